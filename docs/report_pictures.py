"""Capture the pictures of the report with headless Chromium.

Writes docs/assets/report.png and docs/assets/report-row.png.

    python docs/report_pictures.py REPORT.html
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
WIDTH, HEIGHT = 900, 1000
# For each picture: the color scheme of the page, and the element at the top of the picture.
PICTURES = {"report": ("light", "header"), "report-row": ("dark", "article.row")}


def main() -> None:
    page_file = Path(sys.argv[1]).resolve()
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (scheme, top) in PICTURES.items():
            context = browser.new_context(color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT})
            page = context.new_page()
            page.goto(page_file.as_uri())
            page.evaluate("top => document.querySelector(top).scrollIntoView()", top)
            # Few colors take a tenth of the bytes, without a visible difference.
            picture = Image.open(io.BytesIO(page.screenshot())).quantize(32, dither=Image.Dither.NONE)
            picture.save(ASSETS / f"{name}.png", optimize=True)
            print(ASSETS / f"{name}.png", (ASSETS / f"{name}.png").stat().st_size)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
