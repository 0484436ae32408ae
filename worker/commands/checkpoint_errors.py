"""How the checkpoint commands end: what can go wrong, as sentences on stderr and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import wraps

Command = Callable[[argparse.Namespace], int]

USAGE = 2


def explained(*, checkpoint_error_code: int) -> Callable[[Command], Command]:
    """Turn what a command raises into its exit code; a `CheckpointError` lists every mismatch on a line of its own."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(arguments: argparse.Namespace) -> int:
            from engine.errors import CheckpointError

            try:
                return command(arguments)
            except CheckpointError as error:
                for mismatch in error.mismatches:
                    print(f"mismatch: {mismatch}", file=sys.stderr)
                return checkpoint_error_code
            except ModuleNotFoundError as error:
                print(f"the package {error.name} is not installed; see --help for the extra", file=sys.stderr)
            except OSError as error:
                print(error, file=sys.stderr)
            return USAGE

        return run

    return decorate
