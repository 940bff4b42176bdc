"""OpenAI's own client and plain HTTP against a server on a free port. Cases H7, H10, H13, H20 and H24 are here."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import decode
from adjust_dlm.sampler import Sampler
from adjust_dlm.serve import http
from adjust_dlm.serve.engine import Engine, Limits
from adjust_dlm.serve.errors import ApiError
from adjust_dlm.serve.guard import Rate
from adjust_dlm.types import DecodeConfig
from helpers import tiny_sampler
from serving import MODEL, Served, Typist, byte_tokenizer, serving, typing_engine
from tiny_ar import IM_END, chat_base, tiny_partner

HELLO, CONTEXT = "hello world foo", 128
ANSWERS = ("/v1/completions", "/v1/chat/completions")
EMOJI = "a\U0001f600 \ud55c\uad6d\uc5b4"


@pytest.fixture(scope="module")
def typist() -> Iterator[Served]:
    """Writes HELLO behind every colon, from the right."""
    with serving(typing_engine(Typist(HELLO))) as served:
        yield served


@pytest.fixture(scope="module")
def model() -> tuple[TransformerBase, Sampler]:
    """Random weights: every prompt, seed and temperature has a text of its own."""
    base = chat_base(context=CONTEXT)
    return base, tiny_sampler(base)


@pytest.fixture(scope="module")
def random_texts(model: tuple[TransformerBase, Sampler]) -> Iterator[Served]:
    base, sampler = model
    engine = Engine(base, sampler=sampler, partner=tiny_partner(base), limits=Limits(rows=6, queue=64))
    with serving(engine) as served:
        yield served


def openai_client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def body_for(path: str, prompt: str = "write:", **rest: Any) -> dict[str, Any]:
    said = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    return {"model": MODEL, **said, **rest}


def post(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON of every event; OpenAI's streams end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


def said(choice: dict[str, Any]) -> str:
    """The text of a choice or of a piece of one."""
    inner = choice.get("delta", choice.get("message"))
    text: str = choice.get("text", "") if inner is None else inner.get("content", "")
    return text


def streamed(served: Served, path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, Any] | None]:
    """Joined deltas of the only choice, finish_reason and usage."""
    answer = served.client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    pieces = chunks(answer.text)
    choices = [choice for piece in pieces for choice in piece["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1 and choices[-1]["finish_reason"] == reasons[0]
    assert pieces[-1]["choices"] == [] and all(piece["usage"] is None for piece in pieces[:-1])
    return "".join(map(said, choices)), reasons[0], pieces[-1]["usage"]


# H10, H13: text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [(["lo wo"], "hel", "stop"), ("world", "hello ", "stop"), (["lo wx"], HELLO, "stop"), (None, HELLO, "stop")],
)
def test_stop_strings_never_leak(typist: Served, path: str, k: int, stop: Any, text: str, reason: str) -> None:
    body = body_for(path, stop=stop, tokens_per_step=k, max_tokens=20)
    whole = post(typist, path, body)
    choice = whole["choices"][0]
    assert (said(choice), choice["finish_reason"]) == (text, reason)
    assert whole["usage"]["completion_tokens"] == len(text)
    assert streamed(typist, path, body) == (text, reason, whole["usage"])


def test_a_silent_stream_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the right nothing shows until the last round; comments are no events to any client."""
    monkeypatch.setattr(http, "PING_SECONDS", 0.01)
    base = Typist(HELLO)
    base.sleep = 0.03
    with serving(typing_engine(base)) as served:
        body = {"prompt": "write:", "max_tokens": 5, "decoder": "joint"}
        answer = served.client.post("/v1/completions", json={**body, "stream": True})
        assert answer.text.count(": nothing yet\n\n") >= 4
        assert "".join(said(piece["choices"][0]) for piece in chunks(answer.text)) == "hello"
        stream = openai_client(served).completions.create(
            model=MODEL, prompt="write:", max_tokens=5, stream=True, extra_body={"decoder": "joint"}
        )
        assert "".join(piece.choices[0].text for piece in stream) == "hello"


@pytest.mark.parametrize("path", ANSWERS)
def test_a_length_that_cuts_is_length(typist: Served, path: str) -> None:
    body = body_for(path, max_tokens=7)
    assert said(post(typist, path, body)["choices"][0]) == "hello w"
    assert streamed(typist, path, body)[:2] == ("hello w", "length")


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("cut", [20, 2, 3, 5])
def test_characters_of_several_tokens_arrive_whole(k: int, cut: int) -> None:
    """An emoji of two tokens and Korean letters of three, the right halves first; and cut in the middle."""
    tokenizer = byte_tokenizer(b"\xf0\x9f", b"\x98\x80")
    ids = tokenizer.encode(EMOJI)
    assert len(ids) == 1 + 2 + 1 + 9
    with serving(typing_engine(Typist(EMOJI, tokenizer))) as served:
        for path in ANSWERS:
            body = body_for(path, tokens_per_step=k, max_tokens=cut)
            text = said(post(served, path, body)["choices"][0])
            assert text == tokenizer.decode(ids[:cut]) and streamed(served, path, body)[0] == text
            whole = text.rstrip("\ufffd")
            assert EMOJI.startswith(whole) and ("\ufffd" in text) == (cut in (2, 5))


# What the clients of OpenAI rely on -----------------------------------------------------------------------------


def test_the_openai_client_gets_what_it_expects(typist: Served) -> None:
    client = openai_client(typist)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "adjust-dlm"
    plain = client.completions.create(model=MODEL, prompt="write:", max_tokens=5, n=2, seed=1, stop=["zz"])
    assert [(c.index, c.text, c.finish_reason) for c in plain.choices] == [
        (0, "hello", "length"),
        (1, "hello", "length"),
    ]
    assert plain.usage is not None and (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (7, 10)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=20, user="me", metadata={"a": "b"},
        extra_body={"tokens_per_step": 8, "decoder": "parallel"},
    )  # fmt: skip
    assert chat.choices[0].message.content == HELLO and chat.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=20, stream=True,
        stream_options={"include_usage": True}, extra_body={"block_length": 2},
    )  # fmt: skip
    pieces = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    deltas = [choice.delta.content or "" for piece in pieces for choice in piece.choices]
    assert "".join(deltas) == HELLO and sum(bool(delta) for delta in deltas) >= len(HELLO) // 2
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == len(HELLO)
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt'"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_gets_an_answer_a_stream_and_a_reason(typist: Served) -> None:
    """As docs/serving.md shows it; -w prints the status behind the body."""

    def curl(path: str, body: str) -> tuple[str, int]:
        call = ["curl", "-sN", "-w", "\n%{http_code}", f"{typist.url}{path}", "-H", "content-type: application/json"]
        said = subprocess.run([*call, "-d", body], capture_output=True, text=True, timeout=60, check=True).stdout
        text, _, status = said.rpartition("\n")
        return text, int(status)

    asked = body_for("/v1/completions", max_tokens=15)
    text, status = curl("/v1/completions", json.dumps(asked))
    assert (json.loads(text)["choices"][0]["text"], status) == (HELLO, 200)
    text, status = curl("/v1/completions", json.dumps({**asked, "stream": True}))
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert (lines[-1], status) == ("[DONE]", 200)
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == HELLO
    text, status = curl("/v1/completions", "{")
    assert (set(json.loads(text)["error"]), status) == ({"message", "type", "param", "code"}, 400)


def test_choices_differ_and_a_seed_brings_them_back(
    random_texts: Served, model: tuple[TransformerBase, Sampler]
) -> None:
    """H7: row i * n + j of the seed, as `decode` has it."""
    base, sampler = model
    body = {"prompt": ["one", "two"], "n": 8, "seed": 11, "max_tokens": 12, "temperature": 0.9, "top_p": 0.95}
    first, again = (post(random_texts, "/v1/completions", body)["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert first == again and len(set(texts)) == 16 and [choice["index"] for choice in first] == list(range(16))
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=12, temperature=0.9, top_p=0.95, seed=11)
    prompts = [base.encode(text) for text in ("one", "two") for _ in range(8)]
    result = decode(base, prompts, config, sampler=sampler)
    assert texts == [base.decode(row[-12:].tolist()) for row in result.tokens_BL]
    unseeded = [post(random_texts, "/v1/completions", {**body, "seed": None}) for _ in range(2)]
    assert unseeded[0]["choices"] != unseeded[1]["choices"]
    assert all(0 <= answer["adjust"]["seed"] < 2**53 for answer in unseeded)  # a double holds it whole
    repeated = post(random_texts, "/v1/completions", {**body, "seed": unseeded[0]["adjust"]["seed"]})
    assert repeated["choices"] == unseeded[0]["choices"]


def test_sixteen_clients_at_once_get_what_each_gets_alone(random_texts: Served) -> None:
    """H20: prompts, seeds, temperatures, stops, decoders and streams of their own."""
    decoders = [
        {},
        {"decoder": "adaptive", "decoder_options": {"gamma": 2.0}},
        {"decoder": "parallel", "tokens_per_step": 2},
        {"decoder": "joint"},
    ]
    asked = [
        {
            "prompt": f"client {n} says", "seed": 100 + n, "temperature": (0.0, 0.7, 1.0, 1.3)[n % 4],
            "max_tokens": 8 + n, "stop": ["e", "Q"] if n % 2 else None, **decoders[n // 4],
        }
        for n in range(16)
    ]  # fmt: skip

    def one(n: int) -> tuple[str, str, Any]:
        body = asked[n]
        if n % 3 == 0:
            return streamed(random_texts, "/v1/completions", body)
        answer = post(random_texts, "/v1/completions", body)
        choice = answer["choices"][0]
        return choice["text"], choice["finish_reason"], answer["usage"]

    alone = [one(n) for n in range(16)]
    assert len({text for text, *_ in alone if text}) >= 12
    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(one, range(16))) == alone


def test_token_ids_are_prompts_too(typist: Served) -> None:
    ids = typist.engine.base.encode("write:")
    for prompt, count in ((ids, 1), ([ids, ids[1:]], 2), (["write:"], 1)):
        choices = post(typist, "/v1/completions", {"prompt": prompt, "max_tokens": 5})["choices"]
        assert [choice["text"] for choice in choices] == ["hello"] * count


def test_conversations_go_through_the_template(random_texts: Served, model: tuple[TransformerBase, Sampler]) -> None:
    base, sampler = model
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "four", "name": "me"},
    ]
    answer = post(random_texts, "/v1/chat/completions", {"messages": turns, "seed": 5, "max_tokens": 9})
    ids = base.tokenizer.encode(
        "<|im_start|>s:be brief<|im_end|><|im_start|>u:one two<|im_end|><|im_start|>a:three<|im_end|>"
        "<|im_start|>u:four<|im_end|><|im_start|>a:"
    )
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=9, seed=5)
    result = decode(base, [ids], config, sampler=sampler)
    assert answer["choices"][0]["message"]["content"] == base.decode(result.tokens_BL[0, -9:].tolist())
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_adaptive_and_options_reach_the_decoder(random_texts: Served, model: tuple[TransformerBase, Sampler]) -> None:
    base, sampler = model
    ids = base.encode("abc")
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"decoder": "adaptive", "decoder_options": {"gamma": 9.0}, "tokens_per_step": 2}, "adaptive",
         {"gamma": 9.0, "most": 2}),
        ({"decoder": "threshold", "decoder_options": {"tau": 0.02}}, "threshold", {"tau": 0.02}),
    ]  # fmt: skip
    for asked, decoder, options in cases:
        answer = post(random_texts, "/v1/completions", {"prompt": "abc", "seed": 3, "max_tokens": 16, **asked})
        config = DecodeConfig(max_new_tokens=16, seed=3, tokens_per_step=4)
        result = decode(base, [ids], config, decoder=decoder, sampler=sampler, **options)
        assert answer["choices"][0]["text"] == base.decode(result.tokens_BL[0, -16:].tolist())
        assert answer["adjust"]["base_calls"] == int(result.base_calls_B[0])
        assert answer["adjust"]["sampler_calls"] == int(result.sampler_calls_B[0])


# H24: bad input --------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [10**5]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": "a<empty_output>b"}, "prompt"), ({"prompt": "x" * 200}, "prompt"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1e9}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 100}, None),
    ({"temperature": -1}, "temperature"), ({"temperature": 3}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"seed": 2**64}, "seed"), ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"), ({"stop": list("abcde")}, "stop"), ({"stop": 5}, "stop"), ({"logprobs": 1}, "logprobs"),
    ({"logprobs": 0}, "logprobs"), ({"best_of": 3}, "best_of"), ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"),
    ({"logit_bias": {"5": 1}}, "logit_bias"), ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"tools": [{}]}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format"), ({"x": 1}, "x"),
    ({"decoder": "klass"}, "decoder"), ({"decoder": "nope"}, "decoder"), ({"decoder": 5}, "decoder"),
    ({"decoder_options": {"nope": 1}}, None), ({"decoder_options": 5}, "decoder_options"),
    ({"decoder": "threshold", "decoder_options": {"tau": "x"}}, None),
    ({"decoder": "threshold", "decoder_options": {"tau": [1]}}, None),
    ({"decoder": "adaptive", "decoder_options": {"most": 10**30}}, None),
    ({"decoder": "edlm", "decoder_options": {"completions": 17}}, "decoder_options"),
    ({"decoder": "verified", "decoder_options": {"depth": 17}}, "decoder_options"),
    ({"decoder": "threshold", "tokens_per_step": 2}, "tokens_per_step"), ({"tokens_per_step": 0}, "tokens_per_step"),
    ({"tokens_per_step": 10**12}, "tokens_per_step"), ({"block_length": 0}, "block_length"),
    ({"order": "best"}, "order"),
    ({"stream_options": {"include_usage": 5}}, "stream_options"),
    ({"stream_options": {"x": 5}, "stream": True}, "stream_options.x"), ({"stream": "yes"}, "stream"),
]  # fmt: skip
BAD_CHAT: list[tuple[Any, str | None]] = [
    ({"messages": []}, "messages"), ({}, "messages"), ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"), ({"messages": [5]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
]  # fmt: skip


def refused(answer: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    """OpenAI's error shape, a message, and the parameter at fault."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    return error


@pytest.mark.parametrize(("changes", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_bad_parameters_are_refused_before_anything_starts(
    random_texts: Served, changes: dict[str, Any], param: str | None
) -> None:
    for stream in (True, False):
        body = {"prompt": "x", "stream": stream, **changes}
        error = refused(random_texts.client.post("/v1/completions", json=body), param)
    if param not in ("prompt", "stream") and not str(param).startswith("stream"):
        chat = {**body_for("/v1/chat/completions"), **changes}
        refused(random_texts.client.post("/v1/chat/completions", json=chat), param)
    if changes == {"prompt": "x" * 200}:
        assert error["code"] == "context_length_exceeded"
        assert error["message"] == (
            "the context is 128 tokens; the prompt has 201 and max_tokens asks for 1 more, together 202"
        )
    assert random_texts.client.get("/health").json() == {"status": "ok", "waiting": 0, "running": 0}


@pytest.mark.parametrize(("body", "param"), BAD_CHAT, ids=lambda value: json.dumps(value)[:60])
def test_bad_conversations_are_refused(random_texts: Served, body: dict[str, Any], param: str | None) -> None:
    for stream in (True, False):
        refused(random_texts.client.post("/v1/chat/completions", json={**body, "stream": stream}), param)


@pytest.mark.parametrize("path", [*ANSWERS, "/v1/infill", "/v1/canvas"])
def test_bodies_that_are_no_requests_are_refused(random_texts: Served, path: str) -> None:
    as_json = {"content-type": "application/json"}
    for content, headers, param in (
        (b'{"model":"m", x}', as_json, None), (b"[]", as_json, None), (b"5", as_json, None), (b"null", as_json, None),
        (b"\xff\xfe", as_json, None), (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}, None),
        (b'{"temperature": NaN}', as_json, "temperature"),
        (b'{"decoder_options": {"gamma": Infinity}}', as_json, "decoder_options"), (b"[" * 5000, as_json, None),
        (b'{"decoder": "\\ud800"}', as_json, None),
    ):  # fmt: skip
        answer = random_texts.client.post(path, content=content, headers=headers)
        assert answer.status_code == 400, (content[:20], answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
        if param:
            assert answer.json()["error"]["param"] == param
    if path in ANSWERS:
        body = {**body_for(path), "model": "gpt"}
        error = refused(random_texts.client.post(path, json=body), "model", status=404)
        assert error["code"] == "model_not_found"
    refused(random_texts.client.get(path), None, status=405)


HALF = json.dumps("a\ud83d")  # half of an emoji, as a client that cut a text in the middle sends it


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}'),
        ("/v1/infill", '{"parts": [%s, "x"], "gaps": [2]}'),
        ("/v1/canvas", '{"prompt": %s}'),
        ("/v1/completions", '{"prompt": "x", "decoder": "threshold", "decoder_options": {%s: 1}}'),
        ("/v1/completions", '{"prompt": "x", "decoder": "threshold", "decoder_options": {"tau": %s}}'),
        ("/v1/completions", '{"prompt": "x", %s: 1}'),
    ],
)
def test_half_a_character_is_refused(random_texts: Served, path: str, body: str) -> None:
    answer = random_texts.client.post(path, content=body % HALF, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text


def test_nesting_of_any_depth_is_refused(random_texts: Served) -> None:
    for depth in range(940, 1000):  # around the depth that the parser still takes
        body = '{"prompt": ' + '{"a": ' * depth + "1" + "}" * depth + "}"
        answer = random_texts.client.post(ANSWERS[0], content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), depth


def test_whole_characters_beyond_the_first_plane_are_text(random_texts: Served) -> None:
    body = '{"prompt": "\\ud83c\\udf0d", "max_tokens": 1}'  # one emoji, spelled as JSON spells it
    answer = random_texts.client.post(ANSWERS[0], content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_a_huge_prompt_is_refused_and_the_server_lives(random_texts: Served) -> None:
    for path in ANSWERS:
        for size, status in ((900_000, 400), (2_000_000, 413)):
            answer = random_texts.client.post(path, json=body_for(path, "x" * size))
            assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
    pieces = (b" " * 100_000 for _ in range(20))  # without a content-length
    answer = random_texts.client.post(ANSWERS[0], content=pieces, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert post(random_texts, ANSWERS[0], {"prompt": "x", "max_tokens": 3})["usage"]["completion_tokens"] <= 3


def test_values_that_change_nothing_are_taken(typist: Served) -> None:
    neutral = {
        "logprobs": None, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "u",
        "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True, "n": None, "temperature": None,
        "top_p": None, "seed": None, "stop": None, "stream": None, "stream_options": None,
        "decoder": None,
    }  # fmt: skip
    for path in ANSWERS:
        assert said(post(typist, path, body_for(path, max_tokens=5, **neutral))["choices"][0]) == "hello"


# Infill and canvas -----------------------------------------------------------------------------------------------


def test_gaps_are_filled_and_nothing_else(random_texts: Served, model: tuple[TransformerBase, Sampler]) -> None:
    base, sampler = model
    body = {"parts": ["The ", " sat on ", "."], "gaps": [4, 3], "seed": 9, "n": 2, "temperature": 0.8}
    answer = post(random_texts, "/v1/infill", body)
    words = [base.tokenizer.encode(part) for part in body["parts"]]  # type: ignore[attr-defined]
    mask = base.spec.mask_id
    ids = [base.spec.bos_id, *words[0], *[mask] * 4, *words[1], *[mask] * 3, *words[2]]
    config = DecodeConfig(tokens_per_step=4, temperature=0.8, seed=9, suppress_eos=True, max_new_tokens=1)
    plan_rows = [_filled(base, sampler, ids, config, row) for row in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == [base.tokenizer.decode(r[1:]) for r in plan_rows]
    for choice, row in zip(answer["choices"], plan_rows, strict=True):
        first = 1 + len(words[0])
        second = first + 4 + len(words[1])
        assert [gap["tokens"] for gap in choice["gaps"]] == [row[first : first + 4], row[second : second + 3]]
        a, b = (gap["text"] for gap in choice["gaps"])
        assert choice["text"] == f"The {a} sat on {b}." and IM_END not in row
    assert answer["usage"] == {"prompt_tokens": len(ids) - 7, "completion_tokens": 14, "total_tokens": len(ids) + 7}


def _filled(base: Any, sampler: Any, ids: list[Any], config: DecodeConfig, row: int) -> list[int]:
    """The canvas without masks behind it, which `decode` does not offer."""
    from adjust_dlm.decoders import make_plan
    from adjust_dlm.decoders.machinery.canvas import Canvas

    plan = make_plan(base, config, decoder="adjust", sampler=sampler)
    canvas = Canvas(plan.base, [ids], plan.config, rows=[row], new=[0])
    with torch.no_grad():
        plan.run(canvas)
    tokens: list[int] = canvas.tokens_BL[0].tolist()
    return tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"parts": ["a"], "gaps": [1]}, "parts"), ({"parts": ["a", "b"], "gaps": []}, "gaps"), ({}, "parts"),
        ({"parts": ["a", "b", "c"], "gaps": [1]}, "gaps"), ({"parts": ["a", "b"], "gaps": [0]}, "gaps"),
        ({"parts": ["a", "b"], "gaps": [500]}, "gaps"), ({"parts": ["a" * 100, "b" * 50], "gaps": [5]}, "parts"),
        ({"parts": ["a", "b"], "gaps": [1], "stop": "x"}, "stop"),
        ({"parts": ["a", "<empty_output>"], "gaps": [1]}, "parts"),
    ],
)  # fmt: skip
def test_gaps_that_make_no_sense_are_refused(random_texts: Served, body: dict[str, Any], param: str) -> None:
    refused(random_texts.client.post("/v1/infill", json=body), param)


def canvas_events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = served.client.post("/v1/canvas", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_the_canvas_stream_tells_every_commit(random_texts: Served, model: tuple[TransformerBase, Sampler]) -> None:
    base, sampler = model
    body = {"prompt": "once", "max_tokens": 10, "seed": 4, "n": 2, "tokens_per_step": 3, "nll": True}
    events = canvas_events(random_texts, body)
    start, end = events[0], events[-1]
    ids = base.encode("once")
    config = DecodeConfig(tokens_per_step=3, max_new_tokens=10, seed=4)
    result = decode(base, [ids] * 2, config, sampler=sampler)
    assert start["rows"] == [{"length": 15, "prompt_tokens": 5, "masks": list(range(5, 15))}] * 2
    assert (start["seed"], start["decoder"], start["tokens_per_step"]) == (4, "adjust", 3)
    partner = tiny_partner(base)
    for row in range(2):
        rounds = [event for event in events if event["type"] == "round" and event["row"] == row]
        commits = [commit for event in rounds for commit in event["commits"]]
        order, tokens = result.order_BL[row].tolist(), result.tokens_BL[row].tolist()
        assert [c["order"] for c in commits] == list(range(max(order) + 1))
        assert all(order[c["position"]] == c["order"] and tokens[c["position"]] == c["token"] for c in commits)
        assert all(0 < c["certainty"] <= 1 for c in commits)
        assert all(c["text"] == base.tokenizer.decode([c["token"]], skip_special_tokens=True) for c in commits)
        assert [event["rounds"] for event in rounds] == list(range(1, int(result.rounds_B[row]) + 1))
        assert rounds[-1]["sampler_calls"] == int(result.sampler_calls_B[row])
        (over,) = [event for event in events if event["type"] == "row" and event["row"] == row]
        text = base.decode(tokens[5:])
        assert over["text"] == text == "".join(event["text"] for event in rounds)
        spoken = tokens[5 : 5 + over["completion_tokens"]]
        log_p = partner.model(torch.tensor([[*ids, *spoken]])).logits[0, 4:-1].log_softmax(-1)
        assert end["nll"][row] == pytest.approx(-float(log_p[range(len(spoken)), spoken].mean()), abs=1e-4)
    done = [event["completion_tokens"] for event in events if event["type"] == "row"]
    assert end["usage"] == {"prompt_tokens": 5, "completion_tokens": sum(done), "total_tokens": 5 + sum(done)}
    assert end["base_calls"] == int(result.base_calls_B.sum()) and end["seconds"] > 0


@pytest.mark.parametrize("order", ["left_to_right", "random", "margin"])
def test_a_request_may_say_in_which_order(
    random_texts: Served, model: tuple[TransformerBase, Sampler], order: Any
) -> None:
    base, sampler = model
    config = DecodeConfig(tokens_per_step=3, max_new_tokens=10, seed=4, order=order)
    result = decode(base, [base.encode("once")], config, sampler=sampler)
    body = {"prompt": "once", "max_tokens": 10, "seed": 4, "tokens_per_step": 3, "order": order}
    events = canvas_events(random_texts, body)
    at = [commit["position"] for event in events for commit in event.get("commits", ())]
    wanted = result.order_BL[0].tolist()
    assert [wanted[position] for position in at] == list(range(len(at))) and len(at) == max(wanted) + 1
    assert at == sorted(at) or order != "left_to_right"


def test_the_model_says_which_settings_its_decoders_have(random_texts: Served) -> None:
    (model,) = random_texts.client.get("/v1/models").json()["data"]
    settings = model["decoder_settings"]
    assert list(settings) == model["decoders"]
    assert settings["cascade"] == ["tau", "tau_g", "calls"] and settings["joint"] == []


def test_the_canvas_stream_of_gaps_and_of_conversations(random_texts: Served) -> None:
    events = canvas_events(random_texts, {"parts": ["ab", "c", ""], "gaps": [2, 3], "seed": 4, "nll": True})
    assert events[0]["rows"][0]["masks"] == [3, 4, 6, 7, 8]
    assert [(g["position"], g["text"]) for g in events[0]["rows"][0]["given"]] == [
        (0, ""),
        (1, "a"),
        (2, "b"),
        (5, "c"),
    ]
    filled = post(random_texts, "/v1/infill", {"parts": ["ab", "c", ""], "gaps": [2, 3], "seed": 4})
    assert events[-2]["text"] == filled["choices"][0]["text"] and events[-1]["usage"] == filled["usage"]
    assert len(events[-1]["nll"]) == 1 and events[-1]["nll"][0] > 0
    said_hi = {"messages": [{"role": "user", "content": "hi"}], "seed": 4, "max_tokens": 6}
    text = post(random_texts, "/v1/chat/completions", said_hi)["choices"][0]["message"]["content"]
    assert canvas_events(random_texts, said_hi)[-2]["text"] == text


def test_the_canvas_refuses_before_the_stream(random_texts: Served, typist: Served) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"), ({"parts": ["a", "b"]}, "gaps"),
        ({"gaps": [1]}, "gaps"), ({"parts": ["a", "b"], "gaps": [1], "stop": "x"}, "stop"),
        ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": "x", "max_tokens": 1000}, "prompt"),
    ]  # fmt: skip
    for body, param in cases:
        refused(random_texts.client.post("/v1/canvas", json=body), param)
    error = refused(typist.client.post("/v1/canvas", json={"prompt": "x", "nll": True}), "nll")
    assert "--load-partner" in error["message"]


def test_a_poisoned_request_is_a_500_of_its_own(typist: Served) -> None:
    """NaN and a crash, beside good requests; as a stream it is an error before the stream, since no round succeeded."""
    bodies = [{"prompt": p, "max_tokens": 12, "stream": s} for p in ("~:", "`:") for s in (True, False)]
    good = {"prompt": "write:", "max_tokens": 12}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: typist.client.post("/v1/completions", json=body), [*bodies, *[good] * 8]))
    for answer in answers[:4]:
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal"
        assert "crash" not in answer.text and "NaN" not in answer.text
    assert [answer.json()["choices"][0]["text"] for answer in answers[4:]] == ["hello world "] * 8


# Around the routes -----------------------------------------------------------------------------------------------


def test_the_key_opens_every_route_but_health() -> None:
    with serving(typing_engine(Typist(HELLO)), api_key="secret") as served:
        assert served.client.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for path in ("/v1/models", "/metrics"):
                answer = served.client.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            answer = served.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 401
        with pytest.raises(openai.AuthenticationError):
            openai_client(served).models.list()
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0)
        assert client.completions.create(model=MODEL, prompt="a:", max_tokens=5).choices[0].text == "hello"


def test_rates_are_counted_by_client_and_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    rate = Rate(2, clock=lambda: now[0])
    outcomes = []
    for moment, client in ((0, "a"), (9, "a"), (30.5, "a"), (31, "b"), (59.5, "a"), (60, "a"), (61, "a"), (62, "a")):
        now[0] = moment
        try:
            rate.check(client)
            outcomes.append("")
        except ApiError as error:
            outcomes.append((error.headers or {})["retry-after"])
    assert outcomes == ["", "", "30", "", "1", "", "", "58"]
    monkeypatch.setattr("adjust_dlm.serve.http.Rate", lambda per_minute: Rate(per_minute, clock=lambda: 5.0))
    with serving(typing_engine(Typist(HELLO)), rate_limit=2) as served:
        statuses = [served.client.get("/v1/models").status_code for _ in range(3)]
        assert statuses == [200, 200, 429] and served.client.get("/health").status_code == 200
        with pytest.raises(openai.RateLimitError):
            openai_client(served).models.list()


def test_a_full_queue_is_429_and_defaults_are_the_servers() -> None:
    base = Typist(HELLO)
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=6, temperature=0)
    with serving(typing_engine(base, queue=4), decoder="parallel", config=config) as served:
        body = {"prompt": "write:", "n": 5}
        refused(served.client.post("/v1/completions", json=body), None)
        answer = post(served, "/v1/completions", {"prompt": "write:"})
        assert answer["choices"][0]["text"] == "hello " and answer["adjust"]["base_calls"] == 3
        base.sleep = 0.05
        with ThreadPoolExecutor(12) as pool:
            answers = list(
                pool.map(lambda _: served.client.post("/v1/completions", json={"prompt": "a:", "n": 4}), [0] * 12)
            )
        full = [answer for answer in answers if answer.status_code == 429]
        assert full and all(a.json()["error"]["code"] == "queue_full" and a.headers["retry-after"] == "1" for a in full)
        assert all(len(a.json()["choices"]) == 4 for a in answers if a.status_code == 200)


def test_only_who_watches_is_told_of_rounds(random_texts: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: list[bool] = []
    submit = random_texts.engine.submit
    monkeypatch.setattr(
        random_texts.engine, "submit", lambda work, sink: quiet.append(work.quiet) or submit(work, sink)
    )
    for path in ANSWERS:
        for stream in (False, True):
            assert random_texts.client.post(path, json=body_for(path, max_tokens=2, stream=stream)).status_code == 200
    gaps = {"parts": ["a", "b"], "gaps": [2]}
    assert random_texts.client.post("/v1/infill", json=gaps).status_code == 200
    assert random_texts.client.post("/v1/canvas", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert quiet == [True, False, True, False, True, False]


def test_a_short_context_shortens_the_default_and_a_timeout_is_504() -> None:
    base = Typist(HELLO, context=20)
    with serving(typing_engine(base, seconds=0.8)) as served:
        answer = post(served, "/v1/completions", {"prompt": "write:"})
        assert answer["choices"][0]["text"] == HELLO[:13]
        base.sleep = 0.2
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/canvas"):
            slow = body_for(path if path != "/v1/canvas" else ANSWERS[0], "a:", max_tokens=8, decoder="joint")
            answer_ = served.client.post(path, json=slow)
            text = answer_.text
            assert "request_timeout" in text and answer_.status_code == (200 if path == "/v1/canvas" else 504)


def test_the_numbers_on_metrics_are_those_of_the_requests() -> None:
    with serving(typing_engine(Typist(HELLO))) as served:
        for _ in range(3):
            post(served, "/v1/completions", {"prompt": "write:", "max_tokens": 6, "tokens_per_step": 3, "n": 2})
        served.client.post("/v1/completions", json={"max_tokens": 0})
        served.client.get("/nowhere")
        lines = dict(
            line.rsplit(" ", 1) for line in served.client.get("/metrics").text.splitlines() if not line.startswith("#")
        )
    expected = {
        'adjust_requests_total{path="/v1/completions",status="200"}': 3, "adjust_base_passes_total": 6,
        'adjust_requests_total{path="/v1/completions",status="400"}': 1, "adjust_sampler_passes_total": 12,
        'adjust_requests_total{path="other",status="404"}': 1, "adjust_rounds_total": 6, "adjust_queue_rows": 0,
        'adjust_tokens_total{kind="prompt"}': 21, 'adjust_tokens_total{kind="completion"}': 36,
        "adjust_running_rows": 0, "adjust_row_seconds_count": 6,
        'adjust_request_seconds_count{path="/v1/completions"}': 4,
    }  # fmt: skip
    assert {key: float(lines[key]) for key in expected} == expected


def test_throughput_is_logged_while_something_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="adjust_dlm.serve")
    monkeypatch.setattr("adjust_dlm.serve.metrics.LOG_SECONDS", 0.05)
    with serving(typing_engine(Typist(HELLO))) as served:
        for _ in range(50):  # a server of other tests may end late
            caplog.clear()
            time.sleep(0.2)
            if not (told := [record for record in caplog.records if "tokens/s" in record.getMessage()]):
                break
        assert not told  # nothing runs
        post(served, "/v1/completions", {"prompt": "write:", "max_tokens": 6, "tokens_per_step": 3})
        time.sleep(0.3)
    said = [record.getMessage() for record in caplog.records]
    told = [line for line in said if "tokens/s" in line]
    assert any("in 1 rows that ended; " in line for line in told)
    assert sum(float(line.split()[0]) for line in told if "in 1 rows" in line) == pytest.approx(6 / 0.05)
    assert any(line.startswith("/v1/completions: 200 in ") for line in said)


def test_metrics_tell_what_the_fast_form_holds(model: tuple[TransformerBase, Sampler]) -> None:
    """Concurrent requests with the texts of `decode`, and the memory that their shapes took."""
    base, sampler = model
    engine = Engine(base, sampler=sampler, eager=False)
    with serving(engine) as served, ThreadPoolExecutor(4) as pool:
        asked = [{"prompt": "once", "max_tokens": 7, "seed": n, "tokens_per_step": 3} for n in range(8)]
        answers = list(pool.map(lambda body: post(served, "/v1/completions", body), asked))
        lines = dict(
            line.rsplit(" ", 1) for line in served.client.get("/metrics").text.splitlines() if not line.startswith("#")
        )
    for body, answer in zip(asked, answers, strict=True):
        config = DecodeConfig(max_new_tokens=7, tokens_per_step=3, seed=body["seed"])
        alone = decode(base, [base.encode("once")], config, sampler=sampler, eager=True)
        assert answer["choices"][0]["text"] == base.decode(alone.tokens_BL[0, -7:].tolist())
    held, shapes = engine.held, int(float(lines["adjust_captured_shapes"]))
    assert held.shapes == shapes > 0
    assert float(lines['adjust_captured_bytes{kind="buffers"}']) == held.buffer_bytes > shapes * 32 * 2 * 4 * base.width
    assert float(lines['adjust_captured_bytes{kind="graphs"}']) == 0  # without a card nothing is captured
    assert (float(lines["adjust_captures_total"]), float(lines["adjust_captured_functions"])) == (0, 0)


def test_a_base_without_a_template_says_so(model: tuple[TransformerBase, Sampler]) -> None:
    base = Typist(HELLO)
    base.tokenizer.chat_template = None
    with serving(typing_engine(base)) as served:
        error = refused(served.client.post(ANSWERS[1], json=body_for(ANSWERS[1])), None)
        assert "has no chat template; continue plain text with /v1/completions" in error["message"]
