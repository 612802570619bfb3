"""Which pictures of which results are wanted, and writing them under names that say it."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bioptimus.batch.result_files import results_below
from bioptimus.counting import Tell, tell_nobody
from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.disk import refuse_file, refuse_folder, remove_abandoned
from bioptimus.view import figures
from bioptimus.view.components import Components
from bioptimus.view.page import PictureOptions
from bioptimus.view.scales import Quantity, Scale, ScaleFit
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
        fit_on: Folder of result files that give the colours of embedding maps and heatmaps; None
            takes those of which they are drawn.
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
        quantities: What its heatmaps show; none where it has no tiles.
        tiles: How many tiles it holds.
        problem: Why none can be drawn.
    """

    result: Path
    pictures: Mapping[str, Path]
    space: Space | None = None
    quantities: tuple[Quantity, ...] = ()
    tiles: int = 0
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Colours that several slides share; where there is nothing, a slide has its own.

    Attributes:
        components: Of embedding maps.
        scales: Of heatmaps.
    """

    components: Mapping[Space, Components] = field(default_factory=dict)
    scales: Mapping[Quantity, Scale] = field(default_factory=dict)


def plan_sheets(
    results: Mapping[Path, PurePath],
    wanted: Wanted,
    *,
    out: Path,
    suffix: str,
    overwrite: bool = False,
    tell: Tell = tell_nobody,
) -> list[Sheet]:
    """Find out what will be drawn, and refuse what cannot be; nothing is written.

    Args:
        results: Result files, each with its path below the folder given.
        wanted: Which pictures.
        out: Folder for ``<folders>/<stem>.<picture>.<suffix>``.
        suffix: ``png``, ``svg`` or ``pdf``.
        overwrite: Whether pictures of other results may be replaced. Those of the same result are
            in any case.
        tell: Called before each result is looked at.

    Returns:
        A sheet for each result; of one that cannot be read it says why.

    Raises:
        UsageError: A file has no such column, row or embeddings; two pictures would become the same
            file; or one stands in another's place that is not known to be of the same result.
        OutputError: What stands there cannot be read.
    """
    sheets: list[Sheet] = []
    taken: dict[str, Path] = {}
    for number, (path, relative) in enumerate(results.items()):
        tell("results", number, len(results))
        try:
            source = open_source(path)
        except OutputError as exc:
            sheets.append(Sheet(result=path, pictures={}, problem=str(exc)))
            continue
        wanted.check(source)
        pictures: dict[str, Path] = {}
        for name, _ in _drawings(source, wanted, PictureOptions(), Fitted()):
            picture = out / relative.parent / f"{relative.stem}.{_file_name(name)}.{suffix}"
            _refuse_same(taken, picture, path)
            # A folder is told when its turn comes: the other results are drawn all the same.
            there = picture.exists() and not picture.is_dir()
            if there and not overwrite and not figures.shows(picture, _words(source)):
                raise UsageError(
                    f"{picture}: is there already, and not known to be a picture of {path}; pass "
                    "--overwrite, or choose another --out"
                )
            pictures[name] = picture
        sheets.append(
            Sheet(
                result=path,
                pictures=pictures,
                space=source.space if wanted.draws_embedding(source) else None,
                quantities=_quantities(source, wanted),
                tiles=len(source),
            )
        )
    return sheets


def _quantities(source: SlideResult, wanted: Wanted) -> tuple[Quantity, ...]:
    # Each once: a value may be asked for by its name and by its number.
    return tuple(dict.fromkeys(map(source.quantity, wanted.columns))) if len(source) else ()


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


def fit_colours(sheets: Sequence[Sheet], wanted: Wanted) -> Fitted:
    """What all embedding maps of a model, and all heatmaps of a value, take their colours from.

    The folder that :class:`Wanted` names, else the sheets themselves, where there are several of
    one model. A single one has the colours of its own slide.

    Raises:
        UsageError: There is no such folder, or nothing in it that the pictures show.
    """
    if wanted.fit_on is not None and not any(each.space or each.quantities for each in sheets):
        log.warning(
            "--fit-on %s: is not used; it colours the pictures of --embedding and --column",
            wanted.fit_on,
        )
        return Fitted()
    return Fitted(components=_fit_maps(sheets, wanted), scales=_fit_scales(sheets, wanted))


def _fit_maps(sheets: Sequence[Sheet], wanted: Wanted) -> dict[Space, Components]:
    maps = {sheet.result: sheet.space for sheet in sheets if sheet.space is not None}
    tiles: dict[Space, dict[Path, int]] = {}
    if wanted.fit_on is None:
        for sheet in sheets:
            if sheet.space is not None:
                tiles.setdefault(sheet.space, {})[sheet.result] = sheet.tiles
    elif maps:
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


def _fit_scales(sheets: Sequence[Sheet], wanted: Wanted) -> dict[Quantity, Scale]:
    results: dict[Quantity, list[Path]] = {}
    for sheet in sheets:
        for quantity in sheet.quantities:
            results.setdefault(quantity, []).append(sheet.result)
    if wanted.fit_on is None:
        fits = {quantity: ScaleFit() for quantity, paths in results.items() if len(paths) > 1}
        paths: Iterable[Path] = dict.fromkeys(path for each in fits for path in results[each])
    else:
        fits = {quantity: ScaleFit() for quantity in results}
        paths = _result_files(wanted.fit_on) if fits else ()
    for source in _opened(paths):
        _add_values(fits, source)
    scales: dict[Quantity, Scale] = {}
    for quantity, fit in fits.items():
        scale = fit.scale()
        if scale is not None:
            scales[quantity] = scale
        elif wanted.fit_on is not None:
            raise UsageError(
                f"--fit-on {wanted.fit_on}: holds no predictions {quantity.name} of model "
                f"{quantity.model}, as {results[quantity][0].name} does; use the files of one model"
            )
    return scales


def _add_values(fits: Mapping[Quantity, ScaleFit], source: SlideResult) -> None:
    held = [
        quantity
        for quantity in fits
        if quantity.model == source.model
        and source.predictions is not None
        and quantity.name in source.output_names
        and len(source)
    ]
    if not held:
        return
    try:
        columns = source.columns([quantity.name for quantity in held])
    except OutputError as exc:
        figures.leave_out(exc)
        return
    for quantity, values in zip(held, columns, strict=True):
        fits[quantity].add(values)


def _cohorts(paths: Iterable[Path]) -> dict[Space, dict[Path, int]]:
    """How many tiles result files hold, by the space of their embeddings."""
    tiles: dict[Space, dict[Path, int]] = {}
    for path in paths:
        try:
            space, count = embeddings_of(path)
        except OutputError as exc:
            figures.leave_out(exc)
            continue
        if space is not None:
            tiles.setdefault(space, {})[path] = count
    return tiles


def _opened(paths: Iterable[Path]) -> Iterator[SlideResult]:
    for path in paths:
        try:
            source = open_source(path)
        except OutputError as exc:
            figures.leave_out(exc)
            continue
        yield source
        del source  # before the next one is opened


def draw_sheet(
    sheet: Sheet,
    wanted: Wanted,
    options: PictureOptions,
    *,
    fitted: Fitted,
    told: set[Path] | None = None,
) -> Iterator[Path]:
    """Draw and write the pictures of one result, one after another.

    Args:
        sheet: From :func:`plan_sheets`.
        wanted: Which pictures.
        options: Size.
        fitted: From :func:`fit_colours`.
        told: Slides of which it was said already that they are gone; added to.

    Yields:
        The path of each picture, once it is written.

    Raises:
        OutputError: A picture cannot be written, a folder is in its place, or the result file
            cannot be read.
    """
    if sheet.problem is not None:
        raise OutputError(sheet.problem)
    for picture in sheet.pictures.values():
        refuse_file(picture.parent)
        refuse_folder(picture)
    source = open_source(sheet.result)
    slide = wanted.slide
    if slide is None and wanted.use_slide:
        slide = find_slide(source, told=told)
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
    source: SlideResult, wanted: Wanted, options: PictureOptions, fitted: Fitted
) -> Iterator[tuple[str, "Callable[[], Figure]"]]:
    if wanted.overview or wanted.nothing_chosen:
        yield "overview", lambda: figures.draw_overview(source, options)
    if wanted.draws_embedding(source):
        components = fitted.components.get(source.space) if source.space else None
        yield "embedding", lambda: figures.draw_embedding(source, options, fitted=components)
    for column in wanted.columns:
        yield (
            column,
            partial(
                figures.draw_prediction,
                source,
                options,
                column=column,
                scale=fitted.scales.get(source.quantity(column)),
            ),
        )
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
    """The result files that give the colours.

    Raises:
        UsageError: There is no such folder, or it holds none.
    """
    if not folder.is_dir():
        there = "is a file, not a folder" if folder.exists() else "no such folder"
        raise UsageError(f"--fit-on {folder}: {there}")
    paths = results_below(folder)
    if not paths:
        raise UsageError(f"--fit-on {folder}: holds no result files (*.h5)")
    return paths


def _file_name(name: str) -> str:
    """A column's name without what file systems mind."""
    return re.sub(r"[^\w.+-]+", "_", name)
