"""The small interface behind which every kind of slide file is read, and OpenSlide behind it.

A source speaks level pixels: (x, y) counted from the level's corner, whole numbers, any
rectangle, also one that leaves the level. What lies outside the level or the scanned area comes
back in the slide's background colour.
"""

import ctypes
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
import numpy.typing as npt
import openslide
from openslide import lowlevel

from bioptimus.errors import SlideReadError

log = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)
_OPAQUE = np.uint32(0xFF000000)
# A row of blocks of 448 px reads fits; measured, more buys nothing.
_CACHE_BYTES = 64 << 20


class PixelSource(Protocol):
    """Reads rectangles of a level. Every method may be called from any thread."""

    name: str

    def read(
        self,
        level: int,
        x: int,
        y: int,
        width: int,
        height: int,
        out: Pixels | None = None,
    ) -> Pixels:
        """RGB (height, width, 3), composited on the background colour; in ``out`` if given.

        Raises:
            SlideReadError: A pixel could not be decoded.
        """

    def read_opaque(
        self, level: int, x: int, y: int, width: int, height: int
    ) -> tuple[Pixels, Pixels]:
        """As :meth:`read`, with (height, width) uint8: how much of each pixel was scanned.

        Raises:
            SlideReadError: A pixel could not be decoded.
        """

    def read_tiles(
        self,
        level: int,
        corners: Sequence[tuple[int, int]],
        factor: tuple[int, int],
        outs: Sequence[Pixels],
    ) -> list[bool]:
        """Fill pictures with means over whole factors of pixels, where there is a short way.

        Args:
            level: Level to read.
            corners: (x, y) of each picture, pixels of the level.
            factor: (x, y) level pixels per pixel of a picture.
            outs: RGB (height, width, 3) each.

        Returns:
            Which were filled; the others are for :meth:`read` and resampling.
        """

    def stored_tile(self, level: int) -> tuple[int, int]:
        """(width, height) of the tiles in which a level is stored, as far as is known."""

    def close(self) -> None:
        """Release files. Twice is fine."""


class OpenSlideSource:
    """Pixels through OpenSlide.

    An error makes a handle useless: every later read repeats it. So the handle is replaced after
    an error, and the read tried once more.

    Args:
        path: The slide.
        handle: An open handle; this object owns it from now on.
        background: Colour of what was not scanned.
    """

    name = "openslide"

    def __init__(self, path: Path, handle: openslide.OpenSlide, background: Colour) -> None:
        self._path = path
        self._background = background
        self._downsamples = handle.level_downsamples
        self._stored = [
            _stored_tile(handle.properties, level) for level in range(handle.level_count)
        ]
        self._lock = threading.Lock()  # guards _handle being replaced; reads need no lock
        self._handle: openslide.OpenSlide | None = _with_cache(handle)

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
            SlideReadError: OpenSlide failed, also after one reopening.
        """
        raw = self._read_raw(level, x, y, width, height)
        if out is None:
            out = np.empty((height, width, 3), np.uint8)
        _composite(raw, self._background, out)
        return out

    def read_opaque(
        self, level: int, x: int, y: int, width: int, height: int
    ) -> tuple[Pixels, Pixels]:
        """RGB and the share of each pixel that was scanned, 0 to 255.

        Raises:
            SlideReadError: OpenSlide failed, also after one reopening.
        """
        raw = self._read_raw(level, x, y, width, height)
        pixels = np.empty((height, width, 3), np.uint8)
        _composite(raw, self._background, pixels)
        return pixels, np.ascontiguousarray(raw[..., 3])

    def read_tiles(
        self,
        level: int,
        corners: Sequence[tuple[int, int]],
        factor: tuple[int, int],
        outs: Sequence[Pixels],
    ) -> list[bool]:
        """OpenSlide has no short way."""
        return [False] * len(outs)

    def _read_raw(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Premultiplied BGRA (height, width, 4)."""
        # OpenSlide wants the corner in level-0 pixels and divides by its own downsample.
        downsample = self._downsamples[level]
        corner = (round(x * downsample), round(y * downsample))
        pixels = np.empty((height, width, 4), np.uint8)
        target = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
        handle = self._current()
        try:
            lowlevel._read_region(handle._osr, target, *corner, level, width, height)
        except openslide.OpenSlideError as first:
            log.debug("%s: %s; reopening", self._path.name, first)
            # On a handle of its own: the shared one may be killed again by another thread's read.
            fresh = None
            try:
                fresh = openslide.OpenSlide(self._path)
                lowlevel._read_region(fresh._osr, target, *corner, level, width, height)
            except openslide.OpenSlideError as exc:
                self._replace(handle, None)
                raise SlideReadError(
                    f"{self._path.name}: level {level} at ({corner[0]}, {corner[1]}) cannot be "
                    f"decoded ({exc}); the slide is damaged there, copy it again from the source"
                ) from exc
            self._replace(handle, fresh)
        return pixels

    def _current(self) -> openslide.OpenSlide:
        handle = self._handle
        if handle is None:
            raise SlideReadError(f"{self._path.name}: was closed; open it again to read from it")
        return handle

    def _replace(self, failed: openslide.OpenSlide, working: openslide.OpenSlide | None) -> None:
        """Put a working handle in the place of one that failed; the first thread to come does.

        The old handle is dropped, not closed: another thread may be reading through it. If the
        file cannot even be opened any more, the next read says so.
        """
        with self._lock:
            if self._handle is not failed:
                return
            try:
                self._handle = _with_cache(working or openslide.OpenSlide(self._path))
            except openslide.OpenSlideError as exc:
                log.debug("%s: cannot be opened again: %s", self._path.name, exc)

    def stored_tile(self, level: int) -> tuple[int, int]:
        """(width, height) of the level's stored tiles, 256 where the file does not tell."""
        return self._stored[level]

    def close(self) -> None:
        """Drop the handle; it is closed when the last read through it has returned."""
        with self._lock:
            self._handle = None


def _stored_tile(properties: Mapping[str, str], level: int) -> tuple[int, int]:
    width, height = (
        int(properties.get(f"openslide.level[{level}].tile-{side}", 256))
        for side in ("width", "height")
    )
    return (width, height)


def _with_cache(handle: openslide.OpenSlide) -> openslide.OpenSlide:
    handle.set_cache(openslide.OpenSlideCache(_CACHE_BYTES))
    return handle


def _composite(raw: Pixels, background: Colour, out: Pixels) -> None:
    """Premultiplied BGRA over a colour, as RGB into ``out``."""
    if raw.size == 0 or raw.view(np.uint32).min() >= _OPAQUE:
        cv2.cvtColor(raw, cv2.COLOR_BGRA2RGB, dst=out)
        return
    clear = 255 - raw[..., 3:].astype(np.uint16)
    rgb = raw[..., 2::-1].astype(np.uint16)
    if background == WHITE:
        rgb += clear
    else:
        rgb += (clear * np.array(background, np.uint16) + 127) // 255
    np.minimum(rgb, 255, out=out, casting="unsafe")
