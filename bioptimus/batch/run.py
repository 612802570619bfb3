"""Many slides on one model.

Worker threads, one for each slide under way, share one client and one pool of reader threads, so
that the model never waits for one slide to open or end.
"""

import contextlib
import gc
import time
from collections.abc import Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bioptimus.batch.config import RunConfig
from bioptimus.batch.quiet import SilentListener, Stop
from bioptimus.batch.report import RunFile
from bioptimus.batch.stage import Stager, staging_folder
from bioptimus.batch.threads import plan_threads, slides_under_way
from bioptimus.batch.work import Work, list_work
from bioptimus.batch.workers import BatchSizeSearch, RunListener, Workers, lacks_result
from bioptimus.jobs import SlideReport, StopSignal
from bioptimus.kinds import checks_kinds
from bioptimus.planning import is_tissue_model
from bioptimus.recipe import library_versions
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.loader import check_pin, load_model, prepare_environment, wanted_device
from bioptimus.runtime.runners import default_slots, require_device
from bioptimus.runtime.segmenter import open_segmenter

if TYPE_CHECKING:
    from bioptimus.runtime.server_model import BaseServerModel

__all__ = ["RunConfig", "RunListener", "RunResult", "run"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        reports: One per input of this run's share, in the order given.
        skipped: (path, reason) of files below the inputs that are not slides.
        run_file: The JSON report.
    """

    reports: tuple[SlideReport, ...]
    skipped: tuple[tuple[str, str], ...]
    run_file: Path

    @property
    def failed(self) -> bool:
        """Whether any slide failed."""
        return any(report.state == "failed" for report in self.reports)


@checks_kinds
def run(
    config: RunConfig,
    *,
    listener: RunListener | None = None,
    stop: StopSignal | None = None,
    failed: MutableSequence[int] | None = None,
    model: "BaseServerModel | None" = None,
    skipped: Sequence[tuple[str, str]] = (),
) -> RunResult:
    """Process every slide of the inputs, or this job's share of them.

    Args:
        config: What to do.
        listener: Hears the progress; None: nobody does.
        stop: Once it says so, running slides flush what they have and end as ``stopped``. None:
            only a ``KeyboardInterrupt`` does that.
        failed: A number per slide, not 0 once it has failed; shared by the processes of one run
            on several devices, so that only one of them tries such a slide.
        model: Loaded already from a file; what the configuration says of model and device is only
            reported then. How many passes it runs at once is set for this run.
        skipped: (path, reason) of files that were left out when the inputs were listed, to be
            reported with those that are left out here.

    Returns:
        A report for each slide; an error of one slide is in its report, not raised.

    A ``KeyboardInterrupt`` on the calling thread, as a notebook's stop button raises, stops the
    slides in the same way before it goes on its way.

    Raises:
        UsageError: The inputs or options make no sense, two results would share a name, or a folder
            cannot be written.
        CheckpointError: The model cannot be loaded.
        OutputError: The disk of a folder is full.
    """
    prepare_environment()
    work = list_work(config, model)
    if config.device != "auto" and any(map(lacks_result, work.jobs)):
        # Told before anything is written. Where all is done, the device does not matter.
        require_device(config.device)
    with contextlib.ExitStack() as owned:
        stager = None
        if config.stage is not None and work.jobs:
            # Before the model is loaded, and the report begun: what names the folder may be wrong.
            stager = owned.enter_context(
                Stager(staging_folder(config.stage), max_gb=config.stage_gb)
            )
        run_file = RunFile(
            config.out,
            command=config.command,
            model=work.model.spec.name,
            parameters=_parameters(config),
            inputs={
                str(job.path): job.output.relative_to(config.out).as_posix() for job in work.jobs
            },
            skipped=(*skipped, *work.skipped),
            versions=library_versions(),
        )
        owned.callback(run_file.close)
        if failed is None:
            failed = bytearray(len(work.jobs))
        listener, stop = listener or SilentListener(), stop or Stop()
        listener.run_started(len(work.jobs))
        work.tell_notes()
        reports = []
        if work.jobs:
            reports = _run_jobs(work, config, run_file, listener, stop, failed, model, stager)
    return RunResult(
        reports=tuple(reports),
        skipped=work.skipped,
        run_file=run_file.path,
    )


def _parameters(config: RunConfig) -> dict[str, object]:
    """What the report says of the options: plain values only."""
    shown = asdict(config)
    del shown["inputs"], shown["command"]
    return {key: str(value) if isinstance(value, Path) else value for key, value in shown.items()}


def _run_jobs(
    work: Work,
    config: RunConfig,
    run_file: RunFile,
    listener: RunListener,
    stop: StopSignal,
    failed: MutableSequence[int],
    model: "BaseServerModel | None",
    stager: Stager | None,
) -> list[SlideReport]:
    workers = Workers(
        work=work, config=config, run_file=run_file, listener=listener, stop=stop, failed=failed
    )
    workers.refuse()
    checkpoint = work.model.checkpoint
    workers.model_sha256 = model.checkpoint_sha256 if model else file_sha256(checkpoint)
    if model is None:
        workers.settle(slides_under_way(len(work.jobs), config.workers))
    if workers.left == 0:
        return workers.reports()
    import torch

    from bioptimus.models.clients.local import InProcessClient
    from bioptimus.runtime.batch_size import usual_batch_size

    if stop.stopped:  # in that second or two
        return workers.reports()
    if model is None and config.device != "auto":
        require_device(config.device)
    device = model.device if model else wanted_device(config.device)
    plan = plan_threads(
        on_cpu=device == "cpu",
        slides=len(work.jobs),
        workers=config.workers,
        readers=config.readers,
        threads=config.threads,
    )
    began = time.perf_counter()
    # Before loading: how many passes the model lets run side by side follows from it.
    torch.set_num_threads(plan.threads)
    if model is None:
        listener.loading(work.model.spec.name)
        # Once more: finding the slides may have taken long.
        check_pin(work.model.checkpoint, config.sha256)
        model = load_model(work.model, device)
    else:
        model.set_concurrency(default_slots(device))
    segmenter = None
    if is_tissue_model(config.slide.plan.tissue):
        segmenter = open_segmenter(config.slide.plan.tissue, device=device)
    passes = min(plan.passes, default_slots(model.device))
    auto = config.batch_size == "auto"
    fixed = None if config.batch_size == "auto" else config.batch_size
    batch_size = fixed or usual_batch_size(model, threads=plan.threads)
    with (
        _loaded_objects_out_of_collections(),
        InProcessClient(model, max_batch_size=batch_size, max_wait_ms=config.max_wait_ms) as client,
        ThreadPoolExecutor(plan.readers, thread_name_prefix="reader") as readers,
    ):
        if auto:
            search = BatchSizeSearch(client, config.slide.mode, passes, listener)
            # At once where it will be needed, while nothing else is at work.
            if any(map(lacks_result, workers.jobs_left())):
                search.run()
            workers.search = search
        load_seconds = time.perf_counter() - began
        listener.model_loaded(model.model_name, device=model.device)
        workers.client, workers.readers = client, readers
        workers.readers_per_slide = plan.readers_per_slide
        workers.openers_per_slide = plan.openers_per_slide
        workers.stager, workers.segmenter = stager, segmenter
        reports = workers.run(plan.workers)
        run_file.add_model(
            name=model.model_name,
            device=model.device,
            load_seconds=load_seconds,
            batch_size=client.max_batch_size,
            passes=client.batch_statistics(),
        )
        return reports


@contextlib.contextmanager
def _loaded_objects_out_of_collections() -> Iterator[None]:
    """Have the garbage collector look only at what comes from now on.

    torch alone brings half a million objects that live as long as the process. A collection that
    looks through them stops every thread for 0.2 s in the middle of a run.
    """
    if gc.get_freeze_count():  # the caller's own doing, not ours to undo
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
