"""Standard streams that are closed, or go to a full disk, cost nobody a run."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import EXAMPLE_SLIDE

FULL = Path("/dev/full")  # each write fails as on a full disk
# Coarse tiles: a run is little more than its start.
COARSE = ("--tile-mpp", "2", "--min-tissue", "0")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's alone")


def _bioptimus(*words: object, streams: str) -> subprocess.CompletedProcess[str]:
    """The command line under a shell's redirections."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_run_whose_standard_streams_are_closed_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = _bioptimus("embed", EXAMPLE_SLIDE, *COARSE, "--out", out, streams="<&- >&- 2>&-")
    assert done.returncode == 0
    assert (out / "lite0" / f"{EXAMPLE_SLIDE.stem}.h5").is_file()


@needs_full
def test_run_goes_on_where_paths_cannot_be_told_and_says_so_at_its_end(tmp_path: Path) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    for name in ("a.svs", "b.svs"):
        (slides / name).write_bytes(EXAMPLE_SLIDE.read_bytes())
    out = tmp_path / "out"
    done = _bioptimus("embed", slides, *COARSE, "--out", out, streams=f"> {FULL}")
    assert done.returncode == 1
    assert sorted(path.name for path in (out / "lite0").iterdir()) == ["a.h5", "b.h5"]
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: standard output: {os.strerror(errno.ENOSPC)}")
    assert "Traceback" not in done.stderr


@needs_full
def test_run_goes_on_where_its_lines_cannot_be_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = _bioptimus("embed", EXAMPLE_SLIDE, *COARSE, "--out", out, streams=f"2> {FULL}")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [str(out / "lite0" / f"{EXAMPLE_SLIDE.stem}.h5")]


@needs_full
def test_full_disk_under_the_output_of_a_command_is_one_line() -> None:
    done = _bioptimus("info", EXAMPLE_SLIDE, streams=f"> {FULL}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: standard output: {os.strerror(errno.ENOSPC)}")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_a_full_disk_takes_a_part_of_is_told(unbuffered: str, tmp_path: Path) -> None:
    """Python without buffers, as containers have it, drops the rest without a word."""
    told = tmp_path / "models.json"
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 8; exec "$@" > "$0"', told, sys.executable, "-m", "cli", "models",
         "list", "--json"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert told.stat().st_size in (4096, 8192)  # a shell's block has 512 or 1,024 bytes
    assert done.returncode == 1
    assert done.stderr == "error: standard output: File too large; send it elsewhere\n"


def test_a_reader_that_has_seen_enough_of_a_table_ends_it_in_silence() -> None:
    words = ["tiles", str(EXAMPLE_SLIDE), "--no-overview", "--csv", "-", "--tile-size-px", "32"]
    with subprocess.Popen(
        [sys.executable, "-m", "cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("slide,index,")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
