"""The same slides and the same near-free model through other free tools, in one run.

    python -m venv /elsewhere && /elsewhere/bin/pip install slide2vec
    python -m benchmarks.peers slide2vec=/elsewhere/bin/python [lazyslide=...] [--rounds 3]

Each tool runs as its own documentation says, with its own defaults but for the number of processes
that read tiles, of which both are tried (0, and one for each core), in a process that has loaded
the model and embedded a slide before; its time counts from the slides to the finished files. Tools
find tissue differently, so numbers of tiles differ and are printed too. Each needs an environment
of its own.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from benchmarks.big_slides import big_slide, cache_folder
from benchmarks.end_to_end import Silent, small_slides
from benchmarks.near_free import near_free_checkpoint
from bioptimus.batch.run import RunConfig, run
from bioptimus.batch.threads import plan_threads
from bioptimus.runtime.machine import available_cores

TOOLS = Path(__file__).with_name("peer_tools")
# Processes that read tiles: each tool's own default, and one for each core where that is another.
LOADERS: dict[str, tuple[int | str, ...]] = {
    "slide2vec": ("auto",),
    "lazyslide": (0, available_cores()),
    "tiatoolbox": (0, available_cores()),
}

Embed = Callable[[Sequence[Path], Path], tuple[float, int]]
"""(slides, folder for the results) → seconds, tiles."""


def ours(slides: Sequence[Path], out: Path) -> tuple[float, int]:
    torch.set_num_threads(plan_threads(on_cpu=True, slides=len(slides)).threads)
    listener = Silent()
    config = RunConfig(inputs=tuple(map(str, slides)), out=out, model=str(near_free_checkpoint()))
    result = run(config, listener=listener, stop=listener)
    seconds = time.perf_counter() - listener.started
    return seconds, sum(report.tiles_done for report in result.reports)


def ask(process: subprocess.Popen[str], slides: Sequence[Path], out: Path) -> tuple[float, int]:
    """Have another tool embed the slides."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"slides": list(map(str, slides)), "out": str(out)}) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        # Tools and their libraries print there too.
        if line.startswith('{"seconds"'):
            answer = json.loads(line)
            return answer["seconds"], answer["tiles"]
    raise SystemExit(f"{process.args!r} ended: {process.wait()}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="+", metavar="TOOL=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    small = small_slides()
    cases = {
        "one small slide": small[:1],
        "A, native level": [big_slide("A")],
        "B, 448 -> 224 px": [big_slide("B")],
        "ten small slides": small[:10],
    }
    tools: dict[str, Embed] = {"bioptimus": ours}
    with ExitStack() as stack, tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        for peer in options.peers:
            name, python = peer.split("=", 1)
            for loaders in LOADERS[name]:
                process = stack.enter_context(
                    subprocess.Popen(
                        [python, TOOLS / f"with_{name}.py", str(loaders)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        cwd=folder,  # some leave files where they run
                        text=True,
                    )
                )
                tools[f"{name}, {loaders} loaders"] = partial(ask, process)

        def embed(name: str, slides: Sequence[Path]) -> tuple[float, int]:
            return tools[name](slides, Path(tempfile.mkdtemp(dir=folder)))

        for name in tools:
            embed(name, small[-1:])
        for case, slides in cases.items():
            seconds: dict[str, list[float]] = {name: [] for name in tools}
            tiles: dict[str, int] = {}
            for _ in range(options.rounds):
                for name in tools:
                    took, tiles[name] = embed(name, slides)
                    seconds[name].append(took)
            print(f"\n## {case}")
            print(f"{'':24s} {'tiles':>6s} {'wall s':>8s} {'÷ ours':>7s} {'tiles/s':>8s}")
            first = statistics.median(seconds["bioptimus"])
            for name in tools:
                took = statistics.median(seconds[name])
                print(
                    f"{name:24s} {tiles[name]:6d} {took:8.2f} {took / first:7.1f}"
                    f" {tiles[name] / took:8.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
