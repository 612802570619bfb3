"""``bioptimus view``: pictures of one result file."""

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bioptimus.errors import OutputError, UsageError
from cli.progress import say

log = logging.getLogger(__name__)


class Format(StrEnum):
    """File formats of a picture."""

    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


def view(
    file: Annotated[Path, typer.Argument(help="A result file.", metavar="FILE.h5")],
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
            help="Folder of result files that give the embedding map's colours, so that slides "
            "can be compared.",
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
) -> None:
    """Draw what is in a result file: overview, embedding map, heatmaps, clusters, like tiles.

    Without any of the picture options: the overview and, where the file has embeddings, the
    embedding map. Works without the slide, and is sharper with it; says so where it is gone.
    """
    from bioptimus.batch.places import refuse_unwritable
    from bioptimus.view.figures import check_installed
    from bioptimus.view.page import PictureOptions
    from bioptimus.view.source import find_slide, open_slide, open_source
    from bioptimus.view.wanted import Wanted, draw_wanted

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
    try:
        source = open_source(file)
    except OutputError as exc:
        if file.is_file():
            raise
        raise UsageError(str(exc)) from exc
    chosen = tile if at is None else source.tile_at(_location(at))
    if slide is not None:
        open_slide(slide, source).close()
    elif use_slide:
        slide = find_slide(source)
    wanted = Wanted(
        overview=overview,
        embedding=embedding,
        columns=tuple(column or ()),
        clusters=clusters,
        tile=chosen,
        neighbours=neighbours,
        fit_on=fit_on,
    )
    options = PictureOptions(width_px=width_px, slide=slide)
    for path in draw_wanted(source, wanted, options, out=out, suffix=file_format.value):
        say(path)


def _location(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--at {text}: give x,y in level-0 pixels, such as 1200,3400") from None
    return x, y
