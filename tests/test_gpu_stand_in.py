"""The GPU's path, step by step, on a stand-in: what a machine without one can show."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from bioptimus.errors import LostDeviceError, ModelError, OutOfDeviceMemoryError, _ForwardError
from bioptimus.models.types import InferenceMode, ModelSpec, Precision
from bioptimus.runtime import compiled, loader, runners
from bioptimus.runtime.archive import ArchiveInfo, inspect_archive
from bioptimus.runtime.batch_size import find_batch_size
from bioptimus.runtime.compiled import CompiledRunner
from bioptimus.runtime.fitting import signature_of
from bioptimus.runtime.loader import load_model, resolve_model
from bioptimus.runtime.runners import PortableRunner
from bioptimus.runtime.server_model import BaseServerModel
from tests.gpu_stand_in import StandIn
from tests.models import EMBEDDING, mean_colour, request
from tests.tiny_models import save_tiny

FLOATS = EMBEDDING.with_(input_layout="nchw_float32", mean=(0.1,) * 3, std=(0.5,) * 3)


class Means(nn.Module):
    """The mean colour of tiles of either layout; fails with what it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return tiles.float().mean((1, 2) if tiles.shape[-1] == 3 else (2, 3))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def model_on(
    device: str, spec: ModelSpec = EMBEDDING, error: Exception | None = None
) -> BaseServerModel:
    runner = PortableRunner(Means(error), signature_of(spec), device=device, slots=3)
    return BaseServerModel.from_runner(spec, runner)


def embeddings(model: BaseServerModel, seeds: range) -> list[npt.NDArray[np.float32]]:
    asked = [request(seed) for seed in seeds]
    samples = [model.prepare_sample(one) for one in asked]
    return [answer.output for answer in model.forward_batch(samples, asked, "embedding")]


def test_many_threads_get_results_that_have_arrived(gpu: StandIn) -> None:
    model = model_on("cuda:1")
    with ThreadPoolExecutor(4) as threads:
        ranges = [range(start, start + 7) for start in range(0, 140, 7)]
        found = [
            one for part in threads.map(lambda r: embeddings(model, r), ranges) for one in part
        ]
    for seed, embedding in enumerate(found):
        np.testing.assert_allclose(embedding, mean_colour(seed), rtol=1e-5)
    assert 1 <= len(gpu.streams) <= 4
    assert model.hardware == "a stand-in"


def test_float_tiles_are_normalised_there_as_on_a_cpu(gpu: StandIn) -> None:
    there, here = (embeddings(model_on(d, FLOATS), range(5)) for d in ("cuda:1", "cpu"))
    np.testing.assert_array_equal(there, here)


def test_a_second_gpu_is_used_without_memory_of_the_first(gpu: StandIn) -> None:
    model = model_on("cuda:1")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(embeddings, model, range(3)).result()
        assert thread.submit(torch.cuda.current_device).result() == 0
    full = model_on("cuda:1", error=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OutOfDeviceMemoryError):
        embeddings(full, range(3))
    assert gpu.emptied == [1]
    assert gpu.contexts == {1}


def test_a_runner_called_directly_has_a_stream_for_each_thread_or_the_callers_own(
    gpu: StandIn,
) -> None:
    runner = PortableRunner(Means(), signature_of(EMBEDDING), device="cuda:1", slots=3)
    tiles = torch.arange(2 * 16 * 16 * 3).reshape(2, 16, 16, 3).to(torch.uint8)
    wanted = Means()(tiles)
    together = threading.Barrier(3, timeout=30)

    def call(_: int) -> torch.Tensor:
        together.wait()
        return [runner(tiles)[0] for _ in range(2)][1]

    with ThreadPoolExecutor(3) as threads:
        assert all(torch.equal(found, wanted) for found in threads.map(call, range(3)))
    assert len(gpu.streams) == 3
    # What is on the GPU already may still be in the making, on the default stream.
    assert gpu.default_stream("cuda:1") in gpu.streams[0].waited_for
    own = torch.cuda.Stream("cuda:1")  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own):
        assert torch.equal(runner(tiles)[0], wanted)
    assert len(gpu.streams) == 4


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        ),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_gpu_that_takes_nothing_any_more_is_lost_in_whatever_words(
    gpu: StandIn, error: Exception
) -> None:
    model = model_on("cuda:0", error=error)
    with pytest.raises(_ForwardError) as caught:
        embeddings(model, range(3))
    assert not isinstance(caught.value, LostDeviceError), "it works on"
    gpu.lost = True
    with pytest.raises(LostDeviceError, match=r"cuda:0 works no more in this process .*run the"):
        embeddings(model, range(3))
    with pytest.raises(LostDeviceError):
        find_batch_size(model, InferenceMode.EMBEDDING, passes=2)


def test_a_gpu_lost_in_the_search_for_a_batch_size_is_not_taken_for_a_full_one(
    gpu: StandIn,
) -> None:
    class Breaks(Means):
        def forward(self, tiles: torch.Tensor) -> torch.Tensor:
            if len(tiles) >= 8:
                gpu.lost = True
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().forward(tiles)

    runner = PortableRunner(Breaks(), signature_of(EMBEDDING), device="cuda:0", slots=1)
    model = BaseServerModel.from_runner(EMBEDDING, runner)
    with pytest.raises(LostDeviceError):
        find_batch_size(model, InferenceMode.EMBEDDING)


def test_weights_are_there_before_the_first_pass_on_another_stream(gpu: StandIn) -> None:
    arrived = []
    gpu.default_stream("cuda:1").work.append(lambda: arrived.append("weights"))
    model_on("cuda:1")
    assert arrived == ["weights"]


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: no kernel image is available for execution on the device\nand more",
        "CUDA error: all CUDA-capable devices are busy or unavailable",
        "CUDA out of memory. Tried to allocate 2.00 MiB.",
    ],
)
def test_a_gpu_that_cannot_be_used_is_told_when_the_model_is_loaded(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    choice = resolve_model(save_tiny(tmp_path / "tiny.pt2"))
    runner = PortableRunner(Means(), signature_of(choice.spec), device="cuda:1", slots=3)
    monkeypatch.setattr(runners, "open_archive", lambda *_, **__: runner)
    assert load_model(choice, "cuda:1").device == "cuda:1"
    gpu.broken = words
    with pytest.raises(ModelError) as caught:
        load_model(choice, "cuda:1")
    assert str(caught.value) == (
        f"tiny: cannot be loaded on cuda:1: {words.splitlines()[0]}; see `bioptimus doctor`, or "
        "use another device"
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("device", "precision", "told"),
    [("cuda:1", "fp32", True), ("cuda:1", "fp16", False), ("cpu", "fp32", False)],
)
def test_a_run_on_a_gpu_is_told_of_a_large_model_in_full_precision(
    gpu: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    precision: Precision,
    told: bool,
) -> None:
    path = save_tiny(tmp_path / "tiny.pt2")
    choice = resolve_model(path)
    choice = replace(choice, spec=choice.spec.with_(precision=precision))
    runner = PortableRunner(Means(), signature_of(choice.spec), device=device, slots=3)
    monkeypatch.setattr(runners, "open_archive", lambda *_, **__: runner)
    load_model(choice, device)
    assert not warnings_of(caplog), "a small one is fast enough"
    monkeypatch.setattr(loader, "_LARGE_BYTES", path.stat().st_size)
    load_model(choice, device)
    assert warnings_of(caplog) == told * [
        "tiny: computes in fp32, which a GPU does several times slower than half precision; export "
        "it with --precision bf16 or fp16"
    ]


def test_a_compiled_program_is_made_on_its_gpu_and_no_oftener_than_passes_run_there(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int, int]] = []

    class Program:
        def __init__(self, info: ArchiveInfo, folder: Path, *, device: str, runners: int) -> None:
            made.append((device, runners, torch.cuda.current_device()))

        def check_counts(self, *_: object) -> None: ...

    monkeypatch.setattr(compiled, "_Library", Program)
    monkeypatch.setattr(compiled, "unpack", lambda _: tmp_path)
    monkeypatch.setattr(compiled, "available_cores", lambda: 64)
    info = replace(inspect_archive(save_tiny(tmp_path / "tiny.pt2")), torch_version="")
    signature = signature_of(EMBEDDING)
    for device in ("cuda:1", "cpu"):
        CompiledRunner(info, signature, device=device, slots=3)
        assert made.pop() == ((device, 3, 1) if device == "cuda:1" else (device, 64, 0))
