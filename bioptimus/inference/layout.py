"""Names in a result file, in one place: what writers write, readers read and docs/hdf5.md tells."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

FORMAT = "bioptimus-tiles"
"""Root attribute ``format`` of every result file."""

FORMAT_VERSION = 1
"""Root attribute ``format_version``; grows when a reader of the older one would be misled."""

PART_SUFFIX = ".part"
"""``x.h5.part`` holds the rows of an unfinished ``x.h5``."""

HEAP_CHECKSUMS = "heap_crc32"
"""Root attribute (H, 3): offset, length and CRC-32 of each global heap of HDF5, in bytes."""

WRITER_ATTRIBUTES = frozenset(
    {
        "format",
        "format_version",
        "state",
        "complete",
        "digest",
        "digest_parameters",
        "tiles_planned",
        "tiles_failed",
        HEAP_CHECKSUMS,
    }
)
"""Root attributes that the writer sets itself."""

STORED_TYPES = ("float32", "float16")
"""What ``features`` and ``predictions`` may be stored as."""

REQUIRED_DATASETS = ("coords", "tissue_ratios", "failed_tiles")
"""Datasets of every result file, whatever its mode."""

REQUIRED_ATTRIBUTES = (
    "state",
    "digest",
    "slide_name",
    "slide_width",
    "slide_height",
    "mpp_x",
    "mpp_y",
    "model_spec",
    "model_sha256",
    "mode",
    "tile_size_px",
    "tile_mpp",
    "overlap_px",
)
"""Root attributes that a reader cannot do without."""

CHECKSUM = "crc32"
"""Attribute of every small dataset: CRC-32 of its values, for :mod:`bioptimus.verify`."""

ROW_CHECKSUMS = "row_crc32"
"""Dataset (N,) of the CRC-32 of each row of ``features``, then of ``predictions``."""

EARLIER_PARAMETERS: Mapping[str, Any] = {"tissue search version": 1}
"""What a parameter of the digest was in files that do not tell it, being older than it is."""

_RUN_PARAMETERS = (
    "model sha256",
    "mode",
    "tile size (px)",
    "tile mpp",
    "overlap (px)",
    "icc",
    "dtype",
)

AttributeValue = str | int | float | bool | Sequence[Any] | Mapping[str, Any] | None


def digest_of(parameters: Mapping[str, Any]) -> str:
    """SHA-256 over what a file depends on, whatever the order of the names.

    A parameter with its earlier value does not count, as in the files that do not tell it.
    """
    counted = {
        name: value
        for name, value in parameters.items()
        if name not in EARLIER_PARAMETERS or value != EARLIER_PARAMETERS[name]
    }
    text = orjson.dumps(counted, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()


def of_run(parameters: object) -> dict[str, Any]:
    """Those parameters of a digest that are a run's, not a slide's, and make rows comparable.

    Results of one folder are meant to agree in them. How tissue is found is none of them: it may
    be chosen slide by slide.
    """
    found = parameters if isinstance(parameters, Mapping) else {}
    return {name: found[name] for name in _RUN_PARAMETERS if name in found}


def to_json(value: Any) -> str:
    """JSON text with keys in order, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Numpy scalars and arrays as numbers and lists, anything else in its own words."""
    convert = getattr(value, "tolist", None)
    return convert() if convert is not None else str(value)


def differences(
    there: Mapping[str, Any], now: Mapping[str, Any], *, limit: int = 4, here: str = "now"
) -> str:
    """Say which parameters differ, as ``tile.mpp is 0.5 there, 1.0 now``."""
    earlier = {name: value for name, value in EARLIER_PARAMETERS.items() if name in now}
    old, new = _flat({**earlier, **there}), _flat(now)
    words = [
        f"{key} is {_in_words(old, key)} there, {_in_words(new, key)} {here}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return "; ".join(words[:limit]) + more


_ABSENT = object()


def _in_words(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "absent")
    return "none" if value == "" else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted names, values as JSON would give them back."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.loads(to_json(value))
    return flat
