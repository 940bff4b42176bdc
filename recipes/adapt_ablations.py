"""Adapts one block base after another on an equal budget of seconds or steps, and looks at each.

    python recipes/adapt_ablations.py OUTPUT --corpus DIR --seconds 60 [--only S-8 suffix-1] [--share 0/4]

Several processes, each with a `--share` of its own, first make the corpus together. A line of JSON for each variant:
masked cross-entropy by rate, held out and on as many training canvases; from left to right, and for some by entropy,
NLL and distinct-2 of joint text at T = 1, KL(q||p) of parallel decoding at K = 4, held-out questions answered right at
T = 0; NLL and distinct-2 of the text that was trained on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from answers import NEW_TOKENS, answered, asked

from adjust_dlm import DecodeConfig, load_base
from adjust_dlm.bases.autoregressive import autoregressive_base, load_ar, read_vocabulary
from adjust_dlm.data.canvases import Source
from adjust_dlm.data.corpus import build_corpus, load_corpus
from adjust_dlm.data.settings import SAMPLED, CorpusConfig
from adjust_dlm.eval import divergence
from adjust_dlm.eval.nll import score_nll
from adjust_dlm.eval.table import TableConfig, distinct_n, generate_cell, open_judge, score_line
from adjust_dlm.train import masked_ce
from adjust_dlm.train.adapt import AdaptConfig, adapt

Line = dict[str, Any]
SHIPPED: Line = {
    "batch_size": 256,
    "block_size": 16,
    "suffix": 0.5,
    "lora_rank": 32,
    "lr": 4e-3,
    "warmup": 30,
    "share_text": 0.55,
    "share_chat": 0.3,
    "share_questions": 0.1,
}
VARIANTS: dict[str, Line] = {
    "shipped": {},
    "any": {"suffix": 0.0},
    "suffix-1": {"suffix": 1.0},
    "S-8": {"block_size": 8},
    "S-32": {"block_size": 32},
    "rank-16": {"lora_rank": 16},
    "rank-64": {"lora_rank": 64},
    "rank-576": {"lora_rank": 576},  # as wide as the model: any change of the weights can be learned
    "top-p-1": {"sample_top_p": 1.0},
    "top-p-0.9": {"sample_top_p": 0.9},
    "chats-most": {"share_text": 0.3, "share_chat": 0.5, "share_questions": 0.15},
    "seed-1": {"seed": 1},
    "lr-2e-3": {"lr": 2e-3},
    "lr-8e-3": {"lr": 8e-3},
    "whole-canvas": {"block_size": None, "suffix": 0.0},
    "whole-canvas-repeated": {"block_size": None, "suffix": 0.0, "some": 1 / 50},
    "repeated": {"some": 1 / 50},
}
BY_ENTROPY = ("shipped", "any", "whole-canvas", "whole-canvas-repeated")  # looked at in this order as well


def make_corpus(args: argparse.Namespace, part: int, parts: int) -> None:
    """This process's shards; returns when those of all others are there, too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_ar(args.ar, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    base = autoregressive_base(model, tokenizer)
    source = Source(base, tokenizer, read_vocabulary(tokenizer, model.config))
    sizes = {kind: getattr(args, kind) for kind in SAMPLED}
    config = CorpusConfig(ar=args.ar, **sizes, heldout=args.heldout, length=args.length)
    build_corpus(args.corpus, config, source, rank=part, world=parts)
    while not all((args.corpus / name).is_file() for name in config.shards()):
        time.sleep(1)


def train(args: argparse.Namespace, name: str) -> Line:
    """The adaptation of a variant; its corpus is the given one unless the variant samples another."""
    settings = SHIPPED | VARIANTS[name]
    some = settings.pop("some", 1.0)
    output, own = args.output / name, "sample_top_p" in settings
    sizes = {kind: getattr(args, kind) for kind in SAMPLED}
    if own:  # for less than one epoch of the budget; a corpus belongs to its settings
        sizes |= {"text": args.text // 6, "chat": args.chat // 6}
    config = AdaptConfig(
        output=output, corpus=None if own else args.corpus, ar=args.ar, **sizes, heldout=args.heldout,
        length=args.length,
        micro_batch=args.micro_batch, steps=args.steps, max_seconds=args.seconds or None,
        lora_alpha=settings["lora_rank"], log_every=20, share_lists=0.05, **settings,
    )  # fmt: skip
    kept = masked_ce.CanvasBatches.__init__

    def fewer(self: Any, corpus: Any, *rest: Any, **named: Any) -> None:
        ends = [(corpus.kind_N == kind).nonzero()[:, 0] for kind in corpus.kind_N.unique()]
        kept(self, corpus._rows(torch.cat([e[: max(1, int(len(e) * some))] for e in ends])), *rest, **named)

    masked_ce.CanvasBatches.__init__ = fewer  # type: ignore[method-assign]
    try:
        return adapt(config)
    finally:
        masked_ce.CanvasBatches.__init__ = kept  # type: ignore[method-assign]


def look(args: argparse.Namespace, name: str, questions: list[Any]) -> Line:
    """What a trained base writes."""
    base = load_base(str(args.output / name), device=args.device)
    table = TableConfig(
        base=str(args.output / name), output=str(args.output / f"{name}-texts"), n=args.n, batch_size=args.n,
        max_new_tokens=args.length - 1, divergence=0, temperatures=(1.0,), judge=args.ar,
    )  # fmt: skip
    judge, start = open_judge(table, base)
    out: Line = {}
    for order in ("left_to_right", *(("entropy",) if name in BY_ENTROPY else ())):
        rows = [line.tokens for line in generate_cell(base, {}, table, (1.0, f"joint:order={order}", 1))]
        joint = score_line(1.0, "joint", 1, rows, score_nll(judge, rows, condition_id=start, batch_size=64))
        law = divergence.DivergenceConfig(
            base=table.base, output=f"{table.output}/law-{order}", n=args.n // 4, batch_size=args.n, order=order,
            max_new_tokens=args.length - 1, decoders=("parallel",), tokens_per_step=(4,), sources=("own",),
        )  # fmt: skip
        found = divergence.run(law, base=base)["rows"][0]
        config = DecodeConfig(tokens_per_step=1, max_new_tokens=NEW_TOKENS, temperature=0.0, seed=3, order=order)
        right = sum(answered(base, questions, config, "joint")[0])
        out[order] = {"nll": joint["nll"], "ci95": joint["nll_ci95"], "distinct_2": joint["distinct_2"]}
        out[order] |= {"parallel_kl": found["kl_qp"], "kl_ci95": found["kl_qp_ci95"], "right": int(right)}
    own = args.output / name / "corpus"
    corpus = load_corpus(own if own.is_dir() else args.corpus, "train").of_kind("text")
    text = corpus.tokens_NL[: 4 * args.n, 1:].tolist()
    target = score_nll(judge, text, condition_id=start, batch_size=64)
    out |= {"text_nll": target.nll, "text_ci95": target.ci95, "text_distinct_2": distinct_n(text[: args.n], 2)}
    return out | {"asked": len(questions)}


def main() -> None:
    """This process's share of the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--ar", default="smol")
    parser.add_argument("--seconds", type=float, default=60, help="of training each; 0: --steps alone end it")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--share", default="0/1", help="this process of so many")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds after which no variant is begun")
    parser.add_argument("--device", default="auto")
    sizes = {"text": 400_000, "chat": 60_000, "lists": 5_000, "questions": 16_384, "heldout": 512, "length": 128,
             "micro_batch": 128, "steps": 100_000, "n": 512}  # fmt: skip
    for size, number in sizes.items():
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, default=number)
    args = parser.parse_args()
    if not args.seconds and args.steps == sizes["steps"]:
        parser.error("--seconds 0 needs --steps")
    began, (part, parts) = time.monotonic(), map(int, args.share.split("/"))
    args.output.mkdir(parents=True, exist_ok=True)
    make_corpus(args, part, parts)
    questions: list[Any] | None = None
    for name in args.only[part::parts]:
        if time.monotonic() - began > args.stop_after:
            sys.stderr.write(f"{name}: no time left\n")
            continue
        start = time.monotonic()
        result = train(args, name)
        if not result["finished"]:
            raise SystemExit("stopped by a signal")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        questions = asked(args.ar, 200, device) if questions is None else questions
        line = {"variant": name, **{key: result[key] for key in ("step", "tokens", "tokens_per_second")}}
        line |= look(args, name, questions) | {"ce": result["ce"], "ce_train": result["ce_train"]}
        line["wall"] = round(time.monotonic() - start)
        with (args.output / f"lines-{part}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
