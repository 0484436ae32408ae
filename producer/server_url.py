"""A server's URL: one server, or the primary that Sentinels name. No error repeats it: it may hold a password."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
DEFAULT_SENTINEL_PORT = 26379
SENTINEL_TIMEOUT_S = 2.0
_PLACE = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")


class _Watched(NamedTuple):
    """A primary by the Sentinels that know where it is; `options` are for its own connections."""

    sentinels: list[tuple[str, int]]
    service: str
    options: dict[str, Any]


def checked_url(url: str) -> str:
    """The URL, if it can be read.

    Raises:
        ValueError: it cannot. redis-py's own words may name a piece of the password, so they are dropped.
    """
    try:
        _watched(url) if is_sentinel(url) else parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError(
            "the server's URL cannot be read: it begins with redis://, rediss:// or unix://, its port is a number, and "
            "in its password '/', '?', '#', '[' and ']' are percent-encoded ('/' as %2F); Sentinels are named as "
            "redis+sentinel://host:26379,host:26379/SERVICE or rediss+sentinel://..."
        ) from None
    return url


def is_sentinel(url: str) -> bool:
    """Whether the URL names Sentinels instead of a server."""
    return url.partition("://")[0] in SENTINEL_SCHEMES


def connect(url: str, **options: Any) -> redis.Redis:
    """A client of the URL's server, or of whatever the Sentinels call the primary when a connection is made.

    Args:
        url: as redis-py takes it, or `redis+sentinel://[user:password@]host[:port],.../service[/db]`. User and password
            are the servers'; the Sentinels themselves are asked without.
        options: of redis-py's client.

    Raises:
        ValueError: the URL cannot be read.
    """
    if not is_sentinel(checked_url(url)):
        return redis.Redis.from_url(url, **options)
    watched = _watched(url)
    sentinel = Sentinel(watched.sentinels, sentinel_kwargs=_asking(watched, Retry))  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(watched.service, **watched.options, **options)  # type: ignore[no-untyped-call]
    return client


def connect_once(url: str, timeout_s: float, **options: Any) -> redis.Redis:
    """As `connect`, for who would rather be told that the server is away: no command or connection is tried again, none
    lasts longer than the timeout."""
    return connect(
        url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), **options
    )


def connect_async(url: str, **options: Any) -> redis.asyncio.Redis:
    """As `connect`, awaited."""
    if not is_sentinel(checked_url(url)):
        return redis.asyncio.Redis.from_url(url, **options)
    watched = _watched(url)
    sentinel = AsyncSentinel(watched.sentinels, sentinel_kwargs=_asking(watched, AsyncRetry))  # type: ignore[no-untyped-call]
    client: redis.asyncio.Redis = sentinel.master_for(watched.service, **watched.options, **options)
    return client


def _watched(url: str) -> _Watched:
    parts = urlsplit(url)
    credentials, _, places = parts.netloc.rpartition("@")
    found = [_PLACE.fullmatch(place) for place in places.split(",")]
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not service or not all(found) or parts.query or parts.fragment or not (database or "0").isdecimal():
        raise ValueError("not a URL of Sentinels")
    user, _, password = credentials.partition(":")
    options: dict[str, Any] = {"db": int(database or 0)}
    if credentials:
        options |= {"username": unquote(user) or None, "password": unquote(password) or None}
    if parts.scheme == "rediss+sentinel":
        options["ssl"] = True
    sentinels = [(one[1].strip("[]"), int(one[2] or DEFAULT_SENTINEL_PORT)) for one in found if one]
    return _Watched(sentinels, service, options)


def _asking(watched: _Watched, retry: type[Retry] | type[AsyncRetry]) -> dict[str, Any]:
    """How the Sentinels are asked: once each, for one that is away must not hold up the next."""
    return {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "retry": retry(NoBackoff(), 0),
        "ssl": bool(watched.options.get("ssl")),
    }
