"""Which result files a command is about: from files, folders and globs."""

import glob
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath

from bioptimus.batch.inputs import static_folder
from bioptimus.errors import UsageError

log = logging.getLogger(__name__)

RESULT_SUFFIX = ".h5"


def find_results(arguments: Sequence[Path], *, exclude: Path | None = None) -> dict[Path, PurePath]:
    """Result files, each once and with its path below the folder given.

    Args:
        arguments: Files, folders (searched to the bottom), and globs that the shell left alone.
        exclude: A folder within those folders not to search, such as the output folder.

    Raises:
        UsageError: A folder holds none, a glob matches none, or a path is not there.
    """
    found: dict[str, tuple[Path, PurePath]] = {}
    for argument in arguments:
        if argument.is_dir():
            taken = {path: path.relative_to(argument) for path in _in_folder(argument, exclude)}
            if not taken:
                raise UsageError(f"{argument}: no result files ({RESULT_SUFFIX}) in this folder")
        elif argument.exists():
            taken = {argument: Path(argument.name)}
        elif glob.has_magic(str(argument)):
            base = static_folder(str(argument))
            taken = {path: path.relative_to(base) for path in _matching(str(argument), exclude)}
            if not taken:
                raise UsageError(f"{argument}: no result file ({RESULT_SUFFIX}) matches this glob")
        else:
            raise UsageError(f"{argument}: no such file or folder")
        for path, relative in taken.items():
            found.setdefault(os.path.abspath(path), (path, PurePath(relative)))
    return dict(found.values())


def _in_folder(folder: Path, exclude: Path | None) -> list[Path]:
    apart = exclude if exclude and not _same(exclude, folder) else None
    return [path for path in results_below(folder) if not (apart and _is_below(path, apart))]


def results_below(folder: Path) -> list[Path]:
    """Files below a folder that are called as results are, sorted.

    Folders that cannot be looked into are left out with a warning.
    """

    def warn(error: OSError) -> None:
        why = why_not_listed(error)
        log.warning("%s: %s; what is in it is left out", error.filename, why)

    return sorted(path for path in files_below(folder, warn) if path.name.endswith(RESULT_SUFFIX))


def files_below(folder: Path, not_listed: Callable[[OSError], None]) -> Iterator[Path]:
    """Every file below a folder, to the bottom, each folder once; also behind links to folders.

    But for ``._x``, in which macOS keeps what other file systems cannot say of the ``x`` beside it.

    Args:
        folder: The folder.
        not_listed: Called for each folder that cannot be looked into.
    """
    seen: set[str] = set()
    # Links last: what is below the folder is called by its own name.
    starts = [folder]
    for start in starts:
        for place, folders, names in os.walk(start, onerror=not_listed):
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            below = (Path(place, name) for name in sorted(folders))
            starts.extend(path for path in below if path.is_symlink())
            for name in names:
                path = Path(place, name)
                if not name.startswith("._") and _may_be_file(path):
                    yield path


def why_not_listed(error: OSError) -> str:
    """Say of a folder that it cannot be looked into, without its name."""
    return f"cannot be looked into ({error.strerror}); check its permissions and the mount"


def _may_be_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False  # a link to nothing, or gone by now
    except OSError:
        return True  # who reads it is told why not


def _matching(pattern: str, exclude: Path | None) -> list[Path]:
    paths: list[Path] = []
    for match in sorted(map(Path, glob.glob(pattern, recursive=True))):
        if match.is_dir():
            paths += _in_folder(match, exclude)
        elif match.suffix == RESULT_SUFFIX:
            paths.append(match)
    return paths


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _is_below(path: Path, folder: Path) -> bool:
    return folder.resolve() in path.resolve().parents
