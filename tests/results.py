"""A result file as ``docs/hdf5.md`` describes it, written with plain h5py and real pixels."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import openslide
from PIL import Image

from bioptimus.models.registry import SPECS
from bioptimus.tiles import TileSpec, plan_tiles

DEFAULT_TILE = TileSpec()
OUTPUT_NAMES = ("brightness", "saturation", "haematoxylin_od")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What goes into a file.

    Attributes:
        coords: (N, 2) level-0 pixels.
        features: (N, D), or None to leave the dataset out.
        predictions: (N, 3), or None to leave the dataset out.
        thumbnail: (H, W, 3) and its downsample, or None.
        mask: (H, W) bool and its downsample, or None.
        failed: (M, 2) corners.
    """

    coords: npt.NDArray[np.int64]
    features: npt.NDArray[np.float32] | None
    predictions: npt.NDArray[np.float32] | None
    thumbnail: tuple[npt.NDArray[np.uint8], tuple[float, float]] | None
    mask: tuple[npt.NDArray[np.bool_], tuple[float, float]] | None
    failed: npt.NDArray[np.int64]
    dimensions: tuple[int, int]
    mpp: tuple[float, float] = (0.499, 0.499)
    tile: TileSpec = DEFAULT_TILE
    slide: Path = Path("slide.svs")


def sample_slide(slide: Path, *, tile: TileSpec | None = None, fail: int = 0) -> Sample:
    """Tiles of a real slide with simple measures of their pixels as features."""
    tile = tile or TileSpec()
    with openslide.OpenSlide(str(slide)) as opened:
        grid = plan_tiles(opened.dimensions, spec=tile, mpp=(0.499, 0.499))
        whole = np.asarray(opened.read_region((0, 0), 0, opened.dimensions).convert("RGB"))
    small = np.asarray(Image.fromarray(whole).resize((whole.shape[1] // 4, whole.shape[0] // 4)))
    mask = (small.max(axis=2).astype(int) - small.min(axis=2)) > 25
    kept: list[tuple[int, int]] = []
    rows: list[npt.NDArray[np.float32]] = []
    for place in grid:
        pixels = whole[place.y : place.y + round(place.height), place.x :][:, : round(place.width)]
        if (pixels.max(axis=2).astype(int) - pixels.min(axis=2)).mean() < 12:
            continue
        kept.append((place.x, place.y))
        rows.append(_measures(pixels))
    features = np.stack(rows)
    return Sample(
        coords=np.array(kept[fail:], np.int64),
        features=features[fail:],
        predictions=np.ascontiguousarray(features[fail:, :3]),
        thumbnail=(small, (4.0, 4.0)),
        mask=(mask, (4.0, 4.0)),
        failed=np.array(kept[:fail], np.int64).reshape(-1, 2),
        dimensions=(whole.shape[1], whole.shape[0]),
        tile=tile,
        slide=slide,
    )


def _measures(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    unit = pixels.astype(np.float32) / 255
    density = -np.log10(np.maximum(unit, 1 / 255))
    steps = np.abs(np.diff(unit, axis=0)).mean(axis=(0, 1))
    values = [
        [unit.mean(), (unit.max(axis=2) - unit.min(axis=2)).mean(), density[..., 0].mean()],
        unit.mean(axis=(0, 1)), unit.std(axis=(0, 1)), density.mean(axis=(0, 1)), steps,
        np.percentile(unit, (5, 25, 75, 95), axis=(0, 1)).ravel(),
    ]  # fmt: skip
    return np.concatenate([np.asarray(value, np.float32).ravel() for value in values])


def write_result(path: Path, sample: Sample, **changes: Any) -> Path:
    """Write the file; ``changes`` replace root attributes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        coords = file.create_dataset("coords", data=sample.coords.reshape(-1, 2))
        coords.attrs.update(_coords_attributes(sample))
        file["tissue_ratios"] = np.full(len(sample.coords), 0.9, np.float32)
        if sample.features is not None:
            file["features"] = sample.features
        if sample.predictions is not None:
            file["predictions"] = sample.predictions
            file["output_names"] = list(OUTPUT_NAMES)
        for name, picture in (("thumbnail", sample.thumbnail), ("tissue_mask", sample.mask)):
            if picture is not None:
                file[name] = picture[0].astype(np.uint8)
                file[name].attrs["downsample"] = picture[1]
        words = h5py.string_dtype()
        columns = [("x", "<i8"), ("y", "<i8"), ("stage", words), ("reason", words)]
        failed = np.zeros(len(sample.failed), columns)
        failed["x"], failed["y"] = sample.failed[:, 0], sample.failed[:, 1]
        failed["stage"], failed["reason"] = "read", "Bogus marker length"
        file["failed_tiles"] = failed
        file.attrs.update(_root_attributes(sample) | changes)
    return path


def _coords_attributes(sample: Sample) -> Mapping[str, Any]:
    return {
        "patch_size": sample.tile.size_px,
        "patch_size_level0": round(sample.tile.side_um / sample.mpp[0]),
        "level0_magnification": 10 / sample.mpp[0],
        "target_magnification": 10 / sample.tile.mpp,
        "overlap": sample.tile.overlap_px,
        "name": sample.slide.stem,
        "savetodir": "",
        "level0_width": sample.dimensions[0],
        "level0_height": sample.dimensions[1],
    }


def _root_attributes(sample: Sample) -> dict[str, Any]:
    return {
        "format": "bioptimus-tiles",
        "format_version": 1,
        "complete": True,
        "state": "ok" if len(sample.coords) else "empty",
        "tiles_planned": len(sample.coords) + len(sample.failed),
        "tiles_failed": len(sample.failed),
        "slide_path": str(sample.slide),
        "slide_name": sample.slide.name,
        "slide_width": sample.dimensions[0],
        "slide_height": sample.dimensions[1],
        "slide_size_bytes": 1_938_955,
        "slide_vendor": "aperio",
        "slide_quickhash": "00",
        "reader": "tiff",
        "mpp_x": sample.mpp[0],
        "mpp_y": sample.mpp[1],
        "mpp_source": "openslide.mpp-x",
        "model_name": "lite0",
        "model_sha256": "0" * 64,
        "model_spec": json.dumps(SPECS["lite0"].with_(output_names=()).to_dict()),
        "mode": "prediction_with_embedding",
        "tile_size_px": sample.tile.size_px,
        "tile_mpp": sample.tile.mpp,
        "overlap_px": sample.tile.overlap_px,
        "tissue": json.dumps({"method": "auto"}),
        "parameters": json.dumps({"min_tissue": 0.5}),
        "versions": json.dumps({"bioptimus": "0.1.0"}),
        "digest": "0" * 64,
        "digest_parameters": "{}",
    }
