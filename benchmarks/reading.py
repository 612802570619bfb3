"""How fast tiles are read, against OpenSlide + PIL and against raw decoding, in one run.

    python -m benchmarks.reading [--rounds 3] [--check]

The slides are built on the first run (see :mod:`benchmarks.big_slides`). Readers take turns in
every round, and the ratios are medians of ratios within a round. Figures of one thread are tiles
per second of CPU time, which other work on the machine disturbs least; those of two threads are
tiles per second on the clock.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cv2
import imagecodecs
import numpy as np
import numpy.typing as npt
import openslide
import tifffile

from benchmarks.big_slides import SHARED, big_slide
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import TileSpec, plan_tiles

Pixels = npt.NDArray[np.uint8]
Reader = Literal["auto", "openslide"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One slide and what is read of it.

    Attributes:
        title: What the table calls it.
        path: The slide.
        level: Level that the other readers read.
        read_px: Side of a tile on that level; scaled to 224. The other readers take whole pixels.
        columns: (first, last) column of tiles read.
        rows: (first, last) row of tiles read.
        reader: Option of ours.
        has_raw: Whether the raw reader can read it.
        goals: Least (ratio to OpenSlide, ratio to raw); None where there is no such goal.
    """

    title: str
    path: Path
    level: int
    read_px: float
    columns: tuple[int, int]
    rows: tuple[int, int]
    reader: Reader = "auto"
    has_raw: bool = True
    goals: tuple[float, float | None] = (3.5, 0.85)

    @property
    def whole_px(self) -> int:
        """What the other readers read."""
        return round(self.read_px)


class _Area(TypedDict):
    """Part of a slide, of a :class:`Case`."""

    columns: tuple[int, int]
    rows: tuple[int, int]


def cases() -> list[Case]:
    """Everything that is measured; the big slides are built if need be."""
    # Begins and ends where stored tiles do, as a whole slide does.
    area = _Area(columns=(8, 48), rows=(8, 40))
    few = _Area(columns=(1, 17), rows=(1, 8))
    found = [
        Case(title="A  native level, 224 px", path=big_slide("A"), level=1, read_px=224, **area),
        Case(title="B  448 -> 224", path=big_slide("B"), level=0, read_px=448, **area),
        # As most slides are: no scanner has exactly 0.25 µm/px.
        Case(
            title="B  443.3 -> 224 (0.2527 µm/px)",
            path=big_slide("B"),
            level=0,
            read_px=0.5 / 0.2527 * 224,
            goals=(2.0, None),
            **area,
        ),
        Case(title="C  448 -> 224, RGB JPEG", path=big_slide("C"), level=0, read_px=448, **area),
        Case(
            title="J  448 -> 224, JPEG 2000",
            path=big_slide("J"),
            level=0,
            read_px=448,
            has_raw=False,
            goals=(1.0, None),
            **few,
        ),
    ]
    for name, level, px in (("A", 1, 224), ("B", 0, 448)):
        found.append(
            Case(
                title=f"{name}  {px} px, --reader openslide",
                path=big_slide(name),
                level=level,
                read_px=px,
                reader="openslide",
                has_raw=False,
                goals=(1.0, None),
                **few,
            )
        )
    series = sorted((SHARED / "dicom" / "CMU-1-Small-Region").glob("*.dcm"))
    if series:
        found.append(
            Case(
                title="DICOM, 224 px",
                path=series[0],
                level=0,
                read_px=224,
                columns=(0, 9),
                rows=(0, 13),
                has_raw=False,
                goals=(1.0, None),
            )
        )
    return found


# ---- the readers compared ----


def ours(case: Case, threads: int) -> float:
    """Tiles per second through :class:`~bioptimus.io.wsi.Slide`."""
    # DICOM says 0.499: at its own scale nothing is resampled, as for the others.
    with Slide.open(case.path, OpenOptions(reader=case.reader)) as slide:
        mpp = slide.mpp[0]
        scale = mpp * slide.level_downsamples[case.level][0] * case.read_px / 224
        spec = TileSpec(size_px=224, mpp=scale)
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        kept = np.array([r * grid.columns + c for c, r in _cells(case)], np.int64)
        kept.sort()
        tiles = slide.tile_reader(spec)
        blocks = iter(tiles.blocks(grid, kept))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    block = next(blocks, None)
                if block is None:
                    return
                for result in tiles.read_block([grid[int(index)] for index in kept[block]]):
                    if isinstance(result, Exception):
                        raise result

        return _rate(len(kept), [work] * threads)


def through_openslide(case: Case, threads: int) -> float:
    """Tiles per second by ``read_region().convert("RGB")``, tile by tile."""
    with openslide.OpenSlide(case.path) as slide:
        downsample = slide.level_downsamples[case.level]

        def read(x: int, y: int) -> Pixels:
            place = (round(x * downsample), round(y * downsample))
            region = slide.read_region(place, case.level, (case.whole_px, case.whole_px))
            return np.asarray(region.convert("RGB"))

        return _tile_by_tile(case, threads, lambda: read)


def raw(case: Case, threads: int) -> float:
    """Tiles per second by tifffile's table, ``pread`` and libjpeg-turbo; nothing is checked."""
    return _tile_by_tile(case, threads, lambda: _RawReader(case).read)


class _RawReader:
    def __init__(self, case: Case) -> None:
        with tifffile.TiffFile(case.path) as tiff:
            page = tiff.pages[case.level].aspage()
            self._across = -(-page.imagewidth // 256)
            self._offsets, self._lengths = page.dataoffsets, page.databytecounts
            self._tables = page.jpegtables
            self._space = "RGB" if "C-" in case.path.name else "YCBCR"
            if int(page.photometric) == 2:
                self._space = "RGB"
        self._file = case.path.open("rb")
        self._px = case.whole_px
        self._kept: OrderedDict[int, Pixels] = OrderedDict()

    def __del__(self) -> None:
        self._file.close()

    def _tile(self, number: int) -> Pixels:
        tile = self._kept.get(number)
        if tile is None:
            data = os.pread(self._file.fileno(), self._lengths[number], self._offsets[number])
            tile = imagecodecs.jpeg8_decode(
                data, tables=self._tables, colorspace=self._space, outcolorspace="RGB"
            )
            self._kept[number] = tile
            if len(self._kept) > 256:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(number)
        return tile

    def read(self, x: int, y: int) -> Pixels:
        px = self._px
        out = np.empty((px, px, 3), np.uint8)
        for row in range(y // 256, (y + px - 1) // 256 + 1):
            for column in range(x // 256, (x + px - 1) // 256 + 1):
                tile = self._tile(row * self._across + column)
                left, right = max(x, column * 256), min(x + px, column * 256 + 256)
                top, low = max(y, row * 256), min(y + px, row * 256 + 256)
                out[top - y : low - y, left - x : right - x] = tile[
                    top - row * 256 : low - row * 256, left - column * 256 : right - column * 256
                ]
        return out


# ---- measuring ----


def _cells(case: Case) -> list[tuple[int, int]]:
    return [(c, r) for r in range(*case.rows) for c in range(*case.columns)]


def _tile_by_tile(
    case: Case, threads: int, reader: Callable[[], Callable[[int, int], Pixels]]
) -> float:
    """Row by row, each thread its own share; averaged by OpenCV."""
    cells = _cells(case)
    per_thread = -(-len(cells) // threads)

    def job(part: Sequence[tuple[int, int]]) -> Callable[[], None]:
        read = reader()

        def work() -> None:
            for column, row in part:
                pixels = read(round(column * case.read_px), round(row * case.read_px))
                if case.whole_px != 224:
                    cv2.resize(pixels, (224, 224), interpolation=cv2.INTER_AREA)

        return work

    parts = [cells[first : first + per_thread] for first in range(0, len(cells), per_thread)]
    return _rate(len(cells), [job(part) for part in parts])


def _rate(count: int, jobs: Sequence[Callable[[], None]]) -> float:
    """Tiles per second: of CPU time for one job, on the clock for several at once."""
    clock = time.process_time if len(jobs) == 1 else time.perf_counter
    workers = [threading.Thread(target=job) for job in jobs]
    start = clock()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return count / (clock() - start)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one case: medians of tiles per second, and of ratios within rounds."""

    case: Case
    one: float
    two: float
    openslide: float
    raw: float | None
    to_openslide: float
    to_raw: float | None

    @property
    def meets_goals(self) -> bool:
        """Whether both ratios reach what was set for the case."""
        least_openslide, least_raw = self.case.goals
        return self.to_openslide >= least_openslide and (
            least_raw is None or (self.to_raw or 0.0) >= least_raw
        )


def measure(case: Case, rounds: int) -> Row:
    """Run every reader in turn, ``rounds`` times."""
    ones, twos, theirs, raws = [], [], [], []
    ours(case, 1)  # the file comes into the page cache
    for _ in range(rounds):
        ones.append(ours(case, 1))
        theirs.append(through_openslide(case, 1))
        if case.has_raw:
            raws.append(raw(case, 1))
        twos.append(ours(case, 2))
    middle = statistics.median
    return Row(
        case=case,
        one=middle(ones),
        two=middle(twos),
        openslide=middle(theirs),
        raw=middle(raws) if raws else None,
        to_openslide=middle([a / b for a, b in zip(ones, theirs, strict=True)]),
        to_raw=middle([a / b for a, b in zip(ones, raws, strict=True)]) if raws else None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; with ``--check``, 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    options = parser.parse_args(arguments)
    cv2.setNumThreads(1)
    print(
        f"{'tiles/s':<33}{'1 thread':>10}{'2 threads':>11}{'OpenSlide':>11}{'raw':>8}"
        f"{'x OpenSlide':>13}{'x raw':>8}  goals"
    )
    rows = []
    for case in cases():
        row = measure(case, options.rounds)
        rows.append(row)
        least, least_raw = case.goals
        goals = f">= {least:g}" + ("" if least_raw is None else f", >= {least_raw:g}")
        raw_text = "-" if row.raw is None else f"{row.raw:.0f}"
        ratio_text = "-" if row.to_raw is None else f"{row.to_raw:.2f}"
        print(
            f"{case.title:<33}{row.one:>10.0f}{row.two:>11.0f}{row.openslide:>11.0f}{raw_text:>8}"
            f"{row.to_openslide:>13.2f}{ratio_text:>8}  {goals}"
            f"{'' if row.meets_goals else '   MISSED'}",
            flush=True,
        )
    return 1 if options.check and not all(row.meets_goals for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
