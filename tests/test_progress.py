"""What the terminal shows while a run goes on."""

from pathlib import Path

from bioptimus.pipeline import SlideJob, SlideReport
from cli.progress import BarProgress


def test_tiles_of_a_slide_whose_end_was_told_do_not_end_the_display() -> None:
    """Of two devices that are stopping, one may take up what the other has laid down."""
    job = SlideJob(path=Path("a.svs"), output=Path("a.h5"), name="a.svs")
    with BarProgress() as progress:
        progress.loading("lite0")
        progress.run_started(1, device="cpu")
        progress.slide_planned(job, tiles=8, resumed=0)
        progress.tiles_done(job, 4)
        progress.slide_ended(job, SlideReport(slide="a.svs", state="stopped"))
        progress.tiles_done(job, 4)
        assert progress._progress.tasks[0].completed == 1
