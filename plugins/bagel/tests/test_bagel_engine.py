"""Every task through the engine, against what the model's authors' code gave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from asking import Answer, Asked, image, tensor, text
from torch import Tensor

from mstar_plugin_bagel.modeling.schedule import schedule

VARIANTS = [
    "t2i_global", "t2i_text_channel", "t2i_channel", "t2i_noimgcfg", "t2i_renormmin1", "edit_global",
    "edit_text_channel",
]  # fmt: skip
near = partial(torch.testing.assert_close, atol=2e-4, rtol=0)
near_latents = partial(torch.testing.assert_close, atol=1e-3, rtol=0)


@contextlib.contextmanager
def forwards(model: Asked) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Positions and hidden states of each forward of the language model."""
    found: list[tuple[Tensor, Tensor]] = []
    llm = model.worker.modules["llm"].node.llm
    hook = llm.register_forward_hook(lambda _, inputs, hidden: found.append((inputs[1], hidden)))
    try:
        yield found
    finally:
        hook.remove()


@contextlib.contextmanager
def steps(model: Asked) -> Iterator[list[dict[str, Tensor | None]]]:
    """What each step of a lone drawing is made of: latents before and after, velocities; without the markers' rows."""
    found: list[dict[str, Tensor | None]] = []
    methods = model.worker.modules["combine_cfg"].methods
    step = methods["step"]

    def watched(ctx: Any, **ports: Any) -> Any:
        made = step(ctx, **ports)
        rows = {name: value[0] for name, value in [*ports.items(), ("next", made["latents"])]}
        found.append({name: None if value is None else value[1:-1] for name, value in rows.items()})
        return made

    methods["step"] = watched
    try:
        yield found
    finally:
        methods["step"] = step


def ask_text(model: Asked, golden: Any, kind: str, *, count: int) -> Answer:
    pictures = [image(golden.inputs["image_uint8"])] if kind == "i2t" else []
    params = {"temperature": 0, "repetition_penalty": 1, "max_tokens": count}  # its generation_config.json says 1.05
    return model.ask(*pictures, text(golden.asked["question"]), params=params)


def ask_image(model: Asked, golden: Any, name: str) -> Answer:
    asked, fact, kind = golden.asked, golden.facts[name], name.partition("_")[0]
    params: dict[str, Any] = {key: asked[key] for key in ("num_timesteps", "timestep_shift", "cfg_interval")}
    names = ("cfg_text_scale", "cfg_img_scale", "cfg_renorm_type", "cfg_renorm_min")
    params |= {key: fact[key] for key in names if key in fact}
    inputs = [tensor("latents", golden.inputs[f"{kind}_init_noise"])]
    if kind == "edit":
        noise = tensor("vae_noise", golden.inputs["vae_encode_noise"])
        inputs += [image(golden.inputs["image_uint8"]), noise, text(asked["edit_instruction"])]
    else:
        params |= dict(zip(("height", "width"), asked["t2i_shape_hw"], strict=True))
        inputs.append(text(asked["t2i_prompt"]))
    return model.ask(*inputs, task="image", outputs=["image", "tensors"], params=params)


@pytest.mark.parametrize("kind", ["t2t", "i2t"])
def test_text_follows_as_published(model: Asked, golden: Any, kind: str) -> None:
    facts, count = golden.facts[kind], golden.asked["max_length"]
    found = ask_text(model, golden, kind, count=count)
    assert found.ids == [facts["next_token_argmax"]]
    assert found.result.finish_reason == "length"
    assert found.result.usage == {"prompt_tokens": facts["kv_lens_before_decode"][0], "completion_tokens": count}
    assert found.result.prompt_token_ids[-len(facts["text_ids"]) :] == facts["text_ids"]
    if "decoded_text" in facts:
        assert ask_text(model, golden, kind, count=count - 1).texts == [facts["decoded_text"]]


@pytest.mark.parametrize("kind", ["t2t", "i2t"])
def test_texts_are_read_and_scored_as_published(model: Asked, golden: Any, kind: str) -> None:
    with forwards(model) as found:
        ask_text(model, golden, kind, count=golden.asked["max_length"])
    (_, read), *written = found
    prefills = [golden.tensors[f"{kind}.prefill{index}.hidden"] for index in range(2 if kind == "i2t" else 1)]
    near(read, torch.cat(prefills))
    assert [int(positions) for positions, _ in written] == golden.facts[kind]["decode_positions"]
    logits = model.worker.modules["llm"].node.llm.logits(torch.cat([hidden for _, hidden in written[:3]]))
    near(logits, golden.tensors[f"{kind}.step_logits"])


@pytest.mark.parametrize("name", ["t2i_global", "edit_global"])
def test_contexts_are_read_as_published(model: Asked, golden: Any, name: str) -> None:
    """All in one forward, but for the texts alone; without images those are all there is."""
    kind = name.partition("_")[0]
    expected = [
        tuple(golden.tensors[f"{kind}.prefill{index}.{key}"] for key in ("position_ids", "hidden"))
        for index in range(len(golden.facts[kind]["prefills"]))
    ]
    with forwards(model) as found:
        ask_image(model, golden, name)
    by_length = {len(hidden): (positions, hidden) for positions, hidden in found}
    for parts in (expected[:-1], expected[-1:]):
        positions, hidden = by_length[sum(len(hidden) for _, hidden in parts)]
        assert torch.equal(positions, torch.cat([positions for positions, _ in parts]))
        near(hidden, torch.cat([hidden for _, hidden in parts]))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_branch_of_every_step_is_as_published(model: Asked, golden: Any, name: str) -> None:
    with steps(model) as found:
        ask_image(model, golden, name)
    fact = golden.facts[name]
    starts, lengths = schedule(golden.asked["num_timesteps"], golden.asked["timestep_shift"])
    assert starts.tolist() == fact["timesteps"] and len(found) == len(lengths)
    for number, (step, length) in enumerate(zip(found, lengths.tolist(), strict=True)):
        guided = {which: fact[f"cfg_{which}_scale_used"][number] > 1 for which in ("text", "img")}
        if guided["img"] and not name.startswith("edit"):
            assert step["v_img"] is None  # without images it is the main branch
            step["v_img"] = step["v"]
        assert {which: step[f"v_{which}"] is not None for which in guided} == guided
        x, after = step["latents"], step["next"]
        assert x is not None and after is not None
        rows = {"x_t": x, "v_cond": step["v"], "v": (x - after) / length}
        rows |= {f"v_cfg_{which}": step[f"v_{which}"] for which in guided if guided[which]}
        for key, value in rows.items():
            if f"{name}.{key}" in golden.tensors:
                near_latents(value, golden.tensors[f"{name}.{key}"][number])


@pytest.mark.parametrize("name", VARIANTS)
def test_images_are_drawn_as_published(model: Asked, golden: Any, name: str) -> None:
    fact = golden.facts[name]
    found = ask_image(model, golden, name)
    expected = {key: golden.tensors[f"{name}.{key}"] for key in ("final_latent_tokens", "pixels", "uint8")}
    torch.testing.assert_close(found.tensors["latents"], expected["final_latent_tokens"], atol=1e-3, rtol=0)
    torch.testing.assert_close(found.tensors["pixels"], expected["pixels"], atol=2e-3, rtol=0)
    (drawn,) = found.images
    assert list(drawn.shape[:2]) == fact["output_hw"]
    assert (torch.from_numpy(drawn.copy()).int() - expected["uint8"].int()).abs().max() <= 1
    counters, steps = found.result.counters, golden.asked["num_timesteps"] - 1
    guided = {which: sum(scale > 1 for scale in fact[f"cfg_{which}_scale_used"]) for which in ("text", "img")}
    assert counters["llm.flow"] == counters["combine_cfg.step"] == steps
    assert counters["llm_cfg_text.flow"] == guided["text"]
    by_images = guided["img"] if name.startswith("edit") else 0  # without images it is the main branch
    assert counters.get("llm_cfg_img.flow", 0) == by_images


@pytest.mark.parametrize(
    ("params", "branches"),
    [({}, 90), ({"cfg_text_scale": 1}, 49), ({"cfg_img_scale": 1.5}, 90), ({"cfg_interval": [0, 1]}, 98)],
    ids=["usual", "unguided", "both", "always"],
)
def test_branches_that_do_not_matter_are_not_run(model: Asked, params: dict[str, Any], branches: int) -> None:
    found = model.ask(text("a fox"), outputs=["image"], params={"height": 8, "width": 8, **params})
    counters = found.result.counters
    assert sum(count for name, count in counters.items() if name.endswith(".flow")) == branches
    assert counters["combine_cfg.step"] == 49
    assert "vae_encoder.encode" not in counters and "vit_encoder.encode" not in counters


def test_each_image_is_encoded_as_far_as_it_is_needed(model: Asked, golden: Any) -> None:
    picture, short = image(golden.inputs["image_uint8"]), {"num_timesteps": 2}
    looked = model.ask(picture, picture, text("which?"), params={"max_tokens": 1}).result.counters
    assert looked == {"vit_encoder.encode": 2, "llm.prefill": 1, "llm.decode": 1}
    edited = model.ask(picture, picture, text("join them"), task="image", params=short).result.counters
    assert edited == {
        "vit_encoder.encode": 2, "vae_encoder.encode": 2, "llm.condition": 2, "llm.prefill": 1,
        "llm_cfg_img.prefill": 1, "llm.flow": 1, "llm_cfg_text.flow": 1, "llm_cfg_img.flow": 1, "combine_cfg.step": 1,
        "vae_decoder.decode": 1,
    }  # fmt: skip
    unguided = model.ask(picture, text("join"), task="image", params=short | {"cfg_text_scale": 1}).result.counters
    assert "llm_cfg_img.prefill" not in unguided


@pytest.mark.parametrize("budget", [1, 16, 40])
def test_long_prompts_are_read_in_parts(golden: Any, budget: int) -> None:
    parts = Asked(plugin="bagel", model=str(golden.folder), max_num_batched_tokens=budget, block_size=8)
    try:
        count = golden.asked["max_length"]
        assert ask_text(parts, golden, "i2t", count=count).ids == [golden.facts["i2t"]["next_token_argmax"]]
        found = ask_image(parts, golden, "edit_global").tensors["latents"]
        torch.testing.assert_close(found, golden.tensors["edit_global.final_latent_tokens"], atol=1e-3, rtol=0)
        parts.assert_clean()
    finally:
        parts.close()
