"""The nouns of the library: what is decoded, how, and what comes back.

Shape suffixes used everywhere: B rows, L positions, R gathered (masked) rows, D width,
V vocabulary, K tokens per step, T commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from adjust_dlm.checks import FINITE, Bound, Checked, Count, NotNegative, Positive, TopP, Whole
from adjust_dlm.checks import InputError as InputError
from adjust_dlm.checks import refusing as refusing
from adjust_dlm.checks import require as require

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


def check_placement(quantize: str | None, device_map: DeviceMap | None) -> None:
    """Refuses what `quantize_body` and `place` cannot do, before any weight is read."""
    known = get_args(Quantize)
    require(quantize in (None, *known), f"quantize is {quantize!r}; it must be one of {', '.join(known)}")
    missing = quantize in ("int8", "fp8") and find_spec("torchao") is None
    require(not missing, f"quantize {quantize} needs torchao: pip install 'adjust-dlm[quant]'")
    good = device_map is None or isinstance(device_map, Mapping) or device_map in get_args(Spread)
    require(good, f"device_map is {device_map!r}; it must be one of {', '.join(get_args(Spread))}, or a mapping")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
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

    tokens_per_step: Count = 1
    max_new_tokens: Count = 64
    temperature: NotNegative = 1.0
    top_p: TopP = 1.0
    top_k: Whole = 0
    order: OrderRule | None = None
    order_on: OrderOn | None = None
    schedule: Schedule = "exact"
    suppress_eos: bool = False
    block_length: Count | None = None
    candidates: Whole | None = None
    cache_period: Count | None = None
    cache_window: Count | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        without = self.cache_window is not None and self.cache_period is None
        require(not without, f"cache_window is {self.cache_window} without a cache; set cache_period too")

    def but(self, **changes: object) -> DecodeConfig:
        """A copy with some fields changed (and checked again)."""
        unknown = set(changes) - {f.name for f in fields(self)}
        require(not unknown, f"unknown decode setting {', '.join(sorted(unknown))}")
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(Checked):
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
    output_norm_init: Annotated[float, Bound(-FINITE, FINITE, "a finite number")] = 0.1
    pairing: Literal["state", "token"] = "state"
    layers: Count = 1
    mlp: Positive = 1.0
    features: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
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
