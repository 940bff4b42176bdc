"""What an autoregressive model gives to adaptation: the facts of its vocabulary, and samples as a corpus.

Shape suffixes: B rows, T tokens, D width, V vocabulary, H key/value heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.kernels import HAS_TRITON
from adjust_dlm.sampling import draw, process, uniform
from adjust_dlm.types import DecodeConfig, require

HEAD_ROWS = 1024  # rows of logits held at a time
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
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
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
    model: Any, prefix_ids: Sequence[int] | Tensor, *, count: int, new_tokens: int, batch_size: int, seed: int,
    temperature: float = 1.0, top_p: float = 0.95, forbid: Sequence[int] = (), first_row: int | Tensor = 0,
) -> Tensor:  # fmt: skip
    """Samples `count` continuations from a causal Llama, Qwen2 or Qwen3ForCausalLM in eval mode.

    Every token is drawn by inverse CDF from a uniform of (seed, row, step), so a row does not depend on
    `batch_size` or its neighbours beyond the rounding of the model's own kernels. Ids in `forbid` are never drawn.

    `prefix_ids` are the ids before every continuation, at least one; or int64 [count, P], those of each row.
    `first_row` is the id of the first row, and the others follow; or int64 [count], the id of each.

    Returns:
        int64 [count, new_tokens] on the CPU, without the prefix.
    """
    prefix_NP = torch.as_tensor(prefix_ids, dtype=torch.long).expand(count, -1)
    rows_N = first_row + torch.arange(count) if isinstance(first_row, int) else first_row
    require(prefix_NP.shape[1] >= 1, "the prefix is empty; a causal model needs at least one token to start from")
    settings, weight_VD = DecodeConfig(temperature=temperature, top_p=top_p), model.lm_head.weight
    device, on_gpu = weight_VD.device, weight_VD.device.type == "cuda"
    bias_V = forbid_bias(len(weight_VD), forbid, device)

    def pick(h_CD: Tensor, u_C: Tensor) -> Tensor:
        return _drawn((h_CD @ weight_VD.T) + bias_V.to(weight_VD.dtype), u_C, settings)

    grain = HEAD_ROWS if on_gpu else 1
    rows = min(batch_size, -(-count // grain) * grain)
    parts, steps_T = [], torch.arange(new_tokens, device=device)
    for start in range(0, count, rows):
        # Always full batches: the surplus of the last one is cut off, and all shapes stay the same.
        place_B = torch.arange(start, start + rows).clamp_max(count - 1)
        ids_B = rows_N[place_B].to(device)
        cache = _Cache(prefix_NP.shape[1] + new_tokens)
        tokens_BT = prefix_NP[place_B].to(device)
        out_BT = torch.empty(rows, new_tokens, dtype=torch.long, device=device)
        # All uniforms at once: inside the loop, nothing waits for the device.
        u_TB = uniform(seed, ids_B[None], steps_T[:, None], steps_T[:, None])
        for step in range(new_tokens):
            h_BD = _forward(model.model, tokens_BT, cache)
            chunks = zip(h_BD.split(HEAD_ROWS), u_TB[step].split(HEAD_ROWS), strict=True)
            out_BT[:, step] = torch.cat([pick(h_CD, u_C) for h_CD, u_C in chunks])
            tokens_BT = out_BT[:, step : step + 1]
        parts.append(out_BT.cpu())
    return torch.cat(parts)[:count]


def ar_replies(
    model: Any, tokenizer: Any, questions: Sequence[str], *, new_tokens: int, batch_size: int, temperature: float = 0.0,
    forbid: Sequence[int] = (), seed: int = 0, first_row: int = 0,
) -> list[list[int]]:  # fmt: skip
    """What a chat model answers to each question: int lists of `new_tokens` ids, its end token among them.

    A question stands in the model's own template (with its system turn). Questions of one length are asked together.
    """
    start = chat_context(tokenizer) + CHAT_USER
    prompts = [tokenizer.encode(start + question + CHAT_TURN, add_special_tokens=False) for question in questions]
    replies: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        members = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        out_NT = ar_sample(
            model, torch.tensor([prompts[n] for n in members]), count=len(members), new_tokens=new_tokens,
            batch_size=min(batch_size, len(members)), seed=seed, temperature=temperature, forbid=forbid,
            first_row=first_row + torch.tensor(members),
        )  # fmt: skip
        for n, reply in zip(members, out_NT.tolist(), strict=True):
            replies[n] = reply
    return replies


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
    bias_V = torch.zeros(size)
    bias_V[list(forbid)] = -torch.inf
    return bias_V.to(device)
