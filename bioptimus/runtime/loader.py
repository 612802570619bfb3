"""From a model's name or file to a loaded model."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING

from bioptimus.errors import CheckpointError, ModelError, UsageError
from bioptimus.kinds import checks_kinds
from bioptimus.models.registry import SPECS, get_spec
from bioptimus.models.types import Models, ModelSpec
from bioptimus.runtime.archive import ArchiveInfo, file_sha256, inspect_archive
from bioptimus.runtime.fitting import check_fit, fit_spec

if TYPE_CHECKING:
    from bioptimus.runtime.runners import Runner
    from bioptimus.runtime.server_model import BaseServerModel

log = logging.getLogger(__name__)

MODEL_ROOT = Path("/opt/ml/model")

# Below this a GPU waits for tiles whatever it computes in: 25 million weights.
_LARGE_BYTES = 100_000_000
"""Where serving containers of the SageMaker convention mount checkpoints."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What the user's ``--model`` and ``--checkpoint`` come to.

    Attributes:
        name: Registry key, or the name that the file carries.
        spec: The file's own description, else the registry's.
        checkpoint: The ``.pt2``.
        info: What the file says about itself; None for a model that is loaded already.
        is_builtin: Whether it is the built-in model's own file.
    """

    name: str
    spec: ModelSpec
    checkpoint: Path
    info: ArchiveInfo | None = None
    is_builtin: bool = False


def prepare_environment() -> None:
    """Set what torch reads once, when it is loaded; what the user has set stays.

    Call it before anything imports torch.

    - ``OMP_WAIT_POLICY=PASSIVE``: waiting OpenMP threads sleep. Spinning ones, with one reader
      on the same cores, make two threads slower than one.
    - ``AOTI_RUNTIME_CHECK_INPUTS=1``: compiled programs check shapes too, a second net.
    - ``PYTORCH_ALLOC_CONF=pinned_free_catch_all:True``: a process whose GPU is lost can tell so.
      Without, torch aborts it when the first pinned memory is let go of.
    """
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
    # Of the two names torch reads the older one first. Only Linux has builds for CUDA, and an older
    # torch than we ask for would stop at the word.
    older = "PYTORCH_CUDA_ALLOC_CONF"
    name = older if older in os.environ else "PYTORCH_ALLOC_CONF"
    given = os.environ.get(name, "")
    if "pinned_free_catch_all" not in given and sys.platform == "linux" and _has_catch_all():
        os.environ[name] = f"{given},pinned_free_catch_all:True".lstrip(",")


def _has_catch_all() -> bool:
    from importlib.metadata import version

    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def resolve_model(
    model: str | Path,
    checkpoint: str | Path | None = None,
    *,
    assets_root: str | Path | None = None,
    sha256: str | None = None,
) -> ModelChoice:
    """Find a model's file and description, without torch and without running the file.

    Args:
        model: Registry key; or the path of a ``.pt2`` that carries its description.
        checkpoint: The ``.pt2`` for a registry key. Not needed for the built-in model, nor for
            a file named ``<key>.pt2`` in ``assets_root``.
        assets_root: Folder where checkpoints lie; ``/opt/ml/model`` if not given.
        sha256: What the file's digest must be.

    Raises:
        UsageError: No such model, or no file for it.
        CheckpointError: The file is damaged, foreign, has another digest, or is of another model.
    """
    name = str(model)
    if name not in SPECS and (checkpoint is None or name == str(checkpoint)):
        if not _looks_like_path(name):
            known = ", ".join(SPECS)
            raise UsageError(f"{name}: no such model; known are {known}, or the path of a .pt2")
        info = inspect_archive(_find(Path(name), assets_root))
        if info.spec is None:
            keys = ", ".join(key for key in SPECS if key != Models.LITE0)
            raise CheckpointError(
                f"{info.path}: carries no description of the model; say which it is, with "
                f"--model KEY --checkpoint {info.path} (keys: {keys})"
            )
        return choice_of(info.spec.name, info, sha256)
    if checkpoint is not None:
        return choice_of(name, inspect_archive(_find(Path(checkpoint), assets_root)), sha256)
    if name == Models.LITE0:
        from bioptimus.runtime.builtin import builtin_checkpoint

        return replace(choice_of(name, builtin_checkpoint(), sha256), is_builtin=True)
    return choice_of(name, inspect_archive(_expected(name, assets_root)), sha256)


def choice_of(name: str, info: ArchiveInfo, sha256: str | None = None) -> ModelChoice:
    """A file that was looked at, taken for the model of a name.

    Args:
        name: Registry key, or the name that the file carries.
        info: The file.
        sha256: What the file's digest must be.

    Raises:
        CheckpointError: The file has another digest, or is of another model.
    """
    check_pin(info.path, sha256)
    return ModelChoice(name=name, spec=_spec_of(name, info), checkpoint=info.path, info=info)


@checks_kinds
def build_server_model(
    name: str | Path,
    checkpoint: str | Path | None = None,
    device: str = "cpu",
    assets_root: str | Path | None = None,
    *,
    sha256: str | None = None,
    use_compiled: bool = True,
) -> BaseServerModel:
    """Load a model.

    Loading a ``.pt2`` runs code from it: load only what you trust.

    Args:
        name: Registry key such as ``h1``; or the path of a ``.pt2`` that carries its description.
        checkpoint: The ``.pt2``; not needed for the built-in model, ``lite0``.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for a GPU where there is one.
        assets_root: Folder where checkpoints lie; ``/opt/ml/model`` if not given.
        sha256: What the file's digest must be.
        use_compiled: Run the compiled twin that ``bioptimus models compile`` made for this
            machine, if there is one.

    Returns:
        The model, of the class that its specification asks for.

    Raises:
        UsageError: No such model or device, no file for it, or a value is of another kind.
        CheckpointError: The file is damaged, foreign, made for another machine or model, or has
            another digest.
        ModelError: The device is there and cannot be used, or lacks memory.
    """
    prepare_environment()  # making the built-in model takes torch
    choice = resolve_model(name, checkpoint, assets_root=assets_root, sha256=sha256)
    return load_model(choice, device, use_compiled=use_compiled)


def load_model(
    choice: ModelChoice, device: str = "cpu", *, use_compiled: bool = True
) -> BaseServerModel:
    """Load what :func:`resolve_model` found, without looking at the file a second time.

    Args:
        choice: The model.
        device: See :func:`build_server_model`.
        use_compiled: See :func:`build_server_model`.

    Raises:
        UsageError: No such device.
        CheckpointError: The file cannot be loaded, or is made for another machine.
        ModelError: The device is there and cannot be used, or lacks memory.
    """
    prepare_environment()
    from bioptimus.runtime import server_model
    from bioptimus.runtime.runners import first_line

    kind = server_model.BaseServerModel
    if choice.spec.output_kind == "mask":
        kind = server_model.MaskServerModel
    elif choice.spec.rna_dim:
        kind = server_model.BulkRNAServerModel
    device = wanted_device(device)
    try:
        runner = _runner(choice, device, use_compiled=use_compiled)
        model = kind.from_runner(choice.spec, runner, checkpoint_path=choice.checkpoint)
    except RuntimeError as exc:  # torch's, of a GPU that is full, taken, broken or too old
        if device == "cpu":
            raise
        raise ModelError(
            f"{choice.name}: cannot be loaded on {device}: {first_line(exc)}; see "
            "`bioptimus doctor`, or use another device"
        ) from exc
    # Of a foreign file nobody has said what it computes in.
    exported_here = choice.info is not None and choice.info.spec is not None
    full = exported_here and choice.spec.precision == "fp32"
    if device != "cpu" and full and model.checkpoint_bytes >= _LARGE_BYTES:
        log.warning(
            "%s: computes in fp32, which a GPU does several times slower than half precision; "
            "export it with --precision bf16 or fp16",
            choice.name,
        )
    return model


def _runner(choice: ModelChoice, device: str, *, use_compiled: bool) -> Runner:
    from bioptimus.runtime.runners import open_archive

    info = choice.info or inspect_archive(choice.checkpoint)
    runner = _compiled_twin(choice, info, device) if use_compiled else None
    if runner is None and choice.is_builtin:
        runner = _builtin(choice, info, device)
    return runner or open_archive(info, device=device, spec=choice.spec)


def _builtin(choice: ModelChoice, info: ArchiveInfo, device: str) -> Runner:
    """The built-in network itself."""
    from bioptimus.runtime.builtin import builtin_network
    from bioptimus.runtime.runners import run_module

    return run_module(builtin_network(), info, device=device, spec=choice.spec)


def _compiled_twin(choice: ModelChoice, info: ArchiveInfo, device: str) -> Runner | None:
    from bioptimus.runtime.compilation import find_compiled
    from bioptimus.runtime.runners import check_device, open_runner

    if info.kind == "compiled":
        return None
    check_device(info, device)
    path = find_compiled(info, device=device)
    if path is None:
        return None
    try:
        runner = open_runner(path, device=device, spec=choice.spec)
    except CheckpointError as exc:
        # It can be made again and the portable file runs: no reason to stop.
        log.warning("%s; using %s", exc, choice.checkpoint)
        return None
    log.info("%s: runs compiled, from %s", choice.name, path)
    return runner


def require_loaded(model: object) -> None:
    """Refuse what is no loaded model.

    Raises:
        UsageError: It is none.
    """
    from bioptimus.runtime.server_model import BaseServerModel

    if not isinstance(model, BaseServerModel):
        raise UsageError(
            f"model {shown(model)}: must be the name of one, the path of a .pt2, or one that "
            "build_server_model has loaded"
        )


def wanted_device(device: str) -> str:
    """``auto`` and ``cuda`` → the current GPU by its number; others unchanged.

    By its number, since each thread has a current one of its own. Without a GPU ``auto`` is
    ``cpu``.
    """
    if device not in ("auto", "cuda"):
        return device
    import torch

    if not torch.cuda.is_available():
        return "cpu" if device == "auto" else device
    return f"cuda:{torch.cuda.current_device()}"


def check_pin(path: Path, sha256: str | None) -> None:
    """Refuse a file whose digest is not the one that the user pinned.

    Raises:
        UsageError: The pin is no SHA-256.
        CheckpointError: The digests differ.
    """
    if sha256 is None:
        return
    wanted = sha256.lower().removeprefix("sha256:").strip()
    if len(wanted) != 64 or set(wanted) - set("0123456789abcdef"):
        raise UsageError(f"--sha256 {sha256}: must be 64 hexadecimal digits")
    found = file_sha256(path)
    if found != wanted:
        raise CheckpointError(f"{path}: sha256 is {found}, not the one asked for; do not trust it")


def _looks_like_path(name: str) -> bool:
    return name.endswith(".pt2") or "/" in name or os.path.exists(name)


def _expected(name: str, assets_root: str | Path | None) -> Path:
    """Where the weights of a model known by name lie, if the user put them there."""
    expected = Path(assets_root or MODEL_ROOT) / f"{name}.pt2"
    if os.path.exists(expected):
        return expected
    raise UsageError(
        f"{name}: its weights are not part of this package; pass --checkpoint PATH.pt2 "
        f"(`bioptimus models export` makes one; {expected} is looked for too)"
    )


def _find(path: Path, assets_root: str | Path | None) -> Path:
    path = Path(os.path.expanduser(path))  # the method raises where no home is known
    if path.is_absolute() or os.path.exists(path):
        return path
    inside = Path(assets_root or MODEL_ROOT) / path
    return inside if os.path.exists(inside) else path


def _spec_of(name: str, info: ArchiveInfo) -> ModelSpec:
    """The file's description, or the registry's where it has none, completed by the program."""
    if info.spec is not None:
        if name in SPECS and info.spec.name != name:
            raise CheckpointError(f"{info.path}: is {info.spec.name}, asked for was {name}")
        spec = info.spec
    else:
        spec = get_spec(name)
    if info.signature is not None:
        spec = fit_spec(spec, info.signature)
        check_fit(info.path, spec, info.signature)
    return spec
