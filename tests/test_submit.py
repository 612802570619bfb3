"""The array job is readable, quoted, and does on a real SLURM what its script says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bioptimus.batch.inputs import SlideInput, find_inputs
from bioptimus.batch.submit import ArrayJob, ArrayOptions
from bioptimus.errors import OutputError, SubmitError, UsageError
from tests.slurm import SlurmCluster, missing_for_slurm

# Does what the real command does with slides, shards, claims and signals, without a model: the
# slide named slow.svs is not done before the file "go" is there, or the process is told to stop.
STAND_IN = """
import os, sys
from pathlib import Path
from bioptimus.batch.claims import Claim
from bioptimus.batch.inputs import find_inputs, output_path
from bioptimus.batch.shards import parse_shard, share
from bioptimus.batch.signals import StopFlag
action, slides, option, shard, option, out = sys.argv[1:]
assert action == "embed"
me = os.environ["SLURM_ARRAY_JOB_ID"] + "_" + os.environ["SLURM_ARRAY_TASK_ID"]
with StopFlag() as flag:
    for slide in share(find_inputs([slides]).slides, parse_shard(shard)):
        output = output_path(Path(out), "m", slide)
        claim = Claim.take(output)
        with claim:
            if output.exists():
                continue
            if slide.path.name == "slow.svs":
                Path(out, "begun").write_text(me)
                while not Path("go").exists() and not flag.wait(0.05):
                    pass
            if flag.stopped:
                print("told to stop in", slide.path.name)
                break
            os.write(os.open(output, os.O_CREAT | os.O_EXCL | os.O_WRONLY), me.encode())
            print("did", slide.path.name)
sys.exit(flag.exit_code)
"""


def job_of(place: Path, *, count: int = 12, **changes: Any) -> ArrayJob:
    paths = [place / "slides" / f"{n}.svs" for n in range(count)]
    values: dict[str, Any] = {
        "folder": place / "job",
        "working_folder": place,
        "command": ("/env/bin/bioptimus",),
        "action": "embed",
        "arguments": ("--model", "lite0", "--out", "results"),
        "slides": tuple(SlideInput(path=p, relative=Path(p.name), size_bytes=1) for p in paths),
        "options": ArrayOptions(tasks=4),
    }
    return ArrayJob(**values | changes)


def directives(job: ArrayJob) -> list[str]:
    lines = job.text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_script_asks_for_what_was_given_and_leaves_the_rest_to_the_cluster() -> None:
    plain = job_of(Path("/p"))
    assert directives(plain) == [
        "--job-name=bioptimus",
        "--array=1-4",
        "--chdir=/p",
        "--output=/p/job/logs/%A_%a.log",
        "--open-mode=append",
        "--signal=B:TERM@120",
        "--requeue",
    ]
    options = ArrayOptions(
        tasks=4,
        max_running=2,
        name="night",
        partition="gpu",
        time_limit="1-12:00:00",
        gpus="a100:1",
        cpus=8,
        memory_gb=64,
        stop_early_s=300,
        requeue=False,
        further=("--account=lab",),
        setup=("module load cuda",),
    )
    full = job_of(Path("/p"), options=options)
    assert directives(full) == [
        "--job-name=night",
        "--array=1-4%2",
        "--partition=gpu",
        "--time=1-12:00:00",
        "--gres=gpu:a100:1",
        "--cpus-per-task=8",
        "--mem=64G",
        "--chdir=/p",
        "--output=/p/job/logs/%A_%a.log",
        "--open-mode=append",
        "--signal=B:TERM@300",
        "--no-requeue",
        "--account=lab",
    ]
    assert "\nmodule load cuda\n" in full.text()


def test_array_is_never_wider_than_there_are_slides() -> None:
    assert job_of(Path("/p"), count=3).tasks == 3
    assert "--array=1-3" in directives(job_of(Path("/p"), count=3))


def test_program_replaces_the_shell_so_that_signals_reach_it() -> None:
    (run,) = [line for line in job_of(Path("/p")).text().splitlines() if "bioptimus embed" in line]
    assert run.startswith("exec /env/bin/bioptimus embed ")


def test_script_passes_every_word_through_the_shell_unchanged(tmp_path: Path) -> None:
    words = ["--out", "my results/$HOME", "--note", 'it\'s "5" µm; rm -rf *', "--model", "a\\b"]
    show = tmp_path / "show it.py"
    show.write_text("import sys; print(*sys.argv[1:], sep='\\n')")
    job = job_of(
        tmp_path,
        folder=tmp_path / "job 'x'",
        command=(sys.executable, str(show)),
        arguments=tuple(words),
    )
    job.write()
    assert os.access(job.script, os.X_OK)
    task = {**os.environ, "SLURM_ARRAY_TASK_ID": "2"}
    done = subprocess.run([str(job.script)], env=task, capture_output=True, text=True, check=True)
    expected = ["embed", f"{tmp_path}/job 'x'/slides.csv", "--shard", "2/4", *words]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tasks", 0),
        ("max_running", 0),
        ("cpus", 0),
        ("memory_gb", 0),
        ("stop_early_s", -1),
        ("time_limit", "12h"),
        ("time_limit", "1:2:3:4"),
        ("gpus", "a100"),
        ("gpus", "1; rm"),
        ("name", "a\nb"),
        ("setup", ("a\nb",)),
        ("further", ("account=lab",)),
        ("further", ("--array=1-3",)),
        ("further", ("-a 1-3",)),
    ],
)
def test_option_that_sbatch_would_misread_is_a_usage_error(option: str, value: object) -> None:
    values: dict[str, Any] = {"tasks": 1, option: value}
    with pytest.raises(UsageError):
        ArrayOptions(**values)


@pytest.mark.parametrize("limit", ["90", "90:00", "12:00:00", "2-00", "2-00:30", "2-00:30:10"])
def test_time_limit_takes_every_form_of_sbatch(limit: str) -> None:
    seconds = {
        "90": 5400,
        "90:00": 5400,
        "12:00:00": 43200,
        "2-00": 172800,
        "2-00:30": 174600,
        "2-00:30:10": 174610,
    }[limit]
    assert ArrayOptions(tasks=1, time_limit=limit, stop_early_s=seconds - 1).time_limit == limit
    with pytest.raises(UsageError, match=f"tasks stop {seconds} s before it"):
        ArrayOptions(tasks=1, time_limit=limit, stop_early_s=seconds)


def test_folder_that_holds_a_job_is_not_overwritten(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.write()
    with pytest.raises(UsageError, match="is there already; choose another --job-folder"):
        job.write()


def test_a_file_where_the_logs_are_to_be_is_called_one(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.folder.mkdir(parents=True)
    (job.folder / "logs").touch()
    with pytest.raises(OutputError, match=r"/logs: is a file, and a folder is to be there; move"):
        job.write()


def test_log_folder_that_slurm_would_misread_is_a_usage_error(tmp_path: Path) -> None:
    for name in ("a\\b", "a\nb"):
        with pytest.raises(UsageError):
            job_of(tmp_path, folder=tmp_path / name).write()
        assert not (tmp_path / name).exists()


def test_frozen_list_beside_the_script_holds_the_slides(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.write()
    frozen = find_inputs([job.slide_list]).slides
    assert [s.path for s in frozen] == [s.path for s in job.slides]
    assert all(s.size_bytes == 1 for s in frozen)


def test_without_sbatch_the_written_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path)
    job.write()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match=r"not found on this machine; .*job/job\.sh"):
        job.submit()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if lacking := missing_for_slurm():
        pytest.skip(lacking)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def on_slurm(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, for commands that this process starts."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    return slurm


def stand_in_job(folder: Path, **changes: Any) -> ArrayJob:
    """Make a job of twelve slides in a folder whose name needs quoting everywhere."""
    folder = folder / 'a "100%x" #1 folder'
    (folder / "slides").mkdir(parents=True)
    for name in ("slow", *range(11)):
        (folder / "slides" / f"{name}.svs").write_text("x")
    (folder / "stand in.py").write_text(STAND_IN)
    return job_of(
        folder,
        command=(sys.executable, str(folder / "stand in.py")),
        arguments=("--out", str(folder / "results")),
        slides=find_inputs([folder / "slides"]).slides,
        **changes,
    )


def logs(job: ArrayJob) -> str:
    return "\n".join(path.read_text() for path in sorted(job.folder.glob("logs/*.log")))


def test_array_with_a_requeued_task_does_every_slide_once(
    on_slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = stand_in_job(tmp_path, options=ArrayOptions(tasks=4, max_running=2, cpus=1))
    job.write()
    number = job.submit()
    begun = job.working_folder / "results" / "begun"
    on_slurm.wait_for(lambda: begun.exists() and begun.read_text() != "", "a task in mid-slide")
    task = begun.read_text()
    on_slurm.run("scontrol", "requeue", task)
    on_slurm.wait_for(lambda: on_slurm.states(task) == ["PENDING 1"], "the requeue")
    (job.working_folder / "go").touch()
    # SLURM holds a requeued job back for two minutes; it refuses one that comes within a second.
    on_slurm.run("scontrol", "update", f"JobId={task}", "StartTime=now+3")
    on_slurm.wait_for(
        lambda: {state.split()[0] for state in on_slurm.states(number)} == {"COMPLETED"}, "the job"
    )
    assert sorted(on_slurm.states(number)) == ["COMPLETED 0"] * 3 + ["COMPLETED 1"]
    text = logs(job)
    assert text.count("told to stop in slow.svs") == 1
    results = sorted((job.working_folder / "results" / "m").iterdir())
    assert [p.name for p in results] == sorted(f"{n}.h5" for n in ("slow", *range(11)))
    assert len({p.read_text() for p in results}) == 4
    assert all(text.count(f"did {p.stem}.svs") == 1 for p in results)


def test_cancelled_task_gives_its_slides_free(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    job = stand_in_job(tmp_path, options=ArrayOptions(tasks=1))
    job.write()
    number = job.submit()
    results = job.working_folder / "results"
    on_slurm.wait_for(lambda: (results / "begun").exists(), "a task in mid-slide")
    on_slurm.run("scancel", number)
    on_slurm.wait_for(lambda: on_slurm.states(number) == ["CANCELLED 0"], "the end of the job")
    on_slurm.wait_for(lambda: "told to stop in slow.svs" in logs(job), "the task's last words")
    assert not list(results.rglob("*claim*"))


def test_sbatch_refusal_comes_in_its_words(on_slurm: SlurmCluster, tmp_path: Path) -> None:
    job = stand_in_job(tmp_path, options=ArrayOptions(tasks=1, partition="nowhere"))
    job.write()
    with pytest.raises(SubmitError, match=r"sbatch refused it: .*invalid partition specified"):
        job.submit()
