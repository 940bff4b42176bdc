"""Importer for the published Dream checkpoint of ADJUST: its tensors under our names.

The published g takes [e, u] in this order, has its three norms, adds to the un-normalised state, and pairs the
embedding of x_i with the state that scores position i (`pairing="token"`). One set of weights serves every step.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.sampler import Sampler, SamplerConfig
from adjust_dlm.types import InputError, require

log = logging.getLogger(__name__)

PREFIX = "drafter."
# theirs -> ours; the 0 in front is the step that a copy of the weights is for, the second one the layer
_MODULES = {
    "drafter.down_project.0.": "mix.",
    "drafter.layers.0.0.": "layer.layer.",
    "drafter.norm_embed.0.": "norm_embed.",
    "drafter.norm_hidden.0.": "norm_hidden.",
    "drafter.norm_postattn.0.": "norm_out.",
}
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def import_released(path: Path | str, base: Base) -> Sampler:
    """A sampler from a published checkpoint, for the base it was trained on.

    The file does not name its base: that the shapes fit is all that can be checked.

    Args:
        path: a .safetensors, .bin or .pt file, an index of shards (.index.json), or a folder with one of these. Tensors
            outside `drafter.` (the base's own weights) are not read; the log lists them.
        base: the frozen model below; its dtype and device become the sampler's.

    Returns:
        The sampler, frozen, with `SamplerConfig.released()`.

    Raises:
        InputError: unreadable, another variant (unshared heads, other layers), a missing or misshapen tensor, by name.
    """
    path = Path(path)
    theirs = _read(path)
    sampler = Sampler(base, SamplerConfig.released())
    renamed = {_our_name(name): name for name in theirs}
    wanted = sampler.state_dict()
    _check_names(path, renamed, wanted.keys())
    odd = [ours for ours in wanted if theirs[renamed[ours]].shape != wanted[ours].shape]
    require(
        not odd,
        f"{path} does not fit base {base.spec.name!r}: "
        + "; ".join(f"{renamed[k]} is {tuple(theirs[renamed[k]].shape)}, wanted {tuple(wanted[k].shape)}" for k in odd),
    )
    sampler.load_state_dict({ours: theirs[name].float() for ours, name in renamed.items()})
    return sampler.to(base.device, base.dtype).eval().requires_grad_(False)


def _our_name(theirs: str) -> str:
    """Our name of a tensor, or its own where we have none."""
    for old, new in _MODULES.items():
        if theirs.startswith(old):
            return new + theirs.removeprefix(old)
    return theirs


def _their_name(ours: str) -> str:
    old, new = next((old, new) for old, new in _MODULES.items() if ours.startswith(new))
    return old + ours.removeprefix(new)


def _check_names(path: Path, renamed: dict[str, str], wanted: Collection[str]) -> None:
    """Other variants first, so that the message says what the file is and not only what it lacks."""
    unknown = sorted(renamed[name] for name in renamed.keys() - set(wanted))
    unshared = [name for name in unknown if name.removeprefix(PREFIX).split(".")[1:2] not in ([], ["0"])]
    require(
        not unshared,
        f"{path} has unshared heads, own weights for each step of a round ({', '.join(unshared[:3])}); "
        "only shared ones (shared_params: true) can be imported",
    )
    require(not unknown, f"{path} is another variant of g: no place for {', '.join(unknown[:3])}")
    missing = sorted(_their_name(name) for name in wanted if name not in renamed)
    require(not missing, f"{path} lacks {', '.join(missing[:3])}" + (", ..." if len(missing) > 3 else ""))


# Files ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors below `drafter.`, from one file or from the shards that hold them."""
    files = _files(path)
    found: dict[str, Tensor] = {}
    others: list[str] = []
    for file in files:
        mine, rest = _read_file(file)
        found |= mine
        others += rest
    require(bool(found), f"{path} holds no tensor called {PREFIX}*; its tensors are {', '.join(sorted(others)[:3])}")
    if others:
        log.info("%s: %d tensors of other parts are not read: %s", path, len(others), ", ".join(sorted(others)))
    return found


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        path = _checkpoint_in(path)
    require(path.is_file(), f"no checkpoint at {path}")
    if path.name.endswith(".index.json"):
        return _shards(path)
    require(path.suffix in _SUFFIXES, f"{path} is no checkpoint; its name must end in {', '.join(_SUFFIXES)}")
    return [path]


def _checkpoint_in(folder: Path) -> Path:
    """The checkpoint of a folder: an index, a file of the usual name, or the only one there."""
    for name in (*(f"{single}.index.json" for single in _SINGLE), *_SINGLE):
        if (folder / name).is_file():
            return folder / name
    found = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    names = ", ".join(file.name for file in found) or "none"
    require(len(found) == 1, f"{folder} must hold one checkpoint, found {names}; name the file")
    return found[0]


def _shards(index: Path) -> list[Path]:
    """The shards with a tensor of g; the others, most of the base, are not opened."""
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index} is not an index of shards: {error!r}") from error
    names = sorted({str(file) for tensor, file in places.items() if tensor.startswith(PREFIX)})
    require(bool(names), f"{index} holds no tensor called {PREFIX}*; its tensors are {', '.join(sorted(places)[:3])}")
    outside = [name for name in names if Path(name).name != name]
    require(not outside, f"{index} names shards outside its folder: {', '.join(outside)}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    require(not missing, f"{index} names shards that are not there: {', '.join(missing)}")
    return [index.parent / name for name in names]


def _read_file(file: Path) -> tuple[dict[str, Tensor], list[str]]:
    """(tensors of g, names of the others)."""
    from safetensors import SafetensorError

    read: Callable[[Path], tuple[dict[str, Tensor], list[str]]]
    read = _read_safetensors if file.suffix == ".safetensors" else _read_torch
    try:
        return read(file)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read the checkpoint {file}: {(str(error) or repr(error)).splitlines()[0]}") from error


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], list[str]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        names = list(content.keys())
        mine = {name: content.get_tensor(name) for name in names if name.startswith(PREFIX)}
    return mine, [name for name in names if name not in mine]


def _read_torch(file: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors only: `weights_only` runs no code from the file."""
    import torch

    content: Any = torch.load(file, map_location="cpu", weights_only=True)
    flat = isinstance(content, dict) and all(isinstance(x, Tensor) for x in content.values())
    require(flat, f"{file} is no flat mapping of names to tensors")
    mine = {name: tensor for name, tensor in content.items() if name.startswith(PREFIX)}
    return mine, [name for name in content if name not in mine]
