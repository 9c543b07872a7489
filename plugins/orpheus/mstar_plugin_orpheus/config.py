"""The checkpoint's configuration: language model, codec, special tokens, sampling defaults, voices.

Read once per process from the checkpoint's folders. Special ids are resolved by name from the tokenizer, because
vocabularies differ between checkpoints. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.errors import ConfigError
from mstar_plugin_orpheus.modeling.frames import FRAME_CODES, LEVEL_SLOTS

CHECKPOINT = "canopylabs/orpheus-3b-0.1-ft"
TOKENIZER = "canopylabs/orpheus-3b-0.1-pretrained"
CODEC = "hubertsiuzdak/snac_24khz"

ENGLISH_VOICES = ("tara", "zoe", "zac", "jess", "leo", "mia", "julia", "leah", "dan")
VOICES: Mapping[str, tuple[str, ...]] = {
    "3b-fr-ft-research_release": ("pierre", "amelie", "marie"),
    "3b-de-ft-research_release": ("jana", "thomas", "max"),
    "3b-ko-ft-research_release": ("유나", "준서"),
    "3b-hi-ft-research_release": ("ऋतिका",),
    "3b-zh-ft-research_release": ("长乐", "白芷"),
    "3b-es_it-ft-research_release": ("javi", "sergio", "maria", "pietro", "giulia", "carlo"),
}
"""Published finetunes -> voices, the default first. Any other checkpoint speaks English, or lists `voices.json`."""

AUDIO_OFFSET = 10
"""custom_token_0 .. 9 are control tokens; code 0 of slot 0 is custom_token_10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens that frame a prompt and end speech."""

    begin_of_text: int
    end_of_turn: int
    start_of_human: int
    end_of_human: int
    start_of_ai: int
    start_of_speech: int
    end_of_speech: int
    audio_base: int


_NAMES = {
    "begin_of_text": "<|begin_of_text|>",
    "end_of_turn": "<|eot_id|>",
    "start_of_human": "<custom_token_3>",
    "end_of_human": "<custom_token_4>",
    "start_of_ai": "<custom_token_5>",
    "start_of_speech": "<custom_token_1>",
    "end_of_speech": "<custom_token_2>",
    "audio_base": "<custom_token_0>",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnacConfig:
    """Shape of the codec's decoder, as the codec's own config.json gives it."""

    sampling_rate: int
    latent_dim: int
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    codebook_size: int
    codebook_dim: int
    vq_strides: tuple[int, ...]
    noise: bool
    depthwise: bool

    def __post_init__(self) -> None:
        sizes = (self.sampling_rate, self.latent_dim, self.decoder_dim, self.codebook_size, self.codebook_dim)
        if min(*sizes, *self.decoder_rates, *self.vq_strides) < 1:
            raise ValueError("all rates, strides and sizes must be at least 1")
        per_level = tuple(self.vq_strides[0] // stride for stride in self.vq_strides)
        wanted = tuple(len(slots) for slots in LEVEL_SLOTS)
        if per_level != wanted:
            raise ConfigError(
                f"the codec's vq_strides {list(self.vq_strides)} give {per_level} codes per frame and level; "
                f"Orpheus speaks {wanted}: use a codec such as {CODEC}"
            )

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.decoder_rates) * self.vq_strides[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrpheusConfig:
    """Everything the graph, the nodes and the processor need to know of a checkpoint.

    Args:
        language: the language model's config.json.
        generation: its generation_config.json, or {}.
        tokenizer: path of tokenizer.json.
        voices: known voices, the default first.
    """

    language: Mapping[str, Any]
    generation: Mapping[str, Any]
    codec: SnacConfig
    tokens: SpecialTokens
    tokenizer: Path
    voices: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        return int(self.language["vocab_size"])

    @property
    def dtype(self) -> str:
        """What the language model was saved in."""
        return str(self.language.get("dtype") or self.language.get("torch_dtype") or "float32")


def load(folder: Path, parts: Mapping[str, Path]) -> OrpheusConfig:
    """The configuration of a checkpoint. Raises ConfigError that names the file at fault."""
    language = _read_object(folder / "config.json")
    if language.get("model_type") != "llama":
        raise ConfigError(
            f"{folder / 'config.json'}: model_type is {language.get('model_type')!r}, expected 'llama'; "
            f"pass a checkpoint such as {CHECKPOINT}"
        )
    generation_file = folder / "generation_config.json"
    tokenizer = _find_tokenizer(folder, parts)
    codec = _load_codec(parts["snac_24khz"])
    tokens = _special_tokens(tokenizer)
    audio_end = tokens.audio_base + FRAME_CODES * codec.codebook_size
    if audio_end > language["vocab_size"]:
        raise ConfigError(
            f"{folder / 'config.json'}: vocab_size {language['vocab_size']} is too small for "
            f"{FRAME_CODES} slots of {codec.codebook_size} codes, which end at id {audio_end}"
        )
    return OrpheusConfig(
        language=language,
        generation=_read_object(generation_file) if generation_file.exists() else {},
        codec=codec,
        tokens=tokens,
        tokenizer=tokenizer,
        voices=_voices(folder),
    )


def max_model_len(config: OrpheusConfig) -> int:
    """Most tokens, prompt and speech together, that the language model was made for."""
    return int(config.language["max_position_embeddings"])


def voices(config: OrpheusConfig) -> list[str]:
    """Names of the known voices, the default first."""
    return list(config.voices)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; --model takes a checkpoint such as {CHECKPOINT}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def _find_tokenizer(folder: Path, parts: Mapping[str, Path]) -> Path:
    for place in (folder, parts.get("tokenizer")):
        if place is not None and (place / "tokenizer.json").exists():
            return place / "tokenizer.json"
    from huggingface_hub import hf_hub_download  # slow to import, and needed by almost no checkpoint
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(TOKENIZER, "tokenizer.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and fetching that of {TOKENIZER} failed ({error}); "
            "put tokenizer.json into the model's folder"
        ) from error


def _load_codec(folder: Path) -> SnacConfig:
    path = folder / "config.json"
    raw = _read_object(path)
    try:
        return _codec(raw, path=path)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} describes no codec: {reason}; use a codec such as {CODEC}") from error


def _codec(raw: Mapping[str, Any], *, path: Path) -> SnacConfig:
    if raw.get("attn_window_size") is not None:
        raise ConfigError(
            f"{path}: attn_window_size {raw['attn_window_size']}: codecs with attention are not "
            f"supported; use a codec such as {CODEC}"
        )
    latent_dim = raw.get("latent_dim")
    return SnacConfig(
        sampling_rate=raw["sampling_rate"],
        latent_dim=raw["encoder_dim"] * 2 ** len(raw["encoder_rates"]) if latent_dim is None else latent_dim,
        decoder_dim=raw["decoder_dim"],
        decoder_rates=tuple(raw["decoder_rates"]),
        codebook_size=raw["codebook_size"],
        codebook_dim=raw["codebook_dim"],
        vq_strides=tuple(raw["vq_strides"]),
        noise=raw.get("noise", True),
        depthwise=raw.get("depthwise", True),
    )


def _special_tokens(tokenizer: Path) -> SpecialTokens:
    added = {token["content"]: token["id"] for token in _read_object(tokenizer)["added_tokens"]}
    missing = sorted(name for name in _NAMES.values() if name not in added)
    if missing:
        raise ConfigError(f"{tokenizer}: added_tokens lack {', '.join(missing)}; is it the tokenizer of {TOKENIZER}?")
    ids = {field: added[name] for field, name in _NAMES.items()}
    return SpecialTokens(**{**ids, "audio_base": ids["audio_base"] + AUDIO_OFFSET})


def _voices(folder: Path) -> tuple[str, ...]:
    listed = folder / "voices.json"
    if listed.exists():
        names = _read_json(listed)
        if not (isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)):
            raise ConfigError(f"{listed}: expected a list of voice names, the default first")
        return tuple(names)
    # A hub checkpoint lies in .../models--OWNER--NAME/snapshots/REVISION, a downloaded one in .../NAME.
    for place in folder.absolute().parts[::-1]:
        known = VOICES.get(place.rpartition("--")[2])
        if known is not None:
            return known
    return ENGLISH_VOICES
