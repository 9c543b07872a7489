"""OpenAI's chat completions, mapped to and from native requests: turns of parts in, choices or chunks of them out.

Runs in the server process. Which of a model's tasks answers follows from what is asked for and what it is about.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mstar.errors import PluginError, RequestError
from mstar.media.encode import check_format, open_encoder
from mstar.plugin.spec import ModelSpec, Task
from mstar.server import native
from mstar.server.convert import check_values, convert, field_names, short
from mstar.server.native import MAX_PARTS, MAX_SEED, MAX_TIMEOUT_S, ChatMessage, GenerateRequest, MediaSource, Text
from mstar.server.openai import check_param, reworded, split_params
from mstar.server.results import JSON, Form, Outputs, Result, encode_media, error_fields, server_sent
from mstar.server.tools import MAX_TOOLS, CallId, Tool, ToolCallInput
from mstar.types import AudioChunk, Chunk, ImageChunk, ProgressChunk, Request, TensorChunk, TextChunk, ToolCallChunk

CHAT = "/v1/chat/completions"
NEUTRAL: dict[str, Any] = {
    "max_tokens": None, "temperature": None, "top_p": 1, "n": 1, "stop": [], "logit_bias": {}, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip
"""OpenAI's parameters that a task may have, and the values that ask for nothing."""

# ---- wire types -------------------------------------------------------------------------------------------------


class UrlFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """`detail` changes nothing."""

    url: MediaSource
    detail: Literal["auto", "low", "high"] | None = None


class AudioData(Struct, kw_only=True, forbid_unknown_fields=True):
    data: Annotated[str, Meta(description="a sound file in base64")]
    format: Annotated[str, Meta(pattern="^[a-z0-9]{1,8}$")]


Url = MediaSource | UrlFields


class TextContent(Struct, tag="text", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    text: Text


class ImageContent(Struct, tag="image_url", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    image_url: Url


class SoundContent(Struct, tag="input_audio", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    input_audio: AudioData


class AudioContent(Struct, tag="audio_url", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    audio_url: Url


class VideoContent(Struct, tag="video_url", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """`fps`, `num_frames` and `frame_indices` are those of the native video part."""

    video_url: Url
    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None
    num_frames: Annotated[int, Meta(ge=1, le=native.MAX_FRAMES)] | None = None
    frame_indices: (
        Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=native.MAX_FRAMES)] | None
    ) = None


Content = TextContent | ImageContent | SoundContent | AudioContent | VideoContent


class SpokenTurn(Struct, kw_only=True, forbid_unknown_fields=True):
    """The sound of an earlier answer, as it came: it stands for its transcript."""

    id: str
    transcript: Text | None = None
    data: str | None = None
    expires_at: int | None = None
    sample_rate: int | None = None


class ChatTurn(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message. An earlier answer may be sent back as it came: `images` are then parts after its text, and names are
    left out.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Content], Meta(max_length=MAX_PARTS)] | None = None
    images: Annotated[list[ImageContent], Meta(max_length=MAX_PARTS)] | None = None
    reasoning_content: Text | None = None
    name: str | None = None
    tool_call_id: CallId | None = None
    refusal: None = None
    audio: SpokenTurn | None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCallInput], Meta(max_length=MAX_TOOLS)] | None = None
    annotations: list[Any] | None = None


class ChatAudio(Struct, kw_only=True, forbid_unknown_fields=True):
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
    voice: str | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"] = "text"


class ChatRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/chat/completions`; parameters of the model's chat tasks may stand beside these.

    `timeout_s` is ours. What changes no answer here (`user`, `metadata`, `store`, `safety_identifier`,
    `prompt_cache_key`) is accepted and not read.
    """

    messages: Annotated[list[ChatTurn], Meta(min_length=1, max_length=MAX_PARTS)]
    model: str | None = None
    modalities: Annotated[list[Literal["text", "image", "audio"]], Meta(min_length=1, max_length=3)] | None = None
    audio: ChatAudio | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None


# ---- to native --------------------------------------------------------------------------------------------------


def chat_tasks(spec: ModelSpec) -> dict[str, Task]:
    """The tasks that chat requests may stand for. Raises PluginError if there is none."""
    if not (found := {name: task for name, task in spec.tasks.items() if task.messages}):
        raise PluginError(f"plugin {spec.name!r} names the endpoint {CHAT}, but no task of it takes messages")
    return found


def speaks(spec: ModelSpec) -> bool:
    """Whether chat is answered aloud."""
    return CHAT in spec.endpoints and any("audio" in task.outputs for task in chat_tasks(spec).values())


def read_chat(body: Any, *, spec: ModelSpec) -> tuple[GenerateRequest, ChatForm]:
    """The native request that a chat request stands for, and how it is answered. Raises RequestError 400."""
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    check_values(body)
    _refuse_tools(body)
    own = {name: value for name, value in body.items() if name in field_names(ChatRequest)}
    chat = convert(own, ChatRequest)
    names: dict[str, str] = {}
    messages = [_message(turn, place=place, names=names) for place, turn in enumerate(chat.messages)]
    tools = list(chat.tools or ()) if chat.tool_choice != "none" else []
    outputs = list(dict.fromkeys(chat.modalities or ["text"]))
    if "audio" in outputs and "text" not in outputs:
        outputs.insert(0, "text")  # the transcript
    name = _task(spec, outputs=outputs, messages=messages, calls_tools=bool(tools))
    task = spec.tasks[name]
    _, params = split_params(body, ChatRequest, task=task, neutral=NEUTRAL)
    params |= _limits(chat, params, task=task, names=names)
    params |= _voice(chat, params, outputs=outputs, task=task, names=names)
    if chat.stream_options is not None and not chat.stream:
        raise RequestError("stream_options is for streams; set stream, or leave it out", param="stream_options")
    wire = GenerateRequest(
        model=chat.model, task=name, messages=messages, tools=tools, outputs=outputs, params=params, seed=chat.seed,
        stream=bool(chat.stream), timeout_s=chat.timeout_s,
    )  # fmt: skip
    return wire, (ChatEvents if chat.stream else ChatForm)(chat, outputs=outputs, names=names)


def _refuse_tools(body: Mapping[str, Any]) -> None:
    """Refuse what of OpenAI's tools cannot be kept to."""
    if body.get("functions"):
        message = "functions is what tools was called; give tools"
        raise RequestError(message, param="functions", code="unsupported_parameter")
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        message = f"tool_choice is {short(choice)}; no model is made to call a tool here: it must be one of none, auto"
        raise RequestError(message, param="tool_choice", code="unsupported_parameter")
    if body.get("tools") and body.get("parallel_tool_calls") is False:
        message = "parallel_tool_calls is false, but nothing keeps a model from several calls; leave it out"
        raise RequestError(message, param="parallel_tool_calls", code="unsupported_parameter")


def _task(spec: ModelSpec, *, outputs: list[str], messages: list[ChatMessage], calls_tools: bool) -> str:
    """The first chat task that gives these outputs, if there is one of those that take all parts."""
    found = [name for name, task in chat_tasks(spec).items() if {*outputs} <= {*task.outputs}]
    if not found:
        tasks = chat_tasks(spec).values()
        known = " or ".join(", ".join(name for name in task.outputs if name != "tensors") for task in tasks)
        raise RequestError(f"modalities are {', '.join(outputs)}; this model gives: {known}", param="modalities")
    found = (calls_tools and [name for name in found if spec.tasks[name].tools]) or found
    kinds = {part.__struct_config__.tag for message in messages for part in message.parts}
    return next((name for name in found if kinds <= {*spec.tasks[name].inputs}), found[0])


def _message(turn: ChatTurn, *, place: int, names: dict[str, str]) -> ChatMessage:
    """A native message. `names` gets what its fields were called."""
    at = f"messages.{place}"
    content: list[tuple[str, Content]] = []
    if isinstance(turn.content, str):
        content.append((f"{at}.content", TextContent(text=turn.content)))
    else:
        content += [(f"{at}.content.{number}", part) for number, part in enumerate(turn.content or ())]
    content += _spoken(turn, at=f"{at}.audio")
    content += [(f"{at}.images.{number}", part) for number, part in enumerate(turn.images or ())]
    if turn.content is None and not content and not turn.tool_calls:
        raise RequestError(f"{at} has no content; give a text or parts", param=f"{at}.content")
    parts = []
    for number, (name, part) in enumerate(content):
        kind, source = _source(part)
        names[f"{at}.content.{number}.data"] = f"{name}.{source}"
        names[f"{at}.content.{number}"] = name
        parts.append(kind)
    role = "system" if turn.role == "developer" else turn.role
    return ChatMessage(
        role=role, content=parts, tool_calls=turn.tool_calls or [], tool_call_id=turn.tool_call_id,
        reasoning_content=turn.reasoning_content,
    )  # fmt: skip


def _spoken(turn: ChatTurn, *, at: str) -> list[tuple[str, Content]]:
    """The transcript of an earlier answer's sound, where it is not the message's text already."""
    if turn.audio is None:
        return []
    said = turn.audio.transcript
    if said is None:
        message = f"{at} has no transcript, and answers are not kept under their id; "
        message += "send the transcript too, or the text as the content and no audio"
        raise RequestError(message, param=f"{at}.transcript", code="unsupported_value")
    if turn.role != "assistant" or turn.content not in (None, said):
        problem = "is not the content" if turn.role == "assistant" else f"is an assistant's, and the role {turn.role}"
        raise RequestError(f"{at}: the transcript {problem}; leave audio out", param=at)
    return [(f"{at}.transcript", TextContent(text=said))] if turn.content is None else []


def _source(part: Content) -> tuple[native.Input, str]:
    """A native part, and what its `data` was called."""
    if isinstance(part, TextContent):
        return native.TextInput(text=part.text), "text"
    if isinstance(part, SoundContent):
        data = f"data:audio/{part.input_audio.format};base64,{part.input_audio.data}"
        return native.AudioInput(data=data), "input_audio.data"
    name = str(part.__struct_config__.tag)
    given: str | UrlFields = getattr(part, name)
    source, place = (given, name) if isinstance(given, str) else (given.url, f"{name}.url")
    if isinstance(part, VideoContent):
        more = {field: getattr(part, field) for field in ("fps", "num_frames", "frame_indices")}
        return native.VideoInput(data=source, **more), place
    return (native.ImageInput if isinstance(part, ImageContent) else native.AudioInput)(data=source), place


def _limits(chat: ChatRequest, params: Mapping[str, Any], *, task: Task, names: dict[str, str]) -> dict[str, Any]:
    """Parameters that OpenAI spells in two ways or two fields."""
    found: dict[str, Any] = {}
    if chat.max_completion_tokens is not None:
        check_param("max_tokens", task=task, param="max_completion_tokens")
        if params.get("max_tokens", chat.max_completion_tokens) != chat.max_completion_tokens:
            message = f"max_tokens is {params['max_tokens']}, and max_completion_tokens {chat.max_completion_tokens}; "
            raise RequestError(message + "they mean the same: leave one out", param="max_completion_tokens")
        found["max_tokens"] = chat.max_completion_tokens
        names["params.max_tokens"] = "max_completion_tokens"
    if chat.top_logprobs is not None and not chat.logprobs:
        raise RequestError("top_logprobs needs logprobs; set that to true", param="top_logprobs")
    if chat.logprobs:
        check_param("logprobs", task=task, param="logprobs")
        found["logprobs"] = chat.top_logprobs or 0
        names["params.logprobs"] = "top_logprobs"
    return found


def _voice(
    chat: ChatRequest, params: Mapping[str, Any], *, outputs: list[str], task: Task, names: dict[str, str]
) -> dict[str, Any]:
    if chat.audio is None:
        return {}
    if "audio" not in outputs:
        raise RequestError("audio is given, but modalities does not name it; add it there", param="audio")
    is_raw = chat.audio.format == "pcm16"
    if chat.stream and not is_raw:
        message = f"audio.format is {chat.audio.format!r}; streams carry 'pcm16' alone"
        raise RequestError(message, param="audio.format")
    check_format("pcm" if is_raw else chat.audio.format, is_streamed=bool(chat.stream), param="audio.format")
    if chat.audio.voice is None:
        return {}
    name = next((name for name in ("voice", "speaker") if name in field_names(task.params)), "voice")
    check_param(name, task=task, param="audio.voice")
    if params.get(name, chat.audio.voice) != chat.audio.voice:
        message = f"{name} is {short(params[name])}, and audio.voice {short(chat.audio.voice)}; "
        raise RequestError(message + "they mean the same: leave one out", param=name)
    names[f"params.{name}"] = "audio.voice"
    return {name: chat.audio.voice}


# ---- answers ----------------------------------------------------------------------------------------------------


def token_usage(usage: Mapping[str, int]) -> dict[str, Any]:
    """OpenAI's `usage`; what else the model counts stands beside it."""
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    found: dict[str, Any] = {**usage, "total_tokens": total}
    if "reasoning_tokens" in found:
        found["completion_tokens_details"] = {"reasoning_tokens": found.pop("reasoning_tokens")}
    if "cached_tokens" in found:
        found["prompt_tokens_details"] = {"cached_tokens": found.pop("cached_tokens")}
    return found


class ChatForm(Form):
    """One JSON object with a choice for each of `n`: text, reasoning, pictures and sound of one in one message."""

    media_type = JSON

    def __init__(self, chat: ChatRequest, *, outputs: list[str], names: Mapping[str, str]) -> None:
        self.name = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.outputs = outputs
        self._format = "wav" if chat.audio is None else chat.audio.format.replace("pcm16", "pcm")
        self._names = {**names, "outputs": "modalities", "inputs": "messages"}

    def worded(self, error: RequestError) -> RequestError:
        return reworded(error, names=self._names)

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        return {"X-Seed": str(request.seed)}

    def piece(self, chunk: Chunk) -> bytes:
        raise NotImplementedError("a whole answer has no pieces")

    def whole(self, outputs: Outputs, result: Result) -> tuple[bytes, dict[str, str]]:
        joined = outputs.joined(indices=result.indices)
        choices = []
        for index, reason in sorted(result.indices.items()):
            own = [chunk for chunk in joined if chunk.index == index]
            logprobs = [chunk.logprobs for chunk in own if isinstance(chunk, TextChunk) and chunk.channel == "answer"]
            message = self._message(own, index=index)
            choice = {"index": index, "message": message, "logprobs": _logprobs(*logprobs)}
            choices.append(choice | {"finish_reason": _reason(reason, has_called="tool_calls" in message)})
        body = self._head("chat.completion", outputs.request) | {"choices": choices, "usage": token_usage(result.usage)}
        return msgspec.json.encode(body), self.headers(outputs.request, first=None, result=result)

    def _head(self, kind: str, request: Request) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": request.model}

    def _message(self, chunks: list[Any], *, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        images, calls = [], list[dict[str, Any]]()
        for chunk in chunks:
            if isinstance(chunk, TextChunk):
                message["content" if chunk.channel == "answer" else "reasoning_content"] = chunk.text
            elif isinstance(chunk, ImageChunk):
                images.append(_image(chunk))
            elif isinstance(chunk, ToolCallChunk):
                calls.append(self._call(chunk, number=len(calls)))
            elif isinstance(chunk, AudioChunk) and len(chunk.samples):
                message["audio"] = self._sound(chunk)
        if "audio" in message:
            message["audio"]["transcript"] = message["content"] or ""
        elif "audio" in self.outputs:
            _check_spoken(message["content"] or "", index=index)
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message | ({"images": images} if images else {})

    def _call(self, chunk: ToolCallChunk, *, number: int) -> dict[str, Any]:
        name = f"call-{self.name.removeprefix('chatcmpl-')}-{chunk.index}-{number}"
        return {"id": name, "type": "function", "function": {"name": chunk.name, "arguments": chunk.arguments}}

    def _audio_id(self, index: int) -> str:
        return f"audio-{self.name.removeprefix('chatcmpl-')}-{index}"

    def _sound(self, chunk: AudioChunk) -> dict[str, Any]:
        encoder = open_encoder(self._format, sample_rate=chunk.sample_rate, num_samples=len(chunk.samples))
        data = encoder.feed(chunk.samples) + encoder.finish()
        return self._sound_fields(chunk.index, sample_rate=encoder.sample_rate) | {"data": data}

    def _sound_fields(self, index: int, **fields: Any) -> dict[str, Any]:
        """What is said of a sound. It has expired when it is sent: nothing is kept for later turns."""
        return {"id": self._audio_id(index), "expires_at": self.created, **fields}


class ChatEvents(ChatForm):
    """The same as server-sent events: for each choice its role, then deltas, and last why it ended; usage; [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, chat: ChatRequest, *, outputs: list[str], names: Mapping[str, str]) -> None:
        super().__init__(chat, outputs=outputs, names=names)
        self._include_usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
        self._is_begun: set[int] = set()
        self._num_calls: Counter[int] = Counter()
        self._texts: dict[int, str] = {}  # of choices that are to be spoken
        self._spoken: set[int] = set()
        self._fields: dict[str, Any] = {}

    def begins(self, chunk: Chunk) -> bool:
        return not isinstance(chunk, ProgressChunk)

    def headers(self, request: Request, *, first: Chunk | None, result: Result | None) -> dict[str, str]:
        self._fields = self._head("chat.completion.chunk", request)
        return super().headers(request, first=first, result=result) | {"Cache-Control": "no-cache"}

    def piece(self, chunk: Chunk) -> bytes:
        if isinstance(chunk, TensorChunk | ProgressChunk):
            return b""
        logprobs = _logprobs(chunk.logprobs) if isinstance(chunk, TextChunk) and chunk.channel == "answer" else None
        delta = self._delta(chunk)
        if not delta and logprobs is None:
            return b""
        return self._begin(chunk.index) + self._event(chunk.index, delta or {"content": ""}, logprobs=logprobs)

    def end(self, request: Request, *, result: Result | None, error: RequestError | None) -> bytes:
        if error is not None:
            return server_sent(error_fields(self.worded(error)))
        assert result is not None
        for index in {*self._texts} - self._spoken:
            _check_spoken(self._texts[index], index=index)
        events = [self._begin(index) for index in result.indices]
        for index, reason in sorted(result.indices.items()):
            if index in self._spoken:
                events.append(self._event(index, {"audio": self._sound_fields(index)}))
            events.append(self._event(index, {}, reason=_reason(reason, has_called=index in self._num_calls)))
        if self._include_usage:
            events.append(server_sent(self._fields | {"choices": [], "usage": token_usage(result.usage)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def _begin(self, index: int) -> bytes:
        if index in self._is_begun:
            return b""
        self._is_begun.add(index)
        return self._event(index, {"role": "assistant", "content": ""})

    def _delta(self, chunk: TextChunk | ImageChunk | AudioChunk | ToolCallChunk) -> dict[str, Any]:
        if isinstance(chunk, ToolCallChunk):
            number = self._num_calls[chunk.index]
            self._num_calls[chunk.index] += 1
            return {"tool_calls": [{"index": number, **self._call(chunk, number=number)}]}
        if isinstance(chunk, ImageChunk):
            return {"images": [_image(chunk) | ({"partial": True} if chunk.partial else {})]}
        if isinstance(chunk, AudioChunk):
            data = encode_media(chunk, is_piece=True)[1]
            sound = {"id": self._audio_id(chunk.index), "data": data, "sample_rate": chunk.sample_rate}
            if not len(chunk.samples):
                return {}
            self._spoken.add(chunk.index)
            return {"audio": sound}
        if not chunk.text:
            return {}
        if chunk.channel == "reasoning":
            return {"reasoning_content": chunk.text}
        if "audio" not in self.outputs:
            return {"content": chunk.text}
        self._texts[chunk.index] = self._texts.get(chunk.index, "") + chunk.text
        return {"content": chunk.text, "audio": {"id": self._audio_id(chunk.index), "transcript": chunk.text}}

    def _event(
        self, index: int, delta: Mapping[str, Any], *, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return server_sent(self._fields | {"choices": [choice]} | usage)


def _check_spoken(text: str, *, index: int) -> None:
    """Raises RequestError for a text that was to be spoken, and was not."""
    if text.strip():
        message = f"the model gave no sound with answer {index}, {short(text)}; try another seed, or ask for text alone"
        raise RequestError(message, param="modalities", code="no_audio")


def _reason(reason: str, *, has_called: bool) -> str:
    """OpenAI knows that an answer was cut, that it calls tools, and else that it ended."""
    return "length" if reason == "length" else "tool_calls" if has_called else "stop"


def _image(chunk: ImageChunk) -> dict[str, Any]:
    data = base64.b64encode(encode_media(chunk)[1]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _logprobs(*texts: Any) -> dict[str, Any] | None:
    entries = [entry for text in texts for entry in text]
    return {"content": entries, "refusal": None} if entries else None
