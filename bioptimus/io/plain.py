"""Files that OpenSlide refuses but people have: OME-TIFF pyramids, striped TIFF, PNG, JPEG.

The same :class:`~bioptimus.io.tiff.TiffSource` reads them, with tables of tiles that tifffile or a
few header bytes give. There is no judge for these: what cannot be decoded is an error.
"""

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile

from bioptimus.errors import SlideOpenError
from bioptimus.io.metadata import Metadata
from bioptimus.io.sources import WHITE, Pixels
from bioptimus.io.stored import StoredLevel, UnsupportedLayoutError, stored_level
from bioptimus.io.tiff import TiffSource

log = logging.getLogger(__name__)

# A strip or picture is decoded whole; more than this at once is not.
MAX_SEGMENT_BYTES = 1 << 30
# Strips of plain bytes can be cut anywhere; about this much is read at a time.
_RAW_STRIP_BYTES = 1 << 20
# Codecs whose pixels leave no question of colour. What else there is, is refused by name.
# none, LZW, JPEG, deflate (twice), PackBits, JPEG 2000 (three times), zstd
_CODECS = frozenset({1, 5, 7, 8, 32946, 32773, 33003, 33005, 34712, 50000})
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_JPEG_MAGIC = b"\xff\xd8\xff"
# Other formats begin with a JPEG preview (MIRAX does), so the name must agree.
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jfif")

Opened = tuple[Metadata, TiffSource]


def open_plain(path: Path) -> Opened:
    """Open a file without OpenSlide.

    Args:
        path: TIFF, PNG or JPEG.

    Returns:
        What the file says, and its pixels.

    Raises:
        UnsupportedLayoutError: The file is none of these, or stored in a way that is not read.
    """
    with path.open("rb") as file:
        start = file.read(32)
    if start[:4] in TIFF_MAGIC:
        return _open_tiff(path)
    if start.startswith(_PNG_MAGIC):
        return _open_picture(path, "png", _png_size(start), imagecodecs.png_decode)
    if start.startswith(_JPEG_MAGIC) and path.suffix.lower() in _JPEG_SUFFIXES:
        return _open_picture(path, "jpeg", _jpeg_size(path), imagecodecs.jpeg8_decode)
    raise UnsupportedLayoutError("not a TIFF, PNG or JPEG")


# ---- TIFF ----


def _open_tiff(path: Path) -> Opened:
    try:
        with tifffile.TiffFile(path) as tiff:
            pages = _pyramid(tiff)
            levels = [_plain_level(page) for page in pages]
            metadata = _tiff_metadata(tiff, pages)
            check_complete(path, levels)
    except (tifffile.TiffFileError, ValueError, KeyError, IndexError, struct.error) as exc:
        raise UnsupportedLayoutError(f"its TIFF structure cannot be read ({exc})") from exc
    source = TiffSource(path, dict(enumerate(levels)), WHITE, judge=None, name="tifffile")
    return metadata, source


def check_complete(path: Path, levels: Sequence[StoredLevel]) -> None:
    """Refuse a file that ends before its tables say.

    Raises:
        SlideOpenError: Stored tiles should lie past the end of the file.
    """
    sentence = cut_off_sentence(path.name, levels, path.stat().st_size)
    if sentence is not None:
        raise SlideOpenError(sentence)


def cut_off_sentence(name: str, levels: Iterable[StoredLevel], size: int) -> str | None:
    """About stored tiles that should lie past the end of the file; None if there are none."""
    counts = [
        (int((level.offsets + level.lengths > size).sum()), len(level.offsets)) for level in levels
    ]
    beyond = sum(missing for missing, _ in counts)
    if not beyond:
        return None
    return (
        f"{name}: truncated: {beyond} of its {sum(count for _, count in counts)} stored tiles lie "
        f"past the end of the file ({size} bytes); copy it again from the source"
    )


def sub_levels(page: tifffile.TiffPage) -> list[tifffile.TiffPage]:
    """The pages below a page, where OME-TIFF keeps the coarser levels; largest first."""
    found = [entry for entry in page.pages or () if isinstance(entry, tifffile.TiffPage)]
    return sorted(found, key=lambda entry: -entry.imagewidth)


def _pyramid(tiff: tifffile.TiffFile) -> list[tifffile.TiffPage]:
    """The pages of the largest picture, largest first."""
    series = max(tiff.series, key=_area, default=None)
    if series is None:
        raise UnsupportedLayoutError("no picture in the file")
    pages = []
    for level in series.levels:
        page = level.keyframe
        if len(level.pages) != 1:
            raise UnsupportedLayoutError(
                f"{len(level.pages)} planes ({level.axes}); z-stacks, time series and "
                "fluorescence channels are not read"
            )
        pages.append(page.aspage())
    return pages


def _area(series: tifffile.TiffPageSeries) -> int:
    page = series.keyframe
    return int(page.imagewidth) * int(page.imagelength)


def _plain_level(page: tifffile.TiffPage) -> StoredLevel:
    compression = int(page.compression)
    if compression not in _CODECS:
        name = str(getattr(page.compression, "name", compression)).lower()
        raise UnsupportedLayoutError(f"unsupported compression {name} ({compression})")
    # No judge here: the tag is believed only where the JPEG stream itself names no colour space.
    level = stored_level(page, trust_photometric=not _names_its_colours(page))
    if compression == 1 and page.predictor == 1 and not page.is_tiled:
        return _cut_strips(level, page)
    size = level.tile_width * level.tile_height * page.samplesperpixel
    if size > MAX_SEGMENT_BYTES:
        raise UnsupportedLayoutError(f"stored in one piece of {size / 2**30:.1f} GiB")
    return level


def _names_its_colours(page: tifffile.TiffPage) -> bool:
    """Whether the first stored tile is JPEG with a JFIF or Adobe marker."""
    if int(page.compression) != 7 or not page.dataoffsets:
        return False
    file = page.parent.filehandle
    file.seek(page.dataoffsets[0])
    start = file.read(64)
    return b"JFIF\0" in start or b"Adobe" in start


def _cut_strips(level: StoredLevel, page: tifffile.TiffPage) -> StoredLevel:
    """Strips of plain bytes as shorter strips, so that one of them is never much to read."""
    samples = page.samplesperpixel // level.planes
    row_bytes = level.width * samples
    per_plane = level.down
    most = max(1, min(level.tile_height, _RAW_STRIP_BYTES // row_bytes))
    # Strips are counted from the top of the level, so all but the last must be equal.
    rows = most if per_plane == 1 else _largest_divisor(level.tile_height, most)
    tops = np.arange(0, level.height, rows)
    strips = tops // level.tile_height + per_plane * np.arange(level.planes)[:, None]
    offsets = level.offsets[strips] + tops % level.tile_height * row_bytes
    lengths = np.broadcast_to(np.minimum(rows, level.height - tops) * row_bytes, offsets.shape)
    is_inverted = int(page.photometric) == 0

    def decode(_number: int, data: bytes) -> Pixels:
        pixels = np.frombuffer(data, np.uint8).reshape(-1, level.width, samples)
        return 255 - pixels if is_inverted else pixels

    return replace(
        level,
        tile_height=rows,
        offsets=offsets.ravel(),
        lengths=lengths.ravel(),
        decode=decode,
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(rows for rows in range(most, 0, -1) if number % rows == 0)


def _tiff_metadata(tiff: tifffile.TiffFile, pages: Sequence[tifffile.TiffPage]) -> Metadata:
    page = pages[0]
    properties = {"openslide.vendor": "ome-tiff" if tiff.is_ome else "tiff", **tiff_tags(page)}
    profile = page.tags.get(34675)
    return Metadata(
        vendor=properties["openslide.vendor"],
        level_dimensions=tuple((entry.imagewidth, entry.imagelength) for entry in pages),
        properties=properties,
        icc_profile=None if profile is None else bytes(profile.value),
        warnings=(),
    )


def tiff_tags(page: tifffile.TiffPage) -> dict[str, str]:
    """A page's description and resolution, under the names that OpenSlide gives them."""
    found = {}
    for code, name in ((270, "ImageDescription"), (305, "Software"), (271, "Make")):
        tag = page.tags.get(code)
        if tag is not None:
            found[f"tiff.{name}"] = str(tag.value)
    for code, name in ((282, "XResolution"), (283, "YResolution")):
        tag = page.tags.get(code)
        if tag is not None and tag.value[1]:
            found[f"tiff.{name}"] = repr(tag.value[0] / tag.value[1])
    unit = page.tags.get(296)
    found["tiff.ResolutionUnit"] = (
        "inch" if unit is None else str(getattr(unit.value, "name", unit.value)).lower()
    )
    return found


# ---- PNG and JPEG ----


def _open_picture(
    path: Path, kind: str, size: tuple[int, int], decode: Callable[[bytes], Pixels]
) -> Opened:
    """One picture, decoded whole when it is first wanted."""
    width, height = size
    if width * height * 3 > MAX_SEGMENT_BYTES:
        raise UnsupportedLayoutError(
            f"a {kind.upper()} of {width} x {height} px can only be decoded in one piece"
        )
    level = StoredLevel(
        width=width,
        height=height,
        tile_width=width,
        tile_height=height,
        is_tiled=True,
        planes=1,
        samples=3,
        offsets=np.array([0], np.int64),
        lengths=np.array([path.stat().st_size], np.int64),
        decode=lambda _number, data: _as_rgb(decode(data)),
    )
    metadata = Metadata(
        vendor=kind,
        level_dimensions=(size,),
        properties={"openslide.vendor": kind},
    )
    return metadata, TiffSource(path, {0: level}, WHITE, judge=None, name="tifffile")


def _as_rgb(pixels: Pixels) -> Pixels:
    """Grey, grey with alpha, RGB or RGBA of 8 or 16 bits, on white."""
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    colours = pixels.shape[2]
    if colours in (1, 3):
        return np.broadcast_to(pixels, (*pixels.shape[:2], 3))
    if colours not in (2, 4):
        raise ValueError(f"{colours} channels")
    share = pixels[..., -1:].astype(np.float32) / 255
    mixed = np.round(pixels[..., :-1] * share + 255 * (1 - share)).astype(np.uint8)
    return np.broadcast_to(mixed, (*pixels.shape[:2], 3))


def _png_size(start: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", start[16:24])
    return int(width), int(height)


def _jpeg_size(path: Path) -> tuple[int, int]:
    """From the frame header, which stands before the data."""
    # Every start of frame but the ones that are no such thing (DHT, JPG, DAC).
    frames = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
    with path.open("rb") as file:
        file.seek(2)
        while True:
            head = file.read(4)
            if len(head) < 4 or head[0] != 0xFF:
                raise UnsupportedLayoutError("a JPEG without a frame header")
            if head[1] in frames:
                height, width = struct.unpack(">xHH", file.read(5))
                return int(width), int(height)
            file.seek(int.from_bytes(head[2:4], "big") - 2, 1)
