"""`python -m producer`: ask about a screenshot from a shell. It reads files, calls `Client` and prints; no more."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from producer.bars import Style, decision_text, recent_text
from producer.client import Client
from producer.errors import DuplicateId, ErrorBody, ProducerError, RequestRefused, shown
from producer.keys import DEFAULT_PREFIX, DEFAULT_QUEUE, Keys
from producer.protocol import DEFAULT_DEADLINE_S, DEFAULT_RECENT, DEFAULT_RESULT_TIMEOUT_S, MAX_DEADLINE_S
from producer.render import render_html, render_png
from producer.result import Result
from producer.screenshot import fit_screenshot
from producer.scripts import MAX_RECENT
from producer.settings import DEFAULT_REDIS_URL, Settings
from producer.table import error_text, result_text
from producer.wire import kind_of

EXIT_ANSWERED, EXIT_NOT_ANSWERED, EXIT_REFUSED, EXIT_NO_RESULT, EXIT_INTERRUPTED = 0, 1, 2, 4, 130
# How often a watch looks for new ends.
WATCH_POLL_S = 0.5
# The server's clock may be ahead of ours by this much.
CLOCK_MARGIN = timedelta(minutes=1)
EXIT_CODES_TEXT = """\
needs: the Redis server; for an answer also a worker there (python -m worker run). No GPU, no torch.

exit codes:
  0  answered (submit: accepted)
  1  the job ended without an answer: invalid, expired, failed or cancelled
  2  wrong usage, a file that cannot be read, or a request refused before it was queued
  4  no result: none in time, unknown job, queue full, or no server
"""
DECIDE_TEXT = """\
Ask one or more closed questions about a screenshot and wait for the answers.

example:
  python -m producer decide shot.png --goal "Save the document" --option save="Save" --option cancel
"""
SUBMIT_TEXT = """\
Put a job on the queue and print its id. It takes what `decide` takes, and does not wait.

example:
  python -m producer submit shot.png --questions questions.json --id shot-17

where questions.json holds one or more questions by name:
  {"next": {"instructions": "Save the document", "criteria": {"save": "Click 'Save'", "cancel": null}}}
"""
RESULT_TEXT = """\
Wait for a submitted job's end and print it.

example:
  python -m producer result shot-17 --timeout-s 10
"""
SHOW_TEXT = """\
Show a job's end at length: each question's options with bars, the chosen one marked, and where the time went.

example:
  python -m producer show shot-17
"""
RECENT_TEXT = """\
List the queue's jobs that ended last, whoever submitted them, newest first. With --json, an array of objects.

example:
  python -m producer recent --most 50
"""
WATCH_TEXT = """\
Show each job of the queue when it has ended, until Ctrl-C. With an ID, wait for that job alone, as long as it takes.
With --json, one object a line.

example:
  python -m producer watch
  python -m producer watch shot-17
"""
RENDER_TEXT = """\
Write a decision beside its screenshot as a picture or as a page of its own (which shows every script; the
picture's font has Latin letters only). Workers keep no image and no prompt, so give the screenshot; options are shown
by their keys.

example:
  python -m producer render shot-17 decision.html --image shot.png
"""


DEFAULT_QUESTION_NAME = "question"


class UsageError(Exception):
    """What a person typed, or a file that they named, cannot be used; the sentence says why."""


class Asker(Protocol):
    """The part of `Client` that the commands use."""

    def submit(
        self, image: bytes, questions: Mapping[str, Mapping[str, object]], *, job_id: str | None, deadline_s: float
    ) -> str: ...

    def result(self, job_id: str, timeout_s: float) -> Result: ...

    def recent(self, most: int, *, after: datetime | None) -> list[Result]: ...

    def decide(
        self,
        image: bytes,
        questions: Mapping[str, Mapping[str, object]],
        *,
        job_id: str | None,
        deadline_s: float,
        timeout_s: float | None,
    ) -> Result: ...


def connect_client(settings: Settings) -> Client:
    """The client of a command."""
    try:
        Keys(settings.prefix, settings.queue)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        return Client(settings.redis_url, queue=settings.queue, prefix=settings.prefix)
    except ValueError:
        # The library's sentence may hold a part of the password.
        raise UsageError(
            "the Redis URL cannot be read; write redis://HOST:PORT/DATABASE (or rediss://, unix://)"
        ) from None


def main(argv: Sequence[str] | None = None, connect: Callable[[Settings], Asker] = connect_client) -> int:
    """Run one command; returns its exit code. `connect` makes the client."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args, connect(_settings(args)))
        return code
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except RequestRefused as error:
        _print_refusal(error.body, as_json=args.json)
        return EXIT_REFUSED
    except ProducerError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED if isinstance(error, DuplicateId) else EXIT_NO_RESULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _decide(args: argparse.Namespace, client: Asker) -> int:
    result = client.decide(
        _image(args), _questions(args), job_id=args.id, deadline_s=args.deadline_s, timeout_s=args.timeout_s
    )
    return _print_result(result, as_json=args.json)


def _submit(args: argparse.Namespace, client: Asker) -> int:
    job_id = client.submit(_image(args), _questions(args), job_id=args.id, deadline_s=args.deadline_s)
    print(json.dumps({"job_id": job_id}) if args.json else job_id)
    return EXIT_ANSWERED


def _result(args: argparse.Namespace, client: Asker) -> int:
    return _print_result(client.result(args.job_id, args.timeout_s), as_json=args.json)


def _show(args: argparse.Namespace, client: Asker) -> int:
    return _print_shown(client.result(args.job_id, 0.0), as_json=args.json)


def _recent(args: argparse.Namespace, client: Asker) -> int:
    results = client.recent(args.most, after=None)
    print(
        json.dumps([result.to_map() for result in results], ensure_ascii=False) if args.json else recent_text(results)
    )
    return EXIT_ANSWERED


def _watch(args: argparse.Namespace, client: Asker) -> int:
    if args.job_id is not None:
        return _print_shown(client.result(args.job_id, MAX_DEADLINE_S), as_json=args.json)
    shown_jobs, last_end = 0, None
    results = client.recent(MAX_RECENT, after=None)
    while True:
        known = {(result.job_id, result.finished_at) for result in results}
        # A forged time must not hide what comes; what it makes come again is known.
        soon = datetime.now(UTC) + CLOCK_MARGIN
        ends = [result.finished_at for result in results if result.finished_at and result.finished_at < soon]
        last_end = max(ends, default=last_end)
        results = client.recent(MAX_RECENT, after=last_end)
        for result in reversed(results):
            if (result.job_id, result.finished_at) not in known:
                _print_shown(result, as_json=args.json)
                shown_jobs += 1
                if shown_jobs == args.count:
                    return EXIT_ANSWERED
        time.sleep(WATCH_POLL_S)


def _render(args: argparse.Namespace, client: Asker) -> int:
    render = {".png": render_png, ".html": render_html}.get(args.out.suffix.lower())
    if render is None:
        raise UsageError(f"{args.out} names no form: a file that ends with .png or .html is written")
    screenshot, result = _read(args.image, "image"), client.result(args.job_id, 0.0)
    try:
        page = render(result, screenshot)
    except (OSError, ValueError) as error:
        raise UsageError(f"the image {args.image} is no PNG or JPEG file that can be decoded") from error
    try:
        args.out.write_bytes(page)
    except OSError as error:
        raise UsageError(f"{args.out} cannot be written: {error.strerror or error}") from error
    return EXIT_ANSWERED if result.ok else EXIT_NOT_ANSWERED


def _print_shown(result: Result, *, as_json: bool) -> int:
    shown_result = (
        json.dumps(result.to_map(), ensure_ascii=False) if as_json else decision_text(result, Style.of(sys.stdout))
    )
    print(shown_result, flush=True)
    return EXIT_ANSWERED if result.ok else EXIT_NOT_ANSWERED


def _print_result(result: Result, *, as_json: bool) -> int:
    print(result.body if as_json else result_text(result))
    return EXIT_ANSWERED if result.ok else EXIT_NOT_ANSWERED


def _print_refusal(error: ErrorBody, *, as_json: bool) -> None:
    if as_json:
        print(error.to_json())
    else:
        print(f"refused, {error_text(error)}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m producer",
        description="Closed questions about a screenshot, answered by a worker on a Redis queue.",
        epilog=f"Each command has its own --help with an example.\n\n{EXIT_CODES_TEXT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    decide = _add_command(commands, "decide", "ask and wait for the answers", DECIDE_TEXT, _decide)
    _add_job_arguments(decide)
    decide.add_argument(
        "--timeout-s",
        type=_seconds,
        help="give up and take the job back after this long (default: some time past the deadline)",
    )
    submit = _add_command(commands, "submit", "put a job on the queue", SUBMIT_TEXT, _submit)
    _add_job_arguments(submit)
    result = _add_command(commands, "result", "wait for a job's end", RESULT_TEXT, _result)
    result.add_argument("job_id", metavar="ID", help="what submit printed")
    result.add_argument(
        "--timeout-s", type=_seconds, default=DEFAULT_RESULT_TIMEOUT_S, help="wait this long (default: %(default)g)"
    )
    show = _add_command(commands, "show", "show a job's end with bars", SHOW_TEXT, _show)
    show.add_argument("job_id", metavar="ID", help="what submit printed")
    recent = _add_command(commands, "recent", "list the jobs that ended last", RECENT_TEXT, _recent)
    recent.add_argument("--most", type=_count, default=DEFAULT_RECENT, help="at most so many (default: %(default)s)")
    watch = _add_command(commands, "watch", "show jobs as they end", WATCH_TEXT, _watch)
    watch.add_argument("job_id", metavar="ID", nargs="?", help="this job alone (default: all)")
    watch.add_argument("--count", type=_count, help="leave after so many (default: never)")
    render = _add_command(commands, "render", "write a decision beside its screenshot", RENDER_TEXT, _render)
    render.add_argument("job_id", metavar="ID", help="what submit printed")
    render.add_argument("out", type=Path, metavar="OUT", help="the file to write: .png or .html")
    render.add_argument("--image", type=Path, required=True, metavar="SHOT", help="the screenshot that was asked about")
    return parser


def _add_command(
    commands: Any, name: str, summary: str, text: str, run: Callable[[argparse.Namespace, Asker], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=text,
        epilog=EXIT_CODES_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print the body as JSON instead of a table")
    parser.add_argument("--url", help=f"the Redis server (default: $CUA_REDIS_URL, or {DEFAULT_REDIS_URL})")
    parser.add_argument("--queue", help=f"the queue's name (default: $CUA_QUEUE, or {DEFAULT_QUEUE})")
    parser.add_argument(
        "--prefix", help=f"what the project's Redis keys begin with (default: $CUA_PREFIX, or {DEFAULT_PREFIX})"
    )
    return parser


def _add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", type=Path, metavar="IMAGE", help="the screenshot, a PNG or JPEG file")
    parser.add_argument("--fit", action="store_true", help="shrink a screenshot that is over the limits")
    parser.add_argument("--goal", help="what is to be done")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY[=LABEL]",
        help="an option, 1 to 26 times; KEY alone is labelled by its key",
    )
    parser.add_argument("--question", metavar="NAME", help=f"the question's name (default: {DEFAULT_QUESTION_NAME})")
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="1 to 8 questions as JSON, instead of the three above"
    )
    parser.add_argument("--id", help="the job's id (default: a fresh one)")
    parser.add_argument(
        "--deadline-s",
        type=_seconds,
        default=DEFAULT_DEADLINE_S,
        help="a job that no worker took by then ends as expired (default: %(default)g)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; over 0 and at most {MAX_DEADLINE_S:g} seconds are allowed"
        )
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_RECENT:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; 1 to {MAX_RECENT} is allowed")
    return int(text)


def _settings(args: argparse.Namespace) -> Settings:
    settings = Settings.from_environment()
    given = {"redis_url": args.url, "queue": args.queue, "prefix": args.prefix}
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def _image(args: argparse.Namespace) -> bytes:
    file = _read(args.image, "image")
    return fit_screenshot(file).data if args.fit else file


def _questions(args: argparse.Namespace) -> Mapping[str, Mapping[str, object]]:
    """The questions in the contract's form; whether they keep the contract is for the client to say."""
    single = [name for name in ("goal", "option", "question") if getattr(args, name) not in (None, [])]
    if args.questions is not None:
        if single:
            raise UsageError(f"--questions holds whole questions: leave out --{' and --'.join(single)}")
        return _questions_of_file(args.questions)
    if not args.option:
        raise UsageError("there is no option to choose from: give --option KEY[=LABEL], or --questions FILE")
    name = DEFAULT_QUESTION_NAME if args.question is None else args.question
    return {name: {"instructions": args.goal, "criteria": _criteria(args.option)}}


def _criteria(options: Sequence[str]) -> dict[str, str | None]:
    criteria: dict[str, str | None] = {}
    for option in options:
        key, equals, label = option.partition("=")
        if key in criteria:
            raise UsageError(f"option {shown(key)} is given twice; a key stands once in a question")
        criteria[key] = label if equals else None
    return criteria


def _questions_of_file(path: Path) -> Mapping[str, Mapping[str, object]]:
    try:
        questions = json.loads(_read(path, "questions file"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the questions file {path} is not JSON: {error}") from error
    if not isinstance(questions, dict):
        raise UsageError(f"the questions file {path} holds {kind_of(questions)}; it must be a map of questions by name")
    return questions


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    distinct = dict(pairs)
    if len(distinct) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise UsageError(f"in the questions file, the key {shown(repeated)} stands twice in its map; keep one")
    return distinct


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror or error}") from error
