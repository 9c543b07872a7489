"""Orpheus over HTTP as clients meet it, and `mstar run` as its offline twin. One server for all tests here."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file

FRAME = 2048
BINARY = {"Accept": "application/octet-stream"}


@pytest.fixture(scope="module")
def served(serving: Any, tiny_folder: Path) -> Iterator[Any]:
    with serving(tiny_folder, max_model_len=1024, served_model_name=("orpheus", "speaker")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[httpx.Client]:
    with served.http() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def _left_clean(served: Any) -> Iterator[None]:
    yield
    served.assert_clean()


def speak(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"input": "Hello there.", "model": "orpheus", "voice": "tara", "seed": 5, "max_tokens": 45} | fields
    response = client.post("/v1/audio/speech", json=body)
    assert response.status_code == 200, response.text
    return response


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def pcm_of(samples: np.ndarray) -> bytes:
    return (np.clip(samples, -1, 1) * np.float32(32767)).astype("<i2").tobytes()


def wav_pcm(data: bytes) -> bytes:
    """The samples of a whole WAV file, its format checked."""
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24000)
        return file.readframes(file.getnframes())


# ---- what the server says of itself -------------------------------------------------------------------------


def test_health_and_models(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["orpheus", "speaker"]
    model = client.get("/v1/models/orpheus").json()
    assert model == listed["data"][0]
    assert model["tasks"] == ["speech", "vocode"] and model["max_model_len"] == 1024
    assert "/v1/audio/speech" in model["endpoints"]
    assert client.get("/v1/models/nobody").status_code == 404


# ---- /v1/audio/speech ---------------------------------------------------------------------------------------


def test_whole_and_streamed_speech_are_the_same_bytes(client: httpx.Client) -> None:
    wav, pcm = speak(client).content, speak(client, response_format="pcm").content
    assert len(pcm) == 6 * FRAME * 2
    assert wav_pcm(wav) == pcm
    assert speak(client, response_format="pcm", stream=True).content == pcm
    streamed = speak(client, stream=True).content
    assert streamed.count(b"RIFF") == 1 and streamed.startswith(b"RIFF")
    assert streamed[4:8] == streamed[40:44] == b"\xff\xff\xff\xff"
    assert streamed[8:40] == wav[8:40]
    assert streamed[44:] == pcm
    assert speak(client, stream_format="audio", response_format="pcm").content == pcm


def test_speech_headers_say_what_the_bytes_are(client: httpx.Client) -> None:
    whole = speak(client)
    assert whole.headers["content-type"] == "audio/wav"
    assert whole.headers["x-sample-rate"] == "24000" and whole.headers["x-seed"] == "5"
    assert whole.headers["x-finish-reason"] == "length"
    assert speak(client, max_tokens=None).headers["x-finish-reason"] == "stop"
    streamed = speak(client, stream=True, response_format="pcm")
    assert streamed.headers["content-type"] == "audio/pcm"
    assert streamed.headers["x-sample-rate"] == "24000" and streamed.headers["x-seed"] == "5"
    assert "content-length" not in streamed.headers


def test_streamed_speech_comes_in_pieces(client: httpx.Client) -> None:
    body = {"input": "A sentence that takes a while to say.", "stream": True, "response_format": "pcm", "seed": 1}
    with client.stream("POST", "/v1/audio/speech", json=body) as response:
        pieces = list(response.iter_raw())
    assert len(pieces) >= 5
    assert len(pieces[0]) == 2 * FRAME * 2  # the first window's two frames, before the others are known
    assert all(len(piece) % 2 == 0 for piece in pieces)


FORMATS = {
    "wav": ("audio/wav", b"RIFF"), "pcm": ("audio/pcm", b""), "mp3": ("audio/mpeg", b"ID3"),
    "flac": ("audio/flac", b"fLaC"), "opus": ("audio/ogg", b"OggS"), "aac": ("audio/aac", b"\xff\xf1"),
}  # fmt: skip
LATE = 2048
"""Samples that a codec may add before the first and after the last."""


def heard(data: bytes) -> np.ndarray:
    """An audio file at 24 kHz, as float32."""
    with av.open(io.BytesIO(data)) as file:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=24000)
        return np.concatenate([b.to_ndarray()[0] for f in [*file.decode(audio=0), None] for b in resampler.resample(f)])


def loudness(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(samples.astype(np.float64) ** 2)))


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == "" and all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_its_type_and_holds_the_speech(client: httpx.Client, name: str) -> None:
    right = heard(speak(client).content)
    response = speak(client, response_format=name)
    assert response.headers["content-type"] == FORMATS[name][0] and response.headers["x-finish-reason"] == "length"
    assert response.content.startswith(FORMATS[name][1])
    found = np.frombuffer(response.content, "<i2") / 32767 if name == "pcm" else heard(response.content)
    assert len(right) <= len(found) <= len(right) + LATE
    assert loudness(found) == pytest.approx(loudness(right), rel=0.2)
    assert speak(client, response_format=name).content == response.content


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "flac"])
def test_a_stream_is_one_file_as_bytes_and_as_events(client: httpx.Client, name: str) -> None:
    right = heard(speak(client).content)
    streamed = speak(client, response_format=name, stream=True)
    assert streamed.headers["content-type"] == FORMATS[name][0]
    assert streamed.content.startswith(FORMATS[name][1]) and streamed.content.count(b"RIFF") == (name == "wav")
    found = np.frombuffer(streamed.content, "<i2") / 32767 if name == "pcm" else heard(streamed.content)
    assert len(right) <= len(found) <= len(right) + LATE
    *deltas, done = events_of(speak(client, response_format=name, stream_format="sse"))
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"} and len(deltas) >= 3
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == streamed.content
    assert done["type"] == "speech.audio.done" and done["finish_reason"] == "length" and done["seed"] == 5
    usage = done["usage"]
    assert usage["output_tokens"] == 45 and usage["total_tokens"] == 45 + usage["input_tokens"]


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
def test_speed_changes_the_length_streamed_or_whole(client: httpx.Client, speed: float) -> None:
    usual, spoken = (len(speak(client, response_format="pcm", speed=s).content) // 2 for s in (1.0, speed))
    assert spoken == round(usual / speed)
    whole = speak(client, response_format="pcm", speed=speed).content
    assert speak(client, response_format="pcm", speed=speed, stream=True).content == whole


def test_speed_one_changes_no_bit(client: httpx.Client) -> None:
    assert speak(client, speed=1).content == speak(client).content == speak(client, speed=1.0).content


def test_speech_past_its_deadline_is_an_error(client: httpx.Client) -> None:
    body = {"input": "On and on.", "timeout_s": 0.5, **LONG}
    response = client.post("/v1/audio/speech", json=body)
    assert response.status_code == 504 and "timeout_s" in error_of(response)["message"]


def test_a_seed_makes_the_same_bytes_and_an_absent_one_is_reported(client: httpx.Client) -> None:
    drawn = speak(client, seed=None)
    again = speak(client, seed=int(drawn.headers["x-seed"]))
    assert again.content == drawn.content
    assert speak(client, seed=None).content != drawn.content
    assert speak(client, seed=6).content != speak(client, seed=5).content
    assert speak(client, voice="leo").content != speak(client).content


def test_the_first_voice_is_the_default_and_null_is_none(client: httpx.Client) -> None:
    body = {"input": "Hello there.", "seed": 5, "max_tokens": 45}
    default = client.post("/v1/audio/speech", json=body).content
    assert default == speak(client).content
    assert client.post("/v1/audio/speech", json={**body, "voice": None}).content != default


def test_sampling_parameters_reach_the_sampler(client: httpx.Client) -> None:
    greedy = {"temperature": 0, "codec_noise": False}
    assert speak(client, seed=1, **greedy).content == speak(client, seed=2, **greedy).content
    assert speak(client, seed=1, **greedy, repetition_penalty=1.0).content != speak(client, seed=1, **greedy).content
    assert speak(client, seed=1, top_k=1, codec_noise=False).content == speak(client, seed=1, **greedy).content


def test_streamed_long_text_is_the_whole_one(
    client: httpx.Client, served: Any, long_text: Callable[[int], str]
) -> None:
    fields = {
        "input": long_text(750), "max_tokens": None, "response_format": "pcm", "logit_bias": {str(served.stop): 45.0},
    }  # fmt: skip
    whole = speak(client, **fields)
    assert whole.headers["x-finish-reason"] == "stop"
    assert len(whole.content) > 15 * FRAME * 2
    assert speak(client, **fields, stream=True).content == whole.content


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"voice": "nobody"}, 400, "voice", "tara, zoe, zac, jess, leo, mia, julia, leah, dan"),
        ({"voice": ""}, 400, "voice", "tara"),
        ({"voice": "../../x"}, 400, "voice", "tara"),
        ({"voice": 3}, 400, "voice", "is 3"),
        ({"input": " \n\t "}, 400, "input", "blank"),
        ({"input": ""}, 400, "input", "blank"),
        ({"input": 7}, 400, "input", "str"),
        ({"inptu": "x"}, 400, "inptu", "known: input, model, voice"),
        ({"model": "gpt-4o-mini-tts"}, 404, "model", "orpheus, speaker"),
        ({"response_format": "mpeg"}, 400, "response_format", "wav, pcm, mp3, flac, opus, aac"),
        ({"response_format": "flac", "stream": True}, 400, "response_format", "wav, pcm, mp3, opus, aac"),
        ({"stream_format": "ndjson"}, 400, "stream_format", "audio, sse"),
        ({"stream_format": "sse", "stream": False}, 400, "stream", "stream_format"),
        ({"instructions": "whisper"}, 400, "instructions", "no instructions"),
        ({"speed": 4.5}, 400, "speed", "<= 4"),
        ({"speed": 0.2}, 400, "speed", ">= 0.25"),
        ({"timeout_s": 0}, 400, "timeout_s", "> 0"),
        ({"temperature": -1}, 400, "temperature", ">= 0"),
        ({"max_tokens": 0}, 400, "max_tokens", ">= 1"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias", "99999"),
        ({"seed": -1}, 400, "seed", ">= 0"),
        ({"voice": "nobody", "stream": True}, 400, "voice", "tara"),
        ({"model": "gpt-4o-mini-tts", "stream": True}, 404, "model", "orpheus"),
    ],
)
def test_mistakes_are_told_before_anything_is_said(
    client: httpx.Client, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    response = client.post("/v1/audio/speech", json={"input": "Hello.", "model": "orpheus", "voice": "tara"} | fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (status, param), error
    assert message in error["message"]
    assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_speech_too_short_for_a_sound_is_an_error_not_an_empty_file(client: httpx.Client, is_streamed: bool) -> None:
    response = client.post("/v1/audio/speech", json={"input": "Hello.", "max_tokens": 6, "stream": is_streamed})
    assert response.status_code == 400, response.content
    error = error_of(response)
    assert (error["param"], error["code"]) == ("max_tokens", "no_audio") and "max_tokens is 6" in error["message"]


def test_a_missing_input_and_a_wrong_body_are_mistakes(client: httpx.Client) -> None:
    assert error_of(client.post("/v1/audio/speech", json={}))["param"] == "input"
    assert client.post("/v1/audio/speech", json=["x"]).status_code == 400
    for content, kind, status in ((b"{", "application/json", 400), (b"{}", "text/plain", 415)):
        response = client.post("/v1/audio/speech", content=content, headers={"content-type": kind})
        assert response.status_code == status
    assert client.get("/v1/audio/speech").status_code == 405
    assert client.post("/v1/chat/completions", json={}).status_code == 404


# ---- /v1/generate -------------------------------------------------------------------------------------------


def native(**fields: Any) -> dict[str, Any]:
    base = {"inputs": [{"type": "text", "text": "Hello there."}], "seed": 5, "params": {"max_tokens": 45}}
    return base | fields


def test_generate_answers_with_json(client: httpx.Client) -> None:
    pcm = speak(client, response_format="pcm").content
    response = client.post("/v1/generate", json=native(outputs=["audio", "tensors"]))
    result = response.json()
    assert result["task"] == "speech" and result["model"] == "orpheus" and result["seed"] == 5
    assert result["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == 45
    assert result["usage"]["prompt_tokens"] == len(result["prompt_token_ids"]) > 10
    assert result["counters"]["lm.decode"] == 45
    assert set(result["timings"]) >= {"queued_s", "first_output_s", "total_s"}
    outputs = {output["name"]: output for output in result["outputs"] if output["type"] == "tensor"}
    (spoken,) = [output for output in result["outputs"] if output["type"] == "audio"]
    assert wav_pcm(base64.b64decode(spoken["data"])) == pcm and spoken["sample_rate"] == 24000
    samples = np.frombuffer(base64.b64decode(outputs["audio"]["data"]), dtype="<f4")
    assert pcm_of(samples) == pcm
    assert outputs["codes"]["shape"] == [42] and outputs["codes"]["dtype"] == "int64"


def test_generate_answers_with_safetensors(client: httpx.Client, tmp_path: Path) -> None:
    pcm = speak(client, response_format="pcm").content
    response = client.post("/v1/generate", json=native(outputs=["audio", "tensor:codes"]), headers=BINARY)
    assert response.headers["content-type"] == "application/octet-stream"
    tensors = safetensors.torch.load(response.content)
    assert set(tensors) == {"audio", "codes"}
    assert pcm_of(tensors["audio"].numpy()) == pcm
    (tmp_path / "x.safetensors").write_bytes(response.content)
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        result = json.loads(file.metadata()["result"])
    assert result["seed"] == 5 and result["finish_reason"] == "length"
    by_type = {output["type"]: output for output in result["outputs"]}
    assert by_type["audio"]["tensor"] == "audio" and by_type["tensor"]["name"] == "codes"


def test_generate_streams_events(client: httpx.Client) -> None:
    pcm = speak(client, response_format="pcm").content
    with client.stream("POST", "/v1/generate", json=native(outputs=["audio", "tensor:codes"], stream=True)) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        events = [json.loads(line) for line in response.iter_lines()]
    audio = [event for event in events if event["event"] == "audio"]
    assert len(audio) >= 3 and {event["sample_rate"] for event in audio} == {24000}
    assert b"".join(base64.b64decode(event["data"]) for event in audio) == pcm
    codes = [base64.b64decode(event["data"]) for event in events if event["event"] == "tensor"]
    assert [len(data) for data in codes] == [7 * 8] * 6
    assert [event["event"] for event in events].index("audio") < len(events) - 3  # not all at the end
    done = events[-1]
    assert done["event"] == "done" and done["finish_reason"] == "length" and done["seed"] == 5


def test_generate_vocodes_what_was_spoken(client: httpx.Client, served: Any) -> None:
    quiet = {"max_tokens": 45, "codec_noise": False}
    asked = native(outputs=["audio", "tensor:codes"], params=quiet)
    spoken = safetensors.torch.load(client.post("/v1/generate", json=asked, headers=BINARY).content)
    codes = spoken["codes"].numpy()
    codes = codes - served.audio_base - 4096 * (np.arange(len(codes)) % 7)
    tensor = {"dtype": "int64", "shape": [len(codes)], "data": base64.b64encode(codes.tobytes()).decode()}
    part = {"type": "tensor", "name": "codes", "tensor": tensor}
    body = {"task": "vocode", "inputs": [part], "params": {"codec_noise": False}}
    heard = safetensors.torch.load(client.post("/v1/generate", json=body, headers=BINARY).content)
    assert (heard["audio"] - spoken["audio"]).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"task": "sing"}, 400, "task", "speech, vocode"),
        ({"model": "nobody"}, 404, "model", "orpheus"),
        ({"params": {"voice": "nobody"}}, 400, "voice", "tara"),
        ({"params": {"volume": 1}}, 400, "volume", "known: "),
        ({"outputs": ["smell"]}, 400, "outputs", "audio"),
        ({"outputs": ["tensor:logits"]}, 400, "outputs", "codes"),
        ({"inputs": [{"type": "text", "text": "  "}]}, 400, "input", "blank"),
        ({"inputs": [{"type": "token_ids", "ids": [5, 10**6]}]}, 400, "inputs", "1000000"),
        ({"colour": 1}, 400, "colour", "unknown"),
        ({"task": "vocode"}, 400, "inputs", "vocode"),
    ],
)
def test_mistakes_in_native_requests_are_named(
    client: httpx.Client, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    response = client.post("/v1/generate", json=native(**fields))
    error = error_of(response)
    assert response.status_code == status, error
    assert param in error["param"], error
    assert message in error["message"], error


def test_a_prompt_beyond_the_limit_is_told_with_both_numbers(client: httpx.Client) -> None:
    part = {"type": "token_ids", "ids": [65] * 1024}
    response = client.post("/v1/generate", json=native(inputs=[part]))
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["message"].count("1024") == 2


# ---- clients that go away -------------------------------------------------------------------------------------


LONG = {"ignore_eos": True}


@pytest.mark.parametrize("route", ["/v1/audio/speech", "/v1/generate"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_goes_away_ends_its_request(
    client: httpx.Client, served: Any, route: str, is_streamed: bool
) -> None:
    body: dict[str, Any] = {"input": "On and on.", **LONG} if "speech" in route else native(params=LONG)
    body["stream"] = is_streamed
    if is_streamed:
        with client.stream("POST", route, json=body) as response:
            next(response.iter_raw())
            assert served.engine.state.stats.running == 1
            assert served.engine.state.stats.pools["lm"][0] > 0
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(route, json=body, timeout=httpx.Timeout(5, read=0.5))
    gone = time.monotonic()
    while not served.is_idle:
        assert time.monotonic() < gone + 1.0, served.engine.state.stats
        time.sleep(0.01)


def test_requests_that_stay_go_on_when_others_leave(serving: Any, tiny_folder: Path) -> None:
    """Bytes are equal where they do not depend on what else is decoded."""
    body = {"input": "On and on.", "stream": True, **LONG}
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(tiny_folder, max_model_len=1024, batch_invariant=True))
        client = stack.enter_context(httpx.Client(base_url=stack.enter_context(served.http()), timeout=60))
        alone = speak(client, response_format="pcm").content
        with client.stream("POST", "/v1/audio/speech", json=body) as first:
            pieces = first.iter_raw()
            next(pieces)
            with client.stream("POST", "/v1/audio/speech", json=body) as second:
                next(second.iter_raw())
            assert served.engine.state.stats.running >= 1
            assert speak(client, response_format="pcm").content == alone
            assert sum(map(len, pieces)) > len(alone)  # to its end, or httpx raises


# ---- offline --------------------------------------------------------------------------------------------------


def test_mstar_run_gives_what_the_server_gives(client: httpx.Client, served: Any, tmp_path: Path) -> None:
    params = {"max_tokens": 45, "speed": 1.5}
    request = native(outputs=["audio", "tensors"], task="speech", params=params)
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "mstar", "run", "--plugin", "orpheus", "--model", served.config.model]
    command += ["--request", str(tmp_path / "request.json"), "--out", str(tmp_path / "out"), "--max-model-len", "1024"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    online = client.post("/v1/generate", json=request)
    tensors = load_file(tmp_path / "out" / "tensors.safetensors")
    result, right = json.loads((tmp_path / "out" / "result.json").read_text()), online.json()
    outputs = {output["name"]: output for output in right["outputs"] if output["type"] == "tensor"}
    assert set(tensors) == set(outputs) == {"audio", "codes"}
    assert tensors["codes"].tobytes() == base64.b64decode(outputs["codes"]["data"])
    audio = np.frombuffer(base64.b64decode(outputs["audio"]["data"]), dtype="<f4")
    assert len(audio) == 6 * FRAME / 1.5
    assert np.abs(tensors["audio"] - audio).max() <= 2 / 32767
    assert wav_pcm((tmp_path / "out" / "audio.wav").read_bytes()) == pcm_of(tensors["audio"])
    same = ("task", "seed", "finish_reason", "usage", "counters", "prompt_token_ids")
    assert {name: result[name] for name in same} == {name: right[name] for name in same}
