"""Pictures of pages, many on a sheet: `python -m examples.page.render OUT --pages 9600` makes what training reads.

Needs Chromium (`apt-get install chromium`) and Playwright's Python package (extra `dev`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from examples.page.page import HEIGHT_PIXELS, WIDTH_PIXELS, Look, markup, sample

if TYPE_CHECKING:
    from playwright.sync_api import Page

COLUMNS, ROWS = 8, 8
SHEET = "sheet-{number:04}.webp"
LOOKS = "looks.json"


def chromium() -> str | None:
    """Where Chromium is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser_page(width: int, height: int) -> Iterator[Page]:
    """A page of headless Chromium, of so many pixels."""
    from playwright.sync_api import sync_playwright

    program = chromium()
    if program is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=1)
        finally:
            browser.close()


def sheet(page: Page, looks: Sequence[Look]) -> Image.Image:
    """Up to `COLUMNS * ROWS` pages in one picture, row by row."""
    boxes = [
        markup(look, at=(number % COLUMNS * WIDTH_PIXELS, number // COLUMNS * HEIGHT_PIXELS))
        for number, look in enumerate(looks)
    ]
    page.set_content(f'<!doctype html><body style="margin:0">{"".join(boxes)}</body>')
    return Image.open(BytesIO(page.screenshot())).convert("RGB")


def main() -> int:
    """Render sheets and write down what is on them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m examples.page.render .train --pages 9600",
    )
    parser.add_argument("out", type=Path, help="the folder for the sheets")
    parser.add_argument("--pages", type=int, default=9600, help="how many (default 9600)")
    parser.add_argument("--seed", type=int, default=0, help="of looks and states (default 0)")
    parser.add_argument("--held-out", action="store_true", help="looks and wordings that training never sees")
    options = parser.parse_args()
    rng = random.Random(f"{'held out' if options.held_out else 'training'} {options.seed}")
    looks = [sample(rng, held_out=options.held_out) for _ in range(options.pages)]
    options.out.mkdir(parents=True, exist_ok=True)
    with browser_page(COLUMNS * WIDTH_PIXELS, ROWS * HEIGHT_PIXELS) as page:
        for number, first in enumerate(range(0, len(looks), COLUMNS * ROWS)):
            picture = sheet(page, looks[first : first + COLUMNS * ROWS])
            picture.save(options.out / SHEET.format(number=number), lossless=True, quality=60, method=2)
            print(f"\r{min(first + COLUMNS * ROWS, len(looks))}/{len(looks)} pages", end="", flush=True)
    (options.out / LOOKS).write_text(json.dumps([asdict(look) for look in looks]))
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
