"""Pictures of what a request gave: features in three colours beside their frames, distances, plans.

Tokens are normalised, then their three main directions become red, green and blue: one basis for all panels of a
picture, so that one colour means one thing in all of them. Imports matplotlib, when there is something to draw.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mstar.plugin import Request
from mstar_plugin_vjepa2.config import VJEPA2ACConfig, VJEPA2Config
from mstar_plugin_vjepa2.processing.inputs import read_clips, read_frames, read_mask

Config = VJEPA2Config | VJEPA2ACConfig
MOST_COLUMNS, MOST_ROWS = 8, 6
"""Of a grid of panels; of more frames some are left out, the first and the last never."""
HIDDEN = 0.92
"""Grey of patches without a feature."""
AXES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


def draw(request: Request, tensors: Mapping[str, Tensor], config: Config, folder: Path) -> list[Path]:
    """Draw the tensors of a result into `folder`; returns the files, none if there is nothing to see."""
    draws = {"encode": _encode, "predict": _predict, "anticipate": _anticipate, "plan": _plan}
    drawn = draws.get(request.task, _rollout)(request, tensors, config)
    paths = []
    for number, figure in enumerate(drawn):
        name = f"{request.task}-{number}.png" if len(drawn) > 1 else f"{request.task}.png"
        figure.savefig(folder / name, dpi=110)
        paths.append(folder / name)
    return paths


# ---- tasks ----------------------------------------------------------------------------------------------


def _encode(request: Request, tensors: Mapping[str, Tensor], config: Config) -> list[Any]:
    """Frames above their features, one picture a clip."""
    if "features" not in tensors:
        return []
    features, clips = tensors["features"], _clips(request, config)
    if isinstance(config, VJEPA2ACConfig):  # a frame is what a clip's tubelet is
        features = features.flatten(0, 1)[None]
    colours = Colours(features)
    figures = []
    for views, tokens in list(zip(clips, features, strict=True))[:MOST_ROWS]:
        maps = _maps(colours(tokens), config)
        grid = Grid(len(maps), ("frame", "features"), f"Features of {len(maps)} {_unit(config)}s — {colours.caption}")
        for column, index in grid.columns():
            grid.show(0, column, views[_first_frame(index, views, config)], title=_when(index, views, config))
            grid.show(1, column, maps[index])
        figures.append(grid.figure)
    return figures


def _predict(request: Request, tensors: Mapping[str, Tensor], config: Config) -> list[Any]:
    """Context, target and prediction at their patches, and how far the last two are apart; one picture a clip."""
    names = ("context", "target", "predicted")
    if not set(names) <= set(tensors):
        return []
    clips = _clips(request, config)
    number = max(1, len(clips[0]) // config.tubelet_size)
    length = number * config.patches
    masks = {name: read_mask(request, f"{name}_mask", clips=len(clips), tokens=length) for name in names[:2]}
    masks["predicted"] = masks["target"]
    colours = Colours(*(tensors[name] for name in names))
    distance = _cosine_distance(tensors["predicted"], tensors["target"])
    figures = []
    for clip, views in enumerate(clips[:MOST_ROWS]):
        title = f"Prediction of {masks['target'].shape[1]} of {length} patches — {colours.caption}"
        grid = Grid(number, ("frame", "context", "target", "predicted", "distance"), title)
        maps = [_maps(_placed(colours(tensors[n][clip]), masks[n][clip], length), config) for n in names]
        far = torch.full((length,), float("nan")).index_copy(0, masks["target"][clip], distance[clip])
        apart = far.unflatten(0, (number, config.grid, config.grid))
        for column, index in grid.columns():
            grid.show(0, column, views[_first_frame(index, views, config)], title=_when(index, views, config))
            for row, images in enumerate(maps, 1):
                grid.show(row, column, images[index])
            grid.heat(4, column, apart[index], top=float(distance[clip].max()))
        grid.scale(4, "1 − cosine")
        figures.append(grid.figure)
    return figures


def _anticipate(request: Request, tensors: Mapping[str, Tensor], config: Config) -> list[Any]:
    """The clip's last frames, and below them the tubelets predicted, one picture a clip."""
    if "predicted" not in tensors:
        return []
    colours = Colours(tensors["predicted"])
    figures = []
    for views, tokens in zip(_clips(request, config)[:MOST_ROWS], tensors["predicted"], strict=False):
        maps, number = _maps(colours(tokens), config), max(1, len(views) // config.tubelet_size)
        title = f"Anticipation {request.params.offset} tubelets after the clip — {colours.caption}"
        grid = Grid(max(len(maps), min(number, MOST_COLUMNS)), ("clip", "predicted"), title)
        for column in range(grid.width):
            if (index := number - grid.width + column) >= 0:
                grid.show(0, column, views[_first_frame(index, views, config)], title=_when(index, views, config))
        for column, index in enumerate(_spread(len(maps), grid.width)):
            ahead = number + request.params.offset + index
            grid.show(1, column, maps[index], title=_when(ahead, None, config))
        figures.append(grid.figure)
    return figures


def _rollout(request: Request, tensors: Mapping[str, Tensor], config: Config) -> list[Any]:
    """Predicted frames in rows, one a rollout; and over their steps the distance to the goal and the pose."""
    if "latents" not in tensors:
        return []
    latents, is_taught = tensors["latents"], request.task == "teacher_forced"
    goal = request.tensor("goal")
    colours = Colours(latents, *([] if goal is None else [goal[None]]))
    rows = min(len(latents), MOST_ROWS)
    labels = [f"rollout {row}" if len(latents) > 1 else "predicted" for row in range(rows)]
    lines = [name for name in ("distances", "states") if name in tensors]
    title = (
        f"{'Teacher-forced prediction' if is_taught else 'Rollout'} of {latents.shape[1]} frames — {colours.caption}"
    )
    grid = Grid(latents.shape[1], ("frame", *labels), title, lines=len(lines))
    first = 1 if is_taught else request.params.context_frames
    for column, index in grid.columns():
        grid.title(1, column, f"frame {first + index}")
        for row in range(rows):
            grid.show(row + 1, column, _maps(colours(latents[row, index]), config)[0])
    frames = _views(request, config)
    if is_taught:
        for column, index in grid.columns():
            grid.show(0, column, frames[index + 1], title=f"frame {index + 1}")
    else:
        shown_goal = None if goal is None else _maps(colours(goal), config)[0]
        _show_ends(grid, frames, request.params, goal=shown_goal)
    for axes, name in zip(grid.lines, lines, strict=True):
        _draw_lines(axes, name, tensors[name], first=first, params=request.params)
    return [grid.figure]


def _show_ends(grid: Grid, frames: Tensor, params: Any, *, goal: Tensor | None) -> None:
    """Context frames from the left, and the goal on the right."""
    for column, index in enumerate(_spread(params.context_frames, grid.width - 1)):
        grid.show(0, column, frames[index], title=f"frame {index}, context")
    if params.goal_frame is not None:
        grid.show(0, grid.width - 1, frames[params.goal_frame], title=f"frame {params.goal_frame}, goal")
    elif goal is not None:
        grid.show(0, grid.width - 1, goal, title="goal")


def _draw_lines(axes: Any, name: str, values: Tensor, *, first: int, params: Any) -> None:
    if name == "distances":
        for row, line in enumerate(values[:MOST_ROWS].tolist()):
            axes.plot(range(first, first + len(line)), line, marker="o", label=f"rollout {row}")
        axes.set(title="Distance to the goal", xlabel="frame", ylabel=params.cost)
    else:
        for column, axis in enumerate(AXES[: values.shape[-1]]):
            axes.plot(range(values.shape[1]), values[0, :, column].tolist(), label=axis)
        axes.set(title="Pose" + (" of rollout 0" if len(values) > 1 else ""), xlabel="frame", ylabel="m, rad")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(axes.lines) > 1:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _plan(request: Request, tensors: Mapping[str, Tensor], config: Config) -> list[Any]:
    """Where it starts and is to end, what candidates cost in each iteration, and the actions planned."""
    if not {"action", "costs"} <= set(tensors):
        return []
    costs, actions, params = tensors["costs"], tensors["action"], request.params
    frames, goal = _views(request, config), request.tensor("goal")
    figure = _figure(12, 3.2, f"Plan of {len(actions)} actions, {costs.shape[0]} × {costs.shape[1]} candidates")
    start, end, left, right = figure.subplots(1, 4, width_ratios=(1, 1, 1.6, 1.6))
    shown_goal = frames[-1] if goal is None else _maps(Colours(goal[None])(goal), config)[0]
    for axes, image, name in ((start, frames[params.context_frames - 1], "start"), (end, shown_goal, "goal")):
        axes.imshow(image.numpy(), interpolation="nearest")
        axes.set(title=name, xticks=[], yticks=[])
    iterations = range(1, len(costs) + 1)
    low, high = costs.quantile(torch.tensor([0.1, 0.9]), dim=1).tolist()
    left.fill_between(iterations, low, high, alpha=0.2, label="10–90 %")
    best = costs.topk(params.topk, largest=False).values.mean(1)
    for name, line in {"mean": costs.mean(1), f"best {params.topk}": best, "min": costs.amin(1)}.items():
        left.plot(iterations, line.tolist(), marker="o", label=name)
    left.set(title="Cost of candidates", xlabel="iteration", ylabel=params.cost)
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize="small")
    _draw_actions(right, actions)
    figure.get_layout_engine().set(rect=(0, 0, 0.98, 1))  # the gripper's scale is not counted
    return [figure]


def _draw_actions(axes: Any, actions: Tensor) -> None:
    """Bars for each action, the gripper's with a scale of their own."""
    other, bars = axes.twinx(), []
    for place, column in enumerate((0, 1, 2, 6)):
        at = [step + (place - 1.5) * 0.2 for step in range(len(actions))]
        of = other if column == 6 else axes
        bars.append(of.bar(at, actions[:, column].tolist(), width=0.2, label=AXES[column], color=f"C{place}"))
    for of in (axes, other):
        reach = max(map(abs, of.get_ylim()))
        of.set_ylim(-reach, reach)
    other.tick_params(axis="y", colors="C3")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(title="Planned actions", xlabel="action", ylabel="m", xticks=range(len(actions)))
    axes.legend(handles=bars, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4)


# ---- colours --------------------------------------------------------------------------------------------


class Colours:
    """The basis of a picture: the three main directions of all its tokens, from the 2nd to the 98th percentile."""

    def __init__(self, *tokens: Tensor) -> None:
        flat = torch.cat([_normalized(part).flatten(0, -2) for part in tokens])
        self._mean = flat.mean(0)
        centred = (flat - self._mean).double()
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        basis = vectors[:, -3:].flip(1)
        # An eigenvector's sign is arbitrary: its largest entry is positive here.
        signs = basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()
        self._basis = (basis * signs).float()
        placed = (flat - self._mean) @ self._basis
        self._low, high = (placed.quantile(q, dim=0) for q in (0.02, 0.98))
        self._range = (high - self._low).clamp(min=1e-6)
        share = float(values[-3:].sum() / values.sum().clamp(min=1e-12))
        self.caption = f"colours: 3 principal components, {100 * share:.0f} % of variance"

    def __call__(self, tokens: Tensor) -> Tensor:
        """(..., D) -> (..., 3) of 0 to 1."""
        return (((_normalized(tokens) - self._mean) @ self._basis - self._low) / self._range).clamp(0, 1)


def _normalized(tokens: Tensor) -> Tensor:
    return functional.layer_norm(tokens.float(), tokens.shape[-1:])


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    return 1 - functional.cosine_similarity(_normalized(a), _normalized(b), dim=-1)


def _placed(colours: Tensor, mask: Tensor, length: int) -> Tensor:
    """Colours (K, 3) at patches `mask` (K,) of `length`."""
    return torch.full((length, 3), HIDDEN).index_copy(0, mask, colours)


def _maps(colours: Tensor, config: Config) -> Tensor:
    """(T * P, 3) -> (T, grid, grid, 3)."""
    return colours.reshape(-1, config.grid, config.grid, colours.shape[-1])


# ---- frames ---------------------------------------------------------------------------------------------


def _clips(request: Request, config: Config) -> list[Tensor]:
    """Each clip's frames as the encoder sees them, (T, S, S, 3) of 0 to 1."""
    if isinstance(config, VJEPA2ACConfig):
        return [_views(request, config)]
    return [_seen(clip, config) for clip in read_clips(request, config, most_tokens=sys.maxsize)]


def _views(request: Request, config: Any) -> Tensor:
    frames = read_frames(request, config)
    assert frames is not None, "what opens no session has frames"
    return _seen(frames.pixels(config), config)


def _seen(pixels: Tensor, config: Config) -> Tensor:
    """Normalised (T, 3, S, S) -> (T, S, S, 3) of 0 to 1."""
    how = config.preprocess
    colours = pixels.permute(0, 2, 3, 1) * torch.tensor(how.std) + torch.tensor(how.mean)
    return (colours / (255 * how.scale)).clamp(0, 1)


def _unit(config: Config) -> str:
    return "frame" if isinstance(config, VJEPA2ACConfig) else "tubelet"


def _first_frame(index: int, views: Tensor, config: Config) -> int:
    """The frame that a token's tubelet begins with."""
    return index if isinstance(config, VJEPA2ACConfig) else index * config.tubelet_size


def _when(index: int, views: Tensor | None, config: Config) -> str:
    if isinstance(config, VJEPA2ACConfig) or (views is not None and len(views) == 1):
        return f"frame {index}"
    begin = index * config.tubelet_size
    return f"frames {begin}–{begin + config.tubelet_size - 1}"


# ---- panels ---------------------------------------------------------------------------------------------


def _spread(number: int, most: int) -> list[int]:
    """At most `most` of `number` indices, the first and the last among them."""
    if number <= most:
        return list(range(number))
    return [round(i * (number - 1) / max(most - 1, 1)) for i in range(most)]


def _figure(width: float, height: float, title: str) -> Any:
    from matplotlib.figure import Figure  # without pyplot, so that no display is looked for

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure


class Grid:
    """Panels in rows with names, over steps of time, and plots of lines below them."""

    def __init__(self, number: int, rows: Sequence[str], title: str, *, lines: int = 0) -> None:
        self._indices = _spread(number, MOST_COLUMNS)
        self.width = max(len(self._indices), 2)
        tall = 1.45 * len(rows) + 0.4
        self.figure = _figure(max(1.4 * self.width + 1, 7), tall + (2.6 if lines else 0), title)
        above, below = self.figure, None
        if lines:
            above, below = self.figure.subfigures(2, 1, height_ratios=(tall, 2.6))
        self._panels = above.subplots(len(rows), self.width, squeeze=False)
        self.lines = [] if below is None else list(below.subplots(1, lines, squeeze=False)[0])
        for panels, name in zip(self._panels, rows, strict=True):
            for axes in panels:
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            panels[0].set_ylabel(name, fontsize="small")

    def columns(self) -> list[tuple[int, int]]:
        """Columns, and the index of the step that each shows."""
        return list(enumerate(self._indices))

    def title(self, row: int, column: int, text: str) -> None:
        self._panels[row, column].set_title(text, fontsize="small")

    def show(self, row: int, column: int, image: Tensor, *, title: str | None = None) -> None:
        """An image (H, W, 3) of 0 to 1."""
        axes = self._panels[row, column]
        axes.imshow(image.numpy(), interpolation="nearest")
        if title is not None:
            self.title(row, column, title)

    def heat(self, row: int, column: int, values: Tensor, *, top: float) -> None:
        """Numbers (H, W) from 0 to `top`; NaN stays empty."""
        axes = self._panels[row, column]
        axes.set_facecolor(str(HIDDEN))
        self._heat = axes.imshow(values.numpy(), cmap="magma", vmin=0, vmax=top, interpolation="nearest")

    def scale(self, row: int, label: str) -> None:
        """What the colours of a row of numbers mean."""
        self.figure.colorbar(self._heat, ax=list(self._panels[row]), label=label, shrink=0.9)
