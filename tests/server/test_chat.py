"""Chat and image answers made of chunks by hand: sound, what is empty, and what fails in the middle."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mstar.errors import RequestError
from mstar.plugin.spec import ModelSpec
from mstar.server.chat import ChatForm, read_chat
from mstar.server.images import ImageEvents
from mstar.server.native import GenerateRequest, read_request
from mstar.server.results import Outputs, Result
from mstar.types import AudioChunk, Chunk, ImageChunk, ProgressChunk, Request, TextChunk

REQUEST = Request(id="r", model="m", task="chat", parts=(), outputs=("text", "audio", "image"), seed=7)
RESULT = Result(
    finish_reason="stop", indices={0: "stop"}, usage={"prompt_tokens": 5, "completion_tokens": 4}, counts={},
    counters={}, prompt_token_ids=[], seed=7,
)  # fmt: skip
TONE = (0.3 * np.sin(np.arange(4800) / 5)).astype(np.float32)
SPOKEN: list[Chunk] = [
    TextChunk("hel"), ProgressChunk(1, 2), AudioChunk(TONE[:2400], 24000), TextChunk(""), TextChunk("lo"),
    AudioChunk(TONE[:0], 24000), AudioChunk(TONE[2400:], 24000),
]  # fmt: skip
ERROR = RequestError("the node failed", status=500)
MAGIC = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "mp3": b"ID3\xff", "aac": b"\xff", "pcm16": b""}


@pytest.fixture
def speaker(parrot_spec: ModelSpec) -> ModelSpec:
    """A model whose chat speaks."""
    chat = replace(parrot_spec.tasks["chat"], params=parrot_spec.tasks["speech"].params, outputs=("text", "audio"))
    return replace(parrot_spec, tasks={"chat": chat, **{"speech": parrot_spec.tasks["speech"]}})


def read(spec: ModelSpec, **fields: Any) -> tuple[GenerateRequest, ChatForm]:
    return read_chat({"messages": [{"role": "user", "content": "hi"}], **fields}, spec=spec)


def whole(form: ChatForm, chunks: list[Chunk], *, request: Request = REQUEST) -> dict[str, Any]:
    outputs = Outputs(request)
    for chunk in chunks:
        outputs.add(chunk)
    found: dict[str, Any] = json.loads(form.whole(outputs, RESULT)[0])
    return found


def events(form: Any, chunks: list[Chunk], *, error: RequestError | None = None) -> list[Any]:
    form.headers(REQUEST, first=chunks[0] if chunks else None, result=RESULT)
    data = b"".join(form.piece(chunk) for chunk in chunks)
    data += form.end(REQUEST, result=None if error else RESULT, error=error)
    found = [block.splitlines()[-1].removeprefix("data: ") for block in data.decode().split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


@pytest.mark.parametrize("name", MAGIC)
def test_text_and_sound_are_one_choice_in_the_format_asked_for(speaker: ModelSpec, name: str) -> None:
    wire, form = read(speaker, modalities=["text", "audio"], audio={"voice": "amy", "format": name})
    assert wire.outputs == ["text", "audio"] and wire.params == {"voice": "amy"}
    (choice,) = whole(form, SPOKEN)["choices"]
    message = choice["message"]
    assert message["content"] == message["audio"]["transcript"] == "hello"
    assert {"id", "data", "expires_at", "transcript"} <= set(message["audio"])
    data = base64.b64decode(message["audio"]["data"])
    assert data[:1] in (MAGIC[name][:1], b"\xff") or name == "pcm16" and len(data) == 2 * len(TONE)


def test_a_stream_of_text_and_sound_merges_to_the_same(speaker: ModelSpec) -> None:
    fields = {"modalities": ["audio"], "audio": {"format": "pcm16"}}
    _, form = read(speaker, stream=True, **fields)
    *chunks, done = events(form, SPOKEN)
    assert done == "[DONE]"
    merged: dict[str, Any] = {"content": "", "data": b"", "transcript": ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        merged["content"] += choice["delta"].get("content", "")
        audio = choice["delta"].get("audio", {})
        merged |= {name: audio[name] for name in ("id", "expires_at") if name in audio}
        merged["data"] += base64.b64decode(audio.get("data", ""))
        merged["transcript"] += audio.get("transcript", "")
    message = whole(read(speaker, **fields)[1], SPOKEN)["choices"][0]["message"]
    assert merged["content"] == merged["transcript"] == message["content"] == "hello"
    assert merged["data"] == base64.b64decode(message["audio"]["data"])
    assert {"id", "expires_at"} <= merged.keys()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"format": "ogg"}, "modalities": ["audio"]}, "audio.format"),
        ({"audio": {"format": "mp3"}, "modalities": ["audio"], "stream": True}, "audio.format"),
        ({"audio": {"format": "mp3"}}, "audio"),
        ({"audio": {"voice": "amy"}, "modalities": ["audio"]}, "audio.format"),
        ({"modalities": ["image"]}, "modalities"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_sound_is_never_of_another_format(speaker: ModelSpec, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(speaker, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_empty_answer_is_a_message_all_the_same(parrot_spec: ModelSpec) -> None:
    request = replace(REQUEST, outputs=("text",))
    message = whole(read(parrot_spec)[1], [], request=request)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "refusal": None}
    first, last, done = events(read(parrot_spec, stream=True)[1], [])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop" and done == "[DONE]"


def test_a_failure_in_the_middle_is_the_last_event(parrot_spec: ModelSpec) -> None:
    *_, last = events(read(parrot_spec, stream=True)[1], [TextChunk("a")], error=ERROR)
    assert last["error"]["message"] == "the node failed"
    image = ImageChunk(np.zeros((2, 2, 3), np.uint8))
    done, last = events(ImageEvents("image_edit", {}), [image], error=ERROR)
    assert done["type"] == "image_edit.completed" and last["error"]["type"] == "server_error"


def test_a_drawing_without_a_picture_is_an_error() -> None:
    form = ImageEvents("image_generation", {})
    assert not form.begins(TextChunk("a")) and not form.begins(ProgressChunk(1, 2))
    with pytest.raises(RequestError) as caught:
        form.headers(REQUEST, first=None, result=RESULT)
    assert (caught.value.status, caught.value.code) == (400, "no_image")


def test_native_errors_are_told_in_the_words_of_chat(parrot_spec: ModelSpec) -> None:
    content = [{"type": "text", "text": "a"}] * 11 + [
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
    ]
    _, form = read_chat(
        {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 3}, spec=parrot_spec
    )
    for param, told in (
        ("messages.0.content.11.data", "messages.0.content.11.input_audio.data"),
        ("messages.0.content.1", "messages.0.content.1"),
        ("params.max_tokens", "max_completion_tokens"),
        ("params.temperature", "temperature"),
        ("outputs.0", "modalities.0"),
        ("model", "model"),
        (None, None),
    ):
        error = form.worded(RequestError(f"{param} is wrong", status=404, param=param, code="c"))
        assert (error.param, error.message, error.status, error.code) == (told, f"{told} is wrong", 404, "c")


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CALLED: list[Chunk] = [
    TextChunk("Let me see."),
    TextChunk('{"name": "look_up", "arguments": "{\\"a\\": 1}"}\n', (5, 6), channel="tool_call"),
    TextChunk('{"name": "look_up", "arguments": "{}"}\n', (7,), channel="tool_call"),
]


@pytest.fixture
def caller(parrot_spec: ModelSpec) -> ModelSpec:
    """A model whose chat calls tools."""
    return replace(parrot_spec, tasks={"chat": replace(parrot_spec.tasks["chat"], tools=True)})


def test_tools_and_earlier_calls_reach_the_model(caller: ModelSpec) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
    ]
    wire, _ = read(caller, messages=messages, tools=[TOOL])
    names = {"spec": caller, "model_names": ("m",), "request_id": "r", "seed": 1}
    request = read_request(wire, **names)  # type: ignore[arg-type]
    assert request.tools == (TOOL,) and request.messages[1].tool_calls == (call,)
    assert request.messages[1].parts == () and request.messages[2].role == "tool"
    assert read(caller, tools=[TOOL], tool_choice="none")[0].tools is None


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [{"type": "function"}]}, "tools.0.function.function"),
    ({"tools": [{"function": {"name": "no such name!"}}]}, "tools.0.function.name"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"functions": [TOOL["function"]]}, "functions"),
])  # fmt: skip
def test_tools_that_are_none_are_refused(caller: ModelSpec, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(caller, **fields)
    assert caught.value.status == 400 and caught.value.param is not None and param.startswith(caught.value.param)


def test_calls_are_part_of_the_message_and_its_reason(caller: ModelSpec) -> None:
    request = replace(REQUEST, outputs=("text",))
    (choice,) = whole(read(caller, tools=[TOOL])[1], CALLED, request=request)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "look_up", "arguments": '{"a": 1}'} and first["id"] != second["id"]
    (choice,) = whole(read(caller, tools=[TOOL])[1], CALLED[1:], request=request)["choices"]
    assert choice["message"]["content"] is None
    *chunks, last, done = events(read(caller, tools=[TOOL], stream=True)[1], CALLED)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    told = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in told] == [0, 1] and told[1]["function"]["arguments"] == "{}"
    assert last["choices"][0]["finish_reason"] == "tool_calls" and done == "[DONE]"
