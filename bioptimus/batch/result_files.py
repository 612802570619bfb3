"""Which result files a command is about: from files, folders and globs."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from bioptimus.batch.inputs import static_folder
from bioptimus.errors import UsageError

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
    return sorted(
        path
        for path in folder.rglob(f"*{RESULT_SUFFIX}")
        if path.is_file() and not (apart and _is_below(path, apart))
    )


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
