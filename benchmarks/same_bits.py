"""Does a question's answer always have the same bits? And is the engine whole after an error? Needs a GPU.

`python -m benchmarks.same_bits` at full size, random weights: eager or from a graph, kept image or not, first or again,
another job in between, alone or among other questions in any order, cut into several passes or not. Then a request that
does not fit into memory, and a device that is lost. Exit code 1 on any miss.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
import triton.language as tl

from benchmarks.full_size import DEVICE, Weights, encoder, our_engine
from benchmarks.screens import png, question, screenshot
from engine import DeviceError, Engine, InferenceError, Question

SIZES = ((1280, 800), (1024, 1024), (640, 480), (512, 512), (383, 257), (256, 256), (1, 1))
Answers = tuple[tuple[float, ...], ...]


class Checks:
    """What was compared, and whether all of it held."""

    def __init__(self) -> None:
        self.missed = 0

    def __call__(self, name: str, holds: bool) -> None:
        """Print one line."""
        self.missed += not holds
        print(f"{'same  ' if holds else 'MISSED'}  {name}", flush=True)


def bits(ours: Engine, check: Checks) -> None:
    """Every way to ask, over several sizes of screenshots and questions of several lengths."""
    runner = ours._runner
    assert runner is not None
    images = [png(screenshot(*size, seed=n)) for n, size in enumerate(SIZES)]
    asked = [question(f"q{n}", 2 + 3 * n, seed=n, words=5 + 13 * n) for n in range(8)]

    def ask(image: bytes, questions: Sequence[Question]) -> Answers:
        return ours.decide(image, questions).probabilities

    runner.images.bound_bytes = 0
    first = [ask(image, asked) for image in images]
    for _ in range(2):
        ours.capture_pending()
        again = [ask(image, asked) for image in images]
    check(f"eager and from graphs ({len(runner.graphs)} captured)", again == first and runner.graphs.failures == 0)
    for size, image, answers in zip(SIZES, images, first, strict=True):
        alone = tuple(ask(image, [one])[0] for one in asked)
        check(f"{size}: alone and among seven others", alone == answers)
        check(f"{size}: in another order", ask(image, asked[::-1])[::-1] == answers)
        check(f"{size}: with a few others", ask(image, [asked[6], asked[1]]) == (answers[6], answers[1]))
    ours.capture_pending()
    check("alone, all of it from graphs", [ask(i, asked[:1])[0] for i in images] == [a[0] for a in first])

    runner.images.bound_bytes = 4 << 30
    hits = runner.images.hits
    check("kept for the first time", [ask(image, asked) for image in images] == first)
    check("from kept images", [ask(image, asked) for image in images] == first)
    alone = [ask(image, [one])[0] for image in images for one in asked]
    check("from kept images, alone", alone == [row for answers in first for row in answers])
    check("kept images were used", runner.images.hits - hits == len(images) * (1 + len(asked)))
    runner.images.clear()
    runner.images.bound_bytes = 0

    changed = screenshot(*SIZES[0], seed=0)
    changed.putpixel((640, 400), (255, 0, 255))
    answers = [ask(image, asked[:4]) for image in (images[0], png(changed), images[5], images[0])]
    check("A, B, C, A", answers[0] == answers[3] == first[0][:4])
    check("one changed pixel is seen", answers[1] != answers[0])

    long = [question(f"l{n}", 3, seed=n, words=1200) for n in range(8)]
    together = ask(images[0], long)
    check("in several passes", tuple(ask(images[0], [one])[0] for one in long) == together)
    check("a hundredth time", all(ask(images[5], asked) == first[5] for _ in range(100)))


def errors(ours: Engine, check: Checks) -> None:
    """Out of memory, then a lost device; the process's CUDA context does not survive the latter."""
    image, asked = png(screenshot(800, 416, seed=9)), [question("q", 4, seed=1)]
    before = ours.decide(image, asked).probabilities
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    # Nothing is left that could be dropped to make room, and no hole between what stays.
    ours._runner._free()  # type: ignore[union-attr]
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / total)
    filling = _fill()
    long = [question(f"l{n}", 3, seed=n, words=1200) for n in range(2)]
    try:
        ours.decide(png(screenshot(1024, 1024, seed=9)), long)
        refused = False
    except InferenceError:
        refused = True
    check("out of memory is an inference error", refused)
    del filling
    torch.cuda.set_per_process_memory_fraction(1.0)
    check("and the next request has its bits", ours.decide(image, asked).probabilities == before)

    write_nowhere[(1,)](torch.zeros(1, device=DEVICE))
    try:
        ours.decide(image, asked)
        lost = False
    except DeviceError:
        lost = True
    check("a lost device is a device error", lost)


def _fill() -> list[torch.Tensor]:
    """All memory that the process may still have, a MiB at a time."""
    held = []
    while True:
        try:
            held.append(torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            return held


@triton.jit
def write_nowhere(pointer):  # type: ignore[no-untyped-def]
    """A store far outside of all memory: a sticky error."""
    tl.store(pointer + (1 << 44), 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default the synthetic checkpoints' one")
    options = parser.parse_args(arguments)
    check = Checks()
    ours = our_engine(Weights(), encoder(options.tokenizer))
    bits(ours, check)
    errors(ours, check)
    print("all held" if not check.missed else f"{check.missed} missed", flush=True)
    return 1 if check.missed else 0


if __name__ == "__main__":
    # Without the interpreter's end: freeing what lies on a lost device would abort.
    os._exit(main())
