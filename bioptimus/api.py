"""The main job as one call, for scripts and notebooks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bioptimus.batch.run import RunConfig, list_work, run
from bioptimus.errors import BioptimusError, SlideError, UsageError
from bioptimus.models.types import InferenceMode
from bioptimus.pipeline import SlideJob, SlideOptions, SlideReport

if TYPE_CHECKING:
    from bioptimus.inference.results import Result


def embed_slide(
    slide: Path | str,
    *,
    out: Path | str = "embeddings",
    model: str = "lite0",
    checkpoint: Path | str | None = None,
    device: str = "auto",
    predictions: bool = False,
    options: SlideOptions | None = None,
) -> "Result":
    """Embed one slide and open the result; what is done already is only opened.

    The model is loaded by each call. For many slides, one :func:`bioptimus.batch.run.run` over
    a folder loads it once and reads the next slide while this one ends. Works inside a running
    event loop, such as a notebook's.

    Args:
        slide: The slide file.
        out: Folder for results, as ``--out`` of the command.
        model: Registry key, or path of a self-describing ``.pt2``.
        checkpoint: ``.pt2`` for a registry key whose weights are the user's.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        predictions: Whether to write the predictions of the same forward pass too.
        options: Scale, tiles, tissue and more; their mode is set by ``predictions``.

    Raises:
        UsageError: The path holds several slides, or options contradict each other.
        SlideError: The slide cannot be read; the message says why and what to do.
        ModelError: The model cannot be loaded or run.
        OutputError: The result cannot be written, or a file from other parameters is there.
    """
    mode = InferenceMode.PREDICTION_WITH_EMBEDDING if predictions else InferenceMode.EMBEDDING
    config = RunConfig(
        inputs=(str(slide),),
        out=Path(out),
        model=model,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        device=device,
        slide=replace(options or SlideOptions(), mode=mode),
        command=("embed_slide", str(slide)),
    )
    count = len(list_work(config).jobs)
    if count != 1:
        raise UsageError(f"{slide}: holds {count} slides; give one, or use bioptimus.batch.run")
    stop = _Stop()
    # The caller's thread only waits, so that a stop button reaches it while the run goes on.
    with ThreadPoolExecutor(1, thread_name_prefix="embed-slide") as one:
        running = one.submit(run, config, listener=_Silent(), stop=stop)
        try:
            reports = running.result().reports
        except KeyboardInterrupt:
            # Rows under way land before this leaves the block; the part file resumes.
            stop.stopped = True
            raise
    return _opened(reports[0])


def _opened(report: SlideReport) -> "Result":
    from bioptimus.inference.results import open_result

    if report.output:
        return open_result(report.output)
    if isinstance(report.error, BioptimusError):
        raise report.error
    raise SlideError(f"{report.slide}: {report.reason or report.state}") from report.error


@dataclass
class _Stop:
    """Tells a run to stop."""

    stopped: bool = False


class _Silent:
    """Hears a run and says nothing."""

    def loading(self, model: str) -> None:
        """Nothing."""

    def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
        """Nothing."""

    def run_started(self, slides: int, *, device: str) -> None:
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
