"""How many of something, in words."""


def counted(count: int, noun: str) -> str:
    """``1 slide``, ``0 slides``, ``2 slides``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
