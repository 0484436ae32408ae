"""PNG files put together by hand: any filters, any chunks, whole or broken."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

import torch

Tensor = torch.Tensor
Chunk = tuple[bytes, bytes]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {3: 2, 4: 6}
# Heights and widths: one pixel, one line, and around the GPU's 32 rows a band and 8 steps a word.
SIZES = ((1, 1), (1, 40), (40, 1), (31, 9), (32, 10), (33, 8), (70, 33))


def noise(height: int, width: int, channels: int, seed: int = 0) -> Tensor:
    """Random pixels, `uint8 [height, width, channels]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, channels), dtype=torch.uint8, generator=generator)


def mixed(height: int, seed: int = 0) -> list[int]:
    """A random filter type for each row."""
    return torch.randint(0, 5, (height,), generator=torch.Generator().manual_seed(seed)).tolist()


def filter_rows(pixels: Tensor, kinds: Sequence[int]) -> Tensor:
    """Scanlines `uint8 [H, 1 + W * channels]` of `pixels`, each filtered by its type: the encoder's side, exact.

    Source: PNG specification (third edition, W3C 2025), section 9.
    """
    height, width, channels = pixels.shape
    padded = torch.zeros(height + 1, width + 1, channels, dtype=torch.int32)
    padded[1:, 1:] = pixels
    x, left, above, corner = padded[1:, 1:], padded[1:, :-1], padded[:-1, 1:], padded[:-1, :-1]
    candidates = torch.stack([left, above, corner])
    distances = (left + above - corner - candidates).abs()
    nearest = candidates.gather(0, distances.argmin(0, keepdim=True))[0]
    average = torch.div(left + above, 2, rounding_mode="floor")
    predictions = torch.stack([torch.zeros_like(x), left, above, average, nearest])
    filtered = (x - predictions[torch.tensor(kinds), torch.arange(height)]) % 256
    types = torch.tensor(kinds, dtype=torch.uint8)[:, None]
    return torch.cat([types, filtered.to(torch.uint8).reshape(height, width * channels)], dim=1)


def header(width: int, height: int, channels: int = 3, **changes: int) -> bytes:
    """An IHDR chunk's data; `changes` names fields to set: depth, colour, compression, filter, interlace."""
    fields = {"depth": 8, "colour": COLOUR_TYPES[channels], "compression": 0, "filter": 0, "interlace": 0} | changes
    return struct.pack(">II5B", width, height, *fields.values())


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk with its length and CRC."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def file(*chunks: Chunk) -> bytes:
    """A file of these chunks."""
    return SIGNATURE + b"".join(chunk(kind, body) for kind, body in chunks)


def split(stream: bytes, sizes: Iterable[int]) -> list[Chunk]:
    """IDAT chunks of these sizes, and one with the rest."""
    chunks: list[Chunk] = []
    for size in sizes:
        chunks.append((b"IDAT", stream[:size]))
        stream = stream[size:]
    return [*chunks, (b"IDAT", stream)]


def encode(pixels: Tensor, kinds: Sequence[int], *ancillary: Chunk, level: int = 6) -> bytes:
    """A plain file of `pixels` `uint8 [H, W, 3 or 4]`, with these chunks between header and pixels."""
    height, width, channels = pixels.shape
    stream = zlib.compress(filter_rows(pixels, kinds).numpy().tobytes(), level)
    head = (b"IHDR", header(width, height, channels))
    return file(head, *ancillary, (b"IDAT", stream), (b"IEND", b""))
