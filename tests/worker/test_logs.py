"""JSON lines on request: whole, with the fields of each event, and without what is nobody's business."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.servers import IMAGE, QUESTIONS, OwnServer, Place, asking, server_binary
from worker.logs import JsonFormatter, event
from worker.settings import Settings, SettingsError

PROMPT = "a prompt that is nobody's business"


def events_of(output: str) -> dict[str, list[dict[str, object]]]:
    """Each line's object, by its event."""
    found = defaultdict(list)
    for line in output.splitlines():
        told = json.loads(line)
        assert datetime.fromisoformat(told["ts"]).utcoffset() == timedelta() and told["message"]
        assert told["level"] in ("info", "warning", "error")
        found[told["event"]].append(told)
    return found


def test_each_line_is_an_object_with_the_events_fields(tmp_path: Path) -> None:
    server = OwnServer(tmp_path, server_binary(), options=("--requirepass", "very-secret"))
    server.start()
    place = Place(f"redis://:very-secret@127.0.0.1:{server.port}/0", tmp_path)
    try:
        with place.client() as client, place.process(environment={"CUA_LOG_FORMAT": "json"}) as process:
            good = client.decide(IMAGE, QUESTIONS)
            bad = client.decide(IMAGE, asking(f"raise {PROMPT}"))
            refused = client.decide(b"no image", asking(PROMPT))
            process.terminate()
            output, _ = process.communicate(timeout=20)
    finally:
        server.kill()
    assert "very-secret" not in output and PROMPT not in output and "Save the file" not in output
    events = events_of(output)
    assert [told["worker"] for told in events["worker_starting"] + events["worker_leaves"]] == ["w", "w"]
    assert [(told["model"], told["level"]) for told in events["worker_ready"]] == [("noop@0:test", "info")]
    ended = {told["job_id"]: told for told in events["job_ended"]}
    assert list(ended) == [good.job_id, bad.job_id, refused.job_id]
    first = ended[good.job_id]
    assert (first["status"], first["vision_ms"], first["attempts"], first["worker"]) == ("ok", 2.25, 1, "w")
    assert first["total_ms"] == good.timings.total_ms and "code" not in first
    assert ended[bad.job_id]["code"] == "inference_failed" and "vision_ms" not in ended[bad.job_id]
    assert (ended[refused.job_id]["status"], ended[refused.job_id]["code"]) == ("invalid", "unsupported_format")
    [failure] = events["job_failed"]
    assert (failure["job_id"], failure["error"], failure["level"]) == (bad.job_id, "RuntimeError", "error")


def test_what_a_script_ended_is_an_event_too(place: Place) -> None:
    with place.process(environment={"CUA_LOG_FORMAT": "json"}) as process, place.client() as client:
        slow = client.submit(IMAGE, asking("sleep 1"))
        place.wait_running(slow)
        place.wait_running(client.submit(IMAGE, QUESTIONS))  # prepared ahead
        late = client.submit(IMAGE, QUESTIONS, deadline_s=0.01)
        client.result(slow)
        last = client.decide(IMAGE, QUESTIONS)
        process.terminate()
        output, _ = process.communicate(timeout=20)
    ended = {told["job_id"]: told for told in events_of(output)["job_ended"]}
    assert (ended[late]["status"], ended[late]["code"]) == ("expired", "expired") and last.job_id in ended


def test_a_field_cannot_pass_for_what_a_line_always_has() -> None:
    record = logging.LogRecord("worker", logging.INFO, "", 1, "line\n%s", ("two",), None)
    record.__dict__.update(event("job_ended", job_id="a\nb", event="forged", ts=1, code=None, why=""))
    text = JsonFormatter().format(record)
    told = json.loads(text)
    assert "\n" not in text and told.pop("ts").endswith("+00:00")
    assert told == {"level": "info", "event": "job_ended", "message": "line\ntwo", "job_id": "a\nb"}


def test_there_are_two_forms() -> None:
    assert (
        Settings().log_format == "text" and Settings.from_environment({"CUA_LOG_FORMAT": "json"}).log_format == "json"
    )
    with pytest.raises(SettingsError, match="log_format is 'xml'; text or json is allowed"):
        Settings(log_format="xml")
