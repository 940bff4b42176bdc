"""The page of `adjust report` in a browser, on a phone and on a desk."""

import shutil
from pathlib import Path

import pytest

from test_report import generated, made, paper_table

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="wants playwright (pip install playwright)")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="want a browser (apt-get install chromium)")]
PROMPT = "How many legs does a spider have? " * 20
WORD = "unbreakable" * 20


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_window(width: int, tmp_path: Path) -> None:
    """Nor does a token run out of its card; tables scroll in their own boxes. A closed heading has two lines."""
    pieces = ["A", " spider\n", WORD, "<|im_end|>"]
    shared = {"prompt": PROMPT, "pieces": pieces, "base_calls": 4, "sampler_calls": 0, "seconds": 1.0}
    folders = [
        generated(tmp_path / name, name, f"A spider\n{WORD}", [0, 1, 3, 2], **shared, row=row)
        for row, name in enumerate(("joint", "parallel", "adjust"))
    ]
    made(tmp_path / "out", *folders, paper_table(tmp_path / "t"))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto((tmp_path / "out" / "report.html").as_uri())
        heights = [
            page.locator("#samples details").nth(n).locator("h3").evaluate("h => h.clientHeight / 16 | 0")
            for n in (0, 1)
        ]
        assert heights[0] > 3 >= heights[1]  # in letters: all of it, and two lines of 1.55
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = """[...document.querySelectorAll('details *')].filter(
            e => e.getBoundingClientRect().right > e.closest('details').getBoundingClientRect().right)
            .map(e => e.outerHTML.slice(0, 80))"""
        assert page.evaluate(wide) == []
        assert page.locator(".spelled").first.inner_text() == f"A spider\u21b5\n{WORD}<|im_end|>"
        shades = [page.locator(".spelled").first.locator("i").nth(n) for n in range(4)]
        colours = [shade.evaluate("e => getComputedStyle(e).backgroundColor") for shade in shades]
        alphas = [float(colour.rstrip(")").split("/")[1]) for colour in colours]
        assert alphas == pytest.approx([0.055, 0.22, 0.55, 0.385])  # strong last; ink stays readable on it
        browser.close()
