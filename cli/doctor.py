"""``bioptimus doctor``: is this machine ready?"""

import json
from pathlib import Path
from typing import Annotated

import typer

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    out: Annotated[
        Path, typer.Option("--out", help="Folder that results would go to.", metavar="DIR")
    ] = Path(),
    model: Annotated[
        bool, typer.Option(help="Load the built-in model and run it on one tile.")
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", envvar="BIOPTIMUS_DOCTOR_JSON", help="Print JSON instead of lines."),
    ] = False,
) -> None:
    """Try every part that a run needs on this machine, one line each.

    Exit 1 when something would make a run fail.
    """
    from bioptimus.doctor import examine

    findings = []
    for finding in examine(out=out, with_model=model):
        findings.append(finding)
        if not as_json:
            word = typer.style(f"{finding.status:8}", fg=_COLOURS[finding.status])
            advice = f" → {finding.advice}" if finding.advice else ""
            typer.echo(f"{word} {finding.name:17} {finding.fact}{advice}")
    if as_json:
        typer.echo(json.dumps([finding.to_dict() for finding in findings], indent=1))
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)
