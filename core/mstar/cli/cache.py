"""`mstar cache`: what compiling has left on this machine, to look at, check, remove and carry elsewhere."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import yaml

from mstar import config
from mstar.errors import ConfigError
from mstar_compile_cache import Entry, Store, StoreError, export_archive, import_archive

_json = click.option("--json", "as_json", is_flag=True, help="print JSON")
_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@click.group(short_help="List, check, remove and carry compiled code.")
def cache() -> None:
    """Compiled code, kept in MSTAR_CACHE (default: ~/.cache/mstar): list, check, remove, carry."""


@cache.command("list")
@_json
def list_entries(as_json: bool) -> None:
    """List the entries, last used first."""
    with _opened() as store:
        entries = store.entries()
    if as_json:
        click.echo(json.dumps([_described(entry) for entry in entries], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("entry", "plugin", "of", "dtype", "size", "last used")
    for entry in entries:
        facts = (str(entry.key.get(name, "?")) for name in ("plugin", "name", "dtype"))
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_use))
        table.add_row(entry.digest[:12], *facts, _size([entry]), used)
    Console(width=None if sys.stdout.isatty() else 200).print(table if entries else f"no entries in {store.root}")


@cache.command()
@click.argument("entry", required=False)
@_json
def info(entry: str | None, as_json: bool) -> None:
    """Describe the cache, or an ENTRY by the beginning of its name."""
    with _opened() as store:
        entries = store.entries()
    found = [one for one in entries if entry and one.digest.startswith(entry)]
    if entry and len(found) != 1:
        raise ConfigError(f"{len(found)} entries begin with {entry!r}; see 'mstar cache list'")
    whole = {"folder": str(store.root), "entries": len(entries), "size_bytes": sum(one.size_bytes for one in entries)}
    facts = _described(found[0]) if found else whole
    click.echo(json.dumps(facts, indent=2) if as_json else yaml.safe_dump(facts, sort_keys=False).strip())


@cache.command()
@click.pass_context
def verify(ctx: click.Context) -> None:
    """Read every file and compare it with what was built; exit with 1 if some differ."""
    with _opened() as store:
        found = store.verify()
    problems = {digest: problem for digest, problem in found.items() if problem}
    lines = [f"{digest[:12]}  {problem}; built again when needed" for digest, problem in problems.items()]
    click.echo("\n".join([*lines, f"{len(problems)} of {len(found)} entries are damaged"]))
    ctx.exit(1 if problems else 0)


@cache.command()
def clear() -> None:
    """Remove all entries but those in use by running processes."""
    with _opened() as store:
        _report(store.clear(), store)


@cache.command()
@click.option("--max-bytes", "limit", type=config._size, default="10GiB", show_default=True, help="what may stay")
def prune(limit: int) -> None:
    """Remove what was used longest ago, until the rest fits."""
    with _opened() as store:
        _report(store.prune(limit), store)


@cache.command("export")
@_file
def export_entries(file: Path) -> None:
    """Write all entries into FILE, a .tar.gz for machines of the same kind."""
    with _opened() as store:
        click.echo(f"{len(export_archive(store, file))} of {len(store.digests())} entries written to {file}")


@cache.command("import")
@_file
def import_entries(file: Path) -> None:
    """Add the entries of FILE. They are code that will run: import only what you trust."""
    with _opened() as store:
        added, left_out = import_archive(store, file)
    click.echo(f"{len(added)} entries added, {len(left_out)} were there already or are being built")


@contextlib.contextmanager
def _opened() -> Iterator[Store]:
    try:
        with Store(config.environment().cache / "compiled") as store:
            yield store
    except (StoreError, OSError) as error:
        raise ConfigError(str(error)) from error


def _described(entry: Entry) -> dict[str, Any]:
    return asdict(entry) | {"size_bytes": entry.size_bytes}


def _report(removed: list[str], store: Store) -> None:
    left = store.entries()
    click.echo(f"{len(removed)} entries removed; {len(left)} stay, {_size(left)}")


def _size(entries: list[Entry]) -> str:
    return f"{sum(entry.size_bytes for entry in entries) / 2**20:.1f} MiB"
