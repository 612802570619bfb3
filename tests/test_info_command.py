"""``bioptimus info``: facts on stdout, errors on stderr, exit code for scripts."""

import io
import json
from pathlib import Path

import pytest

from cli.main import main
from tests import slides
from tests.result_files import make_result


def test_info_shows_each_claim_of_the_scale_and_which_one_won(
    example_slide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(example_slide)]) == 0
    text = capsys.readouterr().out
    for part in (
        "aperio",
        "2220 x 2967 px",
        "0.499 µm/px from openslide.mpp-x/y",
        "aperio.MPP",
        "objective power",
        "passed over",
        "reader           tiff",
        "1.8 MiB",
    ):
        assert part in text


def test_info_as_json_is_one_list_with_every_slide(
    example_slide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--json", str(example_slide), str(tmp_path / "gone.svs")]) == 1
    output = capsys.readouterr()
    good, bad = json.loads(output.out)
    assert good["mpp"] == [0.499, 0.499]
    assert [entry["used"] for entry in good["mpp_candidates"]] == [True, False, False]
    assert good["levels"] == [{"dimensions": [2220, 2967], "downsample": [1.0, 1.0]}]
    assert good["size_bytes"] == example_slide.stat().st_size
    assert "no such file" in bad["error"]
    assert "error:" in output.err


@pytest.mark.parametrize("command", ["info", "tiles", "embed"])
def test_a_result_that_is_given_for_a_slide_is_told_with_what_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = make_result(tmp_path / "a.h5")
    (tmp_path / "b.h5").write_bytes(b"of somebody else")
    words = [str(path), str(tmp_path / "b.h5"), *(["--no-overview"] if command == "tiles" else [])]
    words += ["--out", str(tmp_path / "out")] if command == "embed" else []
    assert main([command, *words]) == 1
    said = capsys.readouterr().err
    assert (
        "a.h5: no slide but a result of bioptimus, of the slide a.svs; bioptimus verify, view "
        "and convert read it, and bioptimus report its folder"
    ) in said.replace("failed, ", "")
    assert "b.h5: not a slide: no format was rec" in said.replace("failed, ", "")


def test_one_bad_slide_does_not_hide_the_others(
    example_slide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.svs").touch()
    assert main(["info", str(tmp_path / "empty.svs"), str(example_slide)]) == 1
    output = capsys.readouterr()
    assert "CMU-1-Small-Region" in output.out
    assert output.err.splitlines() == [
        "error: empty.svs: is empty (0 bytes); copy it again from the source and compare the sizes"
    ]


def test_errors_of_slides_of_one_file_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "s.svs").touch()
    assert main(["info", str(tmp_path)]) == 1
    starts = [line.split(": ")[:2] for line in capsys.readouterr().err.splitlines()]
    assert starts == [["error", "a/s.svs"], ["error", "b/s.svs"]]


def test_info_says_what_an_override_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(300, 300), mpp=0.25)
    assert main(["info", str(path), "--mpp-override", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "0.5 µm/px from --mpp-override" in text
    assert "contradicts 0.25" in text
    assert main(["info", str(path), "--reader", "openslide"]) == 0
    assert "reader           openslide" in capsys.readouterr().out


def test_slide_without_scale_is_shown_with_the_flag_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(300, 300), mpp=None)
    assert main(["info", str(path)]) == 0
    assert "--mpp-override" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--reader", "fast"], ["--mpp-override", "-1"]])
def test_options_that_cannot_be_are_wrong_usage(
    example_slide: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(example_slide), *words]) == 2
    assert words[0] in capsys.readouterr().err


@pytest.fixture
def cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two slides of one name, a note, and a list with a scale for one."""
    monkeypatch.chdir(tmp_path)
    for patient in ("a", "b"):
        (tmp_path / "cohort" / patient).mkdir(parents=True)
        slides.write_pyramid(tmp_path / "cohort" / patient / "x.tif", slides.noise(300, 300))
    (tmp_path / "cohort" / "notes.txt").write_text("x")
    (tmp_path / "list.csv").write_text("slide,mpp\ncohort/a/x.tif,0.3\ncohort/b,\n")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [["cohort"], ["cohort/*/x.tif"], ["list.csv"], ["-"], ["cohort/a/x.tif", "cohort/b/x.tif"]],
    ids=lambda words: words[0],
)
def test_info_takes_what_embed_takes(
    cohort: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("cohort/a/x.tif\ncohort/b/x.tif\n"))
    assert main(["info", "--json", *words]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [facts["path"] for facts in found] == ["cohort/a/x.tif", "cohort/b/x.tif"]
    if words == ["list.csv"]:
        assert found[0]["mpp"] == [0.3, 0.3]
        assert found[0]["mpp_source"] == "the list's mpp column"
    if words == ["cohort"]:
        assert shown.err == "left out: cohort/notes.txt (unknown extension)\n"


def test_info_on_a_folder_without_slides_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(tmp_path)]) == 2
    assert "no slides in this folder" in capsys.readouterr().err
