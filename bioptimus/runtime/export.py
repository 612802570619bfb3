"""A torch module → a self-describing portable ``.pt2``."""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from bioptimus.errors import CheckpointError
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.archive import DESCRIPTION, TensorSpec
from bioptimus.runtime.cache import beside
from bioptimus.runtime.fitting import expected_inputs, expected_outputs, pool_tokens
from bioptimus.runtime.runners import open_runner

log = logging.getLogger(__name__)

LARGEST_BATCH = 1024
# What tracing looks at. Not 1, which would be taken for a constant; and not less than 16, since
# torch chooses convolutions for the CPU by asking whether a batch has 16 rows, and a compiled
# program would take batches on the example's side of that border only.
EXAMPLE_BATCH = 16

LOWEST_COSINE = {"fp32": 0.9999, "bf16": 0.999, "fp16": 0.999}
"""What a program's outputs must reach against the model it was made from, by precision."""


def trace(module: nn.Module, spec: ModelSpec, *, device: str = "cpu") -> ExportedProgram:
    """Trace a module that takes and gives what its specification says.

    Args:
        module: In evaluation mode, on ``device``.
        spec: Says the shapes and dtypes of the inputs; the batch is free up to 1,024.
        device: Where the module's weights are.

    Raises:
        CheckpointError: torch cannot trace it.
    """
    examples = tuple(
        torch.zeros(
            (EXAMPLE_BATCH, *wanted.shape), dtype=getattr(torch, wanted.dtype), device=device
        )
        for wanted in expected_inputs(spec)
    )
    batch = Dim("batch", min=1, max=LARGEST_BATCH)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(
                module, examples, dynamic_shapes=tuple({0: batch} for _ in examples)
            )
    except Exception as exc:  # torch documents no error types; this is its border
        raise CheckpointError(f"{spec.name}: torch.export cannot trace it: {exc}") from exc
    # The examples go into the file; one row is enough of them.
    program.example_inputs = (tuple(example[:1].clone() for example in examples), {})
    for node in program.graph.nodes:
        # Names of this machine's folders have no place in a file that people pass on, and
        # without them the same weights give the same bytes.
        node.meta.pop("stack_trace", None)
    return program


def save(program: ExportedProgram, spec: ModelSpec, path: Path) -> None:
    """Write a program with its description, whole or not at all.

    Args:
        program: From :func:`trace`.
        spec: Goes into the archive.
        path: The final name; its folder is made if need be.

    Raises:
        CheckpointError: The file cannot be written.
    """
    # The archive's inner folder is named after the file: the same name each time, so that the
    # same weights give the same bytes.
    folder = beside(path)
    temporary = folder / "model.pt2"
    try:
        folder.mkdir(parents=True)
        with quiet():
            torch.export.save(
                program, temporary, extra_files={DESCRIPTION: json.dumps(spec.to_dict())}
            )
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(f"{path}: cannot be written: {exc}") from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the deprecation warnings that torch's exporter gives about torch itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TileModel(nn.Module):
    """A network of normalised images as a model of tiles: all that its specification says.

    uint8 (N, H, W, C) tiles are normalised inside (``nhwc_uint8``), float tiles are taken as they
    are; the network computes in the specification's precision; tokens are pooled; what comes out
    is float32.

    Args:
        network: Takes (N, C, H, W); gives (N, D), tokens (N, T, D), or a tuple of outputs.
        spec: Mean, std, layout, pooling, prefix tokens, precision.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, network: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.network = network
        self.spec = spec
        shape = (1, spec.channels, 1, 1)
        self.register_buffer("mean", torch.tensor(spec.mean).view(shape))
        self.register_buffer("std", torch.tensor(spec.std).view(shape))

    def forward(self, tiles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the class."""
        return self.run(tiles)

    def run(self, tiles: torch.Tensor, *extra: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Normalise, compute, pool."""
        dtype = _DTYPES[self.spec.precision]
        if self.spec.input_layout == "nhwc_uint8":
            tiles = (tiles.permute(0, 3, 1, 2).float() / 255.0 - self.mean) / self.std
        images = tiles.to(dtype, memory_format=torch.contiguous_format)
        outputs = self.network(images, *(values.to(dtype) for values in extra))
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        *others, last = (output.float() for output in outputs)
        if self.spec.makes_embedding and last.ndim == 3:
            last = pool_tokens(
                last, pooling=self.spec.pooling, prefix_tokens=self.spec.prefix_tokens
            )
        return (*others, last)


class TileAndRnaModel(TileModel):
    """The same with bulk RNA (N, G), which goes to the network as it is."""

    def forward(  # type: ignore[override]  # one input more
        self, tiles: torch.Tensor, bulk_rna: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See the class."""
        return self.run(tiles, bulk_rna)


def tile_model(network: nn.Module, spec: ModelSpec) -> TileModel:
    """The network with what its specification says around it."""
    return (TileAndRnaModel if spec.rna_dim else TileModel)(network, spec)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did.

    Attributes:
        path: The file written.
        spec: The description inside.
        worst_random: Least cosine to the eager float32 network over random tiles.
        worst_real: The same over real tiles; None where none were given.
    """

    path: Path
    spec: ModelSpec
    worst_random: float
    worst_real: float | None


def export_module(
    network: nn.Module,
    spec: ModelSpec,
    path: Path,
    *,
    device: str = "cpu",
    real_tiles: torch.Tensor | None = None,
) -> ExportReport:
    """Write a network as a self-describing portable ``.pt2``, if the file gives what it gives.

    The file is loaded again and compared with the eager network in float32, on random tiles and
    on real ones; a file that fails is not written.

    Args:
        network: Of float32 weights. It is changed: evaluation mode, on ``device``, in the
            specification's precision.
        spec: Describes the model; ``embedding_dim`` 0 is filled in from what the network gives.
        path: The file to write.
        device: Where to trace. A file traced on the CPU runs on a GPU too.
        real_tiles: (N, H, W, C) uint8 of the specification's tile size.

    Raises:
        CheckpointError: The network cannot be traced, gives something else than the
            specification says, or the file gives something else than the network.
    """
    network = network.eval().to(device)
    batches = [random_inputs(expected_inputs(spec), rows=4)]
    if real_tiles is not None:
        # Every tile of a slide comes with the same further inputs.
        extra = [values[:1].expand(len(real_tiles), -1) for values in batches[0][1:]]
        batches.append([_as_input(real_tiles, spec), *extra])
    eager = tile_model(network, spec.with_(precision="fp32")).to(device)
    with torch.inference_mode():
        wanted = [[o.cpu() for o in eager(*(v.to(device) for v in batch))] for batch in batches]
    spec = _complete(spec, wanted[0])
    network.to(_DTYPES[spec.precision])
    program = trace(tile_model(network, spec).to(device), spec, device=device)
    # Behind the checks that every file passes before it runs, and under its final name only then.
    folder = beside(path)
    try:
        candidate = folder / path.name
        save(program, spec, candidate)
        runner = open_runner(candidate, device=device, spec=spec)
        worst = [
            worst_cosine(want, runner(*batch)) for want, batch in zip(wanted, batches, strict=True)
        ]
        if min(worst) < LOWEST_COSINE[spec.precision]:
            raise CheckpointError(
                f"{path.name}: not written: its results differ from the network's (worst cosine "
                f"{min(worst):.6f}, at least {LOWEST_COSINE[spec.precision]} wanted for "
                f"{spec.precision}); try --precision fp32"
            )
        candidate.replace(path)
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be written: {exc}") from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ExportReport(
        path=path,
        spec=spec,
        worst_random=worst[0],
        worst_real=worst[1] if real_tiles is not None else None,
    )


def _as_input(tiles: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    if spec.input_layout == "nhwc_uint8":
        return tiles
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std))
    floats: torch.Tensor = (tiles.permute(0, 3, 1, 2).float() / 255.0 - mean) / std
    return floats


def _complete(spec: ModelSpec, outputs: Sequence[torch.Tensor]) -> ModelSpec:
    """Widths that the specification leaves open, from what the network gave."""
    if len(outputs) != len(expected_outputs(spec)):
        raise CheckpointError(
            f"{spec.name}: the network gives {len(outputs)} outputs, a model that makes "
            f"{spec.output_kind.replace('_', ' ')} gives {len(expected_outputs(spec))}"
        )
    changes = {}
    if spec.makes_embedding:
        width = outputs[-1].shape[-1]
        if spec.embedding_dim not in (0, width):
            raise CheckpointError(
                f"{spec.name}: the network gives {width} values, {spec.name} gives "
                f"{spec.embedding_dim}; are these the weights of another model?"
            )
        changes["embedding_dim"] = width
    if spec.makes_prediction and not spec.prediction_dim:
        changes["prediction_dim"] = outputs[0].shape[-1]
    return spec.with_(**changes)


def random_inputs(specs: Sequence[TensorSpec], *, rows: int) -> list[torch.Tensor]:
    """Inputs of the shapes given, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for spec in specs:
        shape = (rows, *spec.shape)
        if spec.dtype == "uint8":
            inputs.append(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
        else:
            # As log1p of expression values, and as normalised pixels in size.
            inputs.append(torch.rand(shape, generator=generator) * 3)
    return inputs


def worst_cosine(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The least cosine between the rows of two runs; -1 where shapes differ or values are NaN."""
    worst = 1.0
    for want, have in zip(wanted, found, strict=True):
        if want.shape != have.shape or not torch.isfinite(have).all():
            return -1.0
        a, b = want.flatten(1).double(), have.flatten(1).double()
        cosine = torch.nn.functional.cosine_similarity(a, b)
        # Two rows of zeros are the same, though they have no direction.
        cosine[(a == b).all(1)] = 1.0
        worst = min(worst, float(cosine.min())) if len(cosine) else worst
    return worst
