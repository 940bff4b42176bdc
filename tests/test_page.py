"""The page at / in headless Chromium, against a server with a tiny base, and the page of `adjust report`.

Skipped where there is no Chromium.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from adjust_dlm.bench.report import ReportConfig, make_report
from adjust_dlm.commands.output import Outcome, write_outcome
from adjust_dlm.eval.scores import NllConfig
from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.http import PAGE, PAGE_HEADERS, PAGE_PATHS
from helpers import tiny_sampler
from serving import Served, Typist, byte_tokenizer, serving, typing_engine, wait_for
from tiny_ar import chat_base, tiny_partner

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="wants playwright (pip install playwright)")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="want a browser (apt-get install chromium)")]
expect = playwright.expect
HALVES = (b"\xf0\x9f", b"\x98\x80")
EMOJI = "a\U0001f600 <b>\ud55c</b>\u00e9"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def typist() -> Iterator[Served]:
    """Writes EMOJI from the right; the emoji is two tokens, the Korean letter three, the last one two."""
    with serving(typing_engine(Typist(EMOJI, byte_tokenizer(*HALVES)))) as served:
        yield served


@pytest.fixture(scope="module")
def random_texts() -> Iterator[Served]:
    base = chat_base(context=128)
    with serving(Engine(base, sampler=tiny_sampler(base), partner=tiny_partner(base))) as served:
        yield served


class Visit:
    """A page, everything that it asked for, what it sent to be written and everything that its console said."""

    def __init__(self, chromium: Any, served: Served, *, link: str = "", **options: Any) -> None:
        self.context = chromium.new_context(**options)
        self.page = self.context.new_page()
        self.sent: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.asked: list[str] = []
        self.served = served
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("request", lambda request: self.sent.append(request.post_data_json) if request.post_data else None)
        self.page.goto(served.url + link)
        expect(self.page.locator("#model")).to_contain_text("tiny")
        self.page.evaluate("document.querySelector('details').open = true")

    def run(self, *, text: str, kind: str = "prompt", length: int = 20, k: int = 4) -> None:
        page = self.page
        self.sent.clear()
        page.check(f"[name=kind][value={kind}]")
        page.fill("#text", text)
        page.fill("#k", str(k))
        page.fill("#temperature", "0.6")
        if kind != "parts":
            page.fill("#length", str(length))
        page.click("#start")
        self.wait()

    def wait(self) -> None:
        expect(self.page.locator("#start")).to_be_enabled(timeout=20_000)

    def column(self, n: int) -> Any:
        return self.page.locator("article").nth(n)

    def texts(self) -> list[str]:
        return [self.shown(n) for n in range(3)]

    def shown(self, n: int) -> str:
        """What a screen reader finds in a column."""
        return str(self.column(n).locator(".plain").text_content())

    def number(self, n: int, name: str) -> float:
        return float(self.column(n).locator(f"[data-number={name}]").text_content())

    def colours(self, n: int) -> list[str]:
        script = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
        return list(self.column(n).locator(".token").evaluate_all(script))

    def watch(self, selector: str, look: str) -> Callable[[], list[Any]]:
        """What `look` gives of an element at each of its changes from now on."""
        script = (
            f"() => {{ const one = document.querySelector('{selector}'), seen = window.seen = [], look = {look};"
            " new MutationObserver(() => seen.push(look(one))).observe(one, { childList: true, subtree: true }); }"
        )
        self.page.evaluate(script)
        return lambda: list(self.page.evaluate("window.seen"))

    def wide(self) -> int:
        """Pixels that stick out to the right."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.fixture
def visit(chromium: Any, random_texts: Served) -> Iterator[Visit]:
    with watched(Visit(chromium, random_texts)) as one:
        yield one


class watched:
    """Fails at the end if the console said anything, or if anything but the server was asked."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    def __enter__(self) -> Visit:
        return self.visit

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.visit.context.close()
        if kind is None:
            assert self.visit.said == []
            assert {url for url in self.visit.asked if not url.startswith(f"{self.visit.served.url}/")} == set()


def answer(served: Served, decoder: str, **body: Any) -> dict[str, Any]:
    out = served.client.post("/v1/completions", json={"decoder": decoder, **body})
    assert out.status_code == 200, out.text
    return dict(out.json())


def test_three_decoders_side_by_side_show_what_the_server_says(visit: Visit) -> None:
    """Text, passes and tokens are those of /v1/completions; speed is what they say; NLL is there when asked for."""
    visit.page.check("#nll")
    visit.page.fill("#seed", "5")
    visit.run(text="cat")
    for n, decoder in enumerate(["joint", "parallel", "adjust"]):
        k = {} if decoder == "joint" else {"tokens_per_step": 4}
        wanted = answer(visit.served, decoder, prompt="cat", max_tokens=20, temperature=0.6, seed=5, **k)
        assert visit.shown(n) == wanted["choices"][0]["text"]
        assert visit.number(n, "tokens") == wanted["usage"]["completion_tokens"]
        for name in ("base_calls", "sampler_calls"):
            assert visit.number(n, name) == wanted["adjust"][name]
        assert visit.number(n, "nll") > 0
        assert not visit.column(n).locator("[data-number=partner_calls]").is_visible()
        seconds, speed = visit.number(n, "seconds"), visit.number(n, "speed")
        assert abs(visit.number(n, "tokens") / speed - seconds) <= 0.006 + 0.06 * seconds / speed
    assert "20 tokens" in visit.page.locator("#said").text_content()


def test_the_slider_goes_through_base_passes_and_numbers_follow(visit: Visit) -> None:
    """At every pass text and numbers are those of the rounds until then, of each column; K tokens are new in it."""
    visit.run(text="cat", length=12)
    end, slider = visit.texts(), visit.page.locator("#replay")
    told = [canvas_events(visit.served, body) for body in visit.sent]
    most = max(rounds[-1]["base_calls"] for rounds in told)
    assert slider.get_attribute("max") == str(most) == "12"
    for passed in (0, 1, 2, 3, 7, 12):
        slider.fill(str(passed))
        assert visit.page.locator("#shown").text_content() == f"pass {passed} of 12"
        assert slider.get_attribute("aria-valuetext") == f"after {passed} of 12 base passes"
        for n, rounds in enumerate(told):
            done = [one for one in rounds if one["base_calls"] <= passed]
            commits = sum(len(one["commits"]) for one in done)
            assert visit.column(n).locator(".mask").count() == 12 - commits
            assert visit.number(n, "tokens") == commits
            for name in ("base_calls", "sampler_calls"):
                assert visit.number(n, name) == (done[-1][name] if done else 0)
            new = len(done[-1]["commits"]) if done and done[-1]["base_calls"] == passed < most else 0
            assert visit.column(n).locator(".fresh").count() == new
            seconds = visit.number(n, "seconds")
            if seconds > 0.1:
                speed = visit.number(n, "speed")
                assert abs(speed * seconds - commits) <= 0.06 * seconds + 0.006 * speed
    slider.fill("1")
    turns = [
        visit.column(n).locator(".fresh").evaluate_all("all => all.map(one => one.style.getPropertyValue('--turn'))")
        for n in range(3)
    ]
    assert [sorted(one) for one in turns] == [["0"], ["0"] * 4, ["0", "1", "2", "3"]]  # one after another: only adjust
    for now, then in zip(visit.texts(), end, strict=True):  # an earlier state: parts of the end, with holes
        assert re.fullmatch(".*".join(map(re.escape, now.split("\u2026"))), then, re.DOTALL)
    slider.focus()
    visit.page.keyboard.press("ArrowRight")
    assert [visit.column(n).locator(".mask").count() for n in range(3)] == [10, 4, 4]
    visit.page.keyboard.press("Home")
    assert visit.texts() == ["\u2026"] * 3
    visit.page.keyboard.press("End")
    assert visit.texts() == end
    seen = visit.watch("#shown", "one => one.textContent")
    visit.page.click("#play")
    expect(visit.page.locator("#play")).to_have_text("Play", timeout=15_000)
    assert list(dict.fromkeys(seen())) == [f"pass {passed} of 12" for passed in range(13)]
    assert visit.texts() == end


def canvas_events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds of a canvas stream."""
    lines = served.client.post("/v1/canvas", json=body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return [event for event in events if event["type"] == "round"]


def test_colours_follow_the_switch(visit: Visit) -> None:
    visit.run(text="cat", length=12)
    by_order = visit.colours(0)
    assert len(set(by_order)) == 12  # each commit has a shade of its own
    visit.page.check("[name=colour][value=certainty]")
    assert visit.colours(0) != by_order


def test_the_canvas_fills_in_while_the_server_works(chromium: Any) -> None:
    """All columns at once, with a clock that runs; Stop ends them, and the server with them."""
    base = Typist("x" * 80)
    base.sleep = 0.1
    with serving(typing_engine(base)) as served, watched(Visit(chromium, served)) as visit:
        start(visit, length=60)
        for n in range(3):
            expect(visit.column(n).locator(".token").first).to_be_visible()
        assert visit.page.locator("#replay").is_disabled() and not visit.page.locator("#play").is_visible()
        assert visit.page.locator("#link").is_disabled()
        seen = visit.watch("dl", "one => [...one.querySelectorAll('dd')].map(dd => Number(dd.textContent))")
        visit.page.wait_for_timeout(2500)
        passes, clock = zip(*[(passes, (passes, seconds)) for passes, _, seconds, *_ in seen()], strict=True)
        assert len(set(clock)) > len(set(passes))  # it runs between rounds, too
        assert all(tokens == passes for passes, tokens, *_ in seen())
        visit.page.click("#stop")
        visit.wait()
        written, masks = (visit.column(0).locator(kind).count() for kind in (".token", ".mask"))
        assert written >= 1 and masks >= 1 and written + masks == 60
        assert visit.column(0).locator(".problem").text_content() == "stopped"
        passes = base.passes
        wait_for(lambda: served.engine.idle)
        assert base.passes <= passes + 4  # the round that ran, at most: g is the base here


def test_columns_can_run_one_after_another(chromium: Any) -> None:
    """A box for fair seconds: a column begins when the one before it is over; a stop ends what has not begun, too."""
    base = Typist("x" * 30)
    base.sleep = 0.05
    with serving(typing_engine(base)) as served, watched(Visit(chromium, served)) as visit:
        visit.page.check("#alone")
        start(visit, length=8, k=8)
        expect(visit.column(1).locator(".token").first).to_be_visible()
        assert visit.column(0).locator(".token").count() == 8
        visit.wait()
        shared = "The columns shared the machine"
        assert shared not in visit.page.locator("#closing").text_content()
        start(visit, length=20)
        expect(visit.column(0).locator(".token").first).to_be_visible()
        visit.page.click("#stop")
        visit.wait()
        assert visit.column(1).locator(".canvas").text_content() == ""
        assert [body["decoder"] for body in visit.sent] == ["joint", "parallel", "adjust", "joint"]
        visit.page.uncheck("#alone")
        start(visit, length=8)
        visit.wait()
        assert shared in visit.page.locator("#closing").text_content()


def start(visit: Visit, *, length: int, k: int = 4) -> None:
    visit.page.check("[name=kind][value=prompt]")
    visit.page.fill("#text", "write:")
    visit.page.fill("#length", str(length))
    visit.page.fill("#k", str(k))
    visit.page.click("#start")


@pytest.mark.parametrize("k", [1, 3])
def test_characters_of_several_tokens_are_joined_and_text_is_no_html(chromium: Any, typist: Served, k: int) -> None:
    """Halves alone are shown as such; the end token and what stands behind it are no text."""
    with watched(Visit(chromium, typist)) as visit:
        visit.run(text="write:", length=24, k=k)
        assert visit.texts() == [EMOJI] * 3
        assert visit.column(0).locator(".canvas b").count() == 0
        emoji = visit.column(0).locator(".token", has_text="\U0001f600")
        assert emoji.text_content() == "\U0001f600"
        number = int(emoji.get_attribute("title").split()[1].rstrip(","))
        visit.page.locator("#replay").fill(str(number - 1))
        assert "\U0001f600" not in visit.shown(0)
        assert "\ufffd" in visit.shown(0)


def test_gaps_are_filled_between_what_is_given(visit: Visit) -> None:
    visit.run(text="The cat {3} on{2}.", kind="parts")
    wanted = visit.served.client.post(
        "/v1/infill",
        json={"parts": ["The cat ", " on", "."], "gaps": [3, 2], "decoder": "joint", "temperature": 0.6, "seed": 1},
    ).json()["choices"][0]["text"]
    assert visit.shown(0) == wanted
    assert visit.column(0).locator(".token").count() == 5
    assert visit.column(0).locator(".canvas").text_content() == wanted  # nothing stands for the start token
    assert visit.page.locator("#replay").get_attribute("max") == "5"


def test_errors_of_the_server_are_shown_as_they_are(chromium: Any, random_texts: Served) -> None:
    visit = Visit(chromium, random_texts)
    visit.run(text="cat", length=500)
    body = {"prompt": "cat", "max_tokens": 500}
    said = random_texts.client.post("/v1/completions", json=body).json()["error"]["message"]
    assert [visit.column(n).locator(".problem").text_content() for n in range(3)] == [f"400: {said}"] * 3
    assert visit.column(0).locator(".problem").is_visible()
    visit.run(text="no gaps", kind="parts")
    assert visit.column(0).locator(".problem").text_content().startswith("400: parts: List should have at least 2")
    visit.run(text="cat", length=4)
    assert not visit.column(0).locator(".problem").is_visible()
    assert len(visit.said) == 6 and all("400 (Bad Request)" in line for line in visit.said)  # Chromium's own lines
    visit.context.close()


def test_examples_run_and_the_closing_line_says_what_was_seen(visit: Visit) -> None:
    """One click; the words are those of the columns' numbers. Captions follow K and the decoder."""
    visit.page.fill("#length", "8")
    visit.page.click("#examples button >> nth=1")
    visit.wait()
    asked = "What is the capital of France?"
    assert visit.page.input_value("#text") == asked
    assert [body["messages"] for body in visit.sent] == [[{"role": "user", "content": asked}]] * 3
    lines = visit.page.locator("#closing").text_content().split("\n")
    behind = ["", ", but the tokens of a pass did not see each other", ", and each token saw those before it"]
    for n, decoder in enumerate(["joint", "parallel", "adjust"]):
        tokens, passes = (int(visit.number(n, name)) for name in ("tokens", "base_calls"))
        cost = f"{tokens} token{'s' * (tokens != 1)} in {passes} base pass{'es' * (passes != 1)}"
        seconds = visit.column(n).locator("[data-number=seconds]").text_content()
        assert lines[n] == f"{decoder} wrote {cost} and {seconds} s{behind[n]}."
    assert lines[3:] == ["The columns shared the machine; each is faster alone (More settings)."]
    visit.page.fill("#k", "3")
    captions = visit.page.locator(".caption")
    about = ["1 token a pass", "3 tokens a pass, none sees the others", "3 tokens a pass, each sees those before it"]
    assert captions.all_text_contents() == about
    visit.column(0).locator("select").select_option("threshold")
    assert captions.first.text_content() == "" and not captions.first.is_visible()
    visit.page.check("[name=kind][value=parts]")
    assert visit.page.input_value("#text") == "The cat {3} on the mat."  # an example gives way to another


def test_more_settings_are_sent_to_the_decoders_that_have_them(visit: Visit) -> None:
    """What is left empty is not sent; tau goes to `threshold` alone, K to those that heed it; gaps have no block."""
    visit.run(text="cat", length=8)
    plain = {"temperature": 0.6, "seed": 1, "max_tokens": 8, "prompt": "cat"}
    assert visit.sent == [
        {"decoder": "joint", **plain},
        *({"decoder": decoder, "tokens_per_step": 4, **plain} for decoder in ("parallel", "adjust")),
    ]
    visit.column(0).locator("select").select_option("threshold")
    visit.column(1).locator("select").select_option("none")
    visit.page.select_option("#order", "left_to_right")
    for name, value in (("top_p", "0.9"), ("block", "4"), ("tau", "0.5")):
        visit.page.fill(f"#{name}", value)
    visit.run(text="cat", length=8)
    more = {"order": "left_to_right", "top_p": 0.9}
    assert visit.sent == [
        {"decoder": "threshold", **plain, **more, "block_length": 4, "decoder_options": {"tau": 0.5}},
        {"decoder": "adjust", "tokens_per_step": 4, **plain, **more, "block_length": 4},
    ]
    assert visit.column(1).locator("[data-number=base_calls]").text_content() == "\u2013"
    at = [commit["position"] for one in canvas_events(visit.served, visit.sent[1]) for commit in one["commits"]]
    assert at == sorted(at)
    visit.run(text="a{2}b", kind="parts")
    assert visit.sent[1] == {
        "decoder": "adjust", "tokens_per_step": 4, "temperature": 0.6, "seed": 1, **more,
        "parts": ["a", "b"], "gaps": [2],
    }  # fmt: skip
    assert "(cascade, threshold)" in visit.page.locator("label:has(#tau)").text_content()


FIELDS = """() => [...document.querySelector("form").elements].filter(one => one.name).map(
    one => [one.name, one.value, ["radio", "checkbox"].includes(one.type) && one.checked])"""
CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}


def test_a_link_brings_all_settings_back(chromium: Any, random_texts: Served) -> None:
    """Whatever can be set but the key, with text of any kind; what it gives is the same text."""
    with watched(Visit(chromium, random_texts, **CLIPBOARD)) as visit:
        text = 'two\nlines & "#%=+{2}" \u00e9'
        visit.page.evaluate("document.querySelector('#key-label').hidden = false")
        values = {"seed": "-7", "top_p": "0.9", "block": "4", "tau": "0.5", "key": "secret"}
        for name, value in values.items():
            visit.page.fill(f"#{name}", value)
        visit.page.select_option("#order", "margin")
        visit.column(0).locator("select").select_option("threshold")
        visit.column(1).locator("select").select_option("none")
        for box in ("#alone", "#nll", "[name=colour][value=certainty]"):
            visit.page.check(box)
        visit.run(text="cat", length=9, k=3)
        assert visit.page.url != f"{random_texts.url}/"  # it is in the address once it runs
        written = visit.texts()
        visit.page.fill("#text", text)
        visit.page.click("#link")
        expect(visit.page.locator("#link")).to_have_text("Copied")
        link = visit.page.evaluate("navigator.clipboard.readText()")
        assert link == visit.page.url and "secret" not in link
        assert parse_qs(urlsplit(link).fragment)["text"] == [text]
        fields = visit.page.evaluate(FIELDS)
        expect(visit.page.locator("#link")).to_have_text("Copy link")
    with watched(Visit(chromium, random_texts, link=f"/#{urlsplit(link).fragment}")) as visit:
        assert visit.page.evaluate(FIELDS) == fields
        for field in (
            ["text", text, False],
            ["kind", "prompt", True],
            ["alone", "1", True],
            ["decoder2", "none", False],
        ):
            assert field in fields
        assert visit.page.locator("#problem").text_content() == ""
        visit.page.fill("#text", "cat")
        visit.page.click("#start")
        visit.wait()
        assert visit.texts() == written
        visit.page.evaluate("location.hash = '#kind=messages&text=hi&k=2'")  # as if another link were pasted
        expect(visit.page.locator("#text")).to_have_value("hi")
        assert visit.page.input_value("#k") == "2" and not visit.page.is_checked("#alone")


@pytest.mark.parametrize("asked", ["decoder2=klass", "kind=poem", "seed=many", "order=best", "nll=1"])
def test_a_link_that_asks_for_what_is_not_there_says_so(chromium: Any, typist: Served, asked: str) -> None:
    with watched(Visit(chromium, typist, link=f"/#{asked}")) as visit:
        said = f"the link asks for {asked}, which this page cannot do"
        expect(visit.page.locator("#problem")).to_have_text(said)
        assert visit.page.locator("[name=kind]:checked").get_attribute("value") == "messages"
        assert visit.column(1).locator("select").input_value() == ("none" if "decoder" in asked else "parallel")
        visit.said[:] = [line for line in visit.said if "cannot be parsed" not in line]  # Chromium's own, on the seed


def test_the_text_of_a_column_can_be_copied(chromium: Any, typist: Served) -> None:
    """What is shown: all of it, or with dots for masks; where copying is not allowed, the button says so."""
    with watched(Visit(chromium, typist, **CLIPBOARD)) as visit:
        visit.run(text="write:", length=24)
        button = visit.column(2).locator(".copy")
        button.click()
        expect(button).to_have_text("Copied")
        assert visit.page.evaluate("navigator.clipboard.readText()") == EMOJI
        visit.page.locator("#replay").fill("1")
        button.click()
        wait_for(lambda: visit.page.evaluate("navigator.clipboard.readText()") == visit.shown(2) != EMOJI)
        visit.page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
        visit.column(0).locator(".copy").click()
        expect(visit.column(0).locator(".copy")).to_have_text("Not allowed here")
        expect(visit.column(0).locator(".copy")).to_have_text("Copy text")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_is_kept_by_each_column(visit: Visit) -> None:
    """Every turn is sent with the column's own answers before it; a new conversation begins from nothing."""
    visit.run(text="hi", kind="chat", length=6)
    assert [body["messages"] for body in visit.sent] == [[user("hi")]] * 3
    assert visit.page.input_value("#text") == ""  # for the next one
    first = visit.texts()
    before = [[user("hi"), {"role": "assistant", "content": text}] for text in first]
    visit.run(text="and?", kind="chat", length=6)
    assert [body["messages"] for body in visit.sent] == [[*turns, user("and?")] for turns in before]
    second = visit.texts()
    for n in range(3):
        turns = visit.column(n).locator(".turns p").all_text_contents()
        assert turns == ["You: hi", f"Answer: {first[n]}", "You: and?"]
    visit.column(1).locator("select").select_option("none")  # it misses a turn, and keeps what it has
    visit.run(text="so", kind="chat", length=6)
    visit.column(1).locator("select").select_option("parallel")
    visit.run(text="ok", kind="chat", length=6)
    whole = [*before[1], user("and?"), {"role": "assistant", "content": second[1]}, user("ok")]
    assert visit.sent[1]["messages"] == whole
    assert [len(body["messages"]) for body in visit.sent] == [7, 5, 7]
    visit.page.click("#anew")
    assert visit.page.locator(".turns p").count() == 0 and visit.texts() == [""] * 3
    assert visit.page.evaluate("document.activeElement.id") == "text"
    visit.run(text="hi", kind="chat", length=6)
    assert [body["messages"] for body in visit.sent] == [[user("hi")]] * 3
    visit.run(text="cat", length=4)
    assert not visit.page.locator("#anew").is_visible() and visit.page.locator(".turns p").count() == 0
    visit.run(text="hi", kind="chat", length=6)
    assert [body["messages"] for body in visit.sent] == [[user("hi")]] * 3


def test_a_turn_that_failed_or_was_stopped_is_no_part_of_the_conversation(chromium: Any) -> None:
    """The text stays, to be asked again. An empty question is not asked at all."""
    base = Typist("hello")
    with serving(typing_engine(base)) as served:
        visit = Visit(chromium, served)
        visit.run(text="far too long", kind="chat", length=1000)
        assert visit.column(0).locator(".problem").text_content().startswith("400: ")
        assert visit.page.input_value("#text") == "far too long"
        base.sleep = 0.1
        visit.page.fill("#text", "stop me:")
        visit.page.fill("#length", "20")
        visit.page.click("#start")
        expect(visit.column(0).locator(".token").first).to_be_visible()
        visit.page.click("#stop")
        visit.wait()
        base.sleep = 0.0
        visit.run(text="a:", kind="chat", length=20)
        assert [body["messages"] for body in visit.sent] == [[user("a:")]] * 3
        visit.page.click("#start")
        assert visit.page.locator("#start").is_enabled() and len(visit.sent) == 3
        assert len(visit.said) == 3 and all("400 (Bad Request)" in line for line in visit.said)
        visit.context.close()


def test_a_server_with_a_key_asks_for_it(chromium: Any) -> None:
    with serving(typing_engine(Typist("hello")), api_key="secret") as served:
        page = chromium.new_page()
        page.goto(served.url)
        expect(page.locator("#problem")).to_have_text("401: wrong or missing API key")
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        expect(page.locator("#model")).to_contain_text("tiny")
        assert page.locator("#problem").text_content() == ""
        assert not page.locator("#order").is_visible()  # folded away
        page.fill("#text", "write:")
        page.click("#start")
        expect(page.locator("article .plain").nth(2)).to_have_text("hello")
        assert "secret" not in page.url
        page.close()


def test_the_keyboard_is_enough(visit: Visit) -> None:
    """Ctrl+Enter starts; every control has a name; nothing is reached by colour or mouse alone."""
    visit.page.fill("#length", "4")
    visit.page.focus("#text")
    visit.page.keyboard.press("Control+Enter")
    expect(visit.page.locator("#closing")).to_contain_text("adjust wrote", timeout=20_000)
    expect(visit.page.locator("#said")).to_have_text(re.compile("^(joint|parallel|adjust): 4 tokens"))  # the last one
    nameless = visit.page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(one => !one.labels?.length && !one.textContent.trim()).map(one => one.id)"
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_one_column_and_no_sideways_scrolling(chromium: Any, random_texts: Served, scheme: str) -> None:
    """Also with words without end; text stands out from every shade behind it (4.5 to 1, WCAG AA)."""
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    with watched(Visit(chromium, random_texts, **options)) as visit:
        visit.run(text="x" * 60, length=40)
        boxes = [visit.column(n).bounding_box() for n in range(3)]
        assert len({box["x"] for box in boxes}) == 1 and boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
        assert visit.wide() == 0
        ink = luminance(visit, visit.page.evaluate("getComputedStyle(document.body).color"))
        for colour in ("order", "certainty"):
            visit.page.check(f"[name=colour][value={colour}]")
            shades = [luminance(visit, shade) for shade in dict.fromkeys(visit.colours(0))]
            ends = sorted(luminance(visit, variable(visit, f"--{colour}-{end}")) + 0.05 for end in ("low", "high"))
            assert ends[1] / ends[0] >= 1.8  # told apart by lightness alone, whoever sees which hues
            assert min(max(a, ink) + 0.05 for a in shades) / min(min(a, ink) + 0.05 for a in shades) >= 4.5
        visit.page.set_viewport_size({"width": 1200, "height": 800})
        assert len({visit.column(n).bounding_box()["y"] for n in range(3)}) == 1
        assert visit.wide() == 0


OVERLAPS = """() => {
    const found = [], words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), shown = [];
    for (let node; (node = words.nextNode()); ) {
        const box = node.parentElement;
        if (!node.textContent.trim() || !box.checkVisibility() || box.closest(".unseen, script, option, svg")) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        for (const rect of range.getClientRects()) shown.push({ node, rect });
    }
    shown.forEach((a, n) => shown.slice(n + 1).forEach((b) => {
        const wide = Math.min(a.rect.right, b.rect.right) - Math.max(a.rect.left, b.rect.left);
        const high = Math.min(a.rect.bottom, b.rect.bottom) - Math.max(a.rect.top, b.rect.top);
        // Lines of one paragraph touch; half a line is no longer a touch.
        if (a.node !== b.node && wide > 1 && high > 8) found.push([a, b].map(({ node }) => node.textContent.trim()));
    }));
    return found;
}"""


def test_no_text_of_the_page_lies_over_another_on_a_phone(chromium: Any, random_texts: Served) -> None:
    with watched(Visit(chromium, random_texts, viewport={"width": 390, "height": 800})) as visit:
        for kind, text in (("prompt", "x" * 80), ("parts", "The cat {3} on{2}.")):
            visit.run(text=text, kind=kind)
            visit.page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")  # the slider lies over what scrolls
            assert visit.page.evaluate(OVERLAPS) == []
            assert visit.wide() == 0
        visit.page.evaluate("document.querySelector('dd').style.translate = '-9rem'")
        assert visit.page.evaluate(OVERLAPS) != []  # it can be seen


def test_no_text_of_a_report_lies_over_another_on_a_phone(chromium: Any, tmp_path: Path) -> None:
    row = {"decoder": "", "n": 3, "nll": 2.5, "nll_ci95": 0.25, "n_empty": 0, "n_tokens": 30, "perplexity": 12.2}
    rows = [{"file": f"/home/somebody/runs/{'long' * 12}/{name}.jsonl", **row} for name in "ab"]
    config = NllConfig(files=("a.jsonl",))
    results = {"judge": "smol", "rule": "", "max_tokens": 512, "rows": rows}
    write_outcome(tmp_path / ("folder" * 9), "eval nll", config, Outcome(results=results))
    make_report(ReportConfig(results=(str(tmp_path / ("folder" * 9)),), output=str(tmp_path / "out"), plot=False))
    page = chromium.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "out" / "report.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.locator("tbody th").count() == 2
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    page.close()


def variable(visit: Visit, name: str) -> str:
    return str(visit.page.evaluate("name => getComputedStyle(document.body).getPropertyValue(name)", name))


def test_start_goes_to_the_columns_on_a_phone(chromium: Any, random_texts: Served) -> None:
    """There the slider stays in sight, too. On a wide screen nothing moves."""
    for width, moves in ((390, True), (1440, False)):
        options = {"viewport": {"width": width, "height": 844}, "reduced_motion": "reduce"}
        with watched(Visit(chromium, random_texts, **options)) as visit:
            visit.page.evaluate("document.querySelector('details').open = false")
            visit.run(text="cat")
            assert (visit.page.evaluate("scrollY") > 0) == moves
            top = visit.column(0).bounding_box()["y"]
            assert 0 < top < (120 if moves else 700)
            if moves:
                visit.column(2).scroll_into_view_if_needed()
                assert visit.page.locator("#replay").bounding_box()["y"] < 60
                visit.page.locator("#replay").fill("1")
                assert visit.column(2).locator(".fresh").count() == 4


def luminance(visit: Visit, colour: str) -> float:
    """Relative luminance of any CSS colour, as WCAG defines it; the browser turns it into sRGB."""
    script = """colour => {
        const pen = new OffscreenCanvas(1, 1).getContext("2d");
        pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    }"""
    parts = [part / 255 for part in visit.page.evaluate(script, colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_foreign_can_be_loaded_or_asked(visit: Visit) -> None:
    """The policy is sent with every file, and Chromium keeps to it."""
    assert sorted(PAGE_PATHS) == sorted(f"/{file.name}".replace("/index.html", "/") for file in PAGE.iterdir())
    for path in PAGE_PATHS:
        answer = visit.served.client.get(path)
        assert answer.status_code == 200
        assert {key: answer.headers[key] for key in PAGE_HEADERS} == PAGE_HEADERS
    tried = visit.page.evaluate(
        "async () => [await fetch('http://127.0.0.2:9/').then(() => 'reached', () => 'kept back'),"
        " (() => { try { document.body.innerHTML = '<b>x</b>'; return 'written'; } catch { return 'refused'; } })()]"
    )
    assert tried == ["kept back", "refused"]
    assert len(visit.said) >= 2 and all(
        "Content Security Policy" in line or "TrustedHTML" in line for line in visit.said
    )
    visit.said.clear()
