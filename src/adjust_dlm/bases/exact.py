"""A base whose joint is known and small enough to enumerate: the ground truth of every proof.

Its hidden state of a masked position is the exact conditional log-marginal given the revealed tokens,
its head reads that off, so one token per pass samples p* exactly, by construction.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import Base, BaseSpec, Partner, register_base
from adjust_dlm.bases.shape import Shape
from adjust_dlm.checks import MOST, Bound, Count, require, require_value
from adjust_dlm.sampling import wrapped
from adjust_dlm.types import OrderRule, State

_FLOOR = -60.0  # log of "impossible": exp(-60) is below any 32-bit uniform


class ExactBase(Base):
    """A table p over all strings of `length` tokens from a vocabulary of `words`; the mask is id `words`.

    Args:
        joint: non-negative table with `length` axes of size `words`; normalised here.
        width: D >= words + 1 (extra dimensions are zero and give a sampler room).
        end_ids: token ids that end a text, none by default.
        order: rule for the next position.
        block: S, if a position sees its own block of S and those before it alone; the law stays the table's.
        shifted: with blocks: state i-1 scores token i, so a block's first is drawn without seeing the block. The first
            token of all must then be given.
    """

    def __init__(
        self, joint: Tensor, *, width: int = 32, end_ids: tuple[int, ...] = (), order: OrderRule = "entropy",
        block: int | None = None, shifted: bool = False,
    ) -> None:  # fmt: skip
        words, length = joint.shape[0], joint.ndim
        require(joint.shape == (words,) * length, f"joint has shape {tuple(joint.shape)}; all axes must be equal")
        require(bool((joint >= 0).all() and joint.sum() > 0), "joint must be non-negative with a positive sum")
        require_value("width", width, Annotated[int, Bound(words + 1, MOST, f"at least {words + 1}")])
        self.joint = joint.double() / joint.double().sum()
        self.words, self.length, self.width = words, length, width
        self.strings_NL = self.joint.nonzero()
        self.p_N = self.joint[tuple(self.strings_NL.T)]
        self.head_matrix = torch.eye(words + 1, width)
        self.spec = BaseSpec(
            name="exact", mask_id=words, end_ids=end_ids, pad_id=0, bos_id=None, vocab_size=words + 1,
            token_limit=words + 1, context=length, order=order, order_on="processed", block=block,
        )  # fmt: skip
        require(block is not None or not shifted, "shifted is true without blocks; set block too")
        require(block is None or length % block == 0, f"block is {block}; it must divide the {length} tokens")
        self.lag = int(shifted)
        table = hashlib.sha256(self.joint.float().numpy().tobytes()).hexdigest()
        blocks = "" if block is None else f"-block-{block}{'-shifted' * shifted}"
        self.fingerprint = f"exact-{words}-{length}-{width}-{table}{blocks}"
        self.layer_config = Shape.of({
            "model_type": "llama", "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 1,
            "num_attention_heads": 4, "vocab_size": 8,
        }, block)  # fmt: skip

    def marginals(self, tokens_BL: Tensor) -> Tensor:
        """p(x_i | revealed) for every position, float64 [B, L, words]; the mask id is "not revealed".

        Tokens that cannot stand together (parallel decoding commits such) are conditioned on as far as
        possible: the strings that agree with most of them count.
        """
        masked_BL = tokens_BL == self.spec.mask_id
        agree_BN = ((self.strings_NL == tokens_BL[:, None]) | masked_BL[:, None]).sum(-1)
        weight_BN = torch.where(agree_BN == agree_BN.amax(-1, keepdim=True), self.p_N, 0)
        onehot_NLV = torch.nn.functional.one_hot(self.strings_NL, self.words).double()
        return torch.einsum("bn,nlv->blv", weight_BN / weight_BN.sum(-1, keepdim=True), onehot_NLV)

    def hidden(self, state: State) -> Tensor:
        """Exact conditional log-marginals in the first `words` dimensions, zeros behind."""
        self.check_length(state)
        size = self.spec.block
        if size is None:
            return self._states(self.marginals(state.tokens_BL))
        require(not self.lag or not bool(state.masked_BL[:, 0].any()), "a shifted exact base must be given token 0")
        column_L = torch.arange(self.length)
        parts = []
        for first in range(0, self.length, size):
            seen_BL = state.tokens_BL.masked_fill(column_L >= first + size, self.spec.mask_id)
            parts.append(self.marginals(seen_BL).roll(-self.lag, 1)[:, first : first + size])
        return self._states(torch.cat(parts, 1))

    def hidden_causal(self, state: State) -> Tensor:
        """Row i is the exact log p(x_i | revealed left of i)."""
        self.check_length(state)
        tokens_BL = state.tokens_BL
        columns = torch.arange(tokens_BL.shape[1])
        rows = [self.marginals(tokens_BL.masked_fill(columns >= i, self.spec.mask_id))[:, i] for i in columns]
        return self._states(torch.stack(rows, dim=1).roll(-self.lag, 1))

    def _states(self, p_BLV: Tensor) -> Tensor:
        h_BLD = torch.zeros(*p_BLV.shape[:2], self.width)
        h_BLD[..., : self.words] = p_BLV.log().clamp_min(_FLOOR).float()
        return h_BLD

    def check_length(self, state: State) -> None:
        """Raises InputError unless the canvas is as long as the strings of the joint, without padding."""
        require(
            bool(state.real_BL.all()) and state.tokens_BL.shape[1] == self.length,
            f"the exact base takes canvases of exactly {self.length} tokens without padding",
        )

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """One-hot embeddings."""
        return self.head_matrix[tokens_BL]

    def partner(self) -> ExactPartner:
        """The same law, left to right."""
        return ExactPartner(self)


class ExactPartner(Partner):
    """The true p(x_i | x_<i) of an `ExactBase`: an autoregressive model of the very same law."""

    def __init__(self, base: ExactBase) -> None:
        self.base, self.spec, self.name, self.fingerprint = base, base.spec, "exact", base.fingerprint

    def read(self, tokens_BN: Tensor, real_BL: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        """States are log p(next | prefix); the memory is the prefix."""
        start = 0 if memory is None else memory.shape[1]
        tokens_BL = tokens_BN if memory is None else torch.cat([memory, tokens_BN], dim=1)
        states = [self._after(tokens_BL[:, : n + 1]) for n in range(start, tokens_BL.shape[1])]
        return torch.stack(states, dim=1), tokens_BL

    def _after(self, prefix_BN: Tensor) -> Tensor:
        """[B, words]; zeros behind the last column."""
        masks_BL = torch.full((len(prefix_BN), self.base.length), self.spec.mask_id)
        masks_BL[:, : prefix_BN.shape[1]] = prefix_BN
        at = min(prefix_BN.shape[1], self.base.length - 1)
        return self.base.marginals(masks_BL)[:, at].log().clamp_min(_FLOOR).float()

    def hidden(self, state: State) -> Tensor:
        """As for any partner, and the first row is p(x_0): an exact law needs no start token."""
        h_BLD = super().hidden(state)
        h_BLD[:, 0] = self.base.marginals(torch.full_like(state.tokens_BL, self.spec.mask_id))[:, 0].log().float()
        return h_BLD

    def head(self, h_RD: Tensor) -> Tensor:
        """States are the logits."""
        return h_RD

    def require_start(self, state: State) -> None:
        """Any canvas will do."""


@register_base("exact", "enumerable toy with a known joint (proofs and tutorials)", cpu_only=True)
def load_exact(
    *, device: torch.device, dtype: torch.dtype, words: int = 4, length: int = 4, seed: int = 0, width: int = 32,
    end_ids: tuple[int, ...] = (), order: OrderRule = "entropy", block: int | None = None, shifted: bool = False,
) -> ExactBase:  # fmt: skip
    """A seeded random joint, Dirichlet(0.3) over all strings; what follows `seed` is as in `ExactBase`.

    Raises:
        InputError: another device or dtype, a bad value, or more than 1,000,000 strings.
    """
    require(device.type == "cpu" and dtype == torch.float32, "the exact base runs on the CPU in float32")
    require_value("seed", seed, int)
    require_value("words", words, Annotated[int, Bound(2, MOST, "at least 2")])
    require_value("length", length, Count)
    few = length <= 20 and words**length <= 1_000_000  # 2**20 are too many
    require(few, f"{words}**{length} strings are too many to enumerate (1,000,000 at most)")
    generator = torch.Generator().manual_seed(wrapped(seed))
    gamma = torch._standard_gamma(torch.full((words**length,), 0.3), generator=generator)
    table = gamma.reshape((words,) * length)
    return ExactBase(table, width=width, end_ids=end_ids, order=order, block=block, shifted=shifted)
