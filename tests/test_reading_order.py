"""Blocks and the cache: every tile once, every stored tile decoded about once, memory flat."""

import os
import threading
import tracemalloc
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import imagecodecs
import numpy as np
import pytest
import tifffile

from bioptimus.errors import SlideReadError
from bioptimus.io.blocks import band_rows, blocks_of, most_band_rows
from bioptimus.io.cache import TileCache
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import Tile, TileSpec, plan_tiles
from tests import slides


@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 33, 1000])
def test_blocks_hold_each_position_once(count: int) -> None:
    kept = np.sort(np.random.default_rng(count).choice(4000, count, replace=False))
    blocks = blocks_of(kept.astype(np.int64), 57, 8)
    positions = [int(position) for block in blocks for position in block]
    assert sorted(positions) == list(range(count))
    assert all(0 < len(block) <= 32 for block in blocks)


def test_small_slides_give_blocks_enough_for_several_threads() -> None:
    assert len(blocks_of(np.arange(73), 9, 32)) >= 4


@pytest.mark.parametrize(
    ("stride", "stored", "rows"), [(224, 256, 8), (448, 256, 4), (256, 256, 1), (240, 512, 32)]
)
def test_bands_end_where_stored_tiles_end(stride: float, stored: int, rows: int) -> None:
    assert band_rows(stride, stored) == rows
    assert rows * stride % stored == 0


def test_bands_of_strips_are_low_enough_for_the_cache() -> None:
    # 50,000 px wide strips: a row of 224 px tiles takes 34 MB.
    assert most_band_rows(224, column_px=50_000, cache_bytes=48 << 20) == 1
    assert most_band_rows(224, column_px=2 * 256 + 224, cache_bytes=48 << 20) == 32


def test_stored_tiles_that_lie_side_by_side_come_with_one_read(
    example_slide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TileSpec(size_px=224, mpp=0.499)
    with Slide.open(example_slide) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        reader = slide.tile_reader(spec)
        reads: list[int] = []
        real = os.pread

        def counted(file: int, length: int, offset: int) -> bytes:
            reads.append(length)
            return real(file, length, offset)

        monkeypatch.setattr(os, "pread", counted)
        block = [grid[row * grid.columns + column] for row in range(4) for column in range(4)]
        assert not any(isinstance(result, Exception) for result in reader.read_block(block))
    # 4 x 4 stored tiles, of which each row lies together in the file.
    assert len(reads) == 4


def _counting_decoder(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    decoded: list[int] = []
    real = imagecodecs.jpeg8_decode

    def counted(*args: Any, **options: Any) -> Any:
        decoded.append(1)
        return real(*args, **options)

    monkeypatch.setattr(imagecodecs, "jpeg8_decode", counted)
    return decoded


def test_level_that_fits_is_decoded_once_for_its_pictures_and_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = slides.write_pyramid(
        tmp_path / "a.tif", slides.noise(2048, 2048), mpp=0.5, factors=(1,), compression="jpeg"
    )
    with Slide.open(path) as slide:
        decoded = _counting_decoder(monkeypatch)
        slide.coarse_image(8.0)
        slide.thumbnail()
        spec = TileSpec(size_px=224, mpp=0.5)
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        slide.tile_reader(spec).read_block(list(grid))
        # Those that were compared with OpenSlide's are there before.
        assert 0 < len(decoded) <= 64


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("tile_px", "most"), [(224, 1.0), (200, 1.15)])
def test_each_stored_tile_is_decoded_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, tile_px: int, most: float
) -> None:
    path = tmp_path / "a.tif"
    # 28 x 40 stored tiles, all the same: only how often they are decoded matters.
    (stored,) = (imagecodecs.jpeg8_encode(slides.tissue(256, 256), level=80),)
    tifffile.imwrite(
        path,
        (bytes(stored) for _ in range(28 * 40)),
        shape=(40 * 256, 28 * 256, 3),
        dtype=np.uint8,
        tile=(256, 256),
        compression="jpeg",
        photometric="ycbcr",
        subsampling=(2, 2),
        resolution=(20000, 20000),
        resolutionunit="CENTIMETER",
        metadata=None,
    )
    spec = TileSpec(size_px=tile_px, mpp=0.5)
    with Slide.open(path) as slide:
        assert slide.reader == "tiff"
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        reader = slide.tile_reader(spec)
        blocks = iter(reader.blocks(grid, np.arange(len(grid))))
        decoded, lock = _counting_decoder(monkeypatch), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    block = next(blocks, None)
                if block is None:
                    return
                reader.read_block([grid[int(index)] for index in block])

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert len(decoded) <= most * 28 * 40 + 1


@pytest.mark.parametrize(("tile_mpp", "overlap"), [(0.25, 0), (0.25, 56), (0.5, 0), (0.5, 112)])
def test_neighbours_read_together_have_the_pixels_of_tiles_read_alone(
    tmp_path: Path, tile_mpp: float, overlap: int
) -> None:
    path = slides.write_svs(tmp_path / "a.svs", slides.tissue(1500, 1300))
    spec = TileSpec(size_px=224, mpp=tile_mpp, overlap_px=overlap)
    with Slide.open(path) as slide, Slide.open(path) as another:
        assert slide.reader == "tiff"
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        together = _pixels(slide.tile_reader(spec).read_block(list(grid)))
        alone = another.tile_reader(spec)
        assert len(together) == len(grid)
        for tile, pixels in reversed(list(zip(grid, together, strict=True))):
            assert np.array_equal(pixels, alone.read(tile))


def _pixels(results: list[slides.Pixels | SlideReadError]) -> list[slides.Pixels]:
    return [result for result in results if isinstance(result, np.ndarray)]


READERS: tuple[Literal["auto", "openslide"], ...] = ("auto", "openslide")


@pytest.mark.parametrize("reader", READERS)
def test_tile_between_level_pixels_is_not_that_of_the_next_whole_ones(
    tmp_path: Path, reader: Literal["auto", "openslide"]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    path = slides.write_pyramid(tmp_path / "noise.tif", noise, factors=(1, 4))
    with Slide.open(path, OpenOptions(reader=reader)) as slide:
        at_level = slide.tile_reader(TileSpec(size_px=64, mpp=1.0))  # as level 1 is stored
        pixels = at_level.read(Tile(0, 64, 128, 256, 256)).astype(float)
        places = [(64, 128), (66, 128), (64, 130), (68, 128)]
        found = at_level.read_block([Tile(i, *xy, 256, 256) for i, xy in enumerate(places)])
    assert at_level.level == 1
    whole, right, below, next_one = (tile.astype(float) for tile in _pixels(found))
    np.testing.assert_array_equal(whole, pixels)
    np.testing.assert_array_equal(next_one[:, :-1], pixels[:, 1:])
    # Half a pixel on, each is the mean of two.
    assert np.abs(right[:, :-1] - (pixels[:, :-1] + pixels[:, 1:]) / 2).max() <= 1
    assert np.abs(below[:-1] - (pixels[:-1] + pixels[1:]) / 2).max() <= 1


@pytest.mark.parametrize("reader", READERS)
def test_threads_read_the_same_pixels_as_one_alone(
    example_slide: Path, reader: Literal["auto", "openslide"]
) -> None:
    spec = TileSpec(size_px=224, mpp=0.7)
    with Slide.open(example_slide, OpenOptions(reader=reader)) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        tiles = slide.tile_reader(spec)
        some = [grid[index] for index in range(0, len(grid), 2)]
        right = tiles.read_block(some)
        same: list[bool] = []

        def compare() -> None:
            found = tiles.read_block(some)
            same.append(np.array_equal(np.stack(_pixels(found)), np.stack(_pixels(right))))

        workers = [threading.Thread(target=compare) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    assert same == [True] * 8


# ---- the cache ----


def _read(
    cache: TileCache, key: Hashable, decode: Callable[[slides.Pixels], None], size: int = 300
) -> slides.Pixels:
    slot = cache.acquire(key, (size,), decode)
    try:
        return slot.pixels.copy()
    finally:
        cache.release(slot)


def _fill(value: int, out: slides.Pixels) -> None:
    out[:] = value


def _never(_out: slides.Pixels) -> None:
    pytest.fail("decoded twice")


def test_cache_stays_below_its_limit_and_drops_the_oldest() -> None:
    cache = TileCache(1000)
    for key in range(10):
        assert (_read(cache, key, partial(_fill, key)) == key).all()
        assert cache.held_bytes <= 1000
    assert (_read(cache, 9, _never) == 9).all()
    fresh: list[int] = []

    def decode(out: slides.Pixels) -> None:
        fresh.append(1)
        out[:] = 0

    _read(cache, 0, decode)
    assert fresh == [1]


def test_tiles_of_several_sizes_share_the_limit() -> None:
    cache = TileCache(1000)
    for key in range(30):
        size = (100, 333, 700)[key % 3]
        assert (_read(cache, key, partial(_fill, key), size) == key).all()
        assert cache.held_bytes <= 1000


def test_tile_larger_than_the_cache_is_still_kept_while_it_is_the_newest() -> None:
    cache = TileCache(10)
    _read(cache, "a", partial(_fill, 1))
    assert _read(cache, "a", _never).size == 300


def test_memory_of_a_tile_being_read_is_not_given_away() -> None:
    cache = TileCache(600)
    held = cache.acquire("held", (300,), partial(_fill, 7))
    for key in range(10):
        _read(cache, key, partial(_fill, key))
    assert (held.pixels == 7).all()
    cache.clear()
    _read(cache, "other", partial(_fill, 8))
    assert (held.pixels == 7).all()
    cache.release(held)


def test_failed_decode_is_not_remembered() -> None:
    cache = TileCache(1000)

    def fail(_out: slides.Pixels) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cache.acquire("a", (300,), fail)
    assert (_read(cache, "a", partial(_fill, 1)) == 1).all()


def test_tile_wanted_by_several_threads_is_decoded_by_one() -> None:
    cache, decoding, go = TileCache(1000), threading.Event(), threading.Event()
    calls: list[int] = []

    def slow(out: slides.Pixels) -> None:
        calls.append(1)
        decoding.set()
        assert go.wait(10)
        out[:] = 1

    workers = [threading.Thread(target=_read, args=(cache, "a", slow)) for _ in range(4)]
    workers[0].start()
    assert decoding.wait(10)
    for worker in workers[1:]:
        worker.start()
    go.set()
    for worker in workers:
        worker.join(10)
    assert calls == [1]


def test_threads_that_crowd_a_small_cache_never_see_each_others_pixels() -> None:
    cache = TileCache(1000)
    wrong: list[int] = []

    def work(seed: int) -> None:
        keys = np.random.default_rng(seed).integers(0, 20, 2000).tolist()
        wrong.extend(key for key in keys if _read(cache, key, partial(_fill, key)).mean() != key)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert wrong == []


def test_tiles_handed_out_are_the_callers_own(example_slide: Path) -> None:
    spec = TileSpec()
    with Slide.open(example_slide) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        reader = slide.tile_reader(spec)
        first = reader.read(grid[20])
        before = first.copy()
        for tile in grid[:60]:
            reader.read(tile)[:] = 0
        np.testing.assert_array_equal(first, before)
        assert first.flags.c_contiguous
        np.testing.assert_array_equal(reader.read(grid[20]), before)


def test_memory_of_tiles_is_used_again_only_when_nobody_holds_them(example_slide: Path) -> None:
    spec = TileSpec(size_px=512, mpp=0.5)  # a batch holds five of these
    with Slide.open(example_slide) as slide:
        reader = slide.tile_reader(spec)
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        tiles = [grid[index % len(grid)] for index in range(60)]
        kept = [reader.read(tile)[100:200] for tile in tiles]  # views of views
        copies = [part.copy() for part in kept]
        for tile in tiles:
            reader.read(tile)[:] = 7
        for part, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(part, copy)
        del kept, part
        places = {reader.read(tile).__array_interface__["data"][0] for tile in tiles}
    assert len(places) <= 4 * 5


def test_memory_stays_flat_over_a_hundred_thousand_tiles(tmp_path: Path) -> None:
    """Planning and cutting 100,000 tiles into blocks, and reading ever more of them."""
    path = tmp_path / "a.tif"
    (stored,) = (imagecodecs.jpeg8_encode(slides.white(512, 512), level=50),)
    across = 142  # 72,704 px: 324 x 324 tiles of 224 px, 104,976
    tifffile.imwrite(
        path,
        (bytes(stored) for _ in range(across * across)),
        shape=(across * 512, across * 512, 3),
        dtype=np.uint8,
        tile=(512, 512),
        compression="jpeg",
        photometric="ycbcr",
        subsampling=(2, 2),
        resolution=(20000, 20000),
        resolutionunit="CENTIMETER",
        metadata=None,
    )
    spec = TileSpec(size_px=224, mpp=0.5)
    with Slide.open(path) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        assert len(grid) > 100_000
        reader = slide.tile_reader(spec)
        blocks = reader.blocks(grid, np.arange(len(grid)))
        held = []
        # A thousand tiles from each tenth of the slide: were anything kept, it would add up.
        tracemalloc.start()
        for part in range(10):
            for block in blocks[part * len(blocks) // 10 :][:30]:
                reader.read_block([grid[int(index)] for index in block])
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert max(held) < 64 << 20
    assert max(held[1:]) - min(held[1:]) < 16 << 20
