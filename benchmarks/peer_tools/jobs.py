"""How ``benchmarks.peers`` talks with a tool in another environment; standard library only."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

MPP = 0.5
TILE_PX = 224


def answer(embed: Callable[[list[str], Path], Callable[[], int]]) -> None:
    """Embed the slides of each line of stdin; print seconds and tiles for each.

    Args:
        embed: Writes the results of slides into a folder, and returns what counts their tiles: to
            look is not part of the time.
    """
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        count = embed(job["slides"], Path(job["out"]))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tiles": count()}), flush=True)
