"""Options that commands share: made from the table in `config`, read from flags and `--config`, flags first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click

from mstar import config
from mstar.config import Flag
from mstar.errors import ConfigError

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

REPEATABLE = ("served_model_name", "parts")


class _Value(click.ParamType):
    """A value read by its flag's own parser, as in configuration files."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self.name = flag.parse.__name__.lstrip("_")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.flag.parse(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def settings(kind: type[Any], *, without: Collection[str] = ()) -> Callable[[Decorated], Decorated]:
    """Add an option for every setting of a configuration class but those in `without`; absent ones are None."""

    def decorate(command: Decorated) -> Decorated:
        for name, flag in reversed(config.flags(kind).items()):
            if name not in without:
                command = click.option(*_spelling(name, flag), **_attributes(kind, name, flag))(command)
        return command

    return decorate


def _spelling(name: str, flag: Flag) -> tuple[str, str]:
    return (f"{flag.name}/--no-{flag.key}" if flag.is_switch else flag.name), name


def _attributes(kind: type[Any], name: str, flag: Flag) -> dict[str, Any]:
    usual = flag.default_text
    if not usual and name not in REPEATABLE:
        value = config.default(kind, name)
        usual = ("on" if value else "off") if flag.is_switch else flag.shown(value)
    attributes: dict[str, Any] = {"default": None, "help": f"{flag.help}  [default: {usual}]" if usual else flag.help}
    if name in REPEATABLE:
        attributes |= {"multiple": True, "type": str, "metavar": "PART=PATH" if name == "parts" else "NAME"}
    elif not flag.is_switch:
        attributes["type"] = _Value(flag)
        attributes["metavar"] = "|".join(flag.choices) or None
    return attributes


config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file of these settings, 'flag-name: value' a line; flags given here win over it",
)

log_level_option = settings(
    config.ServerConfig, without=[n for n in config.flags(config.ServerConfig) if n != "log_level"]
)


def collect(given: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Settings by field name, from flags (None or () where absent) and a file. ConfigError for a key not in `given`."""
    found = config.load_config_file(file) if file else {}
    for name in found:
        if name not in given:
            command = click.get_current_context().info_name
            key = (config.flags(config.EngineConfig) | config.flags(config.ServerConfig))[name].key
            raise ConfigError(f"--config {file}: {key!r} has no meaning for 'mstar {command}'; remove it")
    for name, value in given.items():
        if value is None or value == ():
            continue
        if name in REPEATABLE:
            flag = config.flags(config.EngineConfig)[name]
            try:
                value = flag.parse(value)
            except ValueError as error:
                raise click.BadParameter(f"{' '.join(value)!r}: {error}", param_hint=flag.name) from error
        found[name] = value
    return found


def choose_plugin(name: str | None) -> str:
    """The plugin asked for, or the only one installed. ConfigError otherwise, naming those installed."""
    from mstar.plugin import loader

    if name is not None:
        return name
    names = sorted({plugin.name for plugin in loader.installed()})
    if not names:
        raise ConfigError("no plugin is installed; install one, such as with 'pip install mstar-plugin-NAME'")
    if len(names) > 1:
        raise ConfigError(f"--plugin is missing and {len(names)} plugins are installed; give one of {', '.join(names)}")
    click.echo(f"using plugin {names[0]!r}, the only one installed", err=True)
    return names[0]
