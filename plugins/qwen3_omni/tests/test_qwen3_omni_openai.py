"""The tiny checkpoint as the openai package asks it: media in, streams with sound, tools, many answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from asking import Asked, image
from sounds import sound_file, wave

from mstar.types import Emission

MODEL = "qwen3_omni"
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '\n{"name": "look_up", "arguments": {"city": "Köln"}}\n'


@pytest.fixture(scope="module")
def serving() -> Iterator[Asked]:
    asked = Asked(plugin=MODEL, model="tiny", served_model_name=(MODEL,))
    yield asked
    asked.close()


def asked(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "Hello, who are you?"}]
    usual = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    return {**usual, "messages": [{"role": "user", "content": content}], **fields}


def picture(seed: int) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(256, size=(64, 96, 3), dtype=np.uint8)
    return {"type": "image_url", "image_url": {"url": image(pixels)["data"], "detail": "high"}}


def tone(hertz: float, kind: str, codec: str) -> dict[str, Any]:
    data = sound_file(wave(1, hertz=hertz)[None], codec=codec, kind=kind)
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def test_text_is_answered_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**asked())
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and choice.message.content and choice.message.audio is None
    assert whole.usage is not None and whole.usage.completion_tokens == 5 and whole.model == MODEL
    chunks = list(client.chat.completions.create(**asked(stream=True, stream_options={"include_usage": True})))
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == choice.message.content
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage == whole.usage


def test_a_stream_has_text_and_sound_in_one_choice(client: openai.OpenAI) -> None:
    extra = {"talker_max_tokens": 8, "talker_temperature": 0}
    fields = asked(modalities=["text", "audio"], audio={"voice": "Aiden", "format": "pcm16"}, extra_body=extra)
    message = client.chat.completions.create(**fields).choices[0].message
    assert message.audio is not None and message.audio.transcript == message.content
    words, spoken, sound, ids, kinds = "", "", b"", set[str](), list[str]()
    for chunk in client.chat.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        assert choice.index == 0
        audio = choice.delta.model_dump().get("audio") or {}
        kinds += [name for name in ("transcript", "data") if audio.get(name)]
        words, spoken = words + (choice.delta.content or ""), spoken + (audio.get("transcript") or "")
        sound += base64.b64decode(audio.get("data") or "")
        ids |= {audio["id"]} if audio else set()
    assert words == spoken == message.content and len(ids) == 1
    assert sound == base64.b64decode(message.audio.data) and len(sound) == 2 * (7 * 1920 - 555)
    assert kinds.count("data") == 2 and kinds.index("data") < len(kinds) - 1


def test_sounds_and_pictures_are_looked_at(client: openai.OpenAI) -> None:
    def told(*parts: Any) -> tuple[int, Any]:
        found = client.chat.completions.create(**asked(*parts, logprobs=True, top_logprobs=2))
        assert found.usage is not None and found.choices[0].logprobs is not None
        return found.usage.prompt_tokens, found.choices[0].logprobs.content

    alone = told()[0]
    for parts, tokens in (
        ([tone(200, "wav", "pcm_s16le"), tone(2000, "wav", "pcm_s16le")], 13),
        ([tone(200, "flac", "flac"), tone(2000, "flac", "flac")], 13),
        ([picture(1), picture(2)], 6),
    ):
        one, other = map(told, parts)
        assert one[0] == other[0] == alone + tokens + 2 and one[1] != other[1]


def test_many_answers_seeds_and_stops(client: openai.OpenAI) -> None:
    fields = asked(n=3, temperature=1, extra_body={"ignore_eos": True})
    first, again = (client.chat.completions.create(**fields, seed=4) for _ in range(2))
    texts = [[choice.message.content for choice in found.choices] for found in (first, again)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3 and [one.index for one in first.choices] == [0, 1, 2]
    whole = client.chat.completions.create(**asked(max_tokens=12)).choices[0].message.content or ""
    end = next(letter for letter in whole if letter.isascii())
    cut = client.chat.completions.create(**asked(max_tokens=12, stop=end)).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole.split(end)[0], "stop")
    for param, more in (("n", {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}, "n": 2}),
                        ("logit_bias", {"logit_bias": {"999": 1}})):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked(**more))
        assert refused.value.param == param


def test_tools_are_called_and_answered(client: openai.OpenAI, model: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random model would write for a call stands in the place of what it writes."""
    plain, tooled = (client.chat.completions.create(**asked(**more)).usage for more in ({}, {"tools": [LOOK]}))
    assert plain is not None and tooled is not None and tooled.prompt_tokens > plain.prompt_tokens + 50

    processor: Any = model.engine._processor
    words, decode = processor.reader.words, processor.decode
    begin, end = words.special["<tool_call>"], words.special["</tool_call>"]
    ids = [*words.encode("I look."), begin, *words.encode(CALL), end]
    written: dict[int, Iterator[int]] = {}

    def replaced(state: Any, emission: Emission) -> Any:
        if emission.name == "text" and not emission.final:
            left = written.setdefault(id(state), iter(ids))
            emission = replace(emission, value=torch.tensor(next(left)))
        return decode(state, emission)

    monkeypatch.setattr(processor, "decode", replaced)
    fields = asked(tools=[LOOK], max_tokens=len(ids), extra_body={"ignore_eos": True})
    message = client.chat.completions.create(**fields).choices[0].message
    assert message.content == "I look." and message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("look_up", '{"city": "Köln"}')
    written.clear()
    deltas = [one.choices[0].delta for one in client.chat.completions.create(**fields, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    (streamed,) = (one for delta in deltas for one in delta.tool_calls or ())
    assert streamed.function is not None and streamed.function.arguments == call.function.arguments
    monkeypatch.undo()
    turns = [*fields["messages"], message.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    usage = client.chat.completions.create(**asked(tools=[LOOK]) | {"messages": turns}).usage
    assert usage is not None and usage.prompt_tokens > tooled.prompt_tokens + len(ids)
