"""`python -m producer`: what it asks of the client, what it prints and its exit codes. No server is needed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from producer.cli import connect_client, main
from producer.contract import build_payload
from producer.errors import (
    DuplicateId,
    ErrorBody,
    Fault,
    MalformedResult,
    ProducerError,
    QueueFull,
    RequestRefused,
    ResultTimeout,
    ServerUnavailable,
    UnknownJob,
)
from producer.result import Result
from producer.settings import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGE = b"\x89PNG of a kind"
ANSWERED = {
    "model": "tiny@1234",
    "answers": {
        "save": {"choice": "ok", "probabilities": {"ok": 0.75, "no": 0.25}, "confidence": 0.1887},
        "保存": {"choice": "\x1b[2J", "probabilities": {"\x1b[2J": 1.0}, "confidence": 1.0},
    },
    "usage": {"input_tokens": 1403, "output_tokens": 0},
}
REFUSED = ErrorBody("decode_failed", "corrupt", (Fault("state.image", "the data is \x1bcorrupt", "decode_failed"),))


def ended(status: str, body: str) -> Result:
    times = {b"queue_ms": b"1.5", b"vision_ms": b"30.04", b"total_ms": b"153.026"}
    return Result.from_hash(
        "job-1", {b"status": status.encode(), b"body": body.encode(), b"model": b"tiny@1234"} | times
    )


@dataclass
class FakeClient:
    """Answers every call with `end`, and remembers the calls; an error is raised instead."""

    end: Result | BaseException = field(default_factory=lambda: ended("ok", json.dumps(ANSWERED)))
    calls: list[dict[str, Any]] = field(default_factory=list)
    settings: Settings | None = None

    def __call__(self, settings: Settings) -> FakeClient:
        self.settings = settings
        return self

    def submit(self, image: bytes, questions: Mapping[str, Mapping[str, object]], **given: Any) -> str:
        self._end(call="submit", image=image, questions=questions, **given)
        return given["job_id"] or "fresh-id"

    def result(self, job_id: str, timeout_s: float) -> Result:
        return self._end(call="result", job_id=job_id, timeout_s=timeout_s)

    def decide(self, image: bytes, questions: Mapping[str, Mapping[str, object]], **given: Any) -> Result:
        return self._end(call="decide", image=image, questions=questions, **given)

    def _end(self, **call: Any) -> Result:
        self.calls.append(call)
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


@pytest.fixture
def shot(tmp_path: Path) -> str:
    path = tmp_path / "shot.png"
    path.write_bytes(IMAGE)
    return str(path)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUA_REDIS_URL", "CUA_QUEUE", "CUA_PREFIX"):
        monkeypatch.delenv(name, raising=False)


def test_decide_asks_one_question_from_its_arguments(shot: str) -> None:
    client = FakeClient()
    options = ["--option", "save=Click 'Save' = done", "--option", "cancel", "--option", "none="]
    assert main(["decide", shot, "--goal", "Save", *options], connect=client) == 0
    criteria = {"save": "Click 'Save' = done", "cancel": None, "none": ""}
    assert client.calls == [
        {
            "call": "decide",
            "image": IMAGE,
            "questions": {"question": {"instructions": "Save", "criteria": criteria}},
            "job_id": None,
            "deadline_s": 60.0,
            "timeout_s": None,
        }
    ]
    assert list(client.calls[0]["questions"]["question"]["criteria"]) == ["save", "cancel", "none"]


def test_decide_passes_on_name_id_and_times(shot: str) -> None:
    client = FakeClient()
    given = ["--question", "next", "--id", "job-1", "--deadline-s", "5", "--timeout-s", "2.5"]
    assert main(["decide", shot, "--option", "a", *given], connect=client) == 0
    [call] = client.calls
    assert call["questions"] == {"next": {"instructions": None, "criteria": {"a": None}}}
    assert (call["job_id"], call["deadline_s"], call["timeout_s"]) == ("job-1", 5.0, 2.5)


@pytest.mark.parametrize("command", ["decide", "submit"])
def test_a_screenshot_over_the_limits_is_fitted_when_asked_for(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big, small = tmp_path / "big.png", tmp_path / "small.png"
    Image.new("RGB", (2880, 1800)).save(big)
    Image.new("RGB", (640, 400)).save(small)
    client = FakeClient()
    for file in (big, small):
        assert main([command, str(file), "--option", "a", "--fit"], connect=client) == 0
    shrunk = Image.open(io.BytesIO(client.calls[0]["image"]))
    assert shrunk.width / shrunk.height == pytest.approx(1.6, abs=0.01) and shrunk.width * shrunk.height <= 1_048_576
    assert client.calls[1]["image"] == small.read_bytes()
    capsys.readouterr()
    assert main([command, str(big), "--option", "a"]) == 2, "refused before any server is asked"
    assert "2,880 x 1,800" in (refused := capsys.readouterr().err) and "--fit" in refused


def test_questions_come_from_a_file(shot: str, tmp_path: Path) -> None:
    questions = {"b": {"instructions": {"a": [1]}, "criteria": {"x": None}}, "a": {"criteria": 5}}
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(questions))
    client = FakeClient()
    assert main(["submit", shot, "--questions", str(file)], connect=client) == 0
    assert client.calls[0]["questions"] == questions
    assert list(client.calls[0]["questions"]) == ["b", "a"]


def test_submit_prints_the_id(shot: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", shot, "--option", "a"], connect=FakeClient()) == 0
    assert capsys.readouterr().out == "fresh-id\n"
    assert main(["submit", shot, "--option", "a", "--id", "mine", "--json"], connect=FakeClient()) == 0
    assert json.loads(capsys.readouterr().out) == {"job_id": "mine"}


def test_result_waits_for_the_id(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["result", "job-1", "--timeout-s", "3"], connect=client) == 0
    assert client.calls == [{"call": "result", "job_id": "job-1", "timeout_s": 3.0}]
    assert "job job-1: ok" in capsys.readouterr().out


def test_an_answer_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["result", "job-1"], connect=FakeClient()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job job-1: ok in 153.0 ms (queue 1.5, vision 30.0 ms; 1,403 tokens)",
        "model tiny@1234",
        "",
        "question  option     probability",
        "save      ok         0.7500       <- chosen, confidence 0.189",
        "          no         0.2500",
        "保存      \\u001b[2J  1.0000       <- chosen, confidence 1.000",
    ]


def test_an_end_without_an_answer_names_its_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["result", "job-1"], connect=FakeClient(ended("invalid", REFUSED.to_json()))) == 1
    assert capsys.readouterr().out.splitlines() == [
        "job job-1: invalid in 153.0 ms (queue 1.5, vision 30.0 ms)",
        "decode_failed:",
        "  state.image: the data is \\u001bcorrupt",
    ]
    lost = ErrorBody("worker_lost", "its worker was lost 3 times").to_json()
    assert main(["result", "job-1"], connect=FakeClient(ended("failed", lost))) == 1
    assert "worker_lost: its worker was lost 3 times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "code"), [("ok", json.dumps(ANSWERED), 0), ("invalid", REFUSED.to_json(), 1)]
)
def test_json_is_the_body(status: str, body: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["result", "job-1", "--json"], connect=FakeClient(ended(status, body))) == code
    assert capsys.readouterr().out == body + "\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DuplicateId("job-1"), 2),
        (QueueFull("256 jobs wait", 2.5), 4),
        (UnknownJob("job-1"), 4),
        (ResultTimeout("job-1", 5.0), 4),
        (MalformedResult("job-1", "status: missing"), 4),
        (ServerUnavailable("the Redis server at 127.0.0.1:1 cannot be reached"), 4),
    ],
)
def test_a_clients_error_is_a_sentence_and_an_exit_code(
    error: ProducerError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["result", "job-1"], connect=FakeClient(error)) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {error}\n"


def test_an_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["result", "job-1"], connect=FakeClient(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_a_refusal_names_each_fault_with_its_place(shot: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestRefused) as caught:
        build_payload(IMAGE, {"q": {"type": "score", "instructions": None, "criteria": {"a": 5}}})
    refusal = FakeClient(caught.value)
    assert main(["decide", shot, "--option", "a"], connect=refusal) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    head, *faults = printed.err.splitlines()
    assert head == "refused, invalid_request:"
    assert [line.split(": ")[0] for line in faults] == ["  questions.q.type", "  questions.q.criteria.a"]
    assert main(["decide", shot, "--option", "a", "--json"], connect=refusal) == 2
    assert [error["loc"] for error in json.loads(capsys.readouterr().out)["errors"]] == [
        "questions.q.type",
        "questions.q.criteria.a",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["decide", "SHOT"], "no option to choose from"),
        (["decide", "SHOT", "--goal", "Save"], "no option to choose from"),
        (["decide", "SHOT", "--option", "a=x", "--option", "a"], 'option "a" is given twice'),
        (["decide", "none.png", "--option", "a"], "the image none.png cannot be read: No such file"),
        (["decide", "SHOT", "--questions", "none.json"], "questions file none.json cannot be read: No such file"),
        (["submit", "SHOT", "--questions", "SHOT"], "is not JSON"),
        (["submit", "SHOT", "--questions", "FILE", "--goal", "", "--option", "a"], "leave out --goal and --option"),
        (["decide", ".", "--option", "a"], "the image . cannot be read: Is a directory"),
        (["result", "job-1", "--queue", "../x"], "queue name '../x'"),
        (["result", "job-1", "--url", "http://user:secret@host"], "the Redis URL cannot be read; write redis://"),
        (["result", "job-1", "--url", "redis://host:secret/0"], "the Redis URL cannot be read; write redis://"),
    ],
)
def test_wrong_usage_is_a_sentence(
    arguments: list[str], sentence: str, shot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.json"
    file.write_text("{}")
    known = {"SHOT": shot, "FILE": str(file)}
    assert main([known.get(argument, argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert sentence in error
    assert "secret" not in error


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "holds an array; it must be a map"),
        ("5", "holds an integer; it must be a map"),
        ("{", "is not JSON"),
        ('{"a": {"criteria": {"x": 1, "x": 2}}}', 'the key "x" stands twice'),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_questions_file_that_is_none_is_a_sentence(
    text: str, sentence: str, shot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.json"
    file.write_text(text)
    assert main(["decide", shot, "--questions", str(file)], connect=FakeClient()) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_a_time_is_positive_seconds(seconds: str, shot: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["decide", shot, "--option", "a", f"--deadline-s={seconds}"], connect=FakeClient())
    assert caught.value.code == 2
    assert f"'{seconds}' is no time" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decide", "submit", "result", "show", "recent", "watch", "render"])
def test_help_has_an_example_and_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  python -m producer {command}" in shown
    for code in ("0  answered", "1  the job ended without", "2  wrong usage", "4  no result"):
        assert code in shown


def test_where_the_queue_is_comes_from_arguments_then_environment_then_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    main(["result", "job-1"], connect=client)
    assert client.settings == Settings("redis://127.0.0.1:6379/0", "screenshots", "cua:")
    monkeypatch.setenv("CUA_REDIS_URL", "redis://environment/1")
    monkeypatch.setenv("CUA_QUEUE", "second")
    monkeypatch.setenv("CUA_PREFIX", "two:")
    main(["result", "job-1"], connect=client)
    assert client.settings == Settings("redis://environment/1", "second", "two:")
    main(["result", "job-1", "--url", "redis://argument", "--queue", "third", "--prefix", "three:"], connect=client)
    assert client.settings == Settings("redis://argument", "third", "three:")


def test_the_command_makes_a_real_client() -> None:
    with connect_client(Settings("redis://127.0.0.1:1/0")) as client:
        assert callable(client.decide) and callable(client.submit) and callable(client.result)


def test_no_server_is_a_sentence_without_the_password() -> None:
    command = [sys.executable, "-m", "producer", "result", "job-1", "--timeout-s", "0.1"]
    command += ["--url", "redis://user:secret@127.0.0.1:1/0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.startswith("error: the Redis server at 127.0.0.1:1 cannot be reached")
    assert "Traceback" not in done.stderr and "secret" not in done.stderr


def test_output_survives_a_terminal_that_lacks_the_letters() -> None:
    command = [sys.executable, "-m", "producer", "decide", "保存.png", "--option", "a"]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=ascii_only, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "cannot be read" in done.stderr
