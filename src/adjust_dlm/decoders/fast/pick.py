"""TOP and the draw on a lane: Algorithm 1, lines 5-7, with shapes that the host knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.machinery.canvas import Picks
from adjust_dlm.decoders.machinery.pick import Rows
from adjust_dlm.sampling import confidence, draw, no_softmax

_FUSED_BYTES = 2 << 30  # logits in the head's dtype held at once


def pick(base: Base, lane: Lane, width: int, count: int, *, first: bool = False) -> None:
    """Picks and commits the `count` best of at most `width` open positions of each row.

    The `first` pick of a round narrows it to its candidates.
    """
    lane.commit(picks(base, lane.h_BLD, lane, width, count, first=first))


def picks(
    base: Base, h_BLD: Tensor, lane: Lane, width: int, count: int = 1, *, first: bool = False, plain: bool = False
) -> Picks:
    """What `pick` commits, by any states; `plain` ones have the logits that their tokens were drawn from."""
    column_BN, open_BN = lane.open_columns(width)
    row_BN = lane.slot_B[:, None].expand_as(column_BN)
    kind = (Laws if plain else Fused) if fused(lane) else Plain
    rows = kind(base, h_BLD, lane)
    score_BN = rows.scores(row_BN.flatten(), column_BN.flatten()).view_as(column_BN)
    if base.lag:
        score_BN = score_BN.masked_fill(lane.lead_BL.gather(1, column_BN) & (score_BN > -torch.inf), torch.inf)
    if first:
        nothing_BL = torch.full(lane.tokens_BL.shape, -torch.inf, device=score_BN.device)
        lane.narrow(nothing_BL.scatter(1, column_BN, torch.where(open_BN, score_BN, -torch.inf)))
    position_BC, index_BC, u_BC, valid_BC = lane.choose(score_BN, column_BN, open_BN, count)
    row_R = row_BN[:, : position_BC.shape[1]].flatten()
    token_R = rows.draw(row_R, position_BC.flatten(), index_BC.flatten(), u_BC.flatten())
    if lane.noting:
        old_BC = lane.chance_BL.gather(1, position_BC)
        lane.chance_BL.scatter_(1, position_BC, torch.where(valid_BC, rows.chance_R.view_as(old_BC), old_BC))
    return Picks(position_BC, token_R.view_as(position_BC), valid_BC, rows.processed_RV)


def fused(lane: Lane) -> bool:
    """Whether the kernels do what these settings ask for: they draw for chosen rows only, and tell no chances."""
    draws_all = lane.rule == "confidence" and lane.config.temperature > 0
    return lane.kernels and not draws_all and not lane.noting


class Plain(Rows):
    """Scored and drawn as the reference does; faults are noted, not raised."""

    processed_RV: Tensor | None = None  # what tokens were drawn from

    def __init__(self, base: Base, h_BLD: Tensor, lane: Lane) -> None:
        super().__init__(base, h_BLD, lane)
        self.lane = lane
        self.chance_R = torch.empty(0)  # of the tokens drawn, if anyone wants to know

    def draw(self, row_R: Tensor, column_R: Tensor, index_R: Tensor, u_R: Tensor) -> Tensor:
        """Tokens of chosen rows, `index_R` among those that were scored; notes a row without a softmax."""
        self.processed_RV = processed_RV = self.processed(row_R, column_R, index_R)
        token_R = draw(processed_RV, u_R, self.config.temperature)
        if self.lane.noting:
            self.chance_R = confidence(processed_RV, token_R)
        self.lane.bad |= no_softmax(processed_RV).any()
        return token_R


class Fused(Plain):
    """The same from the head's own logits, with the kernels of `kernels.draw`."""

    def _certainty(self, row_R: Tensor, column_R: Tensor) -> Tensor:
        from adjust_dlm.kernels.draw import Stats, row_stats

        chunk = max(1, _FUSED_BYTES // (self.base.spec.vocab_size * self.base.dtype.itemsize))
        parts, logits_RV = [], torch.empty(0)
        for row, column in zip(row_R.split(chunk), column_R.split(chunk), strict=True):
            logits_RV = torch.empty(0)
            logits_RV = self._logits(row, column)
            parts.append(row_stats(logits_RV, **self._processing(scored=True)))
        stats = parts[0] if len(parts) == 1 else Stats(*map(torch.cat, zip(*parts, strict=True)))
        self._kept_RV = logits_RV if len(parts) == 1 else None
        self._stats = stats
        return {"entropy": stats.entropy, "margin": stats.margin, "confidence": stats.confidence}[self.lane.rule]

    def draw(self, row_R: Tensor, column_R: Tensor, index_R: Tensor, u_R: Tensor) -> Tensor:
        """See `Plain.draw`."""
        from adjust_dlm.kernels.draw import draw_rows, row_stats

        processing = self._processing(scored=False)
        logits_RV = self._kept_RV
        if logits_RV is not None and processing == self._processing(scored=True):
            stats = self._stats
        else:
            logits_RV = self._logits(row_R, column_R) if logits_RV is None else logits_RV[index_R]
            stats, index_R = row_stats(logits_RV, **processing), torch.arange(len(row_R), device=row_R.device)
        if self.config.temperature == 0:
            self.lane.bad |= ~(stats.total[index_R] > 0).all()  # NaN of an infinite logit, 0 of nothing but -inf
            return stats.token[index_R]
        return draw_rows(logits_RV, index_R, stats, u_R, self.lane.bad, **processing)

    def _logits(self, row_R: Tensor, column_R: Tensor) -> Tensor:
        return self.base.plain_logits(self._states(row_R, column_R), suppress_eos=self.config.suppress_eos)

    def _processing(self, *, scored: bool) -> dict[str, Any]:
        """For raw scores logits count as they are; T = 0 leaves their scale alone."""
        config = self.config
        if scored and not self.canvas.on_processed:
            return {"temperature": 1.0}
        return {"temperature": config.temperature or 1.0, "top_p": config.top_p, "top_k": config.top_k}


class Laws(Fused):
    """Scored by the kernels, drawn in the plain form, which keeps what tokens were drawn from."""

    draw = Plain.draw
