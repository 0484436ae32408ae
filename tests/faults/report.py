"""Writes a section of docs/drills.md; each of its sections is the last run of one command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def replace_section(path: Path, name: str, text: str) -> None:
    """Put the text between the section's two marks."""
    begin, end = f"<!-- {name}: written by make {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{path} has no section {name}"
    path.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")
