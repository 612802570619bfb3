"""What the machine has: processor, devices, room for files."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bioptimus.doctor.finding import Finding, ok

# A result file of a large slide is about 0.6 GB; below the first a run ends soon, below the
# second it cannot even begin.
_LOW_SPACE_BYTES = 10 << 30
_NO_SPACE_BYTES = 200 << 20

# A worker holds a slide, its reopened handle, a part file and a claim; libraries take the rest.
_WANTED_FILES = 1024


def processor() -> Iterator[Finding]:
    """Cores, memory, and whether the processor has what models want."""
    import torch

    from bioptimus.runtime.machine import available_cores

    features = torch.backends.cpu.get_cpu_capability()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    yield ok(
        "processor",
        f"{available_cores()} cores usable, {features}, {pages / 2**30:.0f} GiB of memory, "
        + ("a C++ compiler for `models compile`" if compiler else "no C++ compiler (not needed)"),
    )
    if features == "DEFAULT" and platform.machine() == "x86_64":
        yield Finding(
            name="processor",
            status="warning",
            fact="no AVX2: models will run several times slower",
            advice="use a newer node, or ask whether the virtual machine hides the feature",
        )


def cuda() -> Iterator[Finding]:
    """Devices, or why there are none."""
    import torch

    from bioptimus.runtime.runners import first_line, try_device

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            name = f"cuda:{number}"
            try:
                facts = torch.cuda.get_device_properties(number)
                try_device(name)
            except RuntimeError as exc:
                yield Finding(
                    name=name,
                    status="problem",
                    fact=first_line(exc),
                    advice="see nvidia-smi for what else runs there, and the driver's log; or use "
                    "another --device",
                )
                continue
            memory = facts.total_memory / 2**30
            yield ok(
                name,
                f"{facts.name}, {memory:.0f} GiB, compute capability {facts.major}.{facts.minor}",
            )
    elif shutil.which("nvidia-smi"):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = "install the build of torch that fits the driver (pytorch.org), or a newer driver"
        if torch.version.cuda is None:
            advice = "install the CUDA build of torch that fits the driver (pytorch.org)"
        elif shown is not None:
            advice = (
                f"CUDA_VISIBLE_DEVICES is {shown!r}: unset it, or ask the batch system for a GPU"
            )
        yield Finding(
            name="cuda",
            status="warning",
            fact=f"an NVIDIA driver is here, and torch {torch.__version__} cannot use it",
            advice=advice,
        )
    else:
        yield ok("cuda", "no device; models run on the CPU")


def temporary_folder() -> Iterator[Finding]:
    """Room there, and whether code may be loaded from it."""
    folder = Path(tempfile.gettempdir())
    space = free_space("temporary folder", folder)
    no_execution = getattr(os, "ST_NOEXEC", 0) & os.statvfs(folder).f_flag
    if no_execution and space.status == "ok":
        yield Finding(
            name="temporary folder",
            status="warning",
            fact=f"{folder} is mounted noexec: compiled models cannot be loaded from there",
            advice="set TMPDIR to a folder on another file system, or use portable .pt2 files",
        )
    else:
        yield space


def caches() -> Iterator[Finding]:
    """Whether compiled and exported models can be kept, and how much they take."""
    from bioptimus.runtime.cache import cache_folder, limit_bytes, size_by_kind

    folder = cache_folder("doctor")
    with tempfile.NamedTemporaryFile(dir=folder):
        sizes = size_by_kind()
    folder.rmdir()
    parts = [f"{name} {_in_mb(size)}" for name, size in sizes.items() if size]
    fact = f"{folder.parent}, writable, {_in_mb(sum(sizes.values()))}"
    if parts:
        fact += f" ({', '.join(parts)})"
    yield ok("cache folder", f"{fact}; pruned above {limit_bytes() / 1e9:g} GB")


def _in_mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def open_files() -> Iterator[Finding]:
    """How many a process may open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _WANTED_FILES:
        yield Finding(
            name="open files",
            status="warning",
            fact=f"a process may open {soft} files (hard limit {hard})",
            advice=f"ulimit -n {_WANTED_FILES} before a run with many workers",
        )
    else:
        yield ok("open files", f"limit {soft}")


def free_space(name: str, folder: Path) -> Finding:
    """Room for results."""
    free = shutil.disk_usage(folder).free
    fact = f"{free / 2**30:.1f} GiB in {folder}"
    if free < _NO_SPACE_BYTES:
        return Finding(name=name, status="problem", fact=fact, advice="free some space first")
    if free < _LOW_SPACE_BYTES:
        return Finding(
            name=name,
            status="warning",
            fact=fact,
            advice="100,000 tiles of 1,536 values need 0.6 GiB; `embed --dry-run` tells the sum",
        )
    return ok(name, fact)
