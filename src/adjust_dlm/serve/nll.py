"""How likely an autoregressive partner finds a text."""

from __future__ import annotations

import torch

from adjust_dlm.bases import Base, Partner
from adjust_dlm.types import State


@torch.no_grad()
def mean_nll(base: Base, partner: Partner, prompt: list[int], completion: list[int]) -> float | None:
    """-log p(completion | prompt) / tokens, in nats, under the partner's own softmax; None for an empty completion.

    A prompt that does not begin with the base's start token gets it in front; without either there is no first term,
    and the mean is over the tokens behind the first.
    """
    start = base.spec.bos_id
    before = prompt if start is None or prompt[:1] == [start] else [start, *prompt]
    first = max(1, len(before))
    ids = [*before, *completion]
    if len(ids) <= first:
        return None
    tokens_BL = torch.tensor([ids], device=base.device)
    state = State(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool), torch.zeros_like(tokens_BL).bool(), False)
    h_RD = partner.hidden(state)[0, first:]
    log_p_RV = partner.head(h_RD).float().log_softmax(-1)
    return -float(log_p_RV.gather(-1, tokens_BL[0, first:, None]).double().mean())
