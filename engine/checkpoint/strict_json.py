"""JSON from outside, read strictly, and the one way in which this package writes JSON that is hashed.

It knows no schema: pins, manifests, indices and tensor headers each know their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from engine.errors import CheckpointError


def parse_object(text: bytes, name: str) -> dict[str, object]:
    """The JSON object in `text`; `name` is how errors call it.

    Raises:
        CheckpointError: not UTF-8, not JSON, a key twice, NaN or infinity, or not an object.
    """
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=float
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError([f"{name}: not readable as JSON ({error})"]) from error
    if not isinstance(value, dict):
        raise CheckpointError([f"{name}: a JSON object is needed, found {type(value).__name__}"])
    return value


def canonical_sha256(value: Mapping[str, object]) -> str:
    """SHA-256 of the value's contents: keys sorted, no blanks, so that layout does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def pretty(value: Mapping[str, object]) -> bytes:
    """The value as a file that people read: two blanks a level, keys in their order, a newline at the end."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


class Fields:
    """One JSON object being taken apart: faults are noted and reading goes on; what nobody asked for is a fault."""

    def __init__(self, value: object, place: str, faults: list[str]) -> None:
        self.place, self._faults = place, faults
        self._values: Mapping[str, object] = value if isinstance(value, dict) else {}
        self._known: set[str] = set()
        if not isinstance(value, dict):
            faults.append(f"{place}: an object is needed, found {value!r}")

    def take(self, key: str) -> object:
        """The value of a required key, or None with a fault."""
        self._known.add(key)
        if key not in self._values:
            self.fault(key, "is missing")
        return self._values.get(key)

    def text(self, key: str) -> str:
        """A required string that is not empty."""
        value = self.take(key)
        if isinstance(value, str) and value:
            return value
        self.fault(key, f"must be a string that is not empty, found {value!r}")
        return ""

    def count(self, key: str) -> int:
        """A required integer of at least 0."""
        value = self.take(key)
        if type(value) is int and value >= 0:
            return value
        self.fault(key, f"must be an integer of at least 0, found {value!r}")
        return 0

    def flag(self, key: str) -> bool:
        """An optional boolean; absent is False."""
        self._known.add(key)
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            self.fault(key, f"must be true or false, found {value!r}")
        return value is True

    def sha256(self, key: str) -> str:
        """A required SHA-256: 64 lower-case hexadecimal digits."""
        value = self.take(key)
        if isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef"):
            return value
        self.fault(key, f"must be 64 lower-case hexadecimal digits, found {value!r}")
        return ""

    def only(self, key: str, allowed: Sequence[object]) -> None:
        """A required value out of `allowed`."""
        value = self.take(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            self.fault(key, f"must be {' or '.join(map(repr, allowed))}, found {value!r}")

    def mapping(self, key: str) -> Mapping[str, object]:
        """A required object whose keys are data."""
        value = self.take(key)
        if isinstance(value, dict):
            return value
        self.fault(key, f"must be an object, found {value!r}")
        return {}

    def finish(self) -> None:
        """Note every key that nobody asked for."""
        for key in sorted(set(self._values) - self._known):
            self.fault(key, "is not known here; remove it")

    def fault(self, key: str, sentence: str) -> None:
        """Note that `key` is wrong."""
        self._faults.append(f"{self.place}: {key} {sentence}")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} stands twice in one object")
    return value


def _no_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not allowed")
