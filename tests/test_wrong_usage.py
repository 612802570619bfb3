"""Wrong usage is exit code 2 and one line, found before any work is done."""

import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bioptimus import embed_slide
from bioptimus.batch.places import refuse_unwritable
from bioptimus.errors import UsageError
from cli.main import main
from tests.conftest import EXAMPLE_SLIDE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a file in it, and nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    return tmp_path


def test_misspelt_variable_of_an_option_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIOPTIMUS_INFO_JSN", "1")
    monkeypatch.setenv("BIOPTIMUS_INFO_JSON", "0")
    monkeypatch.setenv("BIOPTIMUS_EMBED_OUTT", "other command")
    monkeypatch.setenv("BIOPTIMUS_CACHE_GB", "20")
    assert main(["info", SLIDE]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "WARNING: BIOPTIMUS_INFO_JSN is set, and sets no option; is BIOPTIMUS_INFO_JSON meant?"
    ]
    monkeypatch.setenv("BIOPTIMUS_MODELS_LIST_JSON", "1")
    assert main(["models", "list"]) == 0
    assert not capsys.readouterr().err


def test_option_that_there_is_not_is_answered_with_those_it_is_a_word_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["embed", SLIDE, "--mpp", "0.5"]) == 2
    assert capsys.readouterr().err == (
        "error: No such option: --mpp (Possible options: --mpp-fallback, --mpp-override, "
        "--tile-mpp); see 'bioptimus embed --help'\n"
    )
    assert main(["embed", SLIDE, "--batchsize", "3"]) == 2
    assert "(Possible options: --batch-size)" in capsys.readouterr().err


SLIDE = str(EXAMPLE_SLIDE)
RUNS = [
    (["--model", "missing.pt2"], "missing.pt2: no such file"),
    (["--model", "h1", "--checkpoint", "missing.pt2"], "missing.pt2: no such file"),
    (["--model", "h1", "--checkpoint", "."], "a folder, not a .pt2"),
    (["--out", "file"], "--out file: file is a file, not a folder"),
    (["--out", "file/below"], "file is a file"),
    (["--stage", "file/below"], "--stage file/below: file is a file"),
    (["--stage", "scratch", "--stage-gb", "0"], "--stage-gb 0"),
    (["--tissue", "missing.png"], "--tissue missing.png: no such mask"),
    (["--tissue", "."], "--tissue .: no such mask"),
    (["--tissue", "missing.pt2"], "no such tissue model"),
    (["--device", "gpu"], "device gpu: known are"),
    (["--device", "cuda:x"], "device cuda:x: known are"),
    (["--device", "cuda:99"], "device cuda:99: "),
    (["--device", "cpu,gpu"], "device gpu: known are"),
    (["--device", ","], "names no device"),
    (["--mpp-override", "-1"], "--mpp-override -1"),
    (["--mpp-fallback", "90"], "--mpp-fallback 90"),
    (["--batch-size", "0"], "--batch-size"),
    (["--no-such-option"], "--no-such-option"),
]


@pytest.mark.parametrize(("words", "message"), RUNS)
def test_of_a_run_is_told_before_a_model_is_loaded_or_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    assert main(["embed", SLIDE, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("name", ["lite0", "runs"])
def test_of_a_file_where_a_folder_of_the_run_is_to_be_is_told_before_a_model_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (folder / "out").mkdir()
    (folder / "out" / name).touch()
    assert main(["embed", SLIDE, "--out", "out"]) == 2
    told = f"error: --out out/{name}: out/{name} is a file, not a folder; choose another folder\n"
    assert capsys.readouterr().err == told
    assert os.listdir(folder / "out") == [name]


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["embed", SLIDE, "--out", ""], "after --out"),
        (["embed", SLIDE, "--out="], "in --out="),
        (["embed", SLIDE, "--stage", ""], "after --stage"),
        (["embed", SLIDE, "--model", "h1", "--checkpoint", ""], "after --checkpoint"),
        (["embed", SLIDE, "--model", ""], "after --model"),
        (["embed", ""], "after embed"),
        (["tiles", SLIDE, "--csv", ""], "after --csv"),
        (["tiles", SLIDE, "--dump", ""], "after --dump"),
        (["verify", ""], "after verify"),
        (["report", ".", "--html", ""], "after --html"),
        (["convert", ".", "--to", "npz", "--out", ""], "after --out"),
        (["view", "a.h5", "--out", ""], "after --out"),
        (["models", "export", "lite0", "--out", ""], "after --out"),
        (["submit", "embed", SLIDE, "--out", ""], "after --out"),
        ([""], "given"),
    ],
)
def test_of_a_variable_that_is_not_set_is_told_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], where: str
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: an empty value was given")
    assert f"{where}; is a variable of the script not set?" in line
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", ".", "--html", "-"], "--html -: this does not go to stdout; name a file, such"),
        (["models", "export", "weights", "-o", "-"], "--out -: this does not go to stdout; name a"),
        (["embed", SLIDE, "--out", "-"], "--out -: nothing of this goes to stdout; name a folder"),
        (["embed", SLIDE, "--stage", "-"], "--stage -: nothing of this goes to stdout"),
        (["tiles", SLIDE, "--out", "-"], "--out -: nothing of this goes to stdout"),
        (["tiles", SLIDE, "--dump", "-"], "--dump -: nothing of this goes to stdout"),
        (["convert", ".", "--to", "npz", "--out", "-"], "--out -: nothing of this goes to stdout"),
        (["view", "a.h5", "--out", "-"], "--out -: nothing of this goes to stdout"),
    ],
)
def test_of_a_dash_where_nothing_goes_to_stdout_is_told_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert os.listdir(folder) == ["file"]


def test_of_an_empty_path_is_told_in_python(folder: Path) -> None:
    for path in ("out", "checkpoint"):
        given: dict[str, Any] = {path: ""}
        with pytest.raises(UsageError, match=f"{path}: an empty path was given"):
            embed_slide(SLIDE, **given)
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("option", ["--bulk-rna", "--gene-column", "--value-column"])
def test_of_a_model_without_rna_is_told_to_who_brings_some(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["predict", SLIDE, option, "file"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"lite0: reads no bulk RNA; leave out {option}" in line
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tissue", "missing.png"], "--tissue missing.png: no such mask"),
        (["--out", "file"], "--out file: file is a file"),
        (["--dump", "file"], "--dump file: file is a file"),
        (["--csv", "file/tiles.csv"], "--csv file: file is a file"),
        (["--csv", "."], "--csv .: is a folder; name a file, such as tiles.csv"),
        (["--mpp-override", "0"], "--mpp-override 0"),
    ],
)
def test_of_tiles_is_told_before_a_slide_is_opened(
    folder: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    assert main(["tiles", SLIDE, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("value", ["900", "0", "nan", "wide"])
def test_of_a_list_names_the_line_with_an_impossible_scale(
    folder: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    Path("list.csv").write_text(f"slide,mpp\n{SLIDE},{value}\n")
    assert main(["embed", "list.csv"]) == 2
    assert "list.csv, line 2: mpp" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == ["file", "list.csv"]


def test_folder_that_may_not_be_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The system is asked, and root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != ".")
    told = r"--out new/below: \. cannot be written \(Permission denied\); choose another folder"
    with pytest.raises(UsageError, match=told):
        refuse_unwritable(Path("new") / "below", option="--out")
    # No permission would help, and the owner of the folder cannot mend it.
    read_only = os.statvfs_result((0, 0, 0, 0, 0, 0, 0, 0, os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    with pytest.raises(UsageError, match=r"\. cannot be written \(Read-only file system\)"):
        refuse_unwritable(Path("new") / "below", option="--out")


@pytest.mark.parametrize(
    "words",
    [
        ["models", "export", "a:b", "--mean", "0,0,0", "--std", "1,1,1", "-o", "closed/x"],
        ["models", "show", "closed/x"],
        ["report", ".", "--html", "closed/x"],
        ["report", "closed/x"],
        ["tiles", SLIDE, "--csv", "closed/x"],
        ["view", "closed/x"],
        ["verify", "closed/x"],
        ["convert", "closed/x", "--to", "npz", "--out", "out"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_path_below_a_folder_that_may_not_be_entered_is_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
) -> None:
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path) == "closed/x":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    # Root may enter every folder.
    monkeypatch.setattr(os, "stat", refuse)
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    if sys.version_info < (3, 14):  # later ones take it for a path that is not there
        assert line == "error: closed/x: Permission denied; check its permissions and its folders'"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder nobody can write in")
@pytest.mark.parametrize(
    ("option", "what"),
    [("--out", "cannot be written"), ("--stage", "slides cannot be staged there")],
)
def test_folder_that_only_writing_shows_to_be_closed_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, what: str
) -> None:
    assert main(["embed", SLIDE, option, "/proc/below"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"/proc/below: {what}" in line
    assert f"choose another {option}" in line
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("words", [["--log-json", "--device", "gpu"], ["--log-json", "--nonsense"]])
def test_is_told_as_json_to_who_asked_for_json(
    folder: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str]
) -> None:
    assert main(["embed", SLIDE, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert words[-1] in event["message"]


def test_is_told_as_json_when_the_environment_asks_for_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIOPTIMUS_EMBED_LOG_JSON", "1")
    assert main(["embed", SLIDE, "--device", "gpu"]) == 2
    assert json.loads(capsys.readouterr().err)["exit_code"] == 2


def test_keeps_its_exit_code_when_the_traceback_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", SLIDE, "--device", "gpu", "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err
