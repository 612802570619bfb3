"""The border of a mask as polygons."""

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.tissue.mask import TissueMask

Ring = npt.NDArray[np.float64]


def outline(mask: TissueMask) -> list[Ring]:
    """Every border of the mask, to be drawn: outer ones and those of holes.

    Returns:
        (n, 2) closed rings of x, y in level-0 pixels, without the first point repeated. Filled by
        the even-odd rule they are the mask.
    """
    return [ring for polygon in polygons(mask) for ring in polygon]


def polygons(mask: TissueMask) -> list[list[Ring]]:
    """The mask as polygons with holes, exact along the edges of its pixels.

    Returns:
        For each island a list of (n, 2) rings of x, y in level-0 pixels: its outer border, then
        its holes; the shape of a GeoJSON polygon, without the first point repeated.
    """
    # OpenCV's contours run through pixel centres, half a pixel inside. On an image of twice the
    # size, (position + 1) // 2 is the very corner that the contour goes around.
    doubled = np.repeat(np.repeat(mask.mask.astype(np.uint8), 2, axis=0), 2, axis=1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    if hierarchy is None:
        return []
    islands: dict[int, list[Ring]] = {}
    rings = [_corners(contour) * np.array(mask.downsample) for contour in contours]
    for index, (_, _, _, parent) in enumerate(hierarchy[0]):
        if parent < 0:
            islands[index] = [rings[index]]
    for index, (_, _, _, parent) in enumerate(hierarchy[0]):
        if parent >= 0:
            islands[parent].append(rings[index])
    return list(islands.values())


def _corners(contour: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The (n, 2) pixel corners at which a contour of the doubled image turns."""
    points = (np.asarray(contour, dtype=np.int64).reshape(-1, 2) + 1) // 2
    points = points[(points != np.roll(points, 1, axis=0)).any(axis=1)]
    before = points - np.roll(points, 1, axis=0)
    after = np.roll(points, -1, axis=0) - points
    turns = before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]
    return np.asarray(points[turns], dtype=np.int64)
