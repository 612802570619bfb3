"""What the terminal shows while a run goes on."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from bioptimus.jobs import SlideJob, SlideReport, SlideState, Timings
from bioptimus.report_html import write_html
from bioptimus.verify import verify
from cli.progress import BarProgress, LineProgress, bar, event_line, one_line, slide_line
from tests.result_files import make_result


def test_tiles_of_a_slide_whose_end_was_told_do_not_end_the_display() -> None:
    """Of two devices that are stopping, one may take up what the other has laid down."""
    job = SlideJob(path=Path("a.svs"), output=Path("a.h5"), name="a.svs")
    with BarProgress() as progress:
        progress.run_started(1)
        progress.slide_planned(job, tiles=8, resumed=0)
        progress.tiles_done(job, 4)
        progress.slide_ended(job, SlideReport(slide="a.svs", state="stopped"))
        progress.tiles_done(job, 4)
        assert progress._progress.tasks[0].completed == 1


def test_slides_that_end_at_once_are_counted_in_the_order_of_their_lines() -> None:
    job = SlideJob(path=Path("a.svs"), output=Path("a.h5"), name="a.svs")
    told = io.StringIO()
    progress = LineProgress(told)
    progress.run_started(2)
    report = SlideReport(slide="a.svs", state="ok")
    other = threading.Thread(target=progress.slide_ended, args=(job, report))

    class Meanwhile(str):
        """A reason that another slide ends over, while its own line is made."""

        def __bool__(self) -> bool:
            other.start()
            other.join(10)
            return True

    progress.slide_ended(job, SlideReport(slide="a.svs", state="ok", reason=Meanwhile("slow")))
    assert not other.is_alive()
    assert told.getvalue() == "2 slides\n[1/2] a.svs: ok\n[2/2] a.svs: ok, slow\n"


def test_slides_that_a_stopped_run_did_not_come_to_have_one_line() -> None:
    told = io.StringIO()
    progress = LineProgress(told)
    progress.run_started(4)
    for name in "abcd":
        job = SlideJob(path=Path(name), output=Path(f"{name}.h5"), name=name)
        state: SlideState = "failed" if name in "ac" else "stopped"
        progress.slide_ended(job, SlideReport(slide=name, state=state))
    assert told.getvalue().splitlines() == [
        *("4 slides", "[1/4] a: failed", "[3/4] c: failed", "[4/4] 2 slides stopped, not started"),
    ]


def test_slide_of_which_nothing_was_left_to_compute_has_no_rate() -> None:
    report = SlideReport(
        slide="a.svs", state="ok", tiles_planned=8, tiles_done=8, tiles_resumed=8,
        seconds=Timings(total=0.2),
    )  # fmt: skip
    assert slide_line("a.svs", report) == "a.svs: ok, 8 tiles, 0.2 s"
    report.tiles_resumed = 4
    assert slide_line("a.svs", report) == "a.svs: ok, 8 tiles, 0.2 s, 20 tiles/s"


def test_event_about_any_name_is_json_on_one_line() -> None:
    name = "".join(map(chr, range(160))) + "\u2028\u2029"
    (line,) = one_line(event_line("note", slide=name)).splitlines()
    assert json.loads(line)["slide"] == name


def test_line_of_a_stopped_slide_says_so_once() -> None:
    reason = "stopped; run the same command again to go on"
    report = SlideReport(slide="a.svs", state="stopped", reason=reason)
    assert slide_line("a.svs", report) == "a.svs: stopped, run the same command again to go on"
    report.reason = "not started"
    assert slide_line("a.svs", report) == "a.svs: stopped, not started"


def test_rate_of_a_bar_counts_what_this_run_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SlideJob(path=Path("a.svs"), output=Path("a.h5"), name="a.svs")
    with BarProgress() as progress:
        now = time.monotonic()
        progress.slide_planned(job, tiles=2000, resumed=1000)
        monkeypatch.setattr(time, "monotonic", lambda: now + 10)
        progress._started[job.name] = now
        progress.tiles_done(job, 50)
        assert progress._progress.tasks[0].fields["rate"] == "5 tiles/s"
        monkeypatch.undo()


def on_a_terminal(*words: str) -> str:
    """What a command shows on one."""
    ours, its = pty.openpty()
    arguments = [sys.executable, "-m", "cli", *words]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=its) as process:
        os.close(its)
        shown = b""
        # It ends in an error of the terminal's, or in nothing, by system.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65536):
                shown += piece
    os.close(ours)
    assert process.returncode == 0
    return shown.decode()


def test_commands_over_many_results_show_on_a_terminal_how_far_they_are(tmp_path: Path) -> None:
    for name in "abc":
        make_result(tmp_path / "out" / "tiny" / f"{name}.h5")
    out, made = str(tmp_path / "out"), str(tmp_path / "made")
    for words in (["verify"], ["convert", "--to", "npz", "--out", made], ["view", "--out", made]):
        assert "/3" in on_a_terminal(words[0], out, *words[1:])


def test_many_results_are_counted_as_they_are_done(tmp_path: Path) -> None:
    for name in "abc":
        make_result(tmp_path / "out" / "tiny" / f"{name}.h5")
    told: list[tuple[str, int, int]] = []
    verify(tmp_path / "out", tell=lambda *words: told.append(words))
    write_html(tmp_path / "out", tmp_path / "a.html", tell=lambda *words: told.append(words))
    assert told == [
        (what, done, 3) for what in ("files", "results", "pictures") for done in (1, 2, 3)
    ]


def test_a_bar_begins_anew_with_what_is_counted_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown: list[tuple[str, float]] = []
    update = Progress.update

    def noting(self: Progress, task: Any, **values: Any) -> None:
        update(self, task, **values)
        shown.extend((each.description, each.completed) for each in self.tasks)

    monkeypatch.setattr(Progress, "update", noting)
    with bar() as move:
        move("results", 2, 2)
        print("what is printed between them")
        move("pictures", 1, 2)
    assert shown == [("results", 2), ("pictures", 1)]
