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


_TINY = math.nextafter(0, 1)
Count = Annotated[int, Bound(1, MOST, "at least 1")]
Whole = Annotated[int, Bound(0, MOST, "at least 0")]
Seed = Annotated[int, Bound(0, 2**63 - 1, "in 0..2**63-1")]
Positive = Annotated[float, Bound(_TINY, FINITE, "a finite number above 0")]
NotNegative = Annotated[float, Bound(0, FINITE, "a finite number >= 0")]
Nats = Annotated[float, Bound(0, math.inf, "a number >= 0")]
Above0 = Annotated[float, Bound(_TINY, math.inf, "above 0")]
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

    A whole number will do for a float, a list for a tuple, a `Path` for a str.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        kinds = _annotations(cls)
        for name, kind in ((field.name, kinds[field.name]) for field in fields(self)):
            value, items = getattr(self, name), get_origin(kind) is tuple
            several = items and isinstance(value, tuple | list)
            for one in value if several else [value]:
                require_value(name, one, get_args(kind)[0] if several else kind)

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
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(in_words, get_args(kind)))
    return _WORDS.get(kind) or (kind.__name__ if isinstance(kind, type) else str(kind))


_WORDS = {NoneType: "null", int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _wanted(value: Any, kind: Any) -> str | None:
    """What a value should be instead, None where it is what an annotation says."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = (bound for bound in args[1:] if isinstance(bound, Bound) and not bound.least <= value <= bound.most)
        return _wanted(value, args[0]) or next((bound.words_for(value) for bound in bounds), None)
    if origin in (Union, UnionType):
        wanted = [_wanted(value, one) for one in args]
        return None if None in wanted else " or ".join(filter(None, wanted))
    if origin is Literal:
        good = isinstance(value, str) and value in args
    else:
        wider = {float: int | float, str: str | PathLike}
        good = isinstance(value, wider.get(kind, origin or kind)) and (kind is bool or not isinstance(value, bool))
    return None if good else in_words(kind)
