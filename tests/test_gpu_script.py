"""The script for a machine with a GPU starts here too, and says that there is none."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

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


def test_a_caller_that_fails_ends_the_timing_of_all_in_its_own_words() -> None:
    calls = itertools.count()

    def third_lacks_memory(_: torch.Tensor) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        gpu._rate(third_lacks_memory, torch.zeros(8), 3, 0.01)
    assert gpu._rate(lambda _: time.sleep(0.001), torch.zeros(8), 3, 0.01) > 0


def test_a_step_that_fails_in_any_way_leaves_the_others_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("torch has no such name\nand more")

    for step in ("_describe", "_export"):
        monkeypatch.setattr(gpu, step, fail)
    bench = gpu.Bench(device="cpu", small=True, folder=tmp_path, deadline=0)
    assert gpu._run(bench)
    assert bench.rows == [("FAILED", "AttributeError", "torch has no such name")] * 3
