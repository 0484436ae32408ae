"""Strict msgpack: what is carried comes back the same, all else is refused with its place, and nothing crashes."""

from __future__ import annotations

import datetime
import math
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import wire
from producer.errors import Code, Fault, RequestRefused
from producer.limits import MAX_NESTING, MAX_PAYLOAD_BYTES, MAX_VALUES
from tests.producer.jobs import reproducible

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.binary(),
)
broken_text = st.text(st.characters(categories=["Cs", "Ll"]))
carried = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
extensions = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
timestamps = st.builds(msgpack.Timestamp, st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**9 - 1))
# Whatever msgpack itself can say: keys that are no text, NaN, timestamps, extension types, broken text.
anything = st.recursive(
    scalars | st.floats() | broken_text | extensions | timestamps,
    lambda inner: st.lists(inner) | st.dictionaries(scalars | broken_text, inner),
    max_leaves=12,
)


def packed(value: object) -> bytes:
    """What any msgpack library may send, without our strictness."""
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return data


def refusal(payload: bytes) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        wire.unpack(payload)
    return caught.value


def faults(payload: bytes) -> list[tuple[str, str]]:
    return [(fault.loc, fault.msg) for fault in wire.unpack(payload).faults]


def nested(depth: int) -> bytes:
    return b"\x91" * (depth - 1) + b"\x90"


@reproducible
@given(carried)
def test_what_is_carried_comes_back_the_same(value: object) -> None:
    back = wire.unpack(wire.pack(value))
    assert back == wire.Checked(value, (), frozenset())


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1])
def test_the_largest_integers_are_carried(number: int) -> None:
    assert wire.unpack(wire.pack(number)).value == number


@pytest.mark.parametrize("size_bytes", [0, 0xFF, 0xFFFF, 0x10000, 2**20])
def test_binary_of_any_size_at_any_depth_is_packed_as_msgpack_packs_it(size_bytes: int) -> None:
    data = bytes(size_bytes)
    for value in (data, {"a": data, "b": [data]}, {"a": 1, "b": {"c": data, "d": {"e": data}}, "f": {}}):
        assert wire.pack(value) == msgpack.packb(value)


def test_tuples_and_byte_arrays_are_carried_as_arrays_and_binary() -> None:
    assert wire.unpack(wire.pack({"a": (1, 2), "b": bytearray(b"x")})).value == {"a": [1, 2], "b": b"x"}


@reproducible
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    try:
        checked = wire.unpack(payload)
    except RequestRefused as refused:
        assert refused.code in {Code.MALFORMED_PAYLOAD, Code.PAYLOAD_TOO_LARGE}
    else:
        assert all(fault.code == Code.MALFORMED_PAYLOAD for fault in checked.faults)


@reproducible
@given(anything)
def test_any_msgpack_value_is_read_or_named(value: object) -> None:
    checked = wire.unpack(packed(value))
    if not checked.faults:
        assert wire.unpack(wire.pack(checked.value)).value == checked.value


python_values = st.recursive(
    scalars | st.floats() | broken_text | extensions | st.complex_numbers() | st.integers() | st.datetimes(),
    lambda inner: st.lists(inner) | st.dictionaries(scalars | broken_text, inner),
    max_leaves=8,
)


@reproducible
@given(python_values)
def test_any_python_value_is_packed_or_refused(value: object) -> None:
    try:
        payload = wire.pack(value)
    except RequestRefused as refused:
        assert refused.code == Code.MALFORMED_PAYLOAD
    else:
        assert wire.unpack(payload).faults == ()


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"", "ends in the middle"),
        (b"\x81", "ends in the middle"),
        (b"\xdb\xff\xff\xff\xff", "ends in the middle"),
        (b"\xdd\xff\xff\xff\xff", "ends in the middle"),
        (b"\xdf\xff\xff\xff\xff\xa1a", "ends in the middle"),
        (b"\xc9\xff\xff\xff\xff\x01", "ends in the middle"),
        (b"\xc1", "0xc1"),
        (b"\x80\x00\x00", "more bytes (2) follow"),
        (b"\xc7\x0c\xff" + b"\xff" * 12, "not valid msgpack"),
        (b"\xd4\xff\x00", "not valid msgpack"),
    ],
)
def test_bytes_that_are_no_one_value_are_malformed(payload: bytes, sentence: str) -> None:
    refused = refusal(payload)
    assert refused.code == Code.MALFORMED_PAYLOAD
    assert [fault.loc for fault in refused.errors] == ["payload"]
    assert sentence in refused.errors[0].msg


def test_a_payload_may_have_8_mib_and_not_a_byte_more() -> None:
    most = MAX_PAYLOAD_BYTES - 5
    assert wire.unpack(b"\xc6" + struct.pack(">I", most) + bytes(most)).faults == ()
    refused = refusal(b"\xc6" + struct.pack(">I", most + 1) + bytes(most + 1))
    assert refused.code == Code.PAYLOAD_TOO_LARGE
    assert "8,388,609" in refused.detail and "8,388,608" in refused.detail


def test_pack_keeps_the_same_size() -> None:
    assert len(wire.pack(bytes(MAX_PAYLOAD_BYTES - 5))) == MAX_PAYLOAD_BYTES
    with pytest.raises(RequestRefused) as caught:
        wire.pack(bytes(MAX_PAYLOAD_BYTES - 4))
    assert caught.value.code == Code.PAYLOAD_TOO_LARGE


def test_arrays_and_maps_may_nest_127_deep() -> None:
    assert wire.unpack(nested(MAX_NESTING)).faults == ()
    for depth in (MAX_NESTING + 1, 500, 600, 5000):
        refused = refusal(nested(depth))
        assert refused.code == Code.MALFORMED_PAYLOAD
        assert "over 127 deep" in refused.detail
    deep_map: dict[str, Any] = {}
    for _ in range(MAX_NESTING):
        deep_map = {"a": deep_map}
    assert "over 127 deep" in refusal(packed(deep_map)).detail


def test_a_deep_value_hides_no_other_fault() -> None:
    refused = refusal(b"\x82\xa1a\xca\x7f\xc0\x00\x00\xa1b" + nested(MAX_NESTING))
    assert [fault.loc for fault in refused.errors] == ["a", "b" + ".0" * 11 + "...."]


def test_pack_refuses_a_value_that_holds_itself() -> None:
    loop: list[object] = []
    loop += [loop, loop]
    with pytest.raises(RequestRefused):
        wire.pack(loop)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd" + struct.pack(">I", MAX_VALUES - 10) + b"\x90" * (MAX_VALUES - 10),
        b"\xdd" + struct.pack(">I", MAX_VALUES - 10) + b"\x80" * (MAX_VALUES - 10),
        b"\xdd" + struct.pack(">I", MAX_VALUES + 10) + b"\xc0" * (MAX_VALUES + 10),
        b"\x92" + (b"\xdd" + struct.pack(">I", MAX_VALUES - 10) + b"\xc0" * (MAX_VALUES - 10)) * 2,
        b"\xdd"
        + struct.pack(">I", MAX_VALUES + 10)
        + b"\xc6"
        + struct.pack(">I", 2 * MAX_VALUES)
        + bytes(2 * MAX_VALUES),
    ],
    ids=["arrays", "maps", "one long array", "two long arrays", "a long array announced and cut off"],
)
def test_a_small_payload_with_very_many_values_is_too_large(payload: bytes) -> None:
    refused = refusal(payload)
    assert refused.code == Code.PAYLOAD_TOO_LARGE
    assert "262,144 values" in refused.detail


def test_nearly_that_many_values_are_read() -> None:
    payload = b"\xdd" + struct.pack(">I", MAX_VALUES - 10) + b"\xc0" * (MAX_VALUES - 10)
    assert wire.unpack(payload).faults == ()


def test_announced_lengths_take_no_memory() -> None:
    # 127 arrays in one another, each announcing 262,000 items, of which none comes.
    refused = refusal((b"\xdd" + struct.pack(">I", 262_000)) * 127)
    assert refused.code == Code.MALFORMED_PAYLOAD


@pytest.mark.parametrize(
    ("payload", "loc", "sentence"),
    [
        (b"\x82\xa1a\x01\xa1a\x02", "a", "stands 2 times"),
        (b"\x81\xa1q\x91\x83\xa1a\x01\xa1a\x02\xa1a\x03", "q.0.a", "stands 3 times"),
        (b"\x81\xa1q\x81\x01\x02", "q", "key of this map is an integer"),
        (b"\x81\xa1q\x81\xc4\x01a\x02", "q", "key of this map is binary"),
        (b"\x81\xa1q\x81\x91\x01\x02", "q", "key of this map is an array"),
        (b"\x81\xa1q\xa2\xc3\x28", "q", "not valid UTF-8 after 0"),
        (b"\x81\xa1q\xa3ab\xff", "q", "not valid UTF-8 after 2"),
        (b"\x81\xa1q\xa3\xed\xa0\xbd", "q", "lone surrogate"),
        (b"\x81\xa1q\xa6\xed\xa0\xbd\xed\xb2\xa9", "q", "lone surrogate"),
        (b"\x81\xa1q\xa2\xed\x9f", "q", "not valid UTF-8"),
        (b"\x81\xa1\xff\x01", '"\\udcff"', "in the key, the text is not valid UTF-8"),
        (b"\x81\xa1q\xca\x7f\xc0\x00\x00", "q", "the number is nan"),
        (b"\x81\xa1q\xcb" + struct.pack(">d", math.inf), "q", "the number is inf"),
        (b"\x81\xa1q\xcb" + struct.pack(">d", -math.inf), "q", "the number is -inf"),
        (b"\x81\xa1q\xd4\x05\x00", "q", "msgpack extension (type 5)"),
        (b"\x81\xa1q\xd6\xff\x00\x00\x00\x01", "q", "msgpack timestamp"),
        (b"\x81\xa1q\xd7\xff" + bytes(8), "q", "msgpack timestamp"),
        (b"\x81\xa1q\xc7\x0c\xff" + bytes(12), "q", "msgpack timestamp"),
    ],
)
def test_each_thing_that_is_not_carried_is_named_with_its_place(payload: bytes, loc: str, sentence: str) -> None:
    [found] = faults(payload)
    assert found[0] == loc
    assert sentence in found[1]


def test_all_faults_are_named_beside_each_other() -> None:
    payload = packed({"a": math.nan, "b": ["\ud800", {"c": msgpack.ExtType(3, b"")}], 5: None, "ok": 1})
    checked = wire.unpack(payload)
    assert [fault.loc for fault in checked.faults] == ["payload", "a", "b.0", "b.1.c"]
    assert checked.unreadable == {"a", "b.0", "b.1.c"}
    assert isinstance(checked.value, dict) and checked.value["ok"] == 1


@pytest.mark.parametrize(
    ("value", "loc", "sentence"),
    [
        ({"a": {1, 2}}, "a", "a Python set"),
        ({"a": [datetime.datetime(2026, 12, 1)]}, "a.0", "a Python datetime"),
        ({"a": math.nan}, "a", "the number is nan"),
        ({"a": "x\ud800"}, "a", "lone surrogate after 1 "),
        ({"a": "x\udcff"}, "a", "not valid UTF-8"),
        ({"a": 2**64}, "a", "over 64 bits"),
        ({"a": -(2**63) - 1}, "a", "over 64 bits"),
        ({"a": {1: 2}}, "a", "key of this map is an integer"),
        ({"a": {True: 2}}, "a", "key of this map is a boolean"),
        ({"a": memoryview(b"x")}, "a", "a Python memoryview"),
        ({"a": msgpack.ExtType(3, b"x")}, "a", "a msgpack extension"),
        ({"a": msgpack.Timestamp(0)}, "a", "a msgpack timestamp"),
    ],
)
def test_pack_names_what_it_cannot_carry(value: object, loc: str, sentence: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        wire.pack(value)
    [fault] = caught.value.errors
    assert fault == Fault(loc, fault.msg, Code.MALFORMED_PAYLOAD)
    assert sentence in fault.msg
