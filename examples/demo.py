"""The whole path on this machine, without a GPU: `make demo`, or `python -m examples.demo`.

Every step is a command that a person could type, echoed before it runs. The checkpoint is synthetic (random weights in
the published layout), so the answers are real computations whose choices mean nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

ROOT = Path(__file__).resolve().parent.parent
PAGES = "examples/pages"
MPO_FILE = "tests/vectors/images/mpo-two-pictures.jpg"
READY_TIMEOUT_S = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="where the checkpoint and the queue's data go")
    folder: Path = parser.parse_args().dir
    os.chdir(ROOT)

    say("1. A checkpoint in the published layout. Its weights are RANDOM: the choices below mean nothing.")
    checkpoint = folder / "checkpoint"
    if not (checkpoint / "export").exists():
        run("-m", "worker", "synthesize", str(checkpoint), "--size", "tiny", "--force")
        run("-m", "worker", "export", f"{checkpoint}/base", f"{checkpoint}/adapter", f"{checkpoint}/export")

    say("2. A worker with its own bundled server: it verifies every byte and warms up before it says ready.")
    with worker(checkpoint, folder / "redis") as url:
        os.environ["CUA_REDIS_URL"] = url

        say("3. One screenshot, three questions (2, 5 and 26 options), from a second process.")
        screenshot, questions = f"{PAGES}/settings-1280x800.png", f"{PAGES}/settings-questions.json"
        run("-m", "producer", "decide", screenshot, "--questions", questions, "--id", "demo-1", "--force-new")

        say("4. The same answer as redis-cli shows it to anybody who looks.")
        show_hash(url, "cua:result:demo-1")

        say("5. A file with two pictures in it is refused with a sentence; the worker goes on.")
        run("-m", "producer", "decide", MPO_FILE, "--goal", "Save", "--option", "save=Save", expect=1)

    say("Done. The same by hand, in two terminals:")
    print(f"  python -m worker run --embedded {folder}/redis --checkpoint {checkpoint}")
    print(f"  python -m producer decide {screenshot} --goal 'Save the changes' --option save=Save --option wait=Wait")
    return 0
