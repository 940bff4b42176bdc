"""The table of decoders, and how one is named with its settings: `threshold:tau=0.9`. All of it without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from adjust_dlm import options as own
from adjust_dlm.types import DecodeConfig, require
from adjust_dlm.words import known


@dataclass(frozen=True)
class Decoder:
    """An entry of `DECODERS`.

    Attributes:
        run: (base, [sampler,] [partner,] canvas, [options]) -> None; fills the canvas. Of those in the table None until
            `adjust_dlm.decoders` is imported, which takes torch.
        needs_sampler: whether it takes g.
        needs_partner: whether it takes an autoregressive partner (`bases.partner`).
        takes_k: whether `tokens_per_step` says how many tokens a pass commits.
        takes_candidates: whether its rounds heed `DecodeConfig.candidates`.
        resumable: whether it keeps nothing between rounds, so that rows of a batch may come and go (`machinery.rows`).
        options: dataclass of settings that only this decoder has.
        by_drawn: whether at T > 0 it takes positions for the tokens that were drawn there.
        by_order: whether `DecodeConfig.order` says which position is next.
        lawless: why its tokens have no distribution given those before them (see `decoders.divergence`).
    """

    run: Any = None
    needs_sampler: bool = False
    needs_partner: bool = False
    takes_k: bool = False
    takes_candidates: bool = False
    resumable: bool = False
    options: Callable[..., Any] | None = None
    by_drawn: bool = False
    by_order: bool = True
    lawless: str | None = None


_JOINT = "its text is joint decoding's own, or has its law; measure joint"
_MIXED = "its tokens are kept or dropped by what a second model makes of them"
DECODERS: dict[str, Decoder] = {
    "joint": Decoder(resumable=True),
    "parallel": Decoder(resumable=True, takes_k=True),
    "adjust": Decoder(
        resumable=True, needs_sampler=True, takes_k=True, takes_candidates=True, options=own.AdjustOptions
    ),
    "adaptive": Decoder(resumable=True, needs_sampler=True, takes_candidates=True, options=own.AdaptiveOptions),
    "verified": Decoder(resumable=True, needs_sampler=True, options=own.VerifiedOptions, lawless=_JOINT),
    "cascade": Decoder(resumable=True, needs_sampler=True, options=own.CascadeOptions, by_drawn=True),
    "threshold": Decoder(resumable=True, options=own.ThresholdOptions, by_order=False),
    "factor": Decoder(resumable=True, options=own.FactorOptions, by_drawn=True),
    "entropy_bound": Decoder(resumable=True, options=own.EntropyBoundOptions, by_order=False),
    "klass": Decoder(options=own.KlassOptions, by_drawn=True),
    "edlm": Decoder(resumable=True, needs_partner=True, takes_k=True, options=own.EdlmOptions, lawless=_MIXED),
    "origin": Decoder(takes_k=True, options=own.OriginOptions, by_order=False),
    "soft_order": Decoder(resumable=True, takes_k=True, options=own.SoftOrderOptions),
    "guided": Decoder(resumable=True, takes_k=True, options=own.GuidedOptions, by_drawn=True),
    "fast_dllm": Decoder(resumable=True, options=own.FastDllmOptions, by_drawn=True, by_order=False),
    "sdar": Decoder(options=own.SdarOptions, by_drawn=True, by_order=False),
    "apd": Decoder(resumable=True, needs_partner=True, options=own.ApdOptions, lawless=_MIXED),
    "dcd": Decoder(resumable=True, needs_partner=True, takes_k=True, options=own.DcdOptions, lawless=_MIXED),
}


def option_names(name: str) -> list[str]:
    """Settings that only this decoder has."""
    kind = DECODERS[name].options
    return [] if kind is None else [field.name for field in fields(kind)]  # type: ignore[arg-type]


def build_options(name: str, given: Mapping[str, Any]) -> list[Any]:
    """A decoder's own options as its function takes them: one object, or nothing.

    Raises:
        InputError: unknown decoder, an option that it does not have, or a bad value.
    """
    require(name in DECODERS, f"unknown decoder {name!r}; {known(name, DECODERS)}")
    kind, names = DECODERS[name].options, option_names(name)
    unknown = sorted(given.keys() - set(names))
    has = f"it has {', '.join(names)}" if names else "it has none"
    require(not unknown, f"decoder {name!r} has no option {', '.join(unknown)}; {has}")
    return [] if kind is None else [kind(**given)]


def read_options(pairs: Iterable[str]) -> dict[str, Any]:
    """`tau=0.9`, `switch=sane` as keywords; a value is JSON (a number, true, [1, 2]), or else a word.

    Raises:
        InputError: a pair without a name or a value.
    """
    out = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        require(bool(name and equals), f"settings of a decoder are NAME=VALUE, not {pair!r}")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


class Variant(NamedTuple):
    """A decoder with its settings, as one word says it.

    Attributes:
        name: of the decoder.
        settings: fields of `DecodeConfig` that differ, such as tokens_per_step.
        options: its own options.
    """

    name: str
    settings: dict[str, Any]
    options: dict[str, Any]


def read_variant(text: str) -> Variant:
    """`threshold:tau=0.9`, `adjust:tokens_per_step=4`.

    Raises:
        InputError: an unknown decoder, a setting that neither it nor `DecodeConfig` has, or a bad value.
    """
    name, _, pairs = text.partition(":")
    settings, options = split_settings(read_options(re.split(r",(?![^\[]*\])", pairs) if pairs else []))
    build_options(name, options)
    DecodeConfig(**settings)
    return Variant(name, settings, options)


def split_settings(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `DecodeConfig`, and a decoder's own options."""
    shared = {field.name for field in fields(DecodeConfig)}
    own = {key: value for key, value in given.items() if key not in shared}
    return {key: value for key, value in given.items() if key in shared}, own


def slug(variant: str) -> str:
    """A variant as part of a file name."""
    return "".join(c if c.isalnum() or c in "._=-" else "-" for c in variant)
