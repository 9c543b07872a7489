"""The nodes that speak: the talker, the code predictor and the codec. Run in a worker.

B: tasks, T: tokens of all tasks, H: width of the talker and of the predictor. Speech is a loop of frames; each frame's
first code is the talker's, the further ones are the predictor's, and the sum of what all of them stand for goes round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mstar.plugin.nodes import Context, KVLayout, Node, Plan, Sampler, Slot, Task
from mstar.plugin.spec import Checkpoint
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.config.speech import SpeechConfig
from mstar_plugin_qwen3_omni.modeling.code2wav import Code2Wav
from mstar_plugin_qwen3_omni.modeling.decoder import tensor_parallel
from mstar_plugin_qwen3_omni.modeling.predictor import FrameCache, Predictor
from mstar_plugin_qwen3_omni.modeling.talker import Talker
from mstar_plugin_qwen3_omni.weights import speech as weights

SILENT = -1
"""In the place of a word: there is nothing to say, not one word."""


class SpeechNode(Node):
    """What these nodes have in common."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        assert config.speech is not None
        self.speech: SpeechConfig = config.speech


class TalkerNode(SpeechNode):
    """Draws the first code of each frame, hearing the text word by word."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):  # filled by load_weights
            self.talker = Talker(self.speech.talker)
        shape = self.speech.talker.decoder
        self.kv_layout = KVLayout(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        self.samplers = (Sampler(name="talker", vocab_size=self.speech.talker.num_codes + 1),)
        self.tensor_parallel = {
            r"talker\.((text|codec)_embedding|codec_head)": "vocab",
            r"talker\.(text|hidden)_projection\.fc1": "column",
            r"talker\.(text|hidden)_projection\.fc2": "row",
            **tensor_parallel(shape, to="talker.decoder."),
        }

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_talker(self.talker, checkpoint, dtype, device)

    def prepare_prefill(self, tasks: Sequence[Task]) -> Plan:
        """Positions of this chunk, and which of the batch's taps stands where."""
        positions, advance, rows = list[Tensor](), list[float](), list[Tensor]()
        first = 0
        for task in tasks:
            here = slice(task.token_start, task.token_start + task.num_tokens)
            positions.append(task.inputs["places"][here].float())
            advance.append(float(positions[-1][-1, 0]) + 1 - task.position)
            sources = task.inputs["sources"][here]
            rows.append((sources + first).where(sources >= 0, -1))
            first += len(task.inputs["taps"])
        tensors = {"rows": torch.cat(rows)} if any(bool((found >= 0).any()) for found in rows) else {}
        return Plan(positions=torch.cat(positions), advance=advance, tensors=tensors)

    def prefill(
        self, ctx: Context, ids: Tensor, sources: Tensor, codes: Tensor, places: Tensor, taps: list[Tensor]
    ) -> dict[str, Tensor]:
        """A prompt; what it gives is the codes' side of what enters next.

        Args:
            ids: (T,) of text.
            sources: (T,) int64, which of the task's taps stands there instead; -1: none.
            codes: (T,) int64, the code added to it; -1: none.
            places: (T, 3) float32, positions.
            taps: of each task's thinker, (tokens, text_size).
        """
        x = self.talker.text(ids)
        if "rows" in ctx.plan:
            rows = ctx.plan["rows"]
            heard = self.talker.heard(torch.cat(taps).to(x.dtype)[rows.clamp(min=0)])
            x = heard.where(rows[:, None] >= 0, x)
        self._hidden(ctx, x + self.talker.codes(codes))
        return {"sum": self.talker.codes(torch.full_like(ctx.last_tokens, self.speech.talker.tokens.bos))}

    def prepare_follow(self, tasks: Sequence[Task]) -> Plan:
        """What stands in for a word where there is none: behind the last one its end, then padding."""
        tokens, chunks = self.speech.talker.tokens, [task.chunks.get("words") for task in tasks]
        ends = [tokens.text_pad if chunk is None else SILENT if chunk.first else tokens.text_eos for chunk in chunks]
        return Plan(tensors={"otherwise": torch.tensor(ends)})

    def follow(self, ctx: Context, words: list[Tensor | None]) -> dict[str, Tensor]:
        """The newest word of each task, if there is one -> text (B,), the id that goes with the next frame."""
        given = zip(words, ctx.plan["otherwise"], strict=True)
        return {"text": torch.stack([word[0] if word is not None and len(word) else other for word, other in given])}

    def step(self, ctx: Context, sum: Tensor, text: Tensor) -> dict[str, Tensor]:
        """The last frame's sum (B, H), text (B,) -> hidden (B, H), code (B,) and what it stands for, first (B, H)."""
        hidden = self._hidden(ctx, sum + self.talker.text(text.clamp(min=0)))
        code = ctx.sample("talker", self.talker.logits(hidden).float())
        code = code.where(text != SILENT, self.speech.talker.num_codes)
        return {"hidden": hidden, "first": self.talker.codes(code), "code": code}

    def _hidden(self, ctx: Context, x: Tensor) -> Tensor:
        return self.talker(x, ctx.positions, ctx.kv.attend, invariant=ctx.row_multiple > 1)


class PredictorNode(SpeechNode):
    """Draws the further codes of each frame, over a cache that begins anew with it."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.predictor = Predictor(self.speech.predictor)
        shape = self.speech.predictor
        groups, heads = shape.num_groups, (shape.num_kv_heads, shape.head_dim)
        self.samplers = (Sampler(name="code_predictor", vocab_size=shape.vocab_size),)
        self.slots = (
            Slot(name="cache", shape=(shape.num_layers, 2, groups, *heads)),
            Slot(name="total", shape=(shape.hidden_size,)),
            Slot(name="codes", shape=(groups,), dtype=torch.int64),
        )

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_predictor(self.predictor, checkpoint, dtype, device)

    def prefill(self, ctx: Context, hidden: Tensor, first: Tensor, code: Tensor) -> dict[str, Tensor]:
        """Begin a frame: the talker's hidden (B, H), its code (B,) and what that stands for (B, H) -> the next code."""
        ctx.slots["codes"][ctx.rows, 0] = code
        ctx.slots["total"][ctx.rows] = first.float()
        places = torch.arange(2, device=code.device).expand(code.shape[0], 2)
        return {"code": self._draw(ctx, torch.stack((hidden, first), dim=1), places, torch.zeros_like(code))}

    def step(self, ctx: Context, code: Tensor) -> dict[str, Tensor]:
        """The last code (B,) -> the next one (B,)."""
        number = ctx.iteration
        embedded = self.predictor.embed(code, number=number)
        ctx.slots["total"][ctx.rows] += embedded.float()
        return {"code": self._draw(ctx, embedded[:, None], number[:, None] + 2, number + 1)}

    def sum(self, ctx: Context, code: Tensor) -> dict[str, Tensor]:
        """The last code (B,) -> sum (B, H) of what all codes stand for, and the frame (B, groups)."""
        last = self.predictor.embed(code, number=torch.full_like(code, self.speech.predictor.num_groups - 2))
        total = ctx.slots["total"][ctx.rows].to(last.dtype) + last
        return {"sum": total, "frame": ctx.slots["codes"][ctx.rows]}

    def finish_sum(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """The end, drawn in the place of a frame's first code, ends the loop, and there is no frame."""
        return {"frame": list(self._frames(tasks, outputs["frame"]))}

    def _frames(self, tasks: Sequence[Task], frames: Tensor) -> Iterator[Tensor | None]:
        is_end = frames[:, 0] == self.speech.talker.num_codes
        for task, frame, ends in zip(tasks, frames, is_end.tolist(), strict=True):
            if ends:
                task.stop()
            else:
                task.count("frames")
            yield None if ends else frame[None]

    def _draw(self, ctx: Context, x: Tensor, places: Tensor, number: Tensor) -> Tensor:
        """x (B, n, H) at places (B, n) of the frame -> (B,), the code that head `number` (B,) gives."""
        hidden = self.predictor(x, FrameCache(ctx.slots["cache"], ctx.rows, places))
        logits = self.predictor.logits(hidden, number=number, invariant=ctx.row_multiple > 1)
        code = ctx.sample("code_predictor", logits.float())
        ctx.slots["codes"][ctx.rows, number + 1] = code
        return code


class VocoderNode(SpeechNode):
    """The codec's decoder, always float32."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.code2wav = Code2Wav(self.speech.vocoder)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_vocoder(self.code2wav, checkpoint, torch.float32, device)

    def prepare_decode(self, tasks: Sequence[Task]) -> Plan:
        """From which sample on a window's sound is wanted.

        In a stream these are as many samples as its new frames have: the last ones, as a sound ends early, by what the
        next window begins with. Otherwise those behind the context, as in the authors' code, which leaves holes.
        """
        shape, starts = self.speech.vocoder, []
        for task in tasks:
            chunk, context = task.chunks.get("window"), task.inputs["context"]
            if chunk is None:
                starts.append((0 if context is None else int(context)) * shape.frame_samples)
            else:
                total = shape.num_samples(len(task.inputs["window"]))
                starts.append(max(0, total - chunk.num_new * shape.frame_samples))
        return Plan(tensors={"starts": torch.tensor(starts)})

    def decode(self, ctx: Context, window: list[Tensor], context: list[Any]) -> dict[str, list[Tensor]]:
        """Frames (n, groups) of each task -> the samples that are wanted of it.

        Windows of one length go together, except on CPUs, which are no faster so, and round otherwise; the network
        makes a hundred times more of a rounding.
        """
        starts = ctx.plan["starts"].tolist()
        shape = self.speech.vocoder
        audio = [torch.zeros(0, device=frames.device) for frames in window]
        alike: dict[int, list[int]] = {}
        for place, (frames, start) in enumerate(zip(window, starts, strict=True)):
            if start < shape.num_samples(len(frames)):
                is_alone = ctx.row_multiple > 1 or frames.device.type == "cpu"
                alike.setdefault(-place if is_alone else len(frames), []).append(place)
        for places in alike.values():
            whole = self.code2wav(torch.stack([window[place] for place in places]))
            for place, samples in zip(places, whole, strict=True):
                audio[place] = samples[starts[place] :]
        return {"audio": audio}
