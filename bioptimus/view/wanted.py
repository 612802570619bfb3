"""Which pictures of a file are wanted, and writing them under names that say what they show."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bioptimus.errors import OutputError, UsageError
from bioptimus.view import figures
from bioptimus.view.page import PictureOptions
from bioptimus.view.source import SlideResult, embedded_tiles, open_source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Pictures to draw. With none chosen: the overview, and the embedding map if there is one.

    Attributes:
        overview: The slide, its tissue and tiles.
        embedding: The embedding map.
        columns: Names or numbers of predicted values, a heatmap each.
        clusters: Number of k-means clusters.
        tile: Row whose likes are wanted.
        neighbours: How many of them.
        fit_on: Folder of result files that give the embedding map's colours.
    """

    overview: bool = False
    embedding: bool = False
    columns: tuple[str, ...] = ()
    clusters: int | None = None
    tile: int | None = None
    neighbours: int = 13
    fit_on: Path | None = None

    @property
    def nothing_chosen(self) -> bool:
        """Whether the default pictures are wanted."""
        return not (
            self.overview
            or self.embedding
            or self.columns
            or self.clusters is not None
            or self.tile is not None
        )

    def check(self, source: SlideResult) -> None:
        """Refuse pictures that cannot be drawn of a file, before the first one is.

        Raises:
            UsageError: The file has no such column, row or embeddings; or there is nothing to fit
                the colours on.
        """
        if self.embedding or self.clusters is not None or self.tile is not None:
            source.feature_blocks()
        for column in self.columns:
            source.column_number(column)
        if self.clusters is not None:
            figures.check_clusters(self.clusters)
        if self.tile is not None:
            figures.check_neighbours(source, row=self.tile, count=self.neighbours)
        if self.fit_on is not None and self.draws_embedding(source):
            _result_files(self.fit_on)

    def draws_embedding(self, source: SlideResult) -> bool:
        """Whether the embedding map is among the pictures."""
        return self.embedding or (self.nothing_chosen and source.features is not None)


def draw_wanted(
    source: SlideResult,
    wanted: Wanted,
    options: PictureOptions,
    *,
    out: Path,
    suffix: str,
) -> Iterator[Path]:
    """Draw and write pictures one after another.

    Args:
        source: The result file.
        wanted: Which pictures.
        options: Size, and the slide.
        out: Folder for ``<stem>.<picture>.<suffix>``; made if need be.
        suffix: ``png``, ``svg`` or ``pdf``.

    Yields:
        The path of each picture, once it is written.

    Raises:
        UsageError: The file has no such column, row or embeddings.
        OutputError: A picture cannot be written, or the result file cannot be read.
    """
    wanted.check(source)
    if wanted.fit_on is not None and not wanted.draws_embedding(source):
        log.warning(
            "--fit-on %s: is not used; it colours the embedding map, which --embedding draws",
            wanted.fit_on,
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{out}: cannot be made: {exc.strerror or exc}") from exc
    for name, draw in _drawings(source, wanted, options):
        path = out / f"{source.path.stem}.{_file_name(name)}.{suffix}"
        figures.save(draw(), path, options)
        yield path


def _drawings(
    source: SlideResult, wanted: Wanted, options: PictureOptions
) -> Iterator[tuple[str, "Callable[[], Figure]"]]:
    if wanted.overview or wanted.nothing_chosen:
        yield "overview", lambda: figures.draw_overview(source, options)
    if wanted.draws_embedding(source):
        yield "embedding", lambda: _embedding(source, wanted, options)
    for column in wanted.columns:
        yield column, lambda: figures.draw_prediction(source, options, column=column)  # noqa: B023
    if (clusters := wanted.clusters) is not None:
        yield "clusters", lambda: figures.draw_clusters(source, options, count=clusters)
    if (row := wanted.tile) is not None:
        yield (
            f"like-{row}",
            lambda: figures.draw_nearest(source, options, row=row, count=wanted.neighbours),
        )


def _embedding(source: SlideResult, wanted: Wanted, options: PictureOptions) -> "Figure":
    if wanted.fit_on is None:
        return figures.draw_embedding(source, options)
    paths = _result_files(wanted.fit_on)
    tiles = sum(map(embedded_tiles, paths))
    fitted = figures.fit_cohort(map(open_source, paths), tiles=tiles)
    return figures.draw_embedding(source, options, fitted=fitted)


def _result_files(folder: Path) -> list[Path]:
    """The result files that give the embedding map's colours.

    Raises:
        UsageError: There is no such folder, or it holds none.
    """
    if not folder.is_dir():
        there = "is a file, not a folder" if folder.exists() else "no such folder"
        raise UsageError(f"--fit-on {folder}: {there}")
    paths = sorted(folder.rglob("*.h5"))
    if not paths:
        raise UsageError(f"--fit-on {folder}: holds no result files (*.h5)")
    return paths


def _file_name(name: str) -> str:
    """A column's name without what file systems mind."""
    return re.sub(r"[^\w.+-]+", "_", name)
