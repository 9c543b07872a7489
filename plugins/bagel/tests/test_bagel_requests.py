"""Requests beside each other and one after another; several outputs; thoughts; previews; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import Answer, Asked, ask_for, image, tensor, text, token_ids
from PIL import Image
from safetensors.torch import load_file

from mstar.errors import RequestError
from mstar.server.native import GenerateRequest
from mstar.server.results import Outputs
from mstar.types import ImageChunk, ProgressChunk, Request, TextChunk

GREEDY = {"temperature": 0, "repetition_penalty": 1}
SMALL = {"height": 16, "width": 24, "num_timesteps": 6}


def picture(seed: int, height: int = 40, width: int = 56) -> dict[str, Any]:
    return image(np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8))


def draw(*inputs: dict[str, Any], seed: int = 1, stream: bool = False, **params: Any) -> GenerateRequest:
    outputs = ["image", "tensors"]
    return ask_for(*inputs, task="image", outputs=outputs, seed=seed, stream=stream, params=SMALL | params)


def chat(*inputs: dict[str, Any], seed: int = 1, **params: Any) -> GenerateRequest:
    return ask_for(*inputs, seed=seed, params={"max_tokens": 12, **params})


def one(served: Asked, wire: GenerateRequest) -> Answer:
    return served.ask_all(wire)[0]


MIXED = [
    chat(text("What is a fox?"), **GREEDY),
    draw(text("a red fox")),
    draw(picture(1), text("make it blue"), height=None, width=None, seed=2),
    chat(picture(2, 30, 70), text("and this?"), temperature=1.0, top_p=0.9, seed=7),
    draw(text("a boat"), think=True, think_max_tokens=7, **GREEDY),
    draw(text("a hill"), cfg_text_scale=1, height=24, width=8, num_timesteps=4),
    draw(picture(3), picture(4, 24, 24), text("both"), cfg_renorm_type="channel", cfg_interval=[0.3, 0.9]),
    chat(text("Say"), picture(5), text("more"), n=2, temperature=0.8),
]


def same(found: Answer, alone: Answer, *, exact: bool = False) -> None:
    assert (found.ids, found.texts, found.thoughts) == (alone.ids, alone.texts, alone.thoughts)
    assert found.result.counters == alone.result.counters
    assert found.tensors.keys() == alone.tensors.keys()
    for name, expected in alone.tensors.items():
        atol = 0 if exact else 1e-4 if name == "latents" else 2e-3
        torch.testing.assert_close(found.tensors[name], expected, atol=atol, rtol=0)


PAGE = 2 * 2 * 2 * 16 * 4 * 4
"""Bytes: keys and values, layers, heads, their width, of float32, tokens."""
NARROW = {"kv_cache_memory_bytes": 60 * PAGE, "block_size": 4, "max_model_len": 200}
"""Memory for three requests of `MIXED`, two if they are large."""


@pytest.fixture(scope="module")
def served(golden: Any) -> Iterator[Callable[..., Asked]]:
    """`served(**settings)`: an engine of the golden checkpoint, kept until the module's tests are over."""
    started: dict[str, Asked] = {}

    def start(**settings: Any) -> Asked:
        key = repr(sorted(settings.items()))
        if key not in started:
            started[key] = Asked(plugin="bagel", model=str(golden.folder), **settings)
        return started[key]

    yield start
    for asked in started.values():
        asked.close()


@pytest.fixture(scope="module")
def narrow(served: Callable[..., Asked]) -> Asked:
    return served(**NARROW)


@pytest.mark.parametrize("exact", [False, True], ids=["usual", "batch invariant"])
@pytest.mark.parametrize("memory", [{}, NARROW], ids=["ample", "for three"])
def test_mixed_requests_do_not_change_each_other(
    served: Callable[..., Asked], exact: bool, memory: dict[str, Any]
) -> None:
    """Eight at once or one after the other began, some of which hang up, against each alone."""
    model = served(batch_invariant=exact, **memory)
    lone = [one(served(batch_invariant=exact), wire) for wire in MIXED]
    crowds: list[dict[int, int]] = [{}, {1: 2, 4: 3}, {0: 4, 6: 2, 7: 3}]
    for apart_s, aborted in zip((0.0, 0.0, 0.02), crowds, strict=True):
        found = model.ask_all(*MIXED, apart_s=apart_s, abort_after=aborted)
        for place, (answer, expected) in enumerate(zip(found, lone, strict=True)):
            if place in aborted:
                assert isinstance(answer, RequestError) and answer.code == "aborted"
            else:
                same(answer, expected, exact=exact)
        model.assert_clean()
    assert (model.worker.scheduler.num_swaps > 0) == bool(memory)


def test_texts_are_read_again_where_nothing_can_be_moved(golden: Any) -> None:
    served = Asked(
        plugin="bagel", model=str(golden.folder), kv_cache_memory_bytes=24 * PAGE, block_size=4, max_model_len=90,
        swap_space_bytes=0,
    )  # fmt: skip
    wires = [chat(text(f"{n}: what is a fox?"), max_tokens=30, temperature=1.0, seed=n) for n in range(5)]
    try:
        lone = [one(served, wire) for wire in wires]
        for found, expected in zip(served.ask_all(*wires), lone, strict=True):
            same(found, expected)
        assert served.worker.scheduler.num_rebuilds > 0
        served.assert_clean()
    finally:
        served.close()


def test_branches_and_drawings_of_any_size_share_a_forward(model: Asked) -> None:
    def flows() -> tuple[float, float]:
        calls, rows, _ = model.worker.modules["llm"].method_s["flow"]
        return calls, rows

    edit = draw(picture(1), text("blue"), height=None, width=None)
    one(model, edit)
    before = flows()
    one(model, edit)
    calls, rows = (after - was for after, was in zip(flows(), before, strict=True))
    assert (calls, rows) == (5, 15)
    before = flows()
    model.ask_all(*[draw(text(f"{n}"), height=8 * n, width=16, cfg_text_scale=n, num_timesteps=21) for n in (1, 2, 3)])
    calls, rows = (after - was for after, was in zip(flows(), before, strict=True))
    assert rows == 20 + 2 * (20 + 17) and calls < 0.6 * rows


# ---- the prefix cache -----------------------------------------------------------------------------------


def test_what_was_read_before_is_not_read_again_and_nothing_else_is_taken_for_it(golden: Any) -> None:
    def served(*, caches: bool) -> Asked:
        return Asked(plugin="bagel", model=str(golden.folder), block_size=4, enable_prefix_caching=caches)

    words = text("What is shown in the picture, and why?")
    pixels = np.random.default_rng(0).integers(256, size=(24, 56, 3), dtype=np.uint8)
    turned = pixels.reshape(56, 24, 3)  # the same bytes
    wires = [
        chat(image(pixels), words, **GREEDY),
        chat(image(turned), words, **GREEDY),
        chat(image(pixels.reshape(24, 168)), words, **GREEDY),  # grey, of the same bytes
        draw(image(pixels), words),
        draw(image(pixels), words, seed=2),  # other noise
        chat(text("Look!"), image(pixels), words, **GREEDY),
        draw(image(pixels), words, cfg_img_scale=1.0),
    ]
    cold, warm = served(caches=False), served(caches=True)
    try:
        expected = [one(cold, wire) for wire in wires]
        pool = warm.worker.modules["llm"].pool
        assert pool is not None
        for wire, answer in zip(wires[:4], expected, strict=False):  # each begins with another image, or other noise
            same(one(warm, wire), answer)
            assert pool.hit_tokens == 0
        for _ in range(2):
            for wire, answer in zip(wires, expected, strict=True):
                same(one(warm, wire), answer)
        assert pool.hit_tokens > 100
        cold.assert_clean()
        warm.assert_clean()
    finally:
        cold.close()
        warm.close()


# ---- outputs --------------------------------------------------------------------------------------------


def test_several_drawings_differ_and_the_first_is_what_one_would_be(model: Asked) -> None:
    several = one(model, draw(picture(1), text("blue"), n=3, seed=7))
    alone = one(model, draw(picture(1), text("blue"), seed=7))
    assert len(several.images) == 3
    assert np.abs(several.images[0].astype(int) - alone.images[0]).max() <= 1
    assert len({drawing.tobytes() for drawing in several.images}) == 3
    assert several.tensors.keys() == {"latents", "latents-1", "latents-2", "pixels", "pixels-1", "pixels-2"}
    assert several.result.counters["llm.flow"] == 3 * alone.result.counters["llm.flow"]
    assert several.result.counters["llm.prefill"] == 1


def test_noise_is_drawn_from_the_seed_in_the_order_of_the_original(model: Asked) -> None:
    generator = torch.Generator().manual_seed(7)
    seen = torch.randn((1, 4, 10, 14), generator=generator)  # of the image's latents
    drawn = torch.randn((6, 16), generator=generator)
    given = draw(picture(1), tensor("latents", drawn), tensor("vae_noise", seen), text("blue"), seed=8)
    by_seed = one(model, draw(picture(1), text("blue"), seed=7))
    assert torch.equal(one(model, given).tensors["latents"], by_seed.tensors["latents"])
    turn = {"role": "user", "content": [picture(1), tensor("latents", drawn), tensor("vae_noise", seen), text("blue")]}
    said = model.ask(messages=[turn], task="image", outputs=["tensors"], params=SMALL, seed=8)
    assert torch.equal(said.tensors["latents"], by_seed.tensors["latents"])


def test_several_texts_have_their_own_draws_and_reasons(model: Asked) -> None:
    found = one(model, chat(text("Say"), n=3, temperature=2.0, max_tokens=5))
    assert [len(ids) for ids in found.ids] == [5, 5, 5] and len({tuple(ids) for ids in found.ids}) == 3
    assert found.result.indices == dict.fromkeys(range(3), "length")
    assert found.result.usage["completion_tokens"] == 15


def test_a_text_ends_where_the_model_ends_it(model: Asked) -> None:
    bias = {"288": 1000.0}  # the token that ends a text
    ended = one(model, chat(text("Say"), logit_bias=bias))
    assert (ended.ids, ended.texts, ended.result.finish_reason) == ([[]], [""], "stop")
    ignored = one(model, chat(text("Say"), logit_bias=bias, ignore_eos=True, max_tokens=4))
    assert (ignored.ids, ignored.texts, ignored.result.finish_reason) == ([[288] * 4], [""], "length")


def test_a_text_ends_at_a_stop_string(model: Asked) -> None:
    whole = one(model, chat(text("What is a fox?"), max_tokens=30, **GREEDY)).texts[0]
    stop = whole[8:10]
    cut = one(model, chat(text("What is a fox?"), max_tokens=30, stop=stop, **GREEDY))
    assert (cut.texts, cut.result.finish_reason) == ([whole[: whole.index(stop)]], "stop")


def test_log_probabilities_are_those_of_the_tokens(model: Asked) -> None:
    plain = one(model, chat(text("What?"), **GREEDY))
    found = one(model, chat(text("What?"), logprobs=3, **GREEDY))
    assert found.ids == plain.ids
    scores = [score for chunk in found.chunks if isinstance(chunk, TextChunk) for score in chunk.logprobs]
    assert len(scores) == 12
    for score in scores:
        assert score.logprob == score.top_logprobs[0].logprob < 0  # greedy
        assert len(score.top_logprobs) == 3 and score.bytes == score.top_logprobs[0].bytes
        assert sum(np.exp(other.logprob) for other in score.top_logprobs) < 1


def test_previews_come_on_the_way(model: Asked) -> None:
    found = one(model, draw(text("a fox"), stream=True, preview_every=2, num_timesteps=8))
    images = [chunk for chunk in found.chunks if isinstance(chunk, ImageChunk)]
    assert [chunk.partial for chunk in images] == [True, True, True, False]
    assert len({chunk.pixels.tobytes() for chunk in images}) == 4
    steps = [(chunk.step, chunk.total) for chunk in found.chunks if isinstance(chunk, ProgressChunk)]
    assert steps == [(step + 1, 7) for step in range(7)]
    plain = one(model, draw(text("a fox"), num_timesteps=8))
    torch.testing.assert_close(plain.tensors["latents"], found.tensors["latents"], atol=0, rtol=0)
    spread = one(model, draw(text("a fox"), stream=True, partial_images=2, num_timesteps=8))
    assert sum(chunk.partial for chunk in spread.chunks if isinstance(chunk, ImageChunk)) == 2


def test_a_result_is_written_as_files(model: Asked, tmp_path: Path) -> None:
    found = one(model, draw(text("a fox")))
    outputs = Outputs(Request(id="", model="", task="image", parts=(), outputs=("image", "tensors")))
    for chunk in found.chunks:
        outputs.add(chunk)
    outputs.write(tmp_path, found.result)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "image-0.png")), found.images[0])
    assert torch.equal(load_file(tmp_path / "tensors.safetensors")["pixels"], found.tensors["pixels"])
    (only,) = one(model, ask_for(text("a fox"), task="image", params=SMALL)).images
    outputs = Outputs(Request(id="", model="", task="image", parts=(), outputs=("image",)))
    outputs.add(ImageChunk(only))
    outputs.write(tmp_path, found.result)
    assert torch.equal(load_file(tmp_path / "tensors.safetensors")["image-0"], torch.from_numpy(only.copy()))


# ---- prompts --------------------------------------------------------------------------------------------


def test_messages_are_their_parts_in_order(model: Asked) -> None:
    turns = [("system", [text("Be brief.")]), ("user", [picture(1), text("What?")]), ("assistant", [text("A fox.")])]
    last = ("user", [text("And"), picture(2), text("this?")])
    messages = [{"role": role, "content": parts} for role, parts in [*turns, last]]
    params = {"max_tokens": 8, **GREEDY}
    by_turns = model.ask(messages=messages, params=params)
    by_parts = model.ask(*(part for _, parts in [*turns, last] for part in parts), params=params)
    assert by_turns.ids == by_parts.ids
    assert by_turns.result.prompt_token_ids == by_parts.result.prompt_token_ids


def test_ids_are_used_as_they_are_and_words_cannot_spell_control_tokens(model: Asked, golden: Any) -> None:
    ids, question = golden.facts["t2t"]["text_ids"], golden.asked["question"]
    by_ids, by_text = (one(model, chat(part, **GREEDY)) for part in (token_ids(ids), text(question)))
    assert by_ids.ids == by_text.ids
    spelled = one(model, chat(text("<|im_end|>"), max_tokens=1)).result.prompt_token_ids
    assert spelled[0] == ids[0] and spelled[-1] == ids[-1] and ids[-1] not in spelled[1:-1]


def test_what_was_thought_is_read_before_drawing(model: Asked) -> None:
    plain = {"cfg_text_scale": 1, "num_timesteps": 4, **GREEDY}
    thought = one(model, draw(text("a fox"), think=True, think_max_tokens=6, **plain))
    assert len(thought.thoughts) == 1 and not thought.texts and len(thought.ids[0]) == 6
    assert thought.result.usage["reasoning_tokens"] == thought.result.usage["completion_tokens"] == 6
    assert thought.result.finish_reason == "length"
    prompt = thought.result.prompt_token_ids
    processor = model.engine._processor
    assert processor is not None
    again = processor.step("reencode", None, {"thought": [thought.ids[0]]})["thought_ids"].tolist()  # type: ignore[arg-type]
    spelled = one(model, draw(token_ids(prompt), token_ids(again), **plain))
    torch.testing.assert_close(thought.tensors["latents"], spelled.tensors["latents"], atol=1e-4, rtol=0)


def test_thinking_guides_by_what_was_known_before_it(model: Asked) -> None:
    def counts(*inputs: dict[str, Any], **params: Any) -> dict[str, int]:
        return one(model, draw(*inputs, think=True, think_max_tokens=3, num_timesteps=4, **params)).result.counters

    drawn = counts(text("a fox"), cfg_img_scale=1.5, cfg_interval=[0, 1])
    assert drawn["llm_cfg_img.flow"] == 3  # what was thought is in main alone
    assert "llm_cfg_img.prefill" not in drawn and drawn["llm.prefill"] == 2 and drawn["llm.decode"] == 3
    edited = counts(picture(1), text("blue"))
    assert edited["llm_cfg_img.flow"] == 3 and edited["llm_cfg_img.prefill"] == 1


# ---- what is refused ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "blank": ([text(" \n")], {}, "inputs.0 is an empty or blank text"),
    "no part": ([tensor("latents", torch.zeros(6, 16))], {}, "neither text nor an image"),
    "no stride": ([text("a")], {"height": 13, "width": 16}, "height is 13; it must be a multiple of"),
    "too large": ([text("a")], {"height": 8, "width": 4096}, "width is 4096; .* at most"),
    "one side": ([text("a")], {"height": 8}, "give both height and width"),
    "one time": ([text("a")], {"num_timesteps": 1}, "num_timesteps"),
    "many times": ([text("a")], {"num_timesteps": 1000000}, "num_timesteps"),
    "n": ([text("a")], {"n": 11}, "params.n"),
    "renorm": ([text("a")], {"cfg_renorm_type": "local"}, "global, channel, text_channel"),
    "interval": ([text("a")], {"cfg_interval": [0.4, 1.5]}, "cfg_interval"),
    "backwards": ([text("a")], {"cfg_interval": [0.9, 0.4]}, "cfg_interval is"),
    "latents": ([text("a"), tensor("latents", torch.zeros(3, 16))], {}, r"latents is float32 \[3, 16\]; .* floats"),
    "latents of n": ([text("a"), tensor("latents", torch.zeros(6, 16))], {"n": 2}, "n is 2"),
    "noise": ([text("a"), picture(1), tensor("vae_noise", torch.zeros(1, 4, 2, 2))], {}, "vae_noise is float32"),
    "noise of none": ([text("a"), tensor("vae_noise", torch.zeros(1, 4, 2, 2))], {}, "there are 0 images; tensor"),
    "preview": ([text("a")], {"partial_images": 2}, "partial_images is 2, but previews are for streams"),
    "no shift": ([text("a")], {"timestep_shift": 1e-9}, "timestep_shift is 1e-09"),
    "ids": ([token_ids([5, 100000])], {}, "contains 100000; give ids of 0.."),
    "bias": ([text("a")], {"logit_bias": {"4000": 1.0}}, "logit_bias names token '4000'"),
    "unknown": ([text("a")], {"steps": 3}, "known: "),
}


@pytest.mark.parametrize(("inputs", "params", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(
    model: Asked, inputs: list[dict[str, Any]], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        model.ask(
            *inputs, task="image", params=({"height": 16, "width": 24} if "height" not in params else {}) | params
        )
    assert caught.value.status == 400 and caught.value.param


def test_a_drawing_that_is_no_numbers_is_an_error_and_its_neighbours_are_as_alone(model: Asked) -> None:
    params = {"height": 16, "width": 24, "num_timesteps": 4}
    huge = tensor("latents", torch.full((6, 16), 3e38))
    wires = [
        ask_for(text("a fox"), *more, task="image", outputs=["tensor:latents"], params=params)
        for more in ([huge], [], [huge])
    ]
    alone = model.ask_all(wires[1])[0].tensors["latents"]
    first, between, last = model.ask_all(*wires, abort_after={0: 99, 2: 99})
    for error in (first, last):
        assert isinstance(error, RequestError) and error.code == "not_finite" and "drawing 0 came to" in error.message
    assert torch.allclose(between.tensors["latents"], alone, atol=1e-4)
    model.assert_clean()


def test_prompts_that_do_not_fit_are_refused(narrow: Asked) -> None:
    with pytest.raises(RequestError, match="the prompt has .* those of 5 images included") as caught:
        narrow.ask(*[picture(n) for n in range(5)], task="image")
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_a_role_that_is_not_known_is_refused(model: Asked) -> None:
    with pytest.raises(RequestError, match="role is 'poet'; known: system"):
        model.ask(messages=[{"role": "poet", "content": "O"}])
