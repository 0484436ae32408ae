"""Screenshots and questions that benchmarks use: drawn from a seed, so that every run sees the same."""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw

from engine import Question
from engine.prompt import LETTERS

WORDS = (
    *("Save", "Cancel", "Open", "Delete", "Settings", "Account", "Search", "Next", "Back", "Submit", "Confirm", "Help"),
    *("Profile", "Billing", "Export", "Import", "Share", "Archive", "Reply", "Forward", "Print", "Close", "Retry"),
)


def screenshot(width: int, height: int, seed: int) -> Image.Image:
    """Panels, buttons and lines of text on a plain ground, RGB."""
    chance = random.Random(seed)

    def colour() -> tuple[int, int, int]:
        return (chance.randrange(256), chance.randrange(256), chance.randrange(256))

    image = Image.new("RGB", (width, height), colour())
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        x, y = chance.randrange(width), chance.randrange(height)
        right, bottom = x + chance.randrange(1, width // 4 + 2), y + chance.randrange(1, height // 8 + 2)
        draw.rectangle((x, y, right, bottom), fill=colour(), outline=colour())
        draw.text((x + 2, y + 2), " ".join(chance.choices(WORDS, k=3)), fill=colour())
    return image


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file's bytes."""
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def question(name: str, options: int, seed: int, words: int = 12) -> Question:
    """A question whose goal has so many words, with so many different options."""
    chance = random.Random(seed)
    goal = " ".join(chance.choices(WORDS, k=words)).lower()
    labels = tuple(f"{' '.join(chance.choices(WORDS, k=2))} {letter}" for letter in LETTERS[:options])
    return Question(name, goal, labels)
