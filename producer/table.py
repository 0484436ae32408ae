"""Results and refusals as text for a terminal. Whatever came from outside is escaped, so that it cannot steer one."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from producer.errors import ErrorBody
from producer.result import Result

MAX_CELL_CHARACTERS = 48
STAGES = ("queue_ms", "prepare_ms", "vision_ms", "language_ms")


def result_text(result: Result) -> str:
    """A job's end: a line on the job, then its answers as a table or its faults, one a line."""
    head = f"job {result.job_id}: {result.status}{timing_text(result)}"
    if result.error is not None:
        return f"{head}\n{error_text(result.error)}"
    lines = [head, f"model {cell(result.model or '(unnamed)')}", "", *table(_answer_rows(result))]
    return "\n".join(lines)


def error_text(error: ErrorBody) -> str:
    """A refusal: its code, then every fault with its place."""
    if not error.errors:
        return f"{error.code}: {printable(error.detail)}"
    return "\n".join(
        [f"{error.code}:", *(f"  {printable(fault.loc)}: {printable(fault.msg)}" for fault in error.errors)]
    )


def timing_text(result: Result) -> str:
    """How long a job took, the stages that it reached and its tokens; to be put behind its status."""
    times = result.timings.model_dump()
    stages = [f"{name.removesuffix('_ms')} {times[name]:.1f}" for name in STAGES if times[name] is not None]
    total = f" in {times['total_ms']:.1f} ms" if times["total_ms"] is not None else ""
    tokens = [f"{result.usage.input_tokens:,} tokens"] if result.usage else []
    more = [f"{', '.join(stages)} ms"] if stages else []
    return f"{total} ({'; '.join(more + tokens)})" if more + tokens else total


def _answer_rows(result: Result) -> Iterator[Sequence[str]]:
    yield "question", "option", "probability", ""
    for name, answer in result.answers.items():
        shown_name = cell(name)
        for key, probability in answer.probabilities.items():
            chosen = f"<- chosen, confidence {answer.confidence:.3f}" if key == answer.choice else ""
            yield shown_name, cell(key), f"{probability:.4f}", chosen
            shown_name = ""


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows as lines, each column as wide as its widest cell."""
    cells = list(rows)
    widths = [max(map(width_of, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [text + " " * (width - width_of(text)) for text, width in zip(row, widths, strict=True)]
        yield "  ".join(padded).rstrip()


def width_of(text: str) -> int:
    """Terminal columns: East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def cell(text: str) -> str:
    """Text fit for a table's cell: printable, and shortened if it is long."""
    shown = printable(text)
    return shown[: MAX_CELL_CHARACTERS - 3] + "..." if len(shown) > MAX_CELL_CHARACTERS else shown


def printable(text: str) -> str:
    """Text without characters that steer a terminal or turn the direction of writing: they are escaped."""
    return text if text.isprintable() else json.dumps(text)[1:-1]
