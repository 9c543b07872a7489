"""Faults that users of peer systems met (tests/bug_cases/README.md has the numbers), on the golden checkpoint."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from asking import Asked, ask_for, image, text
from media_files import (
    animation,
    data_uri,
    image_file,
    listening,
    png_of_one_colour,
    png_with_bad_checksum,
    response,
    tiff_bomb,
)
from PIL import Image

CHAT, DRAW, EDIT, NATIVE = "/v1/chat/completions", "/v1/images/generations", "/v1/images/edits", "/v1/generate"
GREEDY = {"temperature": 0, "repetition_penalty": 1}
SMALL = {"size": "24x16", "seed": 7, "num_timesteps": 6}
QUESTION = {"type": "text", "text": "What is it?"}


def pixels(seed: int, height: int = 40, width: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


def shown(source: str | np.ndarray) -> dict[str, Any]:
    url = source if isinstance(source, str) else image(source)["data"]
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def opened(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.rpartition(",")[2]))))


def good(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text[:500]
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json" and set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and 'File "' not in error["message"]
    return error


def drawn(answer: httpx.Response) -> list[np.ndarray]:
    return [opened(one["b64_json"]) for one in good(answer)["data"]]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text[:500]
    lines = [block.splitlines()[-1].removeprefix("data: ") for block in answer.text.split("\n\n")[:-1]]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture
def ask(http: httpx.Client, model: Asked) -> Callable[..., httpx.Response]:
    """`ask(path, **fields)`: posts JSON to the served checkpoint."""
    return lambda path, **fields: http.post(path, json=fields)


Ask = Callable[..., httpx.Response]

# ---- 1, 2: one choice has all, in the form asked for --------------------------------------------------------


@pytest.mark.parametrize("modalities", [["text", "image"], ["image"]])
def test_a_picture_and_what_was_thought_are_one_choice(ask: Ask, modalities: list[str]) -> None:
    params = {"think": True, "think_max_tokens": 5, "height": 16, "width": 24, "num_timesteps": 4, **GREEDY}
    body = {"messages": [user({"type": "text", "text": "a fox"})], "modalities": modalities, "seed": 7, **params}
    whole = good(ask(CHAT, **body))
    (choice,) = whole["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] in ("stop", "length")
    assert len(choice["message"]["images"]) == 1
    assert choice["message"]["content"] == ("" if "text" in modalities else None)
    chunks = events(ask(CHAT, **body, stream=True))
    assert {delta["index"] for chunk in chunks for delta in chunk["choices"]} == {0}
    deltas = [delta["delta"] for chunk in chunks for delta in chunk["choices"]]
    assert [one for delta in deltas for one in delta.get("images", [])] == choice["message"]["images"]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought == choice["message"]["reasoning_content"] != ""
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_sound_is_refused_by_name(ask: Ask) -> None:
    for fields in ({"modalities": ["text", "audio"]}, {"modalities": ["audio"], "audio": {"format": "mp3"}}):
        error = refused(ask(CHAT, messages=[user(QUESTION)], **fields))
        assert error["param"] == "modalities" and "text" in error["message"]
    assert refused(ask(CHAT, messages=[user(QUESTION)], audio={"format": "mp3"}))["param"] == "audio"


# ---- 7: a client's mistake is no 500 ------------------------------------------------------------------------


def test_too_much_is_told_with_the_limit(ask: Ask, http: httpx.Client) -> None:
    long = "fox " * 20000
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [user({"type": "text", "text": long})]}),
        (DRAW, {"prompt": long}),
        (EDIT, {"prompt": "join", "image": [image(pixels(1))["data"]] * 900}),
    ]
    for path, body in asked:
        error = refused(ask(path, **body))
        assert "32768" in error["message"] and error["code"] == "context_length_exceeded"
    many = refused(ask(EDIT, prompt="join", image=["data:,"] * 1025))
    assert many["param"] == "image" and "1024" in many["message"]
    files = [("image[]", ("a.png", b"", "image/png"))] * 1025
    assert "1024" in refused(http.post(EDIT, data={"prompt": "join"}, files=files))["message"]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_blank_prompt_is_called_prompt(ask: Ask, count: int) -> None:
    images = {"image": [image(pixels(1))["data"]] * count} if count else {}
    error = refused(ask(EDIT if count else DRAW, prompt=" \n", **images))
    assert error["param"] == "prompt" and error["message"].startswith("prompt is an empty or blank text")


def test_mistakes_found_deep_inside_are_the_clients(ask: Ask) -> None:
    part = {"type": "tensor", "name": "latents", "tensor": {"dtype": "float32", "shape": [1], "data": "AAAAAA=="}}
    inputs = [{"type": "text", "text": "a"}]
    assert refused(ask(NATIVE, task="image", inputs=[*inputs, part]))["param"] == "latents"
    assert refused(ask(NATIVE, task="image", inputs=inputs, params={"cfg_interval": [1, 0]}))["param"]
    assert refused(ask(CHAT, messages=[user(QUESTION)], logit_bias={"99999": 1}))["param"] == "logit_bias"


# ---- 9: n pictures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [DRAW, EDIT])
def test_n_pictures_are_different_ones_and_begin_with_the_one(ask: Ask, path: str) -> None:
    body = {"prompt": "a fox", **SMALL} | ({"image": image(pixels(1))["data"]} if path == EDIT else {})
    many, alone = drawn(ask(path, **body, n=3)), drawn(ask(path, **body, n=1))
    assert len(many) == 3 and len({one.tobytes() for one in many}) == 3
    assert np.abs(many[0].astype(int) - alone[0]).max() <= 1
    for n in (0, 11, "x", -1, 1.5):
        assert refused(ask(path, **body | {"n": n}))["param"] == "n"


# ---- 10: every parameter does what it says, or is refused ---------------------------------------------------

THINKING = {"think": True, "think_max_tokens": 6}
PARAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({}, {"num_timesteps": 9}),
    "shift": ({}, {"timestep_shift": 1.0}),
    "guidance by text": ({}, {"cfg_text_scale": 1.0}),
    "more guidance by text": ({}, {"cfg_text_scale": 6.0}),
    "guidance by images": ({}, {"cfg_img_scale": 3.0}),
    "interval": ({}, {"cfg_interval": [0.0, 0.5]}),
    "renorm": ({}, {"cfg_renorm_type": "channel"}),
    "least renorm": ({}, {"cfg_renorm_min": 1.0}),
    "seed": ({}, {"seed": 8}),
    "size": ({}, {"size": "16x24"}),
    "thoughts": ({}, THINKING),
    "fewer thoughts": (THINKING, {"think_max_tokens": 3}),
    "temperature of thoughts": (THINKING, {"temperature": 3.0, "top_p": 1, "top_k": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", PARAMS)
@pytest.mark.parametrize("path", [DRAW, EDIT])
def test_every_parameter_changes_the_picture_wherever_it_is_given(
    ask: Ask, client: openai.OpenAI, path: str, case: str
) -> None:
    base, change = PARAMS[case]
    usual = SMALL | GREEDY | base
    body: dict[str, Any] = {"prompt": "a fox"} | ({"image": image(pixels(1))["data"]} if path == EDIT else {})
    (before,), (after,) = drawn(ask(path, **body, **usual)), drawn(ask(path, **body, **usual | change))
    assert before.shape != after.shape or not np.array_equal(before, after)
    error = refused(ask(path, **body, **usual, extra_body=change))
    assert error["param"] == "extra_body" and "num_timesteps" in error["message"]
    extra: Any = usual | change
    size = extra.pop("size")
    if path == DRAW:
        found = client.images.generate(prompt="a fox", size=size, extra_body=extra)
    else:
        file = ("a.png", image_file(pixels(1)), "image/png")
        found = client.images.edit(image=file, prompt="a fox", size=size, extra_body=extra)
    assert np.array_equal(opened((found.data or [])[0].b64_json or ""), after)
    if path == DRAW:
        width, height = map(int, size.split("x"))
        sides = {"width": width, "height": height, **extra, "modalities": ["image"]}
        (choice,) = good(ask(CHAT, messages=[user({"type": "text", "text": "a fox"})], **sides))["choices"]
        assert np.array_equal(opened(choice["message"]["images"][0]["image_url"]["url"]), after)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({}, {"max_tokens": 4}), ({}, {"seed": 8}), ({}, {"temperature": 0.1}), ({}, {"top_p": 0.05}),
        ({}, {"top_k": 1}), ({}, {"min_p": 1.0}), ({}, {"repetition_penalty": 50.0}),
        ({}, {"presence_penalty": 2.0, "temperature": 0.5}), ({"temperature": 0}, {"frequency_penalty": 2.0}),
        ({}, {"logit_bias": {"60": 100.0}}), ({}, {"think": True}), ({}, {"n": 2}), ({}, {"logprobs": True}),
        ({"logit_bias": {"288": 1000}}, {"ignore_eos": True}),
    ],
    ids=lambda value: "-".join(value) or "usual",
)  # fmt: skip
def test_every_parameter_changes_the_text(ask: Ask, base: dict[str, Any], change: dict[str, Any]) -> None:
    usual = {"messages": [user(QUESTION)], "seed": 7, "temperature": 2.0, "top_p": 1, "top_k": 0, "max_tokens": 24}
    before, after = (good(ask(CHAT, **usual | base | more))["choices"] for more in ({}, change))
    assert before != after
    assert refused(ask(CHAT, **usual, extra_body=change))["param"] == "extra_body"


@pytest.mark.parametrize("path", [CHAT, DRAW, EDIT])
@pytest.mark.parametrize("name", ["num_inference_steps", "guidance_scale", "steps", "negative_prompt"])
def test_what_is_unknown_is_refused_with_what_is_known(ask: Ask, path: str, name: str) -> None:
    body = {"messages": [user(QUESTION)]} if path == CHAT else {"prompt": "a", "image": image(pixels(1))["data"]}
    if path == DRAW:
        del body["image"]
    error = refused(ask(path, **body, **{name: 3}))
    assert error["param"] == name and ("max_tokens" if path == CHAT else "num_timesteps") in error["message"]


# ---- 11: limits of texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_is_kept_and_the_reason_told(ask: Ask, name: str) -> None:
    body = {"messages": [user(shown(pixels(1)), QUESTION)], **GREEDY}
    for fields, reason, most in ({name: 5}, "length", 5), ({name: 5, "logit_bias": {"288": 1000}}, "stop", 0):
        whole = good(ask(CHAT, **body, **fields))
        assert whole["choices"][0]["finish_reason"] == reason and whole["usage"]["completion_tokens"] == most
        *_, end, usage = events(ask(CHAT, **body, **fields, stream=True, stream_options={"include_usage": True}))
        assert end["choices"][0]["finish_reason"] == reason and usage["usage"] == whole["usage"]
    for value in (0, -1, "x", 1.5):
        assert refused(ask(CHAT, **body, **{name: value}))["param"] == name


# ---- 13: parts are what they are ----------------------------------------------------------------------------


def test_an_image_costs_its_tokens_and_is_looked_at_in_any_turn(ask: Ask) -> None:
    def found(*messages: dict[str, Any]) -> tuple[int, str]:
        answer = good(ask(CHAT, messages=list(messages), max_tokens=8, **GREEDY))
        return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]

    alone, _ = found(user(QUESTION))
    patches = (42 // 14) * (56 // 14)
    first, second = (found(user(shown(pixels(seed)), QUESTION)) for seed in (1, 2))
    assert first[0] == second[0] == alone + patches + 2 and first[1] != second[1]
    said = {"role": "assistant", "content": "A fox."}
    early, other = (found(user(shown(pixels(seed))), said, user(QUESTION)) for seed in (1, 2))
    assert early[0] == other[0] and early[1] != other[1]
    system = {"role": "system", "content": "Be brief."}
    assert found(system, user(shown(pixels(1)), QUESTION))[0] > first[0]


@pytest.mark.parametrize("kind", ["input_audio", "audio_url", "video_url", "input_image", "file"])
def test_parts_that_are_not_taken_are_refused(ask: Ask, kind: str) -> None:
    value = {"data": "AAAA", "format": "wav"} if kind == "input_audio" else "data:,"
    error = refused(ask(CHAT, messages=[user(QUESTION, {"type": kind, kind: value})]))
    assert str(error["param"]).startswith("messages.0.content.1")


# ---- 15: sizes and steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [DRAW, EDIT])
@pytest.mark.parametrize(
    "size", ["20000x20000", "0x0", "-1x512", "512X512", "512x", "513x511", "1x1", "1024x1024", "24", "24x16x3", ""]
)
def test_odd_sizes_are_refused_at_once(ask: Ask, path: str, size: str) -> None:
    body = {"prompt": "a fox", "size": size} | ({"image": image(pixels(1))["data"]} if path == EDIT else {})
    began = time.monotonic()
    assert refused(ask(path, **body))["param"] == "size" and time.monotonic() - began < 1


def test_odd_step_counts_are_refused_and_one_step_is_a_step(ask: Ask) -> None:
    for steps in (0, 1, -5, 10**6, 2.5, "x"):
        error = refused(ask(DRAW, prompt="a fox", **SMALL | {"num_timesteps": steps}))
        assert error["param"] == "num_timesteps"
    (picture,) = drawn(ask(DRAW, prompt="a fox", **SMALL | {"num_timesteps": 2}))
    assert picture.shape == (16, 24, 3)


# ---- 16, 18, 20 to 22: every field that takes a picture -----------------------------------------------------


def native(task: str) -> Callable[[str], dict[str, Any]]:
    params = {"height": 16, "width": 24, "num_timesteps": 3, "partial_images": 1, "think_max_tokens": 2}
    body: dict[str, Any] = {"task": task, "seed": 1, "stream": True}
    body["params"] = {"think": True} | (params if task == "image" else {"max_tokens": 2})
    words = {"type": "text", "text": "a"}
    return lambda source: {"url": NATIVE, "json": body | {"inputs": [{"type": "image", "data": source}, words]}}


def chat(turn: Callable[[str], dict[str, Any]], **fields: Any) -> Callable[[str], dict[str, Any]]:
    more = {"seed": 1, "stream": True, "think": True} | (fields or {"max_tokens": 2})
    return lambda source: {"url": CHAT, "json": {"messages": [turn(source), user(QUESTION)]} | more}


SHORT = {"size": "24x16", "num_timesteps": 3, "think": True, "think_max_tokens": 2, "stream": True, "seed": 1}


def edit(source: str) -> dict[str, Any]:
    return {"url": EDIT, "json": {"image": source, "prompt": "a", "partial_images": 1, **SHORT}}


def edit_of_two(source: str) -> dict[str, Any]:
    return {"url": EDIT, "json": {"image": [image(pixels(1))["data"], source], "prompt": "a", **SHORT}}


def form(source: str) -> dict[str, Any]:
    fields = {"image": source, "prompt": "a"} | {name: str(value).lower() for name, value in SHORT.items()}
    return {"url": EDIT, "files": {name: (None, value) for name, value in fields.items()}}


def object_of(source: str) -> dict[str, Any]:
    return user({"type": "image_url", "image_url": {"url": source, "detail": "high"}}, QUESTION)


FIELDS: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "native text": (native("text"), "inputs.0.data"),
    "native image": (native("image"), "inputs.0.data"),
    "chat, a string": (
        chat(lambda source: user({"type": "image_url", "image_url": source})), "messages.0.content.0.image_url",
    ),
    "chat": (chat(object_of), "messages.0.content.0.image_url.url"),
    "chat of an earlier answer": (
        chat(lambda source: {"role": "assistant", "images": [shown(source)]}), "messages.0.images.0.image_url.url",
    ),
    "chat that draws": (
        chat(object_of, modalities=["image"], num_timesteps=3, think_max_tokens=2, height=16, width=24),
        "messages.0.content.0.image_url.url",
    ),
    "edit": (edit, "image"),
    "edit of two": (edit_of_two, "image.1"),
    "edit by a form": (form, "image"),
}  # fmt: skip

every_field = pytest.mark.parametrize("field", FIELDS)


def refusal(http: httpx.Client, field: str, source: str) -> dict[str, Any]:
    request, param = FIELDS[field]
    error = refused(http.post(**request(source)))
    assert error["param"] == param, error
    return error


@pytest.fixture(scope="module")
def bombs() -> dict[str, str]:
    return {
        "png": data_uri(png_of_one_colour(12_000, 12_000)),
        "gif": data_uri(animation("GIF", 1000)),
        "webp": data_uri(animation("WEBP", 1000)),
        "tiff": data_uri(tiff_bomb(100_000, 100_000)),
    }


@every_field
def test_bombs_are_refused_at_once(http: httpx.Client, model: Asked, bombs: dict[str, str], field: str) -> None:
    for name, bomb in bombs.items():
        began = time.monotonic()
        error = refusal(http, field, bomb)
        assert time.monotonic() - began < 1, name
        assert error["code"] in ("media_too_large", "invalid_media")


def test_small_requests_pass_many_bombs(ask: Ask, http: httpx.Client, bombs: dict[str, str]) -> None:
    small = {"messages": [user(QUESTION)], "max_tokens": 1}
    good(ask(CHAT, **small))
    with ThreadPoolExecutor(16) as pool:
        flying = [pool.submit(refusal, http, field, bombs["gif"]) for field in [*FIELDS, *FIELDS][:16]]
        began = time.monotonic()
        good(ask(CHAT, **small))
        assert time.monotonic() - began < 2
        assert len([one.result() for one in flying]) == 16


JPEG = image_file(pixels(1), "JPEG")
DAMAGED = {
    "jpeg cut": data_uri(JPEG[:-128], "image/jpeg"),
    "empty": data_uri(b"", "image/png"),
    "text": data_uri(b"hello, I am a PNG", "image/png"),
    "bad checksum": data_uri(png_with_bad_checksum(), "image/png"),
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png;base64,####",
}


@every_field
def test_damaged_pictures_are_the_clients_fault(http: httpx.Client, model: Asked, field: str) -> None:
    for source in DAMAGED.values():
        assert refusal(http, field, source)["message"]
    assert http.post(**FIELDS[field][0](data_uri(JPEG, "image/png"))).status_code == 200


def test_damaged_files_of_a_form_are_too(http: httpx.Client, model: Asked) -> None:
    for data in (JPEG[:-128], b"", b"hello", png_with_bad_checksum()):
        files = [("image[]", ("a.png", file, "image/png")) for file in (image_file(), data)]
        assert refused(http.post(EDIT, data={"prompt": "a"}, files=files))["param"] == "image.1"
    files = [("image[]", ("a.gif", data, "image/gif")) for data in (animation("GIF", 3),)]
    assert "animation" in refused(http.post(EDIT, data={"prompt": "a"}, files=files))["message"]


@pytest.fixture(scope="module")
def open_http(golden: Any) -> Iterator[httpx.Client]:
    """One that fetches, from this address alone."""
    served = Asked(plugin="bagel", model=str(golden.folder), allowed_media_domains=("127.0.0.1", "allowed.example"))
    try:
        with served.http() as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client
        served.assert_clean()
    finally:
        served.close()


INWARD = [
    "http://127.0.0.2:{port}/", "http://[::1]:{port}/", "http://169.254.169.254/latest/meta-data/", "http://2130706434:{port}/",
    "http://0177.0.0.2:{port}/", "http://0x7f000002:{port}/", "http://localhost:{port}/", "http://[::ffff:127.0.0.2]:{port}/",
    "http://allowed.example\\@127.0.0.2:{port}/", "http://allowed.example@127.0.0.2:{port}/", "file:///etc/hostname",
    "/etc/hostname", "./x.png", "file:///tmp/%2e%2e/etc/hostname", "/no/such/file",
]  # fmt: skip


@every_field
def test_no_field_reaches_inward_nor_reads_a_file(
    http: httpx.Client, open_http: httpx.Client, model: Asked, field: str
) -> None:
    for site in (http, open_http):
        files: set[str] = set()
        with listening(response(JPEG), host="127.0.0.2") as canary:
            for source in INWARD:
                error = refusal(site, field, source.format(port=canary.port))
                assert error["code"] in ("media_refused", "media_unreachable"), (source, error)
                files |= {error["message"]} if "http" not in source else set()
            time.sleep(0.005)
            assert canary.num_connections == 0
        assert len(files) == 1  # whether a file exists is not told


@every_field
def test_allowed_hosts_are_asked_and_lead_nobody_inward(
    http: httpx.Client, open_http: httpx.Client, model: Asked, field: str
) -> None:
    request, _ = FIELDS[field]

    def told(site: httpx.Client, source: str) -> list[np.ndarray | str]:
        answer = site.post(**request(source))
        assert answer.status_code == 200, answer.text[:500]
        values = re.findall(r'"(?:b64_json|url|data|content|text)": ?"([^"]+)"', answer.text)
        assert values
        return [opened(value) if len(value) > 100 else value for value in values]

    with listening(response(JPEG)) as host:
        url = f"http://127.0.0.1:{host.port}/x.jpg"
        for one, other in zip(told(open_http, url), told(http, data_uri(JPEG)), strict=True):
            assert one == other if isinstance(one, str) else np.abs(one.astype(int) - other).max() <= 1
        assert host.num_connections == 1
        refusal(http, field, url)
        assert host.num_connections == 1
    with listening(response(JPEG), host="127.0.0.2") as canary:
        with listening(response(status="302 Found", Location=f"http://127.0.0.2:{canary.port}/")) as host:
            refusal(open_http, field, f"http://127.0.0.1:{host.port}/")
            assert host.num_connections == 1
        assert canary.num_connections == 0


# ---- 67: guidance is what it says ---------------------------------------------------------------------------

PROMPTS = ["a fox", "a boat", "snow", "two apples", "an old house", "the sea", "a cat asleep", "night", "1", "hills"]


def draw(model: Asked, *inputs: dict[str, Any], **params: Any) -> torch.Tensor:
    params = {"height": 16, "width": 24, "num_timesteps": 6} | params
    return model.ask(*inputs, task="image", outputs=["tensors"], seed=7, params=params).tensors["latents"]


def test_a_drawing_is_of_its_prompt(model: Asked) -> None:
    """With one seed for all, what is drawn in more steps is nearest to what is drawn of the same words in fewer."""
    few, many = (
        torch.stack([draw(model, text(prompt), num_timesteps=count).flatten() for prompt in PROMPTS])
        for count in (6, 9)
    )
    assert torch.cdist(many, few).argmin(dim=1).tolist() == list(range(len(PROMPTS)))


def test_guidance_pulls_away_from_what_is_not_asked_for(model: Asked) -> None:
    unguided, guided, more = (draw(model, text("a fox"), cfg_text_scale=scale) for scale in (1.0, 4.0, 8.0))
    assert (unguided - guided).abs().max() > 0.05 and (guided - more).abs().max() > 0.05
    source = image(pixels(1))
    plain, by_image = (draw(model, source, text("blue"), cfg_img_scale=scale) for scale in (1.0, 2.0))
    assert (plain - by_image).abs().max() > 0.05


@pytest.mark.parametrize("branch", ["v_text", "v_img"])
def test_a_branch_that_is_missing_fails_the_request(model: Asked, monkeypatch: pytest.MonkeyPatch, branch: str) -> None:
    hooks = model.worker.modules["combine_cfg"].prepare
    prepare = hooks["step"]

    def without(tasks: Any) -> Any:
        for task in tasks:
            task.inputs[branch] = None
        return prepare(tasks)

    monkeypatch.setitem(hooks, "step", without)
    with pytest.raises(Exception, match="branch"):
        draw(model, image(pixels(1)), text("blue"))


# ---- 71: what stands beside a request, and how much is read at a time, changes nothing ----------------------


@pytest.mark.parametrize("count", [2, 8, 32])
def test_batches_of_any_size_give_what_one_does(model: Asked, count: int) -> None:
    small = {"height": 16, "width": 24, "num_timesteps": 5}

    def wires(number: int) -> list[Any]:
        source = image(pixels(number % 3))
        return [
            ask_for(source, QUESTION, seed=number, params={"max_tokens": 6, "temperature": 1.0}),
            ask_for(text(f"{number}"), task="image", seed=number, params=small),
        ]

    both = [wire for number in range(count // 2) for wire in wires(number)]
    together = model.ask_all(*both)
    for number in {0, count // 2 - 1}:
        for found, wire in zip(together[2 * number : 2 * number + 2], wires(number), strict=True):
            (alone,) = model.ask_all(wire)
            assert found.ids == alone.ids
            for one, other in zip(found.images, alone.images, strict=True):
                assert np.abs(one.astype(int) - other).max() <= 1


def test_seeds_are_kept_at_the_ends_of_their_range_and_repeat(ask: Ask) -> None:
    found = {}
    for seed in (0, 1, 2**63 - 1):
        first, second = (good(ask(DRAW, prompt="a", **SMALL | {"seed": seed}))["data"] for _ in range(2))
        assert first == second
        found[seed] = first[0]["b64_json"]
    assert len(set(found.values())) == 3
    for seed in (-1, 2**63, 1.5, "x"):
        assert refused(ask(DRAW, prompt="a", **SMALL | {"seed": seed}))["param"] == "seed"


# ---- 77: memory ---------------------------------------------------------------------------------------------


def test_edits_of_any_size_do_not_make_memory_creep(model: Asked) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def edits(count: int) -> None:
        for _ in range(count):
            height, width = chance.integers(20, 600, size=2)
            source = np.full((height, width, 3), chance.integers(256), dtype=np.uint8)
            model.ask(image(source), text("blue"), task="image", params={"num_timesteps": 2})

    chance = np.random.default_rng(0)
    edits(30)
    before = resident()
    edits(40)
    assert resident() - before < 0.03 * before
