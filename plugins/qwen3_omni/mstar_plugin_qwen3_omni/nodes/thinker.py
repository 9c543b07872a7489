"""The nodes that see, hear, read and write. Run in a worker.

B: tasks, T: tokens of all tasks, L: sets of tokens of a picture beside the first. A prompt is read without its last
token: answers begin with that, so that each sample draws its own first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mstar.layers.sampling import logprobs
from mstar.plugin.nodes import Context, KVLayout, Node, Plan, Sampler, Task
from mstar.plugin.spec import Checkpoint
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.graph import MOST_LOGPROBS
from mstar_plugin_qwen3_omni.modeling.audio import AudioEncoder
from mstar_plugin_qwen3_omni.modeling.decoder import tensor_parallel
from mstar_plugin_qwen3_omni.modeling.pictures import normalised
from mstar_plugin_qwen3_omni.modeling.thinker import Spliced, Thinker
from mstar_plugin_qwen3_omni.modeling.vision import VisionEncoder
from mstar_plugin_qwen3_omni.weights import thinker as weights

Media = list[Tensor] | None


class AudioNode(Node):
    """The audio encoder."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        assert config.thinker.audio is not None
        with torch.device("meta"):  # filled by load_weights
            self.encoder = AudioEncoder(config.thinker.audio)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_audio(self.encoder, checkpoint, dtype, device)

    def encode(self, ctx: Context, spectrogram: list[Tensor]) -> dict[str, list[Tensor]]:
        """Spectrograms (bins, frames) -> what is heard of each, (tokens, hidden)."""
        size = 1 if ctx.row_multiple > 1 else len(spectrogram)  # else the bits of a sound depend on the others
        batches = [spectrogram[i : i + size] for i in range(0, len(spectrogram), size)]
        return {"heard": [one for batch in batches for one in self.encoder(batch)]}


class VisionNode(Node):
    """The vision encoder."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        assert config.thinker.vision is not None
        with torch.device("meta"):
            self.encoder = VisionEncoder(config.thinker.vision)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_vision(self.encoder, checkpoint, dtype, device)

    def encode(self, ctx: Context, patches: list[Tensor], grid: list[list[int]]) -> dict[str, list[Tensor]]:
        """patches (n, patch_dim) uint8 and grid (frames, rows, columns) of each picture or video -> what is seen of it,
        (tokens, 1 + L, hidden)."""
        size = 1 if ctx.row_multiple > 1 else len(patches)
        found: list[Tensor] = []
        for start in range(0, len(patches), size):
            cut = [normalised(one, self.config.pictures) for one in patches[start : start + size]]
            grids = [(int(t), int(h), int(w)) for t, h, w in grid[start : start + size]]
            found += self.encoder(cut, grids)
        return {"seen": found}


class ThinkerNode(Node):
    """Reads prompts with media in them, and writes."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.thinker = Thinker(config.thinker)
        shape = config.thinker.decoder
        self.kv_layout = KVLayout(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        self.samplers = (Sampler(name="main", vocab_size=config.thinker.vocab_size),)
        self.tensor_parallel = {
            r"thinker\.(embedding|head)": "vocab",
            **tensor_parallel(shape, to="thinker.decoder."),
        }

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_thinker(self.thinker, checkpoint, dtype, device)

    # ---- reading ----------------------------------------------------------------------------------------

    def prepare_prefill(self, tasks: Sequence[Task]) -> Plan | None:
        """Positions of this chunk, which media go where, and which of their rows."""
        if all(task.inputs["sources"] is None for task in tasks):
            return None
        positions, advance = [], []
        rows: dict[str, list[Tensor]] = {"seen": [], "heard": []}
        places: dict[str, list[Tensor]] = {"seen": [], "heard": []}
        starts = {"seen": 0, "heard": 0}
        first = 0
        for task in tasks:
            here = slice(task.token_start, task.token_start + task.num_tokens)
            if (sources := task.inputs["sources"]) is None:
                positions.append((task.position + torch.arange(task.num_tokens))[:, None].expand(-1, 3).float())
                advance.append(float(task.num_tokens))
            else:
                own = task.inputs["places"][here].float()
                positions.append(own[:, :3])
                advance.append(float(own[-1, 3]) - task.position)
                which, skip = sources[here], 0
                for name in starts:
                    count = sum(map(len, task.inputs[name] or ()))
                    is_here = (which >= skip) & (which < skip + count)
                    places[name].append(first + is_here.nonzero()[:, 0])
                    rows[name].append(which[is_here] - skip + starts[name])
                    starts[name], skip = starts[name] + count, skip + count
            first += task.num_tokens
        tensors = {f"{name}_at": torch.cat(found) for name, found in places.items()}
        tensors |= {f"{name}_rows": torch.cat(found) for name, found in rows.items()}
        shielded = {name: tensor[None] for name, tensor in tensors.items()}  # one row: not padded
        return Plan(positions=torch.cat(positions), advance=advance, tensors=shielded)

    prepare_tapped = prepare_prefill

    def prefill(
        self,
        ctx: Context,
        ids: Tensor,
        places: Tensor | None,
        sources: Tensor | None,
        seen: list[Media],
        heard: list[Media],
    ) -> dict[str, Tensor]:
        """A prompt, of which nothing is kept but keys and values.

        Args:
            ids: (T,), with a token for each of media.
            places: (T, 4) float32, positions, and where the token after each begins; absent: consecutive.
            sources: (T,) int64, which of the request's media rows stands there: those of all that is seen, in order,
                then those of all that is heard; -1: the token itself. Absent: no media.
            seen: per request, (tokens, 1 + L, hidden) of each picture and video.
            heard: per request, (tokens, hidden) of each sound.
        """
        self._read(ctx, ids, seen, heard, tap=None)
        return {}

    def tapped(
        self,
        ctx: Context,
        ids: Tensor,
        places: Tensor | None,
        sources: Tensor | None,
        seen: list[Media],
        heard: list[Media],
    ) -> dict[str, Tensor]:
        """As `prefill`, with what enters the layer that speech is made from: taps (T, hidden)."""
        return {"taps": self._read(ctx, ids, seen, heard, tap=self.config.speech.talker.tap)}

    def _read(self, ctx: Context, ids: Tensor, seen: list[Media], heard: list[Media], *, tap: int | None) -> Tensor:
        media = None
        if "seen_at" in ctx.plan:
            pictures = [one for task in seen for one in task or ()]
            sounds = [one for task in heard for one in task or ()]
            seen_at, seen_rows, heard_at, heard_rows = (
                ctx.plan[name][0] for name in ("seen_at", "seen_rows", "heard_at", "heard_rows")
            )
            hidden = self.config.thinker.decoder.hidden_size
            levels = 1 + self.config.thinker.num_taps
            looks = torch.cat(pictures) if pictures else self.thinker.embedding.weight.new_empty(0, levels, hidden)
            sound = torch.cat(sounds) if sounds else looks.new_empty(0, hidden)
            looks = looks.index_select(0, seen_rows)
            embeddings = torch.cat((looks[:, 0], sound.index_select(0, heard_rows)))
            media = Spliced(torch.cat((seen_at, heard_at)), embeddings, seen_at, looks[:, 1:])
        invariant = ctx.row_multiple > 1
        x, tapped = self.thinker(ids, ctx.positions, ctx.kv.attend, media=media, tap=tap, invariant=invariant)
        return x if tapped is None else tapped

    # ---- writing ----------------------------------------------------------------------------------------

    def decode(self, ctx: Context, last: Tensor) -> dict[str, Tensor]:
        """last (B,), each sequence's newest token -> the token drawn after it, three times: `finish_decode` lets out
        text and words."""
        token = ctx.sample("main", self._logits(ctx, last))
        return {"last": token, "text": token, "words": token}

    def finish_decode(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Tensor | None]]:
        text = list(self._let_out(tasks, outputs["last"], outputs["text"]))
        return {"text": text, "words": _spoken(tasks, text)}

    def score(self, ctx: Context, last: Tensor) -> dict[str, Tensor]:
        """As `decode`, with log-probabilities: scored (B, 2 + 2 * MOST_LOGPROBS).

        They are the token, its own, the likeliest tokens, and theirs; of the logits as they are.
        """
        logits = self._logits(ctx, last)
        token = ctx.sample("main", logits)
        own, ids, best = logprobs(logits, token, MOST_LOGPROBS)
        scored = torch.cat([token[:, None], own[:, None], ids, best], dim=1).double()
        return {"last": token, "text": token, "words": token, "scored": scored}

    def finish_score(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Tensor | None]]:
        text = list(self._let_out(tasks, outputs["last"], outputs["text"]))
        rows = zip(text, outputs["scored"], strict=True)
        return {
            "text": text,
            "words": _spoken(tasks, text),
            "scored": [None if token is None else row for token, row in rows],
        }

    def _logits(self, ctx: Context, last: Tensor) -> Tensor:
        hidden, _ = self.thinker(last, ctx.positions, ctx.kv.attend, invariant=ctx.row_multiple > 1)
        return self.thinker.logits(hidden).float()

    def _let_out(self, tasks: Sequence[Task], tokens: Tensor, values: Tensor) -> Iterator[Tensor | None]:
        """What each task tells of its token. The one that ends an answer is none of it."""
        for task, token, value in zip(tasks, tokens.tolist(), values, strict=True):
            is_end = token in self.config.stops and not task.params.ignore_eos
            if is_end:
                task.stop()
            else:
                task.count("completion_tokens")
            yield None if is_end else value


def _spoken(tasks: Sequence[Task], text: list[Tensor | None]) -> list[Tensor | None]:
    """What of a text goes to the talker. The authors' code leaves out the token at which a limit cuts it."""
    is_cut = [t.iteration + 1 == t.fields["max_tokens"] and not t.params.speak_last_token for t in tasks]
    return [None if cut or token is None else token[None] for cut, token in zip(is_cut, text, strict=True)]
