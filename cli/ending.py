"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it writes under another name goes first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_end() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise ``SystemExit``, with code 143 or 129.

    Left to themselves they end Python where it stands, and no ``finally`` runs. The second SIGTERM
    does that here too. A command that finishes what is under way puts its own handlers in their
    place meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may have handlers
        yield
        return
    # Not where they are ignored, as by nohup, nor where a program that calls us has its own.
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    # Of a terminal that was closed kernel and shell tell at the same moment: never the second one.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + number)
