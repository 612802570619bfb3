"""Decoded tiles that several threads share."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Concatenate, ParamSpec

import numpy as np
import numpy.typing as npt

from bioptimus.io.memory import BATCH_BYTES, fresh_rows

Pixels = npt.NDArray[np.uint8]
P = ParamSpec("P")


class Slot:
    """One tile of a :class:`TileCache`, valid from ``acquire`` to ``release``.

    Attributes:
        key: As given to ``acquire``.
        pixels: The decoded tile; read only.
    """

    __slots__ = ("_buffer", "_lock", "_pins", "_pixels", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self._lock = threading.Lock()  # held by the thread that decodes
        self._pins = 0  # guarded by the cache's lock
        self._buffer: Pixels | None = None
        self._pixels: Pixels | None = None

    @property
    def pixels(self) -> Pixels:
        """The decoded tile."""
        assert self._pixels is not None
        return self._pixels


class TileCache:
    """The most recently used decoded tiles of one slide, in memory that is used again and again.

    Owner: the source that made it; used from any thread. ``_lock`` guards the table, the pins and
    the free memory, and is never held while a tile is decoded. A tile wanted by two threads at
    once is decoded by one of them while the other waits. Memory of a tile that someone is reading
    (pinned) is never given away; if all is pinned, or one tile alone exceeds the limit, the limit
    is exceeded for as long as that lasts.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, Slot] = OrderedDict()
        self._free: dict[int, list[Pixels]] = {}
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory held, filled or not."""
        return self._bytes

    def __contains__(self, key: Hashable) -> bool:
        """Whether the tile is here, or being decoded, at this moment."""
        return key in self._slots

    def acquire(
        self,
        key: Hashable,
        shape: tuple[int, ...],
        decode: Callable[Concatenate[Pixels, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Slot:
        """The tile of that key, decoded if it is not here. Must be given to :meth:`release`.

        Args:
            key: Of the tile.
            shape: Of its pixels.
            decode: Fills an array of that shape, its first argument.
            args: The other arguments of ``decode``.
            kwargs: Those with names.

        Raises:
            Exception: Whatever ``decode`` raises; nothing is kept or to be released then.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = Slot(key)
            else:
                self._slots.move_to_end(key)
            slot._pins += 1
        if slot._pixels is None:
            with slot._lock:
                if slot._pixels is None:
                    try:
                        self._fill(slot, shape, lambda out: decode(out, *args, **kwargs))
                    except BaseException:
                        self._abandon(slot)
                        raise
        return slot

    def release(self, slot: Slot) -> None:
        """The caller has read what it wanted."""
        with self._lock:
            self._unpin(slot)

    def clear(self) -> None:
        """Forget everything; pinned tiles stay valid until released."""
        with self._lock:
            self._slots.clear()
            self._free.clear()
            self._bytes = 0

    def _fill(self, slot: Slot, shape: tuple[int, ...], decode: Callable[[Pixels], None]) -> None:
        buffer = self._buffer(math.prod(shape))
        pixels = buffer.reshape(shape)
        try:
            decode(pixels)
        except BaseException:
            with self._lock:
                self._free.setdefault(buffer.nbytes, []).append(buffer)
            raise
        slot._buffer, slot._pixels = buffer, pixels

    def _abandon(self, slot: Slot) -> None:
        """Take a slot out whose tile could not be decoded."""
        with self._lock:
            if self._slots.get(slot.key) is slot:
                del self._slots[slot.key]
            self._unpin(slot)

    def _unpin(self, slot: Slot) -> None:
        slot._pins -= 1
        # Decoded by a thread that waited while the first one failed: in no table, so given back.
        if slot._pins == 0 and slot._buffer is not None and self._slots.get(slot.key) is not slot:
            self._free.setdefault(slot._buffer.nbytes, []).append(slot._buffer)
            slot._buffer = slot._pixels = None

    def _buffer(self, nbytes: int) -> Pixels:
        """Memory for one tile: unused, or that of the oldest tile, or new."""
        with self._lock:
            while True:
                free = self._free.get(nbytes)
                if free:
                    return free.pop()
                room = self._limit_bytes - self._bytes
                if room >= nbytes or not self._drop_oldest():
                    return self._allocate(nbytes, room)

    def _allocate(self, nbytes: int, room: int) -> Pixels:
        """Memory for several tiles at once, so that it is worth huge pages."""
        count = max(1, min(BATCH_BYTES // nbytes, room // nbytes))
        first, *others = fresh_rows(count, nbytes)
        self._free.setdefault(nbytes, []).extend(others)
        self._bytes += count * nbytes
        return np.asarray(first)

    def _drop_oldest(self) -> bool:
        """Free the memory of the oldest tile that nobody reads; unused memory of any size first."""
        for nbytes, buffers in self._free.items():
            if buffers:
                self._bytes -= nbytes * len(buffers)
                buffers.clear()
                return True
        for key, slot in self._slots.items():
            if slot._pins == 0 and slot._buffer is not None:
                del self._slots[key]
                self._free.setdefault(slot._buffer.nbytes, []).append(slot._buffer)
                slot._buffer = slot._pixels = None
                return True
        return False
