"""ADJUST: K tokens per base pass, drawn one after another (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from adjust_dlm.bases import Base
from adjust_dlm.bases.blocks import open_block
from adjust_dlm.bases.memory import Memory, renew
from adjust_dlm.decoders.machinery.canvas import Canvas, columns_of
from adjust_dlm.decoders.machinery.pick import pick
from adjust_dlm.options import AdjustOptions
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import State


def adjust(base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, options: AdjustOptions) -> None:
    """Fills the canvas; each commit of a round sees the ones before it through the sampler g.

    Line 8 is moved to the front of the inner loop: the last call of a round as printed is never used,
    so g runs K-1 times for K commits. TOP (line 5) looks at the round's `candidates`; 0 of them is the printed form.
    """
    options.check(sampler, canvas.config.candidates)
    sparse = sampler if options.sparse and isinstance(sampler, Sampler) else None
    while canvas.open:  # line 2
        h_BLD = base.hidden(canvas)  # line 3
        keys: Memory | None = None
        for k in canvas.round():  # line 4
            if k:
                if sparse is None:
                    h_BLD = sampler(h_BLD, canvas)  # line 8
                else:
                    keys = keys or sparse.keys(h_BLD, canvas)
                    h_BLD = sparse_step(sparse, h_BLD, canvas, keys, k)
            canvas.commit(pick(base, h_BLD, canvas))  # lines 5-7


def sparse_step(sampler: Sampler, h_BLD: Tensor, canvas: Canvas, keys: Memory, k: int) -> Tensor:
    """Step k = 1, 2, ... of a round, at the candidates and the columns that see the round's k tokens."""
    active_BL, most = canvas.only_BL | sampler.carriers(canvas.written_BL, canvas), canvas.wide + k
    if sampler.block is not None:  # and of candidates the columns that score them
        scoring_BL = F.pad(canvas.only_BL[:, 1:], (0, 1)) if canvas.base.lag else canvas.only_BL
        active_BL, most = (active_BL | scoring_BL) & open_block(canvas, sampler.block), sampler.block
    column_BN, valid_BN = columns_of(active_BL, most)
    new_BND = sampler.rows(h_BLD, canvas, column_BN, keys, valid_BN)
    return renew(h_BLD.clone(), new_BND, column_BN, valid_BN)
