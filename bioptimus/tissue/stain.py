"""How much stain each place of a coarse image holds.

Stain takes colours out of the light unequally; dust, shadows, edges of the coverslip, air and
black markers take all alike. So what counts is *chroma*: the difference between the most and the
least of red, green and blue that gets through, as shares of what gets through bare glass. It is
measured at two scales, since tissue is of two kinds. Stained tissue shows pixel by pixel. Fat,
mucin and faded sections let nearly all light through, and differ from glass only on average over
some ten cells; the average leaves stained pixels out, so it does not smear them over the glass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.tissue.background import Background

ByteImage = npt.NDArray[np.uint8]
BoolImage = npt.NDArray[np.bool_]
FloatImage = npt.NDArray[np.float32]

# One step of the byte images.
STEP = 1 / 400
# Fine pixels of stain: surely, and beside those that are sure.
CERTAIN_CHROMA = 0.080
POSSIBLE_CHROMA = 0.035
# Those that the average leaves out with their surroundings, unless they are as thin as the walls
# of fat cells.
STAINED_CHROMA = 0.055
AROUND = np.ones((7, 7), dtype=np.uint8)
# Less than this part of the strongest within two pixels is that one's blurred border.
NEAR = np.ones((5, 5), dtype=np.uint8)
BORDER_PART = 0.40
# Faint tissue: chroma, and a quarter of the texture, averaged.
FAINT_RANGE = (0.016, 0.026)
FAINT_NOISE = 3.5
FAINT_BORDER_PART = 0.60
FAINT_CERTAIN = 1.6
TEXTURE_PART = 0.25
# Compression tints single blocks; tissue as faint as that is wider. So the average over a wider
# neighbourhood must hold so much of what would be possible.
SUPPORT_BLOCKS = 2.5
SUPPORT_PART = 0.5
# What darkens, or varies in darkness, much more than it colours is dust, fibre or shadow. Pixel by
# pixel that holds only where it is nearly grey, since very dark tissue is; on average, sooner.
LEAST_PIXEL_TINT = 0.08
LEAST_TINT = 0.20
# The average is taken on an image smaller by this factor, in rows of blocks.
BLOCK = 4
# So that what a band of rows needs stays in the processor's cache: of 96 to 256 rows the search
# takes a quarter less than of 512 on a picture 768 px wide, a tenth less on one of 3,000.
STRIP_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class Stain:
    """Stain of a coarse image, all arrays (height, width).

    Attributes:
        possible: Stain, if it touches a certain one.
        certain: Stain for sure.
        dark: Light lost, in steps of ``STEP``, whatever its colour.
    """

    possible: BoolImage
    certain: BoolImage
    dark: ByteImage


def measure_stain(
    pixels: ByteImage,
    scanned: BoolImage,
    *,
    background: Background,
    mpp: tuple[float, float],
) -> Stain:
    """Measure the stain in bands of rows, so that little memory is used besides the result's.

    Args:
        pixels: RGB (height, width, 3).
        scanned: (height, width) true where the pixels are those of the scan.
        background: Colour of the glass.
        mpp: (x, y) µm per pixel.
    """
    height, width = scanned.shape
    chroma = np.empty((height, width), dtype=np.uint8)
    dark = np.empty((height, width), dtype=np.uint8)
    faint_bands = []
    sigma = (max(0.5, 8 / mpp[0]), max(0.5, 8 / mpp[1]))
    for start, stop, first, last in _strips(height, math.ceil(3 * sigma[1]) + 8):
        glass = background.rows(first, last, size=(width, height))
        band = _with_glass_outside(pixels[first:last], scanned[first:last], glass)
        blurred = cv2.GaussianBlur(band, (0, 0), sigma[0], sigmaY=sigma[1])
        through = _through(np.asarray(blurred, dtype=np.uint8), glass)
        spread, loss = _chroma(through), _loss(through)
        spread *= spread >= LEAST_PIXEL_TINT * loss
        inside = slice(start - first, stop - first)
        chroma[start:stop] = _as_bytes(spread)[inside]
        dark[start:stop] = _as_bytes(loss)[inside]
        stained = cv2.morphologyEx(
            (spread >= STAINED_CHROMA).astype(np.uint8), cv2.MORPH_OPEN, NEAR
        )
        stained = cv2.dilate(stained, AROUND)
        weight = ((stained[inside] == 0) & scanned[start:stop]).astype(np.float32)
        faint_bands.append(_block_means([c[inside] for c in through], loss[inside], weight))
    faint, noise = _faint(np.concatenate(faint_bands, axis=0))
    limit = float(np.clip(FAINT_NOISE * noise, *FAINT_RANGE))
    faint_bytes = cv2.resize(_as_bytes(faint), (width, height), interpolation=cv2.INTER_LINEAR)
    strongest = cv2.dilate(chroma, NEAR)
    own = (chroma >= _steps(POSSIBLE_CHROMA)) & (chroma >= BORDER_PART * strongest)
    return Stain(
        possible=own | (faint_bytes >= _steps(limit)),
        certain=(chroma >= _steps(CERTAIN_CHROMA)) | (faint_bytes >= _steps(limit * FAINT_CERTAIN)),
        dark=dark,
    )


def _steps(value: float) -> int:
    return round(value / STEP)


def _as_bytes(values: FloatImage) -> ByteImage:
    return np.asarray(cv2.convertScaleAbs(values, alpha=1 / STEP), dtype=np.uint8)


def _strips(height: int, halo: int) -> Iterator[tuple[int, int, int, int]]:
    """(first, after last, first to read, after last to read) of bands of rows."""
    for start in range(0, height, STRIP_ROWS):
        stop = min(start + STRIP_ROWS, height)
        yield start, stop, max(0, start - halo), min(height, stop + halo)


def _with_glass_outside(
    pixels: ByteImage, scanned: BoolImage, glass: list[FloatImage]
) -> ByteImage:
    """What was not scanned must not blur into the tissue at its border."""
    if scanned.all():
        return pixels
    band = pixels.copy()
    for channel, plane in enumerate(glass):
        band[..., channel] = np.where(scanned, band[..., channel], plane.astype(np.uint8))
    return band


def _through(pixels: ByteImage, glass: list[FloatImage]) -> list[FloatImage]:
    """Red, green, blue as shares of what gets through the glass, at most 1."""
    planes = []
    for plane, full in zip(cv2.split(pixels), glass, strict=True):
        share = np.asarray(plane * (1 / full), dtype=np.float32)
        planes.append(np.minimum(share, 1, out=share))
    return planes


def _chroma(through: list[FloatImage]) -> FloatImage:
    red, green, blue = through
    most, least = cv2.max(cv2.max(red, green), blue), cv2.min(cv2.min(red, green), blue)
    return np.asarray(cv2.subtract(most, least), dtype=np.float32)


def _loss(through: list[FloatImage]) -> FloatImage:
    red, green, blue = through
    return np.asarray(1 - (red + green + blue) * np.float32(1 / 3), dtype=np.float32)


def _block_means(through: list[FloatImage], loss: FloatImage, weight: FloatImage) -> FloatImage:
    """Weighted means over blocks: (rows, columns, 6) of weight, red, green, blue, loss, loss²."""
    height, width = weight.shape
    size = (math.ceil(width / BLOCK), math.ceil(height / BLOCK))
    planes = [weight, *(plane * weight for plane in through), loss * weight, loss * loss * weight]
    return np.stack(
        [cv2.resize(plane, size, interpolation=cv2.INTER_AREA) for plane in planes], axis=2
    )


def _faint(blocks: FloatImage) -> tuple[FloatImage, float]:
    """Evidence of faint tissue in each block, and how much of it bare glass shows."""
    sums = cv2.GaussianBlur(blocks, (0, 0), 1.0)
    weight = np.maximum(sums[..., 0], 1e-6)
    red, green, blue, loss, squares = (
        np.asarray(sums[..., plane] / weight, dtype=np.float32) for plane in range(1, 6)
    )
    chroma = _chroma([red, green, blue])
    texture = np.sqrt(np.maximum(squares - loss * loss, 0)).astype(np.float32)
    evidence = chroma + np.minimum(TEXTURE_PART * texture, chroma)
    known = (sums[..., 0] > 0.05).astype(np.float32)
    glassy = (known > 0) & (loss < 0.06)
    noise = float(np.quantile(evidence[glassy], 0.2)) if glassy.any() else 0.0
    evidence *= known * (chroma >= LEAST_TINT * (loss + texture))
    around = cv2.GaussianBlur(np.stack([evidence, known], axis=2), (0, 0), SUPPORT_BLOCKS)
    evidence[around[..., 0] < SUPPORT_PART * FAINT_RANGE[0] * around[..., 1]] = 0
    strongest = cv2.dilate(evidence, np.ones((3, 3), dtype=np.uint8))
    evidence[evidence < FAINT_BORDER_PART * strongest] = 0
    return evidence, noise
