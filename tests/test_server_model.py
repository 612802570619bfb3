"""From requests to samples, from samples to responses, from any thread."""

import hashlib
import json
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from bioptimus.errors import (
    CheckpointError,
    OutOfDeviceMemoryError,
    RequestError,
    UsageError,
    _ForwardError,
)
from bioptimus.inference.schemas import ModelRequest
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.runtime.server_model import (
    BaseServerModel,
    BulkRNAServerModel,
    MaskServerModel,
    PreparedSample,
    StreamPool,
)
from bioptimus.tiles import TileSpec
from tests.models import BOTH, EMBEDDING, SIZE, FakeRunner, fake_model, mean_colour, pixels, request

GENES = 5
RNA = ModelSpec(
    name="rna",
    tile=TileSpec(size_px=SIZE),
    output_kind="prediction_and_embedding",
    embedding_dim=3,
    prediction_dim=GENES,
    rna_dim=GENES,
    omics_transform="log1p",
)


class GivenRunner:
    """Gives what it is told, and keeps what it got."""

    device = "cpu"
    max_batch: int | None = None

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.inputs: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.inputs.append(tuple(tensor.clone() for tensor in inputs))
        answer = self._answer(*inputs)
        return answer if isinstance(answer, tuple) else (answer,)


def echo_rna(tiles: torch.Tensor, rna: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rna, tiles.to(torch.float32).mean((1, 2))


def answer(model: BaseServerModel, requests: list[ModelRequest], mode: str = "embedding") -> Any:
    return model.forward_batch([model.prepare_sample(r) for r in requests], requests, mode)


# Preparing.


def test_tile_is_a_view_of_the_requests_pixels() -> None:
    model, _ = fake_model()
    tile = pixels(1)
    sample = model.prepare_sample(ModelRequest.from_pixels(tile))
    assert sample.tile.shape == (3, SIZE, SIZE)
    assert sample.tile.dtype == torch.uint8
    tile[0, 5, 2] = 77
    assert sample.tile[2, 0, 5] == 77
    assert sample.pixels is tile
    sample.tile = sample.tile[:, 1:] + 1
    assert sample.pixels.shape == (SIZE - 1, SIZE, 3)
    assert sample.pixels[4, 2, 0] == tile[5, 2, 0] + 1


def test_read_only_and_strided_pixels_are_taken() -> None:
    model, _ = fake_model()
    big = pixels(1, 40)
    view = big[3 : 3 + SIZE, 5 : 5 + SIZE]
    fixed = view.copy()
    fixed.flags.writeable = False
    responses = answer(model, [ModelRequest.from_pixels(view), ModelRequest.from_pixels(fixed)])
    expected = view.astype(np.float64).mean((0, 1))
    for response in responses:
        np.testing.assert_allclose(response.output, expected, rtol=1e-5)


def test_mirrored_pixels_are_taken_wherever_they_stand_in_a_batch() -> None:
    model, _ = fake_model()
    tile = pixels(1)
    # As OpenCV's BGR is usually turned into RGB, and as tiles are flipped.
    requests = [ModelRequest.from_pixels(view) for view in (tile[..., ::-1], tile[::-1], tile)]
    found = [response.output for response in answer(model, requests)]
    np.testing.assert_array_equal(found[0], found[2][::-1])
    np.testing.assert_allclose(found[1], found[2], rtol=1e-6)
    assert model.prepare_sample(requests[1]).tile[0, 0, 0] == tile[-1, 0, 0]


def test_tile_of_another_size_is_refused_with_both_sizes() -> None:
    model, _ = fake_model()
    for one in (
        ModelRequest.from_pixels(pixels(1, SIZE + 1)),
        ModelRequest.from_json(ModelRequest.from_pixels(pixels(1, SIZE + 1)).to_json()),
    ):
        with pytest.raises(RequestError, match="tile of 17 x 17 px, the model takes 16 x 16 px"):
            model.prepare_sample(one)


# Running.


def test_responses_echo_their_requests_in_order() -> None:
    model, _ = fake_model()
    requests = [
        ModelRequest.from_pixels(
            pixels(i),
            slide_name=f"{i}.svs",
            x=i,
            y=-i,
            tissue_ratio=0.5,
            patch_idx=i,
            resolution=2.0,
        )
        for i in range(5)
    ]
    for i, response in enumerate(answer(model, requests)):
        assert (response.slide_name, response.x, response.y) == (f"{i}.svs", i, -i)
        assert (response.width, response.height, response.patch_idx) == (SIZE, SIZE, i)
        assert (response.tissue_ratio, response.resolution) == (0.5, 2.0)
        assert response.output.dtype == np.float32
        assert response.embedding is None
        np.testing.assert_allclose(response.output, mean_colour(i), rtol=1e-5)


def test_combined_mode_gives_both_from_one_pass() -> None:
    model, runner = fake_model(BOTH)
    (both,) = answer(model, [request(1)], "prediction_with_embedding")
    assert runner.batches == [1]
    (prediction,) = answer(model, [request(1)], "prediction")
    (embedding,) = answer(model, [request(1)], "embedding")
    assert np.array_equal(both.output, prediction.output)
    assert np.array_equal(both.embedding, embedding.output)
    assert prediction.embedding is None


def test_empty_batch_asks_nothing_of_the_model() -> None:
    model, runner = fake_model()
    assert model.forward_batch([], [], "embedding") == []
    assert model.forward([]).shape == (0, 3)
    assert runner.batches == []


def test_answers_outlive_the_next_batch() -> None:
    """Assembly buffers are used again; an answer must not be a window into one."""
    spec = RNA.with_(omics_transform=None)
    model = BulkRNAServerModel.from_runner(spec, GivenRunner(echo_rna))  # gives its input back
    (first,) = answer(model, [rna_request([1.0] * GENES)], "prediction")
    answer(model, [rna_request([2.0] * GENES)], "prediction")
    assert first.output.tolist() == [1.0] * GENES


def test_float_tiles_of_a_subclass_are_taken_as_they_are() -> None:
    class Floats(BaseServerModel):
        def prepare_sample(self, request: ModelRequest) -> PreparedSample:
            tile = super().prepare_sample(request).tile
            number = torch.tensor(request.x)
            return PreparedSample(tile.to(torch.float32) - 1, {"number": number})

    runner = GivenRunner(lambda tiles, numbers: tiles.mean((2, 3)))
    model = Floats.from_runner(EMBEDDING.with_(input_layout="nchw_float32"), runner)
    answer(model, [request(1), request(2)])
    tiles, numbers = runner.inputs[0]
    assert np.array_equal(tiles[1].numpy(), pixels(2).transpose(2, 0, 1).astype(np.float32) - 1)
    assert numbers.tolist() == [1, 2]
    with pytest.raises(_ForwardError, match=r"takes uint8 tiles, got torch\.float32"):
        answer(Floats.from_runner(EMBEDDING, runner), [request(1)])


@pytest.mark.parametrize("mode", ["prediction", "prediction_with_embedding"])
def test_mode_is_checked_against_the_specification(mode: str) -> None:
    model, runner = fake_model()
    with pytest.raises(UsageError, match=r"means: cannot answer .* modes it has: embedding"):
        answer(model, [request(1)], mode)
    with pytest.raises(UsageError, match="no such inference mode"):
        answer(model, [request(1)], "segment")
    assert runner.batches == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_value_that_is_no_number_marks_its_own_response_only(bad: float) -> None:
    def poisoned(tiles: torch.Tensor) -> torch.Tensor:
        result = tiles.to(torch.float32).mean((1, 2))
        result[1, 2] = bad
        return result

    model = BaseServerModel.from_runner(EMBEDDING, GivenRunner(poisoned))
    responses = answer(model, [request(i) for i in range(3)])
    assert [response.finite for response in responses] == [True, False, True]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (torch.zeros(2, 4), r"embedding of shape \(2, 4\), \(2, 3\) expected"),
        (torch.zeros(1, 3), r"embedding of shape \(1, 3\)"),
        (torch.zeros(2, 3, 1), r"embedding of shape \(2, 3, 1\)"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), "gave 2 outputs, 1 expected"),
    ],
)
def test_outputs_that_do_not_fit_the_specification_fail_the_batch(outputs: Any, words: str) -> None:
    model = BaseServerModel.from_runner(EMBEDDING, GivenRunner(lambda _: outputs))
    with pytest.raises(_ForwardError, match=words):
        answer(model, [request(1), request(2)])


def test_failure_of_the_pass_names_model_and_cause() -> None:
    def fail(_: int) -> None:
        raise RuntimeError("no such kernel")

    model, _ = fake_model(before=fail)
    with pytest.raises(_ForwardError, match="means: forward pass of 1 tiles failed: no such"):
        answer(model, [request(1)])


def test_want_of_memory_is_told_apart_and_says_what_helps() -> None:
    def fail(_: int) -> None:
        raise MemoryError

    model, _ = fake_model(before=fail)
    with pytest.raises(OutOfDeviceMemoryError, match="with 2 tiles in a batch; a smaller batch"):
        answer(model, [request(1), request(2)])
    with pytest.raises(OutOfDeviceMemoryError, match="on cpu with a single tile; free memory"):
        answer(model, [request(1)])


def test_really_too_large_an_allocation_is_want_of_memory() -> None:
    model = BaseServerModel.from_runner(EMBEDDING, GivenRunner(lambda _: torch.empty(1 << 58)))
    with pytest.raises(OutOfDeviceMemoryError):
        answer(model, [request(1)])


def test_want_of_memory_lets_go_of_what_the_pass_had_made() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def fail(_: torch.Tensor) -> torch.Tensor:
        half_way = torch.empty(8)
        made.append(weakref.ref(half_way))
        raise MemoryError

    model = BaseServerModel.from_runner(EMBEDDING, GivenRunner(fail))
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        answer(model, [request(1)])
    # The caller still holds the error, while it tries again with a smaller batch.
    assert caught.value.__cause__ is not None
    assert made[0]() is None


def test_passes_side_by_side_have_a_stream_each_and_later_ones_use_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []
    current: list[object] = []

    def make(device: torch.device) -> object:
        made.append(device)
        return len(made)

    @contextmanager
    def use(stream: object) -> Iterator[None]:
        current.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    pool = StreamPool(torch.device("cuda:1"))
    with pool.lease(), pool.lease():
        pass
    assert current == [1, 2]
    with pytest.raises(ValueError, match="failed"), pool.lease():
        raise ValueError("failed")
    for _ in range(5):  # each slide has threads of its own
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_lease, pool).result()
    assert made == [torch.device("cuda:1")] * 2


def _lease(pool: StreamPool) -> None:
    with pool.lease():
        pass


def test_float_layout_gets_the_usual_normalisation_bit_for_bit() -> None:
    spec = EMBEDDING.with_(
        input_layout="nchw_float32", mean=(0.707223, 0.578729, 0.703617), std=(0.21, 0.23, 0.18)
    )
    runner = GivenRunner(lambda tiles: tiles.mean((2, 3)))
    model = BaseServerModel.from_runner(spec, runner)
    answer(model, [request(1), request(2)])
    (given,) = runner.inputs[0]
    assert given.is_contiguous()
    mean, std = (torch.tensor(v, dtype=torch.float32).view(3, 1, 1) for v in (spec.mean, spec.std))
    for row, seed in zip(given, (1, 2), strict=True):
        image = torch.from_numpy(pixels(seed)).permute(2, 0, 1).contiguous().float().div(255)
        assert torch.equal(row, image.sub(mean).div(std))


def test_uint8_layout_gets_contiguous_rows_of_pixels() -> None:
    runner = GivenRunner(lambda tiles: tiles.to(torch.float32).mean((1, 2)))
    model = BaseServerModel.from_runner(EMBEDDING, runner)
    answer(model, [request(1), request(2)])
    (given,) = runner.inputs[0]
    assert given.is_contiguous()
    assert np.array_equal(given.numpy(), np.stack([pixels(1), pixels(2)]))


def test_older_way_gives_the_same_values() -> None:
    model, _ = fake_model()
    stacked = model.forward([request(1), request(2)])
    assert np.array_equal(stacked[1].numpy(), answer(model, [request(1), request(2)])[1].output)


# Bulk RNA.


def rna_request(values: Any, seed: int = 1) -> ModelRequest:
    return ModelRequest.from_pixels(pixels(seed), bulk_rna=values)


def test_tpm_go_in_as_log1p_and_predictions_come_out_as_tpm() -> None:
    runner = GivenRunner(echo_rna)
    model = BulkRNAServerModel.from_runner(RNA, runner)
    tpm = [0.0, 1.0, 10.0, 1e3, 1e6]
    (both,) = answer(model, [rna_request(tpm)], "prediction_with_embedding")
    np.testing.assert_allclose(runner.inputs[0][1][0].numpy(), np.log1p(tpm), rtol=1e-6)
    np.testing.assert_allclose(both.output, tpm, rtol=1e-4)
    np.testing.assert_allclose(both.embedding, mean_colour(1), rtol=1e-5)
    assert len(runner.inputs) == 1


def test_prediction_too_large_for_tpm_is_marked() -> None:
    runner = GivenRunner(lambda tiles, rna: (rna * 0 + 1000, tiles.float().mean((1, 2))))
    model = BulkRNAServerModel.from_runner(RNA, runner)
    (response,) = answer(model, [rna_request([1.0] * GENES)], "prediction")
    assert not response.finite


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "bulk_rna: missing; rna needs 5 TPM values"),
        ([1.0] * 4, "bulk_rna: 4 values, rna takes 5"),
        ([1.0] * 6, "bulk_rna: 6 values, rna takes 5"),
        ([1.0, 1.0, 1.0, 1.0, -0.5], "bulk_rna: holds negative values"),
    ],
)
def test_rna_that_the_model_cannot_take_is_refused(values: Any, words: str) -> None:
    model = BulkRNAServerModel.from_runner(RNA, GivenRunner(echo_rna))
    with pytest.raises(RequestError, match=words):
        model.prepare_sample(rna_request(values))


def test_model_that_permits_it_reads_missing_rna_as_zeros() -> None:
    class Lenient(BulkRNAServerModel):
        bulk_rna_optional = True

    runner = GivenRunner(echo_rna)
    answer(Lenient.from_runner(RNA, runner), [rna_request(None)], "embedding")
    assert runner.inputs[0][1].tolist() == [[0.0] * GENES]


def test_rna_shared_by_a_slide_is_transformed_once_and_only_if_it_cannot_change() -> None:
    model = BulkRNAServerModel.from_runner(RNA, GivenRunner(echo_rna))
    fixed = np.ones(GENES, np.float32)
    fixed.flags.writeable = False
    first, second = (model.prepare_sample(rna_request(fixed)) for _ in range(2))
    assert first.extra_tensors["bulk_rna"] is second.extra_tensors["bulk_rna"]
    other = fixed * 2
    other.flags.writeable = False
    model.prepare_sample(rna_request(other))
    again = model.prepare_sample(rna_request(fixed))
    assert again.extra_tensors["bulk_rna"] is first.extra_tensors["bulk_rna"], "two slides in turn"
    loose = np.ones(GENES, np.float32)
    before = model.prepare_sample(rna_request(loose)).extra_tensors["bulk_rna"]
    loose[:] = 0
    after = model.prepare_sample(rna_request(loose)).extra_tensors["bulk_rna"]
    assert before[0] > 0
    assert after[0] == 0


def test_preprocessing_lists_is_the_transform_and_none_leaves_them() -> None:
    model = BulkRNAServerModel.from_runner(RNA, GivenRunner(echo_rna))
    np.testing.assert_allclose(
        model.preprocess_bulk_rna([0.0, 9.0]), np.log1p([0.0, 9.0]), rtol=1e-6
    )
    plain, _ = fake_model()
    assert plain.preprocess_bulk_rna([-1.0, 9.0]) == [-1.0, 9.0]


# Masks.

MASK = ModelSpec(name="mask", tile=TileSpec(size_px=SIZE), output_kind="mask")


@pytest.mark.parametrize("channel", [False, True])
def test_mask_is_height_by_width(channel: bool) -> None:
    def red(tiles: torch.Tensor) -> torch.Tensor:
        mask = tiles[..., 0].to(torch.float32)
        return mask[:, None] if channel else mask

    model = MaskServerModel.from_runner(MASK, GivenRunner(red))
    first, second = answer(model, [request(1), request(2)], "prediction")
    assert np.array_equal(first.output, pixels(1)[..., 0])
    assert np.array_equal(second.output, pixels(2)[..., 0])
    with pytest.raises(UsageError, match="cannot answer embedding"):
        answer(model, [request(1)], "embedding")


def test_mask_of_another_kind_fails_the_batch() -> None:
    model = MaskServerModel.from_runner(MASK, GivenRunner(lambda t: torch.zeros(len(t), 2, 4, 4)))
    with pytest.raises(_ForwardError, match="mask of shape"):
        answer(model, [request(1)], "prediction")


# What is known.


def test_metadata_is_json_and_says_what_to_send_and_what_comes() -> None:
    model, _ = fake_model(BOTH)
    known = json.loads(json.dumps(model.get_metadata()))
    assert known["model_name"] == "both"
    assert (known["input"]["width"], known["input"]["mpp"]) == (SIZE, 0.5)
    assert known["output"]["output_names"] == ["red", "green"]
    assert known["modes"] == ["prediction", "embedding", "prediction_with_embedding"]
    assert ModelSpec.from_dict(known["config"]) == BOTH


def test_missing_checkpoint_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pt2: no such file"):
        BaseServerModel(EMBEDDING, "none.pt2", "cpu", tmp_path)
    model, _ = fake_model()
    with pytest.raises(CheckpointError, match="made in memory"):
        _ = model.checkpoint_path
    assert model.checkpoint_sha256 == ""


# A real checkpoint, from many threads.


class SmallNet(nn.Module):
    """Convolution and matrix product, the operations real models spend their time in."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, 2)
        self.linear = nn.Linear(8, 3)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        images = tiles.permute(0, 3, 1, 2).to(torch.float32) / 255
        result: torch.Tensor = self.linear(torch.relu(self.convolution(images)).mean((2, 3)))
        return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    example = torch.zeros((2, SIZE, SIZE, 3), dtype=torch.uint8)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(SmallNet().eval(), (example,), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("models") / "small.pt2"
    torch.export.save(program, path)
    return path


def test_checkpoint_is_loaded_by_name_and_folder(checkpoint: Path) -> None:
    model = BaseServerModel(EMBEDDING, checkpoint.name, "cpu", checkpoint.parent)
    assert model.checkpoint_path == checkpoint
    assert model.checkpoint_sha256 == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    assert (model.model_name, model.device) == ("means", "cpu")
    assert len(answer(model, [request(1)])) == 1


def test_eight_threads_get_the_bits_that_one_gets(checkpoint: Path) -> None:
    model = BaseServerModel(EMBEDDING, checkpoint.name, "cpu", checkpoint.parent)
    sizes = (1, 3, 8, 17)
    batches = [[request(100 * n + i) for i in range(n)] for n in sizes for _ in range(2)]

    def run(batch: list[ModelRequest]) -> bytes:
        outputs: list[npt.NDArray[np.float32]] = [r.output for r in answer(model, batch)]
        return np.stack(outputs).tobytes()

    alone = [run(batch) for batch in batches]
    together = threading.Barrier(8)

    def thread(number: int) -> int:
        together.wait()
        order = np.random.default_rng(number).integers(0, len(batches), 40)
        return sum(run(batches[i]) != alone[i] for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(thread, range(8))) == 0


def test_autocast_of_the_caller_does_not_change_the_results(checkpoint: Path) -> None:
    model = BaseServerModel(EMBEDDING, checkpoint.name, "cpu", checkpoint.parent)
    (wanted,) = answer(model, [request(1)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = answer(model, [request(1)])
        assert torch.is_autocast_enabled("cpu")
    np.testing.assert_array_equal(found.output, wanted.output)


def test_modes_are_strings_to_callers() -> None:
    model, _ = fake_model()
    assert model.check_mode("embedding") is InferenceMode.EMBEDDING


def test_fake_runner_is_what_other_tests_think_it_is() -> None:
    runner = FakeRunner(BOTH)
    prediction, embedding = runner(torch.full((2, 4, 4, 3), 8, dtype=torch.uint8))
    assert prediction.tolist() == [[4.0, 4.0]] * 2
    assert embedding.tolist() == [[8.0] * 3] * 2
