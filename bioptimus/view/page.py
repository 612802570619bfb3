"""One figure of a result: a head line, the map on the left, its key on the right."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bioptimus.errors import UsageError
from bioptimus.kinds import check_kinds
from bioptimus.view.clusters import Clusters
from bioptimus.view.colours import (
    CLUSTER_COLOURS,
    FAILED_COLOUR,
    OUTLINE_COLOUR,
    component_colours,
    faded,
    hex_to_rgb,
)
from bioptimus.view.components import Components
from bioptimus.view.lattice import Lattice
from bioptimus.view.scales import Scale
from bioptimus.view.source import Ground, SlidePictures, SlideResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Figures are laid out on a page 10 inches wide whatever the pixels, so that text keeps its
# share of the picture.
PAGE_INCHES = 10.0
_PANEL = 0.245
EDGE = 0.022
_HEAD_INCHES = 0.72
_FOOT_INCHES = 0.16
_SCALE_INCHES = 0.30

# Height over width of a map at most, so that the page fits a screen; and room for the key.
TALLEST_MAP = 1.25
_LOWEST_MAP_INCHES = 3.4

# Below this many picture pixels a cell, lines between cells would hide what they part.
_MIN_CELL_PX = 5.0

# Outlines smaller than this in the picture are dots that say nothing.
_MIN_OUTLINE_PX = 8.0

# Tissue shows through the colours a little, so that the eye can place them.
_TILE_ALPHA = 205

INK = "#1B1F24"
_QUIET = "#5B6570"


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """How a picture is made.

    Attributes:
        width_px: Width of a PNG; text and lines scale with it.
        slide: The slide file, for sharper ground and tile crops; None draws from the
            thumbnail in the result file.
    """

    width_px: int = 1600
    slide: Path | None = None

    def __post_init__(self) -> None:
        """Refuse widths that hold no picture or no memory.

        Raises:
            UsageError: The width lies outside 300 to 12,000 px, or a value is of another kind.
        """
        check_kinds(self)
        if not 300 <= self.width_px <= 12_000:
            raise UsageError(f"--width-px {self.width_px}: must be 300 to 12000")

    @property
    def dpi(self) -> float:
        """Pixels per inch of the page."""
        return self.width_px / PAGE_INCHES


def bare(axes: "Axes") -> None:
    """Take away ticks and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


class Page:
    """One figure: a head line, the map on the left, a panel for its key on the right."""

    def __init__(
        self,
        result: SlideResult,
        options: PictureOptions,
        *,
        box: tuple[float, float, float, float],
    ) -> None:
        from matplotlib.figure import Figure

        self._result = result
        self._box = box
        map_width = PAGE_INCHES * (1 - _PANEL - 3 * EDGE)
        ratio = (box[3] - box[1]) * result.mpp[1] / ((box[2] - box[0]) * result.mpp[0])
        # Long, thin slides: the page stays one that fits a screen, the key keeps its room.
        map_height = min(max(map_width * ratio, _LOWEST_MAP_INCHES), map_width * TALLEST_MAP)
        height = map_height + _HEAD_INCHES + _SCALE_INCHES + _FOOT_INCHES
        self.figure = Figure(figsize=(PAGE_INCHES, height), dpi=options.dpi)
        self._map_box = (
            EDGE,
            (_SCALE_INCHES + _FOOT_INCHES) / height,
            map_width / PAGE_INCHES,
            map_height / height,
        )
        self.axes = self.figure.add_axes(self._map_box)
        bare(self.axes)
        self.axes.set_aspect(result.mpp[1] / result.mpp[0], anchor="NW")
        self.axes.set_xlim(box[0], box[2])
        self.axes.set_ylim(box[3], box[1])
        self._px_per_level0 = (
            min(
                map_width / ((box[2] - box[0]) * result.mpp[0]),
                map_height / ((box[3] - box[1]) * result.mpp[1]),
            )
            * result.mpp[0]
            * options.dpi
        )
        # The key stands beside the picture, also where that is narrower than its place.
        shown = min(map_width, map_height / ratio)
        self._map_bottom_inches = _HEAD_INCHES + min(map_height, map_width * ratio)
        self._panel_left = EDGE + shown / PAGE_INCHES + 1.2 * EDGE

    def grow(self, inches: float) -> None:
        """Add room below; everything drawn so far keeps its size."""
        old = self.figure.get_figheight()
        new = old + inches
        self.figure.set_figheight(new)
        for axes in self.figure.axes:
            box = axes.get_position(original=True)
            axes.set_position(
                (box.x0, (box.y0 * old + inches) / new, box.width, box.height * old / new)
            )
        for label in self.figure.texts:
            x, y = label.get_position()
            label.set_position((x, (y * old + inches) / new))

    def _panel(self, top_inches: float, height_inches: float) -> "Axes":
        """Axes in the panel, ``top_inches`` below the head."""
        height = self.figure.get_figheight()
        bottom = (height - _HEAD_INCHES - top_inches - height_inches) / height
        axes = self.figure.add_axes((self._panel_left, bottom, _PANEL, height_inches / height))
        bare(axes)
        return axes

    def head(self, title: str, subtitle: str) -> None:
        """Title and subtitle over the map, the slide's name in the subtitle."""
        height = self.figure.get_figheight()
        self.figure.text(
            EDGE, 1 - 0.16 / height, title, fontsize=15, fontweight="bold", color=INK, va="top",
            parse_math=False,
        )  # fmt: skip
        line = f"{_shortened(self._result.name, 70)} · {subtitle}"
        # Names may hold dollar signs, between which matplotlib expects a formula.
        self.figure.text(
            EDGE, 1 - 0.45 / height, line, fontsize=9, color=_QUIET, va="top", parse_math=False
        )

    def show_ground(self, ground: Ground | None, *, pale: bool = False) -> None:
        """The slide under everything else; white where there is no picture of it."""
        if ground is None:
            return
        pixels = ground.pixels
        height, width = pixels.shape[:2]
        # Only what the page shows: a slide with one small biopsy is not drawn as a whole.
        left = max(0, int(self._box[0] / ground.downsample[0]))
        top = max(0, int(self._box[1] / ground.downsample[1]))
        right = min(width, int(self._box[2] / ground.downsample[0]) + 1)
        bottom = min(height, int(self._box[3] / ground.downsample[1]) + 1)
        part = pixels[top:bottom, left:right]
        extent = (
            left * ground.downsample[0],
            right * ground.downsample[0],
            bottom * ground.downsample[1],
            top * ground.downsample[1],
        )
        self._image(faded(part) if pale else part, extent, interpolation="antialiased")

    def _image(
        self, pixels: npt.NDArray[Any], extent: tuple[float, float, float, float], **options: Any
    ) -> Any:
        """``imshow`` that leaves the page's limits and aspect alone."""
        image = self.axes.imshow(pixels, extent=extent, aspect=self.axes.get_aspect(), **options)
        self.axes.set_xlim(self._box[0], self._box[2])
        self.axes.set_ylim(self._box[3], self._box[1])
        return image

    def _raster_extent(self, lattice: Lattice) -> tuple[float, float, float, float]:
        left, top, right, bottom = lattice.extent
        return left, right, bottom, top

    def paint(self, colours: npt.NDArray[np.uint8]) -> None:
        """One colour a tile."""
        lattice = self._result.lattice()
        raster = lattice.paint(colours)
        raster[..., 3] = np.where(raster[..., 3] > 0, _TILE_ALPHA, 0)
        self._image(raster, self._raster_extent(lattice), interpolation="nearest")
        self._part_cells(lattice)

    def heat(
        self,
        values: npt.NDArray[np.float32],
        *,
        label: str,
        scale: Scale | None = None,
        whose: str = "",
    ) -> None:
        """Values as colours, with their bar.

        Args:
            values: One a tile.
            label: What stands over the bar.
            scale: What the colours span; by default what these values do.
            whose: Words below the bar that tell whose scale it is.
        """
        lattice = self._result.lattice()
        scale = scale or Scale.of(values)
        image = self._image(
            lattice.spread(values),
            self._raster_extent(lattice),
            interpolation="nearest",
            cmap="viridis",
            vmin=scale.low,
            vmax=scale.high,
            alpha=_TILE_ALPHA / 255,
        )
        self._part_cells(lattice)
        self._colour_bar(image, values, label, whose)

    def _colour_bar(
        self, image: Any, values: npt.NDArray[np.float32], label: str, whose: str
    ) -> None:
        from matplotlib.ticker import FuncFormatter

        bar_inches = min(2.9, self.figure.get_figheight() - _HEAD_INCHES - 1.5)
        axes = self._panel(0.30, bar_inches)
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, 0.022, box.height))
        low, high = image.get_clim()
        ends = ("min" if values.min() < low else "", "max" if values.max() > high else "")
        extend = {("", ""): "neither", ("min", ""): "min", ("", "max"): "max"}.get(ends, "both")
        bar = self.figure.colorbar(image, cax=axes, extend=extend, extendfrac=0.035)
        bar.outline.set_visible(False)
        # Whole numbers at each tick: an offset would stand in the way of the label.
        bar.formatter = FuncFormatter(lambda value, _: f"{value:.6g}")
        bar.ax.tick_params(labelsize=8.5, color=_QUIET, labelcolor=INK, length=3)
        self._note(label, top_inches=0.02, size=9, colour=INK)
        middle = float(np.median(values))
        spread = f"median {middle:.4g}\nrange {values.min():.4g} to {values.max():.4g}"
        self._note(
            f"{spread}\n{whose}" if whose else spread, top_inches=0.30 + bar_inches + 0.22, size=8
        )

    def _note(self, words: str, *, top_inches: float, size: float, colour: str = _QUIET) -> None:
        height = self.figure.get_figheight()
        y = 1 - (_HEAD_INCHES + top_inches) / height
        self.figure.text(
            self._panel_left, y, words, fontsize=size, color=colour, va="top", linespacing=1.45,
            parse_math=False,
        )  # fmt: skip

    def _part_cells(self, lattice: Lattice) -> None:
        """Thin white lines between cells where they are large enough to carry them."""
        if self._result.stride_level0[0] * self._px_per_level0 < 4 * _MIN_CELL_PX:
            return
        self._cell_lines(lattice, colour="white", width=0.5, alpha=0.55)

    def _cell_lines(self, lattice: Lattice, *, colour: str, width: float, alpha: float) -> None:
        from matplotlib.collections import LineCollection

        lines = _cell_edges(lattice, self._result.stride_level0)
        self.axes.add_collection(
            LineCollection(
                list(lines),
                colors=colour,
                linewidths=width,
                alpha=alpha,
                rasterized=len(lines) > 5000,
            ),
            autolim=False,
        )

    def tint_tiles(self) -> None:
        """Show which cells have a row: a light wash, and lines where there is room."""
        lattice = self._result.lattice()
        wash = lattice.paint(np.full((len(self._result), 3), hex_to_rgb("#0072B2"), np.uint8))
        wash[..., 3] = np.where(wash[..., 3] > 0, 38, 0)
        self._image(wash, self._raster_extent(lattice), interpolation="nearest")
        if self._result.stride_level0[0] * self._px_per_level0 >= _MIN_CELL_PX:
            self._cell_lines(lattice, colour="#0072B2", width=0.6, alpha=0.6)

    def outline_tissue(self) -> None:
        """The mask's border."""
        if self._result.mask is None:
            return
        from matplotlib.collections import LineCollection

        mask, downsample = self._result.mask
        smallest = _MIN_OUTLINE_PX / self._px_per_level0
        lines = [
            polygon
            for polygon in (line * np.asarray(downsample) for line in _contours(mask))
            if np.ptp(polygon, axis=0).max() >= smallest
        ]
        self.axes.add_collection(
            LineCollection(lines, colors=OUTLINE_COLOUR, linewidths=1.3), autolim=False
        )

    def mark_failed(self) -> None:
        """A cross over each tile that has no row."""
        failed = self._result.failed
        if not len(failed):
            return
        from matplotlib.patheffects import Normal, Stroke

        centres = failed + np.asarray(self._result.tile_level0) / 2
        cell_points = self._result.stride_level0[0] * self._px_per_level0 / self.figure.dpi * 72
        self.axes.scatter(
            centres[:, 0],
            centres[:, 1],
            s=min(max(cell_points * 0.5, 4.0), 11.0) ** 2,
            marker="x",
            color=FAILED_COLOUR,
            linewidths=1.8,
            path_effects=[Stroke(linewidth=4.0, foreground="white"), Normal()],
        )

    def mark_tiles(self, row: int, others: npt.NDArray[np.int64]) -> None:
        """Frames around one tile and, thinner, around others."""
        from matplotlib.patches import Rectangle

        width, height = self._result.tile_level0
        marks = [(int(other), "white", 1.0) for other in others]
        marks += [(row, INK, 4.5), (row, FAILED_COLOUR, 2.2)]
        for tile, colour, line in marks:
            x, y = self._result.coords[tile]
            self.axes.add_patch(
                Rectangle((x, y), width, height, fill=False, edgecolor=colour, linewidth=line)
            )

    def scale_bar(self) -> None:
        """A bar of a round number of mm below the map, where it hides nothing."""
        left, _, right, _ = self._box
        length_mm = _round_length((right - left) * self._result.mpp[0] / 1000 / 5)
        length_px = length_mm * 1000 / self._result.mpp[0] * self._px_per_level0
        height = self.figure.get_figheight()
        axes = self.figure.add_axes(
            (
                EDGE,
                1 - (self._map_bottom_inches + 0.16) / height,
                length_px / self.figure.dpi / PAGE_INCHES,
                0.055 / height,
            )
        )
        bare(axes)
        axes.set_facecolor(INK)
        axes.text(
            1.0, 0.5, f"  {length_mm:g} mm", transform=axes.transAxes, va="center", fontsize=8.5,
            color=INK,
        )  # fmt: skip

    def say(self, words: str) -> None:
        """A sentence in the middle of the map, where there is nothing else to show."""
        self.axes.text(
            0.5, 0.5, words, transform=self.axes.transAxes, ha="center", va="center",
            fontsize=13, color=INK, zorder=9,
            bbox={"facecolor": "white", "alpha": 0.9, "edgecolor": "none", "pad": 8},
        )  # fmt: skip

    def facts(self, facts: list[tuple[str, str]]) -> None:
        """Figures about the slide, and what the marks mean."""
        for line, (name, value) in enumerate(facts):
            self._note(name, top_inches=0.02 + 0.42 * line, size=8)
            self._note(value, top_inches=0.17 + 0.42 * line, size=10, colour=INK)
        self._overview_legend(0.02 + 0.42 * len(facts) + 0.14)

    def _overview_legend(self, top_inches: float) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Any] = [Patch(facecolor="#CFE0EC", edgecolor="#0072B2", label="tile")]
        if self._result.mask is not None:
            handles.append(Line2D([], [], color=OUTLINE_COLOUR, label="tissue found"))
        if len(self._result.failed):
            handles.append(
                Line2D(
                    [],
                    [],
                    color=FAILED_COLOUR,
                    label="failed tile",
                    marker="x",
                    linestyle="",
                    markeredgewidth=1.8,
                )
            )
        axes = self._panel(top_inches, 0.3 * len(handles))
        axes.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(-0.02, 1.0),
            borderpad=0,
            borderaxespad=0,
            frameon=False,
            fontsize=9,
            labelcolor=INK,
        )

    def component_key(
        self, components: Components, units: npt.NDArray[np.float32], *, cohort: bool
    ) -> None:
        """What the colours mean: a strip for each component, and the tiles in the plane."""
        names = ("lightness", "blue to yellow", "green to red")
        whose = "the cohort's" if cohort else "this slide's"
        self._note(f"one colour a tile:\n{whose} first three components", top_inches=0, size=8.5)
        for number, name in enumerate(names):
            top = 0.52 + 0.55 * number
            share = (
                f"{components.share[number]:.0%} of the variance"
                if number < len(components.share)
                else "no variance"
            )
            self._note(f"{number + 1}  {name}, {share}", top_inches=top, size=8, colour=INK)
            ramp = np.full((256, 3), 0.5, np.float32)
            ramp[:, number] = np.linspace(0, 1, 256)
            strip = self._panel(top + 0.19, 0.13)
            strip.imshow(component_colours(ramp)[None], aspect="auto", interpolation="bilinear")
        room = self.figure.get_figheight() - _HEAD_INCHES - _FOOT_INCHES - 2.42
        side = min(_PANEL * PAGE_INCHES, room)
        if side > 1.0 and len(units) > 1:
            self._component_scatter(units, side)

    def _component_scatter(self, units: npt.NDArray[np.float32], side: float) -> None:
        axes = self._panel(2.3, side - 0.1)
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, side / PAGE_INCHES, box.height))
        shown = units[:: max(1, len(units) // 6000)]
        axes.scatter(
            shown[:, 0],
            shown[:, 1],
            c=component_colours(shown) / 255.0,
            s=max(1.2, min(16.0, 6000 / len(shown))),
            linewidths=0,
            rasterized=True,
        )
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        for edge in ("left", "bottom"):
            axes.spines[edge].set(visible=True, color="#C7CDD3", linewidth=0.8)
        axes.set_xlabel("component 1", fontsize=8, color=_QUIET, labelpad=3)
        axes.set_ylabel("component 2", fontsize=8, color=_QUIET, labelpad=3)

    def cluster_legend(
        self,
        clusters: Clusters,
        scores: npt.NDArray[np.float32],
        pictures: SlidePictures,
    ) -> None:
        """A line for each cluster: colour, share, area, and its three most typical tiles."""
        count = len(clusters.sizes)
        if not count:
            return
        room = self.figure.get_figheight() - _HEAD_INCHES - _FOOT_INCHES - 0.25
        line = min(0.72, room / count)
        cell_mm2 = (self._result.tile.stride_px * self._result.tile.mpp / 1000) ** 2
        self._note("share of tiles, and the most typical ones", top_inches=0, size=8)
        for number in range(count):
            top = 0.25 + number * line
            size = int(clusters.sizes[number])
            swatch = self._panel(top, line * 0.8)
            box = swatch.get_position()
            swatch.set_position((box.x0, box.y0, 0.014, box.height))
            swatch.set_facecolor(CLUSTER_COLOURS[number])
            height = self.figure.get_figheight()
            middle = box.y0 + box.height / 2
            self.figure.text(
                box.x0 + 0.022, middle, f"{number + 1}", fontsize=10, color=INK,
                fontweight="bold", va="center",
            )  # fmt: skip
            words = f"{size / len(self._result):.0%}\n{three_digits(size * cell_mm2)} mm²"
            self.figure.text(
                box.x0 + 0.042, middle, words, fontsize=7.5, color=INK, va="center",
                linespacing=1.3,
            )  # fmt: skip
            typical = clusters.nearest_rows(scores, cluster=number, count=3)
            side = min(line * 0.88, 0.43)
            for place, pixels in enumerate(pictures.tiles(typical)):
                left = box.x0 + 0.104 + place * (side + 0.03) / PAGE_INCHES
                crop = self.figure.add_axes(
                    (left, middle - side / 2 / height, side / PAGE_INCHES, side / height)
                )
                bare(crop)
                crop.imshow(pixels, aspect="auto", interpolation="lanczos")


def _shortened(words: str, most: int) -> str:
    """Fit for one line of a page: middle left out, so that both ends of a long name stay."""
    words = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in words)
    if len(words) <= most:
        return words
    half = (most - 1) // 2
    return f"{words[:half]}…{words[-half:]}"


def three_digits(value: float) -> str:
    """Two or three digits, never an exponent: 0.082, 4.1, 1,230."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _round_length(most_mm: float) -> float:
    """The largest of 1, 2, 5 × 10ⁿ that does not exceed ``most_mm``."""
    power = 10.0 ** np.floor(np.log10(most_mm))
    return float(power * max(step for step in (1, 2, 5) if step * power <= most_mm * 1.0001))


def _contours(mask: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.float64]]:
    """Closed border lines of a mask, (n, 2) in mask pixels, along the pixels' outer edges."""
    import cv2

    # Doubled, so that borders run between pixels and a speck of one pixel has an area.
    large: npt.NDArray[np.uint8] = mask.astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    found, _ = cv2.findContours(large, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    lines = []
    for contour in found:
        points = contour[:, 0, :].astype(np.float64) / 2 + 0.25
        lines.append(np.concatenate([points, points[:1]]))
    return lines


def _cell_edges(lattice: Lattice, stride: tuple[float, float]) -> npt.NDArray[np.float64]:
    """Every edge of every occupied cell once, (E, 2, 2) in level-0 pixels."""
    there = np.zeros((lattice.shape[0] + 2, lattice.shape[1] + 2), bool)
    there[lattice.rows + 1, lattice.columns + 1] = True
    left, top = lattice.extent[:2]
    row, column = np.nonzero((there[1:] | there[:-1])[:, 1:-1])
    flat = _segments(left + column * stride[0], top + row * stride[1], stride[0], 0.0)
    row, column = np.nonzero((there[:, 1:] | there[:, :-1])[1:-1])
    upright = _segments(left + column * stride[0], top + row * stride[1], 0.0, stride[1])
    return np.concatenate([flat, upright])


def _segments(
    x: npt.NDArray[np.floating[Any]], y: npt.NDArray[np.floating[Any]], across: float, down: float
) -> npt.NDArray[np.float64]:
    return np.stack([np.stack([x, y], axis=1), np.stack([x + across, y + down], axis=1)], axis=1)
