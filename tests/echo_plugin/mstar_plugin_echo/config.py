"""The echo model's sizes, and the parameters of its tasks. Imports no torch.

Sizes come from the checkpoint's `config.json`; parameters come with every request, checked before the processor runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mstar.errors import ConfigError
from mstar.types import SamplingParams

BOS = 256
EOS = 257
VOCAB_SIZE = 258
SEPARATOR = 10
"""The newline byte: fed to the first decode step after a prompt that was prefilled whole."""

IMAGE_FEATURES = 4
MOST_LOGPROBS = 20
SAMPLES_PER_FRAME = 4
SAMPLES_PER_TOKEN = 40  # of a chat that is spoken
SAMPLE_RATE = 8000
MODULUS = 65521


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig:
    """Sizes of the networks.

    Args:
        depth_steps: codes that the inner loop adds to each frame's first one.
        num_codes: codes of a codebook; the id after the last one ends the frames.
        seed: every weight is drawn from it.
    """

    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 64
    rope_theta: float = 10000.0
    depth_steps: int = 3
    num_codes: int = 64
    max_model_len: int = 512
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def frame_size(self) -> int:
        """Codes in a frame."""
        return 1 + self.depth_steps

    @property
    def end_code(self) -> int:
        return self.num_codes


def load(folder: Path, parts: Mapping[str, Path]) -> EchoConfig:
    """The configuration of a checkpoint folder. Raises ConfigError for a file that is not an echo model's."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json; pass --model tiny or a folder that `tiny.make` wrote")
    values = json.loads(path.read_text())
    if values.pop("model_type", None) != "echo":
        raise ConfigError(f"{path} is not an echo model's: its model_type is not 'echo'")
    unknown = sorted(set(values) - {f.name for f in fields(EchoConfig)})
    if unknown:
        raise ConfigError(f"{path} has unknown keys {unknown}")
    return EchoConfig(**values)


def max_model_len(config: EchoConfig) -> int:
    """Most tokens of one sequence."""
    return config.max_model_len


def voices(config: EchoConfig) -> list[str]:
    """Names for the speech route."""
    return ["plain", "loud"]


# ---- parameters of the tasks ----------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class GenerateParams(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`generate`: every sampling parameter, and when to end.

    `eos_at`: the decode step at which the model says end-of-text (and at no other); None leaves it to the sampler.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    max_tokens: Positive = 16
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    eos_at: Count | None = None


class NestedParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nested`: frames of codes. `end_at`: the frame at which the model says end; that frame is not emitted.

    `voice`: loud doubles the samples.
    """

    voice: Literal["plain", "loud"] | None = None
    max_frames: Positive = 4
    end_at: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    depth_temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    depth_top_k: Annotated[int, Meta(ge=-1)] = 0


class BranchesParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`branches`: the right branch runs in steps [first_step, end_step) of every round, the third one if `third`."""

    steps: Count = 4
    rounds: Positive = 1
    first_step: Count = 1
    end_step: Count = 3
    third: bool = False


class FanoutParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`fanout`: texts in groups, each continued alone; lists repeat over the texts of all groups.

    `laps`: loops around an idle method before a text is answered: a slow item, without sleeping.
    """

    prefix: Annotated[str, Meta(min_length=1)] = "shared"
    reply_tokens: Annotated[list[Positive], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [4])
    laps: Annotated[list[Count], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [0])
    ordered: bool = False
    max_tokens: Positive = 256


class SpansParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`spans`: guided flow that reads a prompt with image blocks, then text after the same prompt.

    The guidance branch runs in steps [first_step, end_step) if `scale` is not 1.
    """

    steps: Positive = 3
    scale: float = 2.0
    first_step: Count = 0
    end_step: Count = 1000
    max_tokens: Positive = 4


class ChunksParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`chunks` and `chunks_each`: `counts[p][s]` items leave producer p at step s (`chunks` has one producer).

    `consumers`: the lanes that are started.
    """

    counts: Annotated[list[list[Count]], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [[1, 1, 1]])
    consumers: list[Literal["fixed", "sliding", "left", "whole", "follow"]] = msgspec.field(
        default_factory=lambda: ["fixed", "sliding", "left", "whole", "follow"]
    )
    size: Positive = 2
    window: Positive = 4
    stride: Positive = 2
    context: Positive = 1
    follow_steps: Positive = 6


class TroubleParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trouble`: what goes wrong, and at which of the steps. The README lists the kinds."""

    kind: Literal[
        "none", "method", "prepare", "finish", "request", "memory", "shape", "missing", "predicate", "lane",
        "sleep", "encode", "encode_crash", "decode", "kv",
    ] = "none"  # fmt: skip
    at: Count = 1
    steps: Positive = 3
    sleep_s: Annotated[float, Meta(ge=0, le=10)] = 0.05
    watch: bool = False


class SessionParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`session`: one turn. `amount` is added to the session's counter."""

    max_tokens: Positive = 4
    amount: int = 1
    eos_at: Count | None = None


class StatesParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`states`: draft, then (if `revise`) re-encode it and revise, then (if `tally`) show the draft.

    `fail_step`: the Processor step in between raises.
    """

    draft_tokens: Positive = 4
    max_tokens: Positive = 4
    revise: bool = True
    tally: bool = True
    fail_step: bool = False


class MediaParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`media`: whether parts that were seen before are not looked at again."""

    cache: bool = False


class ChatParams(GenerateParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`chat`: as `generate`; so many likeliest tokens at each place; the first `think` tokens are reasoning.

    `say` is spelt in place of what was sampled, as far as there are tokens. `mute`: no sound comes.
    """

    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    think: Count = 0
    voice: Literal["plain", "loud"] | None = None
    say: str | None = None
    mute: bool = False
    hear_videos: bool = False


class DrawParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`draw`: a picture of its prompt, seed, `scale` and steps; 8x8, or as large as the last image it gets.

    `preview_every` so many steps, or so many `partial_images` in all, a preview.
    """

    height: Annotated[int, Meta(ge=1, le=64)] | None = None
    width: Annotated[int, Meta(ge=1, le=64)] | None = None
    steps: Annotated[int, Meta(ge=1, le=64)] = 4
    scale: Annotated[float, Meta(ge=0, le=100)] = 1.0
    n: Annotated[int, Meta(ge=1, le=10)] = 1
    preview_every: Count = 0
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0


def sampling(params: Any) -> SamplingParams:
    """The sampling parameters among a task's parameters."""
    return SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__struct_fields__})
