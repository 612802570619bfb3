"""That benchmarks run; what they measure is nobody's test."""

import os
import subprocess
import sys
from pathlib import Path

from bioptimus.runtime.machine import available_cores
from tests.conftest import ROOT

# One small slide, once, each way.
MEASURE = """
import importlib, pathlib
for path in pathlib.Path("benchmarks").glob("*.py"):
    if path.stem != "__main__":
        importlib.import_module(f"benchmarks.{path.stem}")
from benchmarks import end_to_end
from benchmarks.near_free import near_free, near_free_checkpoint
case = end_to_end.Case("a slide", [end_to_end.EXAMPLE], str(near_free_checkpoint()), near_free())
end_to_end.show(case, end_to_end.measure(case, rounds=1, workers=(1,), searches=(True,)))
"""


def test_a_slide_is_measured_in_every_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        cwd=ROOT,
        env=os.environ | {"BIOPTIMUS_BENCH_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout
    for way in ("reader alone", "model alone", "writer alone", "bioptimus through JSON"):
        assert f"\n{way}" in told
    assert "\nbioptimus, --workers 1 " in told
    for loaders in (0, available_cores()):
        assert f"\nbaseline, {loaders} loaders, Otsu / ours in wall time: " in told
    assert "\nCPU of ours / (reader + model): " in told
