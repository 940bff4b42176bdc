"""`adjust generate`: prompts in, texts out; one text fills in live in the terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from adjust_dlm.checks import Count, require
from adjust_dlm.commands.common import DecodeFlags, encode_prompts, from_pipe, load_for, sample_record, setup_facts
from adjust_dlm.commands.output import Outcome, say, to_json
from adjust_dlm.progress import Bar
from adjust_dlm.types import DecodeConfig
from adjust_dlm.variants import DECODERS, build_options, read_options
from adjust_dlm.words import counted

if TYPE_CHECKING:
    from torch import Tensor

    from adjust_dlm.bases import Base
    from adjust_dlm.decoders import Canvas

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(DecodeFlags):
    """Settings of `adjust generate`.

    Attributes:
        prompt: one or more prompts, - is read from a pipe; without any, text from the base's start token alone.
        decoder: joint (one token per pass), parallel, adjust, ... (see `adjust decoders`).
        set: settings that only this decoder has, as NAME=VALUE (threshold: tau=0.9).
        batch_size: rows decoded at once; does not change any sample.
        watch: show the canvas filling in, in a terminal; auto: a single text. On a card as with --eager.
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    decoder: str = "adjust"
    set: tuple[str, ...] = ()
    batch_size: Count = 16
    watch: Literal["auto", "always", "never"] = "auto"


def run(flags: GenerateConfig) -> Outcome:
    """Decodes every prompt `num_samples` times; sample i of prompt j is row j * num_samples + i."""
    config = _check(flags)
    flags = replace(flags, prompt=tuple(from_pipe(flags.prompt)), watch="always" if _watched(flags) else "never")
    base = load_for(flags)
    helpers = helpers_for(flags, base)
    prompts = encode_prompts(base, flags.prompt, config, chat=flags.chat)
    started = time.perf_counter()
    records = []
    for record in _decode_all(flags, config, base, prompts, helpers):
        records.append(record)
        _show(flags, record, several=len(prompts) * flags.num_samples > 1)
    names = ("prompt_tokens", "completion_tokens", "base_calls", "sampler_calls", "partner_calls")
    total = {key: sum(record[key] for record in records) for key in names}
    seconds = time.perf_counter() - started
    passes = ("base", "sampler", "partner") if "partner" in helpers else ("base", "sampler")
    cost = ", ".join(counted(total[f"{kind}_calls"], f"{kind} pass") for kind in passes)
    logger.info("%s in %.2f s; %s", counted(total["completion_tokens"], "token"), seconds, cost)
    results = {
        "samples": len(records), **total, "seconds": round(seconds, 6),
        "tokens_per_second": total["completion_tokens"] / seconds, **setup_facts(base, helpers.get("sampler")),
    }  # fmt: skip
    return Outcome(results=results, samples=records)


def _check(flags: GenerateConfig) -> DecodeConfig:
    """All that can be refused before a model is loaded."""
    config = DecodeConfig.from_settings(flags)
    live = flags.watch == "always"
    require(not (live and flags.json), "--watch always and --json exclude each other: both write to stdout")
    require(not live or sys.stdout.isatty(), "--watch always needs a terminal, and stdout is none")
    build_options(flags.decoder, read_options(flags.set))
    return config


def _watched(flags: GenerateConfig) -> bool:
    alone = max(1, len(flags.prompt)) * flags.num_samples == 1
    return flags.watch == "always" or (flags.watch == "auto" and alone and not flags.json and sys.stdout.isatty())


def helpers_for(flags: Any, base: Base) -> dict[str, Any]:
    """The sampler and the partner that the flags name, where their decoder needs them."""
    from adjust_dlm.eval.generation import open_helpers

    entry = DECODERS[flags.decoder]
    for kind, needed in (("sampler", entry.needs_sampler), ("partner", entry.needs_partner)):
        if getattr(flags, kind) and not needed:
            logger.warning("decoder %s uses no %s: %s is not read", flags.decoder, kind, getattr(flags, kind))
    return open_helpers(flags, base, [flags.decoder])


def _decode_all(
    flags: GenerateConfig, config: DecodeConfig, base: Base, prompts: list[list[int]], helpers: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Records of all rows, batch by batch, with row number and prompt."""
    from adjust_dlm.decoders import decode

    rows = range(len(prompts) * flags.num_samples)
    batches = [rows[first : first + flags.batch_size] for first in range(0, len(rows), flags.batch_size)]
    live = flags.watch == "always"
    with Bar("decoding", enabled=not live and len(batches) > 1) as bar:
        for batch in batches:
            with Watch(base) if live else nullcontext() as watch:
                result = decode(
                    base, [prompts[row // flags.num_samples] for row in batch], config,
                    decoder=flags.decoder, rows=list(batch), watch=watch, eager=flags.eager or None, **helpers,
                    **read_options(flags.set),
                )  # fmt: skip
            bar.show((batch[-1] + 1) / len(rows))
            for b, row in enumerate(batch):
                text = flags.prompt[row // flags.num_samples] if flags.prompt else ""
                yield {**sample_record(base, result, b), "row": row, "prompt": text}


def _show(flags: GenerateConfig, record: dict[str, Any], *, several: bool) -> None:
    """One sample on stdout: text alone, or under its row number, or as JSON."""
    if flags.json:
        hidden = {"prompt", "given", "pieces", *(("row",) if flags.num_samples == 1 else ())}
        say(to_json({key: value for key, value in record.items() if key not in hidden}))
    elif flags.watch == "never":
        say(f"--- row {record['row']} ---\n{record['text']}" if several else record["text"])


BLOCK, PLAIN_BLOCK = "\u2591\u2591\u2591 ", "... "  # a masked position; the second where the terminal knows ASCII only
MASKED_STYLE, FRESH_STYLE, HEAD_STYLE = "dim", "bold black on green", "dim italic"


class Watch(Live):
    """A hook for `decode(watch=...)` and the context that owns the screen while a batch is decoded."""

    def __init__(self, base: Base, console: Console | None = None) -> None:
        super().__init__(console=console or Console(), auto_refresh=False, vertical_overflow="visible")
        self.base = base
        self.block = PLAIN_BLOCK if self.console.options.ascii_only else BLOCK
        self.seen_B: Tensor | None = None

    def __call__(self, canvas: Canvas) -> None:
        """Draws the canvas; tokens committed since the last frame stand out."""
        self.update(self.frame(canvas), refresh=True)
        self.seen_B = canvas.commits_B.clone()

    def frame(self, canvas: Canvas) -> Group:
        """One text per row of the batch, under a line that counts its passes."""
        seen_B = canvas.commits_B * 0 if self.seen_B is None else self.seen_B
        fresh_BL = canvas.order_BL >= seen_B[:, None]
        parts = []
        for b, number in enumerate(canvas.rows_B.tolist()):
            row = f"row {number}: " if len(canvas.rows_B) > 1 else ""
            base, sampler = int(canvas.base_calls_B[b]), int(canvas.sampler_calls_B[b])
            passes = f"{counted(base, 'base pass')}, {counted(sampler, 'sampler pass')}"
            head = Text(f"{row}{counted(int(canvas.commits_B[b]), 'token')}, {passes}", style=HEAD_STYLE)
            parts += [head, self._row(canvas, b, fresh_BL[b].tolist())]
        return Group(*parts)

    def _row(self, canvas: Canvas, b: int, fresh_L: list[bool]) -> Text:
        """The new positions of row b; neighbours of one style are decoded together (a character may be two tokens)."""
        first = canvas.tokens_BL.shape[1] - canvas.config.max_new_tokens
        tokens, masked, order = (x[b].tolist() for x in (canvas.tokens_BL, canvas.masked_BL, canvas.order_BL))
        text = Text()
        new = [i for i in range(first, len(tokens)) if masked[i] or order[i] >= 0]  # no filler behind the end
        new = list(takewhile(lambda i: masked[i] or tokens[i] not in self.base.spec.end_ids, new))
        for style, run in groupby(new, lambda i: MASKED_STYLE if masked[i] else FRESH_STYLE if fresh_L[i] else ""):
            ids = [tokens[i] for i in run]
            if style == MASKED_STYLE:
                text.append(self.block * len(ids), style)
            elif self.base.tokenizer is None:
                text.append("".join(f"{token} " for token in ids), style)
            else:
                text.append(self.base.tokenizer.decode(ids), style)
        return text
