"""A served BAGEL as the openai package meets it: chat about images, drawings in chat, generations, edits."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
from asking import Asked, ask_for, image, text
from PIL import Image

SMALL = {"num_timesteps": 6}
PIXELS = np.random.default_rng(1).integers(256, size=(40, 56, 3), dtype=np.uint8)


def png() -> bytes:
    return base64.b64decode(image(PIXELS)["data"].partition(",")[2])


def opened(data: str | None) -> np.ndarray:
    assert data is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def turns(*content: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


PICTURE = {"type": "image_url", "image_url": {"url": image(PIXELS)["data"]}}
QUESTION = text("What is it?")


def test_chat_about_an_image(model: Asked, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "bagel", "messages": turns(PICTURE, QUESTION), "temperature": 0, "max_tokens": 8}
    expected = model.ask(image(PIXELS), QUESTION, params={"temperature": 0, "max_tokens": 8})
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.texts[0]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        expected.result.usage["prompt_tokens"], 8,
    )  # fmt: skip
    pieces = [chunk for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.texts[0]
    assert pieces[-1].choices[0].finish_reason == "length"


def test_chat_with_several_answers_scored(model: Asked, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="bagel", messages=turns(QUESTION), n=2, logprobs=True, top_logprobs=2, max_tokens=4, seed=3
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice in found.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 4


def test_a_drawing_in_chat(model: Asked, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="bagel", messages=turns(PICTURE, text("blue")), seed=3, extra_body={"modalities": ["image"], **SMALL}
    )
    (drawn,) = found.choices[0].message.model_extra["images"]  # type: ignore[index]
    expected = model.ask(image(PIXELS), text("blue"), task="image", seed=3, params=SMALL).images[0]
    assert np.array_equal(opened(drawn["image_url"]["url"].partition(",")[2]), expected)


def test_generations_take_every_parameter(model: Asked, client: openai.OpenAI) -> None:
    def drawn(size: str = "24x16", **extra: Any) -> np.ndarray:
        given: Any = {"seed": 7, **SMALL, **extra}
        (data,) = client.images.generate(prompt="a fox", size=size, extra_body=given).data or []  # type: ignore[call-overload]
        return opened(data.b64_json)

    usual = drawn()
    params = {"height": 16, "width": 24, **SMALL}
    assert np.array_equal(usual, model.ask(text("a fox"), task="image", seed=7, params=params).images[0])
    for change in ({"num_timesteps": 9}, {"cfg_text_scale": 1.0}, {"timestep_shift": 1.0}, {"seed": 8}):
        assert not np.array_equal(drawn(**change), usual)
    assert drawn(size="16x24").shape == (24, 16, 3)


def test_several_generations(client: openai.OpenAI) -> None:
    def drawn(n: int) -> list[np.ndarray]:
        found = client.images.generate(prompt="a fox", size="24x16", n=n, extra_body={"seed": 7, **SMALL})  # type: ignore[call-overload]
        return [opened(one.b64_json) for one in found.data or []]

    several, alone = drawn(3), drawn(1)
    assert len(several) == 3 and len({one.tobytes() for one in several}) == 3
    assert np.abs(several[0].astype(int) - alone[0]).max() <= 1


def test_a_stream_shows_what_is_foreseen(client: openai.OpenAI) -> None:
    events = list(
        client.images.generate(
            prompt="a fox",
            size="24x16",
            stream=True,
            partial_images=2,
            extra_body={"seed": 7, **SMALL},  # type: ignore[call-overload]
        )
    )
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_edits_keep_the_last_image_s_shape(model: Asked, client: openai.OpenAI, count: int) -> None:
    pictures: Any = [("a.png", png(), "image/png")] * count
    found = client.images.edit(
        image=pictures if count > 1 else pictures[0], prompt="blue", size="auto", extra_body={"seed": 7, **SMALL}
    )
    expected = model.ask(*[image(PIXELS)] * count, text("blue"), task="image", seed=7, params=SMALL).images[0]
    assert np.array_equal(opened((found.data or [])[0].b64_json), expected)


@pytest.mark.parametrize("size", ["20000x20000", "0x0", "-1x512", "512X512", "512x", "13x11", "1x1"])
def test_sizes_that_cannot_be_drawn_are_refused(client: openai.OpenAI, size: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="a fox", size=size)  # type: ignore[call-overload]
    assert caught.value.param == "size"


def test_requests_are_the_same_by_every_route(model: Asked, client: openai.OpenAI) -> None:
    body = {"inputs": [text("a fox")], "task": "image", "seed": 7, "params": {"height": 16, "width": 24, **SMALL}}
    found = client.post("/generate", body=body, cast_to=object)
    expected = model.run(model.answer(ask_for(text("a fox"), task="image", seed=7, params=body["params"]))).images[0]
    assert np.array_equal(opened(found["outputs"][0]["data"]), expected)  # type: ignore[index]
