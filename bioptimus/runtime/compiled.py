"""AOTInductor packages, called through their C interface so that the interpreter lock is free.

torch's own Python call holds the lock for the whole pass: every other thread and event loop of
the process stands still for a batch at a time. The package's library has a plain C interface;
``ctypes`` drops the lock around it, with the same bits coming out. Two private functions of
torch turn tensors into handles and back; where they are missing (another torch), or where a
program needs torch's own loader, the official call is used and said so in the log.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import weakref
import zipfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bioptimus.errors import CheckpointError
from bioptimus.runtime.archive import ArchiveInfo, Signature, file_sha256
from bioptimus.runtime.cache import beside, cache_errors, cache_folder, hold, prune
from bioptimus.runtime.machine import available_cores
from bioptimus.runtime.runners import CheckedRunner, first_line

log = logging.getLogger(__name__)

_Handle = ctypes.c_void_p
Tensors = tuple[torch.Tensor, ...]


class CompiledRunner(CheckedRunner):
    """A compiled program; its runners share the weights.

    Args:
        info: The file, inspected and found right for this machine.
        signature: What the program takes and gives.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        slots: Passes that may be under way at once.
        adapt: Brings the outputs into the order and shapes of the model's specification.
        official: Use torch's own call, which holds the interpreter lock.

    Raises:
        CheckpointError: The program cannot be loaded or has other inputs or outputs.
    """

    is_compiled = True

    def __init__(
        self,
        info: ArchiveInfo,
        signature: Signature,
        *,
        device: str,
        slots: int,
        adapt: Callable[[Tensors], Tensors] = tuple,
        official: bool = False,
    ) -> None:
        super().__init__(signature, device=device, slots=slots, adapt=adapt)
        if info.torch_version not in ("", torch.__version__):
            # Has worked each time it was tried, and nobody promises it.
            log.warning(
                "%s: compiled by torch %s, this is %s; if it fails, compile it again",
                info.path,
                info.torch_version,
                torch.__version__,
            )
        # Runners share the weights and cost next to nothing: enough for every later wish. On a
        # GPU each loads the kernels for itself, and all are used in turn.
        self._runners = max(slots, available_cores()) if device == "cpu" else slots
        folder = unpack(info)
        reason = _why_official(info) if not official else "asked for"
        if reason:
            log.info("%s: called through torch's own loader: %s", info.path, reason)
        kind = _Official if reason else _Library
        # A program for a GPU makes that one the thread's, and leaves it so.
        guard = nullcontext() if device == "cpu" else torch.cuda.device(device)
        try:
            with guard:
                self._program: _Library | _Official = kind(
                    info, folder, device=device, runners=self._runners
                )
            if isinstance(self._program, _Library):
                self._program.check_counts(info, signature)
        except (OSError, RuntimeError, AttributeError) as exc:
            raise CheckpointError(f"{info.path}: cannot be loaded: {first_line(exc)}") from exc

    def set_concurrency(self, passes: int) -> None:
        """See :class:`CheckedRunner`; a call without a runner would wait inside the library."""
        super().set_concurrency(min(passes, getattr(self, "_runners", passes)))

    def compute(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """See :class:`CheckedRunner`."""
        # A thread's OpenMP takes torch's thread count only once torch has been asked in it.
        torch.get_num_threads()
        try:
            return self._program(inputs)
        except RuntimeError as exc:
            raise RuntimeError(_with_reason(str(exc))) from exc


def _with_reason(message: str) -> str:
    """A compiled program's message; torch's own words where it only names the call that failed."""
    name = "torch_exception_get_what_without_backtrace"
    if "API call failed" not in message:
        return message
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if not hasattr(torch_library, name):  # before torch 2.13
        return message
    # Of the latest failure in this thread. A prototype of its own, as for the capsules below.
    reason = ctypes.CFUNCTYPE(ctypes.c_char_p)((name, torch_library))()
    return (reason or b"").decode(errors="replace").strip() or message


class _Library:
    """The package's shared library, through ctypes."""

    def __init__(self, info: ArchiveInfo, folder: Path, *, device: str, runners: int) -> None:
        library = folder / info.library
        self._library = ctypes.CDLL(str(library))
        self._cuda = device != "cpu"
        calls = self._library
        calls.AOTInductorModelContainerCreateWithDevice.argtypes = [
            ctypes.POINTER(_Handle), ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p,
        ]  # fmt: skip
        calls.AOTInductorModelContainerRun.argtypes = [
            _Handle, ctypes.POINTER(_Handle), ctypes.c_size_t,
            ctypes.POINTER(_Handle), ctypes.c_size_t, _Handle, _Handle,
        ]  # fmt: skip
        self._handle = _Handle()
        self._check(
            calls.AOTInductorModelContainerCreateWithDevice(
                ctypes.byref(self._handle), runners, device.encode(), str(library.parent).encode()
            )
        )
        calls.AOTInductorModelContainerDelete.argtypes = [_Handle]
        finalizer = weakref.finalize(
            self, calls.AOTInductorModelContainerDelete, _Handle(self._handle.value)
        )
        # At the end of the process a GPU may be gone already; the system frees what is left.
        finalizer.atexit = False
        self._inputs = self._count("AOTInductorModelContainerGetNumInputs")
        self._outputs = self._count("AOTInductorModelContainerGetNumOutputs")
        # ctypes' own prototype objects are shared by the whole process; private ones are not.
        self._address = ctypes.PYFUNCTYPE(_Handle, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        self._capsule = ctypes.PYFUNCTYPE(ctypes.py_object, _Handle, ctypes.c_char_p, _Handle)(
            ("PyCapsule_New", ctypes.pythonapi)
        )

    def check_counts(self, info: ArchiveInfo, signature: Signature) -> None:
        """Refuse a program with other numbers of inputs or outputs: a call would crash."""
        wanted = (len(signature.inputs), len(signature.outputs))
        if (self._inputs, self._outputs) != wanted:
            raise CheckpointError(
                f"{info.path}: has {self._inputs} inputs and {self._outputs} outputs, expected "
                f"{wanted[0]} and {wanted[1]}"
            )

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        private: Any = torch._C._aoti  # private, see above
        capsules = private.unsafe_alloc_void_ptrs_from_tensors(list(inputs))
        given = (_Handle * len(inputs))(*(self._address(capsule, None) for capsule in capsules))
        made = (_Handle * self._outputs)()
        stream = _Handle(torch.cuda.current_stream().cuda_stream) if self._cuda else None
        # The lock is free in here.
        status = self._library.AOTInductorModelContainerRun(
            self._handle, given, len(inputs), made, self._outputs, stream, None
        )
        self._check(status)
        # The plural helper: the singular one leaks a tensor a call.
        return tuple(
            private.alloc_tensors_by_stealing_from_void_ptrs(
                [self._capsule(handle, None, None) for handle in made]
            )
        )

    def _count(self, function: str) -> int:
        count = ctypes.c_size_t()
        call = getattr(self._library, function)
        call.argtypes = [_Handle, ctypes.POINTER(ctypes.c_size_t)]
        self._check(call(self._handle, ctypes.byref(count)))
        return count.value

    def _check(self, status: int) -> None:
        if not status:
            return
        message = "no reason given"
        if hasattr(self._library, "AOTInductorGetLastError"):
            text = ctypes.c_char_p()
            self._library.AOTInductorGetLastError(ctypes.byref(text))
            message = (text.value or b"").decode(errors="replace").strip() or message
        raise RuntimeError(message)


class _Official:
    """torch's own loader and call."""

    def __init__(self, info: ArchiveInfo, folder: Path, *, device: str, runners: int) -> None:
        index = torch.device(device).index
        private: Any = torch._C._aoti  # private, see above
        # The class below the documented function: that one loads a failing file twice, and
        # compiles a probe of the processor first.
        self._loader = private.AOTIModelPackageLoader(
            str(folder), info.model_name, False, runners, -1 if index is None else index
        )

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        return tuple(self._loader.boxed_run(list(inputs)))


def unpack(info: ArchiveInfo) -> Path:
    """Unpack a compiled file into the cache, once for each content.

    torch's loader would unpack it into a temporary folder at each start and leave that behind
    when killed.

    Returns:
        The folder that holds what lies below the archive's root.

    Raises:
        CheckpointError: No space, no permission, or the file changed meanwhile.
    """
    folder = cache_folder("unpacked") / file_sha256(info.path)
    temporary = beside(folder)
    hold(folder)
    try:
        with zipfile.ZipFile(info.path) as archive:
            members = {
                entry.filename.removeprefix(info.root + "/"): entry
                for entry in archive.infolist()
                if not entry.is_dir() and entry.filename.startswith(info.root + "/")
            }
            if _is_complete(folder, members):
                return folder
            with cache_errors(f"{info.path}: cannot be unpacked into {folder}"):
                _unpack(archive, members, temporary, folder)
    except (OSError, zipfile.BadZipFile) as exc:
        raise CheckpointError(f"{info.path}: cannot be unpacked: {exc}") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    prune()
    return folder


def _unpack(
    archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], temporary: Path, folder: Path
) -> None:
    for name, entry in members.items():
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    try:
        temporary.rename(folder)
    except OSError:
        # Another process was faster, or a cleaner of old files took a part of it.
        if not _is_complete(folder, members):
            shutil.rmtree(folder)
            temporary.rename(folder)


def _is_complete(folder: Path, members: dict[str, zipfile.ZipInfo]) -> bool:
    try:
        return all(os.path.getsize(folder / n) == entry.file_size for n, entry in members.items())
    except OSError:
        return False


def _why_official(info: ArchiveInfo) -> str:
    """Why the library cannot be called directly; empty when it can."""
    if info.needs_proxy:
        return "the program calls operators that have no C interface"
    private = getattr(torch._C, "_aoti", None)
    for name in ("unsafe_alloc_void_ptrs_from_tensors", "alloc_tensors_by_stealing_from_void_ptrs"):
        if not hasattr(private, name):
            return f"torch {torch.__version__} has no {name}"
    return ""
