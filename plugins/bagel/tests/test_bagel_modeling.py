"""The networks and the arithmetic around them, against what their authors' code gave, and against slower twins."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import asking
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.linear import set_batch_invariant
from mstar.plugin.spec import Checkpoint
from mstar_plugin_bagel import config as configs
from mstar_plugin_bagel import tiny, weights
from mstar_plugin_bagel.config import BagelConfig, LanguageConfig, ResizeConfig
from mstar_plugin_bagel.modeling import flow, preprocess
from mstar_plugin_bagel.modeling.flow import FlowHead, guide, patchify, unpatchify
from mstar_plugin_bagel.modeling.llm import Expert, MoT, route
from mstar_plugin_bagel.modeling.schedule import branches, schedule
from mstar_plugin_bagel.modeling.vae import Autoencoder
from mstar_plugin_bagel.modeling.vit import VisionEncoder

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "bagel"
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("no_grad")
near = partial(torch.testing.assert_close, atol=2e-4, rtol=0)
near_latents = partial(torch.testing.assert_close, atol=1e-3, rtol=0)
near_pixels = partial(torch.testing.assert_close, atol=2e-3, rtol=0)


@pytest.fixture
def no_grad() -> Any:
    with torch.no_grad():
        yield


class Model:
    """All networks of a checkpoint, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.config = configs.load(folder, {})
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        with torch.device("meta"):
            self.llm = MoT(self.config.language)
            self.vit = VisionEncoder(self.config)
            self.flow = FlowHead(self.config)
            self.vae = Autoencoder(self.config.autoencoder)
        checkpoint = Checkpoint(model=str(folder), folder=folder, config=self.config)
        weights.load_llm(self.llm, checkpoint, torch.float32, CPU)
        weights.load_vit(self.vit, checkpoint, torch.float32, CPU)
        weights.load_flow(self.flow, checkpoint, torch.float32, CPU)
        weights.load_vae(self.vae, checkpoint, torch.float32, CPU)

    def text(self, text: str) -> Tensor:
        """Ids of a segment."""
        tokens = self.config.tokens
        return torch.tensor([tokens.bos, *self.tokenizer.encode(text, add_special_tokens=False).ids, tokens.eos])

    def framed(self, image: Tensor) -> Tensor:
        """Embeddings of an image between its markers."""
        start, end = self.llm.embed(torch.tensor([self.config.tokens.image_start, self.config.tokens.image_end]))
        return torch.cat((start[None], image, end[None]))


@cache
def model() -> Model:
    return Model(GOLDEN / "checkpoint")


@cache
def golden() -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """What was asked, in words and tensors; and what came out, in numbers and tensors."""
    asked, facts = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("inputs", "golden"))
    return asked, load_file(GOLDEN / "inputs.safetensors"), facts, load_file(GOLDEN / "golden.safetensors")


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """q (T, H, D) over k and v (S, Hkv, D), of which the last T are its own -> (T, H, D)."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool)
    mask = mask.tril(len(k) - len(q)) if causal else mask
    heads = (part.transpose(0, 1)[None] for part in (q, k, v))
    return functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


class Context:
    """One sequence's keys and values, and where it goes on: what the engine's pages do."""

    def __init__(self, of: Model) -> None:
        self.model = of
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = self.position = 0

    def fork(self) -> Context:
        forked = copy.copy(self)
        forked.layers = dict(self.layers)
        return forked

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, write: bool) -> Tensor:
        if layer in self.layers:
            k, v = (torch.cat(pair) for pair in zip(self.layers[layer], (k, v), strict=True))
        if write:
            self.layers[layer] = k, v
        return attention(q, k, v, causal=causal)

    def text(self, ids: Tensor) -> Tensor:
        positions = torch.arange(self.position, self.position + len(ids))
        hidden = self.model.llm(
            self.model.llm.embed(ids), positions, None, partial(self.attend, causal=True, write=True)
        )
        self.length += len(ids)
        self.position += len(ids)
        return hidden

    def image(self, embeds: Tensor, *, is_gen: bool) -> Tensor:
        hidden = self.at_one_position(embeds, is_gen=is_gen, write=True)
        self.length += len(embeds)
        self.position += 1
        return hidden

    def at_one_position(self, embeds: Tensor, *, is_gen: bool, write: bool) -> Tensor:
        positions = torch.full((len(embeds),), self.position)
        experts = inner(len(embeds)) if is_gen else None
        return self.model.llm(embeds, positions, experts, partial(self.attend, causal=False, write=write))

    def velocity(self, tokens: Tensor, t: float, places: Tensor) -> Tensor:
        embeds = self.model.framed(self.model.flow.embed(tokens, torch.tensor([t]), places))
        return self.model.flow.velocity(self.at_one_position(embeds, is_gen=True, write=False)[1:-1])


def inner(count: int) -> Tensor:
    """All but the markers."""
    is_gen = torch.ones(count, dtype=torch.bool)
    is_gen[[0, -1]] = False
    return is_gen


def seen(of: Model, pixels: np.ndarray) -> Tensor:
    """What the language model sees of an image, after the first resize."""
    taken = preprocess.vit_input(pixels, of.config)
    return of.framed(of.vit([taken.patches], [taken.positions])[0])


def drawn_over(of: Model, pixels: np.ndarray, noise: Tensor) -> Tensor:
    """The clean latents of an image to be edited, as the language model gets them."""
    image = preprocess.vae_pixels(pixels, of.config)
    tokens = patchify(of.vae.encode(image[None], noise)[0], of.config.latent_patch)
    places = preprocess.latent_positions(*image.shape[1:], of.config)
    return of.framed(of.flow.embed(tokens, torch.zeros(()), places))


def resized() -> np.ndarray:
    return preprocess.first_resize(golden()[1]["image_uint8"].numpy(), model().config)


# ---- what the authors' code gave ------------------------------------------------------------------------


def test_special_tokens_are_found_by_name() -> None:
    tokens, facts = model().config.tokens, golden()[2]
    assert [tokens.bos, tokens.eos, tokens.image_start, tokens.image_end] == list(facts["special_ids"].values())


def test_images_are_prepared_as_published() -> None:
    expected, config = golden()[3], model().config
    assert np.array_equal(resized(), expected["preproc.resized_uint8"].numpy())
    near(preprocess.vae_pixels(resized(), config), expected["preproc.vae_image"])
    near(preprocess.vit_pixels(resized(), config), expected["preproc.vit_image"])
    taken = preprocess.vit_input(resized(), config)
    near(taken.patches, expected["i2t.vit_tokens"])
    assert torch.equal(taken.positions, expected["i2t.vit_position_ids"])


def test_the_vision_encoder_gives_the_published_tokens() -> None:
    expected, vit = golden()[3], model().vit
    taken = preprocess.vit_input(resized(), model().config)
    hidden = vit.encode(taken.patches, taken.positions, [len(taken.patches)])
    near(hidden, expected["i2t.vit_last_hidden"])
    near(vit.connect(hidden), expected["i2t.connector_out"])
    near(seen(model(), resized()), expected["i2t.prefill0.in_embeds"])


def test_the_autoencoder_gives_the_published_latents_and_pixels() -> None:
    _, inputs, _, expected = golden()
    vae, pixels = model().vae, preprocess.vae_pixels(resized(), model().config)[None]
    near(vae.moments(pixels)[0], expected["edit.vae_moments"])
    near(vae.encode(pixels, inputs["vae_encode_noise"])[0], expected["edit.vae_latent"])
    even = torch.full((1, 4, 3, 2), vae.config.scale * (0.3 - vae.config.shift))
    near_pixels(vae.decode(even)[0], expected["vae.decode_check"])


def test_times_are_embedded_as_published() -> None:
    near(model().flow.time(torch.tensor([0, 1, 0.5, 0.8181818])), golden()[3]["time_embed"])


@pytest.mark.parametrize("kind", ["t2t", "i2t"])
def test_text_follows_as_published(kind: str) -> None:
    asked, _, facts, expected = golden()
    context, prefills = Context(model()), []
    if kind == "i2t":
        prefills.append(context.image(seen(model(), resized()), is_gen=False))
    ids = model().text(asked["question"])
    assert ids.tolist() == facts[kind]["text_ids"]
    prefills.append(context.text(ids))
    for index, hidden in enumerate(prefills):
        near(hidden, expected[f"{kind}.prefill{index}.hidden"])
    assert [context.length, context.position] == [
        facts[kind]["kv_lens_before_decode"][0], facts[kind]["rope_before_decode"][0],
    ]  # fmt: skip
    token, logits, given = model().config.tokens.bos, [], []
    for _ in range(asked["max_length"]):
        logits.append(model().llm.logits(context.text(torch.tensor([token])))[0])
        given.append(token)
        token = int(logits[-1].argmax())
    near(torch.stack(logits[:3]), expected[f"{kind}.step_logits"])
    assert given == facts[kind]["output_ids_incl_bos"]
    assert [*given[1:], token] == facts[kind]["next_token_argmax"]


@cache
def contexts(kind: str) -> tuple[Context, Context, Context, list[Tensor]]:
    """Whole, without the last text, without images; and hidden states in the order of the authors' calls."""
    asked, inputs, facts, _ = golden()
    main, without_images, hidden = Context(model()), Context(model()), []
    if kind == "edit":
        hidden.append(main.image(drawn_over(model(), resized(), inputs["vae_encode_noise"]), is_gen=True))
        hidden.append(main.image(seen(model(), resized()), is_gen=False))
    without_text = main.fork()
    ids = model().text(asked["t2i_prompt" if kind == "t2i" else "edit_instruction"])
    assert ids.tolist() == facts[f"{kind}_prompt_ids"]
    hidden += [main.text(ids), without_images.text(ids)]
    return main, without_text, without_images, hidden


@pytest.mark.parametrize("kind", ["t2i", "edit"])
def test_contexts_are_read_as_published(kind: str) -> None:
    *_, hidden = contexts(kind)
    for index, states in enumerate(hidden):
        near(states, golden()[3][f"{kind}.prefill{index}.hidden"])


VARIANTS = [
    "t2i_global", "t2i_text_channel", "t2i_channel", "t2i_noimgcfg", "t2i_renormmin1", "edit_global",
    "edit_text_channel",
]  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_images_are_drawn_as_published(name: str) -> None:
    asked, inputs, facts, expected = golden()
    kind, fact = name.partition("_")[0], facts[name]
    main, without_text, without_images, _ = contexts(kind)
    rows = [main, without_text, without_images][: len(fact["denoise_calls_step0"])]
    assert [(row.position, row.length) for row in rows] == [
        (call["position"], call["kv"]) for call in fact["denoise_calls_step0"]
    ]
    height, width = asked["t2i_shape_hw"] if kind == "t2i" else resized().shape[:2]
    places = preprocess.latent_positions(height, width, model().config)
    times, lengths = schedule(asked["num_timesteps"], asked["timestep_shift"])
    assert times.tolist() == fact["timesteps"]
    scales = {"cfg_text_scale": fact["cfg_text_scale"], "cfg_img_scale": fact["cfg_img_scale"]}
    x = inputs[f"{kind}_init_noise"]
    for step, (t, length) in enumerate(zip(times.tolist(), lengths.tolist(), strict=True)):
        needed = branches(t, **scales, interval=asked["cfg_interval"])
        assert needed == (fact["cfg_text_scale_used"][step] > 1, fact["cfg_img_scale_used"][step] > 1)
        own = main.velocity(x, t, places)
        text = without_text.velocity(x, t, places) if needed[0] else None
        img = without_images.velocity(x, t, places) if needed[1] else None
        for found, key in ((own, "v_cond"), (text, "v_cfg_text"), (img, "v_cfg_img"), (x, "x_t")):
            if found is not None and f"{name}.{key}" in expected:
                near_latents(found, expected[f"{name}.{key}"][step])
        renorm = {"renorm_type": fact["cfg_renorm_type"], "renorm_min": fact.get("cfg_renorm_min", 0.0)}
        v = guide(own, text, img, **scales, **renorm)
        near_latents(v, expected[f"{name}.v"][step])
        x = x - v * length
    near_latents(x, expected[f"{name}.final_latent_tokens"])
    latents = unpatchify(x, *preprocess.latent_grid(height, width, model().config), model().config.latent_patch)
    near_latents(latents, expected[f"{name}.latent_chw"])
    pixels = model().vae.decode(latents[None])[0]
    near_pixels(pixels, expected[f"{name}.pixels"])
    assert [*pixels.shape[1:]] == fact["output_hw"]
    image = preprocess.to_uint8(pixels)
    assert (image.int() - expected[f"{name}.uint8"].int()).abs().max() <= 1


# ---- the decoder ----------------------------------------------------------------------------------------


def random_llm(**changes: Any) -> MoT:
    """A decoder of other sizes, every parameter random."""
    base = LanguageConfig(
        hidden_size=60, intermediate_size=44, num_layers=3, num_heads=6, num_kv_heads=3, vocab_size=50,
        rms_norm_eps=1e-5, rope_theta=5000.0, rope_scaling=None, qk_norm=True, activation="silu", tied=False,
        max_positions=100, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(3)
    llm = MoT(replace(base, **changes))
    for parameter in llm.parameters():
        parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 + (parameter.ndim == 1))
    return llm


def one_sequence(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)


def by_mask(llm: MoT, x: Tensor, positions: Tensor, is_gen: Tensor) -> Tensor:
    """The slow twin: both experts run on every token, and each token takes its own's."""
    cos, sin = llm.rotary(positions)
    for number, layer in enumerate(llm.layers):
        both = zip(layer.und.project(x, cos, sin), layer.gen.project(x, cos, sin), strict=True)
        q, k, v = (torch.where(is_gen[:, None, None], gen, und) for und, gen in both)
        out = one_sequence(number, q, k, v)
        x = torch.where(is_gen[:, None], layer.gen.finish(x, out), layer.und.finish(x, out))
    return torch.where(is_gen[:, None], llm.norm["gen"](x), llm.norm["und"](x))


EXPERTS = {
    "none": [0] * 12,
    "all": [1] * 12,
    "one": [0] * 5 + [1] + [0] * 6,
    "mixed": [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1],
}


@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("multiple", [1, 16])
def test_grouped_experts_give_what_a_mask_would(experts: list[int], multiple: int) -> None:
    llm, is_gen = random_llm(), torch.tensor(experts, dtype=torch.bool)
    x, positions = torch.randn(12, 60), torch.randperm(12)
    found = llm(x, positions, route(is_gen, multiple=multiple), one_sequence)
    torch.testing.assert_close(found, by_mask(llm, x, positions, is_gen), atol=1e-5, rtol=1e-5)
    groups = route(is_gen, multiple=multiple).groups
    assert len(groups) == 1 or all(len(group.of(x)) % multiple == 0 for group in groups)
    if not is_gen.any():
        assert torch.equal(found, llm(x, positions, None, one_sequence))


@pytest.mark.parametrize(("experts", "gathers"), [("none", False), ("all", False), ("mixed", True)])
def test_every_expert_runs_on_its_own_tokens_alone(
    experts: str, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, is_gen, rows = random_llm(), torch.tensor(EXPERTS[experts], dtype=torch.bool), {"und": set(), "gen": set()}
    for layer in llm.layers:
        for name in rows:
            for child in getattr(layer, name).modules():
                if isinstance(child, nn.Linear):
                    child.register_forward_hook(lambda _, inputs, __, name=name: rows[name].add(len(inputs[0])))
    gathered, gather = [], Tensor.index_select
    monkeypatch.setattr(Tensor, "index_select", lambda *args: gathered.append(1) or gather(*args))
    llm(torch.randn(12, 60), torch.arange(12), is_gen, one_sequence)
    num_gen = int(is_gen.sum())
    assert rows == {"und": {12 - num_gen} - {0}, "gen": {num_gen} - {0}}
    assert bool(gathered) == gathers


@pytest.mark.parametrize("others", [7, 30])
def test_padded_groups_keep_the_bits_of_a_token(others: int) -> None:
    llm = random_llm()
    set_batch_invariant(llm)
    is_gen = torch.cat((inner(20), torch.zeros(others, dtype=torch.bool)))
    x, positions = torch.randn(20 + others, 60), torch.arange(20 + others)

    def attend(_: int, *parts: Tensor) -> Tensor:
        alone = (part.split([20, len(part) - 20]) for part in parts)
        return torch.cat([attention(*one, causal=False) for one in zip(*alone, strict=True) if len(one[0])])

    together = llm(x, positions, route(is_gen, multiple=16), attend)[:20]
    assert torch.equal(together, llm(x[:20], positions[:20], route(is_gen[:20], multiple=16), attend))


def test_sequences_share_a_forward() -> None:
    main, without_text, without_images, _ = contexts("edit")
    rows, x = (main, without_text, without_images), golden()[1]["edit_init_noise"]
    places, t = preprocess.latent_positions(40, 56, model().config), torch.tensor([0.3, 0.9, 0.5])
    lone = [row.velocity(x, float(time), places) for row, time in zip(rows, t, strict=True)]
    owners = torch.arange(3).repeat_interleave(len(x))
    embeds = model().flow.embed(x.repeat(3, 1), t, places.repeat(3), owners=owners).split(len(x))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(rows, q.chunk(3), k.chunk(3), v.chunk(3), strict=True)
        return torch.cat([row.attend(layer, *part, causal=False, write=False) for row, *part in parts])

    is_gen = inner(len(x) + 2).repeat(3)
    positions = torch.tensor([row.position for row in rows]).repeat_interleave(len(x) + 2)
    hidden = model().llm(torch.cat([model().framed(part) for part in embeds]), positions, is_gen, attend)
    torch.testing.assert_close(model().flow.velocity(hidden[is_gen]), torch.cat(lone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}], ids=["plain", "scaled"]
)
def test_the_decoder_agrees_with_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    llm = random_llm(qk_norm=False, rope_scaling=scaling)
    published = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=60, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
            vocab_size=50, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="eager",
            rope_parameters=scaling or {"rope_type": "default", "rope_theta": 5000.0},
        )
    ).eval()  # fmt: skip
    rules = {ours: theirs for theirs, ours in renamed(published, "language_model.", weights.LLM).items()}
    state, merged = published.state_dict(), dict(llm.state_dict())
    for name, tensor in merged.items():
        pieces = [rules[f"{name}[{part}]"] for part in range(3) if f"{name}[{part}]" in rules] or [rules.get(name, "")]
        if pieces == [""]:
            assert "gen" in name
            continue
        rows = tensor.split([len(state[piece]) for piece in pieces])
        for piece, part in zip(pieces, rows, strict=True):
            state[piece] = part
    published.load_state_dict(state)
    ids = torch.randint(50, (11,))
    found = llm.logits(llm(llm.embed(ids), torch.arange(11), None, one_sequence))
    torch.testing.assert_close(found, published(ids[None]).logits[0], atol=2e-4, rtol=1e-4)


def renamed(module: nn.Module, prefix: str, rules: dict[str, str]) -> dict[str, str]:
    """Names of a module of transformers -> ours, by the rules for checkpoints."""
    from mstar.layers.weights import _translator

    translate = _translator(rules)
    return {name: str(translate(prefix + name)) for name in module.state_dict()}


def test_generation_norms_its_queries_in_float32() -> None:
    llm = random_llm().to(torch.bfloat16)
    dtypes: dict[str, torch.dtype] = {}
    expert: Expert
    for name in ("und", "gen"):
        expert = getattr(llm.layers[0], name)
        expert.q_norm.register_forward_hook(lambda _, inputs, __, name=name: dtypes.update({name: inputs[0].dtype}))
    seen_types = set()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen_types.update((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, causal=True)

    x, is_gen = torch.randn(12, 60, dtype=torch.bfloat16), torch.tensor(EXPERTS["mixed"], dtype=torch.bool)
    assert llm(x, torch.arange(12), is_gen, attend).dtype == torch.bfloat16
    assert dtypes == {"und": torch.bfloat16, "gen": torch.float32} and seen_types == {torch.bfloat16}


class Decode(nn.Module):
    def __init__(self, llm: MoT) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, last: Tensor, positions: Tensor) -> Tensor:
        # Each row sees itself alone: the value of its key's group.
        return self.llm.logits(
            self.llm(self.llm.embed(last), positions, None, lambda _, q, k, v: v.repeat(1, 2, 1) + q)
        )


def test_decoding_is_traced_whole_for_any_batch() -> None:
    step, batch = Decode(random_llm()), torch.export.Dim("batch", min=2, max=64)
    example = torch.arange(4), torch.arange(4)
    traced = torch.export.export(step, example, dynamic_shapes=({0: batch}, {0: batch})).module()
    for count in (2, 7):
        last, positions = torch.randint(50, (count,)), torch.randint(90, (count,))
        torch.testing.assert_close(traced(last, positions), step(last, positions), atol=1e-5, rtol=1e-5)


def test_a_tied_head_is_the_embedding() -> None:
    llm = random_llm(tied=True)
    assert llm.head.weight is llm.embedding.weight


# ---- the vision encoder and the autoencoder -------------------------------------------------------------


def test_the_vision_encoder_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = tiny.Sizes(vision_hidden=40, vision_heads=5, vision_layers=3, vision_mlp=36, vision_patch=6, vision_side=4)
    changes = {"layer_norm_eps": 1e-3, "hidden_act": "quick_gelu"}
    folder = change(tiny.write(tmp_path, sizes), "vit_config.json", **changes)
    vit = Model(folder).vit
    published = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=40, intermediate_size=36, num_hidden_layers=3, num_attention_heads=5, image_size=24,
            patch_size=6, vision_use_head=False, **changes,
        )
    ).eval()  # fmt: skip
    inner_model = getattr(published, "vision_model", published)
    stored = {
        name.removeprefix("vit_model.vision_model."): tensor
        for name, tensor in load_file(folder / "ema.safetensors").items()
        if name.startswith("vit_model.")
    }
    kernel = stored["embeddings.patch_embedding.weight"]
    stored["embeddings.patch_embedding.weight"] = kernel.unflatten(1, (6, 6, 3)).permute(0, 3, 1, 2)
    inner_model.load_state_dict(stored)
    pixels = torch.randn(3, 24, 24)
    patches = pixels.unflatten(2, (4, 6)).unflatten(1, (4, 6)).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
    found = vit.encode(patches, torch.arange(16), [16])
    torch.testing.assert_close(found, published(pixels[None]).last_hidden_state[0], atol=1e-4, rtol=1e-4)


def test_images_of_different_sizes_share_a_forward() -> None:
    config, vit = model().config, model().vit
    images = [np.random.default_rng(n).integers(256, size=(h, w, 3), dtype=np.uint8) for n, (h, w) in enumerate(
        [(40, 56), (24, 24), (56, 32)]
    )]  # fmt: skip
    taken = [preprocess.vit_input(image, config) for image in images]
    together = vit([one.patches for one in taken], [one.positions for one in taken])
    for one, found in zip(taken, together, strict=True):
        torch.testing.assert_close(found, vit([one.patches], [one.positions])[0], atol=1e-5, rtol=1e-5)


def test_the_published_autoencoder_has_the_published_size() -> None:
    with torch.device("meta"):
        vae = Autoencoder(configs.published().autoencoder)
    assert sum(parameter.numel() for parameter in vae.parameters()) == 83_819_683  # FLUX's


def test_encoding_draws_with_the_noise_it_is_given() -> None:
    vae, pixels = model().vae, torch.randn(2, 3, 16, 24)
    mean, log_variance = vae.moments(pixels).chunk(2, dim=1)
    noise, still = torch.randn_like(mean), torch.zeros_like(mean)
    config = vae.config
    near(vae.encode(pixels, still), config.scale * (mean - config.shift))
    near(vae.encode(pixels, noise) - vae.encode(pixels, still), config.scale * (log_variance / 2).exp() * noise)
    one = vae.decode(noise[:1])
    torch.testing.assert_close(vae.decode(noise)[:1], one, atol=1e-4, rtol=1e-4)


# ---- steps and guidance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1.0, 1.15, 3.0, 4.7])
def test_times_are_those_of_torch(shift: float) -> None:
    for count in [*range(2, 60), 100, 333, 1000]:
        times = torch.linspace(1, 0, count)
        times = shift * times / (1 + (shift - 1) * times)
        starts, lengths = schedule(count, shift)
        assert torch.equal(torch.tensor(starts), times[:-1])
        assert torch.equal(torch.tensor(lengths), times[:-1] - times[1:])


def forwards(count: int, shift: float, text: float, img: float, interval: tuple[float, float]) -> int:
    times = schedule(count, shift)[0]
    return sum(1 + sum(branches(t, text, img, interval)) for t in times)


def test_branches_that_do_not_matter_are_not_run() -> None:
    usual = (0.4, 1.0)
    assert forwards(50, 3.0, 4.0, 1.0, usual) == 90
    assert forwards(50, 3.0, 1.0, 1.0, usual) == 49
    assert forwards(50, 3.0, 4.0, 1.5, usual) == 49 + 2 * 41
    assert forwards(50, 3.0, 1.0, 2.0, usual) == 49  # no guidance by images alone
    assert forwards(50, 3.0, 4.0, 2.0, (0.0, 1.0)) == 3 * 49
    assert forwards(50, 3.0, 4.0, 2.0, (0.0, 0.999)) == 49 + 2 * 48  # the first step is at 1


def test_the_border_of_the_interval_is_compared_in_float32() -> None:
    at = np.float32(0.4)  # a little above 0.4
    assert branches(at, 4.0, 2.0, (0.4, 1.0)) == branches(float(at), 4.0, 2.0, (0.4, 1.0)) == (False, False)
    assert branches(at, 4.0, 2.0, (0.0, 0.4)) == (True, True)


@pytest.mark.parametrize("kind", flow.RENORMS)
@pytest.mark.parametrize("least", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("has_img", [False, True])
def test_guidance_is_what_it_says(kind: str, least: float, has_img: bool) -> None:
    v, text, img = torch.randn(3, 9, 8)
    scales = {"cfg_text_scale": 4.0, "cfg_img_scale": 1.7}
    found = guide(v, text, img if has_img else None, **scales, renorm_type=kind, renorm_min=least)
    by_text = text + 4.0 * (v - text)
    whole = img + 1.7 * (by_text - img) if has_img else by_text
    if kind == "global":
        expected = whole * min(1.0, max(least, float(v.norm() / whole.norm())))
    elif kind == "channel":
        expected = whole * (v.norm(dim=1) / whole.norm(dim=1)).clamp(least, 1)[:, None]
    else:
        short = by_text * (v.norm(dim=1) / by_text.norm(dim=1)).clamp(least, 1)[:, None]
        expected = img + 1.7 * (short - img) if has_img else short
    torch.testing.assert_close(found, expected)
    assert torch.equal(guide(v, None, None, **scales, renorm_type=kind, renorm_min=least), v)


def test_an_unknown_renorm_is_an_error() -> None:
    v = torch.randn(2, 4)
    with pytest.raises(AssertionError, match="'local'; known: global, channel, text_channel"):
        guide(v, v, None, cfg_text_scale=2.0, cfg_img_scale=1.0, renorm_type="local", renorm_min=0.0)


def test_latents_become_tokens_and_back() -> None:
    latents = torch.randn(3, 6, 10)
    tokens = patchify(latents, 2)
    assert tokens.shape == (15, 12)
    assert torch.equal(tokens[7], latents[:, 2:4, 4:6].permute(1, 2, 0).flatten())  # row 1, column 2: rows, columns, z
    assert torch.equal(unpatchify(tokens, 3, 5, 2), latents)
    assert torch.equal(patchify(torch.nn.functional.pad(latents, (0, 1, 0, 1)), 2), tokens)


# ---- images ---------------------------------------------------------------------------------------------

RELEASED = configs.published().vae_resize


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1024, 1024), (1024, 1024)),
        ((600, 700), (608, 704)),
        ((100, 100), (512, 512)),
        ((3000, 4000), (768, 1024)),
        ((4000, 100), (1024, 32)),  # the limit of the long side wins
        ((520, 1000), (512, 992)),  # 32.5 and 62.5 strides: halves go to the even one
    ],
)
def test_sizes_keep_to_the_limits(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert preprocess.fitted_size(*size, RELEASED) == expected
    assert preprocess.fitted_size(*size[::-1], RELEASED) == expected[::-1]


def test_many_pixels_are_scaled_down() -> None:
    limits = ResizeConfig(max_size=4096, min_size=16, stride=16, max_pixels=1024 * 1024)
    height, width = preprocess.fitted_size(2048, 2048, limits)
    assert (height, width) == (512, 512)  # by the ratio of pixels, not its root


def test_images_are_resized_by_pillow_twice() -> None:
    config = replace(
        model().config,
        vae_resize=ResizeConfig(max_size=64, min_size=8, stride=8),
        vit_resize=ResizeConfig(max_size=56, min_size=14, stride=14),
    )
    pixels = np.random.default_rng(0).integers(256, size=(100, 70, 3), dtype=np.uint8)
    first = Image.fromarray(pixels).resize((48, 64), Image.Resampling.BICUBIC)
    second = np.asarray(first.resize((42, 56), Image.Resampling.BICUBIC))
    assert np.array_equal(preprocess.first_resize(pixels, config), np.asarray(first))
    near(preprocess.vit_pixels(np.asarray(first), config).permute(1, 2, 0), torch.tensor(second / 127.5 - 1).float())


def test_positions_lie_in_the_tables_corner_or_are_spread_over_it() -> None:
    assert preprocess.grid_positions(2, 3, side=8, interpolate=False).tolist() == [0, 1, 2, 8, 9, 10]
    assert preprocess.grid_positions(2, 4, side=8, interpolate=True).tolist() == [0, 2, 4, 6, 32, 34, 36, 38]
    assert preprocess.grid_positions(8, 8, side=8, interpolate=True).tolist() == list(range(64))
    with pytest.raises(AssertionError, match="9x2 in a table of 8x8"):
        preprocess.grid_positions(9, 2, side=8, interpolate=False)


def test_bytes_are_cut_off_not_rounded() -> None:
    pixels = torch.tensor([-3.0, -1.0, 0.0, 0.9999, 1.0, 2.0])[None, None].expand(3, 1, 6)
    assert preprocess.to_uint8(pixels)[0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]


# ---- other checkpoints ----------------------------------------------------------------------------------


def change(folder: Path, file: str, **changes: Any) -> Path:
    """Fields of one of its files set anew; None takes one out."""
    content = {**json.loads((folder / file).read_text()), **changes}
    (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return folder


OTHER = tiny.Sizes(
    hidden=72, mlp=52, layers=3, heads=3, kv_heads=1, vision_hidden=30, vision_mlp=50, vision_layers=1, vision_heads=5,
    vision_patch=8, vision_side=5, width=32, multipliers=(2, 1), blocks=2, channels=3, latent_side=9,
)  # fmt: skip


@pytest.mark.parametrize("sizes", [tiny.Sizes(), OTHER], ids=["tiny", "other"])
def test_a_checkpoint_of_any_size_chats_and_draws(sizes: tiny.Sizes, tmp_path: Path) -> None:
    of = Model(tiny.write(tmp_path, sizes))
    config: BagelConfig = of.config
    pixels = np.random.default_rng(0).integers(256, size=(50, 31, 3), dtype=np.uint8)
    pixels = preprocess.first_resize(pixels, config)
    main, places = Context(of), preprocess.latent_positions(*pixels.shape[:2], config)
    image = preprocess.vae_pixels(pixels, config)
    grid = preprocess.latent_grid(*image.shape[1:], config)
    noise = torch.randn(1, sizes.channels, *(config.latent_patch * count for count in grid))
    main.image(drawn_over(of, pixels, noise), is_gen=True)
    main.image(seen(of, pixels), is_gen=False)
    assert torch.isfinite(of.llm.logits(main.text(of.text("Grüße, 東京!")))).all()
    velocity = main.velocity(torch.randn(len(places), config.latent_dim), 0.5, places)
    assert velocity.shape == (len(places), config.latent_dim) and 0.1 < velocity.std() < 10
    drawn = of.vae.decode(unpatchify(velocity, *grid, config.latent_patch)[None])
    assert drawn.shape == (1, 3, *image.shape[1:]) and torch.isfinite(drawn).all()


@pytest.mark.parametrize("sizes", [tiny.Sizes(), OTHER], ids=["tiny", "other"])
def test_the_engine_gives_what_the_networks_do_by_themselves(sizes: tiny.Sizes, tmp_path: Path) -> None:
    of = Model(tiny.write(tmp_path, sizes))
    source = np.random.default_rng(0).integers(256, size=(50, 31, 3), dtype=np.uint8)
    pixels = preprocess.first_resize(source, of.config)
    height, width = preprocess.vae_size(pixels, of.config)
    places = preprocess.latent_positions(height, width, of.config)
    grid = [of.config.latent_patch * count for count in preprocess.latent_grid(height, width, of.config)]
    noise, x = torch.randn(1, sizes.channels, *grid), torch.randn(len(places), of.config.latent_dim)
    given, words = (asking.tensor("latents", x), asking.tensor("vae_noise", noise)), "make it blue"
    main, texts, looked = Context(of), Context(of), Context(of)
    main.image(drawn_over(of, pixels, noise), is_gen=True)
    main.image(seen(of, pixels), is_gen=False)
    rows = (main, main.fork(), texts)
    main.text(of.text(words)), texts.text(of.text(words))
    for t, length in zip(*(times.tolist() for times in schedule(5, 3.0)), strict=True):
        velocities = [row.velocity(x, t, places) for row in rows]
        scales = {"cfg_text_scale": 4.0, "cfg_img_scale": 2.0, "renorm_type": "text_channel", "renorm_min": 0.0}
        x = x - guide(*velocities, **scales) * length
    looked.image(seen(of, pixels), is_gen=False)
    looked.text(of.text(words))
    ids = [of.config.tokens.bos]
    while len(ids) < 9:
        ids.append(int(of.llm.logits(looked.text(torch.tensor(ids[-1:])))[0].argmax()))
    inputs = asking.image(source), *given, asking.text(words)
    served = asking.Asked(plugin="bagel", model=str(of.config.folder))
    try:
        drawn = served.ask(*inputs, task="image", outputs=["tensors"], params={"num_timesteps": 5})
        near_latents(drawn.tensors["latents"], x)
        params = {"temperature": 0, "repetition_penalty": 1, "max_tokens": 8, "ignore_eos": True}
        assert served.ask(inputs[0], inputs[-1], params=params).ids == [ids[1:]]
        served.assert_clean()
    finally:
        served.close()


def test_the_tiny_checkpoint_is_the_same_every_time_and_quick(tmp_path: Path) -> None:
    start = time.process_time()
    one = tiny.make(tmp_path / "one")
    assert time.process_time() - start < 3
    two = tiny.make(tmp_path / "two")
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in (GOLDEN / "checkpoint").iterdir())
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    tensors = {**load_file(one / "ema.safetensors"), **load_file(one / "ae.safetensors")}
    assert all(tensor.std() > 0.01 and tensor.isfinite().all() for tensor in tensors.values())
    assert sum((one / name).stat().st_size for name in names) < 4 << 20


def test_the_tiny_tokenizer_takes_any_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.make(tmp_path) / "tokenizer.json"))
    text = "the 3 foxes'  are\r\n in 東京 🦊\x00\t!"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) < len(text.encode())
