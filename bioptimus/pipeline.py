"""One slide from file to file: plan, read, ask the client, write.

No threads of its own: `process_slide` runs an event loop on the calling thread, reads on the
executor it is given, and hands tiles to the client's async API. What must not be lost is
written as it arrives; whatever ends the slide early leaves a part file that a rerun resumes.
"""

import asyncio
import hashlib
import logging
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from bioptimus import __version__
from bioptimus.counting import counted
from bioptimus.errors import (
    BioptimusError,
    CheckpointError,
    LostDeviceError,
    OutOfDeviceMemoryError,
    OutputError,
    RequestError,
    SlideOpenError,
    SlideReadError,
    StoppedError,
    TissueError,
    UsageError,
    _ForwardError,
    in_our_words,
    release_frames,
)
from bioptimus.inference.layout import digest_of
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.inference.writers import FilePlan, HDF5Writer, check_existing, look_at_existing
from bioptimus.io.crew import ALONE, Crew
from bioptimus.io.wsi import CoarseImage, OpenOptions, Slide, TileReader
from bioptimus.kinds import check_kinds
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.omics import BulkRNA, read_bulk_rna
from bioptimus.planning import PlanOptions, Segmenter, SlidePlan, plan_slide
from bioptimus.runtime.archive import file_sha256
from bioptimus.tissue import SEARCH_VERSION

if TYPE_CHECKING:
    from bioptimus.models.clients.local import InProcessClient

log = logging.getLogger(__name__)

SlideState = Literal["ok", "skipped", "empty", "failed", "stopped"]

# Rows are made safe against power loss this often; a kill loses nothing that was written.
_FLUSH_SECONDS = 5.0
# Tiles that are with the model per slide, in batches: two in passes, one waiting.
_BATCHES_UNDER_WAY = 3
# The 10 of "magnification = 10 / mpp": a 10x objective gives about 1 µm per pixel.
_MAGNIFICATION_TIMES_MPP = 10.0
THUMBNAIL_PX = 1024
# A badly damaged slide has ten thousand failed tiles, of which each would say the same.
_FAILED_TILES_TOLD = 5
# Closer than this, a tile is at the model's own scale: scanners vary as much.
_SAME_SCALE_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class SlideOptions:
    """How every slide of a run is processed.

    Attributes:
        mode: What the model is asked for.
        opening: How slides are opened and their scale is found.
        plan: Tile and tissue options.
        dtype: Stored type of embeddings and predictions.
        max_failed_tiles: Share of planned tiles that may fail before the slide does, 0..1.
        overwrite: Replace a finished file that was made otherwise, or is damaged, and what a
            stopped run of other parameters left.
        gene_column: Column of gene names in bulk RNA tables; found by its usual names if None.
        value_column: Column of TPM values in them; found by its usual names if None.
    """

    mode: InferenceMode = InferenceMode.EMBEDDING
    opening: OpenOptions = field(default_factory=OpenOptions)
    plan: PlanOptions = field(default_factory=PlanOptions)
    dtype: Literal["float32", "float16"] = "float32"
    max_failed_tiles: float = 0.01
    overwrite: bool = False
    gene_column: str | None = None
    value_column: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no file can hold and no slide can satisfy.

        Raises:
            UsageError: The mode or the stored type is none, the share of tiles is not one, or a
                value is of another kind.
        """
        check_kinds(self)
        if not 0 <= self.max_failed_tiles <= 1:
            raise UsageError(f"max failed tiles {self.max_failed_tiles}: must be a share, 0 to 1")


@dataclass(frozen=True, kw_only=True)
class SlideJob:
    """One slide to process and where its result goes.

    Attributes:
        path: The slide file.
        output: Final name of the result.
        name: What messages and the report call the slide.
        read_path: Where to read the pixels from, when that is a staged copy.
        mpp: µm/px that overrides the file's, for this slide.
        mask: Tissue mask for this slide.
        bulk_rna: Table of bulk RNA for models that read it.
        extra: Further columns of the input table, carried into the report.
        problem: Why the slide cannot be processed, as far as that is known without opening it;
            without its name.
    """

    path: Path
    output: Path
    name: str
    read_path: Path | None = None
    mpp: float | None = None
    mask: Path | None = None
    bulk_rna: Path | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass
class Timings:
    """Where a slide's time went, in seconds: opening it, its plan, tiles, model, file, and all.

    ``read`` is summed over reader threads and ``forward`` over batches, so they may exceed the
    wall time. ``wait`` is how long a lane waited for the model's answers, on average over the
    lanes: near the total where the model is the bottleneck, small where reading is.
    """

    open: float = 0.0
    tissue: float = 0.0
    read: float = 0.0
    wait: float = 0.0
    forward: float = 0.0
    write: float = 0.0
    total: float = 0.0

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the wall time of a block to one of the fields."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - start)


@dataclass
class SlideReport:
    """What became of one slide.

    Attributes:
        slide: Path of the slide as given.
        state: ``ok``, ``skipped`` (done already, or another job's), ``empty`` (no tissue),
            ``failed``, or ``stopped`` (the run was told to stop; the part file resumes).
        reason: Why, where the state is not ``ok``.
        output: Path of the finished file; empty if there is none.
        tiles_planned: Tiles that the plan keeps, of a skipped slide those of its file; 0 where the
            slide did not come so far.
        tiles_done: Rows that the file or its part holds, those of earlier runs included.
        tiles_failed: Tiles that have no row, see ``failed_tiles`` of the file.
        tiles_resumed: Rows that were there before this run.
        mpp: (x, y) µm per level-0 pixel; None where the slide did not come so far.
        mpp_source: What told it.
        reader: What decoded the tiles: ``tiff``, ``openslide`` or ``tifffile``.
        warnings: What was remarkable about the slide, one sentence each.
        seconds: Where the time went.
        batches: Forward passes.
        batch_size: Most tiles of one pass at the slide's end.
        fill_share: Tiles over places of these passes, 0..1.
        extra: Further columns of the input table.
        error: What ended the slide, for callers in Python; not part of the written report.
    """

    slide: str
    state: SlideState = "failed"
    reason: str = ""
    output: str = ""
    tiles_planned: int = 0
    tiles_done: int = 0
    tiles_failed: int = 0
    tiles_resumed: int = 0
    mpp: tuple[float, float] | None = None
    mpp_source: str = ""
    reader: str = ""
    warnings: list[str] = field(default_factory=list)
    seconds: Timings = field(default_factory=Timings)
    batches: int = 0
    batch_size: int = 0
    fill_share: float = 0.0
    extra: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def tiles_per_second(self) -> float:
        """Tiles computed in this run over the wall time of the slide."""
        computed = self.tiles_done - self.tiles_resumed
        return computed / self.seconds.total if self.seconds.total > 0 else 0.0


class SlideListener(Protocol):
    """Hears how a slide goes along; called from the slide's worker thread."""

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        """The plan stands: so many tiles, of which some are in the part file already."""

    def tiles_done(self, job: SlideJob, count: int) -> None:
        """So many more tiles are written or given up."""

    def note(self, job: SlideJob, message: str) -> None:
        """Something a user should see once."""


class StopSignal(Protocol):
    """What tells a slide to stop."""

    @property
    def stopped(self) -> bool:
        """Whether to stop reading."""


def process_slide(
    job: SlideJob,
    *,
    client: "InProcessClient",
    options: SlideOptions,
    readers: Executor,
    stop: StopSignal,
    listener: SlideListener,
    segmenter: Segmenter | None = None,
    readers_at_once: int = 2,
    openers_at_once: int = 1,
) -> SlideReport:
    """Embed or predict one slide and write its file.

    Runs its own event loop on the calling thread until the slide has ended.

    Args:
        job: The slide and its output.
        client: Shared by all slides; each slide gets a scheduler of its own from it.
        options: Of the run.
        readers: Threads that read tiles; shared by all slides.
        stop: Once it says so, no more tiles are read; what is under way lands and is written.
        listener: Hears the progress.
        segmenter: Finds the tissue where the options name a model for it.
        readers_at_once: How many of the threads this slide may keep busy.
        openers_at_once: How many threads open it and make its coarse pictures, this one included.

    Returns:
        What became of the slide. An error does not leave this function: it is the report's
        ``error``, its text the ``reason``; the part file keeps what was computed.
    """
    if job.problem is not None:
        return refused(job)
    report = SlideReport(slide=str(job.path), extra=dict(job.extra))
    crew = Crew(pool=readers, at_once=openers_at_once)
    with _accounted(job, report):
        _process(
            job, report, client, options, readers, readers_at_once, crew, stop, listener, segmenter
        )
    return report


def settle_slide(
    job: SlideJob, *, spec: ModelSpec, model_sha256: str, options: SlideOptions
) -> SlideReport | None:
    """End a slide where that takes no model: its result is there, or it cannot be opened.

    Changes nothing, and so needs no claim.

    Args:
        job: The slide and its output.
        spec: Of the model.
        model_sha256: Digest of its file.
        options: Of the run.

    Returns:
        As `process_slide` would; None where only that can tell.
    """
    report = SlideReport(slide=str(job.path), extra=dict(job.extra))
    with (
        _accounted(job, report),
        _opened(job, report, spec, options, ALONE, to_read=False) as opened,
    ):
        parameters = opened.parameters(model_sha256)
        if not _is_done(job, parameters, report, overwrite=options.overwrite, tidy=False):
            return None
    return report


@contextmanager
def _accounted(job: SlideJob, report: SlideReport) -> Iterator[None]:
    """Have whatever ends the block, and its time, stand in the slide's report."""
    start = time.perf_counter()
    try:
        yield
    except StoppedError as exc:
        report.state, report.reason, report.error = "stopped", str(exc), exc
    except BioptimusError as exc:
        report.state, report.reason, report.error = "failed", error_text(exc), exc
    except Exception as exc:  # noqa: BLE001
        # The slide's edge: a fault nobody foresaw ends this slide, never the run.
        report.state, report.error = "failed", exc
        report.reason = unexpected(job.name, exc)
    if report.error is not None:
        release_frames(report.error)
    report.seconds.total = time.perf_counter() - start


def refused(job: SlideJob) -> SlideReport:
    """The report of a slide with a problem, which it takes neither file nor model to tell."""
    error = SlideOpenError(f"{job.path.name}: {job.problem}")
    return SlideReport(slide=str(job.path), reason=str(error), extra=dict(job.extra), error=error)


def unexpected(slide: str, error: Exception) -> str:
    """What to tell of an error that is not ours; one that nobody foresaw is logged, too."""
    if text := in_our_words(error):
        return text
    text = f"unexpected {type(error).__name__}: {error_text(error)}"
    log.error("%s: %s", slide, text, exc_info=log.isEnabledFor(logging.DEBUG))
    return f"{text}; run again with --verbose and report what it prints"


def error_text(error: BaseException) -> str:
    """The message of an error with its notes, on one line."""
    return "; ".join([str(error), *getattr(error, "__notes__", [])]).replace("\n", " ")


def _process(
    job: SlideJob,
    report: SlideReport,
    client: "InProcessClient",
    options: SlideOptions,
    readers: Executor,
    readers_at_once: int,
    crew: Crew,
    stop: StopSignal,
    listener: SlideListener,
    segmenter: Segmenter | None,
) -> None:
    spec = client.model.model_spec
    with _opened(job, report, spec, options, crew) as opened:
        slide, planning, bulk_rna = opened.slide, opened.planning, opened.bulk_rna
        told = len(slide.warnings)
        parameters = opened.parameters(client.model.checkpoint_sha256)
        if _is_done(job, parameters, report, overwrite=options.overwrite, tidy=True):
            return
        for warning in report.warnings:
            listener.note(job, warning)
        with report.seconds.measure("tissue"):
            plan = plan_slide(slide, spec.tile, planning, segmenter=segmenter)
        if scale := scale_warning(planning, spec):
            report.warnings.append(scale)
        report.warnings.extend(plan.warnings)
        for warning in plan.warnings if len(plan.kept) else ():  # else they are the reason
            listener.note(job, warning)
        report.tiles_planned = len(plan.kept)
        # Before the part: a slide that is refused leaves none.
        tiles = slide.tile_reader(plan.spec)
        thumbnail = slide.thumbnail(THUMBNAIL_PX)
        # Of damage that the coarse pictures met.
        for warning in slide.warnings[told:]:
            report.warnings.append(warning)
            listener.note(job, warning)
        file_plan = _file_plan(
            slide, plan, thumbnail, client, options, planning, job, parameters, report.warnings
        )
        with report.seconds.measure("write"):
            writer = HDF5Writer.open(job.output, file_plan, overwrite=options.overwrite)
        try:
            if writer.started_anew_because:
                listener.note(job, f"starting anew: {writer.started_anew_because}")
            pending = writer.pending()
            report.tiles_resumed = report.tiles_done = report.tiles_planned - len(pending)
            listener.slide_planned(job, tiles=report.tiles_planned, resumed=report.tiles_resumed)
            if len(pending):
                work = _SlideWork(
                    job=job,
                    report=report,
                    client=client,
                    options=options,
                    readers=readers,
                    readers_at_once=readers_at_once,
                    stop=stop,
                    listener=listener,
                    plan=plan,
                    tiles=tiles,
                    writer=writer,
                    bulk_rna=bulk_rna,
                )
                # By a reader meanwhile; at the end by the writer, if none got to it.
                packing = readers.submit(writer.pack_pictures)
                asyncio.run(work.run(pending))
                if not packing.cancel():
                    packing.result()
            state: Literal["ok", "empty"] = "ok" if report.tiles_planned else "empty"
            with report.seconds.measure("write"):
                writer.finish(state=state)
            if (more := report.tiles_failed - _FAILED_TILES_TOLD) > 0:
                log.warning(
                    "%s: %s failed besides; failed_tiles in %s lists all %d",
                    job.name,
                    counted(more, "tile"),
                    job.output,
                    report.tiles_failed,
                )
        finally:
            writer.close()
        report.state = state
        report.output = str(job.output)
        if state == "empty":
            report.reason = "; ".join(plan.warnings)


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A slide that is open, with what its result depends on besides the model's file."""

    slide: Slide
    spec: ModelSpec
    options: SlideOptions
    planning: PlanOptions
    bulk_rna: npt.NDArray[np.float32] | None

    def parameters(self, model_sha256: str) -> dict[str, Any]:
        return digest_parameters(
            self.slide, self.spec, model_sha256, self.options, self.planning, self.bulk_rna
        )


@contextmanager
def _opened(
    job: SlideJob,
    report: SlideReport,
    spec: ModelSpec,
    options: SlideOptions,
    crew: Crew,
    *,
    to_read: bool = True,
) -> Iterator[_Opened]:
    """Open a slide for a block, and note in its report what is found."""
    opening, planning = job_options(job, options)
    with report.seconds.measure("open"):
        rna = slide_rna(job, spec, options)
        report.warnings.extend(() if rna is None else rna.warnings)
        slide = Slide.open(job.read_path or job.path, opening, crew=crew, to_read=to_read)
    with slide:
        report.mpp, report.mpp_source = slide.mpp, slide.resolution.source
        report.reader = slide.reader if to_read else ""
        report.warnings.extend(slide.warnings)
        yield _Opened(
            slide=slide,
            spec=spec,
            options=options,
            planning=planning,
            bulk_rna=None if rna is None else rna.values,
        )


def _is_done(
    job: SlideJob,
    parameters: dict[str, Any],
    report: SlideReport,
    *,
    overwrite: bool,
    tidy: bool,
) -> bool:
    look = check_existing if tidy else look_at_existing
    try:
        # Told to replace what is damaged, it has to look for that.
        found = look(
            job.output,
            digest=digest_of(parameters),
            digest_parameters=parameters,
            whole=overwrite,
        )
    except OutputError:
        if not overwrite:
            raise
        found = None
    # The same file is not made again, also to overwrite: another device, or this job before it
    # was requeued, may have made it a moment ago.
    if found is None:
        return False
    report.state, report.reason, report.output = "skipped", "done already", str(job.output)
    report.tiles_planned, report.tiles_failed = found.tiles_planned, found.tiles_failed
    report.tiles_done = report.tiles_resumed = found.tiles_planned - found.tiles_failed
    return True


def slide_rna(job: SlideJob, spec: ModelSpec, options: SlideOptions) -> BulkRNA | None:
    """Read the bulk RNA of a slide; None for models that read none.

    Raises:
        UsageError: There is no table, or it does not fit the model.
    """
    if job.bulk_rna is None:
        if spec.rna_dim:
            raise UsageError(
                f"{job.name}: {spec.name} reads bulk RNA; pass --bulk-rna, or a bulk_rna column"
            )
        return None
    if not spec.rna_dim:
        return None  # a list may serve several models; the run says so once
    return read_bulk_rna(
        job.bulk_rna, spec, gene_column=options.gene_column, value_column=options.value_column
    )


def job_options(job: SlideJob, options: SlideOptions) -> tuple[OpenOptions, PlanOptions]:
    """The run's options with what the input table says about one slide."""
    opening, planning = options.opening.with_column(job.mpp), options.plan
    if job.mask is not None:
        planning = replace(planning, tissue=str(job.mask))
    return opening, planning


def scale_warning(planning: PlanOptions, spec: ModelSpec) -> str | None:
    """Tiles at another scale than the model was made for, told in one sentence; None if at its."""
    wanted, made_for = planning.applied_to(spec.tile).mpp, spec.tile.mpp
    if abs(wanted / made_for - 1) <= _SAME_SCALE_TOLERANCE:
        return None
    return (
        f"tiles at {wanted:g} µm/px, but {spec.name} was made for {made_for:g} µm/px: what it "
        "makes of them may be worth little; leave out --tile-mpp for the model's own scale"
    )


def digest_parameters(
    slide: Slide,
    spec: ModelSpec,
    model_sha256: str,
    options: SlideOptions,
    planning: PlanOptions,
    bulk_rna: npt.NDArray[np.float32] | None,
) -> dict[str, Any]:
    """What a result file depends on: two runs that agree here make the same file.

    The slide counts by content (size and quickhash), not by path or date. The reader does not
    count, since readers must not differ in a pixel.

    Returns:
        JSON-ready values with names that a message can show.
    """
    mask_given = planning.tissue not in ("auto", "none")
    # A mask counts by its content, not by its path.
    tissue = "mask" if mask_given else planning.tissue
    within = mask_given and planning.search_in_mask
    searched = {"tissue search version": SEARCH_VERSION} if within or tissue == "auto" else {}
    return {
        "slide size (bytes)": slide.size_bytes,
        "slide quickhash": slide.quickhash,
        "mpp": [round(value, 6) for value in slide.mpp],
        "model": spec.name,
        **run_parameters(spec, model_sha256, options),
        "min tissue": planning.min_tissue,
        "tissue": tissue,
        **searched,
        **({"search in mask": True} if within else {}),
        **({"tissue class": sorted(set(planning.tissue_class))} if planning.tissue_class else {}),
        "tissue mask sha256": _mask_sha256(Path(planning.tissue)) if mask_given else "",
        "keep pen": planning.keep_pen,
        # The values, not their file: a table may hold a column for each sample.
        "bulk RNA sha256": "" if bulk_rna is None else hashlib.sha256(bulk_rna.data).hexdigest(),
    }


def run_parameters(spec: ModelSpec, model_sha256: str, options: SlideOptions) -> dict[str, Any]:
    """What of :func:`digest_parameters` is the same for every slide of a run."""
    tile = options.plan.applied_to(spec.tile)
    return {
        "model sha256": model_sha256,
        "mode": str(options.mode),
        "tile size (px)": tile.size_px,
        "tile mpp": tile.mpp,
        "overlap (px)": tile.overlap_px,
        "icc": options.opening.icc,
        "dtype": options.dtype,
    }


def _mask_sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except CheckpointError as exc:
        # It speaks of the file as of a model.
        raise TissueError(f"mask {exc}") from exc


def rows_plan(
    plan: SlidePlan,
    spec: ModelSpec,
    options: SlideOptions,
    *,
    digest: str,
    parameters: Mapping[str, Any],
) -> FilePlan:
    """The rows of a slide's file, without what describes them.

    A part is continued or not by this alone.
    """
    mode = options.mode
    return FilePlan(
        coords=plan.coords,
        tissue_ratios=plan.tissue_ratios,
        embedding_dim=spec.embedding_dim if mode.wants_embedding else 0,
        prediction_dim=spec.prediction_dim if mode.wants_prediction else 0,
        dtype=options.dtype,
        output_names=spec.output_names if mode.wants_prediction else (),
        input_gene_names=spec.input_genes,
        digest=digest,
        digest_parameters=parameters,
    )


def _file_plan(
    slide: Slide,
    plan: SlidePlan,
    thumbnail: CoarseImage,
    client: "InProcessClient",
    options: SlideOptions,
    planning: PlanOptions,
    job: SlideJob,
    parameters: dict[str, Any],
    warnings: Sequence[str],
) -> FilePlan:
    spec = client.model.model_spec
    tile = plan.spec
    return replace(
        rows_plan(plan, spec, options, digest=digest_of(parameters), parameters=parameters),
        attributes={
            "slide_path": str(job.path.absolute()),
            "slide_name": slide.name,
            "slide_size_bytes": slide.size_bytes,
            "slide_vendor": slide.vendor,
            "slide_quickhash": slide.quickhash,
            "slide_width": slide.dimensions[0],
            "slide_height": slide.dimensions[1],
            "slide_has_icc": slide.has_icc,
            # What was done, where the digest has what was asked for.
            "icc": "srgb" if slide.icc_applied else "none",
            "mpp_x": slide.mpp[0],
            "mpp_y": slide.mpp[1],
            "mpp_source": slide.resolution.source,
            "objective_power": slide.objective_power or 0.0,
            "reader": slide.reader,
            "model_name": client.model.model_name,
            "model_sha256": client.model.checkpoint_sha256,
            # These two change what rounding makes of the rows, not what they are made from.
            "hardware": client.model.hardware,
            "compiled": client.model.is_compiled,
            # Names stand in their own datasets: an HDF5 attribute holds at most 64 KiB.
            "model_spec": spec.with_(output_names=(), input_genes=()).to_dict(),
            "mode": str(options.mode),
            "tile_size_px": tile.size_px,
            "tile_mpp": tile.mpp,
            "overlap_px": tile.overlap_px,
            "min_tissue": planning.min_tissue,
            "tissue_method": plan.mask.method,
            "warnings": list(warnings),
            "versions": library_versions(),
        },
        coords_attributes={
            "patch_size": tile.size_px,
            "patch_size_level0": round(plan.grid.tile_level0[0]),
            "level0_magnification": _MAGNIFICATION_TIMES_MPP / slide.mpp[0],
            "target_magnification": _MAGNIFICATION_TIMES_MPP / tile.mpp,
            "overlap": tile.overlap_px,
            "name": job.output.stem,
            "savetodir": str(job.output.parent.absolute()),
            "level0_width": slide.dimensions[0],
            "level0_height": slide.dimensions[1],
        },
        thumbnail=thumbnail.pixels,
        thumbnail_downsample=thumbnail.downsample,
        tissue_mask=plan.mask.mask.astype(np.uint8),
        tissue_mask_downsample=plan.mask.downsample,
    )


@cache
def _library_versions() -> dict[str, str]:
    names = ("torch", "openslide-python", "openslide-bin", "tifffile", "imagecodecs", "numpy")
    found = {"bioptimus-wsi": __version__, "python": platform.python_version()}
    for name in (*names, "opencv-python-headless", "h5py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def library_versions() -> dict[str, str]:
    """Versions of what shapes a result, for the file and the report."""
    # Looked up once: every look parses the packages' metadata files.
    return dict(_library_versions())


@dataclass
class _SlideWork:
    """The reading, asking and writing of one slide, on one event loop.

    Some lanes run side by side. Each takes a block of tiles, has it read on a reader thread,
    asks the client for every tile of it and writes the answers, then takes the next: so the
    tiles under way are bounded by the lanes, and the model gets its next batch while blocks
    are being read. Only the loop's thread touches the writer.
    """

    job: SlideJob
    report: SlideReport
    client: "InProcessClient"
    options: SlideOptions
    readers: Executor
    readers_at_once: int
    stop: StopSignal
    listener: SlideListener
    plan: SlidePlan
    tiles: TileReader
    writer: HDF5Writer
    bulk_rna: npt.NDArray[np.float32] | None = None
    _lanes: int = 1
    _unread: int = 0
    _flushed_at: float = field(default_factory=time.monotonic)
    _reading: set[Future[list[npt.NDArray[np.uint8] | SlideReadError]]] = field(default_factory=set)

    async def run(self, pending: npt.NDArray[np.int64]) -> None:
        """Process the rows that the part file lacks.

        Raises:
            StoppedError: The stop signal came; what was under way is written.
        """
        kept = self.plan.kept[pending]
        blocks = [pending[block] for block in self.tiles.blocks(self.plan.grid, kept)]
        queue = iter(blocks)
        self._lanes, self._unread = self._lane_count(blocks), len(blocks)

        async def lane() -> None:
            for rows in queue:
                if self.stop.stopped:
                    break
                await self._block(rows)

        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._lanes):
                    group.create_task(lane())
        except BaseExceptionGroup as failures:
            # The first failure ended the others; it is the one to tell. Raised below, since
            # `from None` here would take its own cause away.
            failure = _first_cause(failures)
        finally:
            # A lane that was cancelled leaves its reader thread at work on the open slide.
            wait(self._reading)
            statistics = self.client.batch_statistics(asyncio.get_running_loop())
            self.report.batches = statistics.batches
            self.report.batch_size = self.client.max_batch_size
            self.report.fill_share = statistics.fill
            self.report.seconds.forward = statistics.forward_seconds
            with self.report.seconds.measure("write"):
                self.writer.flush()
        if failure is not None:
            raise failure
        if self.stop.stopped and len(self.writer.pending()):
            raise StoppedError(f"{self.job.name}: stopped; run the same command again to go on")

    def _lane_count(self, blocks: list[npt.NDArray[np.int64]]) -> int:
        mean_block = max(1, sum(map(len, blocks)) // max(1, len(blocks)))
        with_the_model = math.ceil(_BATCHES_UNDER_WAY * self.client.max_batch_size / mean_block)
        return max(1, min(self.readers_at_once + with_the_model, len(blocks)))

    async def _block(self, rows: npt.NDArray[np.int64]) -> None:
        reading = self.readers.submit(self._read, rows)
        self._reading.add(reading)
        pixels = await asyncio.wrap_future(reading)
        self._reading.discard(reading)
        self._unread -= 1
        requests: dict[int, ModelRequest] = {}
        coords, ratios = self.plan.coords[rows].tolist(), self.plan.tissue_ratios[rows].tolist()
        for row, tile, (x, y), ratio in zip(rows.tolist(), pixels, coords, ratios, strict=True):
            if isinstance(tile, SlideReadError):
                self._fail(row, "read", tile)
                continue
            requests[row] = ModelRequest.from_pixels(
                tile,
                slide_name=self.job.name,
                x=x,
                y=y,
                tissue_ratio=ratio,
                patch_idx=row,
                resolution=self.plan.spec.mpp,
                bulk_rna=self.bulk_rna,
            )
        asked = time.perf_counter()
        responses = await self._ask(requests)
        self.report.seconds.wait += (time.perf_counter() - asked) / self._lanes
        self._write(responses)
        self.listener.tiles_done(self.job, len(rows))
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            with self.report.seconds.measure("write"):
                self.writer.flush()
            self._flushed_at = time.monotonic()

    def _read(self, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8] | SlideReadError]:
        """On a reader thread."""
        grid, kept = self.plan.grid, self.plan.kept
        start = time.perf_counter()
        block = self.tiles.read_block([grid[int(kept[row])] for row in rows])
        # A float sum raced by two readers could lose a step of a statistic, nothing else.
        self.report.seconds.read += time.perf_counter() - start
        return block

    async def _ask(self, requests: dict[int, ModelRequest]) -> dict[int, ModelResponse]:
        """Every answer that could be had; a batch that failed is asked once more."""
        answers: dict[int, ModelResponse] = {}
        retried = False
        while requests:
            batch_size = self.client.max_batch_size
            if self._unread == 0:
                # Behind the call below, which puts its tiles into the queue at once: no more
                # will come, so a part-filled batch need not wait for them.
                asyncio.get_running_loop().call_soon(self.client.flush)
            outcomes = await self.client.answer_many_async(
                list(requests.values()), self.options.mode
            )
            again: dict[int, ModelRequest] = {}
            failure: BaseException | None = None
            for (row, request), result in zip(requests.items(), outcomes, strict=True):
                if isinstance(result, ModelResponse):
                    answers[row] = result
                elif isinstance(result, RequestError):
                    self._fail(row, "request", result)
                elif isinstance(result, _ForwardError):
                    again[row], failure = request, result
                else:
                    raise result
            if isinstance(failure, OutOfDeviceMemoryError):
                self._halve_batch(batch_size, failure)
            elif failure is not None and (retried or isinstance(failure, LostDeviceError)):
                raise failure
            elif failure is not None:
                retried = True
                log.warning("%s: %s; asking once more", self.job.name, failure)
            requests = again
        return answers

    def _halve_batch(self, failed_size: int, failure: OutOfDeviceMemoryError) -> None:
        """Go on with half the batch that did not fit, for every slide of the run.

        Several lanes and slides learn of one full device: only the first of them halves.

        Raises:
            OutOfDeviceMemoryError: A single tile does not fit.
        """
        if self.client.max_batch_size < failed_size:
            return
        if failed_size <= 1:
            raise failure
        self.client.max_batch_size = failed_size // 2
        self.listener.note(
            self.job, f"out of memory on the device; going on with batches of {failed_size // 2}"
        )

    def _write(self, responses: dict[int, ModelResponse]) -> None:
        mode = self.options.mode
        rows: list[int] = []
        embeddings: list[npt.NDArray[np.float32]] = []
        predictions: list[npt.NDArray[np.float32]] = []
        for row, response in responses.items():
            embedding = response.output if mode is InferenceMode.EMBEDDING else response.embedding
            prediction = response.output if mode.wants_prediction else None
            if not response.finite:
                self._fail(row, "output", "the output holds NaN or infinite values")
                continue
            rows.append(row)
            if embedding is not None:
                embeddings.append(embedding)
            if prediction is not None:
                predictions.append(prediction)
        if not rows:
            return
        with self.report.seconds.measure("write"):
            self.writer.write_rows(
                np.array(rows, np.int64),
                embeddings=np.stack(embeddings) if embeddings else None,
                predictions=np.stack(predictions) if predictions else None,
            )
        self.report.tiles_done += len(rows)

    def _fail(self, row: int, stage: str, reason: object) -> None:
        """Record one tile as failed; too many of them fail the slide.

        Raises:
            SlideReadError: More than the allowed share of the planned tiles failed.
        """
        x, y = self.plan.coords[row]
        told = self.report.tiles_failed < _FAILED_TILES_TOLD
        level = logging.WARNING if told else logging.DEBUG
        log.log(level, "%s: tile at (%d, %d) failed (%s): %s", self.job.name, x, y, stage, reason)
        self.writer.fail_tile(row, stage=stage, reason=str(reason))
        self.report.tiles_failed += 1
        planned, failed = self.report.tiles_planned, self.report.tiles_failed
        if failed > self.options.max_failed_tiles * planned:
            raise SlideReadError(
                f"{self.job.name}: {failed} of {planned} tiles failed so far, more than "
                f"--max-failed-tiles {self.options.max_failed_tiles:g} allows; raise it to go on "
                f"without them, or mend what the last one tells: {reason}"
            )


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
