"""Whether what is given in Python is of the kind that its class or function states.

The command line has parsed its words by then; a script may hand over the text of a table's cell.
"""

import builtins
import os
import textwrap
import types
from collections.abc import Callable, MutableSequence, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from bioptimus.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    types.NoneType: "None",
}


def check_kinds(options: object) -> None:
    """Refuse a value of another kind than its field's; what it may be is the class's own to say.

    Numbers may be NumPy's. A whole number is none that only has no fraction: in a digest 16.0 is
    not 16.

    Args:
        options: A dataclass of numbers, texts, paths, words, tuples of them, or other classes.

    Raises:
        UsageError: Names the field, the value, and what it must be.
    """
    of: Any = type(options)
    for name, wanted in _kinds_of(of).items():
        _check(name, getattr(options, name), wanted)


def checks_kinds(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of each call in the same way, before the function begins.

    What a name stands for that only a type checker imports is left to the function to check.

    Raises:
        UsageError: By the call: names the argument, the value, and what it must be.
    """
    takes = signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = takes.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # says the same, with its name
        wanted = _kinds_of(function)
        for name, value in given.items():
            if name in wanted and takes.parameters[name].kind is not Parameter.VAR_KEYWORD:
                _check(name, value, wanted[name])
        return function(*args, **kwargs)

    return checked


def _check(name: str, value: object, wanted: tuple[Any, ...]) -> None:
    what = name.replace("_", " ")
    if not any(_is(value, kind) for kind in wanted):
        kinds = " or ".join(_in_words(kind) for kind in wanted)
        given = textwrap.shorten(repr(value), 80, placeholder=" …")
        raise UsageError(f"{what} {given}: must be {kinds}")
    if Path in wanted and isinstance(value, str | Path):
        if not str(value):
            # To Path it is the working folder.
            raise UsageError(f"{what}: an empty path was given; is a variable not set?")
        try:
            impossible = b"\0" in os.fsencode(value)
        except UnicodeEncodeError:
            impossible = True
        if impossible:
            raise UsageError(f"{what} {str(value)!r}: no file can have such a name")


@cache
def _kinds_of(what: Any) -> dict[str, tuple[Any, ...]]:
    """The kinds of each field of a class, or argument of a function."""
    names = _Names(vars(builtins) | getattr(what, "__globals__", {}))
    hints = get_type_hints(what, localns=None if isinstance(what, type) else names)
    return {
        name: get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for name, hint in hints.items()
    }


class _Names(dict[str, Any]):
    """Of a module; one that only type checkers know there is anything."""

    def __missing__(self, name: str) -> object:
        return object


def _is(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any or origin is MutableSequence:
        return True  # a mapped file is one that says so to nobody
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is tuple and get_args(kind)[-1] is not Ellipsis:
        each = get_args(kind)
        if not isinstance(value, tuple | list) or len(value) != len(each):
            return False
        return all(_is(item, kind) for item, kind in zip(value, each, strict=True))
    if origin in (tuple, Sequence):
        (each, *_) = get_args(kind)
        listed = isinstance(value, tuple | list if origin is tuple else Sequence)
        if not listed or isinstance(value, str | bytes):
            return False
        return all(_is(item, each) for item in value)
    if kind is bool:
        # NumPy has its own, of another name before its version 2.
        return type(value).__name__ in ("bool", "bool_")
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if getattr(kind, "_is_protocol", False):
        asked = {name for each in kind.__mro__ for name in vars(each) if not name.startswith("_")}
        return asked <= set(dir(value)) or hasattr(type(value), "__getattr__")
    return isinstance(value, origin or kind)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}" if others else str(last)
    if get_origin(kind) is tuple and get_args(kind)[-1] is not Ellipsis:
        return f"{len(get_args(kind))} values, each {_in_words(get_args(kind)[0])}"
    if get_origin(kind) in (tuple, Sequence):
        return f"a list, each {_in_words(get_args(kind)[0])}"
    return _WORDS.get(kind) or f"of type {(get_origin(kind) or kind).__name__}"
