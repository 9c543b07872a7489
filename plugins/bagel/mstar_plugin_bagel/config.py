"""The checkpoint's configuration: language model, vision encoder, autoencoder, image sizes, special tokens.

Read once per process from the checkpoint's folder. What the release leaves to code has the release's values; the sizes
of position tables are those of the stored tables. Every field that changes the numbers is kept, or refused. Imports no
torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.errors import ConfigError
from mstar.plugin.fields import Fields, read_object

CHECKPOINT = "ByteDance-Seed/BAGEL-7B-MoT"
GROUPS = 32
"""Channels of the autoencoder are normalised in so many groups."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageConfig:
    """The decoder with two experts.

    Args:
        tied: whether logits come from the embedding's weight.
        max_positions: tokens it was made for.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    qk_norm: bool
    activation: str
    tied: bool
    max_positions: int
    dtype: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision encoder and the connector behind it.

    Args:
        num_layers: layers that are used, one less than the checkpoint's file says.
        num_positions: rows of the encoder's own table of positions.
        side: patches along each side of the table that the connector's tokens get.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    eps: float
    activation: str
    connector_activation: str
    num_positions: int
    side: int

    @property
    def patch_dim(self) -> int:
        return 3 * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoencoderConfig:
    """Between pixels and latents of `channels`, 1 / `downsample` as high and wide.

    Args:
        width: channels at full resolution, times `multipliers` at each halving.
    """

    width: int
    multipliers: tuple[int, ...]
    num_blocks: int
    channels: int
    scale: float
    shift: float

    @property
    def downsample(self) -> int:
        return 2 ** (len(self.multipliers) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeConfig:
    """Limits that an image is resized to, in pixels; both sides become multiples of `stride`."""

    max_size: int
    min_size: int
    stride: int
    max_pixels: int = 14 * 14 * 9 * 1024

    @property
    def longest(self) -> int:
        """No side is longer."""
        return math.ceil(self.max_size / self.stride) * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens that frame text and images."""

    bos: int
    eos: int
    image_start: int
    image_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BagelConfig:
    """Everything the graph, the nodes and the processor need to know of a checkpoint.

    Args:
        folder: with the tokenizer's files.
        latent_patch: latents along each side of the square that one token holds.
        latent_side: tokens along each side of the table of latent positions.
        interpolate: whether positions are spread over the whole table whatever an image's size is.
        generation: its generation_config.json, or {}.
    """

    folder: Path
    language: LanguageConfig
    vision: VisionConfig
    autoencoder: AutoencoderConfig
    latent_patch: int
    latent_side: int
    interpolate: bool
    vae_resize: ResizeConfig
    vit_resize: ResizeConfig
    tokens: SpecialTokens
    generation: Mapping[str, Any]

    @property
    def latent_stride(self) -> int:
        """Pixels along each side of what one latent token stands for."""
        return self.autoencoder.downsample * self.latent_patch

    @property
    def latent_dim(self) -> int:
        """Numbers in a latent token."""
        return self.latent_patch**2 * self.autoencoder.channels

    @property
    def max_image_side(self) -> int:
        """Pixels along the longest side of an image that can be drawn."""
        return self.latent_side * self.latent_stride

    @property
    def dtype(self) -> str:
        """What the weights were saved in."""
        return self.language.dtype


def load(folder: Path, parts: Mapping[str, Path]) -> BagelConfig:
    """The configuration of a checkpoint. Raises ConfigError that names the file, the field, its value and a remedy."""
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{path} is missing; --model takes a checkpoint such as {CHECKPOINT}")
    fields = Fields(read_object(path), path)
    if fields.text("model_type", "bagel") != "bagel":
        raise fields.refuse("model_type", "expected 'bagel'", f"pass a checkpoint such as {CHECKPOINT}")
    generation = folder / "generation_config.json"
    return _build(
        fields,
        language=_part(fields, folder / "llm_config.json"),
        vision=_part(fields, folder / "vit_config.json"),
        shapes=stored_shapes(weights_file(folder, "ema")),
        token_ids=_token_ids(folder),
        generation=read_object(generation, optional=True),
    )


def published() -> BagelConfig:
    """That of the release, without its files."""
    language, vision = (Fields(values, Path(name)) for name, values in RELEASE.items())
    rows, wide = 70**2, language.values["hidden_size"]
    shapes = {_VIT_ROWS: (rows, 1152), _VIT_TABLE: (rows, wide), _LATENT_TABLE: (64**2, wide)}
    ids = {"<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652, "<|vision_end|>": 151653}
    fields = Fields({}, Path("config.json"))
    return _build(fields, language=language, vision=vision, shapes=shapes, token_ids=ids, generation={})


def max_model_len(config: BagelConfig) -> int:
    """Most tokens of one sequence that the language model was made for."""
    return config.language.max_positions


# ---- files ----------------------------------------------------------------------------------------------


def weights_file(folder: Path, stem: str) -> Path:
    """`stem`.safetensors of a checkpoint, or the index of its shards."""
    for path in (folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"):
        if path.exists():
            return path
    raise ConfigError(f"{folder} has no {stem}.safetensors; download all files of a checkpoint such as {CHECKPOINT}")


def stored_shapes(path: Path) -> Shapes:
    """Shapes of the tensors of a weights file, or of the shards of an index; only headers are read."""
    files = [path]
    if path.name.endswith(".index.json"):
        placed = Fields(read_object(path), path).part("weight_map").values
        files = [path.parent / str(name) for name in dict.fromkeys(placed.values())]
    return dict(shape for file in files for shape in _header(file))


def _header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            entries = json.loads(opened.read(length if length < path.stat().st_size else 0))
        for name, entry in entries.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])
    except (OSError, struct.error, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"cannot read {path}: {error!r}; it is missing or incomplete: download it again") from error


def _token_ids(folder: Path) -> Mapping[str, int]:
    """Special tokens by name, from whichever file of the tokenizer lists them."""
    path = folder / "tokenizer.json"
    try:
        if path.exists():
            return {token["content"]: token["id"] for token in read_object(path)["added_tokens"]}
        path = folder / "tokenizer_config.json"
        if path.exists():
            added = read_object(path)["added_tokens_decoder"]
            return {token["content"]: int(number) for number, token in added.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} does not list its special tokens: {error!r}; download it again") from error
    raise ConfigError(f"{folder} has no tokenizer.json; copy the tokenizer of {CHECKPOINT} there")


# ---- what the fields mean -------------------------------------------------------------------------------

RELEASE: Mapping[str, Mapping[str, Any]] = {
    "llm_config.json": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "max_position_embeddings": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "vit_config.json": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "patch_size": 14, "image_size": 980,
    },
}  # fmt: skip
_VIT_ROWS = "vit_model.vision_model.embeddings.position_embedding.weight"
_VIT_TABLE = "vit_pos_embed.pos_embed"
_LATENT_TABLE = "latent_pos_embed.pos_embed"
_HEAD = "language_model.lm_head.weight"


def _part(fields: Fields, path: Path) -> Fields:
    """A network's fields: from its own file, else from config.json, else those of the release."""
    if path.exists():
        return Fields(read_object(path), path)
    return fields.part(path.stem, RELEASE[path.name])


def _build(
    fields: Fields,
    *,
    language: Fields,
    vision: Fields,
    shapes: Shapes,
    token_ids: Mapping[str, int],
    generation: Mapping[str, Any],
) -> BagelConfig:
    for name in ("visual_gen", "visual_und"):
        fields.require(name, True, "it both sees and draws here")
    llm = _language(language, shapes)
    sizes = fields.part("_tiny_transforms", {})
    config = BagelConfig(
        folder=fields.path.parent,
        language=llm,
        vision=_vision(vision, fields, shapes, wide=llm.hidden_size),
        autoencoder=_autoencoder(fields.part("vae_config", {})),
        latent_patch=fields.whole("latent_patch_size", 2),
        latent_side=_side(shapes, _LATENT_TABLE, wide=llm.hidden_size),
        interpolate=fields.flag("interpolate_pos", False),
        vae_resize=_resize(sizes, "vae_transform", (1024, 512, 16)),
        vit_resize=_resize(sizes, "vit_transform", (980, 224, 14)),
        tokens=_tokens(token_ids, fields.path.parent, vocab_size=llm.vocab_size),
        generation=generation,
    )
    _check_sizes(config, sizes)
    return config


def _language(fields: Fields, shapes: Shapes) -> LanguageConfig:
    fields.require("layer_module", "Qwen2MoTDecoderLayer", "all of a layer is doubled here, not only its MLP")
    fields.require("use_sliding_window", False, "attention here has no window")
    heads, wide = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if wide % (2 * heads):
        raise fields.refuse("hidden_size", f"it must be an even multiple of num_attention_heads ({heads})")
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    fields.require("head_dim", wide // heads, "heads share hidden_size")
    rope = fields.part("rope_parameters", fields.part("rope_scaling", {}).values).values
    return LanguageConfig(
        hidden_size=wide,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=fields.whole("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=fields.number("rope_theta", rope.get("rope_theta", 10000.0)),
        rope_scaling=rope or None,
        qk_norm=fields.flag("qk_norm", True),
        activation=fields.activation("hidden_act", "silu"),
        # The authors' code never ties them: a head that is stored is used.
        tied=fields.flag("tie_word_embeddings", False) and _HEAD not in shapes,
        max_positions=fields.whole("max_position_embeddings", 32768),
        dtype=fields.text("torch_dtype", fields.text("dtype", "bfloat16")),
    )


def _vision(fields: Fields, bagel: Fields, shapes: Shapes, *, wide: int) -> VisionConfig:
    fields.require("num_channels", 3, "images have red, green and blue only")
    fields.require("rope", False, "positions of patches here are learned")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if hidden % heads:
        raise fields.refuse("hidden_size", f"it must be a multiple of num_attention_heads ({heads})")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers") - 1,
        num_heads=heads,
        patch_size=fields.whole("patch_size"),
        eps=fields.number("layer_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
        connector_activation=bagel.activation("connector_act", "gelu_pytorch_tanh"),
        num_positions=_stored(shapes, _VIT_ROWS)[0],
        side=_side(shapes, _VIT_TABLE, wide=wide),
    )


def _autoencoder(fields: Fields) -> AutoencoderConfig:
    for name in ("in_channels", "out_ch"):
        fields.require(name, 3, "images have red, green and blue only")
    config = AutoencoderConfig(
        width=fields.whole("ch", 128),
        multipliers=fields.wholes("ch_mult", (1, 2, 4, 4)),
        num_blocks=fields.whole("num_res_blocks", 2),
        channels=fields.whole("z_channels", 16),
        scale=fields.number("scale_factor", 0.3611),
        shift=fields.number("shift_factor", 0.1159, above=-math.inf),
    )
    if config.width % GROUPS:
        raise fields.refuse("ch", f"channels are normalised in {GROUPS} groups, so it must be a multiple of that")
    if not config.multipliers:
        raise fields.refuse("ch_mult", "expected a list of whole numbers, at least one")
    fields.require("downsample", config.downsample, f"ch_mult has {len(config.multipliers)} entries")
    return config


def _resize(fields: Fields, name: str, default: tuple[int, int, int]) -> ResizeConfig:
    longest, shortest, stride = fields.wholes(name, default, count=3)
    return ResizeConfig(max_size=longest, min_size=shortest, stride=stride)


def _check_sizes(config: BagelConfig, sizes: Fields) -> None:
    """Every image that the transforms let through must find its positions in the tables."""
    vision = config.vision
    if config.vit_resize.stride % vision.patch_size:
        problem = f"its stride, {config.vit_resize.stride}, must be a multiple of patch_size ({vision.patch_size})"
        raise sizes.refuse("vit_transform", problem)
    for name, resize, unit, side, rows in (
        ("vae_transform", config.vae_resize, config.latent_stride, config.latent_side, config.latent_side**2),
        ("vit_transform", config.vit_resize, vision.patch_size, vision.side, vision.num_positions),
    ):
        most = side if config.interpolate else resize.longest // unit
        if most > side or (most - 1) * (side + 1) >= rows:
            raise sizes.refuse(
                name, f"{resize.longest} pixels are {most} tokens; the tables have {rows} positions in rows of {side}"
            )


def _stored(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise ConfigError(f"the weights lack {name}, which says how many positions there are; use another checkpoint")
    return shapes[name]


def _side(shapes: Shapes, name: str, *, wide: int) -> int:
    shape = _stored(shapes, name)
    side = math.isqrt(shape[0])
    if shape != (side * side, wide):
        raise ConfigError(f"{name} is {list(shape)}; expected a square of positions by hidden_size ({wide})")
    return side


def _tokens(ids: Mapping[str, int], folder: Path, *, vocab_size: int) -> SpecialTokens:
    names = {
        "bos": "<|im_start|>", "eos": "<|im_end|>", "image_start": "<|vision_start|>", "image_end": "<|vision_end|>",
    }  # fmt: skip
    missing = sorted(name for name in names.values() if ids.get(name, vocab_size) >= vocab_size)
    if missing:
        raise ConfigError(
            f"the tokenizer in {folder} lacks {', '.join(missing)}, or places it past vocab_size ({vocab_size}); "
            f"is it that of {CHECKPOINT}?"
        )
    return SpecialTokens(**{field: ids[name] for field, name in names.items()})
