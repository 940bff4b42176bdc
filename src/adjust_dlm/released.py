"""Importer for the published Dream checkpoint of ADJUST: its tensors under our names.

The published g takes [e, u] in this order, has its three norms, adds to the un-normalised state, and pairs the
embedding of x_i with the state that scores position i (`pairing="token"`). One set of weights serves every step.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.tensor_files import check_shapes, read_index, some
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import SamplerConfig, refusing, require

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
_USUAL = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors", "pytorch_model.bin")


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
        InputError: unreadable; a missing, unknown, misshapen or integer tensor, by name. A variant with weights for
            each step of a round has unknown ones.
    """
    path = Path(path)
    theirs = _read(path)
    sampler = Sampler(base, SamplerConfig.released())
    ours = sampler.state_dict()
    wanted = {_their_name(name): tuple(tensor.shape) for name, tensor in ours.items()}
    check_shapes(path, {name: tuple(tensor.shape) for name, tensor in theirs.items()}, wanted)
    sampler.load_state_dict({name: theirs[_their_name(name)].float() for name in ours})
    return sampler.to(base.device, base.dtype).eval().requires_grad_(False)


def _their_name(ours: str) -> str:
    old, new = next((old, new) for old, new in _MODULES.items() if ours.startswith(new))
    return old + ours.removeprefix(new)


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors below `drafter.`, from one file or from the shards that hold them; runs no code from a file."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    kinds = OSError, RuntimeError, EOFError, TypeError, ValueError, pickle.PickleError, SafetensorError
    for file in _files(path):
        with refusing(f"cannot read the checkpoint {file}", *kinds, first=True):
            safe = file.suffix == ".safetensors"
            found |= load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    mine = {name: tensor for name, tensor in found.items() if name.startswith(PREFIX)}
    others = sorted(found.keys() - mine.keys())
    require(all(isinstance(x, Tensor) for x in found.values()), f"{path} is no flat mapping of names to tensors")
    require(bool(mine), f"{path} holds no tensor called {PREFIX}*; its tensors are {some(others)}")
    odd = [f"{name} is {tensor.dtype}" for name, tensor in mine.items() if not tensor.is_floating_point()]
    require(not odd, f"{path}: {some(odd)}; weights must be floating point")
    if others:
        log.info("%s: %d tensors of other parts are not read: %s", path, len(others), ", ".join(others))
    return mine


def _files(path: Path) -> list[Path]:
    """The file itself, the shards of an index with a tensor of g, or what a folder holds of these."""
    if path.is_dir():
        usual = [path / name for name in _USUAL if (path / name).is_file()]
        found = usual[:1] or sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt"))
        names = some([file.name for file in found]) or "none"
        require(len(found) == 1, f"{path} must hold one checkpoint, found {names}; name the file")
        path = found[0]
    require(path.is_file(), f"no checkpoint at {path}")
    return sorted(set(read_index(path, PREFIX).values())) if path.name.endswith(".index.json") else [path]
