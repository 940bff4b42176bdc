"""Tensors of a checkpoint by name, whatever holds them: one safetensors file, shards with an index, or a GGUF.

Everything that can be wrong is found and named before the first tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.types import InputError, require

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F16", "BF16", "F32", "F64")
_SHOWN = 3  # how many names an error lists


@dataclass(frozen=True)
class TensorFiles:
    """What a checkpoint holds, none of it read yet.

    Attributes:
        where: the folder or file, for messages.
        shapes: name -> shape.
        kinds: name -> how its numbers are stored, for safetensors.
        read: (name, device) -> tensor in the dtype it is stored in.
    """

    where: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, torch.device], Tensor]
    kinds: Mapping[str, str] = field(default_factory=dict)

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, ignored: Callable[[str], bool] = lambda _: False) -> None:
        """Raises InputError unless the names are exactly the wanted ones (and ignored ones), with their shapes."""
        missing = sorted(wanted.keys() - self.shapes.keys())
        require(not missing, f"{self.where} lacks {_some(missing)}")
        extra = sorted(name for name in self.shapes.keys() - wanted.keys() if not ignored(name))
        require(not extra, f"{self.where} holds tensors that do not belong to this model: {_some(extra)}")
        odd = [f"{n} is {self.shapes[n]}, wanted {shape}" for n, shape in wanted.items() if self.shapes[n] != shape]
        require(not odd, f"{self.where} does not fit its config: {_some(odd)}")
        whole = [f"{n} is {self.kinds[n]}" for n in wanted if self.kinds.get(n, _FLOATS[0]) not in _FLOATS]
        require(not whole, f"{self.where}: {_some(whole)}; weights must be one of {', '.join(_FLOATS)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def open_safetensors(folder: Path) -> TensorFiles:
    """The tensors of a folder.

    Raises:
        InputError: no weights, a missing or damaged shard, an index that names tensors its shards do not hold.
    """
    from safetensors import safe_open

    file_of: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    index = _index(folder)
    for path in sorted({folder / name for name in index.values()} if index else {_single(folder)}):
        for name, (shape, kind) in _header(path).items():
            if index.get(name, path.name) == path.name:
                file_of[name], shapes[name], kinds[name] = path, shape, kind
    lost = sorted(index.keys() - shapes.keys())
    require(not lost, f"{folder / INDEX} names tensors that are not in their shards: {_some(lost)}")

    def read(name: str, device: torch.device) -> Tensor:
        with safe_open(file_of[name], "pt", device=str(device)) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return TensorFiles(folder, shapes, read, kinds)


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> shard; empty where there is no index. All shards are there."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        named: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        good = bool(named) and all(Path(x).name == x for x in named.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not an index of shards: {error!r}") from error
    require(good, f"{path} is not an index of shards: weight_map must give each tensor a file of the same folder")
    lost = sorted(name for name in set(named.values()) if not (folder / name).is_file())
    require(not lost, f"{folder} is not complete: {_some(lost)} missing (named by {INDEX}); download it again")
    return named


def _single(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    others = sorted(path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern))
    hint = f"it has {_some(others)}" if others else "it has no weights at all"
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}; {hint}")


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and kinds; opening also compares the file's length with what its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is damaged or no safetensors file: {error}; download it again") from error


# GGUF names of a layer's parts, and ours.
LAYER_NAMES = {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
LAYER_NAMES |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
LAYER_NAMES |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
Meta = dict[str, Any]


def our_name(gguf_name: str) -> str:
    """`blk.3.attn_q.bias` -> `layers.3.self_attn.q_proj.bias`; names that are none of ours come back as they are."""
    stem, _, kind = gguf_name.rpartition(".")
    part = stem.split(".", 2)
    if part[0] == "blk" and len(part) == 3 and part[2] in LAYER_NAMES:
        return f"layers.{part[1]}.{LAYER_NAMES[part[2]]}.{kind}"
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else gguf_name


def gguf_name(our: str) -> str:
    """The way back, for messages."""
    stem, _, kind = our.rpartition(".")
    back = {ours: theirs for theirs, ours in (LAYER_NAMES | _TOP_NAMES).items()}
    part = stem.split(".", 2)
    if part[0] == "layers" and len(part) == 3 and part[2] in back:
        return f"blk.{part[1]}.{back[part[2]]}.{kind}"
    return f"{back[stem]}.{kind}" if stem in back else our


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's row order of q and k [out, ...]: rotary pairs (2i, 2i+1) go back to (i, i + head_dim / 2)."""
    rows = weight.shape[0]
    return weight.view(heads, rows // heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def open_gguf(path: Path) -> tuple[Meta, TensorFiles]:
    """Metadata and tensors of a GGUF; names are ours (see `our_name`), rows as the file has them.

    Raises:
        InputError: not a GGUF, or damaged.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        reader = GGUFReader(path)
        meta = {key: _plain(field.contents()) for key, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path} is damaged or no GGUF: {error}") from error
    found = {our_name(tensor.name): tensor for tensor in reader.tensors}
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind)
        except NotImplementedError as error:
            raise InputError(f"{path}: {tensor.name} is stored as {kind.name}, which gguf cannot read") from error
    shapes = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in found.items()}  # fastest dimension first

    def read(name: str, device: torch.device) -> Tensor:
        tensor = found[name]
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(shapes[name]).to(device)

    return meta, TensorFiles(path, shapes, read)


def _plain(value: Any) -> Any:
    """float32 as written: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
