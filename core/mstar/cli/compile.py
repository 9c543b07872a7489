"""`mstar compile`: builds beforehand what `mstar serve --compile` would build at its start."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mstar import config
from mstar.cli import options
from mstar.cli.progress import repeated

if TYPE_CHECKING:
    from mstar.worker.compiled import Progress

# what does not change what is compiled, and what cannot be had with it
_WITHOUT = (
    "served_model_name", "max_queue", "session_ttl_s", "max_sessions", "request_timeout_s", "stall_timeout_s", "seed",
    "allowed_media_domains", "allowed_local_media_path", "max_media_bytes", "media_memory_bytes", "max_image_pixels",
    "max_video_frames", "max_audio_duration_s", "max_video_duration_s", "limit_mm_per_prompt", "media_timeout_s",
    "compile", "enforce_eager", "batch_invariant", "encoder_cache_bytes",
    "workers", "placement", "start_timeout_s", "kv_transfer",
)  # fmt: skip


@click.command("compile", short_help="Build beforehand what 'mstar serve --compile' needs.")
@options.settings(config.EngineConfig, without=_WITHOUT)
@options.config_option
@click.option(
    "--log-level", type=click.Choice(config.LOG_LEVELS), default="warning", show_default=True, help="how much is logged"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.pass_context
def compile_model(ctx: click.Context, config_file: Path | None, log_level: str, as_json: bool, **given: Any) -> None:
    """Build all kernels and methods that 'mstar serve --compile' with the same settings needs, and keep them.

    Takes the server's --config file too. Exits with 1 if no method can be compiled.
    """
    known = config.flags(config.EngineConfig)
    everything = dict.fromkeys((*known, *config.flags(config.ServerConfig)))
    found = options.collect(everything | given, config_file)
    settings = {name: value for name, value in found.items() if name in known} | {"compile": True}
    engine = options.engine_config(settings)

    from mstar import launch, observe
    from mstar.layers import kernels

    observe.setup_logging(log_level)
    started = time.perf_counter()
    with _shown(is_bar=sys.stderr.isatty()) as show:
        watch = Watch(show, num_built=lambda: kernels.compile_cache().counters.builds)
        compilation = launch.build(engine, progress=watch)
        watch.end()
    store = kernels.compile_cache()
    facts = {
        "plugin": engine.plugin,
        "model": engine.model,
        "folder": str(store.root),
        "kernels": _state(watch, "kernels"),
        "methods": {name: _state(watch, name) for name in compilation.compiled}
        | {name: {"state": "eager", "reason": reason} for name, reason in compilation.eager.items()},
        "num_built": store.counters.builds,
        "compile_seconds": round(compilation.seconds, 3),
        "seconds": round(time.perf_counter() - started, 3),
    }
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))
    ctx.exit(0 if compilation.compiled else 1)


class Watch:
    """Progress that measures: how long each thing took, and how many artifacts were built for it.

    Attributes:
        found: thing -> (seconds, artifacts built).
    """

    def __init__(self, show: Progress, *, num_built: Callable[[], int]) -> None:
        self.found: dict[str, tuple[float, int]] = {}
        self._show, self._num_built = show, num_built
        self._current: tuple[str, float, int] | None = None

    def __call__(self, name: str, index: int, total: int) -> None:
        self.end()
        self._show(name, index, total)
        self._current = name, time.perf_counter(), self._num_built()

    def end(self) -> None:
        """What was under way is over."""
        if self._current is not None:
            name, started, num_before = self._current
            self.found[name] = time.perf_counter() - started, self._num_built() - num_before
            self._current = None


@contextlib.contextmanager
def _shown(*, is_bar: bool) -> Iterator[Progress]:
    """On a terminal a bar with the seconds of what is under way, else a line for each, again while it lasts."""
    if not is_bar:
        line, started = "", 0.0

        def tell() -> None:
            if line and (seconds := time.monotonic() - started) >= 1:
                click.echo(f"{line}: {seconds:.0f} s so far", err=True)

        def show(name: str, index: int, total: int) -> None:
            nonlocal line, started
            line, started = f"[{index + 1}/{total}] {name}", time.monotonic()
            click.echo(line, err=True)

        with repeated(tell):
            yield show
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda name, index, total: progress.reset(bar, description=name, completed=index, total=total)


def _state(watch: Watch, name: str) -> dict[str, Any]:
    seconds, num_built = watch.found[name]
    return {"state": "built" if num_built else "found", "num_built": num_built, "seconds": round(seconds, 3)}


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people."""
    things = {"kernels": facts["kernels"]} | facts["methods"]
    width = max(map(len, things))
    for name, thing in things.items():
        said = {"built": "built in {seconds:.1f} s", "found": "found in the cache", "eager": "stays eager: {reason}"}
        yield f"{name:{width}}  {said[thing['state']].format(**thing)}"
    num_eager = sum(thing["state"] == "eager" for thing in facts["methods"].values())
    yield (
        f"{len(facts['methods']) - num_eager} methods are compiled, {num_eager} stay eager; {facts['num_built']} "
        f"artifacts were built, in {facts['seconds']:.1f} s, and are in {facts['folder']}"
    )
