"""`python -m worker run`: one worker on one device, with the bundled server beside it if asked for."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import redis

from worker.commands.options import add_place_options, settings_of
from worker.embedded import EmbeddedServer
from worker.settings import SettingsError
from worker.worker import EXIT_USAGE, GpuWorker

DEFAULT_EMBEDDED_FOLDER = ".cua-server"
EPILOG = """examples:
  python -m worker run --checkpoint checkpoint/            one worker on the first GPU, or the CPU
  python -m worker run --checkpoint tiny/ --embedded       the same with the bundled server; it prints its URL

Every option is also an environment variable (CUA_REDIS_URL, CUA_QUEUE, CUA_CHECKPOINT, CUA_DEVICE, CUA_PREFIX,
CUA_RESULT_TTL_S, CUA_LEASE_S, CUA_BEAT_S, CUA_MAX_ATTEMPTS, CUA_PATIENCE_S, CUA_RUNTIME_DIR, CUA_IMAGE_CACHE_BYTES,
CUA_EAGER, CUA_STAGE_LIMIT_S, CUA_START_LIMIT_S).

exit codes: 0 left as asked, 1 gave up on the server, or hung (every thread's frames are printed), 2 wrong settings,
3 the checkpoint is not what its pin says, 4 the warm-up failed, 5 the device failed
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "run",
        help="take jobs from the queue and answer them",
        description="Verify, load and warm up a checkpoint, then answer jobs until SIGTERM or Ctrl-C.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_place_options(parser)
    parser.add_argument("--checkpoint", metavar="DIR", help="the checkpoint's folder (default checkpoint)")
    parser.add_argument("--device", metavar="DEVICE", help="cuda:<index> or cpu (default: the first GPU, else the CPU)")
    parser.add_argument("--eager", action="store_true", default=None, help="on a GPU, never capture a CUDA graph")
    parser.add_argument(
        "--image-cache-bytes",
        type=int,
        metavar="N",
        help="GPU memory for the states of past screenshots (default 4 GiB, 0 keeps none)",
    )
    parser.add_argument("--name", help="the worker's name (default: the host's and a random part)")
    parser.add_argument(
        "--stage-limit-s", type=float, metavar="S", help="a stage of a job that lasts longer is a hang (default 60)"
    )
    parser.add_argument(
        "--start-limit-s", type=float, metavar="S", help="a start that lasts longer is a hang (default 1800)"
    )
    parser.add_argument("--burst", action="store_true", help="leave when the queue is empty")
    parser.add_argument(
        "--embedded",
        metavar="DIR",
        nargs="?",
        const=DEFAULT_EMBEDDED_FOLDER,
        help=f"start the bundled server with its data in DIR (default {DEFAULT_EMBEDDED_FOLDER})",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace, worker_class: type[GpuWorker] = GpuWorker) -> int:
    """Run a worker until it leaves; returns its exit code."""
    with contextlib.ExitStack() as stack:
        try:
            settings = settings_of(arguments)
            if arguments.embedded:
                server = stack.enter_context(EmbeddedServer(Path(arguments.embedded)))
                settings = replace(settings, redis_url=server.url)
                print(f"server {server.url} (data in {arguments.embedded})", flush=True)
            connection = redis.Redis.from_url(settings.redis_url)
            worker = worker_class(settings.queue, arguments.name, connection=connection, settings=settings)
        except (SettingsError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        try:
            worker.work(burst=arguments.burst)
        except SystemExit:
            return worker.exit_code
        return 0
