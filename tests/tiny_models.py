"""Models of a few weights, exported as users' models are, for tests."""

from pathlib import Path

import torch
from torch import nn

from bioptimus.models.types import ModelSpec
from bioptimus.runtime.export import save, trace
from bioptimus.tiles import TileSpec

TINY = ModelSpec(name="tiny", licence="CC0-1.0", tile=TileSpec(size_px=8), embedding_dim=5)


class Tiny(nn.Module):
    """uint8 (N, 8, 8, 3) → (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(tiles.float().mean((1, 2)) / 255)
        return result


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return Tiny().eval()


def save_tiny(path: Path, spec: ModelSpec = TINY) -> Path:
    return save_module(tiny(), spec, path)


def flat() -> nn.Module:
    """Normalised (N, 3, 8, 8) → (N, 5)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))


class TinyRNA(nn.Module):
    """(tiles, RNA (N, 7)) → prediction (N, 2), embedding (N, 5)."""

    def forward(self, tiles: torch.Tensor, rna: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = tiles.float().flatten(1)[:, :5] / 255
        return rna[:, :2] + embedding[:, :2], embedding


def save_module(module: nn.Module, spec: ModelSpec, path: Path) -> Path:
    save(trace(module.eval(), spec), spec, path)
    return path


def save_foreign(path: Path, *, largest: int | None = 8) -> Path:
    """As someone else's export would be: no description, other batch lengths."""
    shapes = None if largest is None else ({0: torch.export.Dim("batch", min=1, max=largest)},)
    example = torch.zeros((4, 8, 8, 3), dtype=torch.uint8)
    torch.export.save(torch.export.export(tiny(), (example,), dynamic_shapes=shapes), path)
    return path


def random_tiles(count: int, side: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
