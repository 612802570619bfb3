"""`bioptimus --help` answers at once: it loads nothing heavy."""

import os
import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "openslide", "h5py", "numpy", "PIL", "cv2", "tifffile", "imagecodecs")


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys, cli.main; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_ends_a_command_on_a_signal_is_loaded_before_anything_slow() -> None:
    slow = ("typer", "subprocess", "logging", "dataclasses", *HEAVY)
    code = f"import sys, cli.ending; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_command_is_ours_where_a_project_on_the_path_has_a_cli_too(tmp_path: Path) -> None:
    (tmp_path / "cli.py").write_text("print('of the project')\n")
    ours = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", "from bioptimus.command import run; run()", "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ours}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bioptimus" in done.stdout
    assert "of the project" not in done.stdout


def test_the_package_runs_as_the_command(tmp_path: Path) -> None:
    ours = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "bioptimus", "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ours},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Usage: bioptimus" in done.stdout


def test_help_exits_0_and_names_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: bioptimus" in done.stdout


def test_nothing_typed_shows_the_help_and_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Usage: bioptimus" in done.stdout + done.stderr
    assert "error" not in done.stderr


def test_unknown_option_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli", "--nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert "Traceback" not in done.stderr
