"""Every piece of Python in the written pages runs as it stands, on the slide in `examples/`."""

import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest

from bioptimus import embed_slide
from tests.conftest import ROOT

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
SLIDES = ("slide.svs", "CMU-1-Small-Region.svs")


def snippets(page: Path) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.M | re.S)
    return [textwrap.dedent(snippet) for snippet in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the slides and results that the pages name."""
    folder = tmp_path_factory.mktemp("place")
    for name in SLIDES:
        shutil.copy(ROOT / "examples" / "CMU-1-Small-Region.svs", folder / name)
        embed_slide(folder / name, out=folder / "embeddings", predictions=True)
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("anndata", reason="needs the extra 'anndata'")
    monkeypatch.chdir(place)
    names: dict[str, object] = {"pixels": np.zeros((224, 224, 3), np.uint8)}
    for snippet in snippets(page):
        exec(snippet, names)


def test_the_pages_hold_python_at_all() -> None:
    assert len(snippets(ROOT / "docs" / "python.md")) > 3
    assert len(snippets(ROOT / "docs" / "hdf5.md")) > 1
    assert snippets(ROOT / "README.md")
