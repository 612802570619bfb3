"""What only a GPU can show, in some minutes: run this file first where there is one.

``tests/test_gpu_stand_in.py`` goes the same ways on any machine.
"""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from bioptimus.errors import OutOfDeviceMemoryError
from bioptimus.runtime.archive import inspect_archive
from bioptimus.runtime.builtin import builtin_checkpoint
from bioptimus.runtime.compilation import compile_portable
from bioptimus.runtime.compiled import CompiledRunner
from bioptimus.runtime.export import agreement, export_module, random_inputs
from bioptimus.runtime.fitting import signature_of
from bioptimus.runtime.runners import PortableRunner, load_runner
from bioptimus.runtime.server_model import BaseServerModel
from tests.models import EMBEDDING, pixels, request
from tests.tiny_models import TINY, flat, random_tiles

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

DEVICE = "cuda:0"
EXAMPLE = Path(__file__).parent.parent / "examples" / "CMU-1-Small-Region.svs"


class Sums(nn.Module):
    """Whole numbers, so that any order of adding gives the same bits."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles.float().sum((1, 2))


def embeddings(model: BaseServerModel, seeds: range) -> list[npt.NDArray[np.float32]]:
    asked = [request(seed) for seed in seeds]
    samples = [model.prepare_sample(one) for one in asked]
    return [answer.output for answer in model.forward_batch(samples, asked, "embedding")]


def sums(seeds: range) -> list[npt.NDArray[np.float32]]:
    return [pixels(seed).astype(np.float32).sum((0, 1)) for seed in seeds]


def test_no_thread_reads_or_writes_memory_before_its_time() -> None:
    runner = PortableRunner(Sums(), signature_of(EMBEDDING), device=DEVICE, slots=3)
    model = BaseServerModel.from_runner(EMBEDDING, runner)
    batches = [range(start, start + 1 + start % 61) for start in range(0, 4_000, 10)]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(embeddings, [model] * len(batches), batches)
        for seeds, outputs in zip(batches, found, strict=True):
            np.testing.assert_array_equal(outputs, sums(seeds))
    assert model._streams is not None
    assert len(model._streams._idle) <= 8


def test_callers_of_a_runner_on_many_threads_get_what_one_gets() -> None:
    path = builtin_checkpoint().path
    info = inspect_archive(path)
    assert info.signature is not None
    tiles = random_inputs(info.signature.inputs, rows=70)[0]
    runner, here = load_runner(path, device=DEVICE), load_runner(path, device="cpu")
    alone = runner(tiles)
    # What is on the GPU already is taken as it is, also where it is still in the making.
    with ThreadPoolExecutor(6) as threads:
        for found in threads.map(lambda _: runner(tiles.to(DEVICE)), range(30)):
            assert agreement(alone, found).within("fp32")
    assert agreement(here(tiles), alone).within("fp32")


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Some 2 GiB for torch."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (2 << 30) / total), DEVICE)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


@pytest.mark.usefixtures("little_memory")
def test_a_batch_that_does_not_fit_says_so_and_a_smaller_one_fits_afterwards() -> None:
    class Greedy(Sums):
        def forward(self, tiles: torch.Tensor) -> torch.Tensor:
            torch.empty((len(tiles), 100 << 20), dtype=torch.uint8, device=tiles.device)
            return super().forward(tiles)

    runner = PortableRunner(Greedy(), signature_of(EMBEDDING), device=DEVICE, slots=3)
    model = BaseServerModel.from_runner(EMBEDDING, runner)
    with pytest.raises(OutOfDeviceMemoryError, match="with 64 tiles in a batch"):
        embeddings(model, range(64))
    np.testing.assert_array_equal(embeddings(model, range(4)), sums(range(4)))


LOST = """
from bioptimus.runtime.loader import prepare_environment
prepare_environment()
import torch
from tests.test_on_gpu import DEVICE, EMBEDDING, Sums, embeddings
from bioptimus.errors import LostDeviceError
from bioptimus.runtime.fitting import signature_of
from bioptimus.runtime.runners import PortableRunner
from bioptimus.runtime.server_model import BaseServerModel

class Faulty(Sums):
    def forward(self, tiles):
        beyond = torch.full((1,), 10**6, device=tiles.device)
        return super().forward(tiles) + torch.zeros(3, device=tiles.device)[beyond]

model = BaseServerModel.from_runner(
    EMBEDDING, PortableRunner(Faulty(), signature_of(EMBEDDING), device=DEVICE, slots=1)
)
for _ in range(2):
    try:
        embeddings(model, range(3))
    except LostDeviceError as exc:
        print(exc)
"""


def test_a_fault_in_a_kernel_loses_the_device_for_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert done.stdout.count("cuda:0 works no more in this process") == 2, done.stderr[-2000:]
    assert done.returncode == 0, "not aborted while pinned memory was let go of"


SECOND = """
import torch
from tests.test_on_gpu import EMBEDDING, Sums, embeddings
from concurrent.futures import ThreadPoolExecutor
from bioptimus.runtime.fitting import signature_of
from bioptimus.runtime.runners import PortableRunner
from bioptimus.runtime.server_model import BaseServerModel

runner = PortableRunner(Sums(), signature_of(EMBEDDING), device="cuda:1", slots=3)
model = BaseServerModel.from_runner(EMBEDDING, runner)
with ThreadPoolExecutor(2) as threads:
    list(threads.map(lambda _: embeddings(model, range(3)), range(8)))
print([torch._C._cuda_hasPrimaryContext(number) for number in (0, 1)])
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_on_the_second_gpu_leaves_the_first_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SECOND], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[False, True]\n", done.stderr[-2000:]


def test_a_file_traced_on_a_gpu_runs_there(tmp_path: Path) -> None:
    spec = TINY.with_(precision="bf16")
    report = export_module(flat(), spec, tmp_path / "tiny.pt2", device=DEVICE)
    assert report.compared_to == "float64"
    runner = load_runner(report.path, device=DEVICE)
    assert runner(random_tiles(3))[0].shape == (3, 5)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        pytest.skip("compiling needs the CUDA toolkit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIOPTIMUS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield compile_portable(builtin_checkpoint().path, device=DEVICE)


def test_a_compiled_program_gives_the_same_from_any_thread_by_both_ways(compiled: Path) -> None:
    info = inspect_archive(compiled)
    assert info.signature is not None
    tiles = random_inputs(info.signature.inputs, rows=70)[0]
    ours, official = (
        CompiledRunner(info, info.signature, device=DEVICE, slots=3, official=official)
        for official in (False, True)
    )
    wanted = official(tiles)
    with ThreadPoolExecutor(6) as threads:
        for found in threads.map(lambda _: ours(tiles), range(30)):
            assert all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("little_memory")
def test_a_compiled_program_that_lacks_memory_says_so(compiled: Path) -> None:
    info = inspect_archive(compiled)
    assert info.signature is not None
    runner = load_runner(compiled, device=DEVICE)
    with pytest.raises(OutOfDeviceMemoryError):
        runner(*random_inputs(info.signature.inputs, rows=1024))
    assert len(runner(*random_inputs(info.signature.inputs, rows=4))[0]) == 4


def test_a_slide_has_the_embeddings_that_a_cpu_gives_it(tmp_path: Path) -> None:
    found = {}
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        command = [sys.executable, "-m", "cli", "embed", str(EXAMPLE), "--device", device]
        done = subprocess.run(
            [*command, "--out", str(out)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        with h5py.File(next(out.rglob("*.h5"))) as file:
            found[device] = torch.from_numpy(file["features"][:])
    assert agreement([found["cpu"]], [found["cuda"]]).within("fp32")
