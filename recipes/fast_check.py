"""Checks the fast decoders on a card against the reference, then times them: components and whole decodes.

    python recipes/fast_check.py --output fast.json                   # graphs alone
    python recipes/fast_check.py --output fast-compiled.json --compile  # compiled layers too (10-30 s more)
    python recipes/fast_check.py --layers 2 --new 16 --rows 1,4         # a quick try, also on a CPU

Weights are random, of Dream-7B's shape (or `--shape llada`); every row is full: no text ends early. Times are medians
of CUDA events; tokens per second count whole decodes, host included. Prints as it goes and writes one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adjust_dlm.bases.dream import dream_base, dream_config
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.llada import llada_base, llada_config
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import decode
from adjust_dlm.decoders.fast import captures
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig, State

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "initializer_range": 0.1,
}  # fmt: skip
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, int]]] = {
    "dream": (dream_config, dream_base, {"mask_id": 151666, "bos_id": 151665}),
    "llada": (llada_config, llada_base, {"mask_id": 126336, "bos_id": 126080}),
}


def say(facts: dict[str, Any], name: str, value: Any) -> None:
    """Keeps a fact and prints it."""
    facts[name] = value
    sys.stdout.write(f"{name}: {json.dumps(value)}\n")
    sys.stdout.flush()


def random_base(family: str, dtype: torch.dtype, **shape: Any) -> tuple[TransformerBase, Sampler]:
    """Base and g with random weights, made where they stay."""
    configure, build, ids = FAMILIES[family]
    config = configure(**shape)
    if shape.get("vocab_size"):
        ids = {"mask_id": 16, "bos_id": 1, "end_ids": (2,)}  # type: ignore[dict-item]
    std = 0.02 if not shape.get("vocab_size") else 3 * config.hidden_size**-0.5  # wide: no near ties in the check
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with DEVICE:
        model = new_model(config)
        head = torch.empty(config.vocab_size, config.hidden_size).normal_(std=std)
        base = build(config, model=model, head_weight=head, **ids)
        sampler = Sampler(base).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    model.rotary.inverse_F = model.rotary.inverse_F.float()
    return base, sampler


def same_tokens(facts: dict[str, Any]) -> None:
    """fp32, a small shape: rows that are the reference's token for token, of all."""
    base, sampler = random_base("dream", torch.float32, **SMALL)
    prompts = [[1, *range(20, 20 + n)] for n in (3, 40, 17, 9, 25)]
    for name, settings in {
        "greedy": {"temperature": 0.0}, "T=1": {"temperature": 1.0}, "T=.7": {"temperature": 0.7},
        "margin": {"order": "margin"}, "confidence": {"temperature": 0.0, "order": "confidence"},
        "top_p": {"top_p": 0.9}, "blocks": {"block_length": 16}, "candidates": {"candidates": 8},
    }.items():  # fmt: skip
        for decoder in ("joint", "parallel", "adjust"):
            if name == "candidates" and decoder == "parallel":
                continue
            config = DecodeConfig(max_new_tokens=48, tokens_per_step=4, **settings)  # type: ignore[arg-type]
            own = {"sparse": True} if name == "candidates" and decoder == "adjust" else {}
            slow, quick = (
                decode(base, prompts, config, decoder=decoder, sampler=sampler, eager=eager, **own)
                for eager in (True, False)
            )
            again = decode(base, prompts, config, decoder=decoder, sampler=sampler, eager=False, slots=2, **own)
            same = [(slow.tokens_BL == other.tokens_BL).all(-1).float().mean().item() for other in (quick, again)]
            say(facts, f"rows alike, {decoder} {name}: whole batch, two slots", same)


def median_ms(run: Callable[[], Any], times: int = 10) -> float:
    """Of CUDA events, after three warm runs."""
    for _ in range(3):
        run()
    out = []
    for _ in range(times):
        if CUDA:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record()
            run()
            end.record()
            end.synchronize()
            out.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            out.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(out), 3)


def ceilings(facts: dict[str, Any]) -> None:
    """What the card gives: a large bf16 product and a large copy."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in "ab")
    say(facts, "GEMM TFLOP/s", round(2 * 8192**3 / median_ms(lambda: a @ b) / 1e9, 1))
    x = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    say(facts, "copy GB/s", round(2 * (1 << 30) / median_ms(lambda: y.copy_(x)) / 1e6, 1))


def components(facts: dict[str, Any], base: TransformerBase, sampler: Sampler, rows: int, length: int) -> None:
    """Eager passes beside the graphs that a decode of this shape left."""
    tokens_BL = torch.full((rows, length), base.spec.mask_id, device=DEVICE)
    state = State(tokens_BL, torch.ones_like(tokens_BL).bool(), torch.ones_like(tokens_BL).bool(), padded=False)
    h_BLD = base.hidden(state)
    with torch.no_grad():
        say(facts, f"B={rows} eager base pass ms", median_ms(lambda: base.hidden(state)))
        say(facts, f"B={rows} eager g step ms", median_ms(lambda: sampler(h_BLD, state)))
        say(facts, f"B={rows} eager head, all rows, ms", median_ms(lambda: base.head(h_BLD.flatten(0, 1))))
    for (shape, (kind, *what, _settings)), graph in base.workspace.graphs.items():
        if shape[0] == rows and (kind != "pick" or what[0] in (8, 64, 128)):
            say(facts, f"B={rows} L={shape[1]} graph {kind} {what} ms", median_ms(graph.replay))


def whole_decodes(facts: dict[str, Any], base: TransformerBase, sampler: Sampler, rows: int, flags: Any) -> None:
    """Tokens per second of each decoder, eager and fast, and the ratios to parallel."""
    prompts = [[base.spec.bos_id] * flags.prompt] * rows
    config = DecodeConfig(max_new_tokens=flags.new, tokens_per_step=4, suppress_eos=True)
    cases: dict[str, tuple[str, DecodeConfig, dict[str, Any]]] = {
        "parallel": ("parallel", config, {}), "adjust": ("adjust", config, {}),
        "adjust, 16 sparse": ("adjust", config.but(candidates=16), {"sparse": True}),
        "adjust, top_p .9": ("adjust", config.but(top_p=0.9), {}),
        "adjust T=0": ("adjust", config.but(temperature=0.0), {}),
    }  # fmt: skip
    if rows == 1:
        cases["joint"] = ("joint", config, {})
    seconds: dict[str, float] = {}
    for name, (decoder, settings, own) in cases.items():
        how: dict[str, Any] = {"decoder": decoder, "sampler": sampler, **own}
        if name in ("parallel", "adjust") and not flags.no_eager:
            decode(base, prompts, settings.but(max_new_tokens=8), eager=True, **how)
            slow = decode(base, prompts, settings, eager=True, **how).seconds
            say(facts, f"B={rows} eager {name} tokens/s", round(rows * flags.new / slow, 1))
        first = decode(base, prompts, settings, eager=False, **how).seconds
        seconds[name] = min(decode(base, prompts, settings, eager=False, **how).seconds for _ in range(2))
        say(facts, f"B={rows} fast {name} tokens/s", round(rows * flags.new / seconds[name], 1))
        say(facts, f"B={rows} fast {name} / parallel", round(seconds[name] / seconds["parallel"], 3))
        say(facts, f"B={rows} fast {name}, first call beyond a later one, s", round(first - seconds[name], 2))


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=FAMILIES, default="dream")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    facts: dict[str, Any] = {"torch": torch.__version__, "card": torch.cuda.get_device_name() if CUDA else "cpu"}
    facts |= {"shape": flags.shape, "compile": flags.compile, "new": flags.new, "prompt": flags.prompt}
    started = time.perf_counter()
    if not flags.no_check:
        same_tokens(facts)
        say(facts, "check seconds", round(time.perf_counter() - started, 1))
    if CUDA:
        ceilings(facts)
    shape = {"num_hidden_layers": flags.layers} if flags.layers else {}
    base, sampler = random_base(flags.shape, torch.bfloat16 if CUDA else torch.float32, **shape)
    say(facts, "GiB of weights", round(torch.cuda.memory_allocated() / 2**30, 2) if CUDA else None)
    if flags.compile:
        base.compile()
    for rows in map(int, flags.rows.split(",")):
        whole_decodes(facts, base, sampler, rows, flags)
        components(facts, base, sampler, rows, flags.prompt + flags.new)
        say(facts, f"B={rows} captures so far", captures(base))
        say(facts, f"B={rows} GiB reserved", round(torch.cuda.memory_reserved() / 2**30, 2) if CUDA else None)
    say(facts, "seconds", round(time.perf_counter() - started, 1))
    if flags.output:
        flags.output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
