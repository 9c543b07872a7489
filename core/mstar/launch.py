"""Starts what a model needs and stops it again: `serve` behind HTTP, `run` for one request offline; `build` compiles.

One process, where the worker is a thread and the channel is in memory, or with --workers or --placement a process for
each (`processes`). The port is taken first, so that a busy one is known before anything is loaded, and listened on
last, so that it answers only when the model can.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import ipaddress
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import uvicorn
import yaml
from starlette.applications import Starlette

import mstar
from mstar import planning
from mstar.config import HIDDEN, EngineConfig, ServerConfig, choose_threads, default, environment, flags, num_cores
from mstar.errors import ConfigError
from mstar.ipc.channel import WorkerEnd, memory_channel
from mstar.ipc.messages import Dead, WorkerStatus
from mstar.layers import kernels, shims
from mstar.model import Model, find_model
from mstar.observe import printable, progress, size_text
from mstar.placement import Placement
from mstar.plugin.graph import Graph
from mstar.plugin.spec import Checkpoint, ModelSpec, load_object, tinies
from mstar.processes import STOP_S, Processes
from mstar.server.app import create_app, route_names
from mstar.server.convert import check_known, convert
from mstar.server.engine import Engine, served_names
from mstar.server.guard import Connection
from mstar.server.native import GenerateRequest, check_request
from mstar.server.requests import contained
from mstar.server.results import Outputs
from mstar.types import ProgressChunk, TensorChunk, TextChunk
from mstar.worker.compiled import Compilation, Progress
from mstar.worker.finish import described
from mstar.worker.worker import Worker

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 10.0
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is closed as its next request is sent


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve one model over HTTP until SIGTERM or SIGINT; a second one stops at once.

    Returns an exit code: 0 after a shutdown that let all requests end, 1 after one that cut some. Raises ConfigError or
    PluginError if the model or the port cannot be served.
    """
    _check_certificate(server_config)
    with _bound(server_config) as listener:
        return asyncio.run(_serve(engine_config, server_config, listener))


def run(engine_config: EngineConfig, request: dict[str, Any], *, out: Path, base: Path, plot: bool = False) -> int:
    """Answer one request and write result.json, tensors.safetensors and media files into `out`.

    Args:
        request: as the body of `POST /v1/generate`; tensors and media may also name files.
        base: folder that relative file names start from.
        plot: whether to draw pictures of it too.

    Returns an exit code. Raises ConfigError, PluginError or RequestError, whose messages say what to do.
    """
    wire = convert(request, GenerateRequest)
    model = find_model(engine_config)
    draw = _plotter(model.plugin.spec) if plot else None
    _check_request(wire, model=model, config=engine_config)
    return asyncio.run(_run(engine_config, wire, model=model, out=out, base=base, draw=draw))


def build(config: EngineConfig, *, progress: Progress) -> Compilation:
    """Put everything into the compile cache that a later start with these settings looks for there, and start nothing.

    Args:
        config: with `compile`.
        progress: told of "kernels", "reading weights" and then each method.

    Raises ConfigError, also where nothing can be compiled, or PluginError.
    """
    _set_threads(config)
    model = find_model(config)
    worker = Worker(model.plugin.spec, model.graph, model.checkpoint, config, memory_channel()[1])
    progress("kernels", 0, 1)
    kernels.compile_cache()  # what is wrong with its folder is said first
    if not shims.load():
        wanted = f"install g++, or set CXX to a C++ compiler (it is {environment().compiler!r})"
        raise ConfigError(f"nothing can be compiled here, as kernels cannot be built; {wanted}")
    progress("reading weights", 0, 1)
    worker.load(progress)
    return worker.compilation


# ---- one model --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def started_engine(
    config: EngineConfig, *, model: Model | None = None, base: Path | None = None
) -> AsyncIterator[Engine]:
    """An engine with its worker or workers, loaded and ready; all are stopped at the end.

    Raises ConfigError or PluginError.

    Args:
        model: what `find_model(config)` gave, if it is known already.
        base: folder that file names in requests start from; None: requests may not name files.
    """
    model = model or find_model(config)
    placement = Placement.wanted(config, model.plugin.spec, model.graph)
    source = f"--placement {config.placement}"
    planning.check(model, placement, source=source)
    planning.check_devices(placement, config, source=source)
    threads = _set_threads(config, num_processes=placement.num_processes)
    is_alone = not config.workers and config.placement is None
    workers = _Thread(model, config) if is_alone else Processes(config, placement, threads=threads)
    engine = Engine(
        spec=model.plugin.spec, graph=model.graph, make_processor=model.make_processor, config=config,
        end=workers.end, base=base, workers=workers.status, num_replicas=placement.num_replicas,
    )  # fmt: skip
    workers.start()
    reporting = asyncio.create_task(_report(engine))
    try:
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await engine.start()
        except TimeoutError as error:
            is_one = len({w.group for w in workers.status()}) == 1
            late = [
                f"worker {w.worker}{'' if is_one else f' ({w.group})'}: {w.detail or 'it is starting'}"
                for w in workers.status()
                if w.state != "ready"
            ]
            problem = f"not ready after {config.start_timeout_s:g} s: {', '.join(late) or engine.state.loading}"
            raise ConfigError(f"{problem}; raise --start-timeout") from error
        yield engine
    finally:
        reporting.cancel()
        await engine.close()
        await workers.stop(at_once=engine.is_abandoned or engine.state.plan is None)


class _Thread:
    """The worker as a thread of this process; the same surface as `Processes`."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.end, worker_end = memory_channel()
        arguments = (model.plugin.spec, model.graph, model.checkpoint, config, worker_end)
        # A daemon: a step that never ends must not keep a forced shutdown waiting.
        self._thread = threading.Thread(target=_work, args=arguments, name="mstar-worker", daemon=True)
        self.start = self._thread.start

    def status(self) -> list[WorkerStatus]:
        """Nothing: what is to be said of this worker is the engine's own state."""
        return []

    async def stop(self, *, at_once: bool) -> None:
        """Wait for it, if it has been told to end."""
        if not at_once:
            await asyncio.to_thread(self._thread.join, STOP_S)


def _work(spec: ModelSpec, graph: Graph, found: Checkpoint, config: EngineConfig, end: WorkerEnd) -> None:
    torch.get_num_threads()  # tells OpenMP of this thread's number
    try:
        with contained():
            Worker(spec, graph, found, config, end).run()
    except Exception as error:
        # What an operator can change is said when the start fails; where it was found is of no use to them.
        logger.error("the worker stopped", exc_info=not isinstance(error, ConfigError))
        end.send(Dead(reason=described(error)))
    end.send(Dead(reason="the worker has ended"))  # heard only if nobody asked it to


def _set_threads(config: EngineConfig, *, num_processes: int = 1) -> int:
    """Set how many threads compute, in this process and for OpenMP in this thread; new threads ask torch.

    Returns their number for one process of workers: these share them, unless an operator has given a number.
    """
    num_threads, reason = choose_threads(config.threads, usual=torch.get_num_threads())
    torch.set_num_threads(num_threads)
    if num_processes > 1 and config.threads is None and environment().omp_num_threads is None:
        num_threads, reason = max(1, num_threads // num_processes), f"{reason}, shared by {num_processes} processes"
    logger.info("threads: %d of %d cores (%s)", num_threads, num_cores(), reason)
    return num_threads


async def _report(engine: Engine) -> None:
    """One line every ten seconds: what loads, or while requests are there how many, how fast, how full the KV is."""
    # One row of these methods adds one token to a sequence.
    methods = {
        f"{node.module}.{method.name}"
        for node in engine.graph.nodes
        for method in node.methods
        if method.kv is not None and method.kv.write and not method.has_tokens
    }
    before = (0, 0)
    while True:
        await asyncio.sleep(_REPORT_INTERVAL_S)
        state, stats = engine.state, engine.state.stats
        if state.plan is None and state.dead is None:
            logger.info("%s", state.loading)
        if stats is None:
            continue
        now = stats.steps, sum(rows for name, (_, rows, _) in stats.method_s.items() if name in methods)
        rates = [(number - last) / _REPORT_INTERVAL_S for number, last in zip(now, before, strict=True)]
        before = now
        if engine.num_active:
            kv = ", ".join(f"{name} {100 * used / max(total, 1):.0f} %" for name, (used, total) in stats.pools.items())
            line = "running %d, waiting %d, %.1f batches/s, %.1f tokens/s, KV use: %s"
            logger.info(line, state.num_running, state.num_waiting, *rates, kv or "none")


# ---- serving ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket that holds the address and does not listen yet."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
                "stop what uses it, or choose another with --host and --port"
            ) from error
        yield listener


def _check_certificate(config: ServerConfig) -> None:
    """Raises ConfigError, naming the flag, for files that TLS cannot be served with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    steps = (  # an empty password, so that nobody is asked for one
        ("--ssl-keyfile", key, lambda: open(key or "").close()),
        ("--ssl-certfile", certificate, lambda: context.load_cert_chain(certificate or "", key, password="")),
        ("--ssl-ca-certs", authorities, lambda: context.load_verify_locations(authorities)),
    )
    for flag, path, load in steps:
        try:
            if path is not None:
                load()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            wanted = "a certificate with its own, unencrypted key" if flag == "--ssl-certfile" else "PEM"
            raise ConfigError(f"{flag} {path}: {reason}; give a readable file of {wanted}") from error


def _shown(config: EngineConfig | ServerConfig) -> dict[str, Any]:
    """Field name -> value, for the log."""
    secret = [name for name, flag in flags(type(config)).items() if flag.is_secret and getattr(config, name)]
    shown: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    return shown | dict.fromkeys(secret, HIDDEN)


def _is_changed(name: str, *configs: EngineConfig | ServerConfig) -> bool:
    return any(getattr(config, name) != default(type(config), name) for config in configs if hasattr(config, name))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve(config: EngineConfig, server_config: ServerConfig, listener: socket.socket) -> int:
    logger.info("mstar %s", mstar.__version__)
    settings = _shown(config) | _shown(server_config)
    logger.debug("all settings:\n%s", yaml.safe_dump(settings, sort_keys=False).rstrip())
    changed = {name: value for name, value in settings.items() if _is_changed(name, config, server_config)}
    logger.info("settings that are not the default:\n%s", yaml.safe_dump(changed, sort_keys=False).rstrip())
    host = server_config.host
    if not server_config.api_key and not _is_loopback(host):
        logger.warning("anyone who can reach %s can use this server; set --api-key or MSTAR_API_KEY", host)
    model = find_model(config)
    spec, found = model.plugin.spec, model.checkpoint
    kind = "random weights, for trying things out" if spec.tiny and config.model in tinies(spec) else "model"
    logger.info("plugin %s %s, %s in %s", spec.name, model.plugin.version, kind, found.folder)
    async with started_engine(config, model=model) as engine:
        gc.collect()
        gc.freeze()  # what is loaded stays; a full collection that walked it again would stop every stream meanwhile
        gc.collect()  # full ones come when the uncollected outgrow what the last one left: without this, too late
        version = model.plugin.version
        app = create_app(engine, root=config.model, config=server_config, voices=model.voices, plugin_version=version)
        for line in (*_plan_lines(engine), "Available routes:", *(f"  {route}" for route in route_names(app.routes))):
            logger.info("%s", line)
        scheme = "https" if server_config.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        logger.info("Starting mstar server on %s://%s:%d", scheme, shown, listener.getsockname()[1])
        server = Server(app, engine, config=server_config)
        await server.serve(sockets=[listener])
        code = 1 if server.force_exit or server.is_cut else 0
    if engine.is_abandoned:
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End the process at once: Python would unwind a worker that still is in a kernel, and C++ abort for it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Server(uvicorn.Server):
    """Uvicorn with our signals: the first drains, a second forces. New connections are answered (503) to the end.

    Attributes:
        is_cut: whether requests were ended because their time, or the operator's patience, was over.
    """

    def __init__(self, app: Starlette, engine: Engine, *, config: ServerConfig) -> None:
        more: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "ws": "none"}
        more |= {name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
        more["ssl_cert_reqs"] = ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE
        more["http"] = functools.partial(Connection, client_timeout_s=config.client_timeout_s)
        more["timeout_keep_alive"] = _KEEP_ALIVE_S
        # The application has no lifespan, and a forced end would log that it was cancelled.
        super().__init__(uvicorn.Config(app, log_level=config.log_level, lifespan="off", **more))
        self.is_cut = False
        self._engine = engine
        self._drain_s = config.drain_timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests and wait for those running; when called again, wait no longer."""
        self._engine.drain()
        self.force_exit = self._engine.is_abandoned = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, end those left with an error, and then for what is still being sent."""
        deadline = time.monotonic() + self._drain_s
        if self._engine.num_active and not self.force_exit:
            line = "stopping: requests that run: %d; they get up to %g s to end; interrupt again to cut them off"
            logger.info(line, self._engine.num_active, self._drain_s)
        while self._engine.num_active and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.is_cut = self._engine.num_active > 0
        self._engine.cut()
        self.config.timeout_graceful_shutdown = max(1, round(deadline - time.monotonic()))
        await super().shutdown(sockets)
        self.is_cut |= bool(self.server_state.tasks)


def _plan_lines(engine: Engine) -> Iterator[str]:
    length = engine.state.max_model_len
    for name, weights_bytes, kv_bytes, kv_tokens in engine.state.plan or ():
        line = f"{name}: weights {size_text(weights_bytes)}"
        if kv_tokens:
            line += f", KV {size_text(kv_bytes)} = {kv_tokens:,} tokens"
            line += f", max concurrency at full length ({length:,}): {kv_tokens / length:.1f}"
        yield line


# ---- offline ----------------------------------------------------------------------------------------------------


def _plotter(spec: ModelSpec) -> Callable[..., list[Path]]:
    """What draws this model's results. Raises ConfigError if nothing does."""
    if spec.plot is None:
        raise ConfigError(f"--plot: plugin {spec.name!r} draws no pictures of its results; leave --plot out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'mstar-core[plot]'")
    draw: Callable[..., list[Path]] = load_object(spec.plot, plugin=spec.name)
    return draw


def _check_request(wire: GenerateRequest, *, model: Model, config: EngineConfig) -> None:
    """Raise RequestError for what would be refused whatever the weights and the media are, before either is read."""
    spec = model.plugin.spec
    _, _, params = check_request(wire, spec=spec, model_names=served_names(config, spec))
    voice, voices = getattr(params, "voice", None), model.voices
    if voices is not None and isinstance(voice, str):
        problem = f"voice {voice[:60]!r} is unknown; known:"
        check_known(voice, voices, problem, param="params.voice", code="unknown_voice")


async def _run(
    config: EngineConfig, wire: GenerateRequest, *, model: Model, out: Path, base: Path,
    draw: Callable[..., list[Path]] | None,
) -> int:  # fmt: skip
    async with started_engine(config, model=model, base=base) as engine:
        handle = await engine.submit(wire)
        outputs = Outputs(handle.request)
        with contextlib.ExitStack() as shown:
            done, advance = 0, None
            async for chunk in handle:
                outputs.add(chunk)
                if isinstance(chunk, ProgressChunk):
                    if advance is None:
                        advance = shown.enter_context(progress(handle.request.task, chunk.total, "steps"))
                    advance(chunk.step - done)
                    done = chunk.step
        assert handle.result is not None
        try:
            names = await asyncio.to_thread(outputs.write, out, handle.result)
            if draw is not None:
                tensors = {chunk.name: chunk.tensor for chunk in outputs.joined() if isinstance(chunk, TensorChunk)}
                drawn = await asyncio.to_thread(draw, handle.request, tensors, model.checkpoint.config, out)
                logger.info("drew %s", ", ".join(path.name for path in drawn) or "nothing: there is nothing to see")
        except OSError as error:
            raise ConfigError(f"cannot write to {out}: {error.strerror or error}; choose another --out") from error
        for chunk in outputs.joined():
            if isinstance(chunk, TextChunk) and chunk.channel == "answer":
                sys.stdout.write(printable(chunk.text) + "\n")
        reason, seconds = handle.result.finish_reason, handle.result.timings["total_s"]
        logger.info("%s after %.2f s: wrote %s to %s", reason, seconds, ", ".join(names), out)
    return 0
