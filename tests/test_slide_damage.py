"""Damaged slides: what is broken fails alone."""

import shutil
import threading
from pathlib import Path
from typing import Literal

import numpy as np
import openslide
import pytest
import tifffile
from openslide import lowlevel

from bioptimus.errors import SlideReadError
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import TileGrid, TileSpec, plan_tiles
from tests import slides

READERS: tuple[Literal["auto", "openslide"], ...] = ("auto", "openslide")
SPEC = TileSpec(size_px=256, mpp=0.5)


def _damaged(path: Path, *, index: int) -> Path:
    slides.write_svs(path, slides.tissue(1024, 1024), mpp=0.5, power=20, factors=(1,))
    return slides.damage_tile(path, index=index)


def _grid(slide: Slide) -> TileGrid:
    return plan_tiles(slide.dimensions, spec=SPEC, mpp=slide.mpp)


@pytest.mark.parametrize("reader", READERS)
def test_one_damaged_tile_leaves_every_other_tile_readable(
    tmp_path: Path, reader: Literal["auto", "openslide"]
) -> None:
    path = _damaged(tmp_path / "a.svs", index=5)
    with Slide.open(path, OpenOptions(reader=reader)) as slide:
        grid = _grid(slide)
        results = slide.tile_reader(SPEC).read_block(list(grid))
    failed = [index for index, result in enumerate(results) if isinstance(result, SlideReadError)]
    assert failed == [5]
    whole = slides.write_svs(
        tmp_path / "whole.svs", slides.tissue(1024, 1024), mpp=0.5, factors=(1,)
    )
    with Slide.open(whole) as slide:
        for index, right in enumerate(slide.tile_reader(SPEC).read_block(list(_grid(slide)))):
            if index != 5:
                np.testing.assert_array_equal(np.asarray(results[index]), np.asarray(right))


def test_damaged_tile_names_slide_place_and_next_step(tmp_path: Path) -> None:
    path = _damaged(tmp_path / "a.svs", index=0)
    with Slide.open(path) as slide, pytest.raises(SlideReadError) as caught:
        slide.tile_reader(SPEC).read(_grid(slide)[0])
    assert "a.svs: level 0 at (0, 0)" in str(caught.value)
    assert "copy it again" in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_damaged_tile_met_by_many_threads_disturbs_none_of_them(
    tmp_path: Path, reader: Literal["auto", "openslide"]
) -> None:
    path = _damaged(tmp_path / "a.svs", index=5)
    with Slide.open(path, OpenOptions(reader=reader)) as slide:
        grid, tiles = _grid(slide), slide.tile_reader(SPEC)
        start = threading.Barrier(8)
        outcomes: list[list[int]] = []

        def read_all() -> None:
            start.wait(10)
            results = tiles.read_block(list(grid))
            outcomes.append([i for i, r in enumerate(results) if isinstance(r, SlideReadError)])

        threads = [threading.Thread(target=read_all) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert outcomes == [[5]] * 8


def test_slide_whose_every_read_fails_opens_and_fails_by_tile(shared_slides: Path) -> None:
    path = shared_slides / "broken" / "unreadable.svs"
    spec = TileSpec(size_px=16, mpp=0.5)
    for reader in READERS:
        with Slide.open(path, OpenOptions(reader=reader)) as slide:
            assert slide.dimensions == (16, 16)
            grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
            (result,) = slide.tile_reader(spec).read_block(list(grid))
            assert isinstance(result, SlideReadError)
            with pytest.raises(SlideReadError):
                slide.coarse_image()


def test_handle_is_opened_again_once_and_the_read_tried_once_more(
    example_slide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read error that passes, as a lost mount does, costs nothing."""
    real, calls = lowlevel._read_region, []

    def fails_first(*args: object) -> None:
        calls.append(args[0])
        if len(calls) == 1:
            raise openslide.OpenSlideError("Input/output error")
        real(*args)

    with Slide.open(example_slide, OpenOptions(reader="openslide")) as slide:
        tiles, tile = slide.tile_reader(SPEC), _grid(slide)[9]
        right = tiles.read(tile)
        monkeypatch.setattr(lowlevel, "_read_region", fails_first)
        np.testing.assert_array_equal(tiles.read(tile), right)
    assert len(calls) == 2
    assert calls[0] is not calls[1]


def test_damaged_coarse_level_is_replaced_by_a_finer_one(tmp_path: Path) -> None:
    pixels = slides.tissue(2048, 2048)
    path = slides.write_svs(tmp_path / "a.svs", pixels, mpp=0.5, power=20)
    slides.damage_level(path, level=2)
    with Slide.open(path) as slide:
        coarse = slide.coarse_image(8.0)
        slide.thumbnail(128)
    assert coarse.level == 1
    assert coarse.pixels.shape == (128, 128, 3)
    assert np.abs(coarse.pixels.astype(int) - slides.half(pixels, 16)).mean() < 2
    assert slide.warnings == [
        "a.svs: level 2 is damaged: a finer level stands in for it; copy the slide again"
    ]


def test_place_that_no_level_has_is_background_and_counts_as_scanned(tmp_path: Path) -> None:
    with Slide.open(_damaged(tmp_path / "a.svs", index=6)) as slide:
        coarse = slide.coarse_image(8.0)
        slide.thumbnail(64)
        background = slide.background
    damaged = np.zeros((64, 64), np.bool_)
    damaged[16:32, 32:48] = True
    np.testing.assert_array_equal(coarse.damaged, damaged)
    assert (coarse.pixels[damaged] == background).all()
    assert (coarse.opaque == 255).all()  # or its tiles would be dropped in silence
    assert slide.warnings == [
        "a.svs: level 0 is damaged: what cannot be read counts as tissue, so that its tiles are "
        "tried; copy the slide again"
    ]


def test_slide_that_lost_its_end_opens_with_a_warning(tmp_path: Path) -> None:
    """Page tables and coarse levels first, pixels last: the other tiles can still be read."""
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(1024, 1024), factors=(1, 4))
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0]
        assert isinstance(page, tifffile.TiffPage)
        first_offset = page.tags[324].valueoffset
    with path.open("r+b") as file:
        file.seek(first_offset)
        file.write((2**31).to_bytes(4, "little"))
    spec = TileSpec(size_px=256, mpp=0.25)
    with Slide.open(path) as slide:
        assert any("1 of its 17 stored tiles" in sentence for sentence in slide.warnings)
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        results = slide.tile_reader(spec).read_block(list(grid))
    assert [isinstance(result, SlideReadError) for result in results] == [True] + [False] * 15


def test_one_unreadable_jpeg2000_tile_fails_alone(tmp_path: Path, shared_slides: Path) -> None:
    path = tmp_path / "a.svs"
    shutil.copyfile(shared_slides / "aperio" / "jp2k-no-mpp.svs", path)
    path.chmod(0o644)
    slides.damage_tile(path, index=8)
    for reader in READERS:
        with Slide.open(path, OpenOptions(reader=reader, mpp_override=0.5)) as slide:
            # 1024 x 1024 of whole stored tiles; seven in a row.
            cells = [_grid(slide)[7 * row + column] for row in range(4) for column in range(4)]
            results = slide.tile_reader(SPEC).read_block(cells)
        failed = [cell.index for cell, r in zip(cells, results, strict=True) if _is_error(r)]
        assert failed == [8]


def _is_error(result: object) -> bool:
    return isinstance(result, SlideReadError)
