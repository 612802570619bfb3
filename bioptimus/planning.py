"""Which tiles of a slide are worth reading: its lattice, its tissue, and what is kept.

Works on anything that has the few properties of :class:`PlannableSlide`, so a test or a script can
plan a slide that is no file.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bioptimus.errors import ResolutionError, TissueError, UsageError
from bioptimus.kinds import check_kinds, checks_kinds
from bioptimus.tiles import Tile, TileGrid, TileSpec, plan_tiles
from bioptimus.tissue import (
    TissueMask,
    TissueOptions,
    TissueStep,
    find_tissue,
    full_mask,
    load_mask,
    tissue_ratios,
)
from bioptimus.tissue.mask import SCANNED_OPACITY, SPECKS

# Tissue is judged at this scale whatever the tile's own, so that changing the model does not
# change what tissue is.
TISSUE_MPP = 8.0
# Beyond any use: the share of tissue of so many positions takes some gigabytes.
_MOST_POSITIONS = 100_000_000
# Share of a mask that a generous hand may have drawn beyond what was scanned.
_MOST_OUTSIDE = 0.05


class CoarseImage(Protocol):
    """A whole slide at a coarse scale."""

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """RGB (height, width, 3), composited on the slide's background colour."""

    @property
    def opaque(self) -> npt.NDArray[np.uint8]:
        """(height, width) share of each pixel that was scanned, 0..255."""

    @property
    def downsample(self) -> tuple[float, float]:
        """(x, y) level-0 pixels per pixel."""

    @property
    def damaged(self) -> npt.NDArray[np.bool_] | None:
        """(height, width) true where nothing could be read; None where all could."""


class PlannableSlide(Protocol):
    """What planning asks of a slide."""

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def dimensions(self) -> tuple[int, int]:
        """(width, height) in level-0 pixels."""

    @property
    def mpp(self) -> tuple[float, float]:
        """(x, y) µm per level-0 pixel; raises ResolutionError where that is not known."""

    @property
    def bounds(self) -> tuple[int, int, int, int] | None:
        """(x, y, width, height) of the scanned area in level-0 pixels, if the file tells."""

    def coarse_image(self, mpp: float = TISSUE_MPP) -> CoarseImage:
        """The whole slide at about that scale; as much coarser as a coarser slide is."""


Segmenter = Callable[[CoarseImage], npt.NDArray[np.bool_]]
"""Takes a coarse image, returns (height, width) true where tissue is; a model, for instance."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is kept of a slide, and where it departs from what the model asks for.

    Attributes:
        tile_size_px: Side of a tile in pixels at its own mpp; the model's if None.
        tile_mpp: Scale of a tile in µm/px; the model's if None.
        overlap_px: Pixels that neighbours share, at the tile's mpp; the model's if None.
        min_tissue: Tiles with at least this share of tissue are kept, 0..1; 0 keeps all.
        tissue: ``auto`` looks for tissue, ``none`` takes the whole scanned area, a path ending in
            ``.pt2`` asks the segmenter, any other is that of a mask (PNG or GeoJSON).
        tissue_class: Of a mask that is GeoJSON, annotations of these classes alone; all if empty.
        search_in_mask: Take of a mask only what the search finds to be tissue; where there is no
            mask, all that it finds.
        keep_pen: Count pen marks as tissue.
    """

    tile_size_px: int | None = None
    tile_mpp: float | None = None
    overlap_px: int | None = None
    min_tissue: float = 0.5
    tissue: str = "auto"
    tissue_class: tuple[str, ...] = ()
    search_in_mask: bool = False
    keep_pen: bool = False

    def __post_init__(self) -> None:
        """Refuse what no slide can satisfy.

        Raises:
            UsageError: A value is of another kind, a size, scale or overlap is none that any tile
                has, the share of tissue is not one, or no way to find tissue is named.
        """
        check_kinds(self)
        if self.overlap_px is not None and self.overlap_px < 0:
            raise UsageError(f"overlap {self.overlap_px} px: must be at least 0")
        if self.tile_mpp is not None and not 0 < self.tile_mpp < math.inf:
            raise UsageError(f"tile mpp {self.tile_mpp}: must be a positive number of µm per pixel")
        if self.tile_size_px is not None:
            self.applied_to(TileSpec())  # no size, or an overlap as large as the tile
        if not 0 <= self.min_tissue <= 1:
            raise UsageError(f"min tissue {self.min_tissue}: must be a share from 0 to 1")
        if not self.tissue:
            raise UsageError("tissue: say auto, none, or the path of a mask file")
        if not all(self.tissue_class):
            raise UsageError("tissue class: must be the name of a class, not empty")
        if self.search_in_mask and (self.tissue == "none" or is_tissue_model(self.tissue)):
            raise UsageError(f"search in mask: tissue {self.tissue} is no mask; give one, or auto")

    @property
    def names_mask(self) -> bool:
        """Whether ``tissue`` is the path of a mask."""
        return self.tissue not in ("auto", "none") and not is_tissue_model(self.tissue)

    def applied_to(self, spec: TileSpec) -> TileSpec:
        """The model's tile with these changes.

        Raises:
            UsageError: The result is no tile that a lattice can have.
        """
        return TileSpec(
            size_px=spec.size_px if self.tile_size_px is None else self.tile_size_px,
            mpp=spec.mpp if self.tile_mpp is None else self.tile_mpp,
            overlap_px=spec.overlap_px if self.overlap_px is None else self.overlap_px,
        )


@dataclass(frozen=True, kw_only=True)
class SlidePlan:
    """The tiles of one slide that are to be read, in row-major order.

    Attributes:
        grid: Every position of the lattice.
        kept: int64 (N,) indices into ``grid``, rising.
        tissue_ratios: float32 (N,) share of tissue of each kept tile.
        mask: The tissue that this was judged by.
        warnings: What the user should know, without the slide's name.
    """

    grid: TileGrid
    kept: npt.NDArray[np.int64]
    tissue_ratios: npt.NDArray[np.float32]
    mask: TissueMask
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of tiles kept."""
        return len(self.kept)

    @property
    def spec(self) -> TileSpec:
        """Size, scale and overlap of the tiles."""
        return self.grid.spec

    @cached_property
    def coords(self) -> npt.NDArray[np.int64]:
        """(N, 2) x and y of each kept tile's upper-left corner, level-0 pixels."""
        x = np.array([self.grid.x(column) for column in range(self.grid.columns)], dtype=np.int64)
        y = np.array([self.grid.y(row) for row in range(self.grid.rows)], dtype=np.int64)
        return np.stack([x[self.columns], y[self.rows]], axis=1)

    @cached_property
    def columns(self) -> npt.NDArray[np.int64]:
        """(N,) column of each kept tile in the lattice."""
        return np.asarray(self.kept % self.grid.columns, dtype=np.int64)

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """(N,) row of each kept tile in the lattice."""
        return np.asarray(self.kept // self.grid.columns, dtype=np.int64)

    def tile(self, position: int) -> Tile:
        """The tile at a position of ``kept``."""
        return self.grid[int(self.kept[position])]


def is_tissue_model(tissue: str) -> bool:
    """Whether ``PlanOptions.tissue`` names a segmentation model."""
    return tissue.lower().endswith(".pt2")


def require_tissue_file(tissue: str) -> None:
    """Refuse a way to find tissue that names a file which is not there.

    Raises:
        UsageError: There is no such file.
    """
    if tissue in ("auto", "none") or os.path.isfile(tissue):
        return
    kind = "tissue model" if is_tissue_model(tissue) else "mask"
    raise UsageError(f"--tissue {tissue}: no such {kind}; give auto, none, or the path of a file")


def lacks_mask(options: PlanOptions) -> str | None:
    """That classes of a mask are asked for and there is no mask; None where it is not so."""
    if options.names_mask or not options.tissue_class:
        return None
    return (
        f"has no mask to take --tissue-class {', '.join(options.tissue_class)} from; give its "
        "annotations with --tissue, or in a list's column mask"
    )


@checks_kinds
def plan_slide(
    slide: PlannableSlide,
    spec: TileSpec,
    options: PlanOptions | None = None,
    *,
    segmenter: Segmenter | None = None,
) -> SlidePlan:
    """Decide which tiles of a slide to read.

    Args:
        slide: The slide.
        spec: The tiles that the model wants.
        options: Changes to them, and what counts as tissue; the defaults if not given.
        segmenter: Finds the tissue in place of our own search where ``options.tissue`` is
            ``auto`` or a model; ``bioptimus.runtime.segmenter.open_segmenter`` loads one.

    Returns:
        The plan; with no tiles where there is no tissue, and a warning that says why.

    Raises:
        UsageError: The tile, as changed by the options, is none; a tissue model is asked for and
            none is given; or a value is of another kind.
        ResolutionError: The slide's scale is not known, or too coarse for the tiles, or the
            slide too large for tiles so small.
        TissueError: A mask file cannot be read or does not fit, or the segmenter's does not.
        SlideReadError: The coarse image cannot be read.
    """
    options = options or PlanOptions()
    grid = plan_tiles(slide.dimensions, spec=options.applied_to(spec), mpp=slide.mpp)
    if len(grid) > _MOST_POSITIONS:
        step_um = grid.spec.stride_px * grid.spec.mpp
        raise ResolutionError(
            f"{slide.name}: {grid.columns} x {grid.rows} tiles, one every {step_um:g} µm, are more "
            f"than {_MOST_POSITIONS:,}; pass larger tiles or a smaller --overlap-px"
        )
    drawn = _drawn_mask(slide, options)
    if drawn is None:
        mask = _found_mask(slide, options, segmenter)
    elif options.search_in_mask:
        mask = _inside(_found_mask(slide, options, segmenter), drawn)
    else:
        mask = _scanned_part(drawn, slide.coarse_image(TISSUE_MPP))
    ratios = tissue_ratios(mask, grid)
    kept = np.flatnonzero(ratios >= options.min_tissue).astype(np.int64)
    warnings = _why_empty(mask, ratios, options, grid) if len(kept) == 0 else ()
    return SlidePlan(
        grid=grid,
        kept=kept,
        tissue_ratios=ratios[kept],
        mask=mask,
        warnings=(*_why_misplaced(drawn, slide.bounds), *_why_mixed(drawn, options), *warnings),
    )


def _drawn_mask(slide: PlannableSlide, options: PlanOptions) -> TissueMask | None:
    """The mask of a file; None where none is given."""
    if options.names_mask:
        return load_mask(
            Path(options.tissue),
            dimensions=slide.dimensions,
            mpp=slide.mpp,
            classes=options.tissue_class,
        )
    if lack := lacks_mask(options):
        raise TissueError(f"{slide.name}: {lack}")
    return None


def _inside(found: TissueMask, drawn: TissueMask) -> TissueMask:
    """What was found where the mask of a file is true."""
    mask = found.mask & _seen_by(found, drawn.mask, drawn.downsample)
    step = TissueStep(name=drawn.steps[-1].name, share=float(mask.mean()))
    return replace(found, mask=mask, method="file and auto", steps=(*found.steps, step))


def _scanned_part(drawn: TissueMask, coarse: CoarseImage) -> TissueMask:
    """The mask of a file where the slide has pixels, or damaged ones: others would be made up."""
    there = coarse.opaque >= SCANNED_OPACITY
    if coarse.damaged is not None:
        there = there | coarse.damaged
    mask = drawn.mask & _seen_by(drawn, there, coarse.downsample)
    step = TissueStep(name="outside the scan", share=float(mask.mean()))
    return replace(drawn, mask=mask, steps=(*drawn.steps, step))


def _seen_by(
    mask: TissueMask, other: npt.NDArray[np.bool_], downsample: tuple[float, float]
) -> npt.NDArray[np.bool_]:
    """The values of another picture of the slide at the middle of each of the mask's pixels."""
    rows, columns = (
        np.clip((np.arange(count) + 0.5) * own / others, 0, last - 1).astype(np.int64)
        for count, own, others, last in zip(
            mask.mask.shape, mask.downsample[::-1], downsample[::-1], other.shape, strict=True
        )
    )
    return np.asarray(other[np.ix_(rows, columns)], dtype=np.bool_)


def _found_mask(
    slide: PlannableSlide, options: PlanOptions, segmenter: Segmenter | None
) -> TissueMask:
    """The mask that the slide's pixels give."""
    if is_tissue_model(options.tissue) and segmenter is None:
        raise UsageError(f"tissue {options.tissue}: load the model and pass it as segmenter")
    coarse = slide.coarse_image(TISSUE_MPP)
    if options.tissue == "none":
        return full_mask(coarse.opaque, coarse.downsample)
    if segmenter is not None:
        mask = _segmented(slide.name, coarse, segmenter)
    else:
        mask = find_tissue(
            coarse.pixels,
            coarse.opaque,
            downsample=coarse.downsample,
            mpp=(slide.mpp[0] * coarse.downsample[0], slide.mpp[1] * coarse.downsample[1]),
            options=TissueOptions(keep_pen=options.keep_pen),
        )
    if coarse.damaged is None:
        return mask
    # What lies there is not known. Reading its tiles says so tile by tile, where calling it
    # empty would drop them in silence.
    step = TissueStep(name="damaged places kept", share=float((mask.mask | coarse.damaged).mean()))
    return replace(mask, mask=mask.mask | coarse.damaged, steps=(*mask.steps, step))


def _segmented(name: str, coarse: CoarseImage, segmenter: Segmenter) -> TissueMask:
    """The mask of a segmenter, held inside the scan."""
    found = np.asarray(segmenter(coarse))
    if found.shape != coarse.opaque.shape:
        raise TissueError(
            f"{name}: the tissue model returned a mask of {found.shape} for an image of "
            f"{coarse.opaque.shape} (height, width)"
        )
    mask = found.astype(np.bool_) & (coarse.opaque >= SCANNED_OPACITY)
    step = TissueStep(name="tissue model", share=float(mask.mean()))
    return TissueMask(mask=mask, downsample=coarse.downsample, method="model", steps=(step,))


def _why_misplaced(
    mask: TissueMask | None, bounds: tuple[int, int, int, int] | None
) -> tuple[str, ...]:
    """That a mask of a file covers what was not scanned, in one sentence."""
    if bounds is None or mask is None:
        return ()
    x, y, width, height = bounds
    left, right = x / mask.downsample[0], (x + width) / mask.downsample[0]
    top, lower = y / mask.downsample[1], (y + height) / mask.downsample[1]
    inside = mask.mask[int(top) : math.ceil(lower), int(left) : math.ceil(right)].sum()
    outside = 1.0 - float(inside) / max(1, int(mask.mask.sum()))
    if outside <= _MOST_OUTSIDE or not mask.mask.any():
        return ()
    return (
        f"{outside:.0%} of the mask lies outside the scanned area, {width} x {height} px at "
        f"({x}, {y}): its coordinates may count from there, as QuPath's do unless the slide was "
        "imported with --no-crop",
    )


def _why_mixed(mask: TissueMask | None, options: PlanOptions) -> tuple[str, ...]:
    """That annotations of several classes count alike, in one sentence."""
    if options.tissue_class or mask is None or len(mask.classes) < 2:
        return ()
    return (
        f"the mask's annotations of {', '.join(mask.classes[:-1])} and {mask.classes[-1]} all "
        "count as tissue; --tissue-class NAME takes those of one class alone",
    )


def _why_empty(
    mask: TissueMask, ratios: npt.NDArray[np.float32], options: PlanOptions, grid: TileGrid
) -> tuple[str, ...]:
    """Why no tile is kept, in one sentence."""
    (width, height), (across, down) = grid.dimensions, grid.tile_level0
    if width < across and height < down:
        return (
            f"smaller than one tile: the slide has {width} x {height} px, a tile takes "
            f"{across:.0f} x {down:.0f} of them; is it a thumbnail, or its mpp wrong?",
        )
    if mask.emptied_by == SPECKS:
        # A picture of a whole slide taken for one at full scale ends here, too.
        smallest_mm2 = TissueOptions().min_object_um2 / 1e6
        return (
            f"no tissue: every stained piece is smaller than {smallest_mm2:g} mm² at "
            f"{grid.mpp[0]:.3g} µm/px; if that scale is wrong, pass --mpp-override",
        )
    if mask.emptied_by is not None:
        return (f"no tissue: nothing was left after the step '{mask.emptied_by}'",)
    best = float(ratios.max(initial=0.0))
    return (
        f"no tile has {options.min_tissue:g} of tissue or more, the best has {best:.3g}; "
        "pass a smaller --min-tissue to keep such tiles",
    )
