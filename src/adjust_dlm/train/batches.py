"""What a micro-batch is trained on: which slices, which depths of their unroll, with which weights.

All of it is a pure function of (seed, step, number of the slice in the step). So nothing has to be saved, and a step is
the same however it is cut into ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.losses import Delta, row_shares
from adjust_dlm.sampling import ORDER, uniform
from adjust_dlm.train.unroll import Frames, Slices, Step, unroll, unrolled_kl
from adjust_dlm.types import GIVEN, Trajectory

_LOTS = ORDER + 1  # a stream of random numbers that joint decoding does not use


def random_slices(
    trajectories: Sequence[Trajectory], rows: Sequence[int], *, count: int, length: int, rollout: int,
    key: tuple[int, ...], pad_id: int, first: int = 0, pad_to: int = 0,
) -> Slices:  # fmt: skip
    """Slices `first` .. `first + count - 1` of a step: each has `length` states of a random trajectory.

    Starts run from -(windows - 1) to T - 2, so that every window start 0..T-2 is equally likely, the all-mask
    state and the last ones included; what hangs over does not count. A slice holds length - rollout windows.

    `rows` are indices of the trajectories that may be used; `key`, (seed, step), and a slice's number decide the draw.
    Canvases have at least `pad_to` columns: one shape for every batch, which a compiled g needs.
    """
    chosen, generators = random_texts(trajectories, rows, count, key, first)
    both = zip(chosen, generators, strict=True)
    starts = [int(own.integers(rollout + 1 - length, max(1, x.commits - 1))) for x, own in both]
    return pack(chosen, starts, length, pad_id, pad_to=pad_to)


def random_texts(
    trajectories: Sequence[Trajectory], rows: Sequence[int], count: int, key: tuple[int, ...], first: int
) -> tuple[list[Trajectory], list[np.random.Generator]]:
    """A random text for each slice, and what decides the rest of its draw."""
    generators = [np.random.default_rng((*key, first + n)) for n in range(count)]
    return [trajectories[rows[int(own.integers(len(rows)))]] for own in generators], generators


def random_start(generator: np.random.Generator, commits: int, windows: int) -> int:
    """0 for a slice that holds all windows; else every window start 0 .. `commits` - 2 is equally likely."""
    return 0 if windows >= commits - 1 else int(generator.integers(1 - windows, commits - 1))


def pack(
    chosen: Sequence[Trajectory], starts: Sequence[int], length: int, pad_id: int, *, pad_to: int = 0, left: bool = True
) -> Slices:
    """Pads trajectories to one length, on the left; a fixed one (`pad_to`) always comes with its padding mask."""
    longest = max(pad_to, *(len(x.tokens_L) for x in chosen))
    tokens_NL = torch.full((len(chosen), longest), pad_id, dtype=torch.long)
    order_NL = torch.full((len(chosen), longest), GIVEN, dtype=torch.long)
    real_NL = torch.zeros((len(chosen), longest), dtype=torch.bool)
    for n, x in enumerate(chosen):
        at = slice(longest - len(x.tokens_L), None) if left else slice(len(x.tokens_L))
        tokens_NL[n, at], order_NL[n, at], real_NL[n, at] = x.tokens_L, x.order_L, True
    return Slices(
        tokens_NL, order_NL, real_NL, torch.tensor(starts), length, padded=pad_to > 0 or not bool(real_NL.all())
    )


def lots(rank_BL: Tensor, count: int, key: tuple[int, ...], first: int = 0, blocks: int = 1) -> Tensor:
    """Uniforms [B, L] that decide which rows a limited loss looks at, the same on any device, behind any pads.

    Of `count` slices from number `first` on of the step, each with so many rows (`blocks`) in each state.
    """
    (size, length), device = rank_BL.shape, rank_BL.device
    parts = (torch.arange(part, device=device) for part in (size // (count * blocks), count, blocks))
    state_S, slice_N, block_J = parts
    row_SNJ = (state_S[:, None, None] << 48) + (block_J << 32) + (first + slice_N[:, None])
    at_L, step = torch.arange(length, device=device).flip(0), torch.full((), key[1], device=device)
    return uniform(key[0], row_SNJ.view(-1, 1), step, at_L, _LOTS)


def to_device(slices: Slices, device: torch.device) -> Slices:
    """Copies without waiting."""
    tensors: dict[str, Any] = {name: value for name, value in vars(slices).items() if isinstance(value, Tensor)}
    return replace(slices, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


def batch_loss(
    base: Base, g: Step, seen: Any, config: Any, *, key: tuple[int, ...], delta: Delta, first: int = 0,
    states: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The loss of a micro-batch: the mean KL over depths.

    `seen` are slices (of blocks, too) on the base's device, or frames that one-pass training has decoded. The key is
    (seed, step), `first` the number of the first slice in the step; `states` are those of the whole step.
    """
    frames = seen if isinstance(seen, Frames) else seen.frames(base)
    run, share_BL = unroll(g, frames, rollout=config.rollout), None
    if config.rows is not None:
        some = lots(run.rank_BL, config.slices, key, first, run.n // config.slices)
        share_BL = row_shares(run.rank_BL, config.rows, some)
    return unrolled_kl(
        base, run, depth_shares(config, key), weights=config.weights, next_decay=config.next_decay,
        next_share=config.next_share, suppress_eos=config.suppress_eos, delta=delta, share_BL=share_BL, states=states,
    )  # fmt: skip


def depth_shares(config: Any, key: tuple[int, ...]) -> dict[int, float]:
    """Depths that a step is trained on, and their shares of the loss: 1 in total."""
    if config.loss == "last":
        return {config.rollout: 1.0}
    if config.loss == "released":
        return {released_depth(key, config.rollout): 1.0}
    return dict.fromkeys(range(1, config.rollout + 1), 1 / config.rollout)


def released_depth(key: tuple[int, ...], rollout: int) -> int:
    """The public release's unroll length: 1..rollout with weights softmax(1, 1/2, 1/4, ...)."""
    weights = np.exp(0.5 ** np.arange(rollout))
    return int(np.random.default_rng((*key, 0, 7)).choice(rollout, p=weights / weights.sum())) + 1
