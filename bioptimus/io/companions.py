"""Files that a slide of several files cannot be read without; nothing is opened but lists of them.

Not those of a DICOM series, which are told by what is in them.
"""

from pathlib import Path, PurePath

# Text files of Hamamatsu slides, which name the pictures beside them.
LISTS_OF_PICTURES = (".vms", ".vmu")


def companions(path: Path) -> tuple[Path, ...]:
    """List the files beside a slide or in its folder that belong to it.

    Args:
        path: The file that OpenSlide is given: ``.mrxs``, ``.vms``, ``.vmu``, or any other,
            which has none.

    Returns:
        Those that are there, sorted, without ``path``.
    """
    extension = path.suffix.lower()
    if extension == ".mrxs":
        return tuple(sorted(p for p in path.with_suffix("").glob("*") if p.is_file()))
    return _files_named_in(path) if extension in LISTS_OF_PICTURES else ()


def _files_named_in(index: Path) -> tuple[Path, ...]:
    """List the files beside a Hamamatsu ``.vms`` or ``.vmu`` that its text names."""
    try:
        text = index.read_text(encoding="latin-1")
    except OSError:
        return ()
    names = {line.partition("=")[2].strip() for line in text.splitlines()}
    paths = (index.parent / name for name in names if name and name == PurePath(name).name)
    return tuple(sorted(p for p in paths if p != index and p.is_file()))
