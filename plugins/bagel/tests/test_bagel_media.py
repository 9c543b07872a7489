"""Pictures of every kind and shape: how they are read, what is seen of them, what an edit's size is (cases 68, 69)."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from asking import Asked, image, text
from media_files import data_uri
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

EDIT = "/v1/images/edits"
SHORT = {"prompt": "blue", "seed": 7, "num_timesteps": 3}
GREEDY = {"temperature": 0, "repetition_penalty": 1, "max_tokens": 8}


def pixels(seed: int = 0, height: int = 40, width: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def edited(http: httpx.Client, data: bytes, **fields: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """What an edit of a file draws, and the answer."""
    body = {"image": data_uri(data), **SHORT, **fields}
    answer = http.post(EDIT, json=body)
    assert answer.status_code == 200, answer.text[:500]
    found = answer.json()
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found["data"][0]["b64_json"])))), found


# ---- kinds of pictures --------------------------------------------------------------------------------------

RGB = pixels()
ALPHA = np.where(np.arange(56) < 28, 0, 255).astype(np.uint8)[None].repeat(40, axis=0)
OVER_WHITE = np.where(ALPHA[..., None] == 0, 255, RGB).astype(np.uint8)
GREY = RGB[..., 0]


def turned(orientation: int) -> bytes:
    """`RGB` stored so that this EXIF orientation turns it upright."""
    back = {2: np.fliplr, 3: lambda x: np.rot90(x, 2), 4: np.flipud, 6: np.rot90, 8: lambda x: np.rot90(x, -1)}
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(np.ascontiguousarray(back[orientation](RGB))), exif=exif)


def png_of_16_bits(values: np.ndarray) -> bytes:
    """A PNG of (H, W, 3) or (H, W, 4), each of whose 8-bit values is stored in 16."""
    height, width, channels = values.shape
    rows = (values.astype(np.uint16) * 257).astype(">u2").reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    )


def palette(*, is_transparent: bool) -> tuple[bytes, np.ndarray]:
    colours = pixels(3, 1, 4)[0]
    numbers = np.random.default_rng(4).integers(4, size=(40, 56), dtype=np.uint8)
    picture = Image.fromarray(numbers, "P")
    picture.putpalette(colours.tobytes())
    options = {"transparency": 2} if is_transparent else {}
    if is_transparent:
        colours = colours.copy()
        colours[2] = 255
    return saved(picture, **options), colours[numbers]


KINDS: dict[str, Callable[[], tuple[bytes, np.ndarray]]] = {
    **{f"EXIF {n}": lambda n=n: (turned(n), RGB) for n in (2, 3, 4, 6, 8)},
    "RGBA": lambda: (saved(Image.fromarray(np.dstack([RGB, ALPHA]))), OVER_WHITE),
    "grey with alpha": lambda: (
        saved(Image.fromarray(np.dstack([GREY, ALPHA]), "LA")), np.where(ALPHA == 0, 255, GREY)[..., None].repeat(3, 2),
    ),
    "grey": lambda: (saved(Image.fromarray(GREY)), GREY[..., None].repeat(3, 2)),
    "16 bits": lambda: (saved(Image.fromarray(GREY.astype(np.uint16) * 257)), GREY[..., None].repeat(3, 2)),
    "48 bits": lambda: (png_of_16_bits(RGB), RGB),
    "64 bits": lambda: (png_of_16_bits(np.dstack([RGB, ALPHA])), OVER_WHITE),
    "16 bits, TIFF": lambda: (
        saved(Image.fromarray(GREY.astype(np.uint16) * 257), "TIFF"), GREY[..., None].repeat(3, 2),
    ),
    "one bit": lambda: (
        saved(Image.fromarray(GREY > 127)), np.where(GREY > 127, 255, 0).astype(np.uint8)[..., None].repeat(3, 2),
    ),
    "CMYK": lambda: (saved(Image.fromarray(np.dstack([255 - RGB, 0 * GREY]), "CMYK"), "TIFF"), RGB),
    "palette": lambda: palette(is_transparent=False),
    "palette with transparency": lambda: palette(is_transparent=True),
    "WEBP": lambda: (saved(Image.fromarray(RGB), "WEBP", lossless=True), RGB),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_every_kind_are_read_as_what_they_show(http: httpx.Client, model: Asked, kind: str) -> None:
    data, plain = KINDS[kind]()
    expected, _ = edited(http, saved(Image.fromarray(plain.astype(np.uint8))))
    found, answer = edited(http, data)
    assert np.array_equal(found, expected)
    assert answer["size"] == "56x40"  # upright
    asked = [model.ask({"type": "image", "data": data_uri(file)}, text("What?"), params=GREEDY) for file in (
        data, saved(Image.fromarray(plain.astype(np.uint8)))
    )]  # fmt: skip
    assert asked[0].ids == asked[1].ids


def test_a_jpeg_of_print_colours_is_read(http: httpx.Client, model: Asked) -> None:
    found, _ = edited(http, saved(Image.fromarray(np.dstack([255 - RGB, 0 * GREY]), "CMYK"), "JPEG", quality=95))
    assert found.shape == (40, 56, 3)


# ---- 68: sizes of edits -------------------------------------------------------------------------------------

SHAPES = {  # source, drawn by default: (height, width) within 24 to 56 pixels a side, in steps of 8
    (512, 512): (56, 56), (37, 53): (40, 56), (53, 37): (56, 40), (100, 4096): (8, 56), (4096, 100): (56, 8),
    (1, 1): (24, 24), (512, 511): (56, 56), (24, 48): (24, 48), (30, 30): (32, 32), (1200, 800): (56, 40),
}  # fmt: skip


@pytest.mark.parametrize("source", SHAPES)
def test_an_edit_keeps_its_source_s_shape(http: httpx.Client, model: Asked, source: tuple[int, int]) -> None:
    data = saved(Image.fromarray(np.full((*source, 3), 90, np.uint8)))
    expected = SHAPES[source]
    for size in ({}, {"size": "auto"}):
        found, answer = edited(http, data, **size)
        assert found.shape == (*expected, 3) and answer["size"] == f"{expected[1]}x{expected[0]}"


@pytest.mark.parametrize("size", ["56x56", "16x64", "64x16", "8x8", "24x40"])
def test_an_edit_has_the_size_asked_for(http: httpx.Client, model: Asked, size: str) -> None:
    width, height = map(int, size.split("x"))
    found, answer = edited(http, saved(Image.fromarray(RGB)), size=size)
    assert found.shape == (height, width, 3) and answer["size"] == size


def test_of_several_images_the_last_gives_the_size(http: httpx.Client, model: Asked) -> None:
    shapes = [(56, 24), (24, 56), (40, 40)]
    for _ in range(3):
        shapes = shapes[1:] + shapes[:1]
        sources = [data_uri(saved(Image.fromarray(pixels(1, *shape)))) for shape in shapes]
        answer = http.post(EDIT, json={**SHORT, "image": sources}).json()
        assert answer["size"] == f"{shapes[-1][1]}x{shapes[-1][0]}"


# ---- 69: what is seen ---------------------------------------------------------------------------------------


def seen_plainly(golden: Any, source: np.ndarray) -> Tensor:
    """What the vision encoder and the connector make of an image, each step written out, from the stored weights."""
    weights = load_file(golden.folder / "ema.safetensors")

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def resized(picture: Image.Image, *, longest: int, shortest: int, stride: int) -> Image.Image:
        scale = max(min(longest / max(picture.size), 1.0), shortest / min(picture.size))
        for _ in range(2):
            width, height = (max(stride, round(round(side * scale) / stride) * stride) for side in picture.size)
            if max(width, height) <= longest:
                break
            scale *= longest / max(width, height)
        return picture.resize((width, height), Image.Resampling.BICUBIC)

    picture = resized(Image.fromarray(source), longest=56, shortest=24, stride=8)
    picture = resized(picture, longest=70, shortest=28, stride=14)
    values = (torch.from_numpy(np.array(picture)).float() / 255 - 0.5) / 0.5
    rows, columns = picture.height // 14, picture.width // 14
    patches, places = [], []
    side = round(len(weights["vit_pos_embed.pos_embed"]) ** 0.5)
    for row in range(rows):
        for column in range(columns):
            patches.append(values[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].flatten())
            places.append(row * side + column)
    root, heads = "vit_model.vision_model", golden.vision_heads
    x = linear(f"{root}.embeddings.patch_embedding", torch.stack(patches))
    x = x + weights[f"{root}.embeddings.position_embedding.weight"][places]
    number = 0
    while f"{root}.encoder.layers.{number}.layer_norm1.weight" in weights:
        layer = f"{root}.encoder.layers.{number}"
        y = norm(f"{layer}.layer_norm1", x)
        q, k, v = (
            linear(f"{layer}.self_attn.{part}_proj", y).unflatten(1, (heads, -1)).transpose(0, 1) for part in "qkv"
        )
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + linear(f"{layer}.self_attn.out_proj", (scores @ v).transpose(0, 1).flatten(1))
        y = linear(f"{layer}.mlp.fc1", norm(f"{layer}.layer_norm2", x))
        x = x + linear(f"{layer}.mlp.fc2", functional.gelu(y, approximate="tanh"))
        number += 1
    x = linear("connector.fc1", norm(f"{root}.post_layernorm", x))
    return linear("connector.fc2", functional.gelu(x, approximate="tanh")) + weights["vit_pos_embed.pos_embed"][places]


ASPECTS = [(56, 56), (24, 56), (56, 24), (37, 53), (90, 30)]


def test_what_is_seen_of_images_of_any_shape_is_what_a_plain_encoder_sees(
    model: Asked, golden: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = model.worker.modules["vit_encoder"].methods
    encode, found = methods["encode"], []
    monkeypatch.setitem(
        methods, "encode", lambda ctx, **ports: (made := encode(ctx, **ports), found.extend(made["seen"]))[0]
    )
    sources = [pixels(number, *shape) for number, shape in enumerate(ASPECTS)]
    model.ask(*map(image, sources), text("Which?"), params=GREEDY)
    assert len(found) == len(ASPECTS)
    for seen, source in zip(found, sources, strict=True):
        plain = seen_plainly(golden, source)
        assert functional.cosine_similarity(seen, plain).min() > 0.999
        torch.testing.assert_close(seen, plain, atol=2e-4, rtol=0)


def test_the_order_of_images_and_texts_is_kept(model: Asked) -> None:
    small, large, words = image(pixels(1, 24, 24)), image(pixels(2, 56, 40)), text("Which is on the left?")
    orders = [(small, large, words), (large, small, words), (small, words, large), (words, small, large)]
    found = [model.ask(*parts, params=GREEDY) for parts in orders]
    assert len({tuple(answer.ids[0]) for answer in found}) == len(orders)
    assert len({answer.result.usage["prompt_tokens"] for answer in found}) == 1
