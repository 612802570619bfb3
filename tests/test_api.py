"""`embed_slide`: the main job as one call."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

import bioptimus
from bioptimus.errors import OutputMismatchError, SlideOpenError, UsageError
from bioptimus.inference.results import Result
from bioptimus.pipeline import SlideOptions
from bioptimus.planning import PlanOptions


def test_one_call_embeds_a_slide_inside_a_running_loop(example_slide: Path, tmp_path: Path) -> None:
    async def notebook() -> Result:
        return bioptimus.embed_slide(example_slide, out=tmp_path, predictions=True)

    result = asyncio.run(notebook())
    assert result.path == tmp_path / "lite0" / "CMU-1-Small-Region.h5"
    assert result.features.shape == (len(result), 424)
    assert result.predictions.shape == (len(result), 6)

    before = result.path.stat().st_mtime_ns
    again = bioptimus.embed_slide(example_slide, out=tmp_path, predictions=True)
    assert again.path.stat().st_mtime_ns == before, "what is done is only opened"
    np.testing.assert_array_equal(again.features, result.features)

    other = SlideOptions(plan=PlanOptions(min_tissue=0.9))
    with pytest.raises(OutputMismatchError, match=r"min tissue is 0\.5 there, 0\.9 now"):
        bioptimus.embed_slide(example_slide, out=tmp_path, predictions=True, options=other)


def test_a_slide_that_cannot_be_read_raises_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "empty.svs").write_bytes(b"")
    with pytest.raises(SlideOpenError, match=r"empty\.svs"):
        bioptimus.embed_slide(tmp_path / "empty.svs", out=tmp_path / "out")


def test_a_folder_of_slides_is_not_one_slide(example_slide: Path, tmp_path: Path) -> None:
    for name in ("a.svs", "b.svs"):
        shutil.copy(example_slide, tmp_path / name)
    with pytest.raises(UsageError, match="2 slides"):
        bioptimus.embed_slide(tmp_path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing was begun"


def test_the_package_names_its_public_parts() -> None:
    assert {"draw", "embed_slide", "open_result"} <= set(dir(bioptimus))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bioptimus.nothing  # type: ignore[attr-defined]
