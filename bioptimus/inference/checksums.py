"""CRC-32 of what a result file holds, so that a value that changed since is found.

The digest of a file names what went in; these tell whether what came out is still there. Rows
have one each, so that a look at some of the rows needs no other, and says which row it is.
"""

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from bioptimus.inference.layout import to_json


def row_checksums(
    rows: npt.NDArray[Any], before: npt.NDArray[np.uint32] | None = None
) -> npt.NDArray[np.uint32]:
    """CRC-32 of each row's bytes.

    Args:
        rows: (n, D) as stored.
        before: (n,) checksums of the same rows of another dataset, to go on from.

    Returns:
        (n,) uint32.
    """
    starts = [0] * len(rows) if before is None else before.tolist()
    sums = map(zlib.crc32, np.ascontiguousarray(rows), starts)
    return np.fromiter(sums, np.uint32, count=len(rows))


def checksum(values: npt.NDArray[Any]) -> int:
    """CRC-32 of the bytes of an array, or of the JSON text of one that holds strings."""
    if values.dtype.hasobject:
        return zlib.crc32(to_json(_decoded(values.tolist())).encode(errors="surrogateescape"))
    return zlib.crc32(np.ascontiguousarray(values).data.cast("B") if values.size else b"")


def _decoded(value: Any) -> Any:
    """Lists for tuples and text for bytes: strings come as either, by way of reading."""
    if isinstance(value, list | tuple):
        return [_decoded(item) for item in value]
    # As h5py reads and writes bytes that are no UTF-8, such as those of odd file names.
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
