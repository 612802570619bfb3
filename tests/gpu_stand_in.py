"""A stand-in for two GPUs: torch's calls for them, with what goes wrong when they are misused.

Computes on the CPU. What it imitates: copies that are not waited for arrive late, and read their
source late; each thread starts on the first device; whatever makes a device the thread's, or frees
memory there, occupies memory of it (a context).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch


class Stream:
    """Work that has not been done yet."""

    def __init__(self, gpu: "StandIn", index: int) -> None:
        self.gpu = gpu
        self.device = torch.device("cuda", index)
        self.work: list[Any] = []
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Self) -> None:
        self.waited_for.append(other)

    def finish(self) -> None:
        work, self.work = self.work, []
        for step in work:
            step()


class StandIn:
    """What the test wants to know, and may break.

    Attributes:
        contexts: Devices that memory is occupied on.
        streams: Made so far, without the default ones.
        lost: Whether each call fails, as after an illegal access.
        broken: What a kernel fails with, if it does.
        emptied: Devices that were current when the cache was emptied.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.contexts: set[int] = set()
        self.streams: list[Stream] = []
        self.lost = False
        self.broken: str | None = None
        self.emptied: list[int] = []
        self._default = [Stream(self, 0), Stream(self, 1)]
        self._thread = threading.local()
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no address is given out twice
        self._real_empty, self._real_ones = torch.empty, torch.ones
        self._real_to, self._real_copy = torch.Tensor.to, torch.Tensor.copy_
        for name in ("device", "stream", "synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("current_stream", "default_stream", "current_device"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "Stream", self._new_stream)
        patch.setattr(torch.cuda, "Event", self._new_event)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda _: "a stand-in")
        patch.setattr(torch, "empty", self._empty)
        patch.setattr(torch, "ones", self._ones)
        patch.setattr(torch.Tensor, "to", lambda *a, **k: self._to(*a, **k))
        patch.setattr(torch.Tensor, "copy_", lambda *a, **k: self._copy(*a, **k))
        patch.setattr(torch.Tensor, "pin_memory", lambda t: self._pin(t.clone()))
        patch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() in self._pinned)

    # Devices and streams.

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self._set_device(self._index(device))
        yield
        self._thread.device = before  # torch's guard sets it when it is next needed

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._set_stream(stream)
        yield
        self._set_stream(before)

    def current_stream(self, device: Any = None) -> Stream:
        index = self._index(device)
        stream: Stream = self._thread.__dict__.get(f"stream{index}", self._default[index])
        return stream

    def default_stream(self, device: Any = None) -> Stream:
        return self._default[self._index(device)]

    def synchronize(self, device: Any = None) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: unknown error")
        self.contexts.add(self._index(device))
        for stream in (*self._default, *self.streams):
            stream.finish()

    def empty_cache(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: unknown error")
        self.emptied.append(self.current_device())
        self.contexts.add(self.current_device())

    def _new_stream(self, device: Any = None) -> Stream:
        stream = Stream(self, self._index(device))
        self.streams.append(stream)
        return stream

    def _new_event(self, *, blocking: bool) -> Any:
        assert blocking, "the thread would spin"

        class Event:
            def record(_) -> None:  # noqa: N805
                _.stream = self.current_stream()

            def synchronize(_) -> None:  # noqa: N805
                _.stream.finish()

        return Event()

    def _index(self, device: Any) -> int:
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index

    def _set_device(self, index: int) -> None:
        self._thread.device = index
        self.contexts.add(index)

    def _set_stream(self, stream: Stream) -> None:
        if self.current_device() != stream.device.index:
            self._set_device(stream.device.index)
        setattr(self._thread, f"stream{stream.device.index}", stream)

    # Memory and copies.

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        self._pinned.add(tensor.data_ptr())
        return tensor

    def _empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = self._real_empty(*size, **options)
        return self._pin(made) if pin_memory else made

    def _ones(self, *size: Any, device: Any = None) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda" and self.broken:
            raise RuntimeError(self.broken)
        return self._real_ones(*size)

    def _to(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        target = args[0] if args else options.get("device")
        if not isinstance(target, str | torch.device) or torch.device(target).type == "cpu":
            return self._real_to(tensor, *args, **options)
        self.contexts.add(self._index(target))
        there = tensor.clone()
        if options.get("non_blocking") and tensor.data_ptr() in self._pinned:
            stream = self.current_stream(target)

            def arrive() -> None:
                assert torch.equal(tensor, there), "pinned memory was written before it was read"

            stream.work.append(arrive)
        return there

    def _copy(self, target: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        if not (options.get("non_blocking") and target.data_ptr() in self._pinned):
            return self._real_copy(target, source, **options)
        there = source.clone()
        self.current_stream().work.append(lambda: self._real_copy(target, there))
        return target
