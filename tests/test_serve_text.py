"""What a client may see of a row's text: no stop strings, no half characters, whatever arrives together (H10, H13)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adjust_dlm.bases.tokenizers import FileTokenizer
from adjust_dlm.serve.text import HALF, Words, Writer
from serving import Typist, byte_tokenizer
from tiny_ar import IM_END, MASK

TOKENIZER = byte_tokenizer(b"\xf0\x9f", b"\x98\x80")


def decode(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids)
    return text


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text)
    return ids


def pieces(ids: list[int], cuts: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], Writer]:
    """What a writer shows when the finished part grows to each of `cuts`, then to the whole."""
    writer = Writer(decode, (IM_END,), stops)
    shown = [writer.feed(ids[:cut], done=False) for cut in cuts] + [writer.feed(ids, done=True)]
    return shown, writer


@given(
    text=st.text("abé\U0001f600 ", max_size=12), end=st.booleans(),
    stops=st.sets(st.text("ab ", min_size=1, max_size=2), max_size=2), data=st.data(),
)  # fmt: skip
def test_a_quiet_writer_says_at_the_end_what_the_other_said_all_along(
    text: str, end: bool, stops: set[str], data: st.DataObject
) -> None:
    ids = [*encode(text), *([IM_END, *encode("b")] if end else [])]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    shown, loud = pieces(ids, cuts, tuple(stops))
    quiet = Writer(decode, (IM_END,), tuple(stops), quiet=True)
    said = [quiet.feed(ids[:cut], done=False) for cut in cuts] + [quiet.feed(ids, done=True)]
    assert (quiet.text, quiet.reason, quiet.tokens) == (loud.text, loud.reason, loud.tokens)
    assert "".join(said) == "".join(shown) == loud.text
    assert len([piece for piece in said if piece]) <= 1 or stops


def test_text_is_decoded_only_where_something_is_new() -> None:
    """It takes longer than anything else a server does for a row's round."""
    calls: list[int] = []

    def counted(ids: list[int]) -> str:
        calls.append(len(ids))
        return decode(ids)

    for quiet, want in ((False, [2, 4, 5]), (True, [5])):
        calls.clear()
        writer, ids = Writer(counted, (IM_END,), (), quiet=quiet), encode("hello")
        shown = "".join(writer.feed(ids[:n], done=n == 5) for n in (0, 0, 2, 2, 4, 4, 5))
        assert calls == want and shown == "hello"


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 8], [5], [3, 6, 9]])
def test_a_stop_string_never_leaks(cuts: list[int]) -> None:
    shown, writer = pieces(encode("hello world foo"), cuts, ("lo wo",))
    assert "".join(shown) == writer.text == "hel" and writer.reason == "stop" and writer.tokens == 3


def test_what_might_begin_a_stop_string_is_held_back_and_let_go() -> None:
    shown, writer = pieces(encode("hello there"), [3, 4, 5, 6, 7], ("lo wo",))
    assert shown == ["he", "l", "", "", "lo t", "here"] and writer.reason == "length" and writer.tokens == 11


def test_the_stop_string_that_is_complete_first_counts() -> None:
    for cuts in ([], [4], [1, 2, 3, 4, 5]):
        assert "".join(pieces(encode("hello!"), cuts, ("hello!", "ell"))[0]) == "h"
        assert "".join(pieces(encode("hello"), cuts, ("lo", "hello"))[0]) == ""


def test_an_end_token_ends_the_text() -> None:
    shown, writer = pieces([*encode("ab"), IM_END, *encode("cd")], [3])
    assert shown == ["ab", ""] and (writer.reason, writer.tokens) == ("stop", 2)


def test_half_a_character_waits_for_the_other_half() -> None:
    ids = encode("a\U0001f600\ud55c\uad6d")
    assert len(ids) == 1 + 2 + 6
    shown, writer = pieces(ids, list(range(1, 9)))
    assert shown == ["a", "", "\U0001f600", "", "", "\ud55c", "", "", "\uad6d"] and HALF not in writer.text


def test_a_character_that_the_length_cuts_shows_at_the_end() -> None:
    shown, writer = pieces(encode("a\U0001f600")[:2], [1])
    assert shown == ["a", HALF] and writer.text == decode(encode("a\U0001f600")[:2])


@given(
    text=st.text(alphabet="ab \u00e9\U0001f600", max_size=12),
    stops=st.lists(st.text(alphabet="ab \u00e9", min_size=1, max_size=3), max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_any_pieces_make_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = encode(text)
    shown, writer = pieces(ids, sorted(min(cut, len(ids)) for cut in cuts), tuple(stops))
    ends = [(at + len(stop), at) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(shown) == writer.text == expected
    assert all(stop not in expected for stop in stops)
    assert decode(ids[: writer.tokens]).startswith(expected)
    assert writer.tokens == 0 or len(decode(ids[: writer.tokens - 1]).rstrip(HALF)) < len(expected)


# Tokens alone ------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1).filter(lambda text: not text.isascii()))
def test_bytes_of_tokens_join_to_the_text(text: str) -> None:
    """Every character beyond ASCII is two tokens or more, so every token of one tells its bytes."""
    words = Words(Typist("", TOKENIZER))
    alone = [words.piece(token) for token in encode(text)]
    assert b"".join(bytes(one.get("bytes", one["text"].encode())) for one in alone).decode() == text
    assert all(("bytes" in one) == (HALF in one["text"]) for one in alone)


def test_whole_and_special_tokens_have_text_alone() -> None:
    words = Words(Typist("", TOKENIZER))
    assert [words.piece(token) for token in (*encode("a "), IM_END, MASK)] == [
        {"text": "a"}, {"text": " "}, {"text": ""}, {"text": ""},
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "raw"), [("<0xE2>", [0xE2]), ("\u0120\u00e2", [0x20, 0xE2]), ("\u2581x", None)])
def test_names_of_other_vocabularies(name: str, raw: list[int] | None) -> None:
    """Byte fallback of SentencePiece, byte-level, and a name that says nothing about bytes."""
    tokenizer: Any = SimpleNamespace(convert_ids_to_tokens=lambda _: [name], decode=lambda *_, **__: HALF)
    expected = {"text": HALF} if raw is None else {"text": HALF, "bytes": raw}
    words = Words(Typist("", TOKENIZER))
    words.base.tokenizer = tokenizer
    assert words.piece(7) == expected


def test_a_file_names_tokens_as_transformers_does(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    ids = [*encode("a\u00e9\U0001f600"), IM_END]
    assert FileTokenizer(tmp_path / "tokenizer.json", None).convert_ids_to_tokens(ids) == (
        TOKENIZER.convert_ids_to_tokens(ids)
    )
