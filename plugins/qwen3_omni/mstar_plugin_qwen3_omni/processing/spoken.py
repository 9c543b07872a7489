"""What speech needs of a request: the talker's prompt, limits, how codes are drawn, windows of codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mstar.errors import RequestError
from mstar.types import SamplingParams
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.config.speech import SpeechConfig
from mstar_plugin_qwen3_omni.graph import CHUNKS, TALKER_PROMPT, chunk_field
from mstar_plugin_qwen3_omni.plugin import ChatParams, CodecParams

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "talker": {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05},
    "code_predictor": {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.0},
}
MAX_TOKENS, LEFT_CONTEXT = 4096, 25
"""Of the talker, and frames before a chunk that are decoded with it; the authors' defaults."""
SPEECH_PARAMS = ("speak", "talker_", "code")
"""How the names of `chat`'s parameters of speech begin."""
MOST_AT_ONCE = 4096
"""Frames of a window of `vocode`, but for its context: memory and time grow faster than the window."""


def speaker_id(config: OmniConfig, name: str | None) -> int:
    """Of a name, in any case. Raises RequestError that lists the known ones."""
    assert config.speech is not None
    names = config.speech.talker.names
    found = config.speech.talker.speakers.get((names[0] if name is None else name).lower())
    if found is None:
        message = f"unknown speaker {str(name)[:60]!r}; known: {', '.join(names)}"
        raise RequestError(message, param="params.speaker", code="unknown_voice")
    return found


def check_silent(params: ChatParams) -> None:
    """Raises RequestError for a parameter of speech, where nothing speaks."""
    unused = ChatParams()
    for name in ChatParams.__struct_fields__:
        if name.startswith(SPEECH_PARAMS) and getattr(params, name) != getattr(unused, name):
            message = f"{name} is of speech, and this checkpoint has nothing that speaks; leave it out"
            raise RequestError(message, param=f"params.{name}", code="unsupported_parameter")


# ---- the talker's prompt --------------------------------------------------------------------------------


def talker_prompt(config: OmniConfig, ids: Tensor, places: Tensor | None, *, speaker: int) -> dict[str, Tensor]:
    """What the talker reads before the first word: the users' turns, and how an answer begins.

    Args:
        ids: (T,) int64, the thinker's prompt.
        places: (T, 3) float32, its positions; None: consecutive.
        speaker: `speaker_id`.

    Returns: the values `graph.TALKER_PROMPT` names, each with one row per token. Raises RequestError for a prompt after
    which it is not the assistant's turn, or is already begun: such words would not be spoken.
    """
    assert config.speech is not None
    tokens, turns = config.speech.talker.tokens, config.turns
    begins = ((ids[:-1] == turns.start) & (ids[1:] == turns.assistant)).nonzero()[:, 0]
    if not len(begins) or len(ids) - int(begins[-1]) > 3:
        message = "only an answer that is not begun can be spoken; end the prompt with <|im_start|>assistant and a "
        raise RequestError(message + "newline, or ask for text alone", param="inputs")
    heard = _of_users(ids, start=turns.start, user=turns.user).nonzero()[:, 0]
    head = ids[int(begins[-1]) : int(begins[-1]) + 3]
    text = [tokens.text_pad] * 4 + [tokens.text_bos]
    codes = [tokens.nothink, tokens.think_bos, tokens.think_eos, speaker, tokens.pad]
    media = config.thinker.tokens
    is_media = torch.isin(ids[heard], torch.tensor([media.audio, media.image, media.video]))
    where, following = _places(config, ids, places, heard)
    count = len(head) + len(text)
    tail = (following + torch.arange(count, dtype=torch.float32))[:, None].expand(-1, 3)
    none = torch.full((count,), -1)
    values = (
        torch.cat((ids[heard], head, torch.tensor(text))),
        torch.cat((heard.where(is_media, -1), none)),
        torch.cat((torch.full_like(heard, -1), none[: len(head)], torch.tensor(codes))),
        torch.cat((where, tail)),
    )
    return dict(zip(TALKER_PROMPT, values, strict=True))


def _of_users(ids: Tensor, *, start: int, user: int) -> Tensor:
    """(T,) bool: which tokens lie in a turn of a user's."""
    at = torch.arange(len(ids))
    turn = at.where(ids == start, 0).cummax(0).values
    return ids[(turn + 1).clamp(max=len(ids) - 1)] == user


def _places(config: OmniConfig, ids: Tensor, places: Tensor | None, heard: Tensor) -> tuple[Tensor, float]:
    """Positions (n, 3) of the tokens that are heard, and the one that follows: as the thinker's, from 0 on and without
    gaps; but the tokens of `_films`, a video's and its sound's by turns, count one by one."""
    if places is None or not len(heard):
        return torch.arange(len(heard), dtype=torch.float32)[:, None].expand(-1, 3), float(len(heard))
    is_film = _films(config, ids[heard])
    parts, following = list[Tensor](), 0.0
    is_cut = (heard[1:] != heard[:-1] + 1) | (is_film[1:] != is_film[:-1])
    ends = [*(is_cut.nonzero()[:, 0] + 1).tolist(), len(heard)]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        first, last = int(heard[begin]), int(heard[end - 1])
        if is_film[begin]:
            relative = torch.arange(end - begin, dtype=torch.float32)[:, None].expand(-1, 3)
            length = float(end - begin)
        else:
            relative = places[first : last + 1].float() - places[first, 0]
            after = places[last + 1, 0] if last + 1 < len(places) else places[last].max() + 1
            length = float(after - places[first, 0])
        parts.append(relative + following)
        following += length
    return torch.cat(parts), following


def _films(config: OmniConfig, ids: Tensor) -> Tensor:
    """(n,) bool, of what is heard: from the start of a video with sound to its end, unless a picture follows. The
    authors' code does not tell the talker that videos have sound, and it looks for videos only before pictures."""
    tokens, found = config.thinker.tokens, torch.zeros(len(ids), dtype=torch.bool)
    begins = (ids[:-1] == tokens.vision_start) & (ids[1:] == tokens.audio_start)
    ends, pictures = ((ids == token).nonzero()[:, 0] for token in (tokens.vision_end, tokens.image))
    for begin in begins.nonzero()[:, 0].tolist():
        if not (pictures > begin).any():
            later = ends[ends > begin]
            found[begin : int(later[0]) + 1 if len(later) else len(ids)] = True
    return found


# ---- limits and draws -----------------------------------------------------------------------------------


def speech_fields(params: ChatParams, *, generation: Mapping[str, Any], room: int) -> dict[str, int]:
    """Request fields of the talker and the codec; `room`: tokens that its prompt leaves of the model's limit.

    Raises RequestError if it leaves none.
    """
    if room < 1:
        message = (
            f"what users said is too long to be answered aloud, by {1 - room} tokens; shorten it, ask for text alone"
        )
        raise RequestError(message + ", or raise --max-model-len", param="inputs", code="context_length_exceeded")
    limit = params.talker_max_tokens or int(generation.get("talker_max_new_tokens") or MAX_TOKENS)
    cap = params.codec_chunk_frames or max(CHUNKS)
    fields = {chunk_field(index): min(size, cap) for index, size in enumerate(CHUNKS)}
    context = LEFT_CONTEXT if params.codec_left_context is None else params.codec_left_context
    # The last token that is drawn begins a frame that nothing completes.
    return fields | {"frames": max(0, min(limit - 1, room)), "codec_left_context": context}


def speech_samplers(params: ChatParams, *, generation: Mapping[str, Any]) -> dict[str, SamplingParams]:
    """How codes are drawn: as the client says, else the checkpoint, else its authors; a greedy talker's further codes
    are greedy too."""
    found: dict[str, SamplingParams] = {}
    for name, defaults in DEFAULTS.items():
        values: dict[str, Any] = {}
        for key, default in defaults.items():
            asked = getattr(params, f"{name}_{key}", None)
            is_greedy = key == "temperature" and generation.get(f"{name}_do_sample") is False
            kept = 0.0 if is_greedy else generation.get(f"{name}_{key}")
            values[key] = next(value for value in (asked, kept, default) if value is not None)
        found[name] = SamplingParams(**values)
    if params.code_predictor_temperature is None and found["talker"].temperature == 0:
        found["code_predictor"] = SamplingParams(temperature=0.0)
    return found


# ---- codes the client gives -----------------------------------------------------------------------------


def windows(config: SpeechConfig, codes: Tensor | None, params: CodecParams) -> list[dict[str, Any]]:
    """Items of the walk `vocode`: all frames at once, or as the authors' code cuts them. Raises RequestError."""
    frames = _checked(config, codes)
    size = min(params.codec_chunk_frames or len(frames), len(frames))
    if size > MOST_AT_ONCE:
        message = f"{size} frames of codes would be decoded at once; the limit is {MOST_AT_ONCE}; "
        raise RequestError(f"{message}set codec_chunk_frames to at most that", param="params.codec_chunk_frames")
    left = LEFT_CONTEXT if params.codec_left_context is None else params.codec_left_context
    return list(_cut(frames, size=size, left=left))


def _cut(frames: Tensor, *, size: int, left: int) -> Iterator[dict[str, Any]]:
    for start in range(0, len(frames), size):
        context = left if start > left else start
        yield {"window": frames[start - context : start + size], "context": context}


def _checked(config: SpeechConfig, codes: Tensor | None) -> Tensor:
    """(groups, frames) as (frames, groups) int64."""
    groups, size = config.vocoder.num_groups, config.vocoder.codebook_size
    if codes is None:
        raise RequestError("vocode needs a tensor 'codes'", param="inputs")
    if codes.dim() != 2 or codes.is_floating_point() or codes.dtype == torch.bool or len(codes) != groups:
        kind = str(codes.dtype).removeprefix("torch.")
        message = f"codes is {kind} of shape {list(codes.shape)}; give integers [{groups}, frames]"
        raise RequestError(message, param="codes")
    if not codes.shape[1]:
        raise RequestError("codes has no frames; give at least one", param="codes")
    if codes.shape[1] > (most := config.talker.max_positions):
        message = f"codes has {codes.shape[1]} frames; the limit is {most}, of which no talker makes more; send fewer"
        raise RequestError(message, param="codes")
    codes = codes.to(torch.int64)
    if codes.min() < 0 or codes.max() >= size:
        wrong = codes[(codes < 0) | (codes >= size)][0].item()
        raise RequestError(f"codes contains {wrong}; codes lie in 0..{size - 1}", param="codes")
    return codes.T.contiguous()
