"""Checking finished results: is every file whole, is anything missing or left over?"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bioptimus.batch.inputs import SlideInput, output_path
from bioptimus.errors import OutputError
from bioptimus.inference.layout import PART_SUFFIX, digest_of
from bioptimus.inference.results import Result, RowsName, open_result

CLAIM_SUFFIX = ".claim"

# Enough to meet a file whose rows were never filled; reading all is what `deep` is for.
_SAMPLED_ROWS = 256
_DEEP_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        path: The file.
        problem: What is wrong with it.
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
    """

    files: int
    rows: int
    findings: tuple[Finding, ...]


def verify(
    out: Path, *, slides: Sequence[SlideInput] | None = None, deep: bool = False
) -> Verification:
    """Check every result below a folder.

    Args:
        out: Output folder of a run, or the folder of one model in it.
        slides: What should be there, for each model that has any result.
        deep: Read every value, not only those at the ends.

    Raises:
        OutputError: There is no such folder.
    """
    if not out.is_dir():
        raise OutputError(f"{out}: no such folder")
    findings: list[Finding] = []
    results: dict[Path, Result] = {}
    files = rows = 0
    for path in sorted(path for path in out.rglob("*.h5*") if path.is_file()):
        if leftover := _leftover(path):
            findings.append(Finding(path=path, problem=leftover))
        elif path.suffix == ".h5":
            files += 1
            try:
                result = open_result(path)
                with result.held_open():
                    problems = list(_problems(result, deep=deep))
            except OutputError as exc:
                problems = [_without_path(exc, path)]
            else:
                rows += len(result)
                results[path] = result
            findings += [Finding(path=path, problem=problem) for problem in problems]
    if slides is not None:
        findings += _against(out, slides, results, {finding.path for finding in findings})
    findings.sort(key=lambda finding: finding.path)
    return Verification(files=files, rows=rows, findings=tuple(findings))


def _leftover(path: Path) -> str | None:
    """What a file beside the results says of a run that did not end; None for a result."""
    if path.name.endswith(".h5" + PART_SUFFIX):
        return "is unfinished; run the same command again to go on with it"
    if f".h5{PART_SUFFIX}." in path.name:
        return "was left by a process that was killed; the next run of this slide removes it"
    if f".h5{CLAIM_SUFFIX}" in path.name:
        return "is a claim: a run is at work on this slide, or died while it was"
    return None


def _problems(result: Result, *, deep: bool) -> Iterator[str]:
    attributes = result.attributes
    failed = len(result.failed_tiles)
    planned = attributes.get("tiles_planned")
    if planned != len(result) + failed:
        yield f"has {len(result)} rows and {failed} failed tiles of {planned} planned"
    if attributes.get("tiles_failed") != failed:
        yield f"lists {failed} failed tiles and says {attributes.get('tiles_failed')}"
    if (result.state == "empty") != (planned == 0):
        yield f"has state {result.state} with {planned} tiles planned"
    if digest_of(attributes.get("digest_parameters") or {}) != result.digest:
        yield "its digest is not that of its parameters"
    yield from _mode_problems(result)
    yield from _position_problems(result)
    for name in ("features", "predictions"):
        yield from _value_problems(result, name, deep=deep)


def _mode_problems(result: Result) -> Iterator[str]:
    if result.mode.wants_embedding != bool(result.embedding_dim):
        yield f"has {result.embedding_dim} embedding values in mode {result.mode}"
    if result.mode.wants_prediction != bool(result.prediction_dim):
        yield f"has {result.prediction_dim} predicted values in mode {result.mode}"
    if result.prediction_dim and len(result.output_names) != result.prediction_dim:
        yield f"has {len(result.output_names)} names for {result.prediction_dim} predicted values"


def _position_problems(result: Result) -> Iterator[str]:
    coords = result.coords
    outside = (coords < 0) | (coords >= np.array(result.dimensions))
    if outside.any():
        yield f"has {int(outside.any(axis=1).sum())} tiles whose corner is outside the slide"
    if len(np.unique(coords, axis=0)) != len(coords):
        yield "has two rows for one tile"
    ratios = result.tissue_ratios
    # Written so that NaN is a problem too.
    if not ((ratios >= 0) & (ratios <= 1)).all():
        yield "has tissue ratios outside 0 to 1"


def _value_problems(result: Result, name: RowsName, *, deep: bool) -> Iterator[str]:
    if name == "features" and not result.embedding_dim:
        return
    if name == "predictions" and not result.prediction_dim:
        return
    bad = sum(
        int((~np.isfinite(block)).any(axis=1).sum()) for block in _blocks(result, name, deep=deep)
    )
    if bad:
        yield f"has {bad} rows of {name} with NaN or Inf"


def _blocks(result: Result, name: RowsName, *, deep: bool) -> Iterator[npt.NDArray[Any]]:
    count = len(result)
    if not deep:
        yield result.read(name, 0, _SAMPLED_ROWS)
        yield result.read(name, max(_SAMPLED_ROWS, count - _SAMPLED_ROWS), count)
        return
    width = 4 * max(result.embedding_dim, result.prediction_dim)
    step = max(1, _DEEP_BYTES // width)
    for first in range(0, count, step):
        yield result.read(name, first, first + step)


def _against(
    out: Path, slides: Iterable[SlideInput], results: Mapping[Path, Result], found: set[Path]
) -> Iterator[Finding]:
    """Slides without a result (not even a part or a broken one), or changed since."""
    folders = _model_folders(out, results, found)
    for slide in slides:
        if not folders:
            yield Finding(path=slide.path, problem=f"has no result below {out}")
        for folder in folders:
            # What the model's folder is called does not matter here; it may be ".".
            path = folder / output_path(Path(), "model", slide).relative_to("model")
            if path in results:
                if change := _change(slide, results[path]):
                    yield Finding(path=path, problem=change)
            elif not found & {path, path.with_name(path.name + PART_SUFFIX)}:
                problem = f"is missing: there is no result of {slide.path}"
                yield Finding(path=path, problem=problem)


def _model_folders(out: Path, results: Mapping[Path, Result], found: set[Path]) -> list[Path]:
    """Folders of models: those below ``out``, or ``out`` itself where its results say so."""
    if out.resolve().name in {result.model.name for result in results.values()}:
        return [out]
    return sorted({out / path.relative_to(out).parts[0] for path in {*results, *found}})


def _change(slide: SlideInput, result: Result) -> str | None:
    """Whether the slide is another one by now, as far as its size tells."""
    if slide.problem is not None or len(slide.files()) > 1:
        return None
    now, then = slide.path.stat().st_size, result.attributes.get("slide_size_bytes")
    if then is None or now == then:
        return None
    return f"was made from another file: {slide.path} has {now} bytes now, {then} then"


def _without_path(error: OutputError, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")
