"""Dream's `alg_temp`: positions drawn by their certainty. Held to what the published code computes by tests."""

from __future__ import annotations

from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import commit_best, plain_logits, propose
from adjust_dlm.options import SoftOrderOptions
from adjust_dlm.sampling import ORDER, score_rows
from adjust_dlm.types import require


def soft_order(base: Base, canvas: Canvas, options: SoftOrderOptions) -> None:
    """Fills the canvas, positions drawn without replacement from softmax(certainty / alg_temp).

    The n largest of certainty / alg_temp + Gumbel noise are such a draw. Counts are the canvas's own (see `schedule`).

    Raises:
        InputError: the order rule does not look at logits.
    """
    rule = canvas.rule
    require(rule in ("entropy", "confidence", "margin"), f"order is {rule!r}; alg_temp needs a certainty to soften")
    on_processed = canvas.on_processed

    def certainty(logits_RV: Tensor, _token_R: Tensor, row_R: Tensor, position_R: Tensor) -> Tensor:
        u_R = canvas.uniforms(position_R, row_R)
        score_R = score_rows(logits_RV, u_R, rule, on_processed=on_processed, config=canvas.config).double()
        if options.alg_temp == 0:
            return score_R
        noise_R = canvas.uniforms(position_R, row_R, ORDER).clamp_min(2.0**-33)  # finite for u = 0 too
        return score_R / max(options.alg_temp, 1e-300) - (-noise_R.log()).log()  # scores stay finite

    while canvas.open:
        h_BLD = base.hidden(canvas)
        canvas.start_round()
        score_BL, token_BL = propose(base, canvas, canvas.open_BL, plain_logits(base, h_BLD, canvas), certainty)
        commit_best(canvas, score_BL, token_BL)
