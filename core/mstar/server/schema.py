"""The OpenAPI document of one served model, generated from the wire types that validation itself uses.

Made once at start, in the server process. What types cannot say, because it is the model's (its tasks, parameters,
voices, names), is filled in here. Knows paths, and nothing of handlers or sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

import mstar
from mstar.media.encode import FORMATS
from mstar.plugin.spec import ModelSpec, Task
from mstar.server import chat, images, openai
from mstar.server.convert import field_names
from mstar.server.multipart import FORM
from mstar.server.native import DTYPES, GenerateRequest, Input
from mstar.server.results import JSON, NDJSON, SAFETENSORS

SCHEMAS = "#/components/schemas/"
_INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
_GENERATION = (404, 408, 409, 410, 413, 415, 429, 503, 504)

# ---- answers that are put together by hand -----------------------------------------------------------------------


class Output(Struct, kw_only=True, forbid_unknown_fields=True):
    """A text; a call of a tool; or, in base64, a WAV or PNG file, or a tensor (little-endian, C order)."""

    type: Literal["text", "tool_call", "audio", "image", "tensor"]
    arguments: str | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[Any] | None = None
    sample_rate: int | None = None
    format: str | None = None
    name: str | None = None
    dtype: str | None = None
    shape: list[int] | None = None
    data: str | None = None
    index: int = 0
    finish_reason: str | None = None


class GenerateResult(Struct, kw_only=True):
    """What `POST /v1/generate` answers; a model may add fields."""

    id: str
    model: str
    task: str
    finish_reason: str
    usage: dict[str, int]
    counts: dict[str, int]
    counters: dict[str, int]
    prompt_token_ids: list[int]
    seed: int
    timings: dict[str, float]
    outputs: list[Output]
    session: str | None = None
    finish_reasons: list[str] = []


class ErrorFields(Struct, kw_only=True, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What every error looks like, on every route."""

    error: ErrorFields


# ---- the document -----------------------------------------------------------------------------------------------


def openapi_document(
    spec: ModelSpec, *, names: Sequence[str], voices: Sequence[str] | None, has_keys: bool, paths: Iterable[str]
) -> dict[str, Any]:
    """OpenAPI 3.1 of the routes in `paths`, which are templates of Starlette's."""
    error = {"description": "an error", "content": {JSON: {"schema": {"$ref": SCHEMAS + "ErrorBody"}}}}
    components = {"schemas": _schemas(spec, names=names, voices=voices), "responses": {"Error": error}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"mstar: {spec.name}", "version": mstar.__version__, "description": spec.description},
        "paths": {path.replace(":path}", "}"): _operations(path, has_keys=has_keys) for path in paths},
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _schemas(spec: ModelSpec, *, names: Sequence[str], voices: Sequence[str] | None) -> dict[str, Any]:
    params = list(dict.fromkeys(task.params for task in spec.tasks.values()))
    bodies = {path: body for path, body in _BODIES.items() if path in spec.endpoints}
    types = [GenerateRequest, GenerateResult, ErrorBody, *params, *bodies.values()]
    roots, schemas = msgspec.json.schema_components(types, ref_template=SCHEMAS + "{name}")
    of_type = dict(zip(types, roots, strict=True))
    _narrow_generate(schemas, spec, names=names, params=[of_type[kind] for kind in params])
    for path, body in bodies.items():
        own = [schemas[of_type[task.params]["$ref"].removeprefix(SCHEMAS)]["properties"] for task in _tasks(spec, path)]
        beside = _param_fields(own, nullable=chat.NEUTRAL if path == chat.CHAT else ())
        if path == openai.SPEECH:
            beside.pop("n", None)
        schemas[body.__name__]["properties"] = fields = beside | schemas[body.__name__]["properties"]
        fields["model"] = _choice(names)
    if openai.SPEECH in bodies:
        _narrow_speech(schemas["SpeechRequest"]["properties"], spec, voices=voices)
    if chat.CHAT in bodies:
        outputs = {kind for task in chat.chat_tasks(spec).values() for kind in task.outputs}
        of_chat = schemas["ChatRequest"]["properties"]["modalities"]["anyOf"]
        of_chat[0]["items"] = {"enum": [kind for kind in ("text", "image", "audio") if kind in outputs]}
    for path in {images.GENERATIONS, images.EDITS} & bodies.keys():
        _narrow_images(schemas[bodies[path].__name__]["properties"], next(_tasks(spec, path)))
    _bound_integers(schemas)
    return schemas


_BODIES: dict[str, type[Struct]] = {
    openai.SPEECH: openai.SpeechRequest,
    chat.CHAT: chat.ChatRequest,
    images.GENERATIONS: images.ImageRequest,
    images.EDITS: images.EditRequest,
}


def _tasks(spec: ModelSpec, path: str) -> Iterator[Task]:
    """The tasks whose parameters may stand beside a route's fields."""
    if path == chat.CHAT:
        yield from chat.chat_tasks(spec).values()
    else:
        yield spec.tasks[openai.speech_task(spec) if path == openai.SPEECH else images.image_task(spec, path=path)]


def _param_fields(params: Iterable[dict[str, Any]], *, nullable: Collection[str]) -> dict[str, Any]:
    """Parameters of one task, or of several: where those differ, either will do."""
    found: dict[str, list[dict[str, Any]]] = {}
    for own in params:
        for name, schema in own.items():
            kinds = found.setdefault(name, [{"type": "null"}] if name in nullable else [])
            kinds += [] if schema in kinds else [schema]
    return {name: kinds[0] if len(kinds) == 1 else {"anyOf": kinds} for name, kinds in found.items()}


def _narrow_speech(fields: dict[str, Any], spec: ModelSpec, *, voices: Sequence[str] | None) -> None:
    fields["input"] |= {"minLength": 1, "pattern": r"\S"}
    if voices is not None:
        fields["voice"] = _choice(voices)
    if "speed" not in field_names(spec.tasks[openai.speech_task(spec)].params):
        fields["speed"] = {"enum": [1.0], "default": 1.0}


def _narrow_images(fields: dict[str, Any], task: Task) -> None:
    known = field_names(task.params)
    for name, nothing, needed in (("n", 1, "n"), ("partial_images", 0, "partial_images"), ("size", "auto", "width")):
        if needed not in known:
            fields[name] = _choice([nothing])


def _narrow_generate(
    schemas: dict[str, Any], spec: ModelSpec, *, names: Sequence[str], params: list[dict[str, Any]]
) -> None:
    """What this model accepts of what the types accept."""
    tasks = spec.tasks.values()
    tensor = schemas["TensorValue"]
    tensor["properties"] = {name: tensor["properties"][name]["anyOf"][0] for name in ("dtype", "shape", "data")}
    tensor["properties"]["dtype"] = {"enum": list(DTYPES)}
    tensor["required"] = list(tensor["properties"])  # files are for `mstar run`
    kinds = {kind.__struct_config__.tag: kind.__name__ for kind in Input.__args__}
    known = [kinds[kind] for kind in spec.modalities_in if kind in kinds]
    part = {"anyOf": [{"$ref": SCHEMAS + name} for name in known]}
    for owner, name in (("ChatMessage", "content"), ("GenerateRequest", "inputs")):
        parts = next(kind for kind in schemas[owner]["properties"][name]["anyOf"] if kind.get("type") == "array")
        parts["items"] = part
    fields = schemas["GenerateRequest"]["properties"]
    outputs = [*spec.modalities_out, *(f"tensor:{name}" for task in tasks for name in task.tensors_out)]
    fields["model"] = _choice(names)
    fields["task"] = _choice(list(spec.tasks))
    fields["inputs"]["anyOf"][0]["minItems"] = fields["messages"]["anyOf"][0]["minItems"] = 1
    fields["outputs"]["anyOf"][0]["items"] = {"enum": list(dict.fromkeys(outputs))}
    fields["params"] = {"anyOf": params, "default": {}}
    if not any(task.messages for task in tasks):
        fields["messages"] = {"type": "null"}
    if not any(task.tools for task in tasks):
        fields["tools"] |= {"maxItems": 0}
    if not any(task.sessions for task in tasks):
        fields["session"] = {"type": "null"}


def _choice(values: Sequence[Any]) -> dict[str, Any]:
    return {"enum": [*values, None], "default": None}


def _bound_integers(schema: Any) -> None:
    """Validation refuses integers over 64 bits everywhere."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema.update(_INT64 | schema)
        for value in schema.values():
            _bound_integers(value)
    elif isinstance(schema, list):
        for value in schema:
            _bound_integers(value)


# ---- routes -----------------------------------------------------------------------------------------------------


def _operations(path: str, *, has_keys: bool) -> dict[str, Any]:
    """Method -> operation, of one path."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    lines = {"schema": {"type": "string", "description": "one JSON object a line; the last event is done or error"}}
    events = {"schema": {"type": "string", "description": "events speech.audio.delta, then speech.audio.done"}}
    plain = {JSON: {"schema": {"type": "object"}}}
    result = {JSON: {"schema": {"$ref": SCHEMAS + "GenerateResult"}}, NDJSON: lines, SAFETENSORS: binary}
    audio = {kind.media_type: binary for kind in FORMATS.values()} | {"text/event-stream": events}
    deltas = {"schema": {"type": "string", "description": "chat.completion.chunk objects, then [DONE]"}}
    pictures = {"schema": {"type": "string", "description": "events partial_image, then completed"}}
    drawn = plain | {"text/event-stream": pictures}
    table: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
        "/v1/generate": ("post", "Any task of the model", result, _GENERATION),
        openai.SPEECH: ("post", "Text to speech, as OpenAI's", audio, _GENERATION),
        chat.CHAT: ("post", "Chat, as OpenAI's", plain | {"text/event-stream": deltas}, _GENERATION),
        images.GENERATIONS: ("post", "Text to image, as OpenAI's", drawn, _GENERATION),
        images.EDITS: ("post", "Images and text to image, as OpenAI's", drawn, _GENERATION),
        "/v1/audio/voices": ("get", "Names for `voice`", plain, ()),
        "/v1/models": ("get", "The served names, with tasks and limits", plain, ()),
        "/v1/models/{name:path}": ("get", "One of them", plain, (404,)),
        "/v1/sessions/{name:path}": ("delete", "Forget a session", plain, (404, 409, 410)),
        "/health": ("get", "Whether the model can work", plain, (503,)),
        "/ready": ("get", "Whether a new request would be taken in", plain, (503,)),
        "/version": ("get", "What is running", plain, ()),
        "/openapi.json": ("get", "This document", plain, ()),
        "/metrics": ("get", "Prometheus metrics", {"text/plain": {"schema": {"type": "string"}}}, ()),
    }
    method, summary, content, statuses = table[path]
    is_open = path == "/health" or not has_keys
    errors = sorted({400, 405, 431, 500, *statuses, *(() if is_open else (401,))})
    references = {str(status): {"$ref": "#/components/responses/Error"} for status in errors}
    operation: dict[str, Any] = {
        "operationId": path.strip("/").partition("{")[0].replace("/", "_").replace(".", "_"),
        "summary": summary,
        "responses": {"200": {"description": "done", "content": content}} | references,
    }
    if path == "/health":
        operation["security"] = []
    if "{name:path}" in path:
        operation["operationId"] += method
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if method == "post":
        schema = {"schema": {"$ref": SCHEMAS + _BODIES.get(path, GenerateRequest).__name__}}
        kinds = (JSON, FORM) if path == images.EDITS else (JSON,)
        operation["requestBody"] = {"required": True, "content": dict.fromkeys(kinds, schema)}
    return {method: operation}
