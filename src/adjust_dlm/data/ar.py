"""What an autoregressive model gives to adaptation: the facts of its vocabulary, and samples as a corpus.

Shape suffixes: B rows, T tokens, D width, V vocabulary, H key/value heads, E width of a head.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.checks import Count, require_value
from adjust_dlm.kernels import HAS_TRITON
from adjust_dlm.sampling import draw, process, uniform
from adjust_dlm.types import DecodeConfig, require

HEAD_ROWS = 1024  # rows of logits held at a time
LOOK_EVERY = 32  # passes from one look for rows that have ended to the next
TEXT_SEPARATOR = "<|endoftext|>"
# Tokens that released models carry and never saw in training; the first one that exists becomes MASK.
UNUSED = ("<|mask|>", "<mask>", "[MASK]", "<empty_output>", "<|reserved_special_token_0|>", "<|fim_pad|>")
CHAT_USER, CHAT_TURN = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


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


class _Cache:
    """Keys and values of one batch in fixed buffers; attention sees the filled part, so it needs no mask."""

    def __init__(self, capacity: int) -> None:
        self.buffers: dict[int, tuple[Tensor, ...]] = {}
        self.filled, self.capacity = 0, capacity

    def update(self, k_BHTE: Tensor, v_BHTE: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What transformers' attention calls: stores the new rows and returns all so far."""
        if layer not in self.buffers:
            shape = (*k_BHTE.shape[:2], self.capacity, k_BHTE.shape[3])
            self.buffers[layer] = k_BHTE.new_empty(shape), v_BHTE.new_empty(shape)
        end = self.filled + k_BHTE.shape[2]
        k_all, v_all = self.buffers[layer]
        k_all[:, :, self.filled : end] = k_BHTE
        v_all[:, :, self.filled : end] = v_BHTE
        return k_all[:, :, :end], v_all[:, :, :end]


def _forward(body: Any, tokens_BT: Tensor, cache: _Cache) -> Tensor:
    """States [B, D] of the last token after the final norm.

    The layers are called one by one: without a mask, attention is causal over several tokens and free for one.
    The cache goes in by position, because its name differs between versions of transformers.
    """
    positions = torch.arange(cache.filled, cache.filled + tokens_BT.shape[1], device=tokens_BT.device)[None]
    h_BTD = body.embed_tokens(tokens_BT)
    rotary = body.rotary_emb(h_BTD, positions)
    for layer in body.layers:
        h_BTD = layer(h_BTD, None, positions, cache, True, rotary)
    cache.filled += tokens_BT.shape[1]
    return body.norm(h_BTD[:, -1])


@torch.no_grad()
def ar_sample(
    model: Any, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], new_tokens: int, batch_size: int, seed: int,
    temperature: float = 1.0, top_p: float = 0.95, forbid: Sequence[int] = (), end_ids: Collection[int] = (),
) -> list[list[int]]:  # fmt: skip
    """Samples a continuation of each prompt from a causal Llama, Qwen2 or Qwen3ForCausalLM in eval mode.

    Every token is drawn by inverse CDF from a uniform of (seed, row id, number of the new token), so a continuation
    depends on no batch beyond the rounding of the model's own kernels. Ids in `forbid` are never drawn. Prompts need
    not have one length; `rows` are their row ids.

    Returns:
        `new_tokens` ids for each prompt, or those up to and with the first of `end_ids` among them.

    Raises:
        InputError: an empty prompt, other than one row id for each, or a count below 1.
    """
    require(all(map(len, prompts)), "a prompt is empty; a causal model needs at least one token to start from")
    require(len(rows) == len(prompts), f"{len(prompts)} prompts need as many row ids, not {len(rows)}")
    for name, count in (("new_tokens", new_tokens), ("batch_size", batch_size)):
        require_value(name, count, Count)
    settings = DecodeConfig(temperature=temperature, top_p=top_p, max_new_tokens=new_tokens, seed=seed)
    weight_VD = model.lm_head.weight
    bias_V = forbid_bias(len(weight_VD), forbid, weight_VD.device).to(weight_VD.dtype)
    out: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    while order:
        limit = len(prompts[order[0]]) + new_tokens  # the others would be done before a longer prompt is read
        batch = [n for n in order[:batch_size] if len(prompts[n]) <= limit]
        del order[: len(batch)]
        ids_B = torch.tensor([rows[n] for n in batch], device=weight_VD.device)
        _fill(model, [(prompts[n], out[n]) for n in batch], ids_B, settings, bias_V, end_ids)
    return out


def _fill(
    model: Any, rows: list[tuple[Sequence[int], list[int]]], ids_B: Tensor, settings: DecodeConfig, bias_V: Tensor,
    end_ids: Collection[int],
) -> None:  # fmt: skip
    """Continues prompts in order of their lengths, each into its list, without padding or a mask.

    One pass reads what they have in length in common, then each a token of a row: its prompt's, or else a drawn one.
    """
    lengths, new_tokens, device = [len(prompt) for prompt, _ in rows], settings.max_new_tokens, ids_B.device
    at, most, width = lengths[0], lengths[-1], lengths[-1] + new_tokens
    given = torch.tensor([[*prompt, *[0] * (most - len(prompt))] for prompt, _ in rows], device=device)
    tokens_BT, cache = torch.nn.functional.pad(given, (0, new_tokens)), _Cache(width)
    # All uniforms at once: inside the loop, only a look for rows that have ended waits for the device.
    number_TB = torch.arange(width, device=device)[:, None] - torch.tensor(lengths, device=device)
    u_TB = uniform(settings.seed, ids_B[None], number_TB.clamp_min_(0), number_TB)
    seen, every = at, LOOK_EVERY if end_ids or at < most else width
    while rows:
        h_BD = _forward(model.model, tokens_BT[:, cache.filled : at], cache)
        drawn = bisect_right(rows, at, key=lambda row: len(row[0]))  # rows that are through their prompt
        for start in range(0, drawn, HEAD_ROWS):
            part = slice(start, min(start + HEAD_ROWS, drawn))
            tokens_BT[part, at] = _drawn(h_BD[part] @ model.lm_head.weight.T + bias_V, u_TB[at, part], settings)
        at += 1
        if at < min(seen + every, width):
            continue
        left = []
        for place, ((prompt, out), tokens) in enumerate(zip(rows, tokens_BT[:, seen:at].tolist(), strict=True)):
            new = tokens[max(len(prompt) - seen, 0) :][: new_tokens - len(out)]
            end = next((n for n, token in enumerate(new, 1) if token in end_ids), None)
            out += new[:end]
            if end is None and len(out) < new_tokens:
                left.append(place)
        if len(left) < len(rows):
            left_B = torch.tensor(left, dtype=torch.long, device=device)
            rows, tokens_BT, u_TB = [rows[n] for n in left], tokens_BT[left_B], u_TB[:, left_B]
            for layer in cache.buffers:
                cache.buffers[layer] = tuple(kept_BHTE[left_B] for kept_BHTE in cache.buffers[layer])
        seen = at


def ar_replies(
    model: Any, tokenizer: Any, questions: Sequence[str], *, temperature: float = 0.0, seed: int = 0,
    first_row: int = 0, **how: Any,
) -> list[list[int]]:  # fmt: skip
    """What a chat model answers to each question in its own template (with its system turn); `how` of `ar_sample`."""
    start, rows = chat_context(tokenizer) + CHAT_USER, range(first_row, first_row + len(questions))
    prompts = [tokenizer.encode(start + question + CHAT_TURN, add_special_tokens=False) for question in questions]
    return ar_sample(model, prompts, rows=rows, temperature=temperature, seed=seed, **how)


def chat_context(tokenizer: Any) -> str:
    """What the model's own chat template puts before the user's first turn, such as a system turn.

    Chats are sampled behind it, because the model invents many more there, and stored without it.
    """
    if not tokenizer.chat_template:
        return ""
    message = [{"role": "user", "content": "."}]
    text = str(tokenizer.apply_chat_template(message, tokenize=False))
    return text.partition(CHAT_USER)[0] if CHAT_USER in text else ""


def _drawn(logits_CV: Tensor, u_C: Tensor, settings: DecodeConfig) -> Tensor:
    """A token of each row: int64 [C]; on a card by kernels that read a row some fifteen times, not a hundred."""
    if settings.temperature == 0 or not _kernels(logits_CV):
        return draw(process(logits_CV.float(), settings), u_C, settings.temperature)
    from adjust_dlm.kernels.draw import draw_rows, row_stats

    how: dict[str, Any] = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
    every_C = torch.arange(len(logits_CV), device=logits_CV.device)
    bad = torch.zeros((), dtype=torch.bool, device=logits_CV.device)
    return draw_rows(logits_CV, every_C, row_stats(logits_CV, **how), u_C, bad, **how)


def _kernels(logits_CV: Tensor) -> bool:
    return HAS_TRITON and logits_CV.is_cuda


def forbid_bias(size: int, forbid: Sequence[int], device: torch.device | str) -> Tensor:
    """fp32 [V]: -inf at forbidden ids, 0 elsewhere; added to logits."""
    return torch.zeros(size).index_fill_(0, torch.tensor(forbid, dtype=torch.long), -torch.inf).to(device)
