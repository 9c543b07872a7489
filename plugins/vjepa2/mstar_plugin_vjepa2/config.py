"""The checkpoint's configuration: V-JEPA 2 in transformers' layout, or V-JEPA 2-AC in its authors'.

Read once per process from the checkpoint's folder. Every field that changes the numbers is kept, or refused. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from mstar.errors import ConfigError
from mstar.plugin.fields import Fields, read_object
from mstar.plugin.spec import Task

CHECKPOINT = "facebook/vjepa2-vitl-fpc64-256"
AC_FILE = "vjepa2-ac-vitg.pt"

RESAMPLING = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CONDITIONS = 2
"""Tokens of a frame's block in the action-conditioned predictor before its patches: action and state."""
CLIPS = 4
"""How many times longer a clip may be than those that a checkpoint was trained on: all its tokens see each other."""
ACTION_DIM = 7
"""Position, extrinsic xyz Euler angles and gripper: what poses are integrated in, and the release's width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig:
    """A stack of transformer blocks.

    Args:
        mlp_dim: width of the MLP's hidden layer.
        eps: of every LayerNorm in it.
    """

    dim: int
    depth: int
    heads: int
    mlp_dim: int
    qkv_bias: bool
    eps: float
    activation: str

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The video encoder.

    Args:
        image_size: side in pixels of the square frames it was made for.
        tubelet_size: frames that one token spans.
        fixed_grid: whether positions are counted on the grid of `image_size` whatever the frames' size is.
    """

    blocks: BlocksConfig
    image_size: int
    patch_size: int
    tubelet_size: int
    channels: int
    fixed_grid: bool

    @property
    def grid(self) -> int:
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """The predictor of masked tokens."""

    blocks: BlocksConfig
    num_mask_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ACPredictorConfig:
    """The predictor of the next frame."""

    blocks: BlocksConfig
    action_dim: int
    num_frames: int

    @property
    def dim(self) -> int:
        return self.blocks.dim

    @property
    def depth(self) -> int:
        return self.blocks.depth

    @property
    def heads(self) -> int:
        return self.blocks.heads

    @property
    def head_dim(self) -> int:
        return self.blocks.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessConfig:
    """How pixels 0..255 become what the encoder takes: resized to a short side, cropped, (x * scale - mean) / std.

    Args:
        short_side: pixels; None crops the largest centred square first, and resizes that.
        antialias: whether shrinking averages over all pixels it leaves out.
    """

    size: int
    short_side: int | None
    resampling: str
    antialias: bool
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


class _Shape:
    """What both kinds of checkpoint have."""

    __slots__ = ()
    encoder: EncoderConfig

    @property
    def image_size(self) -> int:
        return self.encoder.image_size

    @property
    def patch_size(self) -> int:
        return self.encoder.patch_size

    @property
    def tubelet_size(self) -> int:
        return self.encoder.tubelet_size

    @property
    def grid(self) -> int:
        """Patches along each side of a frame."""
        return self.encoder.grid

    @property
    def patches(self) -> int:
        """Tokens of a frame (or tubelet)."""
        return self.grid**2

    @property
    def dim(self) -> int:
        """Width of the encoder's tokens."""
        return self.encoder.blocks.dim


@dataclass(frozen=True, kw_only=True)
class VJEPA2Config(_Shape):
    """A checkpoint in transformers' layout.

    Args:
        frames_per_clip: frames of the clips it was trained on; it does not limit what it takes.
        dtype: what the weights were saved in.
    """

    kind: ClassVar[str] = "hf"
    encoder: EncoderConfig
    predictor: PredictorConfig
    preprocess: PreprocessConfig
    frames_per_clip: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class VJEPA2ACConfig(_Shape):
    """A checkpoint in the layout of the action-conditioned release.

    Args:
        file: the weights.
    """

    kind: ClassVar[str] = "ac"
    encoder: EncoderConfig
    predictor: ACPredictorConfig
    preprocess: PreprocessConfig
    file: Path
    dtype: str = "float32"

    @property
    def action_dim(self) -> int:
        return self.predictor.action_dim

    @property
    def block(self) -> int:
        """Tokens of a frame in the predictor."""
        return CONDITIONS + self.patches

    @property
    def max_frames(self) -> int:
        """Frames that a rollout may span, its context included."""
        return self.predictor.num_frames // self.tubelet_size


def load(folder: Path, parts: Mapping[str, Path]) -> VJEPA2Config | VJEPA2ACConfig:
    """The configuration of a checkpoint. Raises ConfigError that names the file, the field, its value and a remedy."""
    path = folder / "config.json"
    files = sorted(folder.glob("*.pt"))
    if not path.exists():
        if not files:
            raise ConfigError(
                f"{folder} has neither config.json nor a .pt file; pass a checkpoint such as {CHECKPOINT}, "
                f"or the folder of {AC_FILE}"
            )
        return _action_conditioned(Fields(RELEASE, path), files)
    fields = Fields(read_object(path), path)
    kind = fields.text("model_type")
    if kind == "vjepa2":
        return _plain(fields, folder)
    if kind == "vjepa2_ac":
        return _action_conditioned(fields, files)
    raise fields.refuse("model_type", "expected 'vjepa2' or 'vjepa2_ac'", f"pass a checkpoint such as {CHECKPOINT}")


# ---- fields ---------------------------------------------------------------------------------------------


def _blocks(
    fields: Fields, *, dim: str, depth: str, heads: str, ratio: str, defaults: Mapping[str, Any]
) -> BlocksConfig:
    width, count = fields.whole(dim, defaults.get(dim)), fields.whole(heads, defaults.get(heads))
    if width % count:
        raise fields.refuse(dim, f"it must be a multiple of {heads} ({count})")
    if width // count < 6:
        raise fields.refuse(heads, f"it leaves {width // count} of {dim} ({width}) to a head, 3-D positions need 6")
    return BlocksConfig(
        dim=width,
        depth=fields.whole(depth, defaults.get(depth)),
        heads=count,
        mlp_dim=int(width * fields.number(ratio, defaults.get(ratio))),
        qkv_bias=fields.flag("qkv_bias", True),
        eps=fields.number("layer_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "gelu"),
    )


# ---- transformers' layout -------------------------------------------------------------------------------

# What a config.json leaves out has the value of transformers' own defaults.
_ENCODER = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "mlp_ratio": 4.0}
_PREDICTOR = {
    "pred_hidden_size": 384, "pred_num_hidden_layers": 12, "pred_num_attention_heads": 12, "pred_mlp_ratio": 4.0,
}  # fmt: skip
_PROCESSOR_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")


def _plain(fields: Fields, folder: Path) -> VJEPA2Config:
    encoder = EncoderConfig(
        blocks=_blocks(
            fields,
            dim="hidden_size",
            depth="num_hidden_layers",
            heads="num_attention_heads",
            ratio="mlp_ratio",
            defaults=_ENCODER,
        ),
        image_size=fields.whole("crop_size", 256),
        patch_size=fields.whole("patch_size", 16),
        tubelet_size=fields.whole("tubelet_size", 2),
        channels=fields.whole("in_chans", 3),
        fixed_grid=True,
    )
    _check_encoder(fields, encoder, size="crop_size", channels="in_chans")
    predictor = PredictorConfig(
        blocks=_blocks(
            fields,
            dim="pred_hidden_size",
            depth="pred_num_hidden_layers",
            heads="pred_num_attention_heads",
            ratio="pred_mlp_ratio",
            defaults=_PREDICTOR,
        ),
        num_mask_tokens=fields.whole("pred_num_mask_tokens", 10),
    )
    return VJEPA2Config(
        encoder=encoder,
        predictor=predictor,
        preprocess=_preprocess(folder, encoder),
        frames_per_clip=fields.whole("frames_per_clip", 64),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
    )


def _check_encoder(fields: Fields, encoder: EncoderConfig, *, size: str, channels: str) -> None:
    if encoder.grid < 1:
        raise fields.refuse(size, f"it is smaller than patch_size ({encoder.patch_size})")
    if encoder.channels != 3:
        raise fields.refuse(channels, "frames have red, green and blue only", "use another checkpoint")


def _preprocess(folder: Path, encoder: EncoderConfig) -> PreprocessConfig:
    """As transformers' processor of this model would do it: the size to resize to follows from the crop."""
    fields = Fields({}, folder / _PROCESSOR_FILES[1])
    for path in (folder / name for name in _PROCESSOR_FILES):
        content = read_object(path, optional=True)
        content = content.get("video_processor", {}) if path.name == _PROCESSOR_FILES[0] else content
        if content:
            fields = Fields(content, path)
            break
    for name in ("do_resize", "do_center_crop"):
        fields.require(name, True, "the encoder takes frames of one size")
    crop = fields.value("crop_size", encoder.image_size)
    size = Fields(crop, fields.path, "crop_size.").whole("height") if isinstance(crop, Mapping) else crop
    if size != encoder.image_size or (isinstance(crop, Mapping) and crop.get("width", size) != size):
        raise fields.refuse("crop_size", f"the model's crop_size is {encoder.image_size}", "make the two agree")
    resample = fields.value("resample", 2)
    if resample not in RESAMPLING:
        raise fields.refuse("resample", f"known: {RESAMPLING}")
    normalize = fields.flag("do_normalize", True)
    return PreprocessConfig(
        size=encoder.image_size,
        short_side=int(encoder.image_size * 256 / 224),
        resampling=RESAMPLING[resample],
        antialias=True,
        scale=fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else 1.0,
        mean=fields.numbers("image_mean", IMAGENET_MEAN, count=3) if normalize else (0.0,) * 3,
        std=fields.numbers("image_std", IMAGENET_STD, count=3) if normalize else (1.0,) * 3,
    )


# ---- the action-conditioned release ---------------------------------------------------------------------

_SIZES = {"img_size": 256, "patch_size": 16, "num_frames": 64, "tubelet_size": 2, "embed_dim": 1408}
RELEASE: Mapping[str, Any] = {
    "encoder": {**_SIZES, "depth": 40, "num_heads": 22, "mlp_ratio": 48 / 11},
    "predictor": {**_SIZES, "predictor_embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4.0},
}
"""The architecture that the release leaves to code, in the words of a config.json beside it."""

# Fields of the authors' constructors that change nothing at inference with rotary positions.
_IDLE = {
    "drop_rate", "attn_drop_rate", "drop_path_rate", "init_std", "uniform_power", "use_sdpa", "use_SiLU", "wide_SiLU",
    "wide_silu", "use_activation_checkpointing",
}  # fmt: skip
_READ = {
    "img_size", "patch_size", "num_frames", "tubelet_size", "embed_dim", "predictor_embed_dim", "depth", "num_heads",
    "mlp_ratio", "qkv_bias", "hidden_act", "layer_norm_eps", "in_chans", "action_embed_dim", "handle_nonsquare_inputs",
}  # fmt: skip
_ONLY: Mapping[str, tuple[Any, str]] = {
    "use_rope": (True, "positions here are rotary"),
    "use_silu": (False, "the MLP here has no gate"),
    "qk_scale": (None, "scores are scaled by the heads' width"),
    "out_layers": (None, "the last layer's tokens are what is served"),
    "use_extrinsics": (False, "no camera extrinsics are taken"),
    "is_frame_causal": (True, "earlier frames are kept, and must not depend on later ones"),
}


def _action_conditioned(fields: Fields, files: list[Path]) -> VJEPA2ACConfig:
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"{fields.path.parent} must hold one .pt file, such as {AC_FILE}; found {found}")
    for name in ("encoder", "predictor"):
        _check_known(fields.part(name))
    own, ahead = fields.part("encoder"), fields.part("predictor")
    encoder = EncoderConfig(
        blocks=_blocks(own, dim="embed_dim", depth="depth", heads="num_heads", ratio="mlp_ratio", defaults={}),
        image_size=_side(own),
        patch_size=own.whole("patch_size"),
        tubelet_size=own.whole("tubelet_size"),
        channels=own.whole("in_chans", 3),
        fixed_grid=not own.flag("handle_nonsquare_inputs", True),
    )
    _check_encoder(own, encoder, size="img_size", channels="in_chans")
    agreed = {"embed_dim": encoder.blocks.dim, "patch_size": encoder.patch_size, "tubelet_size": encoder.tubelet_size}
    for name, value in agreed.items():
        if ahead.whole(name) != value:
            raise ahead.refuse(name, f"the encoder's is {value}", "make the two agree")
    if _side(ahead) != encoder.image_size:
        raise ahead.refuse("img_size", f"the encoder's is {encoder.image_size}", "make the two agree")
    ahead.require("action_embed_dim", ACTION_DIM, "poses and plans have position, angles and gripper")
    predictor = ACPredictorConfig(
        blocks=_blocks(
            ahead, dim="predictor_embed_dim", depth="depth", heads="num_heads", ratio="mlp_ratio", defaults={}
        ),
        action_dim=ahead.whole("action_embed_dim", ACTION_DIM),
        num_frames=ahead.whole("num_frames"),
    )
    if predictor.num_frames < encoder.tubelet_size:
        raise ahead.refuse("num_frames", f"it is less than tubelet_size ({encoder.tubelet_size})")
    preprocess = PreprocessConfig(
        size=encoder.image_size,
        short_side=None,
        resampling="bilinear",
        antialias=False,
        scale=1 / 255,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
    return VJEPA2ACConfig(encoder=encoder, predictor=predictor, preprocess=preprocess, file=files[0])


def _check_known(fields: Fields) -> None:
    unknown = sorted(set(fields.values) - _READ - _IDLE - set(_ONLY))
    unknown = [name for name in unknown if not name.startswith("_")]
    if unknown:
        known = ", ".join(sorted(_READ | set(_ONLY)))
        raise fields.refuse(unknown[0], "it is not known here", f"remove it; known are {known}")
    for name, (only, why) in _ONLY.items():
        fields.require(name, only, why)


def _side(fields: Fields) -> int:
    """Both sides of the frames, which may be written as one number or two."""
    value = fields.value("img_size")
    sides = set(value) if isinstance(value, list) else {value}
    if len(sides) != 1:
        raise fields.refuse("img_size", "frames must be square", "use another checkpoint")
    return Fields({"img_size": sides.pop()}, fields.path, fields.prefix).whole("img_size")


def offers(config: VJEPA2Config | VJEPA2ACConfig, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks that a checkpoint can do. Videos become clips as long as those it was trained on."""
    if isinstance(config, VJEPA2ACConfig):
        return {name: tasks[name] for name in ("encode", "rollout", "teacher_forced", "plan")}
    usual = (config.frames_per_clip, config.tubelet_size)
    return {name: replace(tasks[name], video_frames=usual) for name in ("encode", "predict", "anticipate")}


def max_model_len(config: VJEPA2Config | VJEPA2ACConfig) -> int:
    """Tokens of the longest rollout; of V-JEPA 2, of the longest clip: `CLIPS` times those it was trained on."""
    if isinstance(config, VJEPA2ACConfig):
        return config.max_frames * config.block
    return CLIPS * max(1, config.frames_per_clip // config.tubelet_size) * config.patches
