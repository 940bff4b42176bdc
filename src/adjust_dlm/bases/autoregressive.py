"""Autoregressive models: their folders and special ids, and each as a base that writes in blocks of one token.

Joint decoding of such a base samples the model itself, in every form that a base has: by evaluation, by the server, and
for the corpora of `adjust adapt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adjust_dlm.bases.base import BaseSpec
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.smol_files import smol_ar_dir
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.hub import PATTERNS, local, read_json, require_ar
from adjust_dlm.types import refusing, require

FAMILIES = ("llama", "qwen2", "qwen3")  # as `model_type` in a config.json
TEXT_SEPARATOR = "<|endoftext|>"
# Tokens that released models carry and never saw in training; the first one that exists becomes MASK.
UNUSED = ("<|mask|>", "<mask>", "[MASK]", "<empty_output>", "<|reserved_special_token_0|>", "<|fim_pad|>")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The ids that canvases of an autoregressive model are made of.

    Attributes:
        bos_id: put before a text.
        end_ids: tokens that end a text; the first one also fills a canvas after its end.
        mask_id: MASK, a token the model never used.
        token_limit: ids from here on are padding rows of the head.
        size: rows of the head.
        chat: whether the tokenizer has the tokens of `CHAT_USER` and `CHAT_TURN`.
    """

    bos_id: int
    end_ids: tuple[int, ...]
    mask_id: int
    token_limit: int
    size: int
    chat: bool

    @property
    def forbidden(self) -> list[int]:
        """MASK and the ids that the tokenizer has no token for: no text may hold them."""
        return [self.mask_id, *range(self.token_limit, self.size)]


def read_vocabulary(tokenizer: Any, config: Any, *, mask_id: int | None = None) -> Vocabulary:
    """Decides the special ids from the tokenizer, the model's config, and the user's choice of MASK.

    Raises:
        InputError: no start, end or unused token can be found, or `mask_id` is not an id of the model.
    """
    words: dict[str, int] = tokenizer.get_vocab()
    separator = words.get(TEXT_SEPARATOR)
    bos_id = next((i for i in (separator, tokenizer.bos_token_id, config.bos_token_id) if i is not None), None)
    require(bos_id is not None, f"the tokenizer has no {TEXT_SEPARATOR} and no start token to begin a text with")
    eos = config.eos_token_id
    ends = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos]), separator]
    end_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    require(bool(end_ids), "neither the tokenizer nor the model's config names an end token")
    mask_id = next((words[word] for word in UNUSED if word in words), None) if mask_id is None else mask_id
    require(
        mask_id is not None,
        f"the tokenizer has none of {', '.join(UNUSED)}; name an unused token's id as the mask with --mask-id",
    )
    assert bos_id is not None and mask_id is not None
    require(0 <= mask_id < config.vocab_size, f"mask id {mask_id} is not in the model's 0..{config.vocab_size - 1}")
    require(mask_id not in (bos_id, *end_ids), f"mask id {mask_id} starts or ends texts; name an unused token")
    return Vocabulary(
        bos_id=bos_id,
        end_ids=end_ids,
        mask_id=mask_id,
        token_limit=min(config.vocab_size, max(words.values()) + 1),
        size=config.vocab_size,
        chat="<|im_start|>" in words and words.get("<|im_end|>") in end_ids,
    )


def is_autoregressive(folder: Path) -> bool:
    """Whether the config of a folder is a causal model's of one of `FAMILIES`."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    causal = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or [])
    return causal and config.get("model_type") in FAMILIES


def ar_folder(source: str, *, weights: bool = False) -> Path:
    """Folder of the autoregressive model: `smol` (fetched on first use), a path, or a Hub id's snapshot.

    Args:
        source: which one.
        weights: whether they will be read; those of `smol` are checked then.

    Raises:
        InputError: no model there, and none of that id on the Hub or in its cache.
    """
    if source == "smol":
        return smol_ar_dir(weights=weights)
    folder = local(source, PATTERNS)
    require_ar(folder, source)
    return folder


def load_ar(source: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """(causal LM, tokenizer) of an autoregressive source: the judge, the AR partner, what `adapt` starts from.

    Raises:
        InputError: no model there, an unreadable file, or weights missing or misshapen, by name.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = ar_folder(source, weights=True)
    kinds = OSError, ValueError, RuntimeError, SafetensorError
    with refusing(f"cannot load the autoregressive model {folder}", *kinds, first=True):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, report = loaded
    # transformers fills such weights with random numbers and only warns.
    lost = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    require(not lost, f"the autoregressive model {folder} has missing or misshapen weights: {', '.join(lost[:3])}")
    return model.to(device).eval().requires_grad_(False), tokenizer


def _place_holder(tokenizer: Any, config: Any) -> int | None:
    words: dict[str, int] = tokenizer.get_vocab()
    if any(word in words for word in UNUSED):
        return None
    last: int = config.vocab_size - 1
    return last if last > max(words.values()) else tokenizer.unk_token_id


def autoregressive_base(
    model: Any, tokenizer: Any, *, mask_id: int | None = None, name: str = "autoregressive"
) -> TransformerBase:
    """A causal model of transformers as a base with blocks of one token, which shares its weights.

    Token i is scored by state i-1, which sees what stands before; MASK, which no state sees, only holds a place.

    Raises:
        InputError: see `read_vocabulary` and `Shape.of`. `mask_id` is as there, but where no token is unused, a padding
            row of the head does, or the unknown token.
    """
    mask_id = _place_holder(tokenizer, model.config) if mask_id is None else mask_id
    vocabulary, shape = read_vocabulary(tokenizer, model.config, mask_id=mask_id), Shape.of(model.config, 1)
    with torch.device("meta"):
        body = Body(shape)
    body.load_state_dict(model.model.state_dict(), assign=True)
    body.rotary.to(model.device)
    spec = BaseSpec(
        name=name, mask_id=vocabulary.mask_id, end_ids=vocabulary.end_ids, pad_id=vocabulary.end_ids[0],
        bos_id=vocabulary.bos_id, vocab_size=vocabulary.size, token_limit=vocabulary.token_limit,
        context=shape.max_position_embeddings, order="left_to_right", order_on="processed", block=shape.block,
    )  # fmt: skip
    return TransformerBase(body, model.lm_head.weight, spec, next_frame=True, tokenizer=tokenizer)
