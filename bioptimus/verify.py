"""Checking finished results: is every file whole, is anything missing or left over?"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bioptimus.batch.inputs import SlideInput, output_path
from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.checksums import row_checksums
from bioptimus.inference.layout import PART_SUFFIX, STORED_TYPES, digest_of
from bioptimus.inference.results import Result, RowsName, open_result

CLAIM_SUFFIX = ".claim"

# Up to here every row is read: it takes less than a tenth of a second more.
_SMALL_BYTES = 50_000_000
# Of larger files, enough to meet one whose rows were never filled; `deep` is for the rest.
SAMPLED_ROWS = 256
_BLOCK_BYTES = 16 << 20


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
            cohorts often hold one.
        sampled: Number of files of which only the first and last :data:`SAMPLED_ROWS` rows were
            read.
    """

    files: int
    rows: int
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...] = ()
    sampled: int = 0


def verify(
    out: Path, *, slides: Sequence[SlideInput] | None = None, deep: bool = False
) -> Verification:
    """Check every result below a folder.

    Args:
        out: Output folder of a run, the folder of one model in it, or one result file.
        slides: What should be there, for each model that has any result.
        deep: Read every row also of large files, not only those at the ends.

    Raises:
        UsageError: There is no such folder or file, or slides are given with one file.
        OutputError: The folder holds no results, and it was not told which there should be.
    """
    if not out.exists():
        raise UsageError(f"{out}: no such folder or file")
    if out.is_file() and slides is not None:
        raise UsageError(f"{out}: is one file; name its folder to see which slides lack a result")
    findings: list[Finding] = []
    results: dict[Path, Result] = {}
    files = rows = sampled = 0
    paths = [out] if out.is_file() else sorted(p for p in out.rglob("*.h5*") if p.is_file())
    for path in paths:
        if leftover := _leftover(path):
            findings.append(Finding(path=path, problem=leftover))
        elif path.suffix == ".h5":
            files += 1
            try:
                result = open_result(path, check=False)  # it tells all that is wrong
                _ = result.model  # raises where its description cannot be read
                whole = deep or _row_bytes(result) * len(result) <= _SMALL_BYTES
                with result.held_open():
                    problems = list(_problems(result, whole=whole))
            except OutputError as exc:
                problems = [_without_path(exc, path)]
            else:
                rows += len(result)
                sampled += not whole and len(result) > 2 * SAMPLED_ROWS
                results[path] = result
            findings += [Finding(path=path, problem=problem) for problem in problems]
    if slides is not None:
        findings += _against(out, slides, results, {finding.path for finding in findings})
    elif not files and not findings:
        raise OutputError(f"{out}: holds no result files (*.h5); is this an --out folder?")
    findings.sort(key=lambda finding: finding.path)
    return Verification(
        files=files,
        rows=rows,
        findings=tuple(findings),
        notes=tuple(_repeated(results)),
        sampled=sampled,
    )


def _leftover(path: Path) -> str | None:
    """What a file beside the results says of a run that did not end; None for a result."""
    if path.name.endswith(".h5" + PART_SUFFIX):
        return "is unfinished; run the same command again to go on with it"
    if f".h5{PART_SUFFIX}." in path.name:
        return "was left by a process that was killed; the next run of this slide removes it"
    if f".h5{CLAIM_SUFFIX}" in path.name:
        return "is a claim: a run is at work on this slide, or died while it was"
    return None


def _row_bytes(result: Result) -> int:
    """About what a row takes."""
    return 4 * (result.embedding_dim + result.prediction_dim)


def _problems(result: Result, *, whole: bool) -> Iterator[str]:
    attributes = result.attributes
    failed = len(result.failed_tiles)
    planned = attributes.get("tiles_planned")
    if planned != len(result) + failed:
        yield f"has {len(result)} rows and {failed} failed tiles of {planned} planned"
    if attributes.get("tiles_failed") != failed:
        yield f"lists {failed} failed tiles and says {attributes.get('tiles_failed')}"
    if (result.state == "empty") != (planned == 0):
        yield f"has state {result.state} with {planned} tiles planned"
    if not _has_own_digest(result):
        yield "its digest is not that of its parameters"
    yield from _mode_problems(result)
    yield from _contradictions(result)
    yield from _position_problems(result)
    for name in result.changed_datasets():
        yield f"has other values in {name} than were written"
    yield from _row_problems(result, whole=whole)


def _has_own_digest(result: Result) -> bool:
    try:
        return digest_of(_parameters(result)) == result.digest
    except TypeError:  # text that is no text any more
        return False


def _parameters(result: Result) -> Mapping[str, Any]:
    """What the digest was made of; none where that cannot be read."""
    found = result.attributes.get("digest_parameters")
    return found if isinstance(found, Mapping) else {}


def _contradictions(result: Result) -> Iterator[str]:
    """Facts that the file tells twice, and not alike."""
    root, tile, mpp = result.attributes, result.tile, result.mpp
    coords, parameters = result.coords_attributes, _parameters(result)
    name = result.path.stem
    said_twice: list[tuple[str, object, str, object]] = [
        ("patch_size of coords", coords.get("patch_size"), "tile_size_px", tile.size_px),
        ("patch_size_level0 of coords", coords.get("patch_size_level0"),
         "tile_size_px, tile_mpp and mpp_x", round(result.tile_level0[0])),
        ("level0_magnification of coords", coords.get("level0_magnification"),
         "10 / mpp_x", 10 / mpp[0]),
        ("target_magnification of coords", coords.get("target_magnification"),
         "10 / tile_mpp", 10 / tile.mpp),
        ("overlap of coords", coords.get("overlap"), "overlap_px", tile.overlap_px),
        ("level0_width of coords", coords.get("level0_width"),
         "slide_width", result.dimensions[0]),
        ("level0_height of coords", coords.get("level0_height"),
         "slide_height", result.dimensions[1]),
        ("name of coords", coords.get("name"), "the file's name", name),
    ]  # fmt: skip
    said_twice += [
        (f"{parameter!r} of digest_parameters", parameters.get(parameter), attribute, value)
        for parameter, attribute, value in (
            ("slide size (bytes)", "slide_size_bytes", root.get("slide_size_bytes")),
            ("slide quickhash", "slide_quickhash", root.get("slide_quickhash")),
            ("mpp", "mpp_x, mpp_y", [round(value, 6) for value in mpp]),
            ("model", "model_name", root.get("model_name")),
            ("model sha256", "model_sha256", result.model_sha256),
            ("mode", "mode", str(result.mode)),
            ("tile size (px)", "tile_size_px", tile.size_px),
            ("tile mpp", "tile_mpp", tile.mpp),
            ("overlap (px)", "overlap_px", tile.overlap_px),
            ("min tissue", "min_tissue", root.get("min_tissue")),
            ("icc", "icc", root.get("icc")),
        )
    ]
    for what, value, other, expected in said_twice:
        # Files of other versions may lack one of the two.
        if None not in (value, expected) and not _agree(value, expected):
            yield f"says {what} is {value}, {other} {expected}"


def _agree(one: object, other: object) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


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


def _row_problems(result: Result, *, whole: bool) -> Iterator[str]:
    dims: dict[RowsName, int] = {
        "features": result.embedding_dim,
        "predictions": result.prediction_dim,
    }
    names = [name for name, dim in dims.items() if dim]
    for name in names:
        if (dtype := result.read(name, 0, 0).dtype) not in STORED_TYPES:
            yield f"holds {dtype} as {name}, not {' or '.join(STORED_TYPES)}"
    not_finite = dict.fromkeys(names, 0)
    changed: list[int] = []
    for first, last in _stretches(len(result), width=_row_bytes(result), whole=whole):
        sums: npt.NDArray[np.uint32] | None = None
        sound = np.ones(last - first, bool)
        for name in names:
            block = result.read(name, first, last)
            finite = np.isfinite(block).all(axis=1)
            not_finite[name] += int((~finite).sum())
            sound &= finite
            sums = row_checksums(block, sums)
        if sums is not None and result.has_row_checksums:
            # One line for one fault: a row with NaN has changed as well.
            other = sound & (sums != result.read("row_crc32", first, last))
            changed += (first + np.flatnonzero(other)).tolist()
    for name, bad in not_finite.items():
        if bad:
            yield f"has {bad} rows of {name} with NaN or Inf"
    if changed:
        where = f"row {changed[0]}" if len(changed) == 1 else f"{len(changed)} rows"
        start = "" if len(changed) == 1 else f", the first of them row {changed[0]}"
        yield f"has other values in {where} than were written{start}"


def _stretches(count: int, *, width: int, whole: bool) -> list[tuple[int, int]]:
    """Rows [first, last) to read at once: all of them, or those at the ends."""
    step = max(1, _BLOCK_BYTES // max(1, width)) if whole else SAMPLED_ROWS
    if whole or count <= 2 * step:
        starts: Sequence[int] = range(0, count, step)
    else:
        starts = (0, count - step)
    return [(first, min(first + step, count)) for first in starts]


def _repeated(results: Mapping[Path, Result]) -> Iterator[Finding]:
    """Results of one slide, which would count twice for who reads the folder."""
    seen: dict[tuple[object, ...], Path] = {}
    for path, result in results.items():
        slide = result.attributes.get("slide_quickhash") or str(result.slide_path)
        alike = (path.parent, slide, result.model_sha256)
        first = seen.setdefault((result.digest,), path)
        if first == path:
            first = seen.setdefault(alike, path)
        if first != path:
            yield Finding(path=path, problem=f"holds the same slide and model as {first}")


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
