"""Names in a result file, in one place: what writers write, readers read and docs/hdf5.md tells."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.tiles import TileSpec

FORMAT = "bioptimus-tiles"
"""Root attribute ``format`` of every result file."""

FORMAT_VERSION = 1
"""Root attribute ``format_version``; grows when a reader of the older one would be misled."""

PART_SUFFIX = ".part"
"""``x.h5.part`` holds the rows of an unfinished ``x.h5``."""

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
    }
)
"""Root attributes that the writer sets itself."""

AttributeValue = str | int | float | bool | Sequence[Any] | Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class SlideFacts:
    """What a result file remembers of its slide.

    Attributes:
        path: The slide as it was given.
        name: File name.
        dimensions: (width, height) in level-0 pixels.
        mpp: (x, y) µm per level-0 pixel.
        mpp_source: Where ``mpp`` came from, in words.
        vendor: Format as the reader names it.
        size_bytes: Size of the slide file.
        quickhash: Identity of the slide's content.
        objective_power: The scanner's nominal lens, where it is known.
        reader: Which reader decoded the tiles.
    """

    path: str
    name: str
    dimensions: tuple[int, int]
    mpp: tuple[float, float]
    mpp_source: str
    vendor: str = ""
    size_bytes: int = 0
    quickhash: str = ""
    objective_power: float | None = None
    reader: str = ""


def root_attributes(
    *,
    slide: SlideFacts,
    model: ModelSpec,
    model_sha256: str,
    tile: TileSpec,
    mode: InferenceMode,
    tissue: Mapping[str, Any],
    parameters: Mapping[str, Any],
    versions: Mapping[str, str],
) -> dict[str, AttributeValue]:
    """The root attributes that say where the rows of a file come from.

    Args:
        slide: The slide.
        model: Specification of the model.
        model_sha256: Digest of its weights file.
        tile: Size, scale and overlap of the tiles.
        mode: What was computed.
        tissue: Method of the tissue mask and its figures.
        parameters: Parameters of the run.
        versions: Library → version.
    """
    return {
        "slide_path": slide.path,
        "slide_name": slide.name,
        "slide_width": slide.dimensions[0],
        "slide_height": slide.dimensions[1],
        "slide_size_bytes": slide.size_bytes,
        "slide_vendor": slide.vendor,
        "slide_quickhash": slide.quickhash,
        "slide_objective_power": slide.objective_power,
        "slide_reader": slide.reader,
        "mpp_x": slide.mpp[0],
        "mpp_y": slide.mpp[1],
        "mpp_source": slide.mpp_source,
        "model_name": model.name,
        "model_sha256": model_sha256,
        "model": model.to_dict(),
        "mode": str(mode),
        "tile_size_px": tile.size_px,
        "tile_mpp": tile.mpp,
        "tile_overlap_px": tile.overlap_px,
        "tissue": tissue,
        "parameters": parameters,
        "versions": versions,
    }


def coords_attributes(
    *, slide: SlideFacts, tile: TileSpec, folder: str
) -> dict[str, AttributeValue]:
    """Attributes of ``coords`` under the names that TRIDENT's readers look for.

    Magnification means 10 / mpp there, not a lens.

    Args:
        slide: The slide.
        tile: Size, scale and overlap of the tiles.
        folder: Folder of the result file.
    """
    return {
        "patch_size": tile.size_px,
        "patch_size_level0": round(tile.side_um / slide.mpp[0]),
        "level0_magnification": 10 / slide.mpp[0],
        "target_magnification": 10 / tile.mpp,
        "overlap": tile.overlap_px,
        "name": slide.name.rsplit(".", 1)[0],
        "savetodir": folder,
        "level0_width": slide.dimensions[0],
        "level0_height": slide.dimensions[1],
    }


def to_json(value: Any) -> str:
    """JSON text with keys in order, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Numpy scalars and arrays as numbers and lists, anything else in its own words."""
    convert = getattr(value, "tolist", None)
    return convert() if convert is not None else str(value)


def differences(there: Mapping[str, Any], now: Mapping[str, Any], *, limit: int = 4) -> str:
    """Say which parameters differ, as ``tile.mpp is 0.5 there, 1.0 now``."""
    old, new = _flat(there), _flat(now)
    words = [
        f"{key} is {old.get(key, 'absent')} there, {new.get(key, 'absent')} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return "; ".join(words[:limit]) + more


_ABSENT = object()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted names, values as JSON would give them back."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.loads(to_json(value))
    return flat
