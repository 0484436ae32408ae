"""`python -m worker export`: merge the language LoRA into the base, once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worker.commands.checkpoint_errors import explained

_EPILOG = """\
example (the published checkpoint, downloaded to /srv/cua):
  python -m worker export /srv/cua/base /srv/cua/adapter /srv/cua/export

Both sources are verified first, by size and SHA-256 of every file. OUT appears when it is whole: a killed export leaves
only a hidden folder beside it, which the next export clears.

needs: the extra `worker`, both sources, and room on the disk for the merged weights
exit codes: 0 exported, 2 OUT is there already, 3 a source is not what the pin says
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "export",
        help="merge the language LoRA into BF16 weights, once",
        description="Verify BASE and ADAPTER, merge the language model's LoRA into BF16, write OUT with a manifest.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", type=Path, help="the base's download")
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="the adapter's download (holds multimodal/)")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    parser.add_argument(
        "--pin",
        type=Path,
        help="the pin file (default: pin.json beside BASE when there is one, else the published checkpoint's)",
    )
    parser.set_defaults(func=run)


@explained(checkpoint_error_code=3)
def run(arguments: argparse.Namespace) -> int:
    """Verify, merge and write; the exit code."""
    from engine.checkpoint import ProgressReport
    from engine.checkpoint.export import export_checkpoint
    from engine.checkpoint.paths import find_pin

    base: Path = arguments.base
    pin = find_pin(base.parent, arguments.pin)
    print(f"exporting {pin.identity}", file=sys.stderr)
    manifest = export_checkpoint(base, arguments.adapter, arguments.out, pin, ProgressReport(sys.stderr))
    size_bytes = sum(file.size_bytes for file in manifest.files.values())
    print(f"{arguments.out}: {len(manifest.files)} files, {size_bytes:,} bytes, manifest {manifest.sha256}")
    return 0
