"""Bytes on disk that may fail at any time: full, stale, gone. No HDF5 in here.

Network file systems lose a request now and then (ESTALE, EIO); such a read or write is tried a
few times more. A failed fsync is not: the kernel has then dropped the very pages it could not
write, and a second fsync would report success over them.
"""

import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

from bioptimus.errors import OutputError
from bioptimus.inference.layout import PART_SUFFIX

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ANOTHER_OUT = "mend that, or choose another --out"
"""The next step where a file cannot be written below the folder of ``--out``."""
ELSEWHERE = "mend that, or choose another place"
"""The next step where a file cannot be written, in words that fit any option."""
TRANSIENT_ERRORS = frozenset({errno.ESTALE, errno.EIO})
RETRY_DELAYS_S = (0.1, 1.0, 5.0)

_TOKEN_BYTES = 4
_ABANDONED_S = 86_400

fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has none


class DiskFile:
    """A file written and read at offsets.

    Owner: whoever opened it; one thread at a time.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open a file for reading and writing.

        Args:
            path: The file.
            create: Make it; it must not be there yet.
        """
        self.path = path
        self._fd = _open_file(path, create=create)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put bytes at an offset, all of them."""

        def put() -> None:
            view = memoryview(data).cast("B")
            at = offset
            while view:
                count = os.pwrite(self._fd, view, at)
                view = view[count:]
                at += count

        self._retry(put)

    def read(self, count: int, offset: int) -> bytes:
        """Bytes at an offset; fewer only at the end of the file."""

        def get() -> bytes:
            pieces: list[bytes] = []
            missing = count
            while missing:
                piece = os.pread(self._fd, missing, offset + count - missing)
                if not piece:
                    break
                pieces.append(piece)
                missing -= len(piece)
            return b"".join(pieces)

        return self._retry(get)

    def truncate(self, size: int) -> None:
        """Set the size; what is added reads as zeros."""
        os.ftruncate(self._fd, size)

    def size(self) -> int:
        """Size in bytes."""
        return os.fstat(self._fd).st_size

    def sync(self) -> None:
        """Return when the bytes would survive a loss of power."""
        fdatasync(self._fd)

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` still names this very file."""
        try:
            return os.path.samestat(os.fstat(self._fd), path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close; again is allowed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _retry(self, action: Callable[[], _T]) -> _T:
        return retry(action, name=self.path.name, on_stale=self._reopen)

    def _reopen(self) -> None:
        """A stale handle stays stale; only opening the path again helps."""
        fd = _open_file(self.path, create=False)
        self.close()
        self._fd = fd


def _open_file(path: Path, *, create: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
    return os.open(path, flags, 0o666)


def retry(action: Callable[[], _T], *, name: str, on_stale: Callable[[], None] | None = None) -> _T:
    """Run an action that may be run twice, again after a transient error.

    Args:
        action: What to do; raises ``OSError``.
        name: File name for the log.
        on_stale: Called after ESTALE and the wait, before the next try.

    Raises:
        OSError: The error is not transient, or came at each of the tries.
    """
    for delay in RETRY_DELAYS_S:
        try:
            return action()
        except OSError as exc:
            if exc.errno not in TRANSIENT_ERRORS:
                raise
            _log.warning("%s: %s; trying again in %g s", name, exc.strerror, delay)
            time.sleep(delay)
            if exc.errno == errno.ESTALE and on_stale is not None:
                on_stale()
    return action()


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a loss of power, where the file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as exc:
        # Some network and FUSE file systems cannot sync a folder; the rename stands anyway.
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def boot_id() -> str:
    """Which start of which machine this is; empty where the system does not say.

    What an earlier one wrote and did not sync may not be on the disk. macOS does not say, nor do
    some containers, with an empty file in its place.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def temporary_beside(path: Path, *, token: str = "") -> Path:
    """A new name beside a file: not a final one, and no other process's unless a token is given."""
    token = token or secrets.token_hex(_TOKEN_BYTES)
    return path.with_name(f"{path.name}{PART_SUFFIX}.{token}")


def temporaries_beside(path: Path) -> list[Path]:
    """Files that killed processes left of :func:`temporary_beside`."""
    names = [name for name in os.listdir(path.parent) if _beside(name) == path.name]
    return [path.parent / name for name in names if not os.path.isdir(path.parent / name)]


def _beside(name: str) -> str | None:
    """Which name a temporary one was made beside; None for any other."""
    start, _, token = name.rpartition(".")
    is_token = len(token) == 2 * _TOKEN_BYTES and set(token) <= set("0123456789abcdef")
    return start.removesuffix(PART_SUFFIX) if is_token and start.endswith(PART_SUFFIX) else None


def remove_abandoned(targets: Iterable[Path]) -> None:
    """Remove what killed processes left of :func:`temporary_beside`, files and folders.

    Only what nobody wrote to for a day: until then another process, on another machine perhaps, may
    be at work on it, and it is in nobody's way.

    Args:
        targets: Names that are about to be written.
    """
    names: dict[Path, set[str]] = {}
    for target in targets:
        names.setdefault(target.parent, set()).add(target.name)
    for folder, wanted in names.items():
        try:
            entries = os.listdir(folder) if folder.is_dir() else []
            for entry in entries:
                if _beside(entry) in wanted and _is_old(folder / entry):
                    remove(folder / entry)
        except OSError as exc:
            _log.debug("%s: what was left there is not removed: %s", folder, exc)


def _is_old(path: Path) -> bool:
    within = path.rglob("*") if path.is_dir() else ()
    newest: float = max(each.lstat().st_mtime for each in (path, *within))
    return newest < time.time() - _ABANDONED_S


def remove(path: Path) -> None:
    """Remove a file or folder; neither need be there, and no error is raised."""
    with suppress(OSError):
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A new name to write a file under; it gets its own once the block has gone well.

    Until then what was there stays. Afterwards the new name is gone, however the block ends.
    """
    temporary = temporary_beside(target)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        remove(temporary)


def is_gone(path: Path) -> bool:
    """Whether the file system says that nothing is there; any other error of its may pass."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def refuse_folder(path: Path) -> None:
    """Refuse to write a file where a folder is, before what goes into it is made.

    Raises:
        OutputError: There is one.
    """
    if os.path.isdir(path):
        raise OutputError(f"{path}: is a folder, and a file is to be written there; move it away")


def refuse_file(folder: Path) -> None:
    """Refuse to make a folder where a file is, or below one, before what goes into it is made.

    Raises:
        OutputError: There is one, or a link to nothing.
    """
    for there in (folder, *folder.parents):
        if os.path.lexists(there):
            if not os.path.isdir(there):
                what = "a file" if os.path.exists(there) else "a link to nothing"
                raise OutputError(f"{there}: is {what}, and a folder is to be there; move it away")
            return


@contextmanager
def output_errors(path: Path, doing: str, *, advice: str = ELSEWHERE) -> Iterator[None]:
    """Turn the OS's errors into ours, with its words.

    Raises:
        OutputError: In place of any ``OSError``.
    """
    try:
        yield
    except OSError as exc:
        # HDF5 tells of a failed read in several lines.
        words = " ".join((exc.strerror or str(exc)).split())
        raise OutputError(f"{path}: {doing}: {words}; {advice}") from exc
