"""`python -m worker queue`: what waits and how quickly it is worked off; the numbers that an autoscaler needs."""

from __future__ import annotations

import argparse
import json
import sys

import redis.exceptions as redis_errors

from producer.server_url import connect_once
from worker.commands.options import add_place_options, settings_of
from worker.queue_facts import QueueFacts, read_facts
from worker.settings import SettingsError

EXIT_UNREACHABLE = 1
EXIT_USAGE = 2
TIMEOUT_S = 5.0
EPILOG = """examples:
  python -m worker queue                                   a few lines for a person
  python -m worker queue --json | jq .drain_s              seconds that the workers need for what waits

With --json, one object: waiting_jobs, waiting_bytes, oldest_waiting_s (null if none waits), running_jobs, workers (how
many in each state), serving_workers (ready and busy), job_ms (smoothed time of a job; null if nothing has ended within
the results' lifetime), capacity_jobs_per_s and drain_s (null without a measurement; drain_s also without a worker).

needs: the Redis server; no checkpoint, no GPU
exit codes: 0 printed, 1 the server cannot be reached or refuses this user, 2 wrong settings
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "queue",
        help="show what waits and how quickly it is worked off: the autoscaling signal",
        description="Show how the queue stands, read in one step.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_place_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=show)


def show(arguments: argparse.Namespace) -> int:
    """Print the facts; returns the exit code."""
    try:
        settings = settings_of(arguments)
        client = connect_once(settings.redis_url, TIMEOUT_S)
    except (SettingsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        facts = read_facts(client, settings.keys)
    except redis_errors.RedisError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    print(json.dumps(facts.to_map()) if arguments.json else text(settings.queue, facts))
    return 0


def text(queue: str, facts: QueueFacts) -> str:
    """The facts for a person."""
    states = ", ".join(f"{count} {state}" for state, count in facts.workers.items())
    oldest = "" if facts.oldest_waiting_s is None else f", the oldest for {facts.oldest_waiting_s:.1f} s"
    rows = {
        "queue": queue,
        "waiting": f"{facts.waiting_jobs} jobs, {facts.waiting_bytes:,} bytes{oldest}",
        "running": f"{facts.running_jobs} jobs",
        "workers": states or "none",
        "a job": _measured(facts.job_ms, "ms"),
        "capacity": _measured(facts.capacity_jobs_per_s, "jobs/s"),
        "drained in": _measured(facts.drain_s, "s"),
    }
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def _measured(value: float | None, unit: str) -> str:
    return "not known yet" if value is None else f"{value:,.2f} {unit}"
