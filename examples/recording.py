"""An agent's steps as an animated picture: each screenshot with the click on it, and the answers with their bars."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from producer.render import render_png
from producer.result import Result

CAPTION_PIXELS, TEXT_PIXELS, RING_PIXELS, MARGIN_PIXELS = 44, 18, 15, 16
FRAME_MS, LAST_FRAME_MS = 2200, 4000
COLORS = 64
INK, RING = "#1b1f24", "#d1242f"


class Recording:
    """Frames in order; `save` writes them as a GIF."""

    def __init__(self) -> None:
        self._frames: list[Image.Image] = []

    def step(self, screenshot: bytes, result: Result, caption: str, click: tuple[float, float] | None) -> None:
        """A decision about a screenshot, with the point that is clicked, in its pixels, if one is."""
        shot = Image.open(BytesIO(screenshot)).convert("RGB")
        if click is not None:
            x, y = click
            box = (x - RING_PIXELS, y - RING_PIXELS, x + RING_PIXELS, y + RING_PIXELS)
            ImageDraw.Draw(shot).ellipse(box, outline=RING, width=3)
        marked = BytesIO()
        shot.save(marked, "PNG")
        self._add(Image.open(BytesIO(render_png(result, marked.getvalue()))), caption)

    def end(self, screenshot: bytes, caption: str) -> None:
        """The last screenshot, and what the page itself says."""
        canvas = Image.new("RGB", self._frames[0].size, "white")
        canvas.paste(Image.open(BytesIO(screenshot)), (MARGIN_PIXELS, MARGIN_PIXELS))
        self._add(canvas.crop((0, 0, canvas.width, canvas.height - CAPTION_PIXELS)), caption)

    def save(self, path: Path) -> None:
        """Write the GIF; it is shown again and again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        first, *others = (frame.quantize(COLORS, dither=Image.Dither.NONE) for frame in self._frames)
        durations = [FRAME_MS] * len(others) + [LAST_FRAME_MS]
        first.save(path, "GIF", save_all=True, append_images=others, duration=durations, loop=0)

    def _add(self, picture: Image.Image, caption: str) -> None:
        frame = Image.new("RGB", (picture.width, picture.height + CAPTION_PIXELS), "white")
        frame.paste(picture, (0, 0))
        at = (MARGIN_PIXELS, picture.height)
        ImageDraw.Draw(frame).text(at, caption, INK, ImageFont.load_default(TEXT_PIXELS))
        self._frames.append(frame)
