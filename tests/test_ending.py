"""A command that is ended while it writes leaves what was there, whole, and nothing of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bioptimus.convert import convert
from bioptimus.inference.disk import remove_abandoned, temporary_beside
from bioptimus.report_html import write_html
from tests.conftest import EXAMPLE_SLIDE, ROOT
from tests.result_files import make_result
from tests.test_report_html import write_run

# The command line; as the file named first gets its name, the process gets the signal. What it
# wrote is all there then, under another name.
ENDED = """
import os, signal, sys
name, number = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]

def ends(event, arguments):
    global name
    if event == "os.rename" and os.path.basename(arguments[1]) == name:
        name = None
        os.kill(os.getpid(), number)

sys.addaudithook(ends)
from cli.__main__ import run
run()
"""

NETWORK = "import torch\ndef build(): return torch.nn.Flatten()\n"


def ended(folder: Path, name: str, words: Sequence[str], number: int) -> int:
    """Run a command that is ended as it writes a file; its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", ENDED, name, str(number), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def contents(folder: Path) -> dict[str, bytes]:
    """Path below a folder → what is in the file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder: a result with the report of its run, and a network."""
    make_result(tmp_path / "results" / "a.h5")
    write_run(tmp_path / "results", "1", [], [])
    (tmp_path / "network.py").write_text(NETWORK)
    return tmp_path


VIEW = ["view", "results/a.h5", "--no-slide", "--out", "out"]
EXPORT = ["models", "export", "network:build", "-o", "out/m.pt2", "--tile-px", "8"]
EXPORT += ["--mpp", "0.5", "--mean", "0,0,0", "--std", "1,1,1"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.overview.png", [*VIEW, "--overview"]),
        ("page.html", ["report", "results", "--html", "out/page.html"]),
        ("a.npz", ["convert", "results", "--to", "npz", "--out", "out", "--overwrite"]),
        ("m.pt2", EXPORT),
        ("tiles.csv", ["tiles", str(EXAMPLE_SLIDE), "--csv", "out/tiles.csv", "--no-overview"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_old_file_stays_and_nothing_is_left(folder: Path, name: str, words: list[str]) -> None:
    (folder / "out").mkdir()
    (folder / "out" / name).write_bytes(b"result of an earlier run")
    words = [*words, "--overwrite"] if words[0] in ("view", "models") else words
    before = contents(folder / "out")
    assert ended(folder, name, words, signal.SIGTERM) == 143
    after = contents(folder / "out")
    after.pop(".bioptimus-convert.jsonl", None)
    assert after == before
    assert [path.name for path in (folder / "out").iterdir() if path.is_dir()] == []


def test_of_a_closed_terminal_it_ends_in_the_same_way(folder: Path) -> None:
    assert ended(folder, "a.overview.png", [*VIEW, "--overview"], signal.SIGHUP) == 129
    assert contents(folder / "out") == {}


def test_one_signal_told_twice_as_by_timeout_does_not_end_the_cleaning_up() -> None:
    code = (
        "import signal; from cli.ending import end_on_signals\n"
        "end_on_signals()\n"
        "try: signal.raise_signal(signal.SIGTERM)\n"
        "finally: signal.raise_signal(signal.SIGTERM); print('cleaned up')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleaned up\n", "")


def test_the_old_folder_is_back_in_its_place(folder: Path) -> None:
    pytest.importorskip("zarr")
    words = ["convert", "results", "--to", "zarr", "--out", "out", "--overwrite"]
    list(convert([folder / "results"], folder / "out", to="zarr"))
    before = contents(folder / "out" / "a.zarr")
    assert ended(folder, "a.zarr", words, signal.SIGTERM) == 143
    assert contents(folder / "out" / "a.zarr") == before
    assert {path.name for path in (folder / "out").iterdir()} == {
        "a.zarr",
        ".bioptimus-convert.jsonl",
    }


def _convert(folder: Path) -> None:
    list(convert([folder / "results"], folder / "out", to="npz"))


def _report(folder: Path) -> None:
    write_html(folder / "results", folder / "out" / "page.html", pictures=False)


@pytest.mark.parametrize(("name", "run"), [("a.npz", _convert), ("page.html", _report)])
def test_what_a_killed_process_left_goes_once_it_is_old(
    folder: Path, name: str, run: Callable[[Path], None]
) -> None:
    (folder / "out").mkdir()
    old, young, other = (
        temporary_beside(folder / "out" / each) for each in (name, name, "other.npz")
    )
    for path in (old, young, other):
        path.mkdir()
        (path / "model.pt2").write_bytes(b"half")
    long_ago = time.time() - 90_000
    for path in (old, other):
        os.utime(path / "model.pt2", (long_ago, long_ago))
        os.utime(path, (long_ago, long_ago))
    run(folder)
    left = {path.name for path in (folder / "out").iterdir()}
    assert left - {".bioptimus-convert.jsonl"} == {name, young.name, other.name}


def test_what_is_written_to_is_not_taken_for_abandoned(tmp_path: Path) -> None:
    target = tmp_path / "m.pt2"
    at_work = temporary_beside(target)
    at_work.mkdir()
    (at_work / "model.pt2").write_bytes(b"half")
    os.utime(at_work, (0, 0))
    remove_abandoned([target, tmp_path / "gone" / "m.pt2"])
    assert at_work.exists()
    os.utime(at_work / "model.pt2", (0, 0))
    remove_abandoned([target])
    assert not at_work.exists()
