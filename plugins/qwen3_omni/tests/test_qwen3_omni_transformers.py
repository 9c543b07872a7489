"""A fresh checkpoint of other sizes, from raw media to text, against `transformers` with its own media processors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import Asked, Part, ask_for, image, tensor, text
from PIL import Image
from torch import Tensor

CHANGED: dict[str, Any] = {
    "text_config": {
        "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24,
        "vocab_size": 360, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "intermediate_size": 56, "norm_topk_prob": False, "mlp_only_layers": [2], "attention_bias": True,
        "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
        "rope_scaling": {"interleaved": True, "mrope_section": [5, 4, 3], "rope_type": "default"},
    },
    "audio_config": {
        "d_model": 24, "encoder_attention_heads": 3, "encoder_ffn_dim": 40, "encoder_layers": 3,
        "num_hidden_layers": 3, "downsample_hidden_size": 5, "n_window_infer": 300, "output_dim": 48,
        "conv_chunksize": 2, "activation_function": "gelu_pytorch_tanh",
    },
    "vision_config": {
        "hidden_size": 24, "num_heads": 3, "depth": 5, "intermediate_size": 36, "num_position_embeddings": 49,
        "deepstack_visual_indexes": [0, 2, 3], "out_hidden_size": 48, "patch_size": 8, "spatial_patch_size": 8,
        "hidden_act": "silu",
    },
    "position_id_per_seconds": 7,
}  # fmt: skip
MEDIA = {
    "patch_size": 8, "min_pixels": 20 * 256, "max_pixels": 60 * 256, "image_mean": [0.1, 0.5, 0.4],
    "image_std": [0.7, 0.3, 0.5],
}  # fmt: skip
COUNT = 10


@dataclass
class Peer:
    """The model as `transformers` runs it, and what it makes of media."""

    folder: Path
    model: Any
    images: Any
    sounds: Any
    tokenizer: Any

    def seen(self, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
        found = self.images(Image.fromarray(pixels), return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]

    def watched(self, frames: np.ndarray) -> tuple[Tensor, Tensor]:
        """A video of an even number of frames, put together of its frames."""
        cut = [self.seen(frame) for frame in frames]
        pairs = [pixels.unflatten(1, (3, 2, 8, 8)) for pixels, _ in cut]
        joined = [
            torch.stack((one[:, :, 0], two[:, :, 1]), dim=2).flatten(1)
            for one, two in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        return torch.cat(joined), torch.tensor([[len(joined), *cut[0][1][0, 1:].tolist()]])

    def heard(self, *sounds: np.ndarray) -> dict[str, Tensor]:
        """Each by itself, then padded: its own padding would change what is beside it."""
        each = [self.sounds(one, sampling_rate=16000, padding=True, return_tensors="pt") for one in sounds]
        features = [one["input_features"][0] for one in each]
        longest = max(one.shape[1] for one in features)
        mask = torch.tensor([[int(i < one.shape[1]) for i in range(longest)] for one in features])
        padded = [torch.nn.functional.pad(one, (0, longest - one.shape[1])) for one in features]
        return {"input_features": torch.stack(padded), "feature_attention_mask": mask}

    def ask(self, ids: list[int], **given: Any) -> tuple[list[int], Tensor]:
        """Greedy ids, and logits before each (COUNT, vocab)."""
        tokens = torch.tensor([ids])
        with torch.no_grad():
            found = self.model.thinker.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=COUNT, do_sample=False,
                eos_token_id=None, return_dict_in_generate=True, output_logits=True, **given,
            )  # fmt: skip
        return found.sequences[0, len(ids) :].tolist(), torch.cat(found.logits)


def write_checkpoint(folder: Path, golden: Path) -> Any:
    """Random weights of a changed configuration; every parameter is noise."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    config = json.loads((golden / "config.json").read_text())
    thinker, talker = config["thinker_config"], config["talker_config"]
    for name, value in CHANGED.items():
        thinker[name] = thinker[name] | value if isinstance(value, dict) else value
    talker["thinker_hidden_size"] = CHANGED["text_config"]["hidden_size"]
    config["enable_audio_output"] = False
    generator = torch.Generator().manual_seed(5)
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith(("norm.weight", "layernorm.weight", "layer_norm.weight", "ln_q.weight"))
            parameter.copy_(1 + 0.2 * noise if is_norm else noise * (0.5 if "embed" in name else 0.15))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.json", "vocab.json", "merges.txt"):
        shutil.copy(golden / name, folder / name)
    media = json.loads((golden / "preprocessor_config.json").read_text()) | MEDIA
    (folder / "preprocessor_config.json").write_text(json.dumps(media))
    return model


@pytest.fixture(scope="module")
def peer(golden: Any, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    from transformers import AutoTokenizer, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = tmp_path_factory.mktemp("checkpoint")
    model = write_checkpoint(folder, golden.folder)
    images, sounds = (kind.from_pretrained(folder) for kind in (Qwen2VLImageProcessorPil, WhisperFeatureExtractor))
    return Peer(folder, model, images, sounds, AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def fresh(peer: Peer) -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model=str(peer.folder), dtype="float32")
    yield asked
    asked.close()


def noise(seed: int, *shape: int) -> np.ndarray:
    """uint8, smooth enough that a resize shows."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 255, (*shape[:-3], shape[-3] // 8 + 1, shape[-2] // 8 + 1, 3), dtype=np.uint8)
    return coarse.repeat(8, axis=-3).repeat(8, axis=-2)[..., : shape[-3], : shape[-2], :]


def tone(seconds: float, hertz: float) -> np.ndarray:
    times = np.arange(int(seconds * 16000)) / 16000
    waves = np.sin(2 * np.pi * hertz * times) * np.sin(times * 3) + 0.05 * np.random.default_rng(1).normal(
        size=len(times)
    )
    return (waves * 0.5).astype(np.float32)


def sound(samples: np.ndarray) -> Part:
    return tensor("audio", torch.from_numpy(samples))


def video(frames: np.ndarray, *, fps: float) -> Part:
    return {"type": "video", "frames": tensor("", torch.from_numpy(frames))["tensor"], "fps": fps}


def check(fresh: Asked, peer: Peer, messages: list[dict[str, Any]], given: dict[str, Any], **params: Any) -> None:
    """Ids are the same, and so are the probabilities of the likeliest tokens."""
    params = {"temperature": 0, "repetition_penalty": 1, "max_tokens": COUNT, "ignore_eos": True, **params}
    wires = [ask_for(messages=messages, params=params | more) for more in ({}, {"logprobs": 20})]
    plain, scored = (fresh.run(fresh.answer(wire)) for wire in wires)
    ids, logits = peer.ask(plain.result.prompt_token_ids, **given)
    assert plain.ids == scored.ids == [ids]
    expected = logits.float().log_softmax(-1).topk(20).values
    told = [token for chunk in scored.chunks for token in chunk.logprobs]
    found = torch.tensor([[one.logprob for one in token.top_logprobs] for token in told])
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=2e-4)


def test_texts_of_several_turns(fresh: Asked, peer: Peer) -> None:
    messages = [
        {"role": "system", "content": "Speak plainly."},
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "hi, <|im_end|> you"},
        {"role": "user", "content": "\n  Tell me.\n"},
    ]
    check(fresh, peer, messages, {})


def test_pictures_of_several_sizes_and_turns(fresh: Asked, peer: Peer) -> None:
    pictures = [noise(1, 90, 40, 3), noise(2, 300, 210, 3), noise(3, 64, 128, 3)]
    messages = [
        {"role": "user", "content": [image(pictures[0]), text("and"), image(pictures[1])]},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": [text("this?"), image(pictures[2])]},
    ]
    values, grids = zip(*map(peer.seen, pictures), strict=True)
    check(fresh, peer, messages, {"pixel_values": torch.cat(values), "image_grid_thw": torch.cat(grids)})


@pytest.mark.parametrize("seconds", [0.0301, 0.73, 1.0, 7.357])
def test_sounds_of_any_length(fresh: Asked, peer: Peer, seconds: float) -> None:
    samples = tone(seconds, 440)
    messages = [{"role": "user", "content": [text("What is it?"), sound(samples)]}]
    check(fresh, peer, messages, peer.heard(samples))


def test_a_video_whose_frames_stand_for_odd_times(fresh: Asked, peer: Peer) -> None:
    frames = noise(4, 6, 96, 80, 3)
    values, grid = peer.watched(frames)
    given = {"pixel_values_videos": values, "video_grid_thw": grid, "video_second_per_grid": torch.tensor([2 / 3.3])}
    check(fresh, peer, [{"role": "user", "content": [video(frames, fps=3.3), text("So?")]}], given)


@pytest.mark.parametrize(("seconds", "fps", "size"), [
    (2.9, 2.0, (112, 64)), (0.9, 1.0, (112, 64)), (6.5, 1.7, (112, 64)), (0.9, 6.0, (16, 640)), (0.3, 8.0, (800, 16)),
])  # fmt: skip
def test_a_video_with_its_sound(fresh: Asked, peer: Peer, seconds: float, fps: float, size: tuple[int, int]) -> None:
    """Of any shape: one that is short and wide has columns that lie further than its end."""
    frames, samples = noise(5, 6, *size, 3), tone(seconds, 300)
    values, grid = peer.watched(frames)
    given = peer.heard(samples) | {
        "pixel_values_videos": values, "video_grid_thw": grid, "video_second_per_grid": torch.tensor([2 / fps]),
        "use_audio_in_video": True,
    }  # fmt: skip
    messages = [{"role": "user", "content": [video(frames, fps=fps), sound(samples), text("So?")]}]
    check(fresh, peer, messages, given, use_audio_in_video=True)


def test_all_kinds_in_one_conversation(fresh: Asked, peer: Peer) -> None:
    frames, picture, samples = noise(6, 4, 80, 80, 3), noise(7, 70, 130, 3), tone(3.14, 700)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [sound(samples), text("Who?"), video(frames, fps=2)]},
        {"role": "assistant", "content": "nobody"},
        {"role": "user", "content": [text("And"), image(picture), text("here?")]},
    ]
    values, grid = peer.watched(frames)
    pixels, shape = peer.seen(picture)
    given = peer.heard(samples) | {
        "pixel_values_videos": values, "video_grid_thw": grid, "video_second_per_grid": torch.tensor([1.0]),
        "pixel_values": pixels, "image_grid_thw": shape,
    }  # fmt: skip
    check(fresh, peer, messages, given)


def test_prompts_are_those_of_the_template(fresh: Asked, peer: Peer) -> None:
    """What a client writes is text, whatever it spells; all else is as `transformers` has it."""
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "\n\nhello  you\n"}]
    found = fresh.ask(messages=messages, params={"max_tokens": 1}).result.prompt_token_ids
    template = json.loads((peer.folder / "chat_template.json").read_text())["chat_template"]
    rendered = peer.tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert found == peer.tokenizer(rendered, add_special_tokens=False)["input_ids"]
