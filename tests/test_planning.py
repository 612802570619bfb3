"""What is kept of a slide, and what is said when nothing is."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from bioptimus.errors import ResolutionError, TissueError, UsageError
from bioptimus.planning import PlanOptions, plan_slide
from bioptimus.tiles import TileSpec

SPEC = TileSpec(size_px=224, mpp=0.5)


@dataclass(frozen=True)
class FakeImage:
    pixels: npt.NDArray[np.uint8]
    opaque: npt.NDArray[np.uint8]
    downsample: tuple[float, float]
    damaged: npt.NDArray[np.bool_] | None = None


@dataclass
class FakeSlide:
    """A slide of 0.5 µm/px whose coarse image is given."""

    pixels: npt.NDArray[np.uint8]
    name: str = "fake.svs"
    damaged: npt.NDArray[np.bool_] | None = None
    opaque: npt.NDArray[np.uint8] | None = None
    scale: float | None = 0.5
    bounds: tuple[int, int, int, int] | None = None
    overhang_px: int = 0  # of the coarse image beyond the slide
    asked_mpp: list[float] = field(default_factory=list)

    @property
    def dimensions(self) -> tuple[int, int]:
        height, width = self.pixels.shape[:2]
        return width * 16 - self.overhang_px, height * 16 - self.overhang_px

    @property
    def mpp(self) -> tuple[float, float]:
        if self.scale is None:
            raise ResolutionError("fake.svs: no mpp")
        return self.scale, self.scale

    def coarse_image(self, mpp: float = 1.0) -> FakeImage:
        self.asked_mpp.append(mpp)
        opaque = self.opaque
        if opaque is None:
            opaque = np.full(self.pixels.shape[:2], 255, dtype=np.uint8)
        return FakeImage(self.pixels, opaque, (16.0, 16.0), self.damaged)


def slide_with_tissue(*, columns: int = 280, rows: int = 140) -> FakeSlide:
    """10 x 5 tiles of 14 coarse pixels, tissue in the left four columns of tiles."""
    pixels = np.full((rows, columns, 3), 240, dtype=np.uint8)
    pixels[:, : 14 * 4] = (200, 120, 170)
    return FakeSlide(pixels)


def test_tiles_on_tissue_are_kept_in_row_major_order() -> None:
    slide = slide_with_tissue()
    plan = plan_slide(slide, SPEC)
    assert plan.grid.columns == 20
    assert plan.coords.tolist() == [[x * 224, y * 224] for y in range(10) for x in range(4)]
    assert (plan.tissue_ratios >= 0.5).all()
    assert plan.columns.tolist() == [0, 1, 2, 3] * 10
    assert plan.tile(5).x == 224
    assert plan.warnings == ()


def test_more_positions_than_memory_has_room_for_are_refused_before_pixels_are_read() -> None:
    pixels = np.broadcast_to(np.uint8(240), (10_000, 10_000, 3))  # takes no memory
    slide = FakeSlide(pixels)
    with pytest.raises(ResolutionError, match=r"fake\.svs: 19999 x 19999 tiles, one every 4 µm"):
        plan_slide(slide, TileSpec(size_px=16, mpp=0.5, overlap_px=8))
    assert slide.asked_mpp == []


def test_coordinates_are_those_of_the_grid() -> None:
    slide = slide_with_tissue()
    slide.scale = 0.2426
    plan = plan_slide(slide, SPEC, PlanOptions(overlap_px=100, min_tissue=0))
    assert len(plan) == len(plan.grid)
    assert plan.coords.tolist() == [[tile.x, tile.y] for tile in plan.grid]


def test_tissue_is_judged_at_8_um_whatever_the_tile_scale() -> None:
    slide = slide_with_tissue()
    for mpp in (0.5, 1.0, 2.0):
        plan_slide(slide, SPEC, PlanOptions(tile_mpp=mpp))
    assert slide.asked_mpp == [8.0, 8.0, 8.0]


def test_overlap_counts_from_the_first_tile_of_every_row() -> None:
    """FIELD 24."""
    slide = slide_with_tissue()
    plan = plan_slide(slide, SPEC, PlanOptions(overlap_px=112, tissue="none"))
    x = sorted({int(value) for value in plan.coords[:, 0]})
    assert x == [112 * column for column in range(39)]
    assert len(plan) == 39 * 19


def test_kept_tiles_lie_on_one_lattice_at_every_scale() -> None:
    """FIELD 25: no row is missing because of another scale."""
    slide = slide_with_tissue()
    for mpp in (0.5, 1.0, 2.0, 0.77):
        plan = plan_slide(slide, SPEC, PlanOptions(tissue="none", tile_mpp=mpp))
        stride = 224 * mpp / 0.5
        for axis, tiles in ((0, plan.columns), (1, plan.rows)):
            assert plan.coords[:, axis].tolist() == [round(n * stride) for n in tiles.tolist()]
            assert sorted(set(tiles.tolist())) == list(range(int(tiles.max()) + 1))


@pytest.mark.parametrize("overlap", [224, 225, 1000, -1])
def test_overlap_as_large_as_the_tile_is_refused(overlap: int) -> None:
    """FIELD 32: it would never end."""
    with pytest.raises(UsageError, match="overlap"):
        plan_slide(slide_with_tissue(), SPEC, PlanOptions(overlap_px=overlap))


def test_no_overlap_at_all_can_be_asked_of_a_model_that_has_some() -> None:
    model = TileSpec(size_px=224, mpp=0.5, overlap_px=112)
    assert PlanOptions(overlap_px=0).applied_to(model).overlap_px == 0
    assert PlanOptions().applied_to(model) == model


def test_pen_counts_as_tissue_where_that_is_asked_for() -> None:
    pixels = np.full((140, 280, 3), 240, dtype=np.uint8)
    pixels[14:42, 28:84] = (35, 55, 150)
    assert len(plan_slide(FakeSlide(pixels), SPEC)) == 0
    assert len(plan_slide(FakeSlide(pixels), SPEC, PlanOptions(keep_pen=True))) == 8


def test_blank_slide_plans_no_tiles_and_says_why() -> None:
    """FIELD 90."""
    plan = plan_slide(FakeSlide(np.full((100, 100, 3), 255, dtype=np.uint8)), SPEC)
    assert len(plan) == 0
    assert plan.coords.shape == (0, 2)
    assert plan.warnings == ("no tissue: nothing was left after the step 'no stain'",)
    strip = plan_slide(FakeSlide(np.full((100, 5, 3), 255, dtype=np.uint8)), SPEC)
    assert strip.warnings == plan.warnings  # narrower than a tile, and no thumbnail


def test_tissue_too_small_to_be_some_is_told_with_the_scale_that_makes_it_so() -> None:
    pixels = np.full((100, 100, 3), 240, dtype=np.uint8)
    pixels[40:50, 40:50] = (200, 120, 170)
    plan = plan_slide(FakeSlide(pixels), SPEC)
    assert plan.warnings == (
        "no tissue: every stained piece is smaller than 0.04 mm² at 0.5 µm/px; if that scale is "
        "wrong, pass --mpp-override",
    )


def test_places_that_cannot_be_read_are_planned_so_that_their_loss_is_told() -> None:
    damaged = np.zeros((140, 140), dtype=np.bool_)
    damaged[:14, 28:42] = True
    plan = plan_slide(FakeSlide(np.full((140, 140, 3), 240, dtype=np.uint8), damaged=damaged), SPEC)
    assert plan.coords.tolist() == [[448, 0]]


def test_tissue_too_thin_for_any_tile_is_told_with_the_best_share() -> None:
    pixels = np.full((140, 140, 3), 240, dtype=np.uint8)
    pixels[:, 70:77] = (200, 120, 170)
    plan = plan_slide(FakeSlide(pixels), SPEC, PlanOptions(min_tissue=0.9))
    assert len(plan) == 0
    assert "no tile has 0.9 of tissue or more, the best has 0." in plan.warnings[0]


def test_tile_exactly_at_the_threshold_is_kept() -> None:
    slide = slide_with_tissue()
    mask = np.zeros((140, 280), dtype=bool)
    mask[:14, :7] = True
    mask[14:28, :6] = True
    plan = plan_slide(slide, SPEC, PlanOptions(min_tissue=0.5), segmenter=lambda _: mask)
    assert plan.kept.tolist() == [0]
    assert plan.mask.method == "model"


def test_what_a_segmenter_finds_outside_the_scan_is_not_tissue() -> None:
    slide = slide_with_tissue()
    slide.opaque = np.full((140, 280), 127, dtype=np.uint8)  # by less than half
    slide.opaque[:14, :28] = 128
    plan = plan_slide(slide, SPEC, segmenter=lambda image: image.opaque > 0)
    assert plan.kept.tolist() == [0, 1]


def test_segmenter_that_returns_another_shape_is_refused() -> None:
    with pytest.raises(TissueError, match=r"fake\.svs: the tissue model returned a mask of"):
        plan_slide(slide_with_tissue(), SPEC, segmenter=lambda _: np.zeros((2, 2), dtype=bool))


def test_mask_file_takes_the_place_of_the_search(tmp_path: Path) -> None:
    mask = np.zeros((140, 280), dtype=np.uint8)
    mask[:14, 14 * 3 : 14 * 6] = 255  # two of them on glass
    Image.fromarray(mask).save(tmp_path / "mask.png")
    plan = plan_slide(slide_with_tissue(), SPEC, PlanOptions(tissue=str(tmp_path / "mask.png")))
    assert plan.kept.tolist() == [3, 4, 5]
    np.testing.assert_array_equal(plan.mask.mask, mask > 0)


@pytest.mark.parametrize("finer", [1, 3])
def test_what_a_mask_file_has_outside_the_scan_is_not_tissue(tmp_path: Path, finer: int) -> None:
    slide = slide_with_tissue()
    slide.opaque = np.zeros((140, 280), dtype=np.uint8)
    slide.opaque[14:42, 14 * 2 : 14 * 4] = 255
    path = tmp_path / "mask.png"
    Image.fromarray(np.full((140 * finer, 280 * finer), 255, dtype=np.uint8)).save(path)
    options = PlanOptions(tissue=str(path))
    plan = plan_slide(slide, SPEC, options)
    assert plan.kept.tolist() == [20 + 2, 20 + 3, 40 + 2, 40 + 3]
    assert plan.mask.mask.shape == (140 * finer, 280 * finer)
    assert (plan.tissue_ratios == 1).all()
    # What cannot be read is told tile by tile.
    slide.damaged = np.zeros((140, 280), dtype=np.bool_)
    slide.damaged[:14, :14] = True
    assert plan_slide(slide, SPEC, options).kept.tolist()[0] == 0
    slide.opaque[:], slide.damaged = 0, None
    (empty,) = plan_slide(slide, SPEC, options).warnings
    assert empty == "no tissue: nothing was left after the step 'outside the scan'"


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ((112, 44, 160, 60), "21% of the mask"),
        ((106, 0, 174, 140), "6% of the mask"),
        ((0, 0, 280, 78), "5% of the mask"),
        ((104, 0, 176, 140), None),
    ],
)
def test_share_of_a_mask_outside_the_scanned_area_is_told(
    tmp_path: Path, bounds: tuple[int, int, int, int], told: str | None
) -> None:
    slide = slide_with_tissue()
    x, y, width, height = (16 * pixels for pixels in bounds)
    slide.bounds = (x, y, width, height)
    mask = np.zeros((140, 280), dtype=np.uint8)
    path = tmp_path / "mask.png"
    Image.fromarray(mask).save(path)
    options = PlanOptions(tissue=str(path))
    (empty,) = plan_slide(slide, SPEC, options).warnings
    assert empty.startswith("no tissue")
    mask[40:80, 100:200] = 1
    Image.fromarray(mask).save(path)
    warnings = plan_slide(slide, SPEC, options).warnings
    assert [words.partition(" lies")[0] for words in warnings] == ([told] if told else [])


def test_slide_without_scale_fails_before_its_pixels_are_read() -> None:
    slide = slide_with_tissue()
    slide.scale = None
    with pytest.raises(ResolutionError):
        plan_slide(slide, SPEC)
    assert slide.asked_mpp == []


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_min_tissue_must_be_a_share(share: float) -> None:
    with pytest.raises(UsageError, match="min tissue"):
        PlanOptions(min_tissue=share)


def test_coordinates_are_computed_once_however_often_they_are_asked_for() -> None:
    """One lookup per tile must not cost a pass over all tiles."""
    plan = plan_slide(FakeSlide(np.full((140, 140, 3), 128, dtype=np.uint8)), SPEC)
    assert plan.coords is plan.coords


@pytest.mark.parametrize("finer", [1, 3])
def test_of_a_mask_only_what_the_search_finds_is_kept_where_that_is_asked_for(
    tmp_path: Path, finer: int
) -> None:
    slide = slide_with_tissue()  # in columns 0 to 3
    slide.bounds = (0, 0, 1000, 2240)
    drawn = np.zeros((140, 280), dtype=np.uint8)
    drawn[: 14 * 2, 14 * 2 :] = 1  # two rows of tiles, columns 2 to 19
    path = tmp_path / "mask.png"
    Image.fromarray(drawn.repeat(finer, axis=0).repeat(finer, axis=1)).save(path)
    alone = plan_slide(slide, SPEC, PlanOptions(tissue=str(path)))
    assert len(alone) == 2 * 18
    plan = plan_slide(slide, SPEC, PlanOptions(tissue=str(path), search_in_mask=True))
    assert plan.coords.tolist() == [[x * 224, y * 224] for y in range(2) for x in (2, 3)]
    assert plan.mask.method == "file and auto"
    assert "of the mask lies outside the scanned area" in alone.warnings[0]
    assert plan.warnings == alone.warnings
    every = PlanOptions(search_in_mask=True)
    assert len(plan_slide(slide, SPEC, every)) == len(plan_slide(slide, SPEC))
    drawn[:] = 0
    drawn[:, 14 * 10 :] = 1  # glass alone
    Image.fromarray(drawn).save(path)
    empty = plan_slide(slide, SPEC, PlanOptions(tissue=str(path), search_in_mask=True))
    assert len(empty) == 0
    assert empty.warnings[-1].endswith("nothing was left after the step 'mask file mask.png'")


@pytest.mark.parametrize("size", [(112, 55), (840, 420)])
def test_mask_of_another_scale_is_asked_at_the_middle_of_each_pixel(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    slide = slide_with_tissue()
    slide.overhang_px = 10
    drawn = np.random.default_rng(0).integers(0, 2, size[::-1], dtype=np.uint8)
    Image.fromarray(drawn).save(tmp_path / "mask.png")
    options = PlanOptions(tissue=str(tmp_path / "mask.png"), search_in_mask=True)
    plan = plan_slide(slide, SPEC, options, segmenter=lambda image: image.opaque > 0)
    rows = [min(int((row + 0.5) * 16 * size[1] / 2230), size[1] - 1) for row in range(140)]
    columns = [min(int((x + 0.5) * 16 * size[0] / 4470), size[0] - 1) for x in range(280)]
    np.testing.assert_array_equal(plan.mask.mask, drawn[rows][:, columns] == 1)


@pytest.mark.parametrize("tissue", ["none", "tissue.pt2", "TISSUE.PT2"])
def test_a_search_in_what_is_no_mask_is_refused(tissue: str) -> None:
    with pytest.raises(UsageError, match=f"search in mask: tissue {tissue} is no mask"):
        PlanOptions(tissue=tissue, search_in_mask=True)
