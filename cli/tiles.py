"""``bioptimus tiles``: which tiles of a slide would be read, without a model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from bioptimus.counting import counted
from bioptimus.errors import BioptimusError, UsageError
from cli import options as opt
from cli.progress import left_out, say, without_name

if TYPE_CHECKING:
    from bioptimus.batch.inputs import SlideInput
    from bioptimus.io.wsi import OpenOptions, Slide
    from bioptimus.planning import PlanOptions, Segmenter, SlidePlan
    from bioptimus.tile_files import TileTable

_TILES, _OUTPUT = "Tiles", "Output"
THUMBNAIL_PX = 1600
# As a file's name.
STDOUT = Path("-")


def tiles(
    inputs: opt.Inputs,
    out: Annotated[
        Path, typer.Option(help="Folder of the overview pictures.", rich_help_panel=_OUTPUT)
    ] = Path("tiles"),
    overview: Annotated[
        bool,
        typer.Option(help="Draw slide, tissue and kept tiles as PNG.", rich_help_panel=_OUTPUT),
    ] = True,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            help="Table of the kept tiles of all slides: column, row, x and y in level-0 pixels, "
            "share of tissue. - for standard output.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the tiles themselves, as PNG at the tile's scale.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    tile_size_px: Annotated[
        int, typer.Option(min=1, help="Tile side in pixels.", rich_help_panel=_TILES)
    ] = 224,
    tile_mpp: Annotated[
        float, typer.Option(help="Tile scale in µm per pixel.", rich_help_panel=_TILES)
    ] = 0.5,
    overlap_px: opt.OverlapPx = 0,
    min_tissue: opt.MinTissue = 0.5,
    tissue: opt.Tissue = "auto",
    tissue_class: opt.TissueClass = None,
    search_in_mask: opt.SearchInMask = False,
    keep_pen: opt.KeepPen = False,
    mpp_override: opt.MppOverride = None,
    mpp_fallback: opt.MppFallback = None,
    reader: opt.ReaderChoice = opt.Reader.AUTO,
    icc: opt.IccChoice = opt.Icc.NONE,
    allow_upsample: opt.AllowUpsample = False,
    max_failed_tiles: opt.MaxFailedTiles = 0.01,
) -> None:
    """Plan the tiles of slides: counts, an overview picture, a table, the tiles themselves.

    No model is needed. Prints one line for each slide on stdout, or on stderr where the table goes
    to stdout. Exit code 1 when a slide failed;
    a slide without tissue has not.
    """
    from bioptimus.batch.inputs import find_inputs
    from bioptimus.batch.places import refuse_unwritable, refuse_unwritable_file
    from bioptimus.inference.disk import remove_abandoned
    from bioptimus.io.wsi import OpenOptions
    from bioptimus.planning import PlanOptions, is_tissue_model, require_tissue_file

    opening = OpenOptions(
        mpp_override=mpp_override,
        mpp_fallback=mpp_fallback,
        reader=reader.value,
        icc=icc.value,
        allow_upsample=allow_upsample,
    )
    planning = PlanOptions(
        tile_size_px=tile_size_px,
        tile_mpp=tile_mpp,
        overlap_px=overlap_px,
        min_tissue=min_tissue,
        tissue=tissue,
        tissue_class=tuple(tissue_class or ()),
        search_in_mask=search_in_mask,
        keep_pen=keep_pen,
    )
    require_tissue_file(tissue)
    for option, folder in (
        ("--out", out if overview else None),
        ("--dump", dump),
    ):
        if folder is not None:
            refuse_unwritable(folder, option=option)
    if csv is not None and csv != STDOUT:
        refuse_unwritable_file(csv, option="--csv", example="tiles.csv")
    found = find_inputs(inputs, exclude=[out, *([dump] if dump else [])])
    for line in (*(f"WARNING: {note}" for note in found.notes), *left_out(found.skipped)):
        say(line, err=True)
    segmenter = None
    if is_tissue_model(tissue):
        from bioptimus.runtime.segmenter import open_segmenter

        segmenter = open_segmenter(tissue)
    if overview:
        remove_abandoned(out / _picture_name(slide) for slide in found.slides)
    failed = 0
    with _table(csv) as table:
        for slide in found.slides:
            try:
                _plan_one(
                    slide,
                    opening,
                    planning,
                    segmenter=segmenter,
                    pictures=out if overview else None,
                    table=table,
                    dump=dump,
                    max_failed_tiles=max_failed_tiles,
                    lines_to_stderr=csv == STDOUT,
                )
            except (UsageError, BrokenPipeError):
                raise
            except BioptimusError as exc:
                # The slide's edge: the others go on.
                failed += 1
                name = str(slide.relative)
                say(f"error: {name}: {without_name(str(exc), name)}", err=True)
            except Exception as exc:  # noqa: BLE001
                # The same for a fault nobody foresaw. Imported here: torch comes with it.
                from bioptimus.pipeline import unexpected

                failed += 1
                unexpected(str(slide.relative), exc)
    if csv is not None and csv != STDOUT:
        say(csv)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _table(path: Path | None) -> "Iterator[TileTable | None]":
    from bioptimus.tile_files import TileTable

    if path is None:
        yield None
        return
    with TileTable(path, stream=sys.stdout if path == STDOUT else None) as table:
        yield table


def _plan_one(
    job: "SlideInput",
    opening: "OpenOptions",
    planning: "PlanOptions",
    *,
    segmenter: "Segmenter | None",
    pictures: Path | None,
    table: "TileTable | None",
    dump: Path | None,
    max_failed_tiles: float,
    lines_to_stderr: bool,
) -> None:
    """Plan one slide, write what was asked for, print its line."""
    from dataclasses import replace

    from bioptimus.errors import SlideOpenError
    from bioptimus.io.resolution import mpp_text
    from bioptimus.io.wsi import Slide
    from bioptimus.planning import plan_slide
    from bioptimus.tile_files import dump_tiles
    from bioptimus.tiles import TileSpec

    if job.problem is not None:
        raise SlideOpenError(f"{job.path.name}: {job.problem}")
    if job.mask is not None:
        planning = replace(planning, tissue=str(job.mask))
    # Which tells slides of one file name apart.
    name = str(job.relative)
    picture = _picture_name(job)
    place = picture.with_suffix("")
    with Slide.open(job.path, opening.with_column(job.mpp)) as slide:
        plan = plan_slide(slide, TileSpec(), planning, segmenter=segmenter)
        level = slide.tile_reader(plan.spec).level
        for warning in (*slide.warnings, *plan.warnings):
            say(f"{name}: {without_name(warning, name)}", err=True)
        if table is not None:
            table.add(str(job.path), plan)
        written = ""
        if pictures is not None and _drawn(slide, plan, pictures / picture, name=name):
            written = f" -> {pictures / picture}"
        side = plan.spec.side_um
        say(
            f"{name}: {len(plan)} of {len(plan.grid)} tiles of {side:g} µm kept, "
            f"{plan.mask.share:.1%} tissue, mpp {mpp_text(slide.mpp)} "
            f"({slide.resolution.source}), level {level}{written}",
            err=lines_to_stderr,
        )
        if dump is not None:
            result = dump_tiles(slide, plan, dump / place, max_failed_share=max_failed_tiles)
            for x, y, reason in result.failed:
                say(f"{name}: tile at ({x}, {y}) not written: {reason}", err=True)
            say(
                f"{name}: {counted(result.written, 'tile')} written -> {dump / place}",
                err=lines_to_stderr,
            )


def _picture_name(slide: "SlideInput") -> PurePath:
    """Where a slide's overview lies below the folder of pictures."""
    from bioptimus.batch.inputs import strip_extension

    return slide.relative.with_name(f"{strip_extension(slide.relative.name)}.png")


def _drawn(slide: "Slide", plan: "SlidePlan", path: Path, *, name: str) -> bool:
    """Draw the overview; a picture that cannot be made is no reason for the slide to fail."""
    from bioptimus.overview import draw_overview, save_overview

    try:
        image = slide.thumbnail(THUMBNAIL_PX)
        save_overview(path, draw_overview(image.pixels, image.downsample, plan))
    except BioptimusError as exc:
        say(f"{name}: no overview: {without_name(str(exc), name)}", err=True)
        return False
    return True
