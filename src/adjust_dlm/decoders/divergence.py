"""How far the law of a decoder is from the base's own, by the chain rule over its commits.

A text's chance is the product of the chances of its commits, so the KL between the laws of whole texts is

    KL(Q || P) = E_Q sum_i KL(q_i || p_i),    KL(P || Q) = E_P sum_i KL(p_i || q_i),

q_i what token i was drawn from, p_i the base looked at anew on the very same canvas. Each term is a sum over the
vocabulary, so only the choice of canvases is sampled. It holds where the next position is a function of the tokens so
far: then a text has one order. Where it is drawn apart from the tokens (rule random), the order is part of the law, and
the KL between the laws of texts alone is at most that. A text is over at its end token: what a round still writes
behind it does not count.

Shapes beside the usual ones: M measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders import make_plan
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.options import ThresholdOptions
from adjust_dlm.sampling import draw, process
from adjust_dlm.types import DecodeConfig, State, TokenSource, require
from adjust_dlm.variants import DECODERS

MEASURES = ("kl_qp", "kl_pq", "entropy_q", "entropy_p", "nll_p")
_SILENT = "decoder {!r} cannot be measured: it does not tell the canvas what it draws from (`Canvas.note_chance`)"


def why_not(
    base: Base, decoder: str, config: DecodeConfig, options: Any, sources: tuple[TokenSource, ...]
) -> str | None:
    """Why a decoder's divergence cannot be read off its commits; None where it can."""
    entry = DECODERS[decoder]
    if entry.lawless is not None:
        return entry.lawless
    by_drawn = entry.by_drawn or (isinstance(options, ThresholdOptions) and options.score == "drawn")
    if config.temperature and by_drawn:
        hint = "; threshold:score=likeliest does not" if decoder == "threshold" else ""
        return f"at temperature {config.temperature} it chooses positions by the tokens drawn there{hint}"
    if config.temperature and (config.order or base.spec.order) == "confidence" and entry.by_order:
        return f"at temperature {config.temperature} order confidence looks at the drawn tokens; set another order"
    narrow = config.temperature == 0 or config.top_p < 1 or config.top_k > 0
    if narrow and "base" in sources:
        how = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
        return f"{how} never draws some tokens of the base, so KL(p || q) is infinite; sources own gives KL(q || p)"
    return None


@torch.no_grad()
def observe(
    base: Base, prompts: list[list[int]], config: DecodeConfig, *, decoder: str, temperature: float = 1.0,
    source: TokenSource = "own", sampler: Any = None, rows: list[int] | None = None, new: list[int] | None = None,
    **options: Any,
) -> Observation:  # fmt: skip
    """Decodes a batch by the reference form and measures every commit; one base pass a commit beside the decoder's own.

    Args as of `decode`, and the temperature of the base's law p; the decoder may have another. Tokens of source "own"
    are the decoder's, as it always draws them, of "base" drawn from p at its positions. `new` are the masks behind each
    prompt, `config.max_new_tokens` unless given.

    Raises:
        InputError: as `decode`, or a law that cannot be read off the commits (see `why_not`).
    """
    require(temperature > 0, f"temperature of the law is {temperature}; at 0 it has one text, and every KL is infinite")
    plan = make_plan(base, config, decoder=decoder, sampler=sampler, **options)
    reason = why_not(base, decoder, plan.config, plan.own[0] if plan.own else None, (source,))
    require(reason is None, f"decoder {decoder!r} cannot be measured: {reason}")
    plan.require_begun(prompts)
    canvas = _Observed(plan.base, prompts, plan.config, rows=rows, new=new)
    canvas.law, canvas.source, canvas.decoder = DecodeConfig(temperature=temperature), source, decoder
    plan.run(canvas)
    return Observation(canvas.value_BTM.cpu(), canvas.depth_BT.cpu(), canvas.rounds_B.cpu())


@dataclass
class Observation:
    """Every commit of some texts.

    Attributes:
        value_BTM: `MEASURES` of each commit in nats, in their order; 0 where a text had fewer commits.
        depth_BT: its place in its round, from 0; -1 where a text had fewer.
        rounds_B: base passes of the decoder.
    """

    value_BTM: Tensor
    depth_BT: Tensor
    rounds_B: Tensor

    def summary(self) -> dict[str, Any]:
        """Means a token with 95 % half-widths over texts, over all commits and by place in the round."""
        places = [self.depth_BT == k for k in range(int(self.depth_BT.max()) + 1)]
        every = self._means(self.depth_BT >= 0)
        by_place = [self._means(at_BT) for at_BT in places]
        rounds = int(self.rounds_B.sum())
        tokens = int((self.depth_BT >= 0).sum())
        return {"texts": len(self.depth_BT), "tokens": tokens, "tokens_per_pass": tokens / rounds, **every,
                "by_commit": by_place}  # fmt: skip

    def _means(self, at_BT: Tensor) -> dict[str, float]:
        """Ratio estimates, since texts may differ in length; linearised half-widths."""
        n, count_B = len(at_BT), at_BT.sum(-1).double()
        sum_BM = (self.value_BTM.double() * at_BT[..., None]).sum(1)
        mean_M = sum_BM.sum(0) / count_B.sum()
        spread_M = (sum_BM - mean_M * count_B[:, None]).square().sum(0) / max(n - 1, 1)
        half_M = 1.96 * (spread_M / n).sqrt() / count_B.mean()
        out: dict[str, float] = {}
        for name, mean, half in zip(MEASURES, mean_M.tolist(), half_M.tolist(), strict=True):
            out |= {name: mean, f"{name}_ci95": half if n > 1 else float("nan")}
        return out

    @staticmethod
    def cat(parts: list[Observation]) -> Observation:
        """Batches of texts as one."""
        longest = max(part.depth_BT.shape[1] for part in parts)
        pads = [longest - part.depth_BT.shape[1] for part in parts]
        pad = torch.nn.functional.pad
        return Observation(
            torch.cat([pad(part.value_BTM, (0, 0, 0, n)) for part, n in zip(parts, pads, strict=True)]),
            torch.cat([pad(part.depth_BT, (0, n), value=-1) for part, n in zip(parts, pads, strict=True)]),
            torch.cat([part.rounds_B for part in parts]),
        )


class _Observed(Canvas):
    """A canvas that looks at the base before each token that it is given."""

    law: DecodeConfig
    source: TokenSource
    decoder: str

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        shape = (len(self.rows_B), max(1, int(self.masked_BL.sum(-1).max())))
        self.value_BTM = torch.zeros(*shape, len(MEASURES), device=self.tokens_BL.device)
        self.depth_BT = torch.full(shape, -1, device=self.tokens_BL.device)
        self._proposed: list[tuple[Tensor, Tensor, Tensor]] = []

    def note_chance(self, row: Tensor, position: Tensor, processed_RV: Tensor, token_R: Tensor) -> None:
        """Keeps what tokens were proposed from, until some of them are committed."""
        if self.config.temperature == 0:
            greedy_RV = torch.full_like(processed_RV, -torch.inf)
            processed_RV = greedy_RV.scatter(-1, token_R[:, None], 0.0)
        self._proposed.append((row.flatten(), position.flatten(), processed_RV))

    def commit(self, picks: Picks) -> None:
        """Measures the tokens one after another, each on the canvas that those before it have made."""
        rank_BN = picks.valid_BN.cumsum(-1) - 1
        goes_BN = picks.valid_BN & (rank_BN < self.quota_B[:, None])
        wanted_BL = torch.zeros_like(self.masked_BL).scatter(1, picks.position_BN, goes_BN)
        number_BL, q_RV = self._what_was_proposed(wanted_BL)
        token_BN = picks.token_BN.clone()
        now = State(self.tokens_BL.clone(), self.real_BL, self.masked_BL.clone(), self.padded)
        for rank in range(int(goes_BN.sum(-1).max())):
            written_BL = (self.order_BL >= 0) | (self.masked_BL & ~now.masked_BL)
            over_B = self.finished(now.tokens_BL, now.masked_BL, written_BL)
            row_R, n_R = (goes_BN & (rank_BN == rank) & ~over_B[:, None]).nonzero(as_tuple=True)
            at = row_R, picks.position_BN[row_R, n_R]
            require(bool((number_BL[at] >= 0).all()), _SILENT.format(self.decoder))
            h_RD = self.base.at(self.base.hidden(now), now, *at)
            p_RV = process(self.base.logits(h_RD, suppress_eos=self.config.suppress_eos), self.law)
            if self.source == "base":
                token_BN[row_R, n_R] = draw(p_RV, self.uniforms(at[1], at[0]), 1.0)
            token_R = token_BN[row_R, n_R]
            commit_R = self.commits_B[row_R] + rank
            self.value_BTM[row_R, commit_R] = measures(q_RV[number_BL[at]], p_RV, token_R)
            self.depth_BT[row_R, commit_R] = commit_R - self._before_B[row_R]
            now.tokens_BL[at], now.masked_BL[at] = token_R, False
        super().commit(replace(picks, token_BN=token_BN))
        self._proposed.clear()

    def _what_was_proposed(self, wanted_BL: Tensor) -> tuple[Tensor, Tensor]:
        """The row of logits [R, V] that belongs to each wanted position, -1 where none does: [B, L].

        A rule proposes for every open position and commits few: only those are copied.
        """
        require(bool(self._proposed), _SILENT.format(self.decoder))
        kept = [(row, position, wanted_BL[row, position], part) for row, position, part in self._proposed]
        rows, positions, logits = zip(*((r[w], at[w], part[w]) for r, at, w, part in kept), strict=True)
        number_BL = torch.full_like(self.tokens_BL, -1)
        row_R, position_R = torch.cat(rows), torch.cat(positions)
        number_BL[row_R, position_R] = torch.arange(len(row_R), device=number_BL.device)
        return number_BL, logits[0] if len(logits) == 1 else torch.cat(logits)


def measures(q_RV: Tensor, p_RV: Tensor, token_R: Tensor) -> Tensor:
    """`MEASURES` of each row, from logits of q and p: fp32 [R, M], in nats."""
    log_q, log_p = q_RV.log_softmax(-1), p_RV.log_softmax(-1)
    parts = (_expected(log_q, log_q - log_p), _expected(log_p, log_p - log_q), -_expected(log_q, log_q),
             -_expected(log_p, log_p), -log_p.gather(-1, token_R[:, None])[:, 0])  # fmt: skip
    return torch.stack(parts, -1)


def _expected(log_RV: Tensor, value_RV: Tensor) -> Tensor:
    """E value under exp(log): what has no chance counts nothing."""
    chance_RV = log_RV.exp()
    return torch.where(chance_RV > 0, chance_RV * value_RV, 0).sum(-1)
