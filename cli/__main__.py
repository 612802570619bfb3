"""The ``bioptimus`` command, and ``python -m cli`` in its stead."""

import sys


def run() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        # Here, so that a Ctrl-C while it is loading ends like any other.
        from cli.main import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    run()
