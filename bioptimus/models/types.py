"""What is known about a model, as plain frozen data: no torch, no numpy."""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain
from reprlib import repr as shown
from typing import Any, Literal, Self, get_args

from bioptimus.errors import CheckpointError, UsageError
from bioptimus.tiles import TileSpec


class InferenceMode(StrEnum):
    """What a forward pass is asked for."""

    PREDICTION = "prediction"
    EMBEDDING = "embedding"
    PREDICTION_WITH_EMBEDDING = "prediction_with_embedding"

    @property
    def wants_prediction(self) -> bool:
        """Whether responses of this mode hold a prediction."""
        return self is not InferenceMode.EMBEDDING

    @property
    def wants_embedding(self) -> bool:
        """Whether responses of this mode hold an embedding."""
        return self is not InferenceMode.PREDICTION


class Models(StrEnum):
    """Keys of the models that this package knows by name."""

    LITE0 = "lite0"
    H0 = "h0"
    H0_MINI = "h0-mini"
    H1 = "h1"
    M_OPTIMUS = "m-optimus"
    TISSUE_SEG = "tissue-seg"


InputLayout = Literal["nhwc_uint8", "nchw_float32"]
OutputKind = Literal["embedding", "prediction", "prediction_and_embedding", "mask"]
Precision = Literal["fp32", "bf16", "fp16"]
_KNOWN: dict[str, tuple[Any, ...]] = {
    "input_layout": get_args(InputLayout),
    "output_kind": get_args(OutputKind),
    "precision": get_args(Precision),
    "pooling": ("cls", "mean", "cls_mean", "none"),
    "omics_transform": (None, "log1p"),
}

# Far beyond any model; above, a description is a mistake or meant to fill the memory.
_LARGEST_TILE_PX = 8192
_MPP_LIMITS = (0.01, 100)
_LARGEST_COUNT = 1_000_000
_LONGEST_NAME = 100


def _name_problem(name: object) -> str:
    """Why no file or folder may be called after a model of this name; empty if it may."""
    if not isinstance(name, str) or not name.strip():
        return "must be a text, and not empty"
    if len(name) > _LONGEST_NAME:
        return f"must have at most {_LONGEST_NAME} characters"
    if not name.isprintable() or set(name) & set("/\\:"):
        return "must have no slashes, colons or control characters: folders are named after it"
    if name != name.strip() or name.startswith("."):
        return "must not begin with a dot, nor begin or end with a space"
    if name.lower() == "runs":
        return "is the name of the folder of run reports, in which its results would lie"
    return ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the pipeline must know about a model.

    Attributes:
        name: Registry key, or the name its exporter gave. Result folders are called after it:
            it has no slashes and no control characters, does not begin with a dot, and is not
            ``runs``.
        version: Version of the weights.
        licence: SPDX identifier or a short phrase.
        tile: Tile size and scale that the model was trained on.
        channels: Colour channels of a tile.
        mean: Per-channel mean on the 0..1 scale, in RGB order.
        std: Per-channel standard deviation on the 0..1 scale, in RGB order.
        input_layout: ``nhwc_uint8``: the graph normalises; ``nchw_float32``: tiles are
            normalised with ``mean`` and ``std`` before the call (the vendor's contract).
        interpolation: How tiles were resized in training; stated, and used by nothing here.
        architecture: Free text, such as ``ViT-g/14, 4 registers``.
        output_kind: What the graph returns: one tensor, or the pair (prediction, embedding).
        embedding_dim: Length of an embedding; 0 where the model makes none.
        prediction_dim: Length of a prediction; 0 where the model makes none.
        output_names: Names of the predicted values, no two the same; empty, or ``prediction_dim``
            of them.
        prefix_tokens: Class and register tokens that are not patches.
        pooling: How patch tokens become one embedding (``cls``, ``cls_mean``, ``mean``, ``none``).
        omics_transform: Applied to bulk RNA going in; its inverse (expm1) coming out.
        rna_dim: Number of bulk RNA values (TPM) that the model takes; 0 for none.
        input_genes: Names of those values in the model's order; empty if not known.
        precision: Precision of the arithmetic inside the graph.
        description: One sentence for people.
        source: Where the weights came from: a repository, or a Python function; empty for a folder.
        source_sha256: Digest of the weights the export read; empty if not known.
    """

    name: str
    version: str = "1"
    licence: str = "unknown"
    tile: TileSpec = field(default_factory=TileSpec)
    channels: int = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    input_layout: InputLayout = "nhwc_uint8"
    interpolation: str = "area"
    architecture: str = ""
    output_kind: OutputKind = "embedding"
    embedding_dim: int = 0
    prediction_dim: int = 0
    output_names: tuple[str, ...] = ()
    prefix_tokens: int = 0
    pooling: str = "none"
    omics_transform: Literal["log1p"] | None = None
    rna_dim: int = 0
    input_genes: tuple[str, ...] = ()
    precision: Precision = "fp32"
    description: str = ""
    source: str = ""
    source_sha256: str = ""

    def __post_init__(self) -> None:
        """Check types and ranges, and that the counts agree with the names.

        A description comes out of a file that anybody may have written.

        Raises:
            CheckpointError: Names the field.
        """
        if problem := _name_problem(self.name):
            raise CheckpointError(f"model name {shown(self.name)}: {problem}")
        # One after the other: values of a wrong type cannot be compared.
        if problem := next(chain(self._wrong_types(), self._wrong_values()), ""):
            raise CheckpointError(f"{self.name}: {problem}")
        if self.output_names and len(self.output_names) != self.prediction_dim:
            raise CheckpointError(
                f"{self.name}: {len(self.output_names)} output names for "
                f"{self.prediction_dim} predicted values"
            )
        if twice := [name for name, n in Counter(self.output_names).items() if n > 1]:
            raise CheckpointError(
                f"{self.name}: output name {shown(twice[0])} is there more than once: values could "
                "not be told apart by it"
            )
        if self.input_genes and len(self.input_genes) != self.rna_dim:
            raise CheckpointError(
                f"{self.name}: {len(self.input_genes)} input genes for {self.rna_dim} RNA values"
            )
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise CheckpointError(f"{self.name}: mean and std must have {self.channels} values")

    def _wrong_types(self) -> Iterator[str]:
        # The types themselves, not their names: annotations of this module are evaluated.
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type is int and not _is_whole(value):
                yield f"{entry.name} {shown(value)}: must be a whole number"
            if entry.type is str and not _is_text(value):
                yield f"{entry.name} {shown(value)}: must be a text without control characters"
        if not isinstance(self.tile, TileSpec):
            yield f"tile {shown(self.tile)}: must be a TileSpec"
        for name in ("mean", "std", "output_names", "input_genes"):
            if not isinstance(getattr(self, name), tuple | list):
                yield f"{name} {shown(getattr(self, name))}: must be a list"
        for name in ("output_names", "input_genes"):
            if not all(map(_is_text, getattr(self, name))):
                yield f"{name}: must be texts without control characters"

    def _wrong_values(self) -> Iterator[str]:
        for name, known in _KNOWN.items():
            value = getattr(self, name)
            if not isinstance(value, str | None) or value not in known:
                yield f"{name} {shown(value)}: known are {', '.join(filter(None, known))}"
        for name in ("channels", "embedding_dim", "prediction_dim", "prefix_tokens", "rna_dim"):
            if not 0 <= getattr(self, name) <= _LARGEST_COUNT:
                yield f"{name} {shown(getattr(self, name))}: must lie in 0 to {_LARGEST_COUNT}"
        for name, least in (("mean", -math.inf), ("std", 0)):
            if not all(_is_number(value) and value > least for value in getattr(self, name)):
                words = "numbers" if name == "mean" else "positive numbers"
                yield f"{name} {shown(getattr(self, name))}: must be {words}"
        low, high = _MPP_LIMITS
        if not (_is_number(self.tile.mpp) and low <= self.tile.mpp <= high):
            yield f"tile mpp {shown(self.tile.mpp)}: must lie in {low} to {high} um/px"
        if self.tile.size_px > _LARGEST_TILE_PX:
            yield f"tile size {shown(self.tile.size_px)} px: must lie in 1 to {_LARGEST_TILE_PX}"

    @property
    def makes_embedding(self) -> bool:
        """Whether the graph returns an embedding."""
        return self.output_kind in ("embedding", "prediction_and_embedding")

    @property
    def makes_prediction(self) -> bool:
        """Whether the graph returns a prediction."""
        return self.output_kind in ("prediction", "prediction_and_embedding")

    def supports(self, mode: InferenceMode) -> bool:
        """Whether one forward pass can answer ``mode``."""
        return (
            self.makes_prediction or self.output_kind == "mask" or not mode.wants_prediction
        ) and (self.makes_embedding or not mode.wants_embedding)

    def with_(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready types; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote.

        Fields of a newer version that this one does not know are ignored.

        Raises:
            CheckpointError: A field is missing or of the wrong type.
        """
        known = {entry.name for entry in fields(cls)}
        found = {key: value for key, value in values.items() if key in known}
        try:
            if "tile" in found:
                found["tile"] = _tile(found["tile"])
            for key in ("mean", "std", "output_names", "input_genes"):
                if key in found:
                    if not isinstance(found[key], (list, tuple)):
                        raise CheckpointError(f"{key} {shown(found[key])}: must be a list")
                    found[key] = tuple(found[key])
            return cls(**found)
        except CheckpointError:
            raise
        except (TypeError, ValueError, OverflowError) as exc:
            raise CheckpointError(f"model description cannot be read: {exc}") from exc


def _tile(values: Mapping[str, Any]) -> TileSpec:
    try:
        return TileSpec(**values)
    except UsageError as exc:
        raise CheckpointError(f"tile: {exc}") from exc


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # JSON has whole numbers that no float can hold.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e12 < value < 1e12


def _is_text(value: object) -> bool:
    # Neither what steers a terminal nor half a character, which cannot be printed at all.
    return isinstance(value, str) and (
        value.isprintable()
        or not any(unicodedata.category(letter) in ("Cc", "Cs") for letter in value)
    )
