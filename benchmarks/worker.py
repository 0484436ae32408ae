"""`python -m benchmarks.worker --checkpoint DIR`: the real worker, from submit to result, alone and under load.

A process of `python -m worker run` answers 1280x800 screenshots through the bundled server on the loopback interface:
first one producer alone, then several at once, each with one job at a time. Past screenshots' states are not kept, so
that every job is computed whole. The GPU's time is what the results tell, vision and language.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import load


def main() -> int:
    """Measure, print the table, write it and its numbers; 1 if an answer under load differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worker",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.worker --checkpoint /srv/cua --device cuda:0 --out results/",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="an exported checkpoint's folder")
    parser.add_argument("--device", default="cuda:0", help="default cuda:0")
    load.add_options(parser, "worker.md and worker.json")
    options = parser.parse_args()
    command = [
        *("-m", "worker", "run", "--checkpoint", str(options.checkpoint), "--device", options.device),
        *("--image-cache-bytes", "0"),
    ]
    with load.running(command) as (connect, facts):
        numbers = load.measure(connect, options.jobs, options.producers, options.seconds)
    found = {**load.about(facts), **numbers}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "worker.json").write_text(json.dumps(found, indent=2) + "\n")
    table = load.report(found, "The worker, from submit to result")
    (options.out / "worker.md").write_text(table + "\n")
    print(table)
    return 0 if found["answers_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
