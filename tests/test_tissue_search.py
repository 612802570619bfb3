"""What counts as tissue on a coarse image, whatever the stain, the scanner and the dirt."""

import numpy as np
import numpy.typing as npt
import pytest

from bioptimus.tissue import TissueOptions, find_tissue

SCALE = (8.0, 8.0)
DOWNSAMPLE = (16.0, 16.0)
PINK = (215, 150, 190)


def find(
    pixels: npt.NDArray[np.uint8],
    opaque: npt.NDArray[np.uint8] | None = None,
    options: TissueOptions | None = None,
) -> npt.NDArray[np.bool_]:
    if opaque is None:
        opaque = np.full(pixels.shape[:2], 255, dtype=np.uint8)
    return find_tissue(pixels, opaque, downsample=DOWNSAMPLE, mpp=SCALE, options=options).mask


def glass(height: int = 300, width: int = 300, *, level: float = 240) -> npt.NDArray[np.uint8]:
    noise = np.random.default_rng(0).normal(0, 1.2, (height, width, 3))
    return np.clip(level + noise, 0, 255).astype(np.uint8)


def tissue(height: int, width: int, colour: tuple[int, int, int] = PINK) -> npt.NDArray[np.uint8]:
    noise = np.random.default_rng(1).normal(0, 8, (height, width, 1))
    return np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)


def test_stained_area_is_found_and_the_glass_is_not() -> None:
    pixels = glass()
    pixels[100:200, 50:150] = tissue(100, 100)
    mask = find(pixels)
    assert mask[105:195, 55:145].all()
    assert mask.sum() == pytest.approx(100 * 100, rel=0.1)


def test_blank_slide_is_empty_and_says_which_step_left_nothing() -> None:
    """FIELD 89 to 91."""
    pixels = glass()
    found = find_tissue(
        pixels, np.full((300, 300), 255, np.uint8), downsample=DOWNSAMPLE, mpp=SCALE
    )
    assert not found.mask.any()
    assert found.emptied_by == "no stain"
