"""What a request asks for is done, or refused by name: nothing ignored, nothing replaced, no 500 for a mistake."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

BLANK = {"empty": "", "spaces": "   ", "newline": "\n", "null": None, "number": 7, "list": ["hello"], "missing": ...}
SPEECH = {"input": "Hi.", "voice": "tara", "seed": 5, "max_tokens": 21}
ErrorOf = Callable[..., dict[str, Any]]


def bodies(value: Any) -> dict[str, dict[str, Any]]:
    """Path -> a request whose text is `value`; ...: without one."""
    if value is ...:
        return {"/v1/audio/speech": {}, "/v1/generate": {"inputs": [{"type": "text"}]}}
    return {"/v1/audio/speech": {"input": value}, "/v1/generate": {"inputs": [{"type": "text", "text": value}]}}


# ---- case 4: empty or blank input is refused ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/generate"])
def test_blank_input_is_refused_at_once_and_runs_nothing(orpheus: Any, error_of: ErrorOf, path: str) -> None:
    steps, seconds = orpheus.served.engine.state.stats, []
    for name, value in BLANK.items():
        started = time.monotonic()
        error = error_of(orpheus.post(path, bodies(value)[path]), 400)
        seconds.append(time.monotonic() - started)
        assert error["param"] and error["param"].startswith("input"), f"{name}: {error}"
    assert orpheus.served.engine.state.stats == steps
    assert statistics.median(seconds) < 0.1


# ---- case 6: a bad voice is a mistake, not a crash and not another voice ----------------------------------------


@pytest.mark.parametrize("voice", ["", "nobody", "x" * 10_000, "../../x", "TARA", 7, ["tara"], {}, True])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_bad_voice_is_refused_and_the_next_request_served(
    orpheus: Any, error_of: ErrorOf, voice: Any, is_streamed: bool
) -> None:
    response = orpheus.post("/v1/audio/speech", SPEECH | {"voice": voice, "stream": is_streamed})
    error = error_of(response, 400)
    assert error["param"] == "voice"
    if isinstance(voice, str):
        assert "tara, zoe, zac" in error["message"]
    assert orpheus.client.get("/health").status_code == 200
    assert orpheus.post("/v1/audio/speech", SPEECH).status_code == 200


# ---- case 7: a client's mistake keeps its status on its way from the worker --------------------------------------


def test_mistakes_found_deep_inside_are_the_clients(echo: Any, orpheus: Any, error_of: ErrorOf) -> None:
    def native(site: Any, **fields: Any) -> Any:
        return site.post("/v1/generate", {"inputs": [{"type": "text", "text": "hi"}]} | fields)

    # Only the worker knows the vocabulary; the node itself says no; the pool's size is known at admission.
    error = error_of(native(echo, task="generate", params={"logit_bias": {"99999": 1.0}}), 400)
    assert "99999" in error["message"]
    error = error_of(native(echo, task="trouble", params={"kind": "request"}), 422)
    assert error["code"] == "told_to_fail"
    long = [{"type": "text", "text": "word " * 3000}]
    error = error_of(native(echo, task="generate", inputs=long), 400)
    assert "512" in error["message"] and error["code"] == "context_length_exceeded"
    error = error_of(native(orpheus, inputs=[{"type": "token_ids", "ids": [1] * 2000}]), 400)
    assert "1024" in error["message"] and error["code"] == "context_length_exceeded"


# ---- case 10: no parameter is quietly dropped ---------------------------------------------------------------------

PROBES: dict[str, Any] = {
    "input": "Something else.",
    "voice": "leo",
    "response_format": "pcm",
    "speed": 2.0,
    "stream_format": "sse",
    "stream": True,
    "seed": 6,
    "timeout_s": 0.001,
    "max_tokens": 14,
    "ignore_eos": True,
    "codec_noise": False,
    "temperature": 0,
    "top_k": 1,
    "top_p": 0.001,
    "min_p": 1.0,
    "repetition_penalty": 1.5,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {"400": 100.0},
    "model": "nobody",
}
"""Every field of a speech request -> a value that must make a difference."""


def test_every_field_of_a_speech_request_makes_a_difference(orpheus: Any) -> None:
    schemas = orpheus.client.get("/openapi.json").json()["components"]["schemas"]
    assert set(PROBES) == set(schemas["SpeechRequest"]["properties"])

    # It ends by itself, a little before the limit, and is drawn from all there is.
    flat = SPEECH | {"max_tokens": 110, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}

    def said(**fields: Any) -> tuple[int, str, bytes]:
        response = orpheus.post("/v1/audio/speech", flat | fields)
        return response.status_code, response.headers["content-type"], response.content

    usual = said()
    assert usual[0] == 200 and said() == usual
    assert [name for name, value in PROBES.items() if said(**{name: value}) == usual] == []


def test_extra_fields_work_as_the_openai_package_sends_them_and_nested_they_are_refused(
    orpheus: Any, error_of: ErrorOf
) -> None:
    usual = orpheus.post("/v1/audio/speech", SPEECH).content
    greedy = orpheus.post("/v1/audio/speech", SPEECH | {"temperature": 0}).content
    assert greedy != usual
    client = openai.OpenAI(base_url=f"{orpheus.client.base_url}/v1", api_key="none", max_retries=0)
    fields: dict[str, Any] = {"model": "orpheus", "input": SPEECH["input"], "voice": SPEECH["voice"]}
    extra = {"seed": 5, "max_tokens": 21, "temperature": 0}
    spoken = client.audio.speech.create(**fields, response_format="wav", extra_body=extra)
    assert spoken.content == greedy
    response = orpheus.post("/v1/audio/speech", SPEECH | {"extra_body": {"temperature": 0}})
    assert error_of(response, 400)["param"] == "extra_body"


# ---- case 11: max_tokens is kept, and the client is told ------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_max_tokens_is_kept_and_the_reason_told(echo: Any, orpheus: Any, is_streamed: bool) -> None:
    def result(site: Any, **fields: Any) -> dict[str, Any]:
        body = {"inputs": [{"type": "text", "text": "hello"}], "stream": is_streamed, "seed": 5} | fields
        response = site.post("/v1/generate", body)
        assert response.status_code == 200, response.text
        last = response.text.splitlines()[-1] if is_streamed else response.text
        found: dict[str, Any] = json.loads(last)
        return found

    for site in (echo, orpheus):
        cut = result(site, params={"max_tokens": 5})
        assert cut["usage"]["completion_tokens"] == 5 and cut["finish_reason"] == "length"
    ended = result(echo, params={"max_tokens": 50, "eos_at": 3})
    assert ended["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] <= 4
    ended = result(orpheus, params={})
    assert ended["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] > 5


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 2**63])
def test_a_max_tokens_that_means_nothing_is_refused(orpheus: Any, error_of: ErrorOf, value: Any) -> None:
    for is_streamed in (False, True):
        response = orpheus.post("/v1/audio/speech", SPEECH | {"max_tokens": value, "stream": is_streamed})
        assert error_of(response, 400)["param"] == "max_tokens"


# ---- case 14: routes that the model cannot serve --------------------------------------------------------------------

OPENAI_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/moderations", "/v1/rerank",
    "/v1/images/generations", "/v1/images/edits", "/v1/images/variations", "/v1/audio/transcriptions",
    "/v1/audio/translations", "/v1/audio/speech", "/v1/realtime", "/v1/videos", "/v1/files", "/v1/batches",
    "/v1/fine_tuning/jobs", "/tokenize", "/invocations", "/v1/generate",
)  # fmt: skip


def test_every_route_is_served_or_refused_and_the_next_request_served(site: Any, error_of: ErrorOf) -> None:
    content = {
        "model": None, "input": "Hello.", "prompt": "Hello.", "messages": [{"role": "user", "content": "Hello."}],
        "inputs": [{"type": "text", "text": "Hello."}],
    }  # fmt: skip
    for path in OPENAI_ROUTES:
        for body in (content, {"input": "Hello."}, {"inputs": [{"type": "text", "text": "Hello."}]}):
            response = site.post(path, body)
            if response.status_code != 200:
                error = error_of(response, 400, 404)
                assert response.status_code == 400 or "POST /v1/generate" in error["message"]
    for body in ({"task": "vocode"}, {"task": "generate"}, {"task": "draw"}, {"outputs": ["image"]}):
        response = site.post("/v1/generate", {"inputs": [{"type": "text", "text": "Hello."}]} | body)
        assert response.status_code == 200 or error_of(response, 400)["message"]
    assert site.post("/v1/generate", {"inputs": [{"type": "text", "text": "Hello."}]}).status_code == 200


# ---- case 22: no file of the server is read -------------------------------------------------------------------------


def test_files_of_the_server_are_not_read_nor_their_existence_told(echo: Any, error_of: ErrorOf) -> None:
    told = set()
    for file in (
        "/etc/hostname",
        "/no/such/file",
        "./x.png",
        "file:///etc/hostname",
        "file:///etc/%2e%2e/etc/hostname",
    ):
        tensor = {"type": "tensor", "name": "image", "tensor": {"file": file, "name": "x"}}
        error = error_of(echo.post("/v1/generate", {"task": "spans", "inputs": [tensor]}), 400)
        told.add(error["message"].replace(file, ""))
        error_of(echo.post("/v1/generate", {"inputs": [{"type": "audio", "data": file}]}), 400)
    assert len(told) == 1


# ---- case 71, in part: seeds ----------------------------------------------------------------------------------------


def test_seeds_at_the_ends_of_their_range_are_kept_and_beyond_it_refused(orpheus: Any, error_of: ErrorOf) -> None:
    spoken = {}
    for seed in (0, 1, 2**63 - 1):
        first, again = (orpheus.post("/v1/audio/speech", SPEECH | {"seed": seed}) for _ in range(2))
        assert first.headers["x-seed"] == str(seed) and first.content == again.content
        spoken[first.content] = seed
    assert len(spoken) == 3
    for seed in (-1, 2**63, 2**64, 1.5, "7", True):
        assert error_of(orpheus.post("/v1/audio/speech", SPEECH | {"seed": seed}), 400)["param"] == "seed"
