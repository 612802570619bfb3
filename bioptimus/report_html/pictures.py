"""Small pictures for the page: the slide, and beside it the embedding map in the same frame."""

import base64
import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bioptimus.counting import Tell, tell_nobody
from bioptimus.errors import BioptimusError
from bioptimus.report_html.collect import RunData, SlideEntry
from bioptimus.view.colours import component_colours, faded
from bioptimus.view.components import Components
from bioptimus.view.source import SlideResult, open_source

logger = logging.getLogger(__name__)

# (slides up to, longer side of a picture in px). A WebP of 128 px takes about 4 kB, so the
# page stays below some 30 MiB whatever the number of slides.
_SIDES = ((40, 420), (200, 280), (1000, 160), (3000, 112))
_SMALLEST_SIDE = 72

# Colours are fitted on this many slides at most, spread evenly over the run.
_FIT_SLIDES = 48
_FIT_ROWS = 400


@dataclass(frozen=True, kw_only=True)
class SlidePicture:
    """Data URIs for one slide; "" where there is nothing to show."""

    thumbnail: str = ""
    embedding: str = ""


def draw_all(run: RunData, tell: Tell = tell_nobody) -> Mapping[str, SlidePicture]:
    """Pictures by slide. Files that cannot be drawn are left out with a log line."""
    with_file = [
        entry for entry in run.slides if entry.state in ("ok", "empty", "skipped") and entry.output
    ]
    side = picture_side(len(with_file))
    fitted = _fit_by_model(with_file)
    pictures: dict[str, SlidePicture] = {}
    for done, entry in enumerate(with_file, start=1):
        source = _source(entry)
        if source is not None:
            width = 0 if source.features is None else source.features.shape[1]
            try:
                pictures[entry.key] = _draw(source, fitted.get((entry.model, width)), side)
            except BioptimusError as exc:
                logger.warning("%s; no picture of it", exc)
        tell("pictures", done, len(with_file))
    return pictures


def picture_side(slides: int) -> int:
    """Longer side of a picture in px for a page of that many slides."""
    return next((side for most, side in _SIDES if slides <= most), _SMALLEST_SIDE)


def _source(entry: SlideEntry) -> SlideResult | None:
    if entry.output is None:
        return None
    try:
        return open_source(entry.output)
    except BioptimusError as exc:
        logger.warning("%s; no picture of it", exc)
        return None


def _fit_by_model(entries: Sequence[SlideEntry]) -> dict[tuple[str, int], Components]:
    """Components over the whole run, so that equal colours mean equal tissue on every slide."""
    samples: dict[tuple[str, int], list[npt.NDArray[np.float32]]] = {}
    for entry in entries[:: max(1, -(-len(entries) // _FIT_SLIDES))]:
        source = _source(entry)
        if source is None or source.features is None or not len(source):
            continue
        key = (entry.model, source.features.shape[1])
        with contextlib.suppress(BioptimusError):  # told when its own picture is drawn
            samples.setdefault(key, []).append(source.feature_sample(wanted=_FIT_ROWS))
    return {
        key: Components.fit(np.concatenate(parts), count=3)
        for key, parts in samples.items()
        if parts
    }


def _draw(source: SlideResult, fitted: Components | None, side: int) -> SlidePicture:
    from PIL import Image

    if source.thumbnail is None:
        ground = np.full((side, side, 3), 245, np.uint8)
        scale = max(source.dimensions) / side
        downsample = (scale, scale)
    else:
        image = Image.fromarray(source.thumbnail.pixels)
        before = image.size
        image.thumbnail((side, side), Image.Resampling.BOX)
        ground = np.asarray(image)
        downsample = (
            source.thumbnail.downsample[0] * before[0] / image.size[0],
            source.thumbnail.downsample[1] * before[1] / image.size[1],
        )
    thumbnail = _data_uri(ground) if source.thumbnail is not None else ""
    if fitted is None or not len(source):
        return SlidePicture(thumbnail=thumbnail)
    scores = fitted.project(source.feature_blocks(), count=3)
    colours = component_colours(fitted.unit_scores(scores))
    return SlidePicture(
        thumbnail=thumbnail,
        embedding=_data_uri(paint_over(faded(ground), source, colours, downsample)),
    )


def paint_over(
    ground: npt.NDArray[np.uint8],
    source: SlideResult,
    colours: npt.NDArray[np.uint8],
    downsample: tuple[float, float],
) -> npt.NDArray[np.uint8]:
    """Coloured tiles over a picture of the whole slide.

    Each pixel takes the tile under its centre, so any number of tiles costs the same.

    Args:
        ground: (H, W, 3) uint8.
        source: Tells where the tiles lie.
        colours: (N, 3) uint8, one a tile.
        downsample: (x, y) level-0 pixels per pixel of the picture.

    Returns:
        (H, W, 3) uint8.
    """
    lattice = source.lattice()
    raster = lattice.paint(colours)
    height, width = ground.shape[:2]
    x = (np.arange(width) + 0.5) * downsample[0] - lattice.extent[0]
    y = (np.arange(height) + 0.5) * downsample[1] - lattice.extent[1]
    column = np.floor(x / source.stride_level0[0]).astype(np.int64)
    row = np.floor(y / source.stride_level0[1]).astype(np.int64)
    inside_x = (column >= 0) & (column < lattice.shape[1])
    inside_y = (row >= 0) & (row < lattice.shape[0])
    over = raster[row.clip(0, lattice.shape[0] - 1)][:, column.clip(0, lattice.shape[1] - 1)]
    there = inside_y[:, None] & inside_x[None, :] & (over[..., 3] > 0)
    picture = ground.copy()
    picture[there] = over[there, :3]
    return picture


def _data_uri(pixels: npt.NDArray[np.uint8]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "WEBP", quality=72, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
