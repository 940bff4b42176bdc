"""The picture in the README, from `adjust serve` on a machine with nothing else to do.

Needs Chromium and playwright (no browser of playwright's own). A first short run warms the server up.
"""

from __future__ import annotations

import argparse
import shutil

from playwright.sync_api import Page, expect, sync_playwright


def run(page: Page, length: int) -> None:
    """Presses Start and waits."""
    page.fill("#length", str(length))
    page.click("#start")
    expect(page.locator("#start")).to_be_enabled(timeout=600_000)


def main() -> None:
    """Takes the picture when ADJUST has done three quarters of its base passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--output", default="docs/images/page.png")
    flags = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 780})
        page.goto(flags.url)
        expect(page.locator("#model")).to_contain_text("context")
        page.fill("#temperature", "0.6")
        run(page, 8)
        run(page, 64)
        passes = int(page.locator("article").nth(2).locator("[data-number=base_calls]").inner_text())
        page.fill("#replay", str(passes * 3 // 4))
        page.screenshot(path=flags.output, full_page=True, animations="disabled")
        browser.close()


if __name__ == "__main__":
    main()
