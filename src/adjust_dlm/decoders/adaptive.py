"""ADJUST with as many tokens a round as g is certain of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.pick import pick
from adjust_dlm.options import AdaptiveOptions
from adjust_dlm.sampling import negative_entropy
from adjust_dlm.types import State


def adaptive(base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, options: AdaptiveOptions) -> None:
    """Fills the canvas as `adjust` does; a row's round ends before the token that would overspend `gamma`.

    A token's entropy is that of the distribution it is drawn from, so at a low temperature rounds are longer. A row's
    last g call of a round finds out that the round is over; it is booked.
    """
    most = options.most or canvas.tokens_BL.shape[1]
    while canvas.open:
        h_BLD = base.hidden(canvas)
        left = canvas.start_round(torch.full_like(canvas.commits_B, most))
        spent_B = torch.zeros(len(h_BLD), device=h_BLD.device)
        for k in range(left):
            if k:
                canvas.sampler_calls_B += canvas.busy_B
                h_BLD = sampler(h_BLD, canvas)
            picks = pick(base, h_BLD, canvas)
            if k:
                assert picks.processed_RV is not None
                spent_B += torch.where(picks.valid_BN[:, 0], -negative_entropy(picks.processed_RV), 0)
                over_B = spent_B > options.gamma
                canvas.quota_B = canvas.quota_B.masked_fill(over_B, 0)
                picks = replace(picks, valid_BN=picks.valid_BN & ~over_B[:, None])
            canvas.commit(picks)
            if not canvas.busy_B.any():
                break
