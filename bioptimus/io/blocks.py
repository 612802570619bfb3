"""In which order tiles are read: blocks of neighbours, so that stored tiles are decoded once."""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

# Tiles of one block wait in memory until its last one is read: 64 of 224 px are 10 MiB.
MAX_BLOCK_TILES = 64


def block_shape(
    stride: tuple[float, float], stored: tuple[int, int], *, limit: int = MAX_BLOCK_TILES
) -> tuple[int, int]:
    """(columns, rows) of tiles in a block.

    Args:
        stride: (x, y) distance of neighbouring tiles, pixels of the level that is read.
        stored: (width, height) of the level's stored tiles.
        limit: Most tiles in a block.

    Returns:
        The shape whose borders cut through the fewest stored tiles.
    """
    side = max(1, int(limit**0.5))
    return (
        _aligned_count(stride[0], stored[0], side),
        _aligned_count(stride[1], stored[1], side),
    )


def _aligned_count(stride: float, stored: int, most: int) -> int:
    """Count whose extent is nearest to a whole number of stored tiles; the largest of equals."""

    def touched_per_tile(count: int) -> float:
        extent = count * stride / stored
        cut = 0.0 if abs(extent - round(extent)) < 1e-3 and round(extent) > 0 else 1.0
        return (extent + cut) / extent

    return max(range(1, most + 1), key=lambda count: (-touched_per_tile(count), count))


def blocks_of(kept: Indices, columns: int, shape: tuple[int, int]) -> list[Indices]:
    """Positions into ``kept``, grouped into blocks; blocks row by row, tiles row by row inside.

    Args:
        kept: Row-major grid indices of the tiles to read.
        columns: Tiles in a row of the grid.
        shape: (columns, rows) of a block.

    Returns:
        Arrays that together hold each position of ``kept`` once.
    """
    if len(kept) == 0:
        return []
    rows, cols = np.divmod(np.asarray(kept, np.int64), columns)
    block = (rows // shape[1]) * (columns // shape[0] + 1) + cols // shape[0]
    order = np.lexsort((cols, rows, block)).astype(np.int64)
    starts = np.flatnonzero(np.diff(block[order])) + 1
    return np.split(order, starts)
