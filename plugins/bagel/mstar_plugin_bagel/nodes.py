"""The nodes of BAGEL: encoders of images, the language model that reads, writes and draws, guidance. Run in a worker.

B: tasks, T: tokens of all tasks, N: latent tokens of a drawing, D: numbers in one. A drawing's tokens lie between two
rows for its markers, which hold zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mstar.layers.sampling import logprobs
from mstar.plugin.nodes import Context, KVLayout, Node, Plan, Sampler, Task
from mstar.plugin.spec import Checkpoint
from mstar_plugin_bagel import weights
from mstar_plugin_bagel.config import BagelConfig
from mstar_plugin_bagel.graph import MOST_LOGPROBS
from mstar_plugin_bagel.modeling.flow import RENORMS, FlowHead, guide, patchify, unpatchify
from mstar_plugin_bagel.modeling.llm import MoT, Routing, grouped
from mstar_plugin_bagel.modeling.schedule import guidance, schedule
from mstar_plugin_bagel.modeling.vae import Autoencoder
from mstar_plugin_bagel.modeling.vit import VisionEncoder

Images = list[Tensor | None]


TENSOR_PARALLEL = {
    r"llm\.(embedding|head)": "vocab",
    r"llm\.layers\.\d+\.(und|gen)\.qkv": "heads",
    r"llm\.layers\.\d+\.(und|gen)\.gate_up": "column",
    r"llm\.layers\.\d+\.(und|gen)\.(output|down)": "row",
}


class Vision(Node):
    """The vision encoder and its connector."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):  # filled by load_weights
            self.encoder = VisionEncoder(config)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_vit(self.encoder, checkpoint, dtype, device)

    def encode(self, ctx: Context, patches: list[Tensor], places: list[Tensor]) -> dict[str, list[Tensor]]:
        """patches (n, patch_dim) and places (n,) of each image -> what is seen of it (n, hidden)."""
        size = 1 if ctx.row_multiple > 1 else len(patches)  # else the bits of an image depend on the others
        batches = [(patches[i : i + size], places[i : i + size]) for i in range(0, len(patches), size)]
        return {"seen": [image for batch in batches for image in self.encoder(*batch)]}


class Latents(Node):
    """The autoencoder: images to latent tokens and back."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.autoencoder = Autoencoder(config.autoencoder)

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_vae(self.autoencoder, checkpoint, dtype, device)

    def encode(self, ctx: Context, pixels: list[Tensor], noise: list[Tensor]) -> dict[str, list[Tensor]]:
        """pixels (3, H, W) in -1..1 and noise (z, h, w) of each image -> tokens (N, D)."""
        found = [self.autoencoder.encode(p[None], n[None])[0] for p, n in zip(pixels, noise, strict=True)]
        return {"tokens": [patchify(latents, self.config.latent_patch) for latents in found]}

    def decode(self, ctx: Context, latents: list[Tensor], grid: list[list[int]]) -> dict[str, list[Tensor]]:
        """latents (1 + N + 1, D) of `grid` rows and columns -> pixels (3, H, W), about -1..1, and tokens (N, D)."""
        tokens = [drawing[1:-1] for drawing in latents]
        patch = self.config.latent_patch
        unfolded = [unpatchify(t, rows, columns, patch) for t, (rows, columns) in zip(tokens, grid, strict=True)]
        return {"pixels": [self.autoencoder.decode(one[None])[0] for one in unfolded], "tokens": tokens}


class LanguageModel(Node):
    """The decoder with two experts, and what is around it when it draws."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.llm = MoT(config.language)
            self.head = FlowHead(config)
        shape = config.language
        self.kv_layout = KVLayout(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        self.samplers = (Sampler(name="main", vocab_size=shape.vocab_size),)
        self.tensor_parallel = TENSOR_PARALLEL

    def load_weights(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        weights.load_llm(self.llm, checkpoint, dtype, device)
        weights.load_flow(self.head, checkpoint, dtype, device)

    # ---- reading ----------------------------------------------------------------------------------------

    def condition(self, ctx: Context, tokens: list[Tensor], cells: list[Tensor]) -> dict[str, list[Tensor]]:
        """Clean latent tokens (N, D) at cells (N,) of each image -> their embeddings (N, hidden), at time 0."""
        return {
            "drawn": [
                self.head.embed(image, torch.zeros(1, device=image.device), places)
                for image, places in zip(tokens, cells, strict=True)
            ]
        }

    def prepare_prefill(self, tasks: Sequence[Task]) -> Plan | None:
        """Where the images of this chunk go, which rows of them, and positions: all of an image has one."""
        if all(task.inputs["blocks"] is None for task in tasks):
            return None
        positions, advance = [], []
        at: list[Tensor] = []
        rows: list[Tensor] = []
        is_gen: list[bool] = []
        first, media = 0, 0
        for task in tasks:
            steps = torch.ones(task.num_tokens, dtype=torch.int64)
            starts, num_media = _media_starts(task)
            for start, end, is_drawn, image in _blocks(task):
                inner = torch.arange(start + 1, end - 1)
                steps[start : end - 1] = 0
                at.append(first + inner)
                rows.append(media + starts[is_drawn, image] + inner - inner[0])
                is_gen += [bool(is_drawn)] * len(inner)
            positions.append(int(task.position) + steps.cumsum(0) - steps)
            advance.append(float(steps.sum()))
            first, media = first + task.num_tokens, media + num_media
        tensors = {}
        if at:
            places = torch.cat(at)
            gen = places[torch.tensor(is_gen)]
            others = torch.ones(first, dtype=torch.bool)
            others[gen] = False
            tensors = {"at": places, "rows": torch.cat(rows), "gen": gen, "und": others.nonzero()[:, 0]}
        return Plan(positions=torch.cat(positions), advance=advance, tensors=_shielded(tensors))

    def prefill(
        self, ctx: Context, ids: Tensor, blocks: Any, spans: Any, drawn: list[Images | None], seen: list[Images | None]
    ) -> dict[str, Tensor]:
        """ids (T,), with what is drawn or seen of images (n, hidden) spliced in -> nothing but keys and values."""
        x, routing = self.llm.embed(ids), None
        if "at" in ctx.plan:
            media = torch.cat([image for row in zip(drawn, seen, strict=True) for image in _images(*row)])
            x = x.index_copy(0, ctx.plan["at"][0], media.index_select(0, ctx.plan["rows"][0]).to(x.dtype))
            routing = _routing(ctx, len(x))
        self.llm(x, ctx.positions, routing, ctx.kv.attend)
        return {}

    # ---- writing ----------------------------------------------------------------------------------------

    def decode(self, ctx: Context, last: Tensor) -> dict[str, Tensor]:
        """last (B,), each sequence's newest token -> the token drawn after it, twice: `finish_decode` lets out text."""
        token = ctx.sample("main", self._logits(ctx, last))
        return {"last": token, "text": token}

    def finish_decode(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Tensor | None]]:
        return {"text": list(self._let_out(tasks, outputs["last"], outputs["text"]))}

    def score(self, ctx: Context, last: Tensor) -> dict[str, Tensor]:
        """As `decode`, with log-probabilities: scored (B, 2 + 2 * MOST_LOGPROBS).

        They are the token, its own, the likeliest tokens, and theirs; of the logits as they are.
        """
        logits = self._logits(ctx, last)
        token = ctx.sample("main", logits)
        own, ids, best = logprobs(logits, token, MOST_LOGPROBS)
        return {"last": token, "scored": torch.cat([token[:, None], own[:, None], ids, best], dim=1).double()}

    def finish_score(self, tasks: Sequence[Task], outputs: dict[str, Tensor]) -> dict[str, list[Tensor | None]]:
        return {"scored": list(self._let_out(tasks, outputs["last"], outputs["scored"]))}

    def _logits(self, ctx: Context, last: Tensor) -> Tensor:
        hidden = self.llm(self.llm.embed(last), ctx.positions, None, ctx.kv.attend)
        return self.llm.logits(hidden).float()

    def _let_out(self, tasks: Sequence[Task], tokens: Tensor, values: Tensor) -> Iterator[Tensor | None]:
        """What each task tells of its token. The one that ends a text is none of it."""
        for task, token, value in zip(tasks, tokens.tolist(), values, strict=True):
            is_end = token == self.config.tokens.eos and not task.params.ignore_eos
            if is_end:
                task.stop()
            else:
                task.count("completion_tokens")
            yield None if is_end else value

    # ---- drawing ----------------------------------------------------------------------------------------

    def prepare_flow(self, tasks: Sequence[Task]) -> Plan:
        """Times, and which rows are markers; all of a drawing has its context's next position."""
        counts = torch.tensor([task.num_tokens for task in tasks])
        owners = torch.arange(len(tasks)).repeat_interleave(counts)
        ends = counts.cumsum(0)
        und = torch.stack((ends - counts, ends - 1), dim=1).flatten()
        is_gen = torch.ones(len(owners), dtype=torch.bool)
        is_gen[und] = False
        gen = is_gen.nonzero()[:, 0]
        positions = torch.tensor([int(task.position) for task in tasks])[owners]
        tensors = _shielded({"und": und, "gen": gen, "owners": owners[gen]})
        times = torch.tensor([_step(task)[0] for task in tasks], dtype=torch.float32)
        return Plan(positions=positions, tensors=tensors | {"times": times})

    def flow(self, ctx: Context, latents: Tensor, cells: Tensor) -> dict[str, Tensor]:
        """latents (T, D) at cells (T,), markers' rows included -> v (T, D) float32, in markers' rows zero."""
        gen, und = ctx.plan["gen"][0], ctx.plan["und"][0]
        tokens = self.head.embed(
            latents.index_select(0, gen), ctx.plan["times"], cells.index_select(0, gen), owners=ctx.plan["owners"][0]
        )
        marks = self.config.tokens
        start, end = self.llm.embed(torch.tensor([marks.image_start, marks.image_end], device=latents.device))
        x = end.repeat(len(latents), 1).index_copy(0, gen, tokens)
        x = x.index_copy(0, und[::2], start.expand(len(und) // 2, -1))
        hidden = self.llm(x, ctx.positions, _routing(ctx, len(x)), ctx.kv.attend)
        velocities = self.head.velocity(hidden.index_select(0, gen))
        return {"v": torch.zeros_like(latents).index_copy(0, gen, velocities)}


def _blocks(task: Task) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, is it drawn, image) of the blocks in this chunk, which starts at 0."""
    begin, blocks = task.token_start, task.inputs["blocks"]
    for start, end, is_drawn, image in [] if blocks is None else blocks.tolist():
        if begin <= start and end <= begin + task.num_tokens:
            yield start - begin, end - begin, is_drawn, image


def _images(drawn: Images | None, seen: Images | None) -> Iterator[Tensor]:
    """A request's images, in the order in which `_media_starts` counts their rows."""
    for pair in zip(drawn or (), seen or (), strict=True):
        yield from (image for image in pair if image is not None)


def _media_starts(task: Task) -> tuple[dict[tuple[int, int], int], int]:
    """(is it drawn, image) -> its first row among the request's, and how many rows these have."""
    starts, count = {}, 0
    for index, pair in enumerate(zip(task.inputs["drawn"] or (), task.inputs["seen"] or (), strict=True)):
        for is_drawn, image in zip((1, 0), pair, strict=True):
            starts[is_drawn, index] = count
            count += 0 if image is None else len(image)
    return starts, count


def _shielded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As one row each: not taken to have one entry per task or token, so not padded."""
    return {name: tensor[None] for name, tensor in tensors.items()}


def _routing(ctx: Context, num_tokens: int) -> Routing:
    """The batch's experts; padding's rows go to the one that understands."""
    und, gen = ctx.plan["und"][0], ctx.plan["gen"][0]
    padding = torch.arange(len(und) + len(gen), num_tokens, device=und.device)
    return grouped(torch.cat((und, padding)), gen, multiple=ctx.row_multiple)


def _step(task: Task) -> tuple[float, float]:
    """Time and length of the step that a task is at."""
    starts, lengths = schedule(task.params.num_timesteps, task.params.timestep_shift)
    return float(starts[task.iteration]), float(lengths[task.iteration])


class Guide(Node):
    """Joins the branches of a step, and takes it. One drawing after the other."""

    def prepare_step(self, tasks: Sequence[Task]) -> Plan:
        rows = []
        for task in tasks:
            how = guidance(task.params, num_images=task.fields["images"])
            by_text, by_img = how.branches(task.iteration)
            is_reused = by_img and not task.fields["images"] and not task.params.think
            given = {name: task.inputs[name] is not None for name in ("v_text", "v_img")}
            if given != {"v_text": by_text, "v_img": by_img and not is_reused}:
                raise RuntimeError(f"step {task.iteration} has not the branches that its guidance needs: {given}")
            renorm = RENORMS.index(how.renorm_type), how.renorm_min
            rows.append((*_step(task), how.text_scale, how.img_scale, *renorm, is_reused))
        return Plan(tensors={"settings": torch.tensor(rows, dtype=torch.float64)[None]})

    def step(
        self, ctx: Context, latents: list[Tensor], v: list[Tensor], v_text: Images, v_img: Images
    ) -> dict[str, Any]:
        """Latents and velocities (1 + N + 1, D) of each drawing -> latents after the step, and at its end as foreseen.

        A branch that was not run is None. Where it would have been the main one, that is used.
        """
        found: list[Tensor] = []
        estimates: list[Tensor] = []
        columns = zip(latents, v, v_text, v_img, ctx.plan["settings"][0].tolist(), strict=True)
        for x, own, text, img, (time, length, text_scale, img_scale, renorm, least, is_reused) in columns:
            whole = guide(
                own, text, own if is_reused else img,
                cfg_text_scale=text_scale, cfg_img_scale=img_scale, renorm_type=RENORMS[int(renorm)], renorm_min=least,
            )  # fmt: skip
            found.append(x - whole * length)
            estimates.append(x - whole * time)
        return {"latents": found, "estimate": estimates, "progress": ctx.iteration + 1}
