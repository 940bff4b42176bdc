"""Flash attention by runs in plain torch, for machines without a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases import attention


def flash(
    q: Tensor, k: Tensor, v: Tensor, query_E: Tensor, key_E: Tensor, most_q: int, most_k: int,
    dropout: float, is_causal: bool, *_: Any, seqused_k: Tensor,
) -> list[Tensor]:  # fmt: skip
    """`torch.ops.aten._flash_attention_forward`: plain attention of each group of queries to its run of keys.

    Causal: the last query of a group sees all of them, the one before it a key less; who sees none gets zeros.
    """
    assert dropout == 0
    parts = (query_E, key_E, seqused_k)
    assert all(part.dtype == torch.int32 and part.is_contiguous() and part.ndim == 1 for part in parts)
    assert q.dtype == k.dtype == v.dtype
    assert len(query_E) == len(key_E) == len(seqused_k) + 1 and most_q > 1
    edges, starts, counts = (part.tolist() for part in parts)
    assert edges[0] == 0 and edges[-1] == len(q) and sorted(edges) == edges
    share, out = q.shape[1] // k.shape[1], torch.full_like(q, torch.nan)
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    for a, b, start, count in zip(edges, edges[1:], starts, counts, strict=False):
        assert b - a <= most_q and count >= 1 and start // most_k == (start + count - 1) // most_k < len(k) // most_k
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[start : start + count]) / q.shape[-1] ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones(b - a, count).triu(count - (b - a) + 1).bool(), -torch.inf)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v[start : start + count])
    return [out]


def by_runs(patch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Has passes attend by runs, by the above; the list gets the keys and the numbers of keys of every call."""
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *given: Any, **more: Any) -> list[Tensor]:
        seen.append((k, more["seqused_k"]))
        return flash(q, k, v, *given, **more)

    patch.setattr(attention, "_flash", lambda h, shape: True)
    patch.setattr(torch.ops.aten, "_flash_attention_forward", spy)
    return seen
