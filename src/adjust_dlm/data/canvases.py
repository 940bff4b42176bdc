"""What a corpus holds: texts and chats sampled from the AR model, list tasks, questions that it answers right.

A canvas is its tokens and how many of them in front are given and never masked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from adjust_dlm.bases import Base
from adjust_dlm.bases.autoregressive import Vocabulary
from adjust_dlm.data.ar import CHAT_TEMPLATE, CHAT_TURN, CHAT_USER, ar_replies, ar_sample, chat_context, endless
from adjust_dlm.data.lists import list_tasks
from adjust_dlm.data.questions import asks_held_out, questions
from adjust_dlm.data.settings import KINDS, SPLITS, CorpusConfig
from adjust_dlm.types import require

MAX_USER_TOKENS = 64
MIN_YIELD = 0.005  # a model that gives fewer chats or right answers than this does not know the template
QUESTION_TEMPERATURE = 0.5
QUESTIONS_AT_ONCE = 16_384  # those of like lengths are sampled together: of many, a batch differs little
ANSWER_TOKENS = 24  # the right word stands in so many tokens of a reply
logger = logging.getLogger(__name__)
Canvas = tuple[list[int], int]


@dataclass(frozen=True)
class Source:
    """Where canvases come from: an autoregressive base, its tokenizer and its special ids."""

    base: Base
    tokenizer: Any
    vocabulary: Vocabulary
    template: str = CHAT_TEMPLATE  # of chats in files

    @functools.cached_property
    def endless(self) -> Base:
        """The base for canvases that are full: texts go on behind an end."""
        return endless(self.base)

    def forget(self) -> None:
        """Lets go of what sampling has kept on the device."""
        self.base.workspace = self.endless.workspace = None


def chat_canvas(
    sample: list[int], prefix: list[int], turn: list[int], end_ids: tuple[int, ...], length: int
) -> Canvas | None:
    """A canvas from what the model wrote after the user prefix, or None if it is no chat.

    A chat has a user turn of 1 to `MAX_USER_TOKENS` tokens, closed by `turn` (whose first token is the first end token
    of the sample), and a reply of at least one token. The reply is given up to its first end token and filled with
    end tokens; a reply without one is kept as it is cut.
    """
    start = next((n for n, token in enumerate(sample) if token in end_ids), None)
    if start is None or not 1 <= start <= MAX_USER_TOKENS or sample[start : start + len(turn)] != turn:
        return None
    first = start + len(turn)
    end = next((n for n in range(first, len(sample)) if sample[n] in end_ids), len(sample) - 1)
    if end < first or sample[first] in end_ids:
        return None
    tokens = prefix + sample[: end + 1]
    return tokens + [end_ids[0]] * (length - len(tokens)), len(prefix) + first


def canvases(config: CorpusConfig, source: Source, split: str, kind: str, shard: int, rows: int) -> Iterator[Canvas]:
    """The stream of canvases of one shard; its first `rows` are the shard."""
    stream = 2 * KINDS.index(kind) + SPLITS.index(split)
    first_row, seed = (stream << 40) + (shard << 24), (config.seed << 32) + shard
    if kind == "lists":
        return _list_canvases(config, source, seed, held_out=split == "heldout")
    if kind == "questions":
        return _question_canvases(config, source, seed, first_row, rows, held_out=split == "heldout")
    if kind == "text":
        prefix = [source.vocabulary.bos_id]
        return ((prefix + sample, 1) for sample in _draw(config, source, [], prefix, first_row, rows))
    return _chat_canvases(config, source, first_row, rows)


def _draw(
    config: CorpusConfig, source: Source, context: list[int], prefix: list[int], row: int, count: int
) -> list[list[int]]:
    """`count` samples that fill a canvas behind `prefix`; `context` stands before it and is not part of the canvas."""
    return ar_sample(
        source.endless, [context + prefix] * count, rows=range(row, row + count), batch_size=config.sample_batch,
        new_tokens=config.length - len(prefix), seed=config.seed, temperature=config.sample_temperature,
        top_p=config.sample_top_p,
    )  # fmt: skip


def _chat_canvases(config: CorpusConfig, source: Source, first_row: int, rows: int) -> Iterator[Canvas]:
    prefix, context, turn = (_ids(source, text) for text in (CHAT_USER, chat_context(source.tokenizer), CHAT_TURN))
    tried = kept = 0
    count = min(config.sample_batch, 4 * rows)
    while True:
        for sample in _draw(config, source, context, prefix, first_row + tried, count):
            canvas = chat_canvas(sample, prefix, turn, source.vocabulary.end_ids, config.length)
            if canvas is not None and not asks_held_out(source.tokenizer.decode(sample[:MAX_USER_TOKENS])):
                kept += 1
                yield canvas
        tried += count
        logger.info("corpus: %d of %d samples are chats", kept, tried)
        message = f"only {kept} of {tried} samples after {CHAT_USER!r} are a chat; ask for no chat canvases"
        require(kept >= MIN_YIELD * tried, message)


def _question_canvases(
    config: CorpusConfig, source: Source, seed: int, first_row: int, rows: int, *, held_out: bool
) -> Iterator[Canvas]:
    """Replies that end and are right, at a low temperature: what the model says then is what it holds to be true."""
    stream, end_ids = questions(seed, held_out=held_out), source.vocabulary.end_ids
    prefix, turn = _ids(source, CHAT_USER), _ids(source, CHAT_TURN)
    tried = kept = 0
    while True:
        asked = list(islice(stream, min(QUESTIONS_AT_ONCE, 4 * rows)))
        replies = ar_replies(
            source.base, [text for text, _ in asked], new_tokens=config.length // 2, batch_size=config.sample_batch,
            temperature=QUESTION_TEMPERATURE, seed=config.seed, first_row=first_row + tried,
        )  # fmt: skip
        for (text, fact), reply in zip(asked, replies, strict=True):
            if reply[-1] in end_ids and fact.right(source.tokenizer.decode(reply[:-1][:ANSWER_TOKENS])):
                sample = [*_ids(source, text), *turn, *reply]
                canvas = chat_canvas(sample[: config.length - len(prefix)], prefix, turn, end_ids, config.length)
                if canvas is not None:
                    kept += 1
                    yield canvas
        tried += len(asked)
        logger.info("corpus: %d of %d questions are answered right", kept, tried)
        require(kept >= MIN_YIELD * tried, f"only {kept} of {tried} questions are answered right; ask for none")


def _ids(source: Source, text: str) -> list[int]:
    return list(source.tokenizer.encode(text, add_special_tokens=False))


def _list_canvases(config: CorpusConfig, source: Source, seed: int, held_out: bool) -> Iterator[Canvas]:
    tasks, end = list_tasks(seed, held_out=held_out), source.vocabulary.end_ids[0]
    while batch := list(islice(tasks, 1024)):
        fits = 0
        for task in batch:
            prompt = _ids(source, CHAT_USER + task.prompt + CHAT_TURN)
            tokens = [*prompt, *_ids(source, task.answer), end]
            if len(tokens) <= config.length:
                fits += 1
                yield tokens + [end] * (config.length - len(tokens)), len(prompt)
        require(fits > 0, f"no list task fits a canvas of {config.length} tokens; raise the length or ask for none")
