"""Whether what a run imports is there, loads, and is the one that was meant."""

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from bioptimus.doctor.finding import DISTRIBUTION, Finding, ok

_LIBRARIES = ("numpy", "tifffile", "cv2", "PIL", "orjson", "pybase64", "rich")


def versions() -> Iterator[Finding]:
    """Ours, and what it runs on."""
    from bioptimus import __version__

    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield ok("bioptimus", f"{__version__}, Python {platform.python_version()}, {system}")


def command() -> Iterator[Finding]:
    """Another package may bring the same import name or the same command."""
    owners = metadata.packages_distributions().get("bioptimus", [])
    others = sorted({owner for owner in owners if owner != DISTRIBUTION})
    if others:
        yield Finding(
            name="command",
            status="problem",
            fact=f"the package {', '.join(others)} is installed under the name bioptimus too",
            advice=f"use an environment of its own for {DISTRIBUTION}: the two overwrite each "
            "other's files",
        )
        return
    found = shutil.which("bioptimus")
    own = Path(sys.executable).parent / "bioptimus"
    if found is None:
        yield ok("command", "`bioptimus` is not on the PATH; `python -m bioptimus` does the same")
    elif own.exists() and Path(found).resolve() != own.resolve():
        yield Finding(
            name="command",
            status="warning",
            fact=f"typing bioptimus starts {found}, not the one of this Python, {own}",
            advice=f"put {own.parent} first on the PATH, or activate this environment",
        )
    else:
        yield ok("command", found)


def libraries() -> Iterator[Finding]:
    """Load the small ones."""
    import importlib

    words = []
    for name in _LIBRARIES:
        module = importlib.import_module(name)
        words.append(f"{name} {getattr(module, '__version__', '') or installed(name)}".strip())
    yield ok("libraries", ", ".join(words))


def openslide_library() -> Iterator[Finding]:
    """Load what reads slides."""
    import imagecodecs
    import openslide

    jpeg = imagecodecs.jpeg8_version()
    yield ok(
        "openslide",
        f"{openslide.__version__}, libopenslide {openslide.__library_version__}, "
        f"imagecodecs {imagecodecs.__version__} ({jpeg})",
    )


def hdf5_library() -> Iterator[Finding]:
    """Load what writes results."""
    import h5py

    yield ok("hdf5", f"{h5py.version.hdf5_version}, h5py {h5py.__version__}")


def torch_build() -> Iterator[Finding]:
    """Load what runs models."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield ok("torch", f"{torch.__version__} ({build})")


def pictures() -> Iterator[Finding]:
    """Look for what `bioptimus view` draws with."""
    version = installed("matplotlib")
    if version:
        yield ok("pictures", f"matplotlib {version}")
    else:
        yield Finding(
            name="pictures",
            status="warning",
            fact="matplotlib is not installed; `bioptimus view` needs it, nothing else does",
            advice=f"pip install '{DISTRIBUTION}[view]'",
        )


def installed(name: str) -> str:
    """Version of a package; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
