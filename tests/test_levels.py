"""Which level is read for which scale."""

from pathlib import Path

import pytest

from bioptimus.errors import ResolutionError
from bioptimus.io.levels import choose_level, finer_levels
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import TileSpec
from tests import slides

INEXACT = [(1.0, 1.0), (4.0039, 4.0078), (16.016, 16.094)]


@pytest.mark.parametrize(
    ("downsamples", "wanted", "level"),
    [
        (INEXACT, 4.0, 1),
        (INEXACT, 16.0, 2),
        (INEXACT, 3.9, 0),
        ([(1.0, 1.0), (3.994, 3.994)], 4.0, 1),
        ([(1.0, 1.0), (4.0, 4.0)], 2.19, 0),
        ([(1.0, 1.0), (2.0, 2.0)], 1.0 / 1.02, 0),
        ([(1.0, 1.0)], 100.0, 0),
        ([(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)], 3.99, 2),
        ([(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)], 3.9, 1),
        ([(1.0, 1.0), (4.0, 4.0), (2.0, 2.0)], 4.0, 1),
    ],
)
def test_coarsest_level_that_is_not_too_coarse(
    downsamples: list[tuple[float, float]], wanted: float, level: int
) -> None:
    choice = choose_level(downsamples, (wanted, wanted))
    assert choice.level == level
    x, y = downsamples[level]
    assert choice.scale == pytest.approx((wanted / x, wanted / y))


def test_upsampling_is_refused_unless_allowed() -> None:
    with pytest.raises(ResolutionError, match=r"a\.svs.*--allow-upsample"):
        choose_level([(1.0, 1.0)], (0.9, 0.9), name="a.svs")
    choice = choose_level([(1.0, 1.0)], (0.9, 0.9), allow_upsample=True)
    assert (choice.level, choice.scale) == (0, (0.9, 0.9))


def test_one_axis_too_coarse_is_too_coarse() -> None:
    assert choose_level([(1.0, 1.0), (2.0, 2.5)], (2.0, 2.0)).level == 0


def test_finer_levels_come_coarsest_first() -> None:
    assert finer_levels(INEXACT, 2) == [2, 1, 0]
    assert finer_levels(INEXACT, 1) == [1, 0]


def test_floor_sized_pyramid_is_read_at_the_level_that_was_meant(tmp_path: Path) -> None:
    """Where OpenSlide's own choice is level 0 and sixteen times the pixels."""
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(2050, 1030), mpp=0.25)
    with Slide.open(path) as slide:
        assert slide.tile_reader(TileSpec(mpp=1.0)).level == 1
        assert slide.tile_reader(TileSpec(mpp=4.0)).level == 2


def test_scale_between_levels_is_read_from_the_finer_one_and_said(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(1200, 1200), mpp=0.228)
    with Slide.open(path) as slide:
        reader = slide.tile_reader(TileSpec(mpp=0.5))
        assert reader.level == 0
        assert reader.scale == pytest.approx((0.5 / 0.228,) * 2)


def test_slide_coarser_than_the_tile_is_refused(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(600, 600), mpp=1.0)
    with Slide.open(path) as slide, pytest.raises(ResolutionError, match="--allow-upsample"):
        slide.tile_reader(TileSpec(mpp=0.5))
    with Slide.open(path, OpenOptions(allow_upsample=True)) as slide:
        assert slide.tile_reader(TileSpec(mpp=0.5)).scale == (0.5, 0.5)
