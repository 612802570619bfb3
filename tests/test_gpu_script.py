"""The script for a machine with a GPU starts here too, and says that there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.sh"


def test_without_a_gpu_the_script_ends_at_the_device_check() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [str(SCRIPT)], capture_output=True, text=True, check=False,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}, cwd="/",
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout.startswith(f"torch {torch.__version__}")
    assert done.stderr == "device check: torch sees no NVIDIA GPU; nothing was measured\n"
