"""In which order tiles are read, so that each stored tile is decoded about once.

A *band* is some rows of tiles. Bands are read from top to bottom, the tiles of a band column by
column: a stored tile is then wanted again at once by the tile below it and the next column, and
a cache of two columns of stored tiles is enough, whatever the width of the slide. Only along the
border of two bands are stored tiles decoded twice. A block is some columns of a band: stored tiles
inside it are never wanted by another block.
"""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

# Tiles of one block wait in memory until its last one is read: 32 of 224 px are 5 MiB.
MAX_BLOCK_TILES = 32
# Enough blocks for several threads to share, also on a small slide.
_WANTED_BLOCKS = 16
_MIN_BLOCK_TILES = 4
_MAX_BAND_ROWS = 32


def band_rows(stride: float, stored: int, *, most: int = _MAX_BAND_ROWS) -> int:
    """Rows of tiles in a band.

    Args:
        stride: Distance of neighbouring rows of tiles, pixels of the level that is read.
        stored: Height of the level's stored tiles.
        most: Rows for which the cache has room.

    Returns:
        The number whose borders cut through the fewest stored tiles. Of equals the smallest: its
        blocks have more columns, so more of their stored tiles lie inside them.
    """

    def decoded_per_needed(rows: int) -> float:
        extent = rows * stride / stored
        whole = round(extent)
        return 1.0 if whole > 0 and abs(extent - whole) < 1e-3 else (extent + 1) / extent

    return min(range(1, max(1, most) + 1), key=decoded_per_needed)


def most_band_rows(
    stride: float, *, column_px: float, cache_bytes: int, most: int = _MAX_BAND_ROWS
) -> int:
    """Rows of tiles whose stored tiles, two columns of them, fit into the cache.

    Args:
        stride: Distance of neighbouring rows of tiles, pixels of the level that is read.
        column_px: Width of two columns of stored tiles.
        cache_bytes: Room for decoded RGB.
        most: Upper limit.
    """
    rows = int(cache_bytes / (3 * column_px * stride))
    return min(max(rows, 1), most)


def blocks_of(kept: Indices, columns: int, rows_per_band: int) -> list[Indices]:
    """Positions into ``kept`` in reading order, cut into blocks.

    Args:
        kept: Row-major grid indices of the tiles to read.
        columns: Tiles in a row of the grid.
        rows_per_band: As :func:`band_rows` says.

    Returns:
        Arrays that together hold each position of ``kept`` once.
    """
    row, column = np.divmod(np.asarray(kept, np.int64), columns)
    band = row // rows_per_band
    order = np.lexsort((row, column, band)).astype(np.int64)
    size = min(max(len(order) // _WANTED_BLOCKS, _MIN_BLOCK_TILES), MAX_BLOCK_TILES)
    # A new band begins a new block.
    starts = np.flatnonzero(np.diff(band[order])) + 1
    return [
        part[first : first + size]
        for part in np.split(order, starts)
        for first in range(0, len(part), size)
    ]
