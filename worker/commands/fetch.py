"""`python -m worker fetch`: download what a pin names. Nothing else in the project downloads anything."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worker.commands.checkpoint_errors import explained

_EPILOG = """\
example:
  python -m worker fetch /srv/cua
  python -m worker export /srv/cua/base /srv/cua/adapter /srv/cua/export

The same as two commands of the hub's own client, `hf download REPOSITORY --revision REVISION --local-dir ...`.
What came is verified by `export`, `verify` and every start of a worker, not here.

needs: the extra `fetch` (pip install 'cua-screenshot-worker[fetch]'), the network and room on the disk
exit codes: 0 downloaded, 2 the hub could not be reached or the extra is not installed, 3 the pin file is not in order
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "fetch",
        help="download a checkpoint's files at their pinned revisions",
        description="Download the pinned base to DIR/base and the pinned adapter to DIR/adapter.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="DIR", type=Path, help="the checkpoint's folder")
    parser.set_defaults(func=run)


@explained(checkpoint_error_code=3)
def run(arguments: argparse.Namespace) -> int:
    """Download the files that the pin lists; the exit code."""
    from huggingface_hub import snapshot_download

    from engine.checkpoint.paths import find_pin

    root: Path = arguments.checkpoint
    pin = find_pin(root, None)
    for role, pinned in (("base", pin.base), ("adapter", pin.adapter)):
        print(f"downloading {pinned.repository}@{pinned.revision} to {root / role}", file=sys.stderr)
        needed = [path for path, file in pinned.files.items() if not file.optional]
        snapshot_download(
            pinned.repository, revision=pinned.revision, allow_patterns=needed, local_dir=str(root / role)
        )
    print(f"next: python -m worker export {root}/base {root}/adapter {root}/export")
    return 0
