"""How many of something, in words, and how many of how many."""

from collections.abc import Callable

Tell = Callable[[str, int, int], None]
"""(what is done, how many of it are, of how many): called as it goes on."""


def tell_nobody(what: str, done: int, of: int) -> None:
    """For who does not want to know."""


def counted(count: int, noun: str) -> str:
    """``1 slide``, ``0 slides``, ``2 slides``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
