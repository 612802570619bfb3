"""`embed_slide`: the main job as one call."""

import asyncio
import contextlib
import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bioptimus
from bioptimus.batch import run as batch_run
from bioptimus.batch.run import RunConfig, run
from bioptimus.batch.submit import ArrayOptions
from bioptimus.batch.threads import plan_threads
from bioptimus.convert import ConvertOptions, convert
from bioptimus.errors import (
    BioptimusError,
    CheckpointError,
    OutputMismatchError,
    SlideOpenError,
    UsageError,
)
from bioptimus.inference.results import Result
from bioptimus.inference.schemas import ModelRequest
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.jobs import SlideOptions
from bioptimus.models.clients.local import InProcessClient
from bioptimus.models.types import ModelSpec
from bioptimus.planning import PlanOptions, plan_slide
from bioptimus.runtime import build_server_model
from bioptimus.runtime.machine import available_cores
from bioptimus.tiles import TileSpec, plan_tiles
from bioptimus.tissue import TissueOptions
from bioptimus.view.page import PictureOptions
from tests.models import fake_model
from tests.slides import tissue, write_pyramid
from tests.tiny_models import TINY, save_tiny


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
    with pytest.raises(OutputMismatchError, match=r"min tissue is 0\.5 there, 0\.9 now") as caught:
        bioptimus.embed_slide(example_slide, out=tmp_path, predictions=True, options=other)
    assert "pass --overwrite or another --out" in str(caught.value)
    assert caught.value.__notes__ == [
        "in Python --overwrite is SlideOptions.overwrite, --out is the argument out"
    ]


def test_a_loaded_model_serves_slide_after_slide(
    example_slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = bioptimus.embed_slide(example_slide, out=tmp_path / "named")
    cores = available_cores()
    torch.set_num_threads(cores)
    model = build_server_model("lite0")

    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded again")

    monkeypatch.setattr(batch_run, "load_model", load)
    for folder in ("first", "second"):
        result = bioptimus.embed_slide(example_slide, out=tmp_path / folder, model=model)
        # The last digits depend on which tiles share a batch, and that on the threads.
        np.testing.assert_allclose(result.features, named.features, rtol=0, atol=2e-5)
    # As many passes side by side as the threads of this run ask for, not those of the loading.
    slots = vars(vars(model._runner)["_slots"])
    assert slots["_initial_value"] == cores // plan_threads(on_cpu=True, slides=1).threads

    before = named.path.stat().st_mtime_ns
    again = bioptimus.embed_slide(example_slide, out=tmp_path / "named", model=model)
    assert again.path.stat().st_mtime_ns == before, "done under its name is done"


def test_what_contradicts_a_loaded_model_is_refused(example_slide: Path, tmp_path: Path) -> None:
    model = build_server_model(save_tiny(tmp_path / "tiny.pt2"))
    for options, words in (
        ({"checkpoint": "h0.pt2"}, "tiny is loaded already"),
        ({"device": "cuda"}, "device cuda: tiny is on cpu"),
        ({"predictions": True}, "tiny: makes embeddings only"),
    ):
        given: dict[str, Any] = options
        with pytest.raises(UsageError, match=words):
            bioptimus.embed_slide(example_slide, out=tmp_path, model=model, **given)
    # Its results could not be told from those of another model of that name.
    with pytest.raises(CheckpointError, match="made in memory"):
        bioptimus.embed_slide(example_slide, out=tmp_path, model=fake_model()[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # Integers would cut every value, without a word.
        ({"slide": {"dtype": "int8"}}, "dtype 'int8': must be float32 or float16"),
        ({"slide": {"dtype": "float64"}}, "dtype 'float64': must be float32 or float16"),
        ({"slide": {"dtype": "banana"}}, "dtype 'banana': must be float32 or float16"),
        ({"slide": {"max_failed_tiles": -3}}, "max failed tiles -3: must be a share, 0 to 1"),
        ({"slide": {"max_failed_tiles": math.nan}}, "max failed tiles nan: must be a share"),
        ({"slide": {"mode": "embedding"}}, "mode 'embedding': must be of type InferenceMode"),
        ({"opening": {"reader": "fast"}}, "reader 'fast': must be auto or openslide"),
        ({"opening": {"icc": "SRGB"}}, "icc 'SRGB': must be none or srgb"),
        ({"tile": {"overlap_px": 10.5}}, r"overlap px 10\.5: must be a whole number"),
        ({"tile": {"mpp": "0.5"}}, "mpp '0.5': must be a number"),
        ({"tile": {"mpp": None}}, "mpp None: must be a number"),
        ({"tile": {"size_px": True}}, "size px True: must be a whole number"),
        ({"tile": {"size_px": math.nan}}, "size px nan: must be a whole number"),
        ({"tile": {"size_px": -224}}, "tile size -224 px: must be at least 1"),
        ({"plan": {"overlap_px": -1}}, "overlap -1 px: must be at least 0"),
        ({"plan": {"tile_size_px": 0}}, "tile size 0 px: must be at least 1"),
        ({"plan": {"tile_mpp": -1}}, "tile mpp -1: must be a positive number"),
        ({"plan": {"tile_mpp": math.inf}}, "tile mpp inf: must be a positive number"),
        ({"plan": {"tile_size_px": 64, "overlap_px": 64}}, "overlap 64 px: must be at least 0 and"),
        ({"plan": {"tile_size_px": 64.5}}, r"tile size px 64\.5: must be a whole number or None"),
        ({"plan": {"min_tissue": "0.5"}}, "min tissue '0.5': must be a number"),
        ({"plan": {"tissue": Path("mask.png")}}, r"mask.png'\): must be a text"),
        ({"plan": {"tissue_class": ("Tumor", "")}}, "tissue class: must be the name of a class"),
        ({"plan": {"keep_pen": "no"}}, "keep pen 'no': must be True or False"),
        ({"opening": {"mpp_override": "0.5"}}, "mpp override '0.5': must be a number or None"),
        ({"opening": {"mpp_fallback": [0.5, 0.5]}}, "must be a number or None"),
        ({"slide": {"max_failed_tiles": None}}, "max failed tiles None: must be a number"),
        ({"slide": {"plan": OpenOptions()}}, "must be of type PlanOptions"),
        ({"tissue": {"min_object_um2": "9"}}, "min object um2 '9': must be a number"),
        ({"tissue": {"method": "stain"}}, "method 'stain': must be auto or none"),
        ({"picture": {"width_px": "800"}}, "width px '800': must be a whole number"),
        ({"convert": {"geometry": "tile"}}, "geometry 'tile': must be tiles or tissue"),
        ({"convert": {"measurements": "TP53"}}, "'TP53': must be a list, each a text"),
        ({"array": {"tasks": "8"}}, "tasks '8': must be a whole number"),
        ({"run": {"inputs": "a.svs"}}, "inputs 'a.svs': must be a list, each a text"),
        ({"run": {"inputs": (Path("a.svs"),)}}, "must be a list, each a text"),
        ({"run": {"out": "out"}}, "out 'out': must be of type Path"),
        ({"run": {"batch_size": "8"}}, "batch size '8': must be a whole number or auto or None"),
        ({"run": {"workers": True}}, "workers True: must be a whole number or None"),
        ({"run": {"max_wait_ms": "30"}}, "max wait ms '30': must be a number"),
        ({"run": {"stage_gb": "100"}}, "stage gb '100': must be a number"),
        ({"run": {"batch_size": 0}}, "batch size 0: must be at least 1"),
        ({"run": {"workers": 0}}, "workers 0: must be at least 1"),
        ({"run": {"readers": -1}}, "readers -1: must be at least 1"),
        ({"run": {"threads": 0}}, "threads 0: must be at least 1"),
        ({"run": {"max_wait_ms": math.nan}}, "max wait nan ms: must be 0 or more"),
    ],
)
def test_options_that_the_command_would_refuse_are_refused(
    options: dict[str, dict[str, Any]], words: str
) -> None:
    ((what, values),) = options.items()
    kinds: dict[str, Callable[..., object]] = {
        "slide": SlideOptions,
        "opening": OpenOptions,
        "plan": PlanOptions,
        "tile": TileSpec,
        "tissue": TissueOptions,
        "picture": PictureOptions,
        "convert": ConvertOptions,
        "array": ArrayOptions,
        "run": partial(RunConfig, inputs=("a.svs",), out=Path("out")),
    }
    with pytest.raises(UsageError, match=words):
        kinds[what](**values)


WRONG: tuple[object, ...] = (
    None,
    "0.5",
    3,
    -1,
    0,
    0.5,
    math.nan,
    math.inf,
    True,
    [1],
    (1, 2),
    {},
    b"x",
    object(),
)
NO_PATHS: tuple[object, ...] = ("", "a\0b", Path("a\0b"), "\ud800")


def test_no_call_answers_a_wrong_value_with_an_error_that_is_not_ours(
    example_slide: Path, tmp_path: Path
) -> None:
    # Of tiles of 64 px: there are some hundreds of them, not ten thousands.
    spec = TINY.with_(tile=TileSpec(size_px=64))
    model = build_server_model(save_tiny(tmp_path / "tiny.pt2", spec))
    result = bioptimus.embed_slide(example_slide, out=tmp_path, model=model)
    pixels = np.zeros((224, 224, 3), np.uint8)
    config = RunConfig(inputs=(str(example_slide),), out=tmp_path)
    slide = Slide.open(example_slide)
    client = InProcessClient(model)
    everywhere = (*WRONG, *NO_PATHS, np.zeros(3))
    calls: list[tuple[Callable[..., object], dict[str, Any], str, Sequence[object]]] = [
        (bioptimus.embed_slide, {"model": model}, "slide", everywhere),
        (bioptimus.embed_slide, {"slide": example_slide}, "model checkpoint device", everywhere),
        (bioptimus.embed_slide, {"slide": example_slide}, "options bulk_rna", WRONG[1:]),
        (bioptimus.embed_slide, {"slide": example_slide}, "batch_size", ["8", 0, 0.5, True]),
        (bioptimus.embed_slide, {"slide": example_slide, "model": model}, "out", WRONG[2:]),
        (bioptimus.open_result, {}, "path", everywhere),
        (bioptimus.open_result, {"path": result.path}, "check", everywhere),
        (result.read, {}, "name", everywhere),
        (result.read, {"name": "coords"}, "start stop", everywhere),
        (result.prediction, {}, "name", everywhere),
        (bioptimus.draw, {}, "result", everywhere),
        (bioptimus.draw, {"result": result}, "picture width_px", everywhere),
        (bioptimus.draw, {"result": result, "picture": "embedding"}, "fitted", WRONG[1:]),
        (bioptimus.draw, {"result": result, "picture": "overview"}, "slide", WRONG[2:]),
        (bioptimus.draw, {"result": result, "picture": "clusters"}, "count", ["3", None, 0.5]),
        (bioptimus.draw, {"result": result, "picture": "nearest"}, "row", ["3", True, 0.5]),
        (bioptimus.draw, {"result": result, "picture": "prediction"}, "column", [3, None]),
        (bioptimus.draw(result, "overview", width_px=300).save, {}, "path", [*everywhere, "a.b"]),
        (build_server_model, {}, "name", everywhere),
        (build_server_model, {"name": "lite0"}, "checkpoint device sha256", WRONG[1:]),
        (build_server_model, {"name": "lite0"}, "use_compiled", WRONG[:8]),
        (InProcessClient, {}, "model", everywhere),
        (InProcessClient, {"model": model}, "max_batch_size max_wait_ms", everywhere),
        (InProcessClient, {"model": model}, "dynamic_batching", everywhere),
        (client.embed, {}, "body", everywhere),
        (client.embed_batch, {}, "bodies", everywhere),
        (ModelRequest.from_pixels, {}, "pixels", everywhere),
        (ModelRequest.from_pixels, {"pixels": pixels}, "slide_name x tissue_ratio", everywhere),
        (ModelRequest.from_pixels, {"pixels": pixels}, "resolution bulk_rna", everywhere),
        (ModelSpec, {}, "name", everywhere),
        (ModelSpec, {"name": "mine"}, "tile mean std output_names precision", everywhere),
        (Slide.open, {}, "path", everywhere),
        (Slide.open, {"path": example_slide}, "options", everywhere),
        (slide.tile_reader, {}, "spec", everywhere),
        (slide.coarse_image, {}, "mpp", everywhere),
        (slide.thumbnail, {}, "max_px", everywhere),
        (plan_slide, {"slide": slide, "spec": TileSpec()}, "slide spec", everywhere),
        (plan_slide, {"slide": slide, "spec": TileSpec()}, "options segmenter", WRONG[1:]),
        (plan_tiles, {"spec": TileSpec(), "mpp": (0.5, 0.5)}, "dimensions", everywhere),
        (plan_tiles, {"spec": TileSpec(), "dimensions": (9, 9)}, "mpp", everywhere),
        (run, {"config": config}, "config listener stop model", WRONG[1:]),
        (convert, {"out": tmp_path, "to": "npz"}, "arguments", everywhere),
        (convert, {"arguments": [result.path], "to": "npz"}, "out", everywhere),
        (convert, {"arguments": [result.path], "out": tmp_path}, "to", everywhere),
    ]
    for call, given, names, values in calls:
        for name, value in itertools.product(names.split(), values):
            with contextlib.suppress(BioptimusError):  # a few of the values are right
                call(**given | {name: value})
    client.close()
    slide.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bioptimus.open_result(3), "path 3: must be of type Path or a text"),  # type: ignore[arg-type]
        (lambda: bioptimus.open_result(""), "path: an empty path was given"),
        (lambda: bioptimus.open_result("a\0b"), r"path 'a\\x00b': no file can have such a name"),
        (lambda: bioptimus.open_result("\ud800"), r"path '\\ud800': no file can have such a name"),
        (
            lambda: bioptimus.embed_slide("a.svs", model=3),  # type: ignore[arg-type]
            "model 3: must be the name of one, the path of a .pt2, or one that build_server_model",
        ),
        (
            lambda: bioptimus.embed_slide("a.svs", options={"dtype": "float16"}),  # type: ignore[arg-type]
            "options .'dtype': 'float16'.: must be of type SlideOptions or None",
        ),
        (lambda: plan_tiles((9, 9, 3), spec=TileSpec(), mpp=(1, 1)), "must be 2 values, each a"),  # type: ignore[arg-type]
        (lambda: convert("a.h5", Path("out"), to="npz"), "must be a list, each of type Path"),  # type: ignore[arg-type]
    ],
)
def test_a_call_says_what_its_argument_must_be(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


def test_a_picture_says_which_options_it_has(example_slide: Path, tmp_path: Path) -> None:
    result = bioptimus.embed_slide(example_slide, out=tmp_path)
    with pytest.raises(UsageError, match=r"colour: clusters has no such option; .* are count"):
        bioptimus.draw(result, "clusters", colour="red")
    with pytest.raises(UsageError, match=r"nearest needs the option row; .* are row, count"):
        bioptimus.draw(result, "nearest")


def test_numbers_of_a_table_count_as_pythons_own(tmp_path: Path) -> None:
    model = build_server_model(save_tiny(tmp_path / "tiny.pt2"))
    slide = write_pyramid(tmp_path / "a.tif", tissue(128, 128), mpp=1.0, factors=(1,))

    def embed(mpp: float, share: float, overlap: int, batch: int) -> int:
        options = SlideOptions(
            opening=OpenOptions(mpp_override=mpp),
            plan=PlanOptions(tissue="none", min_tissue=share, overlap_px=overlap),
        )
        result = bioptimus.embed_slide(
            slide, out=tmp_path, model=model, options=options, batch_size=batch
        )
        return result.path.stat().st_mtime_ns

    # As pandas and numpy give them; mypy takes numpy's float64 for a float, and nothing else.
    cells: Any = (np.float32(0.5), np.float64(0.5), np.int64(2), np.int32(8))
    made = embed(*cells)
    assert embed(0.5, 0.5, 2, 8) == made, "what is done is only opened"


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
