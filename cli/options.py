"""Options that several commands share, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

_MODEL, _TILES, _SCALE, _RUN, _JOBS = "Model", "Tiles", "Slide", "Run", "Jobs"


class Reader(StrEnum):
    """How tiles are read."""

    AUTO = "auto"
    OPENSLIDE = "openslide"


class Icc(StrEnum):
    """What is done with a colour profile."""

    NONE = "none"
    SRGB = "srgb"


class Dtype(StrEnum):
    """Stored type of embeddings and predictions."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Slides, folders (searched recursively), globs, CSV lists with a 'slide' column "
        "(and optionally mpp, mask, bulk_rna), or - for a list on standard input.",
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="Registry key (see 'bioptimus models list') or the path of a self-describing .pt2. "
        "A .pt2 is executable code: load only what you trust.",
        rich_help_panel=_MODEL,
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="The .pt2 with your weights, when --model is a registry key.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Sha256 = Annotated[
    str | None,
    typer.Option(
        "--sha256",
        help="Refuse the checkpoint unless its SHA-256 is this.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:N, or several with commas (one process each).",
        rich_help_panel=_MODEL,
    ),
]


def _batch_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a number from 1 nor auto.")
    return int(text)


BatchSize = Annotated[
    # An int or the word auto, which typer has no type for; _batch_size makes sure of it.
    Any,
    typer.Option(
        "--batch-size",
        parser=_batch_size,
        metavar="N|auto",
        help="Most tiles in one forward pass; auto tries which is the fastest that fits.",
        rich_help_panel=_MODEL,
        show_default="48; on a CPU 4 for each thread of a pass, unless the model is tiny",
    ),
]
MaxWaitMs = Annotated[
    float,
    typer.Option(
        min=0,
        help="Milliseconds a part-filled batch waits for more tiles.",
        rich_help_panel=_MODEL,
    ),
]
TileSizePx = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tile side in pixels.",
        rich_help_panel=_TILES,
        show_default="the model's",
    ),
]
TileMpp = Annotated[
    float | None,
    typer.Option(
        help="Tile scale in µm per pixel.",
        rich_help_panel=_TILES,
        show_default="the model's",
    ),
]
OverlapPx = Annotated[
    int,
    typer.Option(min=0, help="Pixels that neighbouring tiles share.", rich_help_panel=_TILES),
]
MinTissue = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Keep tiles with at least this share of tissue.", rich_help_panel=_TILES
    ),
]
Tissue = Annotated[
    str,
    typer.Option(
        help="auto, none (the whole scan), or a mask: PNG, GeoJSON, or a tissue .pt2.",
        rich_help_panel=_TILES,
    ),
]
TissueClass = Annotated[
    list[str] | None,
    typer.Option(
        help="Of a GeoJSON mask, take annotations of this class alone; may be repeated.",
        rich_help_panel=_TILES,
        show_default="all but those ending in *",
    ),
]
SearchInMask = Annotated[
    bool,
    typer.Option(
        "--search-in-mask",
        help="Take of a mask only what auto finds to be tissue, not the glass in it.",
        rich_help_panel=_TILES,
    ),
]
KeepPen = Annotated[
    bool, typer.Option("--keep-pen", help="Do not remove pen marks.", rich_help_panel=_TILES)
]
MppOverride = Annotated[
    float | None,
    typer.Option(
        help="µm per pixel of level 0, whatever the file says.",
        rich_help_panel=_SCALE,
        show_default=False,
    ),
]
MppFallback = Annotated[
    float | None,
    typer.Option(
        help="µm per pixel of level 0 for slides that do not say.",
        rich_help_panel=_SCALE,
        show_default=False,
    ),
]
ReaderChoice = Annotated[
    Reader,
    typer.Option(
        "--reader",
        help="auto reads tiled-JPEG slides directly, checked against OpenSlide.",
        rich_help_panel=_SCALE,
    ),
]
IccChoice = Annotated[
    Icc,
    typer.Option(
        "--icc", help="srgb converts with the slide's colour profile.", rich_help_panel=_SCALE
    ),
]
AllowUpsample = Annotated[
    bool,
    typer.Option(
        "--allow-upsample",
        help="Accept slides coarser than the tile scale.",
        rich_help_panel=_SCALE,
    ),
]
DtypeChoice = Annotated[
    Dtype,
    typer.Option("--dtype", help="Stored type; float16 halves the file.", rich_help_panel=_RUN),
]
MaxFailedTiles = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Share of a slide's tiles that may be unreadable before the slide fails.",
        rich_help_panel=_RUN,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace files that were made with other parameters or are damaged.",
        rich_help_panel=_RUN,
    ),
]
FailFast = Annotated[
    bool, typer.Option("--fail-fast", help="Stop at the first failed slide.", rich_help_panel=_RUN)
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Open every slide and write nothing; print what a run would make of it (new, "
        "resume, done, other parameters), tiles, mpp and its source, level and output size.",
        rich_help_panel=_RUN,
    ),
]
LogJson = Annotated[
    bool,
    typer.Option(
        "--log-json", help="One JSON line per event on stderr, for machines.", rich_help_panel=_RUN
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Slides under way at once.",
        rich_help_panel=_JOBS,
        show_default="half the cores, 2 to 8",
    ),
]
Readers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Threads that read tiles, shared by all slides.",
        rich_help_panel=_JOBS,
        show_default="the cores, at least 2",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Threads inside one forward pass on a CPU.",
        rich_help_panel=_JOBS,
        show_default="the cores that passes side by side leave",
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        help="This job's share of the slides: i/n (i from 1), or auto in an array job.",
        rich_help_panel=_JOBS,
        show_default=False,
    ),
]
Stage = Annotated[
    Path | None,
    typer.Option(
        help="Folder on fast storage to copy slides to before reading; only its own copies are "
        "removed.",
        rich_help_panel=_JOBS,
        show_default=False,
    ),
]
StageGb = Annotated[
    float, typer.Option(help="Most gigabytes staged at once.", rich_help_panel=_JOBS)
]
