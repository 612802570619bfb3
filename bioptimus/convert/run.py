"""Converting many results: what goes where, and that nothing half made appears."""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

from bioptimus.batch.result_files import find_results
from bioptimus.convert.geojson import geojson
from bioptimus.convert.pieces import ConvertOptions, Piece
from bioptimus.convert.record import Record, made_from
from bioptimus.convert.scverse import h5ad, spatialdata
from bioptimus.convert.tables import npz, parquet, zarr
from bioptimus.convert.trees import clam, trident
from bioptimus.counting import Tell, tell_nobody
from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.disk import (
    output_errors,
    refuse_file,
    refuse_folder,
    remove,
    remove_abandoned,
    sync_folder,
    temporary_beside,
    written_aside,
)
from bioptimus.inference.results import Result, open_result
from bioptimus.kinds import checks_kinds


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format of another tool.

    Attributes:
        pieces: (result, path below the output folder, options) → its files.
        description: One line for people.
    """

    pieces: Callable[[Result, PurePath, ConvertOptions], list[Piece]]
    description: str


FORMATS = {
    "trident": Format(pieces=trident, description="TRIDENT job folder: patches, features"),
    "clam": Format(pieces=clam, description="CLAM folders: patches, h5_files, pt_files"),
    "h5ad": Format(pieces=h5ad, description="AnnData, for scanpy and squidpy"),
    "geojson": Format(pieces=geojson, description="tiles or tissue for QuPath"),
    "zarr": Format(pieces=zarr, description="Zarr group"),
    "npz": Format(pieces=npz, description="NumPy archive"),
    "parquet": Format(pieces=parquet, description="table, a row per tile"),
    "spatialdata": Format(pieces=spatialdata, description="SpatialData store"),
}
"""Name → format."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What became of one result.

    Attributes:
        source: The result file.
        outputs: What was written.
        kept: What was there already, made from the same result and options.
        problem: Why nothing, or not all, was; None if all was.
    """

    source: Path
    outputs: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One result and the pieces it will become.

    Attributes:
        source: The result file.
        pieces: Its outputs; empty where there is a problem.
        made_from: Checks the result and gives the digest of what they depend on.
        problem: Why it cannot be converted.
        needed_bytes: Room that it will take, roughly.
    """

    source: Path
    pieces: tuple[Piece, ...] = ()
    made_from: Callable[[], str] = str
    problem: str | None = None
    needed_bytes: int = 0


@checks_kinds
def convert(
    arguments: Sequence[Path],
    out: Path,
    *,
    to: str,
    options: ConvertOptions | None = None,
    overwrite: bool = False,
    tell: Tell = tell_nobody,
) -> Iterator[Converted]:
    """Convert results, one after the other; one that fails does not stop the others.

    An output that is there already stays if it was made from the same result and options; if it
    was made from something else, that result fails unless told to overwrite.

    Args:
        arguments: Result files, or folders of them.
        out: Output folder; made if missing.
        to: A name in :data:`FORMATS`.
        options: What the text formats write.
        overwrite: Make every output anew, also in the place of what is there.
        tell: Called for each result that was looked at; all are before the first is converted.

    Yields:
        What became of each result, in the order found.

    Raises:
        UsageError: The format is unknown or its package is not installed, there is nothing to
            convert, or two results would become the same file.
        OutputError: The output folder cannot be made.
    """
    if to not in FORMATS:
        raise UsageError(f"{to}: no such format; known are {', '.join(FORMATS)}")
    chosen = options or ConvertOptions()
    plans: deque[Conversion] = deque()
    found = find_results(arguments, exclude=out)
    for source, relative in found.items():
        plans.append(_plan(source, relative, to, chosen))
        tell("results", len(plans), len(found))
    _refuse_collisions(plans)
    with output_errors(out, "cannot be made", advice="choose another --out"):
        out.mkdir(parents=True, exist_ok=True)
    record = Record(out)
    remove_abandoned(out / piece.path for plan in plans for piece in plan.pieces)
    while plans:
        # Off the list: a result keeps what was read of it.
        yield _convert(plans.popleft(), out, record, overwrite=overwrite)


def _plan(source: Path, relative: PurePath, to: str, options: ConvertOptions) -> Conversion:
    """What a result will become. Only attributes and names are read and held: there may be many."""

    def checked() -> str:
        result.check()
        return made_from(result, to, options)

    try:
        result = open_result(source)
        pieces = FORMATS[to].pieces(result, relative, options)
        size = source.stat().st_size
    except OutputError as exc:
        return Conversion(source=source, problem=str(exc))
    return Conversion(source=source, pieces=tuple(pieces), made_from=checked, needed_bytes=size)


def _refuse_collisions(plans: Iterable[Conversion]) -> None:
    sources: dict[str, Path] = {}
    for plan in plans:
        for piece in plan.pieces:
            # Some file systems do not tell upper from lower case.
            first = sources.setdefault(str(piece.path).casefold(), plan.source)
            if first != plan.source:
                raise UsageError(
                    f"{first} and {plan.source} would both become {piece.path}; "
                    "convert them into separate folders"
                )


def _convert(plan: Conversion, out: Path, record: Record, *, overwrite: bool) -> Converted:
    if plan.problem is not None:
        return Converted(source=plan.source, problem=plan.problem)
    done: list[Path] = []
    kept: list[Path] = []
    problem = None
    try:
        for piece in plan.pieces:
            _refuse_other(piece, out / piece.path)
        digest = plan.made_from()
        if not overwrite:
            kept = [
                out / piece.path for piece in plan.pieces if _is_there(piece, digest, out, record)
            ]
        missing = [piece for piece in plan.pieces if out / piece.path not in kept]
        if missing:
            _check_space(plan, out)
        for piece in missing:
            _make(piece, out / piece.path, partial(record.announce, piece.path, digest))
            record.add(piece.path, digest)
            done.append(out / piece.path)
    except OutputError as exc:
        problem = str(exc)
    return Converted(source=plan.source, outputs=tuple(done), kept=tuple(kept), problem=problem)


def _refuse_other(piece: Piece, target: Path) -> None:
    """Refuse what stands in an output's way and no option replaces.

    Raises:
        OutputError: A folder is where a file is to be or the other way round, or a folder that no
            conversion made and may be anything.
    """
    if not piece.is_folder:
        refuse_file(target.parent)
        refuse_folder(target)
        return
    refuse_file(target)
    if target.exists() and not any((target / name).exists() for name in (".zgroup", "zarr.json")):
        raise OutputError(f"{target}: is a folder that no conversion made; move it away")


def _is_there(piece: Piece, digest: str, out: Path, record: Record) -> bool:
    """Whether an output need not be made again.

    Raises:
        OutputError: It is there, and was made from something else as far as is known.
    """
    if not (out / piece.path).exists():
        return False
    if not record.is_current(piece.path, digest):
        raise OutputError(
            f"{out / piece.path}: is there already and not known to be made from this result with "
            "these options; pass --overwrite"
        )
    record.add(piece.path, digest)
    return True


def _check_space(plan: Conversion, out: Path) -> None:
    """Refuse early: some of the libraries end the process when a disk fills up under them."""
    with output_errors(out, "cannot be read", advice="choose another --out"):
        free = shutil.disk_usage(out).free
    if free < plan.needed_bytes:
        raise OutputError(
            f"{plan.source}: {free >> 20} MiB are free in {out} and about "
            f"{-(-plan.needed_bytes >> 20)} MiB are needed; free some, or choose another --out"
        )


def _make(piece: Piece, target: Path, announce: Callable[[Path], None]) -> None:
    """Write an output, and tell of it before it gets its name."""
    advice = "nothing is left under this name"
    with output_errors(target, "cannot be written", advice=advice), _names_in_utf8(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if piece.is_folder:
            _make_folder(piece, target, announce)
        else:
            with written_aside(target) as temporary:
                piece.write(temporary)
                _sync(temporary)
                announce(temporary)
        sync_folder(target.parent)


@contextmanager
def _names_in_utf8(target: Path) -> Iterator[None]:
    """Where a name is not, some libraries cannot write it: into a file, or as one."""
    try:
        yield
    except UnicodeEncodeError as exc:
        raise OutputError(
            f"{target}: its name is not in UTF-8, which this format needs; rename the result"
        ) from exc


def _make_folder(piece: Piece, target: Path, announce: Callable[[Path], None]) -> None:
    """A folder cannot be renamed over another: the old one steps aside, and back in the end."""
    temporary, old = temporary_beside(target), temporary_beside(target)
    try:
        piece.write(temporary)
        _refuse_other(piece, target)  # again: writing may have taken long
        announce(temporary)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        remove(temporary)
        remove(old)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
