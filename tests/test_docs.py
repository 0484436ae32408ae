"""What the pages under docs/ show is what runs: every `sh` command and every `python` snippet, in the page's order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Place
from tests.test_readme import environment, serving

ROOT = Path(__file__).resolve().parents[1]
SERVER = "redis://127.0.0.1:6379/0"
# What is not run here, and why.
NOT_RUN = {
    "pip install -e '.[worker,embedded]'": "the environment that runs this test is that install",
    f"export CUA_REDIS_URL={SERVER}": "the test sets it to its own server",
}
SERVE = "python -m worker run --checkpoint /tmp/page --embedded /tmp/page-server"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of /tmp and /srv."""
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def here(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(valkey_url, tmp_path_factory.mktemp("run"))


def local(command: str, folder: Path) -> list[str]:
    parts = shlex.split(re.sub(r"/(tmp|srv)/", f"{folder}/", command))
    return [sys.executable, *parts[1:]] if parts[0] == "python" else parts


def run(command: str, folder: Path, here: Place) -> str:
    done = subprocess.run(
        local(command, folder), cwd=ROOT, env=environment(here), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def served(folder: Path, here: Place) -> Iterator[None]:
    """The start page's first terminal: its commands up to the worker, which serves the test's server instead."""
    shown = commands("start.md")
    serve = shown.index(SERVE)
    for command in shown[:serve]:
        if command not in NOT_RUN:
            run(command, folder, here)
    with serving([*local(SERVE.partition(" --embedded")[0], folder), "--redis-url", here.url], here):
        yield


@pytest.mark.usefixtures("served")
def test_the_second_terminal(folder: Path, here: Place) -> None:
    shown = commands("start.md")
    said = {
        command.split("/tmp/")[0]: run(command, folder, here)
        for command in shown[shown.index(SERVE) + 1 :]
        if command not in NOT_RUN
    }
    assert "chosen" in next(text for command, text in said.items() if "producer decide" in command)
    assert "switch" in said["python -m producer show first"]
    assert (
        "first" in said["python -m producer recent"] and '"answers"' in said["python -m producer result second --json"]
    )
    assert (folder / "page" / "first.html").stat().st_size > 1000


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("number", range(3))
def test_the_snippets(
    number: int, here: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snippets = blocks("start.md", "python")
    assert len(snippets) == 3
    monkeypatch.chdir(ROOT)
    place = f'("{here.url}", queue="{here.queue}", prefix="{here.prefix}")'
    snippet = snippets[number].replace(f'("{SERVER}")', place)
    exec(compile(snippet, f"start.md {number}", "exec"), {"__name__": "start"})
    first, *_ = capsys.readouterr().out.split()
    assert first in ("save", "discard", "wait", "ok")


def test_a_checkpoint_of_your_own(folder: Path, here: Place) -> None:
    for command in commands("gpu-box.md"):
        run(command, folder, here)
    assert (folder / "tiny" / "export" / "manifest.json").exists()


def test_every_command_of_the_other_pages_is_run_here() -> None:
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    with_commands = [page for page in pages if blocks(page, "sh") or blocks(page, "python")]
    assert with_commands == ["gpu-box.md", "start.md"]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (ROOT / "docs" / target).exists(), target
