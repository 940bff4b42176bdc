"""What one micro-batch is trained on: which unroll, which depths of it, with which weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.losses import Delta, row_shares
from adjust_dlm.train.batches import lots
from adjust_dlm.train.unroll import Frames, Slices, Step, observe, unroll_frames, unrolled_kl


def batch_loss(
    base: Base, g: Step, seen: Slices | Frames, config: Any, *, key: tuple[int, ...], delta: Delta
) -> Tensor:
    """The loss of a micro-batch: the mean KL over depths.

    Args:
        base: f and W.
        g: the sampler, or its compiled twin.
        seen: slices on the base's device, or frames that one-pass training has decoded.
        config: `TrainConfig`.
        key: integers that decide what is drawn.
        delta: from `pick_delta`, with `config.reverse`.
    """
    frames = seen if isinstance(seen, Frames) else observe(base, seen)
    states = unroll_frames(g, frames, rollout=config.rollout)
    share_BL = None if config.rows is None else row_shares(states.rank_BL, config.rows, lots(states.rank_BL, key))
    return unrolled_kl(
        base, states, depth_shares(config, key), weights=config.weights, next_decay=config.next_decay,
        next_share=config.next_share, suppress_eos=config.suppress_eos, delta=delta, share_BL=share_BL,
    )  # fmt: skip


def depth_shares(config: Any, key: tuple[int, ...]) -> dict[int, float]:
    """Depths that a micro-batch is trained on, and their shares of the loss: 1 in total."""
    if config.loss == "last":
        return {config.rollout: 1.0}
    if config.loss == "released":
        return {released_depth(key, config.rollout): 1.0}
    return dict.fromkeys(range(1, config.rollout + 1), 1 / config.rollout)


def released_depth(key: tuple[int, ...], rollout: int) -> int:
    """The public release's unroll length: 1..rollout with weights softmax(1, 1/2, 1/4, ...)."""
    weights = np.exp(0.5 ** np.arange(rollout))
    return int(np.random.default_rng((*key, 7)).choice(rollout, p=weights / weights.sum())) + 1
