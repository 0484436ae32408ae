"""`python -m worker verify`: check every byte of a checkpoint, and say who it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worker.commands.checkpoint_errors import explained

_EPILOG = """\
example:
  python -m worker verify /srv/cua

A worker does the same at every start. All mismatches are listed, each with the file, what was found and what was
expected.

needs: the extra `worker` and the checkpoint's files; no GPU, no server
exit codes: 0 everything is as pinned, 3 something is not
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "verify",
        help="check a checkpoint: sizes, SHA-256, tensors, configs, tokenizer",
        description="Check the checkpoint in DIR (base, adapter, export and, for one's own, pin.json).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="DIR", type=Path, help="the checkpoint's folder")
    parser.set_defaults(func=run)


@explained(checkpoint_error_code=3)
def run(arguments: argparse.Namespace) -> int:
    """Verify and print the identity; the exit code."""
    from engine.checkpoint import ProgressReport, open_checkpoint, verify_checkpoint

    verified = verify_checkpoint(open_checkpoint(arguments.checkpoint), ProgressReport(sys.stderr))
    verified.recheck()
    print(f"verified: {verified.identity.name}")
    for what, digest in verified.identity.hashes.items():
        print(f"  {what} {digest}")
    return 0
