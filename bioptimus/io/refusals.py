"""Why a file cannot be opened, in words that lead on.

OpenSlide says "Unsupported or missing image file" of a missing, an empty, a truncated and a
foreign file alike. Each function here looks at one of these facts.
"""

import errno
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from bioptimus.errors import SlideOpenError
from bioptimus.io.plain import TIFF_MAGIC

_CONVERT = (
    "convert it to a tiled pyramid, e.g. vips tiffsave IN OUT.tif --tile --pyramid --compression "
    "jpeg"
)
_COPY_AGAIN = "copy it again from the source and compare the sizes"
_BIOFORMATS = "export it from the scanner's software as OME-TIFF, or convert it with bioformats2raw"

# Slide formats of suffixes that nothing here reads.
_FOREIGN_SUFFIXES = {
    ".vsi": "Olympus VSI",
    ".ets": "a part of Olympus VSI",
    ".isyntax": "Philips iSyntax",
    ".i2syntax": "Philips iSyntax",
    ".lif": "Leica LIF",
    ".nd2": "Nikon ND2",
    ".oir": "Olympus OIR",
    ".kfb": "KFBio KFB",
    ".sdpc": "Sqray SDPC",
    ".mds": "Motic MDS",
    ".zarr": "OME-Zarr",
}
_PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def check_readable(path: Path) -> None:
    """Refuse what no reader needs to look at.

    Raises:
        SlideOpenError: The path is missing, a folder, empty, or may not be read.
    """
    try:
        if path.is_symlink() and not path.exists():
            raise SlideOpenError(
                f"{path}: a link to {os.readlink(path)}, which is not there; mount or copy the "
                "target"
            )
        if path.is_dir():
            raise SlideOpenError(
                f"{path}: a folder, not a slide; name a slide file in it "
                "(of a DICOM series, any of its files)"
            )
        with path.open("rb") as file:
            first = file.read(1)
    except FileNotFoundError as exc:
        raise SlideOpenError(f"{path}: no such file; check the path") from exc
    except OSError as exc:
        raise SlideOpenError(f"{path}: {why_unreadable(exc)}") from exc
    except ValueError as exc:
        raise SlideOpenError(f"{path}: its path holds a NUL byte; correct it") from exc
    if not first:
        raise SlideOpenError(f"{path.name}: is empty (0 bytes); {_COPY_AGAIN}")


def why_unreadable(error: OSError) -> str:
    """Say why a slide's file cannot be opened, and what to do, without its name."""
    if error.errno == errno.ENAMETOOLONG:
        return "its name is too long for any file; check the path"
    return f"cannot be read ({error.strerror or error}); check its permissions and the mount"


def check_whole(path: Path) -> None:
    """Refuse a TIFF whose tables point past its end.

    Raises:
        SlideOpenError: The file is truncated.
    """
    problem = _truncation(path)
    if problem is not None:
        raise SlideOpenError(problem)


def explain(path: Path, text: str, *, vendor: str | None, reason: str) -> SlideOpenError:
    """The error for a file that nothing could open.

    Args:
        path: The file; not empty.
        text: What OpenSlide said.
        vendor: The format that OpenSlide recognised.
        reason: Why no other reader takes it.
    """
    facts = (
        _missing_companion(path),
        _truncation(path),
        _refused_format(path, text, vendor, reason),
        _foreign_format(path),
        _tiff_of_other_kind(path, text, reason),
    )
    found = next((fact for fact in facts if fact is not None), None)
    return SlideOpenError(found or _no_slide(path))


def check_companions(path: Path, properties: Mapping[str, str]) -> None:
    """Refuse a MIRAX slide without one of its data files, which OpenSlide misses only on reading.

    Args:
        path: The slide's file.
        properties: As OpenSlide names them.

    Raises:
        SlideOpenError: A data file is missing.
    """
    folder = path.with_suffix("")
    names = [properties[key] for key in properties if _MIRAX_DATA_FILE.fullmatch(key)]
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise SlideOpenError(
            f"{path.name}: its MIRAX folder {folder.name} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "; copy the whole folder again"
        )


_MIRAX_DATA_FILE = re.compile(r"mirax\.DATAFILE\.FILE_\d+")
_MIRAX_INDEX = "Slidedat.ini"


def _missing_companion(path: Path) -> str | None:
    around = path.absolute().parent
    whole = around.parent / f"{around.name}.mrxs"
    if (around / _MIRAX_INDEX).is_file() and whole.is_file():
        return f"{path.name}: a part of the MIRAX slide {whole.name}; name {whole} instead"
    if path.suffix.lower() != ".mrxs":
        return None
    folder = path.with_suffix("")
    if (folder / _MIRAX_INDEX).is_file():
        if path.suffix == ".mrxs":
            return None
        return (
            f"{path.name}: a MIRAX slide is only recognised by a name that ends in .mrxs in small "
            f"letters; rename it to {path.stem}.mrxs"
        )
    if folder.is_dir():
        return (
            f"{path.name}: its MIRAX folder {folder.name} lacks {_MIRAX_INDEX}; copy the whole "
            "folder again"
        )
    target = path.resolve()
    if path.is_symlink() and target.with_suffix("").is_dir():
        return (
            f"{path.name}: a link to {target} without one to the folder beside that; link the "
            f"folder {target.stem} as {folder.name} too, or name the slide where it lies"
        )
    return (
        f"{path.name}: the folder {path.stem} that belongs to this MIRAX slide is missing; "
        "copy it to lie beside the .mrxs file"
    )


def _refused_format(path: Path, text: str, vendor: str | None, reason: str) -> str | None:
    """A format that OpenSlide knows, in a form that it does not read."""
    if vendor is None:
        return None
    if vendor == "dicom" and "No pyramid levels" in text:
        return (
            f"{path.name}: the DICOM series is incomplete: no file with the slide's own pixels "
            "(VOLUME) lies beside it; copy every file of the series into one folder"
        )
    if vendor == "mirax":
        return (
            f"{path.name}: its MIRAX folder {path.stem} is damaged or incomplete ({text}); copy "
            "the .mrxs file and the whole folder again"
        )
    if vendor == "zeiss" and "dimension" in text:
        return (
            f"{path.name}: a Zeiss CZI with several planes ({text}), as fluorescence and z-stacks "
            f"have; {_BIOFORMATS}"
        )
    if "compression" in text.lower() or "compression" in reason:
        detail = text if "compression" in text.lower() else reason
        return (
            f"{path.name}: recognised as {vendor}, but with an unsupported compression ({detail}); "
            f"{_CONVERT}"
        )
    return (
        f"{path.name}: recognised as {vendor}, but cannot be opened ({text}); the file may be "
        f"damaged or incomplete, {_COPY_AGAIN}"
    )


def _foreign_format(path: Path) -> str | None:
    kind = _FOREIGN_SUFFIXES.get(path.suffix.lower())
    return None if kind is None else f"{path.name}: {kind} is not supported; {_BIOFORMATS}"


def _tiff_of_other_kind(path: Path, text: str, reason: str) -> str | None:
    start = _start(path)
    if start[:4] in TIFF_MAGIC:
        layout = "" if _is_tiled(path) else "not tiled (striped), and "
        return f"{path.name}: a TIFF that is {layout}not read here: {reason}; {_CONVERT}"
    if path.suffix.lower() in _PICTURE_SUFFIXES:
        return f"{path.name}: not read here: {reason}; {_CONVERT}"
    return None


def _no_slide(path: Path) -> str:
    start = _start(path)
    return (
        f"{path.name}: not a slide: no format was recognised (it begins with "
        f"{start[:8].hex(' ')}); if it should be one, {_COPY_AGAIN}"
    )


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(32)


# ---- tables that point past the end of the file ----


def _truncation(path: Path) -> str | None:
    """The message for a TIFF whose page tables do not lie inside the file, None if they do."""
    size = path.stat().st_size
    beyond = None
    try:
        for offset in _page_offsets(path):
            if offset >= size:
                beyond = offset
                break
    except struct.error:
        beyond = size
    if beyond is None:
        return None
    return (
        f"{path.name}: truncated or damaged: its page table points to byte {beyond}, and it has "
        f"{size}; {_COPY_AGAIN}"
    )


# More pages than any slide has: a chain that runs in a circle must end.
_MOST_PAGES = 10_000


def _page_offsets(path: Path) -> Iterator[int]:
    """Where each page of a TIFF should begin; nothing for other files.

    Raises:
        struct.error: The file ends inside a page table.
    """
    with path.open("rb") as file:
        start = file.read(16)
        if start[:4] not in TIFF_MAGIC:
            return
        order = "<" if start[:2] == b"II" else ">"
        is_big = start[2:4] in (b"+\0", b"\0+")
        count, entry, pointer = ("Q", 20, "Q") if is_big else ("H", 12, "I")
        position = 8 if is_big else 4
        size = struct.calcsize(pointer)
        (offset,) = struct.unpack(order + pointer, start[position : position + size])
        for _ in range(_MOST_PAGES):
            if offset == 0:
                return
            yield offset
            file.seek(offset)
            (entries,) = struct.unpack(order + count, file.read(struct.calcsize(count)))
            file.seek(entries * entry, os.SEEK_CUR)
            (offset,) = struct.unpack(order + pointer, file.read(size))


def _is_tiled(path: Path) -> bool:
    """Whether the first page names a tile width."""
    import tifffile

    try:
        with tifffile.TiffFile(path) as tiff:
            page = tiff.pages[0]
            return isinstance(page, tifffile.TiffPage) and page.is_tiled
    except (tifffile.TiffFileError, ValueError, KeyError, IndexError, struct.error):
        return False
