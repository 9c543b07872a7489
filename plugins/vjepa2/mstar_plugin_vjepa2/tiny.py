"""Writes tiny random checkpoints in the real on-disk layouts: the same files every time, no parameter zero or one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mstar_plugin_vjepa2.config import AC_FILE, IMAGENET_MEAN, IMAGENET_STD

SEED = 22

IMAGE, PATCH, TUBELET, FRAMES = 64, 16, 2, 64
DIM, HEADS, LAYERS = 64, 4, 2
PREDICTOR_DIM, PREDICTOR_HEADS, PREDICTOR_LAYERS = 48, 3, 2
MLP_RATIO, MASK_TOKENS, ACTION = 4, 10, 7

CONFIG: dict[str, Any] = {
    "architectures": ["VJEPA2Model"],
    "model_type": "vjepa2",
    "attention_probs_dropout_prob": 0.0,
    "crop_size": IMAGE,
    "drop_path_rate": 0.0,
    "dtype": "float32",
    "frames_per_clip": FRAMES,
    "hidden_act": "gelu",
    "hidden_size": DIM,
    "in_chans": 3,
    "layer_norm_eps": 1e-6,
    "mlp_ratio": MLP_RATIO,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "patch_size": PATCH,
    "pred_hidden_size": PREDICTOR_DIM,
    "pred_mlp_ratio": MLP_RATIO,
    "pred_num_attention_heads": PREDICTOR_HEADS,
    "pred_num_hidden_layers": PREDICTOR_LAYERS,
    "pred_num_mask_tokens": MASK_TOKENS,
    "qkv_bias": True,
    "tubelet_size": TUBELET,
}
PROCESSOR: dict[str, Any] = {
    "video_processor_type": "VJEPA2VideoProcessor",
    "crop_size": {"height": IMAGE, "width": IMAGE},
    "do_center_crop": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": IMAGENET_MEAN,
    "image_std": IMAGENET_STD,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": int(IMAGE * 256 / 224)},
}
_SIZES = {"img_size": IMAGE, "patch_size": PATCH, "num_frames": FRAMES, "tubelet_size": TUBELET, "embed_dim": DIM}
AC_CONFIG: dict[str, Any] = {
    "model_type": "vjepa2_ac",
    "encoder": {**_SIZES, "depth": LAYERS, "num_heads": HEADS, "mlp_ratio": MLP_RATIO},
    "predictor": {
        **_SIZES,
        "predictor_embed_dim": PREDICTOR_DIM,
        "depth": PREDICTOR_LAYERS,
        "num_heads": PREDICTOR_HEADS,
        "mlp_ratio": MLP_RATIO,
        "action_embed_dim": ACTION,
    },
}


def make(folder: Path) -> Path:
    """Write a checkpoint in transformers' layout below `folder`; returns what `--model` takes."""
    home = _home(folder / "vjepa2-vitl-fpc64-256", CONFIG)
    _write_json(home / "video_preprocessor_config.json", PROCESSOR)
    random = _Random(SEED)
    patches = random.layer("embeddings.patch_embeddings.proj", DIM, 3, TUBELET, PATCH, PATCH)
    encoder = {**dict(patches), **dict(random.norm("layernorm", DIM))}
    predictor = {
        **dict(random.layer("embeddings.predictor_embeddings", PREDICTOR_DIM, DIM)),
        "embeddings.mask_tokens": random.normal(MASK_TOKENS, 1, 1, PREDICTOR_DIM),
        **dict(random.norm("layernorm", PREDICTOR_DIM)),
        **dict(random.layer("proj", DIM, PREDICTOR_DIM)),
    }
    for number in range(LAYERS):
        encoder |= random.block(f"layer.{number}", DIM, projections=("query", "key", "value"), attention="attention")
    for number in range(PREDICTOR_LAYERS):
        predictor |= random.block(
            f"layer.{number}", PREDICTOR_DIM, projections=("query", "key", "value"), attention="attention"
        )
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.items()}
    tensors |= {f"predictor.{name}": tensor for name, tensor in predictor.items()}
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    return home


def make_ac(folder: Path, config: Mapping[str, Any] = AC_CONFIG) -> Path:
    """Write a checkpoint of `config` in the layout of the action-conditioned release below `folder`."""
    home = _home(folder / "vjepa2-ac-vitg", config)
    random = _Random(SEED + 1)
    own, ahead = config["encoder"], config["predictor"]
    dim, width, actions = own["embed_dim"], ahead["predictor_embed_dim"], ahead["action_embed_dim"]
    patches = random.layer("patch_embed.proj", dim, 3, own["tubelet_size"], own["patch_size"], own["patch_size"])
    encoder = {**dict(patches), **dict(random.norm("norm", dim))}
    predictor = {
        **dict(random.layer("predictor_embed", width, dim)),
        **dict(random.layer("action_encoder", width, actions)),
        **dict(random.layer("state_encoder", width, actions)),
        **dict(random.layer("extrinsics_encoder", width, actions - 1)),
        **dict(random.norm("predictor_norm", width)),
        **dict(random.layer("predictor_proj", dim, width)),
    }
    for number in range(own["depth"]):
        encoder |= random.block(f"blocks.{number}", dim, projections=("qkv",), attention="attn")
    for number in range(ahead["depth"]):
        predictor |= random.block(f"predictor_blocks.{number}", width, projections=("qkv",), attention="attn")
    content = {
        "encoder": {f"module.backbone.{name}": tensor for name, tensor in encoder.items()},
        "predictor": {f"module.{name}": tensor for name, tensor in predictor.items()},
        "epoch": 1,
    }
    torch.save(content, home / AC_FILE)
    return home


class _Random:
    """Random parameters under the names of a checkpoint, scaled so that activations keep their size."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def layer(self, name: str, *shape: int) -> Iterator[tuple[str, Tensor]]:
        weight = self.normal(*shape)
        yield f"{name}.weight", weight / weight[0].numel() ** 0.5
        yield f"{name}.bias", 0.2 * self.normal(shape[0])

    def norm(self, name: str, dim: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", 1 + 0.2 * self.normal(dim)
        yield f"{name}.bias", 0.2 * self.normal(dim)

    def block(self, name: str, dim: int, *, projections: tuple[str, ...], attention: str) -> dict[str, Tensor]:
        """One transformer block, whose queries, keys and values are one projection or three."""
        parts = [
            self.norm(f"{name}.norm1", dim),
            *(self.layer(f"{name}.{attention}.{part}", 3 * dim // len(projections), dim) for part in projections),
            self.layer(f"{name}.{attention}.proj", dim, dim),
            self.norm(f"{name}.norm2", dim),
            self.layer(f"{name}.mlp.fc1", MLP_RATIO * dim, dim),
            self.layer(f"{name}.mlp.fc2", dim, MLP_RATIO * dim),
        ]
        return {key: tensor for part in parts for key, tensor in part}


def _home(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
