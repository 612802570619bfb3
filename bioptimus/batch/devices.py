"""Several devices on one machine: one process each, by the rules of several machines.

Every process gets the whole list of slides; claims deal them out as they come, so a fast device
takes more of them. A slide that failed on one is not tried on another. The parent relays what the
processes report and sums it up. Each process has a pipe of its own for that, and no lock is shared:
one that is killed in the middle of a word ends its own pipe and holds up nobody.
"""

import contextlib
import logging
import mmap
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from bioptimus.batch.lists import write_list
from bioptimus.batch.quiet import SilentListener, Stop
from bioptimus.batch.report import RUNS_FOLDER, is_left_to_another_job, merge_reports
from bioptimus.batch.run import RunConfig, RunListener, RunResult, run
from bioptimus.batch.signals import STOP_SIGNALS, StopFlag
from bioptimus.batch.threads import MAX_WORKERS
from bioptimus.batch.work import Work, list_work
from bioptimus.errors import BioptimusError
from bioptimus.jobs import SlideJob, SlideReport, StopSignal
from bioptimus.runtime.machine import available_cores

log = logging.getLogger(__name__)

_Event = tuple[str, dict[str, Any]]
_Reader = connection.Connection
_Writer = connection.Connection

_POLL_SECONDS = 0.2


def run_on_devices(
    config: RunConfig, *, listener: RunListener | None = None, stop: StopSignal | None = None
) -> RunResult:
    """Run with one process for each device named in ``config.device``, commas between.

    Args:
        config: What to do; ``workers`` and ``readers`` count for each process, ``stage_gb`` for
            all together.
        listener: Hears the progress of all processes, on the calling thread; None: nobody does.
        stop: Once it says so, the processes are told to stop and end as one process would; None:
            nobody says so.

    Returns:
        One report per slide, whichever process took it.

    Raises:
        UsageError: The inputs or options make no sense.
        BioptimusError: As `run`, from the first process that could not start, if none could.
    """
    listener, stop = listener or SilentListener(), stop or Stop()
    devices = config.devices
    work = list_work(config)
    listener.run_started(len(work.jobs))
    work.tell_notes()
    with tempfile.TemporaryDirectory(prefix="bioptimus-") as folder:
        # Written down once: standard input can be read once, and folders need no second search.
        slides = Path(folder) / "slides.csv"
        write_list(slides, work.slides)
        share = max(1, available_cores() // len(devices))
        each = replace(
            config,
            inputs=(str(slides),),
            shard=None,
            workers=config.workers or min(share, MAX_WORKERS),
            readers=config.readers or share,
            threads=config.threads or (1 if set(devices) == {"cpu"} else None),
            stage_gb=config.stage_gb / len(devices),
        )
        # Not Python's own shared memory: a container's /dev/shm may be read-only.
        failed = Path(folder) / "failed"
        failed.write_bytes(bytes(max(1, len(work.jobs))))
        collected, dead = _run_processes(each, devices, failed, work, listener, stop)
    if collected.errors:
        error = collected.errors[0]
        # Slides that were done already, each process tells before it loads the model.
        if len(collected.errors) == len(devices) or not collected.reports:
            raise error
        log.warning("the other devices went on without one: %s", error)
        dead.append(str(error))
    reports = merge_reports(collected.reports, work.jobs, dead=dead)
    for job, report in zip(work.jobs, reports, strict=True):
        if job.path.absolute() not in collected.told:
            listener.slide_ended(job, report)
    return RunResult(
        reports=tuple(reports),
        skipped=work.skipped,
        run_file=config.out / RUNS_FOLDER,
    )


def _run_processes(
    config: RunConfig,
    devices: Sequence[str],
    failed: Path,
    work: Work,
    listener: RunListener,
    stop: StopSignal,
) -> tuple["_Collected", list[str]]:
    """Start, hear and join the processes; what they said, and which of them died.

    Args:
        config: What each is to do.
        devices: One for each process.
        failed: A file of a byte for each slide, not 0 once it has failed.
        work: The slides.
        listener: Hears them all.
        stop: Stops them all.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in devices]
    processes = [
        context.Process(
            target=_run_one,
            args=(replace(config, device=device), writer, failed, work.skipped),
            name=f"bioptimus {device}",
        )
        for device, (_, writer) in zip(devices, pipes, strict=True)
    ]
    readers = {reader for reader, _ in pipes}
    collected = _Collected(listener, fail_fast=config.fail_fast)
    # The first process would start it, and it would unblock the signals that `_start` holds back.
    resource_tracker.ensure_running()
    try:
        for process, (_, writer) in zip(processes, pipes, strict=True):
            _start(process)
            writer.close()  # the process has it; with the last copy the pipe ends
        _relay(processes, readers, collected, stop)
    finally:
        _end(processes, readers)
    return collected, [
        f"the process for {device} ended with exit code {process.exitcode}"
        for device, process in zip(devices, processes, strict=True)
        if process.exitcode != 0
    ]


def _start(process: SpawnProcess) -> None:
    """Start a process that hears no signal before it is ready for them; see `_run_one`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(processes: Iterable[SpawnProcess], readers: set[_Reader]) -> None:
    """Stop and join whatever still runs, as when the listener failed."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    # A process ends only when all it said has been taken.
    while any(process.is_alive() for process in started):
        _next_events(readers)
    for process in started:
        process.join()
    for reader in readers:
        reader.close()


class _Collected:
    """What the processes have said so far; used on the parent's thread only."""

    def __init__(self, listener: RunListener, *, fail_fast: bool) -> None:
        self._listener = listener
        self._fail_fast = fail_fast
        # Under --fail-fast the process of the failed slide stops itself, not the others.
        self.failed_fast = False
        self._loading = False
        # Slides whose end the listener has heard; a slide that one process passed over, or did
        # not come to, may be another's yet.
        self.told: set[Path] = set()
        self.reports: list[SlideReport] = []
        self.errors: list[BioptimusError] = []

    def take(self, event: str, arguments: dict[str, Any]) -> None:
        if event == "error":
            self.errors.append(arguments["error"])
        elif event == "loading":
            if not self._loading:
                self._loading = True
                self._listener.loading(**arguments)
        elif event == "slide_ended":
            report: SlideReport = arguments["report"]
            self.reports.append(report)
            if report.state == "failed" and self._fail_fast:
                self.failed_fast = True
            begun = report.state != "stopped" or report.seconds.total > 0
            left = is_left_to_another_job(report.state, report.output)
            path = arguments["job"].path.absolute()
            # While all are stopping, one may take up what the other has just laid down.
            if begun and not left and path not in self.told:
                self.told.add(path)
                self._listener.slide_ended(**arguments)
        else:
            getattr(self._listener, event)(**arguments)


def _relay(
    processes: Iterable[SpawnProcess],
    readers: set[_Reader],
    collected: _Collected,
    stop: StopSignal,
) -> None:
    """Pass events on until every process has ended and its last event is read."""
    told = False
    while True:
        # Looked at before each event: while tiles are done, there may always be one more.
        alive = [process for process in processes if process.is_alive()]
        if (stop.stopped or collected.failed_fast) and not told:
            told = True
            for process in alive:
                process.terminate()
        events = _next_events(readers)
        for event in events:
            collected.take(*event)
        if not alive and not events:
            return


def _next_events(readers: set[_Reader]) -> list[_Event]:
    """One event of each process that has said something, after a short wait for the first.

    Pipes of processes that have ended are closed and taken out.
    """
    events = []
    if not readers:
        time.sleep(_POLL_SECONDS)
    for reader in connection.wait(list(readers), timeout=_POLL_SECONDS):
        assert isinstance(reader, connection.Connection)
        try:
            events.append(reader.recv())
        except (EOFError, OSError):  # the end; also in the middle of an event
            reader.close()
            readers.discard(reader)
    return events


class _Sender:
    """Sends events to the parent.

    Owner: the process's main thread, which closes it. Any thread may put events in; one thread
    sends them, so that no slide waits for the parent.
    """

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="events")
        self._thread.start()

    def put(self, event: _Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        """Send what was put in, then close the pipe."""
        self._events.put(None)
        self._thread.join()
        self._writer.close()

    def _send(self) -> None:
        for event in iter(self._events.get, None):
            # Without a parent nobody listens, and the run is about to stop: see _OrOrphaned.
            with contextlib.suppress(OSError):
                self._writer.send(event)


class _Events(Protocol):
    """Takes events."""

    def put(self, event: _Event) -> None: ...


class _SendingListener:
    """Sends what a process's run says to the parent."""

    def __init__(self, events: _Events) -> None:
        self._events = events

    def run_started(self, slides: int) -> None:
        """Nothing: each process counts every slide; the parent has told it."""

    def loading(self, model: str) -> None:
        self._events.put(("loading", {"model": model}))

    def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
        found = {"tiles": tiles, "device": device, "reason": reason}
        self._events.put(("batch_size_found", found))

    def model_loaded(self, model: str, *, device: str) -> None:
        self._events.put(("model_loaded", {"model": model, "device": device}))

    def slide_started(self, job: SlideJob) -> None:
        self._events.put(("slide_started", {"job": job}))

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        self._events.put(("slide_planned", {"job": job, "tiles": tiles, "resumed": resumed}))

    def tiles_done(self, job: SlideJob, count: int) -> None:
        self._events.put(("tiles_done", {"job": job, "count": count}))

    def note(self, job: SlideJob, message: str) -> None:
        self._events.put(("note", {"job": job, "message": message}))

    def slide_ended(self, job: SlideJob, report: SlideReport) -> None:
        self._events.put(("slide_ended", {"job": job, "report": replace(report, error=None)}))


def _run_one(
    config: RunConfig,
    writer: _Writer,
    failed: Path,
    skipped: Sequence[tuple[str, str]],
) -> None:
    """In a process of its own: run on one device."""
    # A Ctrl-C at the terminal, or its end, is told to the parent alone, which tells each process
    # once: a second signal would mean "at once". Signals have been held back so far, for they
    # would have ended the imports above with a traceback. What the terminal sent meanwhile is
    # dropped, the parent's word is heard.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.signal(number, signal.SIG_IGN))
    with StopFlag() as flag, contextlib.closing(_Sender(writer)) as events:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            # Bytes are written whole, and each only under the claim of its slide: no lock.
            with failed.open("r+b") as file:
                shared: Any = mmap.mmap(file.fileno(), 0)
            run(
                config,
                listener=_SendingListener(events),
                stop=_OrOrphaned(flag),
                failed=shared,
                skipped=skipped,
            )
        except BioptimusError as exc:
            events.put(("error", {"error": exc}))


class _OrOrphaned:
    """A stop signal that is also set when the parent process is gone."""

    def __init__(self, flag: StopSignal) -> None:
        self._flag = flag
        self._parent = multiprocessing.parent_process()

    @property
    def stopped(self) -> bool:
        return self._flag.stopped or (self._parent is not None and not self._parent.is_alive())
