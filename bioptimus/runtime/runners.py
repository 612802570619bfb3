"""One way to call a loaded ``.pt2``, whatever kind it is: checked inputs, no GIL, float32 out.

A runner is shared by every thread of the process. What it promises, and why:

- **Inputs are checked before every call.** A compiled program checks nothing: a wrong size,
  layout, dtype or a strided tensor gives plausible garbage or kills the process.
- **The interpreter lock is free during the pass**, so that readers and event loops go on.
- **A semaphore bounds the passes under way.** More threads than cores cost throughput.
- **Batches of any length are answered**: none gives empty outputs, one beyond the program's
  limit is run in parts, one below it is padded and cut.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bioptimus.errors import CheckpointError, _ForwardError
from bioptimus.models.types import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

# Neither loader is safe to run twice at once in one process.
LOADING = threading.Lock()


class Runner(Protocol):
    """A loaded model that any thread may call.

    Attributes:
        device: Where it computes, such as ``cpu`` or ``cuda:0``.
        max_batch: Most tiles of one pass; longer batches are split. None: no limit known.
    """

    device: str
    max_batch: int | None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run one batch.

        Args:
            inputs: Tiles (N, H, W, C) uint8 or (N, C, H, W) float32 as the spec's
                ``input_layout`` says, then bulk RNA (N, G) float32 where the model takes it.
                On the CPU or on the runner's device.

        Returns:
            The outputs, float32 on the CPU, N rows each: for ``prediction_and_embedding`` the
            prediction, then the embedding.

        Raises:
            _ForwardError: The inputs do not fit the program, or the pass failed.
        """


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a program says about one input or output.

    Attributes:
        dtype: Such as ``uint8`` or ``float32``.
        shape: Sizes of each row, that is, without the batch.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Such as ``uint8 (N, 224, 224, 3)``."""
        return f"{self.dtype} ({', '.join(['N', *map(str, self.shape)])})"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Inputs, outputs and batch lengths that a program was exported for.

    Attributes:
        inputs: In the order of the call.
        outputs: In the order of the returned tuple.
        min_batch: Fewest rows; shorter batches are padded.
        max_batch: Most rows; longer batches are split. None: no limit.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    min_batch: int = 1
    max_batch: int | None = None

    def check(self, inputs: Sequence[torch.Tensor]) -> int:
        """Refuse inputs that the program was not exported for.

        Returns:
            The number of rows.

        Raises:
            _ForwardError: Count, dtype or shape differ.
        """
        if len(inputs) != len(self.inputs):
            wanted = ", ".join(map(str, self.inputs))
            raise _ForwardError(
                f"the model takes {len(self.inputs)} inputs ({wanted}), got {len(inputs)}"
            )
        rows = inputs[0].shape[0] if inputs[0].ndim else -1
        for wanted_spec, given in zip(self.inputs, inputs, strict=True):
            dtype = str(given.dtype).removeprefix("torch.")
            # A float graph of another width is the runner's to convert; uint8 is not a float.
            same_kind = dtype == wanted_spec.dtype or (
                dtype == "float32" and wanted_spec.dtype in ("float16", "bfloat16")
            )
            if not same_kind or given.ndim == 0 or tuple(given.shape) != (rows, *wanted_spec.shape):
                raise _ForwardError(
                    f"the model takes {wanted_spec}, got {dtype} {tuple(given.shape)}"
                )
        return rows


class PortableRunner:
    """A ``torch.export`` archive, run by torch's own operators.

    Args:
        program: The loaded program, on ``device`` already.
        device: Such as ``cpu`` or ``cuda:0``.
        slots: Passes that may be under way at once.
    """

    def __init__(self, program: ExportedProgram, *, device: str, slots: int) -> None:
        self.device = device
        self.signature = _signature_of(program)
        self.max_batch = self.signature.max_batch
        self._module = program.module()
        self._slots = threading.BoundedSemaphore(slots)

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`Runner`."""
        return run_in_parts(self.signature, inputs, self._pass)

    def _pass(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        import torch

        with self._slots, torch.inference_mode():
            outputs = self._module(*(tensor.to(self.device) for tensor in inputs))
            if isinstance(outputs, torch.Tensor):
                outputs = (outputs,)
            return tuple(output.to("cpu", torch.float32) for output in outputs)


def run_in_parts(
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    run: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Check the inputs and run them in batches that the program takes.

    Args:
        signature: What the program takes.
        inputs: Whole batch, N rows each.
        run: Runs one part: contiguous tensors of the program's dtypes, a length that it takes.

    Returns:
        Outputs of N rows each.

    Raises:
        _ForwardError: The inputs do not fit.
    """
    import torch

    rows = signature.check(inputs)
    inputs = [
        given.detach().to(getattr(torch, wanted.dtype)).contiguous()
        for wanted, given in zip(signature.inputs, inputs, strict=True)
    ]
    if rows == 0:
        return tuple(torch.empty((0, *output.shape)) for output in signature.outputs)
    step = signature.max_batch or rows
    if rows <= step and rows >= signature.min_batch:
        return run(inputs)
    parts = []
    for start in range(0, rows, step):
        part = [tensor[start : start + step] for tensor in inputs]
        count = part[0].shape[0]
        missing = max(0, signature.min_batch - count)
        if missing:
            part = [
                torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
                for tensor in part
            ]
        parts.append([output[:count] for output in run(part)])
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def default_slots(device: str) -> int:
    """Passes to run at once: as many as fill the cores, or enough to keep a GPU fed."""
    import torch

    if device.startswith("cuda"):
        return 3
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // torch.get_num_threads())


def open_runner(path: Path, *, device: str, spec: ModelSpec) -> Runner:
    """Load a ``.pt2``.

    Args:
        path: A ``torch.export`` archive. Loading it runs code from it.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        spec: What the caller expects of it.

    Returns:
        The runner.

    Raises:
        CheckpointError: The file cannot be loaded, or takes or gives something else than the
            spec says.
    """
    import torch

    with LOADING:
        try:
            program = torch.export.load(path)
        except Exception as exc:  # torch documents no error types; this is its border
            raise CheckpointError(f"{path}: torch cannot load it: {_first_line(exc)}") from exc
        if device != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return PortableRunner(program, device=device, slots=default_slots(device))


def _signature_of(program: ExportedProgram) -> Signature:
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    inputs = [nodes[str(name)].meta["val"] for name in signature.user_inputs]
    outputs = [nodes[str(name)].meta["val"] for name in signature.user_outputs]
    batch = inputs[0].shape[0]
    if isinstance(batch, int):
        lower: int = batch
        upper: int | None = batch
    else:
        bounds = ranges.get(str(batch))
        lower = max(1, int(bounds.lower)) if bounds else 1
        finite = bounds is not None and bounds.upper.is_finite
        upper = int(bounds.upper) if bounds and finite else None
    return Signature(
        inputs=tuple(map(_tensor_spec, inputs)),
        outputs=tuple(map(_tensor_spec, outputs)),
        min_batch=lower,
        max_batch=upper,
    )


def _tensor_spec(fake: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        dtype=str(fake.dtype).removeprefix("torch."), shape=tuple(map(int, fake.shape[1:]))
    )


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
