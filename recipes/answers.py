"""Short questions by chat that no corpus asks: how many each decoder answers right.

    python recipes/answers.py [--base DIR --sampler DIR] [--device cuda] [--temperatures 0 0.6] [--number 200]

The questions are those of `adjust_dlm.data.questions` that are held out by fact, the kinds in turn; asked are the first
200 of them that the autoregressive model itself answers right at T = 0. An answer is right if the wanted word stands in
its first 24 tokens. Seed 3, rows for evaluation, one draw of each; the half-width is of the share over questions, 95 %.
"""

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from typing import Any

import torch

from adjust_dlm import Base, DecodeConfig, Sampler, load_base, load_sampler
from adjust_dlm.bases.autoregressive import autoregressive_base, load_ar
from adjust_dlm.data.ar import ar_replies
from adjust_dlm.data.questions import WORDING, Fact, facts
from adjust_dlm.decoders import decode_many
from adjust_dlm.eval.generation import half_width
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.types import GIVEN

NEW_TOKENS = 24
SETTINGS = (
    ("joint", {"tokens_per_step": 1}), ("parallel", {"tokens_per_step": 2}), ("parallel", {"tokens_per_step": 4}),
    ("adjust", {"tokens_per_step": 2}), ("adjust", {"tokens_per_step": 4}), ("adjust", {"tokens_per_step": 8}),
    ("adjust", {"tokens_per_step": 4, "candidates": 0}),
)  # fmt: skip


def held_out_questions() -> list[tuple[str, Fact]]:
    """Each held-out fact once, in its first wording, the kinds in turn."""
    columns = [[f for f in facts() if f.kind == kind and f.is_held_out()] for kind in WORDING]
    rng = random.Random("held-out questions")
    for column in columns:
        rng.shuffle(column)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*columns))
    return [(fact.wordings()[0], fact) for fact in turns if fact is not None]


def asked(ar: str, number: int, device: torch.device) -> list[tuple[str, Fact]]:
    """The first questions that the autoregressive model answers right; says how many it was asked."""
    model, tokenizer = load_ar(ar, device=device, dtype=torch.float32)
    base = autoregressive_base(model, tokenizer)
    found = held_out_questions()
    replies = ar_replies(base, [text for text, _ in found], new_tokens=NEW_TOKENS, batch_size=128)
    end = tokenizer.eos_token_id
    texts = [tokenizer.decode(reply[: reply.index(end)] if end in reply else reply) for reply in replies]
    right = [entry for entry, text in zip(found, texts, strict=True) if entry[1].right(text)]
    kinds = dict(Counter(fact.kind for _, fact in right[:number]))
    facts = {"asked": len(found), "right_at_t0": len(right), "used": len(right[:number]), "kinds": kinds}
    sys.stdout.write(json.dumps({"autoregressive": ar, **facts}) + "\n")
    return right[:number]


def answered(
    base: Base, entries: list[tuple[str, Fact]], config: DecodeConfig, decoder: str, sampler: Sampler | None = None
) -> tuple[list[float], float]:
    """1 where a question is answered right, else 0; and tokens a base pass."""
    prompts = [base.encode_messages([{"role": "user", "content": text}]) for text, _ in entries]
    right, tokens, calls = [0.0] * len(entries), 0, 0
    how: dict[str, Any] = {"decoder": decoder, "sampler": sampler, "batch_size": 256}
    how["rows"] = range(EVALUATION_ROWS, EVALUATION_ROWS + len(prompts))
    for numbers, result in decode_many(base, prompts, config, **how):
        for n, row in zip(numbers, result.tokens_BL.tolist(), strict=True):
            right[n] = float(entries[n][1].right(base.decode(row[-config.max_new_tokens :])))
        tokens, calls = tokens + int((result.order_BL > GIVEN).sum()), calls + int(result.base_calls_B.sum())
    return right, tokens / calls


def main() -> None:
    """Prints a line of JSON for each decoder and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smol-block")
    parser.add_argument("--sampler")
    parser.add_argument("--ar", default="smol", help="the autoregressive model that picks the questions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--number", type=int, default=200)
    args = parser.parse_args()
    base = load_base(args.base, device=args.device)
    g = load_sampler(args.sampler, base)
    entries = asked(args.ar, args.number, base.device)
    for temperature in args.temperatures:
        for decoder, more in SETTINGS:
            config = DecodeConfig(max_new_tokens=NEW_TOKENS, temperature=temperature, seed=3, **more)
            right, speed = answered(base, entries, config, decoder, g if decoder == "adjust" else None)
            line = {"T": temperature, "decoder": decoder, **more, "right": int(sum(right)), "of": len(right)}
            line |= {"half_width": round(half_width(right), 3), "tokens_a_pass": round(speed, 2)}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
