"""The confidence threshold, again and again on what g makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import commit_best, plain_logits, probability, propose
from adjust_dlm.options import CascadeOptions
from adjust_dlm.sampling import DRAW
from adjust_dlm.types import State

_CALLS = 1000  # streams of the calls of g: what a call drew and did not commit is never drawn again


def cascade(base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, options: CascadeOptions) -> None:
    """Fills the canvas as `threshold` does; before the next pass, g looks at what was committed and does the same.

    Tokens of one call are drawn at once, so a low threshold draws from a product of marginals. A row's round is over
    when its block is full, or when g is certain of nothing; the call that finds that out is booked. Meant for T = 0: at
    T > 0 any rule that prefers likely tokens takes the variety out of a text.
    """
    most = math.inf if options.calls is None else options.calls
    while canvas.open:
        h_BLD, tau, call = base.hidden(canvas), options.tau, 0
        block_B = canvas.block_B
        least_B = canvas.open_B.long()  # the likeliest token of a pass goes whatever its probability
        canvas.start_round(torch.full_like(canvas.commits_B, canvas.tokens_BL.shape[1]))
        while True:
            going_BL = canvas.open_BL & (canvas.quota_B > 0)[:, None]
            logits, stream = plain_logits(base, h_BLD, canvas), DRAW if call == 0 else _CALLS + call
            score_BL, token_BL = propose(base, canvas, going_BL, logits, probability, stream=stream)
            count_B = (score_BL >= tau).sum(-1).maximum(least_B)
            canvas.quota_B = count_B.clone()
            commit_best(canvas, score_BL, token_BL)
            going_B = (count_B > 0) & canvas.open_BL.any(-1) & (canvas.block_B == block_B)
            if call >= most or not bool(going_B.any()):
                break
            canvas.quota_B = going_B.long()
            canvas.sampler_calls_B += going_B
            h_BLD = sampler(h_BLD, canvas)
            call, tau, least_B = call + 1, options.tau_g or options.tau, torch.zeros_like(least_B)
