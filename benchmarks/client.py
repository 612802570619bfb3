"""CPU cost of asking a model, per tile, with a model that computes almost nothing.

``python -m benchmarks.client`` prints it for each way of asking. What remains is the work of
request, scheduler, batch assembly and response; reading and the forward pass are not in it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.models.clients.local import InProcessClient
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.runtime.server_model import BaseServerModel

DIM = 1536
SPEC = ModelSpec(name="near-free", embedding_dim=DIM)
TILES = 1_920
# A slide's reader keeps about two batches on their way.
CONCURRENT = 96
BLOCK = 32


class NearFreeRunner:
    """Answers with a slice of memory that is there already."""

    device = "cpu"
    max_batch: int | None = None

    def __init__(self) -> None:
        self._answers = np.random.default_rng(0).random((1024, DIM), np.float32)

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Copied by numpy: torch would start its thread team, whose spinning is counted as CPU.
        return (torch.from_numpy(self._answers[: len(inputs[0])].copy()),)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Median of several rounds.

    Attributes:
        way: How the model was asked.
        cpu_us: CPU time of the whole process, µs a tile.
        wall_us: Time on the clock, µs a tile.
        budget_us: What it may cost; None where nothing is promised.
    """

    way: str
    cpu_us: float
    wall_us: float
    budget_us: float | None = None


def measure(rounds: int = 5) -> list[Cost]:
    """Ask in every way; whole rounds in turn, so that a busy moment hits all ways alike."""
    model = BaseServerModel.from_runner(SPEC, NearFreeRunner())
    generator = np.random.default_rng(0)
    tiles = [generator.integers(0, 256, (224, 224, 3), np.uint8) for _ in range(CONCURRENT)]

    async def typed(client: InProcessClient, number: int) -> None:
        request = ModelRequest.from_pixels(
            tiles[number % CONCURRENT], slide_name="a.svs", x=number, y=0, patch_idx=number
        )
        response = await client.embed_async(request)
        assert response.output.shape == (DIM,)

    async def in_blocks(client: InProcessClient) -> None:
        """As a slide does it, a block of tiles at a time."""
        starts = iter(range(0, TILES, BLOCK))

        async def lane() -> None:
            for start in starts:
                requests = [
                    ModelRequest.from_pixels(
                        tiles[i % CONCURRENT], slide_name="a.svs", x=i, y=0, patch_idx=i
                    )
                    for i in range(start, start + BLOCK)
                ]
                answers = await client.answer_many_async(requests, InferenceMode.EMBEDDING)
                assert all(isinstance(answer, ModelResponse) for answer in answers)

        await asyncio.gather(*(lane() for _ in range(CONCURRENT // BLOCK)))

    async def as_json(client: InProcessClient, number: int) -> None:
        request = ModelRequest.from_pixels(
            tiles[number % CONCURRENT], slide_name="a.svs", x=number, y=0, patch_idx=number
        )
        body = await client.embed_async(request.to_json())
        assert ModelResponse.from_json(body).output.shape == (DIM,)

    def batches(client: InProcessClient) -> None:
        for start in range(0, TILES, 48):
            client.embed_batch(
                [
                    ModelRequest.from_pixels(tiles[i % CONCURRENT], slide_name="a.svs", x=i, y=0)
                    for i in range(start, start + 48)
                ]
            )

    ways: dict[str, tuple[Callable[[InProcessClient], None], float | None]] = {
        "typed, embed_async": (lambda client: asyncio.run(_ask(client, typed)), 150.0),
        "typed, answer_many_async": (lambda client: asyncio.run(in_blocks(client)), 150.0),
        "typed, embed_batch": (batches, None),
        "JSON, embed_async": (lambda client: asyncio.run(_ask(client, as_json)), 1000.0),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, (work, _budget) in ways.items():
            with InProcessClient(model) as client:
                cpu, wall = time.process_time(), time.perf_counter()
                work(client)
                found[way].append(
                    (time.process_time() - cpu, time.perf_counter() - wall),
                )
    return [
        Cost(
            way=way,
            # The first round warms up caches and memory.
            cpu_us=median(cpu for cpu, _ in found[way][1:]) / TILES * 1e6,
            wall_us=median(wall for _, wall in found[way][1:]) / TILES * 1e6,
            budget_us=budget,
        )
        for way, (_work, budget) in ways.items()
    ]


async def _ask(
    client: InProcessClient, one: Callable[[InProcessClient, int], Awaitable[None]]
) -> None:
    numbers = iter(range(TILES))

    async def worker() -> None:
        for number in numbers:
            await one(client, number)

    await asyncio.gather(*(worker() for _ in range(CONCURRENT)))


def main() -> None:
    """Print the table."""
    print(f"{TILES} tiles of 224 px, near-free model of {DIM} values, batches of 48\n")
    print(f"{'asked by':<26}{'CPU µs/tile':>12}{'clock µs/tile':>15}{'budget':>9}")
    for cost in measure():
        budget = f"{cost.budget_us:.0f}" if cost.budget_us else ""
        print(f"{cost.way:<26}{cost.cpu_us:>12.1f}{cost.wall_us:>15.1f}{budget:>9}")


if __name__ == "__main__":
    main()
