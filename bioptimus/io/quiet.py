"""What libraries would say by themselves goes to our log instead.

tifffile logs; without a handler of the application's, Python prints such records on the terminal.
OpenSlide's own libraries print nothing (a test holds them to that), so no file descriptor is
touched: it belongs to every thread of the process.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_reading = threading.local()


class _OfOurReads(logging.Filter):
    """Takes the records that our own reads cause, and leaves everybody else's alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = getattr(_reading, "name", None)
        if name is None:
            return True
        log.debug("%s: tifffile: %s", name, record.getMessage())
        return False


@contextmanager
def quiet_tifffile(name: str) -> Iterator[None]:
    """Inside, what tifffile logs on this thread becomes a debug record with the slide's name."""
    logger = logging.getLogger("tifffile")
    if not any(isinstance(entry, _OfOurReads) for entry in logger.filters):
        logger.addFilter(_OfOurReads())
    before = getattr(_reading, "name", None)
    _reading.name = name
    try:
        yield
    finally:
        _reading.name = before
