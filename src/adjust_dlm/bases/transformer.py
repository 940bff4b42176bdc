"""A base made of a bidirectional body and a head: everything the families share."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adjust_dlm.bases.attention import causal_mask, visible
from adjust_dlm.bases.base import Base, BaseSpec, freeze
from adjust_dlm.bases.blocks import block_mask, to_edge
from adjust_dlm.bases.layers import shift_right
from adjust_dlm.bases.memory import KeepKeys, Memory, apart, side_by_side
from adjust_dlm.types import State, require

_SHAPE_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "rms_norm_eps",
)  # fmt: skip
_ROWS = 16  # of every matrix, for the fingerprint
EMBEDDING = "embed_tokens.weight"


class TransformerBase(Base):
    """f = model, W = head weight; `next_frame` says that state i-1 scores token i (Dream)."""

    model: Any

    def __init__(
        self, model: nn.Module, head_weight: Tensor, spec: BaseSpec, *, next_frame: bool, tokenizer: Any = None,
        fingerprint: str | None = None,
    ) -> None:  # fmt: skip
        """Wraps a body without its head (see `bases.layers`); `head_weight` [V, D] is the embedding itself when tied.

        `next_frame` moves states right by one into the scoring frame; with blocks, `lag` is 1 instead. The fingerprint
        is a digest of the source files, or computed from the weights when not given.
        """
        self.model = freeze(model)
        self.head_matrix = head_weight.detach()
        self.spec, self.next_frame, self.tokenizer = spec, next_frame, tokenizer
        self.layer_config = self.model.config
        if getattr(self.layer_config, "lora_rank", None) is not None:
            known = self.model.mask_id
            require(known in (None, spec.mask_id), f"mask_id is {spec.mask_id}; the body's adapters are for {known}")
            self.model.mask_id = spec.mask_id
        for name in ("block", "causal"):
            said, built = getattr(spec, name), getattr(self.layer_config, name)
            require(said == built, f"{name} is {said}; the body has {built}")
        self.lag = int(next_frame and spec.block is not None)
        require(
            self.lag == 1 or not spec.causal, f"next_frame is {next_frame}; in causal blocks state i-1 scores token i"
        )
        self.width = self.model.config.hidden_size
        self.fingerprint = fingerprint or weights_fingerprint(self.model, self.head_matrix, spec.mask_id)

    def compile(self) -> None:
        """Compiles one layer for all layers, batch sizes and lengths, when it is first called (10-30 s)."""
        require(self.spec.block is None, f"base {self.spec.name!r} writes in blocks; its passes have no compiled form")
        self.compiled = True

    def with_features(self, layers: tuple[int, ...]) -> Base:
        """See `Base.with_features`."""
        if layers == self.keep:
            return self
        most = self.layer_config.num_hidden_layers - 1
        good = all(1 <= n <= most for n in layers) and list(layers) == sorted(set(layers))
        require(good, f"features are {layers}; base {self.spec.name!r} has layers 1..{most} below its last, ascending")
        twin = copy.copy(self)
        twin.keep, twin.workspace = layers, None
        return twin

    @torch.no_grad()
    def hidden(self, state: State) -> Tensor:
        """See `Base.hidden`."""
        self.check_length(state)
        size, length = self.spec.block, state.tokens_BL.shape[1]
        whole = state if size is None else to_edge(state, size, self.spec.mask_id)
        sees = visible(whole, self.head_matrix, self.layer_config, masks=self.compiled)
        h_BLD = self.model(whole.tokens_BL, sees, whole.positions_BL, keep=self.keep, compiled=self.compiled)
        return self.to_frame(h_BLD[:, :length], state)

    @torch.no_grad()
    def hidden_causal(self, state: State) -> Tensor:
        """See `Base.hidden_causal`: one pass under a causal attention mask, which the model was not trained with."""
        self.check_length(state)
        sees = causal_mask(state.tokens_BL, state.real_BL[:, None, None] if state.padded else None)
        h_BLD = self.model(state.tokens_BL, sees, state.positions_BL, keep=self.keep, compiled=self.compiled)
        return self.to_frame(h_BLD, state)

    @torch.no_grad()
    def hidden_again(self, state: State, memory: Memory, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        """See `Base.hidden_again`; the states that are remembered are those before the frame."""
        states_BLD = self.renew(state, memory, column_BN, valid_BN)
        framed_BLD = self.to_frame(states_BLD, state)
        return states_BLD.clone() if framed_BLD is states_BLD else framed_BLD

    @torch.no_grad()
    def renew(self, state: State, memory: Memory, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        """`hidden_again`, but the states [B, L, D or more] before the frame, where they stand in the memory."""
        sees = visible(state, self.head_matrix, self.layer_config, column_BN, valid_BN, memory.seen)
        tokens_BN, place_BN = (part_BL.gather(1, column_BN) for part_BL in (state.tokens_BL, state.positions_BL))
        remember = functools.partial(memory.keep, column_BN=column_BN, valid_BN=valid_BN)
        h_BND = self.model(tokens_BN, sees, place_BN, remember=remember, keep=self.keep)
        return memory.write(len(self.model.layers), h_BND, column_BN, valid_BN)

    @torch.no_grad()
    def hidden_drafts(
        self, state: State, memory: Memory, column_BN: Tensor, valid_BN: Tensor, token_BJS: Tensor, place_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`hidden_again` of a block base, and in the same pass J other fillings of each row's open block.

        A filling sees itself and the blocks before, and leaves nothing in the memory. The state comes with its surplus
        columns; `place_BS` are those of the open block. States [B, L, D] of the memory's columns, and [B, J, S, D].
        """
        size, count, seen, views = self.spec.block or 1, column_BN.shape[1], memory.seen, token_BJS.shape[1]
        every_BN = torch.cat([column_BN, place_BS.repeat(1, views)], 1)
        tokens_BN = torch.cat([state.tokens_BL.gather(1, column_BN), token_BJS.flatten(1)], 1)
        own_BNL = block_mask(state, self.layer_config.sees, every_BN)[:, 0, :, :seen]
        own_BNL[:, count:] &= (torch.arange(own_BNL.shape[2], device=every_BN.device) < place_BS[:, :1])[:, None]
        view_N = torch.arange(views * size, device=every_BN.device) // size
        # Numbers, in rows that are a multiple of 16 long: attention would make them of a mask once in every layer.
        length = own_BNL.shape[2] + len(view_N)
        own_NN = view_N[:, None] == view_N[None]
        seen_NM = F.pad(own_NN.tril() if self.spec.causal else own_NN, (0, -length % 16, count, 0))
        bias_BNM = torch.cat([own_BNL, seen_NM.expand(len(every_BN), -1, -1)], 2).to(self.dtype).log()[..., :length]

        def remember(n: int) -> KeepKeys:
            def joined(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                new = side_by_side(k, v)
                known = memory.write(n, new[:, :count], column_BN, valid_BN)[:, :seen]
                return apart(torch.cat([known, new[:, count:]], 1), k.shape[-1])

            return joined

        place_BN = state.positions_BL.gather(1, every_BN)
        h_BND = self.model(tokens_BN, bias_BNM[:, None], place_BN, remember=remember, keep=self.keep)
        states_BLD = memory.write(len(self.model.layers), h_BND[:, :count], column_BN, valid_BN)
        return states_BLD.clone(), h_BND[:, count:].unflatten(1, (views, size))

    @torch.no_grad()
    def hidden_beside(self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, mask_BHNM: Tensor) -> Tensor:
        """States [B, N, D or more] of columns that stand behind those of a memory, which stay as they are.

        Args:
            tokens_BN: their ids; the rows are those of the memory, once or several times over.
            positions_BN: rotary positions.
            memory: of a pass of `hidden_again`.
            mask_BHNM: False on what a column may not see of both, the memory's first.
        """
        return self.model(tokens_BN, mask_BHNM, positions_BN, remember=memory.beside, keep=self.keep)

    def to_frame(self, states_BLD: Tensor, state: State) -> Tensor:
        """See `Base.to_frame`."""
        return shift_right(states_BLD, state) if self.next_frame and not self.lag else states_BLD

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """See `Base.embed`."""
        return self.model.embed_tokens(tokens_BL).to(self.device)  # a spread model keeps the table elsewhere


def sampled_rows(weight: Tensor, also: int | None = None) -> Tensor:
    """What of a tensor goes into a fingerprint, bf16 on the CPU: a vector, or some rows of a matrix and row `also`."""
    rows = weight if weight.ndim == 1 else weight[:: max(1, len(weight) // _ROWS)]
    if also is not None:
        rows = torch.cat([rows, weight[also : also + 1]])
    return rows.detach().to("cpu", torch.bfloat16).contiguous()


def fingerprint_of(shape: Any, rows: Mapping[str, Tensor]) -> str:
    """Digest of shape facts and of the sampled rows of every tensor, by name.

    The same for shards and single files and, where the rows were taken before a cast, for every dtype. Adapters change
    neither norms nor most embeddings, so every matrix is looked at.
    """
    facts = [getattr(shape, f) for f in _SHAPE_FIELDS] + ([] if shape.block is None else ["block", shape.block])
    facts += ["causal"] if shape.causal else []
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name in sorted(rows):
        digest.update(f"{name} {tuple(rows[name].shape)}".encode())
        digest.update(rows[name].view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: Any, head_weight: Tensor, mask_id: int) -> str:
    """The fingerprint of weights in memory."""
    named = [*model.named_parameters(), ("lm_head.weight", head_weight)]
    rows = {name: sampled_rows(w, mask_id if name == EMBEDDING else None) for name, w in named}
    return fingerprint_of(model.config, rows)
