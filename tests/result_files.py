"""Finished result files for tests, made by the writer itself."""

from pathlib import Path
from typing import Any

import numpy as np

from bioptimus.inference.layout import digest_of
from bioptimus.inference.writers import FilePlan, HDF5Writer
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.tiles import TileSpec

TILE = TileSpec(size_px=224, mpp=0.5)
MPP = (0.25, 0.2505)
COLUMNS = 5
DIM = 12
NAMES = ("EPCAM", "KRT8", "Gène 3")
GENES = ("TP53", "EGFR")


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
    model = spec(mode)
    index = np.arange(rows)
    width, height = COLUMNS * 448, max(1, -(-rows // COLUMNS)) * 448
    name = f"{path.stem}.svs"
    sha256 = (attributes or {}).get("model_sha256", "ab" * 32)
    parameters = {
        "slide quickhash": name,
        "mpp": list(MPP),
        "model sha256": sha256,
        "mode": str(mode),
        "tile size (px)": TILE.size_px,
        "tile mpp": TILE.mpp,
        "overlap (px)": TILE.overlap_px,
    }
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
        "attributes": {
            "slide_path": f"/slides/{name}",
            "slide_name": name,
            "slide_width": width,
            "slide_height": height,
            "slide_size_bytes": 1234,
            "slide_vendor": "aperio",
            "slide_quickhash": name,
            "mpp_x": MPP[0],
            "mpp_y": MPP[1],
            "mpp_source": "openslide.mpp-x",
            "objective_power": 40.0,
            "reader": "tiff",
            "model_name": model.name,
            "model_sha256": sha256,
            "model_spec": model.with_(output_names=(), input_genes=()).to_dict(),
            "mode": str(mode),
            "tile_size_px": TILE.size_px,
            "tile_mpp": TILE.mpp,
            "overlap_px": TILE.overlap_px,
            "tissue_method": "stain",
            "versions": {"bioptimus-wsi": "0.1.0"},
            "warnings": [],
        }
        | (attributes or {}),
        "coords_attributes": {
            "patch_size": TILE.size_px,
            "patch_size_level0": 448,
            "level0_magnification": 10 / MPP[0],
            "target_magnification": 10 / TILE.mpp,
            "overlap": TILE.overlap_px,
            "name": path.stem,
            "savetodir": str(path.parent),
            "level0_width": width,
            "level0_height": height,
        },
        "thumbnail": thumbnail,
        "thumbnail_downsample": (32.0, 32.0),
        "tissue_mask": mask,
        "tissue_mask_downsample": (64.0, 64.0),
        "digest": digest_of(parameters),
        "digest_parameters": parameters,
    }
    plan = FilePlan(**(values | changes))
    with HDF5Writer.open(path, plan) as writer:
        for row in failed if rows else ():
            writer.fail_tile(row, stage="read", reason=f"tile {row} is damaged")
        done = writer.pending()
        embeddings = (done[:, None] + np.arange(plan.embedding_dim) / 100).astype(np.float32)
        predictions = (done[:, None] * np.arange(1, plan.prediction_dim + 1)).astype(np.float32)
        writer.write_rows(
            done,
            embeddings=embeddings if plan.embedding_dim else None,
            predictions=predictions if plan.prediction_dim else None,
        )
        return writer.finish(state="ok" if rows else "empty")
