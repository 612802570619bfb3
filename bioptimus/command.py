"""What the installed ``bioptimus`` command starts."""

import importlib
import os
import sys


def run() -> None:
    """Run the command line that lies beside this package, and end the process.

    By its place: ``cli`` is what many projects call a file of theirs, and one on ``PYTHONPATH``
    would be run in its stead.
    """
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.insert(0, beside)
    try:
        program = importlib.import_module("cli.__main__")
    finally:
        sys.path.remove(beside)
    program.run()
