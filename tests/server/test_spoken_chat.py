"""Chat that hears, sees, speaks and calls tools, over HTTP on the echo model: as the openai package sees it."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from served import Served

import mstar

CHAT = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = {"image": 2, "audio": 1, "video": 1}
    found = Served(
        plugin="echo", served_model_name=("echo",), limit_mm_per_prompt=limits, max_audio_duration_s=2,
        max_video_duration_s=2,
    )  # fmt: skip
    yield found
    found.close()


def ask(client: httpx.Client, *, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = client.post(CHAT, json={"messages": HELLO, **fields})
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found["error"] if status != 200 else found["choices"][0]


def wav(seconds: float, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, rate, 0, "NONE", ""))
        sound.writeframes(bytes(2 * round(seconds * rate)))
    return file.getvalue()


def spoken(text: str, *, gain: int = 1) -> np.ndarray:
    """16-bit samples of the echo model for a text."""
    samples = np.repeat(np.frombuffer(text.encode(), np.uint8) * np.float32(gain) / 1024, 40)
    return (samples.astype(np.float32) * np.float32(32767)).astype("<i2")


def heard(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler(format="s16", layout="mono")
        blocks = [b.to_ndarray()[0] for f in container.decode(audio=0) for b in resampler.resample(f)]
    return np.concatenate(blocks)


# ---- sound out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wav", "pcm16", "flac", "mp3", "opus", "aac"])
def test_the_openai_package_hears_a_whole_answer(official: openai.OpenAI, kind: Any) -> None:
    fields: Any = {"modalities": ["text", "audio"], "audio": {"voice": "loud", "format": kind}}
    whole = official.chat.completions.create(
        model="echo", messages=HELLO, extra_body={"say": "Grüße!"}, max_tokens=8, **fields
    )
    message = whole.choices[0].message
    assert message.audio is not None and message.content == message.audio.transcript == "Grüße!"
    assert message.audio.id.startswith("audio-") and message.audio.expires_at >= whole.created
    data, expected = base64.b64decode(message.audio.data), spoken("Grüße!", gain=2)
    if kind == "pcm16":
        assert data == expected.tobytes()
    elif kind in ("wav", "flac"):
        assert np.array_equal(heard(data), expected)
    else:
        assert len(heard(data)) >= len(expected)


@pytest.mark.parametrize("n", [1, 2])
def test_the_openai_package_hears_a_stream(official: openai.OpenAI, n: int) -> None:
    fields: Any = {"modalities": ["text", "audio"], "audio": {"voice": "plain", "format": "pcm16"}, "n": n}
    stream = official.chat.completions.create(
        model="echo", messages=HELLO, max_tokens=6, extra_body={"say": "spoken"}, stream=True,
        stream_options={"include_usage": True}, **fields,
    )  # fmt: skip
    texts, sounds, ids, usage = [""] * n, [b""] * n, [set[str]() for _ in range(n)], None
    transcripts, expires, reasons = [""] * n, set[int](), list[str]()
    for chunk in stream:
        usage = chunk.usage or usage
        assert len(chunk.choices) <= 1
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            given: Any = getattr(choice.delta, "audio", None)
            audio: dict[str, Any] = {} if given is None else given.model_dump(exclude_none=True)
            sounds[choice.index] += base64.b64decode(audio.get("data", ""))
            transcripts[choice.index] += audio.get("transcript", "")
            ids[choice.index] |= {audio["id"]} if audio else set()
            expires |= {audio["expires_at"]} if "expires_at" in audio else set()
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == transcripts == ["spoken"] * n and sounds == [spoken("spoken").tobytes()] * n
    assert [len(own) for own in ids] == [1] * n and len(expires) == 1 and reasons == ["length"] * n
    assert usage is not None and usage.completion_tokens == 6 * n
    whole = official.chat.completions.create(
        model="echo", messages=HELLO, max_tokens=6, extra_body={"say": "spoken"}, **fields
    )
    assert [choice.message.audio.data for choice in whole.choices if choice.message.audio] == [
        base64.b64encode(sound).decode() for sound in sounds
    ]


def test_what_cannot_be_spoken_is_told(client: httpx.Client) -> None:
    audio = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
    for fields, param, words in (
        ({"audio": {"format": "pcm16", "voice": "nobody"}}, "audio.voice", "plain, loud"),
        ({"audio": {"format": "ogg"}}, "audio.format", "one of wav, mp3"),
        ({"audio": {"format": "wav"}, "stream": True}, "audio.format", "'pcm16' alone"),
        ({"audio": {"format": "wav", "speed": 2}}, "audio.speed", "unknown"),
        ({"modalities": ["text"]}, "audio", "modalities"),
        ({"mute": True, "say": "hm"}, "modalities", "no sound"),
    ):
        error = ask(client, status=400, **{**audio, **fields})
        assert error["param"] == param and words in error["message"], error
    streamed, text = {"messages": HELLO, "mute": True, "say": "hm", "stream": True, **audio}, b""
    with client.stream("POST", CHAT, json=streamed) as response, pytest.raises(httpx.RemoteProtocolError):
        for data in response.iter_raw():
            text += data
    assert b'"code":"no_audio"' in text.splitlines()[-2] and b"[DONE]" not in text
    silent = ask(client, say="", eos_at=0, **audio)
    assert silent["message"]["content"] == "" and "audio" not in silent["message"]


def test_an_answer_s_sound_goes_back_as_its_transcript(official: openai.OpenAI, client: httpx.Client) -> None:
    fields: Any = {"modalities": ["text", "audio"], "audio": {"voice": "plain", "format": "wav"}, "max_tokens": 2}
    first = official.chat.completions.create(model="echo", messages=HELLO, extra_body={"say": "ok"}, **fields)
    turn = first.choices[0].message.model_dump(exclude_none=True)
    plain = ask(client, messages=[*HELLO, {"role": "assistant", "content": "ok"}, *HELLO])
    for same in (turn, {name: turn[name] for name in ("role", "audio")}):
        assert ask(client, messages=[*HELLO, same, *HELLO]) == plain
    for changed, param, words in (
        ({"content": None, "audio": {"id": "audio-1"}}, "messages.0.audio.transcript", "not kept"),
        ({"audio": {"id": "audio-1"}}, "messages.0.audio.transcript", "not kept"),
        ({"content": "other"}, "messages.0.audio", "not the content"),
        ({"role": "user"}, "messages.0.audio", "the role user"),
    ):
        error = ask(client, status=400, messages=[turn | changed, *HELLO])
        assert error["param"] == param and words in error["message"], error


# ---- media in ---------------------------------------------------------------------------------------------------


def movie(*, frames: int, rate: int, with_sound: bool = False) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = 32
        track = container.add_stream("aac", rate=16000, layout="mono") if with_sound else None
        for number in range(frames):
            shown = np.full((32, 32, 3), 8 * number % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode(None))
        if track is not None:
            tone = (np.sin(np.arange(16000 * frames // rate) / 9) * 9000).astype(np.int16)
            sound = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
            sound.sample_rate = 16000
            container.mux([*track.encode(sound), *track.encode(None)])
    return file.getvalue()


def part(kind: str, data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}, **fields}


def test_the_number_of_media_is_limited_before_any_is_read(client: httpx.Client) -> None:
    beyond = part("audio", b"nothing that could be decoded")
    turns = [{"role": "user", "content": [part("audio", wav(0.1))]}, {"role": "user", "content": ["x", beyond]}]
    turns[1]["content"] = [{"type": "text", "text": "x"}, beyond]
    error = ask(client, status=400, messages=turns)
    assert error["param"] == "messages.1.content.1" and error["code"] == "too_many_media"
    assert "audio number 2" in error["message"] and "--limit-mm-per-prompt audio=1" in error["message"]
    turns[1]["content"] = [{"type": "image_url", "image_url": "http://127.0.0.1:9/a.png"}] * 3
    assert ask(client, status=400, messages=turns)["param"] == "messages.1.content.2"
    native = {"task": "media", "inputs": [{"type": "video", "data": "data:,"}] * 2}
    assert client.post("/v1/generate", json=native).json()["error"]["param"] == "inputs.1"


def test_long_media_are_refused(client: httpx.Client) -> None:
    for given, name, flag in (
        (part("audio", wav(2.1)), "audio_url.url", "--max-audio-duration"),
        (part("video", movie(frames=30, rate=10)), "video_url.url", "--max-video-duration"),
    ):
        error = ask(client, status=400, messages=[{"role": "user", "content": [given]}])
        assert error["param"] == f"messages.0.content.0.{name}" and error["code"] == "media_too_large"
        assert flag in error["message"] and "2 s" in error["message"]
    samples = {"dtype": "int16", "shape": [1, 33000], "data": base64.b64encode(bytes(66000)).decode()}
    body = {"task": "media", "inputs": [{"type": "audio", "samples": samples}]}
    error = client.post("/v1/generate", json=body).json()["error"]
    assert error["param"] == "inputs.0.samples" and "2.1 s" in error["message"]


def test_samples_are_a_sound_too(client: httpx.Client) -> None:
    tone = (np.sin(np.arange(1600) / 9) * 9000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(tone.tobytes())

    def facts(**fields: Any) -> Any:
        body = {"task": "media", "inputs": [{"type": "audio", **fields}]}
        return client.post("/v1/generate", json=body).json()

    def sent(array: np.ndarray) -> dict[str, Any]:
        return {"dtype": array.dtype.name, "shape": [*array.shape], "data": base64.b64encode(array.tobytes()).decode()}

    whole = facts(data=f"data:;base64,{base64.b64encode(file.getvalue()).decode()}")["outputs"]
    for samples in (tone, tone[None], (tone / np.float32(32768)).astype(np.float32)):
        assert facts(samples=sent(samples))["outputs"] == whole
    assert facts(samples=sent(tone), sample_rate=8000)["outputs"] != whole
    for fields, param in (
        ({}, "inputs.0"),
        ({"samples": sent(tone), "data": "data:,"}, "inputs.0"),
        ({"data": "data:,", "sample_rate": 8000}, "inputs.0.sample_rate"),
        ({"samples": sent(tone[:0])}, "inputs.0.samples"),
        ({"samples": sent(tone.astype(np.int64))}, "inputs.0.samples"),
    ):
        assert facts(**fields)["error"]["param"] == param


def test_videos_are_heard_if_asked(client: httpx.Client) -> None:
    def asked(data: bytes, **fields: Any) -> Any:
        return ask(client, messages=[{"role": "user", "content": [part("video", data)]}], **fields)["message"]

    with_sound, silent = movie(frames=8, rate=8, with_sound=True), movie(frames=8, rate=8)
    assert asked(with_sound, hear_videos=True) != asked(with_sound)
    assert asked(silent, hear_videos=True) == asked(silent)


# ---- tools ------------------------------------------------------------------------------------------------------


def test_the_openai_package_gets_calls_of_tools(official: openai.OpenAI) -> None:
    more, tools = {"say": f"I look.\n{CALL}\n{CALL}"}, [LOOK]
    fields: Any = {"model": "echo", "messages": HELLO, "tools": tools, "max_tokens": 200}
    ends = more | {"eos_at": len(more["say"].encode())}
    whole = official.chat.completions.create(**fields, extra_body=ends).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I look." and whole.message.tool_calls
    calls: Any = whole.message.tool_calls
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "look_up", {"city": "Köln"})
    ] * 2 and len({call.id for call in calls}) == 2
    found: dict[int, Any] = {}
    text, reason = "", None
    for chunk in official.chat.completions.create(**fields, extra_body=ends, stream=True):
        choice = chunk.choices[0]
        text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        found |= {call.index: call for call in choice.delta.tool_calls or ()}
    assert (text, reason) == ("I look.", "tool_calls")
    assert [found[i].function.model_dump() for i in range(2)] == [call.function.model_dump() for call in calls]
    cut = official.chat.completions.create(**fields | {"max_tokens": 20}, extra_body=more).choices[0]
    assert cut.finish_reason == "length" and not cut.message.tool_calls and "<tool_call>" in str(cut.message.content)
    stopped = official.chat.completions.create(**fields, extra_body=more, stop="look").choices[0]
    assert (stopped.message.content, stopped.message.tool_calls) == ("I ", None)

    turns = [*HELLO, whole.message.model_dump(exclude_none=True)]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    again = official.chat.completions.create(**fields | {"messages": turns, "max_tokens": 2})
    other = [*turns[:-1], {**turns[-1], "content": "sun"}]
    assert again.usage and again.choices[0].message.content is not None
    shorter = official.chat.completions.create(**fields | {"messages": other, "max_tokens": 2}).usage
    assert shorter is not None and shorter.prompt_tokens == again.usage.prompt_tokens - len("rain") + len("sun")


def test_tools_are_handed_on_or_left_out_but_never_ignored(client: httpx.Client) -> None:
    def number(**fields: Any) -> int:
        return int(client.post(CHAT, json={"messages": HELLO, **fields}).json()["usage"]["prompt_tokens"])

    plain = number()
    assert number(tools=[LOOK]) == number(tools=[LOOK], tool_choice="auto", parallel_tool_calls=True) > plain
    assert number(tools=[LOOK], tool_choice="none") == plain == number(tools=[])
    called = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    asked = [*HELLO, {"role": "assistant", "tool_calls": [called]}]
    answered = [{"role": role, "content": "a", "tool_call_id": name} for role, name in (("tool", "c2"), ("user", "c1"))]
    for fields, param, words in (
        ({"tools": [LOOK], "tool_choice": "required"}, "tool_choice", "one of none, auto"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice", "none, auto"),
        ({"tools": [LOOK], "parallel_tool_calls": False}, "parallel_tool_calls", "leave it out"),
        ({"tools": [LOOK, LOOK]}, "tools", "2 times"),
        ({"tools": [{**LOOK, "strict": True}]}, "tools.0.strict", "unknown"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "'a b'"),
        ({"tools": [{**LOOK, "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict", "True"),
        ({"functions": [{}]}, "functions", "give tools"),
        ({"tools": [LOOK], "modalities": ["image"]}, "tools", "cannot be called"),
        ({"messages": [*asked, answered[0]]}, "messages.2.tool_call_id", "c1"),
        ({"messages": [*asked, answered[1]]}, "messages.2.tool_call_id", "user"),
        ({"messages": [HELLO[0] | {"tool_calls": [called]}]}, "messages.0.tool_calls", "assistant"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": []}]}, "messages.1.content", "no content"),
    ):  # fmt: skip
        error = ask(client, status=400, **fields)
        assert error["param"] == param and words in error["message"], error
    assert ask(client, messages=[*asked, {"role": "tool", "content": "a", "tool_call_id": "c1"}])["message"]


def test_native_requests_call_tools_too(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"task": "chat", "messages": messages, "tools": [LOOK], "params": {"say": CALL, "max_tokens": 100}}
    found = client.post("/v1/generate", json=body).json()["outputs"]
    assert [output["type"] for output in found] == ["text", "tool_call"]
    assert (found[1]["name"], json.loads(found[1]["arguments"])) == ("look_up", {"city": "Köln"})
    events = [json.loads(line) for line in client.post("/v1/generate", json=body | {"stream": True}).text.splitlines()]
    assert [event["name"] for event in events if event["event"] == "tool_call"] == ["look_up"]
    without = {"inputs": [{"type": "text", "text": "a"}], "tools": [LOOK]}
    for wrong in ({"task": "chat", **without}, {"task": "generate", **without}):
        assert client.post("/v1/generate", json=wrong).json()["error"]["param"] == "tools"


# ---- ours -------------------------------------------------------------------------------------------------------


def test_our_client_speaks_hears_and_calls(url: str, tmp_path: Any) -> None:
    with mstar.Client(url) as ours:
        question = {"role": "user", "content": ["what?", mstar.client.media("audio", wav(0.5))]}
        fields: Any = {"modalities": ["text", "audio"], "say": "ok", "max_tokens": 2}
        whole = ours.chat([question], audio={"format": "wav"}, **fields)
        assert whole.text == "ok" and np.array_equal(heard(whole.audio), spoken("ok"))
        whole.save_audio(tmp_path / "whole.wav")
        with ours.stream_chat([question], audio={"format": "pcm16"}, **fields) as stream:
            list(stream)
        stream.answer.result.save_audio(tmp_path / "streamed.wav")
        assert (tmp_path / "whole.wav").read_bytes() == (tmp_path / "streamed.wav").read_bytes()
        same = {"role": "user", "content": ["what?", mstar.client.audio(np.zeros(4000, np.int16), sample_rate=8000)]}
        assert ours.chat([same], max_tokens=9).text == ours.chat([question], max_tokens=9).text
        called = ours.chat("hello", tools=[LOOK], say=CALL, max_tokens=100)
        assert called.tool_calls[0]["function"]["name"] == "look_up"
        with ours.stream_chat("hello", tools=[LOOK], say=CALL, max_tokens=100) as stream:
            list(stream)
        assert stream.answer.result.tool_calls[0]["function"] == called.tool_calls[0]["function"]
        with pytest.raises(mstar.client.ClientError, match="no sound"):
            called.save_audio(tmp_path / "none.wav")


def test_a_model_that_does_not_read_aloud_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "spec", replace(served.engine.spec, endpoints=(CHAT,)))
    with served.http() as address, httpx.Client(base_url=address, timeout=60) as found:
        response = found.post("/v1/audio/speech", json={"input": "hello"})
        error = response.json()["error"]
        assert response.status_code == 404 and error["code"] == "unsupported_endpoint"
        assert "does not read text aloud" in error["message"] and "/v1/generate" in error["message"]
