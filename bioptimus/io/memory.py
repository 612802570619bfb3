"""Fresh memory for pixels, cheaper than the allocator's.

The kernel hands out memory page by page, zeroed; for pixels that are written once that costs up to
half as much as decoding them. In huge pages it costs next to nothing.
"""

import mmap

import numpy as np
import numpy.typing as npt

_HUGE_PAGE_BYTES = 2 << 20
# Worth a mapping of its own: two huge pages.
BATCH_BYTES = 2 * _HUGE_PAGE_BYTES
# Linux only; elsewhere memory comes as it comes.
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def fresh_rows(count: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory for several pictures.

    Args:
        count: How many.
        nbytes: Size of each.

    Returns:
        (count, nbytes) uint8; freed when the last view of it is gone.
    """
    size = count * nbytes
    if _ADVICE is None or size < _HUGE_PAGE_BYTES:
        return np.empty((count, nbytes), np.uint8)
    # Private: shared memory, Python's default, never gets huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, flags=flags)
    try:
        mapped.madvise(_ADVICE)
    except OSError:
        pass  # a kernel without huge pages: small ones do
    return np.frombuffer(mapped, np.uint8, count=size).reshape(count, nbytes)
