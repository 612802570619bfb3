"""A runner answers any batch, checks what it is given, and gives float32 on the CPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bioptimus.errors import CheckpointError, _ForwardError
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.runners import Runner, open_runner
from bioptimus.tiles import TileSpec

SPEC = ModelSpec(name="tiny", tile=TileSpec(size_px=8), embedding_dim=5)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(tiles.float().mean((1, 2)) / 255)
        return result


def save(path: Path, *, largest: int | None = 8) -> nn.Module:
    torch.manual_seed(0)
    module = Tiny().eval()
    shapes = None if largest is None else ({0: torch.export.Dim("batch", min=1, max=largest)},)
    example = torch.zeros((4, 8, 8, 3), dtype=torch.uint8)
    torch.export.save(torch.export.export(module, (example,), dynamic_shapes=shapes), path)
    return module


def tiles(count: int) -> torch.Tensor:
    torch.manual_seed(count)
    return torch.randint(0, 256, (count, 8, 8, 3), dtype=torch.uint8)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    save(tmp_path / "tiny.pt2")
    return open_runner(tmp_path / "tiny.pt2", device="cpu", spec=SPEC)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 20])
@pytest.mark.parametrize("largest", [8, None], ids=["up to 8", "exactly 4"])
def test_batches_of_any_length_equal_the_eager_model(
    tmp_path: Path, count: int, largest: int | None
) -> None:
    module = save(tmp_path / "tiny.pt2", largest=largest)
    runner = open_runner(tmp_path / "tiny.pt2", device="cpu", spec=SPEC)
    (output,) = runner(tiles(count))
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, module(tiles(count)).detach())


def test_no_tiles_give_no_rows(runner: Runner) -> None:
    (output,) = runner(tiles(0))
    assert output.shape == (0, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        tiles(2).float(),
        tiles(2)[:, :4],
        tiles(2).permute(0, 3, 1, 2),
        tiles(2)[0],
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
        runner(tiles(2), torch.zeros(2, 4))


def test_strided_input_gives_the_same_bits(runner: Runner) -> None:
    wide = torch.zeros((3, 8, 16, 3), dtype=torch.uint8)
    wide[:, :, ::2] = tiles(3)
    assert torch.equal(runner(wide[:, :, ::2])[0], runner(tiles(3))[0])


def test_a_text_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "no.pt2").write_text("hello")
    with pytest.raises(CheckpointError, match=r"no\.pt2"):
        open_runner(tmp_path / "no.pt2", device="cpu", spec=SPEC)
