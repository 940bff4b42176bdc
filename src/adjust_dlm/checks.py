"""What settings must be: bounds in annotations, the class that checks them, and the error that names what is wrong."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, SupportsIndex, Union, get_args, get_origin, get_type_hints

MOST = 2**31 - 1  # of any count: arithmetic with it stays within int64
FINITE = sys.float_info.max


class Bound(NamedTuple):
    """Where the number of a setting must lie, both ends allowed, and how a message says so. Stands in an annotation."""

    least: float
    most: float
    words: str

    def words_for(self, value: float) -> str:
        """What is wrong with a value that lies outside."""
        return f"at most {MOST}" if value > self.most == MOST else self.words


_TINY = math.nextafter(0, 1)  # the least number above 0
Count = Annotated[int, Bound(1, MOST, "at least 1")]
Whole = Annotated[int, Bound(0, MOST, "at least 0")]
Seed = Annotated[int, Bound(0, 2**63 - 1, "in 0..2**63-1")]
Positive = Annotated[float, Bound(_TINY, FINITE, "a finite number above 0")]
PositiveOrInf = Annotated[float, Bound(_TINY, math.inf, "above 0")]
NotNegative = Annotated[float, Bound(0, FINITE, "a finite number >= 0")]
NotNegativeOrInf = Annotated[float, Bound(0, math.inf, "a number >= 0")]
Share = Annotated[float, Bound(0, 1, "in [0, 1]")]
TopP = Annotated[float, Bound(_TINY, 1, "in (0, 1]")]


class InputError(ValueError):
    """Bad input from the user: the command line exits with 2 and prints this one line."""


@contextmanager
def refusing(what: str, *kinds: type[Exception], first: bool = False, hint: str = "") -> Iterator[None]:
    """Makes errors of other code an `InputError` of one line: what went wrong, what they say, and what to do.

    `first` takes the first of their lines alone.
    """
    try:
        yield
    except kinds as error:
        said = str(error) or repr(error)
        raise InputError(f"{what}: {said.splitlines()[0] if first else ' '.join(said.split())}{hint}") from error


def is_id(value: object, least: int, end: int) -> bool:
    """Whether a value is a whole number (numpy's and torch's too), from `least` to before `end`."""
    return isinstance(value, SupportsIndex) and least <= operator.index(value) < end


def require(condition: bool, message: str) -> None:
    """Raises `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Settings that raise `InputError` unless every field holds what its annotation says, with its `Bound`.

    A whole number will do for a float, a list for a tuple, a `Path` for a str. Items of a tuple are checked one by one,
    those of a list or mapping not at all. A `__post_init__` of one's own calls this one.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        kinds = _annotations(cls)
        for field in fields(self):
            for value, kind in _items(getattr(self, field.name), kinds[field.name]):
                require_value(field.name, value, kind)

    @classmethod
    def from_settings(cls, settings: object, **changes: Any) -> Self:
        """What other settings say under the same names, with changes."""
        said = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**said | changes)


def require_value(name: str, value: object, kind: Any) -> None:
    """Raises `InputError` unless a value is what an annotation says."""
    wanted = _wanted(value, kind)
    verb = "lie" if str(wanted).startswith("in ") else "be"
    require(wanted is None, f"{name} is {value!r}; it must {verb} {wanted}")


def in_words(kind: Any) -> str:
    """An annotation: a whole number, one of a, b, or null."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is Annotated:
        return in_words(args[0])
    if origin is tuple:
        return f"a list, each {in_words(args[0])}" if args[-1] is Ellipsis else f"a list of {len(args)}"
    if origin in _UNIONS:
        return " or ".join(map(in_words, args))
    return _WORDS.get(kind) or (kind.__name__ if isinstance(kind, type) else str(kind))


_UNIONS = (Union, UnionType)
_WORDS = {NoneType: "null", int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _items(value: Any, kind: Any) -> Iterator[tuple[Any, Any]]:
    """A value and its annotation; those of each item where it is a list that may stand for a tuple."""
    parts = get_args(kind) if get_origin(kind) in (*_UNIONS, Annotated) else [kind]
    several = [one for one in parts if get_origin(one) is tuple]
    if not (several and isinstance(value, tuple | list)):
        yield value, kind
        return
    item, *others = get_args(several[0])
    kinds = [item] * len(value) if others == [Ellipsis] else [item, *others]
    if len(kinds) == len(value):
        yield from zip(value, kinds, strict=True)
    else:
        yield value, several[0]


def _wanted(value: Any, kind: Any) -> str | None:
    """What a value should be instead, None where it is what an annotation says."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        wanted = _wanted(value, args[0])
        if wanted is not None:
            return wanted  # bounds are for numbers
        bounds = (bound for bound in args[1:] if isinstance(bound, Bound))
        return next((bound.words_for(value) for bound in bounds if not bound.least <= value <= bound.most), None)
    if origin in _UNIONS:
        said = {in_words(one): _wanted(value, one) for one in args}
        limits = [words for name, words in said.items() if words != name]  # None among them where it is of that kind
        return None if None in limits else " or ".join(filter(None, limits or said))
    if origin is tuple:
        good = False  # its items are looked at one by one, see `_items`
    elif origin is Literal:
        good = isinstance(value, str) and value in args
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return None if -(2**63) <= value < 2**63 else "within 64 bits if it is whole"  # torch takes no larger one
    else:
        wider = {str: str | PathLike}
        good = isinstance(value, wider.get(kind, origin or kind)) and (kind is bool or not isinstance(value, bool))
    return None if good else in_words(kind)
