"""The thinker's configuration: encoders of sound and pictures, the decoder that reads and writes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mstar.plugin.fields import Fields
from mstar_plugin_qwen3_omni.config.decoder import DecoderConfig, read_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """The encoder of sound.

    Args:
        num_bins: of the mel spectrogram.
        channels: of the three convolutions.
        chunk_frames: frames that go through them together, and after which positions start anew.
        window_chunks: chunks whose tokens see each other.
        batch_chunks: most chunks that go through the convolutions at once.
        max_positions: rows of the table of positions.
    """

    num_bins: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    channels: int
    chunk_frames: int
    window_chunks: int
    batch_chunks: int
    max_positions: int
    activation: str
    output_size: int

    def num_tokens(self, frames: int) -> int:
        """Tokens of a sound of so many frames: each chunk's halved three times, rounded up."""
        whole, rest = divmod(frames, self.chunk_frames)
        return whole * _eighth(self.chunk_frames) + _eighth(rest)

    @property
    def window_tokens(self) -> int:
        """Tokens that see each other."""
        return self.window_chunks * _eighth(self.chunk_frames)


def _eighth(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The encoder of pictures.

    Args:
        merge: patches along each side of the square that becomes one token.
        frames: of a video in one patch.
        side: rows and columns of the table of positions.
        taps: layers after which a further set of tokens is taken, for the decoder's first layers.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge: int
    frames: int
    side: int
    taps: tuple[int, ...]
    activation: str
    rope_theta: float
    output_size: int

    @property
    def patch_dim(self) -> int:
        return 3 * self.frames * self.patch_size**2

    @property
    def unit(self) -> int:
        """Pixels along each side of what becomes one token."""
        return self.merge * self.patch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """Ids of the tokens that stand for media in a prompt, and that frame them."""

    audio: int
    image: int
    video: int
    audio_start: int
    audio_end: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerConfig:
    """What sees, hears and writes.

    Args:
        audio, vision: None where the checkpoint has no such encoder.
        positions_per_s: how far positions go in a second of sound or video.
        tied: whether logits come from the embedding's weight.
        max_positions: tokens it was made for.
    """

    decoder: DecoderConfig
    audio: AudioConfig | None
    vision: VisionConfig | None
    tokens: MediaTokens
    positions_per_s: float
    vocab_size: int
    tied: bool
    max_positions: int

    @property
    def num_taps(self) -> int:
        """Sets of tokens of a picture beside the first."""
        return len(self.vision.taps) if self.vision is not None else 0


def read_thinker(fields: Fields, *, token_ids: Mapping[str, int]) -> ThinkerConfig:
    """The `thinker_config` of a config.json. `token_ids`: special tokens of the tokenizer, by what they say."""
    text = fields.part("text_config")
    decoder = read_decoder(text)
    audio = _audio(fields.part("audio_config")) if fields.has("audio_config") else None
    vision = _vision(fields.part("vision_config")) if fields.has("vision_config") else None
    for name, encoder in (("audio_config", audio), ("vision_config", vision)):
        if encoder is not None and encoder.output_size != decoder.hidden_size:
            problem = f"its output has {encoder.output_size} numbers; text_config.hidden_size is {decoder.hidden_size}"
            raise fields.part(name).refuse("output_dim" if encoder is audio else "out_hidden_size", problem)
    if vision is not None and len(vision.taps) > decoder.num_layers:
        problem = f"its sets go to the first layers of the decoder, which has {decoder.num_layers}"
        raise fields.part("vision_config").refuse("deepstack_visual_indexes", problem)
    vocab_size = text.whole("vocab_size")
    return ThinkerConfig(
        decoder=decoder,
        audio=audio,
        vision=vision,
        tokens=_tokens(fields, token_ids=token_ids, vocab_size=vocab_size),
        positions_per_s=fields.number("position_id_per_seconds", 25.0),
        vocab_size=vocab_size,
        # Files of this model say it in either place; the outer one is what its authors' code reads.
        tied=fields.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        max_positions=text.whole("max_position_embeddings", 32768),
    )


def _audio(fields: Fields) -> AudioConfig:
    hidden, heads = fields.whole("d_model"), fields.whole("encoder_attention_heads")
    if hidden % (2 * heads):
        raise fields.refuse("d_model", f"it must be an even multiple of encoder_attention_heads ({heads})")
    chunk, window = 2 * fields.whole("n_window", 50), fields.whole("n_window_infer", 800)
    if window < chunk:
        raise fields.refuse("n_window_infer", f"it must be at least a chunk, 2 n_window ({chunk})")
    config = AudioConfig(
        num_bins=fields.whole("num_mel_bins", 128),
        hidden_size=hidden,
        intermediate_size=fields.whole("encoder_ffn_dim"),
        num_layers=fields.whole("encoder_layers"),
        num_heads=heads,
        channels=fields.whole("downsample_hidden_size"),
        chunk_frames=chunk,
        window_chunks=window // chunk,
        batch_chunks=fields.whole("conv_chunksize", 500),
        max_positions=fields.whole("max_source_positions", 1500),
        activation=fields.activation("activation_function", "gelu"),
        output_size=fields.whole("output_dim"),
    )
    # The authors' code counts 13 tokens in a chunk whatever its length is.
    if config.num_tokens(chunk) != 13:
        raise fields.refuse("n_window", f"a chunk of {chunk} frames has {config.num_tokens(chunk)} tokens, not 13")
    return config


def _vision(fields: Fields) -> VisionConfig:
    for name in ("in_channels", "in_chans"):
        fields.require(name, 3, "pictures have red, green and blue only")
    fields.require("apply_vit_abs_pos_embed", True, "learned positions are always added here")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_heads")
    if hidden % (4 * heads):
        raise fields.refuse("hidden_size", f"it must be a multiple of 4 num_heads ({4 * heads})")
    layers, patch = fields.whole("depth"), fields.whole("patch_size", 16)
    fields.require("spatial_patch_size", patch, "patches are square")
    positions = fields.whole("num_position_embeddings")
    if math.isqrt(positions) ** 2 != positions:
        raise fields.refuse("num_position_embeddings", "expected a square number")
    taps = fields.wholes("deepstack_visual_indexes", (8, 16, 24), least=0)
    if sorted(set(taps)) != list(taps) or max(taps, default=0) >= layers:
        raise fields.refuse(
            "deepstack_visual_indexes", f"expected rising indices of layers, of which there are {layers}"
        )
    rope = fields.part("rope_parameters", {})
    rope.require("rope_type", "axial", "frequencies are not scaled here")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        patch_size=patch,
        merge=fields.whole("spatial_merge_size", 2),
        frames=fields.whole("temporal_patch_size", 2),
        side=math.isqrt(positions),
        taps=taps,
        activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
        rope_theta=rope.number("rope_theta", 10_000.0),
        output_size=fields.whole("out_hidden_size"),
    )


_NAMES = {
    "audio": ("audio_token_id", "<|audio_pad|>"),
    "image": ("image_token_id", "<|image_pad|>"),
    "video": ("video_token_id", "<|video_pad|>"),
    "audio_start": ("audio_start_token_id", "<|audio_start|>"),
    "audio_end": ("audio_end_token_id", "<|audio_end|>"),
    "vision_start": ("vision_start_token_id", "<|vision_start|>"),
    "vision_end": ("vision_end_token_id", "<|vision_end|>"),
}


def _tokens(fields: Fields, *, token_ids: Mapping[str, int], vocab_size: int) -> MediaTokens:
    """As config.json says, else as the tokenizer names them."""
    found = {ours: fields.whole(name, token_ids.get(text), least=0) for ours, (name, text) in _NAMES.items()}
    for ours, (name, text) in _NAMES.items():
        if found[ours] >= vocab_size:
            raise fields.refuse(name, f"{text} must be below vocab_size ({vocab_size})")
        if token_ids.get(text, found[ours]) != found[ours]:
            raise fields.refuse(name, f"the tokenizer has {text} at {token_ids[text]}", "take both from one checkpoint")
    return MediaTokens(**found)
