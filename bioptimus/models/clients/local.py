"""Ask a model that is loaded in this process."""

import asyncio
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import orjson

from bioptimus.errors import (
    BioptimusError,
    RequestError,
    SchedulerClosedError,
    UsageError,
    _ForwardError,
)
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.kinds import checks_kinds
from bioptimus.models.clients.failures import log_failures
from bioptimus.models.types import InferenceMode
from bioptimus.runtime.batch_scheduler import BatchScheduler, BatchStatistics, BatchTally
from bioptimus.runtime.loader import build_server_model
from bioptimus.runtime.runners import default_slots
from bioptimus.runtime.server_model import BaseServerModel
from bioptimus.runtime.shared_passes import SharedPasses

_PREDICTION = InferenceMode.PREDICTION
_EMBEDDING = InferenceMode.EMBEDDING
_BOTH = InferenceMode.PREDICTION_WITH_EMBEDDING


class InProcessClient:
    """Runs inference in this process; satisfies :class:`~bioptimus.models.clients.Client`.

    Every method takes JSON and returns JSON, or takes a ``ModelRequest`` and returns a
    ``ModelResponse``: the same values, without encoding a tile that is in memory already.

    With dynamic batching, concurrent ``*_async`` calls share forward passes through one
    scheduler per event loop and mode, made on first use and ended when its loop has closed.
    Slides may so be processed in several threads, each with a loop, with one client; while the
    device is busy, batches of several loops share a pass. Without dynamic batching, each call is
    a pass of its own; the ``*_batch`` methods always run exactly the batch they are given.

    Methods may be called from any thread. :meth:`close`, or the end of a ``with`` block, ends all
    schedulers; the model lives on.

    Args:
        model: Loaded by :func:`bioptimus.runtime.build_server_model`.
        max_batch_size: Most tiles of one forward pass.
        max_wait_ms: How long the oldest tile waits for company, in milliseconds.
        dynamic_batching: Whether concurrent async calls share forward passes.

    Raises:
        UsageError: A number is out of range, or a value of another kind.
    """

    @checks_kinds
    def __init__(
        self,
        model: BaseServerModel,
        max_batch_size: int = 48,
        max_wait_ms: float = 30.0,
        dynamic_batching: bool = True,
    ) -> None:
        if not 0 <= max_wait_ms < math.inf:
            raise UsageError(f"max_wait_ms {max_wait_ms}: must be 0 or more")
        self._model = model
        self._max_wait_ms = max_wait_ms
        self._dynamic = dynamic_batching
        self._lock = threading.Lock()
        self._schedulers: dict[tuple[asyncio.AbstractEventLoop, InferenceMode], BatchScheduler] = {}
        self._closed = False
        self._direct = BatchTally()
        self._passes = SharedPasses(
            model, places=default_slots(model.device), max_tiles=max_batch_size
        )
        self.max_batch_size = max_batch_size

    @classmethod
    @log_failures
    def from_checkpoint(
        cls,
        model_name: str,
        checkpoint: str | Path,
        device: str = "cuda",
        *,
        assets_root: str | Path | None = None,
        max_batch_size: int = 48,
        max_wait_ms: float = 30.0,
        dynamic_batching: bool = True,
    ) -> Self:
        """Load a checkpoint and make a client for it.

        Args:
            model_name: Registry key, such as ``h1``.
            checkpoint: Path of the ``.pt2``.
            device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
            assets_root: Folder of further files, for models that need some.
            max_batch_size: See the class.
            max_wait_ms: See the class.
            dynamic_batching: See the class.

        Raises:
            UsageError: No model of that name is known.
            CheckpointError: The file cannot be loaded.
        """
        model = build_server_model(model_name, checkpoint, device, assets_root)
        return cls(model, max_batch_size, max_wait_ms, dynamic_batching)

    @property
    def model(self) -> BaseServerModel:
        """The model that answers."""
        return self._model

    @property
    def max_batch_size(self) -> int:
        """Most tiles of one forward pass; setting it holds for batches that leave later.

        Raises:
            UsageError: What it is set to is no whole number from 1.
        """
        return self._max_batch_size

    @max_batch_size.setter
    @checks_kinds
    def max_batch_size(self, tiles: int) -> None:
        if tiles < 1:
            raise UsageError(f"max_batch_size {tiles}: must be at least 1")
        with self._lock:
            self._max_batch_size = self._passes.max_tiles = tiles
            for scheduler in self._schedulers.values():
                scheduler.max_batch_size = tiles

    # One tile, in the calling thread.

    @overload
    def predict(self, body: str) -> str: ...
    @overload
    def predict(self, body: ModelRequest) -> ModelResponse: ...
    @log_failures
    def predict(self, body: str | ModelRequest) -> str | ModelResponse:
        """The prediction for one tile.

        Args:
            body: The request, or its JSON.

        Returns:
            The response, or its JSON.

        Raises:
            RequestError: The request is malformed.
            UsageError: The model makes no predictions.
            _ForwardError: The forward pass failed.
        """
        return self._answer(body, _PREDICTION)

    @overload
    def embed(self, body: str) -> str: ...
    @overload
    def embed(self, body: ModelRequest) -> ModelResponse: ...
    @log_failures
    def embed(self, body: str | ModelRequest) -> str | ModelResponse:
        """The embedding of one tile; see :meth:`predict`."""
        return self._answer(body, _EMBEDDING)

    @overload
    def predict_with_embedding(self, body: str) -> str: ...
    @overload
    def predict_with_embedding(self, body: ModelRequest) -> ModelResponse: ...
    @log_failures
    def predict_with_embedding(self, body: str | ModelRequest) -> str | ModelResponse:
        """Prediction and embedding from one forward pass; see :meth:`predict`."""
        return self._answer(body, _BOTH)

    @log_failures
    def metadata(self) -> str:
        """What is known about the model, a JSON object."""
        return orjson.dumps(self._model.get_metadata()).decode("utf-8")

    # One tile, sharing forward passes with others of the same event loop.

    @overload
    async def predict_async(self, body: str, session: Any = None) -> str: ...
    @overload
    async def predict_async(self, body: ModelRequest, session: Any = None) -> ModelResponse: ...
    @log_failures
    async def predict_async(
        self, body: str | ModelRequest, session: Any = None
    ) -> str | ModelResponse:
        """The prediction for one tile.

        Args:
            body: The request, or its JSON.
            session: Unused; other clients take an HTTP session here.

        Returns:
            The response, or its JSON.

        Raises:
            RequestError: The request is malformed; others in its batch do not notice.
            UsageError: The model makes no predictions.
            _ForwardError: The batch that the request was in failed.
            SchedulerClosedError: The client was closed.
        """
        return await self._answer_soon(body, _PREDICTION)

    @overload
    async def embed_async(self, body: str, session: Any = None) -> str: ...
    @overload
    async def embed_async(self, body: ModelRequest, session: Any = None) -> ModelResponse: ...
    @log_failures
    async def embed_async(
        self, body: str | ModelRequest, session: Any = None
    ) -> str | ModelResponse:
        """The embedding of one tile; see :meth:`predict_async`."""
        return await self._answer_soon(body, _EMBEDDING)

    @overload
    async def predict_with_embedding_async(self, body: str, session: Any = None) -> str: ...
    @overload
    async def predict_with_embedding_async(
        self, body: ModelRequest, session: Any = None
    ) -> ModelResponse: ...
    @log_failures
    async def predict_with_embedding_async(
        self, body: str | ModelRequest, session: Any = None
    ) -> str | ModelResponse:
        """Prediction and embedding from one forward pass; see :meth:`predict_async`."""
        return await self._answer_soon(body, _BOTH)

    # Several tiles, sharing forward passes with others of the same event loop.

    async def answer_many_async(
        self, requests: Sequence[ModelRequest], mode: InferenceMode
    ) -> list[ModelResponse | BioptimusError]:
        """The answers to several tiles: what the calls one by one would give, for less.

        Unlike in the ``*_batch`` methods, one that fails leaves the others alone, and the tiles
        are put into passes as room is, together with those of other calls.

        Args:
            requests: Any number of tiles.
            mode: What is asked for.

        Returns:
            In order: the answer, or the error that the call for this tile alone would raise.

        Raises:
            RequestError: One of them is no ``ModelRequest``; their JSON is not taken here.
            UsageError: The model cannot answer this mode.
            SchedulerClosedError: The client was closed before.
        """
        if not all(isinstance(request, ModelRequest) for request in requests):
            raise RequestError("requests: each must be a ModelRequest; from_json reads one")
        if self._dynamic:
            return await self._scheduler(mode).predict_all(requests)
        return [await asyncio.to_thread(self._outcome, request, mode) for request in requests]

    # Several tiles, in exactly one batch, in the calling thread.

    @overload
    def predict_batch(self, bodies: list[str]) -> list[str]: ...
    @overload
    def predict_batch(self, bodies: list[ModelRequest]) -> list[ModelResponse]: ...
    @log_failures
    def predict_batch(
        self, bodies: list[str] | list[ModelRequest]
    ) -> list[str] | list[ModelResponse]:
        """The predictions for several tiles, in one forward pass.

        Args:
            bodies: Requests, or their JSON.

        Returns:
            Responses, or their JSON, in order.

        Raises:
            RequestError: A request is malformed; a note says which. None is answered.
            UsageError: The model makes no predictions.
            _ForwardError: The forward pass failed.
        """
        return self._answer_all(bodies, _PREDICTION)

    @overload
    def embed_batch(self, bodies: list[str]) -> list[str]: ...
    @overload
    def embed_batch(self, bodies: list[ModelRequest]) -> list[ModelResponse]: ...
    @log_failures
    def embed_batch(
        self, bodies: list[str] | list[ModelRequest]
    ) -> list[str] | list[ModelResponse]:
        """The embeddings of several tiles, in one forward pass; see :meth:`predict_batch`."""
        return self._answer_all(bodies, _EMBEDDING)

    @overload
    def predict_with_embedding_batch(self, bodies: list[str]) -> list[str]: ...
    @overload
    def predict_with_embedding_batch(self, bodies: list[ModelRequest]) -> list[ModelResponse]: ...
    @log_failures
    def predict_with_embedding_batch(
        self, bodies: list[str] | list[ModelRequest]
    ) -> list[str] | list[ModelResponse]:
        """Both for several tiles, in one forward pass; see :meth:`predict_batch`."""
        return self._answer_all(bodies, _BOTH)

    # Life.

    def flush(self) -> None:
        """Say that this event loop sends no more tiles for now: those waiting leave at once.

        Raises:
            RuntimeError: Called outside an event loop.
        """
        loop = asyncio.get_running_loop()
        for mode in InferenceMode:
            scheduler = self._schedulers.get((loop, mode))
            if scheduler is not None:
                scheduler.flush()

    def batch_statistics(self, loop: asyncio.AbstractEventLoop | None = None) -> BatchStatistics:
        """Batches, tiles and seconds in forward passes so far.

        Args:
            loop: Count only the batches that this event loop's schedulers sent; some may have
                shared a pass. None: the passes themselves, also those of loops that have closed
                and of the methods that do without a loop.
        """
        if loop is None:
            return self._passes.tally.statistics() + self._direct.statistics()
        with self._lock:
            of_loop = [
                scheduler.tally.statistics()
                for (owner, _mode), scheduler in self._schedulers.items()
                if owner is loop
            ]
        return sum(of_loop, start=BatchStatistics())

    def close(self) -> None:
        """End all schedulers and wait for the batches under way; a second call does nothing.

        Requests that wait end with ``SchedulerClosedError``, and later ones are refused.
        """
        with self._lock:
            self._closed = True
            ended = list(self._schedulers.values())
            self._schedulers.clear()
        for scheduler in ended:
            scheduler.shutdown()
        for scheduler in ended:
            scheduler.shutdown(wait=True)

    def __enter__(self) -> Self:
        """The client; the ``with`` block's end closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Work.

    def _answer_all(self, bodies: Sequence[str | ModelRequest], mode: InferenceMode) -> list[Any]:
        self._refuse_if_closed()
        self._model.check_mode(mode)
        if isinstance(bodies, str) or not isinstance(bodies, Sequence):
            raise RequestError("bodies: must be a list of requests, or of their JSON")
        requests, samples = [], []
        for number, body in enumerate(bodies):
            try:
                request = _parsed(body)
                requests.append(request)
                samples.append(self._model.prepare_sample(request))
            except RequestError as exc:
                if len(bodies) > 1:
                    exc.add_note(f"request {number + 1} of {len(bodies)}")
                raise
        if not requests:
            return []
        with self._direct.timed(tiles=len(requests), capacity=self._max_batch_size):
            responses = self._model.forward_batch(samples, requests, mode)
        return [
            response.to_json() if isinstance(body, str) else response
            for body, response in zip(bodies, responses, strict=True)
        ]

    def _answer(self, body: str | ModelRequest, mode: InferenceMode) -> str | ModelResponse:
        answer: str | ModelResponse = self._answer_all([body], mode)[0]
        return answer

    def _outcome(
        self, request: ModelRequest, mode: InferenceMode
    ) -> ModelResponse | BioptimusError:
        try:
            answer: ModelResponse = self._answer_all([request], mode)[0]
        except (RequestError, _ForwardError) as exc:
            return exc
        return answer

    async def _answer_soon(
        self, body: str | ModelRequest, mode: InferenceMode
    ) -> str | ModelResponse:
        if not self._dynamic:
            return await asyncio.to_thread(self._answer, body, mode)
        scheduler = self._scheduler(mode)
        if isinstance(body, ModelRequest):
            return await scheduler.predict(body)
        return (await scheduler.predict(_parsed(body))).to_json()

    def _scheduler(self, mode: InferenceMode) -> BatchScheduler:
        scheduler = self._schedulers.get((asyncio.get_running_loop(), mode))
        return scheduler or self._new_scheduler(mode)

    def _new_scheduler(self, mode: InferenceMode) -> BatchScheduler:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._refuse_if_closed()
            for key in [key for key in self._schedulers if key[0].is_closed()]:
                self._schedulers.pop(key).shutdown()
            scheduler = BatchScheduler(
                self._model,
                self._max_batch_size,
                self._max_wait_ms,
                mode=mode,
                forward=self._passes.forward_batch,
            )
            return self._schedulers.setdefault((loop, mode), scheduler)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SchedulerClosedError("the client has been closed")


def _parsed(body: str | ModelRequest) -> ModelRequest:
    return body if isinstance(body, ModelRequest) else ModelRequest.from_json(body)
