"""Tiny random causal models with a real tokenizer, as folders: what adaptation starts from in tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from adjust_dlm.bases import Base
from adjust_dlm.bases.family import dream_base
from adjust_dlm.bases.partner import CausalPartner
from adjust_dlm.bases.transformer import TransformerBase

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>")
BOS, IM_START, IM_END, MASK = range(4)
CHAT = "{% for m in messages %}<|im_start|>{{ m.role[0] }}:{{ m.content }}<|im_end|>{% endfor %}<|im_start|>a:"


def tiny_tokenizer() -> Any:
    """One token for each printable ASCII character, the space and the line feed, behind four special tokens."""
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # byte-level names of space and line feed
    vocab = {word: n for n, word in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")


def tiny_model(family: str = "llama", *, seed: int = 0, vocab: int = 104, tied: bool = True) -> Any:
    """A random Llama, Qwen2 or Qwen3ForCausalLM whose distributions are far from flat. 104 > 100 tokens."""
    import transformers

    fields: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 512, "initializer_range": 0.25,
        "tie_word_embeddings": tied, "bos_token_id": BOS, "eos_token_id": IM_END,
    }  # fmt: skip
    torch.manual_seed(seed)
    name = family.capitalize()
    config = getattr(transformers, f"{name}Config")(**fields, **({"head_dim": 16} if family == "qwen3" else {}))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


def save_tiny(folder: Path, family: str = "llama", **options: Any) -> Path:
    """Writes model and tokenizer; returns the folder."""
    tiny_model(family, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_partner(base: Base, *, vocab: int | None = None, seed: int = 0) -> CausalPartner:
    """A random causal model that speaks a base's ids."""
    model = tiny_model(vocab=base.spec.vocab_size if vocab is None else vocab, seed=seed)
    return CausalPartner(model.to(base.device), base.spec, name="tiny")


def chat_base(*, context: int, template: str = CHAT, block: int | None = None) -> TransformerBase:
    """A random Dream that reads and writes the letters of `tiny_tokenizer`."""
    from helpers import tiny_config

    torch.manual_seed(0)
    config = tiny_config("dream", vocab_size=104, max_position_embeddings=context)
    base = dream_base(config, mask_id=MASK, end_ids=(IM_END,), bos_id=BOS, token_limit=100, block=block)
    base.tokenizer = tiny_tokenizer()
    base.tokenizer.chat_template = template
    return base
