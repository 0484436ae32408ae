"""Results and refusals as text for a terminal. Whatever came from outside is escaped, so that it cannot steer one."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence

from producer.errors import ErrorBody
from producer.result import Result

MAX_CELL_CHARACTERS = 48
_STAGES = ("queue_ms", "prepare_ms", "vision_ms", "language_ms")


def result_text(result: Result) -> str:
    """A job's end: a line on the job, then its answers as a table or its faults, one a line."""
    head = f"job {result.job_id}: {result.status}{_timing_text(result)}"
    if result.error is not None:
        return f"{head}\n{error_text(result.error)}"
    lines = [head, f"model {_cell(result.model or '(unnamed)')}", "", *_table(_answer_rows(result))]
    return "\n".join(lines)


def error_text(error: ErrorBody) -> str:
    """A refusal: its code, then every fault with its place."""
    if not error.errors:
        return f"{error.code}: {_printable(error.detail)}"
    return "\n".join(
        [f"{error.code}:", *(f"  {_printable(fault.loc)}: {_printable(fault.msg)}" for fault in error.errors)]
    )


def _timing_text(result: Result) -> str:
    times = result.timings.model_dump()
    stages = [f"{name.removesuffix('_ms')} {times[name]:.1f}" for name in _STAGES if times[name] is not None]
    total = f" in {times['total_ms']:.1f} ms" if times["total_ms"] is not None else ""
    tokens = [f"{result.usage.input_tokens:,} tokens"] if result.usage else []
    more = [f"{', '.join(stages)} ms"] if stages else []
    return f"{total} ({'; '.join(more + tokens)})" if more + tokens else total


def _answer_rows(result: Result) -> Iterator[Sequence[str]]:
    yield "question", "option", "probability", ""
    for name, answer in result.answers.items():
        shown_name = _cell(name)
        for key, probability in answer.probabilities.items():
            chosen = f"<- chosen, confidence {answer.confidence:.3f}" if key == answer.choice else ""
            yield shown_name, _cell(key), f"{probability:.4f}", chosen
            shown_name = ""


def _table(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    cells = list(rows)
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(padded).rstrip()


def _width(text: str) -> int:
    """Terminal columns: East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _cell(text: str) -> str:
    printable = _printable(text)
    too_long = len(printable) > MAX_CELL_CHARACTERS
    return printable[: MAX_CELL_CHARACTERS - 3] + "..." if too_long else printable


def _printable(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]
