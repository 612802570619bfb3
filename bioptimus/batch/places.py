"""Whether folders and files that options name can be used at all, before any work is done."""

import errno
import os
from pathlib import Path

from bioptimus.errors import UsageError

# As people type it where a tool can write there. Ours would make a file or folder of that name.
_STDOUT = Path("-")


def refuse_unwritable(folder: Path, *, option: str) -> None:
    """Refuse a folder that is no folder, or cannot be made or written; nothing is made here.

    Args:
        folder: It need not exist yet.
        option: What named it, for the message.

    Raises:
        UsageError: It is ``-``, a file stands in its place or in its way, writing is not
            permitted, or the file system is read-only.
    """
    refuse_dash(folder, option=option)
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        what = "is a file, not a folder" if there.exists() else "is a link to nothing"
        raise UsageError(f"{option} {folder}: {there} {what}; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        # Not told by access(), and somebody else's to mend.
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        why = os.strerror(errno.EROFS if read_only else errno.EACCES)
        raise UsageError(
            f"{option} {folder}: {there} cannot be written ({why}); choose another folder"
        )


def refuse_dash(folder: Path, *, option: str) -> None:
    """Refuse a folder called ``-``, without a look at any disk.

    Raises:
        UsageError: It is.
    """
    if folder == _STDOUT:
        raise UsageError(f"{option} -: nothing of this goes to stdout; name a folder")


def refuse_unwritable_file(path: Path, *, option: str, example: str) -> None:
    """Refuse a name under which no file can be written; nothing is made here.

    Args:
        path: A file may be there.
        option: What named it, for the message.
        example: A file name that would do.

    Raises:
        UsageError: It is ``-`` or a folder, or its own cannot be made or written.
    """
    if path == _STDOUT:
        raise UsageError(f"{option} -: this does not go to stdout; name a file, such as {example}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file, such as {example}")
    refuse_unwritable(path.parent, option=option)
