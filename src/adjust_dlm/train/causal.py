"""Algorithm 2 on causal blocks: all steps of all windows of a text at once.

What a column of text says of the next position does not depend on what stands behind it. So one pass over a finished
text is the teacher of all its positions. A window hides the `rollout` positions behind some commit; step k of g is one
column there (see `decoders.machinery.cache.step_at_columns`): the base's state of MASK at the k-th of them beside the
text's token, seeing g's own keys of the text before the window, and of the window's columns before it.

Shapes beside those of `unroll`: W windows of a text, M = W times rollout columns of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.memory import Memory, at_columns
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.batches import pack, random_start, random_texts
from adjust_dlm.train.unroll import NEVER, Frames, Slices, Step
from adjust_dlm.types import MASKED, State, Trajectory

_MULTIPLE = 16  # of columns: attention lays masks of other widths out anew in every layer


@dataclass
class CausalSlices(Slices):
    """States of texts written from left to right, padded on the right; a row of a state is its next position alone."""

    rollout: int = 1

    @property
    def rank_BL(self) -> Tensor:
        """0 where a state has a next position; [S N, 1]."""
        commits_N = (self.order_NL >= 0).sum(-1)
        return torch.where((self.t_SN >= 0) & (self.t_SN < commits_N), 0, -NEVER).view(-1, 1)

    def frames(self, base: Base) -> Frames:
        """Algorithm 2, lines 3-7: a pass over the texts, and one over the hidden positions beside them."""
        assert isinstance(base, TransformerBase)
        (n, width), k, device = self.tokens_NL.shape, self.rollout, self.tokens_NL.device
        texts, clean = State(self.tokens_NL, self.real_NL, self.order_NL == MASKED), Memory()
        every_NL = torch.arange(width, device=device).expand(n, -1)
        h_NLD = base.hidden_again(texts, clean, every_NL, self.real_NL)
        next_NS = ((self.order_NL == 0).long().argmax(-1) + self.t_SN).T  # column of each state's next position
        cut_NM = next_NS[:, : self.length - k].repeat_interleave(k, -1)
        m_M = torch.arange(cut_NM.shape[1], device=device)
        place_NM = (cut_NM + m_M % k).clamp(0, width - 1)
        own_MM = (m_M // k == m_M[:, None] // k) & (m_M <= m_M[:, None])
        mask = torch.cat([every_NL[:, None] < cut_NM[..., None], own_MM.expand(n, -1, -1)], -1)[:, None]
        h_NMD = base.hidden_beside(torch.full_like(place_NM, base.spec.mask_id), place_NM, clean, mask)

        def by_depth(part_NMD: Tensor) -> list[Tensor]:
            """Of each depth [W N, 1, D]."""
            return [x_WND.flatten(0, 1)[:, None] for x_WND in part_NMD.unflatten(1, (-1, k)).permute(2, 1, 0, 3)]

        def around(g: Sampler) -> Step:
            """All steps are made here: the states and tokens of each are known, and it is asked for by turn alone."""
            keys = g.keys(h_NLD, texts)
            new_NMD = g.beside(h_NMD, self.tokens_NL.gather(1, place_NM), place_NM, keys, mask)
            steps = iter(by_depth(new_NMD))
            return lambda h_BLD, x: next(steps)

        h_NSD = at_columns(h_NLD, (next_NS - 1).clamp(0, width - 1))
        h_BLD = h_NSD.transpose(0, 1).flatten(0, 1)[:, None]
        return Frames(texts, [h_BLD], self.rank_BL, self.text_SN, around, by_depth(h_NMD))


def random_windows(
    trajectories: Sequence[Trajectory], rows: Sequence[int], *, count: int, length: int, rollout: int,
    key: tuple[int, ...], pad_id: int, first: int = 0,
) -> CausalSlices:  # fmt: skip
    """`count` random texts with a random start; arguments are those of `batches.random_slices`, `length` is S."""
    chosen, generators = random_texts(trajectories, rows, count, key, first)
    most = max(x.commits for x in chosen) - 1
    windows = min(length - rollout, -(-most // _MULTIPLE) * _MULTIPLE)
    starts = [random_start(own, x.commits, windows) for own, x in zip(generators, chosen, strict=True)]
    return pack_windows(chosen, starts, windows + rollout, rollout, pad_id)


def pack_windows(
    chosen: Sequence[Trajectory], starts: Sequence[int], length: int, rollout: int, pad_id: int
) -> CausalSlices:
    """Lays texts out; `starts` are the commits before the first state of each."""
    to = -(-max(len(x.tokens_L) for x in chosen) // _MULTIPLE) * _MULTIPLE
    return CausalSlices(**vars(pack(chosen, starts, length, pad_id, pad_to=to, left=False)), rollout=rollout)
