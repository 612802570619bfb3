"""Folder trees of other pipelines: TRIDENT and CLAM. Layouts and names only, none of their code."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from bioptimus.convert.pieces import ConvertOptions, Piece
from bioptimus.inference.hdf5_image import HDF5Image
from bioptimus.inference.results import Result, RowsName
from bioptimus.tissue import TissueMask, polygons


def trident(result: Result, relative: PurePath, _: ConvertOptions) -> list[Piece]:
    """A TRIDENT job folder: coordinates, features, thumbnail, tissue contours.

    The tree is flat: one name per slide.
    """
    name = relative.stem
    tile = result.tile
    run = PurePath(f"{10 / tile.mpp:g}x_{tile.size_px}px_{tile.overlap_px}px_overlap")
    pieces = [
        Piece(
            path=run / "patches" / f"{name}_patches.h5",
            write=lambda path: _write_rows(result, path, [], _trident_coords(result, name, run)),
        )
    ]
    if result.embedding_dim:
        folder = run / f"features_{result.model.name}"
        features = {"name": name, "savetodir": str(folder)}
        pieces.append(
            Piece(
                path=folder / f"{name}.h5",
                write=lambda path: _write_rows(
                    result,
                    path,
                    ["features"],
                    _trident_coords(result, name, run),
                    features_attributes=features,
                ),
            )
        )
    if result.holds("thumbnail"):
        pieces.append(
            Piece(
                path=PurePath("thumbnails", f"{name}.jpg"),
                write=lambda path: _write_thumbnail(result, path),
            )
        )
    if result.holds("tissue_mask"):
        pieces.append(
            Piece(
                path=PurePath("contours_geojson", f"{name}.geojson"),
                write=lambda path: _write_contours(result, path),
            )
        )
    return pieces


def clam(result: Result, relative: PurePath, _: ConvertOptions) -> list[Piece]:
    """CLAM's folders: ``patches``, and ``h5_files`` and ``pt_files`` of a feature folder.

    The tree is flat: one name per slide.
    """
    name = relative.stem
    pieces = [
        Piece(
            path=PurePath("patches", f"{name}.h5"),
            write=lambda path: _write_rows(result, path, [], _clam_coords(result, name)),
        )
    ]
    if result.embedding_dim:
        pieces += [
            Piece(
                path=PurePath("h5_files", f"{name}.h5"),
                write=lambda path: _write_rows(result, path, ["features"], {}),
            ),
            Piece(
                path=PurePath("pt_files", f"{name}.pt"),
                write=lambda path: _write_tensor(result, path),
            ),
        ]
    return pieces


def _trident_coords(result: Result, name: str, run: PurePath) -> dict[str, Any]:
    """Attributes of ``coords``: those of the result, for the tree they now lie in."""
    tile = result.tile
    return {
        "patch_size": tile.size_px,
        "patch_size_level0": round(result.tile_level0[0]),
        "level0_magnification": 10 / result.mpp[0],
        "target_magnification": 10 / tile.mpp,
        "overlap": tile.overlap_px,
        "name": name,
        "savetodir": str(run),
        "level0_width": result.dimensions[0],
        "level0_height": result.dimensions[1],
    }


def _clam_coords(result: Result, name: str) -> dict[str, Any]:
    """Attributes of ``coords``: the tiles as crops of level 0, which every slide has."""
    size = list(result.dimensions)
    return {
        "patch_size": round(result.tile_level0[0]),
        "patch_level": 0,
        "downsample": [1.0, 1.0],
        "downsampled_level_dim": size,
        "level_dim": size,
        "name": name,
        "save_path": "patches",
    }


def _write_rows(
    result: Result,
    path: Path,
    names: list[RowsName],
    coords_attributes: Mapping[str, Any],
    *,
    features_attributes: Mapping[str, Any] | None = None,
) -> None:
    """An HDF5 file of ``coords`` and the datasets named, as float32, copied in chunks."""
    with HDF5Image() as image:
        for name in names:
            shape = (len(result), result.embedding_dim)
            image.add_rows(name, shape=shape, dtype="float32")
        if features_attributes:
            image.set_attributes(features_attributes, dataset="features")
        image.add_array("coords", result.coords)
        image.set_attributes(coords_attributes, dataset="coords")
    image.save(path, lambda _, first, last: _float32(result, first, last))


def _write_tensor(result: Result, path: Path) -> None:
    import torch

    torch.save(torch.from_numpy(_float32(result)), path)


def _float32(result: Result, first: int = 0, last: int | None = None) -> np.ndarray[Any, Any]:
    """(n, D) embeddings of some rows; a copy of those stored otherwise only."""
    return result.read("features", first, last).astype(np.float32, copy=False)


def _write_thumbnail(result: Result, path: Path) -> None:
    from PIL import Image

    assert result.thumbnail is not None
    Image.fromarray(result.thumbnail.pixels).save(path, "JPEG", quality=90)


def _write_contours(result: Result, path: Path) -> None:
    """Tissue as polygons in level-0 pixels, one feature for each piece of tissue."""
    features = [
        {
            "type": "Feature",
            "properties": {"tissue_id": number},
            "geometry": {
                "type": "Polygon",
                "coordinates": [[*ring, ring[0]] for ring in (r.tolist() for r in rings)],
            },
        }
        for number, rings in enumerate(tissue_polygons(result))
    ]
    text = json.dumps({"type": "FeatureCollection", "features": features})
    path.write_text(text, encoding="utf-8")


def tissue_polygons(result: Result) -> list[list[np.ndarray[Any, np.dtype[np.float64]]]]:
    """For each piece of tissue its outer ring and its holes, (n, 2) level-0 pixels."""
    picture = result.tissue_mask
    if picture is None:
        return []
    mask = TissueMask(
        mask=picture.pixels > 0,
        downsample=picture.downsample,
        method=str(result.attributes.get("tissue_method", "")),
        steps=(),
    )
    return polygons(mask)
