"""What one micro-batch is trained on: which unroll, which depths of it, with which weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.losses import Delta, row_shares
from adjust_dlm.train.batches import lots
from adjust_dlm.train.on_policy import unroll_on_policy
from adjust_dlm.train.unroll import Frames, Slices, Step, Unrolled, unroll, unroll_frames, unrolled_kl
from adjust_dlm.types import require


def check_objective(config: Any) -> None:
    """Raises `InputError` for settings of `TrainConfig` that make no objective."""
    longest = max(config.rollout, *config.rollouts, 0)
    require(all(r >= 1 for r in config.rollouts), f"rollouts is {config.rollouts}; all must be at least 1")
    require(
        config.slice_states > longest,
        f"slice_states is {config.slice_states}; it must exceed every rollout ({longest})",
    )
    apart = [name for name in ("rollouts", "on_policy") if config.one_pass and getattr(config, name)]
    require(not apart, f"one_pass decodes what it trains on, once; leave {', '.join(apart)} out")
    stored = config.trajectories if config.one_pass else ()
    require(
        not stored,
        f"trajectories is {stored}; one_pass decodes what it trains on: give stored rows as heldout_trajectories",
    )
    require(config.detach_every >= 0, f"detach_every is {config.detach_every}; it must be >= 0 (0 is never)")
    given = config.depth_weights
    good = not given or (len(given) == longest and min(given) >= 0 and given[0] > 0 and sum(given) < math.inf)
    require(good, f"depth_weights is {given}; give {longest} finite numbers >= 0, the first above 0, or none")
    require(not given or config.loss == "sum", f"depth_weights belong to loss sum; loss is {config.loss!r}")
    for name in ("on_policy", "next_share", "reverse"):
        require(0 <= getattr(config, name) <= 1, f"{name} is {getattr(config, name)}; it is a share, 0..1")
    own = round(config.on_policy * config.slices)
    require(own > 0 or not config.on_policy, f"on_policy is {config.on_policy}: that is none of {config.slices} slices")
    matched = config.match_states
    require(0 <= matched < math.inf, f"match_states is {matched}; it must be a finite number >= 0")
    require(0 < config.next_decay < math.inf, f"next_decay is {config.next_decay}; it must be a positive number")


def batch_loss(
    base: Base, g: Step, seen: Slices | Frames, config: Any, *, rollout: int, key: tuple[int, ...], delta: Delta
) -> Tensor:
    """The loss of a micro-batch: the mean KL over depths, and what `match_states` adds.

    Args:
        base: f and W.
        g: the sampler, or its compiled twin.
        seen: slices on the base's device, or frames that one-pass training has decoded.
        config: `TrainConfig`.
        rollout: unrolled g steps.
        key: integers that decide what is drawn.
        delta: from `pick_delta`, with `config.reverse`.
    """
    length: dict[str, int] = {"rollout": rollout, "detach_every": config.detach_every}
    if isinstance(seen, Frames):
        states = unroll_frames(g, seen, **length)
    elif config.on_policy:
        states = unroll_on_policy(
            base, g, seen, **length, share=config.on_policy, suppress_eos=config.suppress_eos, key=key
        )
    else:
        states = unroll(base, g, seen, **length)
    share_BL = None if config.rows is None else row_shares(states.rank_BL, config.rows, lots(states.rank_BL, key))
    depths = depth_shares(config, rollout, key)
    loss = unrolled_kl(
        base, states, depths, weights=config.weights, next_decay=config.next_decay, next_share=config.next_share,
        suppress_eos=config.suppress_eos, delta=delta, share_BL=share_BL,
    )  # fmt: skip
    return loss + config.match_states * state_gap(states, depths, base.width) if config.match_states else loss


def state_gap(run: Unrolled, depths: Mapping[int, float], width: int) -> Tensor:
    """sum_k share_k mean |h^_k - h_k|^2 / |h_k|^2 over the masked rows of depth k; needs no head. Scalar, fp32.

    Args:
        run: from `unroll`.
        depths: shares of the loss.
        width: D; columns behind it are not g's to change.
    """
    total = torch.zeros((), device=run.h_BLD.device)
    for k, share in depths.items():
        teacher_BLD, student_BLD = (h_BLD[..., :width].float() for h_BLD in (run.teacher[k - 1], run.student[k - 1]))
        gap_BL = (student_BLD - teacher_BLD).square().sum(-1) / teacher_BLD.square().sum(-1)
        masked_BL = run.rank[k - 1] >= 0
        total = total + share * torch.where(masked_BL, gap_BL, 0).sum() / masked_BL.sum().clamp_min(1)
    return total


def drawn_rollout(rollout: int, rollouts: Sequence[int], key: tuple[int, ...]) -> int:
    """The unroll length of a micro-batch: one of several, all equally likely, or the only one."""
    return int(np.random.default_rng((*key, 13)).choice(rollouts)) if rollouts else rollout


def depth_shares(config: Any, rollout: int, key: tuple[int, ...]) -> dict[int, float]:
    """Depths that a micro-batch is trained on, and their shares of the loss: 1 in total."""
    if config.loss == "last":
        return {rollout: 1.0}
    if config.loss == "released":
        return {released_depth(key, rollout): 1.0}
    weights = (config.depth_weights or (1.0,) * rollout)[:rollout]
    return {k: w / sum(weights) for k, w in enumerate(weights, start=1) if w}


def released_depth(key: tuple[int, ...], rollout: int) -> int:
    """The public release's unroll length: 1..rollout with weights softmax(1, 1/2, 1/4, ...)."""
    weights = np.exp(0.5 ** np.arange(rollout))
    return int(np.random.default_rng((*key, 7)).choice(rollout, p=weights / weights.sum())) + 1
