"""What a base is: the frozen model (f, W) seen through one frame; its partner; and the registry that finds it."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adjust_dlm.bases.layers import shift_right
from adjust_dlm.bases.memory import Memory
from adjust_dlm.bases.packed import frozen_linear
from adjust_dlm.bases.tokenizers import chat_ids
from adjust_dlm.checks import Checked, Count, InputError, refusing, require
from adjust_dlm.hub import require_base, require_device
from adjust_dlm.types import OrderOn, OrderRule, State


@dataclass(frozen=True, kw_only=True)
class BaseSpec(Checked):
    """Facts of a base that decoding needs; checked.

    Attributes:
        name: what `load_base` was asked for.
        mask_id: the mask token M; never committed.
        end_ids: tokens that end a text; the first one is written as filler after the end.
        pad_id: id put on left pads (invisible, never scored).
        bos_id: put before an unconditional canvas; None if the family has none.
        vocab_size: V, rows of the head.
        token_limit: ids from here on are padding rows of the head and never real tokens.
        context: longest canvas in tokens; of a block base made a multiple of S.
        order: the family's rule for the next position.
        order_on: whether that rule sees the tempered and filtered distribution.
        block: S, if it writes in blocks of S positions, left to right (see `bases.blocks`); None: a canvas sees itself.
        causal: its blocks see nothing to the right, so they are written from left to right.
    """

    name: str
    mask_id: int
    end_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None
    vocab_size: int
    token_limit: int
    context: int
    order: OrderRule
    order_on: OrderOn
    block: Count | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"base {self.name!r} has causal blocks, so it needs block, and order left_to_right, not {self.order}"
        require(not self.causal or (self.block is not None and self.order == "left_to_right"), wrong)
        object.__setattr__(self, "context", self.context // (self.block or 1) * (self.block or 1))
        ids = {"mask_id": self.mask_id, "pad_id": self.pad_id, "bos_id": self.bos_id or 0}
        ids |= {f"end_ids[{n}]": token for n, token in enumerate(self.end_ids)} | {"last token": self.token_limit - 1}
        odd = {name: token for name, token in ids.items() if not 0 <= token < self.vocab_size}
        require(not odd, f"base {self.name!r} has {odd}; ids run from 0 to {self.vocab_size - 1}")
        require(self.mask_id not in self.end_ids, f"base {self.name!r}: id {self.mask_id} is MASK and an end of texts")

    @property
    def filler_id(self) -> int:
        """What stands behind the end of a text."""
        return self.end_ids[0] if self.end_ids else self.pad_id


class Partner(ABC):
    """An autoregressive model that speaks a base's ids.

    Attributes:
        name: its source.
        fingerprint: hex digest of its weights.
        spec: the base's facts; forbidden tokens are the base's.
    """

    name: str
    fingerprint: str
    spec: BaseSpec

    @abstractmethod
    def read(self, tokens_BN: Tensor, real_BL: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        """States behind each of N more columns: [B, N, D], row n scores the token *after* column n; and a new memory.

        `memory` is what the last call returned (keys and values), None at the start; each is used once. `real_BL` is
        False on left pads, of all L columns read so far and now.
        """

    @abstractmethod
    def head(self, h_RD: Tensor) -> Tensor:
        """Logits [R, v] of states over the partner's own vocabulary."""

    def hidden(self, state: State) -> Tensor:
        """States of a whole canvas in the scoring frame: row i scores the token at i given those before it.

        Masks are never seen by a row left of them; a row right of a mask means nothing. So does the first row of a
        text, which has nothing before it: `require_start` refuses canvases where it would be asked for.
        """
        tokens_BL = state.tokens_BL.masked_fill(state.masked_BL, 0)
        return shift_right(self.read(tokens_BL, state.real_BL)[0], state)

    def at(self, h_BLD: Tensor, state: State, row_R: Tensor, position_R: Tensor) -> Tensor:
        """See `Base.at`."""
        return h_BLD[row_R, position_R]

    def logits(self, h_RD: Tensor, *, suppress_eos: bool = False) -> Tensor:
        """fp32 logits [R, V] over the base's ids: what the base never commits, or the partner lacks, is -inf."""
        own_RV = self.head(h_RD).float()[:, : self.spec.token_limit]
        logits_RV = own_RV.new_full((len(own_RV), self.spec.vocab_size), -torch.inf)
        logits_RV[:, : own_RV.shape[1]] = own_RV
        logits_RV[:, self.spec.mask_id] = -torch.inf
        if suppress_eos:
            logits_RV[:, list(self.spec.end_ids)] = -torch.inf
        return logits_RV

    def require_start(self, state: State) -> None:
        """Raises InputError if the first token of a text is masked: nothing stands before it."""
        first_BL = (state.positions_BL == 0) & state.real_BL & state.masked_BL
        said = f"partner {self.name!r} scores a token given those before it, and a canvas begins with a mask; "
        require(not bool(first_BL.any()), said + "put at least one token (the start token) in front")


class Base(ABC):
    """The frozen model. `hidden` lies in the scoring frame: row i scores the token at position i (see `lag`).

    Attributes:
        spec: the facts above.
        width: D.
        lag: 1 where state i-1 scores token i: block bases of a shifted family, whose states stay at their own columns.
        fingerprint: hex digest of what it was loaded from; a sampler names the base it belongs to.
        head_matrix: W [V, D], frozen.
        layer_config: the shape of one decoder layer of the base (`bases.layers.Shape`).
        tokenizer: any object with transformers' tokenizer interface, or None.
        compiled: whether `compile` was called; decoders then compile their row scores too.
        keep: earlier layers, from 1, whose states stand behind the D columns (see `with_features`).
        quantized: the kind of small weights that were asked for, or None.
        workspace: what a decoder keeps with the base between two calls: buffers and captured graphs.
        ar_source: the autoregressive model that it was made from (see `bases.partner.load_partner`), or None.
    """

    spec: BaseSpec
    width: int
    lag: int = 0
    fingerprint: str
    head_matrix: Tensor
    layer_config: Any
    tokenizer: Any = None
    compiled: bool = False
    keep: tuple[int, ...] = ()
    ar_source: str | None = None
    quantized: str | None = None
    workspace: Any = None

    @abstractmethod
    def hidden(self, state: State) -> Tensor:
        """f: post-final-norm states h_BLD in the scoring frame. Pads are invisible."""

    def hidden_again(self, state: State, memory: Memory, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        """As `hidden`, but only some columns are computed; the others stay as the last pass left them.

        Columns are all different in a row; they stay as they are where `valid_BN` is False. The memory is renewed in
        place; one that holds nothing yet takes a pass over all columns.
        """
        raise InputError(f"base {self.spec.name!r} keeps no keys and values; leave cache_period out")

    def at(self, h_BLD: Tensor, state: State, row_R: Tensor, position_R: Tensor) -> Tensor:
        """The states [..., D or more] that score positions, given by (row index, position index)."""
        if self.lag:
            position_R = position_R - state.positions_BL[row_R, position_R].clamp_max(1)
        return h_BLD[row_R, position_R]

    def by_position(self, h_BLD: Tensor, state: State) -> Tensor:
        """The same for all positions: [B, L, ...]."""
        return shift_right(h_BLD, state) if self.lag else h_BLD

    def hidden_causal(self, state: State) -> Tensor:
        """As `hidden`, but the row of a masked position scores it from what stands left of it alone.

        Raises:
            InputError: the base has no such pass.
        """
        raise InputError(f"base {self.spec.name!r} has no causal pass")

    def head(self, h_RD: Tensor) -> Tensor:
        """W h: logits [R, V] in the base's dtype, nothing forbidden yet; columns behind the first D are not read."""
        return frozen_linear(h_RD[..., : self.width].to(self.head_matrix.dtype), self.head_matrix)

    @abstractmethod
    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Token embeddings e_BLD."""

    def to_frame(self, states_BLD: Tensor, state: State) -> Tensor:
        """Moves rows that stand at their own position into the scoring frame (identity unless shifted)."""
        return states_BLD

    def compile(self) -> None:
        """Compiles f where the base knows how; a base without a compiled form raises."""
        raise InputError(f"base {self.spec.name!r} has no compiled form; run without --compile")

    def with_features(self, layers: tuple[int, ...]) -> Base:
        """A twin whose states carry those of earlier layers behind the D columns, in the same frame; itself for none.

        The twin has the weights, but no workspace.

        Raises:
            InputError: the base has no such layer.
        """
        require(not layers, f"base {self.spec.name!r} gives no states of earlier layers; leave features empty")
        return self

    def partner(self) -> Partner | None:
        """An autoregressive partner that is part of the base itself; None where it is a model of its own."""
        return None

    def reference_schedule(self, masked: int, steps: int) -> list[int]:
        """Commits per step of the family's published loop; the default spreads evenly, first steps first."""
        return [masked // steps + (s < masked % steps) for s in range(steps)]

    def logits(self, h_RD: Tensor, *, suppress_eos: bool = False) -> Tensor:
        """fp32 logits [R, V] with MASK, padding ids and (optionally) end tokens at -inf."""
        return self.forbid(self.head(h_RD).float(), suppress_eos=suppress_eos)

    def plain_logits(self, h_RD: Tensor, *, suppress_eos: bool = False) -> Tensor:
        """The same numbers, in the head's own dtype: half the memory on a card."""
        return self.forbid(self.head(h_RD), suppress_eos=suppress_eos)

    def forbid(self, logits_RV: Tensor, *, suppress_eos: bool = False) -> Tensor:
        """Writes -inf for tokens that are never committed into fresh logits, and returns them."""
        logits_RV[:, self.spec.mask_id] = -torch.inf
        logits_RV[:, self.spec.token_limit :] = -torch.inf
        if suppress_eos:
            for end in self.spec.end_ids:  # a list of ids would have to travel to the device first
                logits_RV[:, end] = -torch.inf
        return logits_RV

    @property
    def device(self) -> torch.device:
        """Where states live: with the head."""
        return self.head_matrix.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of states: the head's."""
        return self.head_matrix.dtype

    def check_length(self, state: State) -> None:
        """Raises InputError for a canvas beyond the context; `hidden` calls it where the model would not complain."""
        length = state.tokens_BL.shape[1] if self.spec.block is None else int(state.real_BL.sum(-1).max())
        require(
            length <= self.spec.context,
            f"canvas of {length} tokens; base {self.spec.name!r} takes at most {self.spec.context}",
        )

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Prompt ids: BOS once in front, or the chat template's own form."""
        if chat:
            return self.encode_messages([{"role": "user", "content": text}])
        require(self.tokenizer is not None, f"base {self.spec.name!r} has no tokenizer; give token ids")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        bos = self.spec.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the chat template's own form, up to where the answer begins.

        Args:
            messages: `role` and `content` of each; control tokens in a content are letters (see `chat_ids`).

        Raises:
            InputError: no tokenizer, no template, or messages that do not fit it.
        """
        require(self.tokenizer is not None, f"base {self.spec.name!r} has no tokenizer; give token ids")
        return chat_ids(self.tokenizer, self.render_messages, messages)

    def render_messages(self, messages: list[dict[str, str]]) -> str:
        """Text of a conversation in the chat template; raises InputError for messages that do not fit it."""
        with refusing(f"the chat template of base {self.spec.name!r} failed", Exception):  # it is a program of its own
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def decode(self, ids: list[int]) -> str:
        """Text of ids up to the first end token, special tokens dropped."""
        require(self.tokenizer is not None, f"base {self.spec.name!r} has no tokenizer; read token ids")
        return self.tokenizer.decode(cut_at_end(ids, self.spec.end_ids), skip_special_tokens=True)


def cut_at_end(ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """The ids before the first end token: what is text, and what is scored."""
    end = next((n for n, token in enumerate(ids) if token in end_ids), len(ids))
    return list(ids[:end])


Loader = Callable[..., Base]


@dataclass(frozen=True)
class _Entry:
    load: Loader
    description: str
    cpu_only: bool


_REGISTRY: dict[str, _Entry] = {}


def register_base(name: str, description: str, *, cpu_only: bool = False) -> Callable[[Loader], Loader]:
    """Decorator: makes `load_base(name)` call the function. One line per base."""

    def add(loader: Loader) -> Loader:
        _REGISTRY[name] = _Entry(loader, description, cpu_only)
        return loader

    return add


def pick_device(name: str) -> torch.device:
    """The device of a `--device` flag; auto: this process's GPU (LOCAL_RANK) or the CPU. InputError for no such one."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    require_device(name)
    count, number = torch.cuda.device_count(), int(name.partition(":")[2] or 0)
    require(name == "cpu" or number < count, f"device is {name!r}; {count} CUDA devices are visible")
    return torch.device(name)


def known_bases() -> dict[str, str]:
    """Names and one-line descriptions."""
    return {name: entry.description for name, entry in sorted(_REGISTRY.items())}


def load_base(
    name_or_path: str, *, device: str | torch.device = "cpu", dtype: torch.dtype | str | None = None, **options: Any
) -> Base:
    """Loads a base by registered name, or by the path or Hub id of its model.

    Args:
        name_or_path: a name from `known_bases()`; a folder that `adjust adapt` wrote (it has `base.json`); or a
            published checkpoint: folder, `.gguf` file or Hub id (see `bases.checkpoint`).
        device: where to put it; "auto" is the GPU if there is one and the base can use it.
        dtype: floating type or its name; fp32 on the CPU and bf16 on a GPU unless given, or for "auto".
        options: passed to the loader (`length=` of the exact base; `quantize=` of smol, an adapted base or a
            checkpoint; `device_map=`, `revision=` of a checkpoint); None is as if not given.

    Raises:
        InputError: the name is unknown, or what is there is not a base; no such device or floating type.
    """
    name_or_path = str(name_or_path)
    if device == "auto" and name_or_path in _REGISTRY and _REGISTRY[name_or_path].cpu_only:
        device = "cpu"
    device = device if isinstance(device, torch.device) else pick_device(str(device))
    kind: Any = None if dtype == "auto" else getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    floats = kind is None or (isinstance(kind, torch.dtype) and kind.is_floating_point)
    require(floats, f"dtype is {dtype!r}; it must be a floating type of torch")
    placed = {"device": device, "dtype": kind or (torch.float32 if device.type == "cpu" else torch.bfloat16)}
    if name_or_path in _REGISTRY:
        return _load(name_or_path, options, placed)
    if Path(name_or_path, "base.json").is_file():
        return _load("adapted", options, {"path": Path(name_or_path), **placed})
    require_base(name_or_path, known_bases())
    return _load("checkpoint", options, {"source": name_or_path, **placed})


def _load(kind: str, options: dict[str, Any], given: dict[str, Any]) -> Base:
    """Calls a loader; options that it does not take are refused by name."""
    options = {name: value for name, value in options.items() if value is not None}
    loader = _REGISTRY[kind].load
    takes = inspect.signature(loader).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    unknown = [] if open_ended else sorted(options.keys() - takes.keys())
    require(not unknown, f"bases of kind {kind!r} do not take {', '.join(unknown)}")
    return loader(**given, **options)


def freeze(module: nn.Module) -> nn.Module:
    """Eval mode, no gradients."""
    return module.eval().requires_grad_(False)
