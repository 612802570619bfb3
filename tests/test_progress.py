"""What the terminal shows while a run goes on."""

import io
import json
import threading
import time
from pathlib import Path

import pytest

from bioptimus.pipeline import SlideJob, SlideReport, SlideState, Timings
from cli.progress import BarProgress, LineProgress, event_line, one_line, slide_line


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
