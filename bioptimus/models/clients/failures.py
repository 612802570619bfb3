"""Log a failed request where it fails, once, and let the error go on as it is."""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson

from bioptimus.errors import OutOfDeviceMemoryError, SchedulerClosedError
from bioptimus.inference.schemas import ModelRequest

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_LOGGED = "_bioptimus_logged"
# A run handles these: it stops, or halves its batches and says so itself.
_QUIET = (SchedulerClosedError, OutOfDeviceMemoryError)


def log_failures(function: F) -> F:
    """Log what a call was about when it raises, then re-raise unchanged.

    The record names operation, slide, x, y and the exception. An exception that passes several
    decorated functions, or that a batch gives to all its requests, is logged once. Works on
    functions, coroutine functions, and class or static methods.

    Args:
        function: Takes a request, its JSON, or a list of either as its first argument (after
            ``self`` or ``cls``); others are logged without a place.

    Returns:
        The wrapped function, of the same kind.
    """
    if isinstance(function, classmethod | staticmethod):
        return type(function)(log_failures(function.__func__))
    name = function.__name__

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except Exception as exc:
                _log(name, exc, args, kwargs)
                raise

        return run_async  # type: ignore[return-value]

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as exc:
            _log(name, exc, args, kwargs)
            raise

    return run  # type: ignore[return-value]


def _log(operation: str, exc: Exception, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    # The requests of one batch get errors of their own with a cause they share.
    shared: BaseException = exc.__cause__ or exc
    if getattr(exc, _LOGGED, False) or getattr(shared, _LOGGED, False):
        return
    for error in (exc, shared):
        setattr(error, _LOGGED, True)
    slide, x, y, more = _place((*args, *kwargs.values()))
    logger.log(
        logging.DEBUG if isinstance(exc, _QUIET) else logging.ERROR,
        "%s failed for %s at x=%s, y=%s%s: %s: %s",
        operation,
        slide,
        x,
        y,
        f" (and {more} more)" if more else "",
        type(exc).__name__,
        exc,
        extra={"operation": operation, "slide": slide, "x": x, "y": y},
    )


def _place(values: Sequence[Any]) -> tuple[str, int | str, int | str, int]:
    """Slide, x, y of the first request among the values, and how many others came with it."""
    for value in values:
        requests = value if isinstance(value, list | tuple) else [value]
        first = requests[0] if requests else None
        if isinstance(first, ModelRequest):
            return first.slide_name or "?", first.x, first.y, len(requests) - 1
        if isinstance(first, str | bytes):
            try:
                fields = orjson.loads(first)
            except orjson.JSONDecodeError:
                continue
            if isinstance(fields, dict):
                place = (str(fields.get(key, "?"))[:200] for key in ("slide_name", "x", "y"))
                slide, x, y = place
                return slide, x, y, len(requests) - 1
    return "?", "?", "?", 0
