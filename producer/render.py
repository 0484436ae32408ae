"""A decision beside its screenshot, as a picture (PNG) or a page (HTML that loads nothing). No worker keeps an image:
the caller brings it; what the result does not hold, goals and labels, is not shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from producer.result import Result
from producer.table import cell, error_text, printable, timing_text

PANEL_PIXELS, MARGIN_PIXELS, LINE_PIXELS, TEXT_PIXELS = 520, 16, 24, 15
MAX_SHOT_PIXELS = 1280
INK, FAINT, BAR, CHOSEN = "#1b1f24", "#d8dee4", "#6e7781", "#0a6b3d"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 1.5rem;
  display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
img { max-width: min(60vw, 80rem); height: auto; border: 1px solid #6e7781; }
table { border-collapse: collapse; margin-bottom: 1rem; } caption { text-align: left; font-weight: 600; }
th { text-align: left; font-weight: 400; } td, th { padding: 0 .75rem 0 0; }
.chosen th, .chosen td { font-weight: 700; }
"""


class Line(NamedTuple):
    """A line of the picture's panel; one with a `share` has a bar."""

    text: str
    share: float | None = None
    is_chosen: bool = False


def render_html(result: Result, screenshot: bytes) -> bytes:
    """A page of its own: the screenshot as a data URL, a table for each question.

    Raises:
        OSError, ValueError: the screenshot is not a PNG or JPEG file.
    """
    media_type = f"image/{_opened(screenshot).format}".lower()
    image = base64.b64encode(screenshot).decode()
    origin = f"{escape(timing_text(result).strip())}<br>{escape(printable(result.model or ''))}"
    title = escape(f"job {result.job_id}: {result.status}")
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<title>{title}</title><style>{_STYLE}</style></head>\n<body>',
        f'<img src="data:{media_type};base64,{image}" alt="the screenshot that was asked about">',
        f"<main><h1>{title}</h1><p>{origin}</p>",
        *_html_tables(result),
        "</main></body></html>\n",
    ]
    return "\n".join(parts).encode()


def render_png(result: Result, screenshot: bytes) -> bytes:
    """A picture: the screenshot, and right of it the questions with their options. Characters that its built-in font
    lacks (all but Latin-1) are escaped.

    Raises:
        OSError, ValueError: the screenshot is not a PNG or JPEG file that can be decoded.
    """
    shot = _opened(screenshot).convert("RGB")
    shot.thumbnail((MAX_SHOT_PIXELS, MAX_SHOT_PIXELS))
    lines = list(_lines(result))
    height = max(shot.height, LINE_PIXELS * len(lines)) + 2 * MARGIN_PIXELS
    picture = Image.new("RGB", (shot.width + PANEL_PIXELS + 3 * MARGIN_PIXELS, height), "white")
    picture.paste(shot, (MARGIN_PIXELS, MARGIN_PIXELS))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(TEXT_PIXELS)
    for number, line in enumerate(lines):
        _draw(draw, font, line, shot.width + 2 * MARGIN_PIXELS, MARGIN_PIXELS + number * LINE_PIXELS)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _opened(screenshot: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(screenshot), formats=("PNG", "JPEG"))
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error


def _html_tables(result: Result) -> Iterator[str]:
    if result.error is not None:
        yield f"<pre>{escape(error_text(result.error))}</pre>"
    for name, answer in result.answers.items():
        yield f"<table><caption>{escape(printable(name))} (confidence {answer.confidence:.3f})</caption>"
        for key, probability in answer.probabilities.items():
            kind, mark = (' class="chosen"', "chosen") if key == answer.choice else ("", "")
            meter = f'<meter min="0" max="1" value="{probability:.4f}"></meter>'
            share = f"<td>{probability:.2%}</td><td>{meter}</td><td>{mark}</td>"
            yield f'<tr{kind}><th scope="row">{escape(printable(key))}</th>{share}</tr>'
        yield "</table>"


def _lines(result: Result) -> Iterator[Line]:
    total = result.timings.total_ms
    yield Line(f"job {result.job_id}: {result.status}" + ("" if total is None else f" in {total:.1f} ms"))
    yield Line(cell(result.model or ""))
    if result.error is not None:
        yield from (Line(cell(line)) for line in error_text(result.error).splitlines())
    for name, answer in result.answers.items():
        yield Line("")
        yield Line(f"{cell(name)} (confidence {answer.confidence:.3f})")
        for key, probability in answer.probabilities.items():
            yield Line(f"{probability:.1%}  {cell(key)}", min(1.0, max(0.0, probability)), key == answer.choice)


def _draw(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, line: Line, left: int, top: int
) -> None:
    if line.share is not None:
        bottom = top + LINE_PIXELS - 3
        draw.rectangle((left, bottom, left + PANEL_PIXELS, bottom + 2), fill=FAINT)
        filled = round(line.share * PANEL_PIXELS)
        draw.rectangle((left, bottom, left + filled, bottom + 2), fill=CHOSEN if line.is_chosen else BAR)
    text = line.text.encode("latin-1", "backslashreplace").decode("latin-1")
    draw.text((left, top), f"> {text}" if line.is_chosen else text, CHOSEN if line.is_chosen else INK, font)
