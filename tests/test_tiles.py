"""The lattice: anchored at the corner, no drift, every pixel covered."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bioptimus.errors import ResolutionError, UsageError
from bioptimus.tiles import Tile, TileSpec, plan_tiles


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"size_px": 0}, "tile size 0 px"),
        ({"mpp": 0.0}, "tile mpp 0"),
        ({"mpp": float("nan")}, "tile mpp nan"),
        ({"mpp": float("inf")}, "tile mpp inf"),
        ({"size_px": 256, "overlap_px": 256}, "overlap 256 px"),
        ({"overlap_px": -1}, "overlap -1 px"),
    ],
)
def test_tile_that_no_lattice_can_have_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        TileSpec(**values)


@pytest.mark.parametrize("mpp", [0.0, -1.0, float("nan"), float("inf")])
def test_slide_scale_must_be_positive_and_finite(mpp: float) -> None:
    with pytest.raises(ResolutionError, match="slide mpp"):
        plan_tiles((100, 100), spec=TileSpec(), mpp=(mpp, 0.5))


def test_step_of_less_than_one_slide_pixel_is_refused() -> None:
    spec = TileSpec(size_px=20, mpp=0.5, overlap_px=10)
    assert plan_tiles((30, 30), spec=spec, mpp=(5.0, 5.0)).x(7) == 7
    with pytest.raises(ResolutionError, match="coarser than one step of the tiles"):
        plan_tiles((30, 30), spec=spec, mpp=(5.0, 5.01))


def test_slide_without_pixels_is_refused() -> None:
    with pytest.raises(UsageError, match="slide of 100 x 0 px"):
        plan_tiles((100, 0), spec=TileSpec(), mpp=(0.5, 0.5))


def test_tile_side_follows_mpp_not_magnification_buckets() -> None:
    grid = plan_tiles((10_000, 10_000), spec=TileSpec(size_px=512, mpp=0.5), mpp=(0.265, 0.265))
    assert round(grid.tile_level0[0]) == 966


def test_slide_smaller_than_a_tile_has_one_tile() -> None:
    grid = plan_tiles((16, 16), spec=TileSpec(), mpp=(0.5, 0.5))
    assert list(grid) == [Tile(index=0, x=0, y=0, width=224.0, height=224.0)]


def test_exact_fit_has_no_overhanging_tile_and_one_more_pixel_has() -> None:
    spec = TileSpec(size_px=224, mpp=0.5)
    assert plan_tiles((448, 224), spec=spec, mpp=(0.5, 0.5)).columns == 2
    assert plan_tiles((449, 224), spec=spec, mpp=(0.5, 0.5)).columns == 3
    # Tiles of 224.3 px: a third would begin where the slide ends.
    assert plan_tiles((449, 224), spec=spec, mpp=(112 / 224.3, 0.5)).columns == 2


def test_step_is_tile_minus_overlap_from_the_first_column_on() -> None:
    spec = TileSpec(size_px=256, mpp=0.5, overlap_px=128)
    grid = plan_tiles((1024, 256), spec=spec, mpp=(0.5, 0.5))
    assert [tile.x for tile in grid] == [0, 128, 256, 384, 512, 640, 768]


def test_axes_keep_their_own_scale() -> None:
    grid = plan_tiles((1000, 1000), spec=TileSpec(size_px=100, mpp=1.0), mpp=(0.5, 0.25))
    assert grid.tile_level0 == (200.0, 400.0)
    assert (grid.columns, grid.rows) == (5, 3)
    assert [tile.x for tile in grid[:5]] == [0, 200, 400, 600, 800]
    assert [tile.y for tile in grid[::5]] == [0, 400, 800]


def test_position_beyond_the_last_one_is_an_index_error() -> None:
    grid = plan_tiles((448, 448), spec=TileSpec(), mpp=(0.5, 0.5))
    assert [tile.index for tile in grid[-2:]] == [2, 3]
    for index in (4, -5):
        with pytest.raises(IndexError, match="of 4"):
            grid[index]


@given(
    width=st.integers(1, 200_000),
    height=st.integers(1, 200_000),
    mpp=st.floats(0.05, 2.0),
    size=st.integers(8, 1024),
    overlap_share=st.floats(0, 0.9),
)
def test_lattice_covers_the_slide_without_drift(
    width: int, height: int, mpp: float, size: int, overlap_share: float
) -> None:
    spec = TileSpec(size_px=size, mpp=0.5, overlap_px=int(size * overlap_share))
    if spec.stride_px * spec.mpp / mpp < 1:
        return
    grid = plan_tiles((width, height), spec=spec, mpp=(mpp, mpp))
    last = grid[-1]
    assert len(grid) == grid.columns * grid.rows
    assert last.x + last.width >= width - 1
    assert last.y + last.height >= height - 1
    assert last.x < width
    assert last.y < height
    assert abs(last.x - (grid.columns - 1) * grid.stride_level0[0]) <= 0.5
    assert grid[len(grid) // 2].index == len(grid) // 2
