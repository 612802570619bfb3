"""Marks of felt pens, told from stain by the colour of what they take out of the light.

By the law of Beer and Lambert the optical densities of red, green and blue of one dye keep their
proportion whatever its amount, so that a dye is a direction. The stains of pathology take out
green most (haematoxylin and eosin) or blue (DAB) and red moderately; pens go where they do not,
and are far denser than a section a few µm thin.
"""

import cv2
import numpy as np
import numpy.typing as npt

ByteImage = npt.NDArray[np.uint8]
BoolImage = npt.NDArray[np.bool_]
FloatImage = npt.NDArray[np.float32]

# Pens are looked for at this scale: a stroke is some hundred µm wide.
PEN_MPP = 16.0
SMALLEST_PEN_UM2 = 40_000.0
# Beside a stroke, its colour counts down to any density within this distance.
EDGE_UM = 64.0
RIM_UM = 16.0
# Tissue of the colour of a pen (trichrome, methyl green) is rougher than ink: the spread of its
# density within 5 x 5 pixels, as part of its mean.
ROUGHEST_INK = 0.16


def find_pen(
    pixels: ByteImage, *, glass: npt.NDArray[np.float32], mpp: tuple[float, float]
) -> BoolImage:
    """Find pen marks.

    Args:
        pixels: RGB (height, width, 3).
        glass: (3,) RGB of the bare glass.
        mpp: (x, y) µm per pixel.

    Returns:
        (height, width) true on pen marks and their blurred rim.
    """
    height, width = pixels.shape[:2]
    factor = max(1, round(PEN_MPP / min(mpp)))
    size = (max(1, width // factor), max(1, height // factor))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA) if factor > 1 else pixels
    scale = (mpp[0] * width / size[0], mpp[1] * height / size[1])
    density = _density(np.asarray(small, dtype=np.uint8), glass)
    ink = _smooth_pieces(_certain(density), density, SMALLEST_PEN_UM2 / (scale[0] * scale[1]))
    if not ink.any():
        return np.zeros((height, width), dtype=bool)
    ink = _grown(ink, _dense(density))
    edge = ink | (_dilated(ink, EDGE_UM, scale) & _similar(density))
    marks = _dilated(edge, RIM_UM, scale).astype(np.uint8)
    return np.asarray(
        cv2.resize(marks, (width, height), interpolation=cv2.INTER_NEAREST), dtype=bool
    )


def _density(pixels: ByteImage, glass: npt.NDArray[np.float32]) -> FloatImage:
    """Optical densities (height, width, 4) of red, green, blue and their sum; never below 0."""
    levels = np.arange(256, dtype=np.float32)[:, None]
    table = np.log(np.maximum((glass + 1) / (levels + 1), 1)).astype(np.float32)
    red, green, blue = (table[pixels[..., channel], channel] for channel in range(3))
    return np.stack([red, green, blue, red + green + blue], axis=2)


def _certain(density: FloatImage) -> BoolImage:
    """Pixels of a colour and density that only ink has."""
    red, green, blue, total = cv2.split(density)
    bluish = (red >= 0.38 * total) & (total >= 2.2) & (blue <= 0.25 * total)
    light_blue = (red >= 0.48 * total) & (blue <= 0.16 * total) & (total >= 0.9)
    greenish = (green <= 0.30 * total) & (red >= 0.38 * total) & (total >= 0.6)
    # Blood has the proportions of red ink, but not its density.
    deep_red = (red <= 0.13 * total) & (blue >= 0.36 * total) & (total >= 3.2)
    light_red = (red <= 0.06 * total) & (blue >= 0.36 * total) & (total >= 1.2)
    yellow = (blue >= 0.62 * total) & (total >= 0.5)
    black = (cv2.max(cv2.max(red, green), blue) <= 0.385 * total) & (total >= 3.6)
    return np.asarray(
        bluish | light_blue | greenish | deep_red | light_red | yellow | black, dtype=bool
    )


def _similar(density: FloatImage) -> BoolImage:
    """Pixels of a colour that ink has, whatever their density."""
    red, green, blue, total = cv2.split(density)
    bluish = (red >= 0.36 * total) & (blue <= 0.25 * total)
    greenish = green <= 0.33 * total
    reddish = (red <= 0.14 * total) & (blue >= 0.34 * total)
    grey = (cv2.max(cv2.max(red, green), blue) <= 0.40 * total) & (total >= 1.5)
    return np.asarray((bluish | greenish | reddish | grey) & (total >= 0.05), dtype=bool)


def _dense(density: FloatImage) -> BoolImage:
    """Pixels that may be ink over tissue, where the tissue bends the colour."""
    red, green, blue, total = cv2.split(density)
    reddish = (red <= 0.18 * total) & (blue >= 0.32 * total)
    bluish = (red >= 0.34 * total) & (blue <= 0.28 * total)
    greenish = green <= 0.36 * total
    grey = cv2.max(cv2.max(red, green), blue) <= 0.40 * total
    return np.asarray((reddish | bluish | greenish | grey) & (total >= 3.0), dtype=bool)


def _grown(ink: BoolImage, dense: BoolImage) -> BoolImage:
    """Ink, and all that may be ink over tissue and hangs together with it."""
    _, labels = cv2.connectedComponents((ink | dense).astype(np.uint8), connectivity=8)
    return np.asarray((labels > 0) & np.isin(labels, np.unique(labels[ink])))


def _smooth_pieces(mask: BoolImage, density: FloatImage, smallest_px: float) -> BoolImage:
    """The pieces that are large enough for a stroke and as smooth as ink."""
    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8))
    if count == 1:
        return mask
    total = np.ascontiguousarray(density[..., 3])
    mean = cv2.blur(total, (5, 5))
    spread = np.sqrt(np.maximum(cv2.blur(total * total, (5, 5)) - mean * mean, 0))
    rough = spread / np.maximum(mean, 1e-3)
    # Borders are rough in any case: judge by what lies within, where there is such.
    inner = cv2.erode(mask.astype(np.uint8), np.ones((5, 5), dtype=np.uint8)) > 0
    keep = stats[:, cv2.CC_STAT_AREA] >= smallest_px
    keep[0] = False
    total_rough = np.bincount(labels[inner], weights=rough[inner], minlength=count)
    pixels = np.bincount(labels[inner], minlength=count)
    keep &= (pixels > 0) & (total_rough <= ROUGHEST_INK * pixels)
    return np.asarray(keep[labels])


def _dilated(mask: BoolImage, reach_um: float, scale: tuple[float, float]) -> BoolImage:
    size = [2 * max(1, round(reach_um / step)) + 1 for step in scale]
    kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, size)
    return np.asarray(cv2.dilate(mask.astype(np.uint8), kernel), dtype=bool)
