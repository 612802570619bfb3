"""From level pixels to tile pixels: area averages with the right scale and phase.

An output pixel is the mean of the level pixels under it, each weighted by the area that is
covered, so nothing aliases and nothing drifts. Scales of a whole number on whole positions go
through OpenCV's exact integer path; everything else through the matrix products of
:mod:`bioptimus.io.banded`.
"""

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.io.banded import average

Pixels = npt.NDArray[np.uint8]

# Positions are kept to 1/64 pixel: finer changes no grey level and would defeat the cache of
# weights.
PHASE_STEPS = 64

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
    return average(pixels, offset=offset, scale=scale, size=size, out=out)


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
