"""Negative log-likelihood of texts under an autoregressive judge.

The rule, the same for every text: it is conditioned on one start id and on the prompt that it continues, so each of
its tokens is scored, and the score is the mean over all scored tokens of all texts (not a mean of per-text means).

Shape suffixes: N texts, S bootstrap resamples, B rows, L positions, R scored rows, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adjust_dlm.bases import Base, Partner
from adjust_dlm.bases.partner import last_hidden, output_embedding, require_causal, require_plain_head
from adjust_dlm.types import State, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Tokens = Sequence[Sequence[int]]

RESAMPLES = 1000
LOGITS_AT_ONCE = 2**25  # fp32 logits held at a time by the head: 128 MiB


@dataclass(frozen=True)
class NllScore:
    """The NLL of a set of texts, in nats per token.

    Attributes:
        nll: sum of all token NLLs / number of scored tokens.
        ci95: half-width of the 95 % bootstrap interval over texts; nan for a single text, which has no spread.
        n_texts: texts with at least one token.
        n_empty: texts without a token: counted, not scored.
        n_tokens: scored tokens.
        sum_nll_N: NLL of each given text, in the given order; 0 for an empty one.
        tokens_N: scored tokens of each given text.
    """

    nll: float
    ci95: float
    n_texts: int
    n_empty: int
    n_tokens: int
    sum_nll_N: Floats
    tokens_N: Ints


def score_nll(
    model: PreTrainedModel, token_lists: Tokens, *, condition_id: int, batch_size: int, given: Tokens | None = None
) -> NllScore:
    """Scores token lists with a causal LM; the result does not depend on `batch_size` beyond rounding.

    Args:
        model: any causal LM of transformers, in eval mode. Its dtype and device are those of the passes;
            the log-softmax is fp32, the sums are fp64.
        token_lists: N lists of the judge's token ids, without end tokens and pads (see `cut_at_end`).
        condition_id: the id put before every text, such as that of `<|endoftext|>`; not scored itself.
        batch_size: texts per pass.
        given: ids between `condition_id` and each text, which are not scored; none by default.

    Raises:
        InputError: nothing to score, ids the judge does not have, a text beyond its context, a model that
            is not causal or whose logits are not its output embedding times its last hidden state.
    """
    require(batch_size >= 1, f"batch_size is {batch_size}; it must be at least 1")
    require(any(token_lists), f"none of the {len(token_lists)} texts has a token to score")
    fronts = [[condition_id, *ids] for ids in given or [[]] * len(token_lists)]
    require_ids(model, [[*front, *ids] for front, ids in zip(fronts, token_lists, strict=True)])
    require_plain_head(model, require_causal(model, condition_id, model.device))
    tokens_N = np.array([len(ids) for ids in token_lists], dtype=np.int64)
    sum_nll_N = np.zeros(len(token_lists))
    for rows, ids_BL, real_BL in right_padded(token_lists, batch_size, model.device, fronts):
        sum_nll_N[rows] = _sum_nll(model, ids_BL, real_BL).numpy()
    return summarize(sum_nll_N, tokens_N)


def summarize(sum_nll_N: npt.ArrayLike, tokens_N: npt.ArrayLike) -> NllScore:
    """Token mean and its interval from per-text sums; texts with 0 tokens are counted and left out."""
    sums_N, counts_N = np.asarray(sum_nll_N, np.float64), np.asarray(tokens_N, np.int64)
    full_N = counts_N > 0
    require(bool(full_N.any()), f"none of the {len(counts_N)} texts has a token to score")
    resampled = _resample(np.stack([sums_N[full_N], counts_N[full_N]], axis=1))
    n_texts, n_tokens = int(full_N.sum()), int(counts_N.sum())
    ci95 = _half_width(resampled[:, 0] / resampled[:, 1]) if n_texts > 1 else math.nan
    nll = float(sums_N.sum() / n_tokens)
    return NllScore(nll, ci95, n_texts, len(counts_N) - n_texts, n_tokens, sums_N, counts_N)


def gap_closed(joint: NllScore, parallel: NllScore, adjust: NllScore) -> dict[str, float | None]:
    """Share of the NLL gap between parallel and joint decoding that ADJUST closes, and its 95 % half-width.

    (parallel - adjust) / (parallel - joint); None where parallel text does not score worse than joint beyond both
    intervals. The sets are resampled together, text i of one with text i of the others: they have the same prompt and
    row id.
    """
    if parallel.nll - parallel.ci95 <= joint.nll + joint.ci95 or parallel.nll == joint.nll:
        return {"gap_closed": None, "gap_closed_ci95": None}
    resampled = _resample(np.stack([x for s in (joint, parallel, adjust) for x in (s.sum_nll_N, s.tokens_N)], axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample of empty texts only has no NLL
        joint_S, parallel_S, adjust_S = (resampled[:, 0::2] / resampled[:, 1::2]).T
        share_S = (parallel_S - adjust_S) / (parallel_S - joint_S)
    several = min(s.n_texts for s in (joint, parallel, adjust)) > 1
    half = _half_width(share_S[~np.isnan(share_S)]) if several else math.nan
    return {"gap_closed": (parallel.nll - adjust.nll) / (parallel.nll - joint.nll), "gap_closed_ci95": half}


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


def right_padded(
    token_lists: Tokens, batch_size: int, device: torch.device | str, fronts: Tokens | None = None
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Batches of non-empty texts of similar length, longest first (so memory peaks at once, not at the end).

    Pads stand on the right, where causal attention keeps them out of every real token's past, and need no mask.

    Yields:
        The texts' indices, int64 ids [B, L] with what stands in front of each, and bool [B, L]: True on the text's
        own tokens, False on what stands in front and on pads.
    """
    fronts = fronts or [[]] * len(token_lists)
    whole = [[*front, *ids] for front, ids in zip(fronts, token_lists, strict=True)]
    by_length = sorted((i for i, ids in enumerate(token_lists) if len(ids)), key=lambda i: -len(whole[i]))
    for first in range(0, len(by_length), batch_size):
        rows = by_length[first : first + batch_size]
        longest = len(whole[rows[0]])
        # The pad is any valid id: nothing it produces is ever read.
        ids = [whole[i] + [0] * (longest - len(whole[i])) for i in rows]
        real = [[len(fronts[i]) <= j < len(whole[i]) for j in range(longest)] for i in rows]
        yield rows, torch.tensor(ids, device=device), torch.tensor(real, device=device)


def require_ids(model: PreTrainedModel, token_lists: Tokens) -> None:
    """Raises `InputError` on ids outside the judge's vocabulary and on texts longer than its context."""
    vocabulary = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    context = getattr(model.config, "max_position_embeddings", None) or math.inf
    for i, ids in enumerate(token_lists):
        wrong = [token for token in ids if not 0 <= token < vocabulary]
        require(not wrong, f"text {i} has token id {wrong[:1]}; the judge knows 0..{vocabulary - 1}")
        require(len(ids) <= context, f"text {i} takes {len(ids)} positions; the judge has {context}")


@torch.inference_mode()
def _sum_nll(model: PreTrainedModel, ids_BL: Tensor, real_BL: Tensor) -> Tensor:
    """Per-row NLL [B] in fp64 on the CPU; `real_BL` marks the tokens that are scored, never column 0."""
    target_BL, scored_BL = ids_BL[:, 1:], real_BL[:, 1:]
    hidden_RD = last_hidden(model, ids_BL[:, :-1])[scored_BL]
    target_R = target_BL[scored_BL]
    head = output_embedding(model)
    rows = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
    nll_R = [
        F.cross_entropy(head(h_RD).float(), t_R, reduction="none")
        for h_RD, t_R in zip(torch.split(hidden_RD, rows), torch.split(target_R, rows), strict=True)
    ]
    # Scattered back and summed along the row: unlike index_add, the same order of additions every time.
    nll_BL = torch.zeros(target_BL.shape, dtype=torch.float64, device=ids_BL.device)
    nll_BL[scored_BL] = torch.cat(nll_R).double()
    return nll_BL.sum(-1).cpu()


def _resample(stats_NM: Floats) -> Floats:
    """Bootstrap over texts: column sums [S, M] of `RESAMPLES` draws of N rows with replacement."""
    n = len(stats_NM)
    times_SN = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return np.asarray(times_SN @ stats_NM)


def _half_width(values_S: Floats) -> float:
    low, high = np.percentile(values_S, [2.5, 97.5])
    return float(high - low) / 2
