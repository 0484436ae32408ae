"""A screenshot from its file's bytes: what is read from the header before decoding, the decoding, the resize.

Everything here is the contract's section 2. Pixels leave as `uint8`; normalising and packing into patches is
`kernels.patches`. It knows no prompt and no model. What a file's pixels are, and whether it has any, Pillow says;
`engine.png` goes half of the way for it where a GPU can go the other half.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import NamedTuple

import torch
from PIL import Image

from engine.errors import Fault, Refusal
from engine.png import FilteredRows, filtered_rows
from kernels.resize import resize_bicubic
from kernels.unfilter import unfilter

# `uint8 [height, width, 3]`, or what becomes that on a GPU.
Picture = torch.Tensor | FilteredRows

MAX_SIDE_PIXELS = 2048
MAX_IMAGE_PIXELS = 1_048_576
MAX_ASPECT_RATIO = 200
# A resized side is a multiple of this: a patch of 16, merged 2 x 2.
SIDE_MULTIPLE_PIXELS = 32
MIN_RESIZED_PIXELS = 65_536
MAX_RESIZED_PIXELS = 16_777_216

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_SIGNATURE = b"\xff\xd8\xff"
# A camera's JPEG has some tens of header segments; the bound keeps a hostile file from being walked for long.
MAX_JPEG_SEGMENTS = 4096
MAX_PNG_CHUNKS = 65_536

PLACE = "state.image"
_SOF_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MARKERS_WITHOUT_LENGTH = frozenset(range(0xD0, 0xD9)) | {0x01}
_START_OF_SCAN, _END_OF_IMAGE, _APP2 = 0xDA, 0xD9, 0xE2


class Header(NamedTuple):
    """What the first bytes say: `media_type` (`image/png` or `image/jpeg`) and the size in pixels."""

    media_type: str
    width: int
    height: int


def check_image(data: bytes, media_type: str | None = None) -> tuple[Fault, ...]:
    """Every fault that the header of an image file shows; empty when it may be decoded.

    Args:
        data: the file's bytes.
        media_type: the label of the data URL it came in (`image/png`), or None for plain bytes.
    """
    try:
        return _examined(data, media_type)[1]
    except Refusal as refusal:
        return refusal.faults


def open_picture(data: bytes, media_type: str | None = None, *, filtered: bool) -> Picture:
    """The picture in a PNG or JPEG, on the CPU, decoded or nearly.

    Args:
        data: the file's bytes.
        media_type: the label of the data URL it came in, or None for plain bytes.
        filtered: leave a plain PNG's filters to `pixels_of`, which is for pictures that go to a GPU.

    Raises:
        Refusal: as `decode`, for the same files.
    """
    header = _checked(data, media_type)
    if filtered and header.media_type == "image/png":
        rows = filtered_rows(data)
        if rows is not None:
            return rows
    return _decode(data, header)


def decode(data: bytes, media_type: str | None = None) -> torch.Tensor:
    """The RGB pixels of a PNG or JPEG, as Pillow's `convert("RGB")` gives them.

    Returns:
        `uint8 [height, width, 3]`, on the CPU.

    Raises:
        Refusal: `unsupported_format`, `animated`, `multi_picture`, `image_too_large`, `aspect_ratio`, `mime_mismatch`
            (all from the header, before any decoding) or `decode_failed`.
    """
    return _decode(data, _checked(data, media_type))


def size_of(picture: Picture) -> tuple[int, int]:
    """A picture's `(height, width)` in pixels."""
    if isinstance(picture, FilteredRows):
        height, stride = picture.rows.shape
        return height, (stride - 1) // picture.channels
    return picture.shape[0], picture.shape[1]


def pixels_of(picture: Picture) -> torch.Tensor:
    """A picture's pixels on its device, `uint8 [height, width, 3]`: the same as `decode` gives."""
    return unfilter(picture.rows, picture.channels) if isinstance(picture, FilteredRows) else picture


def resized_size(height: int, width: int) -> tuple[int, int]:
    """The `(height, width)` in pixels that an image is resized to: multiples of 32, at least 65,536 pixels in all."""
    unit = SIDE_MULTIPLE_PIXELS
    rounded = round(height / unit) * unit, round(width / unit) * unit  # Python rounds half to even, as upstream does
    if rounded[0] * rounded[1] > MAX_RESIZED_PIXELS:
        scale = math.sqrt(height * width / MAX_RESIZED_PIXELS)
        return max(unit, math.floor(height / scale / unit) * unit), max(unit, math.floor(width / scale / unit) * unit)
    if rounded[0] * rounded[1] < MIN_RESIZED_PIXELS:
        scale = math.sqrt(MIN_RESIZED_PIXELS / (height * width))
        return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return rounded


def resize(pixels: torch.Tensor) -> torch.Tensor:
    """`uint8 [H, W, 3]` in the size `resized_size`, on its device: bicubic with antialias, the reference's bits."""
    return resize_bicubic(pixels, *resized_size(*pixels.shape[:2]))


def read_header(data: bytes) -> Header:
    """The format and size of an image file, without decoding it.

    Raises:
        Refusal: `unsupported_format`, `animated` (a PNG with an `acTL` chunk), `multi_picture` (a JPEG with an APP2
            `MPF` segment) or `decode_failed` (no size to be found).
    """
    if data.startswith(PNG_SIGNATURE):
        return Header("image/png", *_png_size(data))
    if data.startswith(JPEG_SIGNATURE):
        return Header("image/jpeg", *_jpeg_size(data))
    raise _refuse("the image is neither PNG nor JPEG by its first bytes; send one of these", "unsupported_format")


def _examined(data: bytes, media_type: str | None) -> tuple[Header, tuple[Fault, ...]]:
    """The header, and what is wrong with what it says. Raises `Refusal` as `read_header`."""
    header = read_header(data)
    faults = _size_faults(header.width, header.height)
    if media_type is not None and media_type != header.media_type:
        message = f"the data URL is labelled {media_type} but holds {header.media_type}; label it {header.media_type}"
        faults.append(Fault(PLACE, message, "mime_mismatch"))
    return header, tuple(faults)


def _checked(data: bytes, media_type: str | None) -> Header:
    header, faults = _examined(data, media_type)
    if faults:
        raise Refusal(faults)
    return header


def _decode(data: bytes, header: Header) -> torch.Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=[header.media_type.removeprefix("image/").upper()]) as picture:
                rgb = picture.convert("RGB")
    except Exception as error:
        # Pillow raises whatever its plugins meet (OSError, SyntaxError, ValueError, struct.error ...).
        raise _refuse(f"the image data is truncated or corrupt ({type(error).__name__}); encode it again") from error
    if rgb.size != (header.width, header.height):
        raise _refuse(
            f"the header says {header.width}x{header.height} but the data decodes to {rgb.width}x{rgb.height}"
        )
    return torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8).view(rgb.height, rgb.width, 3)


def _size_faults(width: int, height: int) -> list[Fault]:
    found: list[tuple[str, str]] = []
    if max(width, height) > MAX_SIDE_PIXELS:
        found.append((f"at most {MAX_SIDE_PIXELS:,} pixels a side are allowed", "image_too_large"))
    if width * height > MAX_IMAGE_PIXELS:
        found.append((f"at most {MAX_IMAGE_PIXELS:,} pixels in all are allowed", "image_too_large"))
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        found.append((f"one side may be at most {MAX_ASPECT_RATIO} times the other", "aspect_ratio"))
    advice = {"image_too_large": "scale it down", "aspect_ratio": "crop it"}
    return [
        Fault(PLACE, f"the image is {width}x{height}; {limit}: {advice[code]} before sending", code)
        for limit, code in found
    ]


def _png_size(data: bytes) -> tuple[int, int]:
    if data[8:16] != b"\x00\x00\x00\rIHDR" or len(data) < 24:
        raise _refuse("the PNG does not begin with an IHDR chunk of 13 bytes; encode it again")
    if any(kind == b"acTL" for kind in _png_chunks(data)):
        raise _refuse("the PNG holds an acTL chunk (an animation); send a still picture", "animated")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if width == 0 or height == 0:
        raise _refuse(f"the PNG's header says {width}x{height}; both sides must be at least 1")
    return width, height


def _png_chunks(data: bytes) -> list[bytes]:
    """The chunk names, in order, as far as the chunks' lengths lead inside the file."""
    kinds: list[bytes] = []
    at = len(PNG_SIGNATURE)
    while at + 8 <= len(data) and len(kinds) <= MAX_PNG_CHUNKS:
        kinds.append(data[at + 4 : at + 8])
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    if len(kinds) > MAX_PNG_CHUNKS:
        raise _refuse(f"the PNG has more than {MAX_PNG_CHUNKS:,} chunks; encode it again")
    return kinds


def _jpeg_size(data: bytes) -> tuple[int, int]:
    size: tuple[int, int] | None = None
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[at : at + 2] == b"\xff\xff":  # a fill byte before a marker counts as a step
            at += 1
            continue
        if at + 4 > len(data) or data[at] != 0xFF:
            raise _refuse("the JPEG's header ends before its image data begins; encode it again")
        marker = data[at + 1]
        if marker in _MARKERS_WITHOUT_LENGTH:
            at += 2
            continue
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            break
        body = at + 4
        if marker == _APP2 and data[body : body + 4] == b"MPF\x00":
            raise _refuse("the JPEG holds several pictures (an MPF segment); send a single one", "multi_picture")
        if marker in _SOF_MARKERS and size is None:
            size = int.from_bytes(data[body + 3 : body + 5], "big"), int.from_bytes(data[body + 1 : body + 3], "big")
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    else:
        raise _refuse(f"the JPEG has more than {MAX_JPEG_SEGMENTS:,} header segments; encode it again")
    if size is None or 0 in size:
        raise _refuse("the JPEG's header names no size; encode it again")
    return size


def _refuse(message: str, code: str = "decode_failed") -> Refusal:
    return Refusal((Fault(PLACE, message, code),))
