"""Rows of the facts table give what the published code of their models gives."""

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import openslide
import pytest
import torch
from torch.nn import functional

from bioptimus.models.facts import FACTS
from bioptimus.runtime.archive import inspect_archive
from bioptimus.runtime.export import export_module
from bioptimus.runtime.runners import open_runner
from bioptimus.runtime.sources import from_folder
from bioptimus.runtime.vit import VisionTransformer
from cli.main import main
from tests import reference_models
from tests.conftest import EXAMPLE_SLIDE
from tests.reference_models import TIMM, TRANSFORMERS
from tests.test_vit import some_tiles

# One process builds them all, which takes two minutes where others are at work.
pytestmark = pytest.mark.timeout(400)

VITS = [key for key in (*TRANSFORMERS, *TIMM) if FACTS[key].vit]
# At the slide's own scale, so that tiles are pixels of the file.
SHOWN = 4  # every fourth is compared
PLAN = ["--tile-mpp", "0.499", "--min-tissue", "0.999"]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``reference_models`` describes."""
    if lacking := reference_models.missing():
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("references")
    np.save(folder / "tiles.npy", some_tiles().numpy())
    np.save(folder / "slide_tiles.npy", read_by_openslide(planned(folder)[::SHOWN]))
    reference_models.write_references(folder)
    return folder


def planned(folder: Path) -> list[tuple[int, int]]:
    """Upper left corners in level-0 pixels, in the order of a result file."""
    table = folder / "tiles.csv"
    arguments = ["tiles", str(EXAMPLE_SLIDE), "--no-overview", "--csv", str(table), *PLAN]
    assert main(arguments) == 0
    with table.open() as file:
        return [(int(row["x"]), int(row["y"])) for row in csv.DictReader(file)]


def read_by_openslide(corners: list[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """Tiles of 224 px of level 0, which is 0.499 um/px."""
    with openslide.OpenSlide(EXAMPLE_SLIDE) as slide:
        tiles = [slide.read_region(corner, 0, (224, 224)).convert("RGB") for corner in corners]
    return np.stack([np.asarray(tile) for tile in tiles])


@pytest.mark.parametrize("key", [key for key in TIMM if FACTS[key].vit])
def test_the_full_model_has_the_parameters_that_timm_gives_it(key: str, references: Path) -> None:
    shape = FACTS[key].vit
    assert shape is not None
    with torch.device("meta"):
        ours = VisionTransformer(shape).state_dict()
    theirs = json.loads((references / "shapes.json").read_text())[key]
    assert {name: list(value.shape) for name, value in ours.items()} == theirs


@pytest.mark.parametrize("key", VITS)
def test_an_exported_row_gives_what_the_published_code_gives(
    key: str, references: Path, tmp_path: Path
) -> None:
    source = from_folder(references / key, facts_key=key)
    report = export_module(
        source.network, source.spec.with_(embedding_dim=0), tmp_path / "model.pt2"
    )
    (found,) = open_runner(report.path, device="cpu", spec=report.spec)(some_tiles())
    expected = torch.from_numpy(np.load(references / f"{key}.npy"))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_resnet50_exported_through_timm_gives_what_timm_gives(references: Path) -> None:
    path = references / "resnet50.pt2"
    spec = inspect_archive(path).spec
    assert spec is not None
    (found,) = open_runner(path, device="cpu", spec=spec)(some_tiles())
    expected = torch.from_numpy(np.load(references / "resnet50.npy"))
    assert found.shape[1] == spec.embedding_dim == FACTS["resnet50"].dim
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_slide_embedded_with_an_exported_h_optimus_0_are_those_of_eager_timm(
    references: Path, tmp_path: Path
) -> None:
    model = tmp_path / "h0.pt2"
    folder = references / "H-optimus-0"
    assert main(["models", "export", str(folder), "--as", "h0", "-o", str(model)]) == 0
    arguments = ["embed", str(EXAMPLE_SLIDE), "--model", str(model), "--device", "cpu",
                 "--out", str(tmp_path / "out"), *PLAN]  # fmt: skip
    assert main(arguments) == 0
    with h5py.File(tmp_path / "out" / "h0" / "CMU-1-Small-Region.h5") as file:
        corners = [(int(x), int(y)) for x, y in file["coords"][:]]
        found = torch.from_numpy(file["features"][:]).double()
    assert corners == planned(tmp_path)
    found = found[::SHOWN]
    expected = torch.from_numpy(np.load(references / "H-optimus-0.npy"))
    assert found.shape == expected.shape
    assert len(found) > 5
    assert functional.cosine_similarity(found, expected).min() >= 0.9999
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_table_says_which_rows_were_compared() -> None:
    for key, facts in FACTS.items():
        for library, keys in (("timm", TIMM), ("the transformers library", list(TRANSFORMERS))):
            compared = f"compared with {library} " in facts.verified
            assert compared == (key in keys), f"{key}: {facts.verified}"
        if key not in (*TIMM, *TRANSFORMERS):
            assert "not compared" in facts.verified, key
