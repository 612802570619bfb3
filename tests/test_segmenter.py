"""A tissue model answers for the whole slide, tile by tile, with no seam."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bioptimus.errors import OutOfDeviceMemoryError, TissueError, UsageError
from bioptimus.io.wsi import CoarseImage, Slide
from bioptimus.models.types import ModelSpec
from bioptimus.planning import PlanOptions, plan_slide
from bioptimus.runtime.segmenter import open_segmenter
from bioptimus.tiles import TileSpec
from cli.main import app
from tests import slides, tiny_models

SPEC = ModelSpec(name="shade", tile=TileSpec(size_px=64, mpp=8.0), output_kind="mask")


class Shade(nn.Module):
    """uint8 (N, 64, 64, 3) → (N, 64, 64): how far the mean of 5 x 5 pixels is below ``limit``."""

    def __init__(self, limit: float, scale: float = 1.0) -> None:
        super().__init__()
        self.limit, self.scale = limit, scale

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        grey = tiles.float().mean(dim=3)[:, None]
        around = torch.nn.functional.avg_pool2d(grey, 5, stride=1, padding=2)
        return (self.limit - around[:, 0]) * self.scale


class Share(Shade):
    """The same from 0 to 1."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(tiles))


def image(height: int = 200, width: int = 150) -> CoarseImage:
    pixels = np.random.default_rng(0).integers(100, 256, (height, width, 3), dtype=np.uint8)
    opaque = np.full((height, width), 255, dtype=np.uint8)
    return CoarseImage(pixels=pixels, opaque=opaque, downsample=(32.0, 32.0), level=0)


@pytest.mark.parametrize("module", [Shade(178), Share(178)])
def test_tiles_are_put_together_without_seams(module: nn.Module, tmp_path: Path) -> None:
    path = tiny_models.save_module(module, SPEC, tmp_path / "shade.pt2")
    coarse = image()
    found = open_segmenter(path, device="cpu")(coarse)
    grey = coarse.pixels.astype(np.float32).mean(axis=2)
    around = cv2.blur(grey, (5, 5), borderType=cv2.BORDER_REFLECT)
    sure = np.abs(around - 178) > 0.01
    assert (found == (around < 178))[sure].all()


def test_where_memory_is_short_fewer_tiles_go_through_the_model_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segmenter = open_segmenter(
        tiny_models.save_module(Shade(178), SPEC, tmp_path / "shade.pt2"), device="cpu"
    )
    expected = segmenter(image())
    model = segmenter._model
    whole, room = model.forward_batch, 2

    def forward(samples: list[Any], requests: list[Any], mode: str) -> list[Any]:
        if len(samples) > room:
            raise OutOfDeviceMemoryError("full")
        return whole(samples, requests, mode)

    monkeypatch.setattr(model, "forward_batch", forward)
    assert (segmenter(image()) == expected).all()
    room = 0
    with pytest.raises(OutOfDeviceMemoryError):
        segmenter(image())


def test_model_of_another_scale_gets_the_image_at_its_own(tmp_path: Path) -> None:
    spec = SPEC.with_(tile=TileSpec(size_px=64, mpp=16.0))
    path = tiny_models.save_module(Shade(178), spec, tmp_path / "shade.pt2")
    coarse = image()
    coarse.pixels[:100] = 240
    coarse.pixels[100:] = 120
    found = open_segmenter(path, device="cpu")(coarse)
    assert found.shape == coarse.opaque.shape
    assert not found[:94].any()
    assert found[106:].all()


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = tiny_models.save_module(Shade(178, float("nan")), SPEC, tmp_path / "shade.pt2")
    with pytest.raises(TissueError, match="shade: gave values that are no numbers"):
        open_segmenter(path, device="cpu")(image())


def test_model_that_gives_no_masks_is_refused(tmp_path: Path) -> None:
    path = tiny_models.save_tiny(tmp_path / "tiny.pt2")
    with pytest.raises(UsageError, match="gives no tissue masks"):
        open_segmenter(path, device="cpu")


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.pt2: no such tissue model"):
        open_segmenter(tmp_path / "gone.pt2")


def test_tiles_command_takes_a_tissue_model(tmp_path: Path) -> None:
    path = tiny_models.save_module(Shade(200), SPEC, tmp_path / "shade.pt2")
    pixels = slides.white(2048, 1024)
    pixels[:, :1024] = (150, 150, 150)  # a grey that our own search calls no tissue
    slide = slides.write_pyramid(tmp_path / "a.tiff", pixels, mpp=0.5)
    words = ["tiles", str(slide), "--no-overview", "--tile-size-px", "256", "--tissue", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "a.tiff: 16 of 32 tiles" in done.stdout


def test_plan_that_names_a_model_needs_it_loaded(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tiff", slides.white(300, 300), mpp=0.5)
    with Slide.open(path) as slide, pytest.raises(UsageError, match="pass it as segmenter"):
        plan_slide(slide, TileSpec(), PlanOptions(tissue="model.pt2"))
