"""Stored tiles of a TIFF: where they lie in the file, how they are coded, and their decoders."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import imagecodecs
import numpy as np
import numpy.typing as npt
import tifffile

Pixels = npt.NDArray[np.uint8]

_JPEG = 7
_JPEG2000 = (33003, 33005, 34712)
_NO_COMPRESSION = 1
_MIN_IS_WHITE, _MIN_IS_BLACK, _RGB, _YCBCR = 0, 1, 2, 6

# The decoders' ways of saying that bytes are no image.
DECODE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, OSError)

# From the number and the bytes of a tile to its pixels, with or without an axis for one colour.
# The array is the caller's to read.
Decoder = Callable[[int, bytes], Pixels]


class UnsupportedLayoutError(Exception):
    """A page is stored in a way that is not read here; the text says which."""


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
        decode: From (number, bytes) to (tile_height, tile_width, samples) pixels; raises one of
            :data:`DECODE_ERRORS`.
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

    def shape(self, number: int, factor: tuple[int, int] = (1, 1)) -> tuple[int, int, int]:
        """(height, width, colours) of one stored tile reduced by (x, y) whole factors."""
        rows = self.tile_height
        if not self.is_tiled:
            rows = min(rows, self.height - number // self.across * rows)
        return (rows // factor[1], self.tile_width // factor[0], self.samples * self.planes)

    def visible_px(self, number: int, factor: tuple[int, int] = (1, 1)) -> int:
        """Pixels of one stored tile, reduced, that lie inside the level."""
        row, column = divmod(number, self.across)
        rows, columns, _ = self.shape(number, factor)
        below = self.height // factor[1] - row * rows
        right = self.width // factor[0] - column * columns
        return min(rows, below) * min(columns, right)

    @cached_property
    def down(self) -> int:
        """Rows of stored tiles."""
        return -(-self.height // self.tile_height)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all stored tiles, decoded."""
        size = self.tile_width * self.tile_height * self.samples * self.planes
        return self.across * self.down * size

    @cached_property
    def fullest(self) -> tuple[int, int] | None:
        """(x, y) of the tile of most bytes, of a level that lacks some; None where none lacks."""
        if self.lengths.all():
            return None
        row, column = divmod(int(self.lengths[: self.across * self.down].argmax()), self.across)
        return (column * self.tile_width, row * self.tile_height)

    def can_reduce(self, factor: tuple[int, int]) -> bool:
        """Whether means over (x, y) factor pixels never reach across stored tiles."""
        if factor == (1, 1):
            return True
        whole = self.tile_width % factor[0] == 0 and self.tile_height % factor[1] == 0
        return whole and self.is_tiled and self.samples * self.planes == 3

    def holds(
        self, corner: tuple[int, int], factor: tuple[int, int], shape: tuple[int, ...]
    ) -> bool:
        """Whether a picture of (height, width, ...) reduced pixels is made of whole means.

        Copied pixels always are, also those outside the level.
        """
        if factor == (1, 1):
            return True
        (x, y), (across, down) = corner, factor
        inside = x + shape[1] * across <= self.width and y + shape[0] * down <= self.height
        return inside and min(x, y) >= 0 and x % across == 0 and y % down == 0


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
        return lambda _number, data: imagecodecs.jpeg2k_decode(data)
    if photometric == _YCBCR:
        raise UnsupportedLayoutError(f"YCbCr in {_name(page.compression)}")
    decode = page.decode

    def by_tifffile(number: int, data: bytes) -> Pixels:
        decoded = decode(data, number)[0]
        if decoded is None:
            raise ValueError("empty tile")
        pixels: Pixels = decoded[0]
        return 255 - pixels if photometric == _MIN_IS_WHITE else pixels

    return by_tifffile


_END_OF_IMAGE = b"\xff\xd9"
_RESTART_INTERVAL = b"\xff\xdd"


def _jpeg_decoder(tables: bytes | None, photometric: int | None) -> Decoder:
    space = {_RGB: "RGB", _YCBCR: "YCBCR"}.get(-1 if photometric is None else photometric)
    grey = photometric in (_MIN_IS_WHITE, _MIN_IS_BLACK)

    def decode(_number: int, data: bytes) -> Pixels:
        # libjpeg fills up what is missing and says so only by a warning, which OpenSlide takes
        # for an error and imagecodecs does not pass on: two checks see it.
        if data.rfind(_END_OF_IMAGE, -64) < 0:
            raise ValueError("end of image missing")
        pixels: Pixels = imagecodecs.jpeg8_decode(
            data, tables=tables, colorspace=space, outcolorspace=None if grey else "RGB"
        )
        if _looks_filled_up(pixels, every_block=_RESTART_INTERVAL in data[:1024]):
            raise ValueError("data may end early")
        return pixels

    return decode


def _looks_filled_up(pixels: Pixels, *, every_block: bool) -> bool:
    """Whether the last 8 x 8 pixels have the grey that libjpeg gives to blocks without data.

    With restart markers the gap may be anywhere; then every block's corner is looked at.
    """
    if every_block and (pixels[7::8, 7::8] == 128).reshape(-1, pixels[0, 0].size).all(1).any():
        return True
    # Nearly always no, and then this one value has said so.
    return int(pixels[-1, -1].flat[0]) == 128 and bool((pixels[-8:, -8:] == 128).all())
