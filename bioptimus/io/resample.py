"""From level pixels to tile pixels: area averages with the right scale and phase.

An output pixel is the mean of the level pixels under it, each weighted by the area that is
covered, so nothing aliases and nothing drifts. Scales of a whole number on whole positions go
through OpenCV's exact integer path; everything else through two banded matrix products, which
cost about as much as decoding and leave the GIL free.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

# Positions are kept to 1/64 pixel: finer changes no grey level and would defeat the cache of
# weights.
PHASE_STEPS = 64
# Below this many multiplications BLAS stays on the calling thread. Our threads are the
# parallelism; more of them would fight over the cores.
_SINGLE_THREAD_PRODUCT = 200_000

_KEPT_PIXELS = 4

# OpenCV has a pool of its own, which would do the same.
cv2.setNumThreads(1)


def resample(
    pixels: Pixels,
    *,
    offset: tuple[float, float],
    scale: tuple[float, float],
    size: tuple[int, int],
    out: Pixels | None = None,
) -> Pixels:
    """Area average of a rectangle of pixels.

    Args:
        pixels: (H, W, 3) or (H, W) uint8; must cover the rectangle.
        offset: (x, y) of the rectangle's corner in ``pixels``, fractions allowed.
        scale: (x, y) pixels per output pixel. Below 1 the result is interpolated linearly.
        size: (width, height) of the result.
        out: Where to put it, (height, width, 3) or (height, width) uint8, C-contiguous.

    Returns:
        ``out``, or a new array of that shape; the latter may be a view of ``pixels``.
    """
    offset = on_grid(offset)
    factor = whole_factor(offset, scale, size)
    if factor is not None:
        x, y = int(offset[0]), int(offset[1])
        crop = pixels[y : y + size[1] * factor[1], x : x + size[0] * factor[0]]
        if factor == (1, 1):
            if out is None:
                return crop
            out[...] = crop
            return out
        reduced = cv2.resize(crop, size, dst=out, interpolation=cv2.INTER_AREA)
        return np.asarray(reduced, dtype=np.uint8)
    pixels, offset, scale = _pre_reduced(pixels, offset, scale)
    return _banded(pixels, offset, scale, size, out)


def _pre_reduced(
    pixels: Pixels, offset: tuple[float, float], scale: tuple[float, float]
) -> tuple[Pixels, tuple[float, float], tuple[float, float]]:
    """The same rectangle with fewer pixels, where so many fall on one output that none matters.

    At least :data:`_KEPT_PIXELS` pixels per output pixel remain along each axis; only those that
    lie across the border of two outputs are then given to one in a share that is a little off.
    """
    x, y = (max(1, int(by / _KEPT_PIXELS)) for by in scale)
    if x == y == 1:
        return pixels, offset, scale
    height, width = pixels.shape[:2]
    whole = cv2.copyMakeBorder(pixels, 0, -height % y, 0, -width % x, cv2.BORDER_REPLICATE)
    size = (whole.shape[1] // x, whole.shape[0] // y)
    reduced = cv2.resize(whole, size, interpolation=cv2.INTER_AREA)
    return (
        np.asarray(reduced, dtype=np.uint8),
        (offset[0] / x, offset[1] / y),
        (scale[0] / x, scale[1] / y),
    )


def on_grid(offset: tuple[float, float]) -> tuple[float, float]:
    """An (x, y) offset as exactly as it is kept."""
    x, y = (round(position * PHASE_STEPS) / PHASE_STEPS for position in offset)
    return (x, y)


def whole_factor(
    offset: tuple[float, float], scale: tuple[float, float], size: tuple[int, int]
) -> tuple[int, int] | None:
    """The (x, y) scale as whole numbers if no pixel would notice the rounding, else None."""
    factors = []
    for start, value, count in zip(offset, scale, size, strict=True):
        whole = round(value)
        drift = abs(value - whole) * count
        if whole < 1 or start != round(start) or drift > 1 / PHASE_STEPS:
            return None
        factors.append(whole)
    return factors[0], factors[1]


def _banded(
    pixels: Pixels,
    offset: tuple[float, float],
    scale: tuple[float, float],
    size: tuple[int, int],
    out: Pixels | None,
) -> Pixels:
    """Rows, then columns; float32 in between."""
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    source = pixels.reshape(height, width * channels).astype(np.float32)
    rows = np.empty((size[1], width * channels), np.float32)
    for place, taken, weights in _bands(offset[1], scale[1], size[1], height, 1, width * channels):
        np.matmul(weights, source[taken], out=rows[place])
    result = np.empty((size[1], size[0] * channels), np.float32)
    for place, taken, weights in _bands(offset[0], scale[0], size[0], width, channels, size[1]):
        result[:, place] = rows[:, taken] @ weights.T
    flat = None if out is None else out.reshape(result.shape)
    # Rounds to nearest and saturates.
    whole = np.asarray(cv2.convertScaleAbs(result, dst=flat), dtype=np.uint8)
    return whole.reshape((size[1], size[0]) if pixels.ndim == 2 else (size[1], size[0], channels))


_Band = tuple[slice, slice, npt.NDArray[np.float32]]


@lru_cache(maxsize=512)
def _bands(
    offset: float, scale: float, count: int, length: int, channels: int, columns: int
) -> tuple[_Band, ...]:
    """The weights of one axis as small dense blocks along the diagonal.

    Args:
        offset: Where the first output begins, in input pixels.
        scale: Input pixels per output pixel.
        count: Output pixels.
        length: Input pixels there are.
        channels: Interleaved values per pixel.
        columns: Vectors that the blocks will be multiplied with; decides the block size.

    Returns:
        (output slice, input slice, weights (outputs, inputs)) blocks, slices in values.
    """
    weigh: Callable[..., npt.NDArray[np.float64]] = _area_weights if scale >= 1 else _linear_weights
    step = _block_size(scale, channels, columns)
    bands = []
    for first in range(0, count, step):
        last = min(first + step, count)
        start = offset + first * scale
        stop = offset + last * scale
        low = min(max(math.floor(start) - 1, 0), length - 1)
        high = max(min(math.ceil(stop) + 1, length), low + 1)
        weights = weigh(start - low, scale, last - first, high - low)
        # What lies beyond the pixels given is as the last pixel: only float dust ever does.
        weights /= weights.sum(axis=1, keepdims=True)
        dense: Any = np.kron(weights, np.eye(channels)) if channels > 1 else weights
        bands.append(
            (
                slice(first * channels, last * channels),
                slice(low * channels, high * channels),
                np.ascontiguousarray(dense, dtype=np.float32),
            )
        )
    return tuple(bands)


def _block_size(scale: float, channels: int, columns: int) -> int:
    """Largest block that BLAS does not spread over threads."""
    step = 16
    while step > 1 and step * channels * (step * scale + 3) * channels * columns > (
        _SINGLE_THREAD_PRODUCT
    ):
        step -= 1
    return step


def _area_weights(start: float, scale: float, count: int, length: int) -> npt.NDArray[np.float64]:
    """Overlap of output pixel i with input pixel k, (count, length)."""
    edges = start + scale * np.arange(count + 1)[:, None]
    covered = np.clip(edges - np.arange(length)[None, :], 0.0, 1.0)
    return np.diff(covered, axis=0)


def _linear_weights(start: float, scale: float, count: int, length: int) -> npt.NDArray[np.float64]:
    """Linear interpolation between pixel centres, (count, length)."""
    centres = start + scale * (np.arange(count) + 0.5)
    centres = np.clip(centres, 0.5, length - 0.5)
    distance = np.abs(centres[:, None] - (np.arange(length)[None, :] + 0.5))
    weights: npt.NDArray[np.float64] = np.maximum(1.0 - distance, 0.0)
    return weights
