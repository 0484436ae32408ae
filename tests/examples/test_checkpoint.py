"""The page's checkpoint, as committed: right on pages that training has not seen, and only because it sees them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine import Engine
from examples.page.evaluate import CHANCE, CHANCE_MARGIN, LEAST_RIGHT, score
from examples.page.model import COMMITTED, exported
from examples.page.page import HELD_OUT, TRAINING, sample
from examples.page.train import Pages, load_pages

CPU = torch.device("cpu")
SHEETS = Path(__file__).parent / "held-out"
MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(exported(tmp_path_factory.mktemp("page") / "checkpoint"), device=CPU)


@pytest.fixture(scope="module")
def pages() -> Pages:
    return load_pages(SHEETS, CPU)


def test_it_is_right_on_pages_never_seen(engine: Engine, pages: Pages) -> None:
    scores = score(engine, pages)
    assert {name: found.decisions for name, found in scores.items()} == {"state": 64, "next": 64}
    assert all(found.share >= LEAST_RIGHT for found in scores.values()), scores


def test_with_shuffled_pixels_it_is_as_good_as_chance(engine: Engine, pages: Pages) -> None:
    part = Pages(pages.pixels[:32], pages.looks[:32], pages.states[:32])
    scores = score(engine, part, shuffled=True)
    assert all(abs(found.by_key - CHANCE[name]) <= CHANCE_MARGIN for name, found in scores.items()), scores


def test_what_is_kept_for_the_test_is_not_in_training(pages: Pages) -> None:
    for ours, theirs in zip(TRAINING, HELD_OUT, strict=True):
        assert ours is TRAINING.other or not set(ours) & set(theirs)
    rng = random.Random(0)
    seen = [sample(rng) for _ in range(2000)]
    hues = {hue for look in seen for hue in (look.hue, look.accent)}
    words = {word for look in seen for word in (look.feature, look.save, look.saved_text)}
    for look in pages.looks:
        assert not hues & {look.hue, look.accent} and not words & {look.feature, look.save, look.saved_text}


def test_it_is_small() -> None:
    files = [path for part in ("base", "adapter") for path in (COMMITTED / part).rglob("*") if path.is_file()]
    assert 1_000_000 < sum(path.stat().st_size for path in files) < MOST_BYTES
