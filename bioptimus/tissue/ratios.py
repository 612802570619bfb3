"""How much of each tile is tissue."""

import numpy as np
import numpy.typing as npt

from bioptimus.tiles import TileGrid
from bioptimus.tissue.mask import TissueMask


def tissue_ratios(mask: TissueMask, grid: TileGrid) -> npt.NDArray[np.float32]:
    """Share of every tile of a grid that lies under the mask, by area.

    Mask pixels that a tile's edge cuts count by the part inside. What lies outside the slide
    or outside the mask counts as not tissue, so a tile that overhangs an edge by half is at
    most half tissue.

    The tiles of a column share their left and right edges, those of a row their upper and lower
    ones. So the mask is summed up once along each axis (the running sum of a step function is
    exactly linear between its steps), and the cost of a million tiles is that of their output.

    Returns:
        float32 (len(grid),), row-major, 0..1.
    """
    tile_width, tile_height = grid.tile_level0
    left = np.array([grid.x(column) for column in range(grid.columns)], dtype=np.float64)
    top = np.array([grid.y(row) for row in range(grid.rows)], dtype=np.float64)
    bands = _sums_between(
        mask.mask,
        _to_mask_px(top, limit_px=grid.dimensions[1], downsample=mask.downsample[1]),
        _to_mask_px(top + tile_height, limit_px=grid.dimensions[1], downsample=mask.downsample[1]),
    )
    areas = _sums_between(
        bands.T,
        _to_mask_px(left, limit_px=grid.dimensions[0], downsample=mask.downsample[0]),
        _to_mask_px(left + tile_width, limit_px=grid.dimensions[0], downsample=mask.downsample[0]),
    ).T
    whole = (tile_width / mask.downsample[0]) * (tile_height / mask.downsample[1])
    return np.clip(areas / whole, 0.0, 1.0).astype(np.float32).ravel()


def _to_mask_px(
    level0_px: npt.NDArray[np.float64], *, limit_px: int, downsample: float
) -> npt.NDArray[np.float64]:
    """Level-0 positions in mask pixels, held inside the slide."""
    return np.clip(level0_px, 0, limit_px) / downsample


def _sums_between(
    values: npt.NDArray[np.bool_] | npt.NDArray[np.float64],
    start: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Sums of ``values`` (n, m) along its first axis, from ``start`` to ``end``.

    Args:
        values: Rows of numbers.
        start: (k,) fractional row positions; those beyond n count as n.
        end: (k,) the same, at or after ``start``.

    Returns:
        float64 (k, m).
    """
    # The sums of a boolean mask are whole numbers: int32 holds them exactly in half the memory.
    kind = np.int32 if values.dtype == np.bool_ else np.float64
    sums = np.zeros((values.shape[0] + 1, values.shape[1]), dtype=kind)
    np.cumsum(values, axis=0, dtype=kind, out=sums[1:])
    return _between_rows(sums, end) - _between_rows(sums, start)


def _between_rows(
    sums: npt.NDArray[np.int32] | npt.NDArray[np.float64], at: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Rows of ``sums`` at fractional positions, linear in between."""
    last = sums.shape[0] - 1
    inside = np.clip(at, 0, last)
    lower = np.minimum(inside.astype(np.int64), last - 1)
    part = (inside - lower)[:, None]
    return np.asarray(sums[lower] * (1.0 - part) + sums[lower + 1] * part)
