"""`adjust compare`: the same prompt through joint, parallel and ADJUST, side by side."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from adjust_dlm.commands.common import (
    DecodeFlags,
    encode_prompts,
    from_pipe,
    load_for,
    sample_record,
    sampler_for,
    setup_facts,
    status,
)
from adjust_dlm.commands.output import Outcome, say, show_table, to_json

if TYPE_CHECKING:
    from adjust_dlm.bases import Base
    from adjust_dlm.eval.scores import Judge
    from adjust_dlm.types import DecodeConfig

logger = logging.getLogger(__name__)
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompareConfig(DecodeFlags):
    """Settings of `adjust compare`.

    Attributes:
        prompt: what to continue or answer, - is read from a pipe; without one, text from the base's start token alone.
    """

    prompt: Annotated[str | None, tyro.conf.Positional] = None


def run(flags: CompareConfig) -> Outcome:
    """Decodes `num_samples` rows per decoder (same row numbers, same seed), and scores them as `adjust eval nll` does.

    The rows are those for evaluation, since joint text of a row that g was trained on is the training text.
    """
    config = flags.decode_config()
    from adjust_dlm.eval.scores import NllConfig, load_judge
    from adjust_dlm.types import require

    base = load_for(flags)
    sampler, judge, source = sampler_for(flags, base), None, flags.partner or base.ar_source
    if source is not None:
        require(base.tokenizer is not None, f"base {flags.base!r} has no tokenizer: {source} cannot read its texts")
        judge = load_judge(NllConfig(files=("samples.jsonl",), judge=source, device=str(base.device)))
    else:
        logger.info("no NLL column: base %r has no autoregressive partner", flags.base)
    if sampler is None:
        logger.warning("decoder adjust is left out: no sampler ships for base %r; name one with --sampler", flags.base)
    texts = from_pipe([] if flags.prompt is None else [flags.prompt])
    (ids,) = encode_prompts(base, texts, config, chat=flags.chat)
    samples = _decode(flags, base, sampler, ids, config)
    groups = [samples[at : at + flags.num_samples] for at in range(0, len(samples), flags.num_samples)]
    rows = [_row(group, None if judge is None else _nll(judge, group)) for group in groups]
    _show(flags, rows)
    return Outcome(results={"rows": rows, "prompt": "".join(texts), **setup_facts(base, sampler)}, samples=samples)


def _decode(flags: CompareConfig, base: Base, sampler: Any, ids: list[int], config: DecodeConfig) -> list[Record]:
    from adjust_dlm.decoders import decode
    from adjust_dlm.sampling import EVALUATION_ROWS

    prompts = [ids] * flags.num_samples
    rows = list(range(EVALUATION_ROWS, EVALUATION_ROWS + flags.num_samples))
    eager = flags.eager or None
    # One untimed pass: what a process does only once (loading kernels) is not the first decoder's cost. On a card every
    # decoder captures its own steps, so there each runs once before.
    decode(base, prompts, config.but(tokens_per_step=config.max_new_tokens), decoder="parallel", eager=eager)
    samples = []
    for name in ("joint", "parallel") if sampler is None else ("joint", "parallel", "adjust"):
        with status(f"decoding: {name}"):
            for _ in range(2 if base.device.type == "cuda" else 1):
                result = decode(base, prompts, config, decoder=name, sampler=sampler, rows=rows, eager=eager)
        samples += [{**sample_record(base, result, b), "row": row} for b, row in enumerate(rows)]
    return samples


def _nll(judge: Judge, samples: list[Record]) -> float | None:
    """Of one decoder's texts, and into each sample its own; None where no text has a token."""
    texts = [judge.ids(s["text"]) for s in samples]
    if not any(texts):
        return None
    found = judge.score(texts, [s["given"] for s in samples], batch_size=32)
    for s, total, count in zip(samples, found.sum_nll_N.tolist(), found.tokens_N.tolist(), strict=True):
        s["nll"] = total / count if count else None
    return found.nll


def _row(samples: list[Record], nll: float | None) -> Record:
    """One decoder's numbers: passes and tokens are means per sample, seconds are those of the whole batch."""
    tokens = sum(s["completion_tokens"] for s in samples)
    means = ("completion_tokens", "base_calls", "sampler_calls")
    return {
        **{name: samples[0][name] for name in ("decoder", "tokens_per_step", "text", "seconds")},
        **{name: mean(s[name] for s in samples) for name in means},
        "nll": nll,
        "tokens_per_second": tokens / samples[0]["seconds"], "samples": len(samples),
    }  # fmt: skip


def _show(flags: CompareConfig, rows: list[Record]) -> None:
    """JSON lines, or the decoders side by side; the NLL line is there only if something was scored."""
    if flags.json:
        for row in rows:
            say(to_json(row))
        return
    lines = {
        "text": "text", "nll": "NLL", "base_calls": "base passes", "sampler_calls": "sampler passes",
        "seconds": "seconds", "tokens_per_second": "tokens/s",
    }  # fmt: skip
    if all(row["nll"] is None for row in rows):
        del lines["nll"]
    columns = ["", *(f"{row['decoder']}, K={row['tokens_per_step']}" for row in rows)]
    show_table(columns, [[title, *(row[key] for row in rows)] for key, title in lines.items()])
