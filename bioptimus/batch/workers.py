"""The threads that process the slides of a run: claims, looks at what is done, staging, the report.

One worker thread per slide under way, each with its own event loop and scheduler (inside
`process_slide`). A slide that fails ends alone.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableSequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bioptimus.batch.claims import Beat, Claim, claim_path, last_beat
from bioptimus.batch.config import RunConfig
from bioptimus.batch.inputs import SlideInput
from bioptimus.batch.report import RunFile
from bioptimus.batch.stage import Stager
from bioptimus.batch.work import Work
from bioptimus.errors import BioptimusError, LostDeviceError, OutputError
from bioptimus.inference.writers import part_of
from bioptimus.jobs import SlideJob, SlideListener, SlideReport, SlideState, StopSignal
from bioptimus.models.types import InferenceMode
from bioptimus.pipeline import error_text, process_slide, refused, settle_slide, unexpected
from bioptimus.planning import Segmenter

if TYPE_CHECKING:
    from bioptimus.models.clients.local import InProcessClient

# How long the main thread waits for a worker before it looks for signals again.
_WAIT_SECONDS = 0.2
# How long between looks at a claim: each makes a file beside it, to tell its age.
_LOOK_AGAIN_SECONDS = 2.0
_HELD = "another job is at work on it"


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


@dataclass
class BatchSizeSearch:
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
    search: BatchSizeSearch

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        if resumed < tiles:
            self.search.run()
        self.listener.slide_planned(job, tiles=tiles, resumed=resumed)

    def tiles_done(self, job: SlideJob, count: int) -> None:
        self.listener.tiles_done(job, count)

    def note(self, job: SlideJob, message: str) -> None:
        self.listener.note(job, message)


@dataclass
class Workers:
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
    search: BatchSizeSearch | None = field(init=False, default=None)
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
        """End slides in turn that are done or do not open, up to the first that takes the model.

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
        may_be_done = _may_be_done(job)
        if may_be_done:
            self._tell_started(index)
        # A claim, if only for a look, would keep others from a slide that there is work on.
        report = self._settled(slide, job)
        if report is not None and report.state == "failed":
            return self._one(index, self._settled)  # told by one process only
        if report is None or not may_be_done:
            return None
        _remove_left_claim(job)
        return report

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


def _remove_left_claim(job: SlideJob) -> None:
    """Remove the claim of a run that was killed between a result and the end of its claim."""
    if not os.path.exists(claim_path(job.output)):
        return
    # Where it cannot be removed, the result is there all the same.
    with contextlib.suppress(OutputError):
        if (claim := Claim.take(job.output)) is not None:
            claim.release()


def lacks_result(job: SlideJob) -> bool:
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
