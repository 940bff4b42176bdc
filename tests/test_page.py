"""The page at / in headless Chromium, against a server with a tiny base, and the page of `adjust report`.

Skipped where there is no Chromium.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.bench.report import ReportConfig, make_report
from adjust_dlm.commands.output import Outcome, write_outcome
from adjust_dlm.eval.scores import NllConfig
from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.http import PAGE, PAGE_HEADERS, PAGE_PATHS
from helpers import tiny_sampler
from serving import Served, Typist, byte_tokenizer, serving, typing_engine
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
    """A page, everything that it asked for and everything that its console said."""

    def __init__(self, chromium: Any, served: Served, **options: Any) -> None:
        self.context = chromium.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.served = served
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(served.url)
        expect(self.page.locator("#model")).to_contain_text("tiny")

    def run(self, *, text: str, kind: str = "prompt", length: int = 20, k: int = 4) -> None:
        page = self.page
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


def test_the_slider_goes_back_and_colours_follow_the_switch(visit: Visit) -> None:
    visit.run(text="cat", length=12)
    end, slider = visit.texts(), visit.page.locator("#replay")
    assert slider.get_attribute("max") == "12"
    assert [visit.column(n).locator(".mask").count() for n in range(3)] == [0, 0, 0]
    by_order = visit.colours(0)
    assert len(set(by_order)) == 12  # each commit has a shade of its own
    visit.page.check("[name=colour][value=certainty]")
    assert visit.colours(0) != by_order
    slider.fill("5")
    assert [visit.column(n).locator(".mask").count() for n in range(3)] == [7, 7, 7]
    assert visit.page.locator("#shown").text_content() == "5 of 12"
    assert slider.get_attribute("aria-valuetext") == "after 5 of 12 commits"
    for now, then in zip(visit.texts(), end, strict=True):  # an earlier state: parts of the end, with holes
        assert re.fullmatch(".*".join(map(re.escape, now.split("\u2026"))), then, re.DOTALL)
    slider.focus()
    visit.page.keyboard.press("ArrowRight")
    assert visit.column(1).locator(".mask").count() == 6
    slider.fill("0")
    assert visit.texts() == ["\u2026"] * 3
    visit.page.keyboard.press("End")
    assert visit.texts() == end
    visit.page.click("#play")
    expect(visit.page.locator("#play")).to_have_text("Play", timeout=15_000)
    assert visit.texts() == end


def test_the_canvas_fills_in_while_the_server_works(chromium: Any) -> None:
    """Blocks and text side by side after some rounds; Stop ends it, and the server with it."""
    base = Typist("x" * 30)
    base.sleep = 0.1
    with serving(typing_engine(base)) as served, watched(Visit(chromium, served)) as visit:
        visit.page.check("[name=kind][value=prompt]")
        visit.page.fill("#text", "write:")
        visit.page.fill("#length", "20")
        visit.page.click("#start")
        expect(visit.column(0).locator(".token").first).to_be_visible()
        assert visit.page.locator("#replay").is_disabled()
        visit.page.click("#stop")
        visit.wait()
        written, masks = (visit.column(0).locator(kind).count() for kind in (".token", ".mask"))
        assert written >= 1 and masks >= 1 and written + masks == 20
        assert visit.column(0).locator(".problem").text_content() == "stopped"
        assert visit.column(1).locator(".canvas").text_content() == ""
        passes = base.passes
        visit.page.wait_for_timeout(300)
        assert base.passes <= passes + 1 and served.engine.idle


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


def test_a_server_with_a_key_asks_for_it(chromium: Any) -> None:
    with serving(typing_engine(Typist("hello")), api_key="secret") as served:
        page = chromium.new_page()
        page.goto(served.url)
        expect(page.locator("#problem")).to_have_text("401: wrong or missing API key")
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        expect(page.locator("#model")).to_contain_text("tiny")
        assert page.locator("#problem").text_content() == ""
        page.fill("#text", "write:")
        page.click("#start")
        expect(page.locator("article .plain").nth(2)).to_have_text("hello")
        page.close()


def test_the_keyboard_is_enough(visit: Visit) -> None:
    """Ctrl+Enter starts; every control has a name; nothing is reached by colour or mouse alone."""
    visit.page.fill("#length", "4")
    visit.page.focus("#text")
    visit.page.keyboard.press("Control+Enter")
    expect(visit.page.locator("#said")).to_contain_text("adjust: ", timeout=20_000)
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
