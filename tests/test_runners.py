"""A runner answers any batch, checks what it is given, and gives float32 on the CPU."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from bioptimus.errors import CheckpointError, OutOfDeviceMemoryError, UsageError, _ForwardError
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.export import save, trace
from bioptimus.runtime.fitting import fit_spec
from bioptimus.runtime.runners import (
    PortableRunner,
    Runner,
    forward_error,
    lacks_memory,
    open_runner,
    require_device,
)
from bioptimus.tiles import TileSpec
from tests.models import fake_model, request
from tests.tiny_models import TINY, random_tiles, save_foreign, save_tiny, tiny


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = save_foreign(tmp_path_factory.mktemp("runner") / "tiny.pt2")
    return open_runner(path, device="cpu", spec=TINY)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = save_foreign(tmp_path_factory.mktemp("runner") / "tiny.pt2", largest=None)
    return open_runner(path, device="cpu", spec=TINY)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 20])
def test_batches_of_any_length_equal_the_eager_model(
    runner: Runner, of_four: Runner, count: int
) -> None:
    expected = tiny()(random_tiles(count)).detach()
    for each in (runner, of_four):
        (output,) = each(random_tiles(count))
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, expected)


def test_batch_limits_are_those_of_the_export(runner: Runner, of_four: Runner) -> None:
    assert (runner.max_batch, of_four.max_batch) == (8, 4)


def test_no_tiles_give_no_rows(runner: Runner) -> None:
    (output,) = runner(random_tiles(0))
    assert output.shape == (0, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        random_tiles(2).float(),
        random_tiles(2)[:, :4],
        random_tiles(2).permute(0, 3, 1, 2),
        random_tiles(2)[0],
        torch.tensor(1, dtype=torch.uint8),
    ],
    ids=["dtype", "height", "layout", "no batch", "scalar"],
)
def test_inputs_the_program_was_not_exported_for_are_refused(
    runner: Runner, wrong: torch.Tensor
) -> None:
    with pytest.raises(_ForwardError, match=r"takes uint8 \(N, 8, 8, 3\)"):
        runner(wrong)


def test_wrong_number_of_inputs_is_refused(runner: Runner) -> None:
    with pytest.raises(_ForwardError, match="takes 1 inputs"):
        runner(random_tiles(2), torch.zeros(2, 4))


def test_strided_input_gives_the_same_bits(runner: Runner) -> None:
    wide = torch.zeros((3, 8, 16, 3), dtype=torch.uint8)
    wide[:, :, ::2] = random_tiles(3)
    assert torch.equal(runner(wide[:, :, ::2])[0], runner(random_tiles(3))[0])


def test_eight_threads_get_the_bits_of_one(runner: Runner) -> None:
    expected = {count: runner(random_tiles(count))[0] for count in range(1, 12)}
    wrong: list[int] = []

    def ask(offset: int) -> None:
        for number in range(40):
            count = (number + offset) % 11 + 1
            if not torch.equal(runner(random_tiles(count))[0], expected[count]):
                wrong.append(count)

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Loose(nn.Module):
    """uint8 (N, 8, 8, 3) → (N, 5), through a step of the caller's."""

    def __init__(self, step: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.step = step

    def forward(self, tiles: torch.Tensor) -> object:
        return self.step(self.norm(tiles.float().flatten(1)[:, :5]))


def save_loose(path: Path, step: Callable[[torch.Tensor], object], *, training: bool) -> Path:
    """As someone else's export of such a network would be."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    example = torch.zeros((4, 8, 8, 3), dtype=torch.uint8)
    module = Loose(step).train(training)
    torch.export.save(torch.export.export(module, (example,), dynamic_shapes=shapes), path)
    return path


def attend(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    y = x[:, None, None]
    return functional.scaled_dot_product_attention(y, y, y, dropout_p=dropout_p)[:, 0, 0]


def drop_path(x: torch.Tensor) -> torch.Tensor:
    kept = torch.empty_like(x[:, :1])
    kept.bernoulli_(0.9)
    return x * kept


@pytest.mark.parametrize(
    ("step", "training", "operation"),
    [
        (lambda x: x, True, "aten.batch_norm"),
        (lambda x: functional.dropout(x, 0.5, training=True), False, "aten.dropout"),
        (lambda x: attend(x, 0.1), False, "aten.scaled_dot_product_attention"),
        (lambda x: x + torch.rand_like(x), False, "aten.rand_like"),
        (drop_path, False, "aten.bernoulli_"),
    ],
    ids=["batch norm", "dropout", "attention", "random", "in place"],
)
def test_a_foreign_program_whose_results_differ_from_run_to_run_is_refused(
    tmp_path: Path, step: Callable[[torch.Tensor], object], training: bool, operation: str
) -> None:
    path = save_loose(tmp_path / "loose.pt2", step, training=training)
    with pytest.raises(CheckpointError, match=rf"loose.pt2: {operation}.*call eval\(\)"):
        open_runner(path, device="cpu", spec=TINY)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: functional.dropout(x, 0.5, training=False),
        lambda x: functional.dropout(x, 0.0, training=True),
        lambda x: attend(x, 0.0) * 0 + x,
        lambda x: {"embedding": x},
        lambda x: ([x],),
    ],
    ids=["dropout off", "dropout of nothing", "attention", "dictionary", "nested"],
)
def test_a_foreign_program_in_evaluation_mode_runs_whatever_it_holds_its_output_in(
    tmp_path: Path, step: Callable[[torch.Tensor], object]
) -> None:
    path = save_loose(tmp_path / "loose.pt2", step, training=False)
    (output,) = open_runner(path, device="cpu", spec=TINY)(random_tiles(3))
    wanted = random_tiles(3).float().flatten(1)[:, :5] / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(output, wanted)


class Counting(nn.Module):
    """Notes how many calls are inside it at once; two must meet before any leaves."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.inside = 0
        self.most = 0
        self.lock = threading.Lock()
        self.meeting = threading.Barrier(parties)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.meeting.wait(30)
        with self.lock:
            self.inside -= 1
        return tiles[:, :1, 0, 0].float()


def test_no_more_passes_at_once_than_asked_for(runner: Runner) -> None:
    assert isinstance(runner, PortableRunner)
    module = Counting(parties=2)
    counted = PortableRunner(module, runner.signature, device="cpu", slots=5)
    counted.set_concurrency(2)
    threads = [threading.Thread(target=counted, args=(random_tiles(1),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert module.most == 2


class Failing(nn.Module):
    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("first\nsecond")


def test_a_failing_pass_is_a_forward_error_and_the_next_one_runs(runner: Runner) -> None:
    assert isinstance(runner, PortableRunner)
    failing = PortableRunner(Failing(), runner.signature, device="cpu", slots=1)
    for _ in range(3):  # with one slot, a slot that is not given back would hang here
        with pytest.raises(_ForwardError, match=r"^the forward pass failed: first$"):
            failing(random_tiles(1))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("not enough memory: you tried to allocate 9 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_lack_of_memory_has_its_own_error(error: Exception) -> None:
    assert isinstance(forward_error(error), OutOfDeviceMemoryError)

    def fail(_: int) -> None:
        raise error

    model, _ = fake_model(before=fail)
    asked = request(1)
    with pytest.raises(OutOfDeviceMemoryError):
        model.forward_batch([model.prepare_sample(asked)], [asked], "embedding")


def test_an_error_that_only_speaks_of_memory_is_no_lack_of_it() -> None:
    assert not lacks_memory(ValueError("out of memory is not a colour"))
    assert not lacks_memory(RuntimeError("an illegal memory access was encountered"))


class Pair(nn.Module):
    """(embedding (N, 5), prediction (N, 2)): the other way round than our order."""

    def forward(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = tiles.float().flatten(1)
        return flat[:, :5], flat[:, 5:7]


class Tokens(nn.Module):
    """(N, 6, 3): a class token, a register, four patches."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles.float().flatten(1)[:, :18].reshape(-1, 6, 3)


class Mask(nn.Module):
    """(N, 1, 8, 8)."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles[..., :1].float().permute(0, 3, 1, 2)


def opened(path: Path, module: nn.Module, spec: ModelSpec) -> Runner:
    save(trace(module, spec), spec, path)
    return open_runner(path, device="cpu", spec=spec)


def test_a_pair_comes_out_prediction_first(tmp_path: Path) -> None:
    spec = TINY.with_(output_kind="prediction_and_embedding", prediction_dim=2)
    prediction, embedding = opened(tmp_path / "m.pt2", Pair(), spec)(random_tiles(3))
    assert (prediction.shape, embedding.shape) == ((3, 2), (3, 5))


@pytest.mark.parametrize(
    ("pooling", "dim", "expected"),
    [("cls", 3, [0, 1, 2]), ("mean", 3, [10.5, 11.5, 12.5]),
     ("cls_mean", 6, [0, 1, 2, 10.5, 11.5, 12.5])],
)  # fmt: skip
def test_tokens_are_pooled_without_class_and_register_tokens(
    tmp_path: Path, pooling: str, dim: int, expected: list[float]
) -> None:
    spec = TINY.with_(embedding_dim=dim, pooling=pooling, prefix_tokens=2)
    tiles = torch.arange(192, dtype=torch.uint8).reshape(1, 8, 8, 3)
    (embedding,) = opened(tmp_path / "m.pt2", Tokens(), spec)(tiles)
    assert embedding[0].tolist() == expected


def test_a_mask_loses_its_channel_axis(tmp_path: Path) -> None:
    spec = TINY.with_(output_kind="mask", embedding_dim=0)
    tiles = random_tiles(2)
    (mask,) = opened(tmp_path / "m.pt2", Mask(), spec)(tiles)
    assert torch.equal(mask, tiles[..., 0].float())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding_dim": 7}, r"gives float32 \(N, 5\), but tiny gives float32 \(N, 7\)"),
        ({"tile": TileSpec(size_px=16)}, r"takes uint8 \(N, 8, 8, 3\), but tiny takes"),
        ({"input_layout": "nchw_float32"}, r"but tiny takes float32 \(N, 3, 8, 8\)"),
        ({"rna_dim": 9}, r"and float32 \(N, 9\)"),
        ({"output_kind": "mask"}, r"gives float32 \(N, 8, 8\)"),
    ],
)
def test_a_program_that_is_not_what_the_spec_says_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    path = save_tiny(tmp_path / "tiny.pt2")
    with pytest.raises(CheckpointError, match=words):
        open_runner(path, device="cpu", spec=TINY.with_(**changes))


def test_h0_mini_with_the_mean_of_its_patches_is_known_by_its_width(tmp_path: Path) -> None:
    spec = TINY.with_(name="h0-mini", embedding_dim=3, pooling="cls")
    wide = TINY.with_(embedding_dim=6, pooling="cls_mean", prefix_tokens=2)

    class Six(nn.Module):
        def forward(self, tiles: torch.Tensor) -> torch.Tensor:
            return tiles.float().flatten(1)[:, :6]

    runner = opened(tmp_path / "m.pt2", Six(), wide)
    assert isinstance(runner, PortableRunner)
    fitted = fit_spec(spec, runner.signature)
    assert (fitted.embedding_dim, fitted.pooling) == (6, "cls_mean")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_a_device_that_is_not_there_is_a_usage_error(tmp_path: Path, device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    path = save_tiny(tmp_path / "tiny.pt2")
    with pytest.raises(UsageError, match=device):
        open_runner(path, device=device, spec=TINY)


def test_a_gpu_is_told_by_its_number_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda")
    require_device("cuda:1")
    # torch takes the first for cuda:0, and the second for no device at all.
    for device in ("cuda:256", "cuda:99999999999", "cuda:2"):
        with pytest.raises(UsageError, match=f"{device}: there are 2 GPUs here"):
            require_device(device)
    with pytest.raises(UsageError, match=r"cuda:01: known are cpu, cuda and cuda:N"):
        require_device("cuda:01")  # torch refuses it
