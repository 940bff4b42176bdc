"""Tiny bases and stubs for tests, and the law of a decoder by plain enumeration."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from adjust_dlm.bases import Base, BaseSpec, load_base
from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.bases.family import FAMILIES as KNOWN
from adjust_dlm.bases.family import DreamBase, dream_base, dream_config, llada_base
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.sampler import Sampler, SamplerConfig
from adjust_dlm.train.unroll import Slices, Unrolled, observe, unroll
from adjust_dlm.types import DecodeResult, OrderOn, OrderRule, State

ROOT = Path(__file__).parents[1]
FAMILIES = ("dream", "llada")
IN_BLOCKS = ("fast_dllm_qwen", "sdar")
RULES: tuple[OrderRule, ...] = ("entropy", "confidence", "margin", "random", "left_to_right")
CORE = ("joint", "parallel", "adjust")  # decoders that need no more than a base and a sampler
VOCAB, LIMIT, MASK, END, BOS = 24, 22, 20, 1, 2  # of the tiny bases: ids 22 and 23 are padding rows of the head


# Tiny transformers ---------------------------------------------------------------------------------------------


def tiny_config(family: str, **changes: Any) -> Any:
    """Two layers, D=32, wide initial weights: attention and context really matter."""
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4 if family == "llada" else 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }  # fmt: skip
    head = {"head_dim": 16} if family == "sdar" else {}
    return KNOWN[family].config(**{**shape, **head, **changes})


def tiny_base(
    family: str, seed: int = 0, *, end_ids: tuple[int, ...] = (END,), block: int | None = None, device: str = "cpu",
    causal: bool = False, **changes: Any,
) -> TransformerBase:  # fmt: skip
    """A random base of a family, with blocks if asked or its own; the same seed gives the same weights."""
    block = KNOWN[family].block[1] if block is None and KNOWN[family].block else block
    config = tiny_config(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = new_model(replace(Shape.of(config), block=block))
        head_weight = torch.randn(config.vocab_size, config.hidden_size) / 2
    base = KNOWN[family].make(
        config, mask_id=MASK, end_ids=end_ids, bos_id=BOS, token_limit=LIMIT, model=model.to(device),
        head_weight=head_weight.to(device), block=block,
    )  # fmt: skip
    if not causal:
        return base
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = new_model(replace(base.layer_config, causal=True, lora_rank=3)).to(device)
    body.load_state_dict(base.model.state_dict(), strict=False)  # adapters of masks are its own
    spec = replace(base.spec, causal=True, order="left_to_right")
    return type(base)(body, base.head_matrix, spec, next_frame=True)


def two_sentences() -> tuple[ExactBase, list[str]]:
    """The paper's figure: a base with support on two sentences only, and its words by id.

    Both have six words: "The cat sat on the mat" and "The dog ran in the yard".
    """
    words = ["The", "cat", "dog", "sat", "ran", "on", "in", "the", "mat", "yard"]
    joint = torch.zeros((len(words),) * 6)
    for sentence in ("The cat sat on the mat", "The dog ran in the yard"):
        joint[tuple(words.index(w) for w in sentence.split())] = 0.5
    return ExactBase(joint), words


def load_recipe(name: str) -> ModuleType:
    """`recipes/NAME.py` as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_recipe", ROOT / "recipes" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def tiny_sampler(base: Base, seed: int = 0, **config: Any) -> Sampler:
    """A random g that moves the states a good deal (output norm 1 unless told)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sampler = Sampler(base, SamplerConfig(**{"output_norm_init": 1.0, **config}))
        for norm in (sampler.norm_embed, sampler.norm_hidden):
            for weight in norm.parameters():
                nn.init.uniform_(weight, 0.5, 1.5)
    return sampler.eval().requires_grad_(False).to(base.device)


def build(device: str, *, seed: int = 0, spread: float = 0.02, head: float = 0.5) -> tuple[DreamBase, Sampler]:
    torch.manual_seed(seed)
    config = dream_config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64, initializer_range=spread,
    )  # fmt: skip
    base = dream_base(config, mask_id=49, end_ids=(48,), bos_id=47, head_weight=torch.randn(50, 64) * head)
    sampler = Sampler(base).eval()
    base.model.to(device)
    base.head_matrix = base.head_matrix.to(device)
    return base, sampler.to(device)


def wide(device: str) -> tuple[DreamBase, Sampler]:
    """Positions so unlike each other that rounding decides nothing; the best two scores lie 1e-4 apart (checked)."""
    return build(device, seed=3, spread=0.6, head=0.2)


def oracle(base: Base) -> Callable[[Tensor, State], Tensor]:
    """A g that knows the true conditionals."""
    return lambda _h_BLD, state: base.hidden(state)


def guide(base: Base, decoder: str) -> Any:
    """What `decode(sampler=...)` wants for a decoder on a tiny base."""
    return tiny_sampler(base) if decoder == "adjust" else None


# Stubs ---------------------------------------------------------------------------------------------------------


class TableBase(Base):
    """Fixed logits for each position, whatever was committed; the mask is the id behind the last word."""

    def __init__(
        self, logits_LV: Tensor, *, mask_logit: float = 0.0, end_ids: tuple[int, ...] = (),
        order: OrderRule = "entropy", order_on: OrderOn = "processed",
    ) -> None:  # fmt: skip
        length, words = logits_LV.shape
        self.spec = BaseSpec(
            name="table", mask_id=words, end_ids=end_ids, pad_id=0, bos_id=None, vocab_size=words + 1,
            token_limit=words + 1, context=length, order=order, order_on=order_on,
        )  # fmt: skip
        self.width, self.fingerprint, self.head_matrix = words + 1, "table", torch.eye(words + 1)
        self._h_LD = torch.cat([logits_LV.float(), torch.full((length, 1), mask_logit)], -1)

    def hidden(self, state: State) -> Tensor:
        return self._h_LD[state.positions_BL]

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return self.head_matrix[tokens_BL]


def writer(tokens: list[int], certainty: list[float], words: int = 8, **options: Any) -> TableBase:
    """A base that writes `tokens`, the position with the largest certainty (logit) first."""
    logits_LV = torch.zeros(len(tokens), words)
    logits_LV[range(len(tokens)), tokens] = torch.tensor(certainty).float()
    return TableBase(logits_LV, **options)


class _Pointer(nn.Module):
    """A body whose state at place i names the id i + `ahead`."""

    def __init__(self, config: Any, ahead: int) -> None:
        super().__init__()
        self.config, self.ahead = Shape.of({**config.to_dict(), "model_type": "llama"}), ahead
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens_BL: Tensor, sees: Tensor | None, positions_BL: Tensor, **_: Any) -> Tensor:
        return 20.0 * nn.functional.one_hot(positions_BL + self.ahead, self.config.hidden_size)


def pointer_base(family: str, ahead: int) -> TransformerBase:
    """The family's own frame around a body that points `ahead` places; ids 0..31, head = identity."""
    build = {"dream": dream_base, "llada": llada_base}[family]
    config = tiny_config(family, vocab_size=32)
    return build(config, mask_id=31, end_ids=(30,), model=_Pointer(config, ahead), head_weight=torch.eye(32))


class Counted:
    """Calls a function and counts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0
        self.seen: list[Any] = []  # first arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.seen += args[:1]
        return self.function(*args, **kwargs)


def count_passes(base: Base) -> Counted:
    """From now on the base counts its passes."""
    counted = Counted(base.hidden)
    base.hidden = counted  # type: ignore[method-assign]
    return counted


def words(end_of_text: int) -> Any:
    """A judge's tokenizer, as far as its start token goes."""
    return SimpleNamespace(get_vocab=lambda: {"<|endoftext|>": end_of_text}, bos_token_id=None, eos_token_id=None)


# Canvases ------------------------------------------------------------------------------------------------------


def left_pad(rows: list[list[int]], mask_id: int = MASK, pad_id: int = END) -> State:
    """Token rows of any lengths as one left-padded state."""
    length = max(map(len, rows))
    tokens_BL = torch.tensor([[pad_id] * (length - len(row)) + row for row in rows])
    real_BL = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
    return State(tokens_BL, real_BL, (tokens_BL == mask_id) & real_BL, padded=not bool(real_BL.all()))


def row_of(result: DecodeResult, b: int) -> tuple[list[int], list[int], int, int]:
    """Tokens, order and calls of a row, without its pads."""
    real_L = result.real_BL[b]
    return (
        result.tokens_BL[b][real_L].tolist(), result.order_BL[b][real_L].tolist(),
        int(result.base_calls_B[b]), int(result.sampler_calls_B[b]),
    )  # fmt: skip


# Laws by enumeration -------------------------------------------------------------------------------------------

Partial = tuple[int | None, ...]  # None is a mask
Law = dict[tuple[int, ...], float]


def exact_base(words: int = 3, length: int = 4, seed: int = 0, **options: Any) -> ExactBase:
    """A small random joint with every string possible."""
    base = load_base("exact", words=words, length=length, seed=seed, **options)
    assert isinstance(base, ExactBase)
    return base


def target(base: ExactBase) -> Law:
    """p* itself."""
    return {tuple(s): float(p) for s, p in zip(base.strings_NL.tolist(), base.p_N, strict=True)}


def conditionals(p: Law, state: Partial) -> np.ndarray:
    """[L, V] marginals of p given the revealed tokens; of the strings that agree with most of them if none has all."""
    agree = {s: sum(a == b for a, b in zip(s, state, strict=True)) for s in p}
    best = max(agree.values())
    out = np.zeros((len(state), 1 + max(map(max, p))))
    for s, weight in p.items():
        if agree[s] == best:
            out[range(len(state)), s] += weight
    return out / out.sum(-1, keepdims=True)


def temper(p_LV: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Temperature, then the nucleus by sorting; plain float64."""
    p_LV = p_LV ** (1 / temperature)
    p_LV = p_LV / p_LV.sum(-1, keepdims=True)
    order = np.argsort(-p_LV, axis=-1, kind="stable")
    ranked = np.take_along_axis(p_LV, order, -1)
    keep = np.zeros_like(p_LV, dtype=bool)
    np.put_along_axis(keep, order, ranked.cumsum(-1) - ranked < top_p - 1e-9 if top_p < 1 else ranked > -1, -1)
    p_LV = np.where(keep, p_LV, 0)
    return p_LV / p_LV.sum(-1, keepdims=True)


def _best(score: dict[int, float], count: int) -> tuple[int, ...]:
    """Positions with the largest scores, ties to the lowest."""
    return tuple(sorted(score, key=lambda i: (-round(score[i], 6), i))[:count])


def _draws(p_LV: np.ndarray, positions: tuple[int, ...]) -> Iterator[tuple[float, dict[int, int]]]:
    """(probability, {position: token}) of independent draws that are possible at all."""
    for tokens in itertools.product(*(p_LV[i].nonzero()[0].tolist() for i in positions)):
        yield (
            math.prod(p_LV[i, t] for i, t in zip(positions, tokens, strict=True)),
            dict(zip(positions, tokens, strict=True)),
        )


def _choices(p_LV: np.ndarray, open_: list[int], rule: str, count: int) -> Iterator[tuple[float, dict[int, int]]]:
    """(probability, {position: token}) of everything one round may commit."""
    if rule == "confidence":  # the order looks at tokens drawn for every open position
        for chance, drawn in _draws(p_LV, tuple(open_)):
            yield chance, {i: drawn[i] for i in _best({i: p_LV[i, t] for i, t in drawn.items()}, count)}
        return
    if rule == "random":
        sets = list(itertools.combinations(open_, count))
    elif rule == "left_to_right":
        sets = [tuple(open_[:count])]
    elif rule == "entropy":
        sets = [_best({i: sum(q * math.log(q) for q in p_LV[i] if q > 0) for i in open_}, count)]
    else:
        sets = [_best({i: float(np.subtract(*np.sort(p_LV[i])[:-3:-1])) for i in open_}, count)]
    for positions in sets:
        for chance, drawn in _draws(p_LV, positions):
            yield chance / len(sets), drawn


def parallel_law(
    p: Law, rule: str, tokens_per_step: int, *, prompt: tuple[int, ...] = (), temperature: float = 1.0,
    top_p: float = 1.0,
) -> Law:  # fmt: skip
    """Distribution of what parallel decoding writes, by following every branch; K=1 is joint decoding."""

    def commits(state: Partial, open_: list[int]) -> Iterator[tuple[float, dict[int, int]]]:
        p_LV = temper(conditionals(p, state), temperature, top_p)
        return _choices(p_LV, open_, rule, min(tokens_per_step, len(open_)))

    return follow((*prompt, *[None] * (len(next(iter(p))) - len(prompt))), commits)


def follow(start: Partial, commits: Callable[[Partial, list[int]], Iterable[tuple[float, dict[int, int]]]]) -> Law:
    """The law of what stands where nothing is masked any more, by following every branch.

    `commits` gives, for a state and its masked positions, the chance of everything that one round may commit.
    """
    front: dict[Partial, float] = {start: 1.0}
    done: Law = {}
    while front:
        following: dict[Partial, float] = {}
        for state, mass in front.items():
            open_ = [i for i, token in enumerate(state) if token is None]
            if not open_:
                done[state] = done.get(state, 0.0) + mass  # type: ignore[index,arg-type]
                continue
            for chance, made in commits(state, open_):
                after = tuple(made.get(i, token) for i, token in enumerate(state))
                following[after] = following.get(after, 0.0) + mass * chance
        front = following
    return done


def distance(p: Law, q: Law) -> float:
    """Total variation."""
    return sum(abs(p.get(s, 0.0) - q.get(s, 0.0)) for s in p.keys() | q.keys()) / 2


def empirical(tokens_BL: Tensor) -> Law:
    """Frequencies of whole rows."""
    strings, counts = torch.unique(tokens_BL, dim=0, return_counts=True)
    return {tuple(s): c / len(tokens_BL) for s, c in zip(strings.tolist(), counts.tolist(), strict=True)}


def distance_bound(p: Law, n: int, risk: float = 1e-6) -> float:
    """TV between p and n samples of it stays below this, but for `risk` (Jensen for the mean, then McDiarmid)."""
    mean = sum(math.sqrt(q * (1 - min(q, 1.0)) / n) for q in p.values()) / 2
    return mean + math.sqrt(math.log(1 / risk) / (2 * n))


def chi_square(p: Law, seen: Law, n: int) -> float:
    """p-value of n samples under p, strings expected fewer than five times pooled."""
    common = [s for s in p if p[s] * n >= 5]
    expected = [p[s] * n for s in common] + [n * (1 - sum(p[s] for s in common))]
    observed = [seen.get(s, 0.0) * n for s in common] + [n * (1 - sum(seen.get(s, 0.0) for s in common))]
    if expected[-1] < 5:  # too little is left for a cell of its own
        rest, more = expected.pop(), observed.pop()
        least = expected.index(min(expected))
        expected[least] += rest
        observed[least] += more
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def assert_law(tokens_BL: Tensor, p: Law) -> None:
    """The rows are samples of p: nothing impossible, chi-square, and total variation below its bound."""
    n, seen = len(tokens_BL), empirical(tokens_BL)
    assert seen.keys() <= {s for s, q in p.items() if q > 0}
    assert distance(p, seen) < distance_bound(p, n)
    assert chi_square(p, seen, n) > 1e-3


def stopping(exact: ExactBase, calls: int) -> ExactBase:
    """The same base, whose process is told to end during its base pass of that number."""

    class Stopping(ExactBase):
        passes = itertools.count(1)

        def hidden(self, state: State) -> Tensor:
            if next(self.passes) == calls:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().hidden(state)

    return Stopping(exact.joint)


def unroll_slices(base: Base, g: Any, slices: Slices, *, rollout: int = 3) -> Unrolled:
    """Algorithm 2 on stored trajectories."""
    return unroll(g, observe(base, slices), rollout=rollout)
