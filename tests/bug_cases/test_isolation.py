"""A request leaves nothing behind, and nobody else's answer changes: after it, or after it was hung up on."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from asking import image

from mstar.media.audio import encode_wav

GONE_S = 1.5
"""Within a second, as promised, and half of one for a busy machine."""


# ---- case 47: a client that leaves stops the work, wherever it is ---------------------------------------------------


MODES: dict[str, dict[str, Any]] = {
    "embedded": {}, "two processes": {"workers": 2}, "codec apart": {"placement": "disaggregated"},
}  # fmt: skip


@pytest.fixture(scope="module")
def _narrow(start: Callable[..., Any]) -> Iterator[Callable[[str], Any]]:
    fixed = {"plugin": "orpheus", "max_model_len": 1024, "max_num_seqs": 1}
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda mode: stack.enter_context(start(**fixed, **MODES[mode])))


@pytest.fixture
def narrow(_narrow: Callable[[str], Any], request: pytest.FixtureRequest) -> Any:
    """Each worker has room for one request at a time."""
    return _narrow(request.param)


@pytest.mark.parametrize(
    ("narrow", "is_streamed"),
    [("embedded", False), *((mode, True) for mode in MODES)],
    ids=["whole", *(f"streamed, {mode}" for mode in MODES)],
    indirect=["narrow"],
)
@pytest.mark.parametrize("phase", ["sending", "encoding", "queued", "decoding", "heard"])
def test_a_client_that_is_gone_holds_nothing_a_second_later(
    narrow: Any, hang_up: Any, monkeypatch: pytest.MonkeyPatch, phase: str, is_streamed: bool
) -> None:
    state, processor = narrow.served.engine.state, narrow.served.engine._processor
    endless = {"input": "On and on.", "ignore_eos": True, "stream": is_streamed}
    most = state.most_running
    blocking = [narrow.begin("/v1/audio/speech", endless) for _ in range(most if phase == "queued" else 0)]
    if blocking:
        wait_until(lambda: state.num_running == most)
    if phase == "encoding":
        encode = processor.encode
        monkeypatch.setattr(processor, "encode", lambda request: (time.sleep(0.5), encode(request))[1])
    connection = narrow.begin("/v1/audio/speech", endless)
    if phase == "sending":
        hang_up(connection)
        connection = narrow.begin("/v1/audio/speech", endless)
        hang_up(connection)
        time.sleep(0.3)  # there may be nothing to see: until the server has noticed both
    elif phase in ("encoding", "queued"):
        wait_until(lambda: state.num_waiting == 1)
    else:
        wait_until(lambda: state.num_running == 1 and state.stats.pools["lm"][0] > 0)
        if phase == "heard" and is_streamed:
            connection.recv(4096)
    for each in (each for each in (*blocking, connection) if each.fileno() >= 0):
        hang_up(each)
    wait_until(lambda: narrow.served.is_idle, timeout_s=GONE_S)
    narrow.served.assert_clean()


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)


# ---- case 65: nothing sticks after a special request ----------------------------------------------------------------


def text(value: str, *before: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/generate", {"inputs": [*before, {"type": "text", "text": value}], "seed": 3} | fields


def tensor(name: str, value: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(value.numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"type": "tensor", "name": name, "tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}


def chat(*parts: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    content = [*parts, {"type": "text", "text": "hello"}]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields}


def speech(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/audio/speech", {"input": "Hello.", "seed": 3, "max_tokens": 14} | fields


IMAGE = torch.arange(12, dtype=torch.float32).view(3, 4) / 10
SAMPLED = {"temperature": 1.1, "top_k": 40, "repetition_penalty": 1.3, "presence_penalty": 0.4, "max_tokens": 6}
GREEDY = {"temperature": 0, "max_tokens": 6}
PICTURE = image(np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3))
SOUND = {"type": "input_audio", "input_audio": {"format": "wav", "data": base64.b64encode(
    encode_wav(np.sin(np.arange(8000, dtype=np.float32) / 9), sample_rate=16000)).decode()},
}  # fmt: skip
SPOKEN = {"modalities": ["text", "audio"], "seed": 3, "max_tokens": 3, "talker_max_tokens": 4}
DRAWING = {"size": "32x32", "num_timesteps": 4, "seed": 3}
KINDS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "echo": {
        "greedy": text("hello", params={"max_tokens": 6}),
        "sampled": text("hello", params=SAMPLED),
        "stop": text("hello", params={"max_tokens": 6, "stop": ["e", "\n"], "logit_bias": {"101": 3.0}}),
        "frames": text("hello", task="nested", params={"depth_temperature": 1.0}, outputs=["audio", "tensors"]),
        "spans": ("/v1/generate", {
            "task": "spans", "seed": 3, "inputs": [{"type": "text", "text": "look"}, tensor("image", IMAGE)],
        }),
        "states": text("draft", task="states"),
        "fanout": text("one|two", task="fanout", params={"reply_tokens": [3]}),
        "session": text("turn", task="session", session="one"),
        "fails": text("x", task="trouble", params={"kind": "method"}),
        "fails in decode": text("x", task="trouble", params={"kind": "decode"}),
        "out of memory": text("x", task="trouble", params={"kind": "memory"}),
        "refused": text("x", params={"max_tokens": 0}),
        "aborted": text("x", params={"max_tokens": 400, "ignore_eos": True}, stream=True),
    },
    "orpheus": {
        "sampled": speech(),
        "greedy": speech(voice="leo", temperature=0, codec_noise=False, presence_penalty=1.0),
        "fast": speech(speed=2.0, response_format="pcm"),
        "mp3": speech(response_format="mp3"),
        "events": speech(stream_format="sse"),
        "two segments": speech(input="A line of some length. " * 15),
        "codes": ("/v1/generate", {"task": "vocode", "seed": 3, "inputs": [tensor("codes", torch.arange(14))]}),
        "too short": speech(max_tokens=3),
        "refused": speech(voice="nobody"),
        "late": speech(timeout_s=0.001),
        "aborted": speech(max_tokens=None, ignore_eos=True, stream=True),
    },
    "bagel": {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is a fox?"}], **GREEDY}),
        "looks": text("What is this?", PICTURE, params=SAMPLED | {"n": 2, "logprobs": 3}),
        "thinks": text("What?", params=GREEDY | {"think": True}),
        "draws": ("/v1/images/generations", {"prompt": "a fox", **DRAWING}),
        "streams": ("/v1/images/generations", {"prompt": "a fox", "stream": True, "partial_images": 2, **DRAWING}),
        "edits": ("/v1/images/edits", {"prompt": "both", "image": [PICTURE["data"]] * 2, "n": 2, **DRAWING}),
        "thinks and draws": ("/v1/images/edits", {
            "prompt": "blue", "image": PICTURE["data"], "think": True, "think_max_tokens": 4, **DRAWING,
        }),
        "refused": ("/v1/images/generations", {"prompt": "a fox", "size": "1x1"}),
        "aborted": ("/v1/images/generations", {"prompt": "a fox", "stream": True, "partial_images": 3, "seed": 1}),
    },
    "qwen3_omni": {
        "writes": text("hello", params=SAMPLED | {"n": 2, "logprobs": 3}),
        "looks and hears": chat({"type": "image_url", "image_url": {"url": PICTURE["data"]}}, SOUND, **GREEDY),
        "speaks": chat(SOUND, **SPOKEN, audio={"voice": "chelsie", "format": "flac"}),
        "streams": chat(SOUND, **SPOKEN, audio={"voice": "aiden", "format": "pcm16"}, stream=True),
        "codes": ("/v1/generate", {
            "task": "vocode", "seed": 3, "inputs": [tensor("codes", torch.arange(16).repeat(3, 1).T)],
        }),
        "refused": chat(**SPOKEN, audio={"voice": "nobody", "format": "wav"}),
        "aborted": chat(**SPOKEN | {"talker_max_tokens": 400}, audio={"format": "pcm16"}, stream=True),
    },
}  # fmt: skip


CHANGING = re.compile(rb'("(?:created|created_at|expires_at)":)\d+|(audio-|chatcmpl-)[0-9a-f]{32}')
"""Times, and what names of answers and of their sounds hold by chance."""


def answer(site: Any, hang_up: Any, name: str, request: tuple[str, dict[str, Any]]) -> Any:
    """Everything a client gets, but for what differs from one time to the next."""
    path, body = request
    if name == "aborted":
        connection = site.begin(path, body)
        connection.recv(1)
        hang_up(connection)
        return None
    response = site.post(path, body)
    if "session" in body:
        assert site.client.delete(f"/v1/sessions/{body['session']}").status_code == 200
    kind, content = response.headers["content-type"], CHANGING.sub(rb"\g<1>\g<2>0", response.content)
    if kind != "application/json":
        return response.status_code, kind, content
    found = json.loads(content)
    if name == "late":
        return response.status_code, found["error"]["code"]  # the message tells where the request was
    # How many steps a model makes past a stop string depends on when the server finds it.
    changing = ("id", "timings", "created", *(("counters",) if name == "stop" else ()))
    return response.status_code, kind, json.dumps({k: v for k, v in found.items() if k not in changing})


@pytest.mark.parametrize("model", KINDS)
def test_a_request_answers_after_any_other_as_on_a_fresh_server(
    start: Callable[..., Any], hang_up: Any, model: str
) -> None:
    kinds, fresh = KINDS[model], {}
    # Batch-invariant, what follows a prefix has the same bits whether that was read before or not.
    settings = {"plugin": model, "max_model_len": 512, "batch_invariant": model in ("bagel", "qwen3_omni")}
    for name, kind in kinds.items():
        with start(**settings) as site:
            fresh[name] = answer(site, hang_up, name, kind)
    statuses = {name: found[0] for name, found in fresh.items() if found is not None}
    assert {status for status in statuses.values() if status != 200} <= {400, 500, 503, 504}, statuses
    assert sum(status == 200 for status in statuses.values()) >= len(kinds) // 2, statuses
    different = []
    with start(**settings) as site:
        before = ""
        for name in every_ordered_pair(list(kinds)):
            if answer(site, hang_up, name, kinds[name]) != fresh[name]:
                different.append(f"{name} after {before}")
            before = name
        site.served.assert_clean()
    assert different == []


def every_ordered_pair(names: list[str]) -> Iterator[str]:
    """A walk in which each name follows each name, itself too, once: a circle through all edges."""
    unused = {name: list(names) for name in names}
    path, circle = [names[0]], []
    while path:
        if unused[path[-1]]:
            path.append(unused[path[-1]].pop())
        else:
            circle.append(path.pop())
    assert len(circle) == len(names) ** 2 + 1
    yield from circle
