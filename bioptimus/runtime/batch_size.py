"""The batch size that a loaded model is fastest with on this machine, found by trying.

Tiles of zeros go through :meth:`~bioptimus.runtime.server_model.BaseServerModel.forward_batch`, the
call that a run makes, and as many passes run side by side as in a run. So speed and memory are
those of the run: what fits here leaves room for the passes beside it.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from bioptimus.errors import LostDeviceError, OutOfDeviceMemoryError, _ForwardError
from bioptimus.inference.schemas import ModelRequest
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.runtime.runners import release_cached_memory
from bioptimus.runtime.server_model import BaseServerModel

# Twice the tiles must be faster by this much. Less is within what two measurements of the same
# differ by, and a larger batch costs memory and waits longer to fill.
WORTHWHILE = 1.05

# Every slide under way holds three batches of tiles, of 150 kB and more each.
LARGEST = 512

# Small sizes in one step: a GPU is far from filled by them, and a CPU's speed changes little.
_FIRST, _SECOND = 1, 4

# Where nobody chose. On a CPU a batch should stay in the caches of the cores that compute it: for
# each of them 4 tiles made the built-in model 1.35 times as fast as 16 did, vision transformers
# were as fast with any number. A model with next to no weights is soon done with a tile, so that
# what each pass costs besides counts more: 48 took 0.91 of the time that 16 took.
_USUAL = 48
_ON_CPU_FOR_EACH_THREAD = 4
_SMALL_FILE_BYTES = 1_000_000

# A round of passes is repeated for so long and its quickest counts: others use the machine too.
_SECONDS_PER_SIZE = 0.3

# What a search may take; a GPU has rates to gain that repay more. Only the first round may take
# longer, since it alone tells how slow the model is.
_SECONDS_ON_CPU, _SECONDS_ON_GPU = 5.0, 15.0


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """What a search came to.

    Attributes:
        tiles: In one batch.
        tiles_per_second: Of all passes side by side, with that size.
        reason: Why not more, for people.
    """

    tiles: int
    tiles_per_second: float
    reason: str


def usual_batch_size(model: BaseServerModel, *, threads: int) -> int:
    """Tiles of one pass where nobody chose; does not try anything.

    Args:
        model: Loaded.
        threads: Threads inside one pass, on a CPU.
    """
    if model.device != "cpu" or model.checkpoint_bytes < _SMALL_FILE_BYTES:
        return _USUAL
    return min(_ON_CPU_FOR_EACH_THREAD * threads, _USUAL)


def find_batch_size(
    model: BaseServerModel,
    mode: InferenceMode,
    *,
    passes: int = 1,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BatchSize:
    """Double the batch for as long as it fits and makes the model faster.

    Args:
        model: Loaded; nothing else should use its device meanwhile.
        mode: What it will be asked for.
        passes: Forward passes that will run side by side.
        budget_s: Seconds that the search may take; a few on a CPU, some more on a GPU if not
            given. One round with a single tile is always made.
        clock: Tells the time in seconds.

    Returns:
        The size and why it is not larger: memory, no gain, the file's own limit, or time.

    Raises:
        UsageError: The model cannot answer this mode.
        LostDeviceError: The device works no more in this process.
        _ForwardError: Not even a single tile can be computed.
    """
    if budget_s is None:
        budget_s = _SECONDS_ON_CPU if model.device == "cpu" else _SECONDS_ON_GPU
    began = clock()
    trial = _Trial(model, model.check_mode(mode), passes=passes, clock=clock)
    limit = min(model.max_batch or LARGEST, LARGEST)
    reason = f"{limit} are the most of one pass" if limit < LARGEST else "more are not tried"
    tiles, rate, seconds = 0, 0.0, 0.0
    with trial:
        for size in _sizes(limit):
            left = began + budget_s - clock()
            # At least two rounds: the first with a new size pays for memory and preparations.
            if tiles and 2 * seconds * size / tiles > left:
                reason = f"trying {size} would take too long"
                break
            try:
                took = trial.seconds(size, left=left)
            except _ForwardError as exc:
                if not tiles or isinstance(exc, LostDeviceError):
                    raise
                full = isinstance(exc, OutOfDeviceMemoryError)
                reason = f"{size} do not fit into memory" if full else f"{size} fail ({exc})"
                break
            found = passes * size / max(took, 1e-9)
            if tiles and found < WORTHWHILE * rate:
                reason = f"{size} are no faster"
                break
            tiles, rate, seconds = size, found, took
    return BatchSize(tiles=tiles, tiles_per_second=rate, reason=reason)


def _sizes(limit: int) -> Iterator[int]:
    size = _FIRST
    while size < limit:
        yield size
        size = max(2 * size, _SECOND)
    yield limit


class _Trial:
    """Rounds of passes side by side, in threads as a scheduler has them.

    Owner: one search, on one thread. At its end the threads are joined, and the memory that the
    trials took on a GPU is given back to the others there.
    """

    def __init__(
        self,
        model: BaseServerModel,
        mode: InferenceMode,
        *,
        passes: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._mode = mode
        self._passes = passes
        self._clock = clock
        self._request = _request(model.model_spec)
        self._sample = model.prepare_sample(self._request)
        self._threads = ThreadPoolExecutor(passes, f"batch-size-{model.model_name}")

    def __enter__(self) -> "_Trial":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._threads.shutdown()
        if not isinstance(error, LostDeviceError):
            release_cached_memory(self._model.device)

    def seconds(self, size: int, *, left: float) -> float:
        """The time of the quickest of some rounds.

        Args:
            size: Tiles of each pass.
            left: Seconds that there are; a round that takes longer is the last.

        Raises:
            OutOfDeviceMemoryError: The passes do not fit into memory side by side.
            _ForwardError: A pass failed.
        """
        quickest = total = self._round(size)
        rounds = 1
        while total < left and (rounds < 2 or total < _SECONDS_PER_SIZE):
            took = self._round(size)
            quickest, total, rounds = min(quickest, took), total + took, rounds + 1
        return quickest

    def _round(self, size: int) -> float:
        samples, requests = [self._sample] * size, [self._request] * size
        start = self._clock()
        under_way = [
            self._threads.submit(self._model.forward_batch, samples, requests, self._mode)
            for _ in range(self._passes)
        ]
        wait(under_way)
        end = self._clock()
        failures = [failure for each in under_way if (failure := each.exception())]
        # Another pass may fail in other words for the memory that one lacked.
        failures.sort(key=lambda failure: not isinstance(failure, OutOfDeviceMemoryError))
        if failures:
            raise failures[0]
        return end - start


def _request(spec: ModelSpec) -> ModelRequest:
    """A black tile; with RNA of zeros where the model reads some."""
    side = spec.tile.size_px
    return ModelRequest.from_pixels(
        np.zeros((side, side, spec.channels), np.uint8),
        slide_name="",
        x=0,
        y=0,
        bulk_rna=np.zeros(spec.rna_dim, np.float32) if spec.rna_dim else None,
    )
