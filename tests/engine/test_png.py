"""Plain PNGs that are left to the GPU half way: always Pillow's pixels, and never one that is unusual or broken."""

from __future__ import annotations

import io
import json
import random
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from isal import isal_zlib
from PIL import Image

from engine import image as images
from engine.errors import Refusal
from engine.gpu.runner import MAX_PICTURE_BYTES
from engine.png import MAX_ANCILLARY_BYTES, MAX_CHUNKS, MAX_PROFILE_BYTES, FilteredRows, filtered_rows
from tests import pngs
from tests.faults import hostile

VECTORS = Path(__file__).parent.parent / "vectors"
CASES: dict[str, dict[str, object]] = json.loads((VECTORS / "images.json").read_text())
# Of the golden files, those that are 8-bit RGB or RGBA without anything unusual.
PLAIN = {"1x1.png", "200x1.png", "icc.png", "odd-383x257.png", "rgb8.png", "rgba8.png", "wide-1280x64.png"}

WIDTH, HEIGHT = 13, 9
PIXELS = pngs.noise(HEIGHT, WIDTH, 3)
ROWS = pngs.filter_rows(PIXELS, pngs.mixed(HEIGHT))
RAW = ROWS.numpy().tobytes()
STREAM = zlib.compress(RAW)
HEAD, DATA, END = (b"IHDR", pngs.header(WIDTH, HEIGHT)), (b"IDAT", STREAM), (b"IEND", b"")


def is_plain(data: bytes) -> bool:
    return filtered_rows(data) is not None


def assert_pillows_pixels(data: bytes) -> None:
    picture = images.open_picture(data, filtered=True)
    assert isinstance(picture, FilteredRows)
    expected = images.decode(data)
    assert images.size_of(picture) == expected.shape[:2]
    assert torch.equal(images.pixels_of(picture), expected)


def with_head(**changes: int) -> bytes:
    return pngs.file((b"IHDR", pngs.header(WIDTH, HEIGHT, **changes)), DATA, END)


def with_raw(raw: bytes) -> bytes:
    return pngs.file(HEAD, (b"IDAT", zlib.compress(raw)), END)


def with_chunk(kind: bytes, body: bytes) -> bytes:
    return pngs.file(HEAD, (kind, body), DATA, END)


def text(keyword: str) -> bytes:
    return keyword.encode() + b"\x001"


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_the_plain_golden_files_are_taken(name: str) -> None:
    assert_pillows_pixels((VECTORS / "images" / name).read_bytes())


@pytest.mark.parametrize("name", sorted(set(CASES) - PLAIN))
def test_all_other_golden_files_are_pillows(name: str) -> None:
    """The same pixels or the same refusal as without the way over the GPU."""
    data = (VECTORS / "images" / name).read_bytes()
    try:
        expected = images.decode(data)
    except Refusal as refusal:
        with pytest.raises(Refusal) as found:
            images.open_picture(data, filtered=True)
        assert found.value.faults == refusal.faults
    else:
        picture = images.open_picture(data, filtered=True)
        assert isinstance(picture, torch.Tensor) and torch.equal(picture, expected)


def test_for_the_cpu_pillow_decodes_every_file() -> None:
    picture = images.open_picture(pngs.file(HEAD, DATA, END), filtered=False)
    assert isinstance(picture, torch.Tensor) and torch.equal(picture, PIXELS)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"compress_level": 0}, {"compress_level": 1}], ids=str)
def test_pillows_own_files_are_taken(mode: str, options: dict[str, object]) -> None:
    picture = Image.merge("RGB", [Image.radial_gradient("L"), Image.linear_gradient("L"), Image.radial_gradient("L")])
    picture = picture.resize((211, 97)).convert(mode)
    if mode == "RGBA":
        picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    out = io.BytesIO()
    picture.save(out, "PNG", dpi=(96, 96), **options)
    assert_pillows_pixels(out.getvalue())


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("level", [0, 1, 9])
def test_a_filter_a_row_by_chance(channels: int, level: int) -> None:
    assert_pillows_pixels(pngs.encode(pngs.noise(41, 27, channels), pngs.mixed(41), level=level))


@pytest.mark.parametrize(
    "sizes",
    [[1] * (len(STREAM) - 1), [0, 0, 1, 0, 2], [len(STREAM) - 3], [len(STREAM)], [len(STREAM) - 4, 0, 2, 0]],
    ids=["bytes", "empty ones", "a checksum cut in two", "an empty last one", "a checksum in pieces"],
)
def test_wherever_the_stream_is_cut(sizes: list[int]) -> None:
    assert_pillows_pixels(pngs.file(HEAD, *pngs.split(STREAM, sizes), END))


HARMLESS = {
    b"gAMA": bytes(4),
    b"cHRM": bytes(32),
    b"sRGB": b"\x00",
    b"pHYs": b"\x00\x00\x0b\x13\x00\x00\x0b\x13\x01",
    b"sBIT": b"\x08\x08\x08",
    b"bKGD": bytes(6),
    b"tIME": bytes(7),
    b"eXIf": b"MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00",
    b"iDOT": bytes(28),
    b"iCCP": b"profile\x00\x00" + zlib.compress(bytes(500)),
    b"tEXt": text("Software"),
    b"iTXt": b"XML:com.adobe.xmp\x00\x00\x00\x00\x00<x/>",
}


@pytest.mark.parametrize("kind", HARMLESS, ids=bytes.decode)
def test_what_changes_no_pixel_may_stand_before_and_behind_them(kind: bytes) -> None:
    assert_pillows_pixels(with_chunk(kind, HARMLESS[kind]))
    assert_pillows_pixels(pngs.file(HEAD, DATA, (kind, HARMLESS[kind]), END))


def test_all_of_them_together() -> None:
    assert_pillows_pixels(pngs.file(HEAD, *HARMLESS.items(), (b"tEXt", text("Comment")), DATA, END))


WHOLE = pngs.file(HEAD, DATA, END)
OTHERS: dict[str, Callable[[], bytes]] = {
    "palette": lambda: pngs.file((b"IHDR", pngs.header(WIDTH, HEIGHT, colour=3)), (b"PLTE", bytes(6)), DATA, END),
    "gray": lambda: with_head(colour=0),
    "gray and alpha": lambda: with_head(colour=4),
    "16 bits": lambda: with_head(depth=16),
    "an unknown colour type": lambda: with_head(colour=7),
    "interlaced": lambda: with_head(interlace=1),
    "an unknown compression": lambda: with_head(compression=1),
    "an unknown filter method": lambda: with_head(filter=1),
    "a transparent colour": lambda: with_chunk(b"tRNS", bytes(6)),
    "a palette to choose": lambda: with_chunk(b"PLTE", bytes(6)),
    "a frame": lambda: with_chunk(b"fcTL", bytes(26)),
    "an unknown critical chunk": lambda: with_chunk(b"ABCD", b""),
    "an unknown ancillary chunk": lambda: with_chunk(b"abCd", b""),
    "two headers": lambda: with_chunk(*HEAD),
    "a short gAMA": lambda: with_chunk(b"gAMA", bytes(3)),
    "two gAMA": lambda: pngs.file(HEAD, (b"gAMA", bytes(4)), (b"gAMA", bytes(4)), DATA, END),
    "compressed text": lambda: with_chunk(b"zTXt", b"Comment\x00\x00" + zlib.compress(b"x")),
    "compressed international text": lambda: with_chunk(b"iTXt", b"Comment\x00\x01\x00\x00\x00" + zlib.compress(b"x")),
    "international text without an end": lambda: with_chunk(b"iTXt", b"Comment"),
    # Pillow takes this text for the header's field, and reads the rows as interlaced.
    "a text called interlace": lambda: with_chunk(b"tEXt", text("interlace")),
    "a text called bbox": lambda: with_chunk(b"iTXt", b"bbox\x00\x00\x00\x00\x00x"),
    "a text called nothing": lambda: with_chunk(b"tEXt", b""),
    "a profile of another compression": lambda: with_chunk(b"iCCP", b"profile\x00\x01" + zlib.compress(b"x")),
    "a profile without a name": lambda: with_chunk(b"iCCP", b"\x00\x00" + zlib.compress(b"x")),
    "a profile that is broken": lambda: with_chunk(b"iCCP", b"profile\x00\x00xyz"),
    "a profile that is cut off": lambda: with_chunk(b"iCCP", b"profile\x00\x00" + zlib.compress(b"x")[:-1]),
    "a large profile": lambda: with_chunk(b"iCCP", b"profile\x00\x00" + zlib.compress(bytes(MAX_PROFILE_BYTES + 1))),
    "much text": lambda: with_chunk(b"tEXt", text("Comment") + bytes(MAX_ANCILLARY_BYTES)),
    "many chunks": lambda: pngs.file(HEAD, *[(b"IDAT", b"")] * MAX_CHUNKS, DATA, END),
    "pixels in two places": lambda: pngs.file(
        HEAD, (b"IDAT", STREAM[:9]), (b"tIME", bytes(7)), (b"IDAT", STREAM[9:]), END
    ),
    "no pixels": lambda: pngs.file(HEAD, END),
    "no end": lambda: pngs.file(HEAD, DATA),
    "an end that holds something": lambda: pngs.file(HEAD, DATA, (b"IEND", b"x")),
    "something behind the end": lambda: WHOLE + b"x",
    "an end that is cut off": lambda: WHOLE[:-1],
    "a bad CRC of the header": lambda: WHOLE[:29] + bytes(4) + WHOLE[33:],
    "a bad CRC of the pixels": lambda: WHOLE[:-16] + bytes(4) + WHOLE[-12:],
    "a bad CRC of the end": lambda: WHOLE[:-4] + bytes(4),
    "a length over the end": lambda: WHOLE[:-12] + b"\x7f" + WHOLE[-11:],
    "a stream that is cut off": lambda: pngs.file(HEAD, (b"IDAT", STREAM[:-9]), END),
    "a stream without its checksum": lambda: pngs.file(HEAD, (b"IDAT", STREAM[:-4]), END),
    "a stream with a wrong checksum": lambda: pngs.file(HEAD, (b"IDAT", STREAM[:-1] + b"\x00"), END),
    "something behind the stream": lambda: pngs.file(HEAD, (b"IDAT", STREAM + b"x"), END),
    "something behind the stream, apart": lambda: pngs.file(HEAD, DATA, (b"IDAT", b"x"), END),
    "a stream with a dictionary": lambda: pngs.file(HEAD, (b"IDAT", b"\x78\xbb" + bytes(4) + STREAM[2:]), END),
    "a bare deflate stream": lambda: pngs.file(HEAD, (b"IDAT", STREAM[2:-4]), END),
    "a gzip stream": lambda: pngs.file(HEAD, (b"IDAT", zlib.compress(RAW, wbits=31)), END),
    "an empty stream": lambda: with_raw(b""),
    "a row too few": lambda: with_raw(RAW[: -1 - 3 * WIDTH]),
    "a byte too few": lambda: with_raw(RAW[:-1]),
    "a byte too many": lambda: with_raw(RAW + b"\x00"),
    "a row too many": lambda: with_raw(RAW + bytes(1 + 3 * WIDTH)),
    "an unknown filter type in the first row": lambda: with_raw(b"\x05" + RAW[1:]),
    "an unknown filter type in the last row": lambda: with_raw(RAW[: -1 - 3 * WIDTH] + b"\xff" + RAW[-3 * WIDTH :]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_left_to_pillow(name: str) -> None:
    assert is_plain(WHOLE) and not is_plain(OTHERS[name]())


def test_a_text_can_give_pillow_an_order() -> None:
    """Why keywords are looked at: the same rows, which Pillow takes for interlaced ones and cannot read."""
    with pytest.raises(Refusal):
        images.decode(OTHERS["a text called interlace"]())
    assert torch.equal(images.decode(with_chunk(b"tEXt", text("Interlace"))), PIXELS)


def test_no_more_than_a_picture_is_inflated() -> None:
    """Bounded by time here, and in a process of its own by memory."""
    data = pngs.file(HEAD, (b"IDAT", zlib.compress(bytes(1 << 28), 9)), END)
    started_s = time.monotonic()
    assert not is_plain(data)
    assert time.monotonic() - started_s < 0.5
    bomb = hostile.detonate("256 MiB of pixels", data)
    assert bomb.passed, bomb


def test_the_largest_pictures_fit_into_the_gpus_buffer() -> None:
    for height in (images.MAX_SIDE_PIXELS, images.MAX_IMAGE_PIXELS // images.MAX_SIDE_PIXELS):
        width = images.MAX_IMAGE_PIXELS // height
        picture = images.open_picture(
            pngs.encode(torch.zeros(height, width, 4, dtype=torch.uint8), [0] * height), filtered=True
        )
        assert isinstance(picture, FilteredRows) and picture.rows.numel() <= MAX_PICTURE_BYTES


CHANGES: tuple[Callable[[random.Random, list[pngs.Chunk]], None], ...] = (
    lambda chance, chunks: chunks.insert(chance.randrange(len(chunks) + 1), chance.choice(list(HARMLESS.items()))),
    lambda chance, chunks: chunks.insert(chance.randrange(len(chunks) + 1), chance.choice(chunks)),
    lambda chance, chunks: chunks.pop(chance.randrange(len(chunks))) and None,
    lambda chance, chunks: _change_body(chance, chunks, 0),
    lambda chance, chunks: _change_body(chance, chunks, chance.randrange(len(chunks))),
    lambda chance, chunks: _cut_in_two(chance, chunks),
)


def _change_body(chance: random.Random, chunks: list[pngs.Chunk], at: int) -> None:
    kind, body = chunks[at]
    changed = bytearray(body)
    if changed:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    chunks[at] = kind, bytes(changed)


def _cut_in_two(chance: random.Random, chunks: list[pngs.Chunk]) -> None:
    at = chance.randrange(len(chunks))
    kind, body = chunks[at]
    cut = chance.randrange(len(body) + 1)
    chunks[at : at + 1] = [(kind, body[:cut]), (kind, body[cut:])]


def test_whatever_chunks_are_changed_a_yes_means_pillows_pixels() -> None:
    chance = random.Random(1)
    taken = 0
    for seed in range(1500):
        channels = chance.choice((3, 4))
        pixels = pngs.noise(chance.randrange(1, 6), chance.randrange(1, 6), channels, seed)
        stream = zlib.compress(pngs.filter_rows(pixels, pngs.mixed(len(pixels), seed)).numpy().tobytes())
        chunks = [(b"IHDR", pngs.header(pixels.shape[1], len(pixels), channels)), (b"IDAT", stream), END]
        for _ in range(chance.randrange(1, 4)):
            chance.choice(CHANGES)(chance, chunks)
        taken += _yes_means_pillows_pixels(pngs.file(*chunks))
    assert 100 < taken < 1000


def test_whatever_bytes_are_changed_a_yes_means_pillows_pixels() -> None:
    chance = random.Random(2)
    files = [pngs.encode(pngs.noise(7, 5, channels), pngs.mixed(7)) for channels in (3, 4)]
    for _ in range(1500):
        damaged = bytearray(chance.choice(files))
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        _yes_means_pillows_pixels(bytes(damaged))


def test_whatever_bits_of_the_stream_are_changed_a_yes_means_pillows_pixels() -> None:
    """With the checksum set right again, and the one exception that the next test shows."""
    chance = random.Random(3)
    pixels = pngs.noise(12, 12, 3) % 5
    raw = pngs.filter_rows(pixels, [chance.choice((0, 1, 2)) for _ in range(12)]).numpy().tobytes()
    streams = [zlib.compress(raw, level)[2:-4] for level in (1, 6, 9)]
    taken = 0
    for _ in range(4000):
        damaged = bytearray(chance.choice(streams))
        damaged[min(int(chance.expovariate(1 / 20)), len(damaged) - 1)] ^= 1 << chance.randrange(8)
        with suppress(isal_zlib.IsalError):  # type: ignore[arg-type]
            inflated = isal_zlib.decompressobj(-15).decompress(bytes(damaged), len(raw) + 1)
            stream = zlib_stream(bytes(damaged), inflated)
            try:
                taken += _yes_means_pillows_pixels(pngs.file((b"IHDR", pngs.header(12, 12)), (b"IDAT", stream), END))
            except Refusal:
                with pytest.raises(zlib.error, match=r"invalid (distances|literal/lengths) set"):
                    zlib.decompress(stream)
    assert taken > 300


def zlib_stream(deflated: bytes, inflated: bytes) -> bytes:
    return b"\x78\x9c" + deflated + zlib.adler32(inflated).to_bytes(4, "big")


def test_a_huffman_code_with_unused_words_is_refused_by_pillow_alone() -> None:
    """What ISA-L allows and zlib does not; no encoder writes it, and its pixels are what it says."""
    deflated, inflated = bytes.fromhex("05c101010000008220ecffe8a2f2"), b"\x01\x01\x01\x00"
    stream = zlib_stream(deflated, inflated)
    with pytest.raises(zlib.error, match="invalid distances set"):
        zlib.decompress(stream)
    rows = filtered_rows(pngs.file((b"IHDR", pngs.header(1, 1)), (b"IDAT", stream), END))
    assert rows is not None and images.pixels_of(rows).flatten().tolist() == [1, 1, 0]


def _yes_means_pillows_pixels(data: bytes) -> bool:
    if images.check_image(data):
        return False
    rows = filtered_rows(data)
    if rows is not None:
        assert torch.equal(images.pixels_of(rows), images.decode(data))
    return rows is not None
