"""Containers: one host name, process number and user everywhere, and much that is missing."""

import datetime
import errno
import multiprocessing.heap
import os
import platform
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from bioptimus.batch import claims, report
from bioptimus.batch.claims import claim_path
from bioptimus.batch.quiet import SilentListener, Stop
from bioptimus.batch.report import RunFile, is_left_to_another_job
from bioptimus.batch.run import RunConfig, run
from bioptimus.errors import CheckpointError, NoCheckpointError
from bioptimus.jobs import SlideJob
from bioptimus.runtime import cache, machine
from bioptimus.runtime.loader import resolve_model
from cli.main import main
from tests.conftest import ROOT
from tests.slides import tissue, write_pyramid
from tests.test_batch_claims import age, foreign_claim

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


def group(root: Path, place: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.")).write_text(text)


def test_threads_are_for_the_time_that_control_groups_grant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert machine._core_quota(tmp_path) == 64
    own = tmp_path / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text("0::/\n")  # as in a container
    group(tmp_path, "", cpu_max="max 100000\n")
    assert machine._core_quota(tmp_path) == 64
    group(tmp_path, "", cpu_max="150000 100000\n")
    assert machine._core_quota(tmp_path) == 1.5
    group(tmp_path, "", cpu_max="max 100000\n")
    own.write_text("0::/slurm/job_7/step_0\n")  # the group above has the limit
    group(tmp_path, "slurm/job_7", cpu_max="400000 100000\n")
    assert machine._core_quota(tmp_path) == 4
    own.write_text("0::/\n3:cpuset:/\n2:cpu,cpuacct:/docker/ab12\n")  # version 1, under its name
    group(tmp_path, "cpu", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert machine._core_quota(tmp_path) == 64
    group(tmp_path, "cpu", cpu_cfs_quota_us="250000\n", cpu_cfs_period_us="100000\n")
    assert machine._core_quota(tmp_path) == 2.5


@pytest.mark.parametrize(("quota", "cores"), [(0.2, 1), (2.5, 3), (64.0, 8)])
def test_a_part_of_a_core_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, quota: float, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "_core_quota", lambda _: quota)
    assert machine.available_cores() == cores


def test_user_that_is_only_a_number_needs_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "BIOPTIMUS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert cache._wanted_root() == Path("/.cache/bioptimus")
    monkeypatch.chdir(tmp_path)
    for model in ("~/m.pt2", "~no-such-user/m.pt2"):
        with pytest.raises(NoCheckpointError, match=r"~.*/m\.pt2: no such file"):
            resolve_model(model, None)


def test_container_without_a_folder_to_write_tells_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(tmp_path / "file" / "cache"))
    # As tempfile does where all that it knows is read-only.
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=none))
    with pytest.raises(CheckpointError, match=r"No usable .*; set BIOPTIMUS_CACHE"):
        cache.cache_folder("models")


def refuse_threads(monkeypatch: pytest.MonkeyPatch, *names: str, after: int = 0) -> None:
    """As where the limit of processes is reached; root has none."""
    start = threading.Thread.start
    left = dict.fromkeys(names, after)

    def start_or_not(thread: threading.Thread) -> None:
        for name in names:
            if thread.name.startswith(name):
                left[name] -= 1
                if left[name] < 0:
                    raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)


@pytest.mark.parametrize("name", ["claims", "prepare-", "forward-", "slides"])
def test_thread_that_cannot_be_started_is_told_in_one_line(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    slide = write_pyramid(tmp_path / "a.tif", tissue(256, 256), mpp=0.5, factors=(1,))
    words = ["embed", str(slide), "--model", str(model), "--tissue", "none"]
    refuse_threads(monkeypatch, name)
    assert main([*words, "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "no further thread can be started: the user's limit of processes (ulimit -u)" in told
    assert "unexpected" not in told
    assert not list((tmp_path / "out").rglob("*.claim"))


def test_run_goes_on_with_the_threads_that_could_be_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = write_pyramid(tmp_path / "a.tif", tissue(2048, 2048), mpp=0.5, factors=(1, 4))
    words = ["embed", str(slide), "--model", str(model), "--tissue", "none", "--batch-size", "1"]
    refuse_threads(monkeypatch, "prepare-", "forward-", after=1)
    assert main([*words, "--out", str(tmp_path / "out")]) == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="names are UTF-8 in every locale there")
def test_slide_has_the_same_name_in_every_locale(tmp_path: Path) -> None:
    slide = write_pyramid(tmp_path / "ä.tif", tissue(256, 256), mpp=0.5, factors=(1,))
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "cli", "embed", str(slide), "--tissue", "none", "--dry-run"]
    done = subprocess.run(
        words, capture_output=True, check=False, cwd=ROOT, env={**os.environ, **locale}
    )
    assert "ä.tif: new, " in (done.stdout + done.stderr).decode()
    assert done.returncode == 0


class _Watching(SilentListener):
    """Leaves another process's claim on a slide at its turn; acts once the run waits for it."""

    def __init__(self, act: Callable[[Path], object], *, heartbeat_s: float, **holder: str) -> None:
        self.act, self.holder = act, {"heartbeat_s": heartbeat_s, **holder}
        self.waited, self.ahead_s = 0, 0.0

    def slide_started(self, job: SlideJob) -> None:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        age(foreign_claim(job.output, **self.holder), -self.ahead_s)

    def note(self, job: SlideJob, message: str) -> None:
        self.waited += "sign of life" in message
        self.act(claim_path(job.output))


@pytest.mark.parametrize(
    "event",
    ["dies", "died before the clock went back", "lives", "gives it free", "is waited for in vain"],
)
def test_slide_of_another_job_is_left_to_it_only_if_that_one_is_alive(
    model: Path, tmp_path: Path, event: str
) -> None:
    slide = write_pyramid(tmp_path / "a.tif", tissue(256, 256), mpp=0.5, factors=(1,))
    stop = Stop()
    acts: dict[str, Callable[[Path], object]] = {
        "dies": lambda _: None,  # as where its container is started again at once
        "died before the clock went back": lambda _: None,
        "lives": os.utime,
        "gives it free": Path.unlink,
        "is waited for in vain": lambda _: setattr(stop, "stopped", True),
    }
    watching = _Watching(
        acts[event], heartbeat_s=0.2 if "die" in event else 30.0, host=socket.gethostname()
    )
    watching.ahead_s = 1e6 if "clock" in event else 0
    config = RunConfig(inputs=(str(slide),), out=tmp_path / "out", model=str(model))
    (outcome,) = run(config, listener=watching, stop=stop).reports
    assert watching.waited == 1
    left = event in ("lives", "is waited for in vain")
    assert (outcome.state == "skipped") == left
    assert is_left_to_another_job(outcome.state, outcome.output) == left


@pytest.mark.parametrize(("job", "waits"), [("4711_3", True), ("4711_4", False)])
def test_of_jobs_on_other_machines_a_run_waits_for_its_own_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, waits: bool
) -> None:
    slide = write_pyramid(tmp_path / "a.tif", tissue(256, 256), mpp=0.5, factors=(1,))
    monkeypatch.setattr(claims, "job_id", lambda: job)
    watching = _Watching(Path.unlink, heartbeat_s=30.0, host="elsewhere", job="4711_3")
    config = RunConfig(inputs=(str(slide),), out=tmp_path / "out", model=str(model))
    (outcome,) = run(config, listener=watching).reports
    assert (watching.waited, outcome.state != "skipped") == (waits, waits)


def under_limit(kind: str, files: int, out: Path) -> subprocess.CompletedProcess[str]:
    """Embed the example in a shell with a limit of open files, of one kind or of both."""
    command = [sys.executable, "-m", "cli", "embed", "examples/CMU-1-Small-Region.svs"]
    return subprocess.run(
        ["sh", "-c", f'ulimit {kind}n {files}; exec "$@"', "", *command, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_files_open_at_a_time_are_as_many_as_may_be(tmp_path: Path) -> None:
    assert under_limit("-S", 8, tmp_path / "soft").returncode == 0
    refused = under_limit("-", 8, tmp_path / "hard")
    assert refused.returncode == 1
    assert "too many files are open: the limit of one process (ulimit -n)" in refused.stderr
    assert "unexpected" not in refused.stderr


def test_several_devices_need_no_shared_memory_of_pythons(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = write_pyramid(tmp_path / "a.tif", tissue(256, 256), mpp=0.5, factors=(1,))
    read_only = OSError(errno.EROFS, "Read-only file system", "/dev/shm/pym-1")
    monkeypatch.setattr(multiprocessing.heap, "Arena", Mock(side_effect=read_only))
    words = ["embed", str(slide), "--model", str(model), "--tissue", "none", "--device", "cpu,cpu"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
