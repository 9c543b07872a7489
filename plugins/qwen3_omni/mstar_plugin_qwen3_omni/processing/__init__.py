"""The CPU side of Qwen3-Omni: messages and media to prompts, emissions to text and speech. Runs in the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mstar.errors import RequestError
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Checkpoint, Limits
from mstar.plugin.text import Detokenizer
from mstar.plugin.thoughts import ThoughtReader
from mstar.plugin.tools import ToolCallReader
from mstar.types import (
    AudioChunk,
    Chunk,
    Emission,
    Encoded,
    Path,
    Request,
    SamplingParams,
    TensorChunk,
    TextChunk,
    TokenLogprob,
    ToolCallChunk,
)
from mstar_plugin_qwen3_omni import graph
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.config.speech import SAMPLE_RATE
from mstar_plugin_qwen3_omni.plugin import ChatParams
from mstar_plugin_qwen3_omni.processing import media, spoken
from mstar_plugin_qwen3_omni.processing.prompt import Prompt
from mstar_plugin_qwen3_omni.processing.text import THINKING
from mstar_plugin_qwen3_omni.processing.turns import Reader

PUBLISHED_SAMPLING = {"temperature": 0.7, "top_p": 0.9}
USUAL_TOKENS = 2048


@dataclass(slots=True)
class Answer:
    """What `decode` keeps of one request.

    Args:
        in_thought: the prompt ends in a thought.
        thoughts: readers of them, if the model thinks.
        readers: of calls of tools, if the request has some.
        num_frames: of codes so far.
    """

    request: Request
    in_thought: bool = False
    texts: dict[Path, Detokenizer] = field(default_factory=dict)
    thoughts: dict[Path, ThoughtReader] = field(default_factory=dict)
    readers: dict[Path, ToolCallReader] = field(default_factory=dict)
    num_frames: int = 0


class OmniProcessor(Processor):
    """Prompts from conversations with media, text and speech from emissions."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        self.config: OmniConfig = checkpoint.config
        self.reader = Reader(self.config)

    # ---- requests to walk inputs ----------------------------------------------------------------------------

    def encode(self, request: Request) -> Encoded:
        if request.task == "vocode":
            assert self.config.speech is not None
            return Encoded(
                inputs={"windows": spoken.windows(self.config.speech, request.tensor("codes"), request.params)}
            )
        params: ChatParams = request.params
        if self.config.speech is not None:
            spoken.speaker_id(self.config, params.speaker)  # a mistake is one in text's requests too
        else:
            spoken.check_silent(params)
        self._check_media(request)
        prompt = self.reader.read(request)
        generation = self.config.generation
        usual = generation.get("thinker_max_new_tokens") or generation.get("max_new_tokens") or USUAL_TOKENS
        limit = min(self._room(prompt), _wanted(params) or usual)
        first = {"last": torch.tensor(prompt.ids[-1])}
        encoded = Encoded(
            inputs=prompt.inputs(),
            fields={"max_tokens": limit},
            kv_tokens={"thinker.main": len(prompt.ids) + limit},
            samplers={"main": self._sampling(params)},
            sampler_prompts={"main": prompt.ids},
            content_keys={"ids": prompt.keys},
            prompt_token_ids=prompt.ids,
            usage={"prompt_tokens": len(prompt.ids)},
        )
        if graph.speaks(request):  # type: ignore[arg-type]  # it is read as the graph's own view is
            encoded.inputs |= first
            self._add_speech(encoded, prompt, params)
        else:
            encoded.inputs["samples"] = [first] * params.n
        return encoded

    def _add_speech(self, encoded: Encoded, prompt: Prompt, params: Any) -> None:
        if params.n > 1:
            message = f"n is {params.n}; one answer is spoken: ask for text alone, or set n to 1"
            raise RequestError(message, param="params.n")
        if self.reader.words.opens_thought(prompt.ids):
            message = "the model is to think first, and what it thinks is not spoken: ask for text alone"
            raise RequestError(f"{message}, or set {THINKING} to false", param="outputs")
        config, generation = self.config, self.config.generation
        assert config.speech is not None
        places = prompt.positions.whole() if prompt.num_media else None
        speaker = spoken.speaker_id(config, params.speaker)
        ids = torch.tensor(self.reader.words.without_thought(prompt.ids))
        places = places[: len(ids)] if places is not None else None
        begin = spoken.talker_prompt(config, ids, places, speaker=speaker)
        length = len(next(iter(begin.values())))
        room = min(self.limits.max_model_len, config.speech.talker.max_positions) - length
        fields = spoken.speech_fields(params, generation=generation, room=room)
        encoded.inputs |= begin
        encoded.fields |= fields
        encoded.kv_tokens["talker.main"] = length + fields["frames"]
        encoded.samplers |= spoken.speech_samplers(params, generation=generation)

    def _check_media(self, request: Request) -> None:
        """Refuse media that are too much for any prompt, before the work of seeing and hearing them."""
        parts = (*request.parts, *(part for message in request.messages for part in message.parts))
        found = media.Amount.of(parts, self.config)
        if (count := found.seen + found.heard) >= self.limits.max_model_len:
            raise self._too_long(count, found)

    def _room(self, prompt: Prompt) -> int:
        """Tokens that may follow a prompt. Raises RequestError if there are none."""
        if (room := self.limits.max_model_len - len(prompt.ids)) > 0:
            return room
        seen, heard = (sum(one.num_tokens for one in kind) for kind in (prompt.sights, prompt.sounds))
        found = media.Amount(seen, heard, sum(sound.seconds for sound in prompt.sounds))
        raise self._too_long(len(prompt.ids), found)

    def _too_long(self, count: int, found: media.Amount) -> RequestError:
        told = f", {found.seen} of them pictures and {found.heard} of them {found.seconds:.1f} s of sound,"
        message = f"the prompt has {count} tokens{told if found.seen + found.heard else ''} and with an answer it must "
        message += f"fit into {self.limits.max_model_len}; "
        message += "shorten it, send less or smaller media, or raise --max-model-len"
        return RequestError(message, param="inputs", code="context_length_exceeded")

    def _sampling(self, params: ChatParams) -> SamplingParams:
        """What the client gave, else the checkpoint's, else the published defaults."""
        generation = self.config.generation
        greedy = {"temperature": 0.0} if generation.get("do_sample") is False else {}
        values: dict[str, Any] = {}
        for name in SamplingParams.__struct_fields__:
            sources = ({name: getattr(params, name)}, greedy, generation, PUBLISHED_SAMPLING)
            value = next((source[name] for source in sources if source.get(name) is not None), None)
            if value is not None:
                values[name] = value
        most = self.config.thinker.vocab_size
        for token in values.get("logit_bias", ()):
            if not (token.isdecimal() and int(token) < most):
                message = f"logit_bias names token {token!r}; ids lie in 0..{most - 1}"
                raise RequestError(message, param="params.logit_bias")
        return SamplingParams(**values)

    # ---- emissions to chunks --------------------------------------------------------------------------------

    def start(self, request: Request, encoded: Encoded) -> Answer:
        return Answer(request, in_thought=self.reader.words.opens_thought(encoded.prompt_token_ids))

    def decode(self, state: Answer, emission: Emission) -> Iterator[Chunk]:
        if emission.name in ("text", "scored"):
            chunks: Iterable[TextChunk] = (self._text(state, emission),)
            if self.reader.words.thinks:
                chunks = self._parted(state, emission, *chunks)
            yield from self._called(state, emission, chunks) if state.request.tools else chunks
        elif emission.name == "codes":
            yield from _codes(state, emission, groups=self.config.speech.talker.num_groups if self.config.speech else 0)
        else:
            samples = np.zeros(0, dtype=np.float32) if emission.final else emission.value.float().numpy()
            yield AudioChunk(samples, SAMPLE_RATE)
            yield TensorChunk("audio", torch.from_numpy(samples))

    def _text(self, state: Answer, emission: Emission) -> TextChunk:
        index = (emission.path or (0,))[0]
        detokenizer = state.texts.setdefault(emission.path, Detokenizer(self.reader.words))
        if emission.final:
            return TextChunk(detokenizer.flush(), (), index)
        values = emission.value.reshape(-1).tolist()
        ids = (int(values[0]),)
        scores: tuple[TokenLogprob, ...] = ()
        if emission.name == "scored":
            scores = (self._scored(values, count=state.request.params.logprobs),)
        return TextChunk(detokenizer.feed(ids), ids, index, scores)

    def _parted(self, state: Answer, emission: Emission, chunk: TextChunk) -> Iterator[TextChunk]:
        """Thoughts apart from the answer."""
        if emission.path not in state.thoughts:
            state.thoughts[emission.path] = ThoughtReader(is_open=state.in_thought, trimmed="\n")
        yield from state.thoughts[emission.path].feed(chunk, final=emission.final)

    def _called(
        self, state: Answer, emission: Emission, chunks: Iterable[TextChunk]
    ) -> Iterator[TextChunk | ToolCallChunk]:
        """Calls of tools apart from the answer."""
        reader = state.readers.setdefault(emission.path, ToolCallReader())
        for chunk in chunks:
            yield from (chunk,) if chunk.channel == "reasoning" else reader.feed(chunk)
        if emission.final:
            yield from reader.flush()

    def finish(self, state: Answer, result: dict[str, Any]) -> None:
        if num_tokens := sum(reader.num_tokens for reader in state.thoughts.values()):
            result["usage"]["reasoning_tokens"] = num_tokens

    def _scored(self, values: list[float], *, count: int) -> TokenLogprob:
        """Of what `score` gave of one token."""
        most = (len(values) - 2) // 2
        best = zip(map(int, values[2 : 2 + most]), values[2 + most :], strict=True)
        return self.reader.words.logprob(int(values[0]), values[1], top=list(best)[:count])


def _wanted(params: ChatParams) -> int | None:
    """Tokens asked for, by whichever name."""
    if None not in (params.max_tokens, params.thinker_max_tokens) and params.max_tokens != params.thinker_max_tokens:
        message = f"max_tokens is {params.max_tokens}, and thinker_max_tokens {params.thinker_max_tokens}; "
        raise RequestError(message + "they mean the same: leave one out", param="params.thinker_max_tokens")
    return params.thinker_max_tokens if params.max_tokens is None else params.max_tokens


def _codes(state: Answer, emission: Emission, *, groups: int) -> Iterator[TensorChunk]:
    """Frames as columns (groups, frames)."""
    if not emission.final:
        frames = emission.value.reshape(-1, groups)
        yield TensorChunk("codes", frames.T.contiguous(), start=(0, state.num_frames))
        state.num_frames += len(frames)
    elif not state.num_frames:
        yield TensorChunk("codes", torch.zeros(groups, 0, dtype=torch.int64), start=(0, 0))
