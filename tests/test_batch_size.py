"""The search for a batch size: largest that fits and pays off, within its time, for any model."""

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from bioptimus.errors import OutOfDeviceMemoryError, UsageError, _ForwardError
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.runtime.batch_size import LARGEST, BatchSize, find_batch_size, usual_batch_size
from bioptimus.runtime.server_model import (
    BaseServerModel,
    BulkRNAServerModel,
    MaskServerModel,
)
from tests.models import EMBEDDING, FakeRunner
from tests.tiny_models import TINY, save_foreign

EMBED, PREDICT = InferenceMode.EMBEDDING, InferenceMode.PREDICTION


class Device(FakeRunner):
    """A device with a clock of its own, on which a pass costs what it is told.

    Args:
        cost: Seconds of a pass of so many tiles.
        before: Called with the tiles of each pass; may raise.
    """

    def __init__(
        self, cost: Callable[[int], float], before: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(EMBEDDING)
        self.now = 0.0
        self._cost = cost
        self._fits = before
        self._time = threading.Lock()

    def clock(self) -> float:
        return self.now

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tiles = len(inputs[0])
        if self._fits is not None:
            self._fits(tiles)
        with self._time:
            self.now += self._cost(tiles)
        return super().__call__(*inputs)


@pytest.mark.parametrize(
    ("device", "size_bytes", "threads", "tiles"),
    [
        ("cuda:0", 10_000, 1, 48),
        ("cpu", 20_000_000, 1, 4),
        ("cpu", 20_000_000, 8, 32),
        ("cpu", 20_000_000, 64, 48),
        ("cpu", 10_000, 1, 48),
    ],
)
def test_usual_batch_stays_in_the_caches_of_the_cores_that_compute_it(
    tmp_path: Path, device: str, size_bytes: int, threads: int, tiles: int
) -> None:
    checkpoint = tmp_path / "model.pt2"
    with checkpoint.open("wb") as file:
        file.truncate(size_bytes)
    runner = FakeRunner(EMBEDDING)
    model = BaseServerModel.from_runner(EMBEDDING, runner, checkpoint_path=checkpoint)
    runner.device = device
    assert usual_batch_size(model, threads=threads) == tiles


def search(device: Device, *, passes: int = 1, budget_s: float | None = None) -> BatchSize:
    model = BaseServerModel.from_runner(EMBEDDING, device)
    return find_batch_size(model, EMBED, passes=passes, budget_s=budget_s, clock=device.clock)


def filled_by(tiles: int) -> Callable[[int], float]:
    """A device that computes up to so many tiles at once, in 10 ms."""
    return lambda asked: 0.01 * max(1.0, asked / tiles)


def only(most: int, error: type[Exception] = torch.OutOfMemoryError) -> Callable[[int], None]:
    def check(tiles: int) -> None:
        if tiles > most:
            raise error("no room for this many")

    return check


def test_batch_grows_for_as_long_as_tiles_get_faster() -> None:
    device = Device(filled_by(32))
    found = search(device)
    assert (found.tiles, found.reason) == (32, "64 are no faster")
    assert found.tiles_per_second == pytest.approx(3200)
    assert sorted(set(device.batches)) == [1, 4, 8, 16, 32, 64]


def test_a_gain_of_a_few_percent_is_not_worth_a_batch_of_twice_the_size() -> None:
    # 2 % fixed cost at 8 tiles: 16 gain one percent.
    found = search(Device(lambda tiles: 0.01 * (tiles + 0.16)))
    assert (found.tiles, found.reason) == (4, "8 are no faster")


def test_what_does_not_fit_ends_the_search_with_the_last_that_did() -> None:
    found = search(Device(filled_by(1000), only(40)))
    assert (found.tiles, found.reason) == (32, "64 do not fit into memory")


def test_passes_side_by_side_have_room_for_each_other() -> None:
    lock, side_by_side = threading.Lock(), threading.Barrier(2, timeout=30)
    held = 0

    def within_64(tiles: int) -> None:
        nonlocal held
        with lock:
            held += tiles
        side_by_side.wait()
        full = held > 64
        side_by_side.wait()
        with lock:
            held -= tiles
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    found = search(Device(filled_by(1000), within_64), passes=2)
    assert (found.tiles, found.reason) == (32, "64 do not fit into memory")


def test_a_pass_that_fails_beside_one_without_memory_counts_as_lack_of_memory() -> None:
    calls = count()

    def fail(tiles: int) -> None:
        if tiles > 8:
            raise RuntimeError("CUDA out of memory" if next(calls) % 2 else "stream is broken")

    found = search(Device(filled_by(1000), fail), passes=2)
    assert (found.tiles, found.reason) == (8, "16 do not fit into memory")


def test_a_larger_batch_that_fails_for_another_reason_is_left_out_too() -> None:
    found = search(Device(filled_by(1000), only(16, ValueError)))
    assert found.tiles == 16
    assert found.reason.startswith("32 fail (means: forward pass of 32 tiles failed")


def test_a_model_that_computes_no_single_tile_is_an_error() -> None:
    with pytest.raises(OutOfDeviceMemoryError, match="with a single tile"):
        search(Device(filled_by(8), only(0)))
    with pytest.raises(_ForwardError, match="no room"):
        search(Device(filled_by(8), only(0, ValueError)))


def test_a_model_of_seconds_a_tile_is_asked_once() -> None:
    device = Device(lambda tiles: 17.0 * tiles)
    found = search(device)
    assert (found.tiles, found.reason) == (1, "trying 4 would take too long")
    assert device.batches == [1]


def test_search_keeps_within_its_time() -> None:
    # Always faster with more: only the time ends it.
    device = Device(lambda tiles: 0.2 * tiles**0.5)
    found = search(device, budget_s=8.0)
    assert 1 < found.tiles < LARGEST
    assert found.reason == f"trying {2 * found.tiles} would take too long"
    assert device.now < 8.0


def test_a_slow_round_among_quick_ones_does_not_count() -> None:
    spent = count()

    def cost(tiles: int) -> float:
        # Every third pass, somebody else has the machine.
        return filled_by(32)(tiles) * (20 if next(spent) % 3 == 0 else 1)

    assert search(Device(cost)).tiles == 32


def test_what_the_first_pass_of_a_size_prepares_does_not_count() -> None:
    seen: set[int] = set()

    def cost(tiles: int) -> float:
        prepares = tiles == 16 and tiles not in seen
        seen.add(tiles)
        return 100 * filled_by(16)(tiles) * (3 if prepares else 1)

    assert search(Device(cost), budget_s=100).tiles == 16


def test_batches_end_at_a_size_that_memory_for_waiting_tiles_allows() -> None:
    found = search(Device(lambda _: 0.001))
    assert (found.tiles, found.reason) == (LARGEST, "more are not tried")


@pytest.mark.parametrize(("largest", "expected"), [(24, 24), (8, 8), (1024, LARGEST)])
def test_a_file_is_never_asked_for_more_than_it_takes(
    tmp_path: Path, largest: int, expected: int
) -> None:
    path = save_foreign(tmp_path / "tiny.pt2", largest=largest)
    model = BaseServerModel(TINY, path.name, "cpu", tmp_path)
    asked: list[int] = []
    compute = model._runner.__call__

    def remember(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked.append(len(inputs[0]))
        return compute(*inputs)

    remember.device = "cpu"  # type: ignore[attr-defined]
    remember.max_batch = model.max_batch  # type: ignore[attr-defined]
    watched = BaseServerModel.from_runner(TINY, remember)  # type: ignore[arg-type]
    # Every round takes the same time, so a larger batch is always faster.
    ticks = count()
    found = find_batch_size(watched, EMBED, budget_s=1e6, clock=lambda: next(ticks))
    assert found.tiles == max(asked) == expected
    if largest < LARGEST:
        assert found.reason == f"{largest} are the most of one pass"


def test_models_of_genes_and_masks_are_asked_as_in_a_run() -> None:
    genes = EMBEDDING.with_(
        output_kind="prediction", embedding_dim=0, prediction_dim=2, rna_dim=5,
        omics_transform="log1p",
    )  # fmt: skip
    masks = EMBEDDING.with_(output_kind="mask", embedding_dim=0)

    class Genes(Device):
        def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            super().__call__(*inputs)
            assert inputs[1].shape == (len(inputs[0]), 5)
            return (inputs[1][:, :2],)

    class Masks(Device):
        def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            super().__call__(*inputs)
            return (inputs[0][..., 0].float(),)

    kinds: list[tuple[ModelSpec, type[BaseServerModel], Device]] = [
        (genes, BulkRNAServerModel, Genes(filled_by(16))),
        (masks, MaskServerModel, Masks(filled_by(16))),
    ]
    for spec, kind, device in kinds:
        model = kind.from_runner(spec, device)
        assert find_batch_size(model, PREDICT, clock=device.clock).tiles == 16
        with pytest.raises(UsageError, match="cannot answer embedding requests"):
            find_batch_size(model, EMBED, clock=device.clock)
