"""Every decoder behind one call. A new decoder is one file and one line in `DECODERS`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

from adjust_dlm.bases import Base
from adjust_dlm.decoders.adjust import adjust
from adjust_dlm.decoders.canvas import Canvas
from adjust_dlm.decoders.joint import joint
from adjust_dlm.decoders.parallel import parallel
from adjust_dlm.decoders.published import blocks, origin, soft_order
from adjust_dlm.types import DecodeConfig, DecodeResult, require

__all__ = ["DECODERS", "Canvas", "decode", "generate"]

# name -> (function, whether it needs a sampler)
DECODERS: dict[str, tuple[Callable[..., None], bool]] = {
    "joint": (joint, False),
    "parallel": (parallel, False),
    "adjust": (adjust, True),
    "origin": (origin, False),
    "soft_order": (soft_order, False),
    "blocks": (blocks, False),
}


@torch.no_grad()
def decode(
    base: Base,
    prompts: list[list[int]],
    config: DecodeConfig,
    *,
    decoder: str = "adjust",
    sampler: Any = None,
    rows: list[int] | None = None,
    watch: Callable[[Canvas], None] | None = None,
    **options: Any,
) -> DecodeResult:
    """Decodes a batch of token prompts; each row's result is what it would be alone.

    Args:
        base: the frozen model.
        prompts: token ids of each row (see `Base.encode`); masks inside them are filled in too.
        config: all settings; `joint` is one token a pass, whatever `tokens_per_step` and `schedule` say.
        decoder: a name in `DECODERS`.
        sampler: g, for decoders that need it.
        rows: global row ids, 0..B-1 unless given; with the seed they decide every random number.
        watch: called with the canvas after every commit.
        options: what a decoder takes beside these (`published=` of the releases' own loops).

    Raises:
        InputError: unknown decoder or option, missing sampler, or a canvas that does not fit the base.
    """
    require(decoder in DECODERS, f"unknown decoder {decoder!r}; known are {', '.join(DECODERS)}")
    require(bool(prompts), "no prompts: give at least one (an empty list of ids is a prompt)")
    function, needs_sampler = DECODERS[decoder]
    require(
        not needs_sampler or sampler is not None,
        f"decoder {decoder!r} needs a sampler for base {base.spec.name!r}: train one with `adjust train`",
    )
    takes = inspect.signature(function).parameters
    unknown = sorted(options.keys() - takes.keys())
    require(not unknown, f"decoder {decoder!r} does not take {', '.join(unknown)}")
    if decoder == "joint":
        config = config.but(tokens_per_step=1, schedule="exact")
    started = time.perf_counter()
    canvas = Canvas(base, prompts, config, rows=rows)
    canvas.watch = watch
    function(base, *([sampler] if needs_sampler else []), canvas, **options)
    return DecodeResult(
        tokens_BL=canvas.tokens_BL,
        order_BL=canvas.order_BL,
        real_BL=canvas.real_BL,
        base_calls_B=canvas.base_calls_B,
        sampler_calls_B=canvas.sampler_calls_B,
        rows_B=canvas.rows_B,
        config=config,
        decoder=decoder,
        seconds=time.perf_counter() - started,
    )


def generate(
    base: Base, prompt: str = "", *, decoder: str = "adjust", sampler: Any = None, chat: bool = False,
    num_samples: int = 1, **settings: Any,
) -> list[str]:  # fmt: skip
    """Text in, texts out: `generate(base, "Once", sampler=g, tokens_per_step=4, temperature=0.6)`."""
    ids = base.encode(prompt, chat=chat)
    result = decode(base, [ids] * num_samples, DecodeConfig(**settings), decoder=decoder, sampler=sampler)
    return [base.decode(row[-result.config.max_new_tokens :].tolist()) for row in result.tokens_BL]
