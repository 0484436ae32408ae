"""Jobs for the contract's tests: one that keeps it, and ways to break it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import settings

from producer.contract import CONTRACT_MODEL, Request, parse_request
from producer.errors import RequestRefused

# For property tests: the same examples in every run, however slow the machine is.
reproducible = settings(deadline=None, derandomize=True)

IMAGE = b"\x89PNG of a kind"
SAVE = {"type": "choice", "instructions": "Save the document", "criteria": {"save": "Save", "cancel": None}}


def job(**changed: Any) -> dict[str, Any]:
    """A job that keeps the contract, with some of its keys changed."""
    return {"model": CONTRACT_MODEL, "state": {"image": IMAGE}, "questions": {"q": SAVE}} | changed


def question(**changed: Any) -> dict[str, Any]:
    """A job with one question, called `q`, with some of the question's keys changed."""
    return job(questions={"q": SAVE | changed})


def parsed(value: object) -> Request:
    return parse_request(msgpack.packb(value))


def refused(value: object) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parsed(value)
    return caught.value


def places(refusal: RequestRefused) -> list[str]:
    return [fault.loc for fault in refusal.errors]
