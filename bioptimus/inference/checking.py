"""What is wrong with one result file: :func:`check_file`, and the process that calls it for many.

A :class:`~bioptimus.inference.guard.ReadingProcess` runs this module.
"""

import contextlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from bioptimus.counting import counted
from bioptimus.errors import OutputError
from bioptimus.inference import guard
from bioptimus.inference.checksums import row_checksums
from bioptimus.inference.hdf5_image import DAMAGE_ERRORS, open_to_read, texts_changed
from bioptimus.inference.layout import STORED_TYPES, digest_of, of_run
from bioptimus.inference.results import Result, RowsName, open_result, position_problem

# Of files that are not read whole: enough to meet one whose rows were never filled.
SAMPLED_ROWS = 256
_BLOCK_BYTES = 16 << 20

# Of larger ones the rows at the ends are read, and the index of their chunks.
_TOUCHED_WHOLE_BYTES = 50_000_000
# No machine reads and checks rows as slowly as this.
_SLOWEST_BYTES_PER_CPU_S = 10e6


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a look at one result file gave.

    Attributes:
        problems: Everything that is wrong with it.
        facts: What it says of itself; None where it cannot be read.
    """

    problems: tuple[str, ...]
    facts: "Facts | None" = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a result file says of itself.

    Attributes:
        rows: Number of its rows.
        sampled: Whether only the first and last :data:`SAMPLED_ROWS` of them were read.
        digest: Names everything that the rows depend on.
        slide: Tells its slide from others.
        slide_size_bytes: Size of the slide then; None where it does not say.
        model: Name of the model.
        model_sha256: Digest of the model's weights.
        texts_changed: Whether it was written into since, or its texts are damaged.
        parameters: What a run made it with, whatever the slide.
    """

    rows: int
    sampled: bool
    digest: str
    slide: str
    slide_size_bytes: int | None
    model: str
    model_sha256: str
    texts_changed: bool
    parameters: Mapping[str, Any]


def check_file(path: Path, *, whole_up_to_bytes: float) -> Checked:
    """Look at everything that a result file holds.

    Args:
        path: The file.
        whole_up_to_bytes: Of files with larger rows than this together, only those at the ends are
            read.
    """
    try:
        result = open_result(path, check=False)  # it tells all that is wrong
        whole = _row_bytes(result) * len(result) <= whole_up_to_bytes
        with result.held_open():
            model = result.model.name  # raises where its description cannot be read
            problems = tuple(_problems(result, whole=whole))
            changed = texts_changed(path)
    except OutputError as exc:
        return Checked(problems=(str(exc).removeprefix(f"{path}: "),))
    size = result.attributes.get("slide_size_bytes")
    return Checked(
        problems=problems,
        facts=Facts(
            rows=len(result),
            sampled=not whole and len(result) > 2 * SAMPLED_ROWS,
            digest=result.digest,
            slide=str(result.attributes.get("slide_quickhash") or result.slide_path),
            slide_size_bytes=size if isinstance(size, int) else None,
            model=model,
            model_sha256=result.model_sha256,
            texts_changed=changed,
            parameters=of_run(_parameters(result)),
        ),
    )


def _row_bytes(result: Result) -> int:
    """About what a row takes."""
    return 4 * (result.embedding_dim + result.prediction_dim)


def _problems(result: Result, *, whole: bool) -> Iterator[str]:
    attributes = result.attributes
    failed = len(result.failed_tiles)
    planned = attributes.get("tiles_planned")
    if planned != len(result) + failed:
        there = f"{counted(len(result), 'row')} and {counted(failed, 'failed tile')}"
        yield f"has {there} of {planned} planned"
    if attributes.get("tiles_failed") != failed:
        yield f"lists {counted(failed, 'failed tile')} and says {attributes.get('tiles_failed')}"
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
    # Readers of other tools take it from there.
    if (name := coords.get("name")) not in (None, result.path.stem):
        yield f"was renamed: inside it is called {name}; call it {name}.h5 again"
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
            # Of a slide without a profile nothing is converted, whatever was asked for; files of
            # earlier versions say both.
            ("icc", "icc", root.get("icc") if root.get("slide_has_icc", True) else None),
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


def _position_problems(result: Result) -> Iterator[str]:
    coords = result.coords
    if problem := position_problem(coords, result.dimensions):
        yield problem
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
            yield f"has {counted(bad, 'row')} of {name} with NaN or Inf"
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


def touch(path: Path) -> None:
    """Read of a file, ours or not, what any of our readers may ask the HDF5 library for.

    Whether that gives anything does not matter here, only that the library comes back.
    """
    with contextlib.suppress(*DAMAGE_ERRORS), open_to_read(path) as file:
        _touch_attributes(file)
        for name in file:
            with contextlib.suppress(*DAMAGE_ERRORS):
                found = file[name]
                _touch_attributes(found)
                if isinstance(found, h5py.Dataset):
                    _touch_values(found)


def _touch_attributes(found: h5py.Group | h5py.Dataset) -> None:
    for name in found.attrs:
        with contextlib.suppress(*DAMAGE_ERRORS):
            found.attrs[name]


def _touch_values(dataset: h5py.Dataset) -> None:
    # Texts lie in heaps, each anywhere.
    if dataset.dtype.hasobject or dataset.nbytes <= _TOUCHED_WHOLE_BYTES:
        dataset[()]
        return
    if dataset.chunks:
        dataset.id.get_num_chunks()
    dataset[:1]
    dataset[-1:]


def main(look: str, longest_cpu_s: float, whole_up_to_bytes: float = 0.0) -> None:
    """Look at each file named on standard input, and answer on standard output; JSON by the line.

    Args:
        look: ``check``, as :func:`check_file` does, or ``touch``.
        longest_cpu_s: The process is ended by ``SIGPROF`` where one file takes more than this,
            beside what its rows may take: the HDF5 library is lost in a loop.
        whole_up_to_bytes: As of :func:`check_file`.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    guard.is_reading_process = True
    _say(guard.READY)
    for line in sys.stdin:
        path = Path(json.loads(line))
        size_bytes = os.path.getsize(path) if os.path.exists(path) else 0  # it tells that itself
        # Of the processor's time, not the clock's: a slow disk is no loop.
        limit_s = longest_cpu_s + min(size_bytes, whole_up_to_bytes) / _SLOWEST_BYTES_PER_CPU_S
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answer: dict[str, Any] | None = None
        if look == "check":
            answer = asdict(check_file(path, whole_up_to_bytes=whole_up_to_bytes))
        else:
            touch(path)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(json.dumps(answer) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
