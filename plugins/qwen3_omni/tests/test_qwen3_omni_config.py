"""Configurations and weights: every field counts or is refused; parts that a checkpoint lacks are not offered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Asked, image, tensor, text
from safetensors.torch import load_file, save_file

from mstar.errors import ConfigError, RequestError
from mstar.layers.quantized import quantize_int4
from mstar.plugin.spec import Checkpoint
from mstar_plugin_qwen3_omni.config import OmniConfig, load, published
from mstar_plugin_qwen3_omni.config.decoder import MoEConfig
from mstar_plugin_qwen3_omni.modeling.audio import AudioEncoder
from mstar_plugin_qwen3_omni.modeling.moe import SparseMLP
from mstar_plugin_qwen3_omni.modeling.thinker import Thinker
from mstar_plugin_qwen3_omni.modeling.vision import VisionEncoder
from mstar_plugin_qwen3_omni.weights import thinker as weights

CPU = torch.device("cpu")


@pytest.fixture
def folder(golden: Any, tmp_path: Path) -> Path:
    """The golden checkpoint, to be changed."""
    shutil.copytree(golden.folder, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change(folder: Path, name: str, **values: Any) -> None:
    """Set fields of a JSON file; dots lead into objects; ... removes."""
    content = json.loads((folder / name).read_text())
    for path, value in values.items():
        *outer, last = path.split("__")
        place = content
        for key in outer:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    (folder / name).write_text(json.dumps(content))


def test_the_published_configuration_is_that_of_the_release() -> None:
    config = published()
    thinker = config.thinker
    assert thinker.decoder.moe is not None and thinker.audio is not None and thinker.vision is not None
    assert (thinker.decoder.num_layers, thinker.decoder.moe.num_experts, thinker.vocab_size) == (48, 128, 152064)
    assert thinker.audio.window_tokens == 104 and thinker.audio.num_tokens(100 * 60) == 13 * 60
    assert (thinker.vision.side, thinker.vision.unit, thinker.num_taps) == (48, 32, 3)
    assert config.turns.user == 872 and thinker.positions_per_s == 13


@pytest.mark.parametrize(("file", "values", "wanted"), [
    ("config.json", {"model_type": "llama"}, ["model_type is 'llama'", "qwen3_omni_moe"]),
    ("config.json", {"thinker_config__text_config__hidden_act": "gelu"}, ["text_config.hidden_act is 'gelu'"]),
    ("config.json", {"thinker_config__text_config__sliding_window": 4096}, ["sliding_window is 4096", "no window"]),
    ("config.json", {"thinker_config__text_config__num_experts_per_tok": 6}, ["there are 5 experts"]),
    ("config.json", {"thinker_config__text_config__hidden_size": ...}, ["lacks thinker_config.text_config.hidden"]),
    ("config.json", {"thinker_config__audio_config__output_dim": 41}, ["audio_config.output_dim is 41"]),
    ("config.json", {"thinker_config__audio_config__n_window": 40}, ["n_window is 40", "10 tokens, not 13"]),
    ("config.json", {"thinker_config__audio_config__n_window_infer": 99}, ["at least a chunk, 2 n_window (100)"]),
    ("config.json", {"thinker_config__vision_config__num_position_embeddings": 37}, ["expected a square number"]),
    ("config.json", {"thinker_config__vision_config__deepstack_visual_indexes": [1, 4]}, ["of which there are 4"]),
    ("config.json", {"thinker_config__vision_config__in_channels": 4}, ["in_channels is 4"]),
    ("config.json", {"thinker_config__image_token_id": 999}, ["image_token_id is 999", "below vocab_size (352)"]),
    ("config.json", {"thinker_config__image_token_id": 7}, ["the tokenizer has <|image_pad|> at 328"]),
    ("config.json", {"thinker_config__text_config__rope_scaling__rope_type": "yarn"}, ["rope_type is 'yarn'"]),
    ("config.json", {"talker_config__accept_hidden_layer": 4}, ["accept_hidden_layer is 4", "thinker, which has 4"]),
    ("config.json", {"talker_config__position_id_per_seconds": 25}, ["position_id_per_seconds is 25", "only 13"]),
    ("config.json", {"talker_config__spatial_merge_size": 1}, ["spatial_merge_size is 1", "only 2"]),
    ("config.json", {"talker_config__codec_eos_token_id": 5}, ["codec_eos_token_id is 5", "ids are codes"]),
    ("config.json", {"talker_config__speaker_id": {}}, ["speaker_id is {}", "names with their ids"]),
    ("config.json", {"code2wav_config__num_quantizers": 8}, ["num_code_groups is 16", "code2wav_config has 8"]),
    ("preprocessor_config.json", {"feature_size": 80}, ["feature_size is 80", "num_mel_bins is 128"]),
    ("preprocessor_config.json", {"patch_size": 14}, ["patch_size is 14"]),
    ("preprocessor_config.json", {"do_normalize": False}, ["do_normalize is False"]),
    ("preprocessor_config.json", {"min_pixels": 99999}, ["min_pixels is 99999", "at most max_pixels (16384)"]),
    ("chat_template.json", {"chat_template": ...}, ["no chat template"]),
])  # fmt: skip
def test_what_cannot_be_served_is_refused(folder: Path, file: str, values: dict[str, Any], wanted: list[str]) -> None:
    change(folder, file, **values)
    with pytest.raises(ConfigError) as caught:
        load(folder, {})
    assert all(words in str(caught.value) for words in wanted), str(caught.value)


def test_fields_that_may_be_left_out_have_the_models_values(folder: Path) -> None:
    text_config = "thinker_config__text_config__"
    change(
        folder,
        "config.json",
        **{f"{text_config}norm_topk_prob": ..., "user_token_id": ..., f"{text_config}rope_scaling__interleaved": ...},
    )
    change(folder, "generation_config.json", eos_token_id=[316, 318])
    for name in ("audio_end_token_id", "vision_end_token_id"):
        change(folder, "config.json", **{f"thinker_config__{name}": ...})
    config = load(folder, {})
    assert config.thinker.decoder.moe is not None and config.thinker.decoder.moe.normalised
    assert config.turns.user == 268 and config.stops == (318, 316)
    assert (config.thinker.tokens.audio_end, config.thinker.tokens.vision_end) == (343, 326)
    (folder / "preprocessor_config.json").unlink()
    config = load(folder, {})
    assert config.pictures.pixels == (56 * 56, 28 * 28 * 1280) and config.pictures.frame_pixels == (131072, 786432)
    (folder / "video_preprocessor_config.json").write_text('{"size": {"shortest_edge": 4096, "longest_edge": 9000}}')
    assert load(folder, {}).pictures.frame_pixels == (4096, 9000)


# ---- weights --------------------------------------------------------------------------------------------


def load_all(folder: Path) -> OmniConfig:
    config = load(folder, {})
    checkpoint = Checkpoint(model=str(folder), folder=folder, config=config)
    assert config.thinker.audio is not None and config.thinker.vision is not None
    with torch.device("meta"):
        modules = Thinker(config.thinker), AudioEncoder(config.thinker.audio), VisionEncoder(config.thinker.vision)
    for module, fill in zip(modules, (weights.load_thinker, weights.load_audio, weights.load_vision), strict=True):
        fill(module, checkpoint, torch.float32, CPU)  # type: ignore[operator]
    return config


@pytest.mark.parametrize(("name", "kind"), [
    ("thinker.model.layers.2.mlp.experts.4.up_proj.weight", "missing"),
    ("thinker.model.layers.1.self_attn.q_norm.weight", "missing"),
    ("thinker.audio_tower.conv2d2.bias", "missing"),
    ("thinker.visual.merger_list.1.mlp.2.weight", "missing"),
    ("thinker.model.layers.0.mlp.experts.5.up_proj.weight", "unexpected"),
    ("thinker.visual.blocks.0.attn.q_norm.weight", "unexpected"),
    ("thinker.extra.weight", "unexpected"),
    ("model.embed_tokens.weight", "unexpected"),
])  # fmt: skip
def test_weights_fit_exactly(folder: Path, name: str, kind: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    if kind == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(24, 40)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_all(folder)
    assert f"{kind}: " in str(caught.value)
    if kind == "unexpected":
        assert name in str(caught.value)


def test_four_bits_leave_what_is_routed_and_the_router() -> None:
    with torch.random.fork_rng():
        layer = SparseMLP(MoEConfig(hidden_size=256, num_experts=64, num_chosen=2, expert_size=128, shared_size=256))
    kept = layer.router.weight
    assert set(quantize_int4(layer).errors) == {"shared.gate_up", "shared.down"} and layer.router.weight is kept


# ---- parts that are absent ------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["speech", "vision_config", "audio_config"])
def test_checkpoints_without_some_parts_do_the_rest(folder: Path, golden: Any, absent: str) -> None:
    """As those that think, or caption, without speaking."""
    prefixes = {"speech": ("talker.", "code2wav."), "vision_config": ("thinker.visual.",)}
    tensors = load_file(folder / "model.safetensors")
    dropped = prefixes.get(absent, ("thinker.audio_tower.",))
    save_file({n: t for n, t in tensors.items() if not n.startswith(dropped)}, folder / "model.safetensors")
    if absent == "speech":
        change(folder, "config.json", enable_audio_output=False, talker_config=..., code2wav_config=...)
    else:
        change(folder, "config.json", **{f"thinker_config__{absent}": ...})
    model = Asked(plugin="qwen3_omni", model=str(folder))
    picture, sound = image(golden.inputs["image_uint8"]), tensor("audio", golden.inputs["audio_pcm16"])
    try:
        for part, name in ((picture, "vision_config"), (sound, "audio_config")):
            params = {"max_tokens": 1}
            if name == absent:
                with pytest.raises(RequestError) as caught:
                    model.ask(part, text("So?"), params=params)
                assert caught.value.status == 400 and "inputs.0" in (caught.value.param or "")
            else:
                assert model.ask(part, text("So?"), params=params).result.usage["prompt_tokens"] > 7
        if absent == "speech":
            with pytest.raises(RequestError, match="gives no output 'audio'"):
                model.ask(text("So?"), outputs=["audio"])
        model.assert_clean()
    finally:
        model.close()
