"""The loop, the hand-written array job and the Snakemake rule do what they say, when run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from tests.conftest import EXAMPLE_SLIDE, ROOT
from tests.slurm import SlurmCluster, missing_for_slurm

EXAMPLES = ROOT / "examples"
# Coarse tiles: twelve of them on the example slide, so a run is little more than its start.
OPTIONS = ["--device", "cpu", "--tile-mpp", "2", "--min-tissue", "0", "--workers", "1"]


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two slides, one with a space in its name."""
    folder = tmp_path_factory.mktemp("slides of today")
    for name in ("a.svs", "b c.svs"):
        shutil.copy(EXAMPLE_SLIDE, folder / name)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose PATH has the command ``bioptimus`` of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "bioptimus"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m cli "$@"\n')
    command.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def assert_embedded(out: Path, names: list[str]) -> None:
    assert sorted(p.name for p in (out / "lite0").iterdir()) == names
    for name in names:
        with h5py.File(out / "lite0" / name) as file:
            assert file.attrs["complete"]
            assert len(file["features"]) == len(file["coords"]) > 0


@pytest.mark.slow
def test_shell_loop_embeds_each_slide_and_goes_on_after_a_bad_one(
    slides: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    cohort = tmp_path / "my cohort"
    cohort.mkdir()
    shutil.copy(slides / "b c.svs", cohort)
    (cohort / "a bad.svs").write_bytes(b"no slide")
    loop = subprocess.run(
        [EXAMPLES / "loop.sh", cohort, tmp_path / "out", *OPTIONS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loop.returncode == 1, loop.stderr
    assert loop.stderr.endswith("1 slides failed\n")
    assert_embedded(tmp_path / "out", ["b c.h5"])


def test_shell_loop_stops_at_wrong_usage(
    slides: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    loop = subprocess.run(
        [EXAMPLES / "loop.sh", slides, tmp_path / "out", "--nonsense"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loop.returncode == 2
    assert loop.stderr.count("--nonsense") == 1


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if lacking := missing_for_slurm():
        pytest.skip(lacking)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.mark.slow
def test_hand_written_array_job_embeds_every_slide_once(
    slides: Path, tmp_path: Path, environment: dict[str, str], slurm: SlurmCluster
) -> None:
    (tmp_path / "logs").mkdir()
    number = slurm.run(
        *("sbatch", "--parsable", "--array=1-2", f"--chdir={tmp_path}"),
        *(str(EXAMPLES / "array.sbatch"), str(slides), "out", *OPTIONS),
        PATH=environment["PATH"],
    ).strip()
    slurm.wait_for(lambda: slurm.states(number) == ["COMPLETED 0"] * 2, "the job")
    assert_embedded(tmp_path / "out", ["a.h5", "b c.h5"])
    logs = [path.read_text() for path in (tmp_path / "logs").iterdir()]
    assert len(logs) == 2
    for name in ("a.h5", "b c.h5"):
        assert sum(f"out/lite0/{name}" in log for log in logs) == 1


@pytest.mark.slow
def test_snakemake_rule_makes_what_is_missing(
    slides: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    # Installed beside the checkout by .ci/run, apart from our own packages.
    own = ROOT / ".venv-snakemake" / "bin"
    program = shutil.which("snakemake", path=f"{own}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs snakemake, on PATH or in .venv-snakemake")
    command = [program, "--cores", "1", "--quiet", "--directory", str(tmp_path)]
    command += ["--snakefile", str(EXAMPLES / "snakemake" / "Snakefile")]
    command += ["--config", f"slides={slides}", "out=results"]
    done_before = tmp_path / "results" / "lite0" / "a.h5"
    done_before.parent.mkdir(parents=True)
    done_before.write_text("a result")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done_before.read_text() == "a result"
    done_before.unlink()
    assert_embedded(tmp_path / "results", ["b c.h5"])
