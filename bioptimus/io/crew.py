"""Pieces of work shared with threads that happen to be free."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The calling thread, and those of a pool that are free just then.

    Nothing waits for a thread that has not begun: where all of the pool are busy with another
    slide's tiles, the caller does everything itself.

    Attributes:
        pool: The others; None where there are none.
        at_once: Most threads at work, the calling one included.
    """

    pool: Executor | None = None
    at_once: int = 1

    def each(
        self, do: Callable[[T], None], items: Iterable[T], *, at_once: int | None = None
    ) -> None:
        """Call a function with each of the items, several at a time, in no certain order.

        Args:
            do: The function; may be called from any thread.
            items: What it is called with, each once.
            at_once: Most threads for this work, where its memory asks for fewer.

        Raises:
            BaseException: What ``do`` raised first on the calling thread, else what it raised on
                another. No further item is begun then, and what was begun has ended.
        """
        left = deque(items)

        def work() -> None:
            while True:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                try:
                    do(item)
                except BaseException:
                    left.clear()
                    raise

        others = min(self.at_once, at_once or self.at_once, len(left)) - 1
        futures = [self.pool.submit(work) for _ in range(others)] if self.pool is not None else []
        try:
            work()
        finally:
            begun = [future for future in futures if not future.cancel()]
            wait(begun)
        for future in begun:
            future.result()


ALONE = Crew()
