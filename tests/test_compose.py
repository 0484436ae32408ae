"""The compose file: valid where Compose is there to say so, and with what a queue of screenshots needs in any case."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from worker.settings import Settings

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services: dict[str, Any] = content["services"]
    return services


def compose() -> list[str] | None:
    """The plugin, or the older program of its own; neither needs an engine to read a file."""
    plugin = ["docker", "compose"]
    if (
        shutil.which("docker")
        and subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0
    ):
        return plugin
    return ["docker-compose"] if shutil.which("docker-compose") else None


def test_compose_accepts_the_file() -> None:
    command = compose()
    if command is None:
        pytest.skip("neither `docker compose` nor `docker-compose` is installed")
    done = subprocess.run([*command, "config"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "appendonly" in done.stdout


def test_the_server_drops_nothing(services: dict[str, Any]) -> None:
    command = services["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert all(port.startswith("127.0.0.1:") for port in services["redis"]["ports"])


def test_the_worker_waits_for_the_server_and_may_finish_its_job(services: dict[str, Any]) -> None:
    worker = services["worker"]
    assert worker["depends_on"]["redis"]["condition"] == "service_healthy"
    assert worker["healthcheck"]["test"] == ["CMD", "python", "-m", "worker", "status"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > Settings().stop_limit_s
    assert all(volume.endswith(":ro") for volume in worker["volumes"])
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
