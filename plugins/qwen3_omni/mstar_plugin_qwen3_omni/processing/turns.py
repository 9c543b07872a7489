"""Requests to prompts: messages through the chat template, or parts with token ids as they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mstar.errors import RequestError
from mstar.types import AudioPart, ImagePart, Message, Part, Request, TensorPart, TextPart, TokensPart, VideoPart
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.processing import media
from mstar_plugin_qwen3_omni.processing.media import Sight, Sound
from mstar_plugin_qwen3_omni.processing.prompt import TEXT, Prompt
from mstar_plugin_qwen3_omni.processing.text import THINKING, ChatTemplate, Slot, Words

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture, a video, a sound, or a video with its sound."""

    param: str
    sight: Sight | None = None
    sound: Sound | None = None

    @property
    def kind(self) -> str:
        """As parts and templates call it."""
        if self.sight is None:
            return "audio"
        return "video" if self.sight.seconds_per_frame else "image"


Content = str | list[int] | Medium


class Reader:
    """Makes prompts of requests."""

    def __init__(self, config: OmniConfig) -> None:
        self.config = config
        self.words = Words(config)
        self._template = ChatTemplate(config, self.words)
        tokens = config.thinker.tokens
        self._pads = {tokens.image: "image", tokens.video: "video", tokens.audio: "audio"}

    def read(self, request: Request) -> Prompt:
        """The prompt of a request. Raises RequestError that names the part."""
        variables = request.params.chat_template_kwargs
        enable_thinking = None if variables is None else variables.enable_thinking
        if not request.messages and any(isinstance(part, TokensPart) for part in request.parts):
            if enable_thinking is not None:
                problem = f"{THINKING} is for chat templates, and token_ids pass by those; leave it out"
                raise RequestError(problem, param=THINKING)
            return self._as_given(self._contents(request.parts, request, at="inputs"))
        turns, inserted = list[dict[str, Any]](), list[list[int]]()
        queue: deque[Medium] = deque()
        for number, message in enumerate(request.messages or (Message("user", request.parts),)):
            at = f"messages.{number}" if request.messages else "inputs"
            if message.role not in ROLES:
                problem = f"{at}.role is {message.role[:60]!r}; known: {', '.join(ROLES)}"
                raise RequestError(problem, param=f"{at}.role")
            where = f"{at}.content" if request.messages else at
            contents = self._contents(message.parts, request, at=where)
            if message.role == "user" and not any(not isinstance(one, str) or one.strip() for one in contents):
                raise RequestError(f"{where} is empty or blank; write some, or give media", param=where)
            turns.append({"role": message.role, "content": _as_template(contents), **_more(message)})
            inserted += [one for one in contents if isinstance(one, list)]
            queue += [one for one in contents if isinstance(one, Medium)]
        pieces = self._template.pieces(turns, tools=request.tools, enable_thinking=enable_thinking)
        return self._joined(pieces, inserted, queue)

    # ---- parts ------------------------------------------------------------------------------------------

    def _contents(self, parts: Iterable[Part], request: Request, *, at: str) -> list[Content]:
        """What parts are. Frames with sound behind them are one, if it is to be heard: files have theirs with them."""
        found, is_film = list[Content](), request.params.use_audio_in_video
        for number, part in enumerate(parts):
            one, last = self._content(part, param=f"{at}.{number}"), found[-1] if found else ""
            if not (is_film and isinstance(last, Medium) and isinstance(one, Medium)):
                found.append(one)
            elif last.kind == "video" and last.sound is None and one.kind == "audio":
                found[-1] = Medium(last.param, last.sight, one.sound)
            else:
                found.append(one)
        return found

    def _content(self, part: Part, *, param: str) -> Content:
        if isinstance(part, TextPart):
            return part.text
        if isinstance(part, TokensPart):
            return self._checked_ids(part.ids, param=param)
        if isinstance(part, ImagePart):
            return Medium(param, media.see(part, self.config, param=param))
        if isinstance(part, VideoPart):
            sound = None if part.sound is None else media.hear(part.sound, self.config, param=param)
            return Medium(param, media.watch(part, self.config, param=param), sound)
        if isinstance(part, TensorPart):
            part = media.samples_of(part.tensor, self.config.sound, param=param)
        assert isinstance(part, AudioPart)
        return Medium(param, sound=media.hear(part, self.config, param=param))

    def _checked_ids(self, ids: list[int], *, param: str) -> list[int]:
        size = self.config.thinker.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if not ids or wrong is not None:
            problem = "is empty" if not ids else f"contains {wrong}"
            raise RequestError(f"{param} {problem}; give ids of 0..{size - 1}, at least one", param=param)
        return list(ids)

    # ---- prompts ----------------------------------------------------------------------------------------

    def _joined(self, pieces: list[int | str | Slot], inserted: list[list[int]], queue: deque[Medium]) -> Prompt:
        """What the template made of messages."""
        prompt = Prompt(self.config)
        for piece in pieces:
            if isinstance(piece, Slot):
                prompt.add_text(inserted[piece])
            elif isinstance(piece, str):
                prompt.add_text(self.words.encode(piece))
            elif (kind := self._pads.get(piece)) is not None and queue and queue[0].kind == kind:
                self._add(prompt, queue.popleft())
            else:
                prompt.add_text([piece])
        if queue:
            param = queue[0].param
            raise RequestError(f"the model's chat template has no place for {param}; leave it out", param=param)
        return prompt

    def _as_given(self, contents: list[Content]) -> Prompt:
        """Ids as they are. Media go where ids have their tokens, one for each row; where there are none, where they
        stand, framed."""
        prompt = Prompt(self.config)
        queue = deque(one for one in contents if isinstance(one, Medium))
        has_places = any(token in self._pads for one in contents if isinstance(one, list) for token in one)
        for content in contents:
            if isinstance(content, str):
                prompt.add_text(self.words.encode(content))
            elif isinstance(content, list):
                self._add_ids(prompt, content, queue)
            elif not has_places:
                self._add_framed(prompt, queue.popleft())
        if queue:
            message = f"token_ids have no tokens left for {queue[0].param}; leave it out, or the other tokens of media"
            raise RequestError(message, param=queue[0].param)
        if prompt.kinds[-1] != TEXT:
            message = "the prompt ends with a token of media; close their frame (<|vision_end|>, <|audio_end|>)"
            raise RequestError(message, param="inputs")
        return prompt

    def _add_ids(self, prompt: Prompt, ids: list[int], queue: deque[Medium]) -> None:
        at = 0
        while at < len(ids):
            if ids[at] not in self._pads:
                prompt.add_text([ids[at]])
                at += 1
                continue
            if not queue:
                message = f"token_ids have {self._pads[ids[at]]} tokens that no part is left for; give one"
                raise RequestError(message, param="inputs")
            medium, start = queue.popleft(), len(prompt.ids)
            self._add(prompt, medium, framed=False)
            end = at + len(prompt.ids) - start
            if prompt.ids[start:] != ids[at:end]:
                message = (
                    f"{medium.param} ({medium.kind}) takes {end - at} tokens of its kind, in their order; token_ids "
                )
                raise RequestError(message + f"have others from place {at} on", param=medium.param)
            at = end

    def _add_framed(self, prompt: Prompt, medium: Medium) -> None:
        tokens = self.config.thinker.tokens
        is_seen = medium.sight is not None
        prompt.add_text([tokens.vision_start if is_seen else tokens.audio_start])
        self._add(prompt, medium)
        prompt.add_text([tokens.vision_end if is_seen else tokens.audio_end])

    def _add(self, prompt: Prompt, medium: Medium, *, framed: bool = True) -> None:
        """`framed`: a film's sound has its own frame inside the video's."""
        tokens = self.config.thinker.tokens
        if medium.sight is not None and medium.sound is not None:
            if framed:
                prompt.add_text([tokens.audio_start])
            prompt.add_film(medium.sight, medium.sound)
            if framed:
                prompt.add_text([tokens.audio_end])
        elif medium.sight is not None:
            prompt.add_sight(medium.sight)
        elif medium.sound is not None:
            prompt.add_sound(medium.sound)


def _more(message: Message) -> dict[str, Any]:
    """A turn's thoughts, and what it has to do with calls of tools, as OpenAI's API and templates have it."""
    named = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
    calls = [{"id": name, "type": "function", "function": called} for name, called in named]
    answered = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    thought = {"reasoning_content": message.reasoning} if message.reasoning else {}
    return ({"tool_calls": calls} if calls else {}) | answered | thought


def _as_template(contents: list[Content]) -> str | list[dict[str, Any]]:
    """A text alone is one, and so is none; else parts."""
    if not contents:
        return ""
    if len(contents) == 1 and isinstance(contents[0], str):
        return contents[0]
    parts: list[dict[str, Any]] = []
    for one in contents:
        if isinstance(one, str):
            parts.append({"type": "text", "text": one})
        else:
            parts.append({"type": one.kind} if isinstance(one, Medium) else {"type": "ids"})
    return parts
