"""Slides to finished files, beside what bounds it: reader, model and writer alone.

    python -m benchmarks.end_to_end [--rounds 3] [--quick]

For the near-free model (our own work shows) and the built-in one, on one large slide at a native
level (A), one that must be scaled (B), and forty small ones; then the straight-line baseline on
the same tiles. All in one process and one run; medians over rounds that take turns.
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.baseline import embed as straight_line
from benchmarks.big_slides import EXAMPLE, big_slide, cache_folder
from benchmarks.near_free import near_free, near_free_checkpoint
from bioptimus.batch.quiet import SilentListener
from bioptimus.batch.run import RunConfig, run
from bioptimus.batch.threads import plan_threads
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.inference.writers import FilePlan, HDF5Writer
from bioptimus.io.wsi import Slide
from bioptimus.models.clients.local import InProcessClient
from bioptimus.models.types import InferenceMode
from bioptimus.planning import plan_slide
from bioptimus.runtime.batch_size import usual_batch_size
from bioptimus.runtime.builtin import weights_path
from bioptimus.runtime.lite0 import lite0_from_weights
from bioptimus.runtime.loader import build_server_model
from bioptimus.runtime.machine import available_cores

SMALL_SLIDES = 40
_READER, _MODEL = "reader alone (open and tissue included)", "model alone"
_OURS, _JSON = "bioptimus", "bioptimus through JSON"


@dataclass
class Spent:
    """Seconds of one measurement."""

    wall: float
    cpu: float


@dataclass
class Row:
    """One line of the table: medians over the rounds."""

    name: str
    tiles: int
    rounds: list[Spent] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return statistics.median(spent.wall for spent in self.rounds)

    @property
    def cpu(self) -> float:
        return statistics.median(spent.cpu for spent in self.rounds)


class Silent(SilentListener):
    """Remembers when a run's model was loaded, and never stops it."""

    stopped = False
    started = 0.0
    started_cpu = 0.0

    def model_loaded(self, model: str, *, device: str) -> None:
        self.started, self.started_cpu = time.perf_counter(), spent_cpu()


def spent_cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    own, children = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _timed(work: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), spent_cpu()
    work()
    return Spent(time.perf_counter() - wall, spent_cpu() - cpu)


class Case:
    """Some slides and a model, measured in every way."""

    def __init__(self, name: str, slides: Sequence[Path], model: str, network: nn.Module) -> None:
        self.name, self.slides, self.network = name, slides, network
        self.model = model
        self.server = build_server_model(model)
        self.plans = {path: self._plan(path) for path in dict.fromkeys(slides)}
        self.tiles = sum(len(self.plans[path][0]) for path in slides)

    def _plan(self, path: Path) -> tuple[npt.NDArray[np.int64], int]:
        with Slide.open(path) as slide:
            plan = plan_slide(slide, self.server.model_spec.tile)
            return plan.coords, round(plan.grid.tile_level0[0])

    def reader(self) -> None:
        """Every kept tile, on as many threads as a run would use; pixels are dropped."""
        threads = plan_threads(on_cpu=True, slides=1)
        for path in self.slides:
            with Slide.open(path) as slide, ThreadPoolExecutor(threads.readers) as pool:
                plan = plan_slide(slide, self.server.model_spec.tile)
                tiles = slide.tile_reader(plan.spec)

                def read(rows: npt.NDArray[np.int64], plan=plan, tiles=tiles) -> None:  # type: ignore[no-untyped-def]
                    tiles.read_block([plan.tile(int(row)) for row in rows])

                list(pool.map(read, tiles.blocks(plan.grid, plan.kept)))

    def forward(self) -> None:
        """As many tiles through the model, from memory, on all cores, in a run's batches."""
        batch = usual_batch_size(self.server, threads=plan_threads(on_cpu=True, slides=1).threads)
        generator = np.random.default_rng(0)
        requests = [
            ModelRequest.from_pixels(
                generator.integers(0, 256, (224, 224, 3), np.uint8), slide_name="", x=0, y=0
            )
            for _ in range(batch)
        ]
        samples = [self.server.prepare_sample(request) for request in requests]

        def passes(count: int) -> None:
            for _ in range(count):
                self.server.forward_batch(samples, requests, InferenceMode.EMBEDDING)

        count, cores = -(-self.tiles // batch), available_cores()
        threads = [
            threading.Thread(target=passes, args=(len(range(core, count, cores)),))
            for core in range(cores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def writer(self, out: Path) -> None:
        """As many rows into files, from memory."""
        dim = self.server.model_spec.embedding_dim
        for number, path in enumerate(self.slides):
            coords, _ = self.plans[path]
            plan = FilePlan(
                coords=coords,
                tissue_ratios=np.ones(len(coords), np.float32),
                embedding_dim=dim,
                prediction_dim=0,
                digest=str(number),
            )
            rows = np.zeros((16, dim), np.float32)
            with HDF5Writer.open(out / f"{number}.h5", plan) as writer:
                for start in range(0, len(coords), 16):
                    part = np.arange(start, min(start + 16, len(coords)))
                    writer.write_rows(part, embeddings=rows[: len(part)], predictions=None)
                writer.finish(state="ok")

    def ours(self, out: Path, *, workers: int | None = None) -> Spent:
        """A run; its time counts from the loaded model, as the baseline's does."""
        listener = Silent()
        result = run(
            RunConfig(
                inputs=tuple(map(str, self.slides)), out=out, model=self.model, workers=workers
            ),
            listener=listener,
            stop=listener,
        )
        spent = Spent(time.perf_counter() - listener.started, spent_cpu() - listener.started_cpu)
        done = sum(report.tiles_done for report in result.reports)
        assert done == self.tiles, [report.reason for report in result.reports]
        return spent

    def baseline(self, out: Path, *, loader_processes: int, search: bool = False) -> None:
        torch.set_num_threads(available_cores())  # what a user's script has
        straight_line(
            self.slides,
            lambda path: self.plans[path],
            self.network,
            out,
            loader_processes=loader_processes,
            search=search,
        )
        torch.set_num_threads(plan_threads(on_cpu=True, slides=1).threads)


class _ThroughJson(InProcessClient):
    """The same client, asked with JSON strings as a remote one would be."""

    async def answer_many_async(self, requests, mode):  # type: ignore[no-untyped-def]
        bodies = [request.to_json() for request in requests]
        answers = await asyncio.gather(*map(self.embed_async, bodies))
        return [ModelResponse.from_json(answer) for answer in answers]


def measure(
    case: Case, *, rounds: int, workers: Sequence[int], searches: Sequence[bool]
) -> list[Row]:
    """Every way in turn, so that a busy moment of the machine hits all of them."""
    cores = available_cores()
    rows: dict[str, Row] = {}

    def add(name: str, spent: Spent) -> None:
        rows.setdefault(name, Row(name, case.tiles)).rounds.append(spent)

    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            out = Path(folder)
            for name in ("writer", "ours", "json", "baseline"):
                (out / name).mkdir()
            add(_READER, _timed(case.reader))
            add(_MODEL, _timed(case.forward))
            add("writer alone", _timed(partial(case.writer, out / "writer")))
            add(_OURS, case.ours(out / "ours"))
            for count in workers:
                add(f"bioptimus, --workers {count}", case.ours(out / f"w{count}", workers=count))
            add(_JSON, _through_json(case, out / "json"))
            # People use either: 0 is the DataLoader's own default, and reads between the passes.
            for count in (0, cores):
                for search in searches:
                    line = partial(
                        case.baseline, out / "baseline", loader_processes=count, search=search
                    )
                    add(f"baseline, {count} loaders{', Otsu' if search else ''}", _timed(line))
    return list(rows.values())


def _through_json(case: Case, out: Path) -> Spent:
    from bioptimus.models.clients import local as module

    # A run takes it from there when it loads the model.
    plain = module.InProcessClient
    module.InProcessClient = _ThroughJson  # type: ignore[misc]
    try:
        return case.ours(out)
    finally:
        module.InProcessClient = plain  # type: ignore[misc]


def show(case: Case, rows: Sequence[Row]) -> None:
    """Print one case: figures, bounds and ratios."""
    by_name = {row.name: row for row in rows}
    alone = by_name[_READER].cpu + by_name[_MODEL].cpu
    ours, json = by_name[_OURS], by_name[_JSON]
    baselines = [row for row in rows if row.name.startswith("baseline")]
    print(f"\n## {case.name}: {case.tiles} tiles, {len(case.slides)} slides")
    print(f"{'':44s} {'wall s':>8s} {'CPU s':>8s} {'tiles/s':>8s}")
    for row in rows:
        print(f"{row.name:44s} {row.wall:8.2f} {row.cpu:8.2f} {row.tiles / row.wall:8.0f}")
    bound = alone / available_cores()
    typed_us, json_us = ((row.cpu - alone) / case.tiles * 1e6 for row in (ours, json))
    print(
        f"bound, (reader + model CPU) / cores: {bound:.2f} s; ours / bound {ours.wall / bound:.2f}"
    )
    print(f"overhead, CPU a tile: {typed_us:.0f} µs; through JSON {json_us:.0f} µs")
    print(f"CPU of ours / (reader + model): {ours.cpu / alone:.2f}")
    for row in baselines:
        print(f"{row.name} / ours in wall time: {row.wall / ours.wall:.2f}", flush=True)


def small_slides() -> list[Path]:
    """Forty copies of the example slide, so that each is a file of its own."""
    folder = cache_folder() / "small"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:02d}.svs" for number in range(SMALL_SLIDES)]
    for path in paths:
        if not path.exists():
            shutil.copy(EXAMPLE, path)
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="near-free model only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(plan_threads(on_cpu=True, slides=1).threads)
    free, fast = near_free(), str(near_free_checkpoint())
    small = small_slides()
    lite0 = lite0_from_weights(torch.load(weights_path(), weights_only=True)).eval()
    cases = [
        ("near-free model, A (native level)", [big_slide("A")], fast, free),
        ("near-free model, B (448 -> 224)", [big_slide("B")], fast, free),
        ("near-free model, one small slide", small[:1], fast, free),
        ("near-free model, forty small slides", small, fast, free),
    ]
    if not options.quick:
        cases += [
            ("built-in model, A", [big_slide("A")], "lite0", lite0),
            ("built-in model, forty small slides", small, "lite0", lite0),
        ]
    for name, slides, model, network in cases:
        case = Case(name, slides, model, network)
        heavy = model == "lite0"
        workers = (1, 2, 3, 4) if len(slides) > 1 and not heavy else ()
        rows = measure(
            case,
            rounds=1 if heavy else options.rounds,
            workers=workers,
            # Beside a model that takes its time the search takes none.
            searches=(False,) if heavy else (False, True),
        )
        show(case, rows)


if __name__ == "__main__":
    main()
