"""Where tiles lie: lattice arithmetic in level-0 pixels, standard library only.

The lattice is anchored at the slide's upper-left corner, (0, 0) in level-0 pixels, and runs row
by row. Positions are computed from the column and row number each time, never by adding up
rounded steps, so the last tile of a row lies where the first one says it should.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from bioptimus.errors import ResolutionError, UsageError
from bioptimus.kinds import check_kinds, checks_kinds


@dataclass(frozen=True, kw_only=True)
class TileSpec:
    """Size and scale of the tiles a model reads.

    Attributes:
        size_px: Side of the square tile, in pixels at ``mpp``.
        mpp: Scale of the tile in µm per pixel.
        overlap_px: Pixels (at ``mpp``) that neighbours share; 0 ≤ overlap < size.
    """

    size_px: int = 224
    mpp: float = 0.5
    overlap_px: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no lattice can have.

        Raises:
            UsageError: A value is of another kind, a size or scale is not positive and finite, or
                the overlap reaches the tile size (the lattice would never end).
        """
        check_kinds(self)
        # As a table's cells they are NumPy's; a model's description holds Python's own.
        for name in ("size_px", "overlap_px"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if not isinstance(self.mpp, int):
            object.__setattr__(self, "mpp", float(self.mpp))
        if self.size_px < 1:
            raise UsageError(f"tile size {self.size_px} px: must be at least 1")
        if not 0 < self.mpp < math.inf:
            raise UsageError(f"tile mpp {self.mpp}: must be a positive number of µm per pixel")
        if not 0 <= self.overlap_px < self.size_px:
            raise UsageError(
                f"overlap {self.overlap_px} px: must be at least 0 and less than the tile size, "
                f"{self.size_px} px"
            )

    @property
    def stride_px(self) -> int:
        """Distance between neighbours' corners, in pixels at ``mpp``."""
        return self.size_px - self.overlap_px

    @property
    def side_um(self) -> float:
        """Side of the tile in µm."""
        return self.size_px * self.mpp


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile's place on the slide.

    Attributes:
        index: Number of the tile in its grid, row-major from 0.
        x: Left edge, level-0 pixels, counted from the slide's corner.
        y: Upper edge, level-0 pixels.
        width: Extent to the right in level-0 pixels; rarely a whole number.
        height: Extent downwards in level-0 pixels.
    """

    index: int
    x: int
    y: int
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class TileGrid(Sequence[Tile]):
    """Every tile position of a slide, as arithmetic: costs the same for ten tiles and a million.

    Attributes:
        dimensions: (width, height) of the slide in level-0 pixels.
        spec: Size, scale and overlap of the tiles.
        mpp: (x, y) µm per level-0 pixel.
        columns: Tiles in a row. The last one may overhang the right edge.
        rows: Rows of tiles. The last one may overhang the lower edge.
    """

    dimensions: tuple[int, int]
    spec: TileSpec
    mpp: tuple[float, float]
    columns: int
    rows: int

    @property
    def tile_level0(self) -> tuple[float, float]:
        """(width, height) of a tile in level-0 pixels; rarely whole numbers."""
        return (
            self.spec.size_px * self.spec.mpp / self.mpp[0],
            self.spec.size_px * self.spec.mpp / self.mpp[1],
        )

    @property
    def stride_level0(self) -> tuple[float, float]:
        """(x, y) distance of neighbours' corners in level-0 pixels; rarely whole numbers."""
        return (
            self.spec.stride_px * self.spec.mpp / self.mpp[0],
            self.spec.stride_px * self.spec.mpp / self.mpp[1],
        )

    def x(self, column: int) -> int:
        """Left edge of a column, level-0 pixels, rounded to the nearest pixel."""
        return round(column * self.stride_level0[0])

    def y(self, row: int) -> int:
        """Upper edge of a row, level-0 pixels, rounded to the nearest pixel."""
        return round(row * self.stride_level0[1])

    def __len__(self) -> int:
        """Number of positions, tissue or not."""
        return self.columns * self.rows

    @overload
    def __getitem__(self, index: int) -> Tile: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tile]: ...

    def __getitem__(self, index: int | slice) -> Tile | list[Tile]:
        """The tile at a row-major index, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"tile {index} of {len(self)}")
        row, column = divmod(index, self.columns)
        width, height = self.tile_level0
        return Tile(index=index, x=self.x(column), y=self.y(row), width=width, height=height)

    def __iter__(self) -> Iterator[Tile]:
        """Tiles row by row."""
        for index in range(len(self)):
            yield self[index]


@checks_kinds
def plan_tiles(
    dimensions: tuple[int, int], *, spec: TileSpec, mpp: tuple[float, float]
) -> TileGrid:
    """Lay the lattice of tiles over a slide.

    Every level-0 pixel lies in at least one tile; the last column and row may overhang.

    Args:
        dimensions: (width, height) of the slide in level-0 pixels.
        spec: Size, scale and overlap of the tiles.
        mpp: (x, y) µm per level-0 pixel.

    Returns:
        The grid; ``grid[i]`` is the i-th tile, row-major.

    Raises:
        UsageError: The slide has no pixels, or a value is of another kind.
        ResolutionError: A scale is not positive and finite, or so coarse that a step of the
            lattice is less than one level-0 pixel.
    """
    if min(dimensions) < 1:
        raise UsageError(f"slide of {dimensions[0]} x {dimensions[1]} px has no pixels")
    for value in mpp:
        if not (math.isfinite(value) and value > 0):
            raise ResolutionError(f"slide mpp {value}: must be a positive number of µm per pixel")
        if spec.stride_px * spec.mpp / value < 1:
            raise ResolutionError(
                f"slide mpp {value:g} is coarser than one step of the tiles "
                f"({spec.stride_px * spec.mpp:g} µm); pass the right --mpp-override"
            )
    counts = [
        _tiles_to_cover(pixels, spec.size_px * spec.mpp / scale, spec.stride_px * spec.mpp / scale)
        for pixels, scale in zip(dimensions, mpp, strict=True)
    ]
    return TileGrid(dimensions=dimensions, spec=spec, mpp=mpp, columns=counts[0], rows=counts[1])


def _tiles_to_cover(pixels: int, tile: float, stride: float) -> int:
    """Smallest count whose last tile ends at or past ``pixels``.

    Half a level-0 pixel of slack: positions are rounded to whole pixels, so a last tile that
    would hold less than that holds nothing.
    """
    return max(1, math.ceil((pixels - 0.5 - tile) / stride) + 1)
