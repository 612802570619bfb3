"""One way to call a loaded ``.pt2``, whatever kind it is: checked inputs, no GIL, float32 out.

A runner is shared by every thread of the process. What it promises, and why:

- **Inputs are checked before every call.** A compiled program checks nothing: a wrong size,
  layout, dtype or a strided tensor gives plausible garbage or kills the process.
- **The interpreter lock is free during the pass**, so that readers and event loops go on.
- **A semaphore bounds the passes under way.** More threads than cores cost throughput.
- **Batches of any length are answered**: none gives empty outputs, one beyond the program's
  limit is run in parts, one below it is padded and cut.
- **On a GPU a pass runs on its caller's stream**, or on one that is its thread's alone, with pinned
  memory both ways, and waits asleep on an event, without the lock: one thread's copies overlap
  another one's pass.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from bioptimus.errors import (
    CheckpointError,
    LostDeviceError,
    OutOfDeviceMemoryError,
    UsageError,
    _ForwardError,
)
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.archive import ArchiveInfo, Signature, inspect_archive
from bioptimus.runtime.fitting import adapter, check_fit, fit_spec, refuse_training, signature_of
from bioptimus.runtime.machine import available_cores, check_machine

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    Tensors = tuple[torch.Tensor, ...]

# torch refuses a number with zeros before it.
_DEVICE_NAME = re.compile(r"cpu|cuda(:(0|[1-9]\d*))?", re.ASCII)

# Neither loader is safe to run twice at once in one process.
LOADING = threading.Lock()

# Passes in flight on one GPU: one computes, one copies in, one copies out.
GPU_SLOTS = 3


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
            OutOfDeviceMemoryError: The batch does not fit into memory.
            LostDeviceError: The device works no more in this process.
            _ForwardError: The inputs do not fit the program, or the pass failed.
        """


class CheckedRunner:
    """What both kinds of program share: checks, splitting, slots, streams, errors.

    Args:
        signature: What the program takes and gives.
        device: Such as ``cpu`` or ``cuda:0``.
        slots: Passes that may be under way at once.
        adapt: Brings the outputs into the order and shapes of the model's specification.
    """

    is_compiled: ClassVar[bool] = False

    def __init__(
        self,
        signature: Signature,
        *,
        device: str,
        slots: int,
        adapt: Callable[[Tensors], Tensors] = tuple,
    ) -> None:
        self.device = device
        self.signature = signature
        self.max_batch = signature.max_batch
        self._adapt = adapt
        self._lanes = threading.local()
        self.set_concurrency(slots)

    def set_concurrency(self, passes: int) -> None:
        """Change how many passes may be under way at once; those that are go on.

        Args:
            passes: At least 1.
        """
        self._slots = threading.BoundedSemaphore(max(1, passes))

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`Runner`."""
        import torch

        rows = check_inputs(self.signature, inputs)
        with torch.inference_mode():
            parts = [self._run_part(part) for part in split(self.signature, inputs, rows=rows)]
            if not parts:
                empty = (torch.empty((0, *output.shape)) for output in self.signature.outputs)
                return self._adapt(tuple(empty))
            whole = (torch.cat(outputs)[:rows] for outputs in zip(*parts, strict=True))
            return parts[0] if len(parts) == 1 and len(parts[0][0]) == rows else tuple(whole)

    def compute(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Run contiguous inputs, on the device and of the program's dtypes, in the slot held."""
        raise NotImplementedError

    def _run_part(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        with self._slots:
            try:
                if self.device == "cpu":
                    outputs = self._adapt(self.compute([tensor.cpu() for tensor in inputs]))
                    return tuple(output.float().contiguous() for output in outputs)
                return self._run_on_gpu(inputs)
            except _ForwardError:
                raise
            except Exception as exc:  # torch documents no error types; this is the batch's edge
                raise forward_error(exc) from exc

    def _run_on_gpu(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        import torch

        with torch.cuda.device(self.device), torch.cuda.stream(self._stream()):
            moved = [_to_gpu(tensor, self.device) for tensor in inputs]
            outputs = [output.float() for output in self._adapt(self.compute(moved))]
            results = [torch.empty(o.shape, pin_memory=True) for o in outputs]
            for result, output in zip(results, outputs, strict=True):
                result.copy_(output, non_blocking=True)
            # Blocking means asleep: by default the thread would spin, on a core that decodes tiles.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()  # without the interpreter lock
        # Pinned memory is scarce and pooled: hand the pool its block back.
        return tuple(result.clone() for result in results)

    def _stream(self) -> torch.cuda.Stream:
        """The stream that the caller chose, or one that is this thread's alone."""
        import torch

        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            return current
        stream: torch.cuda.Stream | None = getattr(self._lanes, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._lanes.stream = stream
        # Inputs that are on the GPU already may still be in the making.
        stream.wait_stream(current)
        return stream


class PortableRunner(CheckedRunner):
    """A ``torch.export`` archive, run by torch's own operators, which free the lock."""

    def __init__(
        self,
        module: torch.nn.Module,
        signature: Signature,
        *,
        device: str,
        slots: int,
        adapt: Callable[[Tensors], Tensors] = tuple,
    ) -> None:
        super().__init__(signature, device=device, slots=slots, adapt=adapt)
        self._module = module

    def compute(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """See :class:`CheckedRunner`."""
        from torch.utils._pytree import tree_leaves

        # In the order of the signature, also where a foreign program holds them in a dictionary.
        return tuple(tree_leaves(self._module(*inputs)))


def check_inputs(signature: Signature, inputs: Sequence[torch.Tensor]) -> int:
    """Refuse inputs that the program was not exported for.

    Returns:
        The number of rows.

    Raises:
        _ForwardError: Count, dtype or shape differ.
    """
    if len(inputs) != len(signature.inputs):
        wanted = ", ".join(map(str, signature.inputs))
        raise _ForwardError(
            f"the model takes {len(signature.inputs)} inputs ({wanted}), got {len(inputs)}"
        )
    rows = inputs[0].shape[0] if inputs[0].ndim else -1
    for wanted_spec, given in zip(signature.inputs, inputs, strict=True):
        dtype = str(given.dtype).removeprefix("torch.")
        # A graph of another float width is ours to convert for; uint8 is another kind.
        same_kind = dtype == wanted_spec.dtype or (
            dtype == "float32" and wanted_spec.dtype in ("float16", "bfloat16", "float64")
        )
        if not same_kind or given.ndim == 0 or tuple(given.shape) != (rows, *wanted_spec.shape):
            raise _ForwardError(f"the model takes {wanted_spec}, got {dtype} {tuple(given.shape)}")
    return int(rows)


def split(
    signature: Signature, inputs: Sequence[torch.Tensor], *, rows: int
) -> list[list[torch.Tensor]]:
    """Cut a batch into parts that the program takes, contiguous and of its dtypes.

    A part shorter than the program's least is filled up with copies of its last row.
    """
    import torch

    step = signature.max_batch or max(rows, 1)
    parts = []
    for start in range(0, rows, step):
        part = []
        for wanted, given in zip(signature.inputs, inputs, strict=True):
            tensor = given.detach()[start : start + step].to(getattr(torch, wanted.dtype))
            missing = signature.min_batch - len(tensor)
            if missing > 0:
                tensor = torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
            part.append(tensor.contiguous())
        parts.append(part)
    return parts


def forward_error(exc: BaseException) -> _ForwardError:
    """Torch's failure as ours; a lack of memory and the loss of the device have their own class."""
    text = first_line(exc)
    if loses_device(exc):
        return LostDeviceError(f"the device failed: {text}")
    if lacks_memory(exc):
        return OutOfDeviceMemoryError(f"out of memory in the forward pass: {text}")
    return _ForwardError(f"the forward pass failed: {text}")


# What torch's allocators and CUDA's libraries say; a compiled program has no other way to tell.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "status_alloc_failed",
    "device_allocation_failed",
    # What a card without room for cuBLAS's own memory makes of the first multiplication.
    "when calling `cublascreate",
)


def lacks_memory(exc: BaseException) -> bool:
    """Whether a pass failed for want of memory, so that a smaller batch may work."""
    import torch

    if isinstance(exc, MemoryError | torch.OutOfMemoryError | OutOfDeviceMemoryError):
        return True
    text = str(exc).lower()
    return isinstance(exc, RuntimeError | OSError) and any(word in text for word in _OUT_OF_MEMORY)


# CUDA's words for errors after which "the process must be terminated and relaunched".
_DEVICE_LOST = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "global/shared address space",
    "context is destroyed",
    # No fault of the device, but as final: this torch has no code for it.
    "no kernel image is available",
)


def loses_device(exc: BaseException) -> bool:
    """Whether no later pass can succeed in this process, whatever it is given."""
    if isinstance(exc, LostDeviceError):
        return True
    text = str(exc).lower()
    return isinstance(exc, RuntimeError) and any(word in text for word in _DEVICE_LOST)


def still_works(device: str) -> bool:
    """Whether a device can be used after a failure.

    What spoils a process for CUDA makes each later call fail, this one too, whatever the words of
    the first failure were: a library on top of CUDA may have told it in its own.
    """
    if device == "cpu":
        return True
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def try_device(device: str) -> None:
    """Have a GPU compute something, and wait for that and all it was given before.

    Raises:
        RuntimeError: It cannot be used; torch's words.
    """
    import torch

    torch.ones(1, device=device).add_(1)
    torch.cuda.synchronize(device)


def release_cached_memory(device: str) -> None:
    """Give memory that torch keeps for later use back to the device; on the CPU, do nothing."""
    if device == "cpu":
        return
    import torch

    # Without naming the device, CUDA would occupy memory of the first one, to free nothing there.
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def first_line(exc: BaseException) -> str:
    """The first line of torch's often many."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def default_slots(device: str) -> int:
    """Passes to run at once: as many as fill the cores, or enough to keep a GPU fed."""
    import torch

    if device != "cpu":
        return GPU_SLOTS
    return max(1, available_cores() // torch.get_num_threads())


def open_runner(path: Path, *, device: str, spec: ModelSpec) -> Runner:
    """Load a ``.pt2`` after looking at it without running it.

    Args:
        path: A ``torch.export`` archive or an AOTInductor package. Loading runs code from it.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        spec: What the caller expects of it.

    Returns:
        The runner.

    Raises:
        CheckpointError: The file is damaged, foreign, made for another machine or device, or
            takes or gives something else than the spec says.
        UsageError: The device is not there.
    """
    return open_archive(inspect_archive(path), device=device, spec=spec)


def open_archive(info: ArchiveInfo, *, device: str, spec: ModelSpec) -> Runner:
    """As :func:`open_runner`, of a file that was looked at already."""
    signature, adapt = _fitting(info, device, spec)
    return _load(info, signature, device=device, adapt=adapt)


def run_module(
    module: torch.nn.Module, info: ArchiveInfo, *, device: str, spec: ModelSpec
) -> Runner:
    """Run the network that a portable ``.pt2`` was exported from, in its place.

    torch imports its whole tracer to load an archive, which takes longer than torch itself.

    Args:
        module: The network, in evaluation mode.
        info: The archive.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        spec: What the caller expects of it.

    Raises:
        CheckpointError: The archive takes or gives something else.
        UsageError: The device is not there.
    """
    signature, adapt = _fitting(info, device, spec)
    slots = default_slots(device)
    return PortableRunner(module.to(device), signature, device=device, slots=slots, adapt=adapt)


def _fitting(
    info: ArchiveInfo, device: str, spec: ModelSpec
) -> tuple[Signature, Callable[[Tensors], Tensors]]:
    """What a file takes and gives, and how to fit that to the spec, if it fits device and spec."""
    check_machine(info)
    check_device(info, device)
    signature = info.signature or replace(signature_of(spec), max_batch=info.batch_limit)
    fitted = fit_spec(spec, signature)
    check_fit(info.path, fitted, signature)
    return signature, adapter(fitted, signature)


def load_runner(path: Path, *, device: str) -> Runner:
    """Load a ``.pt2`` as it is, whatever it takes and gives; for comparing programs.

    Raises:
        CheckpointError: As :func:`open_runner`; also for a compiled file that does not say what
            it takes.
        UsageError: The device is not there.
    """
    info = inspect_archive(path)
    check_machine(info)
    check_device(info, device)
    if info.signature is None:
        raise CheckpointError(f"{path}: does not say what it takes")
    return _load(info, info.signature, device=device, adapt=tuple)


def _load(
    info: ArchiveInfo, signature: Signature, *, device: str, adapt: Callable[[Tensors], Tensors]
) -> Runner:
    slots = default_slots(device)
    with LOADING:
        if info.kind == "compiled":
            from bioptimus.runtime.compiled import CompiledRunner

            return CompiledRunner(info, signature, device=device, slots=slots, adapt=adapt)
        module = _load_portable(info, device)
    return PortableRunner(module, signature, device=device, slots=slots, adapt=adapt)


def load_program(path: Path) -> ExportedProgram:
    """``torch.export.load``, with the error that it has met.

    torch logs that one, with its traceback, tries the file as of an older format, and raises an
    error that points to the log.
    """
    import torch

    met: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            met.append(error)
        return error is None

    log = logging.getLogger("torch.export")
    log.addFilter(keep)
    try:
        return torch.export.load(path)
    except Exception as exc:
        if met:
            raise met[0] from exc
        raise
    finally:
        log.removeFilter(keep)


def _load_portable(info: ArchiveInfo, device: str) -> torch.nn.Module:
    path = info.path
    try:
        program = load_program(path)
        if info.spec is None:  # our export has compared what its files give
            refuse_training(path, program)
        if device != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return program.module()
    except CheckpointError:
        raise
    except Exception as exc:  # torch documents no error types; this is its border
        # Of a damaged archive, torch has three sentences more.
        words = first_line(exc).partition(". This is an internal")[0]
        raise CheckpointError(f"{path}: torch cannot load it: {words}") from exc


def check_device_name(device: str) -> None:
    """Refuse a word that names no device on any machine.

    Raises:
        UsageError: It is neither ``cpu`` nor ``cuda`` nor ``cuda:N``.
    """
    if not _DEVICE_NAME.fullmatch(device):
        raise UsageError(f"device {device}: known are cpu, cuda and cuda:N")


def require_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        UsageError: It names none, or one that is not here.
    """
    check_device_name(device)
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(f"device {device}: torch sees no NVIDIA GPU here; use --device cpu")
    count = torch.cuda.device_count()
    # Not torch's own reading, which takes 256 for 0.
    if int(device.partition(":")[2] or 0) >= count:
        there = "is 1 GPU" if count == 1 else f"are {count} GPUs"
        raise UsageError(f"device {device}: there {there} here, counted from 0")


def check_device(info: ArchiveInfo, device: str) -> None:
    """Refuse a device that is not there, or that the file was not made for.

    Raises:
        UsageError: No such device on this machine.
        CheckpointError: The file was compiled for another device or GPU architecture.
    """
    require_device(device)
    kind = device.split(":")[0]
    if info.device not in ("any", kind):
        made = "compiled" if info.kind == "compiled" else "exported"
        raise CheckpointError(
            f"{info.path}: {made} for {info.device}, asked to run on {kind}; use the portable "
            f"file (exported on a CPU), or --device {info.device}"
        )
    if kind == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        if info.compute_capability not in ("", f"{major}{minor}"):
            raise CheckpointError(
                f"{info.path}: compiled for a GPU of architecture {info.compute_capability}, "
                f"{device} has {major}{minor}; use the portable file, or compile it on this "
                "machine with `bioptimus models compile`"
            )


def _to_gpu(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.to(device)
    # Only from pinned memory does the copy run beside other work.
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
