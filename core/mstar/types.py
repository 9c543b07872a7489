"""The nouns every process shares: sampling parameters, decoded requests, the outputs of a request.

Imports no torch at run time; tensors appear in annotations only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Path = tuple[int, ...]
"""Where in nested `Each`es something happens: one item index per level; () outside any. Item 0 draws as () does."""


LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-1000, le=1000)]],
    Meta(max_length=300, description="token id -> what is added to its logit"),
]


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drawn. The order of operations is that of `transformers`' generate.

    Repetition, presence and frequency penalties and logit bias come first, then temperature, top-k, top-p, min-p.
    """

    temperature: Annotated[float, Meta(ge=0, le=100, description="0, or less than 0.00001: greedy")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="keep the k likeliest; 0 or -1: all")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: LogitBias | None = None


# ---- a decoded request, as Processor.encode sees it -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class TokensPart:
    ids: list[int]


@dataclass(frozen=True, slots=True)
class TensorPart:
    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class AudioPart:
    samples: np.ndarray  # float32 (channels, samples)
    sample_rate: int


@dataclass(frozen=True, slots=True)
class ImagePart:
    pixels: np.ndarray  # uint8 (H, W, 3), RGB, upright


@dataclass(frozen=True, slots=True)
class VideoPart:
    frames: np.ndarray  # uint8 (T, H, W, 3), RGB, upright
    timestamps: np.ndarray  # float32 (T,): seconds since the clip's first frame
    sound: AudioPart | None = None  # if the task reads it (`Task.video_sound`), and a file has a track
    duration_s: float = 0.0  # of the whole clip, whose last frame is shown as long as the others


class UsualFrames(NamedTuple):
    """Which frames of a video are taken if its part does not choose: spread evenly, the first and the last among them.

    Args:
        most: of one video.
        multiple: their number is the largest multiple of it that fits; of a clip with no more frames than that, all.
        fps: so many a second, at nearest places, but at least `least` where there are as many. None: as many as fit, at
            places rounded down.
    """

    most: int
    multiple: int = 1
    fps: float | None = None
    least: int = 1


Part = TextPart | TokensPart | TensorPart | AudioPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an earlier answer. `arguments`: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Args:
        tool_calls: of an assistant's turn.
        tool_call_id: of a tool's turn, if given: which call it answers.
        reasoning: what an assistant thought before its turn; a model may look back at it, or not.
    """

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""


@dataclass(slots=True, kw_only=True)
class Request:
    """A validated request with decoded media.

    Args:
        parts: the inputs in order; empty when `messages` is given.
        outputs: kinds of output asked for: "text", "audio", "image", "video", "tensors", "tensor:NAME".
        params: the task's params struct, defaults filled in.
        seed: given by the client, or drawn.
        tools: what the model may call, in OpenAI's form, as chat templates take it.
        kept: of a session that goes on, what walks gave its requests before and none has consumed, by name.
    """

    id: str
    model: str
    task: str
    parts: tuple[Part, ...]
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    outputs: tuple[str, ...] = ()
    params: Any = None
    seed: int = 0
    session: str | None = None
    resumed: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False

    def tensor(self, name: str) -> Tensor | None:
        """The tensor input called `name`, if it was given, in a message too."""
        parts = (*self.parts, *(part for message in self.messages for part in message.parts))
        return next((p.tensor for p in parts if isinstance(p, TensorPart) and p.name == name), None)


@dataclass(slots=True, kw_only=True)
class Encoded:
    """What `Processor.encode` returns.

    Args:
        inputs: values for the first walks, by name. Values are tensors, ints, None, or lists of items for `Each`.
        fields: integers the graph names as loop counts, limits, budgets or stream sizes.
        kv_tokens: "module.label" -> most tokens that one sequence of that label can reach: what must fit at once.
        samplers: sampler name -> parameters.
        sampler_prompts: sampler name -> token ids that count as seen by the repetition penalty. A value is one
            list, or one per item of the outermost `Each`.
        content_keys: value name of a `KV.ids` port -> one bytes key per span of non-id content, as
            (start, end, key): media content with geometry, expert kind and noise, for the prefix cache.
        prompt_token_ids: reported in the result.
        usage: reported in the result ("prompt_tokens", ...).
    """

    inputs: dict[str, Any]
    fields: dict[str, int] = field(default_factory=dict)
    kv_tokens: dict[str, int] = field(default_factory=dict)
    samplers: dict[str, SamplingParams] = field(default_factory=dict)
    sampler_prompts: dict[str, list[Any]] = field(default_factory=dict)
    content_keys: dict[str, list[tuple[int, int, bytes]]] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)


# ---- what a request gives -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Emission:
    """A value a walk emitted for the client.

    Args:
        name: the name in `Call.emits`.
        path: the `Each` item it belongs to; emissions of item i come before those of item i+1.
        value: one row of the port, (k, ...) for ports that emit k items; a CPU tensor, or what the node's finish gave.
        final: the walk (of that item) has ended; value is None then.
        reason: with `final`: "stop", "length", or another reason the model gave.
    """

    name: str
    path: Path
    value: Any
    final: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was: natural logarithm of its probability before temperature and filters.

    Args:
        token: what it says; U+FFFD stands for bytes that are no whole character.
        bytes: what it says, exactly.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob(Logprob):
    """The same of a token that was drawn, with the likeliest at its place, the likeliest first."""

    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a text.

    Args:
        index: which of n outputs.
        logprobs: one for each token id, where they were asked for.
        channel: "reasoning": what the model thinks before it answers. Each channel is a text of its own; stop strings
            end the answer alone.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    channel: Literal["answer", "reasoning"] = "answer"


@dataclass(frozen=True, slots=True)
class AudioChunk:
    samples: np.ndarray  # float32 (samples,), -1..1
    sample_rate: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class ImageChunk:
    pixels: np.ndarray  # uint8 (H, W, 3)
    index: int = 0
    partial: bool = False


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Part of a named output tensor.

    Args:
        start: where in the whole the part begins, in every dimension; the whole is as large as its parts reach. ():
            behind the parts before it, along dimension 0. All parts of a tensor have one, or none.
    """

    name: str
    tensor: Tensor
    index: int = 0
    start: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """A whole call of a tool, of which the answer's text holds nothing. `arguments`: JSON."""

    name: str
    arguments: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ProgressChunk:
    step: int
    total: int


Chunk = TextChunk | AudioChunk | ImageChunk | TensorChunk | ToolCallChunk | ProgressChunk
