"""Ctrl-C at any moment: no traceback, exit code 130, a word to the user, a cursor to type at."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import EXAMPLE_SLIDE

# The command line; as it comes to load the module named first, it gets a Ctrl-C, and then waits
# there until its standard input ends.
INTERRUPTED = """
import builtins, os, signal, sys
# Ignored where this test runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
wanted = sys.argv.pop(1)
load = builtins.__import__

def interrupts(name, *rest, **named):
    global wanted
    if name == wanted:
        wanted = ""
        os.kill(os.getpid(), signal.SIGINT)
        while os.read(0, 1):
            pass
    return load(name, *rest, **named)

builtins.__import__ = interrupts
from cli.__main__ import run
run()
"""


def start(module: str, *words: str | Path, errors: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", INTERRUPTED, module, *map(str, words)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typer", ("embed", EXAMPLE_SLIDE)),
        ("bioptimus.errors", ("embed", EXAMPLE_SLIDE)),
        ("numpy", ("embed", EXAMPLE_SLIDE)),
        ("torch", ("embed", EXAMPLE_SLIDE)),
        ("openslide", ("embed", EXAMPLE_SLIDE, "--dry-run")),
        ("openslide", ("tiles", EXAMPLE_SLIDE)),
        ("openslide", ("info", EXAMPLE_SLIDE)),
    ],
    ids=str,
)
def test_while_the_program_is_loading_ends_it_without_a_traceback(
    tmp_path: Path, module: str, words: Sequence[str | Path]
) -> None:
    out = () if "info" in words else ("--out", tmp_path / "out")
    running = start(module, *words, *out, errors=subprocess.PIPE)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert b"Traceback" not in errors
    assert b"KeyboardInterrupt" not in errors


@pytest.mark.parametrize("as_json", [False, True])
def test_is_answered_with_how_to_stop_at_once(tmp_path: Path, as_json: bool) -> None:
    how = ["--log-json"] if as_json else []
    words = (EXAMPLE_SLIDE, "--out", tmp_path)
    with start("numpy", "embed", *words, *how, errors=subprocess.PIPE) as running:
        assert running.stderr is not None
        line = running.stderr.readline()
        _, rest = running.communicate(timeout=60)
    told = json.loads(line)["message"] if as_json else line.decode().strip()
    assert told == "stopping: finishing the batches under way; press again to stop at once"
    assert (running.returncode, rest) == (130, b"")


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def read(terminal_fd: int, *, until: bytes = b"", seconds: float = 30) -> bytes:
    """What the terminal shows: up to some words, or what is there."""
    shown = b""
    while until not in shown if until else select.select([terminal_fd], [], [], 0)[0]:
        assert select.select([terminal_fd], [], [], seconds)[0], shown
        shown += os.read(terminal_fd, 4096)
    return shown


@pytest.mark.parametrize("again", [True, False])
def test_at_a_terminal_is_answered_and_leaves_the_cursor_shown(tmp_path: Path, again: bool) -> None:
    with (
        terminal() as (ours, theirs),
        start("numpy", "embed", EXAMPLE_SLIDE, "--out", tmp_path, errors=theirs) as running,
    ):
        shown = read(ours, until=b"press again to stop at once")
        assert b"\x1b[?25l" in shown, "the bars hide the cursor"
        if again:
            running.send_signal(signal.SIGINT)
            running.wait(timeout=30)
        running.communicate(timeout=30)
        shown += read(ours)
    assert running.returncode == 130
    assert b"Traceback" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")


# The command line in a session whose terminal is its standard input.
AT_A_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# Ignored where this test runs in the background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from cli.__main__ import run
run()
"""


@pytest.mark.parametrize(("how", "until"), [((), b"slides"), (("--log-json",), b'"slide_planned"')])
def test_a_closed_terminal_is_told_by_the_exit_code(
    tmp_path: Path, how: tuple[str, ...], until: bytes
) -> None:
    ours, theirs = pty.openpty()
    words = ("embed", str(EXAMPLE_SLIDE), "--out", str(tmp_path), "--batch-size", "1", *how)
    command = [sys.executable, "-c", AT_A_TERMINAL, *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        read(ours, until=until)
        os.close(ours)
        assert running.wait(timeout=60) == 129
    assert not list(tmp_path.rglob("*.claim"))


def test_a_reader_that_the_same_signal_ended_changes_no_exit_code(tmp_path: Path) -> None:
    words = (EXAMPLE_SLIDE, "--out", tmp_path)
    module = "bioptimus.runtime.batch_size"  # loaded by the run itself
    with start(module, "embed", *words, errors=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stderr is not None
        assert running.stderr.readline() == b"1 slide\n"
        assert b"stopping" in running.stderr.readline()
        running.stderr.close()
        running.stdin.close()
        assert running.wait(timeout=60) == 130
