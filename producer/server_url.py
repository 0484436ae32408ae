"""A server's URL, checked without ever repeating it: it may hold a password."""

from __future__ import annotations

from redis.connection import parse_url


def checked_url(url: str) -> str:
    """The URL, if redis-py can read it.

    Raises:
        ValueError: it cannot. redis-py's own words may name a piece of the password, so they are dropped.
    """
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError(
            "the server's URL cannot be read: it begins with redis://, rediss:// or unix://, its port is a number, and "
            "in its password '/', '?', '#', '[' and ']' are percent-encoded ('/' as %2F)"
        ) from None
    return url
