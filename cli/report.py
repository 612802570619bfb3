"""``bioptimus report``: what became of every slide below an output folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bioptimus.counting import counted
from bioptimus.errors import UsageError
from cli.progress import HELD, bar, say, say_table, without_name


def report(
    out: Annotated[Path, typer.Argument(help="The --out folder of one or more runs.")],
    slides: Annotated[
        bool,
        typer.Option(
            "--slides",
            help="Also list every slide: state, tiles, speed, and where its seconds went.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also write a page to look at: table, pictures, failures; needs no network.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Sum up all runs below an output folder and list what failed or is missing.

    A slide is as the last run that came to it left it, also where the file of a run before is
    there; a run that skipped it as done already changes nothing in what its file's own run said.

    Exit code 1 when a slide failed, was stopped, or was never accounted for, or when the folder
    holds no run.
    """
    from bioptimus.batch.places import refuse_unwritable_file
    from bioptimus.batch.report import read_runs

    if not out.is_dir():
        raise UsageError(f"{out}: no such folder; give the one that --out named")
    if html is not None:
        refuse_unwritable_file(html, option="--html", example="report.html")
    summary = read_runs(out)
    if json:
        _print_json(summary)
    else:
        if slides:
            _print_slides(summary)
        _print_text(summary)
    if html is not None:
        from bioptimus.report_html import write_html

        with bar() as tell:
            count = write_html(out, html, tell=tell)
        say(f"{html}: {counted(count, 'slide')}", err=True)
    unfinished = any(each["state"] in ("failed", "stopped") for each in summary.slides.values())
    return 1 if unfinished or summary.missing else 0


def _print_json(summary: Any) -> None:
    from dataclasses import asdict

    import orjson

    typer.echo(orjson.dumps(asdict(summary), option=orjson.OPT_INDENT_2).decode())


_PARTS = ("total", "open", "tissue", "read", "wait", "forward", "write")
"""Of a slide's seconds. Reading is summed over threads, so parts may exceed the total."""


def _print_slides(summary: Any) -> None:
    """A table of all slides; of several models each slide's line ends with the model."""
    heads = ("state", "tiles", "failed", "tiles/s", *(f"{part} s" for part in _PARTS), "slide")
    rows = [
        (
            record["state"],
            str(record["tiles_done"]),
            str(record["tiles_failed"]),
            f"{record.get('tiles_per_second', 0):.0f}",
            *(f"{record['seconds'].get(part, 0):.1f}" for part in _PARTS),
            slide,
        )
        for slide, record in summary.slides.items()
    ]
    say_table(heads, rows)


def _print_text(summary: Any) -> None:
    counts: dict[str, int] = {}
    tiles = failed_tiles = 0
    for record in summary.slides.values():
        counts[record["state"]] = counts.get(record["state"], 0) + 1
        tiles += record["tiles_done"]
        failed_tiles += record["tiles_failed"]
    for record in summary.slides.values():
        if record["state"] in ("failed", "stopped"):
            reason = without_name(record["reason"], record["slide"])
            model = f" ({record['model']})" if len(summary.models) > 1 else ""
            say(f"{record['state']}: {record['slide']}{model}: {reason}")
    held = set(summary.held)
    for slide in summary.missing:
        if slide in held:
            say(f"{HELD}: {slide}: that job has not accounted for it yet")
        else:
            say(f"missing: {slide}: no run accounted for it; run the same command again")
    for path, reason in summary.skipped.items():
        say(f"left out: {path} ({reason})")
    states = [f"{count} {state}" for state, count in sorted(counts.items())]
    if held:
        states.append(f"{len(held)} {HELD}")
    if lost := len(summary.missing) - len(held):
        states.append(f"{lost} missing")
    runs = counted(len(summary.runs), "run")
    typer.echo(f"{runs}: {', '.join(states) or 'no slides'}; {counted(tiles, 'tile')}", nl=False)
    typer.echo(f", {counted(failed_tiles, 'failed tile')}" if failed_tiles else "")
