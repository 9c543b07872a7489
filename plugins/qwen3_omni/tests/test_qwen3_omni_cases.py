"""Faults that users of peer systems met (tests/bug_cases/README.md has the numbers), on the tiny checkpoint.

Speech is checked by its codes, which a native request gives, and by its samples: n frames are n * 1920 - 555 of them.
"""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from asking import Asked, image, tensor
from media_files import data_uri, image_file
from sounds import film_file, sound_file, wave

from mstar.media.audio import decode_audio, encode_wav

CHAT, NATIVE = "/v1/chat/completions", "/v1/generate"
FRAME, LACK, RATE = 1920, 555, 24000
GREEDY = {"temperature": 0, "repetition_penalty": 1, "talker_temperature": 0}
SPOKEN = {"modalities": ["text", "audio"], "max_tokens": 3, "talker_max_tokens": 5, **GREEDY}
HELLO = {"type": "text", "text": "Hello, who are you?"}


@pytest.fixture(scope="module")
def serving() -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model="tiny")
    yield asked
    asked.close()


@pytest.fixture(scope="module")
def http(serving: Asked) -> Iterator[httpx.Client]:
    with serving.http(max_body_bytes=2**25) as url, httpx.Client(base_url=url, timeout=100) as client:
        yield client


class Site:
    """The served checkpoint, asked over HTTP."""

    def __init__(self, http: httpx.Client, end: int) -> None:
        self.http, self.end = http, end

    def chat(self, *content: dict[str, Any], **fields: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": [user(*content)]} | fields)

    def native(self, *content: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """A result, its tensors by name under `tensors`."""
        found = good(self.http.post(NATIVE, json={"messages": [user(*content)], "seed": 1} | fields))
        tensors = [one for one in found["outputs"] if one["type"] == "tensor"]
        return found | {"tensors": {one["name"]: array(one) for one in tensors}}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def array(one: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(one["data"]), one["dtype"]).reshape(one["shape"])


def good(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text[:500]
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    assert answer.status_code in (statuses or (400,)), answer.text[:500]
    assert answer.headers["content-type"] == "application/json" and set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and 'File "' not in error["message"]
    return error


def message_of(answer: httpx.Response) -> dict[str, Any]:
    (choice,) = good(answer)["choices"]
    assert choice["index"] == 0
    message: dict[str, Any] = choice["message"]
    return message


def merged(answer: httpx.Response) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that a stream's deltas make, and its chunks."""
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text[-500:]
    chunks = [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n")[:-2]]
    words, sound, transcript, ids = "", b"", "", set[str]()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert choice["index"] == 0
        audio = choice["delta"].get("audio", {})
        words += choice["delta"].get("content") or ""
        sound += base64.b64decode(audio.get("data", ""))
        transcript += audio.get("transcript", "")
        ids |= {audio["id"]} if audio else set()
    assert len(ids) <= 1 and chunks[-1 if chunks[-1]["choices"] else -2]["choices"][0]["finish_reason"]
    audio = {"data": sound, "transcript": transcript} if ids else None
    return {"content": words, "audio": audio}, chunks


def heard(message: dict[str, Any]) -> np.ndarray:
    """int16 samples of a whole answer's WAV file."""
    samples, rate = decode_audio(base64.b64decode(message["audio"]["data"]))
    assert rate == RATE and len(samples) == 1
    return pcm(samples[0] * (32768 / 32767))


def pcm(samples: np.ndarray) -> np.ndarray:
    return (samples * 32767).round().astype(np.int16)


def num_frames(samples: np.ndarray | bytes) -> int:
    """Frames that so many samples are, of which there must be a whole number."""
    count = len(samples) // 2 if isinstance(samples, bytes) else len(samples)
    frames, rest = divmod(count + LACK, FRAME)
    assert frames > 0 and not rest, count
    return frames


def sound(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def shown(seed: int, height: int = 64, width: int = 96) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    return {"type": "image_url", "image_url": {"url": image(pixels)["data"]}}


def film(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_uri(data)}}


@pytest.fixture
def site(http: httpx.Client, model: Asked) -> Site:
    return Site(http, model.model.checkpoint.config.turns.end)


# ---- 1, 2: one choice has text and sound, in the form asked for ---------------------------------------------


def test_text_and_speech_are_one_choice(site: Site) -> None:
    message = message_of(site.chat(HELLO, **SPOKEN))
    assert message["content"] and message["audio"]["transcript"] == message["content"]
    assert {"id", "data", "expires_at", "transcript"} <= set(message["audio"])
    audio = {"format": "pcm16"}
    streamed, chunks = merged(site.chat(HELLO, **SPOKEN, audio=audio, stream=True))
    assert streamed["content"] == streamed["audio"]["transcript"] == message["content"]
    assert streamed["audio"]["data"] == heard(message).tobytes()
    last = [choice["delta"]["audio"] for one in chunks for choice in one["choices"] if "audio" in choice["delta"]][-1]
    assert {"id", "expires_at"} <= set(last)


MAGIC = {"wav": (b"RIFF",), "flac": (b"fLaC",), "opus": (b"OggS",), "mp3": (b"ID3", b"\xff"), "aac": (b"\xff",)}


def test_speech_has_the_format_asked_for(site: Site) -> None:
    codes: set[bytes] = set()
    for kind in (*MAGIC, "pcm16"):
        message = message_of(site.chat(HELLO, **SPOKEN, audio={"voice": "Chelsie", "format": kind}))
        data = base64.b64decode(message["audio"]["data"])
        assert data.startswith(MAGIC[kind]) if kind in MAGIC else num_frames(data) == 4
        if kind in ("wav", "flac", "pcm16"):
            codes |= {data if kind == "pcm16" else heard(message).tobytes()}
    assert len(codes) == 1
    for kind in ("ogg", "WAV", "", None, 3):
        assert refused(site.chat(HELLO, **SPOKEN, audio={"format": kind}))["param"] == "audio.format"
    assert refused(site.chat(HELLO, **SPOKEN, audio={"format": "mp3"}, stream=True))["param"] == "audio.format"


# ---- 11: limits of texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_spoken", [False, True], ids=["text", "speech"])
def test_max_tokens_is_kept_and_the_reason_told(site: Site, is_spoken: bool) -> None:
    how: dict[str, Any] = {"seed": 1}
    if is_spoken:
        how |= {"modalities": ["text", "audio"], "talker_max_tokens": 12, "talker_temperature": 1}
    ends = {"seed": 2, "max_tokens": 6, "logit_bias": {str(site.end): 4}}  # text and speech end by themselves
    cases = ({"max_tokens": 5}, "length", 5), ({"max_completion_tokens": 5}, "length", 5), (ends, "stop", 1)
    for fields, reason, most in cases:
        whole = good(site.chat(HELLO, **how | fields))
        assert whole["choices"][0]["finish_reason"] == reason and whole["usage"]["completion_tokens"] == most
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        message, chunks = merged(
            site.chat(HELLO, **how | fields | streaming, **({"audio": {"format": "pcm16"}} if is_spoken else {}))
        )
        assert chunks[-2]["choices"][0]["finish_reason"] == reason and chunks[-1]["usage"] == whole["usage"]
        assert message["content"] == whole["choices"][0]["message"]["content"]
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, "x", 1.5):
            assert refused(site.chat(HELLO, **how | {name: value}))["param"] == name


# ---- 13: parts are what they are ----------------------------------------------------------------------------


def tokens_and_text(answer: httpx.Response) -> tuple[int, str]:
    found = good(answer)
    return found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"]


def test_media_cost_their_tokens_and_are_read_in_any_turn(site: Site) -> None:
    usual = {"max_tokens": 3, "temperature": 0, "repetition_penalty": 1, "logprobs": True}

    def told(*messages: dict[str, Any]) -> tuple[int, Any]:
        found = good(site.http.post(CHAT, json={"messages": messages} | usual))
        return found["usage"]["prompt_tokens"], found["choices"][0]["logprobs"]

    alone = told(user(HELLO))[0]
    low, high = (sound(encode_wav(wave(1, hertz=hertz), sample_rate=16000)) for hertz in (200, 3000))
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{low['input_audio']['data']}"}}
    dark, bright = (film(film_file(2, with_sound=False, grey=grey)) for grey in (0, 128))
    for first, second, tokens in (shown(1), shown(2), 6), (low, high, 13), (dark, bright, 2 * 4):
        one, other = (told(user(part, HELLO)) for part in (first, second))
        assert one[0] == other[0] == alone + tokens + 2 and one[1] != other[1]
        said = {"role": "assistant", "content": "A fox."}
        early = [told(user(part), said, user(HELLO)) for part in (first, second)]
        assert early[0][0] == early[1][0] > one[0] and early[0][1] != early[1][1]
    assert told(user(url, HELLO)) == told(user(low, HELLO))
    both = [told(user(*parts, HELLO)) for parts in ((shown(1), low), (low, shown(1)))]
    assert both[0][0] == both[1][0] and both[0][1] != both[1][1]


def test_parts_that_are_unknown_or_broken_are_refused(site: Site) -> None:
    for part in (
        {"type": "input_image", "input_image": "data:,"}, {"type": "file", "file": {}}, {"type": "input_audio"},
        {"type": "image_url", "image_url": {"url": data_uri(b"none")}}, sound(image_file()), sound(b""), film(b"none"),
        {"type": "input_audio", "input_audio": {"data": "####", "format": "wav"}},
    ):  # fmt: skip
        assert str(refused(site.chat(HELLO, part))["param"]).startswith("messages.0.content.1")


# ---- 14: a route that the model cannot serve ----------------------------------------------------------------

ROUTES = (
    CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/images/generations", "/v1/images/edits",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/realtime", "/tokenize", NATIVE,
)  # fmt: skip


def test_every_route_is_served_or_refused_and_the_next_request_served(site: Site) -> None:
    few = {"max_tokens": 2}
    whole = {"input": "Hello.", "prompt": "Hello.", "messages": [user(HELLO)], "inputs": [HELLO]}
    for path in ROUTES:
        for body in (whole, {"input": "Hello."}, {"messages": [user(HELLO)], "voice": "ethan"}, {"inputs": [HELLO]}):
            fields = {"params": few} if "inputs" in body else few if "messages" in body else {}
            answer = site.http.post(path, json=body | fields)
            assert answer.status_code == 200 or refused(answer, 400, 404)["message"]
    for body in ({"task": "vocode"}, {"task": "speech"}, {"outputs": ["image"]}, {"outputs": ["tensor:pixels"]}):
        assert refused(site.http.post(NATIVE, json={"inputs": [HELLO], "params": few} | body))["param"]
    error = refused(site.http.post("/v1/audio/speech", json={"input": "Hello.", "voice": "ethan"}), 404)
    assert CHAT in error["message"] and error["code"] == "unsupported_endpoint"
    assert num_frames(heard(message_of(site.chat(HELLO, **SPOKEN)))) == 4


# ---- 27, and what sound and videos may be -------------------------------------------------------------------


@pytest.fixture(scope="module")
def usual_answer(http: httpx.Client) -> tuple[int, str]:
    """To a second of a tone: the tokens of its prompt, and the text."""
    content = user(sound(encode_wav(wave(1), sample_rate=16000)), HELLO)
    return tokens_and_text(http.post(CHAT, json={"messages": [content]} | ANSWER))


ANSWER = {"max_tokens": 4, "temperature": 0, "repetition_penalty": 1}


@pytest.mark.parametrize(("rate", "layout", "codec"), [
    (8000, "mono", "pcm_s16le"), (22050, "mono", "pcm_s16le"), (44100, "mono", "pcm_s16le"),
    (96000, "mono", "pcm_s16le"), (16000, "stereo", "pcm_s16le"), (48000, "5.1", "pcm_s16le"),
    (16000, "mono", "pcm_s24le"), (44100, "stereo", "pcm_f32le"), (16000, "mono", "pcm_mulaw"),
])  # fmt: skip
def test_sound_of_any_rate_and_layout_is_heard_as_the_same(
    site: Site, usual_answer: tuple[int, str], rate: int, layout: str, codec: str
) -> None:
    samples = np.stack([wave(1, rate=rate)] * {"mono": 1, "stereo": 2, "5.1": 6}[layout])
    data = sound_file(samples, rate=rate, layout=layout, codec=codec)
    found = tokens_and_text(site.chat(sound(data), HELLO, **ANSWER))
    assert found[0] == usual_answer[0] and (found[1] == usual_answer[1] or codec == "pcm_mulaw")  # which is coarse


@pytest.mark.parametrize(("seconds", "tokens"), [(1, 13), (29, 377), (31, 403), (120, 1560)])
def test_silence_of_any_length_is_heard(site: Site, usual_answer: tuple[int, str], seconds: int, tokens: int) -> None:
    silence = sound(encode_wav(np.zeros(seconds * 16000, np.float32), sample_rate=16000))
    assert tokens_and_text(site.chat(silence, HELLO, **ANSWER))[0] == usual_answer[0] - 13 + tokens
    if seconds == 1:
        assert num_frames(heard(message_of(site.chat(silence, **SPOKEN)))) == 4


@pytest.mark.slow
def test_sixteen_minutes_are_heard_whole(site: Site, usual_answer: tuple[int, str]) -> None:
    data = sound_file(wave(960, rate=8000, hertz=3)[None], rate=8000, codec="pcm_mulaw")
    assert tokens_and_text(site.chat(sound(data), HELLO, **ANSWER))[0] == usual_answer[0] + 959 * 13


def test_sound_without_samples_is_refused(site: Site) -> None:
    for samples in (0, 1, 200):
        data = encode_wav(np.zeros(samples, np.float32), sample_rate=16000)
        error = refused(site.chat(HELLO, sound(data)))
        assert error["param"] == f"messages.0.content.1{'' if samples else '.input_audio.data'}", error
        assert "no samples" in error["message"] or "the least is 0.0126 s" in error["message"]


@pytest.mark.parametrize(("value", "told"), [(np.nan, "NaN or infinity"), (1e30, "samples up to 1e+30")])
def test_sound_that_is_no_sound_is_the_clients_fault(site: Site, value: float, told: str) -> None:
    data = sound_file(np.full((1, 8000), value, dtype=np.float32), codec="pcm_f32le")
    error = refused(site.chat(HELLO, sound(data)))
    assert error["param"].startswith("messages.0.content.1") and told in error["message"]


def test_a_video_is_watched_with_and_without_its_sound(site: Site) -> None:
    silent, noisy = (film(film_file(2, with_sound=one)) for one in (False, True))
    alone = tokens_and_text(site.chat(HELLO, **ANSWER))[0]
    for part, with_sound, tokens in (
        (silent, False, (8,)), (silent, True, (8,)), (noisy, False, (8,)), (noisy, True, (8 + 2 + 26, 8 + 2 + 27)),
    ):  # fmt: skip
        count = tokens_and_text(site.chat(part, HELLO, **ANSWER, use_audio_in_video=with_sound))[0]
        assert count - alone - 2 in tokens


# ---- 31, 32: windows join without holes, clicks or noise ----------------------------------------------------

LONG = {"max_tokens": 5, "talker_max_tokens": 60, "talker_temperature": 1, "code_predictor_temperature": 1}


def vocoded(site: Site, codes: np.ndarray, **params: Any) -> np.ndarray:
    """float32 samples of codes (groups, frames)."""
    asked = {"task": "vocode", "inputs": [tensor("codes", torch.from_numpy(codes.copy()))], "params": params}
    found = good(site.http.post(NATIVE, json=asked | {"outputs": ["tensors"]}))
    return array(next(one for one in found["outputs"] if one.get("name") == "audio"))


def loudness(samples: np.ndarray) -> np.ndarray:
    """Logarithms (windows, bins) of a spectrum, in dB."""
    windows = np.lib.stride_tricks.sliding_window_view(samples, 512)[::256] * np.hanning(512)
    return 20 * np.log10(np.abs(np.fft.rfft(windows)) + 1e-4)


def test_chunks_join_without_holes_clicks_or_noise(site: Site) -> None:
    asked = {"params": LONG, "outputs": ["text", "audio", "tensors"]}
    found = site.native(HELLO, **asked, seed=1)
    codes, joined = found["tensors"]["codes"], found["tensors"]["audio"]
    count = codes.shape[1]
    assert count > 53 and num_frames(joined) == count and found["counters"]["code2wav.decode"] == 5
    whole = vocoded(site, codes)
    assert len(whole) == len(joined) and np.abs(whole - joined).max() < 0.01
    assert np.square(whole).sum() > 1e5 * np.square(whole - joined).sum()  # 50 dB
    assert np.sqrt(np.square(loudness(whole) - loudness(joined)).mean(axis=1)).max() < 0.3
    holed = vocoded(site, codes, codec_chunk_frames=10)  # as the authors' code does
    assert len(holed) == len(whole) - LACK * ((count - 1) // 10)
    steps, cuts = np.abs(np.diff(joined)), np.cumsum([4, 8, 16])[:, None] * FRAME - LACK + np.arange(-2, 1)
    assert steps[cuts].max() <= np.quantile(np.delete(steps, cuts.ravel()), 0.999)


def test_streams_are_the_whole_sample_by_sample(site: Site) -> None:
    asked = LONG | {"modalities": ["text", "audio"], "talker_max_tokens": 15, "seed": 1}
    whole = heard(message_of(site.chat(HELLO, **asked)))
    streamed, chunks = merged(site.chat(HELLO, **asked, audio={"format": "pcm16"}, stream=True))
    assert streamed["audio"]["data"] == whole.tobytes() and num_frames(whole) == 14
    pieces = [
        choice["delta"] for one in chunks for choice in one["choices"] if "data" in choice["delta"].get("audio", {})
    ]
    assert [len(base64.b64decode(piece["audio"]["data"])) for piece in pieces][:2] == [
        2 * (4 * FRAME - LACK),
        2 * 8 * FRAME,
    ]


# ---- 35: short answers are heard ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["Hi.", "A", "<laugh>", "capital of China, one word"])
def test_one_word_is_heard(site: Site, words: str) -> None:
    asked = SPOKEN | {"max_tokens": 1}
    part = {"type": "text", "text": words}
    whole = heard(message_of(site.chat(part, **asked)))
    assert num_frames(whole) in (3, 4) and len(whole) / RATE > 0.2
    streamed, _ = merged(site.chat(part, **asked, audio={"format": "pcm16"}, stream=True))
    assert streamed["audio"]["data"] == whole.tobytes()


def test_silence_is_an_error_and_no_empty_sound(site: Site) -> None:
    asked = SPOKEN | {"talker_max_tokens": 1}  # which leaves no frame
    error = refused(site.chat(HELLO, **asked))
    assert (error["code"], error["param"]) == ("no_audio", "modalities")
    body = {"messages": [user(HELLO)], "stream": True, "audio": {"format": "pcm16"}} | asked
    text = ""
    with pytest.raises(httpx.RemoteProtocolError), site.http.stream("POST", CHAT, json=body) as stream:
        for piece in stream.iter_text():
            text += piece
    assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "no_audio"
    assert "[DONE]" not in text and '"finish_reason":"' not in text


# ---- 43: what is spoken is what is written ------------------------------------------------------------------


@pytest.mark.parametrize("about", ["text", "image", "audio", "video"])
def test_an_answer_that_is_cut_is_spoken_to_its_last_word(site: Site, about: str) -> None:
    part = {
        "text": {"type": "text", "text": "Well, "}, "image": shown(1), "video": film(film_file(1, with_sound=False)),
        "audio": sound(encode_wav(wave(1), sample_rate=16000)),
    }[about]  # fmt: skip
    asked = SPOKEN | {"max_tokens": 3, "talker_max_tokens": 8}
    cut = message_of(site.chat(part, HELLO, **asked))
    longer = message_of(site.chat(part, HELLO, **asked | {"max_tokens": 4, "speak_last_token": False}))
    without = message_of(site.chat(part, HELLO, **asked | {"speak_last_token": False}))
    assert longer["content"].startswith(cut["content"].rstrip("\ufffd")) and without["content"] == cut["content"]
    assert np.array_equal(heard(cut), heard(longer)) and not np.array_equal(heard(cut), heard(without))


def test_voices_are_checked_wherever_they_are_named(site: Site) -> None:
    for fields, param in (
        ({"audio": {"voice": "nobody", "format": "wav"}}, "audio.voice"), ({"speaker": "nobody"}, "speaker"),
        ({"speaker": "nobody", "modalities": ["text"]}, "speaker"),
        ({"speaker": "aiden", "audio": {"voice": "ethan", "format": "wav"}}, "speaker"),
    ):  # fmt: skip
        error = refused(site.chat(HELLO, **SPOKEN | fields))
        assert error["param"] == param and ("ethan" in error["message"])


# ---- 64, 71: who stands beside a request changes nothing ----------------------------------------------------

VOICES = ("ethan", "chelsie", "aiden")


def asked_of(number: int) -> dict[str, Any]:
    """A request unlike its neighbours; half of them speak."""
    part = [shown(number), sound(encode_wav(wave(0.5, hertz=100 + 50 * number), sample_rate=16000))][number // 2 % 2]
    words = {"type": "text", "text": f"Number {number}."}
    content = [part, words] if number % 4 else [words]
    body: dict[str, Any] = {"messages": [user(*content)], "seed": number, "max_tokens": 2 + number % 3, "top_k": 8}
    if number % 2:
        return body
    return body | {
        "modalities": ["text", "audio"], "talker_max_tokens": 4 + number % 3, "talker_top_k": 10,
        "code_predictor_top_k": 6, "audio": {"voice": VOICES[number // 2 % 3], "format": "wav"},
    }  # fmt: skip


def answered(http: httpx.Client, body: dict[str, Any]) -> tuple[str, str]:
    message = message_of(http.post(CHAT, json=body))
    return message["content"], message.get("audio", {}).get("data", "")


def hang_up(http: httpx.Client, body: dict[str, Any], *, after_s: float) -> None:
    content = json.dumps(body | {"talker_max_tokens": 500, "max_tokens": 200, "ignore_eos": True}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((str(http.base_url.host), int(http.base_url.port or 0)), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        time.sleep(after_s)


def test_requests_beside_others_get_what_they_get_alone(site: Site) -> None:
    bodies = [asked_of(number) for number in range(12)]
    alone = [answered(site.http, body) for body in bodies]
    assert len({sound for _, sound in alone if sound}) == 6
    with ThreadPoolExecutor(20) as pool:
        gone = [pool.submit(hang_up, site.http, bodies[2 * n], after_s=0.2 * n) for n in range(4)]
        flying = []
        for body in bodies:
            flying.append(pool.submit(answered, site.http, body))
            time.sleep(0.02)
        assert [one.result() for one in flying] == alone
        assert [one.result() for one in gone] == [None] * 4


def test_seeds_are_kept_at_the_ends_of_their_range_and_repeat(site: Site) -> None:
    asked = asked_of(4) | {"talker_max_tokens": 3}
    found = [answered(site.http, asked | {"seed": seed}) for seed in (0, 0, 1, 2**63 - 1)]
    assert found[0] == found[1] and len(set(found)) == 3
    for seed in (-1, 2**63, 1.5, "x"):
        assert refused(site.chat(HELLO, seed=seed))["param"] == "seed"
