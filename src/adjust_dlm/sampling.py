"""Filters, draws and order rules on rows of logits: what turns scores into one committed token.

Everything here is a pure function of fp32 logits and uniforms, row by row, so a row's result never
depends on its neighbours. Forbidden tokens arrive as -inf (DESIGN: "Forbidden tokens") and stay so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from adjust_dlm.types import EVALUATION_ROWS as EVALUATION_ROWS
from adjust_dlm.types import DecodeConfig, OrderRule

# Streams of the counter-based generator: a draw, an order, Gumbel noise and a second draw never share a number.
NOISE, DRAW, ORDER, REDRAW = 0, 1, 2, 3
STREAM = 0x632BE59BD9B4E019  # what the seed of one stream is from that of the next


def uniform(
    seed: int | Tensor, row: Tensor, commit: Tensor, position: Tensor, stream: int = DRAW, token: Tensor | None = None
) -> Tensor:
    """One uniform in [0, 1) for every (seed, row, commit, position[, token]): stateless and device independent.

    A 64-bit counter hash (the splitmix64 finaliser, applied after each key is added), so batch size,
    neighbours, ranks and devices cannot change a number, and nothing has to be stored.

    Args:
        seed: the run's seed; as an int64 tensor `wrapped(seed)`, one or of the shape of `row`.
        row: int64 row ids; what follows is int64 and broadcastable to it.
        commit: commit numbers.
        position: counted from the first real token.
        stream: `NOISE`, `DRAW`, `ORDER` or `REDRAW`.
        token: vocabulary ids, where each has a number of its own.

    Returns:
        float64 multiples of 2**-32.
    """
    first = stream * STREAM
    if isinstance(seed, int):
        state = _mix(torch.full((), wrapped(seed + first), device=row.device))  # a copy would wait for the device
    else:
        state = _mix(seed + wrapped(first))
    for key in (row, commit, position) if token is None else (row, commit, position, token):
        state = _mix(state ^ (key * -0x61C8864680B583EB))
    return ((state >> 32) & 0xFFFFFFFF).double() * 2.0**-32


def wrapped(number: int) -> int:
    """A whole number as int64 arithmetic keeps it (not every torch wraps one that is too large)."""
    return (number + 2**63) % 2**64 - 2**63


def gumbel(u: Tensor) -> Tensor:
    """fp32 Gumbel noise -log(-log u) of uniforms that are multiples of 2**-32, each taken at the middle of its cell.

    argmax(log p + noise) is a draw from p (paper of `apd`, eq. 9): for close p and q the same noise mostly gives the
    same token.
    """
    return -(-(u + 2.0**-33).log()).log().float()


def _mix(x: Tensor) -> Tensor:
    """splitmix64 on int64 (multiplication wraps; shifts made logical by masking)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def process(logits_RV: Tensor, config: DecodeConfig) -> Tensor:
    """temperature -> top_p -> top_k in fp32; removed tokens become -inf. T=0 leaves the scale alone."""
    logits_RV = logits_RV.float()
    if config.temperature not in (0, 1):
        # Largest logit 0 and T within fp32, so that no T > 0 gives inf - inf; beyond these bounds nothing changes.
        temperature = min(max(config.temperature, 1e-30), 1e30)
        logits_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature
    if config.top_p < 1:  # 0 in fp32 would keep nothing; so little mass is that of the likeliest token alone
        logits_RV = logits_RV.masked_fill(~_nucleus(logits_RV.softmax(-1), max(config.top_p, 1e-30)), -torch.inf)
    if 0 < config.top_k < logits_RV.shape[-1]:
        logits_RV = logits_RV.masked_fill(~_top_k(logits_RV, config.top_k), -torch.inf)
    return logits_RV


def _nucleus(p_RV: Tensor, top_p: float) -> Tensor:
    """Tokens whose preceding mass (sorted down, ties by lowest id) is below top_p.

    The crossing token's probability is found by bisection over fp32 bit patterns (non-negative floats
    order like integers): 31 streaming sums instead of a sort of the whole vocabulary.
    """
    bits_RV = p_RV.view(torch.int32)
    low = torch.zeros_like(bits_RV[:, :1])
    high = bits_RV.amax(-1, keepdim=True) + 1
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = torch.where(bits_RV >= middle, p_RV, 0).sum(-1, keepdim=True) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    crossing = low.view(torch.float32)
    above_RV, tie_RV = p_RV > crossing, p_RV == crossing
    missing = top_p - torch.where(above_RV, p_RV, 0).sum(-1, keepdim=True)
    allowed = (missing / crossing.clamp_min(torch.finfo(torch.float32).tiny)).ceil()
    return above_RV | (tie_RV & (tie_RV.cumsum(-1) <= allowed)) & (p_RV > 0)


def _top_k(logits_RV: Tensor, k: int) -> Tensor:
    """The k largest logits; ties at the edge go to the lowest ids."""
    edge = logits_RV.topk(k, dim=-1).values[:, -1:]
    above_RV, tie_RV = logits_RV > edge, logits_RV == edge
    return above_RV | (tie_RV & (tie_RV.cumsum(-1) <= k - above_RV.sum(-1, keepdim=True)))


def draw(processed_RV: Tensor, u_R: Tensor, temperature: float) -> Tensor:
    """Inverse CDF at u (float64 cumulative sum of the fp32 softmax); argmax at T=0. int64 [R].

    A token of probability zero is never drawn: its CDF step has no width. Rows without a softmax (NaN, or no finite
    largest logit) give some token of the vocabulary; callers refuse them.
    """
    if temperature == 0:
        return processed_RV.argmax(-1)
    return draw_from(processed_RV.softmax(-1).double(), u_R)


def draw_from(mass_RV: Tensor, u_R: Tensor) -> Tensor:
    """Inverse CDF at u of masses in float64 that need not sum to 1: int64 [R]."""
    cdf_RV = mass_RV.cumsum(-1)
    token_R1 = torch.searchsorted(cdf_RV, u_R.double()[:, None] * cdf_RV[:, -1:], right=True)
    return token_R1[:, 0].clamp_max(cdf_RV.shape[-1] - 1)


def coupled(p_RV: Tensor, q_RV: Tensor, token_R: Tensor) -> Tensor:
    """What to draw from where `token_R` was drawn from q, so that the outcome has the law p and mostly is that token.

    The token v stands with probability min(1, p(v) / q(v)), else one from max(p - q, 0) takes its place (speculative
    sampling). No coupling lets v stand more often: its chance over all v is 1 - TV(p, q).

    Both laws come as processed logits; what is returned are masses for `draw_from`.
    """
    # The law of `draw` itself: the fp32 softmax, normalised in float64.
    p_RV, q_RV = (p / p.sum(-1, keepdim=True) for p in (x.softmax(-1).double() for x in (p_RV, q_RV)))
    token_R1 = token_R[:, None]
    stands_R1 = (p_RV.gather(-1, token_R1) / q_RV.gather(-1, token_R1)).clamp_max(1)
    more_RV = (p_RV - q_RV).clamp_min_(0)
    share_R1 = (1 - stands_R1) / more_RV.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return more_RV.mul_(share_R1).scatter_add_(-1, token_R1, stands_R1)


def no_softmax(logits_RV: Tensor) -> Tensor:
    """Which rows have a NaN, an infinite logit (half precision overflows) or nothing but -inf: bool [R]."""
    return ~(logits_RV.amax(-1).abs() < torch.inf)


def negative_entropy(logits_RV: Tensor) -> Tensor:
    """sum p log p in fp32 (0 log 0 = 0): larger is more certain. Dream's rule."""
    below_RV = logits_RV.float() - logits_RV.amax(-1, keepdim=True)
    e_RV = below_RV.exp()
    total_R = e_RV.sum(-1)
    # The clamp keeps 0 * -inf of forbidden tokens at 0. In place: on a CPU a fresh [R, V] costs more than the sum.
    return below_RV.clamp_(min=-1e4).mul_(e_RV).sum(-1) / total_R - total_R.log()


def margin(logits_RV: Tensor) -> Tensor:
    """p1 - p2 of the two likeliest tokens."""
    top = logits_RV.float().softmax(-1).topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


def confidence(logits_RV: Tensor, token_R: Tensor) -> Tensor:
    """Probability of the drawn token. LLaDA's rule (there on un-tempered logits)."""
    return logits_RV.float().softmax(-1).gather(-1, token_R[:, None])[:, 0]


# Rules that need no drawn token.
SCORES: dict[OrderRule, Callable[[Tensor], Tensor]] = {"entropy": negative_entropy, "margin": margin}


def score_rows(
    raw_RV: Tensor, u_R: Tensor | None, rule: OrderRule, *, on_processed: bool, config: DecodeConfig
) -> Tensor:
    """Certainty of each row under a rule that looks at logits: fp32 [R], the largest is revealed first.

    Forbidden tokens are at -inf. `u_R`, the uniform each row would be drawn with, is for `confidence` alone;
    `on_processed` scores after temperature and filters instead of before.
    """
    need_processed = on_processed or rule == "confidence"
    processed_RV = process(raw_RV, config) if need_processed else raw_RV
    seen_RV = processed_RV if on_processed else raw_RV
    if rule == "confidence":
        assert u_R is not None
        return confidence(seen_RV, draw(processed_RV, u_R, config.temperature))
    return SCORES[rule](seen_RV)


@functools.cache
def row_scorer(*, compiled: bool) -> Callable[..., Tensor]:
    """`score_rows`, or its compiled twin beside a compiled base."""
    return torch.compile(score_rows, dynamic=True) if compiled else score_rows
