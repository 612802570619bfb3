"""The notebook in `examples/` runs from top to bottom, on the slide beside it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOK = "slide_to_probe.ipynb"

# In a process of its own: the kernel's own libraries warn of things that are not ours.
_EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


def outputs_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / NOTEBOOK).read_text())
    assert outputs_of(notebook) == []


@pytest.mark.slow
def test_the_notebook_runs_and_its_probe_learns(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (extra 'dev')")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel (extra 'dev')")
    for name in (NOTEBOOK, "CMU-1-Small-Region.svs"):
        shutil.copy(EXAMPLES / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _EXECUTE, NOTEBOOK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = outputs_of(json.loads((tmp_path / NOTEBOOK).read_text()))
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 4
    words = "".join("".join(output.get("text", "")) for output in outputs)
    found = re.search(r"AUC .*: (\d\.\d+)", words)
    assert found
    assert float(found[1]) > 0.75, "the embedding holds what the measure saw"
    assert (tmp_path / "embeddings" / "lite0" / "CMU-1-Small-Region.h5").exists()
