"""Lists of slides: CSV as people, spreadsheets and our own runs write it, and plain lines."""

import csv
import difflib
import io
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bioptimus.errors import UsageError
from bioptimus.io.resolution import PLAUSIBLE_MPP, is_plausible

if TYPE_CHECKING:
    from bioptimus.batch.inputs import SlideInput

LIST_EXTENSION = ".csv"
# How lists that are written here hold names that are no UTF-8; such slides fail by themselves.
ODD_BYTES = "surrogatepass"

# Columns of a CSV list that mean something here; all others are carried into the report.
SLIDE_COLUMN = "slide"
KNOWN_COLUMNS = (SLIDE_COLUMN, "mpp", "mask", "bulk_rna", "relative_path", "size_bytes")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a list says about its slide; of a slide given directly, nothing.

    Attributes:
        mpp: µm per pixel at level 0.
        mask: Tissue mask.
        bulk_rna: Bulk RNA table.
        relative: Where the result goes.
        size_bytes: Size of the slide.
        extra: Further columns.
    """

    mpp: float | None = None
    mask: Path | None = None
    bulk_rna: Path | None = None
    relative: PurePath | None = None
    size_bytes: int | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


# What may stand above the column names of a CSV: remarks, and what tells Excel the delimiter.
_NO_HEADER = ("#", "sep=")


def read_list(path: Path) -> str:
    """The text of a list.

    Raises:
        UsageError: It cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig", errors=ODD_BYTES)
    except OSError as exc:
        raise UsageError(f"{path}: this list cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path}: this list is not UTF-8 text; save it as UTF-8 CSV") from exc


def parse_list(name: str, text: str, folder: Path, notes: list[str]) -> Iterator[tuple[str, Row]]:
    """Yield each slide as written and its row, from a CSV or from plain lines of paths.

    Args:
        name: What messages call the list.
        text: Its text.
        folder: What its paths of masks and tables are relative to.
        notes: Takes what the user should know, one sentence each.

    Raises:
        UsageError: A row makes no sense, or a CSV has no column of slides.
    """
    # Not by splitlines(), which also cuts at what a name may hold.
    lines = [line.strip() for line in text.split("\n")]
    header = next((line for line in lines if line and not line.startswith(_NO_HEADER)), "")
    # Spreadsheets write semicolons where the comma is the decimal sign.
    delimiter = max(",;\t", key=header.count)
    columns = [cell.strip().lower() for cell in _cells(header, delimiter)]
    if SLIDE_COLUMN not in columns:
        if name.lower().endswith(LIST_EXTENSION):
            if not header:
                raise UsageError(f"{name}: no slides in this list")
            raise UsageError(
                f"{name}: no column {SLIDE_COLUMN!r} in its first line; found: {', '.join(columns)}"
            )
        if text.endswith("\0"):  # as from find -print0, which ends names as they are
            yield from ((path, Row()) for path in text.split("\0") if path)
        else:
            yield from ((line, Row()) for line in lines if line and not line.startswith("#"))
        return
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        raise UsageError(f"{name}: column {twice[0]!r} is there twice")
    notes.extend(_near_misses(name, columns))
    past_header = False
    for number, cells in _rows(name, text, delimiter):
        if not any(cell.strip() for cell in cells):
            continue
        if not past_header:
            # Remarks may stand above it; below it, a slide may have such a name.
            past_header = not cells[0].lstrip().startswith(_NO_HEADER)
            continue
        where = f"{name}, line {number}"
        if len(cells) > len(columns):
            raise UsageError(f"{where}: {len(cells)} cells for {len(columns)} columns")
        values = {c: v.strip() for c, v in zip(columns, cells, strict=False) if v.strip()}
        slide = values.pop(SLIDE_COLUMN, "")
        if not slide:
            raise UsageError(f"{where}: no slide")
        if "mpp" in values and delimiter != ",":
            values["mpp"] = values["mpp"].replace(",", ".")
        yield os.path.expanduser(slide), _parse_row(where, values, folder)


def _near_misses(name: str, columns: Sequence[str]) -> Iterator[str]:
    """Tell of columns that mean nothing here, and are called almost as one that does."""
    # Not of the slide's: "slide_id" is a column that people have.
    missing = [known for known in KNOWN_COLUMNS if known not in columns]
    for column in columns:
        near = difflib.get_close_matches(column, missing, n=1, cutoff=0.8)
        if near and column not in KNOWN_COLUMNS:
            yield (
                f"{name}: the column {column!r} is only carried into the report; is {near[0]!r} "
                "meant?"
            )


def _rows(name: str, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row's last line, and its cells."""
    # Strict, or a quote that is not closed would make one name of all that follows.
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    before = 0
    try:
        for cells in reader:
            before = reader.line_num
            yield before, cells
    except csv.Error as exc:
        raise UsageError(f"{name}, line {before + 1}: {exc}; is a quote not closed?") from exc


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []  # too long for a cell, and for any line of column names


def _parse_row(where: str, values: dict[str, str], folder: Path) -> Row:
    def path(column: str) -> Path | None:
        value = values.pop(column, None)
        return folder / os.path.expanduser(value) if value else None

    mpp = values.pop("mpp", None)
    size = values.pop("size_bytes", None)
    relative = PurePath(values.pop("relative_path", ""))
    if relative.is_absolute() or ".." in relative.parts:
        raise UsageError(f"{where}: relative_path {relative} leaves the output folder")
    if size is not None and not size.isdecimal():
        raise UsageError(f"{where}: size_bytes {size!r} is not a number of bytes")
    return Row(
        mpp=None if mpp is None else _parse_mpp(where, mpp),
        mask=path("mask"),
        bulk_rna=path("bulk_rna"),
        relative=relative if relative.name else None,
        size_bytes=None if size is None else int(size),
        extra=values,
    )


def _parse_mpp(where: str, text: str) -> float:
    try:
        mpp = float(text)
    except ValueError:
        mpp = math.nan
    if not is_plausible(mpp):
        least, most = PLAUSIBLE_MPP
        raise UsageError(
            f"{where}: mpp {text!r} is not a number of µm per pixel from {least:g} to {most:g}"
        )
    return mpp


def listed_relative(slide: str, folder: Path) -> PurePath:
    """Where a listed slide lies below its list's folder; its bare name if elsewhere."""
    path = PurePath(slide)
    if path.is_absolute() and path.is_relative_to(folder.absolute()):
        path = path.relative_to(folder.absolute())
    if path.is_absolute() or ".." in path.parts:
        return PurePath(path.name)
    return path


def write_list(path: Path, slides: "Iterable[SlideInput]") -> None:
    """Freeze slides as a CSV that is read back to the same slides and results.

    Paths are written absolute and sizes are looked up, so that every task of an array deals the
    slides out alike, whatever its working directory and whatever arrives meanwhile.
    """
    rows = list(slides)
    further = sorted({name for slide in rows for name in slide.extra})
    with path.open("w", encoding="utf-8", errors=ODD_BYTES, newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*KNOWN_COLUMNS, *further])
        for slide in rows:
            known = (
                slide.path.absolute(),
                slide.mpp,
                slide.mask and slide.mask.absolute(),
                slide.bulk_rna and slide.bulk_rna.absolute(),
                slide.relative.as_posix(),
                slide.size(),
            )
            writer.writerow([*known, *(slide.extra.get(name) for name in further)])
