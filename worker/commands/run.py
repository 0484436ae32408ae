"""`python -m worker run`: a worker, or supervised ones, with the bundled server beside them if asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from producer.server_url import connect
from worker.commands.options import add_place_options, settings_of
from worker.embedded import EmbeddedServer
from worker.settings import LOG_FORMATS, Settings, SettingsError
from worker.supervise import Supervisor, devices_of, list_devices
from worker.worker import EXIT_USAGE, GpuWorker, fresh_name

DEFAULT_EMBEDDED_FOLDER = ".cua-server"
EPILOG = """examples:
  python -m worker run --checkpoint checkpoint/            one worker on the first GPU, or the CPU
  python -m worker run --checkpoint tiny/ --embedded       the same with the bundled server; it prints its URL
  python -m worker run --supervise                         the same, started again when it dies or hangs
  python -m worker run --devices all                       one supervised worker on each GPU

Every option is also an environment variable (CUA_REDIS_URL, CUA_QUEUE, CUA_CHECKPOINT, CUA_DEVICE, CUA_PREFIX,
CUA_RESULT_TTL_S, CUA_LEASE_S, CUA_BEAT_S, CUA_MAX_ATTEMPTS, CUA_PATIENCE_S, CUA_RUNTIME_DIR, CUA_IMAGE_CACHE_BYTES,
CUA_EAGER, CUA_STAGE_LIMIT_S, CUA_START_LIMIT_S, CUA_RESTART_PAUSE_S, CUA_MAX_WAITING_BYTES,
CUA_METRICS_PORT, CUA_METRICS_HOST, CUA_LOG_FORMAT).

needs: the extra `worker`, the Redis server (or --embedded), a checkpoint (fetch and export, or synthesize); a GPU for
speed

exit codes: 0 left as asked, 1 gave up on the server, or hung (every thread's frames are printed), 2 wrong settings,
3 the checkpoint is not what its pin says, 4 the warm-up failed, 5 the device failed
A supervisor's exit code is the last one of the worker that it gave up, 128 + n for signal n
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
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help="one supervised worker on each: `all`, or names such as cuda:0,cuda:1",
    )
    parser.add_argument(
        "--supervise", action="store_true", help="keep the worker running: start it again when it dies or hangs"
    )
    parser.add_argument("--leave-at-eof", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", help="the worker's name (default: the host's and a random part)")
    parser.add_argument(
        "--stage-limit-s", type=float, metavar="S", help="a stage of a job that lasts longer is a hang (default 60)"
    )
    parser.add_argument(
        "--start-limit-s", type=float, metavar="S", help="a start that lasts longer is a hang (default 1800)"
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve metrics for Prometheus (default: none; needs `metrics`)"
    )
    parser.add_argument("--metrics-host", metavar="HOST", help="the address to serve them at (default 127.0.0.1)")
    parser.add_argument("--log-format", choices=LOG_FORMATS, help="lines of text (default) or JSON objects")
    parser.add_argument("--burst", action="store_true", help="leave when the queue is empty")
    parser.add_argument(
        "--embedded",
        metavar="DIR",
        nargs="?",
        const=DEFAULT_EMBEDDED_FOLDER,
        help=f"start the bundled server with its data in DIR (default {DEFAULT_EMBEDDED_FOLDER})",
    )
    parser.set_defaults(func=run)


def run(
    arguments: argparse.Namespace,
    worker_class: type[GpuWorker] = GpuWorker,
    program: str = "worker",
    list_all: Callable[[], list[str]] = list_devices,
) -> int:
    """Run a worker, or supervise some, until they leave; returns the exit code.

    Args:
        worker_class: what runs.
        program: the module that runs it as a process of its own.
        list_all: what `--devices all` names.
    """
    with contextlib.ExitStack() as stack:
        try:
            settings = settings_of(arguments)
            devices = _devices(arguments, settings, list_all)
            if arguments.embedded:
                server = stack.enter_context(EmbeddedServer(Path(arguments.embedded)))
                settings = replace(settings, redis_url=server.url)
                print(f"server {server.url} (data in {arguments.embedded})", flush=True)
            connection = connect(settings.redis_url)
            if devices:
                command = [sys.executable, "-m", program, "run", *(["--burst"] if arguments.burst else [])]
                supervisor = Supervisor(command, arguments.name or fresh_name(), settings, devices)
            else:
                worker = worker_class(settings.queue, arguments.name, connection=connection, settings=settings)
        except (SettingsError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        return supervisor.run() if devices else _work(worker, arguments)


def _work(worker: GpuWorker, arguments: argparse.Namespace) -> int:
    if arguments.leave_at_eof:
        threading.Thread(target=_leave_at_eof, daemon=True).start()
    try:
        worker.work(burst=arguments.burst)
    except SystemExit:
        return worker.exit_code
    return 0


def _devices(arguments: argparse.Namespace, settings: Settings, list_all: Callable[[], list[str]]) -> list[str]:
    """The devices to supervise a worker on; none if the worker runs in this process."""
    if arguments.devices is None:
        return [settings.device] if arguments.supervise else []
    if arguments.device is not None:
        raise SettingsError("--device and --devices exclude each other; name every device in --devices")
    return devices_of(arguments.devices, list_all)


def _leave_at_eof() -> None:
    """A worker whose supervisor is gone finishes its job and leaves."""
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
