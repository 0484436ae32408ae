"""What an engine does before it may say ready: real decisions, through the code that jobs go through, and checked.

The pictures and questions are made here, so that a warm-up needs nothing but the checkpoint.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image

from engine.checkpoint.report import Report, silent
from engine.errors import WarmUpError
from engine.prompt import LETTERS, Question

# A softmax of float32 over at most 26 letters sums to 1 within a few roundings.
SUM_TOLERANCE = 1e-5

Probabilities = tuple[tuple[float, ...], ...]
Decide = Callable[[bytes, tuple[Question, ...]], Probabilities]


class Case(NamedTuple):
    """One warm-up decision: a picture's size in pixels, how many questions of how many options."""

    width: int
    height: int
    questions: int
    options: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}, {self.questions} questions of {self.options} options"


SMALLEST = Case(1, 1, 1, 2)
# The smallest grid, a common screen, the most pixels that are allowed; both ends of questions and options. The first
# case comes again at the end: its bits must not depend on what ran in between.
CASES = (SMALLEST, Case(1280, 800, 1, 26), Case(1024, 1024, 8, 26), SMALLEST)


def warm_up(decide: Decide, report: Report = silent) -> None:
    """Run every case through `decide` and check what comes out.

    Args:
        decide: an engine's decision, as the probabilities of each question's options.
        report: told how many cases are done, in the place of bytes.

    Raises:
        WarmUpError: a case raised, or its outputs are not finite, do not sum to 1, or differ the second time.
    """
    seen: dict[Case, Probabilities] = {}
    for done, case in enumerate(CASES):
        report("warm up", done, len(CASES))
        probabilities = _run(decide, case)
        if seen.setdefault(case, probabilities) != probabilities:
            raise WarmUpError(f"warm-up case {case}: the second answer differs from the first, {seen[case]}")
    report("warm up", len(CASES), len(CASES))


def _run(decide: Decide, case: Case) -> Probabilities:
    started_s = time.monotonic()
    try:
        probabilities = decide(picture(case.width, case.height), questions(case.questions, case.options))
    except Exception as error:
        after_s = time.monotonic() - started_s
        raise WarmUpError(
            f"warm-up case {case} failed after {after_s:.1f} s: {type(error).__name__}: {error}"
        ) from error
    shape = tuple(len(row) for row in probabilities)
    if shape != (case.options,) * case.questions:
        raise WarmUpError(f"warm-up case {case}: answered with {shape} probabilities")
    for row in probabilities:
        if not all(math.isfinite(p) for p in row) or abs(sum(row) - 1) > SUM_TOLERANCE:
            raise WarmUpError(f"warm-up case {case}: probabilities {row} are not finite or do not sum to 1")
    return probabilities


def picture(width: int, height: int) -> bytes:
    """A PNG of a colour gradient with stripes: every patch differs from its neighbours."""
    across = Image.linear_gradient("L").rotate(90).resize((width, height))
    down = Image.linear_gradient("L").resize((width, height))
    stripes = down.point(lambda level: 255 * (level // 16 % 2))
    out = io.BytesIO()
    Image.merge("RGB", (across, down, stripes)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def questions(count: int, options: int) -> tuple[Question, ...]:
    """`count` different questions of `options` options each."""
    labels = tuple(f"Option {letter}" for letter in LETTERS[:options])
    return tuple(Question(f"q{n}", f"Warm-up question {n}", labels) for n in range(count))
