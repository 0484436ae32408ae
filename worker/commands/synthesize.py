"""`python -m worker synthesize`: write a synthetic checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worker.commands.checkpoint_errors import explained

_EPILOG = """\
example:
  python -m worker synthesize /srv/tiny --size tiny
  python -m worker export /srv/tiny/base /srv/tiny/adapter /srv/tiny/export

The weights are random: such a checkpoint runs every step of the real one, and its choices mean nothing.

needs: the extra `synthetic` (pip install 'cua-screenshot-worker[worker,synthetic]'); no GPU, no network
exit codes: 0 written, 2 OUT is there already or the name is not allowed
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "synthesize",
        help="write a checkpoint of random weights in the published layout",
        description="Write OUT/base, OUT/adapter and OUT/pin.json: random weights in the published layout.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    parser.add_argument(
        "--size", choices=("tiny", "full"), default="tiny", help="tiny: 48 MB; full: the published sizes, 9.4 GB"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default 0)")
    parser.add_argument("--name", help="what its answers call it (default synthetic-SIZE-SEED)")
    parser.add_argument("--force", action="store_true", help="replace OUT, if it is a synthetic checkpoint")
    parser.set_defaults(func=run)


@explained(checkpoint_error_code=2)
def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint; the exit code."""
    from engine.checkpoint import ProgressReport
    from engine.checkpoint.synthesize import remove_synthetic, synthesize

    out: Path = arguments.out
    if arguments.force:
        remove_synthetic(out)
    pin = synthesize(out, arguments.size, arguments.seed, arguments.name, ProgressReport(sys.stderr))
    print(f"{out}: base, adapter and pin.json of {pin.identity} (random weights: its choices mean nothing)")
    print(f"next: python -m worker export {out}/base {out}/adapter {out}/export")
    return 0
