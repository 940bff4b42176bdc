"""Which slices a training step sees: a pure function of (seed, step, micro-batch), so nothing has to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.sampling import ORDER, uniform
from adjust_dlm.train.unroll import Slices
from adjust_dlm.types import GIVEN, Trajectory

_LOTS = ORDER + 1  # a stream of random numbers that joint decoding does not use


def random_slices(
    trajectories: Sequence[Trajectory],
    rows: Sequence[int],
    *,
    count: int,
    length: int,
    rollout: int,
    key: tuple[int, ...],
    pad_id: int,
    pad_to: int = 0,
) -> Slices:
    """`count` slices of `length` states from random trajectories.

    Starts run from -(windows - 1) to T - 2, so that every window start 0..T-2 is equally likely, the all-mask
    state and the last ones included; what hangs over does not count.

    Args:
        trajectories: the store.
        rows: indices that may be used.
        count: N.
        length: S.
        rollout: unrolled steps; a slice holds length - rollout windows.
        key: integers that decide the draw, for example (seed, step, micro-batch).
        pad_id: token put on left pads.
        pad_to: least canvas length: one shape for every batch, which a compiled base needs.
    """
    generator = np.random.default_rng(key)
    chosen = [trajectories[rows[i]] for i in generator.integers(len(rows), size=count)]
    starts = [int(generator.integers(rollout + 1 - length, max(1, x.commits - 1))) for x in chosen]
    return pack(chosen, starts, length, pad_id, pad_to=pad_to)


def pack(chosen: Sequence[Trajectory], starts: Sequence[int], length: int, pad_id: int, *, pad_to: int = 0) -> Slices:
    """Left-pads trajectories to one length; a fixed one (`pad_to`) always comes with its padding mask."""
    longest = max(pad_to, *(len(x.tokens_L) for x in chosen))
    tokens_NL = torch.full((len(chosen), longest), pad_id, dtype=torch.long)
    order_NL = torch.full((len(chosen), longest), GIVEN, dtype=torch.long)
    real_NL = torch.zeros((len(chosen), longest), dtype=torch.bool)
    for n, x in enumerate(chosen):
        at = longest - len(x.tokens_L)
        tokens_NL[n, at:], order_NL[n, at:], real_NL[n, at:] = x.tokens_L, x.order_L, True
    return Slices(
        tokens_NL, order_NL, real_NL, torch.tensor(starts), length, padded=pad_to > 0 or not bool(real_NL.all())
    )


def lots(rank_BL: Tensor, key: tuple[int, ...]) -> Tensor:
    """Uniforms [B, L] that decide which rows a limited loss looks at, the same on every device.

    Args:
        rank_BL: whose shape and device they get.
        key: (seed, step, micro-batch).
    """
    seed, step, micro = key
    (count, length), device = rank_BL.shape, rank_BL.device
    row_B1, at_L = torch.arange(count, device=device)[:, None], torch.arange(length, device=device)
    return uniform(seed, row_B1 + (micro << 32), torch.full((), step, device=device), at_L, _LOTS)


def to_device(slices: Slices, device: torch.device) -> Slices:
    """Copies without waiting."""
    tensors: dict[str, Any] = {name: value for name, value in vars(slices).items() if isinstance(value, Tensor)}
    return replace(slices, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})
