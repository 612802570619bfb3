"""Runs over folders: killed, stopped, shared by processes; nothing lost, nothing twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bioptimus.batch import run as batch_run
from bioptimus.batch.claims import Claim, claim_path
from bioptimus.batch.quiet import SilentListener
from bioptimus.batch.report import read_runs
from bioptimus.batch.run import RunConfig, run
from bioptimus.batch.stage import Stager
from bioptimus.jobs import SlideJob, SlideOptions
from bioptimus.planning import PlanOptions
from bioptimus.runtime import batch_size
from bioptimus.runtime.loader import ModelChoice, load_model
from bioptimus.runtime.server_model import BaseServerModel
from cli.main import main
from tests.conftest import ROOT
from tests.result_files import damage
from tests.slides import tissue, write_pyramid

Captured = pytest.CaptureFixture[str]
SLIDES = 6
TILES = 256


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six slides of 1024 x 1024 px at 0.5 µm/px, each turned another way."""
    folder = tmp_path_factory.mktemp("slides")
    for number in range(SLIDES):
        pixels = np.roll(tissue(1024, 1024), number * 100, axis=number % 2)
        write_pyramid(folder / f"slide {number}.tif", pixels, mpp=0.5, factors=(1, 4))
    return folder


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "cli", *map(str, words)]


def bioptimus(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, check=False, timeout=110)


def here(*words: str | Path) -> int:
    """As `bioptimus`, where no process is looked at: one takes seconds to load a ``.pt2``."""
    return main([*map(str, words)])


def records(out: Path, kind: str = "slide") -> Iterator[dict[str, Any]]:
    for path in sorted((out / "runs").glob("*.json")):
        for line in path.read_text().splitlines():
            record: dict[str, Any] = json.loads(line)
            if record["kind"] == kind:
                yield record


@pytest.fixture(scope="module")
def undisturbed(slides: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    assert here("embed", slides, "--model", model, "--tissue", "none", "--out", out) == 0
    return out


def assert_same_files(out: Path, reference: Path) -> None:
    names = sorted(path.relative_to(reference) for path in reference.rglob("*.h5"))
    assert sorted(path.relative_to(out) for path in out.rglob("*.h5")) == names
    for name in names:
        with h5py.File(out / name) as file, h5py.File(reference / name) as other:
            assert set(file) == set(other)
            for dataset in file:
                assert file[dataset].dtype == other[dataset].dtype
                assert file[dataset][()].tobytes() == other[dataset][()].tobytes(), dataset


def leftovers(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.suffix in (".part", ".claim")]


@pytest.mark.skipif(sys.platform == "darwin", reason="the file system takes only UTF-8")
def test_name_that_is_not_utf8_fails_that_slide_alone_in_one_line(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    folder = os.fsencode(tmp_path / "odd")
    os.mkdir(folder)
    shutil.copy(os.fsencode(slides / "slide 0.tif"), folder + b"/a_\xff.tif")
    shutil.copy(os.fsencode(slides / "slide 1.tif"), folder + b"/b.tif")
    Path(os.fsdecode(folder + b"/notes_\xfe.txt")).write_text("no slide")
    out = tmp_path / "out"
    done = bioptimus("embed", tmp_path / "odd", "--model", model, "--tissue", "none", "--out", out)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [f"{out}/tiny/b.h5"]
    assert "not in UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
    assert Counter(each["state"] for each in records(out)) == {"ok": 1, "failed": 1}
    told = bioptimus("report", out)
    assert told.returncode == 1
    assert "1 failed" in told.stdout + told.stderr


def test_the_report_tells_what_the_model_did(undisturbed: Path) -> None:
    (said,) = records(undisturbed, "model")
    slides = list(records(undisturbed))
    assert said["name"] == "tiny"
    assert said["device"] == "cpu"
    assert said["load_seconds"] > 0
    assert said["tiles"] == sum(each["tiles_done"] for each in slides)
    assert 0 < said["passes"] <= sum(each["batches"] for each in slides)
    share = said["tiles"] / (said["passes"] * said["batch_size"])
    assert said["fill_share"] == pytest.approx(share, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fifty_kills_at_random_moments_lose_nothing(
    slides: Path, model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.killed_runs", slides, model, tmp_path, "50"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills, folders = map(int, done.stdout.split())
    assert kills == 50
    for folder in range(folders):
        assert_same_files(tmp_path / str(folder), undisturbed)
        assert leftovers(tmp_path / str(folder)) == []


@pytest.fixture(scope="module")
def overlapping(slides: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed with four times the tiles, so that a signal surely comes before the end."""
    out = tmp_path_factory.mktemp("overlapping")
    assert here(*_overlapping_words(slides, model), "--out", out) == 0
    return out


def _overlapping_words(slides: Path, model: Path) -> tuple[str | Path, ...]:
    return ("embed", slides, "--model", model, "--tissue", "none", "--overlap-px", "32")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_keeps_what_was_computed_and_exits_with_its_code(
    slides: Path, model: Path, overlapping: Path, tmp_path: Path, number: int, code: int
) -> None:
    words = (*_overlapping_words(slides, model), "--out", tmp_path)
    running = subprocess.Popen(
        command(*words, "--log-json", "--workers", "1"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if json.loads(line)["event"] == "slide_planned":
            running.send_signal(number)
            break
    _, rest = running.communicate(timeout=30)
    assert running.returncode == code, rest
    assert "Traceback" not in rest
    assert not list(tmp_path.rglob("*.claim"))
    states = Counter(record["state"] for record in records(tmp_path))
    assert states["stopped"] >= SLIDES - 2
    assert states["failed"] == 0
    assert here(*words) == 0
    assert_same_files(tmp_path, overlapping)


TELLS_OF_FORKS = """
import os, sys
if "multiprocessing" not in " ".join(sys.orig_argv):
    os.register_at_fork(before=lambda: os.mkdir(os.environ["FORKED"]))
"""


def test_two_devices_share_the_slides_and_make_each_once(
    slides: Path, model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Also FIELD 66: a process with threads is not forked, for the fork may hang for ever."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TELLS_OF_FORKS)
    forked = tmp_path / "forked"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]),
        "FORKED": str(forked),
    }
    # Relative, as people type it, while the processes are given absolute paths.
    words = ("embed", slides.name, "--model", model, "--tissue", "none", "--out", tmp_path)
    done = subprocess.run(
        command(*words, "--device", "cpu,cpu"),
        capture_output=True,
        text=True,
        check=False,
        cwd=slides.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    made = Counter(each["slide"] for each in records(tmp_path) if each["state"] == "ok")
    assert sorted(made.values()) == [1] * SLIDES
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2
    assert f"[{SLIDES}/{SLIDES}]" in done.stderr
    assert f"{SLIDES} ok;" in done.stderr
    assert not forked.exists()
    subprocess.run([sys.executable, "-c", "import os; os.fork()"], env=environment, check=True)
    assert forked.exists(), "a fork would have been noticed"
    assert_same_files(tmp_path, undisturbed)


def test_slide_that_failed_on_one_device_is_not_tried_on_another(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    good, bad = slides / "slide 0.tif", tmp_path / "bad.svs"
    bad.write_bytes(b"no slide")
    config = RunConfig(
        inputs=(str(bad), str(good)),
        out=tmp_path / "out",
        model=str(model),
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    failed = bytearray(2)
    for states in (["failed", "ok"], ["skipped", "skipped"]):
        reports = run(config, failed=failed).reports
        assert [report.state for report in reports] == states
    assert read_runs(tmp_path / "out").slides[str(bad)]["state"] == "failed"


def test_two_devices_fail_each_bad_slide_once(model: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "slides", tmp_path / "out"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.svs").write_bytes(b"no slide")
    done = bioptimus("embed", folder, "--model", model, "--out", out, "--device", "cpu,cpu")
    assert done.returncode == 1, done.stderr
    assert "12 failed" in done.stderr
    failed = Counter(each["slide"] for each in records(out) if each["state"] == "failed")
    assert sorted(failed.values()) == [1] * 12


def test_signal_stops_the_processes_of_all_devices_and_each_slide_is_told_once(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    words = ("embed", slides, "--model", model, "--tissue", "none", "--out", tmp_path)
    running = subprocess.Popen(
        command(*words, "--device", "cpu,cpu", "--log-json", "--workers", "1"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    ended: list[str] = []
    told = False
    with running:
        assert running.stderr is not None
        for line in running.stderr:
            event = json.loads(line)
            if event["event"] == "slide_planned" and not told:
                told = True
                running.send_signal(signal.SIGTERM)
            if event["event"] == "slide_ended":
                ended.append(event["slide"])
    assert running.returncode == 143
    assert sorted(ended) == sorted(str(path) for path in slides.iterdir())
    assert not list(tmp_path.rglob("*.claim"))


class Interrupting(SilentListener):
    """Interrupts the main thread, as a notebook's stop button does, once tiles are done."""

    def __init__(self) -> None:
        self._told = threading.Event()

    def tiles_done(self, job: SlideJob, count: int) -> None:
        if not self._told.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            assert self._told.wait(10)

    def hear(self, *_: object) -> None:
        self._told.set()
        raise KeyboardInterrupt


def test_ctrl_c_that_is_no_stop_signal_ends_the_workers_and_keeps_their_work(
    slides: Path, model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config = RunConfig(
        inputs=(str(slides),),
        out=tmp_path,
        model=str(model),
        batch_size=8,
        workers=1,
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    listener = Interrupting()
    before, threads = signal.signal(signal.SIGINT, listener.hear), set(threading.enumerate())
    try:
        with pytest.raises(KeyboardInterrupt):
            run(config, listener=listener)
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(threading.enumerate()) <= threads
    assert [each["state"] for each in records(tmp_path)] == ["stopped"] * SLIDES
    assert [path.suffix for path in leftovers(tmp_path)] == [".part"]
    first, *_ = run(config).reports
    assert 0 < first.tiles_resumed < TILES
    assert_same_files(tmp_path, undisturbed)


IS_KILLED_WHILE_IT_REPORTS = """
import os, signal, sys
from multiprocessing import connection
sent, send = 0, connection.Connection._send
def half(self, data, *more):
    global sent
    sent += 1
    if sent == int(os.environ["NUMBER"]):
        try:
            os.mkdir(os.environ["ONCE"])
        except FileExistsError:
            pass
        else:
            os.write(self.fileno(), bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
    return send(self, data, *more)
if "multiprocessing.spawn" in " ".join(sys.orig_argv):
    connection.Connection._send = half
"""


@pytest.mark.parametrize("number", [1, 9])
def test_a_process_killed_while_it_reports_neither_stops_the_others_nor_the_run(
    slides: Path, model: Path, tmp_path: Path, number: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IS_KILLED_WHILE_IT_REPORTS)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = ("embed", slides, "--model", model, "--tissue", "none", "--out", tmp_path / "out")
    done = subprocess.run(
        command(*words, "--device", "cpu,cpu", "--workers", "1"),
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "ONCE": str(tmp_path / "once"),
            "NUMBER": str(number),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (tmp_path / "once").exists()
    made = len(list((tmp_path / "out").rglob("*.h5")))
    assert made >= SLIDES - 1
    assert done.returncode == (0 if made == SLIDES else 1), done.stderr
    assert f"{made} ok" in done.stderr
    if made < SLIDES:
        assert "ended with exit code -9; run the same command again" in done.stderr


INTERRUPTS_A_STARTING_CHILD = """
import os, signal, sys
if "multiprocessing.spawn" in " ".join(sys.orig_argv):
    try:
        os.mkdir(os.environ["ONCE"])
    except FileExistsError:
        pass
    else:
        os.killpg(0, signal.SIGINT)
"""


def test_ctrl_c_while_the_processes_of_devices_start_stops_them_without_a_traceback(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS_A_STARTING_CHILD)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command(
            "embed", slides, "--model", model, "--out", tmp_path / "out", "--device", "cpu,cpu"
        ),
        env={**os.environ, "PYTHONPATH": paths, "ONCE": str(tmp_path / "once")},
        # The terminal's process group, as it were: the parent, and each child until it leaves.
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (tmp_path / "once").exists()
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert f"{SLIDES} stopped" in done.stderr


def test_slides_that_are_done_are_not_staged_again(
    slides: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    copy_file = Stager._copy_file

    def noted(stager: Stager, source: Path, target: Path) -> bool:
        copied.append(source.name)
        return copy_file(stager, source, target)

    monkeypatch.setattr(Stager, "_copy_file", noted)
    config = RunConfig(
        inputs=(str(slides),),
        out=tmp_path / "out",
        model=str(model),
        stage=tmp_path / "local",
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    made = run(config).reports
    Path(made[2].output).unlink()
    first, copied[:] = sorted(copied), []
    again = run(config).reports
    assert [report.state for report in again] == ["skipped"] * 2 + ["ok"] + ["skipped"] * 3
    assert first == sorted(path.name for path in slides.iterdir())
    assert copied == ["slide 2.tif"]


TELLS_OF_COPIES = """
import os, sys
def tell(event, arguments):
    if event == "open" and arguments[1] in ("x", "xb"):
        path = os.path.basename(arguments[0])
        log = os.open(os.environ["COPIED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, (path + "\\n").encode())
        os.close(log)
sys.addaudithook(tell)
"""


def test_devices_copy_each_slide_once_and_leave_no_claim(
    slides: Path, model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELLS_OF_COPIES)
    copied, out = tmp_path / "copied", tmp_path / "out"
    done = subprocess.run(
        command(
            *("embed", slides, "--model", model, "--tissue", "none", "--out", out),
            *("--device", "cpu,cpu", "--stage", tmp_path / "local"),
        ),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "COPIED": str(copied),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(copied.read_text().splitlines()) == sorted(path.name for path in slides.iterdir())
    assert not list(tmp_path.rglob("*.claim"))
    assert_same_files(out, undisturbed)


def test_report_of_several_devices_tells_what_was_left_out(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    one, out = sorted(slides.iterdir())[0], tmp_path / "out"
    words = ("embed", one, one, "--model", model, "--tissue", "none", "--out", out)
    assert bioptimus(*words, "--device", "cpu,cpu").returncode == 0
    assert read_runs(out).skipped == {str(one): "given twice"}


def test_slides_claimed_ahead_are_given_back_when_the_run_is_stopped(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    class Stop(SilentListener):
        stopped = False

        def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
            deadline = time.monotonic() + 30
            while len(list(tmp_path.rglob("*.claim"))) < 3:  # the folder's, this slide's, the next
                assert time.monotonic() < deadline
                time.sleep(0.005)
            self.stopped = True

    stop = Stop()
    config = RunConfig(
        inputs=(str(slides),),
        out=tmp_path / "out",
        model=str(model),
        workers=1,
        stage=tmp_path / "local",
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    reports = run(config, listener=stop, stop=stop).reports
    assert {report.state for report in reports} == {"stopped"}
    assert not list(tmp_path.rglob("*.claim"))


def test_slides_too_large_to_stage_are_left_to_other_processes(
    slides: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, claimed = threading.Event(), []
    go_through = Stager._run

    def tell(*arguments: Any) -> None:
        go_through(*arguments)
        passed.set()

    monkeypatch.setattr(Stager, "_run", tell)

    class Look(SilentListener):
        def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
            assert passed.wait(30)
            claimed.append(len(list((tmp_path / "out").rglob("*.claim"))))

    config = RunConfig(
        inputs=(str(slides),),
        out=tmp_path / "out",
        model=str(model),
        workers=1,
        stage=tmp_path / "local",
        stage_gb=1e-6,
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    reports = run(config, listener=Look()).reports
    assert {report.state for report in reports} == {"ok"}
    assert claimed == [1] * len(reports)


def test_no_batch_size_is_looked_for_where_nothing_is_to_be_computed(
    slides: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []

    def find(*_: object, passes: int) -> batch_size.BatchSize:
        searches.append(passes)
        return batch_size.BatchSize(tiles=5, tiles_per_second=1, reason="")

    monkeypatch.setattr(batch_size, "find_batch_size", find)
    config = RunConfig(
        inputs=(str(slides / "slide 0.tif"),),
        out=tmp_path / "out",
        model=str(model),
        batch_size="auto",
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    for state in ("ok", "skipped"):
        (report,) = run(config).reports
        assert (report.state, len(searches)) == (state, 1)
    # Whether there is anything to replace, only the slide itself tells.
    again = replace(config, slide=replace(config.slide, overwrite=True))
    (report,) = run(again).reports
    assert (report.state, len(searches)) == ("skipped", 1)
    output = Path(report.output)
    damage(output, "features")
    (report,) = run(again).reports
    assert (report.state, len(searches), report.batch_size) == ("ok", 2, 5)
    output.unlink()
    (report,) = run(config).reports
    assert (report.state, len(searches), report.batch_size) == ("ok", 3, 5)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eight_processes_make_each_of_forty_slides_once(model: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "slides", tmp_path / "out"
    folder.mkdir()
    first = write_pyramid(folder / "0.tif", tissue(256, 256), mpp=0.5, factors=(1,))
    for number in range(1, 40):
        (folder / f"{number}.tif").write_bytes(first.read_bytes())
    # One is killed while the others work: what it held is taken over by a rerun.
    done = subprocess.run(
        [sys.executable, "-m", "tests.shared_run", folder, model, out, "8"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert here("embed", folder, "--model", model, "--tissue", "none", "--out", out) == 0
    made = Counter(each["slide"] for each in records(out) if each["state"] == "ok")
    assert len(made) == 40
    assert set(made.values()) == {1}
    assert leftovers(out) == []


def test_shards_divide_the_slides_and_the_report_sums_them_up(
    slides: Path, model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    words = ("embed", slides, "--model", model, "--tissue", "none", "--out", tmp_path)
    for shard in ("1/2", "2/2"):
        assert here(*words, "--shard", shard) == 0
    per_run = [len(each["slides"]) for each in records(tmp_path, "inputs")]
    assert per_run == [SLIDES / 2] * 2
    assert_same_files(tmp_path, undisturbed)
    report = bioptimus("report", tmp_path)
    assert report.returncode == 0, report.stdout
    assert f"2 runs: {SLIDES} ok; {SLIDES * TILES} tiles" in report.stdout


def test_report_lists_what_no_run_accounted_for(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    run = next((tmp_path / "runs").glob("*.json"))
    lines = run.read_text().splitlines(keepends=True)
    # Killed while it wrote its third slide's line.
    run.write_text("".join(lines[:4]) + lines[4][:40])
    summary = read_runs(tmp_path)
    assert len(summary.slides) == 2
    assert len(summary.missing) == SLIDES - 2
    done = bioptimus("report", tmp_path)
    assert done.returncode == 1
    assert f"2 ok, {SLIDES - 2} missing" in done.stdout


def test_fail_fast_stops_at_the_first_failure_and_accounts_for_the_rest(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    words = ("embed", tmp_path / "missing.tif", slides, "--model", model, "--fail-fast")
    assert here(*words, "--workers", "1", "--out", tmp_path / "out") == 1
    states = Counter(each["state"] for each in records(tmp_path / "out"))
    assert states == {"failed": 1, "stopped": SLIDES}


def test_a_lost_device_ends_the_run_and_a_rerun_goes_on(
    slides: Path, model: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0

    def load_to_break(choice: ModelChoice, device: str) -> BaseServerModel:
        loaded = load_model(choice, device)
        compute = vars(loaded)["_runner"].compute

        def compute_or_fail(inputs: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes > 30:
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nand more")
            return compute(inputs)

        monkeypatch.setattr(vars(loaded)["_runner"], "compute", compute_or_fail)
        return loaded

    monkeypatch.setattr(batch_run, "load_model", load_to_break)
    config = RunConfig(
        inputs=(str(slides),),
        out=tmp_path,
        model=str(model),
        batch_size=16,
        workers=1,
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    failed = bytearray(SLIDES)
    reports = run(config, failed=failed).reports
    states = ["ok", "failed"] + ["stopped"] * (SLIDES - 2)
    assert [report.state for report in reports] == states
    assert "cpu works no more in this process (the device failed: CUDA error" in reports[1].reason
    assert not any(failed), "another device may try it"
    monkeypatch.setattr(batch_run, "load_model", load_model)
    again = run(config).reports
    assert again[1].tiles_resumed > 0
    assert_same_files(tmp_path, undisturbed)


def test_reader_of_stdout_that_leaves_ends_the_run_as_failed_and_accounted_for(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    running = subprocess.Popen(
        command("embed", slides, "--model", model, "--workers", "1", "--out", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()  # as `| head` does
    errors = running.stderr.read()
    running.stderr.close()
    assert running.wait(timeout=60) == 1, errors
    assert "Traceback" not in errors
    states = Counter(each["state"] for each in records(tmp_path))
    assert states["ok"] == len(list(tmp_path.rglob("*.h5"))) == 1


def test_device_that_cannot_be_used_is_told_though_the_others_do_the_work(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    done = bioptimus(
        *("embed", slides, "--model", model, "--tissue", "none", "--out", tmp_path),
        *("--device", "cpu,cuda:77"),
    )
    assert done.returncode == 0, done.stderr
    assert "cuda:77" in done.stderr


def test_full_disk_is_one_clear_line_and_a_rerun_with_room_goes_on(
    slides: Path, model: Path, undisturbed: Path, tiny_disk: Path
) -> None:
    words = ("embed", slides, "--model", model, "--tissue", "none", "--out", tiny_disk)
    full = bioptimus(*words)
    assert full.returncode == 1
    assert "No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    subprocess.run(["mount", "-o", "remount,size=64m", str(tiny_disk)], check=True)
    assert here(*words) == 0
    assert_same_files(tiny_disk, undisturbed)


def test_folder_that_cannot_be_written_is_one_clear_line(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    done = bioptimus("embed", slides, "--model", model, "--out", in_the_way / "out")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "not a folder" in done.stderr


@pytest.mark.parametrize("words", [(), ("--overwrite",), ("--dry-run",)])
def test_folder_where_a_file_is_to_be_fails_that_slide_alone_and_is_named_with_what_to_do(
    slides: Path, model: Path, tmp_path: Path, words: tuple[str, ...], capsys: Captured
) -> None:
    results = tmp_path / "out" / "tiny"
    in_the_way = [
        results / f"slide {number}.h5{ending}" for number, ending in enumerate(("", ".part"))
    ]
    for folder in in_the_way:
        (folder / "below").mkdir(parents=True)
    wanted = [slides / f"slide {number}.tif" for number in range(3)]
    asked = ["embed", *map(str, wanted), "--model", str(model), "--tissue", "none", *words]
    assert main([*asked, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    for folder in in_the_way:
        told = f"{folder}: is a folder, and a file is to be written there; move it away"
        assert (said.err + said.out).count(told) == 1
        assert os.listdir(folder) == ["below"]
    assert "run again" not in said.err
    assert ("1 new" if "--dry-run" in words else "2 failed, 1 ok") in said.out + said.err
    assert leftovers(results) == in_the_way[1:]


def test_claim_that_cannot_be_written_names_what_is_in_the_way(
    slides: Path, model: Path, tmp_path: Path
) -> None:
    results = tmp_path / "out" / "tiny"
    (results / "slide 0.h5.claim").mkdir(parents=True)
    shutil.copytree(slides, tmp_path / "in" / "below")
    shutil.copy(slides / "slide 0.tif", tmp_path / "in")
    (results / "below").touch()
    config = RunConfig(inputs=(str(tmp_path / "in"),), out=tmp_path / "out", model=str(model))
    reasons = {report.reason for report in run(config).reports}
    assert reasons == {
        f"{results}/slide 0.h5.claim: is a folder, and a file is to be written there; move it away",
        f"{results}/below: is a file, not a folder; move it away, or choose another --out",
    }


def test_claim_of_a_killed_run_beside_a_finished_result_is_removed_and_a_living_one_kept(
    slides: Path, undisturbed: Path, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "out")
    outputs = [tmp_path / "out" / "tiny" / f"slide {number}.h5" for number in range(2)]
    code = (
        "import os, pathlib, sys; from bioptimus.batch.claims import Claim\n"
        "Claim.take(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, outputs[0]], check=False)
    assert killed.returncode == 9
    words = ("embed", slides, "--model", model, "--tissue", "none", "--out", tmp_path / "out")
    living = Claim.take(outputs[1])
    assert living is not None
    with living:
        assert sorted(leftovers(tmp_path / "out")) == [claim_path(each) for each in outputs]
        assert here(*words) == 0
        assert leftovers(tmp_path / "out") == [living.path]


def test_folder_beside_a_finished_result_is_left_alone(
    slides: Path, undisturbed: Path, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "out")
    (tmp_path / "out" / "tiny" / "slide 0.h5.part").mkdir()
    config = RunConfig(
        inputs=(str(slides / "slide 0.tif"),),
        out=tmp_path / "out",
        model=str(model),
        slide=SlideOptions(plan=PlanOptions(tissue="none")),
    )
    assert [report.state for report in run(config).reports] == ["skipped"]
    assert leftovers(tmp_path / "out") == [tmp_path / "out" / "tiny" / "slide 0.h5.part"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_hundred_slides_leave_memory_files_and_threads_flat(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "slides"
    folder.mkdir()
    first = write_pyramid(folder / "000.tif", tissue(256, 256), mpp=0.5, factors=(1,))
    for number in range(1, 500):
        (folder / f"{number:03}.tif").write_bytes(first.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "tests.many_slides", folder, model, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    early, late = map(json.loads, done.stdout.splitlines())
    assert late["slides"] == 500
    assert late["files"] <= early["files"] + 5
    assert late["threads"] <= early["threads"] + 2
    assert late["memory_mib"] <= early["memory_mib"] + 30
