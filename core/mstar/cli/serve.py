"""`mstar serve`: an HTTP server for one model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mstar import config
from mstar.cli import options
from mstar.errors import ConfigError


@click.command(short_help="Serve a model over HTTP.")
@click.argument("positional_model", metavar="[MODEL]", required=False)
@options.settings(config.EngineConfig)
@options.settings(config.ServerConfig)
@options.config_option
def serve(positional_model: str | None, config_file: Path | None, **given: Any) -> None:
    """Serve MODEL (the same as --model) over HTTP until interrupted."""
    if positional_model is not None:
        if given["model"] is not None:
            raise ConfigError(
                f"the model is given twice: {positional_model!r} and --model {given['model']!r}; drop one"
            )
        given["model"] = positional_model
    settings = options.collect(given, config_file)
    environment = config.environment()
    settings.setdefault("log_level", environment.log_level)
    if environment.api_key is not None:
        settings.setdefault("api_key", (environment.api_key,))
    server = config.ServerConfig(**{n: settings.pop(n) for n in config.flags(config.ServerConfig) if n in settings})
    engine = options.engine_config(settings)

    from mstar import launch, observe

    observe.setup_logging(server.log_level)
    observe.hide(server.api_key)
    sys.exit(launch.serve(engine, server))
