"""Runs over one folder that start at once; the first is killed with SIGKILL while they begin.

``python -m tests.shared_run SLIDES MODEL OUT RUNS``: forks as :mod:`tests.killed_runs` does.
"""

import os
import signal
import sys
from pathlib import Path

from tests.killed_runs import start


def main(slides: Path, model: Path, out: Path, runs: int) -> None:
    (killed, _), *others = [start(slides, model, out) for _ in range(runs)]
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    statuses = [os.waitpid(child, 0)[1] for child, _ in others]
    if any(statuses):
        raise SystemExit(f"runs ended with {statuses}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
