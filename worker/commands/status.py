"""`python -m worker status`: which workers there are and what waits; its exit code is a health check."""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import redis
import redis.exceptions as redis_errors

from producer.keys import Keys
from producer.server_url import connect
from producer.table import table as aligned
from worker.commands.options import add_place_options, settings_of
from worker.queue_facts import SERVING_STATES
from worker.settings import SettingsError

EXIT_NONE_READY = 1
EXIT_USAGE = 2
HEADER = ("worker", "state", "device", "jobs", "model", "last beat")
_POLL_S = 0.2
EPILOG = """examples:
  python -m worker status                                  a table of the workers
  python -m worker status --wait ready --timeout-s 120     wait until one of them takes jobs

needs: the Redis server; no checkpoint, no GPU
exit codes: 0 a worker is ready or busy, 1 none is, or the server cannot be reached, 2 wrong settings
"""


class Status(NamedTuple):
    """A queue as it is: each worker's fields by name, and how many jobs wait and run."""

    workers: dict[str, dict[str, str]]
    waiting: int
    running: int

    @property
    def is_serving(self) -> bool:
        """Whether any worker takes jobs."""
        return any(worker.get("state") in SERVING_STATES for worker in self.workers.values())


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "status",
        help="show the queue's workers; the exit code says whether one is ready",
        description="Show the queue's workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_place_options(parser)
    parser.add_argument("--wait", choices=["ready"], help="wait until a worker is ready or busy")
    parser.add_argument("--timeout-s", type=float, default=120.0, metavar="S", help="how long to wait (default 120)")
    parser.set_defaults(func=show)


def show(arguments: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    give_up_at_s = time.monotonic() + (arguments.timeout_s if arguments.wait else 0.0)
    try:
        settings = settings_of(arguments)
        client = connect(settings.redis_url, decode_responses=True, socket_timeout=5.0)
    except (SettingsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    while True:
        status, problem = read_status(client, settings.keys)
        if (status and status.is_serving) or time.monotonic() >= give_up_at_s:
            break
        time.sleep(_POLL_S)
    if status is None:
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_NONE_READY
    print(table(status))
    return 0 if status.is_serving else EXIT_NONE_READY


def table(status: Status) -> str:
    """The status for a person."""
    rows = [HEADER, *(row(name, worker) for name, worker in sorted(status.workers.items()))]
    return "\n".join([*aligned(rows), f"{status.waiting} waiting, {status.running} running"])


def row(name: str, worker: dict[str, str]) -> tuple[str, ...]:
    """A worker's line under `HEADER`."""
    state = " ".join(part for part in (worker.get("state", ""), worker.get("progress", "")) if part)
    if worker.get("error"):
        state += f": {worker['error'].splitlines()[0][:60]}"
    shown = (worker.get(field, "") for field in ("gpu", "jobs", "model", "last_beat"))
    return (name, state, *shown)


def read_status(client: redis.Redis, keys: Keys) -> tuple[Status | None, str]:
    """The status, or None and why the server cannot tell it. The client decodes replies."""
    try:
        names = [str(name) for name in client.zrange(keys.workers, 0, -1)]
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(keys.worker(name))
            pipeline.llen(keys.queue)
            pipeline.zcard(keys.leases)
            *workers, waiting, running = pipeline.execute()
    except redis_errors.RedisError as error:
        return None, str(error)
    # A worker that is gone stays on the list a while; its hash has expired.
    living = {name: worker for name, worker in zip(names, workers, strict=True) if worker}
    return Status(living, waiting, running), ""
