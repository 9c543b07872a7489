"""`mstar doctor`: whether this machine can serve, and what to do where it cannot.

A check returns what it found, or raises: the table of checks says what to do then, and whether it keeps from serving.
"""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import click

from mstar import __version__, config
from mstar.cli import options
from mstar.errors import ConfigError, MstarError

LIBRARIES = ("transformers", "safetensors", "huggingface_hub", "av", "starlette", "uvicorn", "msgspec", "pyzmq")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
SHARED_MEMORY_BYTES = 64 * 1024**2
_ENDED = "read the server's log; workers that have ended are started again, unless they are dead"
_DEAD = "read the server's log for why, and restart the server: a dead worker is not started again"
_FAILURES = (ImportError, OSError, OverflowError, subprocess.SubprocessError, MstarError)


class _Noted(MstarError):
    """Something to know that keeps nothing from serving."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at. A failure is a problem that keeps mstar from serving, or else a note of what it costs.

    A look that raises `_Noted` has a note without a remedy.
    """

    subject: str
    look: Callable[[], str]
    remedy: str
    is_vital: bool = True

    def run(self) -> bool:
        """Print a line or two; whether mstar can serve, as far as this goes."""
        try:
            state, detail, remedy = "ok", self.look(), ""
        except _Noted as error:
            state, detail, remedy = "note", str(error), ""
        except _FAILURES as error:
            state, detail, remedy = "problem" if self.is_vital else "note", str(error) or repr(error), self.remedy
        click.echo(f"{state:8}{self.subject:14} {detail}")
        if remedy:
            click.echo(f"{'':23}-> {remedy}")
        return state != "problem"


@click.command(short_help="Say whether this machine can serve, and what to do if not.")
@options.only(config.EngineConfig, "plugin")
@click.option("--model", help="also check this checkpoint: a folder, a hub id or 'tiny'")
@options.only(config.EngineConfig, "placement")
@click.option("--host", default=config.default(config.ServerConfig, "host"), show_default=True, help="address to check")
@click.option("--port", default=config.default(config.ServerConfig, "port"), show_default=True, help="port to check")
@click.option("--url", metavar="URL", help="show the workers of the server that runs there, in place of the machine")
@click.pass_context
def doctor(
    ctx: click.Context, plugin: str | None, model: str | None, placement: str | None, host: str, port: int,
    url: str | None,
) -> None:  # fmt: skip
    """Check this machine, and a model on it, or a server; exit with 1 if something keeps mstar from serving."""
    config.environment()  # its mistakes are of no one check
    asked = checks(host, port=port) if url is None else server_checks(url)
    if plugin is not None or model is not None:
        look = partial(_checkpoint, options.choose_plugin(plugin), model=model or "tiny")
        remedy = "pass --model FOLDER with all files of the checkpoint, or a hub id that is downloaded already"
        asked.append(Check("checkpoint", look, remedy))
    if placement is not None:
        look = partial(_placement, options.choose_plugin(plugin), model=model or "tiny", name=placement)
        asked.append(
            Check("placement", look, "name another, or change the file; 'mstar plan' writes one for the devices here")
        )
    problems = [check.run() for check in asked].count(False)
    wrong = f"{problems} to solve before mstar can serve" if url is None else f"{problems} not as it should be"
    click.echo(wrong if problems else "nothing keeps mstar from serving")
    ctx.exit(1 if problems else 0)


def server_checks(url: str) -> list[Check]:
    """A running server and each of its worker processes, as it sees them."""
    import httpx

    try:
        response = httpx.get(f"{url.rstrip('/')}/health", timeout=10)
        health = response.json()
        is_ok = response.status_code == 200
        found = [_stated("server", health["status"] if is_ok else health["error"]["message"], is_ok=is_ok)]
        rest = health.get("workers", ())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        problem = f"no server of mstar answers at {url}: {error or repr(error)}"
        return [_stated("server", problem, is_ok=False, remedy="start one with 'mstar serve', or correct the URL")]
    for worker in rest:
        running, restarts = f"{worker['running']} running", f"{worker['restarts']} restarts"
        group = f"{worker['group']} ({worker['role']})"
        pids = [pid for pid in (worker["pid"], *worker.get("ranks", ())) if pid]
        process = f"process {' and '.join(map(str, pids)) or 'none'}"
        parts = [worker["state"], group, process, running, restarts, worker["detail"]]
        is_ok = worker["state"] == "ready"
        remedy = _DEAD if worker["state"] == "dead" else _ENDED
        shown = ", ".join(part for part in parts if part)
        found.append(_stated(f"worker {worker['worker']}", shown, is_ok=is_ok, remedy=remedy))
    return found


def _stated(subject: str, text: str, *, is_ok: bool, remedy: str = _ENDED) -> Check:
    def look() -> str:
        if not is_ok:
            raise ConfigError(text)
        return text

    return Check(subject, look, remedy)


def checks(host: str, *, port: int) -> list[Check]:
    """Everything that serving needs."""
    from mstar.plugin import loader

    plugins = [
        Check(
            f"plugin {plugin.name}",
            partial(_plugin, plugin.name, found=f"{plugin.distribution} {plugin.version}"),
            f"pip install --upgrade {plugin.distribution}",
        )
        for plugin in loader.installed()
    ]
    shared = "enlarge /dev/shm (in containers: --shm-size 1g); workers in other processes need it"
    return [
        Check("mstar", _versions, "pip install --upgrade mstar-core"),
        Check("torch", _torch, "pip install --force-reinstall torch"),
        Check("threads", _threads, "leave OMP_NUM_THREADS out, or pass --threads"),
        Check("device", _device, "install a driver that fits, or go on with --device cpu", is_vital=False),
        Check("compiler", _compiler, "install g++, or set CXX to a C++ compiler that works", is_vital=False),
        Check("attention", _attention, "pip install 'mstar-core[cuda]' on CUDA, else g++ (or CXX)", is_vital=False),
        *(plugins or [Check("plugins", partial(options.choose_plugin, None), "pip install mstar-plugin-NAME")]),
        Check("cache folder", _cache, "set MSTAR_CACHE to a folder that can be written"),
        Check("shared memory", _shared_memory, shared, is_vital=False),
        Check("address", partial(_address, host, port=port), "free it, or choose others with --host and --port"),
    ]


def _versions() -> str:
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)
    return f"{__version__} in {Path(__file__).parents[1]}, python {platform.python_version()}, {libraries}"


def _torch() -> str:
    import torch

    return torch.__version__


def _threads() -> str:
    import torch

    number, reason = config.choose_threads(usual=torch.get_num_threads())
    return f"{number} of {config.num_cores()} cores ({reason}); --threads changes it"


def _device() -> str:
    import torch

    if torch.version.cuda and not torch.cuda.is_available():
        raise ConfigError(f"torch is built for CUDA {torch.version.cuda} but finds no device")
    return ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())) or "cpu"


def _attention() -> str:
    import torch

    if torch.cuda.is_available():
        return f"flashinfer {metadata.version('flashinfer-python')}"
    try:
        _compiler()
    except _FAILURES as error:
        raise ConfigError("plain torch, which is slower, as no C++ compiler works to build our own kernels") from error
    return "our own kernels"


def _plugin(name: str, *, found: str) -> str:
    from mstar.plugin import loader

    loader.load(name)
    return found


def _checkpoint(plugin: str, *, model: str) -> str:
    """Where the files are and how much they hold. Reads headers of weights only, and downloads nothing."""
    from mstar.layers.weights import Weights
    from mstar.observe import size_text
    from mstar.plugin import checkpoint, loader

    found = checkpoint.resolve(loader.load(plugin).spec, model, download=_downloaded)
    lines = []
    for folder in (found.folder, *found.parts.values()):
        files = [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHTS]
        if not files and model != checkpoint.TINY:
            raise ConfigError(f"{folder} has no weights ({', '.join(WEIGHTS)})")
        opened = [Weights.open(path) for path in sorted(folder.glob("*.index.json")) or files]
        size = size_text(sum(weights.num_bytes for weights in opened))
        lines.append(f"{folder}: {sum(len(weights.names) for weights in opened)} tensors, {size}")
    return "; ".join(lines)


def _placement(plugin: str, *, model: str, name: str) -> str:
    """Which processes a placement starts, where."""
    from mstar import planning
    from mstar.model import find_model
    from mstar.placement import Placement

    engine = config.EngineConfig(plugin=plugin, model=model, placement=name)
    found = find_model(engine, download=_downloaded)
    placement = Placement.wanted(engine, found.plugin.spec, found.graph)
    planning.check(found, placement, source=f"--placement {name}")
    planning.check_devices(placement, engine, source=f"--placement {name}")
    groups = [
        (f"{group.replicas} x " if group.replicas > 1 else "") + f"{group.name} ({placement.role_of(index)})"
        for index, group in enumerate(placement.groups)
    ]
    return f"{len(placement.workers)} workers: {', '.join(groups)}"


def _downloaded(repository: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except errors.HFValidationError as error:
        raise ConfigError(f"{repository!r} is no hub id: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            wrong = "is not in the hub's cache (HF_HOME), and HF_HUB_OFFLINE is set"
            raise ConfigError(f"{repository!r} {wrong}") from error
        raise _Noted(f"{repository!r} will be downloaded from the hub at first use; it is not here yet") from error


def _compiler() -> str:
    """Which compiler builds kernels, seen by building a very small one."""
    from mstar.layers import kernels

    compiler = config.environment().compiler
    try:
        kernels.try_compiler(compiler)
    except subprocess.CalledProcessError as error:
        reason = " ".join(str(error.stderr).split())[-200:] or f"it ends with {error.returncode}"
        raise ConfigError(f"{compiler} compiles nothing: {reason}") from error
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=False)
    return f"{compiler}: {next(iter(answer.stdout.splitlines()), 'it works')}"


def _cache() -> str:
    folder = config.environment().cache
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        return f"{folder}, {shutil.disk_usage(folder).free / config.GIB:.1f} GiB free"


def _shared_memory() -> str:
    free = shutil.disk_usage("/dev/shm").free
    if free < SHARED_MEMORY_BYTES:
        raise ConfigError(f"{free / 2**20:.0f} MiB free in /dev/shm")
    return f"{free / config.GIB:.1f} GiB free in /dev/shm"


def _address(host: str, *, port: int) -> str:
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((where[0], port, *where[2:]))  # `where` has ports that are too large cut to 16 bits
        except OSError as error:
            raise ConfigError(f"{host}:{port}: {error.strerror or error}") from error
    return f"{host}:{port} is free"
