"""``bioptimus view``: pictures of result files."""

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bioptimus.errors import OutputError, UsageError
from cli.progress import bar, say

log = logging.getLogger(__name__)


class Format(StrEnum):
    """File formats of a picture."""

    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


def view(
    results: Annotated[
        list[Path],
        typer.Argument(help="Result files (.h5), folders of them, or globs.", metavar="FILE"),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the pictures.", metavar="DIR")
    ] = Path("views"),
    overview: Annotated[
        bool, typer.Option("--overview", help="The slide, its tissue, tiles, and failed tiles.")
    ] = False,
    embedding: Annotated[
        bool,
        typer.Option("--embedding", help="The first three principal components as one colour."),
    ] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            help="Heatmap of a predicted value, by name or number; may be given several times.",
            metavar="NAME",
        ),
    ] = None,
    clusters: Annotated[
        int | None,
        typer.Option("--clusters", help="k-means clusters of the embeddings.", metavar="K"),
    ] = None,
    tile: Annotated[
        int | None,
        typer.Option("--tile", help="Tiles that look like this row's.", metavar="ROW"),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", help="The same for the tile at a level-0 pixel.", metavar="X,Y"),
    ] = None,
    neighbours: Annotated[
        int, typer.Option("--neighbours", help="Tiles shown by --tile and --at.")
    ] = 13,
    fit_on: Annotated[
        Path | None,
        typer.Option(
            "--fit-on",
            help="Folder of result files that give the colours of embedding maps and heatmaps, so "
            "that slides can be compared.",
            show_default="the results given, each model's together",
            metavar="DIR",
        ),
    ] = None,
    slide: Annotated[
        Path | None,
        typer.Option("--slide", help="The slide, where it has moved since; for sharper pictures."),
    ] = None,
    use_slide: Annotated[
        bool,
        typer.Option(
            "--use-slide/--no-slide", help="Read the slide, or only the thumbnail in the file."
        ),
    ] = True,
    width_px: Annotated[int, typer.Option("--width-px", help="Width of a PNG in pixels.")] = 1600,
    file_format: Annotated[
        Format,
        typer.Option(
            "--format", envvar="BIOPTIMUS_VIEW_FORMAT", help="PNG, or SVG and PDF for print."
        ),
    ] = Format.PNG,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace pictures of other results, too.")
    ] = False,
) -> None:
    """Draw what is in result files: overview, embedding map, heatmaps, clusters, like tiles.

    Without any of the picture options: the overview and, where the file has embeddings, the
    embedding map. Works without the slide, and is sharper with it; says so where it is gone.
    Exits with 1 if a result could not be drawn, after the others.
    """
    from bioptimus.batch.places import refuse_unwritable
    from bioptimus.batch.result_files import find_results
    from bioptimus.view.figures import check_installed
    from bioptimus.view.page import PictureOptions
    from bioptimus.view.wanted import Wanted, draw_sheet, fit_colours, plan_sheets

    check_installed()
    refuse_unwritable(out, option="--out")
    if tile is not None and at is not None:
        raise UsageError("--tile and --at both choose a tile; give one of them")
    if slide is not None and not use_slide:
        log.warning("--slide %s: is not used; leave out --no-slide", slide)
        slide = None
    if neighbours != Wanted.neighbours and tile is None and at is None:
        log.warning("--neighbours %d: is not used without --tile or --at", neighbours)
    if slide is not None and not slide.exists():
        raise UsageError(f"--slide {slide}: no such file")
    wanted = Wanted(
        overview=overview,
        embedding=embedding,
        columns=tuple(dict.fromkeys(column or ())),
        clusters=clusters,
        tile=tile,
        at=None if at is None else _location(at),
        neighbours=neighbours,
        fit_on=fit_on,
        slide=slide,
        use_slide=use_slide,
    )
    options = PictureOptions(width_px=width_px)
    found = find_results(results)
    if len(found) > 1:
        for option, value in (("--slide", slide), ("--tile", tile), ("--at", at)):
            if value is not None:
                raise UsageError(f"{option} {value}: is for one result, not for {len(found)}")
    with bar() as tell:
        sheets = plan_sheets(
            found, wanted, out=out, suffix=file_format.value, overwrite=overwrite, tell=tell
        )
    fitted = fit_colours(sheets, wanted)
    failed = False
    # Several results may be of one slide.
    told: set[Path] = set()
    for sheet in sheets:
        try:
            for path in draw_sheet(sheet, wanted, options, fitted=fitted, told=told):
                say(path)
        except OutputError as exc:
            # The result's edge: the others are drawn all the same.
            failed = True
            say(f"error: {exc}", err=True)
    if failed:
        raise typer.Exit(1)


def _location(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--at {text}: give x,y in level-0 pixels, such as 1200,3400") from None
    return x, y
