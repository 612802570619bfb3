"""Faults that people met in other tools, over whole runs; each names its row of FIELD."""

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from bioptimus.batch.quiet import SilentListener, Stop
from bioptimus.batch.report import read_runs
from bioptimus.batch.run import RunConfig, run
from bioptimus.errors import OutputError
from bioptimus.jobs import SlideJob, SlideOptions, SlideReport
from bioptimus.models.clients.local import InProcessClient
from bioptimus.models.types import ModelSpec
from bioptimus.pipeline import process_slide
from bioptimus.planning import PlanOptions
from bioptimus.runtime.segmenter import open_segmenter
from bioptimus.tiles import TileSpec
from tests.models import fake_model
from tests.slides import tissue, write_pyramid
from tests.tiny_models import save_module

WHOLE = SlideOptions(plan=PlanOptions(tissue="none"))


def slide(path: Path, side: int = 128) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_pyramid(path, tissue(side, side), mpp=0.5, factors=(1,))


def embed(inputs: Path, model: Path, out: Path, **options: Any) -> tuple[SlideReport, ...]:
    config = RunConfig(
        inputs=(str(inputs),), out=out, model=str(model), **{"slide": WHOLE, **options}
    )
    return run(config).reports


class CountingReaders(ThreadPoolExecutor):
    """Tells when so many blocks of tiles have been read."""

    def __init__(self, blocks: int) -> None:
        super().__init__(2)
        self.read = threading.Event()
        self._left = blocks

    def submit(self, *arguments: Any, **options: Any) -> Future[Any]:
        future = super().submit(*arguments, **options)
        future.add_done_callback(self._count)
        return future

    def _count(self, _: Future[Any]) -> None:
        self._left -= 1
        if self._left == 0:
            self.read.set()


def test_tiles_of_the_next_batch_are_read_while_the_model_works(tmp_path: Path) -> None:
    """FIELD 62, 63, 65: the model would wait for ever, were reading to wait for it."""
    path = slide(tmp_path / "a.tif", 512)
    spec = ModelSpec(name="means", tile=TileSpec(size_px=16), embedding_dim=3)
    waited = []
    # The first batch holds one block of 256 tiles at most.
    with CountingReaders(blocks=3) as readers:
        server, _ = fake_model(spec, lambda number: waited.append(readers.read.wait(20)))
        with InProcessClient(server, max_batch_size=256, max_wait_ms=1) as client:
            report = process_slide(
                SlideJob(path=path, output=tmp_path / "a.h5", name="a.tif"),
                client=client,
                options=WHOLE,
                readers=readers,
                stop=Stop(),
                listener=SilentListener(),
            )
    assert report.state == "ok"
    assert waited[0]


class Together(SilentListener):
    """Lets no slide go on before two are planned."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        self._both.wait(20)


def test_next_slide_is_opened_while_one_is_under_way(model: Path, tmp_path: Path) -> None:
    """FIELD 62, 63, 65."""
    for name in "ab":
        slide(tmp_path / "slides" / f"{name}.tif")
    config = RunConfig(
        inputs=(str(tmp_path / "slides"),), out=tmp_path / "out", model=str(model), slide=WHOLE
    )
    reports = run(config, listener=Together()).reports
    assert [report.state for report in reports] == ["ok", "ok"]


def test_report_says_where_the_time_of_a_slide_went(model: Path, tmp_path: Path) -> None:
    """FIELD 64."""
    path = slide(tmp_path / "a.tif")
    embed(path, model, tmp_path / "out")
    record = read_runs(tmp_path / "out").slides[str(path)]
    assert record["tiles_per_second"] > 0
    assert {"open", "tissue", "read", "wait", "forward", "write", "total"} == set(record["seconds"])
    assert all(record["seconds"][part] > 0 for part in ("read", "wait", "forward", "total"))


class Dark(torch.nn.Module):
    """uint8 (N, 64, 64, 3) → (N, 64, 64): all of it is tissue."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles.float().mean(3) * 0 + 1


def test_tissue_model_is_loaded_once_whatever_the_number_of_slides(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD 72: one owner of the device's memory."""
    spec = ModelSpec(name="dark", tile=TileSpec(size_px=64, mpp=8.0), output_kind="mask")
    segmenter = save_module(Dark(), spec, tmp_path / "dark.pt2")
    opened = []

    def noted(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return open_segmenter(*arguments, **options)

    monkeypatch.setattr("bioptimus.batch.run.open_segmenter", noted)
    for number in range(4):
        slide(tmp_path / "slides" / f"{number}.tif")
    by_model = SlideOptions(plan=PlanOptions(tissue=str(segmenter)))
    reports = embed(tmp_path / "slides", model, tmp_path / "out", slide=by_model, workers=4)
    assert {report.state for report in reports} == {"ok"}
    assert len(opened) == 1


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts by Linux's own account")
def test_what_a_result_costs_to_write_is_linear_in_its_rows(tmp_path: Path) -> None:
    """FIELD 73: bytes and calls, which, unlike seconds, are the same on every machine."""
    script = """
        import sys
        from pathlib import Path
        import numpy as np
        from bioptimus.inference.writers import HDF5Writer
        from tests.writer_process import plan

        def io():
            lines = Path("/proc/self/io").read_text().splitlines()
            return {key: int(value) for key, value in (line.split(": ") for line in lines)}

        for rows in (20_000, 80_000):
            wanted = plan(rows=rows, embedding_dim=64, prediction_dim=0, output_names=())
            before = io()
            with HDF5Writer.open(Path(sys.argv[1]) / f"{rows}.h5", wanted) as writer:
                for first in range(0, rows, 500):
                    block = np.ones((500, 64), np.float32)
                    writer.write_rows(
                        np.arange(first, first + 500), embeddings=block, predictions=None
                    )
                    writer.flush()
                writer.finish(state="ok")
            after = io()
            print(*(after[key] - before[key] for key in ("wchar", "rchar", "syscw", "syscr")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    few, many = (np.array(line.split(), np.int64) for line in done.stdout.splitlines())
    # Four times the rows; a square would be sixteen times the work.
    assert (many <= 4.2 * few).all(), done.stdout


def test_list_that_grew_keeps_its_columns_and_only_the_new_slides_are_made(
    model: Path, tmp_path: Path
) -> None:
    """FIELD 79, 94."""
    listed = tmp_path / "list.csv"
    listed.write_text("slide,cohort\na.tif,first\n")
    slide(tmp_path / "a.tif")
    assert [report.state for report in embed(listed, model, tmp_path / "out")] == ["ok"]
    with listed.open("a") as file:
        file.write("b.tif,second\n")
    slide(tmp_path / "b.tif")
    assert [report.state for report in embed(listed, model, tmp_path / "out")] == ["skipped", "ok"]
    assert listed.read_text() == "slide,cohort\na.tif,first\nb.tif,second\n"
    told = read_runs(tmp_path / "out").slides.values()
    assert [(each["state"], each["extra"]) for each in told] == [
        ("ok", {"cohort": "first"}),
        ("ok", {"cohort": "second"}),
    ]


def test_slides_of_one_name_keep_each_its_own_scale_also_as_staged_copies(
    model: Path, tmp_path: Path
) -> None:
    """FIELD 83, 87."""
    for folder in "ab":
        slide(tmp_path / folder / "x.tif", 256)
    listed = tmp_path / "list.csv"
    listed.write_text("slide,mpp\na/x.tif,0.5\nb/x.tif,0.25\n")
    reports = embed(listed, model, tmp_path / "out", stage=tmp_path / "local")
    assert [report.mpp for report in reports] == [(0.5, 0.5), (0.25, 0.25)]
    for report, mpp in zip(reports, (0.5, 0.25), strict=True):
        with h5py.File(report.output) as file:
            assert file.attrs["mpp_x"] == mpp
            assert file["coords"].attrs["patch_size_level0"] == 64 * 0.5 / mpp
    assert list((tmp_path / "local").iterdir()) == []


def test_slide_without_tissue_leaves_a_finished_file_and_nothing_else(
    model: Path, tmp_path: Path
) -> None:
    """FIELD 89, 90, 91."""
    blank = write_pyramid(
        tmp_path / "blank.tif", np.full((256, 256, 3), 240, np.uint8), mpp=0.5, factors=(1,)
    )
    for state in ("empty", "skipped"):
        (report,) = embed(blank, model, tmp_path / "out", slide=SlideOptions())
        assert report.state == state
        left = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        assert [path for path in left if path.parent.name != "runs"] == [Path(report.output)]


def test_report_of_a_folder_that_no_run_wrote_says_so(tmp_path: Path) -> None:
    """FIELD 97."""
    with pytest.raises(
        OutputError, match=r"no runs/\*\.json here; give the folder that --out named"
    ):
        read_runs(tmp_path)
