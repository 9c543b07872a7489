"""A served BAGEL as the openai package meets it: chat about images, drawings in chat, generations, edits."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from asking import Asked, ask_for, image, text
from media_files import listening, response
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


def test_a_conversation_has_a_system_prompt_images_by_url_and_in_any_turn(golden: Any) -> None:
    served = Asked(plugin="bagel", model=str(golden.folder), allowed_media_domains=("127.0.0.1",))
    limits: Any = {"max_tokens": 8, "temperature": 0}
    try:
        with (
            served.http() as url,
            listening(response(png())) as host,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            by_url = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{host.port}/fox.png"}}
            for first in (by_url, PICTURE):
                messages: list[Any] = [
                    {"role": "system", "content": "Be brief."},
                    *turns(first, text("What?")),
                    {"role": "assistant", "content": "A fox."},
                    *turns(text("And"), PICTURE, text("this?")),
                ]
                found = client.chat.completions.create(model="bagel", messages=messages, **limits)
                parts = [text("Be brief."), image(PIXELS), text("What?"), text("A fox."), text("And"), image(PIXELS)]
                expected = served.ask(*parts, text("this?"), params=limits)
                assert found.choices[0].message.content == expected.texts[0]
            assert host.num_connections == 1
        served.assert_clean()
    finally:
        served.close()


def test_thoughts_stand_beside_the_answer(model: Asked, client: openai.OpenAI) -> None:
    """The model is made to say the tags: thoughts are what is between them."""
    asked: dict[str, Any] = {"model": "bagel", "messages": turns(QUESTION), "max_tokens": 40, "temperature": 0}
    ids = [*tokens(model, "<think>no</think>yes"), 288]
    with said(model, ids):
        whole = client.chat.completions.create(**asked, extra_body={"think": True})
    message = whole.choices[0].message
    assert (message.content, message.model_extra) == ("yes", {"reasoning_content": "no"})
    assert whole.choices[0].finish_reason == "stop"
    with said(model, ids):
        pieces = [chunk.choices[0].delta for chunk in client.chat.completions.create(
            **asked, stream=True, extra_body={"think": True}
        )]  # fmt: skip
    assert "".join(piece.content or "" for piece in pieces) == "yes"
    assert "".join((piece.model_extra or {}).get("reasoning_content", "") for piece in pieces) == "no"
    with said(model, ids):
        cut = client.chat.completions.create(**asked, stop="e", extra_body={"think": True})
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("y", "stop")


def tokens(model: Asked, words: str) -> list[int]:
    processor = model.engine._processor
    assert processor is not None
    ids: list[int] = processor.words.encode(words)  # type: ignore[attr-defined]
    return ids


@contextlib.contextmanager
def said(model: Asked, ids: list[int]) -> Iterator[None]:
    """Whatever the model would say, these are the next tokens that it draws."""
    methods = model.worker.modules["llm"].methods
    decode, left = methods["decode"], list(ids)

    def told(ctx: Any, last: torch.Tensor) -> dict[str, torch.Tensor]:
        decode(ctx, last)
        token = torch.full_like(last, left.pop(0))
        return {"last": token, "text": token}

    methods["decode"] = told
    try:
        yield
    finally:
        methods["decode"] = decode


def test_a_drawing_streams_in_chat_with_previews(model: Asked, client: openai.OpenAI) -> None:
    extra = {"modalities": ["text", "image"], "preview_every": 2, "height": 16, "width": 24, **SMALL}
    chunks = list(
        client.chat.completions.create(
            model="bagel", messages=turns(text("a fox")), seed=3, stream=True, extra_body=extra
        )
    )
    images = [one for chunk in chunks for one in (chunk.choices[0].delta.model_extra or {}).get("images", [])]
    assert [one.get("partial", False) for one in images] == [True, True, False]
    params = {key: value for key, value in extra.items() if key not in ("modalities", "preview_every")}
    expected = model.ask(text("a fox"), task="image", seed=3, params=params).images[0]
    assert np.array_equal(opened(images[-1]["image_url"]["url"].partition(",")[2]), expected)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_drawing_in_chat(model: Asked, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="bagel", messages=turns(PICTURE, text("blue")), seed=3, extra_body={"modalities": ["image"], **SMALL}
    )
    (drawn,) = found.choices[0].message.model_extra["images"]  # type: ignore[index]
    expected = model.ask(image(PIXELS), text("blue"), task="image", seed=3, params=SMALL).images[0]
    assert np.array_equal(opened(drawn["image_url"]["url"].partition(",")[2]), expected)


@pytest.mark.parametrize("think", [False, True])
def test_several_drawings_in_chat_are_as_many_choices(client: openai.OpenAI, think: bool) -> None:
    extra = {"modalities": ["image"], **SMALL, "height": 16, "width": 24, "think": think, "think_max_tokens": 3}
    asked: Any = {"model": "bagel", "messages": turns(text("a fox")), "n": 3, "seed": 3, "extra_body": extra}
    choices = client.chat.completions.create(**asked).choices
    assert [(one.index, len(one.message.model_extra["images"])) for one in choices] == [(0, 1), (1, 1), (2, 1)]
    ended = [one for chunk in client.chat.completions.create(**asked, stream=True) for one in chunk.choices]
    reasons = {one.index: one.finish_reason for one in ended if one.finish_reason}
    assert reasons == {one.index: one.finish_reason for one in choices}


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
        told.append(found.usage.output_tokens if found.usage is not None else 0)
        return [opened(one.b64_json) for one in found.data or []]

    told: list[int] = []
    several, alone = drawn(3), drawn(1)
    assert told[0] == 3 * told[1] > 0
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


def test_previews_come_every_so_many_steps_if_asked(client: openai.OpenAI) -> None:
    given: Any = {"seed": 7, "num_timesteps": 10, "preview_every": 3}
    events = list(client.images.generate(prompt="a fox", size="24x16", stream=True, extra_body=given))
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]  # of 9 steps: 3, 6
    shown = [opened(event.b64_json) for event in events]
    assert {one.shape for one in shown} == {(16, 24, 3)} and len({one.tobytes() for one in shown}) == 3
    far, near = (np.abs(one.astype(int) - shown[-1]).mean() for one in shown[:2])
    assert near < far
    assert events[-1].usage is not None and events[-1].usage.input_tokens > 0


def test_an_edit_streams(client: openai.OpenAI) -> None:
    events = list(
        client.images.edit(
            image=[("a.png", png(), "image/png")] * 2, prompt="blue", stream=True, partial_images=1,
            extra_body={"seed": 7, **SMALL},
        )
    )  # fmt: skip
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


def test_pictures_come_as_base64_and_are_not_kept(client: openai.OpenAI) -> None:
    found = client.images.generate(prompt="a fox", size="24x16", response_format="b64_json", extra_body=SMALL)  # type: ignore[call-overload]
    assert found.data[0].url is None and opened(found.data[0].b64_json).shape == (16, 24, 3)
    with pytest.raises(openai.BadRequestError, match="b64_json") as caught:
        client.images.generate(prompt="a fox", response_format="url")
    assert caught.value.param == "response_format"


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
