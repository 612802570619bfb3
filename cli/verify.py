"""``bioptimus verify``: are the results whole, and is one there for every slide?"""

from pathlib import Path
from typing import Annotated

import typer

from bioptimus.counting import counted
from cli.progress import bar, say, show_cursor


def verify(
    out: Annotated[
        Path,
        typer.Argument(
            help="Output folder of a run, or of one model in it, or one result file.", metavar="OUT"
        ),
    ],
    slides: Annotated[
        list[str] | None,
        typer.Option(
            help="Slides, folders, a glob or a CSV list, as given to the run: tells which have "
            "no result. May be repeated.",
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Read every row also of files above 50 MB, not only the 256 at either end.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", envvar="BIOPTIMUS_VERIFY_JSON", help="One JSON object on stdout."),
    ] = False,
) -> None:
    """Check every result file: structure, counts, checksums, leftovers, and what is missing.

    Finds values that changed since they were written, facts that contradict each other, and files
    that crash the HDF5 library.
    Prints one line for each finding and exits with 1 if there is any. Slides that stand there
    twice, folders with results of several kinds (another model of the same name, scale or overlap),
    and results that another program added texts to, are told as notes, which change no exit code.
    """
    import json
    import os
    from dataclasses import asdict

    from bioptimus.batch.inputs import find_inputs
    from bioptimus.batch.signals import StopFlag
    from bioptimus.errors import StoppedError, UsageError
    from bioptimus.inference.checking import SAMPLED_ROWS
    from bioptimus.verify import verify as check

    for given in slides or ():
        if out.is_dir() and os.path.realpath(given) == os.path.realpath(out):
            raise UsageError(
                f"--slides {given}: is the folder of the results; name the slides, as the run was "
                "given them"
            )
    wanted = find_inputs(slides, exclude=[out]).slides if slides else None
    with StopFlag(at_once=show_cursor) as stop:
        try:
            with bar() as tell:
                found = check(out, slides=wanted, deep=deep, stop=stop, tell=tell)
        except StoppedError as exc:
            raise typer.Exit(stop.exit_code or 1) from exc
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2, default=str))
    else:
        for finding in found.findings:
            say(f"{finding.path}: {finding.problem}")
        for note in found.notes:
            say(f"note: {note.path}: {note.problem}")
    counts = (
        counted(found.files, "file"),
        counted(found.rows, "tile"),
        counted(len(found.findings), "finding"),
    )
    rest = f", {counted(len(found.notes), 'note')}" if found.notes else ""
    if found.sampled:
        rest += (
            f"; of {counted(found.sampled, 'large file')} only the first and last {SAMPLED_ROWS} "
            "rows were read, --deep reads all"
        )
    say(", ".join(counts) + rest, err=True)
    if found.findings:
        raise typer.Exit(1)
