"""What the README shows is what runs: its commands and its snippet, on a synthetic checkpoint and a bundled server."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.checkpoint import published_pin
from tests.servers import Place, wait_until

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SERVER = "redis://127.0.0.1:6379/0"
JOB = "<id>"


def blocks(section: str) -> list[str]:
    """The fenced blocks of a section."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


@pytest.fixture(scope="module")
def box(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two downloads would leave, of a synthetic checkpoint."""
    folder = tmp_path_factory.mktemp("box") / "cua"
    shutil.copytree(tiny_checkpoint, folder, ignore=shutil.ignore_patterns("export"))
    return folder


@pytest.fixture(scope="module")
def here(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(valkey_url, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def served(box: Path, here: Place) -> Iterator[None]:
    """The GPU box section, command by command; the worker it starts runs until the module's tests have ended."""
    (block,) = blocks("Run it on a GPU box")
    steps = commands(block)
    downloads, (*checks, start) = (
        [step for step in steps if step[0] == "hf"],
        [step for step in steps if step[0] != "hf"],
    )
    assert [step[4] for step in checks] == ["/srv/cua/base", "/srv/cua"] and len(downloads) == 2
    for step in checks:
        done = run(step, box, here)
        assert done.returncode == 0, done.stdout + done.stderr
    with serving(localised(start, box, here), here):
        yield


@contextmanager
def serving(command: list[str], here: Place) -> Iterator[None]:
    """A worker's process, ready, until the block ends."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(here))
    try:
        wait_until(lambda: process.poll() is not None or any(worker_states(here)), "the worker to be ready", 100)
        assert process.poll() is None
        yield
    finally:
        process.terminate()
        assert process.wait(30) == 0


def worker_states(here: Place) -> Iterator[bool]:
    for key in here.redis.scan_iter(f"{here.prefix}worker:*"):
        yield here.redis.hget(key, "state") in ("ready", "busy")


def localised(step: list[str], box: Path, here: Place) -> list[str]:
    """A command of the README with this test's folder, server and interpreter."""
    local = [part.replace("/srv/cua", str(box)).replace(SERVER, here.url) for part in step]
    return [sys.executable, *local[1:]] if local[0] == "python" else local


def environment(here: Place) -> dict[str, str]:
    return {**os.environ, **here.environment, "CUA_DEVICE": "cpu"}


def run(step: list[str], box: Path, here: Place) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        localised(step, box, here), cwd=ROOT, env=environment(here), capture_output=True, text=True, timeout=100
    )


def test_the_downloads_are_the_pinned_ones() -> None:
    (block,) = blocks("Run it on a GPU box")
    pin = published_pin()
    for step, pinned in zip(commands(block)[:2], (pin.base, pin.adapter), strict=True):
        assert step[:5] == ["hf", "download", pinned.repository, "--revision", pinned.revision]


@pytest.mark.usefixtures("served")
def test_the_shell_example_answers_and_redis_shows_it(box: Path, here: Place) -> None:
    decide, show = commands(blocks("Ask a question")[1])
    done = run([*decide, "--id", here.id("shell")], box, here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chosen" in done.stdout and "synthetic-tiny-0@" in done.stdout
    assert show[:3] == ["redis-cli", "--raw", "HGETALL"] and show[3].endswith(JOB)
    key = show[3].replace("cua:", here.prefix).replace(JOB, here.id("shell"))
    assert here.redis.hget(key, "status") == "ok"


@pytest.mark.usefixtures("served")
def test_the_snippet_answers(here: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = blocks("Ask a question")[0]
    call = f'Client("{SERVER}")'
    assert call in snippet
    local = snippet.replace(call, f'Client("{here.url}", queue="{here.queue}", prefix="{here.prefix}")')
    monkeypatch.chdir(ROOT)
    exec(compile(local, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("ok ") and "'discard':" in printed


def test_the_tree_names_what_is_there() -> None:
    (tree,) = blocks("What lies where")
    folders = re.findall(r"^(\w+)/ ", tree, flags=re.MULTILINE)
    assert sorted(folders) == sorted(
        path.name
        for path in ROOT.iterdir()
        if path.is_dir()
        and not path.name.startswith(".")
        and any(path.iterdir())
        and not path.name.endswith(".egg-info")
    )
    for folder, first in re.findall(r"^(\w+)/ .*read first: (\S+)", tree, flags=re.MULTILINE):
        assert re.search("ead this (file )?first", (ROOT / folder / first).read_text()[:200]), (folder, first)
    for name in re.search(r"^(docker.*?)   ", tree, flags=re.MULTILINE).group(1).split(", "):  # type: ignore[union-attr]
        assert (ROOT / name).is_file()
