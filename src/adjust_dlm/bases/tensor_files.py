"""Tensors of a checkpoint by name, whatever holds them: one safetensors file, shards with an index, or a GGUF.

Everything that can be wrong is found and named before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.hub import read_json
from adjust_dlm.types import InputError, refusing, require

HEAD = "lm_head.weight"  # our name of it
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F16", "BF16", "F32", "F64")
_SHOWN = 3  # how many names an error lists


@dataclass(frozen=True)
class TensorFiles:
    """What a checkpoint holds, none of it read yet.

    Attributes:
        where: the folder or file, for messages.
        shapes: name -> shape.
        read: (name, device) -> tensor in the dtype it is stored in.
    """

    where: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, torch.device], Tensor]


Shapes = Mapping[str, tuple[int, ...]]


def check_shapes(where: Path, found: Shapes, wanted: Shapes) -> None:
    """Raises InputError unless the names are exactly the wanted ones, with their shapes."""
    missing = sorted(wanted.keys() - found.keys())
    require(not missing, f"{where} lacks {some(missing)}")
    extra = sorted(found.keys() - wanted.keys())
    require(not extra, f"{where} holds tensors that do not belong to this model: {some(extra)}")
    odd = [f"{name} is {found[name]}, wanted {shape}" for name, shape in wanted.items() if found[name] != shape]
    require(not odd, f"{where} does not fit: {some(odd)}")


def check_finite(where: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError for a tensor that holds infinity or no number, as it is or after a cast."""
    for name, tensor in tensors.items():
        said = f"{where}: {name} holds numbers that are not finite in {tensor.dtype}; download it again"
        require(bool(tensor.isfinite().all()), said)


def some(names: Sequence[str]) -> str:
    """The first few of a list, for messages."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def open_safetensors(folder: Path) -> TensorFiles:
    """The tensors of a folder.

    Raises:
        InputError: no weights, two sets of them, a damaged or missing shard, or an index of tensors that are not there.
    """
    from safetensors import safe_open

    index = read_index(folder / INDEX) if (folder / INDEX).is_file() else {}
    both = index and (folder / SINGLE).is_file() and folder / SINGLE not in index.values()
    require(not both, f"{folder} has {INDEX} and {SINGLE}, of which libraries read one or the other; delete one")
    parts = {path: read_header(path) for path in sorted(set(index.values())) or [_single(folder)]}
    file_of = {name: path for path, part in parts.items() for name in part if index.get(name, path) == path}
    lost = sorted(index.keys() - file_of.keys())
    require(not lost, f"{folder / INDEX} names tensors that are not in their shards: {some(lost)}")

    def read(name: str, device: torch.device) -> Tensor:
        with safe_open(file_of[name], "pt", device=str(device)) as file:
            return file.get_tensor(name)

    return TensorFiles(folder, {name: parts[path][name] for name, path in file_of.items()}, read)


def read_index(path: Path, prefix: str = "") -> dict[str, Path]:
    """Tensor -> its shard, from an index of shards; of tensors with another prefix nothing is asked.

    Raises:
        InputError: no index, or one that names a file that is missing or lies elsewhere.
    """
    whole = read_json(path).get("weight_map")
    items = (whole if isinstance(whole, dict) else {}).items()
    named = {name: str(file) for name, file in items if name.startswith(prefix)}
    good = bool(named) and all(Path(file).name == file for file in named.values())
    require(good, f"{path} is not an index of shards: weight_map must give tensors {prefix}* files of the same folder")
    lost = sorted(name for name in set(named.values()) if not (path.parent / name).is_file())
    require(not lost, f"{path.parent} is not complete: {some(lost)} missing (named by {path.name}); download it again")
    return {name: path.parent / file for name, file in named.items()}


def _single(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    others = sorted(path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern))
    hint = f"it has {some(others)}" if others else "it has no weights at all"
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}; {hint}")


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes; InputError for a file that is not as long as its header says, or a tensor that is no float."""
    from safetensors import SafetensorError, safe_open

    damaged = f"{path} is damaged or no safetensors file"
    with refusing(damaged, OSError, SafetensorError, hint="; download it again"), safe_open(path, "pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        odd = [f"{n} is {x.get_dtype()}" for n, x in parts.items() if x.get_dtype() not in _FLOATS]
        shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
    require(not odd, f"{path}: {some(odd)}; weights must be one of {', '.join(_FLOATS)}")
    return shapes


Meta = dict[str, Any]


def gguf_names(shape: Shape) -> dict[str, str]:
    """Our name of each tensor -> its name in a GGUF, from the `gguf` package's own table; the head among them."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    table = get_tensor_name_map(MODEL_ARCH.LLAMA, shape.num_hidden_layers)
    theirs = {name: str(table.get_name(f"model.{name}", (".weight", ".bias"))) for name in body_names(shape)}
    return theirs | {HEAD: "output.weight"}


def body_names(shape: Shape) -> list[str]:
    """Of all tensors but the head."""
    with torch.device("meta"):
        return list(Body(shape).state_dict())


def gguf_config(meta: Meta, kind: str) -> dict[str, Any]:
    """The shape in the metadata of a GGUF of this architecture, under the names of a `config.json`.

    Raises:
        InputError: a fact is missing, the file is a part of one, or it holds another fact of its architecture.
    """
    keys = {ours: f"{kind}.{theirs}" for ours, theirs in _FACTS.items()}
    meta = {keys["num_key_value_heads"]: meta.get(keys["num_attention_heads"])} | meta
    lost = [key for key in (*keys.values(), _WORDS) if key not in meta]
    require(not lost, f"the GGUF has no metadata {', '.join(lost)}")
    facts = {ours: meta[key] for ours, key in keys.items()} | {"vocab_size": len(meta[_WORDS])}
    require(meta.get("split.count", 1) == 1, f"the GGUF is one of {meta.get('split.count')} parts; merge them first")
    rest = {key.removeprefix(f"{kind}."): value for key, value in meta.items() if key.startswith(f"{kind}.")}
    rest = {key: value for key, value in rest.items() if key not in _FACTS.values() and value != "none"}
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    head = rest.get("attention.key_length", width // heads if isinstance(heads, int) and heads else None)
    plain = {
        "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
        "attention.causal": kind == "llama", "vocab_size": facts["vocab_size"],
    }  # fmt: skip
    odd = {key: value for key, value in rest.items() if key not in plain or value != plain[key]}
    known = ", ".join(f"{key} {value}" for key, value in plain.items())
    require(not odd, f"the GGUF says {odd} of {kind}; beside its shape only {known} is known here")
    return facts | ({"head_dim": head} if "attention.key_length" in rest else {})


_WORDS = "tokenizer.ggml.tokens"
_FACTS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}  # fmt: skip


def unpaired(name: str, weight: Tensor, shape: Shape) -> Tensor:
    """Undoes llama.cpp's row order of our q and k; other tensors come back as they are."""
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}.get(name.split(".")[-2])
    return weight if heads is None else unpermute(weight, heads)


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's row order of q and k [out, ...]: rotary pairs (2i, 2i+1) go back to (i, i + head_dim / 2)."""
    rows = weight.shape[0]
    return weight.view(heads, rows // heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def open_gguf(path: Path) -> tuple[Meta, TensorFiles]:
    """Metadata and tensors of a GGUF, names and rows as the file has them.

    Raises:
        InputError: not a GGUF, or damaged; tensors that overlap or leave gaps are.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    with refusing(f"{path} is damaged or no GGUF", OSError, ValueError, KeyError, IndexError):
        reader = GGUFReader(path)
        meta = {key: _plain(field.contents()) for key, field in reader.fields.items()}
    found, place = {tensor.name: tensor for tensor in reader.tensors}, int(reader.data_offset)
    for name, tensor in found.items():  # one behind the other, each padded to the alignment: llama.cpp's own rule
        said = f"the data of {name} should start at byte {place}, not {tensor.data_offset}; download it again"
        require(tensor.data_offset == place, f"{path} is damaged: {said}")
        place += -(-int(tensor.n_bytes) // int(reader.alignment)) * int(reader.alignment)
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
