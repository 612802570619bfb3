"""What the parent of several devices' processes does with what they say."""

import multiprocessing
import os
import pickle
import queue
import signal
import struct
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bioptimus.batch import devices, quiet
from bioptimus.batch.devices import _Collected, _relay, _SendingListener, run_on_devices
from bioptimus.batch.quiet import SilentListener
from bioptimus.batch.run import RunConfig
from bioptimus.errors import OutputError
from bioptimus.jobs import SlideJob, SlideReport

Event = tuple[str, dict[str, Any]]
WORK = SimpleNamespace(slides=(), jobs=(), tell_notes=int)
JOB = SlideJob(path=Path("a.svs"), output=Path("a.h5"), name="a.svs")


class Process:
    """Reports without cease, as a fast device does, until it is told to end."""

    def __init__(self, first: Event | None = None) -> None:
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)
        self.told = 0
        self.sent = 0
        self._first = first
        self._thread = threading.Thread(target=self._report)
        self._thread.start()

    def _report(self) -> None:
        event = self._first
        while not self.told and self.sent < 1000:
            self._writer.send(event or ("tiles_done", {"job": JOB, "count": 1}))
            self.sent, event = self.sent + 1, None
        self._writer.close()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def terminate(self) -> None:
        self.told += 1


class Stop:
    """Comes, if it does, once events have begun to flow."""

    def __init__(self, process: Process, *, comes: bool) -> None:
        self._process = process
        self._comes = comes

    @property
    def stopped(self) -> bool:
        return self._comes and self._process.sent > 10


def relay(first: Event | None, *, stopped: bool, fail_fast: bool = False) -> int:
    """How often the process was told to end; one that was not has an end of its own."""
    process = Process(first)
    collected = _Collected(SilentListener(), fail_fast=fail_fast)
    stop = Stop(process, comes=stopped)
    _relay(cast(Any, [process]), {process.reader}, collected, stop)
    return process.told


def test_every_device_tells_the_batch_size_it_found() -> None:
    class Hears(SilentListener):
        def __init__(self) -> None:
            self.found: list[tuple[int, str, str]] = []

        def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
            self.found.append((tiles, device, reason))

    listener = Hears()
    collected = _Collected(listener, fail_fast=False)
    events: queue.Queue[Event] = queue.Queue()
    for number, tiles in enumerate((64, 128)):
        _SendingListener(events).batch_size_found(tiles, device=f"cuda:{number}", reason="full")
        collected.take(*events.get_nowait())
    assert listener.found == [(64, "cuda:0", "full"), (128, "cuda:1", "full")]


@pytest.mark.parametrize(("cores", "workers", "readers"), [(4, 2, 2), (128, 8, 64)])
def test_a_device_of_several_has_no_more_slides_under_way_than_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, readers: int
) -> None:
    told: list[RunConfig] = []

    def enough(config: RunConfig, *_: object) -> None:
        told.append(config)
        raise OutputError("enough")

    monkeypatch.setattr(devices, "list_work", lambda _: WORK)
    monkeypatch.setattr(devices, "available_cores", lambda: cores)
    monkeypatch.setattr(devices, "_run_processes", enough)
    config = RunConfig(inputs=("a.svs",), out=tmp_path, device="cuda:0,cuda:1")
    with pytest.raises(OutputError, match="enough"):
        run_on_devices(config)
    assert (told[0].workers, told[0].readers) == (workers, readers)


def test_stop_reaches_processes_that_never_cease_to_report() -> None:
    assert relay(None, stopped=True) == 1


def test_failed_slide_stops_the_other_devices_under_fail_fast() -> None:
    failed = ("slide_ended", {"job": JOB, "report": SlideReport(slide="a.svs", state="failed")})
    assert relay(failed, stopped=False, fail_fast=True) == 1
    assert relay(failed, stopped=False) == 0


@pytest.mark.parametrize("written", [0, 2, 9])
def test_a_process_killed_in_the_middle_of_a_word_holds_up_nobody(written: int) -> None:
    heard: list[str] = []

    class Hears(SilentListener):
        def note(self, job: SlideJob, message: str) -> None:
            heard.append(message)

    def say(message: str) -> bytes:
        return pickle.dumps(("note", {"job": JOB, "message": message}))

    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=target, args=(writer, *arguments))
        for target, (_, writer), arguments in (
            (_is_killed, pipes[0], (say("one"), written)),
            (_goes_on, pipes[1], (say("two"), say("three"))),
        )
    ]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()
    collected = _Collected(Hears(), fail_fast=False)
    _relay(processes, {reader for reader, _ in pipes}, collected, quiet.Stop())
    assert sorted(heard) == ["one", "three", "two"]
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0]


def _is_killed(writer: Connection, word: bytes, written: int) -> None:
    writer.send_bytes(word)
    # A word is its length in four bytes, then what it says.
    os.write(writer.fileno(), (struct.pack("!i", len(word)) + word)[:written])
    os.kill(os.getpid(), signal.SIGKILL)


def _goes_on(writer: Connection, *words: bytes) -> None:
    for word in words:
        writer.send_bytes(word)
