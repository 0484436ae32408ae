"""The producer: makes jobs that keep the contract, puts them on the queue and reads their answers. It loads no torch.

Read `contract.py` first: it says what a job is. `client.py` and `aio.py` are what a program uses, `cli.py` a shell;
`testing.py` has clients without a server, `adapters` what other agent projects plug in.
"""

from __future__ import annotations

from producer.aio import AsyncClient
from producer.client import Client
from producer.errors import (
    Code,
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
from producer.protocol import Job
from producer.result import Answer, Result, Status, Timings, Usage
from producer.screenshot import Fitted, fit_screenshot, original_point

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "Code",
    "DuplicateId",
    "ErrorBody",
    "Fault",
    "Fitted",
    "Job",
    "MalformedResult",
    "ProducerError",
    "QueueFull",
    "RequestRefused",
    "Result",
    "ResultTimeout",
    "ServerUnavailable",
    "Status",
    "Timings",
    "UnknownJob",
    "Usage",
    "fit_screenshot",
    "original_point",
]
