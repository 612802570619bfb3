"""Staging copies slides ahead, never beyond its limit, and removes only what it made."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest

from bioptimus.batch.inputs import SlideInput, find_inputs
from bioptimus.batch.stage import Stager, staging_folder
from bioptimus.errors import UsageError

KB = 1000
GB_OF_KB = 1e-6


@pytest.fixture
def slides(tmp_path: Path) -> list[SlideInput]:
    """Six slides of 100 kB, each of its own bytes."""
    (tmp_path / "slow").mkdir()
    for number in range(6):
        (tmp_path / "slow" / f"{number}.svs").write_bytes(bytes([number]) * 100 * KB)
    return list(find_inputs([tmp_path / "slow"]).slides)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wants_all(_: int) -> bool:
    return True


def staged_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.svs"))


def test_slides_are_read_from_copies_that_vanish_after_use(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    local = tmp_path / "local"
    with Stager(local, max_gb=1) as stager:
        stager.plan(slides, ahead=9, take=wants_all)
        for number, slide in enumerate(slides):
            with stager.staged(slide) as path:
                assert path.is_relative_to(local)
                assert path.name == slide.path.name
                assert path.read_bytes() == bytes([number]) * 100 * KB
            assert not path.exists()
    assert list(local.iterdir()) == []
    assert all(slide.path.exists() for slide in slides)


def test_copies_never_exceed_the_limit_and_all_slides_come_through(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    local = tmp_path / "local"
    most = 0
    with Stager(local, max_gb=250 * GB_OF_KB) as stager:
        stager.plan(slides, ahead=9, take=wants_all)
        wait_until(lambda: staged_bytes(local) == 200 * KB)
        for slide in slides:
            with stager.staged(slide) as path:
                most = max(most, staged_bytes(local))
                assert path.read_bytes() == slide.path.read_bytes()
    assert 100 * KB <= most <= 200 * KB


def test_slide_whose_turn_it_is_not_is_copied_in_place_of_one_not_used_yet(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    with Stager(tmp_path / "local", max_gb=250 * GB_OF_KB) as stager:
        stager.plan(slides, ahead=9, take=wants_all)
        wait_until(lambda: staged_bytes(tmp_path / "local") == 200 * KB)
        with stager.staged(slides[5]) as path:
            assert path.is_relative_to(tmp_path / "local")
        for slide in slides[:5]:
            with stager.staged(slide) as path:
                assert path.read_bytes() == slide.path.read_bytes()


def test_dropped_slides_make_room_for_the_next(tmp_path: Path, slides: list[SlideInput]) -> None:
    with Stager(tmp_path / "local", max_gb=150 * GB_OF_KB) as stager:
        stager.plan(slides, ahead=9, take=wants_all)
        for slide in slides[:5]:
            stager.drop(slide)
        # The first one's copy may be under way by then; it goes once it is whole.
        wait_until(lambda: any((tmp_path / "local").rglob("5.svs")))
        with stager.staged(slides[5]) as path:
            assert path.is_relative_to(tmp_path / "local")
            stager.drop(slides[5])
            assert path.exists()  # in use: it goes when its user is done


def test_few_slides_are_copied_ahead_and_only_those_that_are_taken(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    asked: list[int] = []

    def is_even(index: int) -> bool:
        asked.append(index)
        return index % 2 == 0

    with Stager(tmp_path / "local", max_gb=1) as stager:
        stager.plan(slides, ahead=2, take=is_even)
        wait_until(lambda: staged_bytes(tmp_path / "local") == 200 * KB)
        with stager.staged(slides[0]):
            wait_until(lambda: staged_bytes(tmp_path / "local") == 300 * KB)
            assert asked == [0, 1, 2, 3, 4]


def test_going_through_a_long_list_of_slides_that_are_done_takes_no_time(tmp_path: Path) -> None:
    """A step that looks at the whole list makes hours of it: the test's time limit tells."""
    names = [f"{number}.svs" for number in range(30_000)]
    slides = [SlideInput(path=tmp_path / name, relative=PurePath(name)) for name in names]
    asked: list[int] = []

    def wants_none(index: int) -> bool:
        asked.append(index)
        return False

    with Stager(tmp_path / "local", max_gb=1) as stager:
        stager.plan(slides, ahead=2, take=wants_none)
        wait_until(lambda: len(asked) == len(slides))


def test_slide_too_large_for_the_limit_is_read_where_it_lies(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    with Stager(tmp_path / "local", max_gb=50 * GB_OF_KB) as stager:
        stager.plan(slides, ahead=9, take=wants_all)
        with stager.staged(slides[0]) as path:
            assert path == slides[0].path


def test_many_threads_in_any_order_never_wait_for_each_other_for_ever(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    wrong: list[Path] = []

    def use(slide: SlideInput) -> None:
        with stager.staged(slide) as path:
            if path.read_bytes() != slide.path.read_bytes():
                wrong.append(path)

    with Stager(tmp_path / "local", max_gb=250 * GB_OF_KB) as stager:
        stager.plan(slides, ahead=9, take=wants_all)
        threads = [threading.Thread(target=use, args=[s]) for s in reversed(slides)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert wrong == []


def test_companions_are_copied_beside_the_slide(tmp_path: Path) -> None:
    for name in ("m.mrxs", "m/Slidedat.ini", "m/Data0000.dat", "other.svs"):
        path = tmp_path / "slow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    slide = find_inputs([tmp_path / "slow"]).slides[0]
    with Stager(tmp_path / "local", max_gb=1) as stager, stager.staged(slide) as path:
        copied = {p.relative_to(path.parent).as_posix() for p in path.parent.rglob("*.*")}
    assert copied == {"m.mrxs", "m/Slidedat.ini", "m/Data0000.dat"}


def test_failure_inside_leaves_nothing_behind_and_nothing_else_touched(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    local = tmp_path / "local"
    (local / "bioptimus-other").mkdir(parents=True)
    (local / "mine.svs").write_text("keep")
    stager = Stager(local, max_gb=1)
    stager.plan(slides, ahead=9, take=wants_all)
    with pytest.raises(ZeroDivisionError), stager, stager.staged(slides[0]):
        raise ZeroDivisionError
    assert sorted(p.name for p in local.iterdir()) == ["bioptimus-other", "mine.svs"]
    assert not any(thread.name == "stage" for thread in threading.enumerate())


def test_two_runs_in_one_folder_do_not_meet(tmp_path: Path, slides: list[SlideInput]) -> None:
    with Stager(tmp_path, max_gb=1) as one:
        with Stager(tmp_path, max_gb=1) as two:
            assert one.folder != two.folder
        assert one.folder.is_dir()


# Stages a slide and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from bioptimus.batch.inputs import find_inputs
from bioptimus.batch.stage import Stager
stager = Stager(Path(sys.argv[1]), max_gb=1)
with stager.staged(find_inputs([sys.argv[2]]).slides[0]) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


def test_copies_that_a_killed_run_left_are_removed_by_the_next(
    tmp_path: Path, slides: list[SlideInput]
) -> None:
    local = tmp_path / "local"
    (local / "bioptimus-other").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, local, slides[0].path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        copy = Path(holder.stdout.readline().strip())
        with Stager(local, max_gb=1):
            assert copy.exists(), "its owner lives"
        holder.kill()
        holder.wait()
        assert copy.exists()
    with Stager(local, max_gb=1):
        assert not copy.exists()
    assert [path.name for path in local.iterdir()] == ["bioptimus-other"]


def test_missing_slide_is_left_to_its_own_opening(tmp_path: Path) -> None:
    slide = SlideInput(path=tmp_path / "gone.svs", relative=PurePath("gone.svs"))
    with Stager(tmp_path / "local", max_gb=1) as stager:
        stager.plan([slide], ahead=9, take=wants_all)
        with stager.staged(slide) as path:
            assert path == slide.path


class BadDisk:
    """A file that stores one byte less than it is given; then it is full, or says nothing."""

    def __init__(self, path: Path, *, silent: bool) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        self._silent = silent

    def __enter__(self) -> "BadDisk":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, block: memoryview) -> int:
        if len(block) < 100 * KB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(self._descriptor, block[:-1]) + self._silent


def break_disk(monkeypatch: pytest.MonkeyPatch, *, silent: bool) -> None:
    open_file: Any = Path.open

    def opened(path: Path, mode: str = "r", **options: int) -> Any:
        if mode == "xb":
            return BadDisk(path, silent=silent)
        return open_file(path, mode, **options)

    monkeypatch.setattr(Path, "open", opened)


def test_full_disk_is_told_once_and_slides_are_read_where_they_lie(
    tmp_path: Path,
    slides: list[SlideInput],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_disk(monkeypatch, silent=False)
    with caplog.at_level(logging.WARNING), Stager(tmp_path / "local", max_gb=1) as stager:
        stager.plan(slides, ahead=9, take=wants_all)
        for slide in slides:
            with stager.staged(slide) as path:
                assert path == slide.path
        assert staged_bytes(tmp_path / "local") == 0
    (record,) = caplog.records
    assert "No space left on device; slides are read where they lie" in record.message


def test_copy_that_came_out_short_is_not_used(
    tmp_path: Path, slides: list[SlideInput], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_disk(monkeypatch, silent=True)
    with Stager(tmp_path / "local", max_gb=1) as stager, stager.staged(slides[0]) as path:
        assert path == slides[0].path


@pytest.mark.parametrize("max_gb", [0.0, -1.0, float("nan")])
def test_limit_must_be_positive(tmp_path: Path, max_gb: float) -> None:
    with pytest.raises(UsageError, match="--stage-gb"):
        Stager(tmp_path, max_gb=max_gb)


def test_folder_that_cannot_be_made_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="slides cannot be staged there"):
        Stager(tmp_path / "file", max_gb=1)


def test_variables_of_the_node_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_HERE", "/scratch/4711")
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    assert staging_folder(Path("$SCRATCH_HERE/a b")) == Path("/scratch/4711/a b")
    assert staging_folder(Path("/fast")) == Path("/fast")
    with pytest.raises(UsageError, match=r"--stage \$NOT_SET_HERE/x: \$NOT_SET_HERE is not set"):
        staging_folder(Path("$NOT_SET_HERE/x"))
