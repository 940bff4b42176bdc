"""`adjust chat`: a conversation in the terminal; without one, a turn a line from stdin."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adjust_dlm.commands.common import DrawFlags, load_for, sample_record, setup_facts
from adjust_dlm.commands.generate import Watch, helpers_for
from adjust_dlm.commands.output import Outcome, say
from adjust_dlm.types import DecodeConfig, require
from adjust_dlm.variants import build_options, read_options

if TYPE_CHECKING:
    from adjust_dlm.serve.text import Words

logger = logging.getLogger(__name__)
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ChatConfig(DrawFlags):
    """Settings of `adjust chat`.

    Attributes:
        decoder: joint, parallel, adjust, ... (see `adjust decoders`).
        set: settings that only this decoder has, as NAME=VALUE.
        seed: with the number of a turn the only source of randomness.
        output: folder for result.json, samples.jsonl (a turn each) and run.yaml.
    """

    decoder: str = "adjust"
    set: tuple[str, ...] = ()
    seed: int = 0
    output: Path | None = None


def run(flags: ChatConfig) -> Outcome:
    """Asks and answers until stdin ends; the oldest turns are left out once the context is full."""
    config = DecodeConfig.from_settings(flags)
    options = read_options(flags.set)
    build_options(flags.decoder, options)
    from adjust_dlm.decoders import decode  # needs torch, what stands above does not
    from adjust_dlm.serve.text import Words

    base = load_for(flags)
    has_template = bool(getattr(base.tokenizer, "chat_template", None))
    require(has_template, f"base {flags.base!r} has no chat template; use `adjust generate`")
    helpers = helpers_for(flags, base)
    words, messages = Words(base), list[Message]()
    records: list[dict[str, Any]] = []
    while (line := _next_line()) is not None:
        messages.append({"role": "user", "content": line})
        ids = _encoded(words, messages, config)
        with Watch(base) if sys.stdout.isatty() else nullcontext() as watch:
            result = decode(
                base, [ids], config, decoder=flags.decoder, rows=[len(records)], watch=watch,
                eager=flags.eager or None, **helpers, **options,
            )  # fmt: skip
        records.append({**sample_record(base, result, 0), "row": len(records), "prompt": line})
        messages.append({"role": "assistant", "content": records[-1]["text"]})
        if watch is None:
            say(records[-1]["text"])
    return Outcome(results={"turns": len(records), **setup_facts(base, helpers.get("sampler"))}, samples=records)


def _next_line() -> str | None:
    """What the user says next, None at the end of stdin; empty lines are asked again."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.strip()


def _encoded(words: Words, messages: list[Message], config: DecodeConfig) -> list[int]:
    """Ids of the conversation; forgets its oldest question and answer until the reply has room behind them."""
    from adjust_dlm.data.prompts import PromptSource

    room = words.base.spec.context - config.max_new_tokens
    while len(ids := words.encode_messages(messages)) > room and len(messages) > 2:
        logger.info("the context is full: the oldest question and its answer are left out")
        del messages[:2]
    PromptSource("the conversation", [ids]).check_fits(words.base, config.max_new_tokens)
    return ids
