"""How long it takes from the command to the first tile, in processes of their own.

    python -m benchmarks.start_up [--rounds 3]

Each run embeds the small example slide in a fresh Python. Seconds on the clock, medians.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.big_slides import EXAMPLE, cache_folder

STEPS = ("imports", "model loaded", "first tiles", "file written")


def _child(model: str, out: str) -> None:
    """One run; prints the clock at each step."""
    from bioptimus.batch.quiet import SilentListener
    from bioptimus.batch.run import RunConfig, run
    from bioptimus.jobs import SlideJob, SlideReport

    class Clock(SilentListener):
        """Remembers when each step was first reached."""

        stopped = False
        steps: dict[str, float] = {}  # noqa: RUF012

        def _reached(self, step: str) -> None:
            self.steps.setdefault(step, time.time())

        def loading(self, model: str) -> None:
            self._reached("imports")

        def model_loaded(self, model: str, *, device: str) -> None:
            self._reached("model loaded")

        def tiles_done(self, job: SlideJob, count: int) -> None:
            self._reached("first tiles")

        def slide_ended(self, job: SlideJob, report: SlideReport) -> None:
            self._reached("file written")

    clock = Clock()
    run(
        RunConfig(inputs=(str(EXAMPLE),), out=Path(out), model=model),
        listener=clock,
        stop=clock,
    )
    print(json.dumps(clock.steps))


def measure(model: str, rounds: int) -> list[float]:
    """Median seconds that each of :data:`STEPS` took, the first from the start of the process."""
    taken: list[list[float]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=cache_folder()) as out:
            start = time.time()
            command = [sys.executable, "-m", "benchmarks.start_up", "--child", model, out]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        steps = json.loads(done.stdout.splitlines()[-1])
        times = [start, *(steps[step] for step in STEPS)]
        taken.append([after - before for before, after in itertools.pairwise(times)])
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _child(*options.child)
        return
    from benchmarks.near_free import near_free_checkpoint
    from bioptimus.runtime.builtin import builtin_checkpoint

    builtin_checkpoint()  # made once, not at every start
    print(f"{'seconds to':<24}" + "".join(f"{step:>14}" for step in STEPS))
    for name, model in (("built-in", "lite0"), ("near-free .pt2", str(near_free_checkpoint()))):
        seconds = measure(model, options.rounds)
        print(f"{name:<24}" + "".join(f"{value:14.2f}" for value in seconds), flush=True)


if __name__ == "__main__":
    main()
