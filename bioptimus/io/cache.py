"""Decoded tiles that several threads share."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


class _Slot:
    """One tile: decoded by whoever comes first, while the others wait."""

    __slots__ = ("lock", "pixels")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pixels: Pixels | None = None


class TileCache:
    """The most recently used decoded tiles of one slide, up to a number of bytes.

    Owner: the source that made it; used from any thread. ``_lock`` guards the table and the byte
    count and is never held while a tile is decoded. A tile wanted by two threads at once is
    decoded by one of them. The newest tile stays even if it alone exceeds the limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of decoded pixels held."""
        return self._bytes

    def get(self, key: Hashable, decode: Callable[[], Pixels]) -> Pixels:
        """The tile of that key, from ``decode`` if it is not here.

        Raises:
            Exception: Whatever ``decode`` raises; nothing is kept then.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot()
            else:
                self._slots.move_to_end(key)
        if slot.pixels is not None:
            return slot.pixels
        with slot.lock:
            if slot.pixels is None:
                try:
                    slot.pixels = decode()
                except BaseException:
                    self._forget(key, slot)
                    raise
                self._account(key, slot)
            return slot.pixels

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._slots.clear()
            self._bytes = 0

    def _forget(self, key: Hashable, slot: _Slot) -> None:
        with self._lock:
            if self._slots.get(key) is slot:
                del self._slots[key]

    def _account(self, key: Hashable, slot: _Slot) -> None:
        """Count a tile that has just been decoded, and drop the oldest ones beyond the limit."""
        assert slot.pixels is not None
        with self._lock:
            if self._slots.get(key) is not slot:
                return  # dropped while it was being decoded
            self._bytes += slot.pixels.nbytes
            while self._bytes > self._limit_bytes:
                oldest = next(iter(self._slots))
                if oldest == key:
                    break
                dropped = self._slots.pop(oldest)
                if dropped.pixels is not None:
                    self._bytes -= dropped.pixels.nbytes
