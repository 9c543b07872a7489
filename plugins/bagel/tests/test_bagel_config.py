"""What is read from a checkpoint's files, what is refused, and how weights must fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mstar.errors import ConfigError
from mstar.plugin.spec import Checkpoint
from mstar_plugin_bagel import config as configs
from mstar_plugin_bagel import weights
from mstar_plugin_bagel.config import BagelConfig
from mstar_plugin_bagel.modeling.flow import FlowHead
from mstar_plugin_bagel.modeling.llm import MoT
from mstar_plugin_bagel.modeling.vae import Autoencoder
from mstar_plugin_bagel.modeling.vit import VisionEncoder

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "bagel" / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint"))


def change(folder: Path, file: str, **changes: Any) -> BagelConfig:
    """The configuration once fields of a file are set anew; None takes one out."""
    content = {**json.loads((folder / file).read_text()), **changes}
    (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return configs.load(folder, {})


# ---- configuration --------------------------------------------------------------------------------------


def test_the_published_configuration_needs_no_files() -> None:
    config = configs.published()
    assert (config.latent_stride, config.latent_dim, config.max_image_side) == (16, 64, 1024)
    assert (config.language.head_dim, config.vision.patch_dim, config.vision.num_layers) == (128, 588, 26)
    assert configs.max_model_len(config) == 32768 and config.dtype == "bfloat16"


def test_reading_it_imports_no_torch() -> None:
    code = (
        "import sys, mstar_plugin_bagel.config, mstar_plugin_bagel.modeling.schedule; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_have_the_sides_that_are_stored(folder: Path) -> None:
    config = change(folder, "config.json", max_latent_size=64, vit_max_num_patch_per_side=70)
    assert (config.latent_side, config.vision.side, config.vision.num_positions) == (8, 6, 36)


def test_what_the_release_leaves_to_code_has_its_values(folder: Path) -> None:
    config = change(folder, "config.json", vae_config={"z_channels": 4}, latent_patch_size=None, connector_act=None)
    assert config.autoencoder == configs.AutoencoderConfig(
        width=128, multipliers=(1, 2, 4, 4), num_blocks=2, channels=4, scale=0.3611, shift=0.1159
    )
    assert config.latent_stride == 16 and config.vision.connector_activation == "gelu_pytorch_tanh"


def test_networks_are_described_by_their_own_files_first(folder: Path) -> None:
    config = change(folder, "llm_config.json", rope_theta=77.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.language.rope_theta == 77.0 and config.language.rope_scaling == {"type": "linear", "factor": 2.0}
    (folder / "llm_config.json").unlink()
    (folder / "vit_config.json").unlink()
    config = configs.load(folder, {})
    assert (config.language.rope_theta, config.language.num_layers, config.vision.num_layers) == (1e6, 2, 2)
    with pytest.raises(ConfigError, match=r"vit_pos_embed.pos_embed is \[36, 48\]; .* hidden_size \(3584\)"):
        change(folder, "config.json", llm_config=None, vit_config=None)


def test_every_other_number_is_kept(folder: Path) -> None:
    config = change(
        folder, "llm_config.json", rms_norm_eps=1e-5, hidden_act="gelu", qk_norm=False, tie_word_embeddings=True,
        max_position_embeddings=99,
    )  # fmt: skip
    assert (config.language.rms_norm_eps, config.language.activation) == (1e-5, "gelu")
    assert not config.language.qk_norm and not config.language.tied  # a head is stored
    assert configs.max_model_len(config) == 99
    config = change(folder, "vit_config.json", layer_norm_eps=1e-4, hidden_act="relu")
    assert (config.vision.eps, config.vision.activation) == (1e-4, "relu")
    config = change(folder, "config.json", interpolate_pos=True, connector_act="gelu", _tiny_transforms=None)
    assert config.interpolate and config.vision.connector_activation == "gelu"
    assert (config.vae_resize.max_size, config.vit_resize.min_size) == (1024, 224)


@pytest.mark.parametrize(
    ("file", "changes", "match"),
    [
        ("config.json", {"model_type": "qwen2"}, "model_type is 'qwen2'; expected 'bagel'.*BAGEL-7B-MoT"),
        ("config.json", {"visual_gen": False}, "visual_gen is False.*only true"),
        ("config.json", {"interpolate_pos": 1}, "interpolate_pos is 1; expected true or false"),
        ("config.json", {"connector_act": "tanh"}, "connector_act is 'tanh'; known: gelu, .*silu"),
        ("config.json", {"latent_patch_size": 0}, "latent_patch_size is 0; expected a whole number of at least 1"),
        ("config.json", {"vae_config": {"ch": 48}}, "vae_config.ch is 48; .* 32 groups"),
        ("config.json", {"vae_config": {"ch_mult": []}}, "vae_config.ch_mult is .*; expected a list of whole"),
        ("config.json", {"vae_config": {"downsample": 4}}, "downsample is 4; ch_mult has 4 entries.*only 8"),
        ("config.json", {"vae_config": {"in_channels": 4}}, "in_channels is 4; .*only 3"),
        ("config.json", {"vae_config": {"scale_factor": "1"}}, "scale_factor is '1'; expected a number above 0"),
        ("config.json", {"vae_config": 3}, "vae_config is 3; expected an object"),
        ("config.json", {"_tiny_transforms": {"vae_transform": [56, 24]}}, "vae_transform is .*; expected 3 whole"),
        ("config.json", {"_tiny_transforms": {"vae_transform": [72, 24, 8]}}, "72 pixels are 9 tokens; .* rows of 8"),
        ("config.json", {"_tiny_transforms": None}, "1024 pixels are 128 tokens; .* 64 positions"),
        ("llm_config.json", {"hidden_size": None}, "llm_config.json lacks hidden_size"),
        ("llm_config.json", {"hidden_size": 50}, "hidden_size is 50; it must be an even multiple of .* \\(4\\)"),
        ("llm_config.json", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
        ("llm_config.json", {"head_dim": 16}, "head_dim is 16; .*only 12"),
        ("llm_config.json", {"use_sliding_window": True}, "use_sliding_window is True; .*only false"),
        ("llm_config.json", {"layer_module": "Qwen2DecoderLayer"}, "layer_module is 'Qwen2DecoderLayer'"),
        ("llm_config.json", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; known"),
        ("llm_config.json", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; expected a number above 0"),
        ("llm_config.json", {"vocab_size": 290}, r"lacks <\|vision_end\|>, <\|vision_start\|>, or places it past"),
        ("vit_config.json", {"rope": True}, "rope is True; .*only false"),
        ("vit_config.json", {"num_channels": 1}, "num_channels is 1; .*only 3"),
        ("vit_config.json", {"num_attention_heads": 3}, "hidden_size is 32; it must be a multiple .* \\(3\\)"),
        ("vit_config.json", {"patch_size": 10}, "stride, 14, must be a multiple of patch_size .10."),
    ],
)
def test_what_cannot_be_served_is_refused(folder: Path, file: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        change(folder, file, **changes)


def test_damaged_and_missing_files_are_named(folder: Path) -> None:
    (folder / "llm_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"llm_config.json is not valid JSON"):
        configs.load(folder, {})
    (folder / "llm_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"expected a JSON object, found a list"):
        configs.load(folder, {})
    (folder / "llm_config.json").unlink()
    content = (folder / "ema.safetensors").read_bytes()
    for damaged in (
        b"",
        content[:100],
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\x08" + b"\0" * 7 + b"[1, 2]  ",
    ):
        (folder / "ema.safetensors").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cannot read .*ema.safetensors.*download it again"):
            configs.load(folder, {})
    (folder / "ema.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no ema.safetensors; download all files"):
        configs.load(folder, {})
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json is missing; --model takes a checkpoint such as"):
        configs.load(folder, {})


def test_special_tokens_may_have_any_ids_in_either_file(folder: Path) -> None:
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    moved = {str((int(number) + 5) % 14): token for number, token in added.items()}
    (folder / "tokenizer.json").unlink()
    assert configs.load(folder, {}).tokens.image_start == 295
    config = change(folder, "tokenizer_config.json", added_tokens_decoder=moved)
    assert (config.tokens.bos, config.tokens.eos) == (292 % 14, 293 % 14)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json does not list its special tokens"):
        change(folder, "tokenizer_config.json", added_tokens_decoder=None)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json; copy the tokenizer of"):
        configs.load(folder, {})


# ---- weights --------------------------------------------------------------------------------------------

LOADERS: dict[str, tuple[Callable[[BagelConfig], nn.Module], Callable[..., None]]] = {
    "llm": (lambda config: MoT(config.language), weights.load_llm),
    "vit": (VisionEncoder, weights.load_vit),
    "flow": (FlowHead, weights.load_flow),
    "vae": (lambda config: Autoencoder(config.autoencoder), weights.load_vae),
}


def load(folder: Path, name: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = configs.load(folder, {})
    make, fill = LOADERS[name]
    with torch.device("meta"):
        module = make(config)
    fill(module, Checkpoint(model=str(folder), folder=folder, config=config), dtype, torch.device("cpu"))
    return module


@pytest.mark.parametrize(
    ("name", "gone", "ours"),
    [
        ("llm", "language_model.model.layers.1.self_attn.k_proj_moe_gen.bias", r"layers\.1\.gen\.qkv\.bias\[1\]"),
        ("llm", "language_model.lm_head.weight", r"head\.weight"),
        ("vit", "vit_model.vision_model.encoder.layers.0.self_attn.v_proj.weight", r"blocks\.0\.qkv\.weight\[2\]"),
        ("vit", "connector.fc2.bias", r"fc2\.bias"),
        ("flow", "llm2vae.weight", r"leave\.weight"),
        ("vae", "decoder.up.0.block.0.nin_shortcut.bias", r"decoder\.up\.0\.block\.0\.nin_shortcut\.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, name: str, gone: str, ours: str) -> None:
    file = folder / ("ae.safetensors" if name == "vae" else "ema.safetensors")
    tensors = load_file(file)
    extra = gone.rpartition(".")[0] + ".extra"
    save_file({**tensors, extra: tensors[gone].clone()}, file)
    with pytest.raises(ConfigError, match=f"unexpected: {extra}"):
        load(folder, name)
    save_file({**tensors, gone: torch.zeros(3, 3)}, file)
    with pytest.raises(ConfigError, match=f"wrong shape: {gone}"):
        load(folder, name)
    del tensors[gone]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=f"missing: {ours}"):
        load(folder, name)


def test_a_name_that_is_nobodys_is_unexpected_everywhere(folder: Path) -> None:
    save_file({**load_file(folder / "ema.safetensors"), "vision_tower.x": torch.zeros(1)}, folder / "ema.safetensors")
    for name in ("llm", "vit", "flow"):
        with pytest.raises(ConfigError, match=r"unexpected: vision_tower\.x"):
            load(folder, name)


def test_weights_may_come_in_shards(folder: Path) -> None:
    whole = {name: load(folder, name).state_dict() for name in LOADERS}
    for stem in ("ema", "ae"):
        tensors = load_file(folder / f"{stem}.safetensors")
        places = {name: f"{stem}-0000{index % 3}.safetensors" for index, name in enumerate(tensors)}
        for shard in set(places.values()):
            save_file({name: tensor for name, tensor in tensors.items() if places[name] == shard}, folder / shard)
        (folder / f"{stem}.safetensors").unlink()
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name, state in whole.items():
        found = load(folder, name).state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in found.items())
    (folder / "ema-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*ema-00001.safetensors"):
        configs.load(folder, {})


def test_weights_take_the_dtype_asked_for(folder: Path) -> None:
    for name in LOADERS:
        assert {tensor.dtype for tensor in load(folder, name, dtype=torch.bfloat16).state_dict().values()} == {
            torch.bfloat16
        }


def test_a_head_that_is_not_stored_is_tied_where_the_file_says_so(folder: Path) -> None:
    tensors = load_file(folder / "ema.safetensors")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, folder / "ema.safetensors")
    assert change(folder, "llm_config.json", tie_word_embeddings=True).language.tied
    llm = load(folder, "llm")
    assert isinstance(llm, MoT) and llm.head.weight is llm.embedding.weight
