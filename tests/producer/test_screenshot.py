"""Screenshots of any size: what is refused before it is sent, and what shrinking keeps."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from engine import image as engine_image
from producer import RequestRefused, fit_screenshot, limits, original_point
from producer.protocol import payload_of

QUESTIONS = {"q": {"instructions": "Save", "criteria": {"a": None}}}


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format=kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (240, 240, 240))


def test_the_limits_are_the_engines() -> None:
    for name in ("MAX_SIDE_PIXELS", "MAX_IMAGE_PIXELS", "MAX_ASPECT_RATIO"):
        assert getattr(limits, name) == getattr(engine_image, name)


@pytest.mark.parametrize(
    ("size", "codes"),
    [
        ((1024, 1024), set()),
        ((1025, 1024), {"image_too_large"}),
        ((2049, 16), {"image_too_large"}),
        ((200, 1), set()),
        ((201, 1), {"aspect_ratio"}),
        ((2880, 1800), {"image_too_large"}),
    ],
)
@pytest.mark.parametrize("form", ["png", "jpeg", "path", "pixels", "data url"])
def test_a_screen_over_the_limits_is_refused_with_the_way_out(
    size: tuple[int, int], codes: set[str], form: str, tmp_path: Path
) -> None:
    picture, file = blank(*size), tmp_path / "shot.png"
    if form == "path":
        picture.save(file)
    made = {
        "png": lambda: encoded(picture),
        "jpeg": lambda: encoded(picture, "JPEG"),
        "path": lambda: file,
        "pixels": lambda: picture,
        "data url": lambda: _data_url(encoded(picture)),
    }[form]()
    if not codes:
        assert payload_of(made, QUESTIONS)
        return
    with pytest.raises(RequestRefused) as refusal:
        payload_of(made, QUESTIONS)
    assert {fault.code for fault in refusal.value.errors} == codes
    assert {fault.loc for fault in refusal.value.errors} == {"state.image"}
    assert ("fit_screenshot" in str(refusal.value)) == ("image_too_large" in codes)
    assert f"{size[0]:,} x {size[1]:,}" in str(refusal.value)


def _data_url(png: bytes) -> str:
    import base64

    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def test_a_large_screen_does_not_hide_the_other_faults() -> None:
    with pytest.raises(RequestRefused) as refusal:
        payload_of(blank(2000, 1000), {"q": {"instructions": 1, "criteria": {}}})
    assert [fault.loc for fault in refusal.value.errors] == [
        "state.image",
        "questions.q.instructions",
        "questions.q.criteria",
    ]


@pytest.mark.parametrize(
    "size", [(5120, 2880), (2880, 5120), (1921, 1081), (2049, 11), (4000, 20), (20, 4000), (1025, 1024), (3, 3)]
)
@pytest.mark.parametrize("max_pixels", [1_048_576, 100_000, 100, 1])
def test_what_is_fitted_keeps_every_limit_and_its_proportions(size: tuple[int, int], max_pixels: int) -> None:
    data, scale = fit_screenshot(blank(*size), max_pixels=max_pixels)
    picture = opened(data)
    width, height = picture.size
    assert width * height <= max_pixels and len(data) <= limits.MAX_IMAGE_BYTES
    assert engine_image.check_image(data) == ()
    assert (scale == 1.0) == (size[0] * size[1] <= max_pixels and max(size) <= 2048)
    assert abs(width - size[0] * scale) <= 1 and abs(height - size[1] * scale) <= 1
    if scale < 1 and min(width, height) > 50:
        assert width * height > 0.97 * max_pixels, "no smaller than it must be"


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGB"), ("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "RGB")])
def test_a_file_within_the_limits_stays_the_same_bytes(kind: str, mode: str, tmp_path: Path) -> None:
    file = encoded(blank(640, 401).convert(mode), kind)
    assert fit_screenshot(file) == (file, 1.0)
    path = tmp_path / "shot"
    path.write_bytes(file)
    assert fit_screenshot(path) == (file, 1.0) == fit_screenshot(str(path))
    assert fit_screenshot(_data_url(file)) == (file, 1.0)


def test_what_the_worker_would_refuse_becomes_a_plain_png() -> None:
    frames = [blank(40, 30), Image.new("RGB", (40, 30))]
    animated = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    pair = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    for file in (animated, pair, encoded(blank(40, 30), "BMP"), encoded(blank(40, 30), "WEBP", lossless=True)):
        assert engine_image.check_image(file) != ()
        data, scale = fit_screenshot(file)
        assert scale == 1.0 and engine_image.check_image(data) == ()
        assert opened(data).getpixel((20, 15)) == pytest.approx((240, 240, 240), abs=2)


def test_pixels_of_a_fitted_screen_are_where_the_scale_says() -> None:
    screen = blank(5120, 2880)
    screen.paste((255, 0, 0), (4000, 2000, 4100, 2050))
    data, scale = fit_screenshot(screen)
    shrunk = opened(data)
    assert shrunk.getpixel((round(4050 * scale), round(2025 * scale))) == pytest.approx((255, 0, 0), abs=8)
    x, y = original_point(4050 * scale, 2025 * scale, scale)
    assert (x, y) == pytest.approx((4050, 2025))
    left, top, right, bottom = shrunk.getchannel("G").point(lambda green: 255 * (green < 120)).getbbox() or ()
    ends = (*original_point(left, top, scale), *original_point(right, bottom, scale))
    assert ends == pytest.approx((4000, 2000, 4100, 2050), abs=2 / scale)


def test_what_cannot_be_fitted_is_a_refusal() -> None:
    whole = encoded(Image.effect_noise((1200, 1000), 50))
    for file in (b"", b"GIF89a", whole[:2000], "data:image/png;base64,%"):
        with pytest.raises(RequestRefused, match="cannot be decoded"):
            fit_screenshot(file)
    with pytest.raises(RequestRefused, match="crop it"):
        fit_screenshot(blank(4100, 20))
    for pixels in (0, 1_048_577):
        with pytest.raises(ValueError, match="max_pixels"):
            fit_screenshot(whole, max_pixels=pixels)
