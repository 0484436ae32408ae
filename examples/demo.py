"""The whole path on this machine, without a GPU: `make demo`, or `python -m examples.demo`.

Every step is a command that a person could type, echoed before it runs. The checkpoint is a tiny one in the published
layout, trained for one small settings page (`examples/page`) and good for nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import redis

from examples.page.render import chromium
from producer import Client

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "python"
CHECKPOINT = "examples/page/checkpoint"
SCREENSHOT = "examples/pages/switch-off.png"
QUESTIONS = "examples/pages/switch-questions.json"
# What is right for that screenshot, and the page that it is the first screenshot of.
RIGHT = {"state": "off", "next": "switch"}
PAGE_SEED = 29
MPO_FILE = "tests/vectors/images/mpo-two-pictures.jpg"


def main() -> int:
    """Run the steps in order; any that does not end as it should ends the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="example:\n  make demo"
    )
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="where checkpoint and queue go (default .demo)")
    folder: Path = parser.parse_args().dir
    os.chdir(ROOT)

    say("1. A tiny checkpoint in the published layout, trained for one settings page only.")
    checkpoint = folder / "page"
    if (checkpoint / "export").exists():
        print(f"{checkpoint} is there from the last time; the worker verifies it again")
    else:
        print(f"$ cp -r {CHECKPOINT}/. {checkpoint}", flush=True)
        shutil.copytree(CHECKPOINT, checkpoint, ignore=shutil.ignore_patterns("export"), dirs_exist_ok=True)
        run("-m", "worker", "export", f"{checkpoint}/base", f"{checkpoint}/adapter", f"{checkpoint}/export")

    say("2. A worker with its bundled server: it verifies every byte and warms up before it says ready.")
    with worker(checkpoint, folder / "server") as url:
        os.environ["CUA_REDIS_URL"] = url
        run("-m", "worker", "status")

        say(f"3. A page whose switch is off ({SCREENSHOT}), two questions, asked from a second process.")
        job_id = f"demo-{uuid.uuid4().hex[:8]}"
        run("-m", "producer", "decide", SCREENSHOT, "--questions", QUESTIONS, "--id", job_id)
        check_right(url, job_id)

        say("4. The result as anybody can read it in Redis; the screenshot is gone from there.")
        show_hash(url, f"cua:result:{job_id}")

        say("5. A file with two pictures in it is refused with a sentence, and the worker goes on.")
        run("-m", "producer", "decide", MPO_FILE, "--goal", "Save", "--option", "save=Save", expect=1)

        say("6. An agent in a real browser: screenshot, answer, click, until the page itself says that all is done.")
        run_agent(url, folder / "agent-loop.gif")

    say("Done. The same by hand, in two terminals:")
    print(f"  {PYTHON} -m worker run --embedded {folder}/server --checkpoint {checkpoint}")
    print(f"  {PYTHON} -m producer decide --url URL {SCREENSHOT} --questions {QUESTIONS}")
    return 0


def check_right(url: str, job_id: str) -> None:
    """Say that the answers are right; end the demo if one is not."""
    with Client(url) as client:
        found = {name: answer.choice for name, answer in client.result(job_id).answers.items()}
    if found != RIGHT:
        sys.exit(f"the demo stops: the answers are {found}, right is {RIGHT}")
    print("Both are right: the switch is off, and the way to turn it on and save begins with a click on it.")


def run_agent(url: str, recording: Path) -> None:
    """Run the agent loop where Chromium is installed; otherwise say how to."""
    command = ("-m", "examples.agent_loop", "--url", url, "--seed", str(PAGE_SEED), "--record", str(recording))
    if chromium() is None:
        print("Chromium is not installed: apt-get install chromium, then run the demo again")
    else:
        run(*command)


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
        wait_until_ready(process, announced.group())
        yield announced.group()
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(process: subprocess.Popen[str], url: str) -> None:
    """Wait until the worker takes jobs; end the demo if it has ended instead."""
    wait = [sys.executable, "-m", "worker", "status", "--wait", "ready", "--redis-url", url]
    with subprocess.Popen(wait, stdout=subprocess.DEVNULL) as waiting:
        while waiting.poll() is None and process.poll() is None:
            time.sleep(0.05)
        waiting.terminate()
    if process.poll() is not None:
        sys.exit(f"the demo stops: the worker has ended with exit code {process.returncode}; its last lines say why")
    if waiting.returncode != 0:
        sys.exit("the demo stops: the worker does not become ready; its last lines say why")


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
