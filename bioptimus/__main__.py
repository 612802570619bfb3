"""``python -m bioptimus``: the command, where it is not on the PATH."""

from bioptimus.command import run

if __name__ == "__main__":
    run()
