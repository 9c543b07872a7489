"""`mstar plugins` and `mstar graph`: what is installed, and what a model is made of. Loads no weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mstar import config
from mstar.cli import options
from mstar.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from mstar.plugin.loader import InstalledPlugin

_LISTS = ("tasks", "modalities_in", "modalities_out", "endpoints")
_COLUMNS = (
    "name", "version", "distribution", "tasks", "modalities_in", "modalities_out", "placements", "checkpoint", "error",
)  # fmt: skip
_SUFFIXES = {".svg": "svg", ".mmd": "mermaid", ".md": "mermaid", ".txt": "text"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
def plugins(as_json: bool) -> None:
    """List the installed plugins and what their models can do."""
    from mstar.plugin import loader

    rows = [_describe(plugin) for plugin in loader.installed()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo(options.NO_PLUGIN)
        return
    from rich.console import Console
    from rich.table import Table

    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    table = Table(*(name.replace("modalities_", "") for name in columns))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        table.add_row(*(cell if isinstance(cell, str) else ", ".join(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _describe(plugin: InstalledPlugin) -> dict[str, Any]:
    from mstar.placement import examples
    from mstar.plugin import loader

    row: dict[str, Any] = {"name": plugin.name, "version": plugin.version, "distribution": plugin.distribution}
    try:
        spec = loader.load(plugin.name).spec
    except (ConfigError, PluginError) as error:
        return row | {"error": str(error)}
    texts = {name: getattr(spec, name) for name in ("description", "checkpoint")}
    return row | texts | {name: list(getattr(spec, name)) for name in _LISTS} | {"placements": list(examples(spec))}


@click.command(short_help="Draw a model's nodes, walks and streams.")
@options.only(config.EngineConfig, "plugin")
@click.option("--model", help="draw for this checkpoint: a folder, a hub id or 'tiny'  [default: the published one]")
@click.option(
    "--format", "style", type=click.Choice(["text", "mermaid", "svg", "plans"]), help="[default: by suffix, or text]"
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="write to FILE")
@click.option("--plans", "style", flag_value="plans", help="show which loops run as one method; --format plans")
def graph(plugin: str | None, model: str | None, style: str | None, output: Path | None) -> None:
    """Draw a model's nodes, walks and streams, or print its loops' plans."""
    if output is not None and style is None and output.suffix not in _SUFFIXES:
        problem = f"{output}: nothing is drawn by suffix {output.suffix!r}"
        raise click.BadParameter(f"{problem}; use {', '.join(_SUFFIXES)}, or add --format", param_hint="--output")
    from mstar.plugin import draw, loader
    from mstar.plugin.spec import narrowed
    from mstar.plugin.validate import validate

    spec = loader.load(options.choose_plugin(plugin)).spec
    configuration = None
    if model is not None:
        from mstar.plugin import checkpoint

        configuration = checkpoint.resolve(spec, model).config
        spec = narrowed(spec, configuration)
    style = style or (_SUFFIXES[output.suffix] if output else "text")
    declared = spec.graph(configuration)
    validate(declared, spec)
    drawing = draw.plans(declared, spec) if style == "plans" else getattr(draw, style)(declared)
    if output is None:
        click.echo(drawing)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(drawing, encoding="utf-8")
        click.echo(output)
