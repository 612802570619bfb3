"""Containers: one host name, process number and user everywhere, and much that is missing."""

import datetime
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bioptimus.batch import report
from bioptimus.batch.report import RunFile
from tests.conftest import ROOT

# As a process of a container that does not tell which boot this is.
NUMBER_ONE = """
import os, sys
from pathlib import Path
read_text = Path.read_text
def masked(path, *arguments, **options):
    if path.name != "boot_id":
        return read_text(path, *arguments, **options)
    if sys.argv[2] == "missing":
        raise FileNotFoundError(path)
    return ""
Path.read_text = masked
os.getpid = lambda: 1
from bioptimus.batch import claims
from bioptimus.inference.writers import HDF5Writer
from tests.test_writers import plan, rows_of
path = Path(sys.argv[1])
"""
WRITES = """
with HDF5Writer.open(path, plan()) as writer:
    rows_of(writer, 0, 10)
    writer.flush()
    rows_of(writer, 10, 20)
"""
COUNTS = """
with HDF5Writer.open(path, plan()) as writer:
    print(writer.resumed_rows)
"""
# In a process namespace of its own, with the /proc of the one outside.
UNSHARED = ("unshare", "--user", "--map-root-user", "--pid", "--fork")


def python(code: str, *arguments: object, before: tuple[str, ...] = ()) -> str:
    words = [*before, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("boot", ["missing", "empty"])
def test_rows_that_may_be_lost_are_not_taken_for_those_of_the_same_start(
    tmp_path: Path, boot: str
) -> None:
    path = tmp_path / "a.h5"
    python(NUMBER_ONE + WRITES, path, boot)
    assert python(NUMBER_ONE + COUNTS, path, boot) == "10\n"


def test_holder_is_not_judged_where_the_boot_is_not_told(tmp_path: Path) -> None:
    assert python(NUMBER_ONE + "print(repr(claims._machine()))", tmp_path, "empty") == "''\n"


def test_holder_is_not_judged_by_the_process_numbers_of_another_namespace() -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no namespaces here")
    code = "from bioptimus.batch import claims; print(repr(claims._machine()))"
    assert python(code) != "''\n"
    assert python(code, before=UNSHARED) == "''\n"


def test_runs_that_start_at_once_in_containers_of_one_name_have_a_report_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda _: now), UTC=datetime.UTC)
    monkeypatch.setattr(report, "datetime", clock)
    monkeypatch.setattr(platform, "node", lambda: "lab/7")  # Linux takes it
    for _ in range(2):
        RunFile(
            tmp_path, command=(), model="m", parameters={}, inputs={}, skipped=(), versions={}
        ).close()
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2
