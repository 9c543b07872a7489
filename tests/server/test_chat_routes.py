"""The chat and image routes over HTTP, on the echo model: as the openai package sees them, and as raw JSON."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from served import Served

import mstar

CHAT, DRAW, EDIT = "/v1/chat/completions", "/v1/images/generations", "/v1/images/edits"
HELLO = [{"role": "user", "content": "hello"}]


def png(colour: tuple[int, int, int] = (200, 10, 10), size: tuple[int, int] = (6, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def pixels(data: bytes | str) -> np.ndarray:
    content = base64.b64decode(data.rpartition(",")[2]) if isinstance(data, str) else data
    return np.asarray(Image.open(io.BytesIO(content)))


def image_part(data: bytes | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data or png())}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = Served(plugin="echo", served_model_name=("echo",))
    yield found
    found.close()


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(CHAT, json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; the last one of a chat is [DONE]."""
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    lines = [block.splitlines()[-1].removeprefix("data: ") for block in blocks]
    if path == CHAT:
        assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"} and response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "Traceback" not in error["message"]
    assert "params." not in error["message"] and "inputs" not in error["message"]
    return error


# ---- chat -------------------------------------------------------------------------------------------------------


def test_an_answer_has_openai_s_shape(client: httpx.Client) -> None:
    found = chat(client, max_tokens=5, seed=3)
    assert set(found) == {"id", "object", "created", "model", "choices", "usage"}
    assert found["id"].startswith("chatcmpl-") and found["object"] == "chat.completion" and found["model"] == "echo"
    (choice,) = found["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"} and choice["index"] == 0
    assert set(choice["message"]) == {"role", "content", "refusal"} and choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str) and choice["finish_reason"] == "length"
    prompt = len("?user:hello\n\n")
    assert found["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits_hold_and_ends_are_told(client: httpx.Client, name: str) -> None:
    for fields, reason, number in ((({name: 5}), "length", 5), ({name: 9, "eos_at": 3}, "stop", 3)):
        for stream in (False, True):
            if stream:
                body = {"messages": HELLO, "stream_options": {"include_usage": True}, **fields}
                *_, end, usage = events(client, CHAT, body)
            else:
                end = usage = chat(client, **fields)
            assert end["choices"][0]["finish_reason"] == reason and usage["usage"]["completion_tokens"] == number
    for value in (0, -1, "x", 1.5):
        assert error_of(client.post(CHAT, json={"messages": HELLO, name: value}))["param"] == name
    both = {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}
    assert error_of(client.post(CHAT, json=both))["param"] == "max_completion_tokens"


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1.5, "seed": 5}, {"think": 4}, {"logprobs": True}])
def test_a_stream_holds_what_the_whole_answer_does(client: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 12, **fields}
    whole = chat(client, **body)
    *chunks, usage = events(client, CHAT, body | {"stream_options": {"include_usage": True}})
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, usage]}) == 1
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == choice["finish_reason"]
        assert all(c["finish_reason"] is None for c in own[:-1])
        for name in ("content", "reasoning_content"):
            assert "".join(c["delta"].get(name, "") for c in own) == choice["message"].get(name, "")
        told = [entry for c in own for entry in (c["logprobs"] or {}).get("content", [])]
        assert told == ((choice["logprobs"] or {}).get("content", []))
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(texts) == fields.get("n", 1) == len(set(texts))
    plain = events(client, CHAT, body)
    assert all("usage" not in chunk for chunk in plain) and plain[-1]["choices"][0]["finish_reason"]


def test_samples_begin_with_the_one_that_is_drawn_alone(client: httpx.Client) -> None:
    fields = {"temperature": 1.5, "seed": 5, "max_tokens": 8}
    alone, many = chat(client, **fields), chat(client, n=3, **fields)
    assert many["choices"][0]["message"] == alone["choices"][0]["message"]
    assert many["usage"]["completion_tokens"] == 24
    for n in (0, 17, "x"):
        assert error_of(client.post(CHAT, json={"messages": HELLO, "n": n}))["param"] == "n"


def test_stop_strings_end_across_chunks_and_never_show(client: httpx.Client) -> None:
    text = chat(client, max_tokens=30)["choices"][0]["message"]["content"]
    stop = text[4:7]
    for given in (stop, [stop, "never there"]):
        found = chat(client, max_tokens=30, stop=given)["choices"][0]
        assert (found["message"]["content"], found["finish_reason"]) == (text[: text.index(stop)], "stop")
        *chunks, end = events(client, CHAT, {"messages": HELLO, "max_tokens": 30, "stop": given})
        streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert streamed == found["message"]["content"] and end["choices"][0]["finish_reason"] == "stop"
    assert error_of(client.post(CHAT, json={"messages": HELLO, "stop": ""}))["param"] == "stop"


def test_stop_strings_leave_reasoning_alone(client: httpx.Client) -> None:
    whole = chat(client, max_tokens=12, think=6)["choices"][0]["message"]
    stop = whole["reasoning_content"][1:3]
    found = chat(client, max_tokens=12, think=6, stop=stop)
    assert found["choices"][0]["message"]["reasoning_content"] == whole["reasoning_content"]
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_log_probabilities_are_those_of_the_tokens(client: httpx.Client) -> None:
    found = chat(client, max_tokens=6, logprobs=True, top_logprobs=3)["choices"][0]
    entries = found["logprobs"]["content"]
    assert len(entries) == 6 and found["logprobs"]["refusal"] is None
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and entry["logprob"] <= 0
        assert [set(other) for other in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
    data = bytes(byte for entry in entries for byte in entry["bytes"])
    assert data.decode(errors="replace") == found["message"]["content"]
    assert chat(client, logprobs=False)["choices"][0]["logprobs"] is None
    bare = chat(client, max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[], []]
    assert error_of(client.post(CHAT, json={"messages": HELLO, "top_logprobs": 2}))["param"] == "top_logprobs"


def test_parts_of_any_turn_are_read_as_what_they_are(client: httpx.Client) -> None:
    text = {"type": "text", "text": "look"}
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [image_part(), text, image_part(png((0, 0, 9)))]},
        {"role": "assistant", "content": "seen", "name": "bot", "refusal": None, "tool_calls": None},
        {"role": "user", "content": [text]},
    ]
    found = chat(client, messages=turns, max_tokens=8)
    assert found["usage"]["prompt_tokens"] == len("?system:be brief\nuser:look\nassistant:seen\nuser:look\n\n") + 2 * 4
    turns[1]["content"] = [image_part(), text, image_part()]
    other = chat(client, messages=turns, max_tokens=8)
    assert other["choices"][0]["message"] != found["choices"][0]["message"]
    turns[1]["content"] = [{"type": "image_url", "image_url": data_uri(png())}, text, image_part()]
    assert chat(client, messages=turns, max_tokens=8)["choices"] == other["choices"]


def test_sounds_and_videos_are_parts_too(client: httpx.Client, tone: str, clip: str) -> None:
    one = [{"type": "input_audio", "input_audio": {"data": tone, "format": "wav"}}]
    same = [{"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{tone}"}}]
    first, second = (chat(client, messages=[{"role": "user", "content": parts}]) for parts in (one, same))
    assert first["choices"] == second["choices"]
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{clip}"}}
    all_frames, two = (
        chat(client, messages=[{"role": "user", "content": [video | more]}]) for more in ({}, {"num_frames": 2})
    )
    assert all_frames["usage"] == two["usage"] and all_frames["choices"] != two["choices"]


@pytest.fixture(scope="module")
def tone() -> str:
    import wave

    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(800))
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def clip() -> str:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 32
        for shade in (0, 90, 180, 250):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return base64.b64encode(file.getvalue()).decode()


def test_pictures_come_in_the_message_and_go_back_as_they_came(client: httpx.Client) -> None:
    found = chat(client, modalities=["text", "image"], seed=7, n=2)
    messages = [choice["message"] for choice in found["choices"]]
    assert [message["content"] for message in messages] == ["8x8", "8x8"]
    shown = [pixels(message["images"][0]["image_url"]["url"]) for message in messages]
    assert shown[0].shape == (8, 8, 3) and not np.array_equal(*shown)
    alone = chat(client, modalities=["image"], seed=7)["choices"][0]["message"]
    assert alone["content"] is None and alone["images"] == messages[0]["images"]
    again = [*HELLO, messages[0], {"role": "user", "content": "redder"}]
    as_parts = [
        *HELLO, {"role": "assistant", "content": [{"type": "text", "text": "8x8"}, *alone["images"]]}, again[-1],
    ]  # fmt: skip
    first, second = (chat(client, modalities=["image"], seed=7, messages=turns) for turns in (again, as_parts))
    assert first["choices"] == second["choices"] and first["choices"][0]["message"]["images"] != alone["images"]


def test_a_stream_of_a_picture_has_previews_if_asked(client: httpx.Client) -> None:
    body = {"messages": HELLO, "modalities": ["text", "image"], "seed": 7, "preview_every": 1}
    *chunks, end = events(client, CHAT, body)
    images = [image for chunk in chunks for image in chunk["choices"][0]["delta"].get("images", [])]
    assert [image.get("partial", False) for image in images] == [True, True, True, False]
    whole = chat(client, **body)["choices"][0]["message"]
    assert whole["images"] == images[-1:] and end["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "1"),
        ({"messages": None}, "messages", "array"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages.0.role", "system, developer, user, assistant"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages.0.content.0.type", "video_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "missing"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages.0.mood", "unknown"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": "a"}, image_part(b"no")]}]},
            "messages.1.content.1.image_url.url", "no image that can be decoded",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "/etc/passwd"}]}]},
            "messages.0.content.0.image_url", "",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "images": [image_part(b"no")]}]},
            "messages.0.images.0.image_url.url", "no image",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        ({"tool_choice": "required"}, "tool_choice", "one of none, auto"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ({"modalities": ["text", "smell"]}, "modalities.1", "one of text, image, audio"),
        ({"modalities": ["image", "audio"]}, "modalities", "this model gives: "),
        ({"modalities": []}, "modalities", "1"),
        ({"audio": {"format": "wav"}}, "audio", "modalities"),
        ({"temperature": -1}, "temperature", "is -1"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"presence_penalty": 3}, "presence_penalty", "is 3"),
        ({"logit_bias": {"x": 1}}, None, ""),
        ({"colour": 1}, "colour", "known: messages, model"),
        ({"extra_body": {"think": 1}}, "extra_body", "unknown"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "for streams"),
        ({"seed": -1}, "seed", "is -1"),
        ({"stream": "yes"}, "stream", "yes"),
        ({"modalities": ["image"], "temperature": 0.5}, "temperature", "takes no temperature"),
        ({"modalities": ["image"], "max_tokens": 5}, "max_tokens", "takes no max_tokens"),
        ({"modalities": ["image"], "height": 65}, "height", "is 65"),
        ({"eos_at": None, "\ud800": 1}, None, "valid Unicode"),
    ],
)  # fmt: skip
def test_mistakes_name_the_field(client: httpx.Client, body: dict[str, Any], param: str | None, words: str) -> None:
    content = json.dumps({"messages": HELLO, "max_tokens": 2} | body if "modalities" not in body or
                         body.get("max_tokens") else {"messages": HELLO} | body)  # fmt: skip
    response = client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    error = error_of(response)
    assert words in error["message"] and (param is None or error["param"] == param), error


def test_fields_that_ask_for_nothing_change_nothing(client: httpx.Client) -> None:
    plain = chat(client, max_tokens=6)
    nothing = {
        "n": 1, "temperature": None, "top_p": None, "stop": None, "logit_bias": None, "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "seed": None,
        "store": False, "presence_penalty": 0, "frequency_penalty": 0.0, "service_tier": "auto",
        "parallel_tool_calls": True,
        "modalities": None, "stream": False, "stream_options": None, "audio": None, "logprobs": None,
    }  # fmt: skip
    assert chat(client, max_tokens=6, **nothing)["choices"] == plain["choices"]
    drawn = chat(client, modalities=["image"], seed=1, n=1, presence_penalty=0, temperature=None)
    assert drawn["choices"] == chat(client, modalities=["image"], seed=1)["choices"]


def test_unknown_models_and_other_methods_are_told(client: httpx.Client) -> None:
    assert error_of(client.post(CHAT, json={"messages": HELLO, "model": "gpt"}), 404)["code"] == "model_not_found"
    assert error_of(client.get(CHAT), 405)
    assert error_of(client.post(CHAT, content=b"{", headers={"Content-Type": "application/json"}))
    assert error_of(client.post(CHAT, data={"a": "b"}), 415)["param"] == "Content-Type"
    long = {"messages": [{"role": "user", "content": "x" * 600}]}
    assert error_of(client.post(CHAT, json=long))["param"] == "messages"


# ---- images -----------------------------------------------------------------------------------------------------


def draw(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(DRAW, json={"prompt": "a fox", "seed": 7, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-seed"] == "7"
    found: dict[str, Any] = response.json()
    return found


def test_pictures_have_openai_s_shape_and_each_its_own_pixels(client: httpx.Client) -> None:
    found = draw(client, n=3, size="12x6")
    assert set(found) == {"created", "data", "size", "background", "output_format", "quality", "usage"}
    assert found["size"] == "12x6" and len(found["data"]) == 3
    shown = [pixels(entry["b64_json"]) for entry in found["data"]]
    assert {image.shape for image in shown} == {(6, 12, 3)} and len({image.tobytes() for image in shown}) == 3
    alone = draw(client, size="12x6", n=1)
    assert alone["data"] == found["data"][:1]
    assert found["usage"] == {"input_tokens": 5, "output_tokens": 0, "total_tokens": 5}


def test_every_parameter_changes_the_picture(client: httpx.Client, official: openai.OpenAI) -> None:
    base = draw(client)["data"]
    for fields in ({"steps": 9}, {"scale": 6.0}, {"size": "9x9"}, {"height": 9}, {"seed": 8, "scale": 1.0}):
        other = client.post(DRAW, json={"prompt": "a fox", "seed": 7, **fields}).json()["data"]
        assert other != base, fields
        rest = {name: value for name, value in fields.items() if name != "size"}
        size = {"size": fields["size"]} if "size" in fields else {}
        sent = official.images.generate(model="echo", prompt="a fox", extra_body={"seed": 7} | rest, **size)
        assert sent.data and sent.data[0].b64_json == other[0]["b64_json"]
        nested = client.post(DRAW, json={"prompt": "a fox", "extra_body": fields})
        assert error_of(nested)["param"] == "extra_body"


@pytest.mark.parametrize("size", ["20000x20000", "0x0", "-1x512", "8X8", "8x", "x8", "65x8", "8x65", "8x8x8", "", 8])
def test_odd_sizes_are_refused(client: httpx.Client, size: Any) -> None:
    error = error_of(client.post(DRAW, json={"prompt": "a", "size": size}))
    assert error["param"] == "size" and "regex" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "length"),
        ({"prompt": None}, "prompt", "str"),
        ({"n": 0}, "n", "is 0"),
        ({"n": 11}, "n", "is 11"),
        ({"n": "x"}, "n", "'x'"),
        ({"steps": 0}, "steps", "is 0"),
        ({"steps": 10**6}, "steps", "is 1000000"),
        ({"response_format": "url"}, "response_format", "'b64_json'"),
        ({"output_format": "webp"}, "output_format", "'png'"),
        ({"background": "transparent"}, "background", "auto, opaque"),
        ({"partial_images": 2}, "partial_images", "for streams"),
        ({"partial_images": 4, "stream": True}, "partial_images", "is 4"),
        ({"partial_images": 1, "preview_every": 1, "stream": True}, "partial_images", "both"),
        ({"size": "8x8", "width": 8}, "size", "both"),
        ({"image": data_uri(png())}, "image", "unknown"),
        ({"mask": "x"}, "mask", "takes no mask"),
        ({"quality": "hd"}, "quality", "auto, standard"),
        ({"temperature": 1}, "temperature", "unknown"),
    ],
)
def test_mistakes_of_drawing_name_the_field(client: httpx.Client, body: Any, param: str, words: str) -> None:
    error = error_of(client.post(DRAW, json={"prompt": "a", **body}))
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_shows_previews_and_ends_with_the_picture(client: httpx.Client, n: int) -> None:
    body = {"prompt": "a fox", "seed": 7, "partial_images": 2, "n": n, "size": "10x4"}
    found = events(client, DRAW, body)
    done = [event for event in found if event["type"] == "image_generation.completed"]
    partial = [event for event in found if event["type"] == "image_generation.partial_image"]
    assert len(done) == n and len(partial) == 2 * n and found[-1] in done
    assert {event["partial_image_index"] for event in partial} == {0, 1}
    assert {event["size"] for event in found} == {"10x4"} and {event["output_format"] for event in found} == {"png"}
    whole = draw(client, n=n, size="10x4")
    assert [e["b64_json"] for e in sorted(done, key=lambda e: e["index"])] == [e["b64_json"] for e in whole["data"]]
    assert found[-1]["usage"] == whole["usage"] and all("usage" not in event for event in found[:-1])


# ---- edits ------------------------------------------------------------------------------------------------------


def edit(client: httpx.Client, *files: tuple[str, bytes], status: int = 200, **fields: str) -> dict[str, Any]:
    sent = [(name, ("x.png", data, "image/png")) for name, data in files]
    response = client.post(EDIT, data={"prompt": "redder", "seed": "7", **fields}, files=sent)
    if status != 200:
        return error_of(response, status)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_forms_are_edits_with_files_in_order(client: httpx.Client) -> None:
    red, blue = png((200, 0, 0)), png((0, 0, 200), (10, 12))
    one = edit(client, ("image", red))
    assert one["size"] == "6x4" and pixels(one["data"][0]["b64_json"]).shape == (4, 6, 3)
    two = edit(client, ("image[]", red), ("image[]", blue))
    assert two["size"] == "10x12" and edit(client, ("image", red), ("image", blue))["data"] == two["data"]
    assert edit(client, ("image[]", blue), ("image[]", red))["data"] != two["data"]
    assert edit(client, ("image", red), size="auto")["data"] == one["data"]
    assert edit(client, ("image", red), size="5x7")["size"] == "5x7"
    many = edit(client, ("image", red), n="3")["data"]
    assert many[:1] == one["data"] and len({entry["b64_json"] for entry in many}) == 3
    assert edit(client, ("image", red), steps="9")["data"] != one["data"]
    body = {"prompt": "redder", "seed": 7, "image": [data_uri(red), data_uri(blue)]}
    assert client.post(EDIT, json=body).json()["data"] == two["data"]
    assert client.post(EDIT, json=body | {"image": data_uri(red)}).json()["data"] == one["data"]


def test_mistakes_of_edits_name_the_field(client: httpx.Client) -> None:
    red = png()
    assert edit(client, status=415)["param"] == "Content-Type"  # no multipart form
    assert edit(client, ("prompt2", red), status=400)["param"] == "prompt2"
    assert edit(client, ("mask", red), ("image", red), status=400)["param"] == "mask"
    assert edit(client, ("image", b"none"), status=400)["param"] == "image"
    assert edit(client, ("image", red), ("image", b"none"), status=400)["param"] == "image.1"
    for fields in ({"n": "0"}, {"n": "x"}, {"n": "1.5"}, {"size": "8"}, {"steps": "NaN"}, {"colour": "1"}):
        assert edit(client, ("image", red), status=400, **fields)["param"] == next(iter(fields))
    assert edit(client, ("image", red), prompt="", status=400)["param"] == "prompt"
    assert edit(client, ("image", png(size=(70, 4))), status=400)["param"] == "height"
    for source in ("http://127.0.0.1/a.png", "/etc/hostname", "file:///etc/hostname", "./x.png", "data:nothing"):
        sent = [("image", (None, source)), ("prompt", (None, "a"))]
        assert error_of(client.post(EDIT, files=sent))["param"] == "image"


def test_broken_forms_are_refused(client: httpx.Client) -> None:
    def post(body: bytes, kind: str = "multipart/form-data; boundary=b") -> dict[str, Any]:
        return error_of(client.post(EDIT, content=body, headers={"Content-Type": kind}))

    part = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n'
    assert "missing" in post(part + b"--b--\r\n")["message"]  # image is
    for broken in (b"", b"--b", part, part[:-3], part + b"--b", b"--c\r\n" + part, b"--b\r\n\r\na\r\n--b--\r\n"):
        post(broken)
    assert post(part + part + b"--b--\r\n")["param"] == "prompt"
    assert post(part.replace(b"\r\na", b"\r\n\xff") + b"--b--\r\n")["param"] == "prompt"
    assert "1024 parts" in post(part.replace(b"prompt", b"x[]") * 1100 + b"--b--\r\n")["message"]
    post(part + b"--b--\r\n", "multipart/form-data")
    post(part.replace(b"name=", b"nom=") + b"--b--\r\n")
    post(b"--b\r\n" + b"X: " + b"y" * 10**5 + b"\r\n\r\na\r\n--b--\r\n")
    too_large = part.replace(b"\r\na", b"\r\n" + b"a" * 2**20) + b"--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    assert error_of(client.post(EDIT, content=too_large, headers=headers), 413)["code"] == "body_too_large"


def test_an_edit_streams_under_its_own_names(official: openai.OpenAI) -> None:
    with official.images.edit(
        model="echo", image=[io.BytesIO(png())], prompt="redder", stream=True, partial_images=1, extra_body={"seed": 7}
    ) as stream:
        assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


# ---- the openai package, and ours ---------------------------------------------------------------------------------


def test_the_openai_package_chats(official: openai.OpenAI, client: httpx.Client) -> None:
    own: Any = {
        "model": "echo",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, image_part()]}],
    }
    more = {"think": 2, "ignore_eos": True}
    own |= {"max_tokens": 7, "n": 2, "temperature": 1.2, "seed": 4, "logprobs": True, "top_logprobs": 2}
    whole = official.chat.completions.create(**own, extra_body=more)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.choices[0].message.reasoning_content and whole.usage and whole.usage.completion_tokens == 14  # type: ignore[attr-defined]
    stream = official.chat.completions.create(
        **own, extra_body=more, stream=True, stream_options={"include_usage": True}
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices] and chunk.usage == whole.usage
    with pytest.raises(openai.BadRequestError, match="unknown"):
        official.chat.completions.create(model="echo", messages=own["messages"], extra_body={"colour": 1})
    echoed = [*own["messages"], whole.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    assert official.chat.completions.create(model="echo", messages=echoed).choices[0].message.content


def test_the_openai_package_draws_and_edits(official: openai.OpenAI, client: httpx.Client) -> None:
    drawn = official.images.generate(model="echo", prompt="a fox", n=2, extra_body={"seed": 7, "steps": 5})
    expected = draw(client, n=2, steps=5)
    assert drawn.data and [image.b64_json for image in drawn.data] == [e["b64_json"] for e in expected["data"]]
    edited = official.images.edit(
        model="echo", image=[io.BytesIO(png()), io.BytesIO(png((1, 2, 3)))], prompt="redder", n=2, size="auto",
        extra_body={"seed": 7, "steps": 5},
    )  # fmt: skip
    same = edit(client, ("image[]", png()), ("image[]", png((1, 2, 3))), n="2", steps="5")
    assert edited.data and [image.b64_json for image in edited.data] == [e["b64_json"] for e in same["data"]]


def test_our_client_chats_draws_and_edits(url: str, client: httpx.Client) -> None:
    with mstar.Client(url) as ours:
        whole = ours.chat("hello", max_tokens=9, think=3, logprobs=True)
        assert whole.text == chat(client, max_tokens=9, think=3)["choices"][0]["message"]["content"]
        assert whole.reasoning and whole.finish_reason == "length" and len(whole) == 1 and len(whole.logprobs) == 6
        with ours.stream_chat("hello", max_tokens=9, think=3) as stream:
            pieces = list(stream)
        assert "".join(piece.text for piece in pieces if piece.channel == "answer") == whole.text
        result = stream.answer.result
        assert (result.text, result.reasoning, result.usage) == (whole.text, whole.reasoning, whole.usage)
        source = np.asarray(Image.open(io.BytesIO(png())))
        asked = [{"role": "user", "content": ["look", mstar.client.image(source)]}]
        drawn = ours.chat(asked, modalities=["image"], seed=7)
        with ours.stream_chat(asked, modalities=["image"], seed=7, preview_every=2) as stream:
            shown = list(stream)
        assert [image.partial for image in shown] == [True, False]
        assert np.array_equal(shown[-1].pixels, drawn.images[0])
        made = ours.generate_images("a fox", seed=7, n=2)
        assert [image.shape for image in made] == [(8, 8, 3)] * 2 and made.seed == 7 and made.usage
        edited = ours.edit_image([source, png()], "redder", seed=7)
        assert np.array_equal(
            edited[0], pixels(edit(client, ("image", png()), ("image", png()))["data"][0]["b64_json"])
        )
        with pytest.raises(mstar.client.APIError, match="known: prompt"):
            ours.generate_images("a", colour=1)


def test_our_client_for_asyncio_gives_the_same(url: str, client: httpx.Client) -> None:
    async def ask() -> tuple[Any, ...]:
        async with mstar.AsyncClient(url) as ours:
            whole = await ours.chat("hello", max_tokens=9)
            async with ours.stream_chat("hello", max_tokens=9) as stream:
                pieces = [piece async for piece in stream]
            drawn = await ours.generate_images("a fox", seed=7)
            return (
                whole.text,
                "".join(piece.text for piece in pieces),
                drawn,
                await ours.edit_image(drawn[0], "x", seed=7),
            )

    text, streamed, drawn, edited = asyncio.run(ask())
    assert text == streamed == chat(client, max_tokens=9)["choices"][0]["message"]["content"]
    assert np.array_equal(drawn[0], pixels(draw(client)["data"][0]["b64_json"])) and edited[0].shape == (8, 8, 3)


def test_the_documented_client_chats_draws_and_speaks(
    url: str, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    with mstar.Client(url) as ours:
        for block in blocks:
            exec(compile(block, "docs/serving.md", "exec"), {"client": ours, "mstar": mstar, "np": np})
    assert len(blocks) == 2 and (tmp_path / "answer.wav").stat().st_size > 44


# ---- routes, media rules, metrics ---------------------------------------------------------------------------------


def test_routes_are_listed_described_and_counted(client: httpx.Client) -> None:
    assert {CHAT, DRAW, EDIT} <= set(client.get("/v1/models").json()["data"][0]["endpoints"])
    found = client.get("/openapi.json").json()
    schemas = found["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert {"messages", "think", "steps", "temperature", "max_tokens"} <= set(fields)
    assert fields["modalities"]["anyOf"][0]["items"] == {"enum": ["text", "image", "audio"]}
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert set(found["paths"][EDIT]["post"]["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    chat(client)
    metrics = client.get("/metrics").text
    assert f'mstar_http_responses_total{{method="POST",route="{CHAT}",status="200"}}' in metrics
    assert 'mstar_requests_total{outcome="length",task="chat"}' in metrics


@pytest.mark.parametrize("url_given", ["http://127.0.0.1:9/a.png", "file:///etc/hostname", "/etc/hostname", "./x.png"])
def test_no_field_that_takes_a_url_goes_around_the_rules(client: httpx.Client, url_given: str) -> None:
    def refused(path: str, body: dict[str, Any]) -> str:
        error = error_of(client.post(path, json=body))
        assert url_given not in ("/etc/hostname",) or "exist" not in error["message"]
        return str(error["param"])

    for kind in ("image_url", "audio_url", "video_url"):
        for value in (url_given, {"url": url_given}):
            body = {"messages": [*HELLO, {"role": "user", "content": [{"type": kind, kind: value}]}]}
            assert refused(CHAT, body).startswith(f"messages.1.content.0.{kind}")
    body = {"messages": [{"role": "assistant", "images": [{"type": "image_url", "image_url": url_given}]}, *HELLO]}
    assert refused(CHAT, body) == "messages.0.images.0.image_url"
    for value in (url_given, [url_given]):
        assert refused(EDIT, {"prompt": "a", "image": value}) == "image"
