"""Every command says what it needs and gives an example that its own parser takes."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from producer.cli import build_parser as producer_parser
from worker.__main__ import build_parser as worker_parser


def commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Each program's commands: the program, the command and the command's parser."""
    for program, parser in (("producer", producer_parser()), ("worker", worker_parser())):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, command in action.choices.items():
                    yield program, name, command


@pytest.mark.parametrize(
    ("program", "name", "parser"), [pytest.param(*each, id=" ".join(each[:2])) for each in commands()]
)
def test_a_commands_help_is_enough_to_use_it(program: str, name: str, parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    assert re.search(r"^examples?\b", text, re.MULTILINE), "an example"
    assert re.search(r"^needs: \S", text, re.MULTILINE) and re.search(r"^exit codes", text, re.MULTILINE)
    lines = re.findall(rf"^  python -m {program} {name}\b(.*)$", text, re.MULTILINE)
    assert lines, "the example is of this command"
    for line in lines:
        # What follows a pipe, or two blanks and more, is not the command's.
        arguments = shlex.split(re.split(r"\s{2,}|\|", line)[0])
        assert parser.parse_args(arguments).__dict__


def test_every_command_is_looked_at() -> None:
    found = {(program, name) for program, name, _ in commands()}
    assert {("producer", "watch"), ("producer", "render"), ("worker", "dashboard"), ("worker", "run")} <= found
    assert len(found) >= 15
