"""The workers of the drills: processes forked from one that has loaded everything, so that hundreds can be killed.

Their engine writes down what it runs, a line each, so that a job that runs twice is seen although it has one answer.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import redis

from tests.worker.noop import NoopDecision, NoopEngine, NoopWorker
from worker.answer import Question, Report
from worker.lock import Device
from worker.settings import Settings


class RecordingEngine(NoopEngine):
    """Appends the first question's name, which is the job's id, to a file.

    `hold <s>` keeps the interpreter's lock so long, the first time that this job runs anywhere.
    """

    def __init__(self, runs: Path) -> None:
        super().__init__()
        self._path = runs
        self._runs = os.open(runs, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def decide(self, image: bytes, questions: Sequence[Question]) -> NoopDecision:
        name, goal = questions[0].name, questions[0].goal.split()
        holds = goal[:1] == ["hold"] and name not in self._path.read_text().split()
        os.write(self._runs, f"{name}\n".encode())
        if holds:
            ctypes.PyDLL(None).sleep(int(goal[1]))
        return super().decide(image, questions)


class RecordingWorker(NoopWorker):
    """A worker with that engine."""

    runs: Path

    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        return RecordingEngine(self.runs)


def start(settings: Settings, name: str, runs: Path) -> BaseProcess:
    """A worker in a process of its own. Its log goes to a file beside `runs`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.drill_worker", "tests.servers"])
    process = context.Process(target=_work, args=(settings, name, runs), daemon=True)
    process.start()
    return process


def _work(settings: Settings, name: str, runs: Path) -> None:
    log = os.open(runs.with_suffix(".log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    connection = redis.Redis.from_url(settings.redis_url)
    worker = RecordingWorker(settings.queue, name, connection=connection, settings=settings)
    worker.runs = runs
    worker.work()
    sys.exit(worker.exit_code)
