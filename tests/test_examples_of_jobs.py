"""The loop, the hand-written array job and the Snakemake rule do what they say, when run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from bioptimus.batch.dicom_series import DICOM_EXTENSIONS
from bioptimus.batch.inputs import SLIDE_EXTENSIONS
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


def loop(cohort: Path, out: Path, environment: dict[str, str], *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [EXAMPLES / "loop.sh", cohort, out, *(words or OPTIONS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_shell_loop_embeds_each_slide_and_goes_on_after_a_bad_one(
    slides: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    cohort = tmp_path / "my cohort"
    for patient in ("a", 'b, "second" try'):
        (cohort / patient).mkdir(parents=True)
        shutil.copy(slides / "a.svs", cohort / patient / "he 1.svs")
    (cohort / "a bad.svs").write_bytes(b"no slide")
    code, told = loop(cohort, tmp_path / "out", environment)
    assert code == 1, told
    assert told.endswith("1 slides failed\n")
    made = sorted(path.relative_to(tmp_path / "out") for path in tmp_path.rglob("*.h5"))
    assert [str(path) for path in made] == [
        "lite0/a/he 1.h5",
        'lite0/b, "second" try/he 1.h5',
    ]
    # The command over the folder finds them done, each in its place.
    (cohort / "a bad.svs").unlink()
    done = subprocess.run(
        ["bioptimus", "embed", cohort, "--out", tmp_path / "out", *OPTIONS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 skipped; report: " in done.stderr


def test_shell_loop_takes_every_kind_of_slide_but_dicom(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    kinds = [each for each in SLIDE_EXTENSIONS if each not in DICOM_EXTENSIONS]
    cohort = tmp_path / "cohort"
    cohort.mkdir()
    for extension in kinds:
        (cohort / f"{extension[1:]}{extension.upper()}").touch()
    (cohort / "notes.txt").touch()
    (cohort / "._svs.SVS").touch()
    (cohort / ".trash").mkdir()
    (cohort / ".trash" / "a.svs").touch()
    command = tmp_path / "bin" / "bioptimus"
    command.parent.mkdir()
    # Stands for the program: what it is given is all that counts here.
    command.write_text(f"#!/bin/sh\ncat >> '{tmp_path}/given'\n")
    command.chmod(0o755)
    path = {"PATH": f"{command.parent}:{environment['PATH']}"}
    code, told = loop(cohort, tmp_path / "out", environment | path)
    assert (code, told) == (0, "0 slides failed\n")
    given = (tmp_path / "given").read_text().splitlines()
    names = sorted(f"{extension[1:]}{extension.upper()}" for extension in kinds)
    assert given[1::2] == [f'"{cohort}/{name}","{name}"' for name in names]


def test_shell_loop_refuses_two_slides_of_one_result(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    for name in ("x.svs", "x.ome.tif", "y.svs"):
        (tmp_path / name).touch()
    code, told = loop(tmp_path, tmp_path / "out", environment)
    assert code == 2
    assert told.startswith(f"several slides of one name: {tmp_path}/x; ")
    assert not (tmp_path / "out").exists()


def test_shell_loop_stops_at_wrong_usage(
    slides: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    code, told = loop(slides, tmp_path / "out", environment, "--nonsense")
    assert code == 2
    assert told.count("--nonsense") == 1


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
