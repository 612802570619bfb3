"""One slide from file to file: plan, read, ask the client, write.

No threads of its own: `process_slide` runs an event loop on the calling thread, reads on the
executor it is given, and hands tiles to the client's async API. Answers are written a moment after
they come, and whatever ends the slide early leaves a part file that a rerun resumes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bioptimus.counting import counted
from bioptimus.errors import (
    BioptimusError,
    LostDeviceError,
    OutOfDeviceMemoryError,
    OutputError,
    RequestError,
    SlideOpenError,
    SlideReadError,
    StoppedError,
    _ForwardError,
    in_our_words,
    release_frames,
)
from bioptimus.inference.layout import digest_of
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.inference.writers import HDF5Writer, check_existing, look_at_existing
from bioptimus.io.crew import ALONE, Crew
from bioptimus.io.wsi import Slide, TileReader
from bioptimus.jobs import SlideJob, SlideListener, SlideOptions, SlideReport, StopSignal
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.planning import PlanOptions, Segmenter, SlidePlan, plan_slide
from bioptimus.recipe import digest_parameters, file_plan, job_options, scale_warning, slide_rna

if TYPE_CHECKING:
    from bioptimus.models.clients.local import InProcessClient

log = logging.getLogger(__name__)


# Rows are made safe against power loss this often; a kill loses nothing that was written.
_FLUSH_SECONDS = 5.0
# Answers wait so long for those of neighbouring tiles, to be written with them in fewer calls. A
# kill may lose as much.
_WRITE_SECONDS = 0.1
# Tiles that are with the model per slide, in batches: two in passes, one waiting.
_BATCHES_UNDER_WAY = 3
THUMBNAIL_PX = 1024
# A badly damaged slide has ten thousand failed tiles, of which each would say the same.
_FAILED_TILES_TOLD = 5


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
        plan_of_file = file_plan(
            slide,
            plan,
            thumbnail,
            client.model,
            options,
            planning,
            job,
            parameters,
            report.warnings,
        )
        with report.seconds.measure("write"):
            writer = HDF5Writer.open(job.output, plan_of_file, overwrite=options.overwrite)
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


@dataclass
class _SlideWork:
    """The reading, asking and writing of one slide, on one event loop.

    Some lanes run side by side. Each takes a block of tiles, has it read on a reader thread,
    asks the client for every tile of it and keeps the answers, then takes the next: so the
    tiles under way are bounded by the lanes, and the model gets its next batch while blocks
    are being read. Another task writes the answers, several blocks' at a time. Only the loop's
    thread touches the writer.
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
    _unwritten: dict[int, ModelResponse] = field(default_factory=dict)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
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
                writing = group.create_task(self._write_on())
                await asyncio.wait([group.create_task(lane()) for _ in range(self._lanes)])
                writing.cancel()
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
            self._write()
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
        self._unwritten.update(responses)
        self._answered.set()
        self.listener.tiles_done(self.job, len(rows))

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

    async def _write_on(self) -> None:
        flushed_at = time.monotonic()
        while True:
            await self._answered.wait()
            await asyncio.sleep(_WRITE_SECONDS)
            self._answered.clear()
            self._write()
            if time.monotonic() - flushed_at > _FLUSH_SECONDS:
                with self.report.seconds.measure("write"):
                    self.writer.flush()
                flushed_at = time.monotonic()

    def _write(self) -> None:
        """Write the answers that have come since the last time."""
        responses, self._unwritten = self._unwritten, {}
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
