"""Stored tiles of a TIFF: where they lie, how they are coded, and pixels cut out of them.

OpenSlide paints every pixel through a slow compositing step; for a TIFF whose tiles can be
decoded directly that is most of the time. Here the table of tiles is read once, compressed bytes
come with ``pread``, and rectangles are cut from a small shared cache of decoded tiles.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import cv2
import imagecodecs
import numpy as np
import numpy.typing as npt
import tifffile

from bioptimus.errors import SlideReadError
from bioptimus.io.cache import TileCache
from bioptimus.io.sources import Colour, Pixels, PixelSource

log = logging.getLogger(__name__)

# Two columns of tiles of a band of blocks, for several threads.
CACHE_BYTES = 32 << 20

_JPEG = 7
_JPEG2000 = (33003, 33005, 34712)
_NO_COMPRESSION = 1
_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB, _YCBCR = 0, 1, 2, 6

# The decoders' ways of saying that bytes are no image.
_DECODE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, OSError)

# From the number and the bytes of a tile to its pixels, written into the last argument.
Decoder = Callable[[int, bytes, Pixels], None]


class UnsupportedLayoutError(Exception):
    """A page is stored in a way that is not read here; the text says which."""


class _UndecodableTileError(Exception):
    """A stored tile is missing, cut short, or no image."""


@dataclass(frozen=True, kw_only=True)
class StoredLevel:
    """The tiles, or strips, of one level.

    Attributes:
        width: Of the level, pixels.
        height: Of the level, pixels.
        tile_width: Of a stored tile; the level's width where it is stored in strips.
        tile_height: Of a stored tile; the rows of a strip.
        is_tiled: Whether the last row of tiles is padded; the last strip is not.
        planes: 1, or the number of colours where each is stored apart.
        samples: Colours in each tile.
        offsets: Byte offset of each stored tile, plane after plane, row-major.
        lengths: Bytes of each stored tile; 0 where it is missing.
        decode: From (number, bytes) to (tile_height, tile_width, samples) pixels.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    is_tiled: bool
    planes: int
    samples: int
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    decode: Decoder = field(repr=False)

    @cached_property
    def across(self) -> int:
        """Stored tiles in a row."""
        return -(-self.width // self.tile_width)

    def shape(self, number: int) -> tuple[int, int, int]:
        """(height, width, colours) of one stored tile."""
        rows = self.tile_height
        if not self.is_tiled:
            rows = min(rows, self.height - number // self.across * rows)
        return (rows, self.tile_width, self.samples * self.planes)

    @cached_property
    def down(self) -> int:
        """Rows of stored tiles."""
        return -(-self.height // self.tile_height)


class TiffSource:
    """Pixels from the stored tiles of a TIFF.

    Args:
        path: The file.
        levels: The levels that are read here, by number.
        background: Colour outside the level.
        judge: Reads levels that are not in ``levels`` and rectangles with a tile that is
            missing or cannot be decoded. Closed with this source.
        name: What to call this reader in results.
    """

    def __init__(
        self,
        path: Path,
        levels: Mapping[int, StoredLevel],
        background: Colour,
        *,
        judge: PixelSource | None,
        name: str = "tiff",
    ) -> None:
        self.name = name
        self._path = path
        self._levels = levels
        self._background = np.array(background, np.uint8)
        self._judge = judge
        self._cache = TileCache(CACHE_BYTES)
        self._file: _Descriptor | None = _Descriptor(path)

    def stored_tile(self, level: int) -> tuple[int, int]:
        """(width, height) of the level's stored tiles."""
        stored = self._levels.get(level)
        if stored is not None:
            return (stored.tile_width, stored.tile_height)
        return (256, 256) if self._judge is None else self._judge.stored_tile(level)

    def read(
        self,
        level: int,
        x: int,
        y: int,
        width: int,
        height: int,
        out: Pixels | None = None,
    ) -> Pixels:
        """RGB (height, width, 3) of a rectangle in level pixels, in ``out`` if given.

        Raises:
            SlideReadError: A tile cannot be decoded, by the judge neither.
        """
        stored = self._levels.get(level)
        if stored is None:
            return self._ask_judge(level, "is not tiled").read(level, x, y, width, height, out)
        if out is None:
            out = np.empty((height, width, 3), np.uint8)
        try:
            self._cut(level, stored, x, y, out)
        except _UndecodableTileError as exc:
            log.debug("%s: level %d at (%d, %d): %s", self._path.name, level, x, y, exc)
            return self._ask_judge(level, str(exc)).read(level, x, y, width, height, out)
        return out

    def read_reduced(
        self, level: int, x: int, y: int, factor: tuple[int, int], out: Pixels
    ) -> bool:
        """Fill ``out`` with means over whole factors of pixels, each stored tile reduced once.

        Args:
            level: Level to read.
            x: Left edge, pixels of the level.
            y: Upper edge, pixels of the level.
            factor: (x, y) level pixels per pixel of ``out``.
            out: RGB (height, width, 3).

        Returns:
            Whether it was done. It is not where means would reach across stored tiles or over
            the level's edge, or a tile cannot be decoded.
        """
        stored = self._levels.get(level)
        if stored is None or not stored.is_tiled or stored.samples * stored.planes != 3:
            return False
        right, bottom = x + out.shape[1] * factor[0], y + out.shape[0] * factor[1]
        if min(x, y) < 0 or right > stored.width or bottom > stored.height:
            return False
        if x % factor[0] or y % factor[1]:
            return False
        if stored.tile_width % factor[0] or stored.tile_height % factor[1]:
            return False
        try:
            self._cut(level, stored, x // factor[0], y // factor[1], out, factor)
        except _UndecodableTileError:
            return False
        return True

    def read_opaque(
        self, level: int, x: int, y: int, width: int, height: int
    ) -> tuple[Pixels, Pixels]:
        """RGB and the share of each pixel that was scanned: all inside the level, none outside.

        Raises:
            SlideReadError: A tile cannot be decoded, by the judge neither.
        """
        stored = self._levels.get(level)
        if stored is None:
            return self._ask_judge(level, "is not tiled").read_opaque(level, x, y, width, height)
        pixels = np.empty((height, width, 3), np.uint8)
        try:
            self._cut(level, stored, x, y, pixels)
        except _UndecodableTileError as exc:
            return self._ask_judge(level, str(exc)).read_opaque(level, x, y, width, height)
        opaque = np.zeros((height, width), np.uint8)
        opaque[max(0, -y) : max(0, stored.height - y), max(0, -x) : max(0, stored.width - x)] = 255
        return pixels, opaque

    def _ask_judge(self, level: int, reason: str) -> PixelSource:
        if self._judge is None:
            raise SlideReadError(
                f"{self._path.name}: level {level} {reason}; the file is damaged there, copy it "
                "again from the source"
            )
        return self._judge

    def _cut(
        self,
        level: int,
        stored: StoredLevel,
        x: int,
        y: int,
        out: Pixels,
        factor: tuple[int, int] = (1, 1),
    ) -> None:
        """Fill ``out`` with the pixels from (x, y) on; everything in pixels after reduction."""
        height, width = out.shape[:2]
        right = min(x + width, stored.width // factor[0])
        bottom = min(y + height, stored.height // factor[1])
        if x < 0 or y < 0 or right < x + width or bottom < y + height:
            out[:] = self._background
        tw, th = stored.tile_width // factor[0], stored.tile_height // factor[1]
        acquire, release, across = self._cache.acquire, self._cache.release, stored.across
        for row in range(max(y, 0) // th, -(-bottom // th)):
            top, low = max(y, row * th), min(bottom, row * th + th)
            shape = stored.shape(row * across) if factor == (1, 1) else (th, tw, 3)
            for column in range(max(x, 0) // tw, -(-right // tw)):
                left, end = max(x, column * tw), min(right, column * tw + tw)
                number = row * across + column
                slot = acquire(
                    (level, number, factor), shape, self._decode_reduced, stored, number, factor
                )
                try:
                    out[top - y : low - y, left - x : end - x] = slot.pixels[
                        top - row * th : low - row * th, left - column * tw : end - column * tw
                    ]
                finally:
                    release(slot)

    def _decode_reduced(
        self, out: Pixels, stored: StoredLevel, number: int, factor: tuple[int, int]
    ) -> None:
        if factor == (1, 1):
            self._decode(out, stored, number)
            return
        whole = np.empty(stored.shape(number), np.uint8)
        self._decode(whole, stored, number)
        size = (out.shape[1], out.shape[0])
        cv2.resize(whole, size, dst=out, interpolation=cv2.INTER_AREA)

    def _decode(self, out: Pixels, stored: StoredLevel, number: int) -> None:
        if stored.planes == 1:
            self._decode_segment(stored, number, out)
            return
        plane = np.empty((*out.shape[:2], 1), np.uint8)
        for index in range(stored.planes):
            self._decode_segment(stored, number + stored.across * stored.down * index, plane)
            out[..., index] = plane[..., 0]

    def _decode_segment(self, stored: StoredLevel, number: int, out: Pixels) -> None:
        length = int(stored.lengths[number])
        if length == 0:
            raise _UndecodableTileError(f"has no data for its tile {number}")
        try:
            stored.decode(number, self._bytes_at(int(stored.offsets[number]), length), out)
        except _DECODE_ERRORS as exc:
            raise _UndecodableTileError(f"cannot decode its tile {number} ({exc})") from exc

    def _bytes_at(self, offset: int, length: int) -> bytes:
        file = self._file
        if file is None:
            raise SlideReadError(f"{self._path.name}: was closed; open it again to read from it")
        data = os.pread(file.number, length, offset)
        if len(data) != length:
            raise ValueError(f"{len(data)} of {length} bytes are there")
        return data

    def close(self) -> None:
        """Release the file once the last read has returned."""
        self._file = None
        self._cache.clear()
        if self._judge is not None:
            self._judge.close()


class _Descriptor:
    """An open file that closes when nobody reads from it any more.

    Closing at once could hand the number to another file while a thread still reads by it.
    """

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


# ---- from tifffile's page to a StoredLevel ----


def stored_level(page: tifffile.TiffPage, *, trust_photometric: bool = True) -> StoredLevel:
    """The tile table of a page and the decoder of its tiles.

    Args:
        page: As tifffile reads it; may be closed afterwards.
        trust_photometric: Take the colour space of JPEG tiles from the TIFF tag. RGB JPEG of
            scanners carries no marker of its own, so the tag must decide.

    Raises:
        UnsupportedLayoutError: Not 8-bit grey, RGB or YCbCr, or a codec that is not there.
    """
    samples = page.samplesperpixel
    photometric = int(page.photometric)
    if page.bitspersample != 8 or np.dtype(page.dtype or "V") != np.uint8:
        raise UnsupportedLayoutError(f"{page.bitspersample} bits per colour ({page.dtype})")
    if samples not in (1, 3) or photometric not in (_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB, _YCBCR):
        raise UnsupportedLayoutError(f"{samples} channels, {_name(page.photometric)}")
    if page.imagedepth != 1 or page.predictor not in (1, 2):
        raise UnsupportedLayoutError("volumes or predictors of floating point")
    planes = samples if int(page.planarconfig) == 2 else 1
    offsets = np.array(page.dataoffsets, np.int64)
    lengths = np.array(page.databytecounts, np.int64)
    tile_width, tile_height = page.imagewidth, page.rowsperstrip or page.imagelength
    if page.is_tiled:
        tile_width, tile_height = page.tilewidth, page.tilelength
    level = StoredLevel(
        width=page.imagewidth,
        height=page.imagelength,
        tile_width=tile_width,
        tile_height=min(tile_height, page.imagelength) if not page.is_tiled else tile_height,
        is_tiled=page.is_tiled,
        planes=planes,
        samples=samples // planes,
        offsets=offsets,
        lengths=lengths,
        decode=_decoder(page, trust_photometric=trust_photometric),
    )
    if len(offsets) != len(lengths) or len(offsets) < level.across * level.down * planes:
        raise UnsupportedLayoutError(
            f"{len(offsets)} tiles listed instead of {level.across * level.down * planes}"
        )
    return level


def _name(tag: object) -> str:
    return str(getattr(tag, "name", tag)).lower()


def _decoder(page: tifffile.TiffPage, *, trust_photometric: bool) -> Decoder:
    compression = int(page.compression)
    photometric = int(page.photometric)
    if compression == _JPEG:
        return _jpeg_decoder(page.jpegtables, photometric if trust_photometric else None)
    if compression in _JPEG2000:
        return lambda _number, data, out: put(imagecodecs.jpeg2k_decode(data), out)
    if photometric == _YCBCR:
        raise UnsupportedLayoutError(f"YCbCr in {_name(page.compression)}")
    decode = page.decode

    def by_tifffile(number: int, data: bytes, out: Pixels) -> None:
        decoded = decode(data, number)[0]
        if decoded is None:
            raise ValueError("empty tile")
        put(255 - decoded[0] if photometric == _MIN_IS_WHITE else decoded[0], out)

    return by_tifffile


def put(pixels: Pixels, out: Pixels) -> None:
    """Copy decoded pixels to where they belong.

    Raises:
        ValueError: They are not as many as they should be.
    """
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    # Some writers pad the last strip.
    if pixels.shape[0] < out.shape[0] or pixels.shape[1:] != out.shape[1:]:
        raise ValueError(f"holds {pixels.shape} instead of {out.shape} pixels")
    out[...] = pixels[: out.shape[0]]


_END_OF_IMAGE = b"\xff\xd9"
_RESTART_INTERVAL = b"\xff\xdd"


def _jpeg_decoder(tables: bytes | None, photometric: int | None) -> Decoder:
    space = {_RGB: "RGB", _YCBCR: "YCBCR"}.get(-1 if photometric is None else photometric)
    grey = photometric in (_MIN_IS_WHITE, _MIN_IS_BLACK)

    def decode(_number: int, data: bytes, out: Pixels) -> None:
        # libjpeg fills up what is missing and says so only by a warning, which OpenSlide takes
        # for an error and imagecodecs does not pass on: two checks see it.
        if data.rfind(_END_OF_IMAGE, -64) < 0:
            raise ValueError("end of image missing")
        pixels: Pixels = imagecodecs.jpeg8_decode(
            data, tables=tables, colorspace=space, outcolorspace=None if grey else "RGB"
        )
        # Measured: decoding into the same warm memory and copying is quicker than decoding into
        # memory that has long left the processor's cache.
        put(pixels, out)
        if _looks_filled_up(out, every_block=_RESTART_INTERVAL in data[:1024]):
            raise ValueError("data may end early")

    return decode


def _looks_filled_up(pixels: Pixels, *, every_block: bool) -> bool:
    """Whether the last 8 x 8 pixels have the grey that libjpeg gives to blocks without data.

    With restart markers the gap may be anywhere; then every block's corner is looked at.
    """
    if every_block and (pixels[7::8, 7::8] == 128).reshape(-1, pixels[0, 0].size).all(1).any():
        return True
    return bool((pixels[-1, -1] == 128).all() and (pixels[-8:, -8:] == 128).all())
