"""Tiles as cells of a small raster: a map of 100,000 tiles is a picture of 400 × 400."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Where each tile lies on the lattice that holds them all.

    Attributes:
        columns: (N,) int64, from 0 at the leftmost tile there is.
        rows: (N,) int64, from 0 at the uppermost tile there is.
        shape: (rows, columns) of the raster.
        extent: (left, top, right, bottom) of the raster in level-0 pixels. A cell is one
            stride wide and centred on its tile, so overlapping tiles give a gapless map.
    """

    columns: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    shape: tuple[int, int]
    extent: tuple[float, float, float, float]

    @classmethod
    def of(
        cls,
        coords: npt.NDArray[np.int64],
        *,
        tile_level0: tuple[float, float],
        stride_level0: tuple[float, float],
    ) -> Self:
        """Find each tile's cell.

        Args:
            coords: (N, 2) x, y of the upper-left corners, level-0 pixels; N ≥ 1.
            tile_level0: (width, height) of a tile, level-0 pixels.
            stride_level0: (x, y) distance of neighbours' corners, level-0 pixels.
        """
        cells = np.rint(coords / np.asarray(stride_level0, np.float64)).astype(np.int64)
        first, last = cells.min(axis=0), cells.max(axis=0)
        count = last - first + 1
        inset = [(tile - step) / 2 for tile, step in zip(tile_level0, stride_level0, strict=True)]
        left = float(first[0] * stride_level0[0] + inset[0])
        top = float(first[1] * stride_level0[1] + inset[1])
        return cls(
            columns=cells[:, 0] - first[0],
            rows=cells[:, 1] - first[1],
            shape=(int(count[1]), int(count[0])),
            extent=(
                left,
                top,
                left + float(count[0]) * stride_level0[0],
                top + float(count[1]) * stride_level0[1],
            ),
        )

    def paint(self, colours: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Raster of colours.

        Args:
            colours: (N, 3) uint8.

        Returns:
            (rows, columns, 4) uint8; alpha 0 where there is no tile.
        """
        raster = np.zeros((*self.shape, 4), np.uint8)
        raster[self.rows, self.columns, :3] = colours
        raster[self.rows, self.columns, 3] = 255
        return raster

    def spread(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Raster of values (N,); NaN where there is no tile."""
        raster = np.full(self.shape, np.nan, np.float32)
        raster[self.rows, self.columns] = values
        return raster
