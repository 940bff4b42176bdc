"""Settings that one decoder alone has: a dataclass each, checked without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from adjust_dlm.checks import (
    Bound,
    Checked,
    Count,
    NotNegative,
    NotNegativeOrInf,
    Positive,
    PositiveOrInf,
    Share,
    Whole,
    require,
)

EdlmRule = Literal["best", "resample"]
EndSwitch = Literal["off", "faithful", "sane"]
Remasking = Literal["low_confidence_static", "low_confidence_dynamic", "sequential"]
Keep = Literal["random", "left_to_right"]
Reference = Literal["causal", "remasked"]
CANVASES = ("completions", "depth")  # settings that say how many canvases of each row one pass looks at


@dataclass(frozen=True, kw_only=True)
class AdjustOptions(Checked):
    """Settings of `adjust`.

    Attributes:
        sparse: run g at the `candidates` of a round and at the columns that see its tokens; everything else keeps its
            state and g's keys and values from the round's first step. Exact once the candidates are the whole canvas.
    """

    sparse: bool = False

    def check(self, sampler: object, candidates: int | None) -> None:
        """Raises InputError where a sparse step is asked for that cannot be made."""
        require(
            not self.sparse or candidates != 0, "sparse steps run at candidates: candidates must not be 0, which is all"
        )
        able = not self.sparse or (hasattr(sampler, "carriers") and not getattr(sampler, "causal", False))
        name = type(sampler).__name__
        require(able, f"a {name} of this base knows no sparse steps; they take a Sampler, not of causal blocks")


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions(Checked):
    """Settings of `adaptive`.

    Attributes:
        gamma: nats; what the entropies of a round's tokens from g may sum to. The first token of a round is the base's
            own and costs nothing; infinity is `adjust` with `most` tokens a round.
        most: tokens a round at most; None is no limit.
    """

    gamma: NotNegativeOrInf = 1.0
    most: Count | None = None


@dataclass(frozen=True, kw_only=True)
class VerifiedOptions(Checked):
    """Settings of `verified`.

    Attributes:
        depth: canvases of a row that one pass looks at: the present one and depth - 1 drafts; 1 is `joint`.
        match: "token": a draft stands where the base's own draw, by the same uniform, is the same token. The text is
            that of `joint`. "law": it stands as often as the law of the text allows. The text has the law of `joint`,
            is another at T > 0, and takes fewer passes. At T = 0 both are the same.
    """

    depth: Count = 4
    match: Literal["token", "law"] = "token"


@dataclass(frozen=True, kw_only=True)
class CascadeOptions(Checked):
    """Settings of `cascade`.

    Attributes:
        tau: the base's pass commits every token with at least this probability (and always the likeliest).
        tau_g: a call of g commits every token with at least this one; None is `tau`.
        calls: of g in a round, at most; None goes on until g is certain of nothing.
    """

    tau: Positive = 0.9
    tau_g: Positive | None = None
    calls: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions(Checked):
    """Settings of `threshold`.

    Attributes:
        tau: commit every token with at least this probability; above 1 it is one token a pass.
        score: whose probability that is: "drawn", the token's own (the release's rule), or "likeliest", that of the
            position's likeliest token, so that what was drawn does not decide whether it stays. The same at T = 0.
    """

    tau: Positive = 0.9
    score: Literal["drawn", "likeliest"] = "drawn"


@dataclass(frozen=True, kw_only=True)
class FactorOptions(Checked):
    """Settings of `factor`.

    Attributes:
        f: commit the n most certain tokens while (n + 1) (1 - p_n) < f, p_n the n-th probability.
    """

    f: NotNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class EntropyBoundOptions(Checked):
    """Settings of `entropy_bound`.

    Attributes:
        gamma: nats; what the entropies of a pass's tokens, the largest left out, may sum to.
    """

    gamma: NotNegativeOrInf = 0.1


@dataclass(frozen=True, kw_only=True)
class KlassOptions(Checked):
    """Settings of `klass`; the defaults are the release's.

    Attributes:
        tau: commit tokens with at least this probability; above 1 it is one token a pass.
        epsilon_kl: nats; a position is calm in a pass if KL(this pass || the one before) < epsilon_kl.
        history: passes in a row that a position must have been calm; 0 is `threshold`.
    """

    tau: Positive = 0.9
    epsilon_kl: PositiveOrInf = 0.01
    history: Whole = 2


@dataclass(frozen=True, kw_only=True)
class EdlmOptions(Checked):
    """Settings of `edlm`; those behind `completions` belong to the rule "resample" alone.

    Attributes:
        rule: "best" keeps the completion of lowest energy (the ADJUST paper's baseline), "resample" draws one by its
            importance weight (EDLM's own).
        completions: how many are drawn each round; 1 is `parallel`.
        importance_temperature: of the weights softmax(-E / temperature).
        window_start, window_end: shares of a row's masks still there; outside of them (bounds count as inside) a round
            is `parallel`. EDLM's window of length w is (1, 1 - w), w = 0.2; its released config says (0.6, 0.4).
        as_released: what the public code computes: softmax(+E), E of the masked positions alone.
    """

    rule: EdlmRule = "best"
    completions: Count = 2
    importance_temperature: Positive = 1.0
    window_start: float = 1.0
    window_end: float = 0.8
    as_released: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        start, end = self.window_start, self.window_end
        require(0 <= end <= start <= 1, f"the window runs from {start} to {end}; it must fall, within 1 and 0")
        given = [f.name for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        require(self.rule == "resample" or not given, f"rule 'best' takes no {', '.join(given)}; 'resample' does")


@dataclass(frozen=True, kw_only=True)
class OriginOptions(Checked):
    """Settings of `origin`.

    Attributes:
        eps: the time at which its steps end, in [0, 1).
    """

    eps: Annotated[float, Bound(0, math.nextafter(1, 0), "in [0, 1)")] = 1e-3


@dataclass(frozen=True, kw_only=True)
class SoftOrderOptions(Checked):
    """Settings of `soft_order`.

    Attributes:
        alg_temp: temperature of the choice of positions; 0 takes the best ones.
    """

    alg_temp: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class GuidedOptions(Checked):
    """Settings of `guided`.

    Attributes:
        cfg_scale: w >= 0 of un + (w + 1)(cond - un); costs a second pass.
        logits_eos_inf: never draw the EOS token.
        confidence_eos_eot_inf: commit EOS and EOT last. "faithful" does what the release does, where at T > 0 EOS keeps
            its confidence; "sane" holds both back at every T and under every order.
        eos_eot: ids of these two; None: the base's first two end ids (EOT is EOS where there is one only).
    """

    cfg_scale: NotNegative = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: EndSwitch = "off"
    eos_eot: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        ids: Any = self.eos_eot
        pair = ids is None or (isinstance(ids, list | tuple) and [type(i) for i in ids] == [int, int])
        require(pair, f"eos_eot is {ids!r}; it must be two token ids, or none")
        object.__setattr__(self, "eos_eot", ids and tuple(ids))  # a list in a file
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class FastDllmOptions(Checked):
    """Settings of `fast_dllm`.

    Attributes:
        threshold: commit every token above this probability, and always the best one; from 1 on it is one a pass.
    """

    threshold: NotNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class SdarOptions(Checked):
    """Settings of `sdar`.

    Attributes:
        remasking: "low_confidence_static" commits the n best tokens of a pass; "low_confidence_dynamic" all above the
            threshold if these are more; "sequential" the n leftmost.
        denoising_steps: D; pass t of a block of S has n = S // D, one more if t < S % D, and at least 1.
        confidence_threshold: of "low_confidence_dynamic".
    """

    remasking: Remasking = "low_confidence_dynamic"
    denoising_steps: Count = 4
    confidence_threshold: NotNegative = 0.85


@dataclass(frozen=True, kw_only=True)
class ApdOptions(Checked):
    """Settings of `apd`.

    Attributes:
        mixture: R in [0, 1], weight of the base in the target (paper, eq. 8). At 1 every draft is accepted; the lower,
            the fewer. The paper sweeps it; 0.7 is the published demo's.
        lookahead: M, tokens drafted per pass at most; None is all. The base still sees every mask (the paper also cuts
            those behind the draft off its input, for speed).
        correct: a mismatch commits the target's token, as in speculative decoding. The paper's rule, False, ends the
            round before it.
    """

    mixture: Share = 0.7
    lookahead: Count | None = None
    correct: bool = False


@dataclass(frozen=True, kw_only=True)
class DcdOptions(Checked):
    """Settings of `dcd`.

    Attributes:
        keep: which positions of a completion a round commits: at random, or the leftmost. The others are drawn anew.
        reference: where the marginals given the left context come from: `causal` is one pass of the base under a
            causal mask; `remasked` hides what stands right of each gap, a pass a gap, and works for every base.
        alpha: weight of the base's correction; 0 is the partner alone.
    """

    keep: Keep = "random"
    reference: Reference = "causal"
    alpha: NotNegative = 1.0
