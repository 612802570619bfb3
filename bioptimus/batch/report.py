"""The run's report: one JSON line a slide, appended as slides end, and the sum over runs.

``<out>/runs/<id>.json`` starts with a line about the run (``"kind": "run"``) and one with its
inputs (``"kind": "inputs"``); a line for each slide follows (``"kind": "slide"``), at last one
for the model and its forward passes (``"kind": "model"``). Each line is handed to the system
whole, so a killed run leaves whole lines; a full disk may cut one short, which is passed over in
reading. Jobs that share a folder write files of their own.
"""

import datetime
import errno
import logging
import os
import platform
import secrets
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import orjson

from bioptimus.batch.batch_system import job_id
from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.disk import ANOTHER_OUT, is_gone, output_errors, remove
from bioptimus.jobs import SlideJob, SlideReport
from bioptimus.json_lines import json_line

if TYPE_CHECKING:
    from bioptimus.runtime.batch_scheduler import BatchStatistics

log = logging.getLogger(__name__)

RUNS_FOLDER = "runs"

# Of what several processes of one run say of a slide: the best news, of those the last. A slide
# that one lost with its device, another did.
_RANKS: dict[str, int] = {"ok": 0, "empty": 1, "skipped": 2, "stopped": 3, "failed": 3}
_NOT_BEGUN = 4
_LEFT = 5
_GONE = "the result file is not there any more"


def slide_record(report: SlideReport) -> dict[str, Any]:
    """A slide's report as plain JSON-ready values."""
    # Not by asdict, which copies deeply: ten times as long, for each of 100,000 slides.
    record = {name: value for name, value in vars(report).items() if name != "error"}
    record["seconds"] = {name: round(value, 4) for name, value in vars(report.seconds).items()}
    record["tiles_per_second"] = round(report.tiles_per_second, 2)
    record["fill_share"] = round(report.fill_share, 4)
    return record


def is_left_to_another_job(state: str, output: str) -> bool:
    """Whether a job passed a slide over for another's claim: only that other one accounts for it.

    A slide that is skipped because it is done has an output; one that another job holds has none.
    """
    return state == "skipped" and not output


def _is_not_begun(state: str, seconds: float) -> bool:
    """Whether a run was stopped before it came to a slide: it knows nothing about it."""
    return state == "stopped" and not seconds


def merge_reports(
    reports: Iterable[SlideReport], jobs: Sequence[SlideJob], *, dead: Sequence[str]
) -> list[SlideReport]:
    """One report per job out of those of several processes.

    Args:
        reports: In any order; several about one slide where processes met it in turn.
        jobs: Every slide of the run.
        dead: What ended early, for slides that nobody accounted for.
    """
    # By absolute path: the processes were given a list of those.
    best: dict[Path, SlideReport] = {}
    for report in reports:
        path = Path(report.slide).absolute()
        before = best.get(path)
        if before is None or _preference(report) < _preference(before):
            best[path] = report
    merged = []
    for job in jobs:
        found = best.get(job.path.absolute())
        if found is None or (dead and is_left_to_another_job(found.state, found.output)):
            reason = "; ".join(dead) or "no process accounted for it"
            found = SlideReport(slide="", reason=f"{reason}; run the same command again")
        merged.append(replace(found, slide=str(job.path)))
    return merged


def _preference(report: SlideReport) -> int:
    if is_left_to_another_job(report.state, report.output):
        return _LEFT
    if _is_not_begun(report.state, report.seconds.total):
        return _NOT_BEGUN
    return _RANKS[report.state]


class AccountKeys:
    """Which slide and model the accounts in a folder are of, however the commands named them."""

    def __init__(self, out: Path) -> None:
        """Read the run files of an output folder."""
        self._out = out.absolute()
        self._real_folders: dict[str, str] = {}

    def of(self, run: Mapping[str, Any], slide: str) -> tuple[str, str]:
        """The slide, as an absolute path without links to folders, and the model's name.

        Args:
            run: First line of the run's file.
            slide: As the run named it, perhaps relative to its working folder.
        """
        parameters = run.get("parameters")
        if not isinstance(parameters, Mapping):
            parameters = {}
        folder, name = os.path.split(os.path.join(self._folder(run, parameters), slide))
        if os.path.isabs(folder):
            if folder not in self._real_folders:
                self._real_folders[folder] = os.path.realpath(folder)
            folder = self._real_folders[folder]
        # Files of earlier versions tell the option alone, which may be a path.
        model = run.get("model") or PurePath(str(parameters.get("model", ""))).stem
        return os.path.join(folder, name), str(model)

    def _folder(self, run: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
        """Where the run was started; empty if that is not known."""
        if isinstance(folder := run.get("folder"), str):
            return folder
        # Files of earlier versions do not tell it: from there, --out led here.
        given, here = PurePath(str(parameters.get("out", ""))).parts, self._out.parts
        led_here = given and given == here[-len(given) :]
        return str(Path(*here[: -len(given)])) if led_here and given != here else ""


class RunFile:
    """Appends one run's records to ``<out>/runs/<id>.json``.

    Owner: the run that made it; `add` may be called from any of its threads.
    """

    def __init__(
        self,
        out: Path,
        *,
        command: Sequence[str],
        model: str,
        parameters: dict[str, Any],
        inputs: Mapping[str, str],
        skipped: Iterable[tuple[str, str]],
        versions: dict[str, str],
    ) -> None:
        """Create the file and write what is known before the first slide.

        Args:
            out: The output folder.
            command: The command line.
            model: Name of the model.
            parameters: Options of the run.
            inputs: Slides as the run names them, with their result files below the folder.
            skipped: (path, reason) of files that no run takes.
            versions: Library → version.

        Raises:
            UsageError: The folder cannot be made or written.
            OutputError: The disk is full.
        """
        started = datetime.datetime.now(datetime.UTC)
        self.host, self.job = platform.node(), job_id() or ""
        stamp = started.strftime("%Y%m%dT%H%M%S%f")
        # Linux takes any host name; and of containers many have the same, and number 1.
        host = self.host.replace("/", "_")
        self.run_id = f"{stamp}-{host}-{os.getpid()}-{secrets.token_hex(2)}"
        self.path = out / RUNS_FOLDER / f"{self.run_id}.json"
        self._lock = threading.Lock()
        self._torn = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (OutputError if full else UsageError)(
                f"{out}: cannot be written ({exc.strerror}); choose another --out"
            ) from exc
        run = {
            "kind": "run",
            "run": self.run_id,
            "command": list(command),
            "folder": os.getcwd(),
            "model": model,
            "started": started.isoformat(),
            "host": self.host,
            "job": self.job,
            "parameters": parameters,
            "versions": versions,
        }
        given = {
            "kind": "inputs",
            "slides": list(inputs),
            "results": list(inputs.values()),
            "skipped": [{"path": path, "reason": reason} for path, reason in skipped],
        }
        try:
            self._append(run)
            self._append(given)
        except OutputError:
            self.close()
            remove(self.path)  # of a run that did not begin
            raise

    def add_model(
        self,
        *,
        name: str,
        device: str,
        load_seconds: float,
        batch_size: int,
        passes: "BatchStatistics",
    ) -> None:
        """Append what the model did in this run, after its last slide.

        Args:
            name: Of the model.
            device: Where it ran.
            load_seconds: From the start of loading to the first slide's.
            batch_size: Most tiles of a pass, at the end of the run.
            passes: Every forward pass; batches of several slides may have shared one.

        Raises:
            OutputError: The file cannot be written any more.
        """
        self._append(
            {
                "kind": "model",
                "name": name,
                "device": device,
                "load_seconds": round(load_seconds, 3),
                "batch_size": batch_size,
                "passes": passes.batches,
                "tiles": passes.tiles,
                "fill_share": round(passes.fill, 4),
                "forward_seconds": round(passes.forward_seconds, 3),
            }
        )

    def add(self, report: SlideReport) -> None:
        """Append one slide's record.

        Raises:
            OutputError: The file system refused, or took a part only; or the file was removed, and
                nobody would ever read what is appended.
        """
        if is_gone(self.path):
            raise OutputError(
                f"{self.path}: is there no more; were results removed, moved or unmounted? "
                "the run ends here, run again"
            )
        ended = datetime.datetime.now(datetime.UTC).isoformat()
        about = {"ended": ended, "host": self.host, "job": self.job}
        self._append({"kind": "slide", **slide_record(report), **about})

    def _append(self, record: dict[str, Any]) -> None:
        line = json_line(record)
        with self._lock:
            # What a full disk cut short must not take the next line with it.
            left = memoryview(b"\n" + line if self._torn else line)
            with output_errors(self.path, "cannot be written", advice=ANOTHER_OUT):
                while left:
                    left = left[os.write(self._file, left) :]
                    self._torn = bool(left)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass
class RunsSummary:
    """What all runs below an output folder say together.

    Attributes:
        slides: How each slide stands, by its absolute path; of several models one for each, with
            the model's name behind the path.
        missing: Slides that a run was given and none accounted for, as it named them; of several
            models with the model's name behind.
        held: Those of them that a run passed over because another job was at work on them.
        skipped: Files below the inputs that no run took, with the reason.
        runs: First lines of the run files.
        models: Names of the models that they ran.
    """

    slides: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    models: list[str] = field(default_factory=list)


def located(out: Path, output: str) -> Path | None:
    """Where a reported result file is below a folder, which may have moved or be a copy.

    A copy holds the accounts of its original, whose files are no results of the copy.

    Returns:
        None where the folder has no such file.
    """
    path = Path(output)
    if path.absolute().is_relative_to(out.absolute()):
        return path if path.exists() else None
    # A run that was told "--out ." names its results from there.
    for start in range(path.is_absolute(), len(path.parts)):
        moved = out.joinpath(*path.parts[start:])
        if moved.exists():
            return moved
    return None


def read_runs(out: Path) -> RunsSummary:
    """Sum up every run file below an output folder.

    Raises:
        OutputError: The folder holds no run files.
    """
    if next((out / RUNS_FOLDER).glob("*.json"), None) is None:
        raise OutputError(f"{out}: no {RUNS_FOLDER}/*.json here; {_where_else(out)}")
    return read_accounts(out).summary()


def read_accounts(out: Path) -> "Accounts":
    """What the run files below an output folder say of each slide; nothing where there are none.

    A line that a killed process cut short, or that is not ours, is passed over.
    """
    accounts = Accounts(out)
    for path in sorted((out / RUNS_FOLDER).glob("*.json")):
        run: dict[str, Any] = {}
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                record = None
            if _is_record(record):
                run = record if record["kind"] == "run" else run
                accounts.take(run, record)
            elif line.strip():
                log.info("%s:%d: not a line of a run, passed over", path, number)
    return accounts


def _where_else(out: Path) -> str:
    """What to do about a folder that holds no account of runs."""
    if any((out.absolute().parent / RUNS_FOLDER).glob("*.json")):
        return f"give the folder above it, {out.absolute().parent}, that --out named"
    if next(out.rglob("*.h5"), None) is not None:
        return f"the results themselves are looked at by: bioptimus verify {shlex.quote(str(out))}"
    return "give the folder that --out named"


_KEYS = {
    "run": {"run"},
    "inputs": {"slides", "skipped"},
    "slide": {"slide", "state", "reason", "output", "tiles_done", "tiles_failed", "seconds"},
    "model": set[str](),
}


def _is_record(found: object) -> bool:
    """Whether a line is one of ours: other programs may keep JSON files in a folder ``runs``."""
    if not isinstance(found, dict) or not _KEYS.get(str(found.get("kind")), {""}) <= set(found):
        return False
    if found["kind"] != "slide":
        return True
    return found["state"] in _RANKS and isinstance(found["seconds"], dict)


class Accounts:
    """What the runs say, by slide and model.

    Attributes:
        keys: Tell which slide a name is of.
        runs: First lines of the run files.
        skipped: Files below the inputs that no run took, with the reason.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self.keys = AccountKeys(out)
        self.runs: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}
        self._planned: dict[tuple[str, str], str] = {}
        self._results: dict[tuple[str, str], str] = {}
        self._told: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._held: set[tuple[str, str]] = set()

    def take(self, run: Mapping[str, Any], record: dict[str, Any]) -> None:
        """Take in one line of a run's file, of which ``run`` was the first."""
        kind = record["kind"]
        if kind == "run":
            self.runs.append(record)
        elif kind == "inputs":
            keys = [self.keys.of(run, slide) for slide in record["slides"]]
            self._planned.update(zip(keys, record["slides"], strict=True))
            # Files of earlier versions do not tell them.
            self._results.update(zip(keys, record.get("results", ()), strict=False))
            self.skipped.update((each["path"], each["reason"]) for each in record["skipped"])
        elif kind == "slide":
            key = self.keys.of(run, record["slide"])
            if is_left_to_another_job(record["state"], record["output"]):
                self._held.add(key)
                return
            # Files of earlier versions do not tell when a slide ended.
            when = {"ended": run.get("started", ""), "run": run.get("run", ""), **record}
            self._told.setdefault(key, []).append(when)

    def outcome(
        self,
    ) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[tuple[str, str], str]]:
        """How every slide stands, by slide and model.

        Returns:
            The record that counts of each, with its result where that is now; and those that a run
            was given and none accounted for, as it named them.
        """
        stand = {key: _that_counts(told) for key, told in self._told.items()}
        moved = self._moved(stand)
        slides = {
            key: self._checked(record, self._told[key])
            for key, record in stand.items()
            if key not in moved
        }
        missing = {
            key: slide
            for key, slide in self._planned.items()
            if key not in stand and key not in moved
        }
        return slides, missing

    def _moved(self, stand: Mapping[tuple[str, str], dict[str, Any]]) -> set[tuple[str, str]]:
        """Slides that are not there any more, and whose result another one has that is there.

        As where they were moved: what is told of the new path counts.

        Args:
            stand: The record that counts, by slide and model.
        """
        of_result: dict[str, list[tuple[str, str]]] = {}
        for key, result in self._results.items():
            of_result.setdefault(result, []).append(key)
        moved: set[tuple[str, str]] = set()
        for keys in of_result.values():
            if len(keys) == 1:
                continue
            gone = {key for key in keys if not os.path.lexists(key[0])}
            if any(_is_done(stand.get(key)) for key in keys if key not in gone):
                moved |= gone
        return moved

    def _checked(self, record: dict[str, Any], told: list[dict[str, Any]]) -> dict[str, Any]:
        if not record["output"] or not _is_done(record):
            return record
        found = located(self._out, record["output"])
        if found is None:
            return {**record, "state": "failed", "reason": _GONE}
        return {**_of_file(found, record, told), "output": str(found)}

    def by_result(self) -> dict[str, dict[str, Any]]:
        """The record that counts of each slide, by its result's path below the folder."""
        return {
            result: _that_counts(self._told[key])
            for key, result in self._results.items()
            if key in self._told
        }

    def summary(self) -> RunsSummary:
        """All of it."""
        models = sorted({model for _, model in (*self._told, *self._planned)})

        def named(slide: str, model: str) -> str:
            return f"{slide} ({model})" if len(models) > 1 else slide

        slides, missing = self.outcome()
        names = {key: named(slide, key[1]) for key, slide in missing.items()}
        return RunsSummary(
            slides={named(*key): {**record, "model": key[1]} for key, record in slides.items()},
            missing=list(names.values()),
            held=[name for key, name in names.items() if key in self._held],
            skipped=self.skipped,
            runs=self.runs,
            models=models,
        )


def _is_done(record: dict[str, Any] | None) -> bool:
    return record is not None and record["state"] in ("ok", "empty", "skipped")


def _of_file(path: Path, last: dict[str, Any], told: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Which of several accounts of a finished result is of the very file that is there.

    Where folders were brought together, as by rsync, the last account may be of a file that was
    left behind. A run accounts for a slide just after it has written the file.
    """
    made = sorted(filter(_is_made, told), key=lambda record: str(record["ended"]))
    if len(made) < 2:
        return last
    written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).isoformat()
    # A copy that is younger than every account is told of by the last, as far as one can know.
    return next((record for record in made if str(record["ended"]) >= written), last)


def _is_made(record: dict[str, Any]) -> bool:
    return record["state"] in ("ok", "empty")


def _that_counts(told: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Which of several accounts of one slide and model tells how it stands: the last outcome.

    A run that passed a slide over as done already found the result as its maker told.
    """
    told = sorted(told, key=lambda record: str(record["ended"]))
    outcomes = [
        record
        for record in told
        if not _is_not_begun(record["state"], record["seconds"].get("total", 0))
    ]
    last = (outcomes or told)[-1]
    made = [record for record in outcomes if _is_made(record)]
    if last["state"] == "skipped" and made:
        return {**made[-1], "output": last["output"]}  # it may have been copied since
    return last
