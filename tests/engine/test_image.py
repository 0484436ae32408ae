"""Images against the golden vectors, and what hostile bytes may do: be refused, never crash."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine import image as images
from engine.errors import Refusal

VECTORS = Path(__file__).parent.parent / "vectors"
CASES: dict[str, dict[str, object]] = json.loads((VECTORS / "images.json").read_text())
ACCEPTED = sorted(name for name, case in CASES.items() if case["accept"])
REFUSED = sorted(name for name, case in CASES.items() if not case["accept"])


def read(name: str) -> bytes:
    return (VECTORS / "images" / name).read_bytes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_vectors_hold_both_kinds() -> None:
    assert len(ACCEPTED) >= 15 and len(REFUSED) >= 8


@pytest.mark.parametrize("name", ACCEPTED)
def test_decoded_rgb_and_grid_are_the_references(name: str) -> None:
    case = CASES[name]
    pixels = images.decode(read(name))
    assert [pixels.shape[1], pixels.shape[0]] == case["size"]
    assert sha256(pixels.numpy().tobytes()) == case["rgb_sha256"]
    height, width, _ = images.resize(pixels).shape
    assert [1, height // 16, width // 16] == case["grid"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused_with_its_code_and_place(name: str) -> None:
    with pytest.raises(Refusal) as refusal:
        images.decode(read(name))
    assert {fault.code for fault in refusal.value.faults} == {CASES[name]["code"]}
    assert {fault.loc for fault in refusal.value.faults} == {"state.image"}


def test_a_label_must_agree_with_the_signature() -> None:
    assert images.check_image(read("rgb8.png"), "image/png") == ()
    (fault,) = images.check_image(read("rgb8.png"), "image/jpeg")
    assert fault.code == "mime_mismatch" and "image/png" in fault.msg


def test_all_faults_of_a_header_are_named_before_anything_is_decoded() -> None:
    # 4,000,000 x 1 pixels: only the header exists, so decoding could not give these answers.
    header = images.PNG_SIGNATURE + b"\x00\x00\x00\rIHDR" + (4_000_000).to_bytes(4, "big") + (1).to_bytes(4, "big")
    faults = images.check_image(header, "image/jpeg")
    assert [fault.code for fault in faults] == ["image_too_large", "image_too_large", "aspect_ratio", "mime_mismatch"]
    assert all("4000000x1" in fault.msg for fault in faults[:3])


def test_an_animation_chunk_is_found_behind_the_pixels() -> None:
    plain = read("rgb8.png")
    trailer = plain.index(b"IEND") - 4
    chunk = b"\x00\x00\x00\x00acTL\x00\x00\x00\x00"
    assert images.check_image(plain) == ()
    assert images.check_image(plain[:trailer] + chunk + plain[trailer:])[0].code == "animated"
    # The same four letters inside a chunk's data are no chunk.
    text = b"\x00\x00\x00\x04tEXtacTL\x00\x00\x00\x00"
    assert images.check_image(plain[:trailer] + text + plain[trailer:]) == ()


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((800, 1280), (800, 1280)),
        ((1, 1), (256, 256)),
        ((1, 200), (32, 3648)),
        ((257, 383), (256, 384)),
        ((48, 48), (256, 256)),
        # 272 = 8.5 * 32 rounds to the even 8; 304 = 9.5 * 32 to 10
        ((272, 1024), (256, 1024)),
        ((304, 1024), (320, 1024)),
        ((5000, 5000), (4096, 4096)),
    ],
)
def test_sides_become_multiples_of_32(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert images.resized_size(*size) == resized


@given(st.integers(1, 2048), st.integers(1, 2048))
def test_a_resized_size_is_always_allowed(height: int, width: int) -> None:
    rows, columns = images.resized_size(height, width)
    assert rows % 32 == 0 == columns % 32
    assert images.MIN_RESIZED_PIXELS <= rows * columns <= images.MAX_RESIZED_PIXELS


def jpeg(**options: object) -> bytes:
    out = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").save(out, "JPEG", **options)
    return out.getvalue()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([read("rgb8.png"), read("palette8.png"), jpeg(), jpeg(progressive=True)]),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=6),
    st.integers(0, 20_000),
)
def test_a_damaged_file_decodes_or_is_refused(data: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    damaged = bytearray(data)
    for at, value in edits:
        damaged[at % len(damaged)] = value
    try:
        pixels = images.decode(bytes(damaged[: cut or None]))
    except Refusal as refusal:
        assert all(fault.msg and fault.code for fault in refusal.faults)
    else:
        assert pixels.shape[2] == 3


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"", images.PNG_SIGNATURE, images.JPEG_SIGNATURE]), st.binary(max_size=300))
def test_any_bytes_are_refused_or_checked(head: bytes, rest: bytes) -> None:
    try:
        header = images.read_header(head + rest)
    except Refusal as refusal:
        assert len(refusal.faults) == 1
    else:
        assert header.width > 0 and header.height > 0


def test_a_jpeg_of_endless_segments_is_refused_quickly() -> None:
    segments = b"\xff\xe1\x00\x02" * 1_000_000
    assert images.check_image(images.JPEG_SIGNATURE[:2] + segments)[0].code == "decode_failed"
    fill = images.JPEG_SIGNATURE + b"\xff" * 4_000_000
    assert images.check_image(fill)[0].code == "decode_failed"
