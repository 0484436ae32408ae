"""Runs `rq` or the tests' worker under an audit hook that ends the process at anything a forged job may not cause.

`python -m tests.worker.audited rq worker ...` or `python -m tests.worker.audited worker run ...`. Exit code 99, and a
line on standard error, tell what was tried.
"""

from __future__ import annotations

import os
import pickle
import sys
from urllib.parse import urlsplit

FORBIDDEN = (
    "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.spawn", "marshal.loads", "urllib.Request",
)  # fmt: skip
PLANTED_MODULE = "planted_module"
EXIT_FORBIDDEN = 99


def watch(event: str, arguments: tuple[object, ...]) -> None:
    """The audit hook."""
    is_planted = event == "import" and str(arguments[0]).startswith(PLANTED_MODULE)
    is_elsewhere = event == "socket.connect" and arguments[1][1] != server_port  # type: ignore[index]
    if is_planted or is_elsewhere or (event in FORBIDDEN and not is_marshal_of_import(event)):
        os.write(2, f"AUDIT: {event} {arguments!r:.200}\n".encode())
        os._exit(EXIT_FORBIDDEN)


def is_marshal_of_import(event: str) -> bool:
    """Reading a `.pyc` file is how an ordinary import loads code."""
    if event != "marshal.loads":
        return False
    caller = sys._getframe(2)
    return caller.f_code.co_filename.startswith("<frozen importlib")


def refuse_to_unpickle(*arguments: object, **options: object) -> None:
    """Most pickles that do no harm raise no audit event; unpickling anything at all is one too many."""
    os.write(2, b"AUDIT: unpickled\n")
    os._exit(EXIT_FORBIDDEN)


def main() -> int:
    """Install the hook, then run the command."""
    if sys.argv[1] == "rq":
        import rq.serializers
        from rq.cli import main as run

        rq.serializers.DefaultSerializer.loads = refuse_to_unpickle  # type: ignore[assignment]
    else:
        from tests.worker.noop import main as run
    import worker.worker  # noqa: F401

    pickle.loads = pickle.load = pickle.Unpickler = refuse_to_unpickle  # type: ignore[assignment,misc]
    sys.argv = ["worker", *sys.argv[2:]]
    sys.addaudithook(watch)
    return run() or 0


server_port = urlsplit(os.environ.get("CUA_REDIS_URL", "")).port

if __name__ == "__main__":
    sys.exit(main())
