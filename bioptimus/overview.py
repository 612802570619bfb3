"""A picture of a plan: the slide, its tissue's outline, the tiles that are kept."""

from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from bioptimus.inference.disk import output_errors, refuse_file, refuse_folder, written_aside
from bioptimus.planning import SlidePlan
from bioptimus.tissue import TissueMask

Pixels = npt.NDArray[np.uint8]
BoolImage = npt.NDArray[np.bool_]
Edges = npt.NDArray[np.int64]

OUTLINE_COLOUR = (0, 110, 60)
TILE_COLOUR = (20, 60, 200)
# What is not read is mixed with this light grey.
PALE = 245.0
PALE_PART = 0.6
# Tiles smaller than this many pixels are shown by their area only: their borders would hide it.
SMALLEST_LATTICE_PX = 6.0


def draw_overview(pixels: Pixels, downsample: tuple[float, float], plan: SlidePlan) -> Pixels:
    """Draw a plan over a picture of its slide.

    Pure arithmetic on arrays with every position held inside the picture, so that no rounding of
    scales can make it fail, and a million tiles cost little more than one.

    Args:
        pixels: RGB (height, width, 3) of the whole slide.
        downsample: (x, y) level-0 pixels per pixel of the picture.
        plan: What is kept.

    Returns:
        RGB (height, width, 3): kept tiles in full colour with their lattice, the rest paled, the
        tissue outlined.
    """
    left, top, right, lower = tile_edges(plan, downsample, (pixels.shape[1], pixels.shape[0]))
    kept = _covered(pixels.shape[:2], left, top, right, lower)
    drawn = pixels.astype(np.float32)
    drawn[~kept] = drawn[~kept] * (1 - PALE_PART) + PALE * PALE_PART
    side = min(
        length / step for length, step in zip(plan.grid.tile_level0, downsample, strict=True)
    )
    if side >= SMALLEST_LATTICE_PX:
        lines = _borders(pixels.shape[:2], left, top, right, lower)
        drawn[lines] = drawn[lines] * 0.4 + np.array(TILE_COLOUR, dtype=np.float32) * 0.6
    drawn[_outline(plan.mask, downsample, pixels.shape[:2])] = OUTLINE_COLOUR
    return drawn.astype(np.uint8)


def tile_edges(
    plan: SlidePlan, downsample: tuple[float, float], size: tuple[int, int]
) -> tuple[Edges, Edges, Edges, Edges]:
    """Where kept tiles lie on a picture, at least one pixel wide and held inside it.

    Args:
        plan: What is kept.
        downsample: (x, y) level-0 pixels per pixel of the picture.
        size: (width, height) of the picture.

    Returns:
        Left, top, right, lower edges, each int64 (N,); right and lower are those of the pixel
        after the last.
    """
    coords = plan.coords
    starts, ends = [], []
    for axis in range(2):
        exact = coords[:, axis] / downsample[axis]
        start = np.clip(np.round(exact), 0, size[axis] - 1).astype(np.int64)
        length = plan.grid.tile_level0[axis] / downsample[axis]
        end = np.clip(np.round(exact + length), start + 1, size[axis]).astype(np.int64)
        starts.append(start)
        ends.append(end)
    return starts[0], starts[1], ends[0], ends[1]


def save_overview(path: Path, picture: Pixels) -> None:
    """Write a picture as PNG, whole or not at all; its folder is made if missing.

    Args:
        path: A file that is there is replaced once the new one is whole.
        picture: RGB (height, width, 3).

    Raises:
        OutputError: It cannot be written, or a folder is in its place, or a file in that of its
            folder.
    """
    refuse_file(path.parent)
    refuse_folder(path)
    with output_errors(path, "overview not written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")


def _covered(
    shape: tuple[int, ...], left: Edges, top: Edges, right: Edges, lower: Edges
) -> BoolImage:
    """Pixels under at least one rectangle."""
    steps = np.zeros((shape[0] + 1, shape[1] + 1), dtype=np.int32)
    for rows, columns, sign in (
        (top, left, 1),
        (top, right, -1),
        (lower, left, -1),
        (lower, right, 1),
    ):
        np.add.at(steps, (rows, columns), sign)
    return np.asarray(steps.cumsum(axis=0).cumsum(axis=1)[:-1, :-1] > 0)


def _borders(
    shape: tuple[int, ...], left: Edges, top: Edges, right: Edges, lower: Edges
) -> BoolImage:
    """Pixels on the outermost row or column of a rectangle."""
    after_row, after_column = top + 1, left + 1
    return np.asarray(
        _covered(shape, left, top, right, after_row)
        | _covered(shape, left, lower - 1, right, lower)
        | _covered(shape, left, top, after_column, lower)
        | _covered(shape, right - 1, top, right, lower)
    )


def _outline(
    mask: TissueMask, downsample: tuple[float, float], shape: tuple[int, ...]
) -> BoolImage:
    """The mask's border on the picture, two pixels wide."""
    height, width = mask.mask.shape
    rows = ((np.arange(shape[0]) + 0.5) * downsample[1] / mask.downsample[1]).astype(np.int64)
    columns = ((np.arange(shape[1]) + 0.5) * downsample[0] / mask.downsample[0]).astype(np.int64)
    shown = mask.mask[np.minimum(rows, height - 1)][:, np.minimum(columns, width - 1)]
    kernel = np.ones((3, 3), dtype=np.uint8)
    return np.asarray(cv2.morphologyEx(shown.astype(np.uint8), cv2.MORPH_GRADIENT, kernel) > 0)
