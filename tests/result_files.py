"""Finished result files for tests, made by the writer itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import openslide
from PIL import Image

from bioptimus.inference.layout import digest_of
from bioptimus.inference.writers import FilePlan, HDF5Writer
from bioptimus.models.registry import SPECS
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.tiles import TileSpec, plan_tiles

TILE = TileSpec(size_px=224, mpp=0.5)
MPP = (0.25, 0.2505)
COLUMNS = 5
DIM = 12
NAMES = ("EPCAM", "KRT8", "Gène 3")
GENES = ("TP53", "EGFR")
OUTPUT_NAMES = ("brightness", "saturation", "haematoxylin_od")


def spec(mode: InferenceMode) -> ModelSpec:
    """A model that makes what the mode asks for."""
    return ModelSpec(
        name="tiny",
        version="3",
        licence="CC0-1.0",
        tile=TILE,
        output_kind="prediction_and_embedding",
        embedding_dim=DIM,
        prediction_dim=len(NAMES),
        output_names=NAMES,
        rna_dim=len(GENES),
        input_genes=GENES,
    )


def make_result(
    path: Path,
    *,
    rows: int = 12,
    mode: InferenceMode = InferenceMode.PREDICTION_WITH_EMBEDDING,
    failed: tuple[int, ...] = (3,),
    attributes: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a result of a 5-column slide; tile i has embedding i + j/100 and prediction i * (j+1).

    Args:
        path: Where; missing folders are made.
        rows: Tiles planned.
        mode: What the file holds.
        failed: Tiles that have no row.
        attributes: Root attributes to add or change.
        changes: Fields of the plan to change.
    """
    index = np.arange(rows)
    width, height = COLUMNS * 448, max(1, -(-rows // COLUMNS)) * 448
    name = f"{path.stem}.svs"
    facts = _facts(
        Path("/slides", name), (width, height), MPP, TILE, spec(mode), mode
    ) | (attributes or {})  # fmt: skip
    shade = np.linspace(120, 250, width // 32, dtype=np.uint8)
    thumbnail = np.broadcast_to(shade[None, :, None], (height // 32, width // 32, 3)).copy()
    mask = np.zeros((height // 64, width // 64), np.uint8)
    mask[1:-1, 1:-1] = 1
    values: dict[str, Any] = {
        "coords": np.stack([index % COLUMNS * 448, index // COLUMNS * 447], axis=1),
        "tissue_ratios": np.linspace(0.5, 1, rows, dtype=np.float32),
        "embedding_dim": DIM if mode.wants_embedding else 0,
        "prediction_dim": len(NAMES) if mode.wants_prediction else 0,
        "output_names": NAMES if mode.wants_prediction else (),
        "input_gene_names": GENES,
        "attributes": facts,
        "coords_attributes": _coords_facts(path, (width, height), MPP, TILE),
        "thumbnail": thumbnail,
        "thumbnail_downsample": (32.0, 32.0),
        "tissue_mask": mask,
        "tissue_mask_downsample": (64.0, 64.0),
        **_digest(facts),
    }
    plan = FilePlan(**(values | changes))
    embeddings = index[:, None] + np.arange(plan.embedding_dim) / 100
    predictions = index[:, None] * np.arange(1, plan.prediction_dim + 1)
    reasons = {row: f"tile {row} is damaged" for row in failed if row < rows}
    return _write(path, plan, embeddings, predictions, reasons)


def damage(path: Path, dataset: str, row: int = -1, *, by: int = 1) -> Path:
    """Change one value in place, as a disk or a script does, and nothing that tells of it."""
    with h5py.File(path, "r+") as file:
        values = file[dataset][row]
        if dataset == "failed_tiles":
            values["x"] += 1
        else:
            values = b"x" if isinstance(values, bytes) else values + by
        file[dataset][row] = values
    return path


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
    tile: TileSpec = TILE
    slide: Path = Path("slide.svs")


def sample_slide(slide: Path, *, tile: TileSpec | None = None, fail: int = 0) -> Sample:
    """Tiles of a real slide with simple measures of their pixels as features."""
    tile = tile or TILE
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


def write_result(path: Path, sample: Sample) -> Path:
    """Write the file of a sample; the tiles that failed come first in its plan."""
    failed = len(sample.failed)
    coords = np.concatenate([sample.failed, sample.coords.reshape(-1, 2)])
    embedding_dim, embeddings = _with_failed(sample.features, failed)
    prediction_dim, predictions = _with_failed(sample.predictions, failed)
    mode = {
        (True, True): InferenceMode.PREDICTION_WITH_EMBEDDING,
        (False, True): InferenceMode.PREDICTION,
    }.get((bool(embedding_dim), bool(prediction_dim)), InferenceMode.EMBEDDING)
    facts = _facts(
        sample.slide, sample.dimensions, sample.mpp, sample.tile, SPECS["lite0"], mode
    )  # fmt: skip
    pictures: dict[str, Any] = {}
    for name, picture in (("thumbnail", sample.thumbnail), ("tissue_mask", sample.mask)):
        if picture is not None:
            pictures[name] = picture[0].astype(np.uint8)
            pictures[f"{name}_downsample"] = picture[1]
    plan = FilePlan(
        coords=coords,
        tissue_ratios=np.full(len(coords), 0.9, np.float32),
        embedding_dim=embedding_dim,
        prediction_dim=prediction_dim,
        output_names=OUTPUT_NAMES if prediction_dim else (),
        attributes=facts,
        coords_attributes=_coords_facts(path, sample.dimensions, sample.mpp, sample.tile),
        **pictures,
        **_digest(facts),
    )
    reasons = dict.fromkeys(range(failed), "Bogus marker length")
    return _write(path, plan, embeddings, predictions, reasons)


def _with_failed(
    rows: npt.NDArray[np.float32] | None, failed: int
) -> tuple[int, npt.NDArray[np.float32]]:
    """Values per row, and the rows behind some that will not be written."""
    if rows is None:
        return 0, np.zeros((0, 0), np.float32)
    return rows.shape[1], np.concatenate([np.zeros((failed, rows.shape[1]), np.float32), rows])


def _write(
    path: Path,
    plan: FilePlan,
    embeddings: npt.NDArray[Any],
    predictions: npt.NDArray[Any],
    failed: Mapping[int, str],
) -> Path:
    with HDF5Writer.open(path, plan) as writer:
        for row, reason in failed.items():
            writer.fail_tile(row, stage="read", reason=reason)
        done = writer.pending()
        writer.write_rows(
            done,
            embeddings=embeddings[done].astype(np.float32) if plan.embedding_dim else None,
            predictions=predictions[done].astype(np.float32) if plan.prediction_dim else None,
        )
        return writer.finish(state="ok" if len(plan.coords) else "empty")


def _facts(
    slide: Path,
    dimensions: tuple[int, int],
    mpp: tuple[float, float],
    tile: TileSpec,
    model: ModelSpec,
    mode: InferenceMode,
) -> dict[str, Any]:
    """Root attributes."""
    return {
        "slide_path": str(slide),
        "slide_name": slide.name,
        "slide_width": dimensions[0],
        "slide_height": dimensions[1],
        "slide_size_bytes": 1234,
        "slide_vendor": "aperio",
        "slide_quickhash": slide.name,
        "mpp_x": mpp[0],
        "mpp_y": mpp[1],
        "mpp_source": "openslide.mpp-x",
        "objective_power": 40.0,
        "reader": "tiff",
        "model_name": model.name,
        "model_sha256": "ab" * 32,
        "model_spec": model.with_(output_names=(), input_genes=()).to_dict(),
        "mode": str(mode),
        "tile_size_px": tile.size_px,
        "tile_mpp": tile.mpp,
        "overlap_px": tile.overlap_px,
        "tissue_method": "stain",
        "versions": {"bioptimus-wsi": "0.1.0"},
        "warnings": [],
    }


def _coords_facts(
    path: Path, dimensions: tuple[int, int], mpp: tuple[float, float], tile: TileSpec
) -> dict[str, Any]:
    """Attributes of the positions."""
    return {
        "patch_size": tile.size_px,
        "patch_size_level0": round(tile.side_um / mpp[0]),
        "level0_magnification": 10 / mpp[0],
        "target_magnification": 10 / tile.mpp,
        "overlap": tile.overlap_px,
        "name": path.stem,
        "savetodir": str(path.parent),
        "level0_width": dimensions[0],
        "level0_height": dimensions[1],
    }


def _digest(facts: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "slide quickhash": facts["slide_quickhash"],
        "mpp": [facts["mpp_x"], facts["mpp_y"]],
        "model sha256": facts["model_sha256"],
        "mode": facts["mode"],
        "tile size (px)": facts["tile_size_px"],
        "tile mpp": facts["tile_mpp"],
        "overlap (px)": facts["overlap_px"],
    }
    return {"digest": digest_of(parameters), "digest_parameters": parameters}


def crashing(path: Path) -> Path:
    """A file that the HDF5 library does not survive: text of a kind that it does not know."""
    with h5py.File(path, "w") as file:
        file.attrs["format"] = "text"
    content = bytearray(path.read_bytes())
    # Class 9 (of any length), version 1; then its kind, 1 for text.
    content[content.index(b"\x19\x01\x01") + 1] = 2
    path.write_bytes(content)
    return path


def endless(path: Path) -> Path:
    """A file that the HDF5 library reads for ever: its first text ends where nothing is."""
    with h5py.File(path, "w") as file:
        file.attrs["format"] = "text"
    content = bytearray(path.read_bytes())
    size_at = content.index(b"GCOL") + 16 + 8
    content[size_at : size_at + 2] = (2048).to_bytes(2, "little")
    path.write_bytes(content)
    return path
