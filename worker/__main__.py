"""`python -m worker`: lists the commands; each lives in its module under `commands/`."""

from __future__ import annotations

import argparse
import sys

from worker.commands import dashboard, export, fetch, queue, run, status, synthesize, verify

COMMANDS = (run, status, queue, dashboard, fetch, verify, export, synthesize)


def build_parser() -> argparse.ArgumentParser:
    """The command line. Building it loads neither torch nor a checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m worker", description="Answers screenshot jobs from a Redis queue.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    code: int = arguments.func(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
