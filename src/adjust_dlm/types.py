"""The nouns of the library: what is decoded, how, and what comes back.

Shape suffixes used everywhere: B rows, L positions, R gathered (masked) rows, D width,
V vocabulary, K tokens per step, T commits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from os import PathLike
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from torch import Tensor  # a mistake on the command line is told before torch is imported

OrderRule = Literal["entropy", "confidence", "margin", "random", "left_to_right"]
CERTAINTY: tuple[OrderRule, ...] = ("entropy", "margin", "confidence")  # rules that look at logits
OrderOn = Literal["processed", "raw"]
Schedule = Literal["exact", "reference"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["int8", "fp8", "fp8-dynamic"]
Spread = Literal["auto", "balanced", "balanced_low_0", "sequential"]

RowWeights = Literal["next", "uniform"]
KernelName = Literal["auto", "triton", "torch"]
TokenSource = Literal["own", "base"]  # of a measured text: see `decoders.divergence`

DeviceMap = str | Mapping[str, Any]

DEFAULT_BASE = "smol-block"
GIVEN = -1  # order of a token that was there before the first commit
MASKED = -2  # order of a position that still holds the mask
EVALUATION_ROWS = 2**32  # row ids from here on are for evaluation: no trajectory has one, so none is trained on
NEXT_DECAY = 3.0  # exp(-rank/3): measured best of the forms tried
NEXT_SHARE = 0.9  # weight on the rows revealed next; the rest is spread over all masked rows
MOST = 2**31 - 1  # of any count: arithmetic with it stays within int64


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


def is_number(value: object) -> bool:
    """Whether a setting that may come from a file or a flag is a real number (infinity included, NaN not)."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def require_whole(name: str, value: object) -> None:
    """Raises `InputError` unless a setting is an int."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole, f"{name} is {value!r}; it must be a whole number")


def require_count(name: str, value: object, least: int, *, optional: bool = False) -> None:
    """Raises `InputError` unless a setting is a whole number from `least` to `MOST`, or an allowed None."""
    if value is None and optional:
        return
    require_whole(name, value)
    assert isinstance(value, int)
    require(value >= least, f"{name} is {value}; it must be at least {least}")
    require(value <= MOST, f"{name} is {value}; it must be at most {MOST}")


def require_least(settings: object, **least: float) -> None:
    """Raises `InputError` unless each of these settings has at least its value."""
    for name, bound in least.items():
        value = getattr(settings, name)
        require(value >= bound, f"{name} is {value}; it must be at least {bound}")


def require_number(name: str, value: Any, *, zero: bool = False) -> None:
    """Raises `InputError` unless a setting is a finite number above 0, or 0 where that is allowed."""
    good = is_number(value) and 0 <= value < math.inf and (zero or value > 0)
    require(good, f"{name} is {value!r}; it must be a finite number {'>= 0' if zero else 'above 0'}")


def is_id(value: object, least: int, end: int) -> bool:
    """Whether a value is a whole number (numpy's and torch's too), from `least` to before `end`."""
    return isinstance(value, SupportsIndex) and least <= operator.index(value) < end


def require(condition: bool, message: str) -> None:
    """Raises `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def require_kinds(settings: object) -> None:
    """Raises `InputError` unless every field of a dataclass holds what its annotation says.

    A whole number will do for a float, a list for a tuple, a `Path` for a str.
    """
    for name, kind in get_type_hints(type(settings)).items():
        value, items = getattr(settings, name), get_origin(kind) is tuple
        several = items and isinstance(value, tuple | list)
        for one in value if several else [value]:
            own = get_args(kind)[0] if several else kind
            require(_is_kind(one, own), f"{name} is {one!r}; it must be {in_words(own)}")


def in_words(kind: Any) -> str:
    """An annotation: int, one of a, b, or null."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(in_words, get_args(kind)))
    return "null" if kind is NoneType else kind.__name__ if isinstance(kind, type) else str(kind)


def _is_kind(value: object, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (Union, UnionType):
        return any(_is_kind(value, one) for one in args)
    wider = {float: int | float, str: str | PathLike}
    return isinstance(value, wider.get(kind, origin or kind)) and (kind is bool or not isinstance(value, bool))


def check_placement(quantize: str | None, device_map: DeviceMap | None) -> None:
    """Refuses what `quantize_body` and `place` cannot do, before any weight is read."""
    known = get_args(Quantize)
    require(quantize in (None, *known), f"quantize is {quantize!r}; it must be one of {', '.join(known)}")
    missing = quantize in ("int8", "fp8") and find_spec("torchao") is None
    require(not missing, f"quantize {quantize} needs torchao: pip install 'adjust-dlm[quant]'")
    good = device_map is None or isinstance(device_map, Mapping) or device_map in get_args(Spread)
    require(good, f"device_map is {device_map!r}; it must be one of {', '.join(get_args(Spread))}, or a mapping")


_LEAST = {
    "tokens_per_step": 1, "max_new_tokens": 1, "top_k": 0, "candidates": 0, "block_length": 1, "cache_period": 1,
    "cache_window": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Everything that decides which tokens come out, for every decoder.

    Attributes:
        tokens_per_step: K, commits per round (one base pass a round).
        max_new_tokens: masked positions appended to a prompt.
        temperature: T >= 0; 0 is argmax.
        top_p: nucleus mass in (0, 1]; the token that crosses it is kept.
        top_k: keep the k likeliest tokens; 0 keeps all.
        order: rule that picks the next position; None takes the base's own.
        order_on: score the tempered and filtered distribution, or the raw one; None: the base's own.
        schedule: "exact" K per round, or the family's published step counts ("reference").
        suppress_eos: never commit an end token (applies to base and sampler alike).
        block_length: new tokens of a block; blocks are filled from left to right, the last may be shorter, masks
            inside the prompt belong to the first. None is one block. A reference schedule counts within each block.
        candidates: positions that a round may go on to behind its first commit: the best by the order rule at that
            commit, so by the base's own pass. None takes as many as the round has commits left: its positions are those
            of parallel decoding. 0 is every position, as Algorithm 1 is printed: g then decides where a round goes.
        cache_period: None recomputes everything in every base pass. p computes what stands before the first mask once
            for p passes, and whenever a row enters a block: an approximation, exact for p = 1.
        cache_window: with a cache, None keeps what is reused fixed until the next whole pass; W lets it follow the
            first mask, so that in between only W finished columns before it are computed (APD's window).
        seed: with a row's id, the only source of randomness.
    """

    tokens_per_step: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    order: OrderRule | None = None
    order_on: OrderOn | None = None
    schedule: Schedule = "exact"
    suppress_eos: bool = False
    block_length: int | None = None
    candidates: int | None = None
    cache_period: int | None = None
    cache_window: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole("seed", self.seed)
        for name, least in _LEAST.items():
            require_count(name, getattr(self, name), least, optional=getattr(DecodeConfig, name) is None)
        require_number("temperature", self.temperature, zero=True)
        mass = self.top_p
        require(is_number(mass) and 0 < mass <= 1, f"top_p is {mass!r}; it must lie in (0, 1]")
        require(isinstance(self.suppress_eos, bool), f"suppress_eos is {self.suppress_eos!r}; it must be true or false")
        without = self.cache_window is not None and self.cache_period is None
        require(not without, f"cache_window is {self.cache_window} without a cache; set cache_period too")
        for name, kind in (("order", OrderRule), ("order_on", OrderOn), ("schedule", Schedule)):
            value, allowed = getattr(self, name), get_args(kind)
            known = value in allowed or (value is None and name != "schedule")
            require(known, f"{name} is {value!r}; it must be one of {', '.join(allowed)}")

    def but(self, **changes: object) -> DecodeConfig:
        """A copy with some fields changed (and checked again)."""
        unknown = set(changes) - {f.name for f in fields(self)}
        require(not unknown, f"unknown decode setting {', '.join(sorted(unknown))}")
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """Every choice in g (docs/design.md, decisions 2 and 3).

    Attributes:
        norms: normalise e, u and z (the public release does; False is the form printed in the paper).
        residual: h' = h + z rather than h' = z.
        output_norm_init: initial weight of the output norm; small starts close to parallel decoding.
        pairing: the state that the embedding of x_i meets: the one at position i ("state") or the one that scores it
            ("token").
        layers: decoder layers, one after another.
        mlp: width of their MLPs, as a multiple of the base's own.
        features: layers of the base, from 1, whose states f each step also sees: z = layers(Linear([e; u; RMSNorm(f)]))
    """

    norms: bool = True
    residual: bool = True
    output_norm_init: float = 0.1
    pairing: Literal["state", "token"] = "state"
    layers: int = 1
    mlp: float = 1.0
    features: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_kinds(self)
        require_count("layers", self.layers, 1)
        mlp, start = self.mlp, self.output_norm_init
        require(0 < mlp < math.inf, f"mlp is {mlp}; it is a multiple of the base's, above 0")
        require(abs(start) < math.inf, f"output_norm_init is {start}; it must be a finite number")
        object.__setattr__(self, "features", tuple(self.features))  # a list in a file

    @classmethod
    def printed(cls) -> SamplerConfig:
        """The form printed in the paper: no norms, no residual."""
        return cls(norms=False, residual=False, output_norm_init=1.0, pairing="token")

    @classmethod
    def released(cls) -> SamplerConfig:
        """The form of the authors' code: all norms start at 1, h' = h + z."""
        return cls(output_norm_init=1.0, pairing="token")


@dataclass
class State:
    """Token rows at one moment, left-padded: what a base or a sampler looks at.

    Attributes:
        tokens_BL: int64 ids; masked positions hold the base's mask id.
        real_BL: bool, False on left pads (invisible to attention everywhere).
        masked_BL: bool, True where a token is still to be committed.
        padded: False promises that `real_BL` is all True, so that no attention mask is needed.
    """

    tokens_BL: Tensor
    real_BL: Tensor
    masked_BL: Tensor
    padded: bool = True

    @property
    def positions_BL(self) -> Tensor:
        """int64 rotary positions: 0 on each row's first real token, also 0 on its pads."""
        return (self.real_BL.long().cumsum(-1) - 1).clamp_min(0)


@dataclass(frozen=True)
class Trajectory:
    """One finished decode: tokens, and when each was revealed.

    Attributes:
        tokens_L: int ids without padding.
        order_L: commit number 0..T-1 of each position, `GIVEN` for prompt tokens.
        row: the global row id that, with `seed`, reproduces it.
        seed: the seed of its run.
        temperature: that its tokens were drawn at.
    """

    tokens_L: Tensor
    order_L: Tensor
    row: int
    seed: int
    temperature: float = 1.0

    @property
    def commits(self) -> int:
        """T: how many tokens the decode committed."""
        return int((self.order_L >= 0).sum())

    def state(self, t: int, mask_id: int) -> tuple[Tensor, Tensor]:
        """Tokens and mask [L] just before commit t: exact, from order alone.

        Raises:
            InputError: t outside 0..T.
        """
        require(0 <= t <= self.commits, f"state {t} does not exist; this trajectory has states 0..{self.commits}")
        masked_L = (self.order_L >= t) | (self.order_L == MASKED)
        import torch

        return torch.where(masked_L, mask_id, self.tokens_L), masked_L


@dataclass
class DecodeResult:
    """What a decoder returns for a batch, and what it cost.

    Attributes:
        tokens_BL: final ids, left-padded as they came in.
        order_BL: commit number, `GIVEN` for prompt and pads, `MASKED` where a row ended early.
        real_BL: False on left pads.
        base_calls_B: base passes each row needed (what it would cost alone).
        sampler_calls_B: sampler passes each row needed.
        partner_calls_B: passes of the autoregressive partner each row needed; one that reads a single token counts too.
        rounds_B: base passes each row waited for: fewer than `base_calls_B` where one looks at several canvases.
        rows_B: row ids.
        config: the settings that made it.
        decoder: the decoder's name.
        seconds: wall time of the whole batch.
    """

    tokens_BL: Tensor
    order_BL: Tensor
    real_BL: Tensor
    base_calls_B: Tensor
    sampler_calls_B: Tensor
    partner_calls_B: Tensor
    rounds_B: Tensor
    rows_B: Tensor
    config: DecodeConfig
    decoder: str
    seconds: float = 0.0

    def trajectory(self, b: int) -> Trajectory:
        """Row b as a trajectory (pads dropped)."""
        real_L = self.real_BL[b]
        return Trajectory(
            tokens_L=self.tokens_BL[b][real_L].cpu(),
            order_L=self.order_BL[b][real_L].cpu(),
            row=int(self.rows_B[b]),
            seed=self.config.seed,
            temperature=self.config.temperature,
        )
