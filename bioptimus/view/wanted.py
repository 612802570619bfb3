"""Which pictures of which results are wanted, and writing them under names that say it."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.disk import remove_abandoned
from bioptimus.view import figures
from bioptimus.view.components import Components
from bioptimus.view.page import PictureOptions
from bioptimus.view.source import (
    SlideResult,
    Space,
    embeddings_of,
    find_slide,
    open_slide,
    open_source,
)

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
        at: The same for the tile at x, y in level-0 pixels.
        neighbours: How many of them.
        fit_on: Folder of result files that give the embedding map's colours; None takes those of
            which maps are drawn.
        slide: The slide, where it has moved since the result was made.
        use_slide: Whether the slide is looked for, or only the thumbnail in the file drawn on.
    """

    overview: bool = False
    embedding: bool = False
    columns: tuple[str, ...] = ()
    clusters: int | None = None
    tile: int | None = None
    at: tuple[float, float] | None = None
    neighbours: int = 13
    fit_on: Path | None = None
    slide: Path | None = None
    use_slide: bool = True

    @property
    def nothing_chosen(self) -> bool:
        """Whether the default pictures are wanted."""
        return not (
            self.overview
            or self.embedding
            or self.columns
            or self.clusters is not None
            or self.tile is not None
            or self.at is not None
        )

    def check(self, source: SlideResult) -> None:
        """Refuse pictures that cannot be drawn of a file, before the first one is.

        Raises:
            UsageError: The file has no such column, row or embeddings, or is of another slide.
            SlideOpenError: The slide cannot be opened where it was said to be.
        """
        row = self.row(source)
        if self.embedding or self.clusters is not None or row is not None:
            source.feature_blocks()
        for column in self.columns:
            source.column_number(column)
        if self.clusters is not None:
            figures.check_clusters(self.clusters)
        if row is not None:
            figures.check_neighbours(source, row=row, count=self.neighbours)
        if self.slide is not None:
            open_slide(self.slide, source).close()

    def draws_embedding(self, source: SlideResult) -> bool:
        """Whether the embedding map is among the pictures."""
        return self.embedding or (self.nothing_chosen and source.features is not None)

    def row(self, source: SlideResult) -> int | None:
        """The tile whose likes are wanted, if any.

        Raises:
            UsageError: There is no tile at the point given.
        """
        return self.tile if self.at is None else source.tile_at(self.at)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A result file and the pictures of it.

    Attributes:
        result: The result file.
        pictures: Name → file, in the order in which they are drawn.
        space: What its embedding map shows; None where none is drawn, or of no tiles.
        tiles: How many tiles it holds.
        problem: Why none can be drawn.
    """

    result: Path
    pictures: Mapping[str, Path]
    space: Space | None = None
    tiles: int = 0
    problem: str | None = None


def plan_sheets(
    results: Mapping[Path, PurePath],
    wanted: Wanted,
    *,
    out: Path,
    suffix: str,
    overwrite: bool = False,
) -> list[Sheet]:
    """Find out what will be drawn, and refuse what cannot be; nothing is written.

    Args:
        results: Result files, each with its path below the folder given.
        wanted: Which pictures.
        out: Folder for ``<folders>/<stem>.<picture>.<suffix>``.
        suffix: ``png``, ``svg`` or ``pdf``.
        overwrite: Whether pictures of other results may be replaced. Those of the same result are
            in any case.

    Returns:
        A sheet for each result; of one that cannot be read it says why.

    Raises:
        UsageError: A file has no such column, row or embeddings; two pictures would become the same
            file; or one stands in another's place that is not known to be of the same result.
        OutputError: What stands there cannot be read.
    """
    sheets: list[Sheet] = []
    taken: dict[str, Path] = {}
    for path, relative in results.items():
        try:
            source = open_source(path)
        except OutputError as exc:
            sheets.append(Sheet(result=path, pictures={}, problem=str(exc)))
            continue
        wanted.check(source)
        pictures: dict[str, Path] = {}
        for name, _ in _drawings(source, wanted, PictureOptions()):
            picture = out / relative.parent / f"{relative.stem}.{_file_name(name)}.{suffix}"
            _refuse_same(taken, picture, path)
            if picture.exists() and not overwrite and not figures.shows(picture, _words(source)):
                raise UsageError(
                    f"{picture}: is there already, and not known to be a picture of {path}; pass "
                    "--overwrite, or choose another --out"
                )
            pictures[name] = picture
        space = None
        if wanted.draws_embedding(source) and source.features is not None and len(source):
            space = Space(model=source.model, width=source.features.shape[1])
        sheets.append(Sheet(result=path, pictures=pictures, space=space, tiles=len(source)))
    return sheets


def _refuse_same(taken: dict[str, Path], picture: Path, result: Path) -> None:
    # Some file systems do not tell upper from lower case.
    key = str(picture).casefold()
    if key in taken:
        first = taken[key]
        raise UsageError(
            f"{first} and {result} would both become {picture}; give the folder above both, or "
            "draw them into separate folders"
            if first != result
            else f"{result}: two pictures of it would become {picture}; draw one at a time, into "
            "separate folders"
        )
    taken[key] = result


def fit_colours(sheets: Sequence[Sheet], wanted: Wanted) -> dict[Space, Components]:
    """Components that all embedding maps of a model take their colours from.

    Those of the folder that :class:`Wanted` names, else those of the sheets themselves, where there
    are several of one model. A single one has the colours of its own slide.

    Raises:
        UsageError: There is no such folder, or no embeddings of that model in it.
    """
    maps = {sheet.result: sheet.space for sheet in sheets if sheet.space is not None}
    tiles: dict[Space, dict[Path, int]] = {}
    if wanted.fit_on is None:
        for sheet in sheets:
            if sheet.space is not None:
                tiles.setdefault(sheet.space, {})[sheet.result] = sheet.tiles
    elif not maps:
        log.warning(
            "--fit-on %s: is not used; it colours the embedding map, which --embedding draws",
            wanted.fit_on,
        )
    else:
        tiles = _cohorts(_result_files(wanted.fit_on))
    fits: dict[Space, Components] = {}
    for path, space in maps.items():
        if space in fits:
            continue
        cohort = tiles.get(space, {})
        if wanted.fit_on is None and len(cohort) < 2:
            continue
        fitted = figures.fit_cohort(_opened(cohort), tiles=sum(cohort.values()))
        if fitted is not None:
            fits[space] = fitted
        elif wanted.fit_on is not None:
            raise UsageError(
                f"--fit-on {wanted.fit_on}: holds no embeddings of {space.width} values of model "
                f"{space.model}, as {path.name} does; use the files of one model"
            )
    return fits


def _cohorts(paths: Iterable[Path]) -> dict[Space, dict[Path, int]]:
    """How many tiles result files hold, by the space of their embeddings."""
    tiles: dict[Space, dict[Path, int]] = {}
    for path in paths:
        try:
            space, count = embeddings_of(path)
        except OutputError as exc:
            _leave_out(exc)
            continue
        if space is not None:
            tiles.setdefault(space, {})[path] = count
    return tiles


def _opened(paths: Iterable[Path]) -> Iterator[SlideResult]:
    for path in paths:
        try:
            source = open_source(path)
        except OutputError as exc:
            _leave_out(exc)
            continue
        yield source
        del source  # before the next one is opened


def _leave_out(error: OutputError) -> None:
    log.warning("%s; the embedding map's colours are fitted without it", error)


def draw_sheet(
    sheet: Sheet, wanted: Wanted, options: PictureOptions, *, fits: Mapping[Space, Components]
) -> Iterator[Path]:
    """Draw and write the pictures of one result, one after another.

    Args:
        sheet: From :func:`plan_sheets`.
        wanted: Which pictures.
        options: Size.
        fits: From :func:`fit_colours`.

    Yields:
        The path of each picture, once it is written.

    Raises:
        OutputError: A picture cannot be written, or the result file cannot be read.
    """
    if sheet.problem is not None:
        raise OutputError(sheet.problem)
    source = open_source(sheet.result)
    slide = wanted.slide
    if slide is None and wanted.use_slide:
        slide = find_slide(source)
    fitted = fits.get(sheet.space) if sheet.space is not None else None
    remove_abandoned(sheet.pictures.values())
    for name, draw in _drawings(source, wanted, replace(options, slide=slide), fitted):
        path = sheet.pictures[name]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OutputError(f"{path.parent}: cannot be made: {exc.strerror or exc}") from exc
        figures.save(draw(), path, options, made_from=_words(source))
        yield path


def _words(source: SlideResult) -> str:
    """What a picture says of the result that it shows; no name of a person or a folder in it."""
    return f"result {source.digest}"


def _drawings(
    source: SlideResult,
    wanted: Wanted,
    options: PictureOptions,
    fitted: Components | None = None,
) -> Iterator[tuple[str, "Callable[[], Figure]"]]:
    if wanted.overview or wanted.nothing_chosen:
        yield "overview", lambda: figures.draw_overview(source, options)
    if wanted.draws_embedding(source):
        yield "embedding", lambda: figures.draw_embedding(source, options, fitted=fitted)
    for column in wanted.columns:
        yield column, lambda: figures.draw_prediction(source, options, column=column)  # noqa: B023
    if (clusters := wanted.clusters) is not None:
        yield (
            f"clusters-{clusters}",
            lambda: figures.draw_clusters(source, options, count=clusters),
        )
    if (row := wanted.row(source)) is not None:
        yield (
            f"like-{row}",
            lambda: figures.draw_nearest(source, options, row=row, count=wanted.neighbours),
        )


def _result_files(folder: Path) -> Sequence[Path]:
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
