"""``bioptimus convert``: results in the formats of other tools."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bioptimus.counting import counted
from cli.progress import bar, say


class To(StrEnum):
    """Formats; `bioptimus.convert.FORMATS` says what each is."""

    TRIDENT = "trident"
    CLAM = "clam"
    H5AD = "h5ad"
    GEOJSON = "geojson"
    ZARR = "zarr"
    NPZ = "npz"
    PARQUET = "parquet"
    SPATIALDATA = "spatialdata"


class Geometry(StrEnum):
    """What a GeoJSON file holds."""

    TILES = "tiles"
    TISSUE = "tissue"


def convert(
    results: Annotated[
        list[Path],
        typer.Argument(help="Result files (.h5), folders of them, or globs.", metavar="FILE"),
    ],
    to: Annotated[
        To,
        typer.Option(
            help="trident and clam: folder trees as their readers expect; h5ad: AnnData; geojson: "
            "for QuPath; zarr; npz; parquet; spatialdata."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output folder.")],
    geometry: Annotated[
        Geometry,
        typer.Option(help="GeoJSON of the tiles, or of the tissue outlines with their means."),
    ] = Geometry.TILES,
    measurement: Annotated[
        list[str] | None,
        typer.Option(help="GeoJSON: a prediction to write; may be repeated. All if not given."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Make outputs anew that are there already.")
    ] = False,
) -> None:
    """Convert results for other tools. The results themselves stay as they are.

    Prints the path of each file or folder written; what is there already from the same result
    and options stays. Exits with 1 if a result could not be converted, after the others.
    """
    from bioptimus.batch.places import refuse_unwritable
    from bioptimus.convert import ConvertOptions
    from bioptimus.convert import convert as run

    refuse_unwritable(out, option="--out")
    options = ConvertOptions(geometry=geometry.value, measurements=tuple(measurement or ()))
    failed = False
    kept = 0
    with bar() as tell:
        each = run(results, out, to=to.value, options=options, overwrite=overwrite, tell=tell)
        for done in each:
            for path in done.outputs:
                say(path)
            kept += len(done.kept)
            if done.problem is not None:
                failed = True
                say(f"error: {done.problem}", err=True)
    if kept:
        say(f"{counted(kept, 'output')} up to date already", err=True)
    if failed:
        raise typer.Exit(1)
