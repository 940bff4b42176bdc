"""The bidirectional body: RMSNorm, rotary attention, gated MLP, as in Llama, Qwen2 and Qwen3, without a causal mask.

Tensor names are those of the families' checkpoints. transformers' own classes are what the tests compare with; they
are not used here because importing them takes longer than everything else in a start together.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adjust_dlm.bases.attention import Rotary, Seen, attend, fuses, turn, turned, visible
from adjust_dlm.bases.mask_lora import MaskLora
from adjust_dlm.bases.memory import KeepKeys
from adjust_dlm.bases.packed import forget, frozen_linear
from adjust_dlm.bases.shape import Shape
from adjust_dlm.types import State, refusing, require

_PACKED = 1 << 23  # numbers of a matrix that a CPU keeps twice: all of those of a base of half a billion parameters


class Linear(nn.Linear):
    """Without torch's own initialisation: weights are drawn by `_draw_weights` or read from a file."""

    def reset_parameters(self) -> None:
        """Nothing."""

    @staticmethod
    def product(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """W h + b: what a layer of this kind does with its parameters."""
        return F.linear(h, weight, bias)

    def forward(self, h: Tensor) -> Tensor:
        """W h + b."""
        packs = self.weight.is_cpu and self.weight.numel() <= _PACKED
        return (frozen_linear if packs else F.linear)(h, self.weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        forget(self.weight)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """W (silu(gate) * up) + b: [..., D] each to [..., N]."""
        return self(_silu_times(gate, up))


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if fuses(gate):
        from adjust_dlm.kernels.layer import silu_mul

        return silu_mul(gate, up)
    return F.silu(gate) * up


class Embedding(nn.Embedding):
    """As `Linear`."""

    def reset_parameters(self) -> None:
        """Nothing."""


class Norm(nn.Module):
    """RMSNorm: the mean square in fp32, the weight applied in the states' own dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, h_BLD: Tensor) -> Tensor:
        """Same shape."""
        if fuses(h_BLD) and self.weight.dtype == h_BLD.dtype:
            from adjust_dlm.kernels.layer import rms_norm

            return rms_norm(h_BLD, self.weight, self.eps)
        return self.weight * F.rms_norm(h_BLD.float(), self.weight.shape, None, self.eps).to(h_BLD.dtype)

    def after(self, h_BLD: Tensor, more_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and `forward` of it."""
        if fuses(h_BLD) and self.weight.dtype == h_BLD.dtype == more_BLD.dtype:
            from adjust_dlm.kernels.layer import add_rms_norm

            return add_rms_norm(h_BLD, more_BLD, self.weight, self.eps)
        h_BLD = h_BLD + more_BLD
        return h_BLD, self(h_BLD)


class _Joins(nn.Module):
    """Projections of the same states that can be laid side by side in memory, so that one product makes them all."""

    _names: tuple[str, ...]
    lora_in: MaskLora | None
    lora_out: MaskLora | None

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[str, Tensor] | None = None
        self._places: list[int] = []  # of the parts' weights when they were joined

    def join(self) -> None:
        """Lays them so, each a view of its part; nothing for weights that are no plain tensors (torchao's)."""
        parts = [dict(getattr(self, name).named_parameters()) for name in self._names]
        if self._stands() or any(type(part["weight"].data) is not Tensor for part in parts):
            return
        self._joined = {name: torch.cat([part[name].data for part in parts]) for name in parts[0]}
        for name, whole in self._joined.items():
            views = whole.split([len(part[name]) for part in parts])
            for part, view in zip(parts, views, strict=True):
                part[name].data = view
        self._places = self._now()

    def _now(self) -> list[int]:
        return [getattr(self, name).weight.data_ptr() for name in self._names]

    def _stands(self) -> bool:
        """Whether the parts are still views of what was joined, not replaced, copied or given other memory since."""
        return self._joined is not None and (torch.compiler.is_compiling() or self._now() == self._places)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._joined = None  # parameters move one by one
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _project(self, h_BLD: Tensor, text_BL1: Tensor | None) -> list[Tensor]:
        parts = [getattr(self, name) for name in self._names]
        trained = torch.is_grad_enabled() and parts[0].weight.requires_grad  # gradients belong to the parts
        if self._joined is not None and not trained and self._stands():
            whole = parts[0].product(h_BLD, **self._joined)
        elif self.lora_in is None or text_BL1 is None:
            return [part(h_BLD) for part in parts]
        else:
            whole = torch.cat([part(h_BLD) for part in parts], -1)
        if self.lora_in is not None and text_BL1 is not None:
            whole = self.lora_in(whole, h_BLD, text_BL1)
        return list(whole.split([part.out_features for part in parts], -1))

    def _adapt(self, width: int, inner: int, rank: int | None) -> None:
        """Adapters of the projections and of the product behind them."""
        names, outputs = self._names, sum(getattr(self, name).out_features for name in self._names)
        self.lora_in = None if rank is None else MaskLora(width, outputs, len(names) * rank)
        self.lora_out = None if rank is None else MaskLora(inner, width, rank)


class Attention(_Joins):
    """Every position sees every real one."""

    _names = ("q_proj", "k_proj", "v_proj")

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, d = shape.hidden_size, shape.head_dim
        queries, keys = shape.num_attention_heads * d, shape.num_key_value_heads * d
        self.q_proj = Linear(width, queries, bias=shape.qkv_bias)
        self.k_proj = Linear(width, keys, bias=shape.qkv_bias)
        self.v_proj = Linear(width, keys, bias=shape.qkv_bias)
        self.o_proj = Linear(queries, width, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm, self.k_norm = Norm(d, shape.rms_norm_eps), Norm(d, shape.rms_norm_eps)
        self._adapt(width, queries, shape.lora_rank)

    def forward(
        self, h_BLD: Tensor, mask_BHLL: Seen, rotary: tuple[Tensor, Tensor], keep: KeepKeys | None = None,
        text_BL1: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Same shape; `keep` adds the keys and values of before, `text_BL1` is for `MaskLora`.

        A mask broadcasts to [B, heads, L, L] and is False on keys that a query may not see; nothing sees those behind
        its last column.
        """
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in self._project(h_BLD, text_BL1))
        if self.shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, heads, L, d]
        q, k = turned(q, k, *rotary)
        if keep is not None:
            k, v = keep(k, v)
            if isinstance(mask_BHLL, Tensor):
                k, v = (part[:, :, : mask_BHLL.shape[-1]] for part in (k, v))
        mixed_BLD = attend(q, k, v, mask_BHLL)
        out_BLD = self.o_proj(mixed_BLD)
        return out_BLD if self.lora_out is None or text_BL1 is None else self.lora_out(out_BLD, mixed_BLD, text_BL1)

    def keys(self, h_BLD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values alone: [B, heads, L, d] each."""
        k, v = (proj(h_BLD).unflatten(-1, (-1, self.shape.head_dim)) for proj in (self.k_proj, self.v_proj))
        k = self.k_norm(k) if self.shape.qk_norm else k
        return turn(k.transpose(1, 2), *rotary), v.transpose(1, 2)


class Mlp(_Joins):
    """down(silu(gate) * up)."""

    _names = ("gate_proj", "up_proj")

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)
        self._adapt(width, inner, shape.lora_rank)

    def forward(self, h_BLD: Tensor, text_BL1: Tensor | None = None) -> Tensor:
        """Same shape."""
        gate, up = self._project(h_BLD, text_BL1)
        if self.lora_out is None or text_BL1 is None:
            return self.down_proj.gated(gate, up)
        inner = _silu_times(gate, up)
        return self.lora_out(self.down_proj(inner), inner, text_BL1)


class Layer(nn.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, h_BLD: Tensor, mask_BHLL: Seen, rotary: tuple[Tensor, Tensor], keep: KeepKeys | None = None,
        text_BL1: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Same shape."""
        mixed_BLD = self.self_attn(self.input_layernorm(h_BLD), mask_BHLL, rotary, keep, text_BL1)
        h_BLD, normed_BLD = self.post_attention_layernorm.after(h_BLD, mixed_BLD)
        return h_BLD + self.mlp(normed_BLD, text_BL1)


class _WithRotary(nn.Module):
    """Moves its rotary frequencies with its weights, but never casts them."""

    rotary: Rotary

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.rotary.to(next(self.parameters()).device)
        return self


def join_projections(model: nn.Module) -> None:
    """See `_Joins.join`, for all layers; the same numbers, up to rounding, from fewer and larger products."""
    for part in model.modules():
        if isinstance(part, _Joins):
            part.join()


def _call_layer(layer: nn.Module, h_BLD: Tensor, mask_BHLL: Seen, rotary: tuple[Tensor, Tensor]) -> Tensor:
    return layer(h_BLD, mask_BHLL, rotary)


@functools.cache
def _compiled_layer() -> Any:
    """One compiled function for the layers of all bodies and for all batch sizes and lengths.

    A shape of layer has four graphs (one row or several, pads or none). Past torch's limit of eight a base with a g of
    another shape would go on without any, and say so in a log at most.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    return torch.compile(_call_layer, dynamic=True)


class Body(_WithRotary):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        """Matrices hold nothing yet: see `new_model` and `read_model`."""
        super().__init__()
        self.config = shape
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape)
        self.mask_id: int | None = None  # of the base; for `MaskLora`

    def forward(
        self, tokens_BN: Tensor, sees: Seen, positions_BN: Tensor, *,
        remember: Callable[[int], KeepKeys] | None = None, keep: tuple[int, ...] = (), compiled: bool = False,
    ) -> Tensor:  # fmt: skip
        """Post-final-norm states [B, N, D], row i at position i.

        Args:
            tokens_BN: ids of the columns to compute: all, unless others are remembered.
            sees: what they see, see `visible`.
            positions_BN: 0 on the first real token.
            remember: what each layer does with its keys and values, to see those of other columns.
            compiled: call the layers compiled: the first pass takes 10-30 s, other shapes none. Not with `remember`.
            keep: numbers of layers, from 1, whose states follow behind the D columns: [B, N, (1 + len(keep)) D].
        """
        h_BND = self.embed_tokens(tokens_BN)
        rotary = self.rotary(positions_BN, h_BND.dtype)
        kept: list[Tensor] = []
        call = _compiled_layer() if compiled else _call_layer
        text_BN1 = None
        if self.config.lora_rank is not None:
            assert self.mask_id is not None, "adapters of masks need the id of MASK, which a base gives"
            text_BN1 = (tokens_BN != self.mask_id)[..., None]
        for n, layer in enumerate(self.layers):
            if remember is not None or text_BN1 is not None:
                h_BND = layer(h_BND, sees, rotary, None if remember is None else remember(n), text_BN1)
            else:
                h_BND = call(layer, h_BND, sees, rotary)
            if n + 1 in keep:
                kept.append(h_BND)
        return torch.cat([self.norm(h_BND), *kept], -1) if keep else self.norm(h_BND)


def _draw_weights(module: nn.Module, std: float) -> None:
    """The families' initialisation: normal matrices, adapters among them, and zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, MaskLora):
            nn.init.normal_(part.down, std=std)
            nn.init.normal_(part.up, std=std)


def new_model(config: Any) -> Body:
    """A randomly initialised body of a config (see `Shape.of`)."""
    shape = Shape.of(config)
    body = Body(shape)
    _draw_weights(body, shape.initializer_range)
    return body


def read_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, block: int | None = None, causal: bool = False,
    lora_rank: int | None = None,
) -> Body:  # fmt: skip
    """The body in a folder with `config.json` and one `model.safetensors`: strict; see `Shape.of`.

    Raises:
        InputError: unreadable or truncated file; a missing, extra, misshapen or integer tensor, by name.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with refusing(f"cannot load the model in {folder}", OSError, ValueError, SafetensorError, RuntimeError):
        with torch.device("meta"):
            config = json.loads((folder / "config.json").read_text())
            body = Body(replace(Shape.of(config, block, causal=causal), lora_rank=lora_rank))
        weights = load_file(folder / "model.safetensors", device=str(device))
        odd = [f"{name} is {w.dtype}" for name, w in weights.items() if not w.is_floating_point() or w.itemsize < 2]
        require(not odd, f"{', '.join(odd[:3])}; weights must be floats of 16 bits or more")
        body.load_state_dict({name: w.to(dtype) for name, w in weights.items()}, assign=True)
        body.rotary.to(device)
    return body


class BidirectionalLayer(_WithRotary):
    """One layer of the base's own shape, with its rotary embedding: the body of g."""

    def __init__(self, config: Any) -> None:
        """Fresh weights with the family's own initialiser range."""
        super().__init__()
        shape = Shape.of(config)
        self.layer, self.rotary, self.compiled = Layer(shape), Rotary(shape), False
        _draw_weights(self.layer, shape.initializer_range)

    def forward(self, z_BLD: Tensor, state: State) -> Tensor:
        """Same shape out; pads are invisible as keys."""
        sees = visible(state, z_BLD, self.layer.self_attn.shape, masks=self.compiled)
        rotary = self.rotary(state.positions_BL, z_BLD.dtype)
        return (_compiled_layer() if self.compiled else _call_layer)(self.layer, z_BLD, sees, rotary)

    def beside(self, z_BND: Tensor, positions_BN: Tensor, sees: Seen, keep: KeepKeys) -> Tensor:
        """As `forward`, for columns that see others' keys, which `keep` knows, as told."""
        return self.layer(z_BND, sees, self.rotary(positions_BN, z_BND.dtype), keep)

    def keys(self, z_BLD: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The keys and values that `forward` would make of z: [B, heads, L, d] each."""
        normed_BLD = self.layer.input_layernorm(z_BLD)
        return self.layer.self_attn.keys(normed_BLD, self.rotary(state.positions_BL, z_BLD.dtype))


def shift_right(states_BLD: Tensor, state: State) -> Tensor:
    """Dream's frame: row i takes state i-1; each row's first real position keeps its own."""
    shifted = torch.roll(states_BLD, 1, dims=1)
    return torch.where((state.positions_BL == 0)[..., None], states_BLD, shifted)
