"""The short examples run as they stand, on a queue named by the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from examples import ask, ask_async
from tests.servers import Place


@pytest.fixture
def shots(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    paths = [tmp_path / "small.png", tmp_path / "large.png"]
    Image.new("RGB", (640, 400)).save(paths[0])
    Image.new("RGB", (2880, 1800)).save(paths[1])
    return [str(path) for path in paths]


def test_ask(place: Place, shots: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with place.working():
        ask.main(*shots)
    small, large = capsys.readouterr().out.splitlines()
    assert small.startswith(f"{shots[0]}, shrunk to 100%: ") and large.startswith(f"{shots[1]}, shrunk to 45%: ")
    assert {line.rpartition(": ")[2] for line in (small, large)} <= {"save", "discard", "wait"}


async def test_ask_async(place: Place, shots: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with place.working():
        await ask_async.main(*shots)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert "image_too_large" in lines[0] or "fit_screenshot" in lines[0]
    assert lines[1].rpartition(": ")[2] in {"save", "discard", "wait"}
