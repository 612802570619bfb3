"""Names that hold line ends or brackets: one line each in what is printed, whole in lists."""

import ast
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bioptimus import embed_slide, open_result
from bioptimus.batch.inputs import find_inputs
from bioptimus.batch.lists import write_list
from bioptimus.errors import BioptimusError, UsageError
from bioptimus.io.wsi import Slide
from bioptimus.json_lines import json_line
from bioptimus.planning import require_tissue_file
from bioptimus.report_html import write_html
from cli.main import main
from cli.progress import one_line
from tests.conftest import ROOT
from tests.result_files import make_result
from tests.slides import tissue, write_pyramid

ODD, SHOWN = "a\nb\x1b[2J.tif", r"a\nb\x1b[2J.tif"
# In rich's markup these end something that was never begun.
BRACKETS = "[x[/y].tif"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate((ODD, BRACKETS)):
        path = tmp_path / "slides" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_pyramid(path, tissue(256, 256)[:: 1 - 2 * number], mpp=0.5, factors=(1, 4))
    Path("slides", f"{ODD}.txt").touch()
    return tmp_path


def test_every_line_printed_is_of_one_name(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["embed", "slides", "--model", str(model), "--tissue", "none", "--out", "out"]
    for words, lines, errors in (
        (["tiles", "slides", "--tissue", "none", "--tile-size-px", "64"], 2, 1),
        ([*run, "--dry-run"], 3, 1),
        (run, 2, 7),
        (["report", "out"], 2, 0),
        (["verify", "out", "--slides", "slides"], 0, 1),
        (["convert", "out/tiny", "--to", "clam", "--out", "clam"], 6, 0),
        (["info", f"slides/{ODD}"], 15, 0),
        (["info", "none\n.tif"], 0, 1),
    ):
        assert main(words) == (1 if "none\n.tif" in words else 0)
        shown = capsys.readouterr()
        assert "\x1b" not in shown.out + shown.err
        assert len(shown.err.splitlines()) == errors, shown.err
        assert len(shown.out.splitlines()) == lines, shown.out
    Path("out", "tiny", Path(ODD).stem + ".h5").unlink()
    assert main(["verify", "out", "--slides", "slides"]) == 1
    assert f"is missing: there is no result of slides/{SHOWN}\n" in capsys.readouterr().out


def test_failed_slide_of_such_a_name_is_named_once(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("slides", ODD).write_text("no slide")
    assert main(["embed", f"slides/{ODD}", "--model", str(model), "--out", "out"]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "failed, " in line)
    assert line.startswith(rf"[1/1] {SHOWN}: failed, not a slide")


def test_terminal_shows_brackets_in_names_as_they_are(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["embed", "slides", "--model", str(model), "--out", "out"]) == 0
    assert f" {BRACKETS}: " in capsys.readouterr().err


def test_table_at_the_end_of_a_run_is_whole_on_a_narrow_terminal(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    slides = [str(tmp_path / f"a folder of a long name and {number}.svs") for number in (1, 2)]
    assert main(["embed", *slides, "--model", str(model), "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err.splitlines()
    for slide in slides:
        (line,) = (
            line for line in told if line.endswith(f"  {slide}: no such file; check the path")
        )
        assert line.split()[:3] == ["failed", "0", "0"]


def test_renamed_result_of_a_name_that_is_no_utf8_is_one_line_where_it_cannot_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    make_result(folder / "a.h5").rename(folder / "odd\udcff.h5")
    make_result(folder / "b.h5")
    for to, made in (("npz", 2), ("parquet", 1), ("trident", 4)):
        fails = int(to != "npz")
        assert main(["convert", str(folder), "--to", to, "--out", str(tmp_path / to)]) == fails
        shown = capsys.readouterr()
        assert len(shown.out.splitlines()) == made
        told = "its name is not in UTF-8, which this format needs; rename the result\n"
        assert shown.err.count(told) == len(shown.err.splitlines()) == fails
    assert write_html(folder, tmp_path / "a.html") == 2
    assert r"odd\udcff.h5" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_events_of_a_name_that_is_no_utf8_are_json(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("slides", BRACKETS).rename("slides/odd\udcff.tif")
    words = ["embed", "slides", "--model", str(model), "--tissue", "none", "--log-json"]
    assert main([*words, "--out", "out"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    ended = {event["slide"]: event["state"] for event in events if event["event"] == "slide_ended"}
    assert sorted(ended.values()) == ["failed", "ok"]
    assert any(slide.endswith(r"odd\xff.tif") for slide in ended)
    assert events[-1]["event"] == "run_ended"
    assert events[-1]["counts"] == {"failed": 1, "ok": 1}
    assert Path(events[-1]["report"]).is_file()


def test_list_of_such_names_gives_them_back(folder: Path) -> None:
    slides = find_inputs(["slides"]).slides
    write_list(Path("list.csv"), slides)
    again = find_inputs(["list.csv"]).slides
    assert [each.path for each in again] == [each.path.absolute() for each in slides]
    assert [each.relative for each in again] == [each.relative for each in slides]
    # A spreadsheet's quotes, on standard input.
    listed = io.StringIO(f'slide,note\n"slides/{ODD}",one\nslides/{BRACKETS},two\n')
    assert {each.path for each in find_inputs(["-"], stdin=listed).slides} == {
        each.path for each in slides
    }


def test_plain_list_ends_a_path_at_a_line_end_alone(folder: Path) -> None:
    name = "a\x0cb\u2028c\x85d.tif"
    Path(name).touch()
    (slide,) = find_inputs(["-"], stdin=io.StringIO(f"{name}\n")).slides
    assert slide.path == Path(name)
    assert slide.problem is None


def test_records_hold_the_name_as_it_is(folder: Path, model: Path) -> None:
    words = ["embed", f"slides/{ODD}", "--model", str(model), "--tissue", "none"]
    assert main([*words, "--out", "out"]) == 0
    (path,) = Path("out", "runs").iterdir()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["slide"] for each in records if each["kind"] == "slide"] == [f"slides/{ODD}"]


LONG = "n" * 300


def test_names_that_no_file_can_have_fail_alone(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = f"slides/{BRACKETS}"
    # A name that a file can have, and its result can not.
    edge = f"{'e' * 251}.tif"
    Path(good).rename(Path(edge))
    Path(good).hardlink_to(edge)
    Path("list.csv").write_text(
        f"slide,mask\n{edge},\na\0b.tif,\n{LONG}.tif,\nslides/{LONG}/a.tif,\n"
        f"fits.tif,{LONG}.png\n{good},\n"
    )
    Path("fits.tif").hardlink_to(edge)
    run = ["list.csv", "--model", str(model), "--tissue", "none", "--out", "out"]
    assert main(["embed", *run, "--dry-run"]) == 1
    capsys.readouterr()
    assert main(["embed", *run, "--batch-size", "auto"]) == 1
    printed = capsys.readouterr()
    (path,) = printed.out.splitlines()
    assert path == f"out/tiny/{Path(good).with_suffix('.h5')}"
    failed = [line.partition(": failed, ")[2] for line in printed.err.splitlines()]
    assert sorted(filter(None, failed)) == [
        "its name is too long for any file; check the path",
        "its name is too long for any file; check the path",
        "its path holds a NUL byte; correct the list",
        "its result's name would take 254 bytes, and 212 leave room for what lies beside it; "
        "rename the slide, or list it with a column relative_path",
        f"mask {LONG}.png: no such file; correct the list",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["embed", "x.tif", "--tissue", LONG],
        ["embed", "x.tif", "--model", f"{LONG}.pt2"],
        ["embed", "x.tif", "--model", "h0", "--checkpoint", LONG],
        ["tiles", "x.tif", "--csv", LONG],
        ["report", LONG],
        ["verify", LONG],
        ["view", LONG],
        ["models", "show", LONG],
    ],
)
def test_option_that_no_file_can_have_for_a_name_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_such_a_name_is_our_error_in_python_too(tmp_path: Path) -> None:
    for name in (f"{LONG}.tif", "a\0b.tif"):
        calls: list[Callable[[Path], object]] = [Slide.open, open_result, embed_slide]
        for call in calls:
            with pytest.raises(BioptimusError, match=r"too long|no such file|no file can have"):
                call(Path(name))
        with pytest.raises(UsageError, match="no such mask"):
            require_tissue_file(name)


def _forgets_encoding(call: ast.Call) -> bool:
    given = {keyword.arg for keyword in call.keywords}
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if "encoding" in given:
        return False
    if name in ("read_text", "write_text") or "text" in given:
        return True
    if name != "open":
        return False
    mode = call.args[-1] if call.args else ast.Constant("r")
    return (
        isinstance(mode, ast.Constant) and re.fullmatch(r"[rwax]t?\+?", str(mode.value)) is not None
    )


def test_text_is_utf8_whatever_the_locale_says() -> None:
    """Else it is the locale's: in one of ASCII not even the built-in model could be loaded."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("bioptimus", "cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _forgets_encoding(node)
    ]
    assert not found


def test_bytes_that_are_no_utf8_are_printed_as_the_report_writes_them() -> None:
    name = os.fsdecode(b"caf\xe9\n.svs")
    assert one_line(name) == r"caf\xe9\n.svs"
    assert json.loads(json_line({"slide": name}))["slide"] == "caf\\xe9\n.svs"
