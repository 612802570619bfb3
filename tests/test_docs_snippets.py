"""Every piece of Python in the written pages runs as it stands, on the slide in `examples/`."""

import re
import shutil
import textwrap
from collections.abc import Callable, Sized
from dataclasses import fields
from pathlib import Path
from typing import cast

import pytest
import torch

from bioptimus import embed_slide
from bioptimus.io.wsi import OpenOptions
from bioptimus.jobs import SlideOptions
from bioptimus.planning import PlanOptions
from tests.conftest import ROOT
from tests.result_files import make_result

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
    # One without tissue, as every cohort has: what reads a folder must not trip over it.
    make_result(folder / "embeddings" / "lite0" / "blank.h5", rows=0)
    (folder / "my_training.py").write_text("from torch.nn import Flatten as VisionTransformer\n")
    torch.save({}, folder / "checkpoint.pth")
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("anndata", reason="needs the extra 'anndata'")
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    names: dict[str, object] = {}
    for snippet in snippets(page):
        exec(snippet, names)
    build = names.get("build_network")  # of a network of the reader's own
    assert build is None or isinstance(cast("Callable[[], object]", build)(), torch.nn.Module)
    # A run tells of a slide that failed, and raises nothing.
    assert not getattr(names.get("done"), "failed", 0)


def test_slides_without_tissue_are_no_bags(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    names: dict[str, object] = {}
    (snippet,) = (each for each in snippets(ROOT / "docs" / "python.md") if "class Bags" in each)
    exec(snippet, names)
    assert len(cast("Sized", names["bags"])) == len(SLIDES)


def test_the_page_names_every_option_that_python_has() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    for options in (SlideOptions, PlanOptions, OpenOptions):
        for field in fields(options):
            # Not typed by a user: the mode is the command, the source of the scale its option.
            if field.name not in ("mode", "opening", "plan", "override_source"):
                assert f"`--{field.name.replace('_', '-')}`" in page


def test_the_pages_hold_python_at_all() -> None:
    assert len(snippets(ROOT / "docs" / "python.md")) > 3
    assert len(snippets(ROOT / "docs" / "hdf5.md")) > 1
    assert snippets(ROOT / "README.md")
