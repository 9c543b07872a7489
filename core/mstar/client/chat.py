"""Chat and pictures by OpenAI's routes: what is sent, and what answers and their events come to. Knows no sockets."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from mstar.client import parts
from mstar.client.errors import ClientError, StreamBroken
from mstar.client.results import Event, Text, header_number, read_output
from mstar.client.wire import Call, Lines, decode_object, read_event
from mstar.types import ImageChunk

CHAT, GENERATIONS, EDITS = "/v1/chat/completions", "/v1/images/generations", "/v1/images/edits"
Messages = str | Sequence[Mapping[str, Any]]
_DONE = b"[DONE]"
_PLAYERS = (("ffplay", "-nodisp", "-autoexit"), ("afplay",), ("paplay",), ("aplay",))


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One of `n` answers. `images`: uint8 (height, width, 3). `audio`: a file, or of a stream 16-bit samples.

    `tool_calls` are as OpenAI has them.
    """

    text: str = ""
    reasoning: str = ""
    images: list[np.ndarray] = field(default_factory=list)
    audio: bytes = b""
    sample_rate: int | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_streamed: bool = False

    def save_audio(self, path: str | Path) -> None:
        """Write the sound: the file that came, or of a stream a WAV file. Raises ClientError if there is none."""
        if not self.audio:
            raise ClientError('the answer has no sound; ask for modalities=["text", "audio"]')
        if not self.is_streamed:
            Path(path).write_bytes(self.audio)
            return
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, self.sample_rate or 0, 0, "NONE", ""))
            file.writeframes(self.audio)

    def play_audio(self) -> None:
        """Play the sound, with the first player that this machine has. Raises ClientError if it has none."""
        found = next((command for command in _PLAYERS if shutil.which(command[0])), None)
        if found is None:
            raise ClientError(f"no player is installed here; install {_PLAYERS[0][0]}, or use save_audio")
        with tempfile.TemporaryDirectory() as folder:
            self.save_audio(file := Path(folder) / "answer.wav")
            subprocess.run([*found, str(file)], check=True, capture_output=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chat(Sequence[Choice]):
    """An answer to `chat`: its choices, of which the first one's fields are its own too.

    Args:
        raw: the JSON itself; of a stream, that of its last event.
    """

    choices: tuple[Choice, ...]
    usage: Mapping[str, Any]
    seed: int | None
    raw: Mapping[str, Any] = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Choice, name):
            raise AttributeError(f"a chat's answer has no {name!r}")
        return getattr(self.choices[0], name)

    def __getitem__(self, place: Any) -> Any:
        return self.choices[place]

    def __len__(self) -> int:
        return len(self.choices)


class Images(list[np.ndarray]):
    """Pictures, uint8 (height, width, 3) each, with the answer's `seed`, `usage` and JSON (`raw`)."""

    seed: int | None
    usage: Mapping[str, Any]
    raw: Mapping[str, Any]

    @classmethod
    def read(cls, response: httpx.Response) -> Images:
        fields = decode_object(response.content)
        found = cls(_image({"data": entry["b64_json"]}).pixels for entry in fields["data"])
        found.seed, found.usage, found.raw = header_number(response.headers, "x-seed"), fields["usage"], fields
        return found


# ---- calls ------------------------------------------------------------------------------------------------------


def chat(messages: Messages, fields: Mapping[str, Any]) -> Call[Chat]:
    """A whole answer."""
    if fields.get("stream"):
        raise TypeError("stream is for stream_chat; chat gives a whole answer")
    return Call(method="POST", path=CHAT, body={"messages": _messages(messages), **fields}, read=_read)


def stream_chat(messages: Messages, fields: Mapping[str, Any]) -> Call[ChatDecoder]:
    """An answer in events."""
    body = {"messages": _messages(messages), **fields, "stream": True, "stream_options": {"include_usage": True}}
    return Call(method="POST", path=CHAT, body=body, read=ChatDecoder)


def generate_images(prompt: str, fields: Mapping[str, Any], *, image: Any = None) -> Call[Images]:
    """Pictures of a text, or of a text and one or several images."""
    if fields.get("stream"):
        raise TypeError("pictures come whole here; use stream for previews")
    images = {}
    if image is not None:
        images["image"] = [parts.image(one)["data"] for one in (image if isinstance(image, list | tuple) else [image])]
    path = GENERATIONS if image is None else EDITS
    return Call(method="POST", path=path, body={"prompt": prompt, **images, **fields}, read=Images.read)


def _messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages as the route takes them; a string is one of the user. Parts may be those of `generate`."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            message = {**message, "content": [_part(part) for part in content]}
        found.append(dict(message))
    return found


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.get("type") in ("image", "audio", "video") and "data" in part:
        kind = f"{part['type']}_url"
        rest = {name: value for name, value in part.items() if name not in ("type", "data")}
        return {"type": kind, kind: {"url": part["data"]}, **rest}
    return part


# ---- answers ----------------------------------------------------------------------------------------------------


def _read(response: httpx.Response) -> Chat:
    fields = decode_object(response.content)
    choices = []
    for entry in fields["choices"]:
        choice = Choice(finish_reason=entry["finish_reason"])
        for _ in _taken(entry["message"], choice, index=entry["index"]):
            pass
        choice.logprobs = (entry["logprobs"] or {}).get("content") or []
        choices.append(choice)
    seed = header_number(response.headers, "x-seed")
    return Chat(choices=tuple(choices), usage=fields["usage"], seed=seed, raw=fields)


def _taken(message: Mapping[str, Any], choice: Choice, *, index: int) -> Iterator[Event]:
    """Add a message, or a part of one, to a choice; its events."""
    if text := message.get("reasoning_content"):
        choice.reasoning += text
        yield Text(text, index=index, channel="reasoning")
    if text := message.get("content"):
        choice.text += text
        yield Text(text, index=index)
    for entry in message.get("images", ()):
        data, is_partial = entry["image_url"]["url"].partition(",")[2], entry.get("partial", False)
        image = _image({"data": data, "index": index, "partial": is_partial})
        choice.images += [] if is_partial else [image.pixels]
        yield image
    choice.tool_calls += message.get("tool_calls") or ()
    audio = message.get("audio") or {}
    if "data" in audio:
        choice.sample_rate = audio.get("sample_rate")
        choice.audio += base64.b64decode(audio["data"])
        if "transcript" not in audio:  # a piece
            yield read_output({**audio, "format": "pcm", "index": index}, kind="audio")


def _image(fields: Mapping[str, Any]) -> ImageChunk:
    found: ImageChunk = read_output(fields, kind="image")
    return found


class ChatDecoder:
    """Server-sent events to `Text` (of two channels), `Image` (a preview if `partial`) and `Audio`.

    Attributes:
        result: the whole answer, once the stream has ended.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._headers = response.headers
        self._lines = Lines()
        self._choices: dict[int, Choice] = {}
        self._last: dict[str, Any] = {}
        self._is_done = False

    @property
    def result(self) -> Chat:
        if not self._is_done:
            raise ClientError("the stream has not ended yet; the result comes after its last event")
        choices = tuple(choice for _, choice in sorted(self._choices.items()))
        seed = header_number(self._headers, "x-seed")
        return Chat(choices=choices, usage=self._last.get("usage") or {}, seed=seed, raw=self._last)

    def feed(self, data: bytes) -> Iterator[Event]:
        for line in self._lines.feed(data):
            content = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if content == _DONE:
                self._is_done = True
                continue
            self._last = read_event(content, headers=self._headers)
            for entry in self._last["choices"]:
                choice = self._choices.setdefault(entry["index"], Choice(is_streamed=True))
                choice.finish_reason = entry["finish_reason"] or choice.finish_reason
                choice.logprobs += (entry["logprobs"] or {}).get("content") or []
                yield from _taken(entry["delta"], choice, index=entry["index"])

    def end(self) -> None:
        if not self._is_done:
            raise StreamBroken("the stream ended without [DONE]; what came of it is not the whole")
