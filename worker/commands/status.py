"""`python -m worker status`: which workers there are and what waits; its exit code is a health check."""

from __future__ import annotations

import argparse
import sys
import time

from producer.server_url import connect
from producer.table import table as aligned
from worker.commands.options import add_place_options, settings_of
from worker.settings import SettingsError
from worker.worker_list import HEADER, Status, read_status, row

EXIT_NONE_READY = 1
EXIT_USAGE = 2
_POLL_S = 0.2
EPILOG = """examples:
  python -m worker status                                  a table of the workers
  python -m worker status --wait ready --timeout-s 120     wait until one of them takes jobs

needs: the Redis server; no checkpoint, no GPU
exit codes: 0 a worker is ready or busy, 1 none is, or the server cannot be reached, 2 wrong settings
"""


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
    told = ""
    while True:
        status, problem = read_status(client, settings.keys)
        if (status and status.is_serving) or time.monotonic() >= give_up_at_s:
            break
        # One that failed may be started again: wait on, but say what is known.
        if (known := summary(status, problem)) != told:
            print(f"waiting: {known}", file=sys.stderr, flush=True)
            told = known
        time.sleep(_POLL_S)
    if status is None:
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_NONE_READY
    print(table(status))
    return 0 if status.is_serving else EXIT_NONE_READY


def summary(status: Status | None, problem: str) -> str:
    """The states in one line, without what changes all the time."""
    if status is None:
        return problem
    shown = (row(name, worker | {"progress": ""}) for name, worker in sorted(status.workers.items()))
    return "; ".join(f"{name} {state}" for name, state, *_ in shown) or "no worker"


def table(status: Status) -> str:
    """The status for a person."""
    rows = [HEADER, *(row(name, worker) for name, worker in sorted(status.workers.items()))]
    return "\n".join([*aligned(rows), f"{status.waiting} waiting, {status.running} running"])
