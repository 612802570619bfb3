"""Batches leave when they should, errors reach those they concern, and no caller ever hangs."""

import asyncio
import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from bioptimus.errors import (
    OutOfDeviceMemoryError,
    RequestError,
    SchedulerClosedError,
    UsageError,
    _ForwardError,
)
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.models.types import InferenceMode
from bioptimus.runtime.batch_scheduler import BatchScheduler
from bioptimus.runtime.server_model import BaseServerModel, PreparedSample
from tests.models import BOTH, EMBEDDING, FakeRunner, fake_model, mean_colour, pixels, request

# Longer than any test takes: a batch that leaves in time did so for another reason.
NEVER_MS = 3_600_000.0
DEADLINE_S = 30.0


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    return asyncio.run(limited())


def scheduler(model: BaseServerModel, size: int = 4, wait: float = NEVER_MS, **more: Any) -> Any:
    return BatchScheduler(model, size, wait, mode=InferenceMode.EMBEDDING, **more)


def start(batcher: BatchScheduler, *seeds: int) -> list["asyncio.Task[ModelResponse]"]:
    return [asyncio.create_task(batcher.predict(request(seed))) for seed in seeds]


async def settle(tasks: list["asyncio.Task[ModelResponse]"]) -> list[ModelResponse | BaseException]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_batch_of_exactly_the_maximum_leaves_at_once() -> None:
    async def work() -> None:
        await settle(start(batcher, *range(8)))

    model, runner = fake_model()
    batcher = scheduler(model)
    run(work())
    assert runner.batches == [4, 4]
    batcher.shutdown(wait=True)


def test_partial_batch_waits_for_company_and_leaves_when_time_is_up() -> None:
    async def work() -> list[Any]:
        return await settle(start(batcher, 0, 1, 2))

    model, runner = fake_model()
    batcher = scheduler(model, wait=20.0)
    answers = run(work())
    assert runner.batches == [3]
    for seed, answer in enumerate(answers):
        np.testing.assert_allclose(answer.output, mean_colour(seed), rtol=1e-5)
    batcher.shutdown(wait=True)


def test_clock_starts_at_the_oldest_waiting_tile() -> None:
    """Later tiles do not put off the batch: a trickle faster than the wait still leaves."""

    async def work() -> int:
        first = asyncio.create_task(batcher.predict(request(0)))
        others = []
        while not first.done():
            others.append(asyncio.create_task(batcher.predict(request(1))))
            await asyncio.sleep(0.005)
        for task in others:
            task.cancel()
        await settle(others)
        return len(others)

    model, _ = fake_model()
    batcher = scheduler(model, size=100_000, wait=60.0)
    assert run(work()) > 1
    batcher.shutdown(wait=True)


def test_flush_lets_a_partial_batch_leave_at_once() -> None:
    async def work() -> None:
        tasks = start(batcher, 0, 1)
        await asyncio.sleep(0)
        batcher.flush()
        await settle(tasks)
        # The hint is used up: the next ones wait again.
        tasks = start(batcher, 2)
        await asyncio.sleep(0)
        assert runner.batches == [2]
        batcher.flush()
        await settle(tasks)

    model, runner = fake_model()
    batcher = scheduler(model)
    run(work())
    assert runner.batches == [2, 1]
    batcher.shutdown(wait=True)


def test_flush_waits_for_requests_that_are_being_prepared() -> None:
    async def work() -> None:
        encoded = [ModelRequest.from_json(request(seed).to_json()) for seed in range(3)]
        tasks = [asyncio.create_task(batcher.predict(one)) for one in encoded]
        await asyncio.sleep(0)
        batcher.flush()
        await settle(tasks)

    model, runner = fake_model()
    batcher = scheduler(model)
    run(work())
    assert runner.batches == [3]
    batcher.shutdown(wait=True)


def test_flush_does_not_wait_for_a_request_that_turns_out_malformed() -> None:
    async def work() -> list[Any]:
        good = start(batcher, 0)
        bad = asyncio.create_task(batcher.predict(ModelRequest(image_data="AAAA")))
        await asyncio.sleep(0)
        batcher.flush()
        return await settle([*good, bad])

    model, runner = fake_model()
    batcher = scheduler(model)
    good, bad = run(work())
    assert runner.batches == [1]
    assert (type(good), type(bad)) == (ModelResponse, RequestError)
    batcher.shutdown(wait=True)


def test_pixels_of_a_cancelled_caller_are_let_go_while_its_place_is_still_queued() -> None:
    async def work() -> None:
        tile = pixels(1)
        kept = weakref.ref(tile)
        task = asyncio.create_task(batcher.predict(ModelRequest.from_pixels(tile)))
        await asyncio.sleep(0)
        del tile
        assert kept() is not None
        task.cancel()
        await settle([task])
        del task
        gc.collect()
        assert len(batcher._waiting) == 1
        assert kept() is None

    model, _ = fake_model()
    batcher = scheduler(model)
    run(work())
    batcher.shutdown(wait=True)


def test_event_loop_lives_while_a_batch_runs() -> None:
    async def work() -> None:
        tasks = start(batcher, *range(4))
        await asyncio.sleep(0)
        # The pass ends only because this coroutine goes on.
        release.set()
        await settle(tasks)

    release = threading.Event()
    model, _ = fake_model(before=lambda _: assert_set(release))
    batcher = scheduler(model)
    run(work())
    batcher.shutdown(wait=True)


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def test_next_batch_runs_while_the_first_is_under_way() -> None:
    both = threading.Barrier(2, timeout=DEADLINE_S)
    model, runner = fake_model(before=lambda _: wait_at(both))
    batcher = scheduler(model)

    async def work() -> list[Any]:
        return await settle(start(batcher, *range(8)))

    answers = run(work())
    assert all(isinstance(answer, ModelResponse) for answer in answers)
    assert runner.batches == [4, 4]
    batcher.shutdown(wait=True)


def wait_at(barrier: threading.Barrier) -> None:
    barrier.wait()


def test_no_more_batches_run_at_once_than_allowed() -> None:
    running, most, lock = 0, 0, threading.Lock()
    second = threading.Event()

    def before(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if number == 2:
            second.set()
        assert second.wait(DEADLINE_S)

    class Counting(FakeRunner):
        def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal running
            try:
                return super().__call__(*inputs)
            finally:
                with lock:
                    running -= 1

    model = BaseServerModel.from_runner(EMBEDDING, Counting(EMBEDDING, before))
    batcher = scheduler(model)

    async def work() -> None:
        await settle(start(batcher, *range(40)))

    run(work())
    assert most == 2
    batcher.shutdown(wait=True)


def test_malformed_request_among_200_fails_alone() -> None:
    async def work() -> list[Any]:
        bad = ModelRequest(image_data="AAAA", slide_name="bad.svs")
        calls: list[Awaitable[ModelResponse]] = [batcher.predict(request(i)) for i in range(100)]
        calls.append(batcher.predict(bad))
        calls += [
            batcher.predict(ModelRequest.from_json(request(i).to_json())) for i in range(100, 200)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    model, _ = fake_model()
    batcher = scheduler(model, size=48, wait=20.0)
    answers = run(work())
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(answers) == 201
    assert [type(error) for error in errors] == [RequestError]
    assert isinstance(errors[0], ValueError)
    good = [answer for answer in answers if isinstance(answer, ModelResponse)]
    assert [answer.x for answer in good] == list(range(200))
    for answer in good:
        np.testing.assert_allclose(answer.output, mean_colour(answer.x), rtol=1e-5)
    batcher.shutdown(wait=True)


def test_requests_asked_for_together_each_have_their_own_outcome() -> None:
    def before(number: int) -> None:
        if number == 2:
            raise RuntimeError("device lost")

    model, runner = fake_model(before=before)
    batcher = scheduler(model, size=4, wait=20.0, batches_in_flight=1)

    async def work() -> list[Any]:
        alone = asyncio.create_task(batcher.predict(request(100)))
        await asyncio.sleep(0)
        requests = [request(i) for i in range(11)]
        requests[5] = ModelRequest(image_data="AAAA")
        outcomes = await batcher.predict_all(requests)
        return [await alone, *outcomes, *await batcher.predict_all([])]

    alone, *outcomes = run(work())
    # The one that waited already shares the first pass; the malformed one has no place in any.
    assert runner.batches == [4, 4, 3]
    assert alone.x == 100
    kinds = [type(outcome) for outcome in outcomes]
    assert (
        kinds
        == [ModelResponse] * 3
        + [_ForwardError] * 2
        + [RequestError]
        + [_ForwardError] * 2
        + [ModelResponse] * 3
    )
    assert [outcome.x for outcome in outcomes[8:]] == [8, 9, 10]
    failed = {id(outcome) for outcome in outcomes if isinstance(outcome, _ForwardError)}
    assert len(failed) == 4, "tiles must not share one exception"
    assert batcher._unanswered == set()
    batcher.shutdown(wait=True)


@pytest.mark.parametrize("encoded", [False, True])
def test_cancelled_call_for_several_tiles_gives_all_its_places_up(encoded: bool) -> None:
    async def work() -> list[Any]:
        tile = pixels(1)
        kept = weakref.ref(tile)
        several = [ModelRequest.from_pixels(tile), request(2), request(3)]
        if encoded:
            several[1:] = [ModelRequest.from_json(one.to_json()) for one in several[1:]]
        task = asyncio.create_task(batcher.predict_all(several))
        await asyncio.sleep(0)
        del tile, several
        task.cancel()
        await asyncio.wait([task])
        del task
        gc.collect()
        assert kept() is None
        return await settle(start(batcher, 4, 5, 6, 7))

    model, runner = fake_model()
    batcher = scheduler(model)
    answers = run(work())
    assert runner.batches == [4]
    assert [answer.x for answer in answers] == [4, 5, 6, 7]
    assert batcher._dead == 0
    batcher.shutdown(wait=True)


def test_shutdown_ends_those_of_several_tiles_that_wait_and_leaves_the_others() -> None:
    async def work() -> list[Any]:
        asked = asyncio.create_task(batcher.predict_all([request(i) for i in range(6)]))
        await asyncio.to_thread(under_way.wait, 10)
        batcher.shutdown()
        await asyncio.sleep(0)
        release.set()
        outcomes: list[Any] = await asked
        return outcomes

    under_way, release = threading.Event(), threading.Event()

    def before(_number: int) -> None:
        under_way.set()
        assert_set(release)

    model, _ = fake_model(before=before)
    batcher = scheduler(model, batches_in_flight=1)
    outcomes = run(work())
    assert [type(one) for one in outcomes] == [ModelResponse] * 4 + [SchedulerClosedError] * 2
    batcher.shutdown(wait=True)


def test_forward_failure_of_the_third_batch_fails_that_batch_alone() -> None:
    def before(number: int) -> None:
        if number == 3:
            raise RuntimeError("device lost")

    model, _ = fake_model(before=before)
    batcher = scheduler(model, batches_in_flight=1)

    async def work() -> list[Any]:
        return await settle(start(batcher, *range(20)))

    answers = run(work())
    failed = [i for i, answer in enumerate(answers) if isinstance(answer, BaseException)]
    assert failed == [8, 9, 10, 11]
    for i in failed:
        assert isinstance(answers[i], _ForwardError)
        assert "device lost" in str(answers[i])
    assert len({id(answers[i]) for i in failed}) == 4, "callers must not share one exception"
    statistics = batcher.tally.statistics()
    assert (statistics.batches, statistics.tiles, statistics.failed_batches) == (5, 20, 1)
    batcher.shutdown(wait=True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no"), OutOfDeviceMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfDeviceMemoryError),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            OutOfDeviceMemoryError,
        ),
        (RuntimeError("anything else"), _ForwardError),
        (StopIteration(), _ForwardError),
        (SystemExit(3), _ForwardError),
        (AssertionError("guard failed"), _ForwardError),
    ],
)
def test_whatever_a_pass_raises_reaches_every_caller_of_the_batch(
    error: BaseException, kind: type[Exception]
) -> None:
    def before(number: int) -> None:
        if number == 1:
            raise error

    model, _ = fake_model(before=before)
    batcher = scheduler(model)

    async def work() -> list[Any]:
        first = await settle(start(batcher, *range(4)))
        return [first, await settle(start(batcher, *range(4)))]

    first, second = run(work())
    assert [type(answer) for answer in first] == [kind] * 4
    assert all(isinstance(answer, ModelResponse) for answer in second)
    batcher.shutdown(wait=True)


class OddModel(BaseServerModel):
    """Gives whatever ``answer`` makes of the right responses."""

    answer: Callable[[list[ModelResponse]], Any]

    def forward_batch(self, samples: Any, requests: Any, mode: str = "prediction") -> Any:
        return self.answer(super().forward_batch(samples, requests, mode))


@pytest.mark.parametrize("answer", [lambda r: r[:-1], lambda r: [*r, r[0]], lambda r: None])
def test_results_that_do_not_match_the_requests_fail_the_batch(answer: Any) -> None:
    model = OddModel.from_runner(EMBEDDING, FakeRunner(EMBEDDING))
    model.answer = answer
    batcher = scheduler(model)

    async def work() -> list[Any]:
        return await settle(start(batcher, *range(4)))

    assert [type(answer) for answer in run(work())] == [_ForwardError] * 4
    batcher.shutdown(wait=True)


def test_error_while_assembling_fails_that_batch_and_later_ones_go_on() -> None:
    class Ragged(BaseServerModel):
        def prepare_sample(self, request: ModelRequest) -> PreparedSample:
            sample = super().prepare_sample(request)
            if request.x == 2:
                sample.tile = sample.tile[:, 1:]
            return sample

    model = Ragged.from_runner(EMBEDDING, FakeRunner(EMBEDDING))
    assert not model.prepares_inline
    batcher = scheduler(model)

    async def work() -> list[Any]:
        first = await settle(start(batcher, *range(4)))
        return [first, await settle(start(batcher, *range(4, 8)))]

    first, second = run(work())
    assert [type(answer) for answer in first] == [_ForwardError] * 4
    assert "samples of one batch differ" in str(first[0])
    assert all(isinstance(answer, ModelResponse) for answer in second)
    batcher.shutdown(wait=True)


@pytest.mark.parametrize("error", [TypeError("odd"), KeyError("gene"), SystemExit(1)])
def test_whatever_preparing_raises_is_a_value_error_of_that_caller(error: BaseException) -> None:
    class Picky(BaseServerModel):
        def prepare_sample(self, request: ModelRequest) -> PreparedSample:
            if request.x == 1:
                raise error
            return super().prepare_sample(request)

    batcher = scheduler(Picky.from_runner(EMBEDDING, FakeRunner(EMBEDDING)), size=3)

    async def work() -> list[Any]:
        return await settle(start(batcher, *range(4)))

    answers = run(work())
    assert [type(a) for a in answers] == [ModelResponse, RequestError, ModelResponse, ModelResponse]
    batcher.shutdown(wait=True)


def test_cancelled_caller_is_dropped_before_the_pass_and_stops_no_later_batch() -> None:
    async def work() -> None:
        tasks = start(batcher, 0, 1, 2)
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        tasks += start(batcher, 3)
        await asyncio.sleep(0)
        assert runner.batches == [], "the cancelled tile must not count towards a full batch"
        tasks += start(batcher, 4)
        answers = await settle(tasks)
        assert isinstance(answers[1], asyncio.CancelledError)
        assert [a.x for a in answers if isinstance(a, ModelResponse)] == [0, 2, 3, 4]
        await settle(start(batcher, 5, 6, 7, 8))

    model, runner = fake_model()
    batcher = scheduler(model)
    run(work())
    assert runner.batches == [4, 4]
    batcher.shutdown(wait=True)


def test_batch_of_cancelled_callers_alone_is_not_run() -> None:
    async def work() -> None:
        tasks = start(batcher, 0, 1)
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        batcher.flush()
        await settle(tasks)
        await settle(start(batcher, *range(4)))

    model, runner = fake_model()
    batcher = scheduler(model)
    run(work())
    assert runner.batches == [4]
    batcher.shutdown(wait=True)


def test_caller_cancelled_during_the_pass_leaves_the_others_their_answers() -> None:
    entered, release = threading.Event(), threading.Event()

    def before(_: int) -> None:
        entered.set()
        assert release.wait(DEADLINE_S)

    async def work() -> list[Any]:
        tasks = start(batcher, *range(4))
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        tasks[2].cancel()
        await asyncio.sleep(0)
        release.set()
        return await settle(tasks)

    model, _ = fake_model(before=before)
    batcher = scheduler(model)
    answers = run(work())
    assert isinstance(answers[2], asyncio.CancelledError)
    assert [answers[i].x for i in (0, 1, 3)] == [0, 1, 3]
    batcher.shutdown(wait=True)


def test_shutdown_from_another_thread_ends_those_who_wait() -> None:
    async def work() -> list[Any]:
        tasks = start(batcher, 0, 1)
        slow = ModelRequest.from_json(request(2).to_json())
        tasks.append(asyncio.create_task(batcher.predict(slow)))
        await asyncio.sleep(0)
        await asyncio.to_thread(batcher.shutdown)
        await asyncio.to_thread(batcher.shutdown)
        answers = await settle(tasks)
        with pytest.raises(SchedulerClosedError):
            await batcher.predict(request(3))
        return answers

    model, runner = fake_model()
    batcher = scheduler(model)
    assert [type(answer) for answer in run(work())] == [SchedulerClosedError] * 3
    assert runner.batches == []


def test_shutdown_during_a_pass_still_delivers_its_answers() -> None:
    entered, release = threading.Event(), threading.Event()

    def before(_: int) -> None:
        entered.set()
        assert release.wait(DEADLINE_S)

    async def work() -> list[Any]:
        tasks = start(batcher, *range(5))
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        batcher.shutdown()
        release.set()
        return await settle(tasks)

    model, _ = fake_model(before=before)
    batcher = scheduler(model)
    answers = run(work())
    assert [type(answer) for answer in answers] == [*[ModelResponse] * 4, SchedulerClosedError]


def test_shutdown_before_use_and_after_the_loop_has_closed() -> None:
    model, _ = fake_model()
    unused = scheduler(model)
    unused.shutdown()

    used = scheduler(model)

    async def work() -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(used.predict(request(0)), 0.01)

    run(work())
    used.shutdown(wait=True)
    used.shutdown(wait=True)
    assert used.closed


def test_loop_closed_during_a_pass_leaves_no_thread_and_no_noise() -> None:
    entered, release = threading.Event(), threading.Event()

    def before(_: int) -> None:
        entered.set()
        assert release.wait(DEADLINE_S)

    async def work() -> None:
        start(batcher, *range(4))
        await asyncio.to_thread(entered.wait, DEADLINE_S)

    model, _ = fake_model(before=before)
    batcher = scheduler(model)
    run(work())  # cancels the four callers
    release.set()
    batcher.shutdown(wait=True)
    assert not [t for t in threading.enumerate() if t.name.startswith("forward-means")]


def test_scheduler_serves_one_loop() -> None:
    model, _ = fake_model()
    batcher = scheduler(model, size=1)
    run(batcher.predict(request(0)))
    with pytest.raises(SchedulerClosedError, match="another event loop"):
        run(batcher.predict(request(0)))
    batcher.shutdown(wait=True)


def test_batch_size_may_be_lowered_at_any_time() -> None:
    async def work() -> None:
        tasks = start(batcher, 0, 1, 2)
        await asyncio.sleep(0)
        batcher.max_batch_size = 2
        tasks += start(batcher, 3)
        await settle(tasks)

    model, runner = fake_model()
    batcher = scheduler(model, size=100)
    run(work())
    assert runner.batches == [2, 2]
    batcher.shutdown(wait=True)


def test_batch_is_put_together_when_the_model_is_free_for_it_not_before() -> None:
    """What changes while a pass runs, such as the batch size, holds for the very next batch."""
    entered, release = threading.Event(), threading.Event()

    def before(_: int) -> None:
        entered.set()
        assert release.wait(DEADLINE_S)

    async def work() -> None:
        tasks = start(batcher, *range(8))
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        batcher.max_batch_size = 8
        tasks += start(batcher, *range(8, 12))
        await asyncio.sleep(0)
        release.set()
        await settle(tasks)

    model, runner = fake_model(before=before)
    batcher = scheduler(model, batches_in_flight=1)
    run(work())
    assert runner.batches == [4, 8]
    batcher.shutdown(wait=True)


def test_clock_is_not_set_back_by_what_happens_meanwhile() -> None:
    async def work() -> None:
        tasks = start(batcher, 0)
        await asyncio.sleep(0)
        assert batcher._timer is not None
        due = batcher._timer.when()
        await asyncio.sleep(0.002)
        batcher._pump()
        assert batcher._timer.when() == due
        batcher.flush()
        await settle(tasks)

    model, _ = fake_model()
    batcher = scheduler(model)
    run(work())
    batcher.shutdown(wait=True)


def test_numbers_out_of_range_are_refused() -> None:
    model, _ = fake_model()
    for wrong in ({"max_batch_size": 0}, {"max_wait_ms": -1.0}, {"preprocess_workers": 0}):
        with pytest.raises(ValueError):
            BatchScheduler(model, mode=InferenceMode.EMBEDDING, **wrong)


def test_mode_that_the_model_cannot_answer_is_refused_at_once() -> None:
    model, _ = fake_model()
    with pytest.raises(UsageError, match="means: cannot answer prediction requests"):
        BatchScheduler(model)


@pytest.mark.parametrize("seed", [1, 2])
def test_10000_requests_with_cancellations_failures_and_a_late_shutdown_all_end(seed: int) -> None:
    """Whatever happens, each caller gets an answer, an error or its cancellation."""
    chance = random.Random(seed)
    count = 10_000

    failed = threading.Event()

    def before(number: int) -> None:
        if number % 7 == 3:
            failed.set()
            raise RuntimeError("now and then")

    model, _ = fake_model(BOTH, before=before)
    batcher = scheduler(model, size=16, wait=1.0)
    typed = [request(i) for i in range(20)]
    encoded = [ModelRequest.from_json(one.to_json()) for one in typed]
    bad = ModelRequest(image_data="AAAA")

    async def work() -> list[Any]:
        tasks: list[asyncio.Task[ModelResponse]] = []
        groups: list[asyncio.Task[Any]] = []
        for i in range(count):
            kind = chance.random()
            one = bad if kind < 0.02 else chance.choice(encoded if kind < 0.3 else typed)
            tasks.append(asyncio.create_task(batcher.predict(one)))
            if chance.random() < 0.1:
                chance.choice(tasks[-50:]).cancel()
            if chance.random() < 0.01:
                several = [chance.choice((bad, *typed, *encoded)) for _ in range(20)]
                groups.append(asyncio.create_task(batcher.predict_all(several)))
                if chance.random() < 0.3:
                    chance.choice(groups).cancel()
            if chance.random() < 0.05:
                await asyncio.sleep(0)
            if chance.random() < 0.01:
                batcher.flush()
            if i == count - 100:
                while not failed.is_set():  # the loop may have been quicker than the passes
                    await asyncio.sleep(0.001)
                threading.Thread(target=batcher.shutdown).start()
        for outcome in await asyncio.gather(*groups, return_exceptions=True):
            whole = (asyncio.CancelledError, SchedulerClosedError)
            assert isinstance(outcome, (list, *whole)), outcome
            if isinstance(outcome, list):
                assert len(outcome) == 20
                assert all(isinstance(one, allowed) for one in outcome)
        return await settle(tasks)

    allowed = (ModelResponse, _ForwardError, RequestError, SchedulerClosedError)
    answers = run(work())
    assert len(answers) == count
    assert all(isinstance(a, (*allowed, asyncio.CancelledError)) for a in answers)
    seen = {type(answer) for answer in answers}
    assert {ModelResponse, _ForwardError, RequestError, asyncio.CancelledError} <= seen
    assert batcher._unanswered == set()
    assert batcher._dead == 0
    batcher.shutdown(wait=True)


@pytest.mark.parametrize("as_json", [False, True])
def test_shutdown_at_any_moment_leaves_no_caller_waiting(as_json: bool) -> None:
    """Two threads end the scheduler while it prepares, waits, sends or answers."""
    model, _ = fake_model()
    one = ModelRequest.from_json(request(1).to_json()) if as_json else request(1)

    async def work(number: int) -> list[Any]:
        batcher = scheduler(model, size=3, wait=number % 4 / 2)
        tasks = [asyncio.create_task(batcher.predict(one)) for _ in range(10)]
        for _ in range(number % 13):
            await asyncio.sleep(0)
        closers = [threading.Thread(target=batcher.shutdown) for _ in range(2)]
        for closer in closers:
            closer.start()
        answers = await settle(tasks)
        for closer in closers:
            closer.join()
        batcher.shutdown(wait=True)
        return answers

    for number in range(60):
        answers = run(work(number))
        assert {type(answer) for answer in answers} <= {ModelResponse, SchedulerClosedError}


def test_time_spent_waiting_for_cancelled_tiles_is_not_added_to_the_next() -> None:
    """The clock follows the oldest tile that is still wanted."""

    async def work() -> None:
        first = start(batcher, 0)
        await asyncio.sleep(0)
        first[0].cancel()
        await settle(first)
        others = start(batcher, 1, 2)
        await settle(others)

    model, runner = fake_model()
    batcher = scheduler(model, size=10, wait=20.0)
    run(work())
    assert runner.batches == [2]
    batcher.shutdown(wait=True)


def test_many_encoded_requests_use_all_preparing_threads_and_all_come_back() -> None:
    names: set[str] = set()
    together = threading.Barrier(3, timeout=DEADLINE_S)
    model, _ = fake_model()

    class Named(BaseServerModel):
        def prepare_sample(self, request: ModelRequest) -> PreparedSample:
            if threading.current_thread().name not in names:
                names.add(threading.current_thread().name)
                together.wait()
            return super().prepare_sample(request)

    model = Named.from_runner(EMBEDDING, FakeRunner(EMBEDDING))
    batcher = scheduler(model, size=10, preprocess_workers=3)

    async def work() -> list[Any]:
        return await settle(start(batcher, *range(100)))

    assert [answer.x for answer in run(work())] == list(range(100))
    assert len(names) == 3
    batcher.shutdown(wait=True)
