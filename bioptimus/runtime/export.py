"""A torch module → a self-describing portable ``.pt2``."""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from bioptimus.errors import CheckpointError
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.archive import DESCRIPTION, TensorSpec
from bioptimus.runtime.cache import beside
from bioptimus.runtime.fitting import expected_inputs

log = logging.getLogger(__name__)

LARGEST_BATCH = 1024

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
    # Two rows: a batch of one would be taken for a constant.
    examples = tuple(
        torch.zeros((2, *wanted.shape), dtype=getattr(torch, wanted.dtype), device=device)
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
