"""Writes result files in processes that die: run as a script, it forks one child per order.

An order is a JSON line ``{"path": ..., "die_at": k}``; the child writes :func:`plan`'s file and
kills itself with SIGKILL at its k-th call to the operating system (0: never), a write half done.
Answers are lines: the child's pid when it starts, its exit status when it has ended.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bioptimus.inference import disk
from bioptimus.inference.writers import FilePlan, HDF5Writer

ROWS = 100
DIM = 33
BATCH = 16
FAILED = {7, 50, 99}


def plan(*, rows: int = ROWS, digest: str = "digest", **changes: Any) -> FilePlan:
    """A small file with everything in it."""
    index = np.arange(rows, dtype=np.int64)
    values: dict[str, Any] = {
        "coords": np.stack([index * 224, index * 7], axis=1),
        "tissue_ratios": np.linspace(0.5, 1, rows, dtype=np.float32),
        "embedding_dim": DIM,
        "prediction_dim": 2,
        "output_names": ("GENE-1", "Gène 2"),
        "input_gene_names": ("A", "B", "C"),
        "attributes": {"slide_name": "a.svs", "model": {"name": "m"}, "mpp_x": 0.25},
        "coords_attributes": {"patch_size": 224},
        "thumbnail": np.full((30, 40, 3), 200, np.uint8),
        "thumbnail_downsample": (32.0, 32.5),
        "tissue_mask": np.eye(20, dtype=np.uint8),
        "tissue_mask_downsample": (64.0, 64.0),
        "digest": digest,
        "digest_parameters": {"model": {"sha256": "ab"}, "tile_mpp": 0.5},
    }
    return FilePlan(**(values | changes))


def embeddings(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """What the model would say of these tiles."""
    return (rows[:, None] * 1000 + np.arange(DIM)).astype(np.float32)


def predictions(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """What it would predict."""
    return np.stack([rows, -rows], axis=1).astype(np.float32)


def write(path: Path) -> Path:
    """Do what is pending, in a scattered order, and finish."""
    with HDF5Writer.open(path, plan()) as writer:
        pending = writer.pending()
        # Blocks of eight in another order, as a reader likes them.
        shuffled = pending[np.argsort(pending // 8 * 5 % 13, kind="stable")]
        for first in range(0, len(shuffled), BATCH):
            rows = shuffled[first : first + BATCH]
            good = rows[~np.isin(rows, list(FAILED))]
            for row in sorted(FAILED & set(rows.tolist())):
                writer.fail_tile(row, stage="read", reason=f"tile {row} is damaged")
            writer.write_rows(good, embeddings=embeddings(good), predictions=predictions(good))
            if first // BATCH % 4 == 3:
                writer.flush()
        return writer.finish(state="ok", attributes={"tiles_per_s": 12.5})


def die_at(call: int) -> None:
    """Make the ``call``-th call to the operating system the last one."""
    left = call

    def deadly(function: Callable[..., Any], *, half: bool) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if half:
                    fd, data, offset = arguments
                    function(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return called

    for name in ("open", "rename", "unlink", "ftruncate", "fsync", "mkdir", "close"):
        setattr(os, name, deadly(getattr(os, name), half=False))
    os.pwrite = deadly(os.pwrite, half=True)
    disk.fdatasync = deadly(disk.fdatasync, half=False)


def _serve() -> None:
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if order["die_at"]:
                    die_at(order["die_at"])
                write(Path(order["path"]))
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)
        # Not waited for before it is asked: until then its process id is nobody else's.
        sys.stdin.readline()
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    _serve()
