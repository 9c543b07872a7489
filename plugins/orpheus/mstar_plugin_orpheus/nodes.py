"""The nodes of Orpheus: the language model that draws one token a step, and the codec that speaks windows of frames.

Run in a worker. Batched and pure but for KV, samplers and the host-side state of frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mstar.layers.decoder import Decoder, decoder_parallel
from mstar.layers.sampling import normal
from mstar.plugin.nodes import Context, KVLayout, Node, Plan, Sampler, Task
from mstar.plugin.spec import Checkpoint
from mstar_plugin_orpheus import weights
from mstar_plugin_orpheus.config import OrpheusConfig
from mstar_plugin_orpheus.modeling.frames import FRAME_CODES, LEVEL_SLOTS, FrameAssembler, new_frames
from mstar_plugin_orpheus.modeling.snac import SnacDecoder


class LanguageModel(Node):
    """A Llama whose tokens are codes; `finish_decode` turns them into whole frames."""

    def __init__(self, config: OrpheusConfig) -> None:
        super().__init__(config)
        shape = weights.decoder_config(config)
        with torch.device("meta"):  # filled by load_weights
            self.decoder = Decoder(shape)
        self.kv_layout = KVLayout(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        self.samplers = (Sampler(name="main", vocab_size=shape.vocab_size),)
        self.tensor_parallel = decoder_parallel(to="decoder.")
        self.host_state = partial(FrameAssembler, config.tokens.audio_base, config.codec.codebook_size)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_language_model(self.decoder, checkpoint.folder, dtype=dtype, device=device)

    def prefill(self, ctx: Context, ids: Tensor) -> dict[str, Tensor]:
        """ids (T,) -> nothing but their keys and values."""
        self.decoder(self.decoder.embed(ids), ctx.positions, ctx.kv)
        return {}

    def decode(self, ctx: Context, last: Tensor) -> dict[str, Tensor | None]:
        """last (B,), each sequence's newest token -> last (B,), the token drawn after it; `finish_decode` has codes."""
        hidden = self.decoder(self.decoder.embed(last), ctx.positions, ctx.kv)
        return {"last": ctx.sample("main", self.decoder.logits(hidden).float()), "codes": None}

    def finish_decode(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        frames: list[Tensor | None] = []
        for task, token in zip(tasks, outputs["last"].tolist(), strict=True):
            assembler: FrameAssembler = task.state
            task.count("completion_tokens")
            codes: list[int] = []
            if token == self.config.tokens.end_of_speech and not task.params.ignore_eos:
                num_dropped = assembler.drop()
                task.stop("stop")
            else:
                codes, num_dropped = assembler.push([token])
            if num_dropped:
                task.count("skipped_codes", num_dropped)
            frames.append(torch.tensor(codes) if codes else None)
        return {"codes": frames}


class Codec(Node):
    """SNAC, always float32. `vocode` decodes windows; which of their samples are new, `finish_vocode` knows."""

    def __init__(self, config: OrpheusConfig) -> None:
        super().__init__(config)
        self.decoder = SnacDecoder(config.codec)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_codec(self.decoder, checkpoint.parts["snac_24khz"], device=device)

    def feed(self, ctx: Context, codes: list[Tensor]) -> dict[str, None]:
        """The client's codes; `finish_feed` hands them on."""
        return {"items": None}

    def finish_feed(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        return {"items": [task.inputs["codes"] for task in tasks]}

    def prepare_vocode(self, tasks: Sequence[Task]) -> Plan:
        return Plan(
            tensors={
                "first_frame": torch.tensor([task.chunks["window"].start // FRAME_CODES for task in tasks]),
                "noise_gain": torch.tensor([float(task.params.codec_noise) for task in tasks]),
            }
        )

    def vocode(self, ctx: Context, window: Tensor) -> dict[str, Tensor]:
        """window (B, 7 * frames) of codes -> audio (B, samples)."""
        if window.shape[1] == 0:
            return {"audio": torch.zeros(window.shape, device=window.device)}
        frames = window.unflatten(1, (-1, FRAME_CODES))
        codes = [frames[:, :, slots].flatten(1) for slots in LEVEL_SLOTS]
        noise = self._noise(ctx, num_frames=frames.shape[1]) if self.config.codec.noise else None
        return {"audio": self.decoder(codes, noise)}

    def _noise(self, ctx: Context, *, num_frames: int) -> list[Tensor]:
        """Standard normal noise per block, keyed by where in the request's audio a step lies.

        So windows that overlap agree on it, and how a stream was cut into windows is not heard.
        """
        gain, first_frame = ctx.plan["noise_gain"][:, None], ctx.plan["first_frame"][:, None]
        num_blocks = len(self.decoder.block_steps)
        noise = []
        for block, steps in enumerate(self.decoder.block_steps):
            within = torch.arange(num_frames * steps, device=ctx.draw_keys.device)
            counters = (first_frame * steps + within) * num_blocks + block
            noise.append(gain * normal(ctx.draw_keys[:, None], counters))
        return noise

    def finish_vocode(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        samples_per_frame = self.config.codec.samples_per_frame
        heard: list[Tensor | None] = []
        for task, audio in zip(tasks, outputs["audio"], strict=True):
            chunk = task.chunks["window"]
            start, end = new_frames(
                num_frames=len(audio) // samples_per_frame,
                num_new_frames=chunk.num_new // FRAME_CODES,
                first=chunk.first,
                final=chunk.final,
            )
            heard.append(audio[start * samples_per_frame : end * samples_per_frame] if end > start else None)
        return {"audio": heard}
