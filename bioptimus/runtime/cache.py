"""The user's cache folder: what can be made again, such as the built-in and compiled models."""

import logging
import os
import secrets
import tempfile
from pathlib import Path

from bioptimus.errors import CheckpointError

log = logging.getLogger(__name__)


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
    own = Path(tempfile.gettempdir()) / f"bioptimus-{os.getuid()}"
    log.warning("cache folder %s: %s; using %s (set BIOPTIMUS_CACHE)", wanted, reason, own)
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        status = own.lstat()
        # What lies here is loaded as code: nobody else may be able to put it there.
        if status.st_uid != os.getuid() or status.st_mode & 0o022 or own.is_symlink():
            raise CheckpointError(f"{own}: others can write there; set BIOPTIMUS_CACHE")
        (own / kind).mkdir(exist_ok=True)
    except OSError as exc:
        raise CheckpointError(
            f"cannot make a cache folder: {exc.strerror}; set BIOPTIMUS_CACHE"
        ) from exc
    return own / kind


def _wanted_root() -> Path:
    if chosen := os.environ.get("BIOPTIMUS_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path there is to be ignored.
    folder = Path(base) if base and os.path.isabs(base) else Path("~/.cache").expanduser()
    return folder / "bioptimus"


def beside(path: Path) -> Path:
    """A name in the same folder that no other process or thread uses, for write-then-rename."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
