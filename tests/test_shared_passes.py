"""Batches of several slides share a pass while the device is busy, and only then."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bioptimus.errors import OutOfDeviceMemoryError, _ForwardError
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.models.types import InferenceMode
from bioptimus.runtime.shared_passes import SharedPasses
from tests.models import BOTH, fake_model, mean_colour, request

EMBEDDING = InferenceMode.EMBEDDING
DEADLINE_S = 30.0


class Bench:
    """One place on the device, held shut until `open_gate`; batches queue before it meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, max_tiles: int = 8) -> None:
        self.model, self.runner = fake_model(BOTH)
        self.passes = SharedPasses(self.model, places=1, max_tiles=max_tiles)
        self.modes: list[InferenceMode] = []
        self.before: Callable[[Sequence[ModelRequest]], None] = lambda _: None
        self.missing = 0
        self._gate, self._entered = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(8)
        real = self.model.forward_batch

        def gated(samples: Any, requests: Any, mode: Any) -> list[ModelResponse]:
            self._entered.set()
            assert self._gate.wait(DEADLINE_S)
            self.modes.append(mode)
            self.before(requests)
            answers: list[ModelResponse] = real(samples, requests, mode)
            return (answers * 2)[: len(answers) - self.missing]

        monkeypatch.setattr(self.model, "forward_batch", gated)
        self._submit([0], EMBEDDING)  # takes the only place
        assert self._entered.wait(DEADLINE_S)

    def send(self, *seeds: int, mode: InferenceMode = EMBEDDING) -> "Future[list[ModelResponse]]":
        """Bring a batch, in a thread of its own; in the queue when this returns."""
        waiting = len(self.passes._waiting)
        sent = self._submit(seeds, mode)
        deadline = time.monotonic() + DEADLINE_S
        while len(self.passes._waiting) == waiting:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return sent

    def _submit(self, seeds: Sequence[int], mode: InferenceMode) -> "Future[list[ModelResponse]]":
        requests = [request(seed) for seed in seeds]
        samples = [self.model.prepare_sample(each) for each in requests]
        return self._pool.submit(self.passes.forward_batch, samples, requests, mode)

    def open_gate(self) -> None:
        self._gate.set()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_batches_that_queue_share_the_next_pass_and_each_gets_its_own_answers(
    bench: Bench,
) -> None:
    sent = {seeds: bench.send(*seeds) for seeds in ((1, 2), (3,), (4, 5, 6))}
    bench.open_gate()
    for seeds, future in sent.items():
        answers = future.result(DEADLINE_S)
        assert len(answers) == len(seeds)
        for seed, answer in zip(seeds, answers, strict=True):
            np.testing.assert_allclose(answer.output, mean_colour(seed), rtol=1e-5)
    assert bench.runner.batches == [1, 6]
    counted = bench.passes.tally.statistics()
    assert (counted.batches, counted.tiles, counted.capacity) == (2, 7, 16)
    assert counted.fill == 7 / 16


@pytest.mark.parametrize(("sizes", "passes"), [((5, 5, 3), [5, 8]), ((5, 3, 3), [3, 8])])
def test_a_pass_holds_no_more_than_the_maximum(
    bench: Bench, sizes: Sequence[int], passes: list[int]
) -> None:
    sent = [bench.send(*range(size)) for size in sizes]
    bench.open_gate()
    assert [len(future.result(DEADLINE_S)) for future in sent] == list(sizes)
    assert sorted(bench.runner.batches[1:]) == passes


def test_a_smaller_maximum_holds_from_the_next_pass_on(bench: Bench) -> None:
    sent = [bench.send(1, 2), bench.send(3, 4)]
    bench.passes.max_tiles = 2
    bench.open_gate()
    for future in sent:
        future.result(DEADLINE_S)
    assert bench.runner.batches == [1, 2, 2]


def test_only_batches_of_one_mode_share_a_pass(bench: Bench) -> None:
    both = InferenceMode.PREDICTION_WITH_EMBEDDING
    sent = [bench.send(1), bench.send(2, mode=both), bench.send(3)]
    bench.open_gate()
    for future in sent:
        future.result(DEADLINE_S)
    assert bench.modes in ([EMBEDDING, EMBEDDING, both], [EMBEDDING, both, EMBEDDING])


def test_a_failing_batch_does_not_fail_those_that_shared_its_pass(bench: Bench) -> None:
    def refuse(requests: Sequence[ModelRequest]) -> None:
        if any(each.x == 9 for each in requests):
            raise _ForwardError("tile 9 is cursed")

    bench.before = refuse
    good, bad = bench.send(1, 2), bench.send(9)
    bench.open_gate()
    assert len(good.result(DEADLINE_S)) == 2
    with pytest.raises(_ForwardError, match="cursed"):
        bad.result(DEADLINE_S)
    assert bench.runner.batches == [1, 2]


@pytest.mark.parametrize("missing", [1, -1])
def test_other_numbers_of_answers_than_tiles_are_given_to_nobody(
    bench: Bench, missing: int
) -> None:
    """Else each caller behind the first would get its neighbour's."""
    bench.missing = missing
    sent = {seeds: bench.send(*seeds) for seeds in ((1, 2), (3,))}
    bench.open_gate()
    for seeds, future in sent.items():
        count = len(seeds)
        told = f"^both: {count - missing} results for {count} requests$"
        with pytest.raises(_ForwardError, match=told):
            future.result(DEADLINE_S)
    assert bench.runner.batches == [1, 3, 2, 1]


def test_a_shared_pass_with_an_answer_too_few_is_tried_again_for_each_alone(bench: Bench) -> None:
    def short(requests: Sequence[ModelRequest]) -> None:
        bench.missing = int(len(requests) > 2)

    bench.before = short
    sent = {seeds: bench.send(*seeds) for seeds in ((1, 2), (3,))}
    bench.open_gate()
    for seeds, future in sent.items():
        for seed, answer in zip(seeds, future.result(DEADLINE_S), strict=True):
            np.testing.assert_allclose(answer.output, mean_colour(seed), rtol=1e-5)
    assert bench.runner.batches == [1, 3, 2, 1]


def test_lack_of_memory_is_told_to_all_of_the_pass(bench: Bench) -> None:
    def full(requests: Sequence[ModelRequest]) -> None:
        if len(requests) > 1:
            raise OutOfDeviceMemoryError("no room")

    bench.before = full
    sent = [bench.send(1), bench.send(2)]
    bench.open_gate()
    for future in sent:
        with pytest.raises(OutOfDeviceMemoryError):
            future.result(DEADLINE_S)


def test_a_batch_that_finds_a_free_place_leaves_alone_and_at_once() -> None:
    model, runner = fake_model()
    passes = SharedPasses(model, places=1, max_tiles=8)
    for seed in range(3):
        each = request(seed)
        assert len(passes.forward_batch([model.prepare_sample(each)], [each], EMBEDDING)) == 1
    assert runner.batches == [1, 1, 1]


def test_even_the_end_of_the_interpreter_in_a_pass_leaves_nobody_waiting(bench: Bench) -> None:
    def leave(_: Sequence[ModelRequest]) -> None:
        raise SystemExit

    bench.before = leave
    sent = [bench.send(1), bench.send(2)]
    bench.open_gate()
    for future in sent:
        with pytest.raises(SystemExit):
            future.result(DEADLINE_S)
