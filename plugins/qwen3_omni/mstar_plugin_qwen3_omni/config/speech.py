"""The configuration of what speaks: talker, code predictor and codec. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mstar.plugin.fields import Fields
from mstar_plugin_qwen3_omni.config.decoder import DecoderConfig, attention_sizes, read_decoder, rope_theta

SPECIAL_CODES = 1024
"""The last ids of the talker's vocabulary are no codes; of them only the end is ever drawn."""
SAMPLE_RATE = 24_000
SPEAKER = "ethan"
"""Who speaks where nobody is named, if the checkpoint knows him."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerTokens:
    """Ids that the talker's prompt is framed with.

    Args:
        pad, bos, eos, nothink, think_bos, think_eos: of the talker's own vocabulary.
        text_pad, text_bos, text_eos: of the thinker's.
    """

    pad: int
    bos: int
    eos: int
    nothink: int
    think_bos: int
    think_eos: int
    text_pad: int
    text_bos: int
    text_eos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerConfig:
    """The decoder that draws the first code of a frame.

    Args:
        vocab_size: of its codes, special ones included.
        num_codes: codes that sound.
        num_groups: codes of a frame.
        tap: which layer's input of the thinker it hears media by.
        text_size: width of the thinker's embeddings and hidden states.
        text_vocab_size: of the thinker's embeddings.
        speakers: name, in lower case -> its id.
    """

    decoder: DecoderConfig
    vocab_size: int
    num_groups: int
    tap: int
    text_size: int
    text_vocab_size: int
    tokens: TalkerTokens
    speakers: Mapping[str, int]
    max_positions: int

    @property
    def names(self) -> list[str]:
        """Who can speak, the default first."""
        return sorted(self.speakers, key=lambda name: (name != SPEAKER, name))

    @property
    def num_codes(self) -> int:
        return self.vocab_size - SPECIAL_CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """The decoder that draws the further codes of a frame, one by one; heads and embeddings are each code's own."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_groups: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderConfig:
    """The codec's decoder: frames of codes to samples.

    Args:
        window: frames that a frame sees, itself included.
        upsampling: by the stages at the transformer's width, then `rates` by those that halve it.
        width: channels before the first halving.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    codebook_size: int
    num_groups: int
    window: int
    upsampling: tuple[int, ...]
    rates: tuple[int, ...]
    width: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool

    @property
    def frame_samples(self) -> int:
        return math.prod(self.upsampling) * math.prod(self.rates)

    @property
    def lost_samples(self) -> int:
        """By how much the sound of n frames is shorter than n * frame_samples: each stage ends a step early."""
        lost = 0
        for rate in self.rates:
            lost = lost * rate + rate
        return lost

    def num_samples(self, frames: int) -> int:
        """Samples of a sound of so many frames."""
        return max(0, frames * self.frame_samples - self.lost_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechConfig:
    """What a checkpoint that speaks has besides its thinker."""

    talker: TalkerConfig
    predictor: PredictorConfig
    vocoder: VocoderConfig


def read_speech(config: Fields) -> SpeechConfig | None:
    """Of a whole config.json; None where there is no talker. Raises ConfigError for what cannot be served."""
    if not config.flag("enable_audio_output", True) or not config.has("talker_config"):
        return None
    talker = _talker(config)
    predictor = _predictor(config.part("talker_config").part("code_predictor_config"))
    vocoder = _vocoder(config.part("code2wav_config"))
    counts = {"code_predictor_config": predictor.num_groups, "code2wav_config": vocoder.num_groups}
    for name, count in counts.items():
        if count != talker.num_groups:
            problem = f"{name} has {count} codes in a frame"
            raise config.part("talker_config").refuse("num_code_groups", problem)
    if predictor.hidden_size != talker.decoder.hidden_size:
        problem = f"the talker's hidden_size is {talker.decoder.hidden_size}, and the predictor reads its hidden states"
        raise config.part("talker_config").part("code_predictor_config").refuse("hidden_size", problem)
    for name, size in {"the talker": talker.num_codes, "the predictor": predictor.vocab_size}.items():
        if size > vocoder.codebook_size:
            problem = f"{name} draws {size} different codes"
            raise config.part("code2wav_config").refuse("codebook_size", problem)
    return SpeechConfig(talker=talker, predictor=predictor, vocoder=vocoder)


def _talker(config: Fields) -> TalkerConfig:
    fields, thinker = config.part("talker_config"), config.part("thinker_config").part("text_config")
    text = fields.part("text_config")
    decoder = read_decoder(text, shared_expert=True)
    if decoder.moe is None:
        raise text.refuse("num_experts", "all layers of a talker have experts")
    vocab_size = text.whole("vocab_size")
    if vocab_size <= SPECIAL_CODES:
        raise text.refuse("vocab_size", f"its last {SPECIAL_CODES} ids are no codes")
    tap, size = fields.whole("accept_hidden_layer", least=0), fields.whole("thinker_hidden_size")
    if tap >= (layers := thinker.whole("num_hidden_layers")):
        raise fields.refuse("accept_hidden_layer", f"it is what enters a layer of the thinker, which has {layers}")
    for name, only in {
        "position_id_per_seconds": config.part("thinker_config").value("position_id_per_seconds", 25),
        "spatial_merge_size": config.part("thinker_config").part("vision_config", {}).value("spatial_merge_size", 2),
    }.items():
        fields.require(name, only, "the talker has the thinker's positions")
    if size != thinker.whole("hidden_size"):
        raise fields.refuse("thinker_hidden_size", f"the thinker's hidden_size is {thinker.whole('hidden_size')}")
    return TalkerConfig(
        decoder=replace(decoder, dense_layers=()),
        vocab_size=vocab_size,
        num_groups=fields.whole("num_code_groups"),
        tap=tap,
        text_size=size,
        text_vocab_size=thinker.whole("vocab_size"),
        tokens=_tokens(config, vocab_size=vocab_size, text_vocab_size=thinker.whole("vocab_size")),
        speakers=_speakers(fields, vocab_size=vocab_size),
        max_positions=text.whole("max_position_embeddings", 65536),
    )


def _tokens(config: Fields, *, vocab_size: int, text_vocab_size: int) -> TalkerTokens:
    fields = config.part("talker_config")
    own = {
        "pad": "codec_pad_id",
        "bos": "codec_bos_id",
        "eos": "codec_eos_token_id",
        "nothink": "codec_nothink_id",
        "think_bos": "codec_think_bos_id",
        "think_eos": "codec_think_eos_id",
    }
    texts = {"text_pad": "tts_pad_token_id", "text_bos": "tts_bos_token_id", "text_eos": "tts_eos_token_id"}
    ids = {}
    for part, names, size in ((fields, own, vocab_size), (config, texts, text_vocab_size)):
        for ours, name in names.items():
            ids[ours] = part.whole(name, least=0)
            if ids[ours] >= size:
                raise part.refuse(name, f"the vocabulary has {size} ids")
    if ids["eos"] < vocab_size - SPECIAL_CODES:
        raise fields.refuse("codec_eos_token_id", f"the first {vocab_size - SPECIAL_CODES} ids are codes")
    return TalkerTokens(**ids)


def _speakers(fields: Fields, *, vocab_size: int) -> dict[str, int]:
    part = fields.part("speaker_id")
    if not part.values:
        raise fields.refuse("speaker_id", "expected names with their ids")
    speakers = {name.lower(): part.whole(name, least=0) for name in part.values}
    for name in part.values:
        if part.whole(name, least=0) >= vocab_size:
            raise part.refuse(name, f"the talker's vocabulary has {vocab_size} ids")
    return speakers


def _predictor(fields: Fields) -> PredictorConfig:
    fields.require("use_sliding_window", False, "attention here has no window")
    kinds = fields.value("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        raise fields.refuse("layer_types", "attention here has no window", "use another checkpoint")
    return PredictorConfig(
        **attention_sizes(fields),
        vocab_size=fields.whole("vocab_size"),
        num_groups=fields.whole("num_code_groups"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(fields, 1e6),
        attention_bias=fields.flag("attention_bias", False),
    )


def _vocoder(fields: Fields) -> VocoderConfig:
    rates, width = fields.wholes("upsample_rates"), fields.whole("decoder_dim")
    if width % 2 ** len(rates):
        raise fields.refuse("decoder_dim", f"each of {len(rates)} upsample_rates halves it")
    return VocoderConfig(
        **attention_sizes(fields),
        codebook_size=fields.whole("codebook_size"),
        num_groups=fields.whole("num_quantizers"),
        window=fields.whole("sliding_window"),
        upsampling=fields.wholes("upsampling_ratios"),
        rates=rates,
        width=width,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope_theta=rope_theta(fields, 1e4),
        attention_bias=fields.flag("attention_bias", False),
    )
