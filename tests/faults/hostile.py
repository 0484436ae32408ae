"""Hostile input in bulk: payloads that differ from a valid one somewhere, picture files that unpack to much more."""

from __future__ import annotations

import copy
import io
import multiprocessing
import random
import resource
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgpack
from PIL import Image

from producer.contract import parse_request
from producer.errors import Code, RequestRefused
from tests import pngs
from tests.producer.jobs import job

ALLOWED_CODES = frozenset(str(code) for code in Code)
MAX_BOMB_S, MAX_BOMB_MIB = 5.0, 256
_SCALARS: tuple[Callable[[random.Random], Any], ...] = (
    lambda random: None,
    lambda random: random.choice([True, False, 0, -1, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf")]),
    lambda random: random.randbytes(random.randrange(40)),
    lambda random: "".join(chr(random.randrange(1, 0xD7FF)) for _ in range(random.randrange(12))),
    lambda random: random.choice(["", "<|image_pad|>", "data:image/png;base64,AAAA", "choice", "score", "x" * 300]),
    lambda random: msgpack.ExtType(random.randrange(128), b"x"),
    lambda random: [],
    lambda random: {},
)


def payloads(count: int, seed: int) -> Iterator[bytes]:
    """A valid job's bytes, changed: values, keys and places in the map, then sometimes the bytes themselves."""
    chance = random.Random(seed)
    for _ in range(count):
        value: Any = copy.deepcopy(job())
        for _ in range(chance.randrange(4)):
            _change(value, chance)
        data = bytearray(msgpack.packb(value, unicode_errors="surrogatepass"))
        if chance.random() < 0.4:
            for _ in range(chance.randrange(1, 5)):
                at = chance.randrange(len(data) + 1)
                data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        if chance.random() < 0.1:
            del data[chance.randrange(len(data) + 1) :]
        yield bytes(data)


def judge(data: bytes) -> str:
    """`valid`, or the refusal's first code; anything else than these two is the caller's exception."""
    try:
        parse_request(data)
    except RequestRefused as refusal:
        codes = {str(fault.code) for fault in refusal.errors}
        assert codes and codes <= ALLOWED_CODES, codes
        assert all(fault.loc and fault.msg for fault in refusal.errors)
        return str(refusal.errors[0].code)
    return "valid"


def fuzz(count: int, seed: int) -> Counter[str]:
    """How often each verdict came."""
    return Counter(map(judge, payloads(count, seed)))


def _change(value: Any, chance: random.Random) -> None:
    """One change at a random place."""
    while isinstance(value, dict | list) and value:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
            value = inner
            continue
        match chance.randrange(4):
            case 0 if isinstance(value, dict):
                value[chance.choice(["", "x", "image", "type", 7, b"k"])] = chance.choice(_SCALARS)(chance)
            case 1:
                del value[key]
            case 2:
                nested: Any = chance.choice(_SCALARS)(chance)
                for _ in range(chance.choice([1, 3, 130])):
                    nested = [nested]
                value[key] = nested
            case _:
                value[key] = chance.choice(_SCALARS)(chance)
        return


class Bomb(NamedTuple):
    """What came of a picture file: its size, its verdict, and what looking at it took."""

    name: str
    file_bytes: int
    verdict: str
    seconds: float
    more_mib: float

    @property
    def passed(self) -> bool:
        """Bounded in time and memory, whatever the verdict."""
        return self.seconds <= MAX_BOMB_S and self.more_mib <= MAX_BOMB_MIB


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small files that claim or hold much."""
    zeros = zlib.compress(bytes(2**20) * 256, 9)
    small, header = (64, 64), struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    yield "PNG, 256 MiB of pixels behind a header of 64 x 64", png(header, (b"IDAT", zeros))
    yield "PNG, header of 2,147,483,647 a side", png(struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0))
    yield "PNG, iCCP profile of 256 MiB", png(header, (b"iCCP", b"p\0\0" + zeros), (b"IDAT", pixels(*small)))
    yield "PNG, zTXt of 256 MiB", png(header, (b"zTXt", b"k\0\0" + zeros), (b"IDAT", pixels(*small)))
    yield "PNG, iTXt of 256 MiB", png(header, (b"iTXt", b"k\0\1\0\0\0" + zeros), (b"IDAT", pixels(*small)))
    yield "PNG, 300,000 empty chunks", png(header, *[(b"tEXt", b"")] * 300_000, (b"IDAT", pixels(*small)))
    yield (
        "PNG, 1,000 x 1,000 of 16 bits, interlaced",
        png(struct.pack(">IIBBBBB", 1000, 1000, 16, 6, 0, 0, 1), (b"IDAT", zlib.compress(bytes(8_200_000), 9))),
    )
    yield "JPEG, 60,000 empty segments", b"\xff\xd8" + b"\xff\xe1\x00\x02" * 60_000 + b"\xff\xd9"
    yield "JPEG, 1,024 x 1,024, progressive, its scans 24 times", repeated_scans(24)


def png(header: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    return pngs.file((b"IHDR", header), *chunks, (b"IEND", b""))


def pixels(width: int, height: int) -> bytes:
    return zlib.compress(bytes((3 * width + 1) * height))


def repeated_scans(times: int) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((1024, 1024), 50).convert("RGB").save(buffer, "JPEG", progressive=True, quality=20)
    data = buffer.getvalue()
    first = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    return data[:first] + data[first:-2] * times + b"\xff\xd9"


def detonate(name: str, data: bytes) -> Bomb:
    """Look at a file in a process of its own, as a worker does, and measure that."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=_look, args=(data, there), daemon=True)
    process.start()
    there.close()
    try:
        verdict, seconds, more_mib = here.recv() if here.poll(60) else ("no end within 60 s", 60.0, 0.0)
    except EOFError:
        verdict, seconds, more_mib = "the process died", float("inf"), float("inf")
    process.kill()
    process.join()
    return Bomb(name, len(data), verdict, seconds, more_mib)


def _look(data: bytes, reply: Connection) -> None:
    from engine.errors import Refusal
    from engine.image import open_picture, pixels_of

    before_kib, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        pixels_of(open_picture(data, filtered=True))
        verdict = "decoded"
    except Refusal as refusal:
        verdict = refusal.faults[0][2]
    seconds = time.monotonic() - started_s
    more_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    reply.send((str(verdict), seconds, more_kib / 1024))
