"""Area averages at any scale and phase, as two products with banded matrices.

Each output pixel is a weighted sum of the few pixels under it, along one axis and then the other.
The weights of some neighbouring outputs are a small dense block, and a picture is multiplied with
all blocks of an axis in one call: OpenCV's own area average takes twice as long at a scale that is
no whole number, and a Python call for each block would cost more than the product and hand the
interpreter lock to and fro, so that two threads would be no faster than one.
"""

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.blas import ONE_THREAD_PRODUCT

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Outputs in a block: what the processor's vectors take at a time. Of more, the products would have
# more zeros; down, they have whole rows to run along.
_DOWN_BLOCK = 4
_ACROSS_BLOCK = 16
# Outputs of one side that are made at a time. The windows of an axis lie whole pixels apart and its
# outputs do not: the more there are, the wider must each window be.
_MOST_OUTPUTS = 256
# Pixels as floats, at a time: what stays in a core's own cache from one step to the next.
_STRIP_BYTES = 1 << 20
# What a tile needs is kept for the thread's next one: memory that is new from the kernel costs as
# much as the products. A large coarse picture's is not.
_KEPT_BYTES = 8 << 20


def average(
    pixels: Pixels,
    *,
    offset: tuple[float, float],
    scale: tuple[float, float],
    size: tuple[int, int],
    out: Pixels | None = None,
) -> Pixels:
    """Area average of a rectangle of pixels; interpolated linearly where the scale is below 1.

    Takes what :func:`bioptimus.io.resample.resample` takes, which chooses it; returns ``out``, or
    a new array of its shape.
    """
    if max(size) > _MOST_OUTPUTS:
        return _in_parts(pixels, offset, scale, size, out)
    # Linear interpolation looks at the pixel before, too.
    left, top = (
        max(0, math.floor(start) - (by < 1)) for start, by in zip(offset, scale, strict=True)
    )
    pixels = pixels[top:, left:]
    down = _axis(offset[1] - top, scale[1], size[1], pixels.shape[0], _DOWN_BLOCK)
    across = _axis(offset[0] - left, scale[0], size[0], pixels.shape[1], _ACROSS_BLOCK)
    # Planes side by side, so that both products run along rows of numbers.
    planes = 1 if pixels.ndim == 2 else pixels.shape[2]
    pieces, piece = _cut(planes * across.taken, down.block * down.width)
    row = pieces * piece
    rows = down.blocks * down.block
    heights, height = _cut(rows, across.block * across.width)
    middle = _scratch("middle", heights * height * row)
    most = max(1, (_STRIP_BYTES // (4 * row) - down.width) // down.step)
    for first in range(0, down.blocks, most):
        weights = down.weights[first : first + most, None]
        blocks = len(weights)
        taken = (blocks - 1) * down.step + down.width
        source = _scratch("source", taken * row)
        _spread(
            pixels,
            _view(source, (taken, planes, across.taken), (row, across.taken, 1)),
            corner=(-across.before, first * down.step - down.before),
        )
        np.matmul(
            weights,
            _view(source, (blocks, pieces, down.width, piece), (down.step * row, piece, row, 1)),
            out=_view(
                middle[first * down.block * row :],
                (blocks, pieces, down.block, piece),
                (down.block * row, piece, row, 1),
            ),
        )

    length = across.blocks * across.block
    wide = planes * length
    result = _scratch("result", heights * height * wide)
    np.matmul(
        _view(
            middle,
            (across.blocks, planes, heights, height, across.width),
            (across.step, across.taken, height * row, row, 1),
        ),
        np.ascontiguousarray(across.weights.transpose(0, 2, 1))[:, None, None],
        out=_view(
            result,
            (across.blocks, planes, heights, height, across.block),
            (across.block, length, height * wide, wide, 1),
        ),
    )
    # Rounds to nearest and saturates.
    grey = cv2.convertScaleAbs(result[: size[1] * wide].reshape(size[1], wide))
    parts = [grey[:, first : first + size[0]] for first in range(0, wide, length)]
    whole = parts[0] if planes == 1 else cv2.merge(parts, dst=out)
    if out is None:
        return np.ascontiguousarray(whole, dtype=np.uint8)
    if whole is not out:
        out[...] = whole
    return out


def _in_parts(
    pixels: Pixels,
    offset: tuple[float, float],
    scale: tuple[float, float],
    size: tuple[int, int],
    out: Pixels | None,
) -> Pixels:
    if out is None:
        out = np.empty((size[1], size[0], *pixels.shape[2:]), np.uint8)
    for top in range(0, size[1], _MOST_OUTPUTS):
        for left in range(0, size[0], _MOST_OUTPUTS):
            place = out[top : top + _MOST_OUTPUTS, left : left + _MOST_OUTPUTS]
            place[...] = average(
                pixels,
                offset=(offset[0] + left * scale[0], offset[1] + top * scale[1]),
                scale=scale,
                size=(place.shape[1], place.shape[0]),
            )
    return out


def _cut(count: int, products: int) -> tuple[int, int]:
    """(pieces, length of each) of rows or columns, each piece for one thread's product."""
    pieces = -(-count * products // ONE_THREAD_PRODUCT)
    return pieces, -(-count // pieces)


def _spread(pixels: Pixels, place: Floats, *, corner: tuple[int, int]) -> None:
    """Put the pixels from (x, y) on, as floats, into (rows, planes, columns).

    What lies outside the picture keeps numbers of an earlier one. They are finite, their weights
    are 0.
    """
    x, y = corner
    place = place[max(0, -y) :, :, max(0, -x) :]
    pixels = pixels[max(0, y) :, max(0, x) :][: place.shape[0], : place.shape[2]]
    height, width = pixels.shape[:2]
    if pixels.ndim == 2:
        place[:height, 0, :width] = pixels
        return
    kept = _scratch("planes", pixels.size, np.uint8).reshape(pixels.shape[2], height, width)
    for number, plane in enumerate(cv2.split(pixels, list(kept))):
        place[:height, number, :width] = plane


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """The weights of one axis, in blocks whose windows of input pixels lie at equal distances.

    Attributes:
        weights: (blocks, outputs in a block, width of a window) float32. The last block may have
            outputs without weights, which nobody wants.
        step: Input pixels from one window to the next.
        before: Pixels of no weight before the first input pixel.
    """

    weights: Floats
    step: int
    before: int

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return int(self.weights.shape[0])

    @property
    def block(self) -> int:
        """Outputs in a block."""
        return int(self.weights.shape[1])

    @property
    def width(self) -> int:
        """Input pixels in a window."""
        return int(self.weights.shape[2])

    @property
    def taken(self) -> int:
        """Pixels that all windows take together, those before the first input pixel included."""
        return (self.blocks - 1) * self.step + self.width


@lru_cache(maxsize=512)
def _axis(offset: float, scale: float, count: int, length: int, block: int) -> _Axis:
    """The weights of one axis.

    Args:
        offset: Where the first output begins, input pixels from 0 to 2.
        scale: Input pixels per output pixel.
        count: Output pixels.
        length: Input pixels that there are.
        block: Outputs in a block.
    """
    blocks = -(-count // block)
    step = max(1, round(block * scale))
    edges = offset + scale * np.arange(blocks * block + 1)
    windows = step * np.arange(blocks)
    # Linear interpolation looks beyond the edges of an output, by less than a pixel.
    beyond = 0 if scale >= 1 else 1
    lead = int((np.floor(edges[:-1:block]) - beyond - windows).min())
    width = int((np.ceil(edges[block::block]) + beyond - windows).max()) - lead
    # Input pixel under each weight.
    inputs = (lead + windows)[:, None, None] + np.arange(width)
    first, last = (part.reshape(blocks, block, 1) for part in (edges[:-1], edges[1:]))
    if scale >= 1:
        weights = np.minimum(last, inputs + 1) - np.maximum(first, inputs)
    else:
        centres = np.clip((first + last) / 2, 0.5, length - 0.5)
        weights = 1 - np.abs(centres - (inputs + 0.5))
    weights = np.maximum(weights, 0)
    weights[np.broadcast_to((inputs < 0) | (inputs >= length), weights.shape)] = 0
    weights.reshape(-1, width)[count:] = 0
    # Of an output that reaches beyond the pixels given: the mean of those that are there.
    total = weights.sum(axis=2, keepdims=True)
    weights /= np.where(total > 0, total, 1)
    return _Axis(weights=weights.astype(np.float32), step=step, before=-lead)


class _Kept(threading.local):
    """Memory of one thread, by what it is for. It holds finite numbers at all times."""

    def __init__(self) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}


_kept = _Kept()


def _scratch(name: str, count: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    """(count,) of memory that this thread alone has until its next picture."""
    array = _kept.arrays.get(name)
    if array is None or len(array) < count:
        array = np.zeros(count, dtype)
        if array.nbytes <= _KEPT_BYTES:
            _kept.arrays[name] = array
    return array[:count]


def _view(array: Floats, shape: tuple[int, ...], strides: tuple[int, ...]) -> Floats:
    """Another shape of the same memory; strides count numbers, not bytes."""
    return np.ndarray(
        shape, np.float32, array, strides=tuple(step * array.itemsize for step in strides)
    )
