"""`show`, `recent`, `watch` and `render`: what a person sees of decisions that have been made. No server is needed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from producer import cli
from producer.bars import Style, decision_text
from producer.render import render_html, render_png
from producer.result import Result
from producer.testing import FakeClient
from tests.servers import IMAGE, QUESTIONS

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e\" onload='x"
ANSWERS = {
    "save": {"choice": "ok", "probabilities": {"ok": 0.75, "no": 0.25}, "confidence": 0.1887},
    HOSTILE: {"choice": HOSTILE, "probabilities": {HOSTILE: 1.0, "保存": 0.0}, "confidence": 1.0},
}
TIMES = {"queue_ms": "1.5", "prepare_ms": "", "vision_ms": "30", "language_ms": "60", "total_ms": "153.026"}


def ended(answers: dict[str, object] | None = None, model: str = "tiny@1234") -> Result:
    body = {"model": model, "answers": answers or ANSWERS, "usage": {"input_tokens": 1403}}
    fields = {"status": "ok", "body": json.dumps(body), "model": model, "worker": "w1", "attempts": "1", **TIMES}
    fields["finished_at"] = "2026-02-28T12:30:15.500000Z"
    return Result.from_hash("job-1", {name.encode(): text.encode() for name, text in fields.items()})


def refused() -> Result:
    body = {"code": "decode_failed", "detail": "corrupt", "errors": [{"loc": "state.image", "msg": HOSTILE}]}
    return Result.from_hash("job-2", {b"status": b"invalid", b"body": json.dumps(body).encode()})


@pytest.fixture
def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (300, 200), (10, 20, 200)).save(file, "PNG")
    return file.getvalue()


def test_a_decision_has_bars_the_choice_marked_and_its_times() -> None:
    assert decision_text(ended({"save": ANSWERS["save"]}), Style(columns=39)).splitlines() == [
        "job job-1: ok in 153.0 ms (queue 1.5, vision 30.0, language 60.0 ms; 1,403 tokens)",
        "model tiny@1234, worker w1, attempts 1, finished 2026-02-28 12:30:15 UTC",
        "",
        "save (confidence 0.189)",
        "  > ok   75.00%  |###############     |",
        "    no   25.00%  |#####               |",
        "",
        "  queue           1.5 ms  |                |",
        "  vision         30.0 ms  |########        |",
        "  language       60.0 ms  |################|",
    ]


def test_a_terminal_gets_blocks_and_its_width_is_kept() -> None:
    for columns in (20, 39, 500):
        style = Style(columns, is_plain=False)
        [chosen] = [line for line in decision_text(ended(), style).splitlines() if "ok" in line and "%" in line]
        assert chosen.startswith("  \x1b[1m> ok ") and "█" in chosen
        bar = chosen.partition("|")[2].partition("|")[0]
        assert 8 <= len(bar) <= 40
    assert Style(80, is_plain=False).bar(0.0625, 8) == "▌       "
    assert [Style().bar(share, 4) for share in (-1.0, 0.5, 7.0)] == ["    ", "##  ", "####"]


class Terminal(io.StringIO):
    encoding = "UTF-8"

    def isatty(self) -> bool:
        return True


def test_bars_are_plain_unless_a_terminal_can_show_more() -> None:
    assert not Style.of(Terminal(), {}).is_plain
    assert Style.of(Terminal(), {"NO_COLOR": "1"}).is_plain
    assert Style.of(io.StringIO(), {}).is_plain
    latin = Terminal()
    latin.encoding = "ISO-8859-1"
    assert Style.of(latin, {}).is_plain


@pytest.mark.parametrize("result", [ended(), refused()], ids=["answered", "refused"])
def test_what_came_from_outside_steers_no_terminal(result: Result) -> None:
    text = decision_text(result, Style())
    assert "\\u001b[2J" in text and "\x1b" not in text and "\u202e" not in text


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(client: object, *arguments: str) -> tuple[int, str]:
        code = cli.main(list(arguments), connect=lambda settings: client)  # type: ignore[arg-type, return-value]
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def fake_with(*ids: str) -> FakeClient:
    client = FakeClient()
    for job_id in ids:
        client.decide(IMAGE, QUESTIONS, job_id=job_id)
    return client


def test_show_prints_the_decision(run: Callable[..., tuple[int, str]]) -> None:
    client = fake_with("one")
    code, text = run(client, "show", "one")
    assert code == 0 and "job one: ok" in text and "> ok" in text and "|###" in text
    code, text = run(client, "show", "one", "--json")
    assert code == 0 and json.loads(text)["body"]["answers"]["save"]["choice"] == "ok"
    code, text = run(client, "show", "two")
    assert code == 4 and text.startswith("error: no job")


def test_recent_lists_the_newest_first(run: Callable[..., tuple[int, str]]) -> None:
    client = fake_with("one", "two", "three")
    code, text = run(client, "recent", "--most", "2")
    assert code == 0
    header, *rows = [line.split() for line in text.splitlines()]
    assert header[:2] == ["finished", "job"] and [row[1] for row in rows] == ["three", "two"]
    assert rows[0][2:6] == ["ok", "save=ok", "and", "1"]
    code, text = run(client, "recent", "--json")
    assert [each["job_id"] for each in json.loads(text)] == ["three", "two", "one"]
    assert run(FakeClient(), "recent") == (0, "no job has ended within the results' lifetime\n")


def test_watch_shows_what_ends_from_then_on(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = fake_with("before")
    coming = iter([["one", "two"], [], ["three"]])

    def meanwhile(pause_s: float) -> None:
        for job_id in next(coming):
            client.decide(IMAGE, QUESTIONS, job_id=job_id)

    monkeypatch.setattr(cli, "time", SimpleNamespace(sleep=meanwhile))  # not for other threads
    code, text = run(client, "watch", "--count", "3", "--json")
    assert code == 0 and [json.loads(line)["job_id"] for line in text.splitlines()] == ["one", "two", "three"]
    code, text = run(client, "watch", "one")
    assert code == 0 and text.startswith("job one: ok")


def test_forged_ends_are_shown_once_and_hide_nothing(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = [replace(ended(), job_id="far", finished_at=datetime.max.replace(tzinfo=UTC))]
    forged += [replace(ended(), job_id="timeless", finished_at=None)]

    class Server(FakeClient):
        """Lists what a stranger wrote at the top, whatever is asked for."""

        def recent(self, most: int = 20, *, after: datetime | None = None) -> list[Result]:
            return forged * (polls > 1) + super().recent(most, after=after)

    client, polls = Server(), 0

    def meanwhile(pause_s: float) -> None:
        nonlocal polls
        polls += 1
        client.decide(IMAGE, QUESTIONS, job_id=f"job-{polls}")

    monkeypatch.setattr(cli, "time", SimpleNamespace(sleep=meanwhile))  # not for other threads
    _, text = run(client, "watch", "--count", "6", "--json")
    shown = [json.loads(line)["job_id"] for line in text.splitlines()]
    assert shown == ["job-1", "job-2", "timeless", "far", "job-3", "job-4"]


@pytest.mark.parametrize("count", ["0", "1001", "-1", "many"])
def test_a_count_is_within_bounds(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["recent", f"--most={count}"])
    assert "1 to 1000 is allowed" in capsys.readouterr().err


class Page(HTMLParser):
    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("result", [ended(model=HOSTILE), refused()], ids=["answered", "refused"])
def test_the_page_is_self_contained_and_escapes_everything(result: Result, png: bytes) -> None:
    page = Page(render_html(result, png))
    names = {tag for tag, _ in page.tags}
    assert "script" not in names and HOSTILE[:25] in page.text, "it is text, not a tag"
    assert "\x1b" not in page.text and "\u202e" not in page.text
    for _, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("href", "action")}
    [image] = [attributes for tag, attributes in page.tags if tag == "img"]
    head, _, data = str(image["src"]).partition(",")
    assert head == "data:image/png;base64" and base64.b64decode(data) == png
    assert any("default-src 'none'" in str(attributes.get("content")) for tag, attributes in page.tags if tag == "meta")


def test_the_page_marks_the_choice(png: bytes) -> None:
    page = Page(render_html(ended(), png))
    assert [attributes["value"] for tag, attributes in page.tags if tag == "meter"] == [
        "0.7500", "0.2500", "1.0000", "0.0000",
    ]  # fmt: skip
    assert [attributes.get("class") for tag, attributes in page.tags if tag == "tr"] == ["chosen", None] * 2
    assert "75.00%" in page.text and "保存" in page.text


def test_the_picture_holds_the_screenshot_and_the_bars(png: bytes) -> None:
    picture = Image.open(io.BytesIO(render_png(ended(), png)))
    assert picture.size[0] > 300 + 400 and picture.getpixel((16 + 150, 16 + 100)) == (10, 20, 200)
    colours = {colour for _, colour in picture.getcolors(1 << 20)}  # type: ignore[union-attr]
    assert (10, 107, 61) in colours and (110, 119, 129) in colours, "the chosen option's bar, and the others'"
    refusal = Image.open(io.BytesIO(render_png(refused(), png)))
    assert (10, 107, 61) not in {colour for _, colour in refusal.getcolors(1 << 20)}  # type: ignore[union-attr]


def test_render_writes_the_form_that_the_name_asks_for(
    run: Callable[..., tuple[int, str]], tmp_path: Path, png: bytes
) -> None:
    shot = tmp_path / "shot.png"
    shot.write_bytes(png)
    client = fake_with("one")
    for name, start in (("a.png", b"\x89PNG"), ("a.HTML", b"<!DOCTYPE html>")):
        assert run(client, "render", "one", str(tmp_path / name), "--image", str(shot)) == (0, "")
        assert (tmp_path / name).read_bytes().startswith(start)
    for out, image, sentence in (
        ("a.gif", shot, "ends with .png or .html"),
        ("none/a.png", shot, "cannot be written: No such file"),
        ("b.png", tmp_path / "a.HTML", "no PNG or JPEG file"),
        ("b.html", tmp_path / "a.HTML", "no PNG or JPEG file"),
        ("b.html", tmp_path / "none.png", "cannot be read"),
    ):
        code, text = run(client, "render", "one", str(tmp_path / out), "--image", str(image))
        assert code == 2 and sentence in text
    assert not (tmp_path / "b.png").exists() and not (tmp_path / "b.html").exists()


def test_a_result_is_a_map_for_json() -> None:
    found = json.loads(json.dumps(ended().to_map()))
    assert found["status"] == "ok" and found["body"]["answers"]["save"] == ANSWERS["save"]
    assert datetime.fromisoformat(found["finished_at"]).microsecond == 500_000
    assert (found["prepare_ms"], found["total_ms"], found["enqueued_at"]) == (None, 153.026, None)
