"""The `mstar` command. Parses flags and says what went wrong in one line; the work is done by the modules below it.

One file per group of commands. Nothing heavy is imported before a command runs, so that `--help` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from mstar import __version__
from mstar.cli.bench import bench
from mstar.cli.cache import cache
from mstar.cli.compile import compile_model
from mstar.cli.doctor import doctor
from mstar.cli.plan import plan
from mstar.cli.run import run
from mstar.cli.serve import serve
from mstar.cli.show import graph, plugins
from mstar.config import suggest
from mstar.errors import MstarError

# Flags that other servers have, and what there is instead.
_NOT_NEEDED = "every model is served with all that it can do; leave it out"
_ELSEWHERE = {
    "--tensor-parallel-size": ": 'tensor_parallel' in a file for --placement does it; 'mstar plan' writes one",
    "--gpu-memory-utilization": ": the KV cache takes what memory is free; --kv-cache-memory-bytes says how much",
    "--stage-configs-path": ": a plugin declares its stages; 'mstar graph' shows them",
    **dict.fromkeys(("--omni", "--trust-remote-code", "--enable-auto-tool-choice"), f": {_NOT_NEEDED}"),
}
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130


class _Commands(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f"no command {args[0]!r}{suggest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="mstar")
def cli() -> None:
    """Serve composite multimodal models: encoders, language backbones, flow heads, codecs, world predictors."""


for _command in (serve, run, bench, plugins, graph, plan, compile_model, cache, doctor):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong settings or request, 130 interrupted."""
    try:
        code = cli.main(args=arguments, prog_name="mstar", standalone_mode=False)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.option_name in _ELSEWHERE:
            said = f"there is no {error.option_name}{_ELSEWHERE[error.option_name]}"
            error = click.UsageError(said, ctx=error.ctx)
        error.show()
        code = error.exit_code
    except MstarError as error:
        click.echo(f"Error: {error}", err=True)
        code = EXIT_CONFIGURATION
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    sys.exit(code)
