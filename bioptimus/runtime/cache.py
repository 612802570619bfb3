"""The user's cache folder: what can be made again, such as the built-in and compiled models."""

import contextlib
import fcntl
import functools
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bioptimus.errors import CheckpointError

log = logging.getLogger(__name__)

# What grows with every model and every version of torch. The rest is small.
PRUNED_KINDS = ("compiled", "unpacked", "checksums")
DEFAULT_LIMIT_GB = 20.0
_DAY_S = 86_400
OLDEST_DAYS = 90
"""What nobody used for so long goes, whatever the size."""
KEPT_DAYS = 7
"""What somebody used within these stays, whatever the size: where file locks do not work, another
machine may be using it, and jobs of more than a week are rare."""
MOVE_IT = "set BIOPTIMUS_CACHE to a folder with room that you can write"
"""The next step where something cannot be put into the cache."""
_MARKER = ".used"
# How long to wait for another process that removes an entry; it renames one and unlinks another.
_PATIENCE_S = 2.0
_held: dict[Path, int] = {}
"""Entry → descriptor of its marker, locked for as long as this process lives."""


def cache_folder(kind: str) -> Path:
    """A folder of the cache, made if need be.

    ``$BIOPTIMUS_CACHE``, else ``bioptimus`` below ``$XDG_CACHE_HOME`` or ``~/.cache``. Where
    that cannot be written (a cluster node with a read-only home), a folder of this user below
    the temporary one.

    Args:
        kind: Name of the folder inside the cache.

    Raises:
        CheckpointError: Neither place can be written, or the temporary one is not this user's.
    """
    wanted = _wanted_root() / kind
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted
        reason = "not writable"
    except OSError as exc:
        reason = exc.strerror or str(exc)
    try:
        own = Path(tempfile.gettempdir()) / f"bioptimus-{os.getuid()}"
        _tell_of_another(wanted.parent, own, reason)
        own.mkdir(mode=0o700, exist_ok=True)
        status = own.lstat()
        # What lies here is loaded as code: nobody else may be able to put it there.
        if status.st_uid != os.getuid() or status.st_mode & 0o022 or own.is_symlink():
            raise CheckpointError(f"{own}: others can write there; {MOVE_IT}")
        (own / kind).mkdir(exist_ok=True)
    except OSError as exc:
        raise CheckpointError(f"cannot make a cache folder: {exc.strerror}; {MOVE_IT}") from exc
    return own / kind


@functools.cache  # a run asks for the cache for each slide
def _tell_of_another(wanted: Path, own: Path, reason: str) -> None:
    log.warning("cache folder %s: %s; using %s (set BIOPTIMUS_CACHE)", wanted, reason, own)


def _wanted_root() -> Path:
    if chosen := os.environ.get("BIOPTIMUS_CACHE"):
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path there is to be ignored.
    if base and os.path.isabs(base):
        return Path(base) / "bioptimus"
    home = os.path.expanduser("~")
    # Not told for the user of a container that is only a number: what Docker takes then.
    return Path("/" if home == "~" else home) / ".cache" / "bioptimus"


@contextlib.contextmanager
def cache_errors(doing: str) -> Iterator[None]:
    """Say of an error of the operating system how to get along without this place.

    Args:
        doing: What cannot be done, and with which file.

    Raises:
        CheckpointError: In place of any ``OSError``.
    """
    try:
        yield
    except OSError as exc:
        raise CheckpointError(f"{doing}: {exc.strerror or exc}; {MOVE_IT}") from exc


def beside(path: Path) -> Path:
    """A name in the same folder that no other process or thread uses, for write-then-rename."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


def hold(entry: Path) -> None:
    """Say that this process uses an entry of the cache, from now until it ends.

    Look afterwards whether the entry is there: what is there then stays. The marker beside it tells
    when it was last used, and the lock on the marker that it is being used. Where no marker can be
    written, nothing can be pruned either.
    """
    marker = entry.with_name(entry.name + _MARKER)
    try:
        if entry not in _held:
            _held[entry] = _locked(marker)
        os.utime(_held[entry])
    except OSError as exc:
        log.debug("%s: cannot be marked as used: %s", marker, exc)


def _locked(marker: Path) -> int:
    """A descriptor of the marker, locked; without a lock where that cannot be had."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = _open_marker(marker)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_at(descriptor, marker):
                return descriptor
        except BlockingIOError as exc:
            # Somebody removes the entry just now, and this marker with it.
            if time.monotonic() > until:
                log.debug("%s: locked by another process: %s", marker, exc)
                return descriptor
            time.sleep(0.01)
        except OSError as exc:
            log.debug("%s: cannot be locked: %s", marker, exc)
            return descriptor
        os.close(descriptor)


def _open_marker(marker: Path) -> int:
    return os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def limit_bytes() -> float:
    """What the cache is pruned to: ``$BIOPTIMUS_CACHE_GB``, 20 GB if not set."""
    text = os.environ.get("BIOPTIMUS_CACHE_GB", "")
    try:
        limit = float(text or DEFAULT_LIMIT_GB)
    except ValueError:
        limit = -1
    if not limit >= 0:
        log.warning("BIOPTIMUS_CACHE_GB=%s: no size in GB; using %g", text, DEFAULT_LIMIT_GB)
        limit = DEFAULT_LIMIT_GB
    return limit * 1e9


@dataclass(frozen=True, kw_only=True)
class _Entry:
    path: Path
    used: float
    size_bytes: int

    @property
    def idle_days(self) -> float:
        return (time.time() - self.used) / _DAY_S


def prune() -> list[Path]:
    """Remove from the cache what was not used for long, the least recently used first.

    Gone afterwards is what nobody used for 90 days; and, where the cache is larger than
    :func:`limit_bytes`, as much as needed of what nobody used for 7 days. Never what a process
    holds. Call it when something was added, which is when the cache grows.

    Returns:
        What was removed.
    """
    entries = sorted(_entries(), key=lambda entry: entry.used)
    excess = sum(entry.size_bytes for entry in entries) - limit_bytes()
    removed = []
    for entry in entries:
        too_old = entry.idle_days > OLDEST_DAYS
        if (too_old or (excess > 0 and entry.idle_days > KEPT_DAYS)) and _remove(entry):
            removed.append(entry.path)
            excess -= entry.size_bytes
    if removed:
        log.info("cache: removed %d entries that were not used for long", len(removed))
    return removed


def size_by_kind() -> dict[str, int]:
    """Kind → bytes of the cache, as it is on disk; without folders that cannot be read."""
    root = cache_folder("compiled").parent
    return {folder.name: _size(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}


def _entries() -> list[_Entry]:
    found = []
    for kind in PRUNED_KINDS:
        names = sorted(os.listdir(cache_folder(kind)))
        for path in (cache_folder(kind) / name for name in names if not name.endswith(_MARKER)):
            with contextlib.suppress(OSError):  # removed by another process meanwhile
                found.append(_Entry(path=path, used=_last_used(path), size_bytes=_size(path)))
    return found


def _last_used(path: Path) -> float:
    marker = path.with_name(path.name + _MARKER)
    return (marker if marker.exists() else path).stat().st_mtime


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    total = 0
    for inner in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += inner.lstat().st_size if not inner.is_dir() else 0
    return total


def _remove(entry: _Entry) -> bool:
    """Remove an entry unless a process holds it; under another name first, so never by halves."""
    path = entry.path
    marker = path.with_name(path.name + _MARKER)
    aside = beside(path)
    try:
        # Looking through a large cache takes its time: jobs may have come and gone since.
        if _last_used(path) != entry.used:
            return False
        descriptor = _open_marker(marker)
        try:
            if _is_locked(descriptor) or not _is_at(descriptor, marker):
                return False
            # Both under the lock: who waits for it sees that this marker counts no more.
            path.rename(aside)
            marker.unlink()
        finally:
            os.close(descriptor)
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
    except OSError as exc:
        log.debug("%s: cannot be removed: %s", path, exc)
        return False
    return True


def _is_locked(descriptor: int) -> bool:
    """Lock it for this process; whether another's lock forbids that."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as exc:
        log.debug("no file locks here (%s); what counts is when it was last used", exc)
    return False
