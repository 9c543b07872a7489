"""`mstar doctor`: whether this machine can serve, and what to do where it cannot."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import click

from mstar import __version__, config
from mstar.errors import ConfigError, PluginError

LIBRARIES = ("transformers", "safetensors", "huggingface_hub", "av", "starlette", "uvicorn", "msgspec", "pyzmq")
SHARED_MEMORY_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `problem` blocks serving, `note` costs something; then `remedy` says what to do."""

    subject: str
    state: Literal["ok", "note", "problem"]
    detail: str
    remedy: str = ""


@click.command()
@click.option("--host", default=config.default(config.ServerConfig, "host"), show_default=True, help="address to check")
@click.option("--port", default=config.default(config.ServerConfig, "port"), show_default=True, help="port to check")
@click.pass_context
def doctor(ctx: click.Context, host: str, port: int) -> None:
    """Check this machine; exit with 1 if something keeps mstar from serving."""
    findings = []
    for finding in examine(host=host, port=port):
        findings.append(finding)
        click.echo(f"{finding.state:8}{finding.subject:15}{finding.detail}")
        if finding.remedy:
            click.echo(f"{'':23}-> {finding.remedy}")
    problems = sum(finding.state == "problem" for finding in findings)
    click.echo("nothing keeps mstar from serving" if not problems else f"{problems} to solve before mstar can serve")
    ctx.exit(1 if problems else 0)


def examine(*, host: str, port: int) -> Iterator[Finding]:
    """Look at everything that serving needs, quickest first."""
    yield Finding("mstar", "ok", f"{__version__}, {os.path.dirname(os.path.dirname(__file__))}")
    yield Finding("python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield from libraries()
    yield from torch()
    yield from plugins()
    yield compiler()
    yield cache()
    yield shared_memory()
    yield address(host, port=port)


def libraries() -> Iterator[Finding]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("libraries", "problem", f"{name} is not installed", f"pip install {name}")
    yield Finding("libraries", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library does not load
        yield Finding("torch", "problem", f"does not import: {error}", "pip install --force-reinstall torch")
        return
    threads = torch.get_num_threads()
    yield Finding("torch", "ok", f"{torch.__version__}, {threads} threads on {os.cpu_count()} cores")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
        yield Finding("device", "ok", f"CUDA: {names}")
        try:
            yield Finding("attention", "ok", f"flashinfer {metadata.version('flashinfer-python')}")
        except metadata.PackageNotFoundError:
            yield Finding("attention", "note", "flashinfer is not installed", "pip install 'mstar-core[cuda]'")
    elif torch.version.cuda:
        remedy = "install a driver that fits, or go on with --device cpu"
        yield Finding("device", "note", f"torch is built for CUDA {torch.version.cuda} but finds no device", remedy)
    else:
        yield Finding("device", "ok", "cpu")


def plugins() -> Iterator[Finding]:
    from mstar.plugin import loader

    found = loader.installed()
    if not found:
        yield Finding("plugins", "problem", "none is installed", "pip install mstar-plugin-NAME")
    for plugin in found:
        subject, detail = f"plugin {plugin.name}", f"{plugin.distribution} {plugin.version}"
        try:
            loader.load(plugin.name)
        except (ConfigError, PluginError) as error:
            yield Finding(subject, "problem", f"{detail}: {error}", f"pip install --upgrade {plugin.distribution}")
        else:
            yield Finding(subject, "ok", detail)


def compiler() -> Finding:
    path = next(
        (found for name in (config.environment().compiler, "g++", "clang++") if (found := shutil.which(name))), None
    )
    if path is None:
        remedy = "install a C++ compiler, such as Debian's g++; without one attention on a CPU is slow"
        return Finding("compiler", "note", "no C++ compiler found", remedy)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    if answer.returncode:
        return Finding("compiler", "note", f"{path} --version fails: {answer.stderr.strip()}", "reinstall it")
    return Finding("compiler", "ok", f"{path}: {answer.stdout.splitlines()[0]}")


def cache() -> Finding:
    try:
        folder = config.environment().cache
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free / config.GIB
    except (OSError, ConfigError) as error:
        return Finding("cache folder", "problem", str(error), "set MSTAR_CACHE to a folder that can be written")
    return Finding("cache folder", "ok", f"{folder}, {free:.1f} GiB free")


def shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("shared memory", "note", str(error), "mount /dev/shm; workers in other processes need it")
    if free < SHARED_MEMORY_BYTES:
        remedy = "enlarge /dev/shm (in containers: --shm-size 1g); workers in other processes need it"
        return Finding("shared memory", "note", f"{free / 2**20:.0f} MiB free in /dev/shm", remedy)
    return Finding("shared memory", "ok", f"{free / config.GIB:.1f} GiB free in /dev/shm")


def address(host: str, *, port: int) -> Finding:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(where)
    except (OSError, OverflowError) as error:
        return Finding(
            "address", "problem", f"{host}:{port}: {error}", "free it, or choose others with --host and --port"
        )
    return Finding("address", "ok", f"{host}:{port} is free")
