"""The client: JSON or objects in and out, one scheduler per loop and mode, an end for all."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bioptimus.errors import RequestError, SchedulerClosedError, UsageError, _ForwardError
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.models.clients import Client, log_failures
from bioptimus.models.clients.local import InProcessClient
from bioptimus.models.types import InferenceMode
from tests.models import BOTH, fake_model, request
from tests.tiny_models import save_tiny

VERBS = ("predict", "embed", "predict_with_embedding")


def same(a: ModelResponse, b: ModelResponse) -> bool:
    same_embedding = (
        a.embedding is b.embedding
        if a.embedding is None or b.embedding is None
        else a.embedding.tobytes() == b.embedding.tobytes()
    )
    names = ("slide_name", "x", "y", "width", "height", "tissue_ratio", "patch_idx", "resolution")
    return (
        a.output.tobytes() == b.output.tobytes()
        and same_embedding
        and all(getattr(a, name) == getattr(b, name) for name in names)
    )


def test_in_process_client_is_a_client() -> None:
    client: Client = InProcessClient(fake_model()[0])
    assert isinstance(client.embed(request(1).to_json()), str)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("verb", "mode"),
    [
        ("predict", "prediction"),
        ("embed", "embedding"),
        ("predict_with_embedding", "prediction_with_embedding"),
    ],
)
def test_tiles_asked_for_together_have_the_answers_of_each_alone(
    verb: str, mode: str, dynamic: bool
) -> None:
    model, _ = fake_model(BOTH)
    asked_for = InferenceMode(mode)
    tiles = [request(seed) for seed in range(7)]
    bad = ModelRequest(image_data="AAAA")
    with InProcessClient(model, max_batch_size=3, dynamic_batching=dynamic) as client:
        *answers, error = asyncio.run(client.answer_many_async([*tiles, bad], asked_for))
        for tile, answer in zip(tiles, answers, strict=True):
            assert isinstance(answer, ModelResponse)
            assert same(answer, getattr(client, verb)(tile))
        assert isinstance(error, RequestError)
        with pytest.raises(RequestError, match="each must be a ModelRequest"):
            asyncio.run(client.answer_many_async([tiles[0].to_json()], asked_for))  # type: ignore[list-item]  # JSON, as the others take it
    with pytest.raises(SchedulerClosedError):
        asyncio.run(client.answer_many_async(tiles, asked_for))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_every_way_of_asking_gives_the_same_bits(verb: str, dynamic: bool) -> None:
    model, _ = fake_model(BOTH)
    with InProcessClient(model, max_batch_size=1, dynamic_batching=dynamic) as client:
        one = ModelRequest.from_pixels(
            request(1).pixels(), slide_name="a", x=5, y=6, tissue_ratio=0.3, resolution=0.5
        )
        direct = getattr(client, verb)
        batched = getattr(client, f"{verb}_batch")
        soon: Callable[..., Any] = getattr(client, f"{verb}_async")

        async def ask(body: Any) -> Any:
            return await soon(body, session=None)

        expected = direct(one)
        assert isinstance(expected, ModelResponse)
        assert (expected.embedding is not None) == (verb == "predict_with_embedding")
        for typed in (batched([one])[0], asyncio.run(ask(one))):
            assert same(typed, expected)
        text = one.to_json()
        for body in (direct(text), batched([text])[0], asyncio.run(ask(text))):
            assert isinstance(body, str)
            assert same(ModelResponse.from_json(body), expected)


def test_explicit_batch_is_one_pass_and_dynamic_batching_off_is_one_pass_each() -> None:
    model, runner = fake_model()
    client = InProcessClient(model, max_batch_size=2, dynamic_batching=False)
    responses = client.embed_batch([request(i) for i in range(5)])
    assert [response.x for response in responses] == list(range(5))
    assert runner.batches == [5]

    async def work() -> None:
        await asyncio.gather(*(client.embed_async(request(i)) for i in range(3)))

    asyncio.run(work())
    assert runner.batches == [5, 1, 1, 1]
    assert client.embed_batch([]) == []
    assert client.batch_statistics().tiles == 8


def test_malformed_request_of_an_explicit_batch_is_named_by_its_place() -> None:
    model, runner = fake_model()
    client = InProcessClient(model)
    with pytest.raises(RequestError, match="image_data") as caught:
        client.embed_batch([request(0), ModelRequest(image_data="AAAA"), request(2)])
    assert caught.value.__notes__ == ["request 2 of 3"]
    with pytest.raises(RequestError, match="body: not JSON"):
        client.embed("{")
    assert runner.batches == []


def test_metadata_is_a_json_object() -> None:
    client = InProcessClient(fake_model(BOTH)[0])
    assert json.loads(client.metadata())["model_name"] == "both"


def test_one_scheduler_per_loop_and_mode() -> None:
    model, runner = fake_model(BOTH)
    with InProcessClient(model, max_batch_size=2) as client:

        async def work() -> None:
            await asyncio.gather(
                *(client.embed_async(request(i)) for i in range(2)),
                *(client.predict_async(request(i)) for i in range(2)),
            )
            loop = asyncio.get_running_loop()
            assert client.batch_statistics(loop).tiles == 4

        asyncio.run(work())
        assert runner.batches == [2, 2]
        assert len(client._schedulers) == 2


def test_scheduler_of_a_closed_loop_is_ended_when_the_next_loop_comes() -> None:
    model, _ = fake_model()
    with InProcessClient(model, max_batch_size=1) as client:

        async def work() -> None:
            await client.embed_async(request(1))

        asyncio.run(work())
        (first,) = client._schedulers.values()
        asyncio.run(work())
        (second,) = client._schedulers.values()
        assert first.closed
        assert not second.closed
        assert client.batch_statistics().batches == 2, "what an ended scheduler did still counts"


def test_slides_in_their_own_threads_and_loops_share_a_client() -> None:
    model, _ = fake_model()
    answers: dict[str, list[ModelResponse]] = {}
    with InProcessClient(model, max_batch_size=4, max_wait_ms=5.0) as client:

        async def slide(name: str) -> None:
            answers[name] = await asyncio.gather(
                *(client.embed_async(request(i, name)) for i in range(30))
            )

        threads = [
            threading.Thread(target=lambda n=name: asyncio.run(slide(n)), name=name)
            for name in ("a.svs", "b.svs", "c.svs", "d.svs")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, responses in answers.items():
        assert {response.slide_name for response in responses} == {name}
        assert [response.x for response in responses] == list(range(30))
    assert len(answers) == 4
    assert client.batch_statistics().tiles == 120


def test_flush_of_a_loop_that_asked_nothing_does_nothing() -> None:
    client = InProcessClient(fake_model()[0])

    async def work() -> None:
        client.flush()

    asyncio.run(work())


def test_flush_sends_what_waits() -> None:
    model, runner = fake_model()
    with InProcessClient(model, max_wait_ms=3_600_000.0) as client:

        async def work() -> None:
            tasks = [asyncio.create_task(client.embed_async(request(i))) for i in range(3)]
            await asyncio.sleep(0)
            client.flush()
            await asyncio.gather(*tasks)

        asyncio.run(work())
    assert runner.batches == [3]
    assert client.batch_statistics().fill == 3 / 48


def test_batch_size_set_later_holds_for_schedulers_in_use() -> None:
    model, runner = fake_model()
    with InProcessClient(model, max_batch_size=4, max_wait_ms=3_600_000.0) as client:

        async def work() -> None:
            await asyncio.gather(*(client.embed_async(request(i)) for i in range(4)))
            client.max_batch_size = 2
            await asyncio.gather(*(client.embed_async(request(i)) for i in range(4)))

        asyncio.run(work())
        with pytest.raises(ValueError, match="max_batch_size 0"):
            client.max_batch_size = 0
    assert runner.batches == [4, 2, 2]


def test_closed_client_ends_those_who_wait_and_refuses_the_rest() -> None:
    model, _ = fake_model()
    client = InProcessClient(model, max_wait_ms=3_600_000.0)

    async def work() -> None:
        waiting = asyncio.create_task(client.embed_async(request(1)))
        await asyncio.sleep(0)
        await asyncio.to_thread(client.close)
        with pytest.raises(SchedulerClosedError):
            await waiting
        with pytest.raises(SchedulerClosedError):
            await client.embed_async(request(1))

    asyncio.run(work())
    client.close()
    with pytest.raises(SchedulerClosedError, match="client has been closed"):
        client.embed(request(1))


def test_closing_on_the_loop_that_waits_does_not_hang() -> None:
    model, _ = fake_model()
    client = InProcessClient(model, max_wait_ms=3_600_000.0)

    async def work() -> None:
        waiting = asyncio.create_task(client.embed_async(request(1)))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(SchedulerClosedError):
            await waiting

    asyncio.run(work())


def test_closed_client_leaves_no_thread() -> None:
    model, _ = fake_model(BOTH)
    with InProcessClient(model, max_batch_size=1) as client:

        async def work() -> None:
            await client.predict_async(request(1).to_json())

        asyncio.run(work())
        assert [t for t in threading.enumerate() if t.name.startswith(("prepare-", "forward-"))]
    assert not [t for t in threading.enumerate() if t.name.startswith(("prepare-", "forward-"))]


def test_mode_that_the_model_lacks_is_a_usage_error_everywhere() -> None:
    client = InProcessClient(fake_model()[0])
    with pytest.raises(UsageError):
        client.predict(request(1))
    with pytest.raises(UsageError):
        client.predict_batch([])
    with pytest.raises(UsageError):
        asyncio.run(client.predict_async(request(1)))


def test_client_is_made_from_a_checkpoint(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny.pt2")
    with InProcessClient.from_checkpoint(str(path), path, "cpu", max_batch_size=7) as client:
        assert client.max_batch_size == 7
        tile = ModelRequest.from_pixels(np.full((8, 8, 3), 100, np.uint8))
        assert client.embed(tile).output.shape == (5,)
        assert json.loads(client.metadata())["checkpoint"] == "tiny.pt2"


FORKED = """
import multiprocessing, numpy, torch
from bioptimus.inference.schemas import ModelRequest
from bioptimus.models.clients.local import InProcessClient
from bioptimus.runtime import build_server_model

def ask(queue):
    queue.put(len(client.embed_batch(tiles)))

torch.set_num_threads(2)
client = InProcessClient(build_server_model("lite0"))
tiles = [ModelRequest.from_pixels(numpy.zeros((224, 224, 3), numpy.uint8)) for _ in range(4)]
client.embed_batch(tiles)
context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=ask, args=(queue,))
child.start()
try:
    print(queue.get(timeout=15))
finally:
    child.kill()
"""


def test_a_forked_process_may_ask_the_model_of_its_parent() -> None:
    command = [sys.executable, "-c", FORKED]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "4\n", done.stderr


def test_importing_the_client_comes_before_torch_reads_its_environment() -> None:
    code = (
        "import os, sys, bioptimus.models.clients.local\n"
        "assert 'torch' in sys.modules\n"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=keep
    )
    assert done.stdout.strip() == "PASSIVE"


# log_failures


class Service:
    @log_failures
    def ask(self, body: Any) -> None:
        raise RequestError("too odd")

    @log_failures
    async def ask_async(self, body: Any) -> None:
        self.ask(body)

    @classmethod
    @log_failures
    def below(cls, name: str) -> str:
        raise RequestError(cls.__name__)

    @log_failures
    @classmethod
    def above(cls, name: str) -> str:
        raise RequestError(cls.__name__)

    @log_failures
    async def cancelled(self) -> None:
        raise asyncio.CancelledError


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("as_json", [True, False])
def test_failure_is_logged_once_with_its_place_and_raised_unchanged(
    caplog: pytest.LogCaptureFixture, as_json: bool
) -> None:
    one = ModelRequest.from_pixels(request(7).pixels(), slide_name="😐.svs", x=7, y=9)
    with pytest.raises(RequestError, match=r"^too odd$") as caught:
        asyncio.run(Service().ask_async(one.to_json() if as_json else one))
    assert failures(caplog) == ["ask failed for 😐.svs at x=7, y=9: RequestError: too odd"]
    record = caplog.records[-1]
    assert (record.__dict__["slide"], record.__dict__["operation"]) == ("😐.svs", "ask")
    assert type(caught.value) is RequestError


def test_list_of_requests_is_logged_by_its_first(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RequestError):
        Service().ask([request(7), request(8)])
    assert failures(caplog) == [
        "ask failed for a.svs at x=7, y=0 (and 1 more): RequestError: too odd"
    ]


@pytest.mark.parametrize("body", ["{", "[]", "5", None, [], [None]])
def test_body_without_a_place_is_logged_too(caplog: pytest.LogCaptureFixture, body: Any) -> None:
    with pytest.raises(RequestError):
        Service().ask(body)
    assert len(failures(caplog)) == 1


def test_class_methods_are_wrapped_on_either_side(caplog: pytest.LogCaptureFixture) -> None:
    for method in (Service.below, Service.above):
        with pytest.raises(RequestError, match=r"^Service$"):
            method("h1")
    assert len(failures(caplog)) == 2


def test_stopping_is_not_logged_as_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Service().cancelled())
    client = InProcessClient(fake_model()[0])
    client.close()
    with pytest.raises(SchedulerClosedError):
        client.embed(request(1))
    assert failures(caplog) == []


def test_failed_batch_is_logged_once_not_once_per_tile(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("device lost")

    model, _ = fake_model(before=fail)

    async def work() -> list[Any]:
        calls = (client.embed_async(request(i)) for i in range(8))
        return await asyncio.gather(*calls, return_exceptions=True)

    with InProcessClient(model, max_batch_size=4) as client:
        answers = asyncio.run(work())
    assert [type(one) for one in answers] == [_ForwardError] * 8
    assert len(failures(caplog)) == 2
    assert all("device lost" in line for line in failures(caplog))


def test_wrapped_functions_keep_their_names() -> None:
    assert InProcessClient.embed_async.__name__ == "embed_async"
    assert "embedding of one tile" in str(InProcessClient.embed_async.__doc__)


def test_json_floats_are_exact() -> None:
    model, _ = fake_model()
    client = InProcessClient(model)
    typed = client.embed(request(3))
    text = json.loads(client.embed(request(3).to_json()))
    assert np.array(text["output"], np.float32).tobytes() == typed.output.tobytes()
