"""Prompts with examples: how a question and its examples become a `Problem`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adjust_dlm.eval.downstream import Problem
from adjust_dlm.types import require


@dataclass(frozen=True)
class Shot:
    r"""An example.

    Attributes:
        ask: what the prompt says up to where the answer begins, such as "Q: ...\nA:".
        answer: the answer as the model should write it.
    """

    ask: str
    answer: str


def first_shots(shots: Sequence[Shot], count: int, where: str) -> list[Shot]:
    """The first `count`.

    Raises:
        InputError: there are fewer.
    """
    require(len(shots) >= count, f"{where} has {len(shots)} examples, {count} are asked for; give fewer --shots")
    return list(shots[:count])


def with_shots(id: str, ask: str, shots: Sequence[Shot], facts: dict[str, Any], *, kind: str, chat: bool) -> Problem:
    """A problem behind its examples: turns of a chat, or one text with blank lines between.

    Raises:
        InputError: the question is one of the examples.
    """
    require(all(ask != shot.ask for shot in shots), f"problem {id} is among the examples of its own prompt")
    if chat:
        return Problem(id, ask, facts, kind, tuple(text for shot in shots for text in (shot.ask, shot.answer)))
    return Problem(id, "\n\n".join([*(f"{shot.ask} {shot.answer}" for shot in shots), ask]), facts, kind)
