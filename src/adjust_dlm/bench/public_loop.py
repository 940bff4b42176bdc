"""The released ADJUST code's way of working, as a small loop: what the project's own decoders are compared with.

Its habits that cost time, and only those: the head runs on all rows of the canvas, probabilities of the whole
vocabulary are made for all of them in the model's dtype, g runs after every commit (the last of a round too, whose
result nobody reads), everything is eager, and a condition is asked of the device after every commit. Tokens are drawn
by torch's generator; its batches have no pads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig, State


@torch.no_grad()
def public_loop(base: Base, sampler: Sampler | None, prompts: list[list[int]], config: DecodeConfig) -> Tensor:
    """Fills canvases K tokens a base pass: ids [B, L]; without a sampler all K come from the base's marginals.

    Prompts are of one length. Of the settings K, length, temperature, top_p, end tokens and seed count.
    """
    base = base if sampler is None else sampler.on(base)
    new = torch.full((len(prompts), config.max_new_tokens), base.spec.mask_id, device=base.device)
    tokens_BL = torch.cat([torch.tensor(prompts, device=base.device).long(), new], 1)
    state = State(tokens_BL, torch.ones_like(tokens_BL).bool(), tokens_BL == base.spec.mask_id, padded=False)
    generator = torch.Generator(base.device).manual_seed(config.seed) if config.temperature else None
    for _ in range(-(-config.max_new_tokens // config.tokens_per_step)):
        h_BLD = base.hidden(state)
        p_BLV = _probabilities(base, h_BLD, config)
        if sampler is None:
            _reveal(state, p_BLV, config.tokens_per_step, generator)
            continue
        for _ in range(config.tokens_per_step):
            _reveal(state, p_BLV, 1, generator)
            h_BLD = sampler(h_BLD, state)
            p_BLV = _probabilities(base, h_BLD, config)
            if not bool(state.masked_BL.any()):
                return tokens_BL
    return tokens_BL


def _probabilities(base: Base, h_BLD: Tensor, config: DecodeConfig) -> Tensor:
    """[B, L, V] after temperature and nucleus, in the head's dtype."""
    logits_RV = base.plain_logits(h_BLD.flatten(0, 1), suppress_eos=config.suppress_eos)
    if config.temperature not in (0, 1):
        logits_RV = logits_RV / config.temperature
    if config.top_p < 1:
        ranked_RV, index_RV = logits_RV.sort(descending=True)
        p_RV = ranked_RV.softmax(-1)
        gone_RV = p_RV.cumsum(-1) - p_RV >= config.top_p
        logits_RV = logits_RV.scatter(-1, index_RV, ranked_RV.masked_fill(gone_RV, -torch.inf))
    return logits_RV.softmax(-1).view(*h_BLD.shape[:2], -1)


def _reveal(state: State, p_BLV: Tensor, count: int, generator: torch.Generator | None) -> None:
    """The `count` masked positions of least entropy get tokens: drawn from their marginals, or the likeliest."""
    certainty_BL = (p_BLV * (p_BLV + 1e-10).log()).sum(-1).masked_fill(~state.masked_BL, -torch.inf)
    count = min(count, certainty_BL.shape[1])
    best = certainty_BL.topk(count, -1)
    at_BC, open_BC = best.indices, best.values > -torch.inf
    p_RV = p_BLV.gather(1, at_BC[..., None].expand(-1, -1, p_BLV.shape[-1])).flatten(0, 1)
    drawn = p_RV.argmax(-1) if generator is None else torch.multinomial(p_RV.float(), 1, generator=generator)
    token_BC = drawn.view(at_BC.shape)
    old_BC = state.tokens_BL.gather(1, at_BC)
    state.tokens_BL.scatter_(1, at_BC, torch.where(open_BC, token_BC, old_BC))
    state.masked_BL.scatter_(1, at_BC, False)
