"""Pixels cut out of the stored tiles of a TIFF.

OpenSlide paints every pixel through a slow compositing step; for a TIFF whose tiles can be
decoded directly that is most of the time. Here compressed bytes come with ``pread``, and a
decoded tile is copied at once to every picture that has a part of it. Only those that other
pictures will want too go through a small shared cache: writing to memory that has left the
processor's cache and reading it again costs a sixth of decoding.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from bioptimus.errors import SlideReadError
from bioptimus.io.cache import TileCache
from bioptimus.io.sources import Colour, Pixels, PixelSource
from bioptimus.io.stored import DECODE_ERRORS, StoredLevel

log = logging.getLogger(__name__)

# Two columns of tiles of a band of blocks, for several threads.
CACHE_BYTES = 32 << 20
# A level that fits is decoded once for the tissue search, the thumbnail and the tiles.
_KEPT_LEVEL_BYTES = CACHE_BYTES // 4 * 3
# Compressed bytes of neighbours are read together up to this.
_MOST_READ_BYTES = 1 << 20

# Rows and columns.
_Place = tuple[slice, slice]


class _UndecodableTileError(Exception):
    """A stored tile is missing, cut short, or no image."""


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

    def read_tiles(
        self,
        level: int,
        corners: Sequence[tuple[int, int]],
        factor: tuple[int, int],
        outs: Sequence[Pixels],
    ) -> list[bool]:
        """Fill pictures with means over whole factors of pixels, each stored tile decoded once.

        Args:
            level: Level to read.
            corners: (x, y) of each picture, pixels of the level.
            factor: (x, y) level pixels per pixel of a picture; (1, 1) copies.
            outs: RGB (height, width, 3) each.

        Returns:
            Which were filled. Not those where means would reach across stored tiles or over the
            level's edge, or that have a part in a tile that cannot be decoded.
        """
        stored = self._levels.get(level)
        if stored is None or not stored.can_reduce(factor):
            return [False] * len(outs)
        done = [
            stored.holds(corner, factor, out.shape)
            for corner, out in zip(corners, outs, strict=True)
        ]
        wanted: dict[int, list[tuple[int, _Place, _Place]]] = {}
        for index, ((x, y), out) in enumerate(zip(corners, outs, strict=True)):
            if done[index]:
                pieces = self._pieces(stored, x // factor[0], y // factor[1], out, factor)
                for number, place, part in pieces:
                    wanted.setdefault(number, []).append((index, place, part))
        together = self._bytes_of(level, stored, wanted, factor)
        for number, places in wanted.items():
            try:
                self._hand_out(level, stored, number, factor, places, outs, together.get(number))
            except (_UndecodableTileError, SlideReadError) as exc:
                log.debug("%s: level %d: %s", self._path.name, level, exc)
                for index, _, _ in places:
                    done[index] = False
        return done

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
                f"{self._path.name}: level {level} {reason}; the slide is damaged there, copy it "
                "again from the source"
            )
        return self._judge

    def _cut(self, level: int, stored: StoredLevel, x: int, y: int, out: Pixels) -> None:
        """Fill ``out`` with the pixels from (x, y) on."""
        pieces = list(self._pieces(stored, x, y, out, (1, 1)))
        together = self._bytes_of(level, stored, [number for number, _, _ in pieces], (1, 1))
        for number, place, part in pieces:
            self._hand_out(
                level, stored, number, (1, 1), [(0, place, part)], [out], together.get(number)
            )

    def _pieces(
        self, stored: StoredLevel, x: int, y: int, out: Pixels, factor: tuple[int, int]
    ) -> Iterator[tuple[int, _Place, _Place]]:
        """(number of a stored tile, its place in ``out``, that place in the tile).

        Everything in pixels after reduction. What lies outside the level is filled.
        """
        height, width = out.shape[:2]
        right = min(x + width, stored.width // factor[0])
        bottom = min(y + height, stored.height // factor[1])
        if x < 0 or y < 0 or right < x + width or bottom < y + height:
            out[:] = self._background
        tw, th = stored.tile_width // factor[0], stored.tile_height // factor[1]
        for row in range(max(y, 0) // th, -(-bottom // th)):
            top, low = max(y, row * th), min(bottom, row * th + th)
            rows, tile_rows = slice(top - y, low - y), slice(top - row * th, low - row * th)
            for column in range(max(x, 0) // tw, -(-right // tw)):
                left, end = max(x, column * tw), min(right, column * tw + tw)
                yield (
                    row * stored.across + column,
                    (rows, slice(left - x, end - x)),
                    (tile_rows, slice(left - column * tw, end - column * tw)),
                )

    def _hand_out(
        self,
        level: int,
        stored: StoredLevel,
        number: int,
        factor: tuple[int, int],
        places: Sequence[tuple[int, _Place, _Place]],
        outs: Sequence[Pixels],
        data: bytes | None,
    ) -> None:
        """Copy one stored tile to its places: (index into ``outs``, place in it, in the tile).

        Its compressed bytes are read if they are not given.

        Raises:
            _UndecodableTileError: It cannot be decoded; nothing was copied.
        """
        kept = _kept(stored, factor)
        key = (level, number, kept)
        copied = sum(map(_area, (part for _, _, part in places)))
        nothing_left = copied >= stored.visible_px(number, factor)
        if nothing_left and stored.nbytes > _KEPT_LEVEL_BYTES and key not in self._cache:
            pixels = self._decoded(stored, number, factor, data)
            for index, place, part in places:
                outs[index][place] = pixels[part]
            return
        slot = self._cache.acquire(
            key, stored.shape(number, kept), self._decode_into, stored, number, kept, data
        )
        try:
            pixels = slot.pixels
            if kept != factor:
                pixels = _reduced(pixels, stored.shape(number, factor))
            for index, place, part in places:
                outs[index][place] = pixels[part]
        finally:
            self._cache.release(slot)

    def _decode_into(
        self,
        out: Pixels,
        stored: StoredLevel,
        number: int,
        factor: tuple[int, int],
        data: bytes | None,
    ) -> None:
        # Measured: decoding into the same warm memory and copying is quicker than decoding into
        # memory that has long left the processor's cache.
        out[...] = self._decoded(stored, number, factor, data)

    def _decoded(
        self, stored: StoredLevel, number: int, factor: tuple[int, int], data: bytes | None
    ) -> Pixels:
        segments = [self._segment(stored, number, plane, data) for plane in range(stored.planes)]
        pixels = segments[0] if stored.planes == 1 else np.concatenate(segments, axis=2)
        return pixels if factor == (1, 1) else _reduced(pixels, stored.shape(number, factor))

    def _segment(self, stored: StoredLevel, number: int, plane: int, data: bytes | None) -> Pixels:
        """(tile height, tile width, samples) pixels of one piece of compressed bytes."""
        index = number + stored.across * stored.down * plane
        length = int(stored.lengths[index])
        if length == 0:
            raise _UndecodableTileError(f"has no data for its tile {number}")
        try:
            data = data or self._bytes_at(int(stored.offsets[index]), length)
            pixels = stored.decode(index, data)
            if pixels.ndim == 2:
                pixels = pixels[..., None]
            rows, columns, _ = stored.shape(number)
            # Some writers pad the last strip.
            if pixels.shape[0] < rows or pixels.shape[1:] != (columns, stored.samples):
                raise ValueError(f"holds {pixels.shape} pixels")
        except DECODE_ERRORS as exc:
            raise _UndecodableTileError(f"cannot decode its tile {number} ({exc})") from exc
        return pixels[:rows]

    def _bytes_of(
        self, level: int, stored: StoredLevel, numbers: Iterable[int], factor: tuple[int, int]
    ) -> dict[int, bytes]:
        """Compressed bytes of stored tiles, those that lie side by side in the file read at once.

        Fewer and longer reads: of a network disk each costs a journey, and each passes the
        interpreter lock on. Only those that gain by it are in the result.
        """
        kept = _kept(stored, factor)
        missing = [n for n in dict.fromkeys(numbers) if (level, n, kept) not in self._cache]
        if stored.planes > 1 or len(missing) < 2:
            return {}
        found: dict[int, bytes] = {}
        offsets, lengths = stored.offsets[missing].tolist(), stored.lengths[missing].tolist()
        runs: list[list[tuple[int, int, int]]] = []
        for offset, length, number in sorted(zip(offsets, lengths, missing, strict=True)):
            if length == 0:
                continue
            last = runs[-1] if runs else []
            if (
                last
                and offset == last[-1][0] + last[-1][1]
                and (offset + length - last[0][0] <= _MOST_READ_BYTES)
            ):
                last.append((offset, length, number))
            else:
                runs.append([(offset, length, number)])
        for run in runs:
            if len(run) == 1:
                continue
            start = run[0][0]
            try:
                data = self._bytes_at(start, run[-1][0] + run[-1][1] - start)
            except (SlideReadError, *DECODE_ERRORS):
                continue  # one by one, each tile's own fault is found
            for offset, length, number in run:
                found[number] = data[offset - start : offset - start + length]
        return found

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


def _kept(stored: StoredLevel, factor: tuple[int, int]) -> tuple[int, int]:
    """The factor by which tiles in the cache are reduced: not at all where all of them fit."""
    return (1, 1) if stored.nbytes <= _KEPT_LEVEL_BYTES else factor


def _reduced(pixels: Pixels, shape: tuple[int, int, int]) -> Pixels:
    """Means over whole factors of pixels."""
    rows, columns, _ = shape
    reduced = cv2.resize(pixels, (columns, rows), interpolation=cv2.INTER_AREA)
    return np.asarray(reduced, dtype=np.uint8)


def _area(place: _Place) -> int:
    rows, columns = place
    return int((rows.stop - rows.start) * (columns.stop - columns.start))
