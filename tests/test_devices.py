"""What the parent of several devices' processes does with what they say."""

import queue
from pathlib import Path
from typing import Any, cast

import pytest

from bioptimus.batch.devices import _Collected, _QueueListener, _relay
from bioptimus.pipeline import SlideJob, SlideReport
from tests.killed_runs import Silent

JOB = SlideJob(path=Path("a.svs"), output=Path("a.h5"), name="a.svs")


class Process:
    """Lives until it is told to end."""

    def __init__(self) -> None:
        self.told = 0

    def is_alive(self) -> bool:
        return self.told == 0

    def terminate(self) -> None:
        self.told += 1


class Busy:
    """A queue with always one more event, as that of fast devices, while the process lives."""

    def __init__(self, process: Process, first: tuple[str, dict[str, Any]] | None = None) -> None:
        self._process = process
        self._first = first
        self.given = 0

    def get(self, timeout: float) -> tuple[str, dict[str, Any]]:
        self.given += 1
        assert self.given < 1000, "the process was never told to stop"
        if self._first is not None and self.given == 1:
            return self._first
        if not self._process.is_alive():
            raise queue.Empty
        return "tiles_done", {"job": JOB, "count": 1}


class Stop:
    """Comes, if it does, once events have begun to flow."""

    def __init__(self, events: Busy, *, comes: bool) -> None:
        self._events = events
        self._comes = comes

    @property
    def stopped(self) -> bool:
        return self._comes and self._events.given > 10


def relay(
    first: tuple[str, dict[str, Any]] | None, *, stopped: bool, fail_fast: bool = False
) -> int:
    process = Process()
    collected = _Collected(Silent(), 2, fail_fast=fail_fast)
    events = Busy(process, first)
    _relay(cast(Any, [process]), events, collected, Stop(events, comes=stopped))
    return process.told


def test_every_device_tells_the_batch_size_it_found() -> None:
    class Hears(Silent):
        def __init__(self) -> None:
            self.found: list[tuple[int, str, str]] = []

        def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
            self.found.append((tiles, device, reason))

    listener = Hears()
    collected = _Collected(listener, 1, fail_fast=False)
    events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
    for number, tiles in enumerate((64, 128)):
        _QueueListener(events).batch_size_found(tiles, device=f"cuda:{number}", reason="full")
        collected.take(*events.get_nowait())
    assert listener.found == [(64, "cuda:0", "full"), (128, "cuda:1", "full")]


def test_stop_reaches_processes_that_never_cease_to_report() -> None:
    assert relay(None, stopped=True) == 1


def test_failed_slide_stops_the_other_devices_under_fail_fast() -> None:
    failed = ("slide_ended", {"job": JOB, "report": SlideReport(slide="a.svs", state="failed")})
    assert relay(failed, stopped=False, fail_fast=True) == 1
    with pytest.raises(AssertionError, match="never told"):
        relay(failed, stopped=False)
