"""What is known about a model, as plain frozen data: no torch, no numpy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal, Self

from bioptimus.errors import CheckpointError
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


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the pipeline must know about a model.

    Attributes:
        name: Registry key, or the name its exporter gave.
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
        output_names: Names of the predicted values; empty, or ``prediction_dim`` of them.
        prefix_tokens: Class and register tokens that are not patches.
        pooling: How patch tokens become one embedding (``cls``, ``cls_mean``, ``mean``, ``none``).
        omics_transform: Applied to bulk RNA going in; its inverse (expm1) coming out.
        rna_dim: Number of bulk RNA values (TPM) that the model takes; 0 for none.
        input_genes: Names of those values in the model's order; empty if not known.
        precision: Precision of the arithmetic inside the graph.
        description: One sentence for people.
        source: Where the weights came from.
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
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    description: str = ""
    source: str = ""
    source_sha256: str = ""

    def __post_init__(self) -> None:
        """Check that the counts agree with the names.

        Raises:
            CheckpointError: They do not, or a dimension that ``output_kind`` needs is missing.
        """
        if self.output_names and len(self.output_names) != self.prediction_dim:
            raise CheckpointError(
                f"{self.name}: {len(self.output_names)} output names for "
                f"{self.prediction_dim} predicted values"
            )
        if self.input_genes and len(self.input_genes) != self.rna_dim:
            raise CheckpointError(
                f"{self.name}: {len(self.input_genes)} input genes for {self.rna_dim} RNA values"
            )
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise CheckpointError(f"{self.name}: mean and std must have {self.channels} values")

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
                found["tile"] = TileSpec(**found["tile"])
            for key in ("mean", "std", "output_names", "input_genes"):
                if key in found:
                    found[key] = tuple(found[key])
            return cls(**found)
        except (TypeError, ValueError) as exc:
            raise CheckpointError(f"model description cannot be read: {exc}") from exc
