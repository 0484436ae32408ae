"""Plain PNGs as far as a CPU should take them: chunks checked, zlib stream inflated, filters left for the GPU to undo.

What a picture's pixels are is said by Pillow, the contract's decoder. This reader says yes only to files for which its
answer, once `kernels.unfilter` has undone the filters, is Pillow's to the bit; to anything unusual or broken it says
nothing, and Pillow decodes the file or refuses it. Two things make it worth having: ISA-L inflates several times
faster than zlib does, and filters are most of what is left.

One thing only is taken here that Pillow refuses: a stream, whole and with a valid checksum, in which a Huffman code has
words that stand for nothing. ISA-L reads it, zlib does not, and no encoder writes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from isal import isal_zlib

from kernels.unfilter import PAETH

SIGNATURE_BYTES = 8
# More of either is no screenshot as a browser or a system writes it; Pillow decides.
MAX_CHUNKS = 4096
MAX_ANCILLARY_BYTES = 1 << 20
# Pillow inflates a colour profile, to throw it away, and refuses one of more than 1 MiB.
MAX_PROFILE_BYTES = 1 << 16

# Bytes a pixel, by bit depth and colour type, of what is taken: RGB and RGBA of 8 bits.
_CHANNELS = {(8, 2): 3, (8, 6): 4}
# Ancillary chunks that change no pixel. Those of a fixed length Pillow refuses when they are shorter.
_LENGTHS = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9}
_OF_ANY_LENGTH = frozenset({b"sBIT", b"bKGD", b"tIME", b"eXIf", b"iDOT"})
_TEXTS = frozenset({b"tEXt", b"iTXt"})


@dataclass(frozen=True)
class FilteredRows:
    """A PNG's scanlines with their filters.

    `rows` is `uint8 [height, 1 + width * channels]`: a row's filter type, then its filtered bytes.
    `channels` is 3 (RGB) or 4 (RGBA).
    """

    rows: torch.Tensor
    channels: int

    def to(self, device: torch.device | str) -> FilteredRows:
        """The same scanlines on another device."""
        return FilteredRows(self.rows.to(device), self.channels)


def filtered_rows(data: bytes) -> FilteredRows | None:
    """A plain PNG's scanlines, or None where Pillow has to decide.

    Taken are: 8-bit RGB and RGBA without interlacing or tRNS; every chunk whole, with a valid CRC, of a kind that
    changes no pixel; IDAT chunks in one run; nothing behind IEND; a zlib stream with a valid checksum and nothing
    behind it that gives exactly the picture's bytes; filter types 0 to 4. Never more than one byte over the picture's
    size is inflated.

    Args:
        data: a PNG file's bytes, in which `engine.image.check_image` found no fault.

    Source: PNG specification (third edition, W3C 2025), sections 5, 9 and 11.
    """
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data[26:29] != b"\x00\x00\x00":  # compression and filter method, interlacing
        return None
    channels = _CHANNELS.get((data[24], data[25]))
    stream = _zlib_stream(data)
    if channels is None or stream is None:
        return None
    stride = 1 + width * channels
    inflater = isal_zlib.decompressobj()
    try:
        scanlines = inflater.decompress(stream, height * stride + 1)
    except isal_zlib.IsalError:  # type: ignore[misc]  # its stubs take the class for an instance
        return None
    if not inflater.eof or inflater.unused_data or len(scanlines) != height * stride:
        return None
    if max(scanlines[::stride]) > PAETH:
        return None
    # Copied, because a tensor may not lie over bytes; that takes a tenth of what inflating does.
    rows = torch.frombuffer(bytearray(scanlines), dtype=torch.uint8)
    return FilteredRows(rows.view(height, stride), channels)


def _zlib_stream(data: bytes) -> bytes | None:
    """The IDAT chunks' bytes, if the file is whole and none of its chunks is unusual."""
    parts: list[memoryview] = []
    past: set[bytes] = set()
    ancillary_bytes = 0
    before = b""
    for kind, body in _chunks(data):
        if kind == b"IDAT":
            if parts and before != b"IDAT":
                return None
            parts.append(body)
        elif kind == b"IEND":
            return None if body else b"".join(parts)
        elif before:
            ancillary_bytes += len(body)
            repeated = kind in past and kind not in _TEXTS
            if repeated or ancillary_bytes > MAX_ANCILLARY_BYTES or not _changes_nothing(kind, bytes(body)):
                return None
            past.add(kind)
        elif kind != b"IHDR":
            return None
        before = kind
    return None


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Every chunk's name and data; it ends early, without IEND, at a chunk that is broken or when they are too many."""
    view = memoryview(data)
    at = SIGNATURE_BYTES
    for _ in range(MAX_CHUNKS):
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        if end > len(data) or isal_zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return
        kind = bytes(view[at + 4 : at + 8])
        if kind == b"IEND" and end != len(data):
            return
        yield kind, view[at + 8 : end - 4]
        at = end


def _changes_nothing(kind: bytes, body: bytes) -> bool:
    """Whether Pillow reads this chunk without a fault, and gives the same pixels as without it."""
    if kind in _LENGTHS:
        return len(body) == _LENGTHS[kind]
    if kind in _TEXTS:
        # Pillow puts texts beside what it knows of the file, by their keywords: one called "interlace" is an order to
        # it. Its own names are all in small letters.
        keyword, _, rest = body.partition(b"\x00")
        return keyword[:1].isupper() and (kind == b"tEXt" or (len(rest) >= 2 and rest[0] == 0))
    return kind in _OF_ANY_LENGTH or (kind == b"iCCP" and _is_small_profile(body))


def _is_small_profile(body: bytes) -> bool:
    name, _, rest = body.partition(b"\x00")
    if not name or rest[:1] != b"\x00":
        return False
    inflater = zlib.decompressobj()
    try:
        inflater.decompress(rest[1:], MAX_PROFILE_BYTES)
    except zlib.error:
        return False
    return inflater.eof
