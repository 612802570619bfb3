"""GeoJSON for QuPath: tiles, or outlines of the tissue, with measurements.

Coordinates are level-0 pixels, as QuPath has them of slides without bounds, and of others when they
are imported with ``--no-crop``.
"""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from bioptimus.convert.pieces import ConvertOptions, Piece, measured
from bioptimus.convert.trees import tissue_polygons
from bioptimus.inference.results import Picture, Result

_NAMESPACE = uuid.UUID("5f7c4f0e-6b5e-5a4c-9b7f-0f4f3a0f9d11")
_ROWS_AT_ONCE = 4096


def geojson(result: Result, relative: PurePath, options: ConvertOptions) -> list[Piece]:
    """One GeoJSON file of the tiles, or of the tissue."""
    names = measured(result, options)
    features = _tissue if options.geometry == "tissue" else _tiles
    return [
        Piece(
            path=relative.with_suffix(".geojson"),
            write=lambda path: _write(path, features(result, names)),
        )
    ]


def _write(path: Path, features: Iterator[dict[str, Any]]) -> None:
    """Feature by feature, so that a million tiles need no more memory than one."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"type":"FeatureCollection","features":[')
        separator = "\n"
        for feature in features:
            file.write(separator + json.dumps(feature, ensure_ascii=False))
            separator = ",\n"
        file.write("\n]}\n")


def _tiles(result: Result, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    columns = [result.output_names.index(name) for name in names]
    limit = np.array(result.dimensions)
    for first in range(0, len(result), _ROWS_AT_ONCE):
        corners = result.coords[first : first + _ROWS_AT_ONCE]
        # QuPath asks about every object that reaches outside the image.
        ends = np.minimum(corners + np.array(result.tile_level0), limit).round(2)
        values = _values(result, first, columns)
        ratios = result.tissue_ratios[first : first + _ROWS_AT_ONCE]
        for (x, y), (right, lower), ratio, row in zip(
            corners.tolist(), ends.tolist(), ratios.tolist(), values, strict=True
        ):
            ring = [[x, y], [right, y], [right, lower], [x, lower], [x, y]]
            measurements = {"tissue_ratio": ratio, **dict(zip(names, row, strict=True))}
            yield _feature(result, f"{x},{y}", [ring], "tile", measurements)


def _values(result: Result, first: int, columns: list[int]) -> list[list[float]]:
    last = min(first + _ROWS_AT_ONCE, len(result))
    if not columns:
        return [[]] * (last - first)
    rows: list[list[float]] = result.read("predictions", first, last)[:, columns].tolist()
    return rows


def _tissue(result: Result, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    mask = result.tissue_mask
    if mask is None:
        return
    islands = _islands(mask)
    of_tiles = _pixels(islands, result.centers / mask.downsample)
    count = int(islands.max()) + 1
    tiles = np.bincount(of_tiles, minlength=count)
    sums = {name: np.bincount(of_tiles, result.prediction(name), count) for name in names}
    for number, rings in enumerate(tissue_polygons(result), start=1):
        # The first of the leftmost corners is the upper left one of a pixel of the island.
        corner = min(map(tuple, (rings[0] / mask.downsample).round().tolist()))
        island = int(_pixels(islands, np.array([corner]))[0])
        area = _area(rings[0]) - sum(map(_area, rings[1:]))
        measurements = {
            "area_um2": area * result.mpp[0] * result.mpp[1],
            "tiles": int(tiles[island]),
        }
        if tiles[island]:
            for name in names:
                measurements[f"{name} mean"] = float(sums[name][island] / tiles[island])
        closed = [[*ring, ring[0]] for ring in (ring.tolist() for ring in rings)]
        feature = _feature(result, f"tissue {number}", closed, "annotation", measurements)
        feature["properties"] |= {
            "name": f"Tissue {number}",
            "classification": {"name": "Tissue", "color": [0, 158, 115]},
        }
        yield feature


def _feature(
    result: Result, key: str, rings: list[Any], kind: str, measurements: dict[str, float]
) -> dict[str, Any]:
    return {
        "type": "Feature",
        # Of the content, so that converting again gives the same file.
        "id": str(uuid.uuid5(_NAMESPACE, f"{result.digest} {key}")),
        "geometry": {"type": "Polygon", "coordinates": rings},
        "properties": {
            "objectType": kind,
            "measurements": {name: float(f"{value:.7g}") for name, value in measurements.items()},
        },
    }


def _area(ring: npt.NDArray[np.float64]) -> float:
    """Area of a ring in square pixels, whichever way it turns."""
    x, y = ring.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


def _islands(mask: Picture) -> npt.NDArray[np.int32]:
    """The mask with its islands numbered from 1, as its polygons part them: diagonals touch."""
    import cv2

    _, islands = cv2.connectedComponents((mask.pixels > 0).astype(np.uint8), connectivity=8)
    return np.asarray(islands, np.int32)


def _pixels(
    image: npt.NDArray[np.int32], positions: npt.NDArray[np.float64]
) -> npt.NDArray[np.int32]:
    """Values of the pixels that hold the positions (x, y), in pixels; 0 outside the image."""
    x, y = np.floor(positions).astype(np.int64).T
    height, width = image.shape
    within = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    values = np.zeros(len(positions), np.int32)
    values[within] = image[y[within], x[within]]
    return values
