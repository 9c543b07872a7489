"""Bodies, headers and bytes drawn from the server's own `/openapi.json`: what it describes is what it takes.

A valid body is answered, one that breaks the schema is refused with an OpenAI-shaped error that names a field, and
nothing at all ends in 500, takes long, or leaves anything behind. Draws are the same every time.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from json_schema import Document, broken
from served import Served

BOUND_S = 20.0
"""Most that one request may take; far above what any takes on a quiet machine."""
SMALL = st.integers(1, 24)
KEPT_SHORT: dict[str, st.SearchStrategy[Any]] = {
    # Which of these a model has differs. Long outputs are the load tests'; faults, the failure tests'.
    "max_tokens": SMALL, "max_frames": st.integers(1, 6), "draft_tokens": st.integers(1, 6), "steps": st.integers(1, 3),
    "rounds": st.integers(1, 2), "end_at": st.integers(1, 6), "timeout_s": st.sampled_from([60, 86400, 100.5]),
    "kind": st.just("none"), "fail_step": st.just(False), "sleep_s": st.just(0), "n": st.integers(1, 3),
    "input": st.sampled_from(["hello", "A", "é", "日本", "a\n b", "<laugh>", "😀"]),
    "stop": st.sampled_from(["a", "xy", ["b", "c"], [], None]),
    "logit_bias": st.dictionaries(st.sampled_from(["7", "65", "101"]), st.floats(-9, 9, width=32), max_size=2),
    "session": st.none(), "messages": st.none(),
}  # fmt: skip
REQUIRED = ("max_tokens", "max_frames", "end_at")
"""Fields that are always given where there are any: so that outputs stay short, and are not empty."""
STRICT = {"generate", "nested", "branches", "states", "trouble", "speech"}
"""Tasks whose parameters mean something in every combination that the schema allows."""


class Site:
    """A served model, a client of it, and what it says of itself."""

    def __init__(self, served: Served, client: httpx.Client) -> None:
        self.served = served
        self.client = client
        found = client.get("/openapi.json").json()
        self.document = Document(found)
        self.paths: dict[str, Any] = found["paths"]

    def __repr__(self) -> str:
        return self.served.engine.spec.name  # examples are shown with it

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """A response: in time, no 500, and if it is an error, shaped like one."""
        started = time.monotonic()
        response = self.client.request(method, path, **request)
        assert time.monotonic() - started < BOUND_S
        assert response.status_code < 500, f"{response.status_code}: {response.text[:300]}"
        if not response.is_success and method != "HEAD":
            error = response.json()["error"]
            assert response.headers["content-type"] == "application/json" and set(response.json()) == {"error"}
            assert set(error) == {"message", "type", "param", "code"}
            assert 0 < len(error["message"]) < 2000 and "Traceback" not in error["message"], error["message"][:200]
            assert error["param"] is None or 0 < len(error["param"]) < 500, error["param"][:200]
        return response

    def schema(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return found

    def short(self, schema: dict[str, Any], *required: str, **only: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        """What a schema accepts and asks for little. `only`: of these fields, such values."""
        schema = self.document.resolved(schema)
        names = [*required, *(name for name in REQUIRED if name in schema["properties"])]
        narrowed = schema | {"required": list(dict.fromkeys([*schema.get("required", ()), *names]))}
        voice = st.sampled_from([*self.voices, None])
        return self.document.values(narrowed, only=KEPT_SHORT | {"voice": voice} | only)

    @property
    def voices(self) -> list[str]:
        return self.served.model.voices or []


@pytest.fixture(scope="module", params=["echo", "orpheus"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    served = Served(plugin=request.param, max_model_len=512)
    try:
        with served.http() as url, httpx.Client(base_url=url, timeout=BOUND_S) as client:
            yield Site(served, client)
            assert client.get("/health").status_code == 200 and client.get("/ready").status_code == 200
            assert client.post("/v1/audio/speech", json={"input": "Hello."}).status_code == 200
        served.assert_clean()
    finally:
        served.close()


def fuzz(max_examples: int) -> Callable[[Any], Any]:
    """The same examples every time, without shrinking: the first failure is told as it is."""
    return settings(
        max_examples=max_examples, derandomize=True, deadline=None, database=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def clash(body: dict[str, Any]) -> str | None:
    """The field of a valid speech request that another field forbids, as the documentation tells in words."""
    is_streamed = bool(body.get("stream")) or body.get("stream_format") is not None
    if body.get("stream") is False and body.get("stream_format") is not None:
        return "stream"
    return "response_format" if is_streamed and body.get("response_format") == "flac" else None


# ---- bodies ---------------------------------------------------------------------------------------------------------


@fuzz(30)
@given(data=st.data())
def test_valid_speech_requests_are_answered(site: Site, data: st.DataObject) -> None:
    body = data.draw(site.short(site.schema("/v1/audio/speech")))
    assert site.document.accepts(site.schema("/v1/audio/speech"), body)
    response = site.ask("POST", "/v1/audio/speech", json=body)
    if (field := clash(body)) is not None:
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), body
    elif response.status_code != 200:  # a few tokens may be no sound at all, which is told
        assert response.json()["error"]["code"] == "no_audio", response.text
    event(f"speech {response.status_code}")


@fuzz(40)
@given(data=st.data())
def test_valid_native_requests_are_answered(site: Site, data: st.DataObject) -> None:
    spec = site.served.engine.spec
    task = data.draw(st.sampled_from(sorted(spec.tasks)))
    only = KEPT_SHORT | {
        "model": st.sampled_from([None, *site.served.engine.model_names]),
        "task": st.just(task),
        "outputs": st.none(), "tools": st.just([]),
        "params": site.short({"$ref": f"#/{spec.tasks[task].params.__name__}"}),
        "inputs": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": KEPT_SHORT["input"]}), min_size=1,
                           max_size=2),
    }  # fmt: skip
    schema = site.document.resolved(site.schema("/v1/generate"))
    body = data.draw(site.document.values(schema | {"required": ["task", "inputs", "params"]}, only=only))
    assert site.document.accepts(schema, body)
    response = site.ask("POST", "/v1/generate", json=body)
    assert response.status_code in ((200,) if task in STRICT else (200, 400)), f"{body}: {response.text[:500]}"
    if response.status_code == 200 and not body.get("stream"):
        assert site.document.accepts({"$ref": "#/GenerateResult"}, response.json()), response.text[:500]
    event(f"{task} {response.status_code}")


@fuzz(100)
@given(data=st.data())
@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/generate"])
def test_requests_that_break_the_schema_are_refused(site: Site, path: str, data: st.DataObject) -> None:
    schema = site.schema(path)
    required = data.draw(site.short(schema))
    body = data.draw(broken(st.just(required)))
    is_valid = site.document.accepts(schema, body)
    if is_valid and not _is_short(body, like=required):
        return
    response = site.ask("POST", path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert is_valid or response.status_code in (400, 404), f"{response.status_code} for {body}"
    event("still valid" if is_valid else "refused")


TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": KEPT_SHORT["input"]}
)
DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)
PICTURES: dict[str, st.SearchStrategy[Any]] = {
    "prompt": KEPT_SHORT["input"], "size": st.sampled_from([None, "auto", "8x6"]), "preview_every": st.just(0),
    "image": st.sampled_from([DOT, [DOT], [DOT, DOT]]),
}  # fmt: skip
OTHERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/v1/chat/completions": {
        "messages": st.lists(TURN, min_size=1, max_size=3), "audio": st.none(), "max_completion_tokens": st.none(),
        "stream_options": st.none(), "tools": st.sampled_from([None, []]),
        "modalities": st.sampled_from([None, ["text"], ["text", "image"]]),
    },
    "/v1/images/generations": PICTURES,
    "/v1/images/edits": PICTURES,
}  # fmt: skip


@fuzz(60)
@given(data=st.data())
@pytest.mark.parametrize("path", OTHERS)
def test_chat_and_pictures_are_answered_or_refused(site: Site, path: str, data: st.DataObject) -> None:
    if path not in site.paths:
        return
    schema = site.schema(path)
    body = data.draw(site.short(schema, **OTHERS[path]))
    assert site.document.accepts(schema, body)
    assert site.ask("POST", path, json=body).status_code in (200, 400)  # fields may clash
    wrong = data.draw(broken(st.just(body)))
    is_valid = site.document.accepts(schema, wrong)
    if is_valid and not _is_short(wrong, like=body):
        return
    response = site.ask("POST", path, content=json.dumps(wrong), headers={"Content-Type": "application/json"})
    assert is_valid or response.status_code in (400, 404), f"{response.status_code} for {wrong}"
    event(f"{path} {is_valid} {response.status_code}")


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--b\r\nContent-Disposition: form-data; '
    b'name="image"; filename="x"\r\nContent-Type: image/png\r\n\r\n' + base64.b64decode(DOT[22:]) + b"\r\n--b--\r\n"
)


@fuzz(150)
@given(at=st.integers(0, len(FORM)), num_dropped=st.integers(0, 12), put=st.binary(max_size=12), is_cut=st.booleans())
def test_any_form_is_an_edit_or_refused(site: Site, at: int, num_dropped: int, put: bytes, is_cut: bool) -> None:
    if "/v1/images/edits" in site.paths:
        content = FORM[:at] + put + (b"" if is_cut else FORM[at + num_dropped :])
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        assert site.ask("POST", "/v1/images/edits", content=content, headers=headers).status_code in (200, 400)


def _is_short(body: dict[str, Any], *, like: dict[str, Any]) -> bool:
    """Whether a body that the breaking left valid still asks for little, and for no fault of the test model."""
    fields, usual = ({**given, **(given.get("params") or {})} for given in (body, like))
    return all(name in fields and fields[name] == usual[name] for name in KEPT_SHORT if name in usual)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@fuzz(60)
@given(
    path=st.sampled_from(["/v1/audio/speech", "/v1/generate", *OTHERS]),
    content=st.one_of(
        JSON_LIKE.map(lambda value: json.dumps(value).encode()),
        st.binary(max_size=40),
        st.sampled_from([b"", b"{", b"[" * 5000, b'{"a":' * 2000, b"NaN", b'{"input": "\\ud800"}', b'{"input":1e999}',
                         b'\xef\xbb\xbf{}', b'{"input":"x","input":"y"}', b"9" * 5000, b"null", b"\x00"]),
    ),
)  # fmt: skip
def test_any_other_body_is_refused(site: Site, path: str, content: bytes) -> None:
    path = path if path in site.paths else "/v1/generate"
    response = site.ask("POST", path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, content[:100]


# ---- methods, headers, paths ----------------------------------------------------------------------------------------

NAMES = st.sampled_from([
    "Content-Type", "Accept", "Content-Encoding", "X-Request-Id", "Authorization", "Origin", "Range", "Expect",
    "If-None-Match", "Upgrade", "Connection", "Cookie", "Host", "X-Forwarded-For", "Accept-Encoding", "Content-Range",
])  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(["application/json", "text/plain", "application/json; charset=utf-16", "gzip", "*/*", "", "x" * 900,
                     "multipart/form-data; boundary=x", "application/octet-stream", "bytes=0-1", "keep-alive", "é"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30).map(str.strip),
)  # fmt: skip


@fuzz(100)
@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FROB"]),
    data=st.data(),
    tail=st.sampled_from(["", "/", "?a=1", "?", "/x", "%00", "//", "#f", ";x", "?stream=true"]),
    headers=st.dictionaries(NAMES, VALUES, max_size=3),
)
def test_any_method_and_headers_on_any_route(
    site: Site, method: str, data: st.DataObject, tail: str, headers: dict[str, str]
) -> None:
    path = data.draw(st.sampled_from([*site.paths, "/", "/nowhere"])).replace("{name}", "some name")
    body = b'{"input": "A", "max_tokens": 7}' if method == "POST" else None
    given = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    response = site.ask(method, path + tail, content=body, headers=given)
    known = site.paths.get(path, {})
    if not tail and known and method not in ("HEAD", "OPTIONS") and method.lower() not in known:
        assert response.status_code in (405, 400) and response.status_code != 400 or "Host" in headers, response.text
    assert response.headers.get("x-request-id") or response.status_code == 400


# ---- bytes ----------------------------------------------------------------------------------------------------------

WHOLE = (
    b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 31\r\n"
    b'Connection: close\r\n\r\n{"input": "A", "max_tokens": 7}'
)


@fuzz(60)
@given(at=st.integers(0, len(WHOLE)), num_dropped=st.integers(0, 12), put=st.binary(max_size=12), is_cut=st.booleans())
def test_any_bytes_on_the_wire_get_an_answer_or_a_closed_connection(
    site: Site, at: int, num_dropped: int, put: bytes, is_cut: bool
) -> None:
    url = site.client.base_url
    with socket.create_connection((url.host, url.port or 80), timeout=BOUND_S) as connection:
        connection.sendall(WHOLE[:at] + put + (b"" if is_cut else WHOLE[at + num_dropped :]))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while block := connection.recv(65536):
                answer += block
        except ConnectionResetError:
            return
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        status, length = int(head.split()[1]), re.search(rb"(?i)content-length: (\d+)", head)
        assert head.startswith(b"HTTP/1.1 ") and (status == 200 or 400 <= status < 500), answer[:300]
        body, answer = (rest[: int(length[1])], rest[int(length[1]) :]) if length else (rest, b"")
        assert status == 200 or not body or set(json.loads(body)) == {"error"}
