"""What a worker does while nobody waits, and the settings that reach its engine."""

from __future__ import annotations

import pytest

from tests.servers import IMAGE, QUESTIONS, Place, wait_until
from tests.worker.noop import NoopEngine, NoopWorker
from worker.answer import Report
from worker.lock import Device
from worker.settings import Settings, SettingsError


class CapturingEngine(NoopEngine):
    """Counts what it was given time for."""

    captured: int = 0

    def capture_pending(self, most: int | None = None) -> int:
        assert most == 1, "one at a time: a job may come"
        type(self).captured += 1
        return 0


class CapturingWorker(NoopWorker):
    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        return CapturingEngine()


def test_an_idle_worker_gives_its_engine_time_and_goes_on(place: Place) -> None:
    CapturingEngine.captured = 0
    with place.working(CapturingWorker), place.client() as client:
        wait_until(lambda: CapturingEngine.captured >= 1, "the idle engine to be given time")
        assert client.decide(IMAGE, QUESTIONS).status == "ok"


def test_the_engines_settings_come_from_the_environment() -> None:
    assert Settings.from_environment({}).eager is False
    given = Settings.from_environment({"CUA_EAGER": "1", "CUA_IMAGE_CACHE_BYTES": "0"})
    assert given.eager is True and given.image_cache_bytes == 0


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("CUA_EAGER", "yes", "0 or 1 is allowed"), ("CUA_IMAGE_CACHE_BYTES", "-1", r"0 \(none\) or more is allowed")],
)
def test_a_value_that_is_not_allowed_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings.from_environment({name: value})
