"""The echo model's CPU side: requests to walk inputs, emissions to chunks. Runs in the server, off the event loop.

Tokens are the bytes of UTF-8, between BOS and EOS.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.layers.sampling import draw_key, normal
from mstar.plugin import (
    AudioChunk,
    AudioPart,
    Chunk,
    Emission,
    Encoded,
    ImageChunk,
    ImagePart,
    Logprob,
    Part,
    Processor,
    ProgressChunk,
    Request,
    SamplingParams,
    TensorChunk,
    TensorPart,
    TextChunk,
    TextPart,
    TokenLogprob,
    TokensPart,
    VideoPart,
)
from mstar.plugin.media import content_key
from mstar.plugin.tools import ToolCallReader
from mstar_plugin_echo.config import (
    BOS,
    EOS,
    IMAGE_FEATURES,
    MODULUS,
    MOST_LOGPROBS,
    SAMPLE_RATE,
    SAMPLES_PER_TOKEN,
    SEPARATOR,
    VOCAB_SIZE,
    NestedParams,
    sampling,
)

NUM_LATENTS = 6


@dataclass(slots=True)
class DecodeState:
    """What one request's decoding remembers: how much each item has given, and its text's unfinished character."""

    request: Request
    counts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    characters: dict[tuple[int, ...], codecs.IncrementalDecoder] = field(default_factory=dict)
    readers: dict[int, ToolCallReader] = field(default_factory=dict)  # of outputs that may call tools


class EchoProcessor(Processor):
    """One encoder per task; decoding goes by the emission's name."""

    def encode(self, request: Request) -> Encoded:
        encoded = ENCODERS[request.task](request)
        longest = max(encoded.kv_tokens.values(), default=0)
        if longest > self.limits.max_model_len and getattr(request.params, "kind", "") != "kv":
            raise RequestError(
                f"prompt and output need up to {longest} tokens; the limit is {self.limits.max_model_len}; "
                "shorten the input, ask for less, or raise --max-model-len",
                param="inputs",
                code="context_length_exceeded",
            )
        return encoded

    def start(self, request: Request, encoded: Encoded) -> DecodeState:
        return DecodeState(request)

    def decode(self, state: DecodeState, emission: Emission) -> Iterable[Chunk]:
        if emission.final:
            yield from self._flush(state, emission)
        elif emission.name == "text":
            yield self._text(state, emission)
        elif emission.name == "said":
            yield from self._said(state, emission)
        elif emission.name == "strokes":
            yield from _picture(state, emission)
        elif emission.name == "wave":
            yield AudioChunk(emission.value.numpy(), SAMPLE_RATE)
        elif emission.name == "progress":
            yield ProgressChunk(int(emission.value), state.request.params.steps)
        else:
            if getattr(state.request.params, "kind", "") == "decode":
                raise RuntimeError("decode was told to fail")
            value = emission.value
            # Parts are joined along their first dimension: a number is one entry of it.
            yield TensorChunk(emission.name, value[None] if value.dim() == 0 else value, _index(state, emission))

    def step(self, name: str, request: Request, outputs: dict[str, Any]) -> dict[str, Any]:
        """`reencode`: what the draft said, in capitals, after the prompt's last token."""
        if name != "reencode":
            return super().step(name, request, outputs)
        if request.params.fail_step:
            raise RuntimeError("the step was told to fail")
        said = bytes(token for token in map(int, outputs["draft"]) if token < BOS)
        return {"ids": _ids([_prompt(request)[-1], *said.upper()]), "last": torch.tensor(SEPARATOR)}

    def finish(self, state: DecodeState, result: dict[str, Any]) -> None:
        think = getattr(state.request.params, "think", 0)
        if think:
            result["usage"]["reasoning_tokens"] = sum(min(count, think) for count in state.counts.values())

    def _said(self, state: DecodeState, emission: Emission) -> Iterable[Chunk]:
        params, number = state.request.params, state.counts[emission.path]
        state.counts[emission.path] += 1
        if number == params.think:
            yield from self._flush(state, emission)
        token = emission.value[0]
        if params.say is not None:
            said = params.say.encode()
            token = torch.tensor(said[number] if number < len(said) else BOS)
        chunk = self._text(state, replace(emission, value=token))
        if params.logprobs is not None:
            chunk = replace(chunk, logprobs=(_logprob(emission.value, params.logprobs),))
        if number < params.think:
            yield replace(chunk, channel="reasoning")
            return
        if state.request.tools:
            reader = state.readers.setdefault(chunk.index, ToolCallReader())
            yield from reader.feed(chunk)
        else:
            yield chunk
        if "audio" in state.request.outputs and not params.mute and token < BOS:
            gain = 2 if params.voice == "loud" else 1
            tone = np.full(SAMPLES_PER_TOKEN, gain * int(token) / 1024, dtype=np.float32)
            yield AudioChunk(tone, SAMPLE_RATE, chunk.index)

    def _text(self, state: DecodeState, emission: Emission) -> TextChunk:
        token = int(emission.value)
        decoder = state.characters.get(emission.path)
        if decoder is None:
            decoder = state.characters[emission.path] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(bytes([token])) if token < BOS else ""
        return TextChunk(text, (token,), _index(state, emission))

    def _flush(self, state: DecodeState, emission: Emission) -> Iterable[Chunk]:
        decoder = state.characters.pop(emission.path, None)
        rest = decoder.decode(b"", final=True) if decoder else ""
        if (reader := state.readers.pop(_index(state, emission), None)) is not None:
            yield from reader.feed(TextChunk(rest, (), _index(state, emission)))
            yield from reader.flush()
        elif rest:
            is_thought = state.counts[emission.path] <= getattr(state.request.params, "think", -1)
            channel: Literal["answer", "reasoning"] = "reasoning" if is_thought else "answer"
            yield TextChunk(rest, (), _index(state, emission), channel=channel)


def _index(state: DecodeState, emission: Emission) -> int:
    """Which of several outputs an item's emissions belong to: samples and producers have their own, texts join."""
    has_own = state.request.task in ("generate", "chunks_each", "chat", "draw")
    return emission.path[0] if has_own and emission.path else 0


def _logprob(said: Tensor, top: int) -> TokenLogprob:
    """What `lm.say` says of a token, with its `top` likeliest others."""

    def named(token: int) -> tuple[str, tuple[int, ...]]:
        data = bytes([token]) if token < BOS else f"<{token}>".encode()
        return data.decode(errors="replace"), tuple(data)

    ids, values = said[2 : 2 + MOST_LOGPROBS].int().tolist()[:top], said[2 + MOST_LOGPROBS :].tolist()[:top]
    (text, data), own = named(int(said[0])), float(said[1])
    likeliest = [(named(token), value) for token, value in zip(ids, values, strict=True)]
    return TokenLogprob(text, own, data, tuple(Logprob(name, value, spelt) for (name, spelt), value in likeliest))


def _picture(state: DecodeState, emission: Emission) -> Iterable[Chunk]:
    """The picture after a stroke: a preview where one is due, and after the last stroke the picture itself."""
    params, index = state.request.params, _index(state, emission)
    state.counts[emission.path] += 1
    number, steps = state.counts[emission.path], params.steps
    if index == 0:
        yield ProgressChunk(number, steps)
    due = [steps * place // (params.partial_images + 1) for place in range(1, params.partial_images + 1)]
    if params.preview_every:
        due += range(params.preview_every, steps, params.preview_every)
    if number < steps and number not in due:
        return
    height, width = _size(state.request)
    at = np.arange(height * width * 3, dtype=np.int64).reshape(height, width, 3)
    pixels = ((at + 1) * int(emission.value) // 7 % 256).astype(np.uint8)
    yield ImageChunk(pixels, index, partial=number < steps)
    if number == steps:
        yield TextChunk(f"{width}x{height}", (), index)


# ---- encoders -------------------------------------------------------------------------------------------


def encode_generate(request: Request) -> Encoded:
    return _sampled(request, _prompt(request, least=2))


def _sampled(request: Request, prompt: list[int]) -> Encoded:
    """`n` samples that go on from a prompt's last token."""
    params = request.params
    return Encoded(
        inputs={
            "ids": _ids(prompt[:-1]),
            "last": [torch.tensor(prompt[-1])] * params.n,
            "eos_at": -1 if params.eos_at is None else params.eos_at,
        },
        fields={"max_tokens": params.max_tokens},
        kv_tokens={"lm.main": len(prompt) - 1 + params.max_tokens},
        samplers={"main": sampling(params)},
        sampler_prompts={"main": prompt},
        prompt_token_ids=prompt,
    )


def encode_nested(request: Request) -> Encoded:
    params: NestedParams = request.params
    prompt = _prompt(request)
    return Encoded(
        inputs={"ids": _ids(prompt), "end_at": -1 if params.end_at is None else params.end_at},
        fields={"max_frames": params.max_frames},
        kv_tokens={"lm.main": len(prompt) + params.max_frames},
        samplers={
            "frame": SamplingParams(temperature=params.temperature),
            "depth": SamplingParams(temperature=params.depth_temperature, top_k=params.depth_top_k),
        },
        prompt_token_ids=prompt,
    )


def encode_branches(request: Request) -> Encoded:
    factors = {"two": torch.tensor(2), "three": torch.tensor(3), "five": torch.tensor(5)}
    return Encoded(
        inputs={"x": torch.tensor(sum(_text(request)) % MODULUS), **factors},
        fields={"steps": request.params.steps, "rounds": request.params.rounds},
    )


def encode_fanout(request: Request) -> Encoded:
    """Every text part is a group; `|` parts it into texts."""
    params = request.params
    prefix = [BOS, *params.prefix.encode()]
    replies, laps = cycle(params.reply_tokens), cycle(params.laps)
    groups, longest = [], 0
    for number, part in enumerate(request.parts):
        assert isinstance(part, TextPart)
        header = f"#{number}".encode()
        texts = []
        for text in part.text.encode().split(b"|"):
            if not text:
                raise RequestError(
                    "a group holds an empty text; put at least 1 byte between '|'", param=f"inputs.{number}"
                )
            reply = next(replies)
            texts.append(
                {
                    "ids": _ids(text),
                    "last": torch.tensor(SEPARATOR),
                    "reply_tokens": reply,
                    "laps": next(laps),
                }
            )
            longest = max(longest, len(prefix) + len(header) + len(text) + reply)
        groups.append({"header": _ids(header), "texts": texts})
    return Encoded(
        inputs={"prefix": _ids(prefix), "groups": groups},
        fields={"max_tokens": params.max_tokens},
        kv_tokens={"lm.main": longest},
        samplers={"main": SamplingParams(temperature=0)},
        prompt_token_ids=prefix,
    )


def encode_spans(request: Request) -> Encoded:
    """Text and image parts in order. `text_end`, (length, position), cuts before the last one.

    The two differ, for an image block takes one position.
    """
    params = request.params
    tokens, spans, keys, position, text_end = [BOS], [], [], 1, [1, 1]
    pixels: dict[int, Tensor] = {}
    latents = request.tensor("latents")
    for number, part in enumerate(request.parts):
        if isinstance(part, TensorPart) and part.name == "latents":
            continue
        start = len(tokens)
        text_end = [start, position]
        if isinstance(part, TensorPart):
            _check_features(part.tensor, param=f"inputs.{number}")
            pixels[start] = part.tensor
            tokens += [0] * part.tensor.shape[0]
            position += 1
            spans.append((start, len(tokens)))
            keys.append((start, len(tokens), hashlib.sha256(part.tensor.float().numpy().tobytes()).digest()))
        elif isinstance(part, TextPart):
            tokens += part.text.encode()
            position += len(tokens) - start
    if len(tokens) == 1:
        raise RequestError("the prompt is empty; give a text or image", param="inputs")
    if latents is None:
        key = torch.tensor(draw_key(request.seed, (), "latents"))
        latents = normal(key, torch.arange(NUM_LATENTS * IMAGE_FEATURES)).view(NUM_LATENTS, IMAGE_FEATURES)
    _check_features(latents, param="inputs")
    features, is_pixel = torch.zeros(len(tokens), IMAGE_FEATURES), torch.zeros(len(tokens), dtype=torch.bool)
    for start, block in pixels.items():
        features[start : start + block.shape[0]] = block.float()
        is_pixel[start : start + block.shape[0]] = True
    return Encoded(
        inputs={
            "ids": _ids(tokens),
            "pixels": features,
            "is_pixel": is_pixel,
            "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 2),
            "text_end": text_end,
            "latents": latents.float(),
            "scale": torch.tensor(params.scale),
            "last": torch.tensor(SEPARATOR),
        },
        fields={"steps": params.steps, "max_tokens": params.max_tokens},
        kv_tokens={"lm.main": len(tokens) + params.max_tokens, "lm.text": text_end[0]},
        samplers={"main": SamplingParams(temperature=0)},
        content_keys={"ids": keys},
        prompt_token_ids=tokens,
    )


def encode_chunks(request: Request) -> Encoded:
    params = request.params
    counts = [torch.tensor(steps, dtype=torch.int64) for steps in params.counts]
    if request.task == "chunks" and len(counts) != 1:
        raise RequestError(
            f"params.counts holds {len(counts)} producers; task chunks has 1, use chunks_each", param="params.counts"
        )
    producers = [{"counts": steps, "steps": len(steps)} for steps in counts]
    fields = {"size": params.size, "window": params.window, "stride": params.stride, "context": params.context}
    return Encoded(
        inputs={"counts": counts[0], "producers": producers, "base": torch.tensor(1000 * len(_text(request)))},
        fields={**fields, "follow_steps": params.follow_steps, "steps": len(counts[0])},
    )


def encode_trouble(request: Request) -> Encoded:
    params, prompt = request.params, _prompt(request)
    if params.kind == "encode":
        raise RequestError("encode was told to refuse", param="params.kind", code="told_to_fail")
    if params.kind == "encode_crash":
        raise RuntimeError("encode was told to fail")
    return Encoded(
        inputs={"ids": _ids(prompt), "x": torch.tensor(0)},
        fields={"steps": params.steps},
        kv_tokens={"lm.main": 10**9 if params.kind == "kv" else len(prompt)},
        prompt_token_ids=prompt,
    )


def encode_session(request: Request) -> Encoded:
    """`kv_tokens` counts what this turn adds: only the worker knows how long the session's sequence is."""
    params, text = request.params, _text(request)
    prompt = [SEPARATOR if request.resumed else BOS, *text]
    inputs: dict[str, Any] = {
        "ids": _ids(prompt[:-1]),
        "last": torch.tensor(prompt[-1]),
        "eos_at": -1 if params.eos_at is None else params.eos_at,
        "amount": torch.tensor(params.amount),
    }
    if not request.resumed:
        inputs["count"] = torch.tensor(0)
    return Encoded(
        inputs=inputs,
        fields={"max_tokens": params.max_tokens},
        kv_tokens={"lm.main": len(prompt) + params.max_tokens},
        samplers={"main": SamplingParams(temperature=0)},
        prompt_token_ids=prompt,
    )


def encode_states(request: Request) -> Encoded:
    params, prompt = request.params, _prompt(request, least=2)
    drafted = len(prompt) - 1 + params.draft_tokens
    return Encoded(
        inputs={"ids": _ids(prompt[:-1]), "last": torch.tensor(prompt[-1])},
        fields={"draft_tokens": params.draft_tokens, "max_tokens": params.max_tokens},
        kv_tokens={"lm.main": drafted + 1 + params.max_tokens, "lm.draft": drafted},
        samplers={"main": SamplingParams(temperature=0)},
        prompt_token_ids=prompt,
    )


def encode_media(request: Request) -> Encoded:
    facts = [media_facts(part) for part in request.parts]
    keys = [content_key(one) if request.params.cache else None for one in facts]
    return Encoded(inputs={"media": [{"facts": one, "key": key} for one, key in zip(facts, keys, strict=True)]})


def encode_chat(request: Request) -> Encoded:
    """A line for each message: its role, its text, and four bytes for every image, sound or video."""
    return _sampled(request, [BOS, *_conversation(request), SEPARATOR])


def encode_draw(request: Request) -> Encoded:
    params = request.params
    if params.preview_every and params.partial_images:
        message = "params.preview_every and params.partial_images are both given; leave one out"
        raise RequestError(message, param="params.partial_images")
    _size(request)
    prompt = _conversation(request)
    seeds = [f"{request.seed} {params.scale} {item}".encode() + prompt for item in range(params.n)]
    items = [torch.tensor(1 + zlib.crc32(seed) % (MODULUS - 1)) for seed in seeds]
    fields = {"steps": params.steps}
    return Encoded(inputs={"x": items, "two": torch.tensor(2)}, fields=fields, prompt_token_ids=list(prompt))


def _conversation(request: Request) -> bytes:
    known = ("system", "user", "assistant", "tool")
    lines = []
    for place, message in enumerate(request.messages):
        if message.role not in known:
            text = f"messages.{place}.role is {message.role[:60]!r}; known: {', '.join(known)}"
            raise RequestError(text, param=f"messages.{place}.role")
        calls = [f"<tool_call>{call.name} {call.arguments}</tool_call>" for call in message.tool_calls]
        said = [*map(_spelt, message.parts), "".join([*calls, message.tool_call_id or ""]).encode()]
        lines.append(f"{message.role}:".encode() + b"".join(said))
    if request.tools:
        lines.insert(0, json.dumps(request.tools).encode())
    return b"\n".join([*lines, b"".join(map(_spelt, request.parts))])


def _spelt(part: Part) -> bytes:
    if isinstance(part, TextPart):
        return part.text.encode()
    return zlib.crc32(repr(media_facts(part)).encode()).to_bytes(4, "little")


def _size(request: Request) -> tuple[int, int]:
    """Height and width: those asked for, or else the last image's, or else 8."""
    parts = [*request.parts, *(part for message in request.messages for part in message.parts)]
    shapes = [part.pixels.shape[:2] for part in parts if isinstance(part, ImagePart)]
    height, width = shapes[-1] if shapes else (8, 8)
    found = request.params.height or height, request.params.width or width
    if max(found) > 64:
        text = f"the image would be {found[1]}x{found[0]}; at most 64x64 is drawn: give a size"
        raise RequestError(text, param="params.height")
    return found


def media_facts(part: Part) -> list[int]:
    """What came of a part: sample rate or milliseconds of a clip, shape, and a checksum of its bytes."""
    if isinstance(part, AudioPart):
        return [part.sample_rate, *part.samples.shape, zlib.crc32(part.samples.tobytes())]
    if isinstance(part, ImagePart):
        return [*part.pixels.shape, zlib.crc32(part.pixels.tobytes())]
    if isinstance(part, VideoPart):
        sound = [] if part.sound is None else media_facts(part.sound)
        return [round(1000 * float(part.timestamps[-1])), *part.frames.shape, zlib.crc32(part.frames.tobytes()), *sound]
    assert isinstance(part, TextPart)
    return [len(part.text), zlib.crc32(part.text.encode())]


ENCODERS: dict[str, Callable[[Request], Encoded]] = {
    "generate": encode_generate,
    "nested": encode_nested,
    "branches": encode_branches,
    "fanout": encode_fanout,
    "spans": encode_spans,
    "chunks": encode_chunks,
    "chunks_each": encode_chunks,
    "trouble": encode_trouble,
    "session": encode_session,
    "states": encode_states,
    "media": encode_media,
    "chat": encode_chat,
    "draw": encode_draw,
}


def _text(request: Request) -> bytes:
    """The text of a request, its parts joined."""
    text = b"".join(part.text.encode() for part in request.parts if isinstance(part, TextPart))
    if not text:
        raise RequestError("the input text is empty; give at least 1 byte", param="inputs")
    return text


def _prompt(request: Request, *, least: int = 1) -> list[int]:
    """BOS and bytes; or token ids, which are used as they are."""
    ids = [token for part in request.parts if isinstance(part, TokensPart) for token in part.ids]
    if not ids:
        return [BOS, *_text(request)]
    if any(isinstance(part, TextPart) for part in request.parts):
        raise RequestError("give either text or token ids", param="inputs")
    if len(ids) < least:
        raise RequestError(f"the prompt has {len(ids)} token ids; it needs at least {least}", param="inputs")
    if not 0 <= min(ids) <= max(ids) < VOCAB_SIZE:
        raise RequestError(f"token ids reach from {min(ids)} to {max(ids)}; they are 0 to {EOS}", param="inputs")
    return ids


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)


def _check_features(tensor: Tensor, *, param: str) -> None:
    if tensor.dim() != 2 or tensor.shape[0] == 0 or tensor.shape[1] != IMAGE_FEATURES:
        raise RequestError(
            f"the tensor has shape {list(tensor.shape)}; it must be [n, {IMAGE_FEATURES}], n at least 1", param=param
        )
