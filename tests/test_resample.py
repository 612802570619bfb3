"""Resampling: area averages, exact sizes, no drift, right phase."""

import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bioptimus.io.resample import resample
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import Tile, TileSpec, plan_tiles
from tests import slides

Pixels = npt.NDArray[np.uint8]


def area_average(
    pixels: Pixels, corner: tuple[float, float], scale: tuple[float, float], size: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """The definition, in float64: each output pixel is the mean of what it covers."""

    def weights(start: float, step: float, count: int, length: int) -> npt.NDArray[np.float64]:
        rows = np.zeros((count, length))
        for index in range(count):
            low, high = start + index * step, start + (index + 1) * step
            for pixel in range(int(low), min(int(np.ceil(high)), length)):
                rows[index, pixel] = max(0.0, min(high, pixel + 1) - max(low, pixel))
        total: npt.NDArray[np.float64] = rows / step
        return total

    across = weights(corner[0], scale[0], size[0], pixels.shape[1])
    down = weights(corner[1], scale[1], size[1], pixels.shape[0])
    mean: npt.NDArray[np.float64] = np.einsum("ya,abc,xb->yxc", down, pixels, across, optimize=True)
    return mean


@pytest.mark.parametrize(
    "scale", [(1.002, 1.002), (1.67, 1.6), (2.0, 2.0), (2.19, 2.19), (3.94, 4)]
)
@pytest.mark.parametrize("corner", [(0.0, 0.0), (3.37, 0.5)])
def test_result_is_the_area_average_on_real_tissue(
    scale: tuple[float, float], corner: tuple[float, float]
) -> None:
    pixels = slides.tissue(1000, 1000)[80:]
    ours = resample(pixels, offset=corner, scale=scale, size=(224, 224))
    reference = area_average(pixels, corner, scale, (224, 224))
    assert ours.shape == (224, 224, 3)
    assert np.abs(ours - reference).mean() <= 0.3  # rounding alone makes 0.25
    assert np.abs(ours - reference).max() <= 1.6


@pytest.mark.parametrize("size", [(1800, 1800), (1543, 1511)])  # the latter just as many as needed
def test_many_pixels_per_output_keep_the_average(size: tuple[int, int]) -> None:
    pixels = slides.tissue(*size)
    ours = resample(pixels, offset=(0.4, 0.0), scale=(25.7, 30.2), size=(60, 50))
    reference = area_average(pixels, (0.4, 0.0), (25.7, 30.2), (60, 50))
    assert np.abs(ours - reference).mean() <= 1.0
    pixels[:] = 255
    assert (resample(pixels, offset=(0.4, 0.0), scale=(25.7, 30.2), size=(60, 50)) == 255).all()


@pytest.mark.parametrize("factor", [(2, 2), (2, 3), (3, 1)])
def test_whole_factors_are_the_mean_of_the_pixels_below(factor: tuple[int, int]) -> None:
    x, y = factor
    pixels = slides.noise(224 * x, 224 * y)
    ours = resample(pixels, offset=(0, 0), scale=factor, size=(224, 224))
    mean = pixels.reshape(224, y, 224, x, 3).mean(axis=(1, 3))
    assert np.abs(ours - mean).max() <= 0.5


def test_scale_one_on_whole_positions_changes_nothing() -> None:
    pixels = slides.noise(300, 300)
    ours = resample(pixels, offset=(7.0, 9.0), scale=(1.0, 1.0), size=(224, 224))
    np.testing.assert_array_equal(ours, pixels[9:233, 7:231])
    out = np.empty((224, 224, 3), np.uint8)
    assert resample(pixels, offset=(7, 9), scale=(1, 1), size=(224, 224), out=out) is out
    np.testing.assert_array_equal(out, ours)


def test_grey_pictures_are_resampled_too() -> None:
    pixels = slides.noise(300, 300)[..., 0]
    ours = resample(pixels, offset=(0.5, 0.5), scale=(1.3, 1.3), size=(100, 100))
    reference = area_average(pixels[..., None], (0.5, 0.5), (1.3, 1.3), (100, 100))[..., 0]
    assert np.abs(ours - reference).max() <= 1.0


def test_upsampling_interpolates_between_centres() -> None:
    pixels = slides.ramp(100, 100)
    ours = resample(pixels, offset=(10.0, 10.0), scale=(0.5, 0.5), size=(100, 100))
    expected = 255 * (10 + (np.arange(100) + 0.5) / 2 - 0.5) / 99
    assert np.abs(ours[50, :, 0] - expected).max() <= 1.0


@pytest.mark.parametrize("mpp", [0.25, 0.2527, 0.228, 0.499, 0.5])
def test_ramp_shows_no_drift_from_the_first_tile_to_the_last(tmp_path: Path, mpp: float) -> None:
    """Red tells x and green tells y: each tile's mean must be that of its place."""
    side = 2000
    path = slides.write_pyramid(
        tmp_path / "a.tif", slides.ramp(side, side), mpp=mpp, factors=(1, 2)
    )
    spec = TileSpec(size_px=64, mpp=0.5)
    with Slide.open(path, OpenOptions(mpp_override=mpp)) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        reader = slide.tile_reader(spec)
        for index in (0, grid.columns - 2, len(grid) - grid.columns - 2):
            tile = grid[index]
            pixels = reader.read(tile).astype(np.float64)
            for channel, start, length in ((0, tile.x, tile.width), (1, tile.y, tile.height)):
                expected = 255 * (start + length / 2 - 0.5) / (side - 1)
                assert pixels[..., channel].mean() == pytest.approx(expected, abs=0.25)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_corner_pixels_of_every_level_are_where_they_belong(tmp_path: Path, level: int) -> None:
    pixels = slides.noise(1024, 768)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=0.5, factors=(1, 2, 8))
    stored = pixels if level == 0 else slides.half(pixels, (1, 2, 8)[level])
    factor = (1, 2, 8)[level]
    height, width = stored.shape[:2]
    with Slide.open(path) as slide:
        reader = slide.tile_reader(TileSpec(size_px=32, mpp=0.5 * factor))
        assert reader.level == level
        for x, y in ((0, 0), (width - 32, 0), (0, height - 32), (width - 32, height - 32)):
            tile = Tile(0, x * factor, y * factor, 32 * factor, 32 * factor)
            np.testing.assert_array_equal(reader.read(tile), stored[y : y + 32, x : x + 32])


def test_tile_of_a_level_whose_sides_were_rounded_down_has_its_share_of_it(tmp_path: Path) -> None:
    pixels = slides.noise(1603, 1047)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=0.5, factors=(1, 16))
    stored = slides.half(pixels, 16)
    with Slide.open(path) as slide:
        reader = slide.tile_reader(TileSpec(size_px=8, mpp=8.4))
        assert reader.level == 1
        tile = reader.read(Tile(0, 1400, 900, 134.4, 134.4))
    by = (1603 / 100, 1047 / 65)
    reference = area_average(
        stored, (1400 / by[0], 900 / by[1]), (16.8 / by[0], 16.8 / by[1]), (8, 8)
    )
    assert np.abs(tile - reference).max() <= 1.6


def test_tile_of_a_real_slide_is_the_area_average_of_its_place(example_slide: Path) -> None:
    spec = TileSpec(size_px=224, mpp=0.75)
    with Slide.open(example_slide) as slide:
        whole = slide.thumbnail(10_000).pixels
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        reader = slide.tile_reader(spec)
        scale = (spec.mpp / slide.mpp[0], spec.mpp / slide.mpp[1])
        for tile in (grid[0], grid[8], grid[3 * grid.columns + 2]):
            covered = whole[tile.y : tile.y + 340, tile.x : tile.x + 340]
            reference = area_average(covered, (0, 0), scale, (224, 224))
            assert np.abs(reader.read(tile) - reference).mean() <= 1.0


@pytest.mark.parametrize("factor", [2, 4])
def test_short_way_for_whole_factors_gives_the_same_pixels(tmp_path: Path, factor: int) -> None:
    """Stored tiles reduced one by one, against the whole crop reduced at once."""
    path = slides.write_svs(tmp_path / "a.svs", slides.tissue(1500, 1300), mpp=0.5, factors=(1,))
    spec = TileSpec(size_px=224, mpp=0.5 * factor)
    with Slide.open(path) as slide, Slide.open(path, OpenOptions(reader="openslide")) as judge:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        for tile in grid:
            fast = slide.tile_reader(spec).read(tile)
            np.testing.assert_array_equal(fast, judge.tile_reader(spec).read(tile))


def test_large_picture_takes_memory_in_proportion_to_its_size() -> None:
    pixels = slides.noise(8, 8000)
    resample(pixels, offset=(0.25, 0.25), scale=(1.13, 1.13), size=(5, 7000))  # warm
    tracemalloc.start()
    try:
        ours = resample(pixels, offset=(0.25, 0.5), scale=(1.13, 1.13), size=(5, 7000))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    reference = area_average(pixels, (0.25, 0.5), (1.13, 1.13), (5, 7000))
    assert np.abs(ours - reference).max() <= 0.51
    assert most < 40 * pixels.nbytes


def test_upsampling_looks_at_the_pixel_before_the_first() -> None:
    pixels = slides.ramp(100, 100)
    ours = resample(pixels, offset=(10.0, 10.0), scale=(0.5, 0.5), size=(100, 100))
    expected = 255 * (10 + 0.25 - 0.5) / 99
    assert np.abs(ours[0, :, 1] - expected).max() <= 0.51
