"""Single requests in, batches to the model, each answer back to its caller."""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

from bioptimus.errors import (
    BioptimusError,
    LostDeviceError,
    OutOfDeviceMemoryError,
    RequestError,
    SchedulerClosedError,
    _ForwardError,
    in_our_words,
)
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.models.types import InferenceMode
from bioptimus.runtime.server_model import BaseServerModel, PreparedSample

logger = logging.getLogger(__name__)

_DEFAULT_MAX_BATCH_SIZE = 48
_DEFAULT_MAX_WAIT_MS = 30.0
_DEFAULT_PREPROCESS_WORKERS = min(4, os.cpu_count() or 1)
# While one batch computes, the next is assembled and copied, so that an accelerator never waits
# for us. A third would only hold memory.
_BATCHES_IN_FLIGHT = 2
# A preparing thread more for each so many requests: threads that find nothing cost more than they
# do, and a stored PNG is decoded in a tenth of a millisecond.
_REQUESTS_PER_PREPARER = 8


Forward = Callable[
    [list[PreparedSample], list[ModelRequest], InferenceMode], Sequence[ModelResponse]
]
"""Samples, what they were made from, mode → one response for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """What went through the model.

    Attributes:
        batches: Forward passes, failed ones included.
        tiles: Tiles in them.
        capacity: Tiles that those passes could have held.
        failed_batches: Passes that failed.
        forward_seconds: Time spent in them, waiting for a free runner included. Passes that
            overlap count each.
    """

    batches: int = 0
    tiles: int = 0
    capacity: int = 0
    failed_batches: int = 0
    forward_seconds: float = 0.0

    @property
    def fill(self) -> float:
        """Share of the capacity that was used, 0..1; 0 before the first batch."""
        return self.tiles / self.capacity if self.capacity else 0.0

    def __add__(self, other: "BatchStatistics") -> "BatchStatistics":
        """The sum of two."""
        return BatchStatistics(
            batches=self.batches + other.batches,
            tiles=self.tiles + other.tiles,
            capacity=self.capacity + other.capacity,
            failed_batches=self.failed_batches + other.failed_batches,
            forward_seconds=self.forward_seconds + other.forward_seconds,
        )


class BatchTally:
    """Adds up batches; any thread may count and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = BatchStatistics()

    def count(self, *, tiles: int, capacity: int, failed: bool, seconds: float) -> None:
        """Add one forward pass."""
        one = BatchStatistics(
            batches=1,
            tiles=tiles,
            capacity=capacity,
            failed_batches=int(failed),
            forward_seconds=seconds,
        )
        with self._lock:
            self._sum += one

    @contextmanager
    def timed(self, *, tiles: int, capacity: int) -> Iterator[None]:
        """Add the forward pass that the block makes; one that raises has failed."""
        began = time.perf_counter()
        failed = True
        try:
            yield
            failed = False
        finally:
            self.count(
                tiles=tiles,
                capacity=max(tiles, capacity),
                failed=failed,
                seconds=time.perf_counter() - began,
            )

    def statistics(self) -> BatchStatistics:
        """The sum so far."""
        with self._lock:
            return self._sum


class _Stage(Enum):
    """Where a request is; it only moves forward."""

    PREPARING = 1
    WAITING = 2
    GONE = 3  # handed to the model, or dropped


class _Call:
    """What a caller waits for: the outcomes of one request or of several.

    One future for all of them, since a future and a task for every tile cost more than the rest
    of a tile's way. It is done when the last outcome is there, or when the caller was cancelled.
    """

    __slots__ = ("entries", "future", "left")

    def __init__(self, requests: Sequence[ModelRequest], future: "asyncio.Future[None]") -> None:
        self.future = future
        self.entries = [_Entry(request, self) for request in requests]
        self.left = len(self.entries)


class _Entry:
    """One request on its way. Its outcome is set once, on the loop's thread."""

    __slots__ = ("arrival", "call", "outcome", "request", "sample", "stage")

    def __init__(self, request: ModelRequest, call: _Call) -> None:
        self.request: ModelRequest | None = request
        self.call = call
        self.sample: PreparedSample | None = None
        self.stage = _Stage.PREPARING
        self.arrival = 0.0  # in the queue, by the loop's clock
        self.outcome: ModelResponse | BioptimusError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for an outcome any more; any thread may ask."""
        return self.outcome is not None or self.call.future.done()

    def end(self, outcome: ModelResponse | BioptimusError) -> None:
        """Give the outcome, unless one was given or the caller was cancelled."""
        call = self.call
        if self.outcome is not None or call.future.done():
            return
        self.outcome = outcome
        self.sample = None
        self.request = None
        call.left -= 1
        if not call.left:
            call.future.set_result(None)


class BatchScheduler:
    """Groups the requests of one event loop into batches.

    Owner: the client that made it, one per loop and mode. :meth:`predict`, :meth:`predict_all`
    and :meth:`flush` run on that loop only; the first call decides which it is. :meth:`shutdown`
    may come from any thread, twice, or after the loop has closed.

    A batch leaves when ``max_batch_size`` tiles wait, or ``max_wait_ms`` after the oldest of
    those waiting entered the queue, or when :meth:`flush` says that no more will come. It runs in a
    thread, so the loop stays alive, and the next one may leave meanwhile.

    There is no loop task that could die: each step is a callback of the event loop that ends
    requests. What holds throughout: a request of a call in ``_unanswered`` is ended by its batch,
    by its own preparation, by its caller's cancellation, or by the shutdown; nothing else owns it.

    Args:
        model: Shared; see its module for what threads may do with it.
        max_batch_size: Most tiles of one forward pass. May be changed at any time.
        max_wait_ms: How long the oldest tile waits for company, in milliseconds.
        preprocess_workers: Threads that decode images.
        mode: What the model is asked for.
        batches_in_flight: Batches that may be in the model's hands at once.
        forward: Runs a batch in place of the model's own ``forward_batch``, to share passes.

    Raises:
        UsageError: The model cannot answer this mode.
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        model: BaseServerModel,
        max_batch_size: int = _DEFAULT_MAX_BATCH_SIZE,
        max_wait_ms: float = _DEFAULT_MAX_WAIT_MS,
        preprocess_workers: int = _DEFAULT_PREPROCESS_WORKERS,
        mode: InferenceMode = InferenceMode.PREDICTION,
        *,
        batches_in_flight: int = _BATCHES_IN_FLIGHT,
        forward: Forward | None = None,
    ) -> None:
        if not max_wait_ms >= 0:
            raise ValueError(f"max_wait_ms {max_wait_ms}: must be 0 or more")
        if min(preprocess_workers, batches_in_flight) < 1:
            raise ValueError("preprocess_workers and batches_in_flight must be at least 1")
        self.mode = model.check_mode(mode)
        self.max_batch_size = max_batch_size
        self.tally = BatchTally()
        self._model = model
        self._forward_batch = forward or model.forward_batch
        self._wait_s = max_wait_ms / 1000
        self._limit = batches_in_flight
        name = f"{model.model_name}-{self.mode.value}"
        self._preparers = ThreadPoolExecutor(preprocess_workers, f"prepare-{name}")
        self._runners = ThreadPoolExecutor(batches_in_flight, f"forward-{name}")
        # A thread of each before there is work: where none can be started, that is told here. Later
        # it takes no more, since work is queued before a thread is started for it.
        try:
            for pool in (self._preparers, self._runners):
                pool.submit(_nothing)
        except RuntimeError:
            self._preparers.shutdown(wait=False)
            self._runners.shutdown(wait=False)
            raise
        self._closing = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Between the loop's thread and those that prepare; deques may be used from both sides.
        self._unprepared: deque[_Entry] = deque()
        self._prepared: deque[tuple[_Entry, RequestError | None]] = deque()
        self._collecting = False
        # Everything below is touched on the loop's thread only.
        self._preparer_count = preprocess_workers
        self._preparers_busy = 0
        self._unanswered: set[_Call] = set()
        self._waiting: deque[_Entry] = deque()
        self._dead = 0  # entries in _waiting whose callers were cancelled
        self._preparing = 0
        self._in_flight = 0
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def max_batch_size(self) -> int:
        """Most tiles of one forward pass; setting it holds for every batch that leaves later."""
        return self._max_batch_size

    @max_batch_size.setter
    def max_batch_size(self, tiles: int) -> None:
        if tiles < 1:
            raise ValueError(f"max_batch_size {tiles}: must be at least 1")
        self._max_batch_size = tiles

    @property
    def closed(self) -> bool:
        """Whether :meth:`shutdown` has been called."""
        return self._closed

    async def predict(self, request: ModelRequest) -> ModelResponse:
        """Prepare a request, let it wait for company, and return the model's answer.

        Args:
            request: One tile.

        Returns:
            The answer to it.

        Raises:
            RequestError: The request is malformed; no other caller notices.
            _ForwardError: The batch it was in failed.
            SchedulerClosedError: The scheduler is, or was meanwhile, shut down.
        """
        asked = self.predict_all([request])
        # A cancelled future keeps its traceback, that keeps this frame, and this frame the pixels.
        del request
        (outcome,) = await asked
        if isinstance(outcome, ModelResponse):
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # or the error would keep the frame, and the frame the error

    async def predict_all(
        self, requests: Sequence[ModelRequest]
    ) -> list[ModelResponse | BioptimusError]:
        """What :meth:`predict` would give for each of several requests, at a third of the cost.

        They need not share a batch with each other, and may share one with others.

        Args:
            requests: Any number of tiles.

        Returns:
            In order: the answer, or the error that :meth:`predict` would raise.

        Raises:
            SchedulerClosedError: The scheduler was shut down before.
        """
        loop = self._bind()
        if not requests:
            return []
        call = _Call(requests, loop.create_future())
        del requests  # see predict
        self._unanswered.add(call)
        now = loop.time()
        for entry in call.entries:
            request = entry.request
            assert request is not None
            if request.holds_pixels and self._model.prepares_inline:
                # Wrapping pixels takes a few µs, a hop to a thread and back takes 50 and wakes
                # the loop: nothing is gained by leaving.
                try:
                    entry.sample = self._prepare(request)
                except RequestError as exc:
                    entry.end(exc)
                else:
                    self._enqueue(entry, now)
            else:
                self._preparing += 1
                self._unprepared.append(entry)
                self._start_preparer()
            del request
        try:
            await call.future
            return [entry.outcome for entry in call.entries if entry.outcome is not None]
        finally:
            self._unanswered.discard(call)
            for entry in call.entries:
                # Cancelled: the entry still lies in the queue, its pixels need not. In this
                # order: a forward thread that finds the sample has found the request before.
                entry.sample = None
                entry.request = None
                if entry.stage is _Stage.WAITING:
                    entry.stage = _Stage.GONE
                    self._dead += 1
            call.entries.clear()  # each of them names the call

    def flush(self) -> None:
        """Say that no more requests come for now: those waiting leave at once.

        Requests that are still being prepared are waited for. A hint: results do not change.
        """
        if self._waiting or self._preparing:
            self._flushing = True
            self._pump()

    def shutdown(self, *, wait: bool = False) -> None:
        """End the scheduler. Requests that wait end with ``SchedulerClosedError``.

        Batches that are in the model's hands are still answered if the loop lives on.

        Args:
            wait: Return only when the threads have ended.
        """
        with self._closing:
            first, self._closed = not self._closed, True
            loop = self._loop
        if first and loop is not None:
            try:
                loop.call_soon_threadsafe(self._abandon)
            except RuntimeError:
                pass  # The loop is closed, and nobody can wait on a closed loop.
        # Work that has not begun is dropped: _abandon has ended, or will end, its futures.
        self._preparers.shutdown(wait=wait, cancel_futures=True)
        self._runners.shutdown(wait=wait)

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is not self._loop or self._closed:
            with self._closing:
                if self._closed:
                    raise SchedulerClosedError(_CLOSED)
                if self._loop is not None:
                    raise SchedulerClosedError(
                        "the batch scheduler belongs to another event loop; use one per loop"
                    )
                self._loop = loop
        return loop

    # Stage 1: one request.

    def _prepare(self, request: ModelRequest) -> PreparedSample:
        try:
            return self._model.prepare_sample(request)
        except RequestError:
            raise
        except Exception as exc:
            # The request's edge: a model's own prepare_sample may raise anything, and whatever
            # it is concerns this request alone.
            raise RequestError(f"request cannot be prepared: {exc}") from exc

    def _start_preparer(self) -> None:
        """Hand the unprepared to one more thread, if there are enough of them to be worth it.

        A thread takes one after the other, and what it has done is collected in heaps: a hop to
        a thread and back per tile would cost as much as decoding it.
        """
        enough = _REQUESTS_PER_PREPARER * self._preparers_busy
        if self._preparers_busy < self._preparer_count and len(self._unprepared) > enough:
            try:
                self._preparers.submit(self._prepare_all)
            except RuntimeError as exc:
                if not in_our_words(exc):  # shut down by another thread; _abandon is on its way
                    return
            self._preparers_busy += 1

    def _prepare_all(self) -> None:
        """Prepare until nothing is left; in a thread. Never raises: all ends in ``_collect``."""
        while True:
            try:
                entry = self._unprepared.popleft()
            except IndexError:
                break
            error: RequestError | None = None
            request = entry.request
            if request is not None and not entry.is_over:
                try:
                    entry.sample = self._prepare(request)
                except RequestError as exc:
                    error = exc
                except BaseException as exc:  # noqa: BLE001 - no one else looks at this thread
                    error = RequestError(f"request cannot be prepared: {exc!r}")
                    error.__cause__ = exc
            self._prepared.append((entry, error))
            if not self._collecting:
                self._collecting = True
                self._call_loop(self._collect)
        self._call_loop(self._preparer_ended)

    def _preparer_ended(self) -> None:
        self._preparers_busy -= 1
        self._start_preparer()  # for what came after it had looked

    def _collect(self) -> None:
        """Take over what the preparing threads have done; on the loop's thread."""
        # First the flag, then the entries: a thread that adds one and still finds the flag set
        # can rely on the loop below.
        self._collecting = False
        assert self._loop is not None
        now = self._loop.time()
        while self._prepared:
            entry, error = self._prepared.popleft()
            self._preparing -= 1
            if entry.is_over:
                entry.sample = None
            elif error is not None:
                entry.end(error)
            else:
                self._enqueue(entry, now)
        if self._flushing:
            self._pump()  # it may have been the last one that a flush waits for

    # Stage 2: batches.

    def _enqueue(self, entry: _Entry, now: float) -> None:
        assert self._loop is not None
        entry.stage = _Stage.WAITING
        entry.arrival = now
        self._waiting.append(entry)
        if self._in_flight >= self._limit:
            return  # the next batch back pumps
        if self._flushing or len(self._waiting) - self._dead >= self._max_batch_size:
            self._pump()
        elif self._timer is None:
            self._timer = self._loop.call_at(entry.arrival + self._wait_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._pump()

    def _pump(self) -> None:
        """Let every batch leave that may, then set the clock for the oldest tile left."""
        assert self._loop is not None
        while self._in_flight < self._limit and self._may_leave(self._loop.time()):
            self._send(self._take())
        if not self._waiting and not self._preparing:
            self._flushing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Without a free place in flight no clock is needed: the next batch back pumps.
        if self._waiting and self._in_flight < self._limit:
            due = self._waiting[0].arrival + self._wait_s
            self._timer = self._loop.call_at(due, self._on_time)

    def _may_leave(self, now: float) -> bool:
        while self._waiting and self._waiting[0].is_over:
            self._drop(self._waiting.popleft())
        if not self._waiting:
            return False
        return (
            len(self._waiting) - self._dead >= self._max_batch_size
            or (self._flushing and not self._preparing)
            or now >= self._waiting[0].arrival + self._wait_s
        )

    def _take(self) -> list[_Entry]:
        """The oldest callers that still want an answer: cancelled ones cost no forward pass."""
        taken: list[_Entry] = []
        while self._waiting and len(taken) < self._max_batch_size:
            entry = self._waiting.popleft()
            if entry.is_over:
                self._drop(entry)
            else:
                entry.stage = _Stage.GONE
                taken.append(entry)
        return taken

    def _drop(self, entry: _Entry) -> None:
        if entry.stage is _Stage.GONE:
            self._dead -= 1
        else:
            entry.stage = _Stage.GONE  # cancelled a moment ago; its caller has yet to notice

    def _send(self, entries: list[_Entry]) -> None:
        self._in_flight += 1
        try:
            self._runners.submit(self._run, entries, self._max_batch_size)
        except RuntimeError as exc:
            if not in_our_words(exc):  # shut down by another thread; _abandon is on its way
                self._in_flight -= 1
                _end(entries, SchedulerClosedError(_CLOSED))

    def _run(self, entries: list[_Entry], capacity: int) -> None:
        """Run one batch; in a thread of the pool. Never raises: it ends in ``_ran``."""
        began = time.perf_counter()
        outcome: Sequence[ModelResponse] | BaseException
        try:
            outcome = self._forward(entries)
        except BaseException as exc:  # noqa: BLE001
            # The batch's edge: nothing that happens in a forward pass, SystemExit included, may
            # leave callers waiting, and no one else looks at this thread.
            outcome = exc
        if entries:
            self.tally.count(
                tiles=len(entries),
                capacity=capacity,
                failed=isinstance(outcome, BaseException),
                seconds=time.perf_counter() - began,
            )
        self._call_loop(partial(self._ran, entries, outcome))

    def _forward(self, entries: list[_Entry]) -> Sequence[ModelResponse]:
        # A caller cancelled since takes its sample away, at any moment: look at each once.
        samples: list[PreparedSample] = []
        requests: list[ModelRequest] = []
        kept: list[_Entry] = []
        for entry in entries:
            request, sample = entry.request, entry.sample
            if request is not None and sample is not None:
                samples.append(sample)
                requests.append(request)
                kept.append(entry)
        entries[:] = kept
        if not kept:
            return []
        responses = self._forward_batch(samples, requests, self.mode)
        if len(responses) != len(entries):
            raise _ForwardError(
                f"{self._model.model_name}: {len(responses)} results for {len(entries)} requests"
            )
        return responses

    def _ran(self, entries: list[_Entry], outcome: Sequence[ModelResponse] | BaseException) -> None:
        self._in_flight -= 1
        if isinstance(outcome, BaseException):
            _end(entries, outcome)
        else:
            for entry, response in zip(entries, outcome, strict=True):
                entry.end(response)
        # The traceback of a failure hangs on to the thread's frames, and those to this list.
        entries.clear()
        self._pump()

    # Ends.

    def _call_loop(self, step: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError:
            logger.debug("the event loop closed before an answer could be delivered")

    def _abandon(self) -> None:
        """End every request that is not in the model's hands; on the loop's thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unprepared.clear()
        self._waiting.clear()
        self._dead = 0
        waiting = [
            entry
            for call in self._unanswered
            for entry in call.entries
            if entry.stage is not _Stage.GONE
        ]
        for entry in waiting:
            entry.stage = _Stage.GONE
        _end(waiting, SchedulerClosedError(_CLOSED))


def _nothing() -> None:
    """Work that is done at once."""


_CLOSED = "the batch scheduler has been shut down"


def _end(entries: Iterable[_Entry], error: BaseException) -> None:
    """Give every caller that still waits an error of its own.

    One shared exception object would collect the tracebacks and notes of all of them.
    """
    kind: type[BioptimusError] = _ForwardError
    for known in (OutOfDeviceMemoryError, LostDeviceError, SchedulerClosedError):
        if isinstance(error, known):
            kind = known
    ours = isinstance(error, kind)
    message = str(error) if ours else f"forward pass failed: {error!r}"
    for entry in entries:
        if not entry.is_over:
            own = kind(message)
            own.__cause__ = error.__cause__ if ours and error.__cause__ else error
            entry.end(own)
