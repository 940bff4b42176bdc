"""`adjust compare`: the same prompt through joint, parallel and ADJUST, side by side."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console, Group
from rich.table import Column, Table

from adjust_dlm.commands.common import (
    DecodeFlags,
    encode_prompts,
    from_pipe,
    load_for,
    sample_record,
    setup_facts,
    status,
)
from adjust_dlm.commands.generate import Watch
from adjust_dlm.commands.output import Outcome, say, show_table, show_value, to_json
from adjust_dlm.types import EVALUATION_ROWS, DecodeConfig, require
from adjust_dlm.words import counted

if TYPE_CHECKING:
    from adjust_dlm.bases import Base
    from adjust_dlm.decoders import Canvas
    from adjust_dlm.eval.scores import Judge

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
    config = DecodeConfig.from_settings(flags)
    from adjust_dlm.eval.generation import sampler_for
    from adjust_dlm.eval.scores import load_judge
    from adjust_dlm.eval.settings import NllConfig

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
    _show(flags, rows, closing(rows, groups))
    return Outcome(results={"rows": rows, "prompt": "".join(texts), **setup_facts(base, sampler)}, samples=samples)


def _decode(flags: CompareConfig, base: Base, sampler: Any, ids: list[int], config: DecodeConfig) -> list[Record]:
    from adjust_dlm.decoders import decode

    prompts, eager = [ids] * flags.num_samples, flags.eager or None
    rows = list(range(EVALUATION_ROWS, EVALUATION_ROWS + flags.num_samples))
    names, samples = ("joint", "parallel") if sampler is None else ("joint", "parallel", "adjust"), []
    card, live = base.device.type == "cuda", not flags.json and flags.num_samples == 1 and sys.stdout.isatty()
    # One untimed pass: what a process does only once (loading kernels) is not the first decoder's cost. On a card every
    # decoder captures its own steps, so there each runs once before; a watched run takes the reference form, and is one
    # more. On the CPU it is the timed one, without the time that drawing took.
    first = config.but(tokens_per_step=config.max_new_tokens)
    decode(base, prompts, first, decoder=names[-1], sampler=sampler, eager=eager)
    columns = Columns(base, names)
    with columns if live else nullcontext():
        for name in names:
            columns.begin(name)
            with nullcontext() if live else status(f"decoding: {name}"):
                for watch in [columns if live else None] * (live or not card) + [None, None] * card:
                    result = decode(
                        base, prompts, config, decoder=name, sampler=sampler, rows=rows, watch=watch,
                        eager=eager if watch is None else True,
                    )  # fmt: skip
            result.seconds -= 0 if card else columns.seconds
            samples += [{**sample_record(base, result, b), "row": row} for b, row in enumerate(rows)]
    return samples


class Columns(Watch):
    """The decoders side by side, of which one fills in at a time; gone once their table stands there."""

    def __init__(self, base: Base, names: Sequence[str], console: Console | None = None) -> None:
        super().__init__(base, console)
        self.transient, self.columns = True, {name: Group() for name in names}

    def begin(self, name: str) -> None:
        """Goes on to the column `name`; from here on `seconds` is what drawing it takes."""
        self.name, self.seen_B, self.seconds = name, None, 0.0

    def __call__(self, canvas: Canvas) -> None:
        """Draws the canvas in its column; once it is full, no token stands out any more."""
        started = time.perf_counter()
        if not canvas.open:
            self.seen_B = canvas.commits_B
        self.columns[self.name] = self.frame(canvas)
        self.seen_B = canvas.commits_B.clone()
        table = Table(*(Column(name, ratio=1) for name in self.columns), expand=True)
        table.add_row(*self.columns.values())
        self.update(table, refresh=True)
        self.seconds += time.perf_counter() - started


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


def closing(rows: Sequence[Record], groups: Sequence[Sequence[Record]]) -> str:
    """What the table comes to, in one sentence: whose texts are joint's, base passes, and how many times as fast."""
    joint, texts = rows[0], [[sample["text"] for sample in group] for group in groups]
    each = " a sample" if joint["samples"] > 1 else ""
    said = [f"joint took {counted(joint['base_calls'], 'base pass')}{each}"]
    for row, own in zip(rows[1:], texts[1:], strict=True):
        same = sum(a == b for a, b in zip(own, texts[0], strict=True))
        of = f" in {same} of {len(own)} samples" if 0 < same < len(own) else ""
        text, passes = ("the same" if same else "another") + " text", show_value(row["base_calls"])
        said.append(f"{row['decoder']} wrote {text}{of}, took {passes}")
        if joint["tokens_per_second"] and row["tokens_per_second"]:
            times = float(f"{row['tokens_per_second'] / joint['tokens_per_second']:.2g}")
            said[-1] += f" and was {'only ' * (times < 1)}{f'{times:g} times ' * (times != 1)}as fast"
    return f"{'; '.join(said)} (tokens/s while decoding; loading and warm-up are not counted)."


def _show(flags: CompareConfig, rows: list[Record], summary: str) -> None:
    """JSON lines, or the decoders side by side and a sentence; the NLL line is there only if something was scored."""
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
    Console(file=sys.stdout).print(summary, highlight=False, markup=False)
