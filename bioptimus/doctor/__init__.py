"""Is this machine ready for a night of slides? Each part is tried, not looked up."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bioptimus.doctor import installation, machine, trials
from bioptimus.doctor.finding import DISTRIBUTION, Finding
from bioptimus.errors import BioptimusError

__all__ = ["Finding", "examine"]


def examine(*, out: Path, with_model: bool = True) -> Iterator[Finding]:
    """Try everything that a run needs, one finding after another, as they come.

    Args:
        out: Folder that results would go to; made and removed again where it is missing.
        with_model: Whether to load the built-in model and run it on a tile, which takes
            seconds.

    Yields:
        At least one finding for each part. None of the parts can stop the others.
    """
    parts: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("bioptimus", installation.versions),
        ("command", installation.command),
        ("libraries", installation.libraries),
        ("openslide", installation.openslide_library),
        ("hdf5", installation.hdf5_library),
        ("torch", installation.torch_build),
        ("processor", machine.processor),
        ("cuda", machine.cuda),
        ("pictures", installation.pictures),
        ("reader", trials.reader),
        ("output folder", lambda: trials.output_folder(out)),
        ("temporary folder", machine.temporary_folder),
        ("cache folder", machine.caches),
        ("open files", machine.open_files),
    ]
    if with_model:
        parts.append(("built-in model", trials.built_in_model))
    for name, part in parts:
        yield from _outlived(name, part)


def _outlived(name: str, part: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from part()
    except BioptimusError as exc:
        yield Finding(name=name, status="problem", fact=str(exc), advice="see the message")
    # A broken library may raise anything while it loads, and the other lines are needed then
    # more than ever.
    except Exception as exc:  # noqa: BLE001
        yield Finding(
            name=name,
            status="problem",
            fact=f"{type(exc).__name__}: {exc}",
            advice=f"reinstall: pip install --force-reinstall {DISTRIBUTION}",
        )
