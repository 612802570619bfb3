"""A torch module → a self-describing portable ``.pt2``."""

import io
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.torch_version import TorchVersion

from bioptimus.errors import CheckpointError, _ForwardError, release_frames
from bioptimus.inference.disk import ANOTHER_OUT, remove_abandoned, temporary_beside
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

LARGEST_DIFFERING_SHARE = 0.01
"""Of a mask that the network itself cuts at a threshold, the share of a tile's pixels that may fall
on the other side: those that lie at the threshold, where the last digit decides."""

# What a tile alone must reach against the same tile in a batch: in float64 an error of 0.1 %, for a
# network that mixes the tiles of a batch may mix them thinly; else what precision alone may cost.
_LOWEST_COSINE_ALONE = {True: 1 - 5e-7, False: LOWEST_COSINE["fp32"]}

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
        words = first_line(exc)
        if "Constraints violated" in words:  # of the one axis that is free
            words = (
                "its code fixes the number of tiles in a batch, or branches on it; take it from "
                "x.shape[0], where len(x) and int() make it a constant, and reshape with -1"
            )
        raise CheckpointError(f"{spec.name}: torch.export cannot trace it: {words}") from exc
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


def save(
    program: ExportedProgram, spec: ModelSpec, path: Path, *, advice: str = ANOTHER_OUT
) -> None:
    """Write a program with its description, whole or not at all.

    Args:
        program: From :func:`trace`.
        spec: Goes into the archive.
        path: The final name; its folder is made if need be.
        advice: The next step, told where it cannot be written.

    Raises:
        CheckpointError: The file cannot be written.
    """
    with _made_aside(path, advice=advice) as candidate:
        _write(program, spec, candidate)


def _write(program: ExportedProgram, spec: ModelSpec, path: Path) -> None:
    with quiet(), _as_any_build(), file_for_torch(path) as file:
        torch.export.save(program, file, extra_files={DESCRIPTION: json.dumps(spec.to_dict())})


@contextmanager
def _made_aside(path: Path, *, advice: str = ANOTHER_OUT) -> Iterator[Path]:
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
        raise CheckpointError(
            f"{path}: cannot be written: {exc.strerror or exc}; {advice}"
        ) from exc
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
        network: Takes (N, C, H, W); gives (N, D), tokens (N, T, D), or a pair of outputs, the
            prediction first.
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
        """Normalise, compute, pool.

        Raises:
            CheckpointError: The network gives something else than tensors of real numbers.
        """
        if self.spec.input_layout == "nhwc_uint8":
            tiles = (tiles.permute(0, 3, 1, 2).to(self.outer) / 255.0 - self.mean) / self.std
        images = tiles.to(self.dtype, memory_format=torch.contiguous_format)
        outputs = self.network(images, *(values.to(self.dtype) for values in extra))
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        if (
            not isinstance(outputs, (tuple, list))
            or not outputs
            or not all(isinstance(each, torch.Tensor) for each in outputs)
        ):
            raise _wrong_form(self.spec, _form(outputs))
        if any(output.is_complex() for output in outputs):
            raise _wrong_form(self.spec, "complex numbers")
        *others, last = (output.to(self.outer) for output in outputs)
        if self.spec.output_kind == "mask" and last.ndim == 4 and last.shape[1] == 1:
            last = last[:, 0]
        if self.spec.makes_embedding and last.ndim == 3 and self.spec.pooling != "none":
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


_FORMS = {
    "embedding": "one tensor (N, D), or tokens (N, T, D) with --pooling cls, mean or cls_mean",
    "prediction": "one tensor (N, K)",
    "prediction_and_embedding": (
        "a pair, the prediction (N, K) first, then the embedding (N, D), or tokens (N, T, D) with "
        "--pooling"
    ),
    "mask": "one tensor (N, H, W) or (N, 1, H, W) of the tile's height and width",
}
"""What a network must return, by what the user says that it gives; N are the tiles."""


def _wrong_form(spec: ModelSpec, found: str) -> CheckpointError:
    return CheckpointError(
        f"{spec.name}: the network returns {found}; for --gives {spec.output_kind} it must return "
        f"{_FORMS[spec.output_kind]}"
    )


def _form(outputs: object, *, rows: int = -1) -> str:
    """What a network returned, in words; of tensors the shapes, of which ``rows`` is called N."""
    if isinstance(outputs, torch.Tensor):
        sizes = ["N" if size == rows else str(int(size)) for size in outputs.shape[:1]]
        sizes += [str(int(size)) for size in outputs.shape[1:]]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
    if isinstance(outputs, (tuple, list)):
        listed = " and ".join(_form(each, rows=rows) for each in outputs)
        return f"a {type(outputs).__name__} of {listed or 'nothing'}"
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with the keys {', '.join(map(str, outputs))}"
    return f"a {type(outputs).__name__}"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How near two runs are to each other, at the worst of their rows.

    Attributes:
        cosine: Least cosine between two rows; -1 where shapes differ or values are not finite.
        length_error: Largest difference of two rows' lengths (Euclidean norms), as a share of the
            wanted one. The cosine is blind to scale: twice the values have a cosine of 1.
        differing_share: Of masks with two values only, which count in neither of the others: the
            largest share of a tile's pixels that have the other value, 0..1.
    """

    cosine: float = 1.0
    length_error: float = 0.0
    differing_share: float = 0.0

    def within(self, precision: str) -> bool:
        """Whether it is what a program of this precision must reach."""
        return self.reaches(LOWEST_COSINE[precision])

    def reaches(self, lowest: float) -> bool:
        """Whether it is at least that of a cosine of ``lowest``, in direction and in length."""
        # A cosine of c stands for an error of sqrt(2 (1 - c)) lengths across the row: along it,
        # no more than that is allowed either.
        return (
            self.cosine >= lowest
            and self.length_error <= math.sqrt(2 * (1 - lowest))
            and self.differing_share <= LARGEST_DIFFERING_SHARE
        )

    def worst_of(self, other: Self) -> Self:
        """The worse of both, each by itself."""
        return type(self)(
            cosine=min(self.cosine, other.cosine),
            length_error=max(self.length_error, other.length_error),
            differing_share=max(self.differing_share, other.differing_share),
        )

    def __str__(self) -> str:
        """Such as ``cosine 0.999998, length off by 0.01 %``, or of masks the share of pixels."""
        if self.differing_share:
            return f"{100 * self.differing_share:.2g} % of the pixels differ"
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
        worst_differing_share: Of a mask that the network cuts at a threshold, the largest share of
            a tile's pixels that have the other value, 0..1; the three above are not of such masks.
    """

    path: Path
    spec: ModelSpec
    compared_to: str
    worst_random: float
    worst_real: float | None
    worst_length_error: float
    worst_differing_share: float


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
    spec = _complete(spec, wanted[0], rows=len(batches[0][0]))
    if not all(torch.isfinite(output).all() for outputs in wanted for output in outputs):
        raise CheckpointError(
            f"{spec.name}: the network itself gives NaN or infinity; {_why_not_finite(network)}"
        )
    _refuse_mixed_tiles(network, spec, batches[0], wanted[0], device=device)
    network.to(_DTYPES[spec.precision])
    # torch prints all of a network that it cannot trace, before it raises.
    with redirect_stderr(io.StringIO()):
        program = trace(tile_model(network, spec).to(device), spec, device=device)
    _write(program, spec, candidate)
    runner = open_runner(candidate, device=device, spec=spec)
    try:
        found = [agreement(w, runner(*batch)) for w, batch in zip(wanted, batches, strict=True)]
    except _ForwardError as exc:
        raise CheckpointError(
            f"{path.name}: not written: in {spec.precision} {exc}; does the network convert its "
            "images to another dtype than that of its weights?"
        ) from exc
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
        worst_differing_share=worst.differing_share,
    )


def _why_not_finite(network: nn.Module) -> str:
    """Where to look when a network gives NaN or infinity."""
    weights = network.state_dict()
    # Infinity may be meant, as in a mask of attention.
    broken = [
        name
        for name, value in weights.items()
        if isinstance(value, torch.Tensor) and value.isnan().any()
    ]
    if broken:
        return (
            f"{len(broken)} of its {len(weights)} weights hold NaN, such as {broken[0]}: is the "
            "checkpoint whole?"
        )
    return "are its weights and its mean and deviation right?"


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
        except CheckpointError:
            raise  # what it returns has a wrong form, in any precision
        except Exception as exc:  # noqa: BLE001 - the user's own code; anything may come out
            # Such as a network that names float32 inside, or activations that do not fit.
            words = "".join(c if c.isprintable() else " " for c in first_line(exc))
            reason = f"in float64 it fails: {words}"
            log.info("%s: %s", spec.name, reason)
            release_frames(exc)
    try:
        found = _eager(network, spec, batches, dtype=torch.float32, device=device)
    except CheckpointError:
        raise
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
    if found.differing_share > LARGEST_DIFFERING_SHARE:
        return (
            f"its masks differ from the network's (worst {found}; at most "
            f"{100 * LARGEST_DIFFERING_SHARE:g} % may); {advice_on_precision}"
        )
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


def _refuse_mixed_tiles(
    network: nn.Module,
    spec: ModelSpec,
    batch: Sequence[torch.Tensor],
    together: Sequence[torch.Tensor],
    *,
    device: str,
) -> None:
    """Refuse a network in which the tiles of a batch have a part in each other's results.

    A slide's tiles are batched as they come, so its results would be different ones in each run.

    Args:
        network: As the reference left it, of its dtype.
        spec: Of the model.
        batch: Some tiles, with their further inputs.
        together: What the network gives for them.
        device: Where the network is.

    Raises:
        CheckpointError: A tile alone has another result, or every call has.
    """
    dtype = together[0].dtype
    singles = [[values[i : i + 1] for values in batch] for i in range(len(batch[0]))]
    rows = _eager(network, spec, singles, dtype=dtype, device=device)
    alone = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    found = agreement(together, alone)
    lowest = _LOWEST_COSINE_ALONE[dtype == torch.float64]
    if not found.reaches(lowest):
        (again,) = _eager(network, spec, [batch], dtype=dtype, device=device)
        if not agreement(together, again).reaches(lowest):
            raise CheckpointError(
                f"{spec.name}: the network gives something else in each call, though in evaluation "
                "mode; is there a dropout, or a random number, that is never off?"
            )
        raise CheckpointError(
            f"{spec.name}: the network gives a tile alone something else than the same tile in a "
            f"batch of {len(singles)} (worst {found}); results would depend on the batch, so let "
            "no layer mix tiles (such as batch statistics, or attention along the first axis)"
        )


def _complete(spec: ModelSpec, outputs: Sequence[torch.Tensor], *, rows: int) -> ModelSpec:
    """Check what the network gave, and take the widths that the specification leaves open.

    Args:
        spec: Says what it should give.
        outputs: What it gave, pooled.
        rows: Number of tiles that it was given.

    Raises:
        CheckpointError: It is something else.
    """
    found = _form(tuple(outputs) if len(outputs) > 1 else outputs[0], rows=rows)
    side = spec.tile.size_px
    shapes = {(rows, side, side), (rows, 1, side, side)} if spec.output_kind == "mask" else None
    if len(outputs) != len(expected_outputs(spec)) or not all(
        tuple(output.shape) in shapes
        if shapes
        else output.ndim == 2 and len(output) == rows and output.shape[1]
        for output in outputs
    ):
        raise _wrong_form(spec, found)
    changes = {}
    if spec.makes_prediction:
        width = outputs[0].shape[-1]
        if spec.prediction_dim not in (0, width):
            other_way = len(outputs) == 2 and outputs[1].shape[-1] == spec.prediction_dim
            advice = (
                "; the prediction must come first, then the embedding"
                if other_way
                else "; give as many names as there are values"
            )
            raise CheckpointError(
                f"{spec.name}: the network returns {found}: a prediction of {width} values, and "
                f"--output-names names {spec.prediction_dim}{advice}"
            )
        changes["prediction_dim"] = width
    if spec.makes_embedding:
        width = outputs[-1].shape[-1]
        if spec.embedding_dim not in (0, width):
            raise CheckpointError(
                f"{spec.name}: the network gives {width} values, {spec.name} gives "
                f"{spec.embedding_dim}; are these the weights of another model?"
            )
        changes["embedding_dim"] = width
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
        if want.ndim > 2 and _two_values(want.float(), have.float()):
            shares = (want.float() != have.float()).flatten(1).double().mean(1)
            worst = worst.worst_of(Agreement(differing_share=float(shares.max())))
            continue
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


def _two_values(*masks: torch.Tensor) -> bool:
    """Whether masks hold two values in all, and not two roundings of one."""
    low = min(float(mask.min()) for mask in masks)
    high = max(float(mask.max()) for mask in masks)
    if not high - low > 1e-3 * max(abs(low), abs(high)):
        return False
    return all(bool(((mask == low) | (mask == high)).all()) for mask in masks)
