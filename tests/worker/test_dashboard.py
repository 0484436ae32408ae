"""The dashboard: what it shows, to whom, and that nothing that it shows can do anything. Partly in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.servers import IMAGE, QUESTIONS, ROOT, Place, asking, free_port
from worker.dashboard import Dashboard, Reader, is_loopback
from worker.settings import Settings

HOSTILE = "<script>document.title='owned'</script><img src=//evil.example/x onerror=alert(1)>"


@contextmanager
def dashboard_of(settings: Settings) -> Iterator[Dashboard]:
    with Dashboard("127.0.0.1", 0, Reader(settings)) as dashboard:
        thread = threading.Thread(target=dashboard.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield dashboard
        finally:
            dashboard.shutdown()
            thread.join()


def ask(
    dashboard: Dashboard, path: str = "/", method: str = "GET", host: str = "127.0.0.1"
) -> tuple[http.client.HTTPResponse, str]:
    port = int(dashboard.server_address[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Host": f"{host}:{port}"})
    reply = connection.getresponse()
    return reply, reply.read().decode()


@pytest.fixture
def busy(place: Place) -> Iterator[tuple[Place, str]]:
    """A queue with a worker, one end of each kind, and a worker that a stranger made up."""
    with place.client() as client, place.working() as worker:
        client.decide(IMAGE, QUESTIONS, job_id=place.id("good"))
        client.decide(IMAGE, asking("raise"))
        client.decide(b"no image", QUESTIONS)
        client.decide(b"no image", asking("x"))
        client.decide(IMAGE, {HOSTILE: QUESTIONS["save"]}, job_id=place.id("bad"))
        place.redis.zadd(place.keys.workers, {HOSTILE: 9e9})
        place.raw.hset(place.keys.worker(HOSTILE), mapping={b"state": b"\xff\x1b[2J" + HOSTILE.encode()})
        yield place, worker.name


def test_the_page_shows_workers_queue_ends_and_codes(busy: tuple[Place, str]) -> None:
    place, worker = busy
    with dashboard_of(place.settings) as dashboard:
        reply, page = ask(dashboard)
        state = json.loads(ask(dashboard, "/api/state.json")[1])
    assert reply.status == 200 and reply.getheader("Content-Type") == "text/html; charset=utf-8"
    for shown in (worker, "noop@0:test", place.id("good"), "save=", "unsupported_format", "inference_failed", "2.2"):
        assert shown in page
    assert state["facts"]["waiting_jobs"] == 0 and state["workers"][worker]["state"] in ("ready", "busy")
    assert state["codes"] == {"unsupported_format": 2, "inference_failed": 1}
    assert [end["status"] for end in state["recent"]] == ["ok", "invalid", "invalid", "failed", "ok"]
    assert state["recent"][-1]["job_id"] == place.id("good") and state["recent"][-1]["vision_ms"] == 2.25
    assert "Save the file" not in page + json.dumps(state), "no prompt is kept, so none is shown"


def test_it_may_load_and_run_nothing(busy: tuple[Place, str]) -> None:
    with dashboard_of(busy[0].settings) as dashboard:
        for path in ("/", "/api/state.json", "/healthz", "/none"):
            reply, text = ask(dashboard, path)
            policy = reply.getheader("Content-Security-Policy") or ""
            assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
            assert reply.getheader("X-Content-Type-Options") == "nosniff"
            if path == "/":
                assert "<script" not in text and "<img" not in text and "&lt;script&gt;" in text
                assert "\x1b" not in text and not re.search(r"<[^>]*(src|href)=.?(https?:)?//", text)


def test_only_this_machines_names_open_it(place: Place) -> None:
    """A page elsewhere could point its own name at 127.0.0.1 and read what its script fetches."""
    with dashboard_of(place.settings) as dashboard:
        for host, status in (("localhost", 200), ("127.0.0.1", 200), ("[::1]", 200), ("evil.example", 403), ("", 403)):
            for path in ("/", "/api/state.json"):
                reply, text = ask(dashboard, path, host=host)
                assert reply.status == status and (place.queue in text) == (status == 200), host
    assert is_loopback("127.3.2.1") and not is_loopback("0.0.0.0") and not is_loopback("localhost.evil.example")


def test_it_only_reads(place: Place) -> None:
    before = sorted(place.redis.scan_iter(f"*{place.queue}*"))
    with dashboard_of(place.settings) as dashboard:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            reply, _ = ask(dashboard, method=method)
            assert reply.status == 405 and reply.getheader("Allow") == "GET, HEAD"
        assert ask(dashboard, "/other")[0].status == 404 and ask(dashboard, "/../etc/passwd")[0].status == 404
        reply, text = ask(dashboard, method="HEAD")
        assert reply.status == 200 and int(reply.getheader("Content-Length") or 0) > 500 and text == ""
        assert ask(dashboard, "/healthz")[1] == "ok\n"
    assert sorted(place.redis.scan_iter(f"*{place.queue}*")) == before == []


def test_without_the_server_it_says_so() -> None:
    settings = Settings(redis_url=f"redis://:secret@127.0.0.1:{free_port()}/0")
    with dashboard_of(settings) as dashboard:
        for path in ("/", "/api/state.json", "/healthz"):
            reply, text = ask(dashboard, path)
            assert reply.status == 503 and "refused" in text and "secret" not in text, path


def test_the_command_serves_until_it_is_asked_to_leave(place: Place) -> None:
    command = [sys.executable, "-m", "worker", "dashboard", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **place.environment}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"dashboard http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--port", "70000"), 2, "--port is 70000"),
        (("--queue", "../x"), 2, "queue name"),
        (("--host", "192.0.2.1", "--port", "0"), 1, "192.0.2.1:0 cannot be listened on"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker", "dashboard", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code and sentence in done.stderr and "Traceback" not in done.stderr


def test_in_a_browser_it_is_read_with_the_keyboard_and_asks_nobody_else(busy: tuple[Place, str]) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "Chromium is not installed: apt-get install chromium"
    place, worker = busy
    with dashboard_of(place.settings) as dashboard, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        asked: list[str] = []
        complaints: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(dashboard.url)
        assert page.title() == f"Queue {place.queue}", "a hostile name has run nothing"
        for name, cell in (("Workers", worker), ("Recent ends", place.id("good"))):
            assert page.get_by_role("region", name=name).get_by_role("rowheader", name=cell).is_visible()
        assert page.evaluate("getComputedStyle(document.querySelector('table')).borderCollapse") == "collapse"
        reached = []
        for _ in range(7):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent"))
        assert reached == [
            "Skip to the tables", "Refresh every 5 s", "JSON", "Now", "Workers",
            "Ends without an answer, of the last 5", "Recent ends",
        ]  # fmt: skip
        page.focus("text=Refresh every 5 s")
        page.keyboard.press("Enter")
        page.wait_for_url("**/?refresh")
        assert page.get_by_text("Stop refreshing").is_visible()
        browser.close()
    outside = [url for url in asked if not url.startswith(dashboard.url)]
    assert asked and not outside and not complaints
