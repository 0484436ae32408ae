"""`python -m worker`: lists the commands; each lives in its module under `commands/`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from importlib import import_module

COMMANDS = ("run", "status", "verify", "export", "synthesize")


def build_parser() -> argparse.ArgumentParser:
    """The command line. Building it loads neither torch nor a checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m worker", description="Answers screenshot jobs from a Redis queue.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        if importlib.util.find_spec(f"worker.commands.{name}"):
            import_module(f"worker.commands.{name}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    code: int = arguments.func(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
