"""The agent loop and the demo: a real browser, a real queue, a worker on the committed checkpoint."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from examples import demo
from examples.agent_loop import DONE, centre, run, untouched
from examples.page.page import HEIGHT_PIXELS, WIDTH_PIXELS, live
from examples.page.render import browser_page, chromium
from examples.recording import Recording
from producer.contract import Question
from producer.testing import FakeClient

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
PNG = (ROOT / demo.SCREENSHOT).read_bytes()
MOST_GIF_BYTES = 1_000_000


@pytest.fixture(scope="module")
def browser() -> None:
    """Chromium from the system; its tests are skipped where there is none, but not in CI."""
    if chromium() is None:
        assert not os.environ.get("CI"), "Chromium is not installed, and CI must run with it: apt-get install chromium"
        pytest.skip("Chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def page(browser: None) -> Iterator[Page]:
    with browser_page(WIDTH_PIXELS, HEIGHT_PIXELS) as page:
        yield page


def test_the_answers_become_clicks_and_the_page_tells_its_own_state(page: Page, tmp_path: Path) -> None:
    wanted = iter(("other", "save", "switch", "save", "stop"))
    states = []

    def answers(image: bytes, questions: Mapping[str, Question]) -> dict[str, str]:
        assert image == page.screenshot(), "what is asked about is what is on the page"
        states.append(tuple(page.evaluate("Object.values(document.body.dataset)")))
        return {"state": "off", "next": next(wanted)}

    rng, recording = random.Random(5), Recording()
    state = run(FakeClient(answers), page, untouched(rng), rng, recording)  # type: ignore[arg-type]
    assert state == DONE
    off, on = ("false", "true")
    assert states == [(off, off), (off, off), (off, on), (on, off), (on, on)], "enabled, saved before each answer"
    recording.save(tmp_path / "loop.gif")
    assert Image.open(tmp_path / "loop.gif").n_frames == 6  # type: ignore[attr-defined]


def test_an_agent_that_is_wrong_for_ever_stops_and_the_page_says_so(page: Page) -> None:
    rng = random.Random(6)
    client = FakeClient({"next": "other"})
    assert run(client, page, untouched(rng), rng, Recording()) == {"enabled": "false", "saved": "false"}  # type: ignore[arg-type]
    assert len(client.submitted) == 6


def test_only_real_clicks_count(page: Page) -> None:
    page.set_content(live(untouched(random.Random(7))))
    page.evaluate("document.querySelector('#switch').click()")
    assert page.evaluate("document.body.dataset.enabled") == "false"
    page.mouse.click(*centre(page, "switch"))
    assert page.evaluate("document.body.dataset.enabled") == "true"


@pytest.mark.usefixtures("browser")
def test_the_demo_is_right_and_its_agent_ends_with_the_page_switched_on_and_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "the page says: enabled=true, saved=true" in lines
    steps = [line for line in lines if line[:2] in ("1.", "2.", "3.") and "sure)" in line]
    assert [step.partition(";")[0] for step in steps] == [
        "1. the switch is off", "2. the switch is on", "3. the switch is on"
    ]  # fmt: skip
    assert any(line.startswith("Both are right") for line in lines)
    assert any("multi_picture" in line for line in lines) and "(integer) 0" in lines
    recording = tmp_path / "agent-loop.gif"
    assert recording.stat().st_size < MOST_GIF_BYTES
    assert Image.open(recording).n_frames >= 3  # type: ignore[attr-defined]


def test_a_demo_that_is_wrong_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"state": "on", "next": "switch"}
    client = FakeClient(wrong)
    questions = {name: {"instructions": None, "criteria": {key: None}} for name, key in wrong.items()}
    monkeypatch.setattr(demo, "Client", lambda url: client)
    with pytest.raises(SystemExit, match=r"the answers are .*'on'.*, right is .*'off'"):
        demo.check_right("redis://unused", client.submit(PNG, questions))


def test_a_demo_without_chromium_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    demo.run_agent("redis://unused", tmp_path / "loop.gif")
    assert "apt-get install chromium" in capsys.readouterr().out


def test_a_worker_that_has_ended_ends_the_demo_with_a_sentence() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], text=True)
    ended.wait()
    with pytest.raises(SystemExit, match=r"the worker has ended with exit code 3"):
        demo.wait_until_ready(ended, "redis://127.0.0.1:1")
