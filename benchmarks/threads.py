"""Who holds the interpreter lock, and what threads are worth, for the built-in model on this CPU.

    python -m benchmarks.threads

First the lock: two threads run forward passes while a third does nothing but look at the clock
every millisecond; how late it comes is how long readers, event loops and progress bars stand
still. Then the options: the same slides with other numbers of readers, workers, threads in a pass
and tiles in a batch.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._inductor.package.package import load_package

from benchmarks.big_slides import cache_folder
from benchmarks.end_to_end import Silent, small_slides
from bioptimus.batch.run import RunConfig, run
from bioptimus.runtime.builtin import builtin_checkpoint, builtin_network
from bioptimus.runtime.compilation import find_compiled
from bioptimus.runtime.runners import load_runner

BATCH = 8
PASS_THREADS = 2
SECONDS = 5.0
TICK_S = 0.001
SLIDES = 4
OPTIONS: tuple[dict[str, int], ...] = (
    {},
    {"readers": 1},
    {"readers": 4},
    {"workers": 1},
    {"workers": 4},
    {"threads": 2},
    {"batch_size": 1},
    {"batch_size": 4},
    {"batch_size": 48},
)

Pass = Callable[[torch.Tensor], object]


def passes() -> dict[str, Pass]:
    """Ways to run the same network: name → one pass."""
    found: dict[str, Pass] = {"torch's operators": builtin_network()}
    compiled = find_compiled(builtin_checkpoint(), device="cpu")
    if compiled is None:
        print("no compiled file: run `bioptimus models compile lite0` for the other two lines")
        return found
    found["compiled, our call"] = load_runner(compiled, device="cpu")
    found["compiled, torch's own call"] = load_package(str(compiled), num_runners=PASS_THREADS)
    return found


def lateness(one_pass: Pass) -> tuple[float, float, float]:
    """(tiles per second, median lateness, worst lateness), the latter in milliseconds."""
    tiles = torch.randint(0, 256, (BATCH, 224, 224, 3), dtype=torch.uint8)
    ended = threading.Event()
    counts = [0] * PASS_THREADS

    def work(number: int) -> None:
        with torch.inference_mode():
            while not ended.is_set():
                one_pass(tiles)
                counts[number] += BATCH

    threads = [threading.Thread(target=work, args=(number,)) for number in range(PASS_THREADS)]
    late = []
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    while (before := time.perf_counter()) < start + SECONDS:
        time.sleep(TICK_S)
        late.append((time.perf_counter() - before - TICK_S) * 1e3)
    ended.set()
    rate = sum(counts) / (time.perf_counter() - start)
    for thread in threads:
        thread.join()
    return rate, statistics.median(late), max(late)


def rate(options: dict[str, int]) -> float:
    """Tiles per second of a run over some small slides, from the loaded model on."""
    listener = Silent()
    with tempfile.TemporaryDirectory(dir=cache_folder()) as out:
        result = run(
            RunConfig(
                inputs=tuple(map(str, small_slides()[:SLIDES])),
                out=Path(out),
                model="lite0",
                **options,  # type: ignore[arg-type]
            ),
            listener=listener,
            stop=listener,
        )
        seconds = time.perf_counter() - listener.started
    return sum(report.tiles_done for report in result.reports) / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'forward passes in 2 threads':<32}{'tiles/s':>9}{'late, ms':>10}{'worst, ms':>11}")
    for name, one_pass in passes().items():
        with torch.inference_mode():
            one_pass(torch.zeros((BATCH, 224, 224, 3), dtype=torch.uint8))
        tiles, middle, worst = lateness(one_pass)
        print(f"{name:<32}{tiles:>9.0f}{middle:>10.2f}{worst:>11.1f}", flush=True)
    print(f"\n{'built-in model, four small slides':<36}{'tiles/s':>9}")
    rate({})  # files and memory warm
    for options in OPTIONS:
        words = ", ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())
        print(f"{words or 'defaults':<36}{rate(options):>9.1f}", flush=True)


if __name__ == "__main__":
    main()
