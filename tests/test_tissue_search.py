"""What counts as tissue on a coarse image, whatever the stain, the scanner and the dirt.

Real tissue of the example slide, brought to 8 µm/px, on glass with noise; and, where the folder
of shared slides is there, the scenes of ``benchmarks.tissue``.
"""

from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import openslide
import pytest

from benchmarks.tissue import ACCEPTED_IOU, CONDITIONS, Library, overlap, search
from bioptimus.errors import UsageError
from bioptimus.tissue import TissueMask, TissueOptions, find_tissue
from bioptimus.tissue.find import _cleaned
from tests.conftest import EXAMPLE_SLIDE

Pixels = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

SIDE = 300
TRUTH = np.zeros((SIDE, SIDE), dtype=bool)
TRUTH[60:220, 50:170] = True
TRUTH[100:260, 200:270] = True
NOTHING = np.zeros((SIDE, SIDE), dtype=bool)


@lru_cache(maxsize=1)
def real_tissue() -> Pixels:
    """(SIDE, SIDE, 3) of H&E at 8 µm/px, as shares of what gets through the glass."""
    with openslide.OpenSlide(EXAMPLE_SLIDE) as slide:
        fine = np.asarray(slide.read_region((930, 1630), 0, (400, 592)).convert("RGB"))
    coarse = cv2.resize(fine, (25, 37), interpolation=cv2.INTER_AREA)
    mirrored = np.pad(coarse, ((0, SIDE - 37), (0, SIDE - 25), (0, 0)), mode="symmetric")
    return np.asarray(np.clip(mirrored / 243.0, 0.01, 1), dtype=np.float32)


def glass(level: float = 240, noise: float = 1.2) -> Pixels:
    return np.random.default_rng(0).normal(level, noise, (SIDE, SIDE, 3)).astype(np.float32)


def on_glass(through: Pixels, truth: Mask = TRUTH, ground: Pixels | None = None) -> Pixels:
    ground = glass() if ground is None else ground
    return np.where(truth[..., None], ground * through, ground).astype(np.float32)


def find(
    pixels: Pixels,
    opaque: npt.NDArray[np.uint8] | None = None,
    options: TissueOptions | None = None,
) -> TissueMask:
    image = np.clip(pixels, 0, 255).astype(np.uint8)
    if opaque is None:
        opaque = np.full(image.shape[:2], 255, dtype=np.uint8)
    return find_tissue(image, opaque, downsample=(16.0, 16.0), mpp=(8.0, 8.0), options=options)


def check_found(pixels: Pixels, truth: Mask = TRUTH) -> None:
    assert overlap(find(pixels).mask, truth) > 0.91


@pytest.mark.parametrize("power", [0.12, 0.3, 1.0, 2.5])
def test_tissue_is_found_from_pale_to_dark(power: float) -> None:
    check_found(on_glass(real_tissue() ** np.float32(power)))


@pytest.mark.parametrize(
    "light", [(1, 1, 1), (0.97, 0.95, 0.86), (0.86, 0.93, 0.96), (0.72, 0.72, 0.72)]
)
def test_tint_and_brightness_of_the_glass_do_not_matter(light: tuple[float, ...]) -> None:
    check_found(on_glass(real_tissue()) * np.array(light, dtype=np.float32))


def test_light_that_falls_off_is_no_tissue() -> None:
    across = np.linspace(-1, 1, SIDE, dtype=np.float32)
    light = 0.9 - 0.08 * across[None, :] - 0.08 * across[:, None] ** 2
    check_found(on_glass(real_tissue()) * light[..., None])
    assert not find(glass() * light[..., None]).mask.any()


def test_brown_and_blue_stain_are_one_tissue_also_where_they_mix_to_grey() -> None:
    amount = -np.log(real_tissue()).mean(axis=2, keepdims=True)
    share = np.clip((np.arange(SIDE) - 100) / 20, 0, 1)[None, :, None]
    blue, brown = np.array([0.65, 0.55, 0.29]), np.array([0.27, 0.57, 0.78])
    loss = amount * (0.5 * blue * (1 - share) + 1.2 * brown * share)
    check_found(on_glass(np.exp(-loss).astype(np.float32)))


def test_wide_grey_within_stain_is_tissue_and_beside_it_is_not() -> None:
    pixels = on_glass(real_tissue())
    pixels[90:190, 80:140] = 150  # 800 x 480 µm, more than any hole that is filled
    pixels[110:210, 271:299] = 150
    check_found(pixels)


def test_fat_is_tissue_though_its_cells_are_as_clear_as_glass() -> None:
    # Cells of 10 px with membranes that take away a tenth to a third of the light.
    noise = np.random.default_rng(3).uniform(0.4, 1.6, (SIDE, SIDE, 1))
    net = np.zeros((SIDE, SIDE, 1))
    net[::10] = net[:, ::10] = 1
    loss = net * noise * np.array([0.06, 0.22, 0.14])
    check_found(on_glass(np.exp(-loss).astype(np.float32)))


def test_slide_that_is_all_tissue_is_kept_whole() -> None:
    found = find(real_tissue() * 240)
    assert found.mask.mean() > 0.99


def test_blank_slide_is_empty_and_says_which_step_left_nothing() -> None:
    """FIELD 89 to 91."""
    for noise in (0.0, 1.2, 4.0):
        found = find(glass(noise=noise))
        assert not found.mask.any()
        assert found.emptied_by == "no stain"


def test_specks_of_tissue_are_dropped_by_area_and_named_when_nothing_else_is_left() -> None:
    small = NOTHING.copy()
    small[100:115, 100:115] = True
    pixels = on_glass(real_tissue(), small)
    assert find(pixels).emptied_by == "specks"
    kept = find(pixels, options=TissueOptions(min_object_um2=5_000))
    assert overlap(kept.mask, small) > 0.8


def test_holes_are_filled_up_to_their_area_in_um2() -> None:
    holed = TRUTH.copy()
    holed[100:120, 90:110] = False  # 160 µm: 25,600 µm²
    holed[150:195, 80:125] = False  # 360 µm: 129,600 µm²
    found = find(on_glass(real_tissue(), holed)).mask
    assert found[100:120, 90:110].all()
    assert not found[155:190, 85:120].any()
    unfilled = find(on_glass(real_tissue(), holed), options=TissueOptions(max_hole_um2=0)).mask
    assert not unfilled[105:115, 95:105].any()


def test_island_in_a_hole_does_not_keep_the_hole_open() -> None:
    holed = TRUTH.copy()
    holed[100:126, 90:116] = False
    holed[111:115, 101:105] = True
    assert find(on_glass(real_tissue(), holed)).mask[100:126, 90:116].all()


@pytest.mark.parametrize("side", [24, 25, 26])
def test_an_area_counts_every_pixel_of_an_island_and_of_a_hole(side: int) -> None:
    image = np.zeros((200, 200), dtype=bool)
    image[10 : 10 + side, 10 : 10 + side] = True  # an island of side x side pixels
    image[60:180, 60:180] = True
    image[100 : 100 + side, 100 : 100 + side] = False  # a hole of as many
    cleaned = _cleaned(image, smallest_px=25 * 25, largest_hole_px=25 * 25)
    assert cleaned[10, 10] == (side >= 25)
    assert cleaned[100, 100] == (side <= 25)


def test_grey_dust_fibres_and_coverslip_edges_are_no_tissue() -> None:
    dirt = np.zeros((SIDE, SIDE), dtype=np.float32)
    rng = np.random.default_rng(5)
    for _ in range(60):
        centre = (int(rng.integers(SIDE)), int(rng.integers(SIDE)))
        cv2.circle(dirt, centre, int(rng.integers(1, 7)), float(rng.uniform(0.2, 2)), -1)
    cv2.line(dirt, (10, 280), (290, 240), 1.2, 3)
    dirt[:, 285:] = 0.2
    dirt[:, 283:286] = 1.0
    grey = np.exp(-cv2.GaussianBlur(dirt, (0, 0), 1.0))[..., None]
    assert not find(glass() * grey).mask.any()
    check_found(on_glass(real_tissue()) * grey)


@pytest.mark.parametrize("black", [0.0, 8.0, 25.0])
def test_black_border_is_no_tissue(black: float) -> None:
    pixels = on_glass(real_tissue())
    truth = TRUTH.copy()
    border = np.ones((SIDE, SIDE), dtype=bool)
    border[70:250, 40:290] = False
    pixels[border] = np.random.default_rng(1).normal(black, 2, (int(border.sum()), 3))
    check_found(pixels, truth & ~border)


@pytest.mark.parametrize("fill", [0.0, 255.0])
def test_what_was_not_scanned_is_no_tissue_whatever_colour_it_comes_in(fill: float) -> None:
    """FIELD 51."""
    pixels = on_glass(real_tissue())
    opaque = np.full((SIDE, SIDE), 255, dtype=np.uint8)
    opaque[:, :100] = 0
    opaque[:, 100] = 127
    pixels[opaque == 0] = fill
    found = find(pixels, opaque)
    assert not found.mask[:, :101].any()
    assert overlap(found.mask, TRUTH & (opaque > 127)) > 0.93


def test_white_fill_brighter_than_the_glass_is_no_reason_to_call_glass_tissue() -> None:
    pixels = on_glass(real_tissue()) * np.array([0.97, 0.96, 0.92], dtype=np.float32)
    pixels[:55] = 255
    check_found(pixels)


PENS = {
    "blue": (35, 55, 150),
    "light blue": (90, 150, 225),
    "green": (25, 120, 70),
    "red": (190, 25, 45),
    "black": (30, 30, 34),
}


@pytest.mark.parametrize("colour", PENS)
def test_pen_is_removed_on_glass_and_over_tissue(colour: str) -> None:
    stroke = np.zeros((SIDE, SIDE), dtype=np.float32)
    cv2.line(stroke, (110, 0), (150, 299), 1.0, 30)
    soft = cv2.GaussianBlur(stroke, (0, 0), 1.5)[..., None]
    loss = -np.log(np.array(PENS[colour]) / 245)
    pixels = (on_glass(real_tissue()) * np.exp(-soft * loss)).astype(np.float32)
    truth = TRUTH & (soft[..., 0] < 0.5)
    removed = find(pixels)
    assert overlap(removed.mask, truth) > 0.88
    assert removed.mask[stroke > 0].mean() < 0.005
    if colour != "black":  # which takes out all colours alike, and is never taken for stain
        kept = find(pixels, options=TissueOptions(keep_pen=True))
        assert kept.mask[stroke > 0].mean() > 0.9


def test_slide_with_nothing_but_pen_names_the_step_that_emptied_it() -> None:
    pixels = glass()
    pixels[100:140, 20:280] = PENS["blue"]
    assert find(pixels).emptied_by == "pen marks"


def test_textured_tissue_of_a_pens_colour_is_no_pen() -> None:
    """Trichrome's blue collagen: as blue as ink, but made of fibres."""
    amount = -np.log(real_tissue()).mean(axis=2, keepdims=True)
    rough = np.random.default_rng(2).gamma(4, 0.25, (SIDE, SIDE, 1))
    loss = 2.5 * amount * rough * np.array([0.95, 0.60, 0.15])
    check_found(on_glass(np.exp(-loss).astype(np.float32)))


def test_scale_of_the_coarse_image_does_not_change_what_is_found() -> None:
    pixels = np.clip(on_glass(real_tissue()), 0, 255).astype(np.uint8)
    small = np.asarray(cv2.resize(pixels, (150, 150), interpolation=cv2.INTER_AREA), np.uint8)
    opaque = np.full((150, 150), 255, dtype=np.uint8)
    found = find_tissue(small, opaque, downsample=(32.0, 32.0), mpp=(16.0, 16.0))
    assert overlap(found.mask, TRUTH[::2, ::2]) > 0.9


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 2), (7, 600)])
def test_tiny_and_narrow_slides_are_searched(shape: tuple[int, int]) -> None:
    opaque = np.full(shape, 255, dtype=np.uint8)
    for colour in ((240, 240, 240), (200, 120, 170), (0, 0, 0)):
        pixels = np.full((*shape, 3), colour, dtype=np.uint8)
        found = find_tissue(pixels, opaque, downsample=(16.0, 16.0), mpp=(8.0, 8.0))
        assert found.mask.shape == shape
        # 600 x 7 pixels of stain are no speck, the others are.
        assert found.mask.all() == (shape == (7, 600) and colour == (200, 120, 170))
        assert found.mask.any() == found.mask.all()


def test_method_none_takes_the_whole_scan() -> None:
    opaque = np.full((SIDE, SIDE), 255, dtype=np.uint8)
    opaque[:10] = 0
    found = find(glass(), opaque, TissueOptions(method="none"))
    assert found.method == "none"
    assert found.mask.sum() == SIDE * (SIDE - 10)


def test_steps_say_what_each_left() -> None:
    steps = find(on_glass(real_tissue())).steps
    assert [step.name for step in steps] == [
        "outside the scan or black",
        "no stain",
        "pen marks",
        "specks",
    ]
    assert steps[0].share == 1
    assert steps[1].share == pytest.approx(TRUTH.mean(), rel=0.1)


@pytest.mark.parametrize("area", [-1.0, float("nan")])
def test_areas_below_zero_are_refused(area: float) -> None:
    with pytest.raises(UsageError, match="must be 0 or more"):
        TissueOptions(min_object_um2=area)
    with pytest.raises(UsageError, match="must be 0 or more"):
        TissueOptions(max_hole_um2=area)


@lru_cache(maxsize=1)
def library(folder: Path) -> Library:
    return Library(folder)


@pytest.mark.parametrize(
    "condition",
    ["needle cores", "fatty", "IHC", "IHC kidney", "pen red", "JPEG noise", "dust", "everything"],
)
def test_known_masks_of_real_tissue_on_real_glass_are_found(
    condition: str, shared_slides: Path
) -> None:
    made = CONDITIONS[condition](library(shared_slides), np.random.default_rng(1))
    assert overlap(search(made).mask, made.truth) >= ACCEPTED_IOU
