"""`python -m worker dashboard`: a page that shows the queue, on this machine."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading

from worker.commands.options import add_place_options, settings_of
from worker.dashboard import Dashboard, Reader, is_loopback
from worker.settings import MAX_PORT, SettingsError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8137
EXIT_FAILED, EXIT_USAGE = 1, 2
EPILOG = """example:
  python -m worker dashboard --port 8137                   then open http://127.0.0.1:8137/

It only reads. There is no login, so it listens on this machine alone; reach it from another one through an SSH tunnel.
/api/state.json has the same as JSON, /healthz answers 200 while the server can be read and 503 otherwise.

needs: the Redis server; no checkpoint, no GPU
exit codes: 0 ended by SIGTERM or Ctrl-C, 1 the address cannot be listened on, 2 wrong settings
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "dashboard",
        help="show workers, queue and recent results as a web page on this machine",
        description="Serve a page that shows the queue's workers, what waits, recent ends and refusals.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_place_options(parser)
    parser.add_argument("--host", default=DEFAULT_HOST, help="the address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="the port, 0 for a free one (default %(default)s)"
    )
    parser.set_defaults(func=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        if not 0 <= arguments.port <= MAX_PORT:
            raise SettingsError(f"--port is {arguments.port}; 0 to {MAX_PORT} is allowed")
        reader = Reader(settings_of(arguments))
    except (SettingsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        dashboard = Dashboard(arguments.host, arguments.port, reader)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        print(f"error: {where} cannot be listened on: {error.strerror}; choose another --port", file=sys.stderr)
        return EXIT_FAILED
    if not is_loopback(arguments.host):
        print("warning: whoever reaches this address sees the queue; there is no login", file=sys.stderr)
    with dashboard:
        # `shutdown` waits for the loop below, so a signal's handler leaves it to a thread.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=dashboard.shutdown).start())
        print(f"dashboard {dashboard.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            dashboard.serve_forever()
    return 0
