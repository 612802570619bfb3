"""What the outputs of a folder were made from, so that a rerun leaves those that are up to date.

Most formats of other tools have no place to say it, and dates of files change when they are
copied. So a hidden file in the output folder says it, a line of JSON for each output.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePath

from bioptimus.convert.pieces import ConvertOptions
from bioptimus.inference.disk import output_errors
from bioptimus.inference.layout import digest_of
from bioptimus.inference.results import Result

RECORD_NAME = ".bioptimus-convert.jsonl"


def made_from(result: Result, to: str, options: ConvertOptions) -> str:
    """Digest of what an output depends on: the result by its content, the format, its options.

    Raises:
        OutputError: The result is damaged.
    """
    # The result's own digest is of what its rows were computed from; on another machine their
    # last digits differ. Files of earlier versions tell no checksums, but have a date.
    if result.has_row_checksums:
        rows = zlib.crc32(result.read("row_crc32").tobytes())
    else:
        rows = result.path.stat().st_mtime_ns
    return digest_of(
        {
            "result": result.digest,
            "rows": rows,
            "format": to,
            "geometry": options.geometry,
            "measurements": options.measurements,
        }
    )


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """What is known of an output.

    Attributes:
        made_from: Digest.
        mark: What the file or folder looks like that was to get the output's name, as
            :func:`_mark` tells; None once it has got it.
    """

    made_from: str
    mark: tuple[int, ...] | None = None


class Record:
    """Output → digest of what it was made from. Several processes may append to one file.

    It is written before an output gets its name, with what tells the new file from the old one, and
    again afterwards. So a run that is killed in between leaves nothing of which the next one does
    not know what it is.
    """

    def __init__(self, out: Path) -> None:
        """Read what earlier conversions into a folder wrote.

        Raises:
            OutputError: It cannot be read.
        """
        self._out = out
        self._path = out / RECORD_NAME
        self._entries: dict[str, _Entry] = {}
        with output_errors(self._path, "cannot be read", advice="choose another --out"):
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                mark = tuple(entry["mark"]) if "mark" in entry else None
                self._entries[entry["output"]] = _Entry(made_from=entry["made_from"], mark=mark)
            except (ValueError, KeyError, TypeError):
                continue  # cut short by a kill; its output will be asked about

    def is_current(self, output: PurePath, digest: str) -> bool:
        """Whether an output that is there, named below the folder, was made from just this.

        Raises:
            OutputError: It cannot be looked at.
        """
        entry = self._entries.get(str(output))
        if entry is None or entry.made_from != digest:
            return False
        if entry.mark is None:
            return True
        # A run was killed before it could say more; the mark tells whether it got as far.
        return entry.mark == _mark(self._out / output)

    def announce(self, output: PurePath, digest: str, temporary: Path) -> None:
        """Tell what an output will be made from, before a finished file gets its name.

        Args:
            output: Its name below the folder.
            digest: What the file was made from.
            temporary: The file or folder, under another name; to be renamed, nothing else.

        Raises:
            OutputError: It cannot be written.
        """
        self._add(output, _Entry(made_from=digest, mark=_mark(temporary)))

    def add(self, output: PurePath, digest: str) -> None:
        """Remember what an output was made from, wherever it may be copied to.

        Raises:
            OutputError: It cannot be written.
        """
        if self._entries.get(str(output)) != _Entry(made_from=digest):
            self._add(output, _Entry(made_from=digest))

    def _add(self, output: PurePath, entry: _Entry) -> None:
        self._entries[str(output)] = entry
        told: dict[str, object] = {"output": str(output), "made_from": entry.made_from}
        if entry.mark is not None:
            told["mark"] = entry.mark
        line = json.dumps(told)
        with (
            output_errors(self._path, "cannot be written", advice="choose another --out"),
            self._path.open("a", encoding="ascii") as file,
        ):
            # The line end in front: what a full disk cut short must not take the next line with it.
            file.write(f"\n{line}")


def _mark(path: Path) -> tuple[int, ...]:
    """What a rename leaves as it is, and no two files or folders beside each other share."""
    with output_errors(path, "cannot be looked at", advice="choose another --out"):
        found = path.stat()
    return found.st_ino, found.st_mtime_ns
