"""The CPU side of Orpheus: text to prompts, codes and samples to chunks. Runs in the server process.

Knows nothing of batching or of the network's weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from tokenizers import Tokenizer

from mstar.errors import RequestError
from mstar.plugin.media import TimeStretcher
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Checkpoint, Limits
from mstar.types import (
    AudioChunk,
    Chunk,
    Emission,
    Encoded,
    Request,
    SamplingParams,
    TensorChunk,
    TextPart,
    TokensPart,
)
from mstar_plugin_orpheus.config import OrpheusConfig
from mstar_plugin_orpheus.modeling.frames import FRAME_CODES, token_ids
from mstar_plugin_orpheus.plugin import SpeechParams
from mstar_plugin_orpheus.processing.segments import segment

PUBLISHED_SAMPLING = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3}
FADE_S = 0.005
"""How long a segment takes to fade at a join: too short to hear, long enough not to click."""


@dataclass(slots=True)
class SpeechState:
    """What `decode` keeps of one request.

    Args:
        last_item: the last segment; nothing joins after it.
        tempo: makes one segment after another faster or slower.
        num_codes: codes of good frames so far, per segment.
        held: the end of a segment's audio, kept back until the segment's final decides how it ends.
        item: the segment that spoke last, or None.
    """

    last_item: int
    tempo: TimeStretcher
    num_codes: dict[int, int] = field(default_factory=dict)
    held: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    item: int | None = None


class OrpheusProcessor(Processor):
    """Prompts from text, audio and ids from emissions."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        self.config: OrpheusConfig = checkpoint.config
        self.tokenizer = _plain_tokenizer(self.config)
        self.fade_samples = round(FADE_S * self.config.codec.sampling_rate)
        self.fade_in = np.sin(0.5 * np.pi * (np.arange(self.fade_samples) + 0.5) / self.fade_samples) ** 2
        self.fade_in = self.fade_in.astype(np.float32)

    # ---- requests to walk inputs ----------------------------------------------------------------------------

    def encode(self, request: Request) -> Encoded:
        return self._encode_codes(request) if request.task == "vocode" else self._encode_speech(request)

    def prompt_ids(self, text: str, *, voice: str | None) -> list[int]:
        """The prompt for one segment. The text is text: it cannot spell control tokens."""
        tokens = self.config.tokens
        spoken = self.tokenizer.encode(text if voice is None else f"{voice}: {text}", add_special_tokens=False).ids
        return [
            tokens.start_of_human,
            tokens.begin_of_text,
            *spoken,
            tokens.end_of_turn,
            tokens.end_of_human,
            tokens.start_of_ai,
            tokens.start_of_speech,
        ]

    def _encode_speech(self, request: Request) -> Encoded:
        params: SpeechParams = request.params
        prompts = self._prompts(request, voice=self._voice(params))
        segments, longest = [], 0
        for ids in prompts:
            limit = self.limits.max_model_len - len(ids)
            if limit < 1:
                raise RequestError(
                    f"a prompt has {len(ids)} tokens; with at least one token of speech it must fit into "
                    f"{self.limits.max_model_len}; shorten the input or raise --max-model-len",
                    param="inputs",
                    code="context_length_exceeded",
                )
            longest = max(longest, len(ids) + min(limit, params.max_tokens or limit))
            segments.append({"ids": torch.tensor(ids[:-1]), "last": torch.tensor(ids[-1]), "limit": limit})
        flat = [token for ids in prompts for token in ids]
        return Encoded(
            inputs={"segments": segments},
            fields={} if params.max_tokens is None else {"max_tokens": params.max_tokens},
            kv_tokens={"lm.main": longest},
            samplers={"main": self._sampling(params)},
            sampler_prompts={"main": prompts},
            prompt_token_ids=flat,
            usage={"prompt_tokens": len(flat)},
        )

    def _prompts(self, request: Request, *, voice: str | None) -> list[list[int]]:
        prompts: list[list[int]] = []
        for part in request.parts:
            if isinstance(part, TextPart):
                prompts += [self.prompt_ids(text, voice=voice) for text in segment(part.text)]
            elif isinstance(part, TokensPart):
                prompts.append(self._checked_ids(part.ids))
        if not prompts:
            raise RequestError("the input is empty or blank; give some text to speak", param="input")
        return prompts

    def _checked_ids(self, ids: list[int]) -> list[int]:
        if len(ids) < 2:
            raise RequestError(f"token_ids has {len(ids)} ids; a prompt needs at least 2", param="inputs")
        wrong = next((token for token in ids if not 0 <= token < self.config.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token_ids contains {wrong}; ids lie in 0..{self.config.vocab_size - 1}", param="inputs"
            )
        return list(ids)

    def _voice(self, params: SpeechParams) -> str | None:
        voice = params.voice
        if voice is UNSET:
            voice = self.config.voices[0]
        if voice is not None and voice not in self.config.voices:
            raise RequestError(
                f"unknown voice {voice[:60]!r}; known: {', '.join(self.config.voices)}, or null for none",
                param="voice",
                code="unknown_voice",
            )
        return voice  # type: ignore[return-value]  # UNSET was replaced above

    def _sampling(self, params: SpeechParams) -> SamplingParams:
        """What the client gave, else the checkpoint's, else the published defaults."""
        generation = self.config.generation
        checkpoint = {"temperature": 0.0} if generation.get("do_sample") is False else {}
        sources = (checkpoint, generation, PUBLISHED_SAMPLING)
        values: dict[str, Any] = {}
        for name in SamplingParams.__struct_fields__:
            value = next((s[name] for s in ({name: getattr(params, name)}, *sources) if s.get(name) is not None), None)
            if value is not None:
                values[name] = value
        for token in values.get("logit_bias", ()):
            if not (token.isdecimal() and int(token) < self.config.vocab_size):
                raise RequestError(
                    f"logit_bias names token {token!r}; ids lie in 0..{self.config.vocab_size - 1}", param="logit_bias"
                )
        return SamplingParams(**values)

    def _encode_codes(self, request: Request) -> Encoded:
        codes, size = request.tensor("codes"), self.config.codec.codebook_size
        if codes is None:
            raise RequestError("vocode needs a tensor 'codes'", param="inputs")
        if codes.dim() != 1 or codes.is_floating_point() or codes.dtype == torch.bool:
            raise RequestError(
                f"codes is {str(codes.dtype).removeprefix('torch.')} of shape {list(codes.shape)}; give integers [n]",
                param="codes",
            )
        if not len(codes) or len(codes) % FRAME_CODES:
            raise RequestError(
                f"codes has {len(codes)} values; give {FRAME_CODES} per frame, at least one frame", param="codes"
            )
        codes = codes.to(torch.int64)
        if codes.min() < 0 or codes.max() >= size:
            wrong = codes[(codes < 0) | (codes >= size)][0].item()
            raise RequestError(f"codes contains {wrong}; codebook codes lie in 0..{size - 1}", param="codes")
        return Encoded(inputs={"segments": [{"codes": codes}]}, usage={"prompt_tokens": 0})

    # ---- emissions to chunks --------------------------------------------------------------------------------

    def start(self, request: Request, encoded: Encoded) -> SpeechState:
        tempo = TimeStretcher(sample_rate=self.config.codec.sampling_rate, speed=getattr(request.params, "speed", 1.0))
        return SpeechState(last_item=len(encoded.inputs["segments"]) - 1, tempo=tempo)

    def decode(self, state: SpeechState, emission: Emission) -> Iterator[Chunk]:
        (item,) = emission.path
        is_end = emission.final and item == state.last_item
        if emission.name == "codes":
            if not emission.final:
                yield self._ids(state, emission.value, item=item)
            elif is_end and not state.num_codes:
                yield TensorChunk("codes", torch.zeros(0, dtype=torch.int64))
        elif emission.name == "audio":
            tempo = state.tempo
            spoken = tempo.flush() if emission.final else tempo.feed(np.asarray(emission.value, dtype=np.float32))
            heard = self._join(state, spoken, item=item, final=emission.final)
            if len(heard) or (is_end and state.item is None):
                yield AudioChunk(heard, self.config.codec.sampling_rate)
                yield TensorChunk("audio", torch.from_numpy(heard))

    def _ids(self, state: SpeechState, codes: torch.Tensor, *, item: int) -> TensorChunk:
        first = state.num_codes.get(item, 0)
        state.num_codes[item] = first + len(codes)
        base, size = self.config.tokens.audio_base, self.config.codec.codebook_size
        ids = token_ids(codes.tolist(), first=first, audio_base=base, codebook_size=size)
        return TensorChunk("codes", torch.tensor(ids))

    def _join(self, state: SpeechState, samples: np.ndarray, *, item: int, final: bool) -> np.ndarray:
        """What can be heard now: a segment fades in after another one, and out before another one may follow."""
        if len(samples) and state.item != item:
            if state.item is not None:
                samples = samples.copy()
                width = min(len(samples), self.fade_samples)
                samples[:width] *= self.fade_in[:width]
            state.item = item
        if item < state.last_item:
            samples = np.concatenate((state.held, samples))
            keep = 0 if final else min(len(samples), self.fade_samples)
            if final:
                width = min(len(samples), self.fade_samples)
                samples[len(samples) - width :] *= self.fade_in[:width][::-1]
            state.held = samples[len(samples) - keep :]
            samples = samples[: len(samples) - keep]
        return samples


def _plain_tokenizer(config: OrpheusConfig) -> Tokenizer:
    """The checkpoint's tokenizer without its added tokens, so that a text which spells one stays text."""
    raw = json.loads(config.tokenizer.read_text(encoding="utf-8"))
    raw["added_tokens"], raw["post_processor"] = [], None
    return Tokenizer.from_str(json.dumps(raw))
