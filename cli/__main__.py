"""The ``bioptimus`` command, and ``python -m cli`` in its stead."""

import io
import os
import sys


def run() -> None:
    """Run the command line and end the process with its exit code."""
    _have_names_in_utf8()
    _open_closed_streams()
    _hold_what_is_not_taken()
    try:
        # Here, so that a Ctrl-C while it is loading ends like any other.
        from cli.ending import end_on_signals

        end_on_signals()
        from cli.main import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _have_names_in_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has names of files read otherwise.

    In a Latin-1 locale a slide is called by another name than elsewhere, and its result tells that
    name: on the next node, both would be strangers to each other.
    """
    if sys.getfilesystemencoding() != "utf-8":
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        # The variable is for the processes that this one starts.
        os.execve(sys.executable, words, {**os.environ, "PYTHONUTF8": "1"})


def _open_closed_streams() -> None:
    """Put the null device in the place of standard streams that the caller closed.

    The next file opened would get their number, and a result what a library says on stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - for good
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _hold_what_is_not_taken() -> None:
    """Have what a disk that fills takes a part of told as an error.

    With PYTHONUNBUFFERED, as containers set it, text goes to the system directly, and what the
    system does not take of it is dropped without a word.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stdout.buffer, io.RawIOBase):
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        held = io.BufferedWriter(sys.stdout.detach())
        sys.stdout = io.TextIOWrapper(held, encoding, errors, line_buffering=True)


if __name__ == "__main__":
    run()
