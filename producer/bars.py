"""A decision for a person's eyes: question by question, a bar for each option, the chosen one marked; where the time
went. Also a line for each of several ends. What came from outside is escaped by `table`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from producer.result import Answer, Result
from producer.table import STAGES, cell, error_text, table, timing_text, width_of

MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 8, 40
# Before and behind a bar: mark, blanks, percentage, borders.
_OTHER_COLUMNS = 17
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Style:
    """What the output can show: its width in columns, and whether it is more than plain ASCII."""

    columns: int = 80
    is_plain: bool = True

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Style:
        """Plain unless the stream is a terminal that takes UTF-8, and `NO_COLOR` is unset."""
        is_utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
        is_plain = not stream.isatty() or bool(environment.get("NO_COLOR")) or not is_utf8
        return cls(shutil.get_terminal_size().columns, is_plain)

    def bar(self, share: float, columns: int) -> str:
        """A bar that fills this share, 0 to 1, of so many columns."""
        share = min(1.0, max(0.0, share))
        if self.is_plain:
            return ("#" * round(share * columns)).ljust(columns)
        whole, eighths = divmod(round(share * columns * 8), 8)
        return (_EIGHTHS[8] * whole + _EIGHTHS[eighths] * (eighths > 0)).ljust(columns)

    def strong(self, text: str) -> str:
        """Text that stands out, where that can be shown."""
        return text if self.is_plain else f"\x1b[1m{text}\x1b[0m"


def decision_text(result: Result, style: Style) -> str:
    """A job's end: its answers with bars or its faults, then its stages with bars."""
    lines = [f"job {result.job_id}: {result.status}{timing_text(result)}"]
    lines += [", ".join(_origin(result))]
    if result.error is not None:
        lines += ["", error_text(result.error)]
    for name, answer in result.answers.items():
        lines += ["", *_question(name, answer, style)]
    if stages := list(_stages(result, style)):
        lines += ["", *stages]
    return "\n".join(lines)


def recent_text(results: Iterable[Result]) -> str:
    """One line for each end."""
    rows = [("finished", "job", "status", "answer", "total ms"), *map(_recent_row, results)]
    return "\n".join(table(rows)) if len(rows) > 1 else "no job has ended within the results' lifetime"


def _origin(result: Result) -> Iterator[str]:
    if result.model:
        yield f"model {cell(result.model)}"
    if result.worker:
        yield f"worker {cell(result.worker)}"
    yield f"attempts {result.attempts}"
    if result.finished_at:
        yield f"finished {result.finished_at:%Y-%m-%d %H:%M:%S} UTC"


def _question(name: str, answer: Answer, style: Style) -> Iterator[str]:
    yield style.strong(cell(name)) + f" (confidence {answer.confidence:.3f})"
    names = {key: cell(key) for key in answer.probabilities}
    widest = max(map(width_of, names.values()), default=0)
    columns = max(MIN_BAR_COLUMNS, min(MAX_BAR_COLUMNS, style.columns - widest - _OTHER_COLUMNS))
    for key, probability in answer.probabilities.items():
        is_chosen = key == answer.choice
        label = names[key] + " " * (widest - width_of(names[key]))
        line = f"{'>' if is_chosen else ' '} {label}  {probability:7.2%}  |{style.bar(probability, columns)}|"
        yield "  " + (style.strong(line) if is_chosen else line)


def _stages(result: Result, style: Style) -> Iterator[str]:
    times = result.timings.model_dump()
    spent = {name.removesuffix("_ms"): times[name] for name in STAGES if times[name] is not None}
    longest = max(spent.values(), default=0.0) or 1.0
    for name, time_ms in spent.items():
        yield f"  {name:<9}{time_ms:10.1f} ms  |{style.bar(time_ms / longest, MIN_BAR_COLUMNS * 2)}|"


def _recent_row(result: Result) -> tuple[str, ...]:
    finished = f"{result.finished_at:%H:%M:%S}" if result.finished_at else ""
    total = result.timings.total_ms
    return (finished, result.job_id, result.status, outcome(result), "" if total is None else f"{total:.1f}")


def outcome(result: Result) -> str:
    """A job's end in a few words: the first question's choice, or the code."""
    if result.error is not None:
        return cell(result.error.code)
    choices = [f"{cell(name)}={cell(answer.choice)}" for name, answer in result.answers.items()]
    more = f" and {len(choices) - 1} more" if len(choices) > 1 else ""
    return "".join(choices[:1]) + more
