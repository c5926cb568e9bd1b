"""Arguments of public calls, checked by the types that their signatures state.

One rule for every call. A text or a path is never empty. A truth value is not a number, nor a
number a truth value. A list may be any iterable except a text; where its items are texts or paths,
one of them alone stands for a list of one.

Ranges and choices are for the calls themselves. What a signature says of tensors is checked here
only as far as that they are tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import DtypeError, InputError

P = ParamSpec("P")
R = TypeVar("R")

_MOST_SHOWN = 60  # characters of a wrong value
_REFUSED = object()
_WORDS = {
    bool: ("True or False", "truth values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    Callable: ("a function", "functions"),
    types.NoneType: ("None", "None"),
}


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A function that refuses arguments of other types than its signature states.

    The error is an `InputError`, or a `DtypeError` where a tensor is wanted. Lists arrive as
    tuples. Parameters without a type are handed on as they are.
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        return get_type_hints(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says what is missing or too much
        for name, value in bound.arguments.items():
            if name in hints():
                bound.arguments[name] = checked_argument(name, value, hints()[name])
        return function(*bound.args, **bound.kwargs)

    return call


def checked_argument(name: str, value: Any, hint: Any) -> Any:
    """The value of an argument, as a type of this module's rule takes it.

    Parameters
    ----------
    name : str
        The argument, for the error.
    value : object
        What was given.
    hint : object
        A type: bool, int, float, str, ``str | Path``, None, a class, a callable, a sequence or
        another iterable of these, or a union of them.

    Raises
    ------
    InputError
        The value is of another type.
    DtypeError
        The same, where it has to be a tensor.
    """
    taken = _taken(hint, value)
    if taken is _REFUSED:
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + "..."
        wants_tensor = any(_name(member) == "Tensor" for member in _members(hint))
        error = DtypeError if wants_tensor else InputError
        raise error(f"must be {_words(hint)}, got {shown}", argument=name)
    return taken


def check_fields(instance: Any) -> None:
    """Refuse a dataclass whose fields hold values of other types than it states.

    A field may hold its default in any case.

    Raises
    ------
    InputError, DtypeError
        As `checked_argument`.
    """
    hints = get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if value is not field.default:
            checked_argument(field.name, value, hints[field.name])


def _taken(hint: Any, value: Any) -> Any:
    """The value as the hint takes it, or `_REFUSED`."""
    for member in _members(hint):
        taken = _taken_by(member, value)
        if taken is not _REFUSED:
            return taken
    return _REFUSED


def _members(hint: Any) -> Sequence[Any]:
    """The types of a union; ``str | Path`` is one of them, a path."""
    if get_origin(hint) not in (Union, types.UnionType):
        return [hint]
    members = list(get_args(hint))
    if str in members and Path in members:
        members.remove(str)
    return members


def _taken_by(member: Any, value: Any) -> Any:
    origin = get_origin(member) or member
    if member is Any or member is object:
        fits = True
    elif member in (str, Path):
        kinds = str if member is str else (str, os.PathLike)
        fits = isinstance(value, kinds) and str(value) != "" and "\0" not in str(value)
    elif member in (int, float):
        kind = Integral if member is int else Real
        return member(value) if isinstance(value, kind) and _is_number(value) else _REFUSED
    elif origin in (Sequence, Iterable, list, tuple):
        return _taken_items(get_args(member), value)
    elif origin is Callable:
        fits = callable(value)
    else:
        fits = isinstance(value, origin)
    return value if fits else _REFUSED


def _is_number(value: object) -> bool:
    return not isinstance(value, bool)


def _taken_items(hints: tuple[Any, ...], value: Any) -> Any:
    item = hints[0] if hints else object
    alone = [each for each in _members(item) if each in (str, Path)]
    if isinstance(value, str | os.PathLike):
        taken = _taken(item, value) if alone else _REFUSED
        return taken if taken is _REFUSED else (taken,)
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        return _REFUSED
    items = tuple(_taken(item, each) for each in value)
    return _REFUSED if any(each is _REFUSED for each in items) else items


def _words(hint: Any) -> str:
    """The hint as a reader wants it: ``a list of texts``, ``a whole number or None``."""
    words = [_word(member) for member in _members(hint)]
    return ", ".join(words[:-1]) + (" or " if words[:-1] else "") + words[-1]


def _word(member: Any) -> str:
    origin = get_origin(member) or member
    if origin in (Sequence, Iterable, list, tuple):
        items = _members(get_args(member)[0])
        return f"a list of {_WORDS[items[0]][1] if items[0] in _WORDS else _name(items[0])}"
    return _WORDS[origin][0] if origin in _WORDS else f"a {_name(origin)}"


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
