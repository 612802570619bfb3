"""Forward passes shared by the batches of several event loops.

Each slide has a scheduler of its own, so the last batch of every slide is part-filled, and of a
small slide every batch. While all places on the device are taken, batches queue here, and those
that fit into one pass together take the next place as one. Nobody waits longer for that: a batch
that finds a free place leaves at once.
"""

import threading
from collections.abc import Sequence

from bioptimus.errors import OutOfDeviceMemoryError, _ForwardError
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.models.types import InferenceMode
from bioptimus.runtime.batch_scheduler import BatchTally
from bioptimus.runtime.server_model import BaseServerModel, PreparedSample


class _Batch:
    """What one caller brought, and what came of it."""

    __slots__ = ("error", "is_done", "mode", "requests", "responses", "samples")

    def __init__(
        self, samples: list[PreparedSample], requests: list[ModelRequest], mode: InferenceMode
    ) -> None:
        self.samples = samples
        self.requests = requests
        self.mode = mode
        self.responses: list[ModelResponse] = []
        self.error: BaseException | None = None
        self.is_done = threading.Event()


class SharedPasses:
    """Gives the places on one device to batches, several of them at a time where they fit.

    Owner: the client whose schedulers call :meth:`forward_batch`, from any thread. A batch is in
    ``_waiting`` until a thread that holds a place takes it out, under ``_lock``; that thread ends
    it, whatever happens. It has no threads of its own, so there is nothing to shut down.

    Attributes:
        max_tiles: Most tiles of one pass; may be changed at any time.
        tally: Every pass so far.

    Args:
        model: Shared by all.
        places: Passes that may run side by side.
        max_tiles: See the attributes.
    """

    def __init__(self, model: BaseServerModel, *, places: int, max_tiles: int) -> None:
        self.max_tiles = max_tiles
        self.tally = BatchTally()
        self._model = model
        self._places = threading.BoundedSemaphore(places)
        self._lock = threading.Lock()
        self._waiting: list[_Batch] = []

    def forward_batch(
        self, samples: list[PreparedSample], requests: list[ModelRequest], mode: InferenceMode
    ) -> list[ModelResponse]:
        """As :meth:`~bioptimus.runtime.server_model.BaseServerModel.forward_batch`.

        A pass that fails with the tiles of several callers is tried again for each of them
        alone, so that one's tiles do not fail for another's.

        Raises:
            OutOfDeviceMemoryError: The pass did not fit; told to all whose tiles were in it.
            _ForwardError: The pass of these tiles alone failed.
        """
        mine = _Batch(samples, requests, mode)
        with self._lock:
            self._waiting.append(mine)
        with self._places:
            together = self._take(mine)
            if together:
                self._run(together)
        mine.is_done.wait()
        if mine.error is not None:
            raise mine.error
        return mine.responses

    def _take(self, mine: _Batch) -> list[_Batch]:
        """A batch and those that fit beside it; empty if another thread has taken it already."""
        with self._lock:
            if mine not in self._waiting:
                return []
            taken, room = [mine], self.max_tiles - len(mine.samples)
            for other in self._waiting:
                if other is not mine and other.mode is mine.mode and len(other.samples) <= room:
                    taken.append(other)
                    room -= len(other.samples)
            self._waiting = [batch for batch in self._waiting if batch not in taken]
        return taken

    def _run(self, batches: Sequence[_Batch]) -> None:
        """One pass for all; ends each of them."""
        try:
            responses = self._pass(batches)
            for batch in batches:
                count = len(batch.requests)
                batch.responses, responses = responses[:count], responses[count:]
        except BaseException as exc:  # noqa: BLE001
            # The batch's edge: SystemExit included, nothing may leave callers waiting.
            if len(batches) > 1 and not isinstance(exc, OutOfDeviceMemoryError):
                for batch in batches:
                    self._run([batch])
                return
            for batch in batches:
                batch.error = exc
        for batch in batches:
            batch.is_done.set()

    def _pass(self, batches: Sequence[_Batch]) -> list[ModelResponse]:
        samples = [sample for batch in batches for sample in batch.samples]
        requests = [request for batch in batches for request in batch.requests]
        with self.tally.timed(tiles=len(requests), capacity=self.max_tiles):
            responses = self._model.forward_batch(samples, requests, batches[0].mode)
            if len(responses) != len(requests):
                raise _ForwardError(
                    f"{self._model.model_name}: {len(responses)} results for {len(requests)} "
                    "requests"
                )
        return responses
