"""Bodies of answers and events, as OpenAI's clients expect them, and our own."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from adjust_dlm.serve.asks import Prompt
from adjust_dlm.serve.text import Words
from adjust_dlm.serve.work import Finished, Progress, Work

DONE = "data: [DONE]\n\n"
Body = dict[str, Any]


def usage(prompts: Sequence[Prompt], rows: Iterable[Finished]) -> Body:
    """Prompts count once, however many choices they have; completions up to the end token or stop string."""
    prompt, completion = sum(p.given for p in prompts), sum(row.tokens for row in rows)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def passes(rows: Sequence[Finished]) -> Body:
    """What the rows cost, and how long the longest took."""
    return {
        "base_calls": sum(row.cost.base_calls for row in rows),
        "sampler_calls": sum(row.cost.sampler_calls for row in rows),
        "partner_calls": sum(row.cost.partner_calls for row in rows),
        "rounds": max(row.cost.rounds for row in rows),
        "seconds": round(max(row.seconds for row in rows), 6),
        "queued_seconds": round(max(row.queued for row in rows), 6),
    }


def settings(work: Work) -> Body:
    """What made the answer: enough to get it again."""
    return {
        "decoder": work.decoder, "decoder_options": dict(work.options), "tokens_per_step": work.config.tokens_per_step,
        "seed": work.rows[0].seed,
    }  # fmt: skip


class Shape:
    """One answer of /v1/completions or /v1/chat/completions, whole or in pieces."""

    def __init__(self, model: str, *, chat: bool) -> None:
        """A fresh id and time."""
        self.model, self.chat = model, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def _around(self, choices: list[Body], *, piece: bool) -> Body:
        kind = "chat.completion" if self.chat else "text_completion"
        kind += ".chunk" if piece and self.chat else ""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def whole(self, work: Work, prompts: Sequence[Prompt], rows: Sequence[Finished]) -> Body:
        """The answer when all is done."""
        choices = []
        for row in rows:
            said: Body = {"text": row.text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": row.text, "refusal": None}}
            choices.append({"index": row.index, **said, "logprobs": None, "finish_reason": row.reason})
        return {
            **self._around(choices, piece=False), "usage": usage(prompts, rows),
            "adjust": settings(work) | passes(rows),
        }  # fmt: skip

    def opening(self, index: int) -> Body:
        """The first chunk of a chat choice."""
        return self._piece(index, {"role": "assistant", "content": ""}, None)

    def more(self, index: int, text: str) -> Body:
        """A chunk of text."""
        return self._piece(index, {"content": text} if self.chat else text, None)

    def closing(self, row: Finished) -> Body:
        """The last chunk of a choice."""
        return self._piece(row.index, {} if self.chat else "", row.reason)

    def _piece(self, index: int, said: Any, reason: str | None) -> Body:
        key = "delta" if self.chat else "text"
        choice = {"index": index, key: said, "logprobs": None, "finish_reason": reason}
        return self._around([choice], piece=True)

    def final_usage(self, prompts: Sequence[Prompt], rows: Sequence[Finished]) -> Body:
        """The chunk behind the last, where it was asked for."""
        return self._around([], piece=True) | {"usage": usage(prompts, rows)}


def infilled(model: str, words: Words, work: Work, prompt: Prompt, rows: Sequence[Finished]) -> Body:
    """The answer of /v1/infill."""
    choices = []
    for row in rows:
        gaps = [row.ids[first:end] for first, end in prompt.spans]
        choices.append({
            "index": row.index, "text": words.whole(row.ids),
            "gaps": [{"text": words.whole(ids), "tokens": ids} for ids in gaps],
        })  # fmt: skip
    new = sum(end - first for first, end in prompt.spans) * len(rows)
    counted = {"prompt_tokens": prompt.given, "completion_tokens": new, "total_tokens": prompt.given + new}
    return {
        "id": f"infill-{secrets.token_hex(12)}", "object": "infill", "created": int(time.time()), "model": model,
        "choices": choices, "usage": counted, "adjust": settings(work) | passes(rows),
    }  # fmt: skip


class CanvasEvents:
    """The events of /v1/canvas; docs/serving.md says what is in them."""

    def __init__(self, model: str, words: Words, work: Work, prompt: Prompt) -> None:
        """A fresh id."""
        self.words, self.work, self.prompt = words, work, prompt
        self.head = {"id": f"canvas-{secrets.token_hex(12)}", "model": model}

    def start(self) -> Body:
        """Before the first round: where there is something to fill in."""
        length = len(self.prompt.ids) + self.prompt.new
        masks = [i for first, end in self.prompt.spans for i in range(first, end)]
        masks += range(len(self.prompt.ids), length)
        row = {"length": length, "prompt_tokens": self.prompt.given, "masks": masks}
        if self.prompt.spans:  # what stands between the gaps, for who wants to show it
            gaps = set(masks)
            row["given"] = [
                {"position": i, "token": token, **self.words.piece(token)}
                for i, token in enumerate(self.prompt.ids) if i not in gaps
            ]  # fmt: skip
        return {"type": "start", **self.head, **settings(self.work), "rows": [row] * len(self.work.rows)}

    def round(self, event: Progress) -> Body:
        """After a round of a row."""
        commits = [
            {"position": c.position, "token": c.token, **self.words.piece(c.token), "order": c.order,
             "certainty": c.chance}
            for c in event.commits
        ]  # fmt: skip
        return {"type": "round", "row": event.index, **event.cost._asdict(), "text": event.text, "commits": commits}

    def row(self, event: Finished) -> Body:
        """A row is over."""
        text = self.words.whole(event.ids) if self.prompt.spans else event.text
        reason = "length" if self.prompt.spans else event.reason
        return {
            "type": "row", "row": event.index, "text": text, "finish_reason": reason,
            "completion_tokens": self.tokens(event), **event.cost._asdict(), "seconds": round(event.seconds, 6),
        }  # fmt: skip

    def tokens(self, event: Finished) -> int:
        """New tokens that count."""
        gaps = sum(end - first for first, end in self.prompt.spans)
        return gaps or event.tokens

    def end(self, rows: Sequence[Finished], nll: list[float | None] | None) -> Body:
        """Behind everything."""
        new = sum(map(self.tokens, rows))
        counted = {"prompt_tokens": self.prompt.given, "completion_tokens": new}
        counted["total_tokens"] = sum(counted.values())
        scores = {} if nll is None else {"nll": nll}
        return {"type": "end", "usage": counted, **passes(rows), **scores}


def sse(body: Body, *, named: bool = False) -> str:
    """One server-sent event: ASCII JSON on one line."""
    name = f"event: {body['type']}\n" if named else ""
    return f"{name}data: {json.dumps(body, allow_nan=False)}\n\n"
