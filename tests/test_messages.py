"""What people read when something is wrong: each fact once, under the name of what it is about."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bioptimus.batch.claims import Claim
from cli.main import main
from tests.slides import tissue, truncate, white, write_pyramid

BAD = {
    "below/missing.svs": "no such file",
    "below/loose.svs": "a link to nowhere.svs, which is not there",
    "below/empty.svs": "is empty (0 bytes)",
    "below/text.svs": "not a slide: no format was recognised",
    "below/scan.vsi": "Olympus/Evident format that OpenSlide cannot read",
    "below/half.tif": "truncated or damaged",
    "below/unscaled.tif": "no mpp in its metadata",
    "below/coarse.tif": "4 times coarser than the tile's mpp",
    "below/no mask.tif": "mask nowhere.png: ",
    "below/odd mask.tif": "mask odd.png: neither PNG nor GeoJSON",
    "below/flat mask.tif": "mask flat.png: 50 x 20 px does not have the shape of the slide",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with ``list.csv``, which names every bad input and one good slide."""
    monkeypatch.chdir(tmp_path)
    below = tmp_path / "below"
    below.mkdir()
    (below / "loose.svs").symlink_to("nowhere.svs")
    (below / "empty.svs").touch()
    (below / "text.svs").write_text("hello")
    (below / "scan.vsi").write_text("x")
    pixels = tissue(448, 448)
    truncate(write_pyramid(below / "half.tif", pixels))
    write_pyramid(below / "unscaled.tif", pixels, mpp=None)
    write_pyramid(below / "coarse.tif", pixels, mpp=2.0)
    for name in ("no mask", "odd mask", "flat mask", "good"):
        write_pyramid(below / f"{name}.tif", pixels, mpp=0.5, factors=(1, 4))
    (tmp_path / "odd.png").write_text("hello")
    Image.new("L", (50, 20), 255).save(tmp_path / "flat.png")
    masks = {"below/no mask.tif": "nowhere.png"}
    masks |= {f"below/{kind} mask.tif": f"{kind}.png" for kind in ("odd", "flat")}
    rows = [f"{name},{masks.get(name, '')}" for name in (*BAD, "below/good.tif")]
    (tmp_path / "list.csv").write_text("slide,mask\n" + "\n".join(rows) + "\n")
    return tmp_path


def assert_each_is_told_once(lines: list[str]) -> None:
    for name, fact in BAD.items():
        file = Path(name).name
        told = [line for line in lines if file in line]
        assert len(told) == 1, (name, told)
        assert told[0].count(file) == 1, told
        assert fact in told[0]
        # One line, and it says what can be done.
        assert len(told[0]) < 300


@pytest.mark.parametrize(
    "words", [["tiles"], ["embed", "--dry-run"], ["predict", "--tissue", "none"]]
)
def test_every_bad_input_is_told_once_with_one_name(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main([*words, "list.csv", "--out", "out"]) == 1
    shown = capsys.readouterr()
    lines = [*shown.out.splitlines(), *shown.err.splitlines()]
    assert_each_is_told_once([line for line in lines if not line.startswith("below/good")])
    if words == ["predict", "--tissue", "none"]:
        assert "11 failed, 1 ok; report: " in lines[-1]
        assert main(["report", "out"]) == 1
        assert_each_is_told_once(capsys.readouterr().out.splitlines())


def test_info_tells_the_same_of_what_cannot_be_opened(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [name for name in BAD if "svs" in name or "half" in name]
    assert main(["info", *bad]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(bad)
    for name, line in zip(bad, lines, strict=True):
        assert line.count(Path(name).name) == 1
        assert BAD[name] in line


def test_slide_smaller_than_a_tile_is_told_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pyramid(tmp_path / "icon.tif", white(16, 16), mpp=0.25, factors=(1,), tile=16)
    assert main(["tiles", "icon.tif", "--no-overview"]) == 0
    told = capsys.readouterr().err
    assert "smaller than one tile: the slide has 16 x 16 px, a tile takes 448 x 448" in told


def test_what_is_left_out_of_a_run_is_not_called_no_slide(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = folder / "only"
    only.mkdir()
    (folder / "below" / "good.tif").rename(only / "good.tif")
    (only / "notes.txt").write_text("x")
    assert main(["tiles", "only", "only/good.tif", "--no-overview"]) == 0
    told = capsys.readouterr().err
    assert "left out: only/notes.txt (unknown extension)\n" in told
    assert "left out: only/good.tif (given twice)\n" in told
    assert "not a slide" not in told


def test_what_is_left_out_of_a_run_is_an_event_for_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["embed", "gone.svs", "./gone.svs", "--log-json"]
    assert main([*words, "--out", "out"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [(each["path"], each["reason"]) for each in events if each["event"] == "left_out"]
    assert told == [("gone.svs", "given twice")]
    assert events[-1]["event"] == "run_ended"


def test_one_of_a_thing_is_not_called_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.full((224, 224, 3), 120, np.uint8)
    write_pyramid(tmp_path / "one.tif", pixels, mpp=0.5, factors=(1,))
    assert main(["embed", "one.tif", "--tissue", "none", "--dry-run"]) == 0
    assert main(["embed", "one.tif", "--tissue", "none"]) == 0
    assert main(["tiles", "one.tif", "--tissue", "none", "--dump", "tiles"]) == 0
    assert main(["report", "embeddings", "--html", "page.html"]) == 0
    assert main(["verify", "embeddings"]) == 0
    assert main(["submit", "--dry-run", "embed", "one.tif"]) == 0
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert not re.findall(r"(?<![\d.])(?<!of )1 (?:slides|tiles|runs|tasks|files|findings)\b", text)
    for words in (
        "1 slide: 1 new; 1 tile to",
        "1 slide\nloading lite0\n",
        "1 run: 1 ok; 1 tile\n",
        "1 file, 1 tile",
    ):
        assert words in text
    assert "1 slide in 1 task;" in text


def test_a_report_keeps_the_name_in_front_for_who_reads_the_reason_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "below/empty.svs", "--out", "out"]) == 1
    (run,) = (folder / "out" / "runs").iterdir()
    records = [json.loads(line) for line in run.read_text().splitlines()]
    (reason,) = [each["reason"] for each in records if each["kind"] == "slide"]
    assert reason.startswith("empty.svs: is empty")


def test_slide_that_another_job_holds_is_not_counted_as_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_pyramid(tmp_path / f"{name}.tif", white(224, 224), mpp=0.5, factors=(1,))
    words = ["embed", "a.tif", "b.tif", "--tissue", "none"]
    claim = Claim.take(Path("embeddings/lite0/b.h5"))
    assert claim is not None
    with claim:
        assert main(words) == 0
    assert "1 ok, 1 held by another job; report: " in capsys.readouterr().err
    assert main(["report", "embeddings"]) == 1
    told = capsys.readouterr().out
    assert "held by another job: b.tif: that job has not accounted for it yet\n" in told
    assert "1 run: 1 ok, 1 held by another job; 1 tile\n" in told
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "1 skipped, 1 ok; report: " in told or "1 ok, 1 skipped; report: " in told
    assert main(["report", "embeddings"]) == 0
    assert "held" not in capsys.readouterr().out
