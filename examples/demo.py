"""The whole path on this machine, without a GPU: `make demo`, or `python -m examples.demo`.

Every step is a command that a person could type, echoed before it runs. The checkpoint is synthetic (random weights in
the published layout), so the answers are real computations whose choices mean nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import redis

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "python"
SCREENSHOT = "examples/pages/settings-1280x800.png"
QUESTIONS = "examples/pages/settings-questions.json"
MPO_FILE = "tests/vectors/images/mpo-two-pictures.jpg"


def main() -> int:
    """Run the steps in order; any that does not end as it should ends the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="example:\n  make demo"
    )
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="where checkpoint and queue go (default .demo)")
    folder: Path = parser.parse_args().dir
    os.chdir(ROOT)

    say("1. A checkpoint in the published layout. Its weights are RANDOM: the choices below mean nothing.")
    checkpoint = folder / "checkpoint"
    if (checkpoint / "export").exists():
        print(f"{checkpoint} is there from the last time; the worker verifies it again")
    else:
        run("-m", "worker", "synthesize", str(checkpoint), "--size", "tiny", "--force")
        run("-m", "worker", "export", f"{checkpoint}/base", f"{checkpoint}/adapter", f"{checkpoint}/export")

    say("2. A worker with its bundled server: it verifies every byte and warms up before it says ready.")
    with worker(checkpoint, folder / "server") as url:
        os.environ["CUA_REDIS_URL"] = url
        run("-m", "worker", "status")

        say("3. One screenshot, three questions (2, 5 and 26 options), asked from a second process.")
        job_id = f"demo-{uuid.uuid4().hex[:8]}"
        run("-m", "producer", "decide", SCREENSHOT, "--questions", QUESTIONS, "--id", job_id)

        say("4. The result as anybody can read it in Redis; the screenshot is gone from there.")
        show_hash(url, f"cua:result:{job_id}")

        say("5. A file with two pictures in it is refused with a sentence, and the worker goes on.")
        run("-m", "producer", "decide", MPO_FILE, "--goal", "Save", "--option", "save=Save", expect=1)

    say("Done. The same by hand, in two terminals:")
    print(f"  {PYTHON} -m worker run --embedded {folder}/server --checkpoint {checkpoint}")
    print(f"  {PYTHON} -m producer decide --url URL {SCREENSHOT} --goal 'Save the changes' --option save --option wait")
    return 0


def say(step: str) -> None:
    """A step's heading."""
    print(f"\n== {step}", flush=True)


def run(*arguments: str, expect: int = 0) -> None:
    """Echo and run one of the project's commands; end the demo if its exit code is another than expected."""
    print(f"$ {PYTHON} {shlex.join(arguments)}", flush=True)
    exit_code = subprocess.run([sys.executable, *arguments], check=False).returncode
    if exit_code != expect:
        sys.exit(f"the demo stops: exit code {exit_code}, {expect} was expected")


@contextmanager
def worker(checkpoint: Path, data: Path) -> Iterator[str]:
    """A worker with its bundled server, until the block ends; gives the server's URL once the worker is ready."""
    command = ["-m", "worker", "run", "--embedded", str(data), "--checkpoint", str(checkpoint)]
    print(f"$ {PYTHON} {shlex.join(command)} &", flush=True)
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first_line = process.stdout.readline()
        print(first_line, end="", flush=True)
        announced = re.search(r"redis://\S+", first_line)
        if not announced:
            sys.exit("the demo stops: the worker did not start its server")
        threading.Thread(target=pass_on, args=(process.stdout,), daemon=True).start()
        subprocess.run(
            [sys.executable, "-m", "worker", "status", "--wait", "ready", "--redis-url", announced.group()],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield announced.group()
    finally:
        process.terminate()
        process.wait()


def pass_on(lines: Iterable[str]) -> None:
    """Print the worker's lines as they come."""
    for line in lines:
        print(line, end="", flush=True)


def show_hash(url: str, key: str) -> None:
    """A hash as `redis-cli HGETALL` prints it."""
    print(f'$ redis-cli HGETALL "{key}"')
    with redis.Redis.from_url(url, decode_responses=True) as connection:
        flat = list(chain.from_iterable(connection.hgetall(key).items()))
        for number, text in enumerate(flat, start=1):
            print(f'{number:>2}) "{text if len(text) <= 300 else text[:300] + " ..."}"')
        left = connection.exists(key.replace("result", "job"))
    print(f"$ redis-cli EXISTS {key.replace('result', 'job')}\n(integer) {left}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
