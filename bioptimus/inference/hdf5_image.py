"""A finished HDF5 file, made without letting HDF5 touch the disk.

When a write fails, say on a full disk, the HDF5 library cannot close its file any more and later
aborts the process: every other slide of the night would die with this one. So the library writes
its structure to memory, with the space for the rows set aside but not filled; structure and rows
are then put on disk by our own code, whose errors are ordinary.
"""

import io
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import imagecodecs
import numpy as np
import numpy.typing as npt

from bioptimus.errors import BioptimusError, OutputError
from bioptimus.inference.checksums import checksum
from bioptimus.inference.disk import DiskFile, sync_folder, temporary_beside
from bioptimus.inference.guard import why_deadly
from bioptimus.inference.layout import CHECKSUM, HEAP_CHECKSUMS, AttributeValue, to_json

_PAGE_BYTES = 1 << 16
CHUNK_BYTES = 1 << 20
# Harder levels cost twice the time and win 3 %; bytes gain nothing from shuffling.
_GZIP_LEVEL = 1
# Since HDF5 1.8 (2008) the structure has checksums of its own, which the library looks at as it
# reads. In files as of old, which h5py writes unless told, one changed bit can crash it.
_FORMAT_OF = ("v108", "v108")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# A global heap, where texts of any length lie, and its version. It has no checksum, and the library
# does not survive all damage there, as it does that of an index of chunks.
_HEAP_SIGNATURE = b"GCOL\1\0\0\0"
_LARGEST_OFFSET = (1 << 63) - 1

FAILED_TILES_DTYPE = np.dtype(
    [
        ("x", "<i8"),
        ("y", "<i8"),
        ("stage", h5py.string_dtype()),
        ("reason", h5py.string_dtype()),
    ]
)


# What h5py makes of damage depends on where in the file it is; sizes may be any.
DAMAGE_ERRORS = (OSError, RuntimeError, KeyError, TypeError, ValueError, MemoryError)

CHECK_DISK = "check its permissions and the mount"

# Files, as :func:`_mark` tells them, and why not to read them: one is opened many times.
_looked_at: dict[tuple[int, ...], str | None] = {}


@contextmanager
def damage_told(
    path: Path,
    *,
    advice: str = "it is damaged or not a result file; move it away and make it again",
) -> Iterator[None]:
    """Turn what is raised over a file that cannot be read into our error.

    Raises:
        OutputError: In place of any of :data:`DAMAGE_ERRORS`.
    """
    try:
        yield
    except BioptimusError:
        raise
    except DAMAGE_ERRORS as exc:
        # HDF5 tells of a failed read in several lines, and of damage without a number.
        words = str(exc)
        if isinstance(exc, KeyError):
            words = " ".join(map(str, exc.args))  # by itself it puts that in quotes
        elif isinstance(exc, OSError) and exc.errno is not None:
            words, advice = str(exc.strerror), CHECK_DISK
        words = " ".join(words.split()) or type(exc).__name__
        raise OutputError(f"{path}: cannot be read: {words}; {advice}") from exc


def open_to_read(path: Path) -> h5py.File:
    """Open a finished file without locks, which some network file systems do not have.

    HDF5 insists that all handles on one file of one process agree about locks: where a notebook
    holds it open with h5py's own setting, that is taken.

    A file whose structure is not known to be as it was written, being damaged, edited or another
    program's, is read by another process first: it may crash the library, or send it in circles.

    Raises:
        OSError: As h5py raises it.
        OutputError: Reading the file ends the process that does.
    """
    mark = _mark(path)
    if mark not in _looked_at:
        with path.open("rb") as raw, ExitStack() as opened:
            # What is no HDF5 file at all is no danger, and h5py says so.
            if _has_checksums(raw) or not h5py.is_hdf5(path):
                file = opened.enter_context(_open(path))
                if _has_own_heaps(file, raw):
                    _looked_at[mark] = None
                    opened.pop_all()
                    return file
        _looked_at[mark] = why_deadly(path)
    if (why := _looked_at[mark]) is not None:
        raise OutputError(f"{path}: {why}")
    return _open(path)


def _open(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as exc:
        if "locking flag values don't match" not in str(exc):
            raise
        return h5py.File(path, "r")


def _mark(path: Path) -> tuple[int, ...]:
    """Tells a file from others, and from itself before it was changed."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _has_checksums(raw: BinaryIO) -> bool:
    """Whether the structure is that of HDF5 1.8 or later, from the root on."""
    start = raw.read(48)
    if not start.startswith(_SIGNATURE) or start[8] < 2 or start[9] != 8:
        return False
    # After base, extension and end of the file, all of eight bytes.
    raw.seek(int.from_bytes(start[36:44], "little") & _LARGEST_OFFSET)
    return raw.read(4) == b"OHDR"


def texts_changed(path: Path) -> bool:
    """Whether a file of ours holds other texts than were written; false where it does not tell.

    Raises:
        OSError: As h5py raises it.
    """
    with open_to_read(path) as file, path.open("rb") as raw:
        return HEAP_CHECKSUMS in file.attrs and not _has_own_heaps(file, raw)


def _has_own_heaps(file: h5py.File, raw: BinaryIO) -> bool:
    """Whether the texts of a file with checksums lie as they were written."""
    if HEAP_CHECKSUMS not in file.attrs:
        return False
    for offset, length, crc32 in file.attrs[HEAP_CHECKSUMS].tolist():
        raw.seek(offset)
        if zlib.crc32(raw.read(length)) != crc32:
            return False
    return True


class _MemoryFile(io.RawIOBase):
    """A file-like object for h5py that keeps only the pages that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[int, bytearray] = {}
        self.end = 0
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.end}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self.end = self._at if size is None else size
        return self.end

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            page, start = divmod(self._at, _PAGE_BYTES)
            count = min(_PAGE_BYTES - start, len(view) - done)
            bytes_ = self.pages.setdefault(page, bytearray(_PAGE_BYTES))
            bytes_[start : start + count] = view[done : done + count]
            done += count
            self._at += count
        self.end = max(self.end, self._at)
        return done

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.end - self._at))
        done = 0
        while done < wanted:
            page, start = divmod(self._at, _PAGE_BYTES)
            count = min(_PAGE_BYTES - start, wanted - done)
            found = self.pages.get(page, bytes(_PAGE_BYTES))
            view[done : done + count] = found[start : start + count]
            done += count
            self._at += count
        return done

    def at(self, offset: int, count: int) -> bytes:
        """Some of the bytes."""
        self.seek(offset)
        return self.read(count) or b""

    def find(self, words: bytes) -> Iterator[int]:
        """Where some bytes lie, ascending."""
        before, end = b"", -1
        for page in sorted(self.pages):
            # They may begin on the page before.
            text = (before if page == end else b"") + self.pages[page]
            start = (page + 1) * _PAGE_BYTES - len(text)
            yield from (start + match.start() for match in re.finditer(re.escape(words), text))
            before, end = text[1 - len(words) :], page + 1


@dataclass(frozen=True)
class _Chunk:
    """Rows [first, last) of a dataset lie at ``offset``, in bytes."""

    dataset: str
    first: int
    last: int
    offset: int


RowSource = Callable[[str, int, int], npt.NDArray[Any]]
"""(dataset, first, last) → those rows."""


class HDF5Image:
    """An HDF5 file in the making: structure in memory, room for rows.

    Use as a context manager; call :meth:`save` after the ``with`` block.
    """

    def __init__(self, *, checksums: bool = False) -> None:
        """Start an empty file.

        Args:
            checksums: Give each dataset that is added with its values their checksum.
        """
        self._checksums = checksums
        self._memory = _MemoryFile()
        self._chunks: list[_Chunk] = []

    def __enter__(self) -> "HDF5Image":
        self.file = h5py.File(self._memory, "w", libver=_FORMAT_OF)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        with self.file:
            if self._checksums and exc_type is None:
                self._add_heap_checksums()

    def add_rows(self, name: str, *, shape: tuple[int, ...], dtype: str) -> None:
        """Set room aside for rows that :meth:`write_to` will ask for, after those added before."""
        rows, *columns = shape
        width = math.prod(columns) * np.dtype(dtype).itemsize
        per_chunk = max(1, min(rows, CHUNK_BYTES // width))
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        if rows:
            creation.set_chunk((per_chunk, *columns))
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        dataset = h5py.h5d.create(
            self.file.id,
            name.encode(),
            h5py.h5t.py_create(np.dtype(dtype)),
            h5py.h5s.create_simple(shape),
            creation,
        )
        for first in range(0, rows, per_chunk):
            info = dataset.get_chunk_info_by_coord((first, *(0 for _ in columns)))
            last = min(first + per_chunk, rows)
            self._chunks.append(_Chunk(name, first, last, info.byte_offset))

    def add_array(self, name: str, values: npt.NDArray[Any]) -> None:
        """A small dataset with its values."""
        chunks = (_rows_per_chunk(values), *values.shape[1:]) if values.size else None
        dataset = self.file.create_dataset(name, data=values, chunks=chunks)
        self._add_checksum(dataset, values)

    def add_packed(self, name: str, packed: "PackedArray") -> None:
        """A dataset whose values were compressed before."""
        values = packed.values
        rows = _rows_per_chunk(values)
        dataset = self.file.create_dataset(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(rows, *values.shape[1:]),
            compression="gzip",
            compression_opts=_GZIP_LEVEL,
        )
        for number, chunk in enumerate(packed.chunks):
            dataset.id.write_direct_chunk((number * rows, *[0] * (values.ndim - 1)), chunk)
        self._add_checksum(dataset, values)

    def add_names(self, name: str, values: Sequence[str]) -> None:
        """A dataset of UTF-8 strings."""
        words = np.array(values, object)
        dataset = self.file.create_dataset(name, data=words, dtype=h5py.string_dtype())
        self._add_checksum(dataset, words)

    def set_attributes(
        self, values: Mapping[str, AttributeValue], *, dataset: str | None = None
    ) -> None:
        """Set attributes of the root or of a dataset; mappings as JSON text, None left out."""
        target = self.file if dataset is None else self.file[dataset]
        for key, value in values.items():
            if value is not None:
                target.attrs[key] = _attribute(value)

    def save(self, path: Path, rows: RowSource) -> None:
        """Make the file appear under its name, whole and safe from a loss of power.

        Args:
            path: The name; a file that is there is replaced.
            rows: See :meth:`write_to`.

        Raises:
            OSError: The file system refuses; nothing is left under the name or beside it.
        """
        temporary = temporary_beside(path)
        try:
            with DiskFile(temporary, create=True) as disk:
                self.write_to(disk, rows)
                disk.sync()
            temporary.rename(path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def write_to(self, disk: DiskFile, rows: RowSource) -> None:
        """Put the file on disk, its signature last: until then it is no HDF5 file.

        Args:
            disk: An empty file.
            rows: Gives the rows that :meth:`add_rows` made room for.

        Raises:
            OSError: The file system refuses.
        """
        # Structure before rows: a page may reach into the room that is the rows'.
        for page, content in self._memory.pages.items():
            start = page * _PAGE_BYTES
            skip = len(_SIGNATURE) if page == 0 else 0
            length = min(_PAGE_BYTES, self._memory.end - start)
            if length > 0:
                disk.write(memoryview(content)[skip:length], start + skip)
        for chunk in self._chunks:
            block = np.ascontiguousarray(rows(chunk.dataset, chunk.first, chunk.last))
            disk.write(block.data.cast("B"), chunk.offset)
        disk.truncate(self._memory.end)
        disk.write(_SIGNATURE, 0)

    def _add_heap_checksums(self) -> None:
        """Say where the heaps lie and what is in them; numbers lie in none."""
        self.file.flush()
        heaps = []
        for offset in self._memory.find(_HEAP_SIGNATURE):
            length = int.from_bytes(self._memory.at(offset + 8, 8), "little")
            heaps.append((offset, length, zlib.crc32(self._memory.at(offset, length))))
        self.file.attrs[HEAP_CHECKSUMS] = np.array(heaps, np.int64).reshape(-1, 3)

    def _add_checksum(self, dataset: h5py.Dataset, values: npt.NDArray[Any]) -> None:
        if self._checksums:
            dataset.attrs[CHECKSUM] = checksum(values)


@dataclass(frozen=True)
class PackedArray:
    """Values and their compressed chunks; made by :func:`pack`."""

    values: npt.NDArray[Any]
    chunks: tuple[bytes, ...]


def pack(values: npt.NDArray[Any]) -> PackedArray:
    """Compress values for :meth:`HDF5Image.add_packed`, here or on another thread.

    Args:
        values: A picture, say; not without values.
    """
    rows = _rows_per_chunk(values)
    chunks = []
    for first in range(0, len(values), rows):
        part = values[first : first + rows]
        if len(part) < rows:  # the last one is stored whole as well
            part = np.concatenate(
                [part, np.zeros((rows - len(part), *values.shape[1:]), part.dtype)]
            )
        # Three times as fast as HDF5's own zlib, and the same format.
        packed = imagecodecs.deflate_encode(part.tobytes(), level=_GZIP_LEVEL, raw=False)
        chunks.append(bytes(packed))
    return PackedArray(values, tuple(chunks))


def values_of(dataset: h5py.Dataset) -> npt.NDArray[Any]:
    """All of a dataset; a picture in a third of the time that HDF5's own zlib takes to unpack it.

    Raises:
        Exception: One of :data:`DAMAGE_ERRORS`.
    """
    values: npt.NDArray[Any]
    rows, *sides = dataset.chunks or (0,)
    # As :meth:`HDF5Image.add_packed` writes it: numbers in bands of rows, and no filter but one.
    if (
        dataset.compression == "gzip"
        and dataset.id.get_create_plist().get_nfilters() == 1
        and (*sides,) == dataset.shape[1:]
        and not dataset.dtype.hasobject
    ):
        values = np.empty((-(-len(dataset) // rows) * rows, *sides), dataset.dtype)
        for first in range(0, len(dataset), rows):
            _unpack(dataset, first, values[first : first + rows])
        return values[: len(dataset)]
    values = dataset[()]
    return values


def _unpack(dataset: h5py.Dataset, first: int, band: npt.NDArray[Any]) -> None:
    """Read the chunk that begins with a row."""
    unfiltered, packed = dataset.id.read_direct_chunk((first, *[0] * (band.ndim - 1)))
    room = band.data.cast("B")
    found = packed if unfiltered else imagecodecs.deflate_decode(packed, raw=False, out=room)
    if len(found) != len(room):
        raise ValueError(f"{dataset.name}: {len(found)} bytes of {len(room)}")
    if unfiltered:
        room[:] = found


def _rows_per_chunk(values: npt.NDArray[Any]) -> int:
    return min(len(values), max(1, CHUNK_BYTES // max(1, values[:1].nbytes)))


def _attribute(value: Any) -> Any:
    if isinstance(value, Mapping):
        return to_json(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence):
        if all(isinstance(item, str) for item in value):
            return np.array([str(item) for item in value], dtype=h5py.string_dtype())
        return np.array(value)
    return value
