"""Cost of a tile and memory of a run against the number of tiles.

    python -m benchmarks.scale [--most 1000000] [--plot FILE]

One slide, tiles of 16 px so that our own work is what shows, a mask that keeps as many tiles as
wanted, a model that costs almost nothing. Each size runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from benchmarks.big_slides import big_slide, cache_folder
from bioptimus.io.wsi import Slide
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.export import save, trace
from bioptimus.tiles import TileSpec, plan_tiles

TILE = TileSpec(size_px=16, mpp=0.5, overlap_px=8)
SPEC = ModelSpec(name="mean", tile=TILE, embedding_dim=3, licence="CC0-1.0")


class Mean(nn.Module):
    """uint8 (N, 16, 16, 3) → (N, 3)."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles.float().mean((1, 2))


def checkpoint() -> Path:
    path = cache_folder() / "mean-16.pt2"
    if not path.exists():
        save(trace(Mean().eval(), SPEC), SPEC, path)
    return path


def mask_keeping(tiles: int, slide: Path, path: Path) -> Path:
    """A mask of the slide's upper rows that keeps about so many tiles."""
    with Slide.open(slide) as opened:
        grid = plan_tiles(opened.dimensions, spec=TILE, mpp=opened.mpp)
        width, height = (length // 16 for length in opened.dimensions)
    share = min(1.0, tiles / len(grid))
    mask = np.zeros((height, width), np.uint8)
    mask[: max(1, round(share**0.5 * height)), : max(1, round(share**0.5 * width))] = 255
    Image.fromarray(mask).save(path)
    return path


def one(slide: Path, mask: Path, out: Path) -> None:
    """In a process of its own: run, then print tiles, CPU after loading, and peak memory."""
    from resource import RUSAGE_SELF, getrusage

    from benchmarks.end_to_end import Silent, spent_cpu
    from bioptimus.batch.run import RunConfig, run
    from bioptimus.jobs import SlideOptions
    from bioptimus.planning import PlanOptions

    listener = Silent()
    result = run(
        RunConfig(
            inputs=(str(slide),),
            out=out,
            model=str(checkpoint()),
            batch_size=256,
            slide=SlideOptions(plan=PlanOptions(tissue=str(mask))),
        ),
        listener=listener,
        stop=listener,
    )
    report = result.reports[0]
    assert report.state == "ok", report.reason
    print(
        json.dumps(
            {
                "tiles": report.tiles_done,
                "cpu_us": (spent_cpu() - listener.started_cpu) / report.tiles_done * 1e6,
                "wall_s": report.seconds.total,
                "peak_mib": getrusage(RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        one(*options.one)
        return
    slide, rows = big_slide("A"), []
    checkpoint()
    print(f"{'tiles':>9s} {'CPU µs/tile':>12s} {'wall s':>8s} {'peak MiB':>9s}")
    for tiles in (1_000, 10_000, 100_000, 1_000_000):
        if tiles > options.most:
            break
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            mask = mask_keeping(tiles, slide, Path(folder) / "mask.png")
            words = ["--one", str(slide), str(mask), str(Path(folder) / "out")]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.scale", *words],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        row = json.loads(done.stdout)
        rows.append(row)
        print(
            f"{row['tiles']:9d} {row['cpu_us']:12.0f} {row['wall_s']:8.1f} {row['peak_mib']:9.0f}",
            flush=True,
        )
    if options.plot:
        draw(rows, options.plot)


def draw(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Cost and memory against the number of tiles."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (cost, memory) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    tiles = [row["tiles"] for row in rows]
    for axes, key, label in ((cost, "cpu_us", "CPU, µs a tile"), (memory, "peak_mib", "peak, MiB")):
        axes.plot(tiles, [row[key] for row in rows], marker="o", color="#0072b2")
        axes.set(xscale="log", xlabel="tiles in the slide", ylabel=label)
        axes.set_ylim(0, 1.15 * max(row[key] for row in rows))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
