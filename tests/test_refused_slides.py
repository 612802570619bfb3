"""Slides that cannot be processed end before the model is loaded, each alone."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bioptimus.models.types import ModelSpec
from bioptimus.tiles import TileSpec
from cli.main import main
from tests.slides import tissue, write_pyramid
from tests.tiny_models import TinyRNA, save_module

TPM = "gene,tpm\n" + "".join(f"G{number},{1e6 / 7}\n" for number in range(7))
RNA = ModelSpec(
    name="rna",
    tile=TileSpec(size_px=64),
    output_kind="prediction_and_embedding",
    embedding_dim=5,
    prediction_dim=2,
    rna_dim=7,
    input_genes=tuple(f"G{number}" for number in range(7)),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the slides ``a.tif`` and ``b.tif`` and a table ``rna.csv``."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_pyramid(tmp_path / f"{name}.tif", tissue(256, 256), mpp=0.5, factors=(1, 4))
    (tmp_path / "rna.csv").write_text(TPM)
    return tmp_path


def records(folder: Path) -> list[dict[str, object]]:
    (path,) = (folder / "out" / "runs").iterdir()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in found if record["kind"] == "slide"]


def test_missing_slide_and_mask_are_told_before_the_model_is_loaded_and_the_others_go_on(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("list.csv").write_text("slide,mask\na.tif,\nb.tif,gone.png\nc.tif,\n")
    words = ["embed", "list.csv", "--model", str(model), "--tissue", "none", "--out", "out"]
    told = [
        "mask gone.png: no such file; correct the list",
        "no such file; check the path",
    ]
    assert main([*words, "--dry-run"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [f"b.tif: would fail: {told[0]}", f"c.tif: would fail: {told[1]}"]
    assert main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == [
        "3 slides",
        f"[1/3] b.tif: failed, {told[0]}",
        f"[2/3] c.tif: failed, {told[1]}",
        "loading tiny",
    ]
    assert lines[5].startswith("[3/3] a.tif: ok, 16 tiles")
    assert lines[6].startswith("1 ok, 2 failed; report: ")
    assert Counter(record["state"] for record in records(folder)) == {"ok": 1, "failed": 2}


@pytest.mark.parametrize("also", [[], ["--device", "cpu,cpu"], ["--shard", "3/3"]])
def test_first_event_says_how_many_slides_there_are(
    folder: Path, model: Path, capfd: pytest.CaptureFixture[str], also: list[str]
) -> None:
    words = ["embed", "gone.tif", "lost.tif", *also, "--model", str(model), "--out", "out"]
    main([*words, "--log-json"])
    first, *_, last = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["event"], first["slides"]) == ("run_started", 0 if "3/3" in also else 2)
    assert last["event"] == "run_ended"


@pytest.mark.parametrize("also", [[], ["a.tif", "--fail-fast"], ["--device", "cpu,cpu"]])
def test_model_is_not_loaded_where_no_slide_is_left(
    folder: Path, model: Path, capfd: pytest.CaptureFixture[str], also: list[str]
) -> None:
    words = ["embed", "gone.tif", "lost.tif", *also, "--model", str(model), "--out", "out"]
    assert main(words) == 1
    shown = capfd.readouterr().err
    assert "loading" not in shown
    assert shown.count("gone.tif: failed, no such file; check the path\n") == 1
    rest = "1 failed, 2 stopped" if "--fail-fast" in also else "2 failed"
    assert f"{rest}; report: out/runs" in shown
    assert main(["report", "out"]) == 1


@pytest.mark.parametrize("also", [[], ["--device", "cpu,cpu"]])
def test_slides_that_do_not_open_end_before_the_model_is_loaded_up_to_the_first_that_does(
    folder: Path, model: Path, capfd: pytest.CaptureFixture[str], also: list[str]
) -> None:
    Path("junk.svs").write_bytes(b"no slide at all")
    write_pyramid(folder / "unscaled.tif", tissue(256, 256), mpp=None)
    words = ["--model", str(model), "--tissue", "none", "--workers", "1", "--out", "out", *also]
    assert main(["embed", "junk.svs", "unscaled.tif", *words]) == 1
    shown = capfd.readouterr().err
    assert "loading" not in shown
    assert shown.count("junk.svs: failed, ") == shown.count("unscaled.tif: failed, no mpp") == 1
    assert main(["embed", "junk.svs", "a.tif", "unscaled.tif", *words]) == 1
    shown = capfd.readouterr().err
    order = [shown.index(words) for words in ("junk.svs: failed", "loading tiny", "a.tif: ok")]
    assert order == sorted(order)
    assert shown.count("unscaled.tif: failed, no mpp") == 1
    assert sorted(path.name for path in Path("out", "tiny").iterdir()) == ["a.h5"]


def test_rna_that_a_list_lacks_fails_its_slide_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_module(TinyRNA(), RNA, folder / "rna.pt2")
    Path("list.csv").write_text("slide,bulk_rna\na.tif,rna.csv\nb.tif,gone.csv\nc.tif,\n")
    write_pyramid(folder / "c.tif", tissue(256, 256), mpp=0.5)
    words = ["predict", "list.csv", "--model", str(model), "--tissue", "none", "--out", "out"]
    assert main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:4] == [
        "[1/3] b.tif: failed, bulk RNA gone.csv: no such file; correct the list",
        "[2/3] c.tif: failed, rna reads bulk RNA; pass --bulk-rna, or fill the bulk_rna column",
        "loading rna",
    ]
    assert main([*words, "--bulk-rna", "rna.csv", "--dry-run"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[:3]] == [
        "a.tif: done",
        "b.tif: would fail: bulk RNA gone.csv: no such file; correct the list",
        "c.tif: new",
    ]


def test_slide_without_a_mask_for_the_class_asked_for_fails_before_the_model_is_loaded(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    square = {"type": "Polygon", "coordinates": [[[0, 0], [256, 0], [256, 256], [0, 256]]]}
    tumor = {"type": "Feature", "geometry": square, "properties": {"classification": "Tumor"}}
    Path("a.json").write_text(json.dumps(tumor))
    Path("list.csv").write_text("slide,mask\nb.tif,\na.tif,a.json\n")
    words = ["embed", "list.csv", "--model", str(model), "--tissue-class", "Tumor", "--out", "out"]
    told = "b.tif: would fail: has no mask to take --tissue-class Tumor from; "
    assert main([*words, "--dry-run"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(told)
    assert lines[1].startswith("a.tif: new, 16 tiles")
    assert main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("[1/2] b.tif: failed, has no mask to take --tissue-class Tumor from")
    assert lines[2] == "loading tiny"
    assert lines[4].startswith("[2/2] a.tif: ok, 16 tiles")
    assert main(["tiles", "list.csv", "--tile-size-px", "64", "--tissue-class", "Tumor"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: b.tif: has no mask to take --tissue-class Tumor from; ")
    assert shown.out.startswith("a.tif: 16 of 16 tiles")
