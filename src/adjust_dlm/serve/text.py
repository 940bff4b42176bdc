"""Text in and out of a server: prompts to ids, and the part of a row's text that can no longer change."""

from __future__ import annotations

import bisect
import functools
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from adjust_dlm.bases import Base, cut_at_end
from adjust_dlm.types import InputError, require

logger = logging.getLogger(__name__)
HALF = "\ufffd"  # what half a character decodes to
FinishReason = Literal["stop", "length"]


@contextmanager
def ordinary() -> Iterator[None]:
    """Makes an error that is no Exception, as a panic in the tokenizer's Rust, one: who waits must be told of it."""
    try:
        yield
    except BaseException as error:
        raise error if isinstance(error, Exception) else RuntimeError(repr(error))  # noqa: B904


class Words:
    """A base's tokenizer for several threads; a base without one reads and writes ids separated by spaces."""

    def __init__(self, base: Base) -> None:
        self.base, self._lock = base, threading.Lock()

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Ids; `first` puts the family's start token in front. Raises InputError for half characters and for no ids."""
        _require_whole(text)
        if self.base.tokenizer is None:
            try:
                return [int(word) for word in text.split()]
            except ValueError:
                message = "has no tokenizer; give token ids separated by spaces, not"
                raise InputError(f"base {self.base.spec.name!r} {message} {text!r}") from None
        with self._lock:
            return self.base.encode(text) if first else self.base.tokenizer.encode(text, add_special_tokens=False)

    def encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation. Raises InputError for half characters, and where the base has no chat template."""
        _require_whole("".join(message["content"] for message in messages))
        template = getattr(self.base.tokenizer, "chat_template", None)
        require(
            bool(template),
            f"base {self.base.spec.name!r} has no chat template; continue plain text with /v1/completions",
        )
        with self._lock:
            return self.base.encode_messages(messages)

    def decode(self, ids: list[int]) -> str:
        """Text up to the first end token, special tokens dropped."""
        return self.whole(cut_at_end(ids, self.base.spec.end_ids))

    @ordinary()
    def whole(self, ids: list[int]) -> str:
        """Text of all ids, whatever stands behind an end token; special tokens dropped."""
        if self.base.tokenizer is None:
            return " ".join(map(str, ids))
        with self._lock:
            return str(self.base.tokenizer.decode(ids, skip_special_tokens=True))

    def spelled(self, ids: list[int]) -> str:
        """Text of a prompt, special tokens by their names, its start token left out; nothing without a tokenizer."""
        ids = ids[1:] if ids[:1] == [self.base.spec.bos_id] else ids
        if self.base.tokenizer is None:
            return ""
        with self._lock:
            return str(self.base.tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token: int) -> dict[str, Any]:
        """A token alone: `text`, and `bytes` where it is no whole number of characters and its bytes are known."""
        text = self.whole([token])
        raw = self._raw(token) if HALF in text else None
        return {"text": text} if raw is None else {"text": text, "bytes": list(raw)}

    def _raw(self, token: int) -> bytes | None:
        """From its name: a letter for each byte, or <0xNN>; None for other kinds of vocabulary."""
        (name,) = self.base.tokenizer.convert_ids_to_tokens([token])
        if name and re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes.fromhex(name[3:5])
        codes = [_byte_letters().get(letter) for letter in name or ""]
        return None if not codes or None in codes else bytes(code for code in codes if code is not None)


def _require_whole(text: str) -> None:
    """Half a character is what JSON can spell, and what Python makes of bytes that are no UTF-8."""
    require(not re.search("[\ud800-\udfff]", text), f"this is not UTF-8 text: {text!r}")


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write printable Latin-1 as itself, and the other bytes, in order, as letters from 256."""
    plain = [code for code in range(256) if 33 <= code < 127 or (code > 160 and code != 173)]
    others = [code for code in range(256) if code not in plain]
    return {chr(code): code for code in plain} | {chr(256 + n): code for n, code in enumerate(others)}


class Writer:
    """The text of one row. Only what stands left of the first mask is final, and only that is ever shown.

    Held back are also half a character, and the longest end that may turn out to begin a stop string. Of several stop
    strings the one that is complete first counts (of two that end together the longer), so that the text does not
    depend on how many tokens come at a time.

    Attributes:
        text: what may be shown.
        reason: why the row is over; None while it is not.
        tokens: of `text`, once it is over: up to the end token, or up to the last one that a cut text needs.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], end_ids: Collection[int], stops: Sequence[str], *, quiet: bool = False
    ) -> None:
        """Nothing is written yet. `quiet`: without stop strings nothing is shown before the row is over."""
        self._decode, self._end_ids, self._stops, self._quiet = decode, end_ids, stops, quiet and not stops
        self._seen, self.text, self.tokens = 0, "", 0
        self.reason: FinishReason | None = None

    def feed(self, ids: Sequence[int], *, done: bool) -> str:
        """What is new in the text.

        Args:
            ids: all new tokens left of the row's first mask, old ones too.
            done: nothing is masked any more.
        """
        if self.reason is not None or (len(ids) == self._seen and not done):
            return ""
        self._seen = len(ids)
        words = cut_at_end(ids, self._end_ids)
        ended = len(words) < len(ids)
        if self._quiet and not (ended or done):
            return ""
        full = self._decode(words)
        if not (ended or done):
            full = full.rstrip(HALF)
        found = [(at + len(stop), at) for stop in self._stops if (at := full.find(stop)) >= 0]
        if found:  # where that one begins which is complete first
            shown, self.reason = full[: min(found)[1]], "stop"
        elif ended or done:
            shown, self.reason = full, "stop" if ended else "length"
        else:
            shown = full[: len(full) - _held(full, self._stops)]
        if not shown.startswith(self.text):
            logger.warning("the tokenizer rewrote text that was already sent")
        fresh, self.text = shown[len(self.text) :], shown
        if found:  # as many as it takes to write the text
            lengths = range(len(words) + 1)
            self.tokens = bisect.bisect_left(
                lengths, len(shown), key=lambda n: len(self._decode(words[:n]).rstrip(HALF))
            )
        elif self.reason is not None:
            self.tokens = len(words)
        return fresh


def _held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    most = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    return next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
