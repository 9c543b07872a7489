"""Options that commands share: made from the table in `config`, read from flags and `--config`, flags first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from mstar import config
from mstar.config import Flag
from mstar.errors import ConfigError, PluginError

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

NO_PLUGIN = "no plugin is installed; install one, such as with 'pip install mstar-plugin-NAME'"


def settings(kind: type[Any], *, without: Collection[str] = ()) -> Callable[[Decorated], Decorated]:
    """Add an option for every setting of a configuration class but those in `without`; absent ones are None."""

    def decorate(command: Decorated) -> Decorated:
        for name, flag in reversed(config.flags(kind).items()):
            if name not in without:
                spelling = f"{flag.name}/--no-{flag.key}" if flag.is_switch else flag.name
                kind_of_value = None if flag.is_switch else flag.parse.__name__.strip("_").upper()
                command = click.option(
                    spelling, name, type=bool if flag.is_switch else str, default=None, multiple=flag.is_repeatable,
                    callback=partial(_read, flag), metavar="|".join(flag.choices) or kind_of_value,
                    help=f"{flag.help}  [default: {config.default_text(kind, name)}]",
                )(command)  # fmt: skip
        return command

    return decorate


def only(kind: type[Any], name: str) -> Callable[[Decorated], Decorated]:
    """Add the option of one setting of a configuration class."""
    return settings(kind, without=config.flags(kind).keys() - {name})


def _read(flag: Flag, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """A value read by its flag's own parser, as in configuration files."""
    try:
        return None if value in (None, ()) else flag.parse(value)
    except ValueError as error:
        shown = config.HIDDEN if flag.is_secret else repr(value)
        raise click.BadParameter(f"{shown}: {error}", ctx, param) from error


config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file of these settings, 'flag-name: value' a line; flags given here win over it",
)


def collect(given: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Settings by field name, from flags (None where absent) and a file. ConfigError for a key not in `given`."""
    found = config.load_config_file(file) if file else {}
    for name in (name for name in found if name not in given):
        key = (config.flags(config.EngineConfig) | config.flags(config.ServerConfig))[name].key
        command = click.get_current_context().info_name
        raise ConfigError(f"--config {file}: {key!r} has no meaning for 'mstar {command}'; remove it")
    return found | {name: value for name, value in given.items() if value is not None}


def engine_config(settings: dict[str, Any]) -> config.EngineConfig:
    """The engine's settings, with a plugin that is there and a model that may be. Raises ConfigError, before torch is
    imported, or PluginError.
    """
    from mstar import placement
    from mstar.plugin import checkpoint, loader

    settings = settings | {"plugin": choose_plugin(settings.get("plugin"), model=settings.get("model"))}
    engine = config.EngineConfig(**settings)
    spec = loader.load(engine.plugin).spec
    checkpoint.check(spec, engine.model)
    if engine.placement is not None:
        placement.read(placement.locate(engine.placement, spec))
    return engine


def choose_plugin(name: str | None, *, model: str | None = None) -> str:
    """The plugin asked for, the only one installed, or the only one that `model` is the published checkpoint of.
    ConfigError otherwise, naming those installed.
    """
    from mstar.plugin import loader

    if name is not None:
        return name
    names = sorted({plugin.name for plugin in loader.installed()})
    if not names:
        raise ConfigError(NO_PLUGIN)
    found = [name for name in names if model is not None and _checkpoint_of(name) == model] if names[1:] else names
    if len(found) != 1:
        raise ConfigError(f"--plugin is missing and {len(names)} plugins are installed; give one of {', '.join(names)}")
    why = "whose published checkpoint this is" if names[1:] else "the only one installed"
    click.echo(f"using plugin {found[0]!r}, {why}", err=True)
    return found[0]


def _checkpoint_of(name: str) -> str | None:
    from mstar.plugin import loader

    try:
        return loader.load(name).spec.checkpoint
    except (ConfigError, PluginError):  # it will be said of the plugin that is asked for
        return None
