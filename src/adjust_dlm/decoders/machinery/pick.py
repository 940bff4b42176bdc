"""TOP and the draw of Algorithm 1: which open positions are next, and their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.sampling import ORDER, draw, no_softmax, process, row_scorer

_CHUNK_BYTES = 1 << 30  # fp32 logits held at once while scoring rows


def rows_at_once(base: Base) -> int:
    """How many rows of fp32 logits are held at a time."""
    return max(1, _CHUNK_BYTES // (4 * base.spec.vocab_size))


def pick(base: Base, h_BLD: Tensor, canvas: Canvas, count: int = 1) -> Picks:
    """TOP and the draw (Algorithm 1, lines 5-6): the `count` best open positions of each row, and their tokens.

    The head runs on open positions only. Their logits are kept for the draw if they fit into one chunk; else it runs
    once more on the chosen ones.

    Raises:
        FloatingPointError: the states gave NaN or infinite logits; such a row could never be finished.
    """
    refuse_nan(base, h_BLD[canvas.masked_BL])
    row_R, position_R = (canvas.open_BL & canvas.busy_B[:, None]).nonzero(as_tuple=True)
    rows = Rows(base, h_BLD, canvas)
    score_BL = torch.full(canvas.tokens_BL.shape, -torch.inf, device=h_BLD.device)
    score_BL[row_R, position_R] = rows.scores(row_R, position_R)
    canvas.lead(score_BL)
    if count <= 1 and not canvas.narrowed:
        canvas.narrow(score_BL)
    position_BN = score_BL.sort(dim=-1, descending=True, stable=True).indices[:, : max(count, 1)]
    valid_BN = score_BL.gather(1, position_BN) > -torch.inf
    row_BN = torch.arange(len(score_BL), device=h_BLD.device)[:, None].expand_as(position_BN)
    index_BL = torch.zeros_like(canvas.tokens_BL)  # of positions that are not open (invalid picks) any will do
    index_BL[row_R, position_R] = torch.arange(len(row_R), device=h_BLD.device)
    processed_RV = rows.processed(row_BN.flatten(), position_BN.flatten(), index_BL[row_BN, position_BN].flatten())
    refuse_nan(base, score_BL, logits_RV=processed_RV)
    token_R = draw(processed_RV, canvas.uniforms(position_BN, row_BN).flatten(), canvas.config.temperature)
    canvas.note_chance(row_BN, position_BN, processed_RV, token_R)
    return Picks(position_BN, token_R.view_as(position_BN), valid_BN, processed_RV)


class Rows:
    """Open positions as rows of logits, which are scored first and drawn from then."""

    def __init__(self, base: Base, h_BLD: Tensor, canvas: Canvas) -> None:
        self.base, self.h_BLD, self.canvas, self.config = base, h_BLD, canvas, canvas.config
        self._kept_RV: Tensor | None = None  # all logits that were scored, where they fit

    def scores(self, row_R: Tensor, position_R: Tensor) -> Tensor:
        """The order rule's score of each: fp32 [R], the largest is next."""
        if self.canvas.rule == "left_to_right":
            return -position_R.float()
        if self.canvas.rule == "random":
            return self.canvas.uniforms(position_R, row_R, ORDER).float()
        return self._certainty(row_R, position_R)

    def _certainty(self, row_R: Tensor, position_R: Tensor) -> Tensor:
        score, chunk, parts, logits_RV = row_scorer(compiled=self.base.compiled), rows_at_once(self.base), [], None
        for row, position in zip(row_R.split(chunk), position_R.split(chunk), strict=True):
            logits_RV = None  # one chunk at a time
            logits_RV = self._logits(row, position)
            u_R = self.canvas.uniforms(position, row) if self.canvas.rule == "confidence" else None
            how = {"on_processed": self.canvas.on_processed, "config": self.config}
            parts.append(score(logits_RV, u_R, self.canvas.rule, **how))
        self._kept_RV = logits_RV if len(parts) == 1 and len(row_R) else None
        return torch.cat(parts)

    def processed(self, row_R: Tensor, position_R: Tensor, index_R: Tensor) -> Tensor:
        """Logits [R, V] of chosen positions, `index_R` among those that were scored, as their tokens are drawn."""
        kept_RV = self._kept_RV
        return process(self._logits(row_R, position_R) if kept_RV is None else kept_RV[index_R], self.config)

    def _logits(self, row_R: Tensor, position_R: Tensor) -> Tensor:
        return self.base.logits(self._states(row_R, position_R), suppress_eos=self.config.suppress_eos)

    def _states(self, row_R: Tensor, position_R: Tensor) -> Tensor:
        h_BLD = self.h_BLD[..., : self.base.width]  # copies nothing that the head does not read
        return self.base.at(h_BLD, self.canvas, row_R, position_R)


def refuse_nan(base: Base, *parts: Tensor, logits_RV: Tensor | None = None) -> None:
    """Raises FloatingPointError for states or scores that are NaN, or logits that have no softmax."""
    bad = [] if logits_RV is None else [no_softmax(logits_RV).any()]
    if bool(torch.stack([*bad, *(part.isnan().any() for part in parts)]).any()):
        raise FloatingPointError(nan_message(base))


def nan_message(base: Base) -> str:
    """What a FloatingPointError says."""
    return f"base {base.spec.name!r} or its sampler gave NaN or infinite logits ({base.dtype} on {base.device})"
