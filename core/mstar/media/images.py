"""Image files to pixels. The size is known, and refused if it is too much, before anything is decoded.

Knows bytes, not where they come from.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from mstar.errors import RequestError
from mstar.media.policy import Budget

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_PLAIN_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB", "HSV")
_ANIMATED = ("PNG", "WEBP", "GIF")

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit here is the operator's


def decode_image(data: bytes, *, budget: Budget, param: str | None = None) -> np.ndarray:
    """Pixels, uint8 RGB (H, W, 3), of an image file of `FORMATS`.

    The picture is turned upright by its EXIF orientation and laid over white where it is transparent; 16-bit grey is
    scaled to 8 bits; colour profiles are not applied. Of a TIFF's pages, or a JPEG's pictures, the first is taken.

    Raises RequestError for anything else, too many pixels, an animation, and data that is cut off or damaged.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check(image, budget=budget, param=param)
        image.verify()  # checksums; spends the image
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
        return np.array(_as_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
    except RequestError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit is the most that the operator's can be
        message = f"{param} has more pixels than the limit, {budget.policy.max_image_pixels}; send a smaller image, "
        raise RequestError(message + "or raise --max-image-pixels", param=param, code="media_too_large") from error
    except Exception as error:  # Pillow raises nearly any kind for what is not what it seems
        reason = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({type(error).__name__})"
        message = f"{param} is no image that can be decoded{reason}; expected a whole file of {', '.join(FORMATS)}"
        raise RequestError(message, param=param, code="invalid_media") from error


def _check(image: Image.Image, *, budget: Budget, param: str | None) -> None:
    pixels, limit = image.width * image.height, budget.policy.max_image_pixels
    if pixels > limit:
        message = f"{param} is {image.width}x{image.height}, {pixels} pixels; the limit is {limit}; "
        message += "send a smaller image, or raise --max-image-pixels"
        raise RequestError(message, param=param, code="media_too_large")
    if image.format in _ANIMATED and getattr(image, "is_animated", False):
        message = f"{param} is an animation, and an image part takes one picture; send one, or a video part"
        raise RequestError(message, param=param, code="invalid_media")
    budget.take(3 * pixels, f"an image of {image.width}x{image.height}", param)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode not in _PLAIN_MODES:
        raise ValueError(f"pixels of mode {image.mode}")
    return image.convert("RGB")
