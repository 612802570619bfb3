"""Slides: metadata, scale, tiles and coarse pictures of one whole-slide image.

Everything the rest of the package wants from a slide file is here::

    with Slide.open(path) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        reader = slide.tile_reader(spec)
        pixels = reader.read(grid[0])
"""

import hashlib
import logging
import math
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from bioptimus.errors import ResolutionError, SlideReadError, UsageError
from bioptimus.io.blocks import Indices, band_rows, blocks_of, most_band_rows
from bioptimus.io.companions import companions
from bioptimus.io.crew import ALONE, Crew
from bioptimus.io.icc import SrgbTransform
from bioptimus.io.levels import LevelChoice, choose_level, finer_levels
from bioptimus.io.memory import BATCH_BYTES, fresh_rows
from bioptimus.io.metadata import Metadata
from bioptimus.io.opening import open_source
from bioptimus.io.resample import on_grid, resample, whole_factor
from bioptimus.io.resolution import (
    MPP_COLUMN,
    OVERRIDE,
    Resolution,
    check_mpp_option,
    claims_from_properties,
    decide,
)
from bioptimus.io.sources import PixelSource
from bioptimus.io.tiff import CACHE_BYTES
from bioptimus.kinds import check_kinds, checks_kinds
from bioptimus.tiles import Tile, TileGrid, TileSpec

log = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]
Reader = Literal["auto", "openslide"]
Icc = Literal["none", "srgb"]

# A single level larger than this makes the coarse picture slow enough to be told.
_LARGE_PX = 10_000
# A coarse image may be this much finer or coarser than asked for.
_COARSE_TOLERANCE = 0.1
# The same where the slide is damaged: about one stored tile is lost with each bad spot.
_DAMAGED_SQUARE_PX = 256
# Most pixels of a side under one tile: a thread that reads so many takes half a gigabyte for them.
_MOST_TILE_PX = 8192
# Side of the squares of level pixels that a coarse image is put together from: 12 MiB of RGB.
_STRIP_PX = 2048
# Height of those that are put together from stored tiles, as most of these are not higher.
_ROW_PX = 256
# Threads that read such squares at a time: each takes three times its square.
_STRIPS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a slide is to be read.

    Attributes:
        mpp_override: µm/px that wins over everything the file says.
        override_source: What the user said that by.
        mpp_fallback: µm/px for files that say nothing plausible.
        reader: ``openslide`` forbids the faster readers.
        icc: ``srgb`` converts through the embedded colour profile, where there is one.
        allow_upsample: Read slides that are coarser than the tiles wanted.
    """

    mpp_override: float | None = None
    override_source: str = OVERRIDE
    mpp_fallback: float | None = None
    reader: Reader = "auto"
    icc: Icc = "none"
    allow_upsample: bool = False

    def __post_init__(self) -> None:
        """Refuse a scale that no slide can have, and ways of reading that there are not.

        Raises:
            UsageError: The override or the fallback is not plausible, a word is unknown, or a
                value of another kind.
        """
        check_kinds(self)
        check_mpp_option(self.mpp_override, flag=self.override_source)
        check_mpp_option(self.mpp_fallback, flag="--mpp-fallback")

    def with_column(self, mpp: float | None) -> "OpenOptions":
        """The options for a slide whose row of the input list has this in its mpp column.

        Raises:
            UsageError: It is not plausible.
        """
        if mpp is None:
            return self
        return replace(self, mpp_override=mpp, override_source=MPP_COLUMN)


@dataclass(frozen=True, kw_only=True)
class CoarseImage:
    """The whole slide at a coarse scale.

    Attributes:
        pixels: RGB (H, W, 3) uint8 on the slide's background colour.
        opaque: (H, W) uint8, 0 to 255: how much of each pixel was scanned.
        downsample: (x, y) level-0 pixels per pixel.
        level: Level that was read.
        damaged: (H, W) true where nothing could be read; None where all could.
    """

    pixels: Pixels
    opaque: Pixels
    downsample: tuple[float, float]
    level: int
    damaged: npt.NDArray[np.bool_] | None = None


class Slide:
    """An open slide. Made by :meth:`open`; a context manager.

    Every method may be called from any thread. Positions are level-0 pixels counted from the
    slide's corner, never from its bounds.

    Attributes:
        path: The file.
        name: Its file name.
        vendor: OpenSlide's name of the format.
        dimensions: (width, height) of level 0.
        level_dimensions: (width, height) of each level.
        level_downsamples: (x, y) level-0 pixels per pixel of each level.
        properties: As OpenSlide names them.
        resolution: The scale, every claim about it, and which one won.
        objective_power: The scanner's nominal lens.
        background: (r, g, b) of what was not scanned.
        bounds: (x, y, width, height) of the scanned area in level-0 pixels, if the file tells.
        has_icc: Whether there is a colour profile.
        warnings: What a user should know, one sentence each.
        size_files: The file and its companions.
    """

    def __init__(
        self,
        path: Path,
        options: OpenOptions,
        metadata: Metadata,
        source: PixelSource,
        crew: Crew = ALONE,
    ) -> None:
        self.path = path
        self.name = path.name
        self.vendor = metadata.vendor
        self.properties = metadata.properties
        self.has_icc = metadata.icc_profile is not None
        self._to_srgb: SrgbTransform | None = None
        if options.icc == "srgb" and metadata.icc_profile is not None:
            self._to_srgb = SrgbTransform(metadata.icc_profile, self.name)
        self.level_dimensions = metadata.level_dimensions
        self.dimensions = metadata.level_dimensions[0]
        self.level_downsamples = metadata.level_downsamples
        claims = claims_from_properties(metadata.properties)
        self.objective_power = claims.objective_power
        self.resolution: Resolution = decide(
            self.name,
            claims,
            mpp_override=options.mpp_override,
            override_source=options.override_source,
            mpp_fallback=options.mpp_fallback,
        )
        self.background = metadata.background
        self.bounds = _bounds(metadata.properties)
        self.warnings: list[str] = [*metadata.warnings, *self.resolution.warnings]
        if options.icc == "srgb" and not self.has_icc:
            self.warnings.append(f"{self.name}: no colour profile; colours stay as they are")
        if len(self.level_dimensions) == 1 and max(self.dimensions) > _LARGE_PX:
            self.warnings.append(
                f"{self.name}: one level of {self.dimensions[0]} x {self.dimensions[1]} px and no "
                "pyramid; the coarse picture takes reading all of it"
            )
        self.size_files = _companions(path, metadata)
        self._options = options
        self._stored = metadata.stored
        self._source = source
        self._crew = crew

    @classmethod
    @checks_kinds
    def open(
        cls,
        path: Path | str,
        options: OpenOptions | None = None,
        *,
        crew: Crew = ALONE,
        to_read: bool = True,
    ) -> Self:
        """Open a slide.

        Args:
            path: The slide's file; of a DICOM series, any of its files.
            options: How it is to be read.
            crew: Threads that help to open it and to make its coarse pictures.
            to_read: Whether tiles will be read. If not, no faster reader is tried, which takes
                most of the opening, nor are its warnings told.

        Returns:
            The slide. Its scale may be unknown: :attr:`mpp` raises then, this method does not.

        Raises:
            SlideOpenError: The file is missing, empty, truncated or no slide.
            UsageError: A value is of another kind.
        """
        path = Path(path)
        options = options or OpenOptions()
        fast = options.reader == "auto"
        metadata, source = open_source(path, fast=fast, crew=crew, to_read=to_read)
        return cls(path, options, metadata, source, crew)

    @property
    def mpp(self) -> tuple[float, float]:
        """(x, y) µm per level-0 pixel.

        Raises:
            ResolutionError: The file does not tell and no option did.
        """
        return self.resolution.mpp

    @property
    def reader(self) -> str:
        """What reads the tiles: ``tiff``, ``openslide`` or ``tifffile``."""
        return self._source.name

    @property
    def icc_applied(self) -> bool:
        """Whether tiles are converted to sRGB."""
        return self._to_srgb is not None

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, companions included."""
        return sum(file.stat().st_size for file in self.size_files)

    @property
    def quickhash(self) -> str:
        """An identity that survives renaming: OpenSlide's, or one over the size and samples."""
        return self.properties.get("openslide.quickhash-1") or _sample_hash(self.path)

    @checks_kinds
    def tile_reader(self, spec: TileSpec) -> "TileReader":
        """A reader of tiles of one size and scale.

        Raises:
            UsageError: ``spec`` is none.
            ResolutionError: The slide's scale is unknown; or coarser than the tiles' and
                upsampling was not allowed; or so much finer that a tile takes too much memory.
        """
        mpp = self.mpp
        choice = choose_level(
            self.level_downsamples,
            (spec.mpp / mpp[0], spec.mpp / mpp[1]),
            name=self.name,
            allow_upsample=self._options.allow_upsample,
        )
        self._refuse_huge_tiles(spec, choice)
        return TileReader(self, self._source, spec, choice, self._to_srgb)

    def _refuse_huge_tiles(self, spec: TileSpec, choice: LevelChoice) -> None:
        width, height = (math.ceil(spec.size_px * max(1.0, by)) for by in choice.scale)
        if width * height <= _MOST_TILE_PX**2:
            return
        level_mpp = self.mpp[0] * self.level_downsamples[choice.level][0]
        raise ResolutionError(
            f"{self.name}: a tile of {spec.size_px} px at {spec.mpp:g} µm/px covers "
            f"{width} x {height} px of level {choice.level} ({level_mpp:.3g} µm/px), more than "
            f"{_MOST_TILE_PX} x {_MOST_TILE_PX}; pass a smaller --tile-mpp, make a pyramid of the "
            "slide, or pass --mpp-override where its scale is wrong"
        )

    @checks_kinds
    def coarse_image(self, mpp: float = 8.0) -> CoarseImage:
        """The slide at about ``mpp`` µm/px, the scale at which tissue is looked for.

        A level that cannot be decoded is replaced by the next finer one. Colours are as stored,
        also where tiles are converted to sRGB.

        Raises:
            UsageError: ``mpp`` is not a positive number.
            ResolutionError: The slide's scale is unknown.
            SlideReadError: No level could be decoded.
        """
        if not 0 < mpp < math.inf:
            raise UsageError(f"mpp {mpp}: must be a positive number of µm per pixel")
        return self._coarse((mpp / self.mpp[0], mpp / self.mpp[1]))

    @checks_kinds
    def thumbnail(self, max_px: int = 1024) -> CoarseImage:
        """The slide with its longer side at most ``max_px``; needs no µm/px.

        A whole number of level pixels goes into each of its pixels, so it may be smaller.

        Raises:
            UsageError: ``max_px`` is not a whole number from 1.
            SlideReadError: Nothing could be decoded.
        """
        if max_px < 1:
            raise UsageError(f"max px {max_px}: must be at least 1")
        downsample = max(1.0, max(self.dimensions) / max_px)
        level = choose_level(
            self.level_downsamples, (downsample, downsample), name=self.name, allow_upsample=True
        ).level
        factor = math.ceil(max(self.level_dimensions[level]) / max_px)
        x, y = self.level_downsamples[level]
        return self._coarse((factor * x, factor * y))

    def _coarse(self, wanted: tuple[float, float]) -> CoarseImage:
        best = choose_level(self.level_downsamples, wanted, name=self.name, allow_upsample=True)
        failure: SlideReadError | None = None
        for level in finer_levels(self.level_downsamples, best.level):
            try:
                picture = self._coarse_from(level, wanted)
            except SlideReadError as exc:
                failure = failure or exc
                continue
            if failure is not None:
                self._warn_of_damage(best.level, "a finer level stands in for it")
            return picture
        # No level is whole, as in a damaged slide of one level: small squares lose least.
        picture = self._coarse_from(best.level, wanted, square_px=_DAMAGED_SQUARE_PX)
        if picture.damaged is not None and picture.damaged.all():
            assert failure is not None
            raise failure
        self._warn_of_damage(
            best.level, "what cannot be read counts as tissue, so that its tiles are tried"
        )
        return picture

    def _warn_of_damage(self, level: int, consequence: str) -> None:
        """Tell of a damaged level once, however many pictures are made."""
        start = f"{self.name}: level {level} is damaged"
        if not any(warning.startswith(start) for warning in self.warnings):
            self.warnings.append(f"{start}: {consequence}; copy the slide again")

    def _coarse_from(
        self, level: int, wanted: tuple[float, float], *, square_px: int | None = None
    ) -> CoarseImage:
        """Put the picture together square by square; memory does not grow with the level.

        Args:
            level: Where to read.
            wanted: Level-0 pixels per pixel of the picture.
            square_px: Side of the squares in level pixels, those that cannot be read being left
                blank. None: large ones, and a square that cannot be read ends it.
        """
        width, height = self._level_inside(level)
        x, y = map(_cheap_factor, wanted, self.level_downsamples[level])
        size = (max(1, math.ceil(width / x)), max(1, math.ceil(height / y)))
        scale = (x, y)
        pixels = np.empty((size[1], size[0], 3), np.uint8)
        opaque = np.empty((size[1], size[0]), np.uint8)
        damaged = None if square_px is None else np.zeros((size[1], size[0]), np.bool_)
        done = (0, 0) if square_px else self._fill_from_stored_tiles(level, scale, pixels, opaque)
        side = square_px or _STRIP_PX
        step = (max(1, int(side / scale[0])), max(1, int(side / scale[1])))

        def fill(square: _Window) -> None:
            left, top, columns, rows = square
            window, offset = _window((left * scale[0], top * scale[1]), scale, (columns, rows))
            place = np.s_[top : top + rows, left : left + columns]
            # The last pixel may reach beyond the level: what is there counts for all of it.
            inside = min(window[2], width - window[0]), min(window[3], height - window[1])
            try:
                rgb, alpha = self._source.read_opaque(level, *window[:2], *inside)
            except SlideReadError:
                if damaged is None:
                    raise
                pixels[place], opaque[place], damaged[place] = self.background, 255, True
                return
            if inside != window[2:]:
                beyond = ((0, window[3] - inside[1]), (0, window[2] - inside[0]))
                rgb = np.pad(rgb, (*beyond, (0, 0)), mode="edge")
                alpha = np.pad(alpha, beyond, mode="edge")
            part = (columns, rows)
            pixels[place] = resample(rgb, offset=offset, scale=scale, size=part)
            whole = alpha.min() == 255
            opaque[place] = 255 if whole else resample(alpha, offset=offset, scale=scale, size=part)

        self._crew.each(fill, _squares(size, step, done=done), at_once=_STRIPS_AT_ONCE)
        by = self.level_downsamples[level]
        downsample = (x * by[0], y * by[1])
        if self._stored is not None:
            left_out = self._left_out(self._stored, opaque.shape, downsample)
            pixels[left_out], opaque[left_out] = self.background, 0
        return CoarseImage(
            pixels=pixels, opaque=opaque, downsample=downsample, level=level, damaged=damaged
        )

    def _level_inside(self, level: int) -> tuple[int, int]:
        """(width, height) of a level without the padding that some have beyond level 0."""
        (width, height), (x, y) = self.level_dimensions[level], self.level_downsamples[level]
        # A product of sizes and their quotient may miss a whole number by dust.
        most = (math.ceil(self.dimensions[0] / x - 1e-6), math.ceil(self.dimensions[1] / y - 1e-6))
        return (min(width, most[0]), min(height, most[1]))

    def _left_out(
        self,
        stored: npt.NDArray[np.bool_],
        shape: tuple[int, ...],
        downsample: tuple[float, float],
    ) -> npt.NDArray[np.bool_]:
        """Pixels of a coarse picture whose middle lies in a tile that level 0 does not have."""
        (width, height), (rows, columns) = self._source.stored_tile(0), stored.shape
        y = ((np.arange(shape[0]) + 0.5) * downsample[1] / height).astype(np.int64)
        x = ((np.arange(shape[1]) + 0.5) * downsample[0] / width).astype(np.int64)
        is_there = stored[np.ix_(y.clip(max=rows - 1), x.clip(max=columns - 1))]
        return np.asarray(~is_there, dtype=np.bool_)

    def _fill_from_stored_tiles(
        self, level: int, scale: tuple[float, float], pixels: Pixels, opaque: Pixels
    ) -> tuple[int, int]:
        """Make as much of a coarse image as can be made of each stored tile by itself.

        Args:
            level: Where to read.
            scale: (x, y) level pixels per pixel of the picture.
            pixels: The picture.
            opaque: How much of each of its pixels was scanned.

        Returns:
            (width, height) of the part that is done, from the upper left corner: all but what
            reaches over the level's edge, or nothing.
        """
        if not all(by.is_integer() for by in scale):
            return (0, 0)
        factor = (int(scale[0]), int(scale[1]))
        width, height = self._level_inside(level)
        size = (width // factor[0], height // factor[1])
        # Whole stored tiles: those across a border would be decoded twice. A row of them, since
        # those lie side by side in the file.
        step = tuple(
            max(1, max(tile, most // tile * tile) // by)
            for tile, most, by in zip(
                self._source.stored_tile(level), (_STRIP_PX, _ROW_PX), factor, strict=True
            )
        )
        refused: list[_Window] = []

        def fill(piece: _Window) -> None:
            left, top, columns, rows = piece
            if refused:
                return
            place = np.s_[top : top + rows, left : left + columns]
            corner = (left * factor[0], top * factor[1])
            (filled,) = self._source.read_tiles(level, [corner], factor, [pixels[place]])
            if not filled:
                refused.append(piece)
            opaque[place] = 255

        self._crew.each(fill, _squares(size, (step[0], step[1])))
        return (0, 0) if refused else size

    def close(self) -> None:
        """Release the file. Reads that are under way end well; twice is fine."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class TileReader:
    """Reads the tiles of one slide at one size and scale. Made by :meth:`Slide.tile_reader`.

    Every method may be called from any thread.

    Attributes:
        level: Level that is read.
        level_downsample: (x, y) level-0 pixels per pixel of that level.
        scale: (x, y) level pixels per tile pixel.
        size_px: Side of a tile, in pixels at its own scale.
    """

    def __init__(
        self,
        slide: Slide,
        source: PixelSource,
        spec: TileSpec,
        choice: LevelChoice,
        to_srgb: SrgbTransform | None,
    ) -> None:
        self.level = choice.level
        self.level_downsample = slide.level_downsamples[choice.level]
        self.scale = choice.scale
        self.size_px = spec.size_px
        self._source = source
        self._to_srgb = to_srgb
        self._fresh = _FreshTiles(spec.size_px)

    def read(self, tile: Tile) -> Pixels:
        """Read one tile.

        Args:
            tile: Its place in level-0 pixels; may overhang the right or lower edge.

        Returns:
            RGB (size_px, size_px, 3) uint8. Outside the slide and the scanned area: the
            slide's background colour.

        Raises:
            SlideReadError: The pixels could not be decoded, also after one reopening.
        """
        (result,) = self.read_block([tile])
        if isinstance(result, SlideReadError):
            raise result
        return result

    def read_block(self, tiles: Sequence[Tile]) -> list[Pixels | SlideReadError]:
        """Read several tiles; one that cannot be read is its error, the others are pixels.

        Neighbours read together are cheaper than one by one.

        Args:
            tiles: As :meth:`read` takes them.

        Returns:
            In the same order, what :meth:`read` gives for each, or the error that it raises.
        """
        size = (self.size_px, self.size_px)
        places = [self._place(tile) for tile in tiles]
        outs = [self._fresh.tile() for _ in tiles]
        done = [False] * len(tiles)
        # The scale is the same for all, so those with a corner on a pixel have one factor.
        whole = [i for i, (_, offset) in enumerate(places) if on_grid(offset) == (0.0, 0.0)]
        factor = whole_factor((0.0, 0.0), self.scale, size)
        if factor is not None and whole:
            filled = self._source.read_tiles(
                self.level, [places[i][0][:2] for i in whole], factor, [outs[i] for i in whole]
            )
            for i, was_filled in zip(whole, filled, strict=True):
                done[i] = was_filled
        results: list[Pixels | SlideReadError] = []
        for (window, offset), out, is_done in zip(places, outs, done, strict=True):
            try:
                if not is_done:
                    self._read_alone(window, offset, out)
                results.append(out if self._to_srgb is None else self._to_srgb(out))
            except SlideReadError as exc:
                results.append(exc)
        return results

    def _place(self, tile: Tile) -> "tuple[_Window, tuple[float, float]]":
        corner = (tile.x / self.level_downsample[0], tile.y / self.level_downsample[1])
        return _window(corner, self.scale, (self.size_px, self.size_px))

    def _read_alone(self, window: "_Window", offset: tuple[float, float], out: Pixels) -> None:
        size = (self.size_px, self.size_px)
        if window[2:] == size and whole_factor(offset, self.scale, size) == (1, 1):
            self._source.read(self.level, *window, out=out)
        else:
            pixels = self._source.read(self.level, *window)
            resample(pixels, offset=offset, scale=self.scale, size=size, out=out)

    def blocks(self, grid: TileGrid, kept: Indices) -> list[Indices]:
        """Group tiles so that reading block by block decodes each stored tile about once.

        Args:
            grid: The lattice, made with this reader's spec.
            kept: Grid indices of the tiles to read.

        Returns:
            Arrays of positions into ``kept``; each position is in one of them. Each array is
            for one call of :meth:`read_block`; several threads may take arrays in this order.
        """
        across, down = (
            step / by for step, by in zip(grid.stride_level0, self.level_downsample, strict=True)
        )
        stored = self._source.stored_tile(self.level)
        most = most_band_rows(down, column_px=2 * stored[0] + across, cache_bytes=CACHE_BYTES)
        return blocks_of(kept, grid.columns, band_rows(down, stored[1], most=most))


class _FreshTiles(threading.local):
    """Memory for the tiles that are handed out, many at a time: one supply for each thread.

    A tile is a view of a batch, which lives for as long as one of its tiles does. A batch whose
    tiles are all gone is used again: memory that is new from the kernel costs up to a third of
    decoding.
    """

    _KEPT_BATCHES = 4

    def __init__(self, size_px: int) -> None:
        self._shape = (size_px, size_px, 3)
        self._count = max(1, BATCH_BYTES // math.prod(self._shape))
        self._batches: deque[_Batch] = deque(maxlen=self._KEPT_BATCHES)
        self._left: Iterator[Pixels] = iter(())

    def tile(self) -> Pixels:
        """(size_px, size_px, 3) of memory that nobody else has."""
        tile = next(self._left, None)
        if tile is None:
            self._left = iter(())  # lets go of the batch that is used up
            batch = next((entry for entry in self._batches if entry.is_free), None)
            if batch is None:
                batch = _Batch(self._count, math.prod(self._shape))
                self._batches.append(batch)
            self._left = iter(batch.memory.reshape(self._count, *self._shape))
            tile = next(self._left)
        return tile


class _Batch:
    """Memory for several tiles. Every view of it refers to ``memory``, which owns it."""

    def __init__(self, count: int, nbytes: int) -> None:
        rows = fresh_rows(count, nbytes)
        self.memory: Pixels = rows if rows.base is None else rows.base

    @property
    def is_free(self) -> bool:
        """Whether no tile is left: nothing but this object and the call below refers to it.

        Where Python counts otherwise (free threading), this is false and new memory is taken.
        """
        return sys.getrefcount(self.memory) <= 2


_Window = tuple[int, int, int, int]


def _window(
    corner: tuple[float, float], scale: tuple[float, float], size: tuple[int, int]
) -> tuple[_Window, tuple[float, float]]:
    """Whole level pixels (x, y, width, height) under a rectangle, and its (x, y) offset in them."""
    # Sums of fractions miss whole numbers by dust; a column of pixels must not hang on that.
    dust = 1e-6
    first = [math.floor(start + dust) for start in corner]
    last = [
        max(low + 1, math.ceil(start + by * count - dust))
        for low, start, by, count in zip(first, corner, scale, size, strict=True)
    ]
    window = (first[0], first[1], last[0] - first[0], last[1] - first[1])
    return window, (corner[0] - first[0], corner[1] - first[1])


def _bounds(properties: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    try:
        x, y, width, height = (
            int(properties[f"openslide.bounds-{key}"]) for key in ("x", "y", "width", "height")
        )
    except (KeyError, ValueError):
        return None
    return (x, y, width, height)


def _companions(path: Path, metadata: Metadata) -> tuple[Path, ...]:
    """The file itself and what belongs to it."""
    if metadata.vendor == "dicom":
        series = metadata.properties.get("dicom.SeriesInstanceUID", "").encode()
        others = (file for file in path.parent.iterdir() if file.is_file() and file != path)
        return tuple(sorted([path, *(file for file in others if _names(file, series))]))
    return (path, *companions(path))


# The header of a DICOM file, where its series is named, lies within this.
_DICOM_HEADER_BYTES = 1 << 16


def _names(path: Path, series: bytes) -> bool:
    """Whether the head of a DICOM file names a series."""
    with path.open("rb") as file:
        head = file.read(_DICOM_HEADER_BYTES)
    # A UID may begin another: only a whole one counts.
    whole = re.compile(rb"(?<![\d.])" + re.escape(series) + rb"(?![\d.])")
    return head[128:132] == b"DICM" and bool(series) and whole.search(head) is not None


def _sample_hash(path: Path) -> str:
    """sha256 over the size and 64 KiB from the start, the middle and the end."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for position in (0, size // 2, max(0, size - 65536)):
            file.seek(position)
            digest.update(file.read(65536))
    return digest.hexdigest()


def _squares(
    size: tuple[int, int], step: tuple[int, int], *, done: tuple[int, int] = (0, 0)
) -> Iterator[tuple[int, int, int, int]]:
    """(left, top, columns, rows) of the pieces that a picture is put together from.

    Args:
        size: (width, height) of the picture.
        step: (width, height) of the largest piece.
        done: (width, height) of the part in the upper left corner that is there already.
    """
    beside, below = (done[0], 0, size[0], done[1]), (0, done[1], size[0], size[1])
    for first_x, first_y, end_x, end_y in (beside, below):
        for top in range(first_y, end_y, step[1]):
            for left in range(first_x, end_x, step[0]):
                yield left, top, min(step[0], end_x - left), min(step[1], end_y - top)


def _cheap_factor(wanted: float, downsample: float) -> float:
    """Level pixels per pixel of a coarse image: a whole number where that is near enough.

    Whole factors are averaged several times faster, and nothing that looks at a coarse image
    asks for an exact scale.
    """
    factor = max(1.0, wanted / downsample)
    whole = round(factor)
    return float(whole) if abs(factor / whole - 1) <= _COARSE_TOLERANCE else factor
