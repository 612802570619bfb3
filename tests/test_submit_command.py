"""``bioptimus submit``: mistakes show before anything is queued, and the job does its work."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from bioptimus.batch.inputs import find_inputs
from bioptimus.batch.report import read_runs
from cli.main import main
from tests.conftest import EXAMPLE_SLIDE, ROOT
from tests.slurm import SlurmCluster, missing_for_slurm


@pytest.fixture
def cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with ``my slides`` in it: four slides in two folders, one other file."""
    for name in ("a/1.svs", "a/2.svs", "b/1.svs", "b/3 x.svs"):
        path = tmp_path / "my slides" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLE_SLIDE, path)
    (tmp_path / "my slides" / "notes.xlsx").write_text("x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "my slides")


@pytest.mark.parametrize("at_end", [False, True])
def test_dry_run_shows_the_script_and_writes_nothing(
    cohort: Path, capsys: pytest.CaptureFixture[str], at_end: bool
) -> None:
    ask = ["--tasks", "3", "-p", "gpu", "--gpus", "1", "--time", "2-00", "--job-folder", "job 1"]
    words = ["embed", "my slides", "--batch-size", "auto", "--out", "my results"]
    words = [*ask, *words, "--dry-run"] if at_end else [*ask, "--dry-run", *words]
    assert main(["submit", *words]) == 0
    shown = capsys.readouterr()
    assert written(cohort) == []
    assert "#SBATCH --array=1-3\n" in shown.out
    assert "#SBATCH --partition=gpu\n#SBATCH --time=2-00\n#SBATCH --gres=gpu:1\n" in shown.out
    assert (
        f"    '{cohort}/job 1/slides.csv' \\\n    --shard \"$SLURM_ARRAY_TASK_ID/3\" \\\n"
        in shown.out
    )
    assert shown.out.endswith("    --batch-size auto \\\n    --out 'my results'\n")
    assert "4 slides in 3 tasks; nothing submitted" in shown.err
    assert "notes.xlsx (unknown extension)" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["embed", "my slides", "--no-such-option"], "--no-such-option"),
        (["embed", "my slides", "--batch-size", "many"], "neither a number from 1 nor auto"),
        (["embed", "--out", "o", "my slides"], "give the slides right after embed"),
        (["embed", "my slides", "--out", "o", "my slides/a"], "right after embed"),
        (["embed", "my slides", "--shard", "1/2"], "use --tasks"),
        (["embed", "--out", "o"], "Missing argument"),
        (["embed"], "Missing argument"),
        (["view", "my slides"], "view"),
        (["--tasks", "0", "embed", "my slides"], "--tasks 0"),
        (["--gpus", "all", "embed", "my slides"], "--gpus all"),
        (["--time", "2", "embed", "my slides"], "--time 2: tasks stop 120 s before it"),
        (["--time", "0-0:2", "embed", "my slides"], "tasks stop 120 s before it"),
        (["embed", "my slides/*.ndpi"], "no slide matches"),
        (["embed", "my slides", "gone.svs"], "1 of 5 slides cannot be used"),
        (["embed", "my slides", "--device", "gpu"], "device gpu: known are"),
        (["embed", "my slides", "--model", "gone.pt2"], "gone.pt2: no such file"),
        (["embed", "my slides", "--tissue", "gone.png"], "gone.png: no such mask"),
        (["embed", "my slides", "--mpp-override", "0"], "--mpp-override 0"),
        (["embed", "my slides", "--stage-gb", "0"], "--stage-gb 0"),
        (["embed", "my slides", "--overlap-px", "224"], "overlap 224"),
        (["predict", "my slides", "--gene-column", "x"], "reads no bulk RNA"),
        (["embed", "my slides", "--out", "-"], "--out -: nothing of this goes to stdout"),
        (["embed", "my slides", "--stage", "-"], "--stage -: nothing of this goes to stdout"),
        (["--job-folder", "-", "embed", "my slides"], "--job-folder -: nothing of this goes to"),
        (["--job-folder", "my slides/a/1.svs", "embed", "my slides"], "1.svs is a file, not a fol"),
    ],
)
def test_mistake_shows_before_anything_is_written(
    cohort: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    for how in ([], ["--dry-run"]):
        assert main(["submit", *how, *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert written(cohort) == []


def test_options_of_the_environment_are_written_into_the_job(
    cohort: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch --export=NONE, or another shell on another day, knows nothing of them."""
    monkeypatch.setenv("BIOPTIMUS_EMBED_OVERLAP_PX", "112")
    monkeypatch.setenv("BIOPTIMUS_EMBED_OUT", "my results")
    monkeypatch.setenv("BIOPTIMUS_PREDICT_OUT", "elsewhere")
    assert main(["submit", "--dry-run", "embed", "my slides"]) == 0
    script = capsys.readouterr().out
    exports = [line for line in script.splitlines() if line.startswith("export ")]
    assert exports == [
        "export BIOPTIMUS_EMBED_OUT='my results'",
        "export BIOPTIMUS_EMBED_OVERLAP_PX=112",
    ]
    assert script.index(exports[-1]) < script.index("\nexec ")


def test_what_only_the_compute_node_has_is_no_mistake_here(
    cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here_a_file = cohort / "my slides" / "notes.xlsx"
    words = ["my slides", "--device", "cuda:9", "--stage", str(here_a_file)]
    assert main(["submit", "--dry-run", "embed", *words]) == 0
    assert "--device cuda:9" in capsys.readouterr().out


def test_without_slurm_the_job_is_written_to_be_submitted_elsewhere(
    cohort: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(cohort))
    assert main(["submit", "--job-folder", "job", "embed", "my slides"]) == 1
    assert "submit it where it is: sbatch " in capsys.readouterr().err
    assert written(cohort / "job") == ["job.sh", "logs", "slides.csv"]
    found = find_inputs([cohort / "my slides"]).slides
    frozen = find_inputs([cohort / "job" / "slides.csv"]).slides
    assert [(s.path, s.relative) for s in frozen] == [(s.path, s.relative) for s in found]


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if lacking := missing_for_slurm():
        pytest.skip(lacking)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_submitted_job_with_a_requeued_task_embeds_every_slide_once(
    cohort: Path, slurm: SlurmCluster
) -> None:
    for number in range(8):
        shutil.copy(EXAMPLE_SLIDE, cohort / "my slides" / f"{number}.svs")
    command = [sys.executable, "-m", "cli", "submit", "--tasks", "4", "--cpus", "1", "embed"]
    command += ["my slides", "--out", "my results", "--device", "cpu", "--tile-mpp", "2"]
    command += ["--min-tissue", "0", "--workers", "1"]
    done = subprocess.run(
        command,
        env=slurm.environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert job.isdecimal()
    task = f"{job}_1"
    slurm.wait_for(lambda: slurm.states(task) == ["RUNNING 0"], "the first task")
    slurm.run("scontrol", "requeue", task)
    slurm.wait_for(lambda: slurm.states(task) == ["PENDING 1"], "the requeue")
    # SLURM holds a requeued job back for two minutes; it refuses one that comes within a second.
    slurm.run("scontrol", "update", f"JobId={task}", "StartTime=now+3")
    slurm.wait_for(
        lambda: {state.split()[0] for state in slurm.states(job)} == {"COMPLETED"}, "the job"
    )
    (folder,) = (cohort / "bioptimus-jobs").iterdir()
    logs = [path.read_text() for path in (folder / "logs").iterdir()]
    assert sorted(slurm.states(job)) == ["COMPLETED 0"] * 3 + ["COMPLETED 1"], logs
    names = ["a/1.h5", "a/2.h5", "b/1.h5", "b/3 x.h5", *(f"{number}.h5" for number in range(8))]
    results = cohort / "my results" / "lite0"
    found = sorted(p.relative_to(results).as_posix() for p in results.rglob("*.*"))
    assert found == sorted(names)
    for name in names:
        with h5py.File(results / name) as file:
            assert file.attrs["complete"]
            assert len(file["features"]) == 12
        assert sum(f"my results/lite0/{name}" in log for log in logs) == 1
    summary = read_runs(cohort / "my results")
    assert [each["state"] for each in summary.slides.values()] == ["ok"] * 12
    assert summary.missing == []
