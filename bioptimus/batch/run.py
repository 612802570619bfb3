"""Many slides on one model: worker threads, claims, staging, the report.

One worker thread per slide under way, each with its own event loop and scheduler (inside
`process_slide`), on one shared client and one shared pool of reader threads, so that the model
never waits for one slide to open or end. A slide that fails ends alone.
"""

import contextlib
import gc
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from bioptimus.batch.claims import Beat, Claim, last_beat
from bioptimus.batch.inputs import SlideInput, find_inputs, model_folder, output_path
from bioptimus.batch.neighbours import first_result, made_otherwise
from bioptimus.batch.places import refuse_unwritable
from bioptimus.batch.quiet import SilentListener, Stop
from bioptimus.batch.report import RUNS_FOLDER, RunFile
from bioptimus.batch.shards import parse_shard, share
from bioptimus.batch.stage import Stager, staging_folder
from bioptimus.batch.threads import plan_threads, slides_under_way
from bioptimus.errors import BioptimusError, LostDeviceError, OutputError, UsageError
from bioptimus.inference.writers import part_of
from bioptimus.jobs import (
    SlideJob,
    SlideListener,
    SlideOptions,
    SlideReport,
    SlideState,
    StopSignal,
)
from bioptimus.kinds import check_kinds, checks_kinds
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.omics import read_bulk_rna
from bioptimus.pipeline import error_text, process_slide, refused, settle_slide, unexpected
from bioptimus.planning import Segmenter, is_tissue_model, require_tissue_file
from bioptimus.recipe import library_versions, run_parameters, scale_warning
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.loader import (
    ModelChoice,
    check_pin,
    load_model,
    prepare_environment,
    require_loaded,
    resolve_model,
    wanted_device,
)
from bioptimus.runtime.runners import check_device_name, default_slots, require_device
from bioptimus.runtime.segmenter import open_segmenter

if TYPE_CHECKING:
    from bioptimus.models.clients.local import InProcessClient
    from bioptimus.runtime.server_model import BaseServerModel

log = logging.getLogger(__name__)

# How long the main thread waits for a worker before it looks for signals again.
_WAIT_SECONDS = 0.2
# How long between looks at a claim: each makes a file beside it, to tell its age.
_LOOK_AGAIN_SECONDS = 2.0
_HELD = "another job is at work on it"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is told.

    Attributes:
        inputs: Slides, folders, globs, CSV tables, or ``-`` for a list on standard input.
        out: Folder for results; each goes to ``<out>/<model>/<folders>/<stem>.h5``.
        model: Registry key, or path of a self-describing ``.pt2``.
        checkpoint: ``.pt2`` for a registry key whose weights are the user's.
        sha256: Digest that the checkpoint must have.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; several with commas for
            `bioptimus.batch.devices.run_on_devices`.
        batch_size: Most tiles in one forward pass; None: 48, but on a CPU 4 for
            each thread of a pass, unless the model has less than a megabyte;
            ``auto``: the largest that fits and makes the model faster, found by trying.
        max_wait_ms: How long a part-filled batch waits, from the arrival of its oldest tile.
        workers: Slides under way at once; None: chosen from the cores.
        readers: Threads that read tiles, shared by all slides; None: chosen from the cores.
        threads: Threads inside one forward pass on a CPU; None: chosen.
        shard: ``i/n``, ``auto``, or None for every slide.
        stage: Folder on fast storage to copy slides to before reading; as ``$TMPDIR`` it is looked
            up where the run is.
        stage_gb: Most gigabytes staged at once.
        fail_fast: Stop at the first failed slide.
        bulk_rna: Table of TPM values for every slide that the inputs name none for.
        slide: How each slide is processed.
        command: Words of the command line, for the report.
    """

    inputs: tuple[str, ...]
    out: Path
    model: str = "lite0"
    checkpoint: Path | None = None
    sha256: str | None = None
    device: str = "auto"
    batch_size: int | Literal["auto"] | None = None
    max_wait_ms: float = 30.0
    workers: int | None = None
    readers: int | None = None
    threads: int | None = None
    shard: str | None = None
    stage: Path | None = None
    stage_gb: float = 100.0
    fail_fast: bool = False
    bulk_rna: Path | None = None
    slide: SlideOptions = field(default_factory=SlideOptions)
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no machine can do.

        Raises:
            UsageError: The device is none, a number is too small, no room is left for staged
                slides, or a value is of another kind.
        """
        for each in fields(self):
            object.__setattr__(self, each.name, _plain(getattr(self, each.name)))
        check_kinds(self)
        for device in self.devices:
            if device != "auto":
                check_device_name(device)
        for what in ("batch_size", "workers", "readers", "threads"):
            number = getattr(self, what)
            if number not in (None, "auto") and number < 1:
                raise UsageError(f"{what.replace('_', ' ')} {number}: must be at least 1")
        if not 0 <= self.max_wait_ms < math.inf:
            raise UsageError(f"max wait {self.max_wait_ms} ms: must be 0 or more")
        if not self.stage_gb > 0:
            raise UsageError(f"--stage-gb {self.stage_gb:g}: must be above 0")

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices named, one process each where there are several.

        Raises:
            UsageError: There is none.
        """
        names = tuple(name.strip() for name in self.device.split(",") if name.strip())
        if not names:
            raise UsageError(f"--device {self.device!r} names no device")
        return names


def _plain(value: Any) -> Any:
    """An option, or options, with Python's own numbers, which files and their digest hold.

    In a script they may be numpy's, such as a cell of a table.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _plain(getattr(value, f.name)) for f in fields(value)})
    return value.item() if isinstance(value, np.generic) else value


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


class RunListener(SlideListener, Protocol):
    """Hears how a run goes along; called from any thread."""

    def run_started(self, slides: int) -> None:
        """The run is about to look at so many slides; heard before all else."""

    def loading(self, model: str) -> None:
        """A slide takes the model, which is about to be loaded."""

    def batch_size_found(self, tiles: int, *, device: str, reason: str) -> None:
        """Batches of so many tiles were found the fastest; why not more."""

    def model_loaded(self, model: str, *, device: str) -> None:
        """The model is ready; not heard where no slide takes it."""

    def slide_started(self, job: SlideJob) -> None:
        """A worker takes up a slide."""

    def slide_ended(self, job: SlideJob, report: SlideReport) -> None:
        """A slide ended, one way or another."""


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
    if config.device != "auto" and any(map(_lacks_result, work.jobs)):
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


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to do.

    Attributes:
        model: The model, described but not loaded.
        slides: The slides of this run's share, as the inputs name them.
        jobs: The same slides, with where their results go.
        skipped: (path, reason) of files below the inputs that are not slides.
        notes: What the user should know before the run, one sentence each.
    """

    model: ModelChoice
    slides: tuple[SlideInput, ...]
    jobs: tuple[SlideJob, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def tell_notes(self) -> None:
        """Log the notes; in a process of several devices, the parent has done so."""
        if multiprocessing.parent_process() is None:
            for note in self.notes:
                log.warning("%s", note)


def list_work(config: RunConfig, model: "BaseServerModel | None" = None) -> Work:
    """Find the model's description and the slides of this run's share.

    Args:
        config: What to do.
        model: Loaded already, in place of the configuration's.

    Raises:
        UsageError: The inputs or options make no sense, or two results would share a name.
        CheckpointError: The model's file is missing, damaged or foreign.
    """
    refuse_unwritable(config.out, option="--out")
    if config.stage is not None:
        refuse_unwritable(staging_folder(config.stage), option="--stage")
    require_tissue_file(config.slide.plan.tissue)
    choice = _choice(config, model)
    _check_mode(choice.spec, config.slide.mode)
    for folder in (model_folder(config.out, choice.spec.name), config.out / RUNS_FOLDER):
        refuse_unwritable(folder, option="--out")
    tile = config.slide.plan.applied_to(choice.spec.tile)
    if tile.size_px != choice.spec.tile.size_px:
        raise UsageError(
            f"--tile-size-px {tile.size_px}: {choice.spec.name} reads tiles of "
            f"{choice.spec.tile.size_px} px and no others; leave it out"
        )
    inputs = find_inputs(config.inputs, exclude=(config.out,))
    _check_rna(config, choice.spec, inputs.slides)
    slides = inputs.slides
    if config.shard is not None:
        slides = share(slides, parse_shard(config.shard))
    slides = tuple(_with_problem(each, config, choice.spec) for each in slides)
    jobs = tuple(_job(each, config, choice.spec) for each in slides)
    return Work(
        model=choice,
        slides=slides,
        jobs=jobs,
        skipped=tuple((str(path), reason) for path, reason in inputs.skipped),
        notes=(*inputs.notes, *_notes(config, choice, inputs.slides, jobs)),
    )


def _notes(
    config: RunConfig, choice: ModelChoice, slides: Iterable[SlideInput], jobs: Iterable[SlideJob]
) -> Iterator[str]:
    spec, folder = choice.spec, model_folder(config.out, choice.spec.name)
    there = first_result(folder)
    # What is there of a slide of this run, the run itself refuses or replaces.
    if there is not None and there not in {job.output for job in jobs}:
        now = run_parameters(spec, file_sha256(choice.checkpoint), config.slide)
        if words := made_otherwise(there, now):
            yield (
                f"{folder}: holds results that were made otherwise, as "
                f"{there.relative_to(folder)} ({words}); pass another --out to keep them apart"
            )
    if scale := scale_warning(config.slide.plan, spec):
        yield scale
    if not spec.rna_dim and any(slide.bulk_rna is not None for slide in slides):
        # No error: one list may serve several models.
        yield f"{spec.name} reads no bulk RNA: the list's column bulk_rna is not used"


def _check_rna(config: RunConfig, spec: ModelSpec, slides: Iterable[SlideInput]) -> None:
    """Refuse RNA that the model does not read, RNA that is missing, and a table that is none.

    Raises:
        UsageError: One of these.
    """
    columns = (config.slide.gene_column, config.slide.value_column)
    options = ("--bulk-rna", "--gene-column", "--value-column")
    given = [
        option
        for option, value in zip(options, (config.bulk_rna, *columns), strict=True)
        if value is not None
    ]
    if not spec.rna_dim:
        if given:
            raise UsageError(f"{spec.name}: reads no bulk RNA; leave out {' and '.join(given)}")
    elif config.bulk_rna is not None:
        read_bulk_rna(config.bulk_rna, spec, gene_column=columns[0], value_column=columns[1])
    elif all(slide.bulk_rna is None for slide in slides):
        raise UsageError(
            f"{spec.name} reads bulk RNA; pass --bulk-rna, or a list with a bulk_rna column"
        )


def _with_problem(each: SlideInput, config: RunConfig, spec: ModelSpec) -> SlideInput:
    """The slide, with what its list lacks for it as a problem."""
    problem = each.problem
    if problem is None and each.mask is not None and not os.path.isfile(each.mask):
        problem = f"mask {each.mask}: no such file; correct the list"
    if problem is None and spec.rna_dim:
        rna = each.bulk_rna or config.bulk_rna
        if rna is None:
            problem = f"{spec.name} reads bulk RNA; pass --bulk-rna, or fill the bulk_rna column"
        elif not os.path.isfile(rna):
            problem = f"bulk RNA {rna}: no such file; correct the list"
    return each if problem is each.problem else replace(each, problem=problem)


def _choice(config: RunConfig, model: "BaseServerModel | None") -> ModelChoice:
    if model is None:
        return resolve_model(config.model, config.checkpoint, sha256=config.sha256)
    require_loaded(model)
    # A model without a file has no digest, by which results of one model are told from another's.
    return ModelChoice(
        name=model.model_name, spec=model.model_spec, checkpoint=model.checkpoint_path
    )


def _check_mode(spec: ModelSpec, mode: InferenceMode) -> None:
    if spec.output_kind == "mask":
        raise UsageError(f"{spec.name}: makes tissue masks; pass it as --tissue instead")
    if not spec.supports(mode):
        made = "embeddings" if spec.makes_embedding else "predictions"
        raise UsageError(f"{spec.name}: makes {made} only; choose another --model or command")


def _job(each: SlideInput, config: RunConfig, spec: ModelSpec) -> SlideJob:
    return SlideJob(
        path=each.path,
        output=output_path(config.out, spec.name, each),
        name=str(each.relative),
        mpp=each.mpp,
        mask=each.mask,
        bulk_rna=each.bulk_rna or config.bulk_rna,
        extra=each.extra,
        problem=each.problem,
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
    workers = _Workers(
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
            search = _BatchSizeSearch(client, config.slide.mode, passes, listener)
            # At once where it will be needed, while nothing else is at work.
            if any(map(_lacks_result, workers.jobs_left())):
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


@dataclass
class _BatchSizeSearch:
    """Finds the most tiles of one pass, once.

    Owner: `run`. A slide's thread runs it where only the slide tells that tiles are to be computed;
    the others wait for it.
    """

    client: "InProcessClient"
    mode: InferenceMode
    passes: int
    listener: RunListener
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begun: bool = False

    def run(self) -> None:
        """Give the client the size that is found; the second time, do nothing.

        Raises:
            _ForwardError: Not even a single tile can be computed.
        """
        with self._lock:
            if self._begun:
                return
            self._begun = True
            from bioptimus.runtime.batch_size import find_batch_size

            model = self.client.model
            found = find_batch_size(model, self.mode, passes=self.passes)
            self.client.max_batch_size = found.tiles
            self.listener.batch_size_found(found.tiles, device=model.device, reason=found.reason)


@dataclass(frozen=True)
class _FirstTiles:
    """Passes on what a slide says; before its first tile is computed, the batch size is found."""

    listener: SlideListener
    search: _BatchSizeSearch

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        if resumed < tiles:
            self.search.run()
        self.listener.slide_planned(job, tiles=tiles, resumed=resumed)

    def tiles_done(self, job: SlideJob, count: int) -> None:
        self.listener.tiles_done(job, count)

    def note(self, job: SlideJob, message: str) -> None:
        self.listener.note(job, message)


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


@dataclass
class _Workers:
    """The worker threads of one run.

    Owner: `run`, which starts and joins them on the calling (main) thread, so that signal
    handlers run there between short waits. It gives them the digest of the model before they settle
    slides, the client and what goes with it before they process any.
    """

    work: Work
    config: RunConfig
    run_file: RunFile
    listener: RunListener
    stop: StopSignal
    failed: MutableSequence[int]
    model_sha256: str = field(init=False)
    client: "InProcessClient" = field(init=False)
    readers: ThreadPoolExecutor = field(init=False)
    readers_per_slide: int = field(init=False)
    openers_per_slide: int = field(init=False)
    stager: Stager | None = field(init=False, default=None)
    segmenter: Segmenter | None = field(init=False, default=None)
    search: _BatchSizeSearch | None = field(init=False, default=None)
    _next: int = 0
    # Claims of slides that are being copied ahead of their turn.
    _ahead: dict[int, Claim] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Slides that another job held when their turn came, with the beat of its claim.
    _held: dict[int, Beat | None] = field(default_factory=dict)
    # Those whose beat no other has followed for long.
    _silent: dict[int, Beat] = field(default_factory=dict)
    # Slides whose start was told.
    _begun: set[int] = field(default_factory=set)
    _reports: dict[int, SlideReport] = field(default_factory=dict)
    _ending: threading.Event = field(default_factory=threading.Event)
    _fault: Exception | None = None

    def refuse(self) -> None:
        """End the slides that have a problem: it takes no model to tell."""
        for index, job in enumerate(self.work.jobs):
            if job.problem is not None and not self.stopped:
                self.listener.slide_started(job)
                self._end(index, job, refused(job))

    def settle(self, count: int) -> None:
        """End slides in turn whose result is there, up to the first that takes the model.

        Raises:
            Exception: As `run`.
            KeyboardInterrupt: As `run`.
        """
        self._run(count, self._settle_one)
        # Some of those behind the first may have ended.
        self._next = min(self._indexes_left(), default=len(self.work.jobs))

    def jobs_left(self) -> Iterator[SlideJob]:
        """Slides that have not ended."""
        return (self.work.jobs[index] for index in self._indexes_left())

    def _indexes_left(self) -> Iterator[int]:
        return (index for index in range(len(self.work.jobs)) if index not in self._reports)

    @property
    def left(self) -> int:
        """How many slides there are to take up."""
        return 0 if self.stopped else len(self.work.jobs) - len(self._reports)

    def reports(self) -> list[SlideReport]:
        """One report per job, in order, also for those that no thread came to."""
        self._end_the_rest()
        return [self._reports[index] for index in range(len(self.work.jobs))]

    def run(self, count: int) -> list[SlideReport]:
        """Process all jobs and return their reports in order.

        Raises:
            OutputError: The report could not be written; running slides were stopped. Likewise
                whatever the listener raised, such as BrokenPipeError.
            KeyboardInterrupt: It came to this thread; running slides were stopped.
        """
        if self.stager is not None:
            # One more for each worker: a process that claims more keeps them from the others.
            self.stager.plan(self.work.slides, ahead=count, take=self._take_ahead)
        try:
            self._run(count, self._process_one)
            if self._held:
                self._next = min(self._held)
                self._run(min(count, len(self._held)), self._process_held)
        finally:
            self._give_back()
        return self.reports()

    def _run(self, count: int, one: Callable[[int], SlideReport | None]) -> None:
        # Futures: a thread whose join a Ctrl-C broke off is taken for dead by Python 3.11.
        with ThreadPoolExecutor(count, thread_name_prefix="slides") as pool:
            working = {pool.submit(self._work, one) for _ in range(count)}
            try:
                while working:
                    _, working = wait(working, timeout=_WAIT_SECONDS)
            except BaseException:
                # Nobody turned Ctrl-C into a stop signal, as the commands do, and the threads
                # would go on behind the caller's back.
                self._ending.set()
                wait(working)
                self._end_the_rest()
                raise
        if self._fault is not None:
            raise self._fault

    def _end_the_rest(self) -> None:
        """Account for the slides that no thread came to."""
        for index in self._indexes_left():
            job = self.work.jobs[index]
            held = self._held_elsewhere(job) if index in self._held else None
            self._end(index, job, held or self._left(job, "stopped", "not started"))

    @property
    def stopped(self) -> bool:
        """Whether slides must stop: the run was told to, or ends early for a reason of its own."""
        return self.stop.stopped or self._ending.is_set()

    def _work(self, one: Callable[[int], SlideReport | None]) -> None:
        thread = threading.current_thread()
        while not self.stopped:
            with self._lock:
                index = self._next
                self._next += 1
            if index >= len(self.work.jobs):
                return
            if index in self._reports:
                continue  # refused, or settled
            job = self.work.jobs[index]
            thread.name = f"slide {job.name}"
            try:
                report = one(index)
                if report is not None:
                    self._end(index, job, report)
            except Exception as exc:  # noqa: BLE001
                # The report cannot be written, or nobody hears us any more: slides would go
                # unaccounted for. An error left to the thread would end it and be no one's.
                self._fault = exc
                self._ending.set()

    def _end(self, index: int, job: SlideJob, report: SlideReport) -> None:
        self._reports[index] = report
        if report.state == "failed" and (self.config.fail_fast or _lost_device(report)):
            self._ending.set()
        # First the record: a listener may find its terminal or its pipe gone.
        try:
            self.run_file.add(report)
        finally:
            self.listener.slide_ended(job, report)

    def _settle_one(self, index: int) -> SlideReport | None:
        """What became of a slide; None where it takes the model, and the others end."""
        report = self._settled_one(index)
        if report is None:
            with self._lock:
                self._next = len(self.work.jobs)
        return report

    def _settled_one(self, index: int) -> SlideReport | None:
        slide, job = self.work.slides[index], self.work.jobs[index]
        if not _may_be_done(job):
            return None
        self._tell_started(index)
        # A claim, if only for a look, would keep others from a slide that there is work on.
        report = self._settled(slide, job)
        if report is None or report.state != "failed":
            return report
        return self._one(index, self._settled)  # told by one process only

    def _tell_started(self, index: int) -> None:
        if index not in self._begun:
            self._begun.add(index)
            self.listener.slide_started(self.work.jobs[index])

    def _process_one(self, index: int) -> SlideReport | None:
        """What became of a slide; None where another job holds it, for now."""
        report = self._one(index, self._claimed)
        if report is None or report.reason != _HELD:
            return report
        self._held[index] = last_beat(self.work.jobs[index].output)
        return None

    def _process_held(self, index: int) -> SlideReport | None:
        """What became of a slide that another job held when its turn came.

        It may be free by now. Or its job is dead, as where this container or batch job was started
        again at once, and nobody else would come to the slide: such a claim is watched until it is
        given free, or gives a sign of life, or is stale. One sign since the slide's turn will do,
        and at the end of a long run it is there. For a machine of another name nobody waits: loops
        over one folder on several machines would go through it in step.
        """
        job = self.work.jobs[index]
        watched_since = None
        while not self.stopped:
            report = self._one(index, self._claimed)
            if report is None or report.reason != _HELD:
                return report
            now = last_beat(job.output)
            before = self._held[index]
            if now is not None and (
                now.runs_here or not now.may_be_before or (before is not None and now != before)
            ):
                return report
            self._held[index] = before or now
            if watched_since is None:
                watched_since = time.monotonic()
                self.listener.note(job, "waiting for a sign of life of the job that holds it")
            elif now and now == before and time.monotonic() - watched_since > now.patience_s:
                self._silent[index] = now
            until = time.monotonic() + _LOOK_AGAIN_SECONDS
            while not self.stopped and time.monotonic() < until:
                time.sleep(_WAIT_SECONDS)
        return None  # told with those that are left

    def _one(self, index: int, do: "_Do") -> SlideReport | None:
        slide, job = self.work.slides[index], self.work.jobs[index]
        self._tell_started(index)
        try:
            claim = self._claim(index)
            if claim is None:
                self._drop(slide)
                return self._held_elsewhere(job)
            with claim:
                if self.failed[index]:
                    self._drop(slide)
                    return self._left(job, "skipped", "it failed on another device")
                report = do(slide, job)
                # Still under the claim: whoever takes it next has to know.
                self.failed[index] = (
                    report is not None and report.state == "failed" and not _lost_device(report)
                )
                return report
        except BioptimusError as exc:
            return self._left(job, "failed", error_text(exc), error=exc)
        except Exception as exc:  # noqa: BLE001
            # The batch's edge: whatever happens around one slide, the others go on.
            return self._left(job, "failed", unexpected(job.name, exc), error=exc)

    def _claim(self, index: int) -> Claim | None:
        with self._lock:
            claim = self._ahead.pop(index, None)
        return claim or Claim.take(self.work.jobs[index].output, dead=self._silent.get(index))

    def _take_ahead(self, index: int) -> bool:
        """Claim a slide before its turn; False where no copy of it is wanted.

        Only under its claim a slide is copied: other processes that share the list, on this
        machine or another, copy others.
        """
        job = self.work.jobs[index]
        if self.failed[index] or not _is_to_do(job, self.config):
            return False
        # Claimed without a copy, it would not count as one of the few ahead, nor would the next.
        if self.stager is None or not self.stager.may_copy(self.work.slides[index]):
            return False
        with self._lock:
            if index < self._next or self.stopped:
                return False
            try:
                claim = Claim.take(job.output)
            except OutputError:
                return False  # told when the slide's turn comes
            if claim is None:
                return False
            self._ahead[index] = claim
        # Another process may have ended it a moment ago.
        return not self.failed[index] and _is_to_do(job, self.config)

    def _give_back(self) -> None:
        """Release the claims of slides whose turn will not come."""
        with self._lock:
            self._next = len(self.work.jobs)
            left, self._ahead = self._ahead, {}
        for claim in left.values():
            claim.release()

    def _held_elsewhere(self, job: SlideJob) -> SlideReport:
        return self._left(job, "skipped", _HELD)

    def _left(
        self, job: SlideJob, state: SlideState, reason: str, *, error: Exception | None = None
    ) -> SlideReport:
        return SlideReport(
            slide=str(job.path), state=state, reason=reason, extra=dict(job.extra), error=error
        )

    def _settled(self, _: SlideInput, job: SlideJob) -> SlideReport | None:
        return settle_slide(
            job,
            spec=self.work.model.spec,
            model_sha256=self.model_sha256,
            options=self.config.slide,
        )

    def _claimed(self, slide: SlideInput, job: SlideJob) -> SlideReport:
        if _may_be_done(job):
            # Opened for this look only, a slide takes a tenth of the time that it does to be read.
            report = self._settled(slide, job)
            if report is not None:
                self._drop(slide)
                return report
        listener: SlideListener = self.listener
        if self.search is not None:
            listener = _FirstTiles(listener, self.search)
        with self._staged(slide, job) as staged:
            return process_slide(
                replace(job, read_path=staged),
                client=self.client,
                options=self.config.slide,
                readers=self.readers,
                readers_at_once=self.readers_per_slide,
                openers_at_once=self.openers_per_slide,
                stop=self,
                listener=listener,
                segmenter=self.segmenter,
            )

    def _staged(self, slide: SlideInput, job: SlideJob) -> AbstractContextManager[Path | None]:
        """Give the path of the slide's copy; None to read it where it lies."""
        if self.stager is None:
            return contextlib.nullcontext()
        if _is_made(job, self.config):
            # Another job's work of a moment ago, it may be.
            self._drop(slide)
            return contextlib.nullcontext()
        return self.stager.staged(slide)

    def _drop(self, slide: SlideInput) -> None:
        if self.stager is not None:
            self.stager.drop(slide)


_Do = Callable[[SlideInput, SlideJob], SlideReport | None]


def _lost_device(report: SlideReport) -> bool:
    """Whether the slide failed for no fault of its own, and so would every one after it here."""
    return isinstance(report.error, LostDeviceError)


def _lacks_result(job: SlideJob) -> bool:
    """Whether tiles of the slide have to be computed, as far as it is known without opening it."""
    return job.problem is None and not os.path.exists(job.output)


def _may_be_done(job: SlideJob) -> bool:
    """Whether the result is there, and nothing beside it that would have to be tidied up."""
    return os.path.exists(job.output) and not os.path.exists(part_of(job.output))


def _is_to_do(job: SlideJob, config: RunConfig) -> bool:
    """Whether tiles of the slide may have to be computed."""
    return job.problem is None and not _is_made(job, config)


def _is_made(job: SlideJob, config: RunConfig) -> bool:
    """Whether the result is there to stay: of its slide no more is read than tells whose it is."""
    return os.path.exists(job.output) and not config.slide.overwrite
