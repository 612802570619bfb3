"""Masks that users bring: a PNG of the whole slide, or polygons as GeoJSON."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from PIL import Image, UnidentifiedImageError

from bioptimus.counting import counted
from bioptimus.errors import TissueError
from bioptimus.kinds import checks_kinds
from bioptimus.tissue.mask import TissueMask, TissueStep

Ring = npt.NDArray[np.float64]

# Polygons are drawn at the scale at which tissue is judged.
MASK_MPP = 8.0
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# A mask of a 200k x 200k slide at 8 µm/px has 40 million pixels.
MOST_MASK_PIXELS = 80_000_000


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A geometry of GeoJSON, and the class of the feature that it is of; empty if it has none."""

    kind: str
    coordinates: Any
    of: str


@checks_kinds
def load_mask(
    path: Path,
    *,
    dimensions: tuple[int, int],
    mpp: tuple[float, float],
    classes: tuple[str, ...] = (),
) -> TissueMask:
    """Read a tissue mask from a file.

    A PNG covers the whole slide at any scale; every value but 0 is tissue. Polygons of a GeoJSON
    file are in level-0 pixels counted from the slide's corner, as QuPath writes them for slides
    without bounds: a FeatureCollection, a list of features, one feature or one geometry; holes are
    left out; overlapping polygons are united; classes whose name ends in ``*`` are skipped, as
    QuPath ignores them, unless they are asked for.

    Args:
        path: The file. Its content, not its name, says which kind it is.
        dimensions: (width, height) of the slide in level-0 pixels.
        mpp: (x, y) µm per level-0 pixel.
        classes: Annotations of these alone, and of classes derived from them, are tissue.

    Returns:
        The mask, with method ``file``.

    Raises:
        UsageError: A value is of another kind.
        TissueError: The file is missing or neither kind, has another shape than the slide, is
            transparent in parts, all its polygons lie outside the slide, or it holds none of the
            classes.
    """
    try:
        with path.open("rb") as file:
            start = file.read(24)
        drawn: tuple[str, ...] = ()
        if start.startswith(PNG_SIGNATURE):
            if classes:
                raise TissueError(
                    f"mask {path.name}: a PNG has no classes; leave out --tissue-class, or give "
                    "the annotations as GeoJSON"
                )
            mask = _read_png(path, start, dimensions)
        elif start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
            mask, drawn = _read_geojson(path, dimensions, mpp, classes)
        else:
            raise TissueError(
                f"mask {path.name}: neither PNG nor GeoJSON; save the mask as one of them"
            )
    except OSError as exc:
        raise TissueError(f"mask {path}: cannot be read: {exc.strerror or exc}") from exc
    return TissueMask(
        mask=mask,
        downsample=(dimensions[0] / mask.shape[1], dimensions[1] / mask.shape[0]),
        method="file",
        steps=(TissueStep(name=f"mask file {path.name}", share=float(mask.mean())),),
        classes=drawn,
    )


def _read_png(path: Path, start: bytes, dimensions: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Any value but 0, of an image with the slide's shape."""
    if len(start) < 24:
        raise TissueError(f"mask {path.name}: truncated PNG")
    width, height = struct.unpack(">II", start[16:24])
    if width * height > MOST_MASK_PIXELS:
        raise TissueError(
            f"mask {path.name}: {width} x {height} px is finer than any use of it; "
            f"save it at about {MASK_MPP:g} µm/px"
        )
    try:
        with Image.open(path) as image:
            values = np.asarray(image)
            uneven = _is_transparent_in_parts(image)
    except (UnidentifiedImageError, SyntaxError, ValueError, OSError) as exc:
        raise TissueError(f"mask {path.name}: PNG cannot be decoded: {exc}") from exc
    _check_shape(path, (width, height), dimensions)
    if uneven:
        # Neither the colours nor the alpha alone tell what its maker took for tissue.
        raise TissueError(
            f"mask {path.name}: is transparent in parts, which does not tell tissue; "
            "save it as greyscale, white where there is tissue and black elsewhere"
        )
    if values.ndim == 3:
        colours = values[..., : values.shape[2] - (values.shape[2] % 2 == 0)]
        return np.asarray(colours.any(axis=2))
    return np.asarray(values != 0)


def _is_transparent_in_parts(image: Image.Image) -> bool:
    """Whether the alpha of an image differs from place to place, in a channel or by its colours."""
    # The only kind that PIL gives no alpha channel for.
    if not image.has_transparency_data or image.mode.startswith("I"):
        return False
    alpha = image if "A" in image.mode else image.convert("RGBA")
    lowest, highest = alpha.getchannel("A").getextrema()
    return lowest != highest


def _check_shape(path: Path, size: tuple[int, int], dimensions: tuple[int, int]) -> None:
    """Refuse a mask that is not the whole slide at one scale, but for rounding."""
    across, down = dimensions[0] / size[0], dimensions[1] / size[1]
    if abs(across / down - 1) > 0.01 + 1.0 / min(size):
        raise TissueError(
            f"mask {path.name}: {size[0]} x {size[1]} px does not have the shape of the slide, "
            f"{dimensions[0]} x {dimensions[1]} px; it must cover the whole slide"
        )


def _read_geojson(
    path: Path, dimensions: tuple[int, int], mpp: tuple[float, float], classes: tuple[str, ...]
) -> tuple[npt.NDArray[np.bool_], tuple[str, ...]]:
    """Polygons drawn at about ``MASK_MPP``, and the names of their classes."""
    try:
        document = orjson.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as exc:
        raise TissueError(f"mask {path.name}: not valid JSON: {exc}") from exc
    width = max(1, round(dimensions[0] * mpp[0] / MASK_MPP))
    height = max(1, round(dimensions[1] * mpp[1] / MASK_MPP))
    to_mask = np.array([width / dimensions[0], height / dimensions[1]])
    mask = np.zeros((height, width), dtype=bool)
    shapes = _chosen(path, list(_shapes(document)), classes)
    lies_inside = [
        _draw(mask, [ring * to_mask for ring in rings])
        for rings in _polygons(path, document, shapes)
    ]
    if lies_inside and not any(lies_inside):
        raise TissueError(
            f"mask {path.name}: {counted(len(lies_inside), 'polygon')}, none of them inside the "
            f"slide, {dimensions[0]} x {dimensions[1]} px; coordinates must be level-0 pixels"
        )
    return mask, tuple(sorted({shape.of for shape in shapes if shape.of}))


def _chosen(path: Path, shapes: list[_Shape], classes: tuple[str, ...]) -> list[_Shape]:
    """The shapes that count as tissue.

    Raises:
        TissueError: There are none of the classes asked for.
    """
    if not classes:
        return [shape for shape in shapes if not shape.of.endswith("*")]
    # QuPath calls a class that is derived from another "Tumor: Positive".
    starts = tuple(f"{name}: " for name in classes)
    chosen = [shape for shape in shapes if shape.of in classes or shape.of.startswith(starts)]
    if not chosen:
        there = ", ".join(sorted({shape.of or "no class" for shape in shapes})) or "no shapes"
        raise TissueError(
            f"mask {path.name}: holds {there}, but none of --tissue-class {', '.join(classes)}; "
            "give the name of a class as it is written there"
        )
    return chosen


def _polygons(path: Path, document: Any, shapes: list[_Shape]) -> Iterator[list[Ring]]:
    """Rings of every polygon, the outer one first.

    Raises:
        TissueError: The document is no GeoJSON, or has shapes but no polygon.
    """
    found = False
    for shape in shapes:
        kind = shape.kind
        if kind not in ("Polygon", "MultiPolygon"):
            continue
        found = True
        try:
            parts = [shape.coordinates] if kind == "Polygon" else shape.coordinates
            for part in parts:
                if part != []:  # which is how an empty polygon is written
                    yield [_ring(ring) for ring in part]
        except (TypeError, ValueError, IndexError) as exc:
            raise TissueError(f"mask {path.name}: a {kind} is malformed: {exc}") from exc
    empty_collection = isinstance(document, list) or (
        isinstance(document, dict) and document.get("type") == "FeatureCollection"
    )
    if not found and (shapes or not empty_collection):
        kinds = ", ".join(sorted({shape.kind for shape in shapes})) or "no geometry"
        raise TissueError(f"mask {path.name}: holds {kinds}, but no Polygon or MultiPolygon")


def _shapes(node: Any, of: str = "") -> Iterator[_Shape]:
    """Every geometry below a node."""
    if isinstance(node, list):
        for entry in node:
            yield from _shapes(entry, of)
    elif isinstance(node, dict):
        kind = node.get("type")
        if kind == "FeatureCollection":
            yield from _shapes(node.get("features") or [])
        elif kind == "Feature":
            yield from _shapes(node.get("geometry"), _class_of(node))
        elif kind == "GeometryCollection":
            yield from _shapes(node.get("geometries") or [], of)
        elif isinstance(kind, str) and "coordinates" in node:
            yield _Shape(kind=kind, coordinates=node["coordinates"], of=of)


def _class_of(feature: dict[str, Any]) -> str:
    """The name of a feature's class as QuPath shows it; empty where it has none."""
    properties = feature.get("properties")
    classification = properties.get("classification") if isinstance(properties, dict) else None
    if isinstance(classification, dict):
        # A class that is derived from another is a list of names.
        names = classification.get("names") or [classification.get("name")]
    else:
        names = [classification]
    return ": ".join(name for name in names if isinstance(name, str))


def _ring(points: Any) -> Ring:
    """(n, 2) points of a ring; a third coordinate is dropped."""
    ring = np.array([[float(point[0]), float(point[1])] for point in points], dtype=np.float64)
    if len(ring) < 3:
        raise ValueError(f"a ring of {len(ring)} points")
    if not np.isfinite(ring).all():
        raise ValueError("a coordinate is not a number")
    return ring


def _draw(mask: npt.NDArray[np.bool_], rings: list[Ring]) -> bool:
    """Set the pixels whose centre lies in the polygon; False if it lies outside the mask.

    Every edge flips the inside-ness of all that lies right of it. The flips of a row, added up
    from the left, are odd inside the polygon and even outside and in its holes: the even-odd rule
    with no growth at the border, which the polygon fillers of image libraries have.
    """
    height, width = mask.shape
    outer = np.concatenate(rings)
    left, top = np.floor(outer.min(axis=0))
    right, lower = np.ceil(outer.max(axis=0))
    if right <= 0 or lower <= 0 or left >= width or top >= height:
        return False
    x0, y0 = max(0, int(left)), max(0, int(top))
    x1, y1 = min(width, int(right) + 1), min(height, int(lower) + 1)
    # One column more than the box, for flips at or beyond its right edge.
    flips = np.zeros((y1 - y0, x1 - x0 + 1), dtype=np.uint16)
    for ring in rings:
        rows, x = _crossings(ring, y0, y1)
        columns = np.clip(np.ceil(x - 0.5), x0, x1).astype(np.int64) - x0
        np.add.at(flips, (rows - y0, columns), 1)
    inside = np.cumsum(flips, axis=1, dtype=np.uint16)[:, :-1] % 2 == 1
    mask[y0:y1, x0:x1] |= inside
    return True


def _crossings(
    ring: Ring, first_row: int, end_row: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(row, x) of each place where a ring crosses the middle of a row."""
    start, end = ring, np.roll(ring, -1, axis=0)
    upper = np.where((start[:, 1] <= end[:, 1])[:, None], start, end)
    lower = np.where((start[:, 1] <= end[:, 1])[:, None], end, start)
    first = np.clip(np.ceil(upper[:, 1] - 0.5), first_row, end_row).astype(np.int64)
    stop = np.clip(np.ceil(lower[:, 1] - 0.5), first_row, end_row).astype(np.int64)
    counts = stop - first
    edges = np.repeat(np.arange(len(ring)), counts)
    rows = np.arange(len(edges)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edges]
    rise = lower[edges, 1] - upper[edges, 1]
    part = (rows + 0.5 - upper[edges, 1]) / rise
    return rows, upper[edges, 0] + part * (lower[edges, 0] - upper[edges, 0])
