"""Opening a slide and its coarse pictures, shared with threads that are free."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bioptimus.batch.threads import plan_threads
from bioptimus.io.crew import ALONE, Crew
from bioptimus.io.wsi import Slide
from tests import slides


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def test_every_item_is_done_once_by_several_threads(pool: ThreadPoolExecutor) -> None:
    together = threading.Barrier(3)
    done: list[int] = []
    threads: set[int] = set()

    def do(item: int) -> None:
        if item < 3:
            together.wait(20)  # for three threads at a time, or the barrier breaks
        threads.add(threading.get_ident())
        done.append(item)

    Crew(pool=pool, at_once=3).each(do, range(50))
    assert sorted(done) == list(range(50))
    assert len(threads) == 3
    assert threading.get_ident() in threads


def test_caller_does_all_where_the_others_are_busy(pool: ThreadPoolExecutor) -> None:
    release = threading.Event()
    busy = [pool.submit(release.wait, 30) for _ in range(3)]
    threads: list[int] = []
    try:
        Crew(pool=pool, at_once=3).each(lambda _: threads.append(threading.get_ident()), range(9))
        assert not any(future.done() for future in busy)
    finally:
        release.set()
    assert threads == [threading.get_ident()] * 9


def test_error_on_another_thread_reaches_the_caller_and_ends_the_work(
    pool: ThreadPoolExecutor,
) -> None:
    caller = threading.get_ident()
    failed = threading.Event()
    begun: list[int] = []

    def do(item: int) -> None:
        begun.append(item)
        if threading.get_ident() != caller:
            failed.set()
            raise ValueError("cannot be read")
        assert failed.wait(20)

    with pytest.raises(ValueError, match="cannot be read"):
        Crew(pool=pool, at_once=2).each(do, range(1000))
    assert len(begun) < 1000


def test_error_of_the_caller_waits_for_what_the_others_began(pool: ThreadPoolExecutor) -> None:
    caller = threading.get_ident()
    begun, ended = threading.Event(), threading.Event()

    def do(item: int) -> None:
        if threading.get_ident() == caller:
            assert begun.wait(20)
            raise ValueError(f"no {item}")
        begun.set()
        threading.Event().wait(0.05)
        ended.set()

    with pytest.raises(ValueError, match="no "):
        Crew(pool=pool, at_once=2).each(do, range(2))
    assert ended.is_set()


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("side", [240, 256])
def test_pictures_made_by_several_threads_are_those_of_one(
    tmp_path: Path, pool: ThreadPoolExecutor, side: int, damaged: bool
) -> None:
    path = slides.write_svs(
        tmp_path / "a.svs", slides.tissue(2203, 1307), mpp=0.5, tile=side, factors=(1,)
    )
    if damaged:
        slides.damage_tile(path, index=5)
    pictures = []
    for crew in (ALONE, Crew(pool=pool, at_once=4)):
        with Slide.open(path, crew=crew) as slide:
            pictures.append((slide.reader, slide.warnings, slide.coarse_image(), slide.thumbnail()))
            assert (slide.coarse_image(6.1).damaged is not None) == damaged
    (reader, warnings, *alone), (other_reader, other_warnings, *shared) = pictures
    assert (other_reader, other_warnings) == (reader, warnings)
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(other.pixels, one.pixels)
        np.testing.assert_array_equal(other.opaque, one.opaque)
        assert (one.damaged is None) == (other.damaged is None) == (not damaged)
        if one.damaged is not None and other.damaged is not None:
            np.testing.assert_array_equal(other.damaged, one.damaged)


@pytest.mark.parametrize(
    ("cores", "slides_to_do", "openers"), [(2, 1, 2), (2, 40, 1), (16, 1, 16), (16, 40, 2)]
)
def test_slides_under_way_share_the_readers_for_opening(
    cores: int, slides_to_do: int, openers: int
) -> None:
    plan = plan_threads(on_cpu=True, slides=slides_to_do, cores=cores)
    assert plan.openers_per_slide == openers
