"""Compiled twins of portable files, for this machine, in the user's cache.

The portable file is what people keep. A compiled one is faster (a quarter to a third on a CPU),
fits one kind of processor or GPU and one torch, and can be made again at any time.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from bioptimus.errors import CheckpointError, UsageError
from bioptimus.runtime.archive import (
    DESCRIPTION_KEY,
    ArchiveInfo,
    file_sha256,
    inspect_archive,
)
from bioptimus.runtime.cache import beside, cache_errors, cache_folder, hold, prune
from bioptimus.runtime.machine import processor_features

log = logging.getLogger(__name__)

Isa = Literal["native", "avx2"]

# Best first: what this processor can do → its place in the name of the cached file.
_ISA_NAMES = (
    ("AMX_TILE", "amx"),
    ("AVX512_VNNI", "avx512vnni"),
    ("AVX512F", "avx512"),
    ("AVX2", "avx2"),
)


def compiled_path(source: ArchiveInfo, *, device: str, isa: Isa = "native") -> Path:
    """Where the compiled twin of a portable file lies, made or not.

    Args:
        source: The portable file.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        isa: ``native``, or ``avx2`` for a file that any AVX2 machine of a cluster can run.
    """
    import torch

    precision = source.spec.precision if source.spec else "asis"
    parts = [file_sha256(source.path), f"torch{torch.__version__}", _target(device, isa), precision]
    return cache_folder("compiled") / ("-".join(parts) + ".pt2")


def find_compiled(source: ArchiveInfo, *, device: str) -> Path | None:
    """The compiled twin of a portable file for this machine, if somebody made one."""
    for isa in ("native", "avx2"):
        path = compiled_path(source, device=device, isa=isa)
        if path.exists():
            hold(path)
            if path.exists():  # nobody had begun to remove it
                return path
    return None


def compile_portable(
    source: Path,
    *,
    device: str = "cpu",
    isa: Isa = "native",
    again: bool = False,
    tell: Callable[[str], object] = log.info,
) -> Path:
    """Compile a portable file for this machine, into the cache.

    The compiled program must give what the portable one gives before it gets its name.

    Args:
        source: The portable file.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        isa: ``native``, or ``avx2`` for a file that any AVX2 machine of a cluster can run.
        again: Compile even if a file is there that is whole.
        tell: Hears what is done.

    Returns:
        Path of the compiled file.

    Raises:
        UsageError: It is compiled already, or the device is not there.
        CheckpointError: No compiler, no CUDA toolkit for a GPU, a program that cannot be compiled,
            or other results.
    """
    from bioptimus.runtime.runners import require_device

    info = inspect_archive(source)
    if info.kind == "compiled":
        raise UsageError(f"{source}: is compiled already; give the portable file")
    require_device(device)
    path = compiled_path(info, device=device, isa=isa)
    if not again and _is_whole(path):
        tell(f"{source}: was compiled for this machine before")
        return path
    if not _compiler():
        raise CheckpointError(
            "no C++ compiler (g++) found, which compiling needs; the portable file runs without"
        )
    if device != "cpu" and not _cuda_toolkit():
        raise CheckpointError(
            "no CUDA toolkit (nvcc) found, which compiling for a GPU needs; set CUDA_HOME to its "
            "folder; the portable file runs without"
        )
    tell(f"compiling {source} (a minute or so, longer for large models)")
    folder = beside(path)
    temporary = folder / "model.pt2"
    try:
        with cache_errors(f"{path}: cannot be written"):
            folder.mkdir()
            _compile(info, temporary, device=device, isa=isa)
            _compare(info, temporary, device=device)
            temporary.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    prune()
    return path


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        inspect_archive(path)
    except CheckpointError as exc:
        log.warning("compiling again: %s", exc)
        return False
    return True


def _target(device: str, isa: Isa) -> str:
    if device != "cpu":
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    machine = platform.machine()
    if isa == "avx2":
        return f"{machine}-avx2"
    have = processor_features()
    best = next((name for flag, name in _ISA_NAMES if flag in have), "")
    return f"{machine}-{best}" if best else machine


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("clang++")


def _cuda_toolkit() -> str | None:
    """The folder that torch would take CUDA's headers from, which its packages lack."""
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME


def _compile(info: ArchiveInfo, path: Path, *, device: str, isa: Isa) -> None:
    import torch

    from bioptimus.runtime.export import file_for_torch, quiet
    from bioptimus.runtime.runners import load_program

    if info.signature is None:  # only foreign compiled files have none
        raise CheckpointError(f"{info.path}: its inputs are not known")
    description = {
        "spec": info.spec.to_dict() if info.spec else None,
        "signature": info.signature.to_dict(),
        "torch": torch.__version__,
        "source_sha256": file_sha256(info.path),
    }
    # Of several GPUs, what the file says of its architecture is that of the current one.
    guard = nullcontext() if device == "cpu" else torch.cuda.device(device)
    options: dict[str, object] = {
        # Else the optional runtime check refuses batches of one.
        "aot_inductor.check_lowerbound": False,
        "aot_inductor.metadata": {DESCRIPTION_KEY: json.dumps(description)},
    }
    if device == "cpu":
        options["freezing"] = True
        if isa == "avx2":
            options |= {"cpp.simdlen": 256, "cpp.march": "x86-64-v3"}
    try:
        with quiet(), guard:
            program = load_program(info.path)
            if device != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, device)
            with torch.no_grad(), file_for_torch(path) as file:
                torch._inductor.aoti_compile_and_package(
                    program, package_path=file, inductor_configs=options
                )
    except OSError:
        raise  # nothing about the program
    except Exception as exc:  # torch documents no error types; this is its border
        raise CheckpointError(f"{info.path}: cannot be compiled: {_reason(exc)}") from exc


def _reason(exc: Exception) -> str:
    """The first line of torch's; of the C++ compiler or linker its first complaint too."""
    from bioptimus.runtime.runners import first_line

    lines = str(exc).splitlines()[1:]
    complaint = next((x for x in lines if "error: " in x or "cannot find -l" in x), "").strip()
    return f"{first_line(exc)}: {complaint}" if complaint else first_line(exc)


def _compare(info: ArchiveInfo, compiled: Path, *, device: str) -> None:
    """Refuse a compiled program that gives something else than its source."""
    from bioptimus.runtime.export import agreement, random_inputs
    from bioptimus.runtime.runners import load_runner

    if info.signature is None:
        raise CheckpointError(f"{info.path}: its inputs are not known")
    # On both sides of the sizes at which torch chooses other kernels.
    inputs = random_inputs(info.signature.inputs, rows=20)
    wanted = load_runner(info.path, device=device)(*inputs)
    if not all(output.isfinite().all() for output in wanted):
        raise CheckpointError(
            f"{info.path}: the program itself gives NaN or infinity; were its weights right when "
            "it was exported?"
        )
    runner = load_runner(compiled, device=device)
    ones = runner(*(values[:1] for values in inputs))
    worst = agreement(wanted, runner(*inputs)).worst_of(
        agreement([output[:1] for output in wanted], ones)
    )
    if not worst.within(info.spec.precision if info.spec else "fp16"):
        raise CheckpointError(
            f"{info.path}: the compiled program gives other results ({worst}); use the portable "
            "file"
        )
    log.info("%s: compiled, to the portable program at worst %s", info.path, worst)
