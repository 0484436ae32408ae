"""How often the page's checkpoint is right, through the engine's own path: `python -m examples.page.evaluate`.

`Engine.decide` on the CPU in BF16, two questions a page. Half of the pages have the switch off, a quarter are to be
saved, a quarter are done: therefore right answers are also averaged over the right keys, where every way to answer
without looking comes to `CHANCE`. The control has the same pictures with their pixels shuffled.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from engine import Engine
from engine.prompt import Question
from examples.page.model import exported
from examples.page.page import HEIGHT_PIXELS, WIDTH_PIXELS, questions
from examples.page.train import QUESTIONS, Pages, load_pages

# Set before the first run: the least share of right answers, and how near the control must be to chance.
LEAST_RIGHT, CHANCE_MARGIN = 0.95, 0.10
CHANCE = {"state": 1 / 2, "next": 1 / 3}
TRAINING_LOG = Path(__file__).with_name("training.jsonl")
RESULTS = """\
# How often the page's checkpoint is right

Written by `python -m examples.page.evaluate`; the limits stand in its source and were set before it first ran.

Checkpoint `{identity}`, `Engine.decide`, CPU, BF16, Python {python}, torch {torch}.
"By key" is the mean over the right keys of the share right: whichever way one guesses, it is 50 % for `state` and 33 %
for `next`. Wanted: {least:.0f} % right; with shuffled pixels, by key, at most {margin:.0f} points from chance.

| pages | question | decisions | right | % | by key, % |
|---|---|---|---|---|---|
{rows}

## The training run

```
python -m examples.page.render .train/sheets --pages 9600
python -m examples.page.train --sheets .train/sheets --out .train/run --seconds 185 --device cuda:0
python -m examples.page.model .train/run examples/page/checkpoint
```

Seed 0 for the pages and for the training; one NVIDIA H200, torch 2.11, TF32 products. {parameters:,} parameters,
{steps} steps of 128 pages with two questions each, {s:.0f} s. From the whole log, [training.jsonl](training.jsonl):
right answers while training, where some questions say the state in words.

| step | s | loss | `state`, % | `next`, % |
|---|---|---|---|---|
{log}
"""


class Score(NamedTuple):
    """A question's answers: how many, how many were right, and the mean over the right keys of the share right."""

    decisions: int
    right: int
    by_key: float

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / self.decisions


def score(engine: Engine, pages: Pages, *, shuffled: bool = False, seed: int = 0) -> dict[str, Score]:
    """Ask about every page; the seed draws wordings and orders, and the one permutation of all pictures' pixels."""
    rng = random.Random(seed)
    order = torch.randperm(HEIGHT_PIXELS * WIDTH_PIXELS, generator=torch.Generator().manual_seed(seed))
    hits: dict[str, dict[str, list[bool]]] = {name: {} for name in QUESTIONS}
    for pixels, look in zip(pages.pixels, pages.looks, strict=True):
        asked = questions(look, rng)
        picture = pixels.flatten(0, 1)[order].view_as(pixels) if shuffled else pixels
        asking = [Question(name, ask.goal, tuple(ask.options.values())) for name, ask in asked.items()]
        decision = engine.decide(png(picture), asking)
        for (name, ask), shares in zip(asked.items(), decision.probabilities, strict=True):
            chosen = list(ask.options)[shares.index(max(shares))]
            hits[name].setdefault(ask.right, []).append(chosen == ask.right)
    return {name: _summed(found) for name, found in hits.items()}


def _summed(by_key: dict[str, list[bool]]) -> Score:
    shares = [sum(hits) / len(hits) for hits in by_key.values()]
    return Score(sum(map(len, by_key.values())), sum(map(sum, by_key.values())), sum(shares) / len(shares))


def png(pixels: torch.Tensor) -> bytes:
    """A PNG file of `uint8 [H, W, 3]`."""
    file = BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG", compress_level=1)
    return file.getvalue()


def report(tables: dict[str, dict[str, Score]], identity: str) -> str:
    """The results in Markdown."""
    rows = [
        f"| {pages} | `{name}` | {got.decisions} | {got.right} | {100 * got.share:.1f} | {100 * got.by_key:.1f} |"
        for pages, scores in tables.items()
        for name, got in scores.items()
    ]
    return RESULTS.format(
        identity=identity,
        python=platform.python_version(),
        torch=torch.__version__,
        least=100 * LEAST_RIGHT,
        margin=100 * CHANCE_MARGIN,
        rows="\n".join(rows),
        **_training(),
    )


def _training() -> dict[str, object]:
    first, *_, last = log = [json.loads(line) for line in TRAINING_LOG.read_text().splitlines()]
    reports = [entry for entry in log if "loss" in entry]
    steps = [
        f"| {entry['step']} | {entry['s']:.0f} | {entry['loss']:.4f} | "
        + " | ".join(f"{100 * entry[name]:.1f}" for name in QUESTIONS)
        + " |"
        for entry in reports[len(reports) // 8 :: len(reports) // 8]
    ]
    return {"parameters": first["parameters"], "steps": last["step"], "s": reports[-1]["s"], "log": "\n".join(steps)}


def main() -> int:
    """Score both sets and the control, write the table; 0 if all is within the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m examples.page.render .train/held --pages 512 --held-out\n"
        "  python -m examples.page.render .train/seen --pages 512 --seed 1\n"
        "  python -m examples.page.evaluate .train/held .train/seen --out examples/page/RESULTS.md",
    )
    parser.add_argument("held", type=Path, help="sheets of pages with --held-out")
    parser.add_argument("seen", type=Path, help="sheets of new pages with looks and wordings as in training")
    parser.add_argument("--out", type=Path, required=True, help="the table, Markdown")
    options = parser.parse_args()
    cpu = torch.device("cpu")
    held, seen = load_pages(options.held, cpu), load_pages(options.seen, cpu)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(exported(Path(folder) / "checkpoint"), device=cpu)
    wanted = {"held out": score(engine, held), "as in training, new": score(engine, seen)}
    control = score(engine, held, shuffled=True)
    text = report(wanted | {"held out, pixels shuffled": control}, engine.identity.name)
    options.out.write_text(text)
    print(text)
    is_right = all(found.share >= LEAST_RIGHT for scores in wanted.values() for found in scores.values())
    is_blind = all(abs(found.by_key - CHANCE[name]) <= CHANCE_MARGIN for name, found in control.items())
    return 0 if is_right and is_blind else 1


if __name__ == "__main__":
    sys.exit(main())
