"""Strict msgpack, both ways: what a job's bytes may hold before anyone asks what it means.

A value is nil, bool, a 64-bit integer, a finite float, valid text, binary, an array, or a map with distinct text keys;
at most 127 arrays and maps deep. Everything but binary has a JSON form. It knows no field of a request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]

from producer.errors import MAX_NAMED_FAULTS, Code, Fault, RequestRefused, place
from producer.limits import MAX_NESTING, MAX_PAYLOAD_BYTES, MAX_VALUES

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1

Place: TypeAlias = tuple[str | int, ...]


class Checked(NamedTuple):
    """A value and what the wire does not carry of it.

    In `value`, maps lack the keys that are not valid text. `unreadable` are the places whose values have no meaning (an
    extension, NaN, broken text): a caller need not judge them again.
    """

    value: object
    faults: tuple[Fault, ...]
    unreadable: frozenset[str]


@dataclass(frozen=True)
class Extension:
    """Stands for a msgpack extension type, which the wire does not carry."""

    type: int


class _FaultyMap(dict[str, object]):
    """A map as far as it can be one, and the keys that it repeats or that are not text."""

    repeated: tuple[tuple[str, int], ...] = ()
    other_keys: tuple[object, ...] = ()


class _TooManyValues(Exception):
    pass


def unpack(payload: bytes) -> Checked:
    """Read one msgpack value. Maps become `dict`s with text keys; of a repeated key, the last value stands.

    Raises:
        RequestRefused: `payload_too_large` (over 8 MiB, or over 262,144 values), `malformed_payload` (not msgpack, cut
            off, followed by more bytes, nested over 127 deep). Other faults come back beside the value.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _too_large(len(payload))
    return check(_read(payload))


def pack(value: object) -> bytes:
    """Write one value as msgpack; tuples become arrays.

    Raises:
        RequestRefused: `malformed_payload` for whatever the wire does not carry (sets, dates, NaN, lone surrogates,
            keys that are not text, integers over 64 bits, nesting over 127), each with its place; `payload_too_large`.
    """
    faults = check(value).faults
    if faults:
        raise RequestRefused(faults)
    return pack_checked(value)


def pack_checked(value: object) -> bytes:
    """As `pack`, for a value without faults.

    Raises:
        RequestRefused: `payload_too_large`.
    """
    payload = b"".join(_pieces(msgpack.Packer(), value, levels=2))
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _too_large(len(payload))
    return payload


def check(value: object) -> Checked:
    """Find everything in a value that the wire does not carry.

    Raises:
        RequestRefused: what is nested over 127 deep, or has over 262,144 values, is not looked at further.
    """
    walk = _Walk()
    try:
        walk.visit(value, ())
    except _TooManyValues:
        raise RequestRefused([*walk.faults, _too_many_values()]) from None
    if walk.too_deep:
        raise RequestRefused(walk.faults)
    readable = _with_text_keys(value) if walk.has_faulty_keys else value
    return Checked(readable, tuple(walk.faults), frozenset(walk.unreadable))


def kind_of(value: object) -> str:
    """What a value is, for a sentence: `a boolean`, `an array`; never its content."""
    if isinstance(value, Extension):
        return f"a msgpack extension (type {value.type})"
    for types, name in _KINDS:
        if isinstance(value, types):
            return name
    return f"a Python {type(value).__name__}"


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "nil"),
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a float"),
    (str, "a string"),
    ((bytes, bytearray), "binary"),
    (msgpack.ExtType, "a msgpack extension"),
    ((list, tuple), "an array"),
    (dict, "a map"),
    (msgpack.Timestamp, "a msgpack timestamp"),
)


def _pieces(packer: msgpack.Packer, value: object, levels: int) -> Iterator[bytes]:
    """A packed value in parts: a large binary, in maps at most `levels` deep, uncopied; msgpack copies twice."""
    if levels and isinstance(value, dict):
        yield packer.pack_map_header(len(value))
        for key, item in value.items():
            yield packer.pack(key)
            yield from _pieces(packer, item, levels - 1)
    elif isinstance(value, bytes) and len(value) > 0xFFFF:
        yield b"\xc6" + len(value).to_bytes(4, "big")
        yield value
    else:
        yield packer.pack(value)


class _Budget:
    """Counts values down to a refusal."""

    def __init__(self) -> None:
        self.left = MAX_VALUES

    def take(self, values: int) -> None:
        self.left -= values
        if self.left < 0:
            raise _TooManyValues


def _read(payload: bytes) -> object:
    budget = _Budget()

    def array(items: list[object]) -> list[object]:
        budget.take(len(items) + 1)
        return items

    def mapping(pairs: list[tuple[object, object]]) -> dict[str, object]:
        budget.take(len(pairs) + 1)
        return _map_of(pairs)

    try:
        value: object = msgpack.unpackb(
            payload,
            raw=False,
            unicode_errors="surrogateescape",  # the walk finds the surrogates, and so their place
            strict_map_key=False,
            list_hook=array,
            object_pairs_hook=mapping,
            ext_hook=lambda ext_type, _: Extension(ext_type),
            timestamp=0,
            max_array_len=MAX_VALUES,
            max_map_len=MAX_VALUES,
        )
        return value
    except _TooManyValues:
        fault = _too_many_values()
    except (ValueError, msgpack.UnpackException) as error:
        fault = _unreadable_payload(error, len(payload))
    raise RequestRefused([fault])  # outside the `except`: msgpack's errors carry the payload


def _map_of(pairs: list[tuple[object, object]]) -> dict[str, object]:
    texts = [(key, value) for key, value in pairs if isinstance(key, str)]
    plain = dict(texts)
    if len(plain) == len(pairs):
        return plain
    faulty = _FaultyMap(plain)
    counts = Counter(key for key, _ in texts)
    faulty.repeated = tuple((key, count) for key, count in counts.items() if count > 1)
    faulty.other_keys = tuple(key for key, _ in pairs if not isinstance(key, str))
    return faulty


class _Walk:
    """Walks a value and collects what the wire does not carry."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.unreadable: set[str] = set()
        self.too_deep = False
        self.has_faulty_keys = False
        self._budget = _Budget()

    def visit(self, value: object, where: Place, depth: int = 1) -> None:
        self._budget.take(1)
        if isinstance(value, dict | list | tuple) and not isinstance(value, msgpack.ExtType):  # which is a tuple
            self._visit_container(value, where, depth)
        elif (sentence := _scalar_fault(value)) is not None:
            self._add(where, sentence, unreadable=True)

    def _visit_container(
        self, value: dict[object, object] | list[object] | tuple[object, ...], where: Place, depth: int
    ) -> None:
        if depth > MAX_NESTING:
            self._add(where, f"arrays and maps nest over {MAX_NESTING} deep, the most allowed; make them flatter")
            self.too_deep = True
            return
        if not isinstance(value, dict):
            for index, item in enumerate(value):
                self.visit(item, (*where, index), depth + 1)
            return
        if isinstance(value, _FaultyMap):
            self._visit_faulty_map(value, where)
        for key, item in value.items():
            if (sentence := _key_fault(key)) is not None:
                self.has_faulty_keys = True
                self._add((*where, key) if isinstance(key, str) else where, sentence)
            if isinstance(key, str):
                self.visit(item, (*where, key), depth + 1)

    def _visit_faulty_map(self, value: _FaultyMap, where: Place) -> None:
        for key, count in value.repeated:
            self._add((*where, key), f"the key stands {count:,} times in its map; keep one")
        for other in value.other_keys:
            self._add(where, _other_key(other))

    def _add(self, where: Place, sentence: str, *, unreadable: bool = False) -> None:
        if len(self.faults) > MAX_NAMED_FAULTS:
            return
        fault = Fault(place(where), sentence, Code.MALFORMED_PAYLOAD)
        self.faults.append(fault)
        if unreadable:
            self.unreadable.add(fault.loc)


def _with_text_keys(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_text_keys(item) for key, item in value.items() if _key_fault(key) is None}
    return value


def _key_fault(key: object) -> str | None:
    if not isinstance(key, str):
        return _other_key(key)
    sentence = _text_fault(key)
    return None if sentence is None else f"in the key, {sentence}"


def _other_key(key: object) -> str:
    return f"a key of this map is {kind_of(key)}; keys are strings: rename it"


def _scalar_fault(value: object) -> str | None:
    if value is None or isinstance(value, bool | bytes | bytearray):
        return None
    if isinstance(value, str):
        return _text_fault(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"the number is {value}; send a finite number, or nil"
    if isinstance(value, int):
        in_range = MIN_INTEGER <= value <= MAX_INTEGER
        return None if in_range else "the integer needs over 64 bits, the most allowed; send it as a string"
    return f"this is {kind_of(value)}, which is not carried; send a string, number, boolean, nil, array or map"


def _text_fault(text: str) -> str | None:
    if text.isascii():
        return None
    try:
        text.encode()
        return None
    except UnicodeEncodeError as error:
        at = error.start
    # `surrogateescape` turned each undecodable byte into U+DC80 + (byte - 0x80): ED A0-BF begins an encoded surrogate.
    escaped = "\udc80" <= text[at] <= "\udcff"
    if escaped and not (text[at] == "\udced" and "\udca0" <= text[at + 1 : at + 2] <= "\udcbf"):
        return f"the text is not valid UTF-8 after {at:,} characters; encode it as UTF-8"
    return f"the text holds a lone surrogate after {at:,} characters, which UTF-8 does not allow; remove it"


def _unreadable_payload(error: Exception, payload_bytes: int) -> Fault:
    if "exceeds max_" in str(error) and payload_bytes > MAX_VALUES:
        return _too_many_values()
    if isinstance(error, msgpack.ExtraData):
        found = f"more bytes ({len(error.extra):,}) follow the first value; send one map and nothing after it"
    elif isinstance(error, msgpack.StackError):
        found = f"arrays and maps nest over {MAX_NESTING} deep, the most allowed; make them flatter"
    elif isinstance(error, msgpack.FormatError):
        found = "it holds the byte 0xc1, which msgpack does not define; send one msgpack map"
    elif "incomplete" in str(error) or "exceeds max_" in str(error):
        found = "it ends in the middle of a value; send one whole msgpack map"
    else:
        found = "it is not valid msgpack; send one msgpack map"
    return Fault(place(()), f"the payload cannot be read: {found}", Code.MALFORMED_PAYLOAD)


def _too_many_values() -> Fault:
    message = (
        f"the payload holds or announces over {MAX_VALUES:,} values, the most allowed; send less in instructions and "
        "criteria"
    )
    return Fault(place(()), message, Code.PAYLOAD_TOO_LARGE)


def _too_large(size_bytes: int) -> RequestRefused:
    message = (
        f"the payload has {size_bytes:,} bytes; at most {MAX_PAYLOAD_BYTES:,} (8 MiB) are allowed: send a smaller "
        "image or less text"
    )
    return RequestRefused([Fault(place(()), message, Code.PAYLOAD_TOO_LARGE)])
