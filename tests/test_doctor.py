"""`bioptimus doctor` finds what would make a run fail, and says what to do."""

import errno
import fcntl
import json
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bioptimus.doctor import Finding, examine, installation, machine
from bioptimus.doctor.trials import read_tiny_slide, write_tiny_slide
from bioptimus.io.wsi import TileReader
from cli.main import app
from tests.gpu_stand_in import StandIn


@pytest.fixture(autouse=True)
def _no_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through every installed package takes most of a second each time."""
    monkeypatch.setattr(metadata, "packages_distributions", dict)


def named(findings: Iterator[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def test_every_part_is_tried_and_this_machine_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    done = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path), "--json"])
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.exit_code == 0, done.stdout
    assert {each["status"] for each in found.values()} <= {"ok", "warning"}
    assert "pixels right" in found["reader"]["fact"]
    assert "424 values" in found["built-in model"]["fact"]
    assert "read back" in found["result file"]["fact"]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_each_finding_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path), "--no-model"])
    lines = done.stdout.splitlines()
    assert len(lines) >= 15
    assert all(line.startswith(("ok ", "warning ", "problem ")) for line in lines)


def test_an_output_folder_that_is_missing_is_missing_afterwards(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert named(examine(out=out, with_model=False), "output folder").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path / "file"), "--no-model"])
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "output folder" in line
    assert "choose another --out" in line


def test_missing_file_locks_are_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = named(examine(out=tmp_path, with_model=False), "file locks")
    assert found.status == "ok"
    assert "No locks available" in found.fact


def test_a_full_disk_is_a_problem_and_a_nearly_full_one_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, status in ((100 << 20, "problem"), (1 << 30, "warning"), (1 << 40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert named(examine(out=tmp_path, with_model=False), "free space").status == status


def test_another_package_under_our_name_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {"bioptimus": ["bioptimus", "bioptimus-wsi"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners)
    found = named(examine(out=tmp_path, with_model=False), "command")
    assert found.status == "problem"
    assert "an environment of its own" in found.advice


def test_another_command_first_on_the_path_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "bioptimus").write_text("#!/bin/sh\n")
        (tmp_path / folder / "bioptimus").chmod(0o755)
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    for first, status in (("own", "ok"), ("other", "warning")):
        monkeypatch.setenv("PATH", str(tmp_path / first))
        assert named(examine(out=tmp_path, with_model=False), "command").status == status


def test_wrong_pixels_are_a_problem(tmp_path: Path) -> None:
    wanted = write_tiny_slide(tmp_path / "tiny.tif")
    assert read_tiny_slide(tmp_path / "tiny.tif", wanted).status == "ok"
    swapped = np.ascontiguousarray(wanted[..., ::-1])
    found = read_tiny_slide(tmp_path / "tiny.tif", swapped)
    assert found.status == "problem"
    assert "--reader openslide" in found.advice


def test_readers_that_disagree_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = write_tiny_slide(tmp_path / "tiny.tif")
    read, count = TileReader.read, iter(range(100))

    def drifting(self: TileReader, tile: Any) -> Any:
        return read(self, tile) ^ np.uint8(next(count) >= 4)

    monkeypatch.setattr(TileReader, "read", drifting)
    assert "the readers disagree" in read_tiny_slide(tmp_path / "tiny.tif", wanted).fact


def test_a_library_that_fails_to_load_does_not_hide_the_other_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openslide", None)
    found = list(examine(out=tmp_path, with_model=False))
    assert named(iter(found), "openslide").status == "problem"
    assert "pip install" in named(iter(found), "openslide").advice
    assert named(iter(found), "open files").status == "ok"


def test_pictures_are_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "installed", lambda _: "")
    found = named(examine(out=tmp_path, with_model=False), "pictures")
    assert found.status == "warning"
    assert "bioptimus-wsi[view]" in found.advice


def test_a_gpu_that_computes_nothing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandIn(monkeypatch)
    card = SimpleNamespace(name="H200", total_memory=139 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    fine = list(machine.cuda())
    assert [each.name for each in fine] == ["cuda:0", "cuda:1"]
    assert fine[0].fact == "H200, 139 GiB, compute capability 9.0"
    gpu.broken = "CUDA error: no kernel image is available for execution on the device\nand more"
    for each in machine.cuda():
        assert (each.status, each.fact) == ("problem", gpu.broken.splitlines()[0])


@pytest.mark.parametrize(
    ("build", "shown", "advice"),
    [
        (None, "", "install the CUDA build"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES is '': unset it"),
        ("13.0", None, "or a newer driver"),
    ],
)
def test_why_torch_sees_no_gpu_is_told_by_what_hides_it(
    monkeypatch: pytest.MonkeyPatch, build: str | None, shown: str | None, advice: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    (found,) = machine.cuda()
    assert found.status == "warning"
    assert advice in found.advice
