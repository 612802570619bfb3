"""The pictures, drawn with matplotlib (the extra ``view``)."""

import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bioptimus.counting import counted
from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.disk import output_errors, written_aside
from bioptimus.kinds import checks_kinds
from bioptimus.view.clusters import k_means
from bioptimus.view.colours import (
    CLUSTER_COLOURS,
    FAILED_COLOUR,
    component_colours,
    hex_to_rgb,
)
from bioptimus.view.components import MAX_COMPONENTS, SAMPLE_ROWS, Components, Floats
from bioptimus.view.page import (
    EDGE,
    INK,
    PAGE_INCHES,
    TALLEST_MAP,
    Page,
    PictureOptions,
    bare,
    three_digits,
)
from bioptimus.view.scales import Scale
from bioptimus.view.source import SlidePictures, SlideResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

# The first two lines of a legend for people who do not know the model's words.
UNITS = {
    "haematoxylin_od": "optical density",
    "eosin_od": "optical density",
    "nuclear_area_fraction": "share of the tile's area",
    "brightness": "0 black … 1 white",
    "saturation": "0 grey … 1 full colour",
    "focus": "variance of the Laplacian",
}


def draw_overview(result: SlideResult, options: PictureOptions) -> "Figure":
    """The slide with its tissue outline, the tiles that have a row, and those that failed."""
    with SlidePictures(result, options.slide) as pictures:
        ground = pictures.ground(options.width_px)
    page = Page(result, options, box=_whole_slide(result))
    page.show_ground(ground)
    if len(result):
        page.tint_tiles()
    page.outline_tissue()
    page.mark_failed()
    page.scale_bar()
    if not len(result):
        page.say(_why_empty(result))
    page.head("Tiles", _counts(result))
    page.facts(_overview_facts(result))
    return page.figure


@checks_kinds
def draw_embedding(
    result: SlideResult, options: PictureOptions, *, fitted: Components | None = None
) -> "Figure":
    """The embedding as a map: three components as one colour a tile.

    Args:
        result: The file; an empty one gives a picture without tiles.
        options: Size and slide.
        fitted: Components of a cohort, so that equal colours mean equal tissue on every
            slide; without them the slide's own are used.

    Raises:
        UsageError: The file holds no embeddings, or of another length than the cohort's.
    """
    components = fitted or Components.fit(result.feature_sample(wanted=SAMPLE_ROWS), count=3)
    _check_width(result, components)
    scores = components.project(result.feature_blocks(), count=3)
    units = components.unit_scores(scores)
    page = _map_page(result, options)
    if len(result):
        page.paint(component_colours(units))
        page.component_key(components, units, cohort=fitted is not None)
    page.head("Embedding map", _counts(result))
    return page.figure


@checks_kinds
def draw_prediction(
    result: SlideResult, options: PictureOptions, *, column: str, scale: Scale | None = None
) -> "Figure":
    """One predicted value as a heatmap with a colour bar in its own unit.

    Args:
        result: The file; an empty one gives a picture without tiles.
        options: Size and slide.
        column: The value's name, or its number from 0.
        scale: What the values of a cohort span, so that equal colours mean equal values on every
            slide; without it what the slide's own do.

    Raises:
        UsageError: The file has no predicted value of that name.
    """
    name = result.quantity(column).name
    values = result.column(column)
    unit = result.output_unit or UNITS.get(name, "")
    page = _map_page(result, options)
    page.head(name, _counts(result))
    if len(result):
        whose = counted(scale.slides, "slide") if scale else "this slide alone"
        page.heat(values, label=unit or name, scale=scale, whose=f"scale of {whose}")
    return page.figure


@checks_kinds
def draw_clusters(result: SlideResult, options: PictureOptions, *, count: int) -> "Figure":
    """k-means clusters of the embeddings, the largest first, with typical tiles of each.

    Clustering runs on the first 32 principal components.

    Raises:
        UsageError: The file holds no embeddings, or more clusters are asked for than there
            are colours that people tell apart. Fewer clusters than asked for, because no more
            tiles differ, are no error: the picture says so.
    """
    check_clusters(count)
    components = Components.fit(result.feature_sample(wanted=SAMPLE_ROWS))
    scores = components.project(result.feature_blocks(), count=MAX_COMPONENTS)
    clusters = k_means(scores, count)
    page = _map_page(result, options)
    if len(result):
        palette = np.array([hex_to_rgb(colour) for colour in CLUSTER_COLOURS], np.uint8)
        page.paint(palette[clusters.labels])
    found = len(clusters.sizes)
    counts = _counts(result)
    if 0 < found < count:
        fewer = f"only {found} of {count} clusters: no more tiles differ"
        log.warning("%s: %s", result.name, fewer)
        counts += f" · {fewer}"
    page.head("Clusters", counts)
    with SlidePictures(result, options.slide) as pictures:
        page.cluster_legend(clusters, scores, pictures)
    return page.figure


def check_clusters(count: int) -> None:
    """Refuse a number of clusters that no picture shows.

    Raises:
        UsageError: It is not 1 to the number of colours.
    """
    if not 1 <= count <= len(CLUSTER_COLOURS):
        raise UsageError(f"--clusters {count}: must be 1 to {len(CLUSTER_COLOURS)}")


@checks_kinds
def draw_nearest(
    result: SlideResult, options: PictureOptions, *, row: int, count: int = 12
) -> "Figure":
    """The tiles whose embeddings are closest to one tile's, by cosine similarity.

    Args:
        result: The file.
        options: Size and slide.
        row: The chosen tile's row number.
        count: Neighbours shown.

    Raises:
        UsageError: No such row, or the file holds no embeddings.
    """
    check_neighbours(result, row=row, count=count)
    similarity = cosine_similarity(result, row)
    order = np.argsort(-similarity, kind="stable")
    chosen = order[order != row][:count]
    with SlidePictures(result, options.slide) as pictures:
        crops = pictures.tiles(np.concatenate([[row], chosen]))
    page = _map_page(result, options)
    page.heat(similarity, label="cosine similarity")
    page.head(f"Tiles like tile {row}", _counts(result))
    page.mark_tiles(row, chosen)
    return _with_contact_sheet(page, row, chosen, similarity, crops)


def check_neighbours(result: SlideResult, *, row: int, count: int) -> None:
    """Refuse a tile that is not there, or more neighbours than a picture shows.

    Raises:
        UsageError: One of these.
    """
    if not 0 <= row < len(result):
        rows = f"rows 0 to {len(result) - 1}" if len(result) else "no tiles"
        raise UsageError(f"--tile {row}: {result.path.name} has {rows}")
    if not 1 <= count <= 60:
        raise UsageError(f"--neighbours {count}: must be 1 to 60")


def cosine_similarity(result: SlideResult, row: int) -> npt.NDArray[np.float32]:
    """Cosine of each embedding with one row's, (N,) float32; 0 for a zero vector.

    Raises:
        UsageError: The file holds no embeddings.
    """
    blocks = result.feature_blocks()
    assert result.features is not None
    wanted = np.asarray(result.features[row : row + 1], np.float32)[0]
    wanted = wanted / max(float(np.linalg.norm(wanted)), 1e-30)
    parts = [
        (block @ wanted) / np.maximum(np.linalg.norm(block, axis=1), 1e-30) for block in blocks
    ]
    return np.concatenate(parts).astype(np.float32)


def leave_out(error: OutputError) -> None:
    """Tell that colours are fitted without a result that cannot be read."""
    log.warning("%s; colours are fitted without it", error)


def fit_cohort(results: Iterable[SlideResult], *, tiles: int) -> Components | None:
    """Components of several files, each weighing by its number of tiles.

    Args:
        results: Taken one after the other, so that only one need be in memory. One that is
            damaged is left out, with a warning.
        tiles: How many rows with an embedding they have together.

    Returns:
        Three components; None where no file holds an embedding.

    Raises:
        UsageError: The embeddings differ in length.
    """
    samples: list[Floats] = []
    first = ""
    for result in results:
        if result.features is None or not len(result):
            continue
        wanted = max(1, SAMPLE_ROWS * len(result) // tiles)
        try:
            sample = result.feature_sample(wanted=wanted)
        except OutputError as exc:
            leave_out(exc)
            continue
        if samples and sample.shape[1] != samples[0].shape[1]:
            raise UsageError(
                f"{result.path.name} has embeddings of {sample.shape[1]} values, "
                f"{first} of {samples[0].shape[1]}; use the files of one model"
            )
        first = first or result.path.name
        samples.append(sample)
    return Components.fit(np.concatenate(samples), count=3) if samples else None


def save(
    figure: "Figure", path: Path, options: PictureOptions, *, made_from: str | None = None
) -> None:
    """Write a figure; its suffix says the format: png, svg or pdf.

    Args:
        figure: From one of the functions above.
        path: A file that is there is replaced once the new one is whole.
        options: Those that the figure was drawn with.
        made_from: Words that say what it shows, kept in the file; :func:`shows` finds them.

    Raises:
        OutputError: The file cannot be written.
    """
    import matplotlib as mpl

    kind = path.suffix[1:] or "png"
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    if made_from is not None:
        metadata["Subject" if kind == "pdf" else "Source"] = made_from
    with (
        output_errors(path, "cannot be written"),
        written_aside(path) as temporary,
        # Text stays text, and two runs give the same bytes.
        mpl.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "view"}),
    ):
        render(figure, temporary, format=kind, dpi=options.dpi, metadata=metadata or None)


def shows(path: Path, made_from: str) -> bool:
    """Whether a picture that is there was saved with these words.

    Raises:
        OutputError: It cannot be read.
    """
    try:
        # In none of the formats are these words compressed.
        return made_from.encode() in path.read_bytes()
    except OSError as exc:
        raise OutputError(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def render(figure: "Figure", target: Path | BinaryIO, **options: Any) -> None:
    """``savefig``, without a word for each letter of a name that the font does not have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(target, facecolor="white", **options)


def check_installed() -> None:
    """Say early and plainly that matplotlib is missing.

    Raises:
        UsageError: It is.
    """
    try:
        # Only the figure classes are used, never pyplot: no backend is chosen, no screen needed.
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as exc:
        raise UsageError(
            "pictures need matplotlib; install it with: pip install 'bioptimus-wsi[view]'"
        ) from exc


def _check_width(result: SlideResult, components: Components) -> None:
    width = 0 if result.features is None else result.features.shape[1]
    if width != len(components.mean):
        raise UsageError(
            f"{result.path.name}: embeddings of {width} values, the cohort's have "
            f"{len(components.mean)}; use the files of one model"
        )


def _whole_slide(result: SlideResult) -> tuple[float, float, float, float]:
    return 0.0, 0.0, float(result.dimensions[0]), float(result.dimensions[1])


def _around_tiles(result: SlideResult) -> tuple[float, float, float, float]:
    """The part of the slide that holds tiles, with a margin, inside the slide and the tiles.

    A tall, narrow part is widened to fill the page, as far as the slide goes.
    """
    if not len(result):
        return _whole_slide(result)
    left, top, right, bottom = result.lattice().extent
    margin = 0.04 * max(right - left, bottom - top)
    width, height = result.dimensions
    top, bottom = min(top, max(0.0, top - margin)), max(bottom, min(height, bottom + margin))
    wanted = (bottom - top) * result.mpp[1] / result.mpp[0] / TALLEST_MAP
    margin = max(margin, (wanted - (right - left)) / 2)
    return min(left, max(0.0, left - margin)), top, max(right, min(width, right + margin)), bottom


def _map_page(result: SlideResult, options: PictureOptions) -> Page:
    """A page whose ground is the part of the slide with tiles, in pale greys."""
    box = _around_tiles(result)
    magnify = max(result.dimensions) / max(box[2] - box[0], box[3] - box[1])
    with SlidePictures(result, options.slide) as pictures:
        ground = pictures.ground(min(4096, round(options.width_px * magnify)))
    page = Page(result, options, box=box)
    page.show_ground(ground, pale=True)
    page.scale_bar()
    if not len(result):
        page.say(_why_empty(result))
    return page


def _why_empty(result: SlideResult) -> str:
    failed = len(result.failed)
    return f"no tiles: all {failed:,} failed" if failed else "no tiles were kept"


def _counts(result: SlideResult) -> str:
    parts = [f"{len(result):,} tiles of {result.tile.side_um:g} µm", result.model]
    return " · ".join(part for part in parts if part)


def _by_axis(mpp: tuple[float, float]) -> str:
    """One number, or both where they differ."""
    return " × ".join(dict.fromkeys(f"{value:.4g}" for value in mpp))


def _overview_facts(result: SlideResult) -> list[tuple[str, str]]:
    width_mm, height_mm = (
        size * mpp / 1000 for size, mpp in zip(result.dimensions, result.mpp, strict=True)
    )
    facts = [
        ("slide", f"{width_mm:.1f} × {height_mm:.1f} mm"),
        ("scale", f"{_by_axis(result.mpp)} µm/px"),
        ("tile", f"{result.tile.size_px} px at {result.tile.mpp:g} µm/px"),
        ("tiles", f"{len(result):,}"),
    ]
    if len(result):
        area = float(result.tissue_ratios.sum()) * (
            (result.tile.stride_px * result.tile.mpp / 1000) ** 2
        )
        facts.append(("tissue in tiles", f"{three_digits(area)} mm²"))
    if len(result.failed):
        facts.append(("failed tiles", f"{len(result.failed):,}"))
    return facts


def _with_contact_sheet(
    page: Page,
    row: int,
    chosen: npt.NDArray[np.int64],
    similarity: npt.NDArray[np.float32],
    crops: list[npt.NDArray[np.uint8]],
) -> "Figure":
    """Add the crops below the map: the chosen tile first, framed."""
    columns = 7
    lines = -(-len(crops) // columns)
    side = (PAGE_INCHES * (1 - 2 * EDGE)) / columns
    line_inches = side + 0.12
    page.grow(lines * line_inches + 0.1)
    height = page.figure.get_figheight()
    for position, pixels in enumerate(crops):
        line, column = divmod(position, columns)
        left = EDGE + column * side / PAGE_INCHES
        bottom = ((lines - line - 1) * line_inches + 0.24) / height
        axes = page.figure.add_axes(
            (left, bottom, (side - 0.1) / PAGE_INCHES, (side - 0.1) / height)
        )
        bare(axes)
        axes.imshow(pixels, interpolation="lanczos", aspect="auto")
        tile = row if position == 0 else int(chosen[position - 1])
        label = f"tile {tile}" if position == 0 else f"{tile} · {similarity[tile]:.3f}"
        axes.set_title(label, fontsize=7, color=INK, pad=2.5, y=-0.15, va="bottom")
        if position == 0:
            for spine in axes.spines.values():
                spine.set(visible=True, color=FAILED_COLOUR, linewidth=2.4)
    return page.figure
