"""``bioptimus info``: what a slide says about itself, before any work is spent on it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bioptimus.errors import BioptimusError, UsageError
from cli import options as opt
from cli.progress import left_out, one_line, say, without_name

if TYPE_CHECKING:
    from bioptimus.batch.inputs import SlideInput

READERS = ("auto", "openslide")


def info(
    inputs: opt.Inputs,
    mpp_override: Annotated[
        float | None,
        typer.Option(metavar="UM_PER_PX", help="µm per pixel that wins over what the file says."),
    ] = None,
    mpp_fallback: Annotated[
        float | None,
        typer.Option(
            metavar="UM_PER_PX", help="µm per pixel for files that say nothing plausible."
        ),
    ] = None,
    reader: Annotated[
        str,
        typer.Option(
            metavar="|".join(READERS), help="'openslide' forbids the faster readers of tiles."
        ),
    ] = "auto",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", envvar="BIOPTIMUS_INFO_JSON", help="Print one JSON list instead of text."
        ),
    ] = False,
) -> None:
    """Show format, levels, resolution and where it comes from, and warnings.

    Nothing is computed. Exit code 1 when a slide cannot be opened.
    """
    import json

    from bioptimus.batch.inputs import find_inputs

    if reader not in READERS:
        raise UsageError(f"--reader {reader}: must be one of {', '.join(READERS)}")
    given = find_inputs(inputs, for_results=False)
    for line in left_out(given.skipped):
        say(line, err=True)
    found: list[dict[str, Any]] = []
    all_opened = True
    for number, slide in enumerate(given.slides):
        try:
            facts = _facts(slide, mpp_override, mpp_fallback, reader)
        except UsageError:
            raise
        except BioptimusError as exc:
            facts = {"path": str(slide.path), "name": slide.path.name, "error": str(exc)}
            all_opened = False
            # With its folders: two may have one file name.
            name = str(slide.relative)
            say(f"error: {name}: {without_name(str(exc), name)}", err=True)
        found.append(facts)
        if not as_json and "error" not in facts:
            typer.echo(("\n" if number else "") + _as_text(facts))
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    if not all_opened:
        raise typer.Exit(1)


def _facts(
    slide: "SlideInput", mpp_override: float | None, mpp_fallback: float | None, reader: str
) -> dict[str, Any]:
    from bioptimus.errors import SlideOpenError
    from bioptimus.io.describe import describe
    from bioptimus.io.wsi import OpenOptions, Slide

    if slide.problem is not None:
        raise SlideOpenError(f"{slide.path.name}: {slide.problem}")
    options = OpenOptions(
        mpp_override=mpp_override,
        mpp_fallback=mpp_fallback,
        reader="openslide" if reader == "openslide" else "auto",
    )
    with Slide.open(slide.path, options.with_column(slide.mpp)) as opened:
        return describe(opened)


def _as_text(facts: dict[str, Any]) -> str:
    width, height = facts["dimensions"]
    rows = [
        ("vendor", facts["vendor"]),
        ("reader", facts["reader"]),
        ("dimensions", f"{width} x {height} px"),
        *_level_rows(facts["levels"]),
        ("mpp", _mpp_text(facts)),
        *_candidate_rows(facts["mpp_candidates"]),
        ("objective power", _or_not_given(facts["objective_power"])),
        ("bounds", _bounds_text(facts["bounds"])),
        ("background", "#{:02x}{:02x}{:02x}".format(*facts["background"])),
        ("ICC profile", "yes, not applied unless --icc srgb" if facts["icc_profile"] else "none"),
        ("size on disk", _size_text(facts["size_bytes"], facts["files"])),
        ("quickhash", facts["quickhash"]),
        *(("warning", sentence) for sentence in facts["warnings"]),
    ]
    lines = [facts["path"], *(f"  {key:<15}  {value}" for key, value in rows)]
    return "\n".join(map(one_line, lines))


def _level_rows(levels: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (
            f"level {number}",
            "{} x {} px, downsample {}".format(*level["dimensions"], _pair(level["downsample"])),
        )
        for number, level in enumerate(levels)
    ]


def _candidate_rows(candidates: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (
            "  * used" if entry["used"] else "  - not used",
            f"{_pair(entry['mpp'])} from {entry['source']} ({entry['verdict']})",
        )
        for entry in candidates
    ]


def _mpp_text(facts: dict[str, Any]) -> str:
    if facts["mpp"] is None:
        return f"unknown: {facts['mpp_problem']}"
    return f"{_pair(facts['mpp'])} µm/px from {facts['mpp_source']}"


def _pair(values: list[float]) -> str:
    x, y = values
    return f"{x:.6g}" if x == y else f"{x:.6g} x {y:.6g}"


def _or_not_given(value: float | None) -> str:
    return "not given" if value is None else f"{value:g}"


def _bounds_text(bounds: list[int] | None) -> str:
    return "not given" if bounds is None else "{2} x {3} px at ({0}, {1})".format(*bounds)


def _size_text(size: int, files: int) -> str:
    text = f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
    return text if files == 1 else f"{text} in {files} files"
