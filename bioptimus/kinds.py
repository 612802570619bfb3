"""Whether options given in Python are each of the kind that their class states.

The command line has parsed its words by then; a script may hand over the text of a table's cell.
"""

import textwrap
import types
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bioptimus.errors import UsageError

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
    for name, wanted in _fields(type(options)).items():
        value = getattr(options, name)
        if not any(_is(value, kind) for kind in wanted):
            kinds = " or ".join(_in_words(kind) for kind in wanted)
            given = textwrap.shorten(repr(value), 80, placeholder=" …")
            raise UsageError(f"{name.replace('_', ' ')} {given}: must be {kinds}")


def _fields(options: type[object]) -> dict[str, tuple[Any, ...]]:
    """The kinds of each field."""
    return {
        name: get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for name, hint in get_type_hints(options).items()
    }


def _is(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        each = get_args(kind)[0]
        return isinstance(value, tuple | list) and all(_is(item, each) for item in value)
    if kind is bool:
        # NumPy has its own, of another name before its version 2.
        return type(value).__name__ in ("bool", "bool_")
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {_in_words(get_args(kind)[0])}"
    return _WORDS.get(kind) or f"of type {(get_origin(kind) or kind).__name__}"
