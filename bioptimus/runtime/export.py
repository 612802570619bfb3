"""A torch module → a self-describing portable ``.pt2``."""

import io
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.torch_version import TorchVersion

from bioptimus.errors import CheckpointError, release_frames
from bioptimus.inference.disk import remove_abandoned, temporary_beside
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.archive import DESCRIPTION, TensorSpec
from bioptimus.runtime.fitting import expected_inputs, expected_outputs, pool_tokens
from bioptimus.runtime.machine import free_memory
from bioptimus.runtime.runners import first_line, open_runner

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)

LARGEST_BATCH = 1024
# What tracing looks at. Not 1, which would be taken for a constant; and not less than 16, since
# torch chooses convolutions for the CPU by asking whether a batch has 16 rows, and a compiled
# program would take batches on the example's side of that border only.
EXAMPLE_BATCH = 16

LOWEST_COSINE = {"fp32": 0.9999, "bf16": 0.999, "fp16": 0.999}
"""What a program's outputs must reach against the model it was made from, by precision."""

# Of the memory that is free, for float64 weights of the reference; the rest is for what a pass
# makes and for those who use the machine too.
_SHARE_FOR_WEIGHTS = 0.8


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


@contextmanager
def _as_any_build() -> Iterator[None]:
    """Have torch state its version without the build's (``+cpu``): the same bytes from each."""
    stated = torch.__version__
    torch.__version__ = TorchVersion(stated.partition("+")[0])
    try:
        yield
    finally:
        torch.__version__ = stated


def save(program: ExportedProgram, spec: ModelSpec, path: Path) -> None:
    """Write a program with its description, whole or not at all.

    Args:
        program: From :func:`trace`.
        spec: Goes into the archive.
        path: The final name; its folder is made if need be.

    Raises:
        CheckpointError: The file cannot be written.
    """
    with _made_aside(path) as candidate:
        _write(program, spec, candidate)


def _write(program: ExportedProgram, spec: ModelSpec, path: Path) -> None:
    with quiet(), _as_any_build(), file_for_torch(path) as file:
        torch.export.save(program, file, extra_files={DESCRIPTION: json.dumps(spec.to_dict())})


@contextmanager
def _made_aside(path: Path) -> Iterator[Path]:
    """A name to write a file under; it gets its own once the block has gone well.

    Raises:
        CheckpointError: The file, or anything in the block, cannot be written.
    """
    remove_abandoned([path])
    folder = temporary_beside(path)
    try:
        folder.mkdir(parents=True)
        candidate = folder / "model.pt2"  # torch's loader wants this ending
        yield candidate
        candidate.replace(path)
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be written: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def file_for_torch(path: Path) -> Iterator[io.FileIO]:
    """A new file for torch to write an archive to; it is on the disk at the end of the block.

    torch's writer of archives, told of a full disk by an exception, writes once more while it is
    being taken down, and the second exception ends the process. So it is told nothing, and the
    block's end raises.

    Raises:
        OSError: The file cannot be written.
    """
    with _QuietFile(path, "wb") as file:
        yield file
        if file.error is not None:
            raise file.error
        os.fsync(file.fileno())


class _QuietFile(io.FileIO):
    """Takes everything; keeps the first error, and nothing that comes after it."""

    error: OSError | None = None

    def write(self, data: "ReadableBuffer", /) -> int:
        left = memoryview(data).cast("B")
        size = left.nbytes
        while left and self.error is None:
            try:
                left = left[super().write(left) :]
            except OSError as exc:
                self.error = exc
        return size


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
        dtype: Of the network, where it is another than the specification's precision; for
            float64 everything is, what comes out too.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self, network: nn.Module, spec: ModelSpec, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.spec = spec
        self.dtype = dtype or _DTYPES[spec.precision]
        # What is around the network, also around one of half precision.
        self.outer = torch.float64 if self.dtype == torch.float64 else torch.float32
        shape = (1, spec.channels, 1, 1)
        self.register_buffer("mean", torch.tensor(spec.mean, dtype=self.outer).view(shape))
        self.register_buffer("std", torch.tensor(spec.std, dtype=self.outer).view(shape))

    def forward(self, tiles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the class."""
        return self.run(tiles)

    def run(self, tiles: torch.Tensor, *extra: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Normalise, compute, pool."""
        if self.spec.input_layout == "nhwc_uint8":
            tiles = (tiles.permute(0, 3, 1, 2).to(self.outer) / 255.0 - self.mean) / self.std
        images = tiles.to(self.dtype, memory_format=torch.contiguous_format)
        outputs = self.network(images, *(values.to(self.dtype) for values in extra))
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        *others, last = (output.to(self.outer) for output in outputs)
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


def tile_model(
    network: nn.Module, spec: ModelSpec, *, dtype: torch.dtype | None = None
) -> TileModel:
    """The network with what its specification says around it."""
    return (TileAndRnaModel if spec.rna_dim else TileModel)(network, spec, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How near two runs are to each other, at the worst of their rows.

    Attributes:
        cosine: Least cosine between two rows; -1 where shapes differ or values are not finite.
        length_error: Largest difference of two rows' lengths (Euclidean norms), as a share of the
            wanted one. The cosine is blind to scale: twice the values have a cosine of 1.
    """

    cosine: float = 1.0
    length_error: float = 0.0

    def within(self, precision: str) -> bool:
        """Whether it is what a program of this precision must reach."""
        lowest = LOWEST_COSINE[precision]
        # A cosine of c stands for an error of sqrt(2 (1 - c)) lengths across the row: along it,
        # no more than that is allowed either.
        return self.cosine >= lowest and self.length_error <= math.sqrt(2 * (1 - lowest))

    def worst_of(self, other: Self) -> Self:
        """The worse of both, each by itself."""
        return type(self)(
            cosine=min(self.cosine, other.cosine),
            length_error=max(self.length_error, other.length_error),
        )

    def __str__(self) -> str:
        """Such as ``cosine 0.999998, length off by 0.01 %``."""
        return f"cosine {self.cosine:.6f}, length off by {100 * self.length_error:.2g} %"


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did.

    Attributes:
        path: The file written.
        spec: The description inside.
        compared_to: What the file's results were compared with: ``float64`` is the network itself
            in double precision; ``float32 (why)`` where that could not be had.
        worst_random: Least cosine to the eager network over random tiles.
        worst_real: The same over real tiles; None where none were given.
        worst_length_error: Largest relative difference of a row's length, over all tiles.
    """

    path: Path
    spec: ModelSpec
    compared_to: str
    worst_random: float
    worst_real: float | None
    worst_length_error: float


def export_module(
    network: nn.Module,
    spec: ModelSpec,
    path: Path,
    *,
    device: str = "cpu",
    real_tiles: torch.Tensor | None = None,
) -> ExportReport:
    """Write a network as a self-describing portable ``.pt2``, if the file gives what it gives.

    The file is loaded again and compared with the eager network in float64, on random tiles and
    on real ones; a file that fails is not written. Where float64 cannot be had, for want of memory
    or because the network does not compute in it, the reference is float32. How well they agreed
    differs between processors, so it is in the report and not in the file: the same weights give
    the same bytes on each, else results would count as made from two models.

    Args:
        network: Of float32 weights. It is changed: evaluation mode, on ``device``, in the
            specification's precision.
        spec: Describes the model; ``embedding_dim`` 0 is filled in from what the network gives.
        path: The file to write.
        device: Where to trace. A file traced on the CPU runs on a GPU too.
        real_tiles: (N, H, W, C) uint8 of the specification's tile size.

    Raises:
        CheckpointError: The network cannot be run or traced, gives something else than the
            specification says, or the file gives something else than the network.
    """
    # Behind the checks that every file passes before it runs, and under its final name only then;
    # before anything that takes long, since there may be no room to write.
    with _made_aside(path) as candidate:
        return _export(network, spec, path, candidate, device=device, real_tiles=real_tiles)


def _export(
    network: nn.Module,
    spec: ModelSpec,
    path: Path,
    candidate: Path,
    *,
    device: str,
    real_tiles: torch.Tensor | None,
) -> ExportReport:
    network = network.eval().to(device)
    batches = [random_inputs(expected_inputs(spec), rows=4)]
    if real_tiles is not None:
        # Every tile of a slide comes with the same further inputs.
        extra = [values[:1].expand(len(real_tiles), -1) for values in batches[0][1:]]
        batches.append([_as_input(real_tiles, spec), *extra])
    wanted, compared_to = _reference(network, spec, batches, device=device)
    spec = _complete(spec, wanted[0])
    if not all(torch.isfinite(output).all() for outputs in wanted for output in outputs):
        raise CheckpointError(
            f"{spec.name}: the network itself gives NaN or infinity; are its weights and its mean "
            "and deviation right?"
        )
    network.to(_DTYPES[spec.precision])
    program = trace(tile_model(network, spec).to(device), spec, device=device)
    _write(program, spec, candidate)
    runner = open_runner(candidate, device=device, spec=spec)
    found = [agreement(w, runner(*batch)) for w, batch in zip(wanted, batches, strict=True)]
    worst = reduce(Agreement.worst_of, found)
    if not worst.within(spec.precision):
        raise CheckpointError(f"{path.name}: not written: {_difference(worst, spec)}")
    return ExportReport(
        path=path,
        spec=spec,
        compared_to=compared_to,
        worst_random=found[0].cosine,
        worst_real=found[1].cosine if real_tiles is not None else None,
        worst_length_error=worst.length_error,
    )


def _reference(
    network: nn.Module, spec: ModelSpec, batches: Sequence[Sequence[torch.Tensor]], *, device: str
) -> tuple[list[list[torch.Tensor]], str]:
    """What the network gives for some batches, in float64 if it can, and how it was computed.

    Raises:
        CheckpointError: The network fails.
    """
    reason = _no_room_for_float64(network, device)
    if not reason:
        try:
            return _eager(network, spec, batches, dtype=torch.float64, device=device), "float64"
        except Exception as exc:  # noqa: BLE001 - the user's own code; anything may come out
            # Such as a network that names float32 inside, or activations that do not fit.
            words = "".join(c if c.isprintable() else " " for c in first_line(exc))
            reason = f"in float64 it fails: {words}"
            log.info("%s: %s", spec.name, reason)
            release_frames(exc)
    try:
        found = _eager(network, spec, batches, dtype=torch.float32, device=device)
    except Exception as exc:  # the user's own code; anything may come out of it
        raise CheckpointError(
            f"{spec.name}: the network fails on {spec.tile.size_px} px tiles: {first_line(exc)}"
        ) from exc
    return found, f"float32 ({reason})"


def _eager(
    network: nn.Module,
    spec: ModelSpec,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: str,
) -> list[list[torch.Tensor]]:
    model = tile_model(network.to(dtype), spec, dtype=dtype).to(device)
    with torch.inference_mode():
        return [[o.cpu() for o in model(*(v.to(device) for v in batch))] for batch in batches]


def _no_room_for_float64(network: nn.Module, device: str) -> str:
    """Why the weights in float64 do not fit beside what is there; empty if they do."""
    tensors = [*network.parameters(), *network.buffers()]
    # They are converted in place, one after the other.
    more = sum(t.numel() * (8 - t.element_size()) for t in tensors if t.is_floating_point())
    free = free_memory(device)
    if more <= _SHARE_FOR_WEIGHTS * free:
        return ""
    return f"float64 takes {more / 1e9:.1f} GB more than there was memory for"


def _difference(found: Agreement, spec: ModelSpec) -> str:
    """What is wrong with a file, and what to do."""
    if math.isinf(found.length_error) and found.cosine == -1:
        advice = {
            "fp16": "fp16 ends at 65,504; try --precision bf16",
            "bf16": "try --precision fp32",
            "fp32": "does the network give the same in each call, in evaluation mode?",
        }
        return (
            "it gives NaN, infinity or another number of values where the network does not; "
            f"{advice[spec.precision]}"
        )
    advice_on_precision = "try --precision fp32"
    if spec.precision == "fp32":
        advice_on_precision = "does the network give the same in each call, in evaluation mode?"
    lowest = LOWEST_COSINE[spec.precision]
    return (
        f"its results differ from the network's (worst {found}; wanted for {spec.precision} are "
        f"{lowest} and {100 * math.sqrt(2 * (1 - lowest)):.2g} %); {advice_on_precision}"
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


def agreement(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Agreement:
    """How near what was found is to what was wanted, (N, ...) each, row by row."""
    worst = Agreement()
    for want, have in zip(wanted, found, strict=True):
        if want.shape != have.shape or not torch.isfinite(have).all():
            return Agreement(cosine=-1.0, length_error=math.inf)
        a, b = want.flatten(1).double(), have.flatten(1).double()
        # Two rows of zeros are the same, though they have no direction.
        differ = (a != b).any(1)
        a, b = a[differ], b[differ]
        if len(a):
            cosine = torch.nn.functional.cosine_similarity(a, b)
            length_error = (b.norm(dim=1) / a.norm(dim=1) - 1).abs()
            worst = worst.worst_of(
                Agreement(cosine=float(cosine.min()), length_error=float(length_error.max()))
            )
    return worst
