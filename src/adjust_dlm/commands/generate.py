"""`adjust generate`: prompts in, texts out."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from adjust_dlm.commands.common import (
    DecodeFlags,
    check_fit,
    encode_prompt,
    load_for,
    load_sampler_for,
    no_prompt,
    sample_record,
    setup_facts,
)
from adjust_dlm.commands.output import Outcome, say, to_json

if TYPE_CHECKING:
    from adjust_dlm.bases import Base
    from adjust_dlm.types import DecodeConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(DecodeFlags):
    """Settings of `adjust generate`.

    Attributes:
        prompt: one or more prompts; without any, text from the base's start token alone.
        decoder: joint (one token per pass), parallel, adjust, ...; each is one file of the package.
        set: settings that only this decoder has, as NAME=VALUE (threshold: tau=0.9).
        batch_size: rows decoded at once; does not change any sample.
        watch: show the canvas filling in, live; needs a terminal.
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    decoder: str = "adjust"
    set: tuple[str, ...] = ()
    batch_size: int = 16
    watch: bool = False


def run(flags: GenerateConfig) -> Outcome:
    """Decodes every prompt `num_samples` times; sample i of prompt j is row j * num_samples + i."""
    config = _check(flags)
    base = load_for(flags)
    sampler, partner = _sampler(flags, base), _partner(flags, base)
    prompts = [encode_prompt(base, text, chat=flags.chat) for text in flags.prompt] or [no_prompt(base)]
    check_fit(base, prompts, config)
    started = time.perf_counter()
    records = []
    for record in _decode_all(flags, config, base, prompts, sampler=sampler, partner=partner):
        records.append(record)
        _show(flags, record, several=len(prompts) * flags.num_samples > 1)
    results = {**summary(records, time.perf_counter() - started), **setup_facts(base, sampler)}
    passes = ("base", "sampler", "partner") if partner else ("base", "sampler")
    cost = ", ".join(f"{results[f'{kind}_calls']} {kind} passes" for kind in passes)
    logger.info("%d tokens in %.2f s; %s", results["completion_tokens"], results["seconds"], cost)
    return Outcome(results=results, samples=records)


def _check(flags: GenerateConfig) -> DecodeConfig:
    """All that can be refused before a model is loaded."""
    from adjust_dlm.decoders import build_options, read_options
    from adjust_dlm.types import require

    config = flags.decode_config()
    build_options(flags.decoder, read_options(flags.set))
    require(flags.batch_size >= 1, f"batch_size is {flags.batch_size}; it must be at least 1")
    require(not (flags.watch and flags.json), "--watch and --json exclude each other: both write to stdout")
    require(not flags.watch or sys.stdout.isatty(), "--watch needs a terminal, and stdout is none")
    return config


def _sampler(flags: GenerateConfig, base: Base) -> Any:
    from adjust_dlm.decoders import DECODERS

    if DECODERS[flags.decoder].needs_sampler:
        return load_sampler_for(flags, base)
    if flags.sampler:
        logger.warning("decoder %s uses no sampler: %s is not read", flags.decoder, flags.sampler)
    return None


def _partner(flags: GenerateConfig, base: Base) -> Any:
    from adjust_dlm.bases.partner import load_partner
    from adjust_dlm.decoders import DECODERS

    if DECODERS[flags.decoder].needs_partner:
        return load_partner(base, flags.partner)
    if flags.partner:
        logger.warning("decoder %s asks no partner: %s is not read", flags.decoder, flags.partner)
    return None


def _decode_all(
    flags: GenerateConfig, config: DecodeConfig, base: Base, prompts: list[list[int]], **helpers: Any
) -> Iterator[dict[str, Any]]:
    """Records of all rows, batch by batch, with row number and prompt."""
    from adjust_dlm.decoders import decode, read_options

    rows = range(len(prompts) * flags.num_samples)
    batches = [rows[first : first + flags.batch_size] for first in range(0, len(rows), flags.batch_size)]
    for batch in _progress(batches, quiet=flags.watch or len(batches) == 1):
        with _watching(flags, base) as watch:
            result = decode(
                base, [prompts[row // flags.num_samples] for row in batch], config,
                decoder=flags.decoder, rows=list(batch), watch=watch, eager=flags.eager or None, **helpers,
                **read_options(flags.set),
            )  # fmt: skip
        for b, row in enumerate(batch):
            text = flags.prompt[row // flags.num_samples] if flags.prompt else ""
            yield {**sample_record(base, result, b), "row": row, "prompt": text}


def _progress(batches: list[range], *, quiet: bool) -> Iterator[range]:
    """The batches, with a bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    yield from track(batches, "decoding", console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())


def _watching(flags: GenerateConfig, base: Base) -> Any:
    from contextlib import nullcontext

    if not flags.watch:
        return nullcontext()
    from adjust_dlm.commands.watch import Watch

    return Watch(base)


def _show(flags: GenerateConfig, record: dict[str, Any], *, several: bool) -> None:
    """One sample on stdout: text alone, or under its row number, or as JSON."""
    if flags.json:
        hidden = {"prompt"} if flags.num_samples > 1 else {"prompt", "row"}
        say(to_json({key: value for key, value in record.items() if key not in hidden}))
    elif not flags.watch:
        say(f"--- row {record['row']} ---\n{record['text']}" if several else record["text"])


def summary(records: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Totals over samples; throughput counts completion tokens only (no prompt, nothing behind the end)."""
    counted = ("prompt_tokens", "completion_tokens", "base_calls", "sampler_calls", "partner_calls")
    total = {key: sum(record[key] for record in records) for key in counted}
    speed = total["completion_tokens"] / seconds if seconds else 0.0
    return {"samples": len(records), **total, "seconds": round(seconds, 6), "tokens_per_second": speed}
