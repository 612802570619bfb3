"""Find tissue on a coarse image by the colour it takes out of the light."""

import math
from collections.abc import Iterator

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.tissue.background import Background, estimate_background
from bioptimus.tissue.mask import SCANNED_OPACITY, TissueMask, TissueOptions, TissueStep, full_mask

BoolImage = npt.NDArray[np.bool_]
ByteImage = npt.NDArray[np.uint8]

# Chroma here is the difference between the most and the least of red, green, blue that gets
# through, as shares of what gets through bare glass: 0 for any grey, dust and shadow included.
CERTAIN_CHROMA = 0.075
POSSIBLE_CHROMA = 0.030
CHROMA_STEP = 1 / 400
STRIP_ROWS = 512


def find_tissue(
    pixels: npt.NDArray[np.uint8],
    opaque: npt.NDArray[np.uint8],
    *,
    downsample: tuple[float, float],
    mpp: tuple[float, float],
    options: TissueOptions | None = None,
) -> TissueMask:
    """Find the tissue of a slide.

    Args:
        pixels: RGB (height, width, 3) of the whole slide, composited, best at 8 µm/px.
        opaque: (height, width) share of each pixel that was scanned, 0..255.
        downsample: (x, y) level-0 pixels per coarse pixel.
        mpp: (x, y) µm per coarse pixel.
        options: How to look; the defaults if not given.

    Returns:
        The mask and what each step left of it.
    """
    options = options or TissueOptions()
    if options.method == "none":
        return full_mask(opaque, downsample)
    area_um2 = mpp[0] * mpp[1]
    scanned = opaque >= SCANNED_OPACITY
    steps = [_step("area outside the scan", scanned)]
    background = _background(pixels, scanned)
    chroma = _chroma(pixels, background, mpp)
    mask = _connected_to(chroma >= _levels(POSSIBLE_CHROMA), chroma >= _levels(CERTAIN_CHROMA))
    mask &= scanned
    steps.append(_step("no stain", mask))
    mask = _fill_holes(mask, options.max_hole_um2 / area_um2) & scanned
    mask = _drop_specks(mask, options.min_object_um2 / area_um2)
    steps.append(_step("specks", mask))
    return TissueMask(mask=mask, downsample=downsample, method="auto", steps=tuple(steps))


def _step(name: str, mask: BoolImage) -> TissueStep:
    return TissueStep(name=name, share=float(mask.mean()) if mask.size else 0.0)


def _levels(chroma: float) -> int:
    return round(chroma / CHROMA_STEP)


def _background(pixels: ByteImage, scanned: BoolImage) -> Background:
    """Estimate the glass on an image of at most about 800 px a side."""
    factor = max(1, math.ceil(max(scanned.shape) / 800))
    if factor == 1:
        return estimate_background(pixels, scanned)
    size = (max(1, scanned.shape[1] // factor), max(1, scanned.shape[0] // factor))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    whole = cv2.resize(scanned.astype(np.float32), size, interpolation=cv2.INTER_AREA) > 0.99
    return estimate_background(np.asarray(small, dtype=np.uint8), whole)


def _strips(height: int, halo: int) -> Iterator[tuple[int, int, int, int]]:
    """(first, after last, first to read, after last to read) of bands of rows."""
    for start in range(0, height, STRIP_ROWS):
        stop = min(start + STRIP_ROWS, height)
        yield start, stop, max(0, start - halo), min(height, stop + halo)


def _chroma(pixels: ByteImage, background: Background, mpp: tuple[float, float]) -> ByteImage:
    """Chroma of each pixel, in steps of ``CHROMA_STEP``, smoothed over about 16 µm."""
    height, width = pixels.shape[:2]
    out = np.empty((height, width), dtype=np.uint8)
    sigma = (max(0.4, 8 / mpp[0]), max(0.4, 8 / mpp[1]))
    for start, stop, first, last in _strips(height, math.ceil(3 * sigma[1]) + 1):
        through = pixels[first:last] / background.rows(first, last, size=(width, height))
        np.minimum(through, 1, out=through)
        smooth = cv2.GaussianBlur(through, (0, 0), sigma[0], sigmaY=sigma[1])
        chroma = smooth.max(axis=2) - smooth.min(axis=2)
        band = np.minimum(chroma / CHROMA_STEP, 255).astype(np.uint8)
        out[start:stop] = band[start - first : stop - first]
    return out


def _connected_to(possible: BoolImage, certain: BoolImage) -> BoolImage:
    """The connected regions of ``possible`` that hold a pixel of ``certain``."""
    count, labels = cv2.connectedComponents(possible.astype(np.uint8), connectivity=8)
    keep = np.zeros(count, dtype=bool)
    keep[labels[certain & possible]] = True
    keep[0] = False
    return np.asarray(keep[labels])


def _drop_specks(mask: BoolImage, smallest_px: float) -> BoolImage:
    """Without islands of fewer pixels than that."""
    count, labels, stats, _ = cv2.connectedComponentsWithStats(
        mask.astype(np.uint8), connectivity=8
    )
    keep = stats[:, cv2.CC_STAT_AREA] >= smallest_px
    keep[0] = False
    return np.asarray(keep[labels]) if count > 1 else mask


def _fill_holes(mask: BoolImage, largest_px: float) -> BoolImage:
    """With holes of at most so many pixels filled; a hole touches no edge of the image."""
    _, labels, stats, _ = cv2.connectedComponentsWithStats((~mask).astype(np.uint8), connectivity=4)
    height, width = mask.shape
    inside = (
        (stats[:, cv2.CC_STAT_LEFT] > 0)
        & (stats[:, cv2.CC_STAT_TOP] > 0)
        & (stats[:, cv2.CC_STAT_LEFT] + stats[:, cv2.CC_STAT_WIDTH] < width)
        & (stats[:, cv2.CC_STAT_TOP] + stats[:, cv2.CC_STAT_HEIGHT] < height)
    )
    fill = inside & (stats[:, cv2.CC_STAT_AREA] <= largest_px)
    fill[0] = False
    return np.asarray(mask | fill[labels])
