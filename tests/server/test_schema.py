"""The OpenAPI document says what validation does: routes, fields, bounds, answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from mstar.config import ServerConfig
from mstar.errors import PluginError
from mstar.plugin import loader
from mstar.plugin.spec import ModelSpec
from mstar.server import openai
from mstar.server.app import create_app
from mstar.server.convert import convert
from mstar.server.native import GenerateRequest
from mstar.server.schema import ErrorBody, GenerateResult, openapi_document

PATHS = ["/v1/generate", "/v1/audio/speech", "/v1/models/{name:path}", "/health"]


def document(spec: ModelSpec, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"names": ("tiny",), "voices": ["amy"], "has_keys": False, "paths": PATHS}
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi_document(spec, **options | more)))
    return found


def properties(found: dict[str, Any], name: str) -> dict[str, Any]:
    fields: dict[str, Any] = found["components"]["schemas"][name]["properties"]
    return fields


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else [])
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def kinds(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema."""
    found: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return found


def edges(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values just inside and just outside of what a schema allows."""
    inside: list[Any] = []
    outside: list[Any] = []
    for kind in kinds(schema):
        step = 1 if kind.get("type") == "integer" else 0.001
        for bound, sign in (("minimum", -1), ("maximum", 1)):
            if bound in kind:
                inside.append(kind[bound])
                outside.append(kind[bound] + sign * step)
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            outside += [kind[bound]] if bound in kind else []
        inside += kind.get("enum", [])
        outside += ["no such value"] if "enum" in kind else []
        inside += [True, False] if kind.get("type") == "boolean" else []
        inside += [None] if kind.get("type") == "null" else []
    outside += [None] if None not in inside else []
    outside += [{"a": 1}] if not any(kind.get("type") == "object" for kind in kinds(schema)) else []
    return inside, outside


@pytest.mark.parametrize("plugin", ["parrot", "echo"])
def test_every_bound_of_a_speech_request_is_the_one_that_is_checked(plugin: str, parrot_spec: ModelSpec) -> None:
    spec = parrot_spec if plugin == "parrot" else loader.load(plugin).spec
    fields = properties(document(spec, names=("tiny", plugin), voices=["plain", "loud"]), "SpeechRequest")
    params = spec.tasks[openai.speech_task(spec)].params
    num_edges = 0

    def accept(body: dict[str, Any]) -> None:
        _, wire = openai.read_speech({"input": "hello"} | body, spec=spec)
        convert(wire.params, params, prefix="params.")

    for name, schema in fields.items():
        if name in ("input", "model", "voice"):
            continue  # whose values are strings that the model knows
        inside, outside = edges(schema)
        num_edges += len(inside) + len(outside)
        for value in inside:
            if not (name == "response_format" or (name == "stream_format" and value == "sse")):
                accept({name: value})
        for value in outside:
            with pytest.raises(openai.RequestError) as error:
                accept({name: value})
            assert str(error.value.param).removeprefix("params.") == name, (value, error.value)
    assert num_edges > 25
    with pytest.raises(openai.RequestError, match="unknown"):
        accept({"colour": 1})
    assert document(spec)["components"]["schemas"]["SpeechRequest"]["additionalProperties"] is False


@pytest.mark.parametrize("plugin", ["parrot", "echo"])
def test_every_bound_of_a_task_s_parameters_is_the_one_that_is_checked(plugin: str, parrot_spec: ModelSpec) -> None:
    spec = parrot_spec if plugin == "parrot" else loader.load(plugin).spec
    found = document(spec)
    for task in spec.tasks.values():
        for name, schema in properties(found, task.params.__name__).items():
            inside, outside = edges(schema)
            for value in inside:
                convert({name: value}, task.params, prefix="params.")
            for value in outside:
                with pytest.raises(openai.RequestError) as error:
                    convert({name: value}, task.params, prefix="params.")
                assert str(error.value.param).startswith(f"params.{name}")


def test_a_generate_request_is_narrowed_to_what_the_model_takes(parrot_spec: ModelSpec) -> None:
    found = document(parrot_spec, names=("one", "two"))
    fields = properties(found, "GenerateRequest")
    assert set(fields) == set(msgspec.structs.asdict(GenerateRequest()))
    assert fields["model"]["enum"] == ["one", "two", None] and fields["task"]["enum"] == ["chat", "speech", None]
    assert kinds(fields["outputs"])[0]["items"]["enum"] == [
        "text", "tensors", "audio", "tensor:said", "tensor:audio",
    ]  # fmt: skip
    parts = kinds(fields["inputs"])[0]
    assert parts["minItems"] == 1 and len(parts["items"]["anyOf"]) == 4
    echo = loader.load("echo").spec
    fields = properties(document(echo), "GenerateRequest")
    names = [reference.rpartition("/")[2] for reference in references(fields["inputs"])]
    assert names == ["TextInput", "TokensInput", "TensorInput", "ImageInput", "AudioInput", "VideoInput"]
    without = properties(document(replace(echo, tasks={"media": echo.tasks["media"]}, endpoints=())), "GenerateRequest")
    assert without["messages"] == {"type": "null"}  # no task takes them
    tensor = found["components"]["schemas"]["TensorValue"]
    assert sorted(tensor["properties"]) == sorted(tensor["required"]) == ["data", "dtype", "shape"]


def test_every_reference_leads_somewhere_and_keys_are_declared(parrot_spec: ModelSpec) -> None:
    found = document(parrot_spec, has_keys=True)
    assert found["openapi"] == "3.1.0" and set(found["paths"]) == {p.replace(":path", "") for p in PATHS}
    seen = set(references(found))
    assert len(seen) > 10
    for reference in seen:
        place: Any = found
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    assert found["security"] == [{"key": []}] and found["paths"]["/health"]["get"]["security"] == []
    assert "401" in found["paths"]["/v1/generate"]["post"]["responses"]
    assert "401" not in found["paths"]["/health"]["get"]["responses"]
    assert "security" not in document(parrot_spec) and "securitySchemes" not in document(parrot_spec)["components"]


def test_routes_and_answers_are_those_of_the_server(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            app = create_app(served.engine, root="tiny", config=ServerConfig(), voices=["amy"])
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                found = (await client.get("/openapi.json")).json()
                routes = {(re.sub(":path", "", r.path), m.lower()) for r in app.routes for m in r.methods - {"HEAD"}}
                assert {
                    (path, method) for path, operations in found["paths"].items() for method in operations
                } == routes
                for body in (
                    {"inputs": [{"type": "text", "text": "hi"}], "outputs": ["text", "tensors"]},
                    {"inputs": [{"type": "text", "text": "hi"}], "task": "speech", "outputs": ["audio", "tensors"]},
                    {"inputs": [{"type": "text", "text": "hi"}], "params": {"n": 2}, "session": "s"},
                ):
                    response = await client.post("/v1/generate", json=body)
                    result = msgspec.json.decode(response.content, type=GenerateResult)
                    assert result.outputs and result.session == body.get("session")
                names = {option.encode_name for option in msgspec.structs.fields(GenerateResult)}
                assert set(response.json()) - names == {"parrot"}  # what the model added
                for status, answer in (
                    (404, await client.get("/nowhere")),
                    (400, await client.post("/v1/generate", json={"inputs": 1})),
                ):
                    assert answer.status_code == status
                    msgspec.json.decode(answer.content, type=ErrorBody)
                    declared = found["paths"]["/v1/generate"]["post"]["responses"]
                    assert str(status) in declared

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/images/generations", "/v1/images/edits"])
def test_a_route_that_no_task_can_serve_is_the_plugin_s_mistake(path: str, parrot_spec: ModelSpec) -> None:
    spec = replace(parrot_spec, endpoints=(path,), tasks={"speech": parrot_spec.tasks["speech"]})
    with pytest.raises(PluginError, match=f"parrot.*{path}.*no task"):
        document(spec)
