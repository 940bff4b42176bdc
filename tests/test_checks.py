"""Settings that check themselves by their annotations: what passes, what does not, and how the message says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from adjust_dlm.checks import MOST, Checked, Count, InputError, NotNegative, NotNegativeOrInf, Seed, Share


@dataclass(frozen=True, kw_only=True)
class Some(Checked):
    """One field of each kind."""

    count: Count = 1
    most: Count | None = None
    seed: Seed = 0
    share: Share = 0.5
    gamma: NotNegativeOrInf = 1.0
    tau: NotNegative = 1.0
    flag: bool = False
    kind: Literal["a", "b"] | None = None
    name: str = ""
    counts: tuple[Count, ...] = ()
    perhaps: tuple[Count, ...] | None = None
    pair: tuple[int, str] = (1, "x")
    marked: Annotated[tuple[Count, ...], "a flag"] = ()


@pytest.mark.parametrize(
    "given",
    [
        {"count": MOST},
        {"most": None},
        {"most": 3},
        {"seed": 2**63 - 1},
        {"share": 1},
        {"share": 0},
        {"gamma": math.inf},
        {"gamma": 3},
        {"gamma": 2**63 - 1},
        {"flag": True},
        {"kind": "a"},
        {"kind": None},
        {"name": Path("x")},
        {"counts": [1, 2]},
        {"counts": ()},
        {"perhaps": None},
        {"perhaps": (1,)},
        {"pair": (2, "y")},
        {"marked": [1]},
    ],
    ids=str,
)
def test_what_fits_passes(given: dict[str, Any]) -> None:
    Some(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count is 0; it must be at least 1"),
        ({"count": MOST + 1}, f"it must be at most {MOST}"),
        ({"count": True}, "count is True; it must be a whole number"),
        ({"count": 1.0}, "must be a whole number"),
        ({"count": np.int64(3)}, "must be a whole number"),
        ({"count": None}, "count is None; it must be a whole number"),
        ({"most": 0}, "most is 0; it must be at least 1"),
        ({"most": "x"}, "most is 'x'; it must be a whole number or null"),
        ({"seed": -1}, "seed is -1; it must lie in 0..2**63-1"),
        ({"share": math.nan}, "share is nan; it must lie in [0, 1]"),
        ({"share": 1.5}, "it must lie in [0, 1]"),
        ({"share": True}, "share is True; it must be a number"),
        ({"gamma": -1}, "gamma is -1; it must be a number >= 0"),
        ({"gamma": 2**63}, f"gamma is {2**63}; it must be within 64 bits if it is whole"),
        ({"gamma": 10**400}, "it must be within 64 bits if it is whole"),
        ({"gamma": True}, "gamma is True; it must be a number"),
        ({"tau": math.inf}, "tau is inf; it must be a finite number >= 0"),
        ({"flag": 1}, "flag is 1; it must be true or false"),
        ({"kind": "c"}, "kind is 'c'; it must be one of a, b or null"),
        ({"kind": ["a"]}, "it must be one of a, b or null"),
        ({"name": 5}, "name is 5; it must be text"),
        ({"counts": 5}, "counts is 5; it must be a list, each a whole number"),
        ({"counts": (1, 0)}, "counts is 0; it must be at least 1"),
        ({"counts": "ab"}, "must be a list, each a whole number"),
        ({"perhaps": (1, 0)}, "perhaps is 0; it must be at least 1"),
        ({"perhaps": 5}, "perhaps is 5; it must be a list, each a whole number or null"),
        ({"marked": [0]}, "marked is 0; it must be at least 1"),
        ({"pair": (1, 2)}, "pair is 2; it must be text"),
        ({"pair": (1,)}, "pair is (1,); it must be a list of 2"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_with_what_would(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Some(**given)
    assert message in str(caught.value)
