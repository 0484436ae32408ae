"""The scripts' own arithmetic, run on the server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from producer.scripts import Policy, call, script
from tests.servers import Place

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMES = (
    EPOCH,
    datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime(2000, 2, 29, 0, 0, 0, 1, tzinfo=UTC),
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2026, 2, 28, 12, 30, 15, 500_000, tzinfo=UTC),
    datetime(2028, 2, 29, 23, 59, 59, tzinfo=UTC),
    datetime(2028, 3, 1, tzinfo=UTC),
    datetime(2100, 2, 28, 23, 59, 59, tzinfo=UTC),
    datetime(2100, 3, 1, tzinfo=UTC),
    *(datetime(2027, 1, 31, 1, 2, 3, 4, tzinfo=UTC) + timedelta(days=days) for days in range(0, 365, 31)),
)


@pytest.mark.parametrize("time", TIMES, ids=str)
def test_times_are_iso_8601(any_place: Place, time: datetime) -> None:
    since = (time - EPOCH) // timedelta(microseconds=1)
    command = call(script("return iso(tonumber(ARGV[8]))"), any_place.keys, Policy(), since)
    assert any_place.redis.execute_command(*command) == f"{time:%Y-%m-%dT%H:%M:%S.%fZ}"
