"""What the decoding commands share: their flags, loading, prompts, and the record of one sample."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adjust_dlm.checks import Checked, Count, NotNegative, TopP, Whole, require
from adjust_dlm.types import DEFAULT_BASE, DecodeConfig, Dtype, OrderRule, Quantize, Spread

if TYPE_CHECKING:
    from adjust_dlm.bases import Base
    from adjust_dlm.types import DecodeResult


@dataclass(frozen=True, kw_only=True)
class LoadFlags(Checked):
    """Flags of every command that loads a base and its helpers.

    Attributes:
        base: name of a base (see `adjust bases`), a folder that `adjust adapt` wrote, or a checkpoint: folder, GGUF, or
            Hub id.
        sampler: folder or Hub id of a sampler; by default the one that ships for the base.
        partner: folder of an autoregressive model with the base's tokenizer, for decoders that ask one; by default the
            one that the base was made from.
        device: auto, cpu, cuda or cuda:N.
        dtype: auto is float32 on the CPU and bfloat16 on a GPU.
        quantize: weights of the base's linear layers in 8 bits; fp8-dynamic multiplies in fp8, too.
        device_map: spread a checkpoint's layers over devices.
        revision: commit, tag or branch of a Hub id.
        compile: compile the layers, once for all lengths (10-30 s at the first pass).
    """

    base: str = DEFAULT_BASE
    sampler: Path | None = None
    partner: str | None = None
    device: str = "auto"
    dtype: Dtype = "auto"
    quantize: Quantize | None = None
    device_map: Spread | None = None
    revision: str | None = None
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class DrawFlags(LoadFlags):
    """Flags of every command that decodes, a server included: there they hold where a request says nothing.

    Attributes:
        tokens_per_step: K, tokens committed per base pass.
        max_new_tokens: length of the canvas behind the prompt.
        temperature: 0 is argmax.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k likeliest tokens; 0 keeps all.
        order: which position is next; by default the base's own rule.
        suppress_eos: never commit an end token.
        block_length: fill new tokens block by block of this length, from left to right; by default they are one block.
        eager: run the reference decoders where their fast form on CUDA would be taken.
    """

    tokens_per_step: Count = 4
    max_new_tokens: Count = 64
    temperature: NotNegative = 0.6
    top_p: TopP = 1.0
    top_k: Whole = 0
    order: OrderRule | None = None
    suppress_eos: bool = False
    block_length: Count | None = None
    eager: bool = False


@dataclass(frozen=True, kw_only=True)
class DecodeFlags(DrawFlags, DecodeConfig):
    """Flags of every command that decodes prompts of its own: all settings of decoding among them.

    Attributes:
        order_on: order on processed (tempered and filtered) or raw distributions; by default the base's own.
        schedule: K per pass, or the model family's published step counts.
        candidates: positions a round may go on to, the best of the base's pass; by default as many as it commits, 0 is
            every one.
        cache_period: reuse keys and values of what stands before the first mask for that many passes; by default no
            pass reuses any, and all are exact.
        cache_window: let what is reused follow the first mask; that many finished tokens before it are computed anyway.
        chat: put a prompt into the base's chat template, where it has one; --no-chat continues it as it stands.
        seed: with a sample's row number the only source of randomness.
        num_samples: samples per prompt.
        json: JSON lines on stdout instead of text.
        output: folder for result.json, samples.jsonl and run.yaml.
    """

    chat: bool = True
    num_samples: Count = 1
    json: bool = False
    output: Path | None = None


def set_malloc(*, map_from: int, keep: int) -> None:
    """Makes glibc give blocks of `map_from` bytes back as soon as they are free, and keep `keep` bytes of others."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for name, value in ((-3, map_from), (-1, keep)):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
            libc.mallopt(name, value)


def load_for(flags: LoadFlags) -> Base:
    """The base that the flags name, on their device."""
    from adjust_dlm.bases import load_base

    options = {"quantize": flags.quantize, "device_map": flags.device_map, "revision": flags.revision}
    with status(f"loading {flags.base}"):
        base = load_base(flags.base, device=flags.device, dtype=flags.dtype, **options)
    if flags.compile:
        base.compile()
    return base


def status(text: str) -> AbstractContextManager[Any]:
    """What is going on, on stderr, as long as it goes on; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def from_pipe(prompts: Sequence[str]) -> list[str]:
    """The prompts, `-` replaced by what stands on stdin; raises InputError if that is a terminal or asked for twice."""
    if "-" not in prompts:
        return list(prompts)
    require(list(prompts).count("-") == 1, "the prompt - stands there twice, and stdin can be read once")
    require(not sys.stdin.isatty(), "the prompt - is read from a pipe, and stdin is a terminal")
    text = sys.stdin.read().strip()
    return [text if prompt == "-" else prompt for prompt in prompts]


def encode_prompts(base: Base, texts: Sequence[str], config: DecodeConfig, *, chat: bool) -> list[list[int]]:
    """Ids of each prompt, in the chat template if asked for; without any, of none. Without a tokenizer texts are ids.

    Raises:
        InputError: a prompt is empty, no UTF-8, not a list of ids where ids are needed, or does not fit the base.
    """
    from adjust_dlm.data.prompts import PromptSource, unconditional
    from adjust_dlm.serve.text import Words

    words, prompts = Words(base), []
    for text in texts:
        require(bool(text.strip()), "the prompt is empty; leave it out for text without a prompt")
        in_template = chat and bool(getattr(base.tokenizer, "chat_template", None))
        message = {"role": "user", "content": text}
        prompts.append(words.encode_messages([message]) if in_template else words.encode(text))
    prompts = prompts or [unconditional(base)]
    PromptSource("the command line", prompts).check_fits(base, config.max_new_tokens)
    return prompts


def sample_record(base: Base, result: DecodeResult, b: int) -> dict[str, Any]:
    """Row b of a decode as `adjust generate --json` prints it.

    `tokens` and `order` cover all new positions (order -2: filler behind the end); `completion_tokens` counts
    those before the first end token; `seconds` is the wall time of the batch the row was decoded in. Left out on stdout
    are `given`, what the base was given to continue, chat template included, and `pieces`, every token as text.
    """
    from adjust_dlm.bases import cut_at_end
    from adjust_dlm.serve.text import Words

    new = result.config.max_new_tokens
    tokens, order = result.tokens_BL[b, -new:].tolist(), result.order_BL[b, -new:].tolist()
    kept, words = cut_at_end(tokens, base.spec.end_ids), Words(base)
    prompt = result.tokens_BL[b, result.real_BL[b]][:-new].tolist()
    return {
        "text": words.decode(tokens), "tokens": tokens, "order": order,
        "prompt_tokens": int(result.real_BL[b].sum()) - new, "completion_tokens": len(kept),
        "finish_reason": "stop" if len(kept) < new else "length",
        **{name: int(getattr(result, f"{name}_B")[b]) for name in ("base_calls", "sampler_calls", "partner_calls")},
        "seconds": round(result.seconds, 6), "seed": result.config.seed, "decoder": result.decoder,
        "tokens_per_step": result.config.tokens_per_step, "given": words.spelled(prompt),
        "pieces": [words.spelled([token]) for token in tokens],
    }  # fmt: skip


def setup_facts(base: Base, sampler: Any) -> dict[str, Any]:
    """What was loaded, for `result.json`."""
    return {
        "base_fingerprint": base.fingerprint,
        "device": str(base.device),
        "dtype": str(base.dtype).removeprefix("torch."),
        "sampler_parameters": None if sampler is None else sum(p.numel() for p in sampler.parameters()),
    }
