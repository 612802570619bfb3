"""A rerun loads the model when the first slide takes it, and not before."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bioptimus.batch import run as batch_run
from bioptimus.inference import writers
from bioptimus.io import judge, opening
from bioptimus.io.sources import PixelSource
from bioptimus.runtime.loader import ModelChoice, load_model
from bioptimus.runtime.server_model import BaseServerModel
from cli.main import main
from tests.result_files import damage
from tests.slides import tissue, write_pyramid

SLIDES = ("a.tif", "b.tif", "c.tif")

TELLS_OF_TORCH = """
import sys
from cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


@pytest.fixture
def words(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command whose every result is there, ``out/tiny/a.h5`` and so on, without an account."""
    monkeypatch.chdir(tmp_path)
    for name in SLIDES:
        write_pyramid(tmp_path / name, tissue(256, 256), mpp=0.5, factors=(1, 4))
    typed = ["embed", *SLIDES, "--model", str(model), "--tissue", "none", "--out", "out"]
    assert main(typed) == 0
    return [*typed, "--workers", "1"]


def events(shown: str) -> list[str]:
    return [json.loads(line)["event"] for line in shown.splitlines()]


@pytest.mark.parametrize(
    "also", [[], ["--overwrite", "--batch-size", "auto"], ["--device", "cuda:99"], ["--dry-run"]]
)
def test_torch_is_not_even_imported_where_every_result_is_there(
    words: list[str], also: list[str]
) -> None:
    """Also where a device is named that is not here: nothing is to run on it."""
    done = subprocess.run(
        [sys.executable, "-c", TELLS_OF_TORCH, *words, *also],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    shown = done.stdout if "--dry-run" in also else done.stderr
    assert shown.count(".tif: done, " if "--dry-run" in also else "done already") == len(SLIDES)


def test_model_is_loaded_at_the_first_slide_that_takes_it(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Path] = []

    def load(choice: ModelChoice, device: str) -> BaseServerModel:
        held.extend(Path("out").rglob("*.claim"))
        return load_model(choice, device)

    monkeypatch.setattr(batch_run, "load_model", load)
    Path("out/tiny/b.h5").unlink()
    capsys.readouterr()
    assert main([*words, "--log-json"]) == 0
    assert not held, "another job, whose model is loaded already, may take it"
    assert events(capsys.readouterr().err) == [
        *("run_started", "slide_started", "slide_ended"),
        *("loading", "model_loaded", "slide_started", "slide_planned", "slide_ended"),
        *("slide_started", "slide_ended", "run_ended"),
    ]


def test_slide_that_is_done_has_no_pixels_compared_and_its_folder_not_listed(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the time of a rerun, and the second grows with the results that are there."""
    compared: list[object] = []
    real = judge.first_difference

    def compare(fast: PixelSource, judge: PixelSource, **how: Any) -> str | None:
        compared.append(fast)
        return real(fast, judge, **how)

    def list_folder(path: Path) -> list[Path]:
        raise AssertionError(path)

    monkeypatch.setattr(opening, "first_difference", compare)
    monkeypatch.setattr(writers, "temporaries_beside", list_folder)
    assert main(words) == 0
    assert compared == []
    Path("out/tiny/b.h5").unlink()  # c.tif comes behind it
    assert main(words) == 0
    assert len(compared) == 1


def test_result_that_only_a_look_at_its_slide_tells_to_be_replaced_is_told_of_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(Path("out/tiny/a.h5"), "features")
    capsys.readouterr()
    assert main([*words, "--log-json", "--overwrite"]) == 0
    assert events(capsys.readouterr().err)[:5] == [
        *("run_started", "slide_started", "loading", "model_loaded", "slide_planned"),
    ]


def test_slide_whose_result_was_made_otherwise_fails_without_the_model(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main([*words, "--overlap-px", "8", "--log-json"]) == 1
    shown = capsys.readouterr().err
    assert "loading" not in events(shown)
    assert shown.count("overlap (px) is 0 there, 8 now") >= len(SLIDES)
    assert shown.count('"state":"failed"') == len(SLIDES)


@pytest.mark.parametrize(
    ("devices", "missing"), [("cuda:98", True), ("cuda:98", False), ("cuda:98,cuda:99", False)]
)
def test_device_that_is_not_there_ends_the_run_where_any_slide_takes_the_model(
    words: list[str], capfd: pytest.CaptureFixture[str], devices: str, missing: bool
) -> None:
    if missing:
        Path("out/tiny/b.h5").unlink()
    else:
        damage(Path("out/tiny/b.h5"), "features")
    capfd.readouterr()
    assert main([*words, "--overwrite", "--device", devices]) == 2
    shown = capfd.readouterr().err
    assert shown.splitlines()[-1].startswith("error: device cuda:9")
    assert ("a.tif: skipped, done already" in shown) is not missing
