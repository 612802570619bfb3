"""The share of a tile under the mask is an area, in one frame, whatever the scales."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bioptimus.tiles import TileSpec, plan_tiles
from bioptimus.tissue import TissueMask, full_mask, tissue_ratios


def make_mask(mask: "np.typing.NDArray[np.bool_]", downsample: tuple[float, float]) -> TissueMask:
    return TissueMask(mask=mask, downsample=downsample, method="file")


def test_a_tile_exactly_half_covered_has_exactly_half() -> None:
    mask = np.zeros((64, 64), dtype=bool)
    mask[:, :35] = True  # 35 px of 32 level-0 px = 1120 = 2.5 tiles of 448
    grid = plan_tiles((2048, 2048), spec=TileSpec(size_px=224, mpp=0.5), mpp=(0.25, 0.25))
    ratios = tissue_ratios(make_mask(mask, (32.0, 32.0)), grid).reshape(grid.rows, grid.columns)
    assert ratios[0].tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert ratios.dtype == np.float32


@pytest.mark.parametrize("mpp", [0.1121, 0.2426, 0.265, 0.499])
def test_half_covered_tile_reaches_a_threshold_of_half_at_odd_scales(mpp: float) -> None:
    grid = plan_tiles((5000, 5000), spec=TileSpec(size_px=224, mpp=0.5), mpp=(mpp, mpp))
    side = grid.tile_level0[1]
    mask = np.ones((40, 40), dtype=bool)
    mask[7:] = False
    ratios = tissue_ratios(make_mask(mask, (side / 14, side / 14)), grid)
    assert ratios[0] >= 0.5
    assert ratios[0] == pytest.approx(0.5, abs=1e-7)


def test_mask_is_tested_in_level0_pixels_whatever_the_tile_scale() -> None:
    """FIELD 31: a half-tissue checker asked at twice the µm/px."""
    squares = np.indices((16, 16)).sum(axis=0) % 2 == 0
    mask = make_mask(np.kron(squares, np.ones((14, 14))) > 0, (32.0, 32.0))
    fine = plan_tiles((7168, 7168), spec=TileSpec(size_px=224, mpp=0.5), mpp=(0.25, 0.25))
    coarse = plan_tiles((7168, 7168), spec=TileSpec(size_px=224, mpp=1.0), mpp=(0.25, 0.25))
    assert (tissue_ratios(mask, fine).reshape(16, 16) == squares).all()
    assert (tissue_ratios(mask, coarse) == 0.5).all()


def test_outside_of_the_slide_is_not_tissue() -> None:
    grid = plan_tiles((672, 448), spec=TileSpec(size_px=224, mpp=0.5), mpp=(0.25, 0.25))
    # The mask's last pixels reach past the slide, as whole numbers of coarse pixels do.
    ratios = tissue_ratios(make_mask(np.ones((15, 22), dtype=bool), (32.0, 32.0)), grid)
    assert ratios.tolist() == [1.0, 0.5]


def test_origin_that_is_not_the_scans_is_the_slides_corner() -> None:
    """FIELD 30: one frame, level 0 from the slide's corner; the scan's bounds only mask."""
    opaque = np.zeros((40, 40), dtype=np.uint8)
    opaque[20:, 20:] = 255
    mask = full_mask(opaque, (32.0, 32.0))
    grid = plan_tiles((1280, 1280), spec=TileSpec(size_px=320, mpp=0.5), mpp=(0.25, 0.25))
    assert tissue_ratios(mask, grid).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_tile_mostly_outside_the_scan_is_not_tissue() -> None:
    """FIELD 51: the opaque share counts, also where no tissue is looked for."""
    opaque = np.zeros((14, 28), dtype=np.uint8)
    opaque[:, 12:] = 255
    opaque[:, 11] = 127
    grid = plan_tiles((896, 448), spec=TileSpec(size_px=224, mpp=0.5), mpp=(0.25, 0.25))
    mask = full_mask(opaque, (32.0, 32.0))
    assert tissue_ratios(mask, grid).tolist() == pytest.approx([2 / 14, 1.0])
    assert mask.method == "none"


@given(
    columns=st.integers(1, 12),
    rows=st.integers(1, 12),
    downsample=st.floats(0.7, 40),
    size=st.integers(1, 60),
    overlap=st.floats(0, 0.9),
    scale=st.floats(0.3, 3),
    seed=st.integers(0, 9),
)
def test_ratio_is_the_area_counted_pixel_by_pixel(
    columns: int, rows: int, downsample: float, size: int, overlap: float, scale: float, seed: int
) -> None:
    values = np.random.default_rng(seed).random((rows, columns)) < 0.5
    dimensions = (max(1, int(columns * downsample)), max(1, int(rows * downsample)))
    spec = TileSpec(size_px=size * 4, mpp=scale, overlap_px=int(size * overlap))
    grid = plan_tiles(dimensions, spec=spec, mpp=(0.5, 0.4))
    ratios = tissue_ratios(make_mask(values, (downsample, downsample)), grid)
    assert len(ratios) == len(grid)
    for tile in list(grid)[:40]:
        expected = 0.0
        right = min(tile.x + tile.width, dimensions[0])
        lower = min(tile.y + tile.height, dimensions[1])
        for row, column in zip(*np.nonzero(values), strict=True):
            wide = min(right, (column + 1) * downsample) - max(tile.x, column * downsample)
            high = min(lower, (row + 1) * downsample) - max(tile.y, row * downsample)
            expected += max(0.0, wide) * max(0.0, high)
        assert ratios[tile.index] == pytest.approx(expected / (tile.width * tile.height), abs=1e-5)
