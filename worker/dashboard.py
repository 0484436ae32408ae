"""A small page that shows one queue, for people: workers, what waits, recent ends, refusals. It only reads, loads
nothing from anywhere, runs no script and needs no mouse. What it shows came from outside and is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis.exceptions as redis_errors

from producer.bars import outcome
from producer.client import Client
from producer.errors import ProducerError
from producer.result import Result, Timings
from producer.server_url import connect_once
from producer.table import printable
from worker.queue_facts import QueueFacts, read_facts
from worker.settings import Settings
from worker.worker_list import HEADER, Status, read_status, row

MOST_ENDS, SHOWN_ENDS = 200, 50
REFRESH_S = 5
TIMEOUT_S = 5.0
STAGES = tuple(Timings.model_fields)
STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 0 auto; padding: 1rem;
  max-width: 80rem; }
a:focus, div:focus { outline: 3px solid #0b57d0; outline-offset: 2px; }
.skip { position: absolute; left: -100rem; } .skip:focus { left: 1rem; background: #fff; }
div { overflow-x: auto; } table { border-collapse: collapse; margin-bottom: 1.5rem; }
caption { text-align: left; font-weight: 600; font-size: 1.25rem; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #d0d7de; white-space: nowrap; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Unreadable(Exception):
    """The server does not say how the queue stands; the sentence says why."""


@dataclass(frozen=True)
class State:
    """A queue at one moment, and how its last jobs ended, newest first."""

    queue: str
    facts: QueueFacts
    status: Status
    ends: Sequence[Result]

    @property
    def codes(self) -> dict[str, int]:
        """How many of the ends have each code, the most frequent first; answered ones have none."""
        return dict(Counter(end.error.code for end in self.ends if end.error is not None).most_common())

    def to_map(self) -> dict[str, object]:
        """All of it, for JSON."""
        return {
            "queue": self.queue,
            "facts": self.facts.to_map(),
            "workers": self.status.workers,
            "codes": self.codes,
            "recent": [end.to_map() for end in self.ends[:SHOWN_ENDS]],
        }


class Reader:
    """Reads the state. Safe to share between threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_once(settings.redis_url, TIMEOUT_S, decode_responses=True, encoding_errors="replace")
        self._client = Client(settings.redis_url, queue=settings.queue, prefix=settings.prefix, reconnect_s=0.0)

    def read(self) -> State:
        """The state now.

        Raises:
            Unreadable: the server cannot be reached, or refuses this user.
        """
        try:
            facts = read_facts(self._redis, self._settings.keys)
            status, problem = read_status(self._redis, self._settings.keys)
            ends = self._client.recent(MOST_ENDS)
        except (redis_errors.RedisError, ProducerError) as error:
            raise Unreadable(str(error)) from error
        if status is None:
            raise Unreadable(problem)
        return State(self._settings.queue, facts, status, ends)


class Dashboard(ThreadingHTTPServer):
    """Serves the page until `shutdown`.

    Args:
        host, port: where to listen; port 0 takes a free one.

    Raises:
        OSError: the address cannot be listened on.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, reader: Reader) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.reader = reader
        self.is_loopback = is_loopback(host)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where it can be opened."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    timeout = 10.0  # for a client that sends nothing
    server_version, sys_version = "dashboard", ""

    def do_GET(self) -> None:
        """Answer with a page, or with why there is none."""
        if self.server.is_loopback and not is_loopback(_host_of(self.headers.get("Host", ""))):
            # Another site's name that was pointed here would let its scripts read the page.
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "open it as localhost or 127.0.0.1\n")
        url = urlsplit(self.path)
        if url.path not in ("/", "/api/state.json", "/healthz"):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "there are /, /api/state.json and /healthz\n")
        try:
            state, problem = self.server.reader.read(), ""
        except Unreadable as error:
            state, problem = None, str(error)
        code = HTTPStatus.OK if state else HTTPStatus.SERVICE_UNAVAILABLE
        if url.path == "/healthz":
            return self._send(code, "text/plain", f"{problem or 'ok'}\n")
        if url.path == "/":
            refreshes = "refresh" in parse_qs(url.query, keep_blank_values=True)
            return self._send(code, "text/html", page(state, problem, refreshes=refreshes))
        told = state.to_map() if state else {"error": problem}
        return self._send(code, "application/json", json.dumps(told, ensure_ascii=False))

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._send(
            HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "this page only reads: use GET\n", {"Allow": "GET, HEAD"}
        )

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _send(self, code: HTTPStatus, media_type: str, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(code)
        of_body = {"Content-Type": f"{media_type}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**of_body, **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: requests are no events."""


def is_loopback(host: str) -> bool:
    """Whether a host, by name or number, is this machine for itself alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def page(state: State | None, problem: str, *, refreshes: bool = False) -> str:
    """The page's HTML; without a state it shows the problem."""
    queue = escape(state.queue) if state else "?"
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if refreshes else ""
    turn = '<a href="/">Stop refreshing</a>' if refreshes else f'<a href="/?refresh">Refresh every {REFRESH_S} s</a>'
    body = "".join(_tables(state)) if state else f'<p role="alert">{_text(problem)}</p>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{refresh}'
        f'<meta name="viewport" content="width=device-width"><title>Queue {queue}</title><style>{STYLE}</style></head>'
        '<body><a class="skip" href="#main">Skip to the tables</a>'
        f"<header><h1>Queue {queue}</h1>"
        f'<nav aria-label="Page">{turn} · <a href="/api/state.json">JSON</a></nav></header>'
        f'<main id="main">{body}</main></body></html>\n'
    )


def _tables(state: State) -> Iterator[str]:
    facts = state.facts
    oldest = "none" if facts.oldest_waiting_s is None else f"{facts.oldest_waiting_s:.1f} s"
    now = (str(facts.waiting_jobs), f"{facts.waiting_bytes:,}", oldest, str(facts.running_jobs))
    yield _table("Now", ("waiting jobs", "waiting bytes", "oldest waits", "running jobs"), [now])
    workers = [row(name, worker) for name, worker in sorted(state.status.workers.items())]
    yield _table("Workers", HEADER, workers)
    codes = [(code, str(count)) for code, count in state.codes.items()]
    yield _table(f"Ends without an answer, of the last {len(state.ends)}", ("code", "jobs"), codes)
    stages = [f"{name.removesuffix('_ms')} ms" for name in STAGES]
    yield _table(
        "Recent ends",
        ("job", "finished (UTC)", "status", "answer or code", *stages),
        map(_end, state.ends[:SHOWN_ENDS]),
    )


def _end(end: Result) -> tuple[str, ...]:
    times = end.timings.model_dump()
    shown = ("" if times[name] is None else f"{times[name]:.1f}" for name in STAGES)
    finished = f"{end.finished_at:%H:%M:%S}" if end.finished_at else ""
    return (end.job_id, finished, end.status, outcome(end), *shown)


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in header)
    lines = [
        f'<tr><th scope="row">{_text(first)}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    ] or [f'<tr><td colspan="{len(header)}">none</td></tr>']
    # It may be wider than the window: a keyboard scrolls what it can reach.
    return (
        f'<div role="region" tabindex="0" aria-label="{_text(caption)}"><table><caption>{_text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _host_of(header: str) -> str:
    """The host in a Host header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
