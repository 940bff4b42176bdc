"""Samples of an autoregressive base, as a corpus or as replies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adjust_dlm.bases import Base
from adjust_dlm.decoders import decode_many
from adjust_dlm.types import GIVEN, DecodeConfig

CHAT_USER, CHAT_TURN = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def ar_sample(
    base: Base, prompts: Sequence[list[int]], *, rows: Sequence[int], new_tokens: int, batch_size: int, seed: int = 0,
    temperature: float = 1.0, top_p: float = 0.95,
) -> list[list[int]]:  # fmt: skip
    """A continuation of each prompt, drawn from an autoregressive base by joint decoding.

    A row depends on its prompt, the seed and its id in `rows`, and on no batch beyond the rounding of kernels.

    Returns:
        `new_tokens` ids for each prompt, or those up to and with the first end of a text.

    Raises:
        InputError: see `decode_many`.
    """
    config = DecodeConfig(tokens_per_step=1, max_new_tokens=new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    out: list[list[int]] = [[] for _ in prompts]
    how: dict[str, Any] = {"batch_size": batch_size, "rows": rows, "decoder": "joint"}
    for numbers, result in decode_many(base, prompts, config, **how):
        counts = (result.order_BL > GIVEN).sum(-1).tolist()
        for n, ids, count in zip(numbers, result.tokens_BL[:, -new_tokens:].tolist(), counts, strict=True):
            out[n] = ids[:count]
    return out


def endless(base: Base) -> Base:
    """The same base, to which an end of a text is a token like any other."""
    twin = copy.copy(base)
    twin.spec, twin.workspace = replace(base.spec, end_ids=()), None
    return twin


def ar_replies(base: Base, questions: Sequence[str], *, first_row: int = 0, **how: Any) -> list[list[int]]:
    """What a chat model answers to each question in its own template (with its system turn); `how` of `ar_sample`."""
    start, rows = chat_context(base.tokenizer) + CHAT_USER, range(first_row, first_row + len(questions))
    prompts = [base.tokenizer.encode(start + text + CHAT_TURN, add_special_tokens=False) for text in questions]
    return ar_sample(base, prompts, rows=rows, **{"temperature": 0.0, **how})


def chat_context(tokenizer: Any) -> str:
    """What the model's own chat template puts before the user's first turn, such as a system turn.

    Chats are sampled behind it, because the model invents many more there, and stored without it.
    """
    if not tokenizer.chat_template:
        return ""
    message = [{"role": "user", "content": "."}]
    text = str(tokenizer.apply_chat_template(message, tokenize=False))
    return text.partition(CHAT_USER)[0] if CHAT_USER in text else ""
