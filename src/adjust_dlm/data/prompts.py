"""Where prompts come from: nothing, a file, list tasks, short questions, or a corpus; row i takes prompt i mod n."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from adjust_dlm.bases import Base
from adjust_dlm.data.corpus import load_corpus
from adjust_dlm.data.lists import list_tasks
from adjust_dlm.data.questions import questions
from adjust_dlm.data.settings import check_prompts
from adjust_dlm.data.texts import json_value, lines_of
from adjust_dlm.types import refusing, require

FIELDS = ("prompt", "text", "question", "instruction")  # of a JSONL line; the first one present wins, then `messages`


@dataclass(frozen=True)
class PromptSource:
    """Prompts as token ids.

    Attributes:
        name: what was asked for, for the record.
        prompts: at least one list of ids (an empty list is a prompt).
    """

    name: str
    prompts: list[list[int]]

    def __post_init__(self) -> None:
        require(bool(self.prompts), f"{self.name} holds no prompts")

    def __len__(self) -> int:
        return len(self.prompts)

    def ids(self, row: int) -> list[int]:
        """Prompt of a global row: the list starts again when it is used up."""
        return self.prompts[row % len(self.prompts)]

    @cached_property
    def lengths(self) -> set[int]:
        """The different prompt lengths in tokens."""
        return {len(p) for p in self.prompts}

    def facts(self) -> dict[str, Any]:
        """For a manifest: name, number, and a digest of all ids."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(np.array([len(prompt), *prompt], dtype="<i8").tobytes())
        return {"source": self.name, "count": len(self), "sha256": digest.hexdigest()}

    def check_fits(self, base: Base, new: int) -> None:
        """Raises InputError, naming the first prompt that leaves no room for `new` tokens."""
        for n, prompt in enumerate(self.prompts):
            require(
                len(prompt) + new <= base.spec.context,
                f"prompt {n} of {self.name} has {len(prompt)} tokens; with {new} new ones that is more than "
                f"{base.spec.context}, the context of base {base.spec.name!r}",
            )


def open_prompts(spec: str, base: Base, *, chat: bool = False, rows: int = 1, seed: int = 0) -> PromptSource:
    """Finds a source by its description; an endless one makes `rows` different prompts by `seed`.

    The description is `unconditional`, `lists`, `questions` (none that is held out), `corpus:DIR` (its chats), or the
    path of a .jsonl or .txt file; `chat` puts each text of a file into the base's chat template (list tasks always are
    in it).

    Raises:
        InputError: unknown source, a bad or empty file (the line is named), or an incomplete or unreadable corpus.
    """
    check_prompts(spec, chat=chat)
    if spec == "unconditional":
        return PromptSource(spec, [unconditional(base)])
    if spec in ("lists", "questions"):  # no corpus has a negative seed, so none holds these
        lists, asked = list_tasks(-1 - seed), questions(-1 - seed)
        texts = (task.prompt for task in lists) if spec == "lists" else (text for text, _ in asked)
        return PromptSource(spec, [_encode(base, text, True, spec) for text in itertools.islice(texts, rows)])
    kind, _, folder = spec.partition(":")
    if kind == "corpus" and folder:  # the prompt part of every chat for training, copies dropped
        chats = load_corpus(Path(folder), "train").of_kind("chat")
        rows_N = zip(chats.tokens_NL.tolist(), chats.prompt_len_N.tolist(), strict=True)
        return PromptSource(spec, [*map(list, dict.fromkeys(tuple(tokens[:length]) for tokens, length in rows_N))])
    path = Path(spec)
    found = [(_json_line(line, where) if path.suffix == ".jsonl" else line, where) for where, line in lines_of(path)]
    return PromptSource(spec, [_encode(base, prompt, chat, where) for prompt, where in found])


def unconditional(base: Base) -> list[int]:
    """BOS alone, or nothing when the family has none."""
    return [] if base.spec.bos_id is None else [base.spec.bos_id]


def _json_line(line: str, where: str) -> str | list[Any]:
    """The prompt of one JSON object: text, or chat messages up to the turn to be answered."""
    item = json_value(line, where)
    require(isinstance(item, dict), f"{where}: a JSON object is wanted")
    for name in FIELDS:
        if name in item:
            text = item[name]
            require(isinstance(text, str) and bool(text.strip()), f"{where}: {name} is {text!r}; it must be some text")
            return str(text)
    require("messages" in item, f"{where}: none of {', '.join(FIELDS)}, messages is there")
    messages = item["messages"]
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    require(good, f"{where}: messages must be a list of objects with a role and a content")
    while messages and messages[-1]["role"] == "assistant":  # that is the answer
        messages = messages[:-1]
    require(bool(messages), f"{where}: messages holds no turn to answer")
    return list(messages)


def _encode(base: Base, prompt: str | list[Any], chat: bool, where: str) -> list[int]:
    with refusing(where, Exception, first=True):  # no tokenizer or template, or one that wants other turns
        return base.encode(prompt, chat=chat) if isinstance(prompt, str) else base.encode_messages(prompt)
