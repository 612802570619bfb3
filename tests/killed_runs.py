"""Starts a run again and again and kills it with SIGKILL at random moments.

``python -m tests.killed_runs SLIDES MODEL OUT KILLS``: forks from a process that has imported
everything, so that each try costs its work and not its imports. The time of a kill
counts from when the model is loaded, before the first slide that takes it is claimed. When a run
ends by itself before its kill, the next one writes to the next folder, ``OUT/0``, ``OUT/1``, ….
The last folder is always finished. Prints the number of kills and of finished folders.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch.export.pt2_archive  # noqa: F401  (imported before the fork, as is all that follows)

from bioptimus.batch.quiet import SilentListener
from bioptimus.batch.run import RunConfig, run
from bioptimus.jobs import SlideOptions
from bioptimus.planning import PlanOptions

LONGEST_S = 0.6


class Telling(SilentListener):
    """Writes a byte once the model is loaded."""

    def __init__(self, begun: int) -> None:
        self._begun = begun

    def model_loaded(self, model: str, *, device: str) -> None:
        os.write(self._begun, b".")


def embed(slides: Path, model: Path, out: Path, begun: int) -> None:
    config = RunConfig(
        inputs=(str(slides),),
        out=out,
        model=str(model),
        batch_size=8,
        workers=2,
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    result = run(config, listener=Telling(begun))
    states = {report.state for report in result.reports}
    if not states <= {"ok", "skipped"}:
        raise SystemExit(f"{[report.reason for report in result.reports]}")


def start(slides: Path, model: Path, out: Path) -> tuple[int, int]:
    """Start a run; its process, and where to read a byte once it has loaded the model."""
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begun)
        try:
            embed(slides, model, out, begins)
        except BaseException:  # noqa: BLE001  (a fork must not return into its parent's code)
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    os.close(begins)
    return child, begun


def _ends_within(child: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done and status:
            raise SystemExit(f"a run ended by itself with status {status}")
        if done:
            return True
        time.sleep(0.002)
    return False


def main(slides: Path, model: Path, out: Path, kills: int) -> None:
    chance = random.Random(0)
    killed = folder = 0
    while killed < kills:
        child, begun = start(slides, model, out / str(folder))
        os.read(begun, 1)
        os.close(begun)
        if _ends_within(child, chance.uniform(0, LONGEST_S)):
            folder += 1
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
    child, _ = start(slides, model, out / str(folder))
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("the last run failed")
    sys.stdout.write(f"{killed} {folder + 1}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
