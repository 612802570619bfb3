"""Embeds a folder in one process; prints open files, threads and memory early and at the end.

``python -m tests.many_slides SLIDES MODEL OUT``
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path

from bioptimus.batch.quiet import SilentListener
from bioptimus.batch.run import RunConfig, run
from bioptimus.jobs import SlideJob, SlideOptions, SlideReport
from bioptimus.planning import PlanOptions

EARLY = 100


def state(slides: int) -> str:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return json.dumps(
        {
            "slides": slides,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        }
    )


class Counting(SilentListener):
    """Prints the state after the first hundred slides."""

    def __init__(self) -> None:
        self.ended = 0
        self._lock = threading.Lock()

    def slide_ended(self, job: SlideJob, report: SlideReport) -> None:
        with self._lock:
            self.ended += 1
            if self.ended in (EARLY, 500):
                sys.stdout.write(state(self.ended) + "\n")


def main(slides: Path, model: Path, out: Path) -> None:
    listener = Counting()
    result = run(
        RunConfig(
            inputs=(str(slides),),
            out=out,
            model=str(model),
            slide=SlideOptions(plan=PlanOptions(tissue="none")),
        ),
        listener=listener,
    )
    if bad := [report.reason for report in result.reports if report.state != "ok"]:
        sys.exit(f"{len(bad)} slides did not end well, the first: {bad[0]}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
