"""One slide from file to file, with models that misbehave."""

import gc
import itertools
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch

from bioptimus import pipeline
from bioptimus.errors import LostDeviceError, OutOfDeviceMemoryError
from bioptimus.inference.schemas import ModelRequest
from bioptimus.io.wsi import OpenOptions, TileReader
from bioptimus.jobs import SlideJob, SlideOptions, SlideReport
from bioptimus.models.clients.local import InProcessClient
from bioptimus.models.types import ModelSpec
from bioptimus.pipeline import process_slide
from bioptimus.planning import PlanOptions
from bioptimus.runtime.server_model import BaseServerModel
from bioptimus.tiles import TileSpec
from bioptimus.tissue import SEARCH_VERSION
from bioptimus.verify import verify
from tests.models import FakeRunner
from tests.result_files import damage
from tests.slides import damage_tile, tissue, write_pyramid

# 1024 x 1024 px at 0.5 µm/px in tiles of 64: a lattice of 16 x 16.
SPEC = ModelSpec(name="means", tile=TileSpec(size_px=64, mpp=0.5), embedding_dim=3)
TILES = 256


class Listener:
    """Remembers what it hears; may stop the run after so many tiles."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.done = 0
        self.resumed = 0
        self._stop_after = stop_after

    @property
    def stopped(self) -> bool:
        return self._stop_after is not None and self.done >= self._stop_after

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        self.resumed = resumed

    def tiles_done(self, job: SlideJob, count: int) -> None:
        self.done += count

    def note(self, job: SlideJob, message: str) -> None:
        self.notes.append(message)


class Runner(FakeRunner):
    """Mean colours, after a hook that may fail or alter the answer."""

    def __init__(
        self, hook: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__(SPEC)
        self._hook = hook
        self._calls = 0
        self._count = threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (answer,) = super().__call__(*inputs)
        with self._count:
            self._calls += 1
            call = self._calls
        return (self._hook(call, inputs[0], answer) if self._hook else answer,)


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write_pyramid(tmp_path / "slide.tif", tissue(1024, 1024), mpp=0.5, factors=(1, 4))


def run(
    slide: Path,
    runner: Runner,
    *,
    batch: int = 16,
    listener: Listener | None = None,
    options: SlideOptions | None = None,
    reader_threads: int = 2,
    output: Path | None = None,
) -> SlideReport:
    listener = listener or Listener()
    options = options or SlideOptions(plan=PlanOptions(tissue="none"))
    model = BaseServerModel.from_runner(SPEC, runner)
    with (
        InProcessClient(model, max_batch_size=batch, max_wait_ms=5) as client,
        ThreadPoolExecutor(reader_threads) as readers,
    ):
        return process_slide(
            SlideJob(path=slide, output=output or slide.with_suffix(".h5"), name=slide.name),
            client=client,
            options=options,
            readers=readers,
            readers_at_once=reader_threads,
            stop=listener,
            listener=listener,
        )


def features(slide: Path) -> npt.NDArray[np.float32]:
    with h5py.File(slide.with_suffix(".h5")) as file:
        return np.asarray(file["features"][:], np.float32)


def test_one_slide_keeps_all_readers_busy(slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, number = threading.Barrier(6), itertools.count()
    real = TileReader.read_block

    def read(reader: TileReader, tiles: Any) -> Any:
        if next(number) < 6:
            together.wait(20)  # for six to read at the same time, or the slide fails
        return real(reader, tiles)

    monkeypatch.setattr(TileReader, "read_block", read)
    report = run(slide, Runner(), batch=4, reader_threads=6)
    assert (report.state, report.tiles_done) == ("ok", TILES)


def test_every_planned_tile_becomes_a_row_in_plan_order(slide: Path) -> None:
    report = run(slide, Runner())
    assert (report.state, report.tiles_planned, report.tiles_done) == ("ok", TILES, TILES)
    with h5py.File(slide.with_suffix(".h5")) as file:
        coords = file["coords"][:]
    assert [tuple(xy) for xy in coords] == [
        (x, y) for y in range(0, 1024, 64) for x in range(0, 1024, 64)
    ]
    expected = tissue(1024, 1024).reshape(16, 64, 16, 64, 3).mean((1, 3)).reshape(TILES, 3)
    np.testing.assert_allclose(features(slide), expected, atol=0.01)


def test_result_of_another_tissue_search_is_refused_and_one_that_tells_none_is_of_the_first(
    slide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, whole = SlideOptions(), SlideOptions(plan=PlanOptions(tissue="none"))
    path = slide.with_suffix(".h5")
    assert run(slide, Runner(), options=searched).state == "ok"
    with h5py.File(path, "r+") as file:
        told = json.loads(file.attrs["digest_parameters"])
        assert told.pop("tissue search version") == SEARCH_VERSION
        file.attrs["digest_parameters"] = json.dumps(told)
    # Such a file was made before the search had a version: it is as good as one of the first.
    monkeypatch.setattr("bioptimus.recipe.SEARCH_VERSION", 1)
    assert run(slide, Runner(), options=searched).state == "skipped"
    assert verify(path).findings == ()
    monkeypatch.setattr("bioptimus.recipe.SEARCH_VERSION", 2)
    refused = run(slide, Runner(), options=searched)
    assert refused.state == "failed"
    assert refused.reason.endswith(
        "(tissue search version is 1 there, 2 now); pass --overwrite or another --out"
    )
    assert run(slide, Runner(), options=replace(searched, overwrite=True)).state == "ok"
    assert run(slide, Runner(), options=searched).state == "skipped"
    path.unlink()
    assert run(slide, Runner(), options=whole).state == "ok"
    monkeypatch.setattr("bioptimus.recipe.SEARCH_VERSION", 3)
    assert run(slide, Runner(), options=whole).state == "skipped", "nothing is searched there"


def test_damaged_result_is_made_again_when_told_to_overwrite(slide: Path) -> None:
    overwrite = SlideOptions(plan=PlanOptions(tissue="none"), overwrite=True)
    assert run(slide, Runner()).state == "ok"
    whole = features(slide)
    for dataset, row in (("features", 100), ("tissue_mask", 0)):
        damage(slide.with_suffix(".h5"), dataset, row=row)
        assert run(slide, Runner()).state == "skipped", "not every value is read each time"
        assert run(slide, Runner(), options=overwrite).state == "ok"
        np.testing.assert_array_equal(features(slide), whole)
        assert verify(slide.with_suffix(".h5"), deep=True).findings == ()
        assert run(slide, Runner(), options=overwrite).state == "skipped"


def test_not_a_number_in_an_output_fails_that_tile_alone(slide: Path) -> None:
    reference = run(slide, Runner())
    assert reference.state == "ok"
    whole = features(slide)
    dark = whole.sum(1).argmin()

    def spoil(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        answer[(answer - torch.from_numpy(whole[dark])).abs().sum(1) == 0] = float("nan")
        return answer

    slide.with_suffix(".h5").unlink()
    report = run(slide, Runner(spoil))
    assert (report.state, report.tiles_failed) == ("ok", 1)
    np.testing.assert_array_equal(features(slide), np.delete(whole, dark, axis=0))
    with h5py.File(slide.with_suffix(".h5")) as file:
        failed = file["failed_tiles"][:]
        assert len(file["coords"]) == len(file["tissue_ratios"]) == TILES - 1
    assert (failed["x"][0], failed["y"][0]) == (dark % 16 * 64, dark // 16 * 64)
    assert (failed["stage"][0], b"NaN" in failed["reason"][0]) == (b"output", True)


def test_forward_failure_is_tried_once_more(slide: Path) -> None:
    def fail_third(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        if call == 3:
            raise RuntimeError("a passing fault of the device")
        return answer

    report = run(slide, Runner(fail_third))
    assert (report.state, report.tiles_done) == ("ok", TILES)


def test_forward_failure_twice_fails_the_slide_and_keeps_the_part(slide: Path) -> None:
    def fail_late(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        if call > 8:
            raise RuntimeError("the device is gone")
        return answer

    report = run(slide, Runner(fail_late))
    assert report.state == "failed"
    assert "the device is gone" in report.reason
    assert not slide.with_suffix(".h5").exists()
    listener = Listener()
    again = run(slide, Runner(), listener=listener)
    assert again.state == "ok"
    assert 0 < listener.resumed < TILES
    assert again.tiles_done == TILES


def test_error_of_a_slide_keeps_its_cause_and_none_of_the_tiles(
    slide: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    gc.collect()
    others = [each for each in gc.get_objects() if type(each) is ModelRequest]
    # Captured log records would hold the errors of other tiles.
    with caplog.at_level(logging.CRITICAL + 1, "bioptimus"):
        report = run(slide, Runner(fail))
    assert report.error is not None
    assert isinstance(report.error.__cause__, RuntimeError)
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is ModelRequest]
    assert len(left) == len(others)


def test_a_lost_device_is_not_asked_once_more(
    slide: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        raise LostDeviceError("the device failed")

    report = run(slide, Runner(lose))
    assert isinstance(report.error, LostDeviceError)
    assert "asking once more" not in caplog.text


def test_out_of_memory_halves_the_batch_says_so_once_and_loses_nothing(slide: Path) -> None:
    def full(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        if len(tiles) > 8:
            raise OutOfDeviceMemoryError("CUDA out of memory")
        return answer

    listener = Listener()
    report = run(slide, Runner(full), batch=16, listener=listener)
    assert (report.state, report.tiles_done) == ("ok", TILES)
    assert listener.notes == ["out of memory on the device; going on with batches of 8"]


def test_out_of_memory_with_one_tile_fails_the_slide(slide: Path) -> None:
    def full(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        raise OutOfDeviceMemoryError("CUDA out of memory")

    report = run(slide, Runner(full), batch=4)
    assert report.state == "failed"
    assert "out of memory" in report.reason


def test_stop_signal_keeps_what_was_computed_and_a_rerun_goes_on(slide: Path) -> None:
    listener = Listener(stop_after=64)
    report = run(slide, Runner(), listener=listener)
    assert report.state == "stopped"
    assert not slide.with_suffix(".h5").exists()
    done_before = report.tiles_done
    assert 64 <= done_before < TILES
    runner, listener = Runner(), Listener()
    again = run(slide, runner, listener=listener)
    assert again.state == "ok"
    assert listener.resumed == done_before
    assert sum(runner.batches) == TILES - done_before
    stopped_then_resumed = features(slide)
    slide.with_suffix(".h5").unlink()
    run(slide, Runner())
    np.testing.assert_array_equal(stopped_then_resumed, features(slide))


def test_folder_that_moves_away_ends_the_slide_at_the_next_flush_and_nothing_is_lost(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_FLUSH_SECONDS", 0)
    monkeypatch.setattr(pipeline, "_WRITE_SECONDS", 0)
    out, aside = tmp_path / "out", tmp_path / "aside"

    def move(call: int, tiles: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        if call == 4:
            out.rename(aside)
        return answer

    report = run(slide, Runner(move), output=out / "slide.h5")
    assert report.state == "failed"
    assert report.reason.startswith(f"{out / 'slide.h5'}: its folder is there no more; was it re")
    assert 0 < report.tiles_done < TILES
    assert not out.exists()
    aside.rename(out)
    again = run(slide, Runner(), output=out / "slide.h5")
    assert (again.state, again.tiles_resumed) == ("ok", report.tiles_done)


def test_overwrite_replaces_what_was_made_otherwise_and_nothing_else(slide: Path) -> None:
    plan = PlanOptions(tissue="none")
    assert run(slide, Runner(), options=SlideOptions(plan=plan, dtype="float16")).state == "ok"
    assert run(slide, Runner(), options=SlideOptions(plan=plan)).state == "failed"
    other = SlideOptions(plan=plan, overwrite=True)
    assert run(slide, Runner(), options=other).state == "ok"
    # As the second of two devices, or a requeued job, meets what the first has made.
    assert run(slide, Runner(), options=other).state == "skipped"
    slide.with_suffix(".h5").write_bytes(b"cut short")
    assert run(slide, Runner(), options=other).state == "ok"


def test_slide_that_is_refused_leaves_no_part(slide: Path) -> None:
    finer = SlideOptions(plan=PlanOptions(tissue="none", tile_mpp=0.1))
    report = run(slide, Runner(), options=finer)
    assert report.state == "failed"
    assert "--allow-upsample" in report.reason
    assert list(slide.parent.iterdir()) == [slide]


def test_warnings_of_a_slide_that_is_done_are_not_told_again(slide: Path) -> None:
    options = SlideOptions(
        opening=OpenOptions(mpp_override=0.4), plan=PlanOptions(tissue="none", tile_mpp=0.4)
    )
    first, second = Listener(), Listener()
    assert run(slide, Runner(), options=options, listener=first).state == "ok"
    assert len(first.notes) == 1
    assert "0.4" in first.notes[0]
    assert run(slide, Runner(), options=options, listener=second).state == "skipped"
    assert second.notes == []


def test_unreadable_tile_becomes_a_failed_tile_not_a_row(slide: Path) -> None:
    damage_tile(slide, level=0, index=5)
    options = SlideOptions(plan=PlanOptions(tissue="none"), max_failed_tiles=0.5)
    report = run(slide, Runner(), options=options)
    assert report.state == "ok"
    # One stored tile of 256 px holds 16 of ours.
    assert (report.tiles_failed, report.tiles_done) == (16, TILES - 16)
    with h5py.File(slide.with_suffix(".h5")) as file:
        assert len(file["failed_tiles"]) == 16
        assert set(file["failed_tiles"]["stage"]) == {b"read"}
    assert len(features(slide)) == TILES - 16


def test_failed_tiles_of_a_slide_take_a_few_lines_and_one_for_the_rest(
    slide: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage_tile(slide, level=0, index=5)
    options = SlideOptions(plan=PlanOptions(tissue="none"), max_failed_tiles=0.5)
    assert run(slide, Runner(), options=options).tiles_failed == 16
    *told, rest = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(told) == 5
    assert all("slide.tif: tile at (" in each for each in told)
    output = slide.with_suffix(".h5")
    assert rest == f"slide.tif: 11 tiles failed besides; failed_tiles in {output} lists all 16"


def test_damage_that_is_taken_for_tissue_is_told_once_and_kept_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slide = write_pyramid(tmp_path / "slide.tif", tissue(1024, 1024), mpp=0.5, factors=(1,))
    damage_tile(slide, level=0, index=5)
    listener = Listener()
    options = SlideOptions(max_failed_tiles=0.5)
    assert run(slide, Runner(), options=options, listener=listener).state == "ok"
    told = "slide.tif: level 0 is damaged: what cannot be read counts as tissue"
    assert [note.startswith(told) for note in listener.notes] == [True]
    assert "level 0 is damaged:" not in caplog.text
    with h5py.File(slide.with_suffix(".h5")) as file:
        assert list(file.attrs["warnings"]) == listener.notes
        assert len(file["failed_tiles"]) == 16


def test_too_many_unreadable_tiles_fail_the_slide(slide: Path) -> None:
    damage_tile(slide, level=0, index=5)
    report = run(slide, Runner())
    assert report.state == "failed"
    # What a rerun of the same command would meet again.
    assert "--max-failed-tiles 0.01 allows; raise it to go on without them" in report.reason
    assert not slide.with_suffix(".h5").exists()


def test_unforeseen_error_ends_the_slide_not_the_caller(
    slide: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr("bioptimus.pipeline.plan_slide", explode)
    report = run(slide, Runner())
    assert report.state == "failed"
    assert "ZeroDivisionError" in report.reason
    assert "nobody thought of this" in caplog.text
