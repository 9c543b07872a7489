"""Every task through the engine, against what the model's authors' code gave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Golden, Model, image, tensor, text

VARIANTS = [
    "t2i_global", "t2i_text_channel", "t2i_channel", "t2i_noimgcfg", "t2i_renormmin1", "edit_global",
    "edit_text_channel",
]  # fmt: skip


@pytest.fixture
def model(served_golden: Model) -> Iterator[Model]:
    yield served_golden
    served_golden.served.assert_clean()


@pytest.mark.parametrize("kind", ["t2t", "i2t"])
def test_text_follows_as_published(model: Model, golden: Golden, kind: str) -> None:
    pictures = [image(golden.inputs["image_uint8"])] if kind == "i2t" else []
    count = golden.asked["max_length"]
    found = model.ask(*pictures, text(golden.asked["question"]), params={"temperature": 0, "max_tokens": count})
    facts = golden.facts[kind]
    assert found.ids == [facts["next_token_argmax"]]
    assert found.result.finish_reason == "length"
    assert found.result.usage == {"prompt_tokens": facts["kv_lens_before_decode"][0], "completion_tokens": count}
    assert found.result.prompt_token_ids[-len(facts["text_ids"]) :] == facts["text_ids"]
    if "decoded_text" in facts:
        shorter = {"temperature": 0, "max_tokens": count - 1}
        again = model.ask(*pictures, text(golden.asked["question"]), params=shorter)
        assert again.texts == [facts["decoded_text"]]


@pytest.mark.parametrize("name", VARIANTS)
def test_images_are_drawn_as_published(model: Model, golden: Golden, name: str) -> None:
    asked, fact, kind = golden.asked, golden.facts[name], name.partition("_")[0]
    params: dict[str, Any] = {key: asked[key] for key in ("num_timesteps", "timestep_shift", "cfg_interval")}
    params |= {
        key: fact[key]
        for key in ("cfg_text_scale", "cfg_img_scale", "cfg_renorm_type", "cfg_renorm_min")
        if key in fact
    }
    inputs = [tensor("latents", golden.inputs[f"{kind}_init_noise"])]
    if kind == "edit":
        noise = golden.inputs["vae_encode_noise"]
        inputs += [image(golden.inputs["image_uint8"]), tensor("vae_noise", noise), text(asked["edit_instruction"])]
    else:
        params |= dict(zip(("height", "width"), asked["t2i_shape_hw"], strict=True))
        inputs.append(text(asked["t2i_prompt"]))
    found = model.ask(*inputs, task="image", outputs=["image", "tensors"], params=params)
    expected = {key: golden.tensors[f"{name}.{key}"] for key in ("final_latent_tokens", "pixels", "uint8")}
    torch.testing.assert_close(found.tensors["latents"], expected["final_latent_tokens"], atol=1e-3, rtol=0)
    torch.testing.assert_close(found.tensors["pixels"], expected["pixels"], atol=2e-3, rtol=0)
    (drawn,) = found.images
    assert list(drawn.shape[:2]) == fact["output_hw"]
    assert (torch.from_numpy(drawn).int() - expected["uint8"].int()).abs().max() <= 1
    counters = found.result.counters
    guided = {which: sum(scale > 1 for scale in fact[f"cfg_{which}_scale_used"]) for which in ("text", "img")}
    assert counters["llm.flow"] == asked["num_timesteps"] - 1
    assert counters["llm_cfg_text.flow"] == guided["text"]
    assert counters.get("llm_cfg_img.flow", 0) == (guided["img"] if kind == "edit" else 0)  # else it is the main one
