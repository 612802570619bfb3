"""Runners and models that are cheap and whose answers can be computed in a test."""

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from bioptimus.inference.schemas import ModelRequest
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.server_model import BaseServerModel
from bioptimus.tiles import TileSpec

SIZE = 16

EMBEDDING = ModelSpec(name="means", tile=TileSpec(size_px=SIZE), embedding_dim=3)
BOTH = ModelSpec(
    name="both",
    tile=TileSpec(size_px=SIZE),
    output_kind="prediction_and_embedding",
    embedding_dim=3,
    prediction_dim=2,
    output_names=("red", "green"),
)


class FakeRunner:
    """Counts its calls; the embedding of a tile is its mean colour, the prediction half of it."""

    def __init__(self, spec: ModelSpec, before: Callable[[int], None] | None = None) -> None:
        self.device = "cpu"
        self.max_batch: int | None = None
        self.batches: list[int] = []
        self._spec = spec
        self._before = before
        self._lock = threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._lock:
            self.batches.append(len(inputs[0]))
            number = len(self.batches)
        if self._before is not None:
            self._before(number)
        embedding = inputs[0].to(torch.float32).mean((1, 2))
        if self._spec.output_kind == "prediction_and_embedding":
            return embedding[:, :2] / 2, embedding
        return (embedding,)


def fake_model(
    spec: ModelSpec = EMBEDDING, before: Callable[[int], None] | None = None
) -> tuple[BaseServerModel, FakeRunner]:
    """A model and its runner; ``before`` is called with the number of each pass, from 1."""
    runner = FakeRunner(spec, before)
    return BaseServerModel.from_runner(spec, runner), runner


def pixels(seed: int, size: int = SIZE) -> npt.NDArray[np.uint8]:
    """A tile of noise that differs for each seed."""
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)


def request(seed: int, slide_name: str = "a.svs") -> ModelRequest:
    """A request for :func:`pixels` of the same seed, at x = seed."""
    return ModelRequest.from_pixels(pixels(seed), slide_name=slide_name, x=seed, y=0)


def mean_colour(seed: int) -> npt.NDArray[np.float32]:
    """What the fake model answers, up to rounding."""
    mean: npt.NDArray[np.float32] = pixels(seed).astype(np.float32).mean((0, 1))
    return mean
