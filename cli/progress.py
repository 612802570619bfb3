"""The one place that speaks to the terminal while a run goes on."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

import typer

from bioptimus.counting import Tell, counted, tell_nobody

if TYPE_CHECKING:
    from rich.progress import TaskID

    from bioptimus.jobs import SlideJob, SlideReport


# What a slide is called that is skipped, but not because it is done.
HELD = "held by another job"
# A name may hold line ends, and codes that terminals obey: shown as Python writes them.
_CONTROLS = {
    code: repr(chr(code))[1:-1]
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
    if chr(code) != "\t"
}
_CONTROLS_IN_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS}
STOPPING = "stopping: finishing the batches under way; press again to stop at once"
# Told to the terminal itself, not to what stands for it in Python.
_STDERR = 2
_SHOW_CURSOR = b"\x1b[?25h\r\n"


class LineProgress:
    """One plain line per slide on stderr; the paths of finished files on stdout."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to a stream; stderr if not given."""
        self._stream = stream or sys.stderr
        self._lock = threading.Lock()
        self._slides = self._ended = self._not_begun = 0
        self._loading_since = time.monotonic()
        self.unwritten: OSError | None = None  # why paths are missing on stdout

    def __enter__(self) -> "LineProgress":
        """Nothing to start."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to end."""

    def run_started(self, slides: int) -> None:
        """Say how many slides there are, if any."""
        self._slides = slides
        if slides:
            self._line(counted(slides, "slide"))

    def loading(self, model: str) -> None:
        """Say which model is being loaded."""
        self._loading_since = time.monotonic()
        self._line(f"loading {model}")

    def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
        """Say what the search for a batch size came to."""
        self._line(f"batch size {tiles} on {device}: {reason}")

    def model_loaded(self, model: str, *, device: str) -> None:
        """Say where the model runs and how long it took to load."""
        seconds = time.monotonic() - self._loading_since
        self._line(f"{model} loaded on {device} in {seconds:.1f} s")

    def slide_started(self, job: "SlideJob") -> None:
        """Say nothing; the line comes when the slide ends."""

    def slide_planned(self, job: "SlideJob", *, tiles: int, resumed: int) -> None:
        """Say so when a slide goes on where an earlier run ended."""
        if resumed:
            self._line(f"{job.name}: resuming, {resumed} of {counted(tiles, 'tile')} are done")

    def tiles_done(self, job: "SlideJob", count: int) -> None:
        """Say nothing: no bar here."""

    def note(self, job: "SlideJob", message: str) -> None:
        """Show a message about a slide."""
        self._line(f"{job.name}: {without_name(message, job.name)}")

    def stopping(self) -> None:
        """Say that the first signal to stop was heard."""
        self._line(STOPPING)

    def abandon(self) -> None:
        """Leave the terminal fit for use: the process ends at once, from a signal handler."""

    def slide_ended(self, job: "SlideJob", report: "SlideReport") -> None:
        """One line for the slide; its file's path on stdout."""
        text = slide_line(job.name, report)
        begun = report.state != "stopped" or report.seconds.total > 0
        with self._lock, contextlib.suppress(OSError):
            # Together, or of two slides that end at once the later number might come first.
            self._ended += 1
            count = f"[{self._ended}/{self._slides}]"
            if begun:
                self._write(one_line(f"{count} {text}"))
            else:
                self._not_begun += 1
            if self._not_begun and self._ended == self._slides:
                # One line for all: those of 100,000 slides would hide what went before.
                self._write(f"{count} {counted(self._not_begun, 'slide')} stopped, not started")
        self._result(report.output)

    def _result(self, path: str) -> None:
        """A finished file's path on stdout; on a full disk the run goes on and tells later."""
        if not path or self.unwritten is not None:
            return
        with self._lock:
            try:
                print_result(path)
            except BrokenPipeError:
                raise  # the reader has had enough, as `| head`: the run ends
            except OSError as exc:
                self.unwritten = exc
                drop_unsaid()

    def _line(self, text: str) -> None:
        # A full disk under the log, a terminal that is gone: the run's report says the same.
        with self._lock, contextlib.suppress(OSError):
            self._write(one_line(text))

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class JsonProgress(LineProgress):
    """One JSON line per event on stderr."""

    def run_started(self, slides: int) -> None:
        """Event ``run_started``."""
        self._event("run_started", slides=slides)

    def loading(self, model: str) -> None:
        """Event ``loading``."""
        self._event("loading", model=model)

    def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
        """Event ``batch_size_found``."""
        self._event("batch_size_found", tiles=tiles, device=device, reason=reason)

    def model_loaded(self, model: str, *, device: str) -> None:
        """Event ``model_loaded``."""
        self._event("model_loaded", model=model, device=device)

    def slide_started(self, job: "SlideJob") -> None:
        """Event ``slide_started``."""
        self._event("slide_started", slide=str(job.path))

    def slide_planned(self, job: "SlideJob", *, tiles: int, resumed: int) -> None:
        """Event ``slide_planned``."""
        self._event("slide_planned", slide=str(job.path), tiles=tiles, resumed=resumed)

    def note(self, job: "SlideJob", message: str) -> None:
        """Event ``note``."""
        self._event("note", slide=str(job.path), message=message)

    def stopping(self) -> None:
        """Event ``stopping``."""
        self._event("stopping", message=STOPPING)

    def slide_ended(self, job: "SlideJob", report: "SlideReport") -> None:
        """Event ``slide_ended`` with the slide's report."""
        from bioptimus.batch.report import slide_record

        self._event("slide_ended", **slide_record(report))
        self._result(report.output)

    def _event(self, kind: str, **values: Any) -> None:
        self._line(event_line(kind, **values))


def event_line(kind: str, **values: Any) -> str:
    """One event as a JSON object on one line."""
    from bioptimus.json_lines import json_line

    event = {"event": kind, "time": round(time.time(), 3), **values}
    return json_line(event).decode().removesuffix("\n").translate(_CONTROLS_IN_JSON)


class JsonLines(logging.Formatter):
    """Log records as events of the kind ``log``."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON line, with a traceback inside where there is one."""
        values = {"level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return event_line("log", **values)


class BarProgress(LineProgress):
    """Bars on a terminal: overall and per slide, tiles/s, time left."""

    def __init__(self) -> None:
        """Set up the bars; they show once the run starts."""
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = Console(stderr=True)
        self._progress: Progress = Progress(
            # A name in brackets is a name, no markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._overall: TaskID | None = None
        self._bars: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._resumed: dict[str, int] = {}

    def __enter__(self) -> "BarProgress":
        """Show the bars."""
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Take the bars away."""
        self._progress.stop()

    def abandon(self) -> None:
        """Show the cursor again, which the bars have hidden."""
        show_cursor()

    def run_started(self, slides: int) -> None:
        """Start the overall bar."""
        self._slides = slides
        self._overall = self._progress.add_task("slides", total=slides, rate="")

    def loading(self, model: str) -> None:
        """Say beside the bar what is loading."""
        self._describe(f"slides, loading {model}")

    def model_loaded(self, model: str, *, device: str) -> None:
        """Say beside the bar where the model runs."""
        self._describe(f"slides ({device})")

    def _describe(self, text: str) -> None:
        if self._overall is not None:
            self._progress.update(self._overall, description=text)

    def slide_planned(self, job: "SlideJob", *, tiles: int, resumed: int) -> None:
        """Add the slide's bar."""
        super().slide_planned(job, tiles=tiles, resumed=resumed)
        self._bars[job.name] = self._progress.add_task(
            _shortened(job.name), total=tiles, completed=resumed, rate=""
        )
        self._started[job.name] = time.monotonic()
        self._resumed[job.name] = resumed

    def tiles_done(self, job: "SlideJob", count: int) -> None:
        """Move the slide's bar."""
        bar = self._bars.get(job.name)
        if bar is None:
            return  # of two processes that are stopping, one has told this slide's end already
        self._progress.update(bar, advance=count)
        elapsed = time.monotonic() - self._started[job.name]
        done = self._progress.tasks[self._progress.task_ids.index(bar)].completed
        if elapsed > 1:
            computed = done - self._resumed[job.name]
            self._progress.update(bar, rate=f"{computed / elapsed:.0f} tiles/s")

    def slide_ended(self, job: "SlideJob", report: "SlideReport") -> None:
        """Take the slide's bar away and print its line above the others."""
        bar = self._bars.pop(job.name, None)
        if bar is not None:
            self._progress.remove_task(bar)
        if self._overall is not None:
            self._progress.advance(self._overall)
        super().slide_ended(job, report)

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def bar() -> Iterator[Tell]:
    """One bar on a terminal, gone at the end of what it counts; nothing elsewhere.

    Yields:
        What moves it, and begins anew where it is told of something else.
    """
    if not sys.stderr.isatty():
        yield tell_nobody
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:

        def move(what: str, done: int, of: int) -> None:
            if not progress.tasks or progress.tasks[0].description != what:
                for task in progress.task_ids:
                    progress.remove_task(task)
                progress.add_task(what)
            progress.update(progress.task_ids[0], completed=done, total=of)
            if done == of:  # what comes next may print
                progress.stop()
            elif not progress.live.is_started:
                progress.start()

        yield move


def show_cursor() -> None:
    """Show the terminal's cursor again, which bars have hidden; in a signal handler, too."""
    # Written past rich, whose locks this very thread may hold.
    with contextlib.suppress(OSError):
        if os.isatty(_STDERR):
            os.write(_STDERR, _SHOW_CURSOR)


def choose_progress(*, log_json: bool) -> LineProgress:
    """JSON when asked for, bars on a terminal, plain lines elsewhere."""
    if log_json:
        return JsonProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


# Also bytes of a name that is not UTF-8, as the run's report writes them.
_UNFIT = _CONTROLS | {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}


def one_line(text: object) -> str:
    """A text that may hold names of files, fit for one line of a terminal."""
    return str(text).translate(_UNFIT)


def say(text: object, *, err: bool = False) -> None:
    """Print one line on stdout, or on stderr."""
    typer.echo(one_line(text), err=err)


def say_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print rows of cells in columns, numbers at the right.

    The last column is a line's open end: a terminal that is too narrow wraps it, whole.
    """
    cells = [*zip(heads, *rows, strict=True)][:-1]
    widths = [max(map(len, column)) for column in cells]
    for *row, last in (heads, *rows):
        padded = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        say(f"{'  '.join(padded)}  {last}", err=err)


def print_result(path: str) -> None:
    """A result's path, alone on a line of stdout."""
    path = path.translate(_CONTROLS)
    # Names are bytes to the system and need not be UTF-8: they leave as they came.
    sys.stdout.flush()
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    else:
        sys.stdout.write(path + "\n")
    sys.stdout.flush()


def drop_unsaid() -> None:
    """Let go of what a stream cannot get rid of: at its end, the process would fail for it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def left_out(skipped: Iterable[tuple[object, str]]) -> Iterator[str]:
    """One line for each file or folder that was met and is not part of the run."""
    return (f"left out: {path} ({reason})" for path, reason in _not_part(skipped))


def left_out_events(skipped: Iterable[tuple[object, str]]) -> Iterator[str]:
    """The same as events of the kind ``left_out``."""
    return (event_line("left_out", path=str(path), reason=why) for path, why in _not_part(skipped))


def _not_part(skipped: Iterable[tuple[object, str]]) -> Iterator[tuple[object, str]]:
    """What is no part of any slide that was taken; the run's report lists all."""
    return (each for each in skipped if not each[1].startswith("companion"))


def without_name(text: str, slide: str) -> str:
    """What is said of a slide without the name in front, where the line has it already.

    Args:
        text: A message; it may begin with the slide's file name.
        slide: The slide's path or name.
    """
    for name in (slide, PurePath(slide).name):
        # An error's text has spaces in place of line ends.
        text = text.removeprefix(f"{name}: ").removeprefix("{}: ".format(name.replace("\n", " ")))
    return text


def slide_line(name: str, report: "SlideReport") -> str:
    """One slide's outcome on one line."""
    words = [f"{name}: {report.state}"]
    if report.state in ("ok", "stopped") and report.tiles_planned:
        words.append(counted(report.tiles_done, "tile"))
        if report.tiles_failed:
            words.append(counted(report.tiles_failed, "failed tile"))
        words.append(f"{report.seconds.total:.1f} s")
        if rate := rate_text(report):
            words.append(f"{rate} tiles/s")
    if report.reason:
        # "stopped; run the same command again" has its first word already.
        words.append(without_name(report.reason, name).removeprefix(f"{report.state}; "))
    return ", ".join(words)


def rate_text(report: "SlideReport") -> str:
    """Tiles computed a second; empty where none was, as of a slide that only had to be finished."""
    computed = report.tiles_done > report.tiles_resumed
    return f"{report.tiles_per_second:.0f}" if computed else ""


def _shortened(name: str, width: int = 40) -> str:
    name = one_line(name)
    return name if len(name) <= width else "…" + name[1 - width :]
