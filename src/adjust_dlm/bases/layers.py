"""Bidirectional transformers classes: the whole model for f, one layer of it for g.

transformers' Llama and Qwen2 classes are causal unless `config.is_causal` is False; with no padding mask
their attention falls back to each module's own flag, so that is set as well (a test looks at both).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adjust_dlm.types import InputError, State


def bidirectional(config: Any) -> Any:
    """A copy of a transformers config whose models see both ways."""
    config = copy.deepcopy(config)
    config.is_causal = False
    config.use_cache = False
    if config._attn_implementation is None:
        config._attn_implementation = "sdpa"
    return config


def see_both_ways(module: nn.Module) -> nn.Module:
    """Clears the causal flag of every attention module below `module`."""
    for part in module.modules():
        if hasattr(part, "is_causal"):
            part.is_causal = False  # type: ignore[assignment]
    return module


def _classes(config: Any) -> tuple[Any, Any, Any]:
    """(model class, layer class, rotary class) of a config's family."""
    if config.model_type == "llama":
        from transformers.models.llama import modeling_llama as m

        return m.LlamaModel, m.LlamaDecoderLayer, m.LlamaRotaryEmbedding
    if config.model_type == "qwen2":
        from transformers.models.qwen2 import modeling_qwen2 as q

        return q.Qwen2Model, q.Qwen2DecoderLayer, q.Qwen2RotaryEmbedding
    raise InputError(f"model_type is {config.model_type!r}; a bidirectional layer exists for llama and qwen2")


def new_model(config: Any) -> nn.Module:
    """A randomly initialised bidirectional model of the config's class."""
    config = bidirectional(config)
    return see_both_ways(_classes(config)[0](config))


def read_model(folder: Path, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The bidirectional model in a folder with `config.json` and one `model.safetensors`: strict, and quick.

    Built without weights and filled from the file, which skips transformers' generic loader (2 s of a start); a thread
    reads the file while the rest of transformers is imported.

    Raises:
        InputError: unreadable or truncated file; a missing, extra or misshapen tensor, by name.
    """
    from concurrent.futures import ThreadPoolExecutor

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    def read() -> dict[str, Tensor]:
        weights = load_file(folder / "model.safetensors", device=str(device))
        return {name: w.to(dtype) for name, w in weights.items()}

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        facts = json.loads((folder / "config.json").read_text())
        config = bidirectional(_config_class(facts["model_type"]).from_dict(facts))
        model_class, _, rotary_class = _classes(config)
    with torch.device("meta"):
        model = model_class(config)
    try:
        model.load_state_dict(reading.result(), assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(f"cannot load {folder / 'model.safetensors'}: {' '.join(str(error).split())}") from error
    model.rotary_emb = rotary_class(config=config).to(device)
    return see_both_ways(model)


def _config_class(model_type: str) -> Any:
    if model_type == "llama":
        from transformers.models.llama.configuration_llama import LlamaConfig

        return LlamaConfig
    if model_type == "qwen2":
        from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

        return Qwen2Config
    raise InputError(f"model_type is {model_type!r}; known are llama and qwen2")


class BidirectionalLayer(nn.Module):
    """One decoder layer of the base's own class and shape, with its rotary embedding."""

    def __init__(self, config: Any) -> None:
        """Fresh weights with the family's own initialiser range."""
        super().__init__()
        self._config = config = bidirectional(config)
        config._attn_implementation = "sdpa"  # the boolean key mask of `forward` is sdpa's
        _, layer_class, self._rotary_class = _classes(config)
        self.layer = see_both_ways(layer_class(config, layer_idx=0))
        self.rotary = self._rotary_class(config=config)
        for part in self.layer.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=config.initializer_range)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> BidirectionalLayer:
        """`.to(...)` and the like. Rotary frequencies are made anew in fp32: in bf16 far positions would be turned."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.rotary = self._rotary_class(config=self._config).to(next(self.layer.parameters()).device)
        return self

    def forward(self, z_BLD: Tensor, state: State) -> Tensor:
        """Same shape out; pads are invisible as keys."""
        positions_BL = state.positions_BL
        mask = state.real_BL[:, None, None, :] if state.padded else None
        out = self.layer(
            z_BLD, attention_mask=mask, position_ids=positions_BL, position_embeddings=self.rotary(z_BLD, positions_BL)
        )
        return out if isinstance(out, Tensor) else out[0]


def shift_right(states_BLD: Tensor, state: State) -> Tensor:
    """Dream's frame: row i takes state i-1; each row's first real position keeps its own."""
    shifted = torch.roll(states_BLD, 1, dims=1)
    return torch.where((state.positions_BL == 0)[..., None], states_BLD, shifted)
