"""Everything known about the slides of a result folder, from run reports and result files."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bioptimus.batch.report import Accounts, read_accounts
from bioptimus.batch.result_files import results_below
from bioptimus.counting import Tell, tell_nobody
from bioptimus.errors import BioptimusError

logger = logging.getLogger(__name__)

_FAILED_TILES_SHOWN = 20
_UNREACHED = "the run ended before this slide; run the same command again"


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One start of a command.

    Attributes:
        run: Its identifier.
        command: The command line.
        started: When, as the report says it.
        host: Machine.
        job: Scheduler's job, where there was one.
        parameters: Options it ran with.
        versions: Library → version.
    """

    run: str
    command: str
    started: str
    host: str
    job: str
    parameters: Mapping[str, Any]
    versions: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SlideEntry:
    """One slide of the table.

    Attributes:
        slide: The slide as the run named it.
        state: ``ok``, ``empty``, ``failed``, ``skipped``, ``stopped``, or ``missing`` for an
            input that no run accounts for.
        reason: Why it failed or was skipped.
        tiles_planned: Tiles that the plan held; None where it never came to a plan.
        tiles_done: Tiles that have a row.
        tiles_failed: Tiles that could not be read or were refused.
        mpp: µm per level-0 pixel.
        mpp_source: Where that came from.
        reader: Which reader decoded the tiles.
        model: Name of the model.
        seconds: Part of the work → seconds.
        tiles_per_second: Over the whole slide.
        output: The result file, or None.
        host: Machine that did it.
        job: Scheduler's job, where there was one.
        run: Identifier of the run.
        versions: Library → version.
        parameters: Of the result file.
        failed_tiles: The first of them, as (x, y, stage, reason).
        warnings: What the run said of the slide.
    """

    slide: str
    state: str
    reason: str = ""
    tiles_planned: int | None = None
    tiles_done: int | None = None
    tiles_failed: int | None = None
    mpp: float | None = None
    mpp_source: str = ""
    reader: str = ""
    model: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    tiles_per_second: float | None = None
    output: Path | None = None
    host: str = ""
    job: str = ""
    run: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    failed_tiles: tuple[tuple[int, int, str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Tells two results of one slide apart."""
        return str(self.output) if self.output else self.slide


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A result folder.

    Attributes:
        out: The folder.
        runs: In the order in which they started.
        slides: In the order in which they were first met.
        skipped: Files below the inputs that no run took → the reason.
    """

    out: Path
    runs: tuple[RunEntry, ...]
    slides: tuple[SlideEntry, ...]
    skipped: Mapping[str, str]


def collect(out: Path, tell: Tell = tell_nobody) -> RunData:
    """Read ``runs/*.json`` and every result file below a folder.

    A file without a report is listed all the same, a report whose file has gone says so, and
    so does an input that no run accounts for.
    """
    accounts = read_accounts(out)
    slides = _reported(accounts)
    by_output = {entry.output.resolve(): key for key, entry in slides.items() if entry.output}
    files = results_below(out)
    for done, file in enumerate(files, start=1):
        found = _read_file(file)
        tell("results", done, len(files))
        if _is_foreign(found) and file.resolve() not in by_output:
            # Such as a tree for another tool, converted into the same folder.
            logger.info("%s: not a result file, passed over", file)
            continue
        key = by_output.get(file.resolve())
        if key is None:
            # A slide that failed in the last run may have the file of one before.
            key = accounts.keys.of({"model": found.model}, found.slide)
            if key in slides and slides[key].output:
                key = (str(file), "")
        slides[key] = _joined(slides.get(key), found)
    return RunData(
        out=out,
        runs=tuple(sorted(map(_run, accounts.runs), key=lambda run: run.started)),
        slides=tuple(slides.values()),
        skipped=accounts.skipped,
    )


def _reported(accounts: Accounts) -> dict[tuple[str, str], SlideEntry]:
    """What the runs say of each slide and model."""
    slides, missing = accounts.outcome()
    return {key: _entry(record, model=key[1]) for key, record in slides.items()} | {
        key: SlideEntry(slide=slide, state="missing", reason=_UNREACHED, model=key[1])
        for key, slide in missing.items()
    }


def _run(record: Mapping[str, Any]) -> RunEntry:
    command = record.get("command", "")
    return RunEntry(
        run=str(record["run"]),
        command=" ".join(map(str, command)) if isinstance(command, list) else str(command),
        started=str(record.get("started", "")),
        host=str(record.get("host") or ""),
        job=str(record.get("job") or ""),
        parameters=_mapping(record.get("parameters")),
        versions=_mapping(record.get("versions")),
    )


def _entry(record: Mapping[str, Any], *, model: str) -> SlideEntry:
    output = record.get("output")
    return SlideEntry(
        slide=str(record["slide"]),
        state=str(record.get("state", "")),
        reason=str(record.get("reason") or ""),
        tiles_planned=_whole(record.get("tiles_planned")),
        tiles_done=_whole(record.get("tiles_done")),
        tiles_failed=_whole(record.get("tiles_failed")),
        mpp=_first_number(record.get("mpp")),
        mpp_source=str(record.get("mpp_source") or ""),
        reader=str(record.get("reader") or ""),
        model=model,
        seconds={
            str(key): float(value)
            for key, value in _mapping(record.get("seconds")).items()
            if isinstance(value, int | float)
        },
        tiles_per_second=_first_number(record.get("tiles_per_second")),
        output=Path(str(output)) if output else None,
        host=str(record.get("host") or ""),
        job=str(record.get("job") or ""),
        run=str(record["run"]),
        versions=_mapping(record.get("versions")),
        warnings=_texts(record.get("warnings")),
    )


def _read_file(path: Path) -> SlideEntry:
    """What a result file says of itself; unreadable ones become failed entries."""
    from bioptimus.inference.results import open_result

    try:
        result = open_result(path)
        attributes = result.attributes
        failed = result.failed_tiles
        return SlideEntry(
            slide=str(result.slide_path),
            state=result.state,
            tiles_planned=_whole(attributes.get("tiles_planned")),
            tiles_done=len(result),
            tiles_failed=len(failed),
            mpp=result.mpp[0],
            mpp_source=str(attributes.get("mpp_source") or ""),
            reader=str(attributes.get("reader") or ""),
            model=result.model.name,
            output=path,
            versions=_mapping(attributes.get("versions")),
            parameters=_mapping(attributes.get("digest_parameters")),
            warnings=_texts(attributes.get("warnings")),
            failed_tiles=tuple(
                (tile.x, tile.y, tile.stage, tile.reason) for tile in failed[:_FAILED_TILES_SHOWN]
            ),
        )
    except BioptimusError as exc:
        return SlideEntry(slide=str(path), state="failed", reason=str(exc), output=path)


def _is_foreign(found: SlideEntry) -> bool:
    return found.state == "failed" and "was not written by bioptimus" in found.reason


def _joined(reported: SlideEntry | None, found: SlideEntry) -> SlideEntry:
    """The report's timings with the file's facts."""
    if reported is None or reported.state == "missing":
        return found
    if found.state == "failed":
        return replace(reported, state="failed", reason=found.reason)
    if reported.state in ("failed", "stopped"):
        return reported  # the finished file of a run before does not undo this
    if reported.state == "skipped":
        # Its own run is not told of any more; earlier versions counted no tiles of such a slide.
        reported = replace(reported, tiles_planned=None, tiles_done=None, tiles_failed=None)
    return replace(
        reported,
        state=found.state,
        tiles_planned=_or(reported.tiles_planned, found.tiles_planned),
        tiles_done=_or(reported.tiles_done, found.tiles_done),
        tiles_failed=_or(reported.tiles_failed, found.tiles_failed),
        mpp=_or(reported.mpp, found.mpp),
        mpp_source=reported.mpp_source or found.mpp_source,
        reader=reported.reader or found.reader,
        model=found.model,
        output=found.output,
        versions=reported.versions or found.versions,
        parameters=found.parameters,
        failed_tiles=found.failed_tiles,
        warnings=reported.warnings or found.warnings,
    )


def _or(first: Any, second: Any) -> Any:
    return second if first is None else first


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return dict(value) if isinstance(value, Mapping) else {}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _first_number(value: Any) -> float | None:
    """A number, or the first of a pair."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return float(value) if isinstance(value, int | float) else None
