"""Held-out metrics of a sampler: how close each unroll depth is to the base, and how stale the base would be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.divergence import observe, why_not
from adjust_dlm.decoders.machinery.pick import rows_at_once
from adjust_dlm.losses import kl_rows
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import SCORES
from adjust_dlm.train.batches import pack, to_device
from adjust_dlm.train.blocks import pack_blocks
from adjust_dlm.train.causal import pack_windows
from adjust_dlm.train.unroll import Unrolled, unroll, unrolled_kl
from adjust_dlm.types import CERTAINTY, EVALUATION_ROWS, DecodeConfig, Trajectory

_BATCH, _LEAST, _MOST = 16, 128, 1024  # windows


@torch.no_grad()
def held_out(
    base: Base, sampler: Sampler, data: Sequence[Trajectory], rows: Sequence[int], config: Any, autocast: Any,
    pad_to: int = 0, check: Callable[[], None] = lambda: None,
) -> dict[str, float]:  # fmt: skip
    """Per depth k: `kl_k` teacher || g, `stale_k` teacher || h_0, `top1_k` agreement on the next row's token.

    Decoding takes the position that g is most certain of, which may not be the base's: `position_k` is how often both
    agree, and `own_kl_k` and `own_back_k` are KL(teacher || g) and KL(g || teacher) at g's own next position.

    The same windows at every call (see `looked_at`), in batches of 16. Means over all states that count at a depth; a
    depth that no trajectory is long enough for is left out. A window costs rollout + 1 base passes and rollout steps
    of g over one row, and the head on its masked rows: once for g, once for h_0 and twice for the teacher a depth.
    `check` is called before each batch and may raise.
    """
    if not rows:
        return {}
    sums: dict[str, float] = {}
    counts: dict[int, int] = {}
    windows = looked_at(rows, config.seed)
    for first in range(0, len(windows), _BATCH):
        check()
        some = [(data[row], at) for row, at in windows[first : first + _BATCH]]
        slices = _slices_at(base, [x for x, _ in some], [at for _, at in some], config.rollout + 1, pad_to)
        with autocast:
            run = unroll(sampler, slices.frames(base), rollout=config.rollout)
            for k in range(1, config.rollout + 1):
                count, means = _depth(base, run, k, config)
                counts[k] = counts.get(k, 0) + count
                for name, value in means.items():
                    sums[f"{name}_{k}"] = sums.get(f"{name}_{k}", 0.0) + count * value
    return {name: value / counts[int(name.rpartition("_")[2])] for name, value in sums.items()}


def _slices_at(base: Base, texts: list[Trajectory], moments: list[float], length: int, pad_to: int) -> Any:
    """On the base's device, slices that begin at a share of each text, or of its blocks; of 16 windows if causal."""
    if base.spec.block is not None and not base.spec.causal:
        blocks = pack_blocks(texts, lambda n, commits: int(moments[n] * max(1, commits - 1)), length, base)
        return blocks.to(base.device)
    starts, pad = [int(at * max(1, x.commits - 1)) for x, at in zip(texts, moments, strict=True)], base.spec.pad_id
    if base.spec.causal:
        return to_device(pack_windows(texts, starts, length + _BATCH - 1, length - 1, pad), base.device)
    return to_device(pack(texts, starts, length, pad, pad_to=pad_to), base.device)


def divergence(
    base: Base, sampler: Sampler, data: Sequence[Trajectory], rows: Sequence[int], config: Any, autocast: Any
) -> dict[str, Any]:
    """KL(q || p) of parallel decoding and of ADJUST, K = rollout + 1, on the prompts of held-out trajectories.

    At most `config.heldout_texts` of them, all of the temperature that most have; decoded in rows for evaluation. Costs
    a base pass for each commit.

    Returns:
        `tokens_per_step`, `temperature` and a summary of each decoder (`decoders.divergence.Observation`); nothing
        where fewer than two held-out texts were drawn at one temperature above 0; `no_divergence`, the reason, where
        the base's own order cannot be measured.
    """
    warm = [data[row] for row in rows if data[row].temperature > 0]
    if not warm:
        return {}
    count = Counter(x.temperature for x in warm)
    temperature = max(count, key=lambda t: (count[t], t))
    texts = [x for x in warm if x.temperature == temperature][: config.heldout_texts]
    if len(texts) < 2:  # no interval
        return {}
    settings = DecodeConfig(
        tokens_per_step=config.rollout + 1, max_new_tokens=max(1, *(x.commits for x in texts)), temperature=temperature,
        suppress_eos=config.suppress_eos, seed=config.seed,
    )  # fmt: skip
    reason = why_not(base, "adjust", settings, None, ("own",))
    if reason is not None:
        return {"no_divergence": reason}
    prompts = [x.state(0, base.spec.mask_id)[0].tolist() for x in texts]
    apart = [EVALUATION_ROWS + n for n in range(len(texts))]  # of the texts' own, some seed may be one of training
    how: dict[str, Any] = {"temperature": temperature, "rows": apart, "new": [0] * len(texts)}
    out: dict[str, Any] = {"tokens_per_step": config.rollout + 1, "temperature": temperature}
    with autocast:
        for decoder, helper in (("parallel", None), ("adjust", sampler)):
            seen = observe(base, prompts, settings, decoder=decoder, sampler=helper, **how)
            out[decoder] = seen.summary()
    return out


def looked_at(rows: Sequence[int], seed: int) -> list[tuple[int, float]]:
    """The held-out windows: (row, moment), the latter as a share of the text, in [0, 1).

    Each row comes equally often, once from 128 rows on, and its windows lie in different parts of the text; over all of
    them, moments are spread evenly. Of more than 1024 rows, 1024 are taken, evenly spaced.
    """
    rows = rows if len(rows) <= _MOST else [rows[i * len(rows) // _MOST] for i in range(_MOST)]
    times, generator = -(-_LEAST // len(rows)), np.random.default_rng((seed, 1 << 40))
    moment_N = (generator.permutation(len(rows)) + generator.integers(1 << 20, size=len(rows)) / (1 << 20)) / len(rows)
    return [(row, (n + at) / times) for n in range(times) for row, at in zip(rows, moment_N.tolist(), strict=True)]


def _depth(base: Base, run: Unrolled, k: int, config: Any) -> tuple[int, dict[str, float]]:
    """How many states count (each has one next row), and means over them; none of the latter without the former."""
    settings = {name: getattr(config, name) for name in ("weights", "next_decay", "next_share", "suppress_eos")}
    next_row = (run.rank[k - 1] == 0).nonzero(as_tuple=True)
    if not len(next_row[0]):
        return 0, {}
    teacher_RV = base.logits(run.teacher[k - 1][next_row], suppress_eos=config.suppress_eos)
    student_RV = base.logits(run.student[k - 1][next_row], suppress_eos=config.suppress_eos)
    own_row = next_row[0], _own_next(base, run, k, config.suppress_eos)[next_row[0]]
    p_RV, q_RV = (
        base.logits(h_BLD[own_row], suppress_eos=config.suppress_eos)
        for h_BLD in (run.teacher[k - 1], run.student[k - 1])
    )
    return len(next_row[0]), {
        "position": float((own_row[1] == next_row[1]).float().mean()),
        "own_kl": float(kl_rows(p_RV, q_RV).mean()),
        "own_back": float(kl_rows(q_RV, p_RV).mean()),
        "kl": float(unrolled_kl(base, run, k, **settings)),
        "stale": float(unrolled_kl(base, run, k, stale=True, **settings)),
        "top1": float((teacher_RV.argmax(-1) == student_RV.argmax(-1)).float().mean()),
    }


def _own_next(base: Base, run: Unrolled, k: int, suppress_eos: bool) -> Tensor:
    """The position that g, by the base's own rule on its logits at T = 1, would reveal next in each row."""
    if base.spec.order not in CERTAINTY:  # then the order looks at no logits, and is the base's
        return (run.rank[k - 1] == 0).long().argmax(-1)
    rule, h_BLD = SCORES.get(base.spec.order), run.student[k - 1]
    score_BL = torch.full(run.rank[k - 1].shape, -torch.inf, device=h_BLD.device)
    for part in (run.rank[k - 1] >= 0).nonzero().split(rows_at_once(base)):
        row, at = part.unbind(-1)
        logits_RV = base.logits(h_BLD[row, at], suppress_eos=suppress_eos)
        # Rule confidence looks at the drawn token: its value where that is the likeliest.
        score_BL[row, at] = rule(logits_RV) if rule else logits_RV.softmax(-1).amax(-1)
    return score_BL.argmax(-1)
