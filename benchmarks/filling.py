"""How full forward passes are when many small slides share one device.

    python -m benchmarks.filling

The device is a stand-in: one pass at a time, of a fixed time whatever it holds, which is what a
GPU is to a small model; tiles are those of forty small slides. It shows what sharing passes among
the schedulers of several slides wins, and what it costs where nothing is won.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.big_slides import cache_folder
from benchmarks.end_to_end import Silent, small_slides
from benchmarks.near_free import SPEC, near_free_checkpoint
from bioptimus.batch import run as batch_run
from bioptimus.models.clients import local
from bioptimus.runtime import shared_passes
from bioptimus.runtime.server_model import BaseServerModel

PASS_SECONDS = 0.2
BATCH = 48
WORKERS = (2, 4, 8)


class FixedTimeRunner:
    """One pass at a time, each as long as any other."""

    device = "cpu"
    max_batch: int | None = None

    def __init__(self) -> None:
        self.batches: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._lock:
            self.batches.append(len(inputs[0]))
            time.sleep(PASS_SECONDS)
        return (torch.zeros(len(inputs[0]), SPEC.embedding_dim),)


class _Alone(shared_passes.SharedPasses):
    """Each batch a pass of its own, for comparison."""

    def _take(self, mine):  # type: ignore[no-untyped-def]
        with self._lock:
            self._waiting.remove(mine)
        return [mine]


def measure(workers: int, *, shared: bool) -> tuple[float, float]:
    """(seconds, share of the passes' room that was filled) of a run over the small slides."""
    runner = FixedTimeRunner()
    passes = shared_passes.SharedPasses if shared else _Alone

    def one_place(model, *, places, max_tiles):  # type: ignore[no-untyped-def]
        return passes(model, places=1, max_tiles=max_tiles)

    def load(*_args, **_options):  # type: ignore[no-untyped-def]
        return BaseServerModel.from_runner(SPEC, runner, checkpoint_path=checkpoint)

    checkpoint = near_free_checkpoint()
    listener = Silent()
    with (
        patch.object(local, "SharedPasses", one_place),
        patch.object(batch_run, "load_model", load),
        tempfile.TemporaryDirectory(dir=cache_folder()) as out,
    ):
        config = batch_run.RunConfig(
            inputs=tuple(map(str, small_slides())),
            out=Path(out),
            model=str(checkpoint),
            workers=workers,
            batch_size=BATCH,
        )
        batch_run.run(config, listener=listener, stop=listener)
        seconds = time.perf_counter() - listener.started
    return seconds, sum(runner.batches) / (BATCH * len(runner.batches))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of workers."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(arguments)
    print(f"{'workers':>8}{'alone: fill':>14}{'seconds':>9}{'shared: fill':>14}{'seconds':>9}")
    for workers in WORKERS:
        alone, together = measure(workers, shared=False), measure(workers, shared=True)
        print(
            f"{workers:>8}{alone[1]:>14.2f}{alone[0]:>9.2f}{together[1]:>14.2f}{together[0]:>9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
