"""Colours that people with any colour vision, and a black-and-white printer, can tell apart."""

from typing import Final

import numpy as np
import numpy.typing as npt

CLUSTER_COLOURS: Final = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#332288",
    "#882255",
    "#999933",
    "#44AA99",
    "#7F7F7F",
)
"""Okabe and Ito's palette without black, then Tol's muted tones: the most that stay distinct."""

FAILED_COLOUR: Final = "#D55E00"
OUTLINE_COLOUR: Final = "#0B6E4F"

# Lightness and chroma of the embedding map in OKLab: wide enough to separate, inside sRGB for
# most of the range. Never near white, so that every tile stands out from the glass.
_LIGHT = (0.40, 0.90)
_YELLOW_BLUE = 0.13
_RED_GREEN = 0.10

_OKLAB_TO_LMS = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
_LMS_TO_LINEAR = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def component_colours(unit_scores: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Turn three scores into one colour, the most important into what everyone sees.

    The first component becomes lightness, the second runs from blue to yellow (the axis that
    the common red-green deficiencies keep), the third from green to red.

    Args:
        unit_scores: (N, 3), each 0..1.

    Returns:
        (N, 3) uint8, sRGB.
    """
    light = _LIGHT[0] + (_LIGHT[1] - _LIGHT[0]) * unit_scores[:, 0]
    red = (unit_scores[:, 2] - 0.5) * 2 * _RED_GREEN
    yellow = (unit_scores[:, 1] - 0.5) * 2 * _YELLOW_BLUE
    lms = (np.stack([light, red, yellow], axis=1) @ _OKLAB_TO_LMS.T) ** 3
    return _to_srgb(np.clip(lms @ _LMS_TO_LINEAR.T, 0.0, 1.0))


def _to_srgb(linear: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    curved = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    rounded: npt.NDArray[np.uint8] = np.rint(curved * 255).astype(np.uint8)
    return rounded


def hex_to_rgb(colour: str) -> tuple[int, int, int]:
    """``#RRGGBB`` as three numbers, 0..255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def faded(pixels: npt.NDArray[np.uint8], *, towards_white: float = 0.3) -> npt.NDArray[np.uint8]:
    """The picture in pale greys, as ground under coloured tiles.

    Args:
        pixels: (H, W, 3) uint8.
        towards_white: 0 keeps the contrast, 1 leaves a white sheet.

    Returns:
        (H, W, 3) uint8.
    """
    grey = pixels.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    pale = grey + (255 - grey) * towards_white
    return np.repeat(np.rint(pale).astype(np.uint8)[..., None], 3, axis=2)
