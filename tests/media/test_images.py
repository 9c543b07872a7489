"""Image files to pixels, and cases 16 and 18 of the known faults at the module's edge."""

from __future__ import annotations

import contextlib
import io
import resource
import time

import numpy as np
import pytest
from media_files import animation, gradient, image_file, png_of_one_colour, png_with_bad_checksum, tiff_bomb
from PIL import Image

from mstar.errors import RequestError
from mstar.media.images import decode_image
from mstar.media.policy import Budget, MediaPolicy


def decode(data: bytes, **policy: int) -> np.ndarray:
    return decode_image(data, budget=Budget(MediaPolicy(**policy)), param="inputs.0.data")  # type: ignore[arg-type]


def refusal(data: bytes, **policy: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(data, **policy)
    assert caught.value.status == 400 and caught.value.param == "inputs.0.data"
    return caught.value


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_give_the_pixels_back(kind: str) -> None:
    pixels = decode(image_file(kind=kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, gradient())


def test_jpeg_and_gif_give_nearly_the_pixels() -> None:
    for data in (image_file(kind="JPEG", quality=95), saved(Image.fromarray(gradient()).quantize(256), "GIF")):
        assert np.abs(decode(data).astype(int) - gradient()).mean() < 8


def test_a_picture_is_turned_upright() -> None:
    image = Image.fromarray(gradient())
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    assert np.array_equal(decode(saved(image, exif=exif)), np.rot90(gradient(), -1))


def test_modes_become_rgb() -> None:
    grey = Image.fromarray(gradient()).convert("L")
    expected = np.repeat(np.asarray(grey)[..., None], 3, axis=-1)
    assert np.array_equal(decode(saved(grey)), expected)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert np.array_equal(decode(saved(deep)), expected)
    assert np.array_equal(decode(saved(deep, "TIFF")), expected)
    palette = Image.fromarray(gradient()).quantize(64)
    assert np.array_equal(decode(saved(palette)), np.asarray(palette.convert("RGB")))
    cmyk = Image.fromarray(gradient()).convert("CMYK")
    assert np.abs(decode(saved(cmyk, "JPEG", quality=95)).astype(int) - gradient()).mean() < 8
    assert decode(saved(Image.fromarray(gradient()).convert("1"))).max() == 255


def test_transparent_pictures_lie_over_white() -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert decode(saved(image)).tolist() == [[[200, 0, 0], [255, 255, 255]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert decode(saved(palette, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_the_first_page_of_a_tiff_is_taken() -> None:
    pages = [Image.fromarray(gradient()), Image.new("RGB", (5, 5))]
    assert np.array_equal(decode(saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])), gradient())


BOMBS = {
    "png 12000": lambda: png_of_one_colour(12000, 12000),
    "gif": lambda: animation("GIF", 10_000),
    "webp": lambda: animation("WEBP", 2000),
    "tiff": lambda: tiff_bomb(100_000, 100_000),
    "tiff strip": lambda: tiff_bomb(1000, 1000),  # its one strip is ten times as long as it should be
}


@pytest.mark.parametrize("name", ["png 12000", "gif", "webp", "tiff", "tiff strip"])
def test_bombs_are_refused_before_they_are_decoded(name: str) -> None:
    data = BOMBS[name]()
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    if name == "tiff strip":
        decode(data)  # libtiff takes what belongs to the picture, and no more
    else:
        refusal(data)
    assert time.monotonic() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_limits_are_told() -> None:
    error = refusal(image_file(), max_image_pixels=599)
    assert "30x20, 600 pixels; the limit is 599" in error.message and "--max-image-pixels" in error.message
    error = refusal(png_of_one_colour(40_000, 40_000))  # more than Pillow opens
    assert error.code == "media_too_large" and "--max-image-pixels" in error.message
    error = refusal(image_file(), memory_bytes=1799)
    assert "1800 bytes" in error.message and "--media-memory-bytes" in error.message
    assert "an animation" in refusal(animation("GIF", 2)).message


def test_images_of_one_request_share_its_memory() -> None:
    budget = Budget(MediaPolicy(memory_bytes=4000))
    decode_image(image_file(), budget=budget)
    decode_image(image_file(), budget=budget)
    with pytest.raises(RequestError, match="5400"):
        decode_image(image_file(), budget=budget, param="p")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"not an image", b"\x89PNG\r\n\x1a\n", image_file(kind="JPEG")[:-128], image_file()[:-20],
        image_file()[:60], image_file(kind="WEBP")[:-10], image_file(kind="GIF")[:-200], image_file(kind="BMP")[:-10],
        image_file(kind="TIFF")[:-40], png_with_bad_checksum(), b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        image_file(kind="ICO"), image_file(kind="PPM"), image_file(kind="TGA"),
    ],
    ids=range(16),
)  # fmt: skip
def test_what_is_no_whole_image_is_the_clients_fault(data: bytes) -> None:
    error = refusal(data)
    assert error.code == "invalid_media" and "no image that can be decoded" in error.message


def test_any_bytes_end_in_pixels_or_a_refusal() -> None:
    draw = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = image_file(kind=kind)
        for _ in range(60):
            data = bytearray(whole)
            for at in draw.integers(0, len(data), 3):
                data[at] = draw.integers(0, 256)
            with contextlib.suppress(RequestError):
                assert decode(bytes(data)).shape[-1] == 3
