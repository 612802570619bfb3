"""The unfinished file, ``x.h5.part``: rows at fixed places, so that nothing can tear it.

HDF5 keeps its structure in memory until it is closed, so a killed process leaves a file that
cannot be opened; worse, the library aborts the process when a write fails on a full disk. A part
is therefore no HDF5 at all: a header, one state byte per row, then the rows, each at an offset
known from its number. It has its full size from the start (a sparse file where the file system
can) and comes into being by a rename. Nothing in it ever moves.

A row's state is set after its data. ``WRITTEN`` rows are safe against the death of the process;
after a crash of the machine the kernel may have kept the state and lost the data, so they count
only while the machine has not been started anew. ``DURABLE`` is set after an fsync and counts
always.
"""

import errno
import itertools
import json
import secrets
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bioptimus.inference.disk import (
    DiskFile,
    boot_id,
    sync_folder,
    temporary_beside,
)
from bioptimus.inference.layout import STORED_TYPES, differences, to_json

_MAGIC = b"bioptimus part1\n"
_LENGTH_AT = 16
_BOOT_AT = 24
_BOOT_BYTES = 64
# Not its number and its host's name: those of containers are the same again and again.
_PROCESS = secrets.token_hex(16)
_HEADER_AT = 128
_ALIGNMENT = 4096

# Ends the name of a part that has no header yet.
_BEGINNING = "0" * 8

PENDING, WRITTEN, DURABLE = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """What one row holds and for how many rows.

    Attributes:
        rows: Number of rows.
        columns: Dataset → values per row.
        dtype: ``float32`` or ``float16``, of every dataset.
        coords_crc: Checksum of the tile positions, as a guard beside the digest.
    """

    rows: int
    columns: dict[str, int]
    dtype: str
    coords_crc: int

    def row_bytes(self, name: str) -> int:
        """Bytes of one row of a dataset."""
        return self.columns[name] * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class OtherRows:
    """A part that holds rows, made with other parameters than are wanted now.

    Attributes:
        rows: How many.
        differences: Which parameters differ, in words.
    """

    rows: int
    differences: str


class PartFile:
    """Rows of an unfinished result.

    Owner: one writer in one thread. Two processes on one part write equal bytes to equal places,
    so they waste work and break nothing.

    Attributes:
        path: ``x.h5.part``.
        layout: Number and kind of the rows.
        state: State of each row, uint8 (N,).
    """

    def __init__(self, path: Path, layout: RowLayout, file: DiskFile, header_bytes: int) -> None:
        """Use :meth:`create`, :meth:`resume` or :meth:`look_at`."""
        self.path = path
        self.layout = layout
        self._file = file
        self._state_at = _aligned(_HEADER_AT + header_bytes)
        self._data_at = _offsets(layout, self._state_at)
        self.state: npt.NDArray[np.uint8] = np.zeros(layout.rows, np.uint8)
        self._boot = b""

    @classmethod
    def create(
        cls, path: Path, layout: RowLayout, *, digest: str, parameters: Mapping[str, Any]
    ) -> Self:
        """Make an empty part, in place of any that is there.

        Raises:
            OSError: The file system refuses.
        """
        header = to_json(
            {"digest": digest, "parameters": parameters, "layout": vars(layout)}
        ).encode()
        # Always of one name: what a killed process left of it goes, and no folder of 100,000
        # results has to be looked through for it.
        temporary = temporary_beside(path.with_suffix(""), token=_BEGINNING)
        temporary.unlink(missing_ok=True)
        file = DiskFile(temporary, create=True)
        try:
            part = cls(path, layout, file, len(header))
            file.write(_MAGIC + len(header).to_bytes(8, "little") + _boot_id(), 0)
            file.write(header, _HEADER_AT)
            file.truncate(part._size())
            file.sync()
            temporary.rename(path)
            file.path = path
            sync_folder(path.parent)
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        return part

    @classmethod
    def look_at(
        cls, path: Path, layout: RowLayout, *, digest: str, parameters: Mapping[str, Any]
    ) -> Self | OtherRows | str | None:
        """Open the part that a stopped run left, changing nothing.

        Returns:
            The part, its ``state`` being what :meth:`resume` would go on from; None where there
            is none; what it holds where that was made with other parameters; a reason why it
            cannot be continued by anybody.

        Raises:
            OSError: It is there and the file system does not let us open it.
        """
        try:
            file = DiskFile(path)
        except FileNotFoundError:
            return None
        try:
            found = _read_header(file)
            reason = _why_not(found, layout, digest=digest, parameters=parameters)
            if reason is None:
                part = cls(path, layout, file, found["header_bytes"])
                if file.size() != part._size():
                    reason = "its size is not what its header says"
            if reason is not None:
                other = _other_rows(file, found, parameters)
                file.close()
                return other or reason
            part._read_state(boot=found["boot"])
        except BaseException:
            file.close()
            raise
        return part

    @classmethod
    def resume(
        cls, path: Path, layout: RowLayout, *, digest: str, parameters: Mapping[str, Any]
    ) -> Self | OtherRows | str | None:
        """Open the part that a stopped run left, to go on writing it.

        Returns:
            As :meth:`look_at`.

        Raises:
            OSError: It is there and the file system does not let us open or write it.
        """
        part = cls.look_at(path, layout, digest=digest, parameters=parameters)
        if isinstance(part, cls):
            try:
                part._vouch()
            except BaseException:
                part.close()
                raise
        return part

    def write_rows(
        self, rows: npt.NDArray[np.int64], values: Mapping[str, npt.NDArray[np.floating[Any]]]
    ) -> None:
        """Write rows (ascending, no repeats), data first, then their states."""
        for name, block in values.items():
            width = self.layout.row_bytes(name)
            view = np.ascontiguousarray(block).data.cast("B")
            for start, stop in _runs(rows):
                self._file.write(
                    view[start * width : stop * width],
                    self._data_at[name] + int(rows[start]) * width,
                )
        self.state[rows] = WRITTEN
        self._write_state(int(rows[0]), int(rows[-1]) + 1)

    def read_rows(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.floating[Any]]:
        """Rows (ascending) of a dataset, (n, columns)."""
        width = self.layout.row_bytes(name)
        pieces = []
        for start, stop in _runs(rows):
            count = (stop - start) * width
            piece = self._file.read(count, self._data_at[name] + int(rows[start]) * width)
            if len(piece) != count:
                raise OSError(errno.EIO, "the part file was cut short by somebody else")
            pieces.append(piece)
        data = np.frombuffer(b"".join(pieces), dtype=self.layout.dtype)
        return data.reshape(len(rows), self.layout.columns[name])

    @property
    def rows_done(self) -> int:
        """How many rows are there."""
        return int(np.count_nonzero(self.state != PENDING))

    def flush(self) -> None:
        """Make every row written so far survive a loss of power.

        Raises:
            OSError: It could not be done; the rows since the last flush are pending again.
        """
        (fresh,) = np.nonzero(self.state == WRITTEN)
        if not len(fresh):
            return
        first, last = int(fresh[0]), int(fresh[-1]) + 1
        try:
            self._file.sync()
        except OSError:
            self.state[fresh] = PENDING
            self._write_state(first, last)
            raise
        self.state[fresh] = DURABLE
        self._write_state(first, last)
        self._file.sync()

    def is_current(self) -> bool:
        """Whether the path still names the part that is open here."""
        return self._file.is_at(self.path)

    def close(self) -> None:
        """Close; again is allowed."""
        self._file.close()

    def _write_state(self, first: int, last: int) -> None:
        self._file.write(self.state[first:last].tobytes(), self._state_at + first)

    def _read_state(self, *, boot: bytes) -> None:
        """Read which rows are done: of an earlier start of the machine, those on the disk."""
        self.state = _read_state(self._file, self.layout.rows, self._state_at, boot=boot)
        self._boot = boot

    def _vouch(self) -> None:
        """Have what is written from now on count while the machine runs."""
        now = _boot_id()
        if self._boot != now:
            if self.layout.rows:
                self._write_state(0, self.layout.rows)
            # The order matters: first no untrusted row is left, then the new boot may vouch.
            self._file.sync()
            self._file.write(now, _BOOT_AT)
            self._file.sync()

    def _size(self) -> int:
        ends = [
            self._data_at[name] + self.layout.rows * self.layout.row_bytes(name)
            for name in self.layout.columns
        ]
        return max([self._state_at + self.layout.rows, *ends])


def rows_of_others(path: Path, parameters: Mapping[str, Any]) -> OtherRows | None:
    """What a part holds that was made with other parameters; None where that is nothing.

    Raises:
        OSError: It is there and the file system does not let us open it.
    """
    try:
        file = DiskFile(path)
    except FileNotFoundError:
        return None
    try:
        return _other_rows(file, _read_header(file), parameters)
    finally:
        file.close()


def coords_crc(coords: npt.NDArray[np.int64]) -> int:
    """Checksum of tile positions."""
    return zlib.crc32(np.ascontiguousarray(coords).tobytes())


def _runs(rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches of consecutive row numbers, as (start, stop) positions in ``rows``."""
    if not len(rows):
        return
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    yield from itertools.pairwise(cuts)


def _offsets(layout: RowLayout, state_at: int) -> dict[str, int]:
    offsets = {}
    at = state_at + layout.rows
    for name in layout.columns:
        at = _aligned(at)
        offsets[name] = at
        at += layout.rows * layout.row_bytes(name)
    return offsets


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _read_header(file: DiskFile) -> dict[str, Any]:
    """The header as written, or an empty dict when it is none of ours."""
    start = file.read(_HEADER_AT, 0)
    if len(start) < _HEADER_AT or not start.startswith(_MAGIC):
        return {}
    length = int.from_bytes(start[_LENGTH_AT:_BOOT_AT], "little")
    if length > file.size():
        return {}
    try:
        header = json.loads(file.read(length, _HEADER_AT))
    except (ValueError, RecursionError):
        return {}
    if not _is_header(header, most_rows=file.size()):
        return {}
    boot = start[_BOOT_AT : _BOOT_AT + _BOOT_BYTES]
    return {**header, "header_bytes": length, "boot": boot}


def _is_header(header: Any, *, most_rows: int) -> bool:
    """Whether a header holds all that :meth:`PartFile.create` writes, each of its kind."""
    if not isinstance(header, dict):
        return False
    layout = header.get("layout")
    return (
        isinstance(header.get("digest"), str)
        and isinstance(header.get("parameters"), dict)
        and isinstance(layout, dict)
        and _is_count(layout.get("rows"))
        and layout["rows"] <= most_rows  # each has a byte for its state
        and isinstance(layout.get("columns"), dict)
        and all(map(_is_count, layout["columns"].values()))
        and layout.get("dtype") in STORED_TYPES
        and _is_count(layout.get("coords_crc"))
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _why_not(
    found: Mapping[str, Any], layout: RowLayout, *, digest: str, parameters: Mapping[str, Any]
) -> str | None:
    """Why a part with this header cannot be continued; None if it can."""
    if not found:
        return "it is not a readable part"
    if found["digest"] != digest:
        words = differences(found["parameters"], parameters)
        return words or "its digest is another"
    if found["layout"]["coords_crc"] != layout.coords_crc:
        return "its tiles lie elsewhere"
    return differences(found["layout"], vars(layout)) or None


def _other_rows(
    file: DiskFile, found: Mapping[str, Any], parameters: Mapping[str, Any]
) -> OtherRows | None:
    """What a part holds that was made with other parameters; None where that is nothing."""
    words = differences(found["parameters"], parameters) if found else ""
    if not words:
        return None
    rows = found["layout"]["rows"]
    state_at = _aligned(_HEADER_AT + found["header_bytes"])
    state = _read_state(file, rows, state_at, boot=found["boot"])
    done = int(np.count_nonzero(state != PENDING))
    return OtherRows(rows=done, differences=words) if done else None


def _read_state(file: DiskFile, rows: int, state_at: int, *, boot: bytes) -> npt.NDArray[np.uint8]:
    """The state of each row, those of an earlier start of the machine as far as they are safe."""
    state = np.frombuffer(file.read(rows, state_at), np.uint8).copy()
    if boot != _boot_id():
        state[state == WRITTEN] = PENDING
    return state


def _boot_id() -> bytes:
    """Which start of which machine this is, padded to ``_BOOT_BYTES``.

    Where the system does not say, each process counts as a start of its own, so only durable rows
    are resumed there.
    """
    return (boot_id() or _PROCESS).encode()[:_BOOT_BYTES].ljust(_BOOT_BYTES, b"\0")
