"""Checking finished results: is every file whole, is anything missing or left over?"""

import contextlib
import math
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bioptimus.batch.inputs import SlideInput, model_folder, output_path
from bioptimus.batch.report import RUNS_FOLDER, read_accounts
from bioptimus.batch.result_files import files_below, why_not_listed
from bioptimus.batch.signals import STOP_SIGNALS, StopFlag
from bioptimus.counting import Tell, counted, tell_nobody
from bioptimus.errors import OutputError, StoppedError, UsageError
from bioptimus.inference.checking import Checked, Facts
from bioptimus.inference.guard import FileEndedReaderError, ReadingProcess
from bioptimus.inference.layout import PART_SUFFIX, differences, to_json
from bioptimus.kinds import checks_kinds
from bioptimus.runtime.machine import available_cores

CLAIM_SUFFIX = ".claim"

# Up to here every row is read: it takes less than a tenth of a second more.
_SMALL_BYTES = 50_000_000
# Structure is read in milliseconds, unless the library goes in circles; rows have time besides.
_LONGEST_CPU_S = 60.0
# To start a process takes as long as it takes one to check some twenty small files.
_FILES_PER_PROCESS = 20
# More find the disk busy.
_MOST_PROCESSES = 16


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a file that is not as it should be, or that one should know.

    Attributes:
        path: The file.
        problem: What is wrong with it, or to know of it.
    """

    path: Path
    problem: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What :func:`verify` saw.

    Attributes:
        files: Number of result files looked at.
        rows: Rows in them.
        findings: Everything that is wrong, by path.
        notes: What is right and good to know: a slide that stands there under several names, as
            cohorts often hold one, a folder of one model with results of several kinds, and results
            that another program wrote into.
        sampled: Number of files of which only the first and last
            :data:`~bioptimus.inference.checking.SAMPLED_ROWS` rows were read.
    """

    files: int
    rows: int
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...] = ()
    sampled: int = 0


@checks_kinds
def verify(
    out: Path,
    *,
    slides: Sequence[SlideInput] | None = None,
    deep: bool = False,
    stop: StopFlag | None = None,
    tell: Tell = tell_nobody,
) -> Verification:
    """Check every result below a folder.

    Files are read in processes of their own, since some damage ends a process that reads it, and
    several at a time where there are many.

    Args:
        out: Output folder of a run, the folder of one model in it, or one result file.
        slides: What should be there, for each model that has any result.
        deep: Read every row also of large files, not only those at the ends.
        stop: Ends the check as soon as it is set.
        tell: Called after each file.

    Raises:
        StoppedError: It was.
        UsageError: There is no such folder or file, or slides are given with one file.
        OutputError: The folder holds no results, and it was not told which there should be.
    """
    if not out.exists():
        raise UsageError(f"{out}: no such folder or file")
    if out.is_file() and slides is not None:
        raise UsageError(f"{out}: is one file; name its folder to see which slides lack a result")
    why_unfinished = _Unfinished()
    findings: list[Finding] = []
    found: dict[Path, Facts] = {}
    stop = stop or StopFlag()
    paths, not_listed = _paths(out, stop)
    findings += not_listed
    # First, as a slide may be called a.h5.part.svs.
    results = [path for path in paths if path.suffix == ".h5"]
    whole_up_to_bytes = math.inf if deep else _SMALL_BYTES
    each = _checked(results, stop, whole_up_to_bytes=whole_up_to_bytes)
    for done, (path, checked) in enumerate(each, start=1):
        tell("files", done, len(results))
        findings += [Finding(path=path, problem=problem) for problem in checked.problems]
        if checked.facts is not None:
            found[path] = checked.facts
    for path in paths:
        if path.suffix == ".h5":
            continue
        if path.name.endswith(".h5" + PART_SUFFIX):
            findings.append(Finding(path=path, problem=why_unfinished(path)))
        elif leftover := _leftover(path):
            findings.append(Finding(path=path, problem=leftover))
    if slides is not None:
        findings += _against(out, slides, found, {finding.path for finding in findings})
    elif not results and not findings:
        raise OutputError(f"{out}: holds no result files (*.h5); is this an --out folder?")
    findings.sort(key=lambda finding: finding.path)
    return Verification(
        files=len(results),
        rows=sum(facts.rows for facts in found.values()),
        findings=tuple(findings),
        notes=(*_mixed(found), *_repeated(found), *_written_into(found)),
        sampled=sum(facts.sampled for facts in found.values()),
    )


def _paths(out: Path, stop: StopFlag) -> tuple[list[Path], list[Finding]]:
    """One result, or everything that a run may have left below a folder, as far as it is shown."""
    if out.is_file():
        return [out], []
    paths: list[Path] = []
    hidden: list[Finding] = []

    def not_listed(error: OSError) -> None:
        hidden.append(Finding(path=Path(error.filename), problem=why_not_listed(error)))

    for path in files_below(out, not_listed):
        _end_if_told(stop)
        if ".h5" in path.name:
            paths.append(path)
    return sorted(paths), hidden


def _end_if_told(stop: StopFlag) -> None:
    if stop.stopped:
        raise StoppedError("the check was stopped")


def _checked(
    results: Sequence[Path], stop: StopFlag, *, whole_up_to_bytes: float
) -> Iterator[tuple[Path, Checked]]:
    """Check files, several at a time; in their order."""
    count = max(1, min(available_cores(), _MOST_PROCESSES, len(results) // _FILES_PER_PROCESS))
    look = ("check", str(_LONGEST_CPU_S), str(whole_up_to_bytes))
    with contextlib.ExitStack() as stack:
        checkers = []
        for _ in range(count):
            checkers.append(ReadingProcess(*look, start=partial(_start_held_back, stop)))
            stack.callback(checkers[-1].close)
        # Each has one file at a time, so that it is known which one ended it.
        for path, checker in zip(results, checkers, strict=False):
            checker.begin(path)
        for number, path in enumerate(results):
            checker = checkers[number % count]
            checked = _result(checker, stop)
            if number + count < len(results):
                checker.begin(results[number + count])
            yield path, checked


def _start_held_back(stop: StopFlag, arguments: Sequence[str], **options: Any) -> Any:
    """Start a process that gets every signal this one gets, once it is ready for them.

    While it is loading, they would end it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return stop.start_child(arguments, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(process: ReadingProcess, stop: StopFlag) -> Checked:
    """Wait for what the check of a file gives.

    Raises:
        StoppedError: The stop flag is set.
        OutputError: No process can be started.
    """
    try:
        told = process.result()
    except FileEndedReaderError as exc:
        return Checked(problems=(str(exc),))
    finally:
        # First: a signal ends the process as well.
        _end_if_told(stop)
    facts = told["facts"]
    return Checked(problems=tuple(told["problems"]), facts=facts and Facts(**facts))


class _Unfinished:
    """Says why a part is no result yet, by the accounts of the runs in the folder above it."""

    def __init__(self) -> None:
        self._accounts: dict[Path, dict[str, dict[str, Any]]] = {}

    def __call__(self, part: Path) -> str:
        out = next(
            (each for each in part.absolute().parents if (each / RUNS_FOLDER).is_dir()), None
        )
        if out is not None:
            if out not in self._accounts:
                self._accounts[out] = read_accounts(out).by_result()
            result = part.absolute().with_suffix("").relative_to(out).as_posix()
            record = self._accounts[out].get(result)
            if record is not None and record["state"] == "failed":
                # The same command might fail in the same way.
                return f"is unfinished: its slide failed: {record['reason']}"
        return "is unfinished; run the same command again to go on with it"


def _leftover(path: Path) -> str | None:
    """What a file beside the results says of a run that did not end; None where nothing."""
    if f".h5{PART_SUFFIX}." in path.name:
        return "was left by a process that was killed; the next run of this slide removes it"
    if f".h5{CLAIM_SUFFIX}" in path.name:
        return "is a claim: a run is at work on this slide, or died while it was"
    return None


def _repeated(found: Mapping[Path, Facts]) -> Iterator[Finding]:
    """Results of one slide, which would count twice for who reads the folder."""
    seen: dict[tuple[object, ...], Path] = {}
    for path, facts in found.items():
        alike = (path.parent, facts.slide, facts.model_sha256)
        first = seen.setdefault((facts.digest,), path)
        if first == path:
            first = seen.setdefault(alike, path)
        if first != path:
            yield Finding(path=path, problem=f"holds the same slide and model as {first}")


def _written_into(found: Mapping[Path, Facts]) -> Iterator[Finding]:
    """Results whose attributes may say something else than was written: no checksum tells which."""
    for path, facts in found.items():
        if facts.texts_changed:
            problem = "holds other texts than were written: a program added to it, or it is damaged"
            yield Finding(path=path, problem=problem)


def _mixed(found: Mapping[Path, Facts]) -> Iterator[Finding]:
    """Folders whose results are of several models of one name, scales or the like.

    Who trains on such a folder mixes rows that cannot be compared.
    """
    folders: dict[Path, dict[str, list[Path]]] = {}
    for path, facts in found.items():
        kinds = folders.setdefault(_folder_of_model(path, facts.model), {})
        kinds.setdefault(to_json(facts.parameters), []).append(path)
    for folder, kinds in folders.items():
        if len(kinds) == 1:
            continue
        # The odd ones, not those that most agree with, are what to look at.
        most, other, *more = sorted(kinds.values(), key=len, reverse=True)
        words = differences(found[most[0]].parameters, found[other[0]].parameters, here="here")
        sides = [
            f"{counted(len(paths), 'file')} as {paths[0].relative_to(folder)}"
            for paths in (most, other)
        ]
        rest = f"; {counted(len(more), 'more kind')}" if more else ""
        yield Finding(
            path=folder,
            problem=f"holds results of {len(kinds)} kinds, not to be used together: "
            f"{sides[0]} there, {sides[1]} here: {words}{rest}",
        )


def _folder_of_model(path: Path, model: str) -> Path:
    """The folder that a run named after the model, or the file's own where that is not known."""
    name = model_folder(Path(), model).name
    for folder, real in zip(path.parents, path.absolute().parents, strict=False):
        if real.name == name:
            return folder
    return path.parent


def _against(
    out: Path, slides: Iterable[SlideInput], found: Mapping[Path, Facts], bad: set[Path]
) -> Iterator[Finding]:
    """Slides without a result (not even a part or a broken one), or changed since."""
    folders = _model_folders(out, found, bad)
    for slide in slides:
        if not folders:
            yield Finding(path=slide.path, problem=f"has no result below {out}")
        for folder in folders:
            # What the model's folder is called does not matter here; it may be ".".
            path = folder / output_path(Path(), "model", slide).relative_to("model")
            if path in found:
                if change := _change(slide, found[path]):
                    yield Finding(path=path, problem=change)
            elif not bad & {path, path.with_name(path.name + PART_SUFFIX)}:
                problem = f"is missing: there is no result of {slide.path}"
                yield Finding(path=path, problem=problem)


def _model_folders(out: Path, found: Mapping[Path, Facts], bad: set[Path]) -> list[Path]:
    """Folders of models: those below ``out``, or ``out`` itself where its results say so."""
    if out.resolve().name in {facts.model for facts in found.values()}:
        return [out]
    return sorted({out / path.relative_to(out).parts[0] for path in {*found, *bad}})


def _change(slide: SlideInput, facts: Facts) -> str | None:
    """Whether the slide is another one by now, as far as its size tells."""
    if slide.problem is not None or len(slide.files()) > 1:
        return None
    now, then = slide.path.stat().st_size, facts.slide_size_bytes
    if then is None or now == then:
        return None
    return f"was made from another file: {slide.path} has {now} bytes now, {then} then"
