"""Results that stand in a model's folder already: do those of a run belong with them?

One file is looked at: a folder may hold a hundred thousand, and :mod:`bioptimus.verify` reads all.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bioptimus.errors import OutputError
from bioptimus.inference.layout import differences, of_run
from bioptimus.inference.results import open_result


def first_result(folder: Path) -> Path | None:
    """A finished result below a folder, whichever the file system names first."""
    folders = [folder]
    # What cannot be looked into, such as a folder that is not there yet, has nothing to say.
    with contextlib.suppress(OSError):
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    elif entry.name.endswith(".h5"):
                        return Path(entry.path)
    return None


def made_otherwise(path: Path, now: Mapping[str, Any]) -> str:
    """What a result was made with that a run does otherwise; empty where that is nothing.

    Args:
        path: A result of another slide.
        now: As :func:`~bioptimus.recipe.run_parameters` tells it of the run.
    """
    try:
        there = open_result(path, check=False).attributes.get("digest_parameters")
    except OutputError:
        return ""  # damage is for the run of its own slide to tell
    return differences(of_run(there), now) if there else ""
