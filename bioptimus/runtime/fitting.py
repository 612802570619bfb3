"""Does a program give what the model's specification says, and in which order and shape?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bioptimus.errors import CheckpointError
from bioptimus.models.types import Models, ModelSpec
from bioptimus.runtime.archive import Signature, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import Node

    Outputs = tuple[torch.Tensor, ...]

_FLOATS = ("float32", "float16", "bfloat16", "float64")


def expected_inputs(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """What the specification says that the program takes."""
    side, channels = spec.tile.size_px, spec.channels
    if spec.input_layout == "nhwc_uint8":
        tiles = TensorSpec(dtype="uint8", shape=(side, side, channels))
    else:
        tiles = TensorSpec(dtype="float32", shape=(channels, side, side))
    if not spec.rna_dim:
        return (tiles,)
    return tiles, TensorSpec(dtype="float32", shape=(spec.rna_dim,))


def expected_outputs(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """What the specification says that the program gives; a width of 0 stands for any."""
    embedding = TensorSpec(dtype="float32", shape=(spec.embedding_dim,))
    prediction = TensorSpec(dtype="float32", shape=(spec.prediction_dim,))
    side = spec.tile.size_px
    return {
        "embedding": (embedding,),
        "prediction": (prediction,),
        "prediction_and_embedding": (prediction, embedding),
        "mask": (TensorSpec(dtype="float32", shape=(side, side)),),
    }[spec.output_kind]


def signature_of(spec: ModelSpec) -> Signature:
    """The signature that a compiled file without our description must have."""
    return Signature(inputs=expected_inputs(spec), outputs=expected_outputs(spec))


def fit_spec(spec: ModelSpec, signature: Signature) -> ModelSpec:
    """Complete a specification with what the program tells.

    A width that the specification leaves open (0) is taken from the program. H0-mini exists with
    and without the mean of the patch tokens beside the class token; the width tells which.
    """
    widths = [output.shape[0] for output in signature.outputs if len(output.shape) == 1]
    changes: dict[str, int | str] = {}
    if spec.name == Models.H0_MINI and widths == [2 * spec.embedding_dim]:
        changes = {"embedding_dim": widths[0], "pooling": "cls_mean"}
    elif spec.output_kind == "embedding" and not spec.embedding_dim and len(widths) == 1:
        changes = {"embedding_dim": widths[0]}
    elif spec.output_kind == "prediction" and not spec.prediction_dim and len(widths) == 1:
        changes = {"prediction_dim": widths[0]}
    return spec.with_(**changes)


def check_fit(path: Path, spec: ModelSpec, signature: Signature) -> None:
    """Refuse a program that takes or gives something else than the specification says.

    Raises:
        CheckpointError: Names what the program has and what was expected.
    """
    wanted = expected_inputs(spec)
    if len(wanted) != len(signature.inputs) or not all(map(_input_fits, wanted, signature.inputs)):
        raise CheckpointError(
            f"{path}: takes {_listed(signature.inputs)}, but {spec.name} takes {_listed(wanted)}; "
            "is it the file of another model?"
        )
    if not any(_outputs_fit(spec, order) for order in _orders(signature.outputs)):
        raise CheckpointError(
            f"{path}: gives {_listed(signature.outputs)}, but {spec.name} gives "
            f"{_listed(expected_outputs(spec))}; is it the file of another model?"
        )


def refuse_training(path: Path, program: ExportedProgram) -> None:
    """Refuse a program that was exported in training mode, or draws random numbers.

    A tile would have other results in each run, and nothing that comes out shows it.

    Raises:
        CheckpointError: Names the operation.
    """
    for graph in program.graph_module.modules():
        for node in getattr(getattr(graph, "graph", None), "nodes", ()):
            if _is_unsteady(node):
                raise CheckpointError(
                    f"{path}: {node.target} in it makes the results of a tile differ from run to "
                    "run; call eval() on the network and export it again"
                )


def _is_unsteady(node: Node) -> bool:
    import torch

    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    arguments = operation._schema.arguments
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False))
    values = {a.name: a.default_value for a in arguments} | given | node.kwargs
    if "batch_norm" in str(operation):
        return values.get("training") is True  # by the statistics of the batch
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    # Such as dropout, attention and rrelu, which name what switches chance off in them.
    switches = ("p", "dropout_p", "dropout", "train", "training")
    return all(values[name] for name in switches if name in values)


def adapter(spec: ModelSpec, signature: Signature) -> Callable[[Outputs], Outputs]:
    """What brings the program's outputs into the order and shapes of the specification.

    Three liberties of foreign programs are put right: the pair (embedding, prediction) the other
    way round, tokens (N, T, D) that are not pooled yet, and masks with a channel axis.
    """
    swapped = len(signature.outputs) == 2 and not _outputs_fit(spec, signature.outputs)

    def adapt(outputs: Outputs) -> Outputs:
        if swapped:
            outputs = (outputs[1], outputs[0])
        if spec.output_kind == "mask":
            return tuple(_without_channel(output) for output in outputs)
        *others, last = outputs
        if spec.makes_embedding and last.ndim == 3:
            last = pool_tokens(last, pooling=spec.pooling, prefix_tokens=spec.prefix_tokens)
        return (*others, last)

    return adapt


def pool_tokens(tokens: torch.Tensor, *, pooling: str, prefix_tokens: int) -> torch.Tensor:
    """Tokens (N, T, D), class token first → one embedding each.

    Args:
        tokens: Class token, registers, patch tokens.
        pooling: ``cls``, ``mean`` (of the patch tokens) or ``cls_mean`` (one after the other).
        prefix_tokens: Tokens before the first patch.

    Raises:
        CheckpointError: Another pooling is asked for.
    """
    import torch

    if pooling == "cls":
        return tokens[:, 0]
    mean = tokens[:, prefix_tokens:].mean(1)
    if pooling == "mean":
        return mean
    if pooling == "cls_mean":
        return torch.cat([tokens[:, 0], mean], 1)
    raise CheckpointError(f"pooling {pooling!r}: known are cls, mean, cls_mean")


def _orders(outputs: tuple[TensorSpec, ...]) -> list[tuple[TensorSpec, ...]]:
    return [outputs, outputs[::-1]] if len(outputs) == 2 else [outputs]


def _input_fits(wanted: TensorSpec, found: TensorSpec) -> bool:
    same_kind = wanted.dtype == found.dtype or {wanted.dtype, found.dtype} <= set(_FLOATS)
    return same_kind and wanted.shape == found.shape


def _outputs_fit(spec: ModelSpec, outputs: tuple[TensorSpec, ...]) -> bool:
    wanted = expected_outputs(spec)
    return len(wanted) == len(outputs) and all(
        _output_fits(spec, want, found) for want, found in zip(wanted, outputs, strict=True)
    )


def _output_fits(spec: ModelSpec, wanted: TensorSpec, found: TensorSpec) -> bool:
    if spec.output_kind == "mask":
        return found.shape in (wanted.shape, (1, *wanted.shape))
    (width,) = wanted.shape
    if len(found.shape) == 2 and spec.makes_embedding and width in (0, spec.embedding_dim):
        factor = 2 if spec.pooling == "cls_mean" else 1
        pooled = spec.pooling in ("cls", "mean", "cls_mean")
        return pooled and width in (0, factor * found.shape[1])
    return len(found.shape) == 1 and width in (0, found.shape[0])


def _without_channel(mask: torch.Tensor) -> torch.Tensor:
    return mask[:, 0] if mask.ndim == 4 else mask


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return " and ".join(map(str, specs)) or "nothing"
