"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it writes under another name goes first."""

import os
import signal
import time
from types import FrameType

from bioptimus.same_signal import SAME_SIGNAL_S


def end_on_signals() -> None:
    """From now on SIGTERM and SIGHUP raise ``SystemExit``, with code 143 or 129.

    Left to themselves they end Python where it stands, and no ``finally`` runs. A second SIGTERM
    does that here too, unless it is the first one told twice. A command that finishes what is under
    way puts its own handlers in their place meanwhile.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Ignored from the start, as by nohup: leave it so.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    told = time.monotonic()

    def end_at_once(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - told > SAME_SIGNAL_S:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, end_at_once)
    # Of a terminal that was closed kernel and shell tell at the same moment: never the second one.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SystemExit(128 + number)
