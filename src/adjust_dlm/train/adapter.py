"""A causal model turned into a masked diffusion base: LoRA on all linears, a MASK embedding, both-way attention.

Of causal blocks, columns with MASK alone have the LoRA and attention stays as it was.
"""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adjust_dlm.bases.adapted import ADAPTER, FACTS, MASK_EMBEDDING
from adjust_dlm.bases.attention import kernels_for
from adjust_dlm.bases.autoregressive import Vocabulary
from adjust_dlm.bases.shape import Shape
from adjust_dlm.files import write_whole
from adjust_dlm.hub import read_json
from adjust_dlm.train.masked_ce import Chunk, MaskedBatch, block_views_mask, ce_chunk, chunked_ce, taught_chunk
from adjust_dlm.types import refusing, require

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def require_tied(causal: Any) -> None:
    """Raises InputError for a head of its own: an adapted base reads it from the embeddings."""
    require(
        causal.lm_head.weight is causal.model.embed_tokens.weight,
        "the model's head is not tied to its embeddings; only models with tied embeddings can be adapted",
    )


class AdapterModel(nn.Module):
    """The frozen model with live adapters.

    Trainable are the LoRA matrices (fp32, fresh A from `seed`, B = 0) and the MASK embedding, which starts as the mean
    of all embeddings. On a GPU the base stays in bf16 and autocast runs the adapters in bf16 too.
    """

    bias_V: Tensor

    def __init__(
        self, model: Any, vocabulary: Vocabulary, *, rank: int, alpha: int, seed: int, source: str,
        block: int | None = None,
    ) -> None:  # fmt: skip
        """Wraps a Llama, Qwen2 or Qwen3ForCausalLM in place.

        With `block` it reads [clean | A | B] (see `masked_ce.block_batch`) or [clean | groups] (`group_batch`).

        Raises:
            InputError: the head is not tied to the embeddings (an adapted base reads its head from them), or the body
                is none that `bases.layers` builds.
        """
        super().__init__()
        self.block = block
        from peft import LoraConfig, get_peft_model

        Shape.of(model.config)  # what the trained base could not be built from is refused now
        require_tied(model)
        lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(LINEARS), task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):
            self.peft = get_peft_model(model, lora).eval()
        self.peft.peft_config["default"].base_model_name_or_path = source
        self.body: Any = model.model
        self._set_direction()
        self._fresh_adapters(seed)
        head_VD: Tensor = self.body.embed_tokens.weight
        self.mask_D = nn.Parameter(head_VD.float().mean(0))
        bias_V = torch.zeros(vocabulary.size, device=head_VD.device)
        bias_V[vocabulary.forbidden] = -torch.inf
        self.register_buffer("bias_V", bias_V, persistent=False)
        self._chunk: Chunk = ce_chunk
        self._taught_chunk: Chunk = taught_chunk

    def compile_passes(self) -> None:
        """Compiles a layer (one graph serves all of them, for each length of pass) and a chunk of the loss."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)  # see `CanvasBatches`
        for layer in self.body.layers:
            layer.compile(dynamic=False)
        self._chunk = torch.compile(ce_chunk, dynamic=False)
        self._taught_chunk = torch.compile(taught_chunk, dynamic=False)

    def trainables(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, in a fixed order."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def states(self, tokens_BL: Tensor, masked_BL: Tensor) -> Tensor:
        """Post-final-norm states [B, L, D]; row i stands at position i (it scores token i + 1)."""
        views = 1 if self.block is None else 3
        length, device = tokens_BL.shape[1] // views, tokens_BL.device
        positions = torch.arange(length, device=device).repeat(views)[None]
        sees = None if self.block is None else block_views_mask(length, self.block, device)
        return self._run(tokens_BL, masked_BL, positions, sees)

    def states_of_groups(self, tokens_BL: Tensor, cut_BG: Tensor) -> Tensor:
        """[B, L + G S, D]: the model's own states on the clean canvases, and those of G groups of S masks.

        Group g stands at positions cut_BG[:, g] to cut_BG[:, g] + S - 1. It sees the clean columns left of these.
        """
        length, size, device = tokens_BL.shape[1], self.block or 1, tokens_BL.device
        keys: list[Any] = [_Keys() for _ in self.body.layers]
        clean_BLD = self.teacher_states(tokens_BL, keys)
        group_M = torch.arange(cut_BG.shape[1], device=device).repeat_interleave(size)
        own_MM = (group_M[:, None] == group_M).tril()
        before_BML = torch.arange(length, device=device) < cut_BG[:, group_M, None]
        sees_BMN = torch.cat([before_BML, own_MM.expand(len(tokens_BL), -1, -1)], 2)
        place_BM = (cut_BG[..., None] + torch.arange(size, device=device)).flatten(1)
        masked_BM = torch.ones_like(place_BM, dtype=torch.bool)
        return torch.cat(
            [clean_BLD, self._run(torch.zeros_like(place_BM), masked_BM, place_BM, sees_BMN[:, None], keys)], 1
        )

    def loss(self, batch: MaskedBatch) -> Tensor:
        """The weighted loss of a batch on the model's device; groups learn the model's own states' distributions."""
        if batch.cut_BG is None:
            states_BLD = self.states(batch.tokens_BL, batch.masked_BL)
        else:
            states_BLD = self.states_of_groups(batch.tokens_BL, batch.cut_BG)
        h_RD = states_BLD.flatten(0, 1).index_select(0, batch.rows_R)
        head = self.body.embed_tokens.weight, self.bias_V
        if batch.teachers_R is None:
            return chunked_ce(h_RD, *head, batch.targets_R, batch.weights_R, chunk=self._chunk)
        clean_BLD = states_BLD[:, : batch.tokens_BL.shape[1]].detach()
        teacher_RD = clean_BLD.flatten(0, 1).index_select(0, batch.teachers_R)
        return chunked_ce(h_RD, *head, teacher_RD, batch.weights_R, chunk=self._taught_chunk)

    @torch.no_grad()
    def teacher_states(self, tokens_BL: Tensor, keys: list[Any] | None = None) -> Tensor:
        """States [B, L, D] of the autoregressive model itself; each layer leaves its keys and values in `keys`."""
        length, device = tokens_BL.shape[1], tokens_BL.device
        sees_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
        places = torch.arange(length, device=device)[None]
        for part in self._loras:  # peft's own switch walks the whole model: 17 ms a pass
            part._disable_adapters = True
        try:
            return self._run(tokens_BL, torch.zeros_like(tokens_BL, dtype=torch.bool), places, sees_LL, keys)
        finally:
            for part in self._loras:
                part._disable_adapters = False

    def _run(
        self, tokens_BL: Tensor, masked_BL: Tensor, place_BL: Tensor, mask: Tensor | None, keys: list[Any] | None = None
    ) -> Tensor:
        """The layers one by one; without blocks there is no mask, and attention takes its fastest path."""
        weight_VD = self.body.embed_tokens.weight
        half = weight_VD.dtype != torch.float32
        cast = torch.autocast(weight_VD.device.type, dtype=weight_VD.dtype) if half else nullcontext()
        with kernels_for(mask), cast:
            e_BLD = self.body.embed_tokens(tokens_BL)
            h_BLD = torch.where(masked_BL[..., None], self.mask_D.to(e_BLD.dtype), e_BLD)
            rotary = self.body.rotary_emb(weight_VD, place_BL)
            for n, layer in enumerate(self.body.layers):
                h_BLD = layer(h_BLD, mask, None, None if keys is None else keys[n], False, rotary)
            return self.body.norm(h_BLD)

    def _set_direction(self) -> None:
        """transformers' layers take their direction from the config and, without a mask, from a flag of their own."""
        self.body.config = copy.deepcopy(self.body.config)
        self.body.config.is_causal = self.body.config.use_cache = False
        for layer in self.body.layers:
            layer.self_attn.config, layer.self_attn.is_causal = self.body.config, False

    def _fresh_adapters(self, seed: int) -> None:
        """A from a generator of its own, the same on every rank and device; no cast of the inputs to fp32."""
        from peft.tuners.lora import LoraLayer

        generator = torch.Generator().manual_seed(seed)
        self._loras: list[Any] = [part for part in self.body.modules() if isinstance(part, LoraLayer)]
        for part in self._loras:
            part.cast_input_dtype_enabled = False
            a_RD, b_OR = part.lora_A["default"].weight, part.lora_B["default"].weight
            fresh_RD = nn.init.kaiming_uniform_(torch.empty(a_RD.shape), a=5**0.5, generator=generator)
            a_RD.data, b_OR.data = fresh_RD.to(a_RD.device), b_OR.data.float().zero_()

    def start_from(self, folder: Path) -> None:
        """Takes adapter and MASK of a folder that `save` wrote from the same model.

        Raises:
            InputError: they are unreadable, or of another rank, scale or shape.
        """
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        with refusing(f"cannot read the adapter in {folder}", OSError, KeyError, SafetensorError):
            found, mask_D = load_file(folder / ADAPTER), load_file(folder / MASK_EMBEDDING)["mask_embedding"]
        own = {name: w.shape for name, w in get_peft_model_state_dict(self.peft, save_embedding_layers=False).items()}
        odd = sorted(n for n in own.keys() | found.keys() if own.get(n) != getattr(found.get(n), "shape", None))
        odd += ["mask_embedding"] if mask_D.shape != self.mask_D.shape else []
        require(not odd, f"the adapter in {folder} has another rank or is of another model: {odd[0] if odd else ''}")
        config: Any = self.peft.peft_config["default"]
        alpha, then = config.lora_alpha, read_json(folder / "adapter_config.json").get("lora_alpha")
        require(alpha == then, f"lora_alpha is {alpha}; the adapter in {folder} has {then}")
        set_peft_model_state_dict(self.peft, found)
        self.mask_D.data.copy_(mask_D)

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes the folder that `load_base` reads: the adapter in peft's format as bf16, MASK, and the facts last."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save

        weights = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        half = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()}
        mask = {"mask_embedding": self.mask_D.detach().to("cpu", torch.bfloat16)}
        tensors = {folder / ADAPTER: half, folder / MASK_EMBEDDING: mask}
        write_whole({path: save(found, {"format": "pt"}) for path, found in tensors.items()})
        config = self.peft.peft_config["default"]
        was, config.inference_mode = config.inference_mode, True
        config.save_pretrained(str(folder))
        config.inference_mode = was
        write_whole({folder / FACTS: json.dumps(facts, indent=2) + "\n"})


class _Keys:
    """What a layer takes for its cache: keys and values of the clean columns, put before those of later passes."""

    known: tuple[Tensor, Tensor] | None = None

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values that the layer's queries see."""
        if self.known is None:
            self.known = k, v
            return k, v
        return torch.cat([self.known[0], k], 2), torch.cat([self.known[1], v], 2)
