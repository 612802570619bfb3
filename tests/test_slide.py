"""Slides: what opening tells, and that tiles hold the pixels they should."""

import math
from pathlib import Path

import numpy as np
import pytest

from bioptimus.errors import ResolutionError, SlideOpenError, SlideReadError, UsageError
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import TileSpec, plan_tiles
from tests import slides


def test_example_slide_tells_its_scale_and_where_it_stands(example_slide: Path) -> None:
    with Slide.open(example_slide) as slide:
        assert slide.mpp == pytest.approx((0.499, 0.499))
        assert slide.resolution.source.startswith("openslide")
        assert slide.dimensions == (2220, 2967)
        assert slide.size_bytes == example_slide.stat().st_size
        assert len(slide.quickhash) == 64


def test_slide_without_openslides_hash_is_told_from_one_of_other_pixels(tmp_path: Path) -> None:
    pixels = slides.noise(600, 600)

    def quickhash() -> str:
        path = slides.write_pyramid(
            tmp_path / "a.tif", pixels, factors=(1,), tile=None, compression=None
        )
        with Slide.open(path) as slide:
            assert "openslide.quickhash-1" not in slide.properties
            return slide.quickhash

    found = [quickhash(), quickhash()]
    for row in (0, 310, 599):
        pixels[row] ^= 1
        found.append(quickhash())
    pixels = pixels[:599]
    found.append(quickhash())
    assert len(set(found)) == len(found) - 1


def test_native_tile_is_the_stored_pixels(tmp_path: Path) -> None:
    pixels = slides.noise(700, 500)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=0.5, factors=(1,))
    spec = TileSpec(size_px=224, mpp=0.5)
    with Slide.open(path) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        tile = slide.tile_reader(spec).read(grid[1])
    np.testing.assert_array_equal(tile, pixels[0:224, 224:448])


def test_overhang_of_an_edge_tile_is_background(tmp_path: Path) -> None:
    pixels = slides.noise(300, 300)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=0.5, factors=(1,))
    spec = TileSpec(size_px=224, mpp=0.5)
    with Slide.open(path) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        tile = slide.tile_reader(spec).read(grid[3])
    np.testing.assert_array_equal(tile[:76, :76], pixels[224:, 224:])
    assert (tile[76:] == 255).all()
    assert (tile[:, 76:] == 255).all()


def test_tile_larger_than_the_slide_holds_the_slide_and_background(tmp_path: Path) -> None:
    pixels = slides.noise(320, 160)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=0.5, factors=(1,))
    spec = TileSpec(size_px=8, mpp=40.0)  # 80 level pixels to each of the tile's
    with Slide.open(path) as slide:
        (place,) = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        tile = slide.tile_reader(spec).read(place)
    np.testing.assert_allclose(tile[:2, :4], slides.half(pixels, 80), atol=1)
    assert (tile[2:] == 255).all()
    assert (tile[:, 4:] == 255).all()


@pytest.mark.parametrize(
    ("side_px", "mpp", "refused"),
    [(64, 64.0, False), (64, 64.1, True), (8192, 0.1, False), (8193, 0.1, True)],
)
def test_tile_of_more_pixels_than_memory_has_room_for_is_refused(
    tmp_path: Path, side_px: int, mpp: float, refused: bool
) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.white(64, 64), mpp=0.5, factors=(1,))
    spec = TileSpec(size_px=side_px, mpp=mpp)
    with Slide.open(path, OpenOptions(allow_upsample=True)) as slide:
        if not refused:
            slide.tile_reader(spec)
            return
        with pytest.raises(ResolutionError, match=r"a\.tif: a tile of .* px of level 0"):
            slide.tile_reader(spec)


def test_blocks_hold_every_tile_once(example_slide: Path) -> None:
    spec = TileSpec()
    with Slide.open(example_slide) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        kept = np.arange(0, len(grid), 3)
        blocks = slide.tile_reader(spec).blocks(grid, kept)
    assert sorted(np.concatenate(blocks).tolist()) == list(range(len(kept)))


def test_coarse_image_covers_the_whole_slide(example_slide: Path) -> None:
    with Slide.open(example_slide) as slide:
        coarse = slide.coarse_image(8.0)
        height, width = coarse.pixels.shape[:2]
        x, y = coarse.downsample
        assert (width - 1) * x < 2220 <= width * x
        assert (height - 1) * y < 2967 <= height * y
        assert x == y == pytest.approx(8 / 0.499, rel=0.1)
        assert (coarse.opaque == 255).all()


@pytest.mark.parametrize("mpp", [(0.25, 0.5), (0.5, 0.25)])
def test_coarse_image_of_uneven_pixels_is_the_mean_of_those_below(
    tmp_path: Path, mpp: tuple[float, float]
) -> None:
    pixels = slides.noise(1003, 1001)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=mpp, factors=(1, 2))
    with Slide.open(path) as slide:
        coarse = slide.coarse_image(8.0)
    x, y = round(8 / mpp[0]), round(8 / mpp[1])
    assert coarse.downsample == pytest.approx((x, y), rel=0.01)
    assert coarse.pixels.shape == (math.ceil(1001 / y), math.ceil(1003 / x), 3)
    for row, column in ((3, 5), (1001 // y - 2, 1003 // x - 2)):
        below = pixels[y * row : y * (row + 1), x * column : x * (column + 1)]
        np.testing.assert_allclose(coarse.pixels[row, column], below.mean(axis=(0, 1)), atol=3)


def test_coarse_image_tells_the_scale_of_a_level_whose_sides_were_rounded_down(
    tmp_path: Path,
) -> None:
    pixels = slides.noise(1603, 1047)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=0.5, factors=(1, 16))
    with Slide.open(path) as slide:
        coarse = slide.coarse_image(8.0)
    assert coarse.level == 1
    assert coarse.downsample == (1603 / 100, 1047 / 65)


def test_coarse_image_of_a_slide_coarser_than_that_is_the_slide(tmp_path: Path) -> None:
    pixels = slides.noise(300, 200)
    path = slides.write_pyramid(tmp_path / "a.tif", pixels, mpp=10.0, factors=(1, 2))
    with Slide.open(path) as slide:
        coarse = slide.coarse_image(8.0)
    assert coarse.downsample == (1.0, 1.0)
    np.testing.assert_array_equal(coarse.pixels, pixels)


def test_coarse_image_is_not_far_from_the_scale_asked_for(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(300, 200), mpp=0.5, factors=(1,))
    with Slide.open(path) as slide:
        for mpp in (0.55, 0.75, 0.99, 1.25):
            assert slide.coarse_image(mpp).downsample == pytest.approx((mpp / 0.5,) * 2, rel=0.1)


@pytest.mark.parametrize("mpp", [0.0, float("nan"), float("inf")])
def test_scale_that_no_picture_has_is_refused(example_slide: Path, mpp: float) -> None:
    with Slide.open(example_slide) as slide, pytest.raises(UsageError, match=f"mpp {mpp}"):
        slide.coarse_image(mpp)


def test_thumbnail_is_no_larger_than_asked_for(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(1003, 701), factors=(1,))
    with Slide.open(path) as slide:
        thumbnail = slide.thumbnail(300)
    assert thumbnail.downsample == (4.0, 4.0)
    assert thumbnail.pixels.shape == (176, 251, 3)


def test_scale_from_a_list_wins_only_where_its_row_has_one() -> None:
    options = OpenOptions(mpp_override=0.5)
    assert options.with_column(None) == options
    assert options.with_column(0.25).mpp_override == 0.25


def test_missing_file_is_an_open_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(SlideOpenError, match="no such file"):
        Slide.open(tmp_path / "x.svs")


def test_slide_without_mpp_opens_and_names_the_flag(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(300, 300), mpp=None)
    with Slide.open(path) as slide, pytest.raises(ResolutionError, match="--mpp-override"):
        _ = slide.mpp
    with Slide.open(path, OpenOptions(mpp_override=0.4)) as slide:
        assert slide.mpp == (0.4, 0.4)


def test_damaged_tile_is_a_read_error_and_the_next_one_still_reads(tmp_path: Path) -> None:
    path = slides.write_svs(tmp_path / "a.svs", slides.tissue(1024, 512), mpp=0.5, factors=(1,))
    slides.damage_tile(path, index=0)
    spec = TileSpec(size_px=256, mpp=0.5)
    with Slide.open(path) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        bad, good = slide.tile_reader(spec).read_block([grid[0], grid[1]])
    assert isinstance(bad, SlideReadError)
    assert "a.svs" in str(bad)
    assert isinstance(good, np.ndarray)


def test_each_tile_of_a_block_that_a_closed_slide_cannot_read_has_its_error(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(700, 500), mpp=0.5, factors=(1,))
    spec = TileSpec(size_px=224, mpp=0.5)
    with Slide.open(path) as slide:
        assert slide.reader == "tiff"
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        reader = slide.tile_reader(spec)
    read = reader.read_block([grid[0], grid[1]])
    assert [type(tile) for tile in read] == [SlideReadError] * 2
