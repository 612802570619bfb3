"""Loaded models: from requests to prepared samples, from a batch of those to responses.

Two stages, so that nobody pays for another's mistake:

1. :meth:`BaseServerModel.prepare_sample` decodes and checks one request. What is wrong with it is
   a ``RequestError`` (a ``ValueError``) to its sender alone.
2. :meth:`BaseServerModel.forward_batch` runs checked samples together. What goes wrong there is a
   ``_ForwardError`` to all of them.

**Threads.** One model is loaded once and shared by every thread of the process. After its
construction it changes nothing but a cache guarded by a lock and buffers that belong to the
calling thread, so every method may be called from any number of threads at once and gives the
same bits as one call after the other. How many passes really run at once is the runner's
business: it holds a semaphore. On CUDA each pass has a stream that no other uses meanwhile, so that
the copy of one batch overlaps the computation of another, and waits without the interpreter lock.

**NaN and infinity** in the answer for one tile fail neither the batch nor the call: that response
says ``finite = False``, and whoever stores the values must look.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from bioptimus.errors import (
    CheckpointError,
    LostDeviceError,
    OutOfDeviceMemoryError,
    RequestError,
    UsageError,
    _ForwardError,
    release_frames,
)
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.loader import MODEL_ROOT, wanted_device
from bioptimus.runtime.runners import (
    CheckedRunner,
    Runner,
    first_line,
    lacks_memory,
    loses_device,
    open_runner,
    release_cached_memory,
    still_works,
    try_device,
)

logger = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]

# As many slides as a run has under way unless told otherwise, each with RNA of its own:
# transforming 19,000 genes for every tile anew took 18 µs a tile, looking them up takes 0.4.
_RNA_KEPT = 8


class PreparedSample:
    """A checked sample, ready for a batch.

    Args:
        tile: See the attributes.
        extra_tensors: See the attributes.

    Attributes:
        tile: (C, H, W): uint8 as decoded, or float32 normalised by a subclass. A view of memory
            laid out (H, W, C) costs nothing and is what batches are assembled from fastest.
        extra_tensors: Further inputs of the model by name, without the batch axis: ``bulk_rna``
            (G,) float32 for models that take it.
    """

    __slots__ = ("_pixels", "_tile", "extra_tensors")
    _pixels: npt.NDArray[Any]
    _tile: torch.Tensor | None

    def __init__(
        self, tile: torch.Tensor, extra_tensors: dict[str, torch.Tensor] | None = None
    ) -> None:
        self.tile = tile
        self.extra_tensors = {} if extra_tensors is None else extra_tensors

    @classmethod
    def from_pixels(cls, pixels: npt.NDArray[np.uint8]) -> Self:
        """A sample whose tile is a view of (H, W, C) pixels.

        The view is made when somebody asks for it: each step of torch passes the interpreter lock
        on, and takes 20 µs where other threads want it.
        """
        sample = cls.__new__(cls)
        sample._pixels, sample._tile, sample.extra_tensors = pixels, None, {}
        return sample

    @property
    def tile(self) -> torch.Tensor:
        """See the class."""
        if self._tile is None:
            self._tile = torch.from_numpy(self._pixels).permute(2, 0, 1)
        return self._tile

    @tile.setter
    def tile(self, tile: torch.Tensor) -> None:
        self._tile = tile
        self._pixels = tile.permute(1, 2, 0).numpy()

    @property
    def pixels(self) -> npt.NDArray[Any]:
        """The tile as (H, W, C), the layout that decoders and batches have in memory."""
        return self._pixels


class StreamPool:
    """CUDA streams for passes under way: as many as there ever were at once, used again.

    Not one for each thread: every slide comes with threads of its own, and torch keeps the memory
    of a stream for that stream alone, so a card would fill up with what ended slides have used.

    May be used from any thread.

    Args:
        device: Of the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[torch.cuda.Stream] = []  # append and pop need no lock

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Work of the block goes to a stream that nobody else has meanwhile.

        What a block that failed has left on it is done before the next one's work.
        """
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            # The device too: a thread starts on the first one, and the way back there from
            # another one's stream would take memory of it for this process.
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                yield
        finally:
            self._idle.append(stream)


class BaseServerModel:
    """A loaded ``.pt2`` that answers requests; serves embedding models as it is.

    Subclasses override :meth:`prepare_sample` to check or transform more, and
    :meth:`forward_batch` or :meth:`finish_prediction` to change what comes out.

    Args:
        model_spec: Tile size, layout, outputs.
        checkpoint_name: File name of the ``.pt2``.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        model_root: Folder of the checkpoint.

    Raises:
        CheckpointError: The file is missing, damaged, foreign, or for another device.
    """

    prepares_inline: ClassVar[bool] = True
    """Whether preparing a request that holds pixels takes microseconds, so that an event loop may
    do it itself. False for a subclass with an own ``prepare_sample``, unless it says otherwise."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "prepare_sample" in vars(cls) and "prepares_inline" not in vars(cls):
            cls.prepares_inline = False

    def __init__(
        self,
        model_spec: ModelSpec,
        checkpoint_name: str,
        device: str = "cuda",
        model_root: Path = MODEL_ROOT,
    ) -> None:
        path = Path(model_root) / checkpoint_name
        if not path.exists():
            raise CheckpointError(f"{path}: no such file; pass the path of a .pt2 checkpoint")
        runner = open_runner(path, device=wanted_device(device), spec=model_spec)
        self._set_up(model_spec, runner, path)

    @classmethod
    def from_runner(
        cls, model_spec: ModelSpec, runner: Runner, *, checkpoint_path: Path | None = None
    ) -> Self:
        """Make a model of a runner that is loaded already.

        Args:
            model_spec: What the runner takes and gives.
            runner: Computes a batch; see :class:`~bioptimus.runtime.runners.Runner`.
            checkpoint_path: The file it came from, if any.
        """
        model = cls.__new__(cls)
        model._set_up(model_spec, runner, checkpoint_path)
        return model

    def _set_up(self, model_spec: ModelSpec, runner: Runner, path: Path | None) -> None:
        self._spec = model_spec
        self._runner = runner
        self._path = path
        self._loaded_by = os.getpid()
        self._device = torch.device(runner.device)
        self._local = threading.local()
        self._streams = StreamPool(self._device) if self._device.type == "cuda" else None
        size = model_spec.tile.size_px
        self._tile_size = (size, size)
        self._rna_cache: tuple[tuple[Float32, torch.Tensor], ...] = ()
        shape = (1, model_spec.channels, 1, 1)
        # On the device from the start: a copy per batch would wait for the stream.
        self._mean = torch.tensor(model_spec.mean, dtype=torch.float32).view(shape).to(self._device)
        self._std = torch.tensor(model_spec.std, dtype=torch.float32).view(shape).to(self._device)
        if self._streams:
            # What was copied so far went by the default stream, for which no other waits. And a
            # GPU that computes nothing should say so now, not slide by slide.
            try_device(self.device)

    @property
    def model_spec(self) -> ModelSpec:
        """Tile size, layout, outputs."""
        return self._spec

    @property
    def model_name(self) -> str:
        """Name of the model, for people and paths."""
        return self._spec.name

    @property
    def device(self) -> str:
        """Where the model computes, such as ``cpu`` or ``cuda:0``."""
        return self._runner.device

    @cached_property
    def hardware(self) -> str:
        """What computes: the GPU's name, or ``cpu`` with the instructions that torch uses."""
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"

    @property
    def is_compiled(self) -> bool:
        """Whether a compiled program answers: its results are the portable file's up to rounding.

        In half precision that may be some percent of a value.
        """
        return isinstance(self._runner, CheckedRunner) and self._runner.is_compiled

    @property
    def max_batch(self) -> int | None:
        """Most tiles of one pass; longer batches are run in parts. None: no limit known."""
        return self._runner.max_batch

    def set_concurrency(self, passes: int) -> None:
        """Change how many passes may be under way at once, where the runner bounds them.

        Args:
            passes: At least 1.
        """
        if isinstance(self._runner, CheckedRunner):
            self._runner.set_concurrency(passes)

    @property
    def checkpoint_path(self) -> Path:
        """The file that the model was loaded from.

        Raises:
            CheckpointError: The model was made in memory.
        """
        if self._path is None:
            raise CheckpointError(f"{self.model_name}: made in memory, there is no checkpoint file")
        return self._path

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the checkpoint file; 0 for a model made in memory."""
        return 0 if self._path is None else self._path.stat().st_size

    @cached_property
    def checkpoint_sha256(self) -> str:
        """Digest of the checkpoint file; empty for a model made in memory."""
        if self._path is None:
            return ""
        return file_sha256(self._path)

    def check_mode(self, mode: str) -> InferenceMode:
        """The mode, if one pass of this model can answer it.

        Raises:
            UsageError: No such mode, or the model makes no such output.
        """
        try:
            wanted = InferenceMode(mode)
        except ValueError:
            raise UsageError(
                f"{mode}: no such inference mode; there are {', '.join(InferenceMode)}"
            ) from None
        if not self._spec.supports(wanted):
            able = ", ".join(m for m in InferenceMode if self._spec.supports(m)) or "none"
            raise UsageError(
                f"{self.model_name}: cannot answer {wanted.value} requests; modes it has: {able}"
            )
        return wanted

    def preprocess_bulk_rna(self, raw: Sequence[float]) -> list[float]:
        """Apply the model's omics transform to TPM values.

        Args:
            raw: TPM in the model's gene order.

        Returns:
            The transformed values; the same values where the model has no transform.

        Raises:
            RequestError: A value is negative, or not finite.
        """
        if self._spec.omics_transform is None:
            return list(raw)
        return [float(value) for value in self._transform_rna(np.asarray(raw, np.float32))]

    def _transform_rna(self, raw: Float32) -> Float32:
        if not np.isfinite(raw).all():
            raise RequestError("bulk_rna: holds NaN or infinity")
        if self._spec.omics_transform is None:
            return raw
        if raw.size and raw.min() < 0:
            raise RequestError("bulk_rna: holds negative values; send TPM, not log values")
        return np.log1p(raw)

    def prepare_sample(self, request: ModelRequest) -> PreparedSample:
        """Decode and check one request.

        Args:
            request: With an encoded image or pixels.

        Returns:
            The sample; its tile is a view of the request's pixels where it holds any.

        Raises:
            RequestError: The image cannot be decoded or has another size than the model's tiles.
        """
        pixels = request.pixels(size=self._tile_size)
        if not pixels.flags.writeable or min(pixels.strides) < 0:
            pixels = pixels.copy()  # torch takes neither read-only memory nor a mirrored view
        return PreparedSample.from_pixels(pixels)

    @torch.inference_mode()
    def forward_batch(
        self,
        samples: list[PreparedSample],
        requests: list[ModelRequest],
        mode: str = "prediction",
    ) -> list[ModelResponse]:
        """Run checked samples through the model in one pass.

        Args:
            samples: From :meth:`prepare_sample`.
            requests: What they were made from, for the metadata of the responses.
            mode: ``prediction``, ``embedding``, or ``prediction_with_embedding`` for both out of
                the same pass.

        Returns:
            One response per sample, in order. A response of a tile for which the model gave NaN
            or infinity says ``finite = False``.

        Raises:
            UsageError: The model cannot answer this mode.
            OutOfDeviceMemoryError: There was no memory for a batch of this size.
            LostDeviceError: The device works no more in this process.
            _ForwardError: Assembling, computing or copying back failed, or what came out does
                not fit the model's specification.
        """
        wanted = self.check_mode(mode)
        if not samples:
            return []
        # The batch's edge: whatever happens in here is one error, shared by these requests.
        try:
            return self._answer(self._run(samples), requests, wanted)
        except Exception as exc:
            raise self._translate(exc, len(samples)) from exc

    def _translate(self, exc: Exception, tiles: int) -> _ForwardError:
        # First: on a lost device the lack of memory is but how a library puts it.
        if loses_device(exc) or not still_works(self.device):
            return LostDeviceError(
                f"{self.model_name}: {self.device} works no more in this process "
                f"({first_line(exc)}); run the same command again to go on"
            )
        if lacks_memory(exc):
            # The frames that failed hold what the pass had made so far, on the device.
            release_frames(exc)
            release_cached_memory(self.device)
            what, advice = f"{tiles} tiles in a batch", "a smaller batch may fit"
            if tiles == 1:
                what, advice = "a single tile", "free memory there, or use another device"
            return OutOfDeviceMemoryError(
                f"{self.model_name}: out of memory on {self.device} with {what}; {advice}"
            )
        if isinstance(exc, _ForwardError):
            return _ForwardError(f"{self.model_name}: {exc}")
        return _ForwardError(f"{self.model_name}: forward pass of {tiles} tiles failed: {exc}")

    def _run(self, samples: list[PreparedSample]) -> tuple[npt.NDArray[Any], ...]:
        if os.getpid() != self._loaded_by:
            # OpenMP's threads are not there in a forked process, where a pass on several would wait
            # for them for ever if the thread that forked had made one.
            torch.set_num_threads(1)
        with self._streams.lease() if self._streams else nullcontext(), self._own_precision():
            tiles = self._stage("tile", [sample.pixels for sample in samples])
            inputs = [self._in_model_layout(tiles)]
            inputs += [
                self._stage(name, [sample.extra_tensors[name].numpy() for sample in samples])
                for name in samples[0].extra_tensors
            ]
            outputs = self._runner(*inputs)
            return tuple(self._to_host(output) for output in outputs)

    def _own_precision(self) -> AbstractContextManager[None]:
        """Keep a caller's autocast, such as that of a training loop, from changing the results."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, enabled=False)

    def _stage(self, name: str, rows: list[npt.NDArray[Any]]) -> torch.Tensor:
        """One tensor of all rows, on the device."""
        shape, dtype = rows[0].shape, rows[0].dtype
        if any(row.shape != shape or row.dtype != dtype for row in rows):
            kinds = sorted({f"{row.dtype} {tuple(row.shape)}" for row in rows})
            raise _ForwardError(f"{name}: samples of one batch differ: {', '.join(kinds)}")
        batch = self._buffer(name, (len(rows), *shape), torch.from_numpy(rows[0]).dtype)
        # numpy's copy, not torch's: torch would start its thread team for every tile, which costs
        # more than the copy and spins against the threads that read tiles.
        target = batch.numpy()
        for place, row in enumerate(rows):
            target[place] = row
        if self._device.type == "cpu":
            return batch
        return batch.to(self._device, non_blocking=True)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._device.type == "cuda":
            # Pinned memory comes from torch's caching allocator, which gives a block out again
            # only when the copies that read it are done: a buffer kept here could be overwritten
            # under a copy of a batch that failed half-way.
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        # Kept per thread: fresh memory of 7 MB costs a page fault every 4 kB, each time.
        buffers: dict[str, torch.Tensor] = self._local.__dict__.setdefault("buffers", {})
        kept = buffers.get(name)
        if (
            kept is None
            or kept.dtype != dtype
            or kept.shape[1:] != shape[1:]
            or len(kept) < shape[0]
        ):
            kept = buffers[name] = torch.empty(shape, dtype=dtype)
        return kept[: shape[0]]

    def _in_model_layout(self, tiles: torch.Tensor) -> torch.Tensor:
        """Tiles as the specification's ``input_layout`` wants them, on the device."""
        if tiles.dtype == torch.uint8:
            if self._spec.input_layout == "nhwc_uint8":
                return tiles
            floats = tiles.permute(0, 3, 1, 2).to(
                torch.float32, memory_format=torch.contiguous_format
            )
            # In this order, so that the bits are those of the usual ToTensor and Normalize.
            return floats.div_(255).sub_(self._mean).div_(self._std)
        if self._spec.input_layout == "nhwc_uint8":
            raise _ForwardError(f"takes uint8 tiles, got {tiles.dtype}")
        return tiles.permute(0, 3, 1, 2).contiguous()

    def _to_host(self, output: torch.Tensor) -> npt.NDArray[Any]:
        if output.device.type == "cpu":
            buffers = self._local.__dict__.get("buffers", {}).values()
            if any(_share_memory(output, buffer) for buffer in buffers):
                output = output.clone()  # a graph that hands its input back
            return output.to(torch.float32).numpy()
        host = torch.empty(output.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(output, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()  # asleep, and without the interpreter lock
        return host.numpy().copy()  # pinned memory is scarce: give it back at once

    def _answer(
        self,
        outputs: tuple[npt.NDArray[Any], ...],
        requests: list[ModelRequest],
        mode: InferenceMode,
    ) -> list[ModelResponse]:
        prediction, embedding = self._split(outputs, len(requests))
        finite = np.ones(len(requests), np.bool_)
        if prediction is not None and mode.wants_prediction:
            prediction = self.finish_prediction(prediction)
            finite &= _finite_rows(prediction)
        if embedding is not None and mode.wants_embedding:
            finite &= _finite_rows(embedding)
        if mode is InferenceMode.PREDICTION_WITH_EMBEDDING:
            rows = zip(requests, _rows(prediction), _rows(embedding), finite.tolist(), strict=True)
            return [ModelResponse.answering(r, p, e, finite=ok) for r, p, e, ok in rows]
        values = prediction if mode is InferenceMode.PREDICTION else embedding
        return [
            ModelResponse.answering(request, row, None, finite=ok)
            for request, row, ok in zip(requests, _rows(values), finite.tolist(), strict=True)
        ]

    def _split(
        self, outputs: tuple[npt.NDArray[Any], ...], count: int
    ) -> tuple[Float32 | None, Float32 | None]:
        """(prediction, embedding) of the outputs, checked against the specification."""
        kind = self._spec.output_kind
        names = ("prediction", "embedding") if kind == "prediction_and_embedding" else (kind,)
        if len(outputs) != len(names):
            raise _ForwardError(f"gave {len(outputs)} outputs, {len(names)} expected")
        found: dict[str, Float32] = dict(zip(names, outputs, strict=True))
        for name, dim in (
            ("prediction", self._spec.prediction_dim),
            ("embedding", self._spec.embedding_dim),
        ):
            if name in found:
                shape = found[name].shape
                if len(shape) != 2 or shape[0] != count or (dim and shape[1] != dim):
                    raise _ForwardError(
                        f"gave {name} of shape {shape}, ({count}, {dim or 'any'}) expected"
                    )
        return found.get("prediction", found.get("mask")), found.get("embedding")

    def finish_prediction(self, prediction: Float32) -> Float32:
        """Bring predictions to the unit users know; here they are left as they are.

        Args:
            prediction: (N, K), or (N, H, W) for masks.

        Returns:
            The same shape.
        """
        return prediction

    def get_metadata(self) -> dict[str, Any]:
        """What is known about the model, in types that JSON has.

        Returns:
            Name, inputs, outputs, modes, device, checkpoint, and the whole specification.
        """
        spec = self._spec
        size = spec.tile.size_px
        return {
            "model_name": spec.name,
            "model_version": spec.version,
            "input": {
                "image": "PNG, 8-bit RGB, base64",
                "width": size,
                "height": size,
                "mpp": spec.tile.mpp,
                "bulk_rna": spec.rna_dim,
                "input_genes": list(spec.input_genes),
            },
            "output": {
                "kind": spec.output_kind,
                "prediction_dim": spec.prediction_dim,
                "embedding_dim": spec.embedding_dim,
                "output_names": list(spec.output_names),
            },
            "modes": [mode.value for mode in InferenceMode if spec.supports(mode)],
            "device": self.device,
            "max_batch": self.max_batch,
            "checkpoint": "" if self._path is None else self._path.name,
            "checkpoint_sha256": self.checkpoint_sha256,
            "config": spec.to_dict(),
        }

    def forward(self, requests: list[ModelRequest]) -> torch.Tensor:
        """Run requests directly (the older way, without stages).

        Args:
            requests: Any number; one malformed request fails the call.

        Returns:
            (N, D) float32: embeddings, or predictions of a model that makes no embeddings.

        Raises:
            RequestError: A request is malformed.
            _ForwardError: The pass failed.
        """
        mode = InferenceMode.EMBEDDING if self._spec.makes_embedding else InferenceMode.PREDICTION
        samples = [self.prepare_sample(request) for request in requests]
        responses = self.forward_batch(samples, requests, mode)
        if not responses:
            dim = self._spec.embedding_dim if self._spec.makes_embedding else 0
            return torch.empty((0, dim or self._spec.prediction_dim))
        return torch.from_numpy(np.stack([response.output for response in responses]))


class BulkRNAServerModel(BaseServerModel):
    """A model that reads a tile together with the slide's bulk RNA.

    TPM go in through ``log1p`` and predictions come out through ``expm1`` where the
    specification names that transform.
    """

    prepares_inline = True

    bulk_rna_optional: ClassVar[bool] = False
    """Whether a request without RNA is answered as if every value were 0 TPM."""

    def prepare_sample(self, request: ModelRequest) -> PreparedSample:
        """Decode and check one request, RNA included.

        Raises:
            RequestError: As in the base class; or the RNA is missing, negative, not finite, or
                of another length than the model's gene list.
        """
        sample = super().prepare_sample(request)
        sample.extra_tensors["bulk_rna"] = self._rna_of(request)
        return sample

    def _rna_of(self, request: ModelRequest) -> torch.Tensor:
        genes = self._spec.rna_dim
        raw = request.bulk_rna
        if raw is None:
            if not self.bulk_rna_optional:
                raise RequestError(
                    f"bulk_rna: missing; {self.model_name} needs {genes} TPM values per request"
                )
            return torch.zeros(genes)
        for known, values in self._rna_cache:
            if known is raw:
                return values
        if genes and raw.shape != (genes,):
            raise RequestError(f"bulk_rna: {raw.size} values, {self.model_name} takes {genes}")
        values = torch.from_numpy(np.array(self._transform_rna(raw), np.float32))
        if not raw.flags.writeable:
            # Every tile of a slide comes with the same array. Only one that cannot change may
            # be remembered. One assignment: other threads see the old pairs or the new ones.
            self._rna_cache = ((raw, values), *self._rna_cache[: _RNA_KEPT - 1])
        return values

    def finish_prediction(self, prediction: Float32) -> Float32:
        """Predictions in TPM."""
        if self._spec.omics_transform != "log1p":
            return prediction
        with np.errstate(over="ignore"):  # becomes infinity, and the response says so
            return np.expm1(prediction)


class MaskServerModel(BaseServerModel):
    """A model that answers with an image: ``output`` is (H, W), values as the graph gives them."""

    def _split(
        self, outputs: tuple[npt.NDArray[Any], ...], count: int
    ) -> tuple[Float32 | None, Float32 | None]:
        if len(outputs) != 1:
            raise _ForwardError(f"gave {len(outputs)} outputs, 1 mask expected")
        mask = outputs[0]
        if mask.ndim == 4 and mask.shape[1] == 1:
            mask = mask[:, 0]
        if mask.ndim != 3 or mask.shape[0] != count:
            raise _ForwardError(
                f"gave a mask of shape {outputs[0].shape}, ({count}, H, W) expected"
            )
        return mask, None


def _rows(values: Float32 | None) -> Float32:
    if values is None:
        raise _ForwardError("the model gave no such output")
    return values


def _finite_rows(values: Float32) -> npt.NDArray[np.bool_]:
    flat: Float32 = values.reshape(len(values), -1)
    return np.logical_and.reduce(np.isfinite(flat), axis=1)  # type: ignore[no-any-return]


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
