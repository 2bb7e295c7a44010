"""The pictures of the report in docs/: a page in headless Chromium ─▶ docs/report.png, docs/report-row.png.

python bench/report_pictures.py REPORT.html
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, HEIGHT = 900, 1000
# Of a page: its colour scheme, and what stands at the top of the picture.
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
            # Few colours: a tenth of the bytes, and nothing to see of it.
            picture = Image.open(io.BytesIO(page.screenshot())).quantize(32, dither=Image.Dither.NONE)
            picture.save(DOCS / f"{name}.png", optimize=True)
            print(DOCS / f"{name}.png", (DOCS / f"{name}.png").stat().st_size)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
