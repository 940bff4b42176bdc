"""Bodies of answers and events, as OpenAI's clients expect them, and our own."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from adjust_dlm.serve.asks import Prompt
from adjust_dlm.serve.text import Words
from adjust_dlm.serve.work import Cost, Finished, Progress, Work

DONE = "data: [DONE]\n\n"
Body = dict[str, Any]


def usage(prompts: Sequence[Prompt], rows: Sequence[Finished]) -> Body:
    """Prompts count once, however many choices they have; completions up to the end token or stop string."""
    prompt, new = sum(p.given for p in prompts), sum(row.tokens for row in rows)
    new = new or prompts[0].gaps * len(rows)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def passes(rows: Sequence[Finished]) -> Body:
    """What the rows cost, and how long the longest took."""
    return {
        **{name: sum(getattr(row.cost, name) for row in rows) for name in Cost._fields if name != "rounds"},
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
    """One answer of /v1/completions, /v1/chat/completions or /v1/infill, whole or in pieces."""

    def __init__(self, kind: str, model: str, work: Work, prompts: Sequence[Prompt]) -> None:
        """A fresh id and time; `kind` is what OpenAI calls the object."""
        self.work, self.prompts, self.chat = work, prompts, kind == "chat.completion"
        name = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}.get(kind, kind)
        self.head: Body = {
            "id": f"{name}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model,
        }  # fmt: skip

    def whole(self, rows: Sequence[Finished], words: Words) -> Body:
        """The answer when all is done."""
        counted = {"usage": usage(self.prompts, rows), "adjust": settings(self.work) | passes(rows)}
        return {**self.head, "choices": [self._choice(row, words) for row in rows], **counted}

    def _choice(self, row: Finished, words: Words) -> Body:
        if spans := self.prompts[0].spans:
            gaps = [row.ids[first:end] for first, end in spans]
            filled = [{"text": words.whole(ids), "tokens": ids} for ids in gaps]
            return {"index": row.index, "text": words.whole(row.ids), "gaps": filled}
        message = {"role": "assistant", "content": row.text, "refusal": None}
        said: Body = {"message": message} if self.chat else {"text": row.text}
        return {"index": row.index, **said, "logprobs": None, "finish_reason": row.reason}

    def piece(self, index: int, text: str = "", *, reason: str | None = None, **role: str) -> Body:
        """A chunk of a choice: more text, the role at a chat's beginning, or the reason at the end."""
        said: Body = {"delta": {**role, "content": text}} if self.chat else {"text": text}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return {**self.head, "object": self.head["object"] + ".chunk" * self.chat, "choices": [choice]}


class CanvasEvents:
    """The events of /v1/canvas; docs/serving.md says what is in them."""

    def __init__(self, model: str, words: Words, work: Work, prompt: Prompt) -> None:
        self.words, self.work, self.prompt = words, work, prompt
        self.head = {"id": f"canvas-{secrets.token_hex(12)}", "model": model}

    def start(self) -> Body:
        """Before the first round: where there is something to fill in."""
        length = len(self.prompt.ids) + self.prompt.new
        masks = [i for first, end in self.prompt.spans for i in range(first, end)]
        masks += range(len(self.prompt.ids), length)
        row = {"length": length, "prompt_tokens": self.prompt.given, "masks": masks}
        if self.prompt.spans:  # what stands between the gaps, for who wants to show it
            ids = enumerate(self.prompt.ids)
            row["given"] = [self._token(i, token) for i, token in ids if i not in set(masks)]
        return {"type": "start", **self.head, **settings(self.work), "rows": [row] * len(self.work.rows)}

    def _token(self, position: int, token: int) -> Body:
        return {"position": position, "token": token, **self.words.piece(token)}

    def round(self, event: Progress) -> Body:
        """After a round of a row."""
        commits = [{**self._token(c.position, c.token), "order": c.order, "certainty": c.chance} for c in event.commits]
        return {"type": "round", "row": event.index, **event.cost._asdict(), "text": event.text, "commits": commits}

    def row(self, event: Finished) -> Body:
        """A row is over."""
        gaps = self.prompt.gaps
        return {
            "type": "row", "row": event.index, "text": self.words.whole(event.ids) if gaps else event.text,
            "finish_reason": "length" if gaps else event.reason, "completion_tokens": gaps or event.tokens,
            **event.cost._asdict(), "seconds": round(event.seconds, 6),
        }  # fmt: skip

    def end(self, rows: Sequence[Finished], nll: list[float | None] | None) -> Body:
        """Behind everything."""
        scores = {} if nll is None else {"nll": nll}
        return {"type": "end", "usage": usage([self.prompt], rows), **passes(rows), **scores}


def sse(body: Body, *, named: bool = False) -> str:
    """One server-sent event: ASCII JSON on one line."""
    name = f"event: {body['type']}\n" if named else ""
    return f"{name}data: {json.dumps(body, allow_nan=False)}\n\n"
