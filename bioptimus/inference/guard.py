"""Reading files that may end the process that reads them, in a process that may be ended.

The HDF5 library crashes, or never comes back, where a file's structure is damaged in certain places
that have no checksum. :mod:`bioptimus.verify` has all files read in such processes; every other
reader those files only that are not known to be whole, see
:func:`~bioptimus.inference.hdf5_image.open_to_read`.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bioptimus.errors import OutputError

READY = "ready\n"
# The module that such a process runs; it imports this one.
_MODULE = "bioptimus.inference.checking"
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_DAMAGED = "it is damaged: move it away and make it again"
# Structure is read in milliseconds, unless the library goes in circles.
_LONGEST_CPU_S = 10.0

is_reading_process = False
"""Whether this process is one that a file may end."""

Start = Callable[..., "subprocess.Popen[str]"]


class FileEndedReaderError(OutputError):
    """A file ended the process that read it; the message says how, without the file's name."""


class ReadingProcess:
    """Looks at files in a process of its own; where a file ends that, the next starts another.

    Owner: who made it, one thread at a time. The process ends with :meth:`close`, and with the
    process that started it.
    """

    def __init__(self, *look: str, start: Start | None = None) -> None:
        """Say what is wanted; the process starts with the first file.

        Args:
            look: Words of :func:`bioptimus.inference.checking.main`: what to do with each file.
            start: As ``subprocess.Popen``; by default that, out of reach of a terminal's Ctrl-C.
        """
        self._look = look
        self._start = start or _start
        self._child: subprocess.Popen[str] | None = None
        self._is_ready = False

    def begin(self, path: Path) -> None:
        """Have a file looked at; :meth:`result` is to follow."""
        if self._child is None:
            # Not the folder we are in, but the modules that this process has.
            modules = os.pathsep.join(map(os.path.abspath, sys.path))
            self._child = self._start(
                [sys.executable, "-P", "-m", _MODULE, *self._look],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": modules},
            )
        assert self._child.stdin is not None
        # Where it has ended, its answer tells.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(str(path)) + "\n")
            self._child.stdin.flush()

    def result(self) -> Any:
        """Wait for what the look at the file gives, as JSON gives it back.

        Raises:
            FileEndedReaderError: The process ended over it.
            OutputError: No process can be started.
        """
        if not self._is_ready and self._answer() != READY:
            raise OutputError(f"the process that reads files ended with exit code {self._end()}")
        self._is_ready = True
        if answer := self._answer():
            return json.loads(answer)
        raise FileEndedReaderError(_words_for(self._end()))

    def close(self) -> None:
        """End the process; again is allowed."""
        if self._child is not None:
            self._child.kill()
            self._end()

    def _answer(self) -> str:
        """The next line from the process; nothing where it has ended."""
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout.readline()

    def _end(self) -> int:
        """Wait for the process, and let go of it; its exit code."""
        assert self._child is not None
        child, self._child, self._is_ready = self._child, None, False
        # What it did not take any more is in the way of closing its pipe.
        with contextlib.suppress(BrokenPipeError), child:
            pass
        return child.returncode


def _start(arguments: list[str], **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        arguments, process_group=0, encoding="utf-8", errors="replace", **options
    )


def _words_for(exit_code: int) -> str:
    """What it tells of a file that it ended the process that read it."""
    if exit_code == -signal.SIGPROF:
        return f"reading it never ends in the HDF5 library; {_DAMAGED}"
    if exit_code == -signal.SIGKILL:
        return "the process that read it was killed; if memory was short, read it again alone"
    if -exit_code in _CRASHES:
        return f"reading it crashes the HDF5 library; {_DAMAGED}"
    return f"the process that read it ended with exit code {exit_code}"


class _Guard:
    """Has files read elsewhere, one at a time, before this process reads them.

    Owner: this module, one for the process and all its threads. A forked process has another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = ReadingProcess("touch", str(_LONGEST_CPU_S))

    def why_deadly(self, path: Path) -> str | None:
        with self._lock:
            # The process keeps the folder that it was started in.
            self._process.begin(path.absolute())
            try:
                self._process.result()
            except FileEndedReaderError as exc:
                return str(exc)
        return None

    def close(self) -> None:
        self._process.close()


_guard = _Guard()


def why_deadly(path: Path) -> str | None:
    """Have a file read in another process first; some milliseconds, or half a second the first.

    Returns:
        How it ends the process that reads it; None where it does not, and in such a process.

    Raises:
        OutputError: No process can be started.
    """
    return None if is_reading_process else _guard.why_deadly(path)


def _begin_anew() -> None:
    """What a forked process inherits is its parent's: pipes, and a lock that another may hold."""
    global _guard
    # Kept, so that nobody waits for a process that is no child of this one.
    _inherited.append(_guard)
    _guard = _Guard()


_inherited: list[_Guard] = []
os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _guard.close())
