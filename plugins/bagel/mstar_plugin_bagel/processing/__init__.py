"""The CPU side of BAGEL: texts and images to prompts and noise, emissions to text and pictures. Runs in the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.layers.sampling import draw_key
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Checkpoint, Limits
from mstar.plugin.text import Detokenizer
from mstar.plugin.thoughts import ThoughtReader
from mstar.types import (
    Chunk,
    Emission,
    Encoded,
    ImageChunk,
    ImagePart,
    Part,
    Path,
    ProgressChunk,
    Request,
    SamplingParams,
    TensorChunk,
    TensorPart,
    TextChunk,
    TextPart,
    TokenLogprob,
    TokensPart,
)
from mstar_plugin_bagel.config import BagelConfig
from mstar_plugin_bagel.modeling import preprocess
from mstar_plugin_bagel.modeling.schedule import guidance
from mstar_plugin_bagel.plugin import ImageParams, TextParams, WritingParams
from mstar_plugin_bagel.processing.prompt import Prompt, latent_shape, resized
from mstar_plugin_bagel.processing.text import Words

ROLES = ("system", "developer", "user", "assistant")
PUBLISHED_SAMPLING = {"temperature": 0.3}
USUAL_TOKENS = 2048
USUAL_SIDE = 1024
# What the model was trained to be told before it thinks; to the letter, the space before the line's end included.
_TAGS = "process is enclosed within <think> </think> tags, i.e. <think>"
THINK = {
    "text": "You should first think about the reasoning process in the mind and then provide the user with the "
    f"answer. \nThe reasoning {_TAGS} reasoning process here </think> answer here",
    "image": "You should first think about the planning process in the mind and then generate the image. \n"
    f"The planning {_TAGS} planning process here </think> image here",
}


@dataclass(slots=True)
class Progress:
    """What `decode` keeps of one request.

    Args:
        texts: (emission, item) -> what is held back of its text.
        num_thought: tokens of thoughts.
        steps: taken so far, of all drawings.
    """

    request: Request
    texts: dict[tuple[str, Path], tuple[Detokenizer, ThoughtReader]] = field(default_factory=dict)
    num_thought: int = 0
    steps: int = 0


class BagelProcessor(Processor):
    """Prompts from texts and images, text and pictures from emissions."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        self.config: BagelConfig = checkpoint.config
        self.words = Words(self.config)

    # ---- requests to walk inputs ----------------------------------------------------------------------------

    def encode(self, request: Request) -> Encoded:
        return self._encode_text(request) if request.task == "text" else self._encode_image(request)

    def _encode_text(self, request: Request) -> Encoded:
        params: TextParams = request.params
        prompt = self._prompt(request, noise=None)
        limit = min(self._room(prompt), params.max_tokens or USUAL_TOKENS)
        begin = torch.tensor(self.config.tokens.bos)
        return self._encoded(
            prompt,
            params,
            inputs={"samples": [{"last": begin}] * params.n},
            fields={"max_tokens": limit},
            kv_tokens={"llm.main": len(prompt.ids) + limit},
        )

    def _encode_image(self, request: Request) -> Encoded:
        params: ImageParams = request.params
        if params.cfg_interval is not None and params.cfg_interval[0] > params.cfg_interval[1]:
            low, high = params.cfg_interval
            message = f"cfg_interval is [{low:g}, {high:g}]; the lower time comes first"
            raise RequestError(message, param="params.cfg_interval")
        for name in ("preview_every", "partial_images"):
            if getattr(params, name) and not request.stream:
                message = (
                    f"{name} is {getattr(params, name)}, but previews are for streams; set stream, or leave it out"
                )
                raise RequestError(message, param=f"params.{name}")
        height, width = self._size(request)
        noise = Noise(request)
        prompt = self._prompt(request, noise=noise)
        first = noise.drawing(*preprocess.latent_grid(height, width, self.config), self.config)
        drawings = [{"latents": _framed(one)} for one in first]
        tokens = len(drawings[0]["latents"])
        cells = _framed(preprocess.latent_positions(height, width, self.config))
        room = self._room(prompt)
        thinking = min(room - 2, params.think_max_tokens) if params.think else 0
        begin = torch.tensor(self.config.tokens.bos)
        inputs = {
            "drawings": drawings,
            "cells": cells,
            "grid": list(preprocess.latent_grid(height, width, self.config)),
            "thoughts": [{"last": begin}],
        }
        # What a context shares with main takes a page at most.
        by_text, by_img = guidance(params, num_images=len(prompt.images)).branches()
        kv_tokens = {"llm.main": len(prompt.ids) + thinking + 2 * params.think, "llm.cfg_text": int(by_text)}
        kv_tokens["llm.cfg_img"] = (len(prompt.texts) if prompt.images else int(params.think)) * by_img
        return self._encoded(
            prompt,
            params,
            inputs=inputs,
            fields={"steps": params.num_timesteps - 1, "think_max_tokens": thinking},
            kv_tokens=kv_tokens,
            usage={"image_tokens": (tokens - 2) * params.n},
        )

    def _encoded(
        self,
        prompt: Prompt,
        params: WritingParams,
        *,
        inputs: dict[str, Any],
        fields: dict[str, int],
        kv_tokens: dict[str, int],
        usage: dict[str, int] | None = None,
    ) -> Encoded:
        return Encoded(
            inputs=prompt.inputs() | inputs,
            fields=fields | {"images": len(prompt.images), "words": len(prompt.texts)},
            kv_tokens={name: count for name, count in kv_tokens.items() if count},
            samplers={"main": self._sampling(params)},
            sampler_prompts={"main": prompt.ids},
            content_keys={"prompt": prompt.keys},
            prompt_token_ids=prompt.ids,
            usage={"prompt_tokens": len(prompt.ids), **(usage or {})},
        )

    # ---- prompts --------------------------------------------------------------------------------------------

    def _prompt(self, request: Request, *, noise: Noise | None) -> Prompt:
        prompt = Prompt(self.config, self.words.pad)
        if request.params.think:
            prompt.add_text(prompt.framed(self.words.encode(THINK[request.task])))
        parts = [(param, part) for param, part in _parts(request) if not isinstance(part, TensorPart)]
        for param, part in parts:
            if isinstance(part, TextPart):
                if not part.text.strip():
                    raise RequestError(f"{param} is an empty or blank text; write some, or leave it out", param=param)
                prompt.add_text(prompt.framed(self.words.encode(part.text)))
            elif isinstance(part, TokensPart):
                prompt.add_text(self._checked_ids(part.ids, param=param))
            elif isinstance(part, ImagePart):
                pixels = resized(part.pixels, self.config)
                shape = latent_shape(*preprocess.vae_size(pixels, self.config), self.config)
                prompt.add_image(pixels, None if noise is None else noise.image(shape))
        if not parts:
            raise RequestError("there is neither text nor an image; give one of them", param="inputs")
        return prompt

    def _checked_ids(self, ids: list[int], *, param: str) -> list[int]:
        wrong = next((token for token in ids if not 0 <= token < self.config.language.vocab_size), None)
        if not ids or wrong is not None:
            problem = "is empty" if not ids else f"contains {wrong}"
            most = self.config.language.vocab_size - 1
            raise RequestError(f"{param} {problem}; give ids of 0..{most}, at least one", param=param)
        return list(ids)

    def _room(self, prompt: Prompt) -> int:
        """Tokens that may follow a prompt."""
        room = self.limits.max_model_len - len(prompt.ids)
        if room < 4:
            raise RequestError(
                f"the prompt has {len(prompt.ids)} tokens, those of {len(prompt.images)} images included; with an "
                f"answer it must fit into {self.limits.max_model_len}; shorten it, send fewer or smaller images, or "
                "raise --max-model-len",
                param="inputs",
                code="context_length_exceeded",
            )
        return room

    def _size(self, request: Request) -> tuple[int, int]:
        """Height and width to draw: as asked, else the last image's, else square. Raises RequestError."""
        params, stride, most = request.params, self.config.latent_stride, self.config.max_image_side
        images = _images(request)
        if (params.height is None) != (params.width is None):
            raise RequestError("give both height and width, or neither", param="params.height")
        if params.height is None:
            if images:
                height, width = images[-1].pixels.shape[:2]
                return preprocess.fitted_size(height, width, self.config.vae_resize)
            return (min(USUAL_SIDE, most),) * 2
        for name, side in (("height", params.height), ("width", params.width)):
            if side % stride or side > most:
                raise RequestError(
                    f"{name} is {side}; it must be a multiple of {stride}, and at most {most}", param=f"params.{name}"
                )
        return params.height, params.width

    def _sampling(self, params: WritingParams) -> SamplingParams:
        """What the client gave, else the checkpoint's, else the published defaults."""
        generation = self.config.generation
        greedy = {"temperature": 0.0} if generation.get("do_sample") is False else {}
        values: dict[str, Any] = {}
        for name in SamplingParams.__struct_fields__:
            sources = ({name: getattr(params, name)}, greedy, generation, PUBLISHED_SAMPLING)
            value = next((source[name] for source in sources if source.get(name) is not None), None)
            if value is not None:
                values[name] = value
        most = self.config.language.vocab_size
        for token in values.get("logit_bias", ()):
            if not (token.isdecimal() and int(token) < most):
                raise RequestError(f"logit_bias names token {token!r}; ids lie in 0..{most - 1}", param="logit_bias")
        return SamplingParams(**values)

    # ---- between walks --------------------------------------------------------------------------------------

    def step(self, name: str, request: Request, outputs: dict[str, Any]) -> dict[str, Any]:
        """`reencode`: what was thought, as a text of the prompt."""
        if name != "reencode":
            return super().step(name, request, outputs)
        tokens = self.config.tokens
        said = [token for token in map(int, outputs["thought"][0]) if token not in (tokens.bos, tokens.eos)]
        detokenizer = Detokenizer(self.words)
        text = detokenizer.feed(said) + detokenizer.flush()
        ids = self.words.encode(text, special=True)[: len(outputs["thought"][0])]
        return {"thought_ids": torch.tensor([tokens.bos, *ids, tokens.eos])}

    # ---- emissions to chunks --------------------------------------------------------------------------------

    def start(self, request: Request, encoded: Encoded) -> Progress:
        return Progress(request)

    def decode(self, state: Progress, emission: Emission) -> Iterator[Chunk]:
        index, value = (emission.path or (0,))[0], emission.value
        if emission.name in ("text", "thought", "scored"):
            yield from self._text(state, emission, index=index)
        elif emission.final:
            return
        elif emission.name == "progress":
            state.steps += 1
            params = state.request.params
            yield ProgressChunk(state.steps, (params.num_timesteps - 1) * params.n)
        elif emission.name == "latents":
            yield TensorChunk("latents", value, index)
        else:
            is_partial = emission.name == "preview"
            if not value.isfinite().all():
                message = f"drawing {index} came to NaN or infinity; give smaller noise or scales, or --dtype float32"
                raise RequestError(message, status=500, code="not_finite")
            yield ImageChunk(preprocess.to_uint8(value).numpy(), index, partial=is_partial)
            if not is_partial:
                yield TensorChunk("pixels", value, index)

    def _text(self, state: Progress, emission: Emission, *, index: int) -> Iterator[TextChunk]:
        """A token's text, in the channel that it belongs to; in both, where it ends the thought."""
        key = emission.name, emission.path
        if key not in state.texts:
            state.texts[key] = Detokenizer(self.words), ThoughtReader()
        detokenizer, thoughts = state.texts[key]
        is_answer = not state.request.params.think or thoughts.is_over
        ids: tuple[int, ...] = ()
        scores: tuple[TokenLogprob, ...] = ()
        if emission.final:
            text = detokenizer.flush()
        else:
            values = emission.value.reshape(-1).tolist()
            ids, text = (int(values[0]),), detokenizer.feed([int(values[0])])
            if emission.name == "scored":
                scores = (self._scored(values, count=state.request.params.logprobs),)
        thought, answer = "", text
        if state.request.params.think:
            thought, answer = thoughts.part(text, final=emission.final)
        if emission.name == "thought":
            thought, answer, is_answer = thought + answer, "", False
        is_answer = is_answer or bool(answer)
        if thought or (ids and not is_answer):
            state.num_thought += not is_answer and len(ids)
            yield TextChunk(thought, () if is_answer else ids, index, channel="reasoning")
        if answer or (ids and is_answer):
            yield TextChunk(answer, ids, index, scores)

    def _scored(self, values: list[float], *, count: int) -> TokenLogprob:
        """Of what `score` gave of one token."""
        most = (len(values) - 2) // 2
        best = zip(map(int, values[2 : 2 + most]), values[2 + most :], strict=True)
        return self.words.logprob(int(values[0]), values[1], top=list(best)[:count])

    def finish(self, state: Progress, result: dict[str, Any]) -> None:
        if state.num_thought:
            result["usage"]["reasoning_tokens"] = state.num_thought


class Noise:
    """A request's random numbers: given as tensors, or drawn on the CPU from its seed, in the order of the original.

    That is each image's, in order, when its latents are sampled; then the first drawing's. Further drawings have
    generators of their own.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._generator = torch.Generator().manual_seed(request.seed)
        self._given = request.tensor("vae_noise")
        if self._given is not None and (count := len(_images(request))) != 1:
            problem = f"there are {count} images; tensor 'vae_noise' can be given for one: leave it out"
            raise RequestError(problem, param="vae_noise")

    def drawing(self, rows: int, columns: int, config: BagelConfig) -> list[Tensor]:
        """The first latent tokens (rows * columns, D) of each drawing. Item 0 is what one alone would be."""
        count, shape = self._request.params.n, (rows * columns, config.latent_dim)
        given = self._request.tensor("latents")
        if given is not None:
            if count > 1:
                raise RequestError(f"n is {count}; with tensor 'latents' one drawing can be made", param="params.n")
            return [_checked(given, shape, name="latents")]
        found = [torch.randn(shape, generator=self._generator)]
        for index in range(1, count):
            own = torch.Generator().manual_seed(draw_key(self._request.seed, (index,), "latents"))
            found.append(torch.randn(shape, generator=own))
        return found

    def image(self, shape: tuple[int, int, int]) -> Tensor:
        """What an image's latents (z, h, w) are sampled with."""
        if self._given is None:
            return torch.randn((1, *shape), generator=self._generator)[0]
        return _checked(self._given, (1, *shape), name="vae_noise")[0]


def _checked(tensor: Tensor, shape: tuple[int, ...], *, name: str) -> Tensor:
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise RequestError(
            f"{name} is {kind} {list(tensor.shape)}; for this size it must be floats {list(shape)}", param=name
        )
    return tensor.float()


def _framed(rows: Tensor) -> Tensor:
    """With a row of zeros at both ends, for the markers."""
    edge = rows.new_zeros((1, *rows.shape[1:]))
    return torch.cat((edge, rows, edge))


def _images(request: Request) -> list[ImagePart]:
    return [part for _, part in _parts(request) if isinstance(part, ImagePart)]


def _parts(request: Request) -> Iterable[tuple[str, Part]]:
    """All parts in order, each after its `param`."""
    for index, part in enumerate(request.parts):
        yield f"inputs.{index}", part
    for turn, message in enumerate(request.messages):
        if message.role not in ROLES:
            param = f"messages.{turn}.role"
            raise RequestError(f"{param} is {message.role[:60]!r}; known: {', '.join(ROLES)}", param=param)
        for index, part in enumerate(message.parts):
            yield f"messages.{turn}.content.{index}", part
