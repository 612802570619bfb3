"""The cache forgets what nobody used for long, and never what a process uses."""

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pytest

from bioptimus.doctor import examine
from bioptimus.runtime import cache, compilation
from bioptimus.runtime.archive import inspect_archive
from bioptimus.runtime.cache import cache_folder, hold, limit_bytes, prune, size_by_kind
from bioptimus.runtime.compilation import compiled_path, find_compiled
from bioptimus.runtime.compiled import unpack
from tests.conftest import ROOT
from tests.test_archive import write_compiled
from tests.tiny_models import save_tiny

DAY_S = 86_400


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(tmp_path / "cache"))


def entry(kind: str, name: str, *, idle_days: float, size: int = 10, folder: bool = False) -> Path:
    """Something in the cache that was used so many days ago."""
    path = cache_folder(kind) / name
    if folder:
        (path / "data").mkdir(parents=True)
        (path / "data" / "weights").write_bytes(bytes(size))
    else:
        path.write_bytes(bytes(size))
    idle(path, idle_days)
    return path


def idle(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    marker = path.with_name(path.name + ".used")
    os.utime(marker if marker.exists() else path, (then, then))


def names(kind: str) -> list[str]:
    return sorted(path.name for path in cache_folder(kind).iterdir())


def test_what_nobody_used_for_ninety_days_goes() -> None:
    gone = [entry("compiled", "old.pt2", idle_days=91),
            entry("unpacked", "old", idle_days=91, folder=True),
            entry("unpacked", ".old.123-abc", idle_days=91, folder=True),
            entry("checksums", "old", idle_days=91)]  # fmt: skip
    entry("compiled", "new.pt2", idle_days=89)
    entry("models", "lite0.pt2", idle_days=900)
    assert sorted(prune()) == sorted(gone)
    kinds = ("compiled", "unpacked", "checksums", "models")
    assert [names(kind) for kind in kinds] == [["new.pt2"], [], [], ["lite0.pt2"]]


def test_a_use_counts_not_when_it_was_made() -> None:
    path = entry("unpacked", "a", idle_days=400, folder=True)
    marker = path.with_name("a.used")
    marker.touch()
    idle(path, 5)
    assert prune() == []
    idle(path, 91)
    assert prune() == [path]
    assert names("unpacked") == []


def test_above_the_limit_the_least_recently_used_go_until_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE_GB", "0.0005")
    for name, days in (("a", 30), ("b", 50), ("c", 8), ("d", 10), ("e", 1)):
        entry("compiled", name, idle_days=days, size=200_000)
    assert [path.name for path in prune()] == ["b", "a", "d"]
    assert prune() == []


def test_what_was_used_this_week_stays_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE_GB", "0")
    entry("compiled", "today", idle_days=0)
    entry("unpacked", "monday", idle_days=6.9, folder=True)
    old = entry("unpacked", "last week", idle_days=7.1, folder=True)
    assert prune() == [old]


def python(code: str, *arguments: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def process_that_holds(path: Path) -> Iterator[None]:
    code = (
        "import sys, pathlib\n"
        "from bioptimus.runtime.cache import hold\n"
        "hold(pathlib.Path(sys.argv[1])); print('holds', flush=True); sys.stdin.read()\n"
    )
    with python(code, path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield
        process.stdin.close()


def test_what_another_process_uses_stays_however_long_it_runs() -> None:
    path = entry("unpacked", "a", idle_days=0, folder=True)
    with process_that_holds(path):
        idle(path, 200)
        assert prune() == []
        assert (path / "data" / "weights").exists()
    assert prune() == [path]


def test_what_this_process_uses_stays() -> None:
    path = entry("compiled", "a.pt2", idle_days=100)
    hold(path)
    assert prune() == []
    idle(path, 100)
    assert prune() == []
    assert path.exists()


def test_a_twin_that_is_removed_while_it_is_looked_for_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect_archive(save_tiny(tmp_path / "tiny.pt2"))
    native, avx2 = (compiled_path(source, device="cpu", isa=isa) for isa in ("native", "avx2"))
    for path in (native, avx2):
        path.touch()
    idle(native, 100)

    def hold_late(path: Path) -> None:
        prune()
        hold(path)

    monkeypatch.setattr(compilation, "hold", hold_late)
    assert find_compiled(source, device="cpu") == avx2
    idle(avx2, 100)
    assert prune() == [], "it is held"


def test_holding_waits_for_another_process_that_removes_the_entry(tmp_path: Path) -> None:
    path = entry("compiled", "a.pt2", idle_days=100)
    code = (
        "import sys, pathlib\n"
        "from bioptimus.runtime import cache\n"
        "rename = pathlib.Path.rename\n"
        "def slow(path, target):\n"
        "    print('removing', flush=True); sys.stdin.read(); rename(path, target)\n"
        "pathlib.Path.rename = slow\n"
        "cache.prune()\n"
    )
    with python(code) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "removing\n"
        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(hold, path)
            done, _ = wait([holding], timeout=0.3)
            assert not done, "held what is being removed"
            process.stdin.close()
            holding.result()
    assert not path.exists()
    path.touch()  # made again
    idle(path, 100)
    assert prune() == []


def test_a_marker_that_is_removed_while_it_is_locked_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = entry("compiled", "a.pt2", idle_days=0)
    path.with_name("a.pt2.used").touch()
    idle(path, 100)
    lock, calls = fcntl.flock, []

    def removed_before(descriptor: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            assert prune() == [path]
            path.touch()  # made again
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    hold(path)
    monkeypatch.undo()
    idle(path, 100)
    assert prune() == []


def test_what_was_used_while_the_cache_was_looked_through_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = entry("unpacked", "a", idle_days=100, folder=True)
    look = cache._entries

    def slowly() -> list[cache._Entry]:
        found = look()
        with process_that_holds(path):
            pass
        return found

    monkeypatch.setattr(cache, "_entries", slowly)
    assert prune() == []
    assert path.exists()


def test_unpacking_a_model_removes_old_ones_and_keeps_itself(tmp_path: Path) -> None:
    old = entry("unpacked", "old", idle_days=100, folder=True)
    folder = unpack(inspect_archive(write_compiled(tmp_path / "c.pt2")))
    assert folder.is_dir()
    assert not old.exists()
    idle(folder, 100)
    assert prune() == []


def test_another_folder_than_the_one_asked_for_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for kind in ("models", "checksums", "checksums"):
        assert cache_folder(kind).parent.parent == tmp_path
    (said,) = caplog.messages
    assert said.startswith(f"cache folder {tmp_path / 'file' / 'cache'}: Not a directory; using ")


@pytest.mark.parametrize("text", ["a lot", "-1", "nan"])
def test_a_limit_that_is_none_is_said_and_not_used(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE_GB", text)
    assert limit_bytes() == 20e9
    assert f"BIOPTIMUS_CACHE_GB={text}" in caplog.text


def test_the_doctor_says_where_the_cache_is_how_large_and_what_it_is_pruned_to(
    tmp_path: Path,
) -> None:
    entry("unpacked", "a", idle_days=0, size=3_400_000, folder=True)
    entry("compiled", "b", idle_days=0, size=1_600_000)
    assert size_by_kind() == {"compiled": 1_600_000, "unpacked": 3_400_000}
    (said,) = [
        finding.fact
        for finding in examine(out=tmp_path, with_model=False)
        if finding.name == "cache folder"
    ]
    assert said == (
        f"{tmp_path / 'cache'}, writable, 5 MB (compiled 2 MB, unpacked 3 MB); pruned above 20 GB"
    )
