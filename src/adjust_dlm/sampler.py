"""g: a small transformer (one layer unless told) that updates the base's states after each committed token.

    e = RMSNorm(embed(x));  u = RMSNorm(h);  z = layer(Linear([e; u]));  h' = h + RMSNorm(z)

logits are W h', and h' is the next h (paper, section "Our approximate joint sampler" and its Figure of
the architecture). g owns no embedding and no head: both are the frozen base's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from adjust_dlm.bases import Base, adapted
from adjust_dlm.bases.attention import visible
from adjust_dlm.bases.blocks import open_block
from adjust_dlm.bases.layers import BidirectionalLayer, Linear
from adjust_dlm.bases.memory import Memory, at_columns, side_by_side
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.tensor_files import check_finite, read_header
from adjust_dlm.files import write_whole
from adjust_dlm.hub import SAMPLER as CONFIG
from adjust_dlm.hub import read_json, require_init, require_sampler
from adjust_dlm.types import SamplerConfig, State, refusing, require

WEIGHTS = "sampler.safetensors"


class Sampler(nn.Module):
    """g(h, x) -> h' for one base.

    Args:
        base: the frozen model it sits on; its embedding is used, never copied.
        config: the choices above.

    Attributes:
        states: how many times D columns it gives: h and the features.
        causal: of a base with causal blocks. A step then changes one state of a row, that of the latest token's column,
            which scores the next position (`decoders.machinery.cache.step_at_columns`).
        trained_on: the rows that its file names (`train/record.py`); `save` writes them again.
    """

    def __init__(self, base: Base, config: SamplerConfig | None = None) -> None:
        """Fresh weights, fp32, on the CPU; move with `.to(...)`."""
        super().__init__()
        self.config = config or SamplerConfig()
        self.base_fingerprint = base.fingerprint
        self.trained_on: list[dict[str, Any]] | None = None
        self._embed, self._to_frame = base.embed, base.to_frame
        require(
            not base.lag or self.config.pairing == "state",
            f"pairing is 'token'; base {base.spec.name!r} has blocks in a shifted frame, where it must be 'state'",
        )
        self.block, self.causal = base.spec.block, base.spec.causal
        width = base.width
        self.width = width
        if self.config.features:
            base.with_features(self.config.features)  # refuses what it does not have
        self.states = 1 + len(self.config.features)
        self.mix = Linear((1 + self.states) * width, width)
        nn.Linear.reset_parameters(self.mix)
        shape = layer_shape(self.config, Shape.of(base.layer_config))
        self.layer = BidirectionalLayer(shape)
        self.more = nn.ModuleList(BidirectionalLayer(shape) for _ in range(self.config.layers - 1))
        norm = nn.RMSNorm if self.config.norms else nn.Identity
        eps = shape.rms_norm_eps
        self.norm_embed, self.norm_hidden = norm(width, eps=eps), norm(width, eps=eps)
        self.norm_features = nn.ModuleList(norm(width, eps=eps) for _ in self.config.features)
        self.norm_out = norm(width, eps=eps)
        for weight in self.norm_out.parameters():
            nn.init.constant_(weight, self.config.output_norm_init)

    @property
    def layers(self) -> list[BidirectionalLayer]:
        """All of them, in their order."""
        return [self.layer, *cast("Iterable[BidirectionalLayer]", self.more)]

    def forward(self, h_BLD: Tensor, state: State, column_BN: Tensor | None = None) -> Tensor:
        """One step of the recursion h_{k+1} = g(h_k, x + the token just committed).

        Args:
            h_BLD: current states in the scoring frame: those of `self.on(base)`, or what g itself returned.
            state: the canvas after the latest commit.
            column_BN: the only columns that are wanted, [B, N, ...]: queries and MLP of the last layer run there alone.

        Returns:
            The next states, same shape and frame. Behind their D columns stand the features, which are carried along
            through the round; `Base.head` reads the first D columns. On a block base they change in each row's open
            block alone: earlier blocks keep the base's states of their final tokens, and so g's keys of these.

        Raises:
            InputError: g is causal, so that keys are those of the step that made them, and only `rows` knows them.
        """
        require(not self.causal, "g of causal blocks has no step of a whole canvas: decode with it, or see `rows`")
        *before, last = self.layers
        z_BLD = self._mixed(h_BLD, self._paired(state))
        for layer in before:
            z_BLD = layer(z_BLD, state)
        if column_BN is None:
            new_BLD = self._out(h_BLD, last(z_BLD, state))
            return (
                new_BLD if self.block is None else torch.where(open_block(state, self.block)[..., None], new_BLD, h_BLD)
            )
        keys = last.keys(z_BLD, state)
        sees = visible(state, z_BLD, last.layer.self_attn.shape, column_BN)
        place_BN = state.positions_BL.gather(1, column_BN)
        z_BND = last.beside(at_columns(z_BLD, column_BN), place_BN, sees, lambda *_: keys)
        return self._out(at_columns(h_BLD, column_BN), z_BND)

    def on(self, base: Base) -> Base:
        """The base, giving the features that g wants."""
        return base.with_features(self.config.features)

    def keys(self, h_BLD: Tensor, state: State) -> Memory:
        """The keys and values of each layer in one whole step, for `rows`."""
        z_BLD, memory = self._mixed(h_BLD, self._paired(state)), Memory()
        for n, layer in enumerate(self.layers):
            if n:
                z_BLD = self.layers[n - 1](z_BLD, state)
            memory.kept.append(side_by_side(*layer.keys(z_BLD, state)))
        return memory

    def rows(
        self, h_BLD: Tensor, state: State, column_BN: Tensor, keys: Memory, valid_BN: Tensor | None = None
    ) -> Tensor:
        """One step at some columns alone: [B, N, ...], as wide as `forward` has it.

        With the `keys` of this very step, or at all columns that are no pads, it is exact.

        Args:
            h_BLD: current states.
            state: the canvas after the latest commit.
            column_BN: the columns, all different in a row.
            keys: of all columns, from this step or an earlier one; made anew at these columns, in place.
            valid_BN: False where a column only fills up its row: its keys stay, what it gives means nothing. Without
                this, filling up would change what other columns see of it in the layers behind the first. On a block
                base the others are as `visible` wants them.
        """
        h_BND = at_columns(h_BLD, column_BN)
        z_BND = self._mixed(h_BND, self._paired(state).gather(1, column_BN))
        sees = visible(state, z_BND, self.layer.layer.self_attn.shape, column_BN, valid_BN, keys.seen)
        place_BN = state.positions_BL.gather(1, column_BN)
        for n, layer in enumerate(self.layers):
            z_BND = layer.beside(z_BND, place_BN, sees, keys.keep(n, column_BN, valid_BN))
        return self._out(h_BND, z_BND)

    def beside(self, h_BND: Tensor, tokens_BN: Tensor, positions_BN: Tensor, keys: Memory, mask_BHNM: Tensor) -> Tensor:
        """One step at columns that stand behind those of `keys`, as `TransformerBase.hidden_beside` has them."""
        z_BND = self._mixed(h_BND, tokens_BN)
        for n, layer in enumerate(self.layers):
            z_BND = layer.beside(z_BND, positions_BN, mask_BHNM, keys.beside(n))
        return self._out(h_BND, z_BND)

    def carriers(self, marked_BL: Tensor, state: State) -> Tensor:
        """The columns [B, L] whose input holds the embedding of a marked position's token."""
        if self.config.pairing == "token":
            return marked_BL
        return self._to_frame(marked_BL[..., None].float(), state)[..., 0] > 0

    def _paired(self, state: State) -> Tensor:
        """The token whose embedding meets each state."""
        token_BL = state.tokens_BL
        return token_BL if self.config.pairing == "token" else self._to_frame(token_BL[..., None], state)[..., 0]

    def _mixed(self, h_BLD: Tensor, token_BL: Tensor) -> Tensor:
        """What enters the first layer."""
        e_BLD = self._embed(token_BL).to(h_BLD.dtype)
        norms = [self.norm_hidden, *self.norm_features]
        parts = [norm(part) for norm, part in zip(norms, h_BLD.split(self.width, -1), strict=True)]
        return self.mix(torch.cat([self.norm_embed(e_BLD), *parts], -1))

    def _out(self, h_BLD: Tensor, z_BLD: Tensor) -> Tensor:
        """The next states, from these and what leaves the last layer."""
        h_BLD, *rest = h_BLD.split(self.width, -1)
        z_BLD = self.norm_out(z_BLD)
        h_BLD = h_BLD + z_BLD if self.config.residual else z_BLD
        return torch.cat([h_BLD, *rest], -1) if rest else h_BLD

    def save(self, folder: Path | str, **provenance: Any) -> None:
        """Writes config and weights (bf16), whole or not at all; `provenance` goes into the config file."""
        from safetensors.torch import save

        folder = Path(folder)
        weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in self.state_dict().items()}
        known = {} if self.trained_on is None else {"trained_on": self.trained_on}
        facts = {"config": asdict(self.config), "base_fingerprint": self.base_fingerprint, **known, **provenance}
        text = json.dumps(facts, indent=2) + "\n"
        write_whole({folder / WEIGHTS: save(weights), folder / CONFIG: text})


def layer_shape(config: SamplerConfig, base: Shape) -> Shape:
    """One layer of g, from the shape of one layer of the base."""
    width = max(1, round(config.mlp * base.intermediate_size))
    return replace(base, intermediate_size=width, lora_rank=None)


def default_sampler(base_name: str) -> Path | None:
    """Folder of the sampler that ships with the package for a base, if there is one."""
    folder = adapted.MODELS / f"{base_name}-sampler"
    return folder if (folder / CONFIG).is_file() else None


def require_same_base(sampler: str, fingerprint: str, base: Base) -> None:
    """Raises `InputError` unless a sampler, as it is to be called, was made for this base."""
    require(
        fingerprint == base.fingerprint,
        f"{sampler} belongs to a base with fingerprint {fingerprint[:16]}; "
        f"base {base.spec.name!r} has {base.fingerprint[:16]}",
    )


def load_sampler(folder: Path | str | None, base: Base) -> Sampler:
    """Loads g for its own base, in the base's dtype and on its device; None takes the one that ships.

    Raises:
        InputError: no sampler there, unreadable, incomplete or integer weights, or trained for another base.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = folder or default_sampler(base.spec.name)
    hint = "take decoder joint, since it writes one token a pass" if base.spec.block == 1 else "name one"
    require(folder is not None, f"no sampler ships for base {base.spec.name!r}; {hint}")
    folder = Path(str(folder))
    facts = read_config(folder)
    require_same_base(f"sampler {folder}", facts["base_fingerprint"], base)
    sampler = Sampler(base, SamplerConfig(**facts["config"]))
    sampler.trained_on = facts.get("trained_on")
    with refusing(f"cannot read the sampler weights {folder / WEIGHTS}", OSError, SafetensorError, RuntimeError):
        sampler.load_state_dict(load_file(folder / WEIGHTS))
        read_header(folder / WEIGHTS)  # integers are refused
    sampler = sampler.to(base.device, base.dtype).eval().requires_grad_(False)
    check_finite(folder / WEIGHTS, sampler.state_dict())
    return sampler


def weights_digest(folder: Path | str) -> str:
    """Of a sampler's weights file: says which g made something."""
    return hashlib.sha256(Path(folder, WEIGHTS).read_bytes()).hexdigest()


def start_sampler(base: Base, config: SamplerConfig, init: str) -> Sampler:
    """g before training, fp32 on the CPU; `init` is "fresh", or the folder of a sampler of this base and form.

    Raises:
        InputError: no such folder, or a sampler of another base or form.
    """
    sampler = Sampler(base, config)
    if init != "fresh":
        require_init(init)
        other = load_sampler(init, base)
        require(other.config == config, f"the sampler in {init} has {other.config}; this run has {config}")
        sampler.load_state_dict({k: v.float() for k, v in other.state_dict().items()})
    return sampler


def read_config(folder: Path) -> dict[str, Any]:
    """What a sampler's config file says: its form, its base and how it was trained; checked."""
    path = require_sampler(folder)
    facts = read_json(path)
    good = isinstance(facts.get("config"), dict) and isinstance(facts.get("base_fingerprint"), str)
    require(good, f"{path} is not a sampler config: it lacks config or base_fingerprint")
    unknown = set(facts["config"]) - {f.name for f in fields(SamplerConfig)}
    require(not unknown, f"{path} has unknown settings {sorted(unknown)}")
    return facts
