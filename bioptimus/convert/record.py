"""What the outputs of a folder were made from, so that a rerun leaves those that are up to date.

Most formats of other tools have no place to say it, and dates of files change when they are
copied. So a hidden file in the output folder says it, a line of JSON for each output.
"""

import json
import zlib
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


class Record:
    """Output → digest of what it was made from. Several processes may append to one file."""

    def __init__(self, out: Path) -> None:
        """Read what earlier conversions into a folder wrote.

        Raises:
            OutputError: It cannot be read.
        """
        self._path = out / RECORD_NAME
        self._digests: dict[str, str] = {}
        with output_errors(self._path, "cannot be read", advice="choose another --out"):
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                self._digests[entry["output"]] = entry["made_from"]
            except (ValueError, KeyError, TypeError):
                continue  # cut short by a kill; its output will be asked about

    def is_current(self, output: PurePath, digest: str) -> bool:
        """Whether an output, named below the folder, was last made from just this."""
        return self._digests.get(str(output)) == digest

    def add(self, output: PurePath, digest: str) -> None:
        """Remember what an output was made from.

        Raises:
            OutputError: It cannot be written.
        """
        self._digests[str(output)] = digest
        line = json.dumps({"output": str(output), "made_from": digest})
        with (
            output_errors(self._path, "cannot be written", advice="choose another --out"),
            self._path.open("a", encoding="ascii") as file,
        ):
            # The line end in front: what a full disk cut short must not take the next line with it.
            file.write(f"\n{line}")

    def forget(self, output: PurePath) -> None:
        """Have it known of an output no more what it was made from.

        Raises:
            OutputError: It cannot be written.
        """
        if self._digests.get(str(output)):
            self.add(output, "")
