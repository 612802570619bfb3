"""Stop a run cleanly on Ctrl-C, SIGTERM or SIGHUP, and at once on the second."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

from bioptimus.same_signal import SAME_SIGNAL_S

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long a stop may go unnoticed by a main thread that waits.
STEP_S = 0.1


class StopFlag:
    """Set by the first SIGINT, SIGTERM or SIGHUP; the second ends the process at once.

    Used as a context manager in the main thread, where Python runs signal handlers. Workers in
    any thread look at ``stopped`` between pieces of work; the main thread must not block for
    long in one call, so it waits in steps, as ``wait`` does.

    The second signal ends the process through ``os._exit`` with the same code: no ``finally``
    runs and no thread is waited for. That loses what was computed since the last flush, as
    ``kill -9`` would: parts resume, and claims are seen to be a dead process's. A SIGHUP is
    never the second one: that a terminal was closed, kernel and shell tell at the same moment. Nor
    is a SIGTERM right behind another.

    Child processes come from ``start_child``: in a process group of their own, so that a
    terminal's Ctrl-C does not reach them, and each signal is passed on to them exactly once.
    """

    # The handler only assigns plain attributes: an Event's lock may be held by the very code
    # that the handler interrupts.

    def __init__(self, *, at_once: Callable[[], None] | None = None) -> None:
        """Make a flag that is not set.

        Args:
            at_once: Called before the second signal ends the process. It runs inside the signal
                handler, on top of anything: it must take no lock.
        """
        self._at_once = at_once
        self._signal: int | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}
        self._children: list[subprocess.Popen[str]] = []

    @property
    def stopped(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    @property
    def exit_code(self) -> int | None:
        """130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP, None before any."""
        return None if self._signal is None else 128 + self._signal

    def wait(self, timeout_s: float) -> bool:
        """Wait until a signal comes or the time is over; return whether one came."""
        end = time.monotonic() + timeout_s
        while not self.stopped and (left := end - time.monotonic()) > 0:
            time.sleep(min(STEP_S, left))
        return self.stopped

    def start_child(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process that gets every signal this one gets.

        Args:
            arguments: Program and its arguments.
            options: Further arguments of ``subprocess.Popen``; its standard input is empty if they
                name none.

        Returns:
            The process; the caller waits for it. A stop that came while it started is passed on.
        """
        child: subprocess.Popen[str] = subprocess.Popen(
            arguments,
            process_group=0,
            encoding="utf-8",
            errors="replace",
            **{"stdin": subprocess.DEVNULL, **options},
        )
        self._children.append(child)
        if self._signal is not None:
            _pass_on(child, self._signal)
        return child

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            # Ignored from the start, as by nohup or a shell's "&": leave it so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == self._signal == signal.SIGTERM and now - self._since < SAME_SIGNAL_S:
            return
        second = self._signal is not None and number != signal.SIGHUP
        if self._signal is None:
            self._signal, self._since = number, now
        for child in self._children:
            _pass_on(child, number)
        if second:
            if self._at_once is not None:
                self._at_once()
            os._exit(128 + number)


def _pass_on(child: subprocess.Popen[str], number: int) -> None:
    # Popen looks first whether the child has ended, so no stranger with its number is hit.
    try:
        child.send_signal(number)
    except ProcessLookupError:
        return
