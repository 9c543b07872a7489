"""`mstar bench`: load on a server that runs, and what its clients meet."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from mstar.cli.progress import repeated
from mstar.cli.run import read_params
from mstar.errors import ConfigError

if TYPE_CHECKING:
    from mstar.bench.measure import Sample
    from mstar.bench.run import Plan

TEXTS = (
    "Good morning! The next train leaves from platform four at nine fifteen.",
    "Mix the flour with warm water, then let the dough rest for an hour under a damp cloth.",
    "Could you tell me, please, where the reading room is?",
    "The storm passed in the night, and by sunrise the harbour was calm again.",
)
POSITIVE = click.FloatRange(0, min_open=True)
FILE = click.Path(path_type=Path, dir_okay=False)
FORMATS = ("pcm", "wav", "mp3", "flac", "opus", "aac")


@click.group()
def bench() -> None:
    """Measure a running server."""


@bench.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="address of the server")
@click.option("--concurrency", type=click.IntRange(1), help="closed loop: requests always under way  [default: 8]")
@click.option("--rate", type=POSITIVE, help="open loop: requests a second")
@click.option(
    "--burstiness", type=POSITIVE, default=1.0, show_default=True,
    help="shape of the gamma-distributed gaps of --rate; 1: Poisson, less: bursts",
)  # fmt: skip
@click.option("--num-requests", type=click.IntRange(1), help="[default: 32, or no limit with --duration]")
@click.option("--duration", "duration_s", type=POSITIVE, help="seconds for which requests are begun")
@click.option("--warmup", "num_warmups", type=click.IntRange(0), default=2, show_default=True, help="requests before")
@click.option("--text", "text_file", type=click.File(encoding="utf-8"), help="file with a text a line; -: stdin")
@click.option("--voice", help="[default: the server's]")
@click.option("--format", type=click.Choice(FORMATS), default="pcm", show_default=True)
@click.option("--stream/--no-stream", "is_streamed", default=True, show_default=True, help="audio as it is made")
@click.option("--param", "params", multiple=True, metavar="KEY=VALUE", help="further field of a request; repeatable")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of arrivals; request n: SEED + n")
@click.option("--api-key", help="[default: MSTAR_API_KEY]")
@click.option(
    "--timeout", "timeout_s", type=POSITIVE, default=300.0, show_default=True,
    help="seconds after which a request has failed",
)  # fmt: skip
@click.option("--slo-ttfa", "max_first_audio_s", type=POSITIVE, help="goodput: most seconds to the first audio")
@click.option("--slo-rtf", "max_rtf", type=POSITIVE, help="goodput: most seconds a second of audio may take")
@click.option("--out", type=FILE, help="write all samples and numbers as JSON")
@click.option("--plot", "plot_file", type=FILE, help="draw distributions: PNG, SVG")
@click.pass_context
def speech(ctx: click.Context, text_file: TextIO | None, **given: Any) -> None:
    """Ask for speech again and again. Exits with 1 if any request failed, 130 if interrupted."""
    _check(given)
    given["texts"] = tuple(filter(None, (line.strip() for line in text_file or TEXTS)))
    if not given["texts"]:
        raise click.BadParameter("the file holds no text", param_hint="--text")

    from mstar.bench import report
    from mstar.bench.measure import Job
    from mstar.bench.run import Plan, run

    given["concurrency"] = given["concurrency"] or 8
    given["num_requests"] = given["num_requests"] or (None if given["duration_s"] else 32)
    voice = {} if given["voice"] is None else {"voice": given["voice"]}
    job = Job(fields=read_params(given["params"]) | voice, **_only(Job, given))
    show = _bar if sys.stderr.isatty() else _lines
    plan = Plan(job=job, **_only(Plan, given))
    with show(plan) as on_sample:
        answer, samples = asyncio.run(run(plan, on_sample=on_sample))
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 140).print(report.table(answer))
    for line in report.lines(answer):
        click.echo(line)
    if given["out"] is not None:
        arguments = {name: given[name] for name in given.keys() - {"api_key", "out", "plot_file"}}
        given["out"].write_text(json.dumps({"arguments": arguments, **answer}, indent=1) + "\n")
    if given["plot_file"] is not None:
        report.plot(samples, given["plot_file"])
    ctx.exit(130 if answer["is_interrupted"] else 1 if answer["summary"]["num_failed"] else 0)


def _check(given: dict[str, Any]) -> None:
    """What cannot be asked for together, or here."""
    if given["rate"] is not None and given["concurrency"] is not None:
        raise click.UsageError("--rate lets requests go by themselves, --concurrency by answers; give one of them")
    if given["is_streamed"] and given["format"] not in ("pcm", "wav"):
        problem = f"how much of streamed {given['format']} can be played is not known while it comes"
        raise click.UsageError(f"{problem}; give --no-stream, or --format pcm or wav")
    # Else what comes would be measured as something that it is not.
    for name in read_params(given["params"]).keys() & {"response_format", given["is_streamed"] or "stream_format"}:
        raise click.BadParameter(f"{name} is set by --format and --stream", param_hint="--param")
    for path in (given["out"], given["plot_file"]):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"there is no folder {str(path.parent)!r} to write {path.name} to; make it first")
    if given["plot_file"] is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'mstar-core[plot]'")


def _only(kind: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}


@contextlib.contextmanager
def _bar(plan: Plan) -> Iterator[Callable[[Sample], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[failed]} failed"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=plan.num_requests, failed=0)

        def on_sample(sample: Sample) -> None:
            failed = progress.tasks[0].fields["failed"] + (sample.failure is not None)
            progress.update(bar, advance=1, failed=failed)

        yield on_sample


@contextlib.contextmanager
def _lines(plan: Plan) -> Iterator[Callable[[Sample], None]]:
    """A line to stderr every ten seconds, and at the end."""
    total = "" if plan.num_requests is None else f"/{plan.num_requests}"
    started, counts = time.monotonic(), [0, 0]

    def tell() -> None:
        seconds = time.monotonic() - started
        click.echo(f"{counts[0]}{total} requests, {counts[1]} failed, after {seconds:.0f} s", err=True)

    def on_sample(sample: Sample) -> None:
        counts[:] = counts[0] + 1, counts[1] + (sample.failure is not None)

    with repeated(tell):
        yield on_sample
        tell()
