"""A caller's picture: as the bytes of a file, its size held to the contract (section 2), and shrunk to fit it.

What is inside a file beyond its size, the engine judges. Nothing here knows a queue.
"""

from __future__ import annotations

import binascii
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeAlias

from PIL import Image

from producer.errors import Code, Fault, RequestRefused
from producer.limits import MAX_ASPECT_RATIO, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_SIDE_PIXELS

ImageInput: TypeAlias = bytes | bytearray | memoryview | str | PathLike[str] | Image.Image

PLACE = "state.image"
# PNG encoding of an image given as pixels: level 1 is several times quicker than 6 for a few percent of size.
PNG_COMPRESS_LEVEL = 1
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_CONTRACT_FORMATS = ("PNG", "JPEG")
# What `fit_screenshot` reads besides; Pillow's other plug-ins stay shut.
_SHRINKABLE_FORMATS = (*_CONTRACT_FORMATS, "BMP", "WEBP")
_SENT_AS_THEY_ARE = frozenset({"image/png", "image/jpeg"})  # an animation or a multi-picture file has another type


class Fitted(NamedTuple):
    """A screenshot that keeps the contract's limits.

    `data`: the PNG or JPEG file's bytes. `scale`: pixels of `data`'s picture a pixel of the original, at most 1.0;
    `original_point` maps a point back.
    """

    data: bytes
    scale: float


def fit_screenshot(image: ImageInput, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Fitted:
    """Shrink a screenshot to the contract's limits: 2048 pixels a side, `max_pixels` in all, 4 MiB as a file.

    The proportions stay (Lanczos). A PNG or JPEG file within the limits comes back as the same bytes with scale 1.0;
    anything else as an RGB PNG.

    Args:
        image: as for `Client.submit`; a BMP or WebP file is read, too.
        max_pixels: 1 to 1,048,576. Fewer pixels make fewer tokens, and a quicker answer.

    Raises:
        RequestRefused: the picture cannot be decoded, or one side is over 200 times the other (shrinking cannot mend
            that: crop it).
        ValueError: `max_pixels` is out of range.
        OSError: the file cannot be read.
    """
    if not 1 <= max_pixels <= MAX_IMAGE_PIXELS:
        raise ValueError(f"max_pixels is {max_pixels}; 1 to {MAX_IMAGE_PIXELS:,} are allowed")
    if isinstance(image, Image.Image):
        return _fitted(image, max_pixels)
    file = file_of(image)
    with _undecodable_is_refused(), Image.open(io.BytesIO(_bytes_of(file)), formats=_SHRINKABLE_FORMATS) as picture:
        media_type = picture.get_format_mimetype()
        return _fitted(picture, max_pixels, _bytes_of(file) if media_type in _SENT_AS_THEY_ARE else None)


def original_point(x: float, y: float, scale: float) -> tuple[float, float]:
    """A point of the shrunk picture, in pixels of the original: `x / scale, y / scale`.

    Sides are whole pixels, so this is exact to one pixel of the shrunk picture.
    """
    return x / scale, y / scale


def file_of(image: ImageInput) -> bytes | str:
    """The image as a file's bytes, or as the data URL it is; a PIL image becomes a PNG.

    Raises:
        OSError: the file cannot be read.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Image.Image):
        return _png(image if image.mode in _PNG_MODES else image.convert("RGB"))
    if isinstance(image, str) and image.startswith("data:"):
        return image
    return Path(image).read_bytes()


def file_faults(file: bytes | str) -> tuple[Fault, ...]:
    """What the size of a PNG or JPEG file breaks of the contract; nothing where no size can be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(_bytes_of(file)), formats=_CONTRACT_FORMATS) as picture:
                width, height = picture.size
    except Image.DecompressionBombError as error:
        return (Fault(PLACE, f"the picture is far too large ({error}); {_WAY_OUT}", Code.IMAGE_TOO_LARGE),)
    except Exception:
        return ()  # Pillow raises whatever its plug-ins meet; what is wrong with the file is the engine's to say
    return tuple(size_faults(width, height))


_WAY_OUT = "shrink it first with producer.fit_screenshot(image), or with --fit in a shell"


def size_faults(width: int, height: int) -> Iterator[Fault]:
    """What a size in pixels breaks of the contract."""
    found = f"the screenshot is {width:,} x {height:,}"
    if max(width, height) > MAX_SIDE_PIXELS:
        sentence = f"{found}; at most {MAX_SIDE_PIXELS:,} pixels a side are allowed: {_WAY_OUT}"
        yield Fault(PLACE, sentence, Code.IMAGE_TOO_LARGE)
    if width * height > MAX_IMAGE_PIXELS:
        sentence = f"{found}; at most {MAX_IMAGE_PIXELS:,} pixels in all are allowed: {_WAY_OUT}"
        yield Fault(PLACE, sentence, Code.IMAGE_TOO_LARGE)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        sentence = f"{found}; one side may be at most {MAX_ASPECT_RATIO} times the other: crop it"
        yield Fault(PLACE, sentence, Code.ASPECT_RATIO)


def _fitting_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest size within the limits, in whole pixels."""
    ratio = min(1.0, MAX_SIDE_PIXELS / max(width, height), math.sqrt(max_pixels / (width * height)))
    if ratio == 1.0:
        return width, height
    long, short = max(1, int(max(width, height) * ratio)), int(min(width, height) * ratio)
    short = max(short, math.ceil(long / MAX_ASPECT_RATIO))  # rounding a thin side down would break the aspect
    long = min(long, max_pixels // short)
    return (long, short) if width >= height else (short, long)


def _fitted(picture: Image.Image, max_pixels: int, file: bytes | None = None) -> Fitted:
    """`file`: what the picture was read from, if that is a file to be sent as it is."""
    if faults := [fault for fault in size_faults(*picture.size) if fault.code == Code.ASPECT_RATIO]:
        raise RequestRefused(faults)
    size = _fitting_size(*picture.size, max_pixels)
    if size == picture.size and file is not None and len(file) <= MAX_IMAGE_BYTES:
        return Fitted(file, 1.0)
    rgb = picture.convert("RGB")  # as the engine reads it; a file of RGB pixels within the limits is under 4 MiB
    if size != picture.size:
        rgb = rgb.resize(size, Image.Resampling.LANCZOS)
    return Fitted(_png(rgb), max(size) / max(picture.size))


@contextmanager
def _undecodable_is_refused() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except RequestRefused:
        raise
    except Exception as error:  # Pillow raises whatever its plug-ins meet
        sentence = f"the image cannot be decoded ({type(error).__name__}); send a whole PNG or JPEG file"
        raise RequestRefused([Fault(PLACE, sentence, Code.DECODE_FAILED)]) from error


def _bytes_of(file: bytes | str) -> bytes:
    return file if isinstance(file, bytes) else binascii.a2b_base64(file.partition(",")[2])


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=PNG_COMPRESS_LEVEL, icc_profile=None)
    return buffer.getvalue()
