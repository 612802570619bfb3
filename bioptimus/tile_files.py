"""A plan's tiles as files: a table of them, and their pixels as PNG."""

import csv
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.errors import OutputError, SlideReadError
from bioptimus.inference.disk import (
    ELSEWHERE,
    refuse_file,
    remove,
    remove_abandoned,
    written_aside,
)
from bioptimus.io.wsi import Slide
from bioptimus.planning import SlidePlan

COLUMNS = (
    "slide",
    "index",
    "column",
    "row",
    "x",
    "y",
    "width_level0",
    "height_level0",
    "tissue_ratio",
)
# A block is one band of a slide; cut, so that what is held does not grow with its width.
TILES_AT_ONCE = 64


class TileTable:
    """A CSV of the tiles of several slides; a file has its name only when it is whole.

    Positions and extents are level-0 pixels. A context manager; left by an error, it leaves
    nothing behind.
    """

    def __init__(self, path: Path, *, stream: TextIO | None = None) -> None:
        """Begin the table.

        Args:
            path: The file.
            stream: Where to write in its place; it stays open.

        Raises:
            OutputError: It cannot be written.
        """
        self._path = path
        self._owned = ExitStack()  # kept open over many calls, closed by __exit__
        with _translated(path):
            if stream is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_abandoned([path])
                part = self._owned.enter_context(written_aside(path))
                stream = self._owned.enter_context(part.open("w", encoding="utf-8", newline=""))
        self._file = stream
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(COLUMNS)

    def add(self, slide: str, plan: SlidePlan) -> None:
        """Write a slide's kept tiles.

        Raises:
            OutputError: They cannot be written.
        """
        width, height = (f"{length:.6g}" for length in plan.grid.tile_level0)
        places = zip(
            plan.kept.tolist(),
            plan.columns.tolist(),
            plan.rows.tolist(),
            plan.coords.tolist(),
            plan.tissue_ratios.tolist(),
            strict=True,
        )
        with _translated(self._path):
            self._rows.writerows(
                (slide, index, column, row, x, y, width, height, f"{ratio:.6g}")
                for index, column, row, (x, y), ratio in places
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _translated(self._path):
            self._owned.__exit__(kind, value, traceback)


@dataclass(frozen=True, kw_only=True)
class TileFiles:
    """What :func:`dump_tiles` did.

    Attributes:
        written: Number of PNG files.
        failed: (x, y, reason) of tiles that could not be read; no file is written for them.
    """

    written: int
    failed: tuple[tuple[int, int, str], ...]


def dump_tiles(
    slide: Slide,
    plan: SlidePlan,
    folder: Path,
    *,
    threads: int = 2,
    max_failed_share: float = 0.01,
    on_progress: Callable[[int], None] = lambda _: None,
) -> TileFiles:
    """Write every kept tile as ``x<X>_y<Y>.png``, the corner in level-0 pixels.

    At most ``2 * threads`` pieces of ``TILES_AT_ONCE`` tiles are under way, whatever the slide's
    size. The threads belong to this call and have ended when it returns or raises.

    Args:
        slide: The slide that was planned.
        plan: Its tiles.
        folder: Where the files go; made if it is not there. Files of the same names are replaced.
        threads: Threads that read, encode and write.
        max_failed_share: Share of the tiles that may be unreadable.
        on_progress: Called in this thread with the number of tiles done so far.

    Raises:
        ResolutionError: The slide is coarser than the tiles.
        SlideReadError: More tiles than that could not be read.
        OutputError: A file cannot be written, or stands where the folder is to be.
    """
    refuse_file(folder)
    reader = slide.tile_reader(plan.spec)
    with _translated(folder):
        folder.mkdir(parents=True, exist_ok=True)

    def write_piece(positions: npt.NDArray[np.int64]) -> list[tuple[int, int, str]]:
        tiles = [plan.tile(int(position)) for position in positions]
        failed = []
        for tile, pixels in zip(tiles, reader.read_block(tiles), strict=True):
            if isinstance(pixels, SlideReadError):
                failed.append((tile.x, tile.y, str(pixels)))
            else:
                _write_png(folder / f"x{tile.x}_y{tile.y}.png", pixels)
        return failed

    most_failed = max_failed_share * len(plan)
    done = 0
    failed: list[tuple[int, int, str]] = []
    under_way: deque[tuple[int, Future[list[tuple[int, int, str]]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix=f"tiles of {slide.name}") as pool:
        try:
            for positions in _pieces(reader.blocks(plan.grid, plan.kept)):
                under_way.append((len(positions), pool.submit(write_piece, positions)))
                while len(under_way) >= 2 * threads:
                    done += _finish(under_way, failed, most_failed, slide.name)
                    on_progress(done)
            while under_way:
                done += _finish(under_way, failed, most_failed, slide.name)
                on_progress(done)
        finally:
            for _, future in under_way:
                future.cancel()
    return TileFiles(written=done - len(failed), failed=tuple(failed))


def _pieces(blocks: list[npt.NDArray[np.int64]]) -> Iterator[npt.NDArray[np.int64]]:
    for block in blocks:
        for start in range(0, len(block), TILES_AT_ONCE):
            yield block[start : start + TILES_AT_ONCE]


def _finish(
    under_way: deque[tuple[int, Future[list[tuple[int, int, str]]]]],
    failed: list[tuple[int, int, str]],
    most_failed: float,
    name: str,
) -> int:
    """Wait for the oldest piece; its number of tiles."""
    count, future = under_way.popleft()
    failed += future.result()
    if len(failed) > most_failed:
        x, y, reason = failed[0]
        raise SlideReadError(
            f"{name}: {len(failed)} tiles could not be read, more than allowed; "
            f"the first at ({x}, {y}): {reason}"
        )
    return count


def _write_png(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """Lossless, compressed for speed rather than for the last tenth of size."""
    _, data = cv2.imencode(".png", pixels[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])
    with _translated(path):
        file = path.open("wb")
        try:
            with file:
                file.write(data.tobytes())
        except OSError:
            remove(path)  # cut short
            raise


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has had enough, as `| head`: no fault of the slide
    except OSError as exc:
        raise OutputError(f"{path}: not written: {exc.strerror or exc}; {ELSEWHERE}") from exc
