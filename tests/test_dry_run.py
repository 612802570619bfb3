"""``--dry-run`` says of every input what the run would: what is new, done, or in the way."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch

from bioptimus.batch.run import RunConfig, run
from bioptimus.io.wsi import CoarseImage, Slide
from bioptimus.jobs import SlideJob, SlideOptions
from bioptimus.models.types import ModelSpec
from bioptimus.planning import PlanOptions
from bioptimus.tiles import TileGrid, TileSpec
from bioptimus.tissue import TissueMask, tissue_ratios
from cli.main import main
from cli.progress import LineProgress
from tests.result_files import damage
from tests.slides import tissue, write_pyramid
from tests.tiny_models import save_module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with ``slides``: three slides of 256 tiles, a list and a broken link."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slides").mkdir()
    for name in ("a", "b", "c"):
        write_pyramid(tmp_path / "slides" / f"{name}.tif", tissue(1024, 1024), mpp=0.5)
    (tmp_path / "slides" / "notes.txt").write_text("x")
    (tmp_path / "slides" / "d.svs").symlink_to("nowhere.svs")
    return tmp_path


class StopsEarly(LineProgress):
    """A listener, and a stop signal that is set once the first tiles are there."""

    stopped = False

    def tiles_done(self, job: SlideJob, count: int) -> None:
        self.stopped = True


def stop_in(slide: str, model: Path) -> None:
    listener = StopsEarly()
    options = SlideOptions(plan=PlanOptions(overlap_px=0, tissue="none"))
    config = RunConfig(
        inputs=(slide,),
        out=Path("out"),
        model=str(model),
        device="cpu",
        readers=1,
        batch_size=2,
        slide=options,
    )
    result = run(config, listener=listener, stop=listener)
    assert [report.state for report in result.reports] == ["stopped"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_state_of_every_input_is_told_and_nothing_is_touched(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["embed", "--model", str(model), "--tissue", "none", "--out", "out"]
    assert main([*words, "slides/a.tif"]) == 0
    # As a kill between rename and removal leaves it: the run would tidy up, this must not.
    (folder / "out" / "tiny" / "a.h5.part").write_text("x")
    stop_in("slides/b.tif", model)
    before = contents(folder)
    capsys.readouterr()
    assert main([*words, "slides", "slides/c.tif", "--dry-run"]) == 1
    shown = capsys.readouterr()
    a, b, c, d, total = shown.out.splitlines()
    assert a.startswith("a.tif: done, 256 tiles, mpp 0.5")
    done = int(b.removeprefix("b.tif: resume, ").split()[0])
    assert 0 < done < 256
    assert f"resume, {done} of 256 tiles done, mpp 0.5" in b
    assert c.startswith("c.tif: new, 256 tiles, mpp 0.5")
    assert d.startswith("d.svs: would fail: a link to nowhere.svs")
    assert f"4 slides: 1 done, 1 resume, 1 new, 1 would fail; {512 - done} tiles to" in total
    assert "left out: slides/notes.txt (unknown extension)\n" in shown.err
    assert "left out: slides/c.tif (given twice)\n" in shown.err
    assert main([*words, "slides/a.tif", "--min-tissue", "0.7", "--dry-run"]) == 1
    (line, _) = capsys.readouterr().out.splitlines()
    assert line.startswith("a.tif: other parameters: ")
    assert "min tissue" in line
    assert main([*words, "slides/a.tif", "--min-tissue", "0.7", "--dry-run", "--overwrite"]) == 0
    assert capsys.readouterr().out.startswith("a.tif: new, 256 tiles, ")
    damage(folder / "out" / "tiny" / "a.h5", "features", row=5)
    before = contents(folder)
    for option, state in (([], "done"), (["--overwrite"], "new")):
        assert main([*words, "slides/a.tif", "--dry-run", *option]) == 0
        assert capsys.readouterr().out.startswith(f"a.tif: {state}, 256 tiles, ")
    assert contents(folder) == before


def test_rows_of_a_stopped_run_survive_the_same_command_without_an_option(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_in("slides/b.tif", model)
    left = Path("out/tiny/b.h5.part").read_bytes()
    words = ["embed", "slides/b.tif", "slides/c.tif", "--model", str(model), "--tissue", "none"]
    words += ["--out", "out", "--overlap-px", "8"]
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 1
    assert "b.tif: other parameters: out/tiny/b.h5.part: holds " in capsys.readouterr().out
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "b.tif: failed, out/tiny/b.h5.part: holds " in told
    assert "(overlap (px) is 0 there, 8 now); repeat that command to go on with it" in told
    assert Path("out/tiny/b.h5.part").read_bytes() == left
    assert Path("out/tiny/c.h5").exists()
    assert main([*words, "--overwrite", "--dry-run"]) == 0
    assert "b.tif: starting anew: overlap (px) is 0 there, 8 now" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert not Path("out/tiny/b.h5.part").exists()


def test_part_with_tiles_elsewhere_is_told_as_the_run_takes_it(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_in("slides/b.tif", model)
    # An older version found other tissue under the same parameters.
    monkeypatch.setattr("bioptimus.planning.tissue_ratios", without_first)
    words = ["embed", "slides/b.tif", "--model", str(model), "--tissue", "none", "--out", "out"]
    capsys.readouterr()
    for run_words in (["--dry-run"], []):
        assert main([*words, *run_words]) == 0
        shown = capsys.readouterr()
        assert "b.tif: starting anew: its tiles lie elsewhere\n" in shown.err
        if run_words:
            assert shown.out.startswith("b.tif: new, 255 tiles, ")
            assert "; 255 tiles to compute" in shown.out


def without_first(mask: TissueMask, grid: TileGrid) -> npt.NDArray[np.float32]:
    ratios = tissue_ratios(mask, grid)
    ratios[0] = 0
    return ratios


@pytest.mark.parametrize(
    ("scale", "covers"),
    [
        (["--tile-mpp", "1200"], "9600 x 9600 px of level 2 (8 µm/px)"),
        (["--tile-mpp", "120", "--mpp-override", "0.05"], "9600 x 9600 px of level 2 (0.8 µm/px)"),
    ],
)
def test_slide_fails_in_one_line_where_a_tile_would_take_gigabytes(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    scale: list[str],
    covers: str,
) -> None:
    words = ["embed", "slides/a.tif", "--model", str(model), "--min-tissue", "0", *scale]
    told = f"a tile of 64 px at {scale[1]} µm/px covers {covers}, more than 8192 x 8192; pass a "
    assert main([*words, "--dry-run"]) == 1
    assert f"a.tif: would fail: {told}" in capsys.readouterr().out
    assert main(words) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "failed, " in line)
    assert told in line
    assert not list(Path("embeddings").rglob("*.h5*"))


@pytest.mark.parametrize("words", [["embed", "--dry-run"], ["embed"], ["tiles"]])
def test_fault_nobody_foresaw_is_one_slides_alone(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    coarse_image = Slide.coarse_image

    def faulty(slide: Slide, mpp: float = 8.0) -> CoarseImage:
        if slide.name == "a.tif":
            raise ZeroDivisionError("of some kind")
        return coarse_image(slide, mpp)

    monkeypatch.setattr(Slide, "coarse_image", faulty)
    given = ["--model", str(model)] if words[0] == "embed" else ["--tile-size-px", "64"]
    assert main([*words, "slides/a.tif", "slides/b.tif", *given]) == 1
    shown = capsys.readouterr()
    assert "a.tif: unexpected ZeroDivisionError: of some kind\n" in shown.err
    assert "Traceback" not in shown.err
    assert "b.tif: " in shown.out if words != ["embed"] else "b.h5" in shown.out


@pytest.mark.parametrize("min_tissue", ["0.5", "1"])
def test_size_that_is_told_is_about_that_of_the_file(
    example_slide: Path,
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    min_tissue: str,
) -> None:
    """Three values a tile: most of this file is its thumbnail."""
    words = ["embed", str(example_slide), "--model", str(model), "--min-tissue", min_tissue]
    assert main([*words, "--dry-run"]) == 0
    told = re.search(r", ([0-9.]+) MB -> ", capsys.readouterr().out)
    assert told is not None
    assert main(words) == 0
    written = Path(capsys.readouterr().out.strip()).stat().st_size / 1e6
    assert 0.5 < float(told[1]) / written < 2


def test_column_that_is_almost_one_that_counts_is_told_before_the_run(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("list.csv").write_text("slide,mppp\nslides/a.tif,0.5\n")
    run = ["embed", "list.csv", "--model", str(model), "--tissue", "none"]
    for words in ([*run, "--dry-run"], run, ["tiles", "list.csv", "--tissue", "none"]):
        assert main(words) == 0
        told = (
            "WARNING: list.csv: the column 'mppp' is only carried into the report; is 'mpp' meant?"
        )
        assert capsys.readouterr().err.count(told) == 1


class Everything(torch.nn.Module):
    """uint8 (N, 512, 512, 3) → (N, 512, 512) of ones."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return (tiles.float().mean(3) >= 0).float()


def test_tissue_model_runs_on_the_first_of_several_devices(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ModelSpec(name="all", tile=TileSpec(size_px=512, mpp=8.0), output_kind="mask")
    save_module(Everything(), spec, folder / "all.pt2")
    words = ["embed", "slides/a.tif", "--model", str(model), "--tissue", "all.pt2"]
    assert main([*words, "--device", "cpu,cpu", "--dry-run"]) == 0
    assert "a.tif: new, 256 tiles" in capsys.readouterr().out


def test_scale_other_than_the_models_is_told_once_a_run_and_kept_in_the_file(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = "tiles at 1 µm/px, but tiny was made for 0.5 µm/px"
    monkeypatch.setenv("BIOPTIMUS_EMBED_TILE_MPP", "1")
    words = ["embed", "slides/a.tif", "slides/b.tif", "--model", str(model), "--tissue", "none"]
    for run_words in (["--dry-run"], []):
        assert main([*words, *run_words]) == 0
        assert capsys.readouterr().err.count(expected) == 1
    with h5py.File(folder / "embeddings" / "tiny" / "a.h5") as file:
        assert expected in file.attrs["warnings"][0]


@pytest.mark.parametrize("tile_mpp", ["0.5", "0.499"])
def test_models_own_scale_is_no_warning(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], tile_mpp: str
) -> None:
    words = ["embed", "slides/a.tif", "--model", str(model), "--tile-mpp", tile_mpp]
    assert main([*words, "--allow-upsample", "--dry-run"]) == 0
    assert "made for" not in capsys.readouterr().err


def test_column_of_rna_that_the_model_does_not_read_is_told_once_and_no_error(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("list.csv").write_text("slide,bulk_rna\nslides/a.tif,r.csv\nslides/b.tif,r.csv\n")
    assert main(["embed", "list.csv", "--model", str(model), "--tissue", "none"]) == 0
    told = capsys.readouterr().err
    assert told.count("tiny reads no bulk RNA: the list's column bulk_rna is not used") == 1
    assert "r.csv" not in told


def test_annotations_of_another_class_are_other_parameters(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    square = {"type": "Polygon", "coordinates": [[[0, 0], [99, 0], [99, 99], [0, 99]]]}
    features = [
        {"type": "Feature", "geometry": square, "properties": {"classification": {"name": name}}}
        for name in ("Tumor", "Stroma")
    ]
    Path("mask.json").write_text(json.dumps(features))
    words = ["embed", "slides/a.tif", "--model", str(model), "--tissue", "mask.json"]
    assert main([*words, "--tissue-class", "Tumor", "--tissue-class", "Stroma"]) == 0
    capsys.readouterr()
    assert main([*words[:-2], "--tissue", "none"]) == 1
    told = capsys.readouterr().err
    assert "tissue is mask there, none now; tissue class is " in told
    assert re.search(r"; tissue mask sha256 is [0-9a-f]{64} there, none now[;)]", told)
    for classes, code, state in (
        (["Stroma", "Tumor"], 0, "done"),
        (["Tumor"], 1, "other parameters"),
        ([], 1, "other parameters"),
        (["Stroma", "Tumor", "--search-in-mask"], 1, "other parameters"),
    ):
        named = [name for name in classes if not name.startswith("-")]
        chosen = [word for name in named for word in ("--tissue-class", name)]
        chosen += classes[len(named) :]
        capsys.readouterr()
        assert main([*words, *chosen, "--dry-run"]) == code
        assert capsys.readouterr().out.startswith(f"a.tif: {state}")
