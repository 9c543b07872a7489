"""OpenAI's image routes, generations and edits, mapped to and from native requests.

Runs in the server process. The task is the model's first that gives images and takes what the route takes.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mstar.errors import PluginError, RequestError
from mstar.plugin.spec import ModelSpec, Task
from mstar.server import native
from mstar.server.convert import check_values, convert, field_names, short
from mstar.server.multipart import parse_form
from mstar.server.native import (
    MAX_PARTS,
    MAX_SEED,
    MAX_TIMEOUT_S,
    GenerateRequest,
    ImageInput,
    MediaSource,
    Text,
    TextInput,
)
from mstar.server.openai import check_param, reworded, split_params
from mstar.server.results import JSON, Form, Outputs, Result, encode_media, error_fields, server_sent
from mstar.types import Chunk, ImageChunk, Request

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
_SIZE = "^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$"


class ImageRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/images/generations`; parameters of the model's task may stand beside these.

    `seed` and `timeout_s` are ours. `moderation` and `user` change nothing.
    """

    prompt: Annotated[Text, Meta(min_length=1)]
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    size: Annotated[str, Meta(pattern=_SIZE)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    output_compression: Literal[100] | None = None
    background: Literal["auto", "opaque"] | None = None
    quality: Literal["auto", "standard"] | None = None
    style: None = None
    moderation: Literal["auto", "low"] | None = None
    user: str | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None


class EditRequest(ImageRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/images/edits`, a multipart form, or ours: JSON in which images are data URIs or URLs."""

    image: MediaSource | Annotated[list[MediaSource], Meta(min_length=1, max_length=MAX_PARTS)]
    mask: None = None
    input_fidelity: None = None


def image_task(spec: ModelSpec, *, path: str) -> str:
    """The task that requests of a route stand for. Raises PluginError if there is none."""
    kinds = ("text", "image") if path == EDITS else ("text",)
    for name, task in spec.tasks.items():
        if "image" in task.outputs and {*kinds} <= {*task.inputs}:
            return name
    need = f"no task of it takes {' and '.join(kinds)} and gives images"
    raise PluginError(f"plugin {spec.name!r} names the endpoint {path}, but {need}")


def request_type(path: str) -> type[ImageRequest]:
    return EditRequest if path == EDITS else ImageRequest


def read_image(body: Any, *, spec: ModelSpec, path: str) -> tuple[GenerateRequest, ImageForm]:
    """The native request that an image request stands for, and how it is answered. Raises RequestError 400."""
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    check_values(body)
    if body.get("mask") is not None:
        message = "this model takes no mask; leave it out, and say in the prompt what is to change"
        raise RequestError(message, param="mask", code="unsupported_parameter")
    name, kind = image_task(spec, path=path), request_type(path)
    task = spec.tasks[name]
    own, params = split_params(body, kind, task=task, neutral={})
    _check_size(own.get("size"))
    asked = convert(own, kind)
    if asked.partial_images and not asked.stream:
        raise RequestError("partial_images is for streams; set stream, or leave it out", param="partial_images")
    for field, nothing in (("n", 1), ("partial_images", 0)):
        value = getattr(asked, field)
        if value not in (None, nothing):
            check_param(field, task=task, param=field)
        if value is not None and field in field_names(task.params):
            params[field] = value
    inputs, names = _inputs(asked)
    names |= _take_size(asked, params, task=task)
    wire = GenerateRequest(
        model=asked.model, task=name, inputs=inputs, outputs=["image"], params=params, seed=asked.seed,
        stream=bool(asked.stream), timeout_s=asked.timeout_s,
    )  # fmt: skip
    form = ImageEvents if asked.stream else ImageForm
    return wire, form("image_edit" if path == EDITS else "image_generation", names)


def read_edit_form(body: bytes, *, content_type: str) -> dict[str, Any]:
    """The JSON that a multipart form stands for."""
    texts = {*field_names(EditRequest)} - {"n", "seed", "stream", "partial_images", "output_compression", "timeout_s"}
    return parse_form(body, content_type=content_type, files=("image", "mask"), texts=texts, lists=("image",))


def _inputs(asked: ImageRequest) -> tuple[list[native.Input], dict[str, str]]:
    """Images in order, then the prompt; and what their fields were called."""
    images: list[str] = []
    if isinstance(asked, EditRequest):
        images = [asked.image] if isinstance(asked.image, str) else asked.image
    names = {f"inputs.{len(images)}": "prompt"}
    for number in range(len(images)):
        place = f"image.{number}" if len(images) > 1 else "image"
        names |= {f"inputs.{number}.data": place, f"inputs.{number}": place}
    parts: list[native.Input] = [*(ImageInput(data=source) for source in images), TextInput(text=asked.prompt)]
    return parts, names | {"inputs": "prompt"}


def _check_size(size: Any) -> None:
    """What validation checks too, but would tell as a regular expression."""
    if isinstance(size, str) and not re.search(_SIZE, size):
        message = f"size is {short(size)}; it must be auto, or WIDTHxHEIGHT, such as 512x512"
        raise RequestError(message, param="size")


def _take_size(asked: ImageRequest, params: dict[str, Any], *, task: Task) -> dict[str, str]:
    """Put the size into the parameters; what those were called."""
    if asked.size in (None, "auto"):
        return {}
    sides = dict(zip(("width", "height"), map(int, asked.size.split("x")), strict=True))
    for side in sides:
        check_param(side, task=task, param="size")
        if side in params:
            raise RequestError(f"size and {side} are both given; leave one out", param="size")
    params |= sides
    return {f"params.{side}": "size" for side in sides}


class ImageForm(Form):
    """One JSON object with PNG files in base64.

    Args:
        kind: "image_generation" or "image_edit": what events are called.
        names: fields of the native request -> what they were called.
    """

    media_type = JSON

    def __init__(self, kind: str, names: Mapping[str, str]) -> None:
        self.kind = kind
        self.created = int(time.time())
        self._names = names

    def worded(self, error: RequestError) -> RequestError:
        return reworded(error, names=self._names)

    def begins(self, chunk: Chunk) -> bool:
        return isinstance(chunk, ImageChunk)

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        if first is None:
            message = "the model ended without an image; try another seed or prompt"
            raise RequestError(message, param="prompt", code="no_image")
        return {"X-Seed": str(request.seed)}

    def piece(self, chunk: Chunk) -> bytes:
        raise NotImplementedError("a whole answer has no pieces")

    def whole(self, outputs: Outputs, result: Result) -> tuple[bytes, dict[str, str]]:
        images = [chunk for chunk in outputs.joined() if isinstance(chunk, ImageChunk)]
        headers = self.headers(outputs.request, first=images[0] if images else None, result=result)
        data = [{"b64_json": encode_media(image)[1]} for image in images]
        body = {"created": self.created, "data": data, **_look(images[0]), "usage": _usage(result)}
        return msgspec.json.encode(body), headers


class ImageEvents(ImageForm):
    """Server-sent events: previews as they come, then every image; the last one tells the usage."""

    media_type = "text/event-stream"

    def __init__(self, kind: str, names: Mapping[str, str]) -> None:
        super().__init__(kind, names)
        self._num_partial: Counter[int] = Counter()
        self._held: dict[str, Any] | None = None  # an image that may be the last

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        return super().headers(request, first=first, result=result) | {"Cache-Control": "no-cache"}

    def piece(self, chunk: Chunk) -> bytes:
        if not isinstance(chunk, ImageChunk):
            return b""
        fields = {"b64_json": encode_media(chunk)[1], "created_at": self.created, "index": chunk.index, **_look(chunk)}
        if chunk.partial:
            number = self._num_partial[chunk.index]
            self._num_partial[chunk.index] += 1
            return self._event("partial_image", fields | {"partial_image_index": number})
        before, self._held = self._held, fields
        return b"" if before is None else self._event("completed", before)

    def end(self, request: Request, *, result: Result | None, error: RequestError | None) -> bytes:
        usage = {} if result is None else {"usage": _usage(result)}
        last = b"" if self._held is None else self._event("completed", self._held | usage)
        return last if error is None else last + server_sent(error_fields(self.worded(error)))

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        kind = f"{self.kind}.{name}"
        return server_sent({"type": kind, **fields}, event=kind)


def _look(image: ImageChunk) -> dict[str, str]:
    """What OpenAI says of an image besides its data."""
    height, width = image.pixels.shape[:2]
    return {"size": f"{width}x{height}", "background": "opaque", "output_format": "png", "quality": "auto"}


def _usage(result: Result) -> dict[str, Any]:
    usage = result.usage
    taken, given = usage["prompt_tokens"], usage["completion_tokens"] + usage.get("image_tokens", 0)
    return {"input_tokens": taken, "output_tokens": given, "total_tokens": taken + given}
