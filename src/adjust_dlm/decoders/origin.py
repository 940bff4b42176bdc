"""Dream's `alg="origin"`: positions at random. Held to what the published code computes by tests."""

from __future__ import annotations

import torch

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import commit_best, plain_logits, propose
from adjust_dlm.options import OriginOptions
from adjust_dlm.sampling import ORDER
from adjust_dlm.types import require

_STEP = ORDER + 1  # the first of the streams of random numbers, one for each step


def origin(base: Base, canvas: Canvas, options: OriginOptions) -> None:
    """Fills the canvas at random: each masked position on its own, with probability 1 - s/t.

    t and s are neighbours on linspace(1, eps, steps + 1); the last step takes all that is left. The rule for the
    next position plays no part. A step that commits nothing is a pass all the same. Steps are ceil(new tokens /
    `tokens_per_step`), the release's own when they divide.

    Raises:
        InputError: blocks are asked for, or the base has them.
    """
    require(
        canvas.config.block_length is None, "origin commits at random over the whole canvas; leave block_length out"
    )
    require(
        base.spec.block is None, f"origin commits at random over the whole canvas; base {base.spec.name!r} has blocks"
    )
    steps = -(-canvas.config.max_new_tokens // canvas.config.tokens_per_step)
    times = torch.linspace(1, options.eps, steps + 1)
    for step in range(steps):
        if not canvas.open:
            return
        h_BLD = base.hidden(canvas)
        canvas.start_round()
        share = 1 - float(times[step + 1] / times[step]) if step < steps - 1 else 1.0
        row_R, position_R = canvas.open_BL.nonzero(as_tuple=True)
        chosen_R = canvas.uniforms(position_R, row_R, _STEP + step) < share
        chosen_BL = torch.zeros_like(canvas.masked_BL)
        chosen_BL[row_R, position_R] = chosen_R
        logits = plain_logits(base, h_BLD, canvas)  # equal scores: all are committed, from left to right
        score_BL, token_BL = propose(base, canvas, chosen_BL, logits, lambda _, token_R, *__: torch.zeros_like(token_R))
        canvas.quota_B = chosen_BL.sum(-1)
        commit_best(canvas, score_BL, token_BL)
