"""What a run takes where nobody listens to it, and nobody stops it."""

from dataclasses import dataclass

from bioptimus.jobs import SlideJob, SlideReport


@dataclass
class Stop:
    """Tells a run to stop once it is set, from any thread."""

    stopped: bool = False


class SilentListener:
    """Hears a run and says nothing; a listener of one's own need only override what it tells."""

    def run_started(self, slides: int) -> None:
        """Nothing."""

    def loading(self, model: str) -> None:
        """Nothing."""

    def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
        """Nothing."""

    def model_loaded(self, model: str, *, device: str) -> None:
        """Nothing."""

    def slide_started(self, job: SlideJob) -> None:
        """Nothing."""

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        """Nothing."""

    def tiles_done(self, job: SlideJob, count: int) -> None:
        """Nothing."""

    def note(self, job: SlideJob, message: str) -> None:
        """Nothing."""

    def slide_ended(self, job: SlideJob, report: SlideReport) -> None:
        """Nothing."""
