"""Every setting an operator can change: engine and server configuration, configuration files, environment variables.

One table: a field's `Flag` holds its spelling, help text, limits and how a value is read, so that the command line,
configuration files and validation agree. Read in every process; imports no torch; knows no model.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import ipaddress
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mstar.errors import ConfigError

GIB = 1024**3
HIDDEN = "***"
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of computing, and in how many
_HOST = re.compile(r"\*|(\*\.)?([a-z0-9_-]+\.)*[a-z0-9_-]*[a-z_][a-z0-9_-]*")
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": GIB, "T": 1024**4}

# ---- reading values: from the command line (text) and from YAML (typed) alike; they raise ValueError ------------


def _integer(value: Any) -> int:
    number = _number(value, expected="expected a whole number")
    if not number.is_integer():
        raise ValueError("expected a whole number")
    return int(value)


def _number(value: Any, *, expected: str = "expected a number") -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(expected)
    return number


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool | dict | list) or value is None or not str(value):
        raise ValueError("expected text")
    return str(value)


def _size(value: Any) -> int:
    """Bytes, from a number or a number with a binary unit: 1073741824, 512MiB, 2G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value), flags=re.IGNORECASE)
    if isinstance(value, bool) or match is None:
        raise ValueError("expected bytes, such as 1073741824, 512MiB or 2GiB")
    return _whole_bytes(float(match[1]) * _UNITS[match[2].upper()])


def _gib(value: Any) -> int:
    return _whole_bytes(_number(value) * GIB)


def _whole_bytes(number: float) -> int:
    if abs(number) >= 2**63:
        raise ValueError("expected less than 8 EiB")
    return int(number)


def _file(value: Any) -> str:
    return str(Path(_text(value)).expanduser())


def _folder(value: Any) -> str:
    return _file(value)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(_text(item) for item in (value if isinstance(value, list | tuple) else [value]))


def _amounts(value: Any) -> dict[str, int]:
    """Kind of media -> how many, from a mapping, as JSON too, or "image=3,video=1"."""
    value = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    given = value if isinstance(value, Mapping) else _text(value).split(",")
    pairs = given.items() if isinstance(given, Mapping) else [one.partition("=")[::2] for one in given]
    found = {str(kind).strip(): _integer(number) for kind, number in pairs}
    if not found.keys() <= {*MEDIA_KINDS} or len(found) < len(pairs) or min(found.values(), default=0) < 0:
        raise ValueError(f"expected KIND=NUMBER,..., such as image=3,video=0; kinds are {', '.join(MEDIA_KINDS)}")
    return found


def _is_media_host(text: str) -> bool:
    try:
        return bool(_HOST.fullmatch(text) or ipaddress.ip_network(text))
    except ValueError:
        return False


def _parts(value: Any) -> dict[str, Path]:
    """Part name -> path, from a mapping or a list of "part=PATH"."""
    pairs = value.items() if isinstance(value, Mapping) else [item.partition("=")[::2] for item in _names(value)]
    parts = {str(name): Path(str(path)).expanduser() for name, path in pairs if name and path}
    if len(parts) < len(pairs):
        raise ValueError("expected part=PATH, each part once")
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How a field is spelt, explained, read and limited.

    Args:
        parse: value from text or YAML; raises ValueError.
        help: what it does, with units; the default is appended by whoever prints it.
        name: the flag, with dashes; without them it is the key in configuration files. Usually that of the field.
        choices, minimum, maximum: what validation accepts.
        unit: multiplies a field's value up from the flag's unit (for messages), such as GiB for --swap-space.
        default_text: the default in words, where the value says too little.
        is_secret: never shown, in logs and errors alike.
    """

    parse: Callable[[Any], Any]
    help: str
    name: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    unit: int = 1
    default_text: str = ""
    is_secret: bool = False

    @property
    def key(self) -> str:
        return self.name.removeprefix("--")

    @property
    def is_switch(self) -> bool:
        return self.parse is _boolean

    @property
    def is_repeatable(self) -> bool:
        return self.parse in (_names, _parts)

    def shown(self, value: Any) -> str:
        """A field's value as an operator would write it."""
        if self.is_secret:
            return HIDDEN
        if self.is_switch:
            return "on" if value else "off"
        return str(value).removesuffix(".0") if self.unit == 1 else f"{value / self.unit:g}"


def _setting(parse: Callable[[Any], Any], default: Any, help: str, **limits: Any) -> Any:
    metadata = {"flag": Flag(parse=parse, help=help, **limits)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not metadata["flag"].is_secret)


MEDIA_KINDS = ("image", "audio", "video")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int4")
KV_TRANSFERS = ("layers", "chunks", "end")
ATTENTION_BACKENDS = ("auto", "cpu", "flashinfer", "reference")
LOG_LEVELS = ("debug", "info", "warning", "error")
_KV_CACHE_DEFAULT = "on a CPU max-num-seqs times max-model-len, at most 2GiB; else by free memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine needs to run one model. Raises ConfigError for values that cannot work."""

    plugin: str = _setting(
        _text, MISSING, "name of the installed plugin that serves the model", default_text="the only one installed"
    )
    model: str = _setting(_text, "tiny", "checkpoint: a folder, a hub id, or 'tiny' (random weights)")
    parts: Mapping[str, Path] = _setting(
        _parts, dict, "where another part of the model lies, part=PATH; repeatable", name="--set", default_text="none"
    )
    served_model_name: tuple[str, ...] = _setting(
        _names, (), "name in the API; repeatable, the first is the main one",
        default_text="the value of --model, and the plugin's name",
    )  # fmt: skip
    dtype: str = _setting(_text, "auto", "type of weights and activations; auto: the checkpoint's", choices=DTYPES)
    quantization: str = _setting(
        _text, "none", "int4: weights of linear layers in four bits, on a CPU; less exact", choices=QUANTIZATIONS
    )
    device: str = _setting(_text, "auto", "auto, cpu, cuda or cuda:N; auto: CUDA where there is one")
    max_model_len: int | None = _setting(
        _integer, None, "most tokens of a prompt and its output", minimum=1, default_text="the model's own limit"
    )
    max_num_seqs: int = _setting(_integer, 32, "most requests that run at once", minimum=1, maximum=65536)
    max_num_batched_tokens: int = _setting(_integer, 2048, "tokens of a step; longer prompts are cut", minimum=1)
    block_size: int = _setting(_integer, 64, "tokens in a page of KV cache", minimum=1, maximum=1024)
    kv_cache_memory_bytes: int | None = _setting(
        _size, None, "size of the KV cache, in bytes or as 512MiB, 2GiB", minimum=1, default_text=_KV_CACHE_DEFAULT
    )
    swap_space_bytes: int = _setting(
        _gib, GIB, "host memory for swapping, in GiB; 0: recompute instead", name="--swap-space", minimum=0, unit=GIB
    )
    enable_prefix_caching: bool = _setting(_boolean, True, "reuse the KV cache of prompts that begin alike")
    encoder_cache_bytes: int = _setting(
        _size, 256 * 1024**2, "outputs kept of media encoders, by content; 0: none", minimum=0, default_text="256MiB"
    )
    batch_invariant: bool = _setting(_boolean, False, "results bit for bit the same in any batch; slower")
    enforce_eager: bool = _setting(_boolean, False, "run every method alone as written, no fused loops; slower")
    attention_backend: str = _setting(
        _text, "auto", "kernel of attention; auto: the fastest that works here", choices=ATTENTION_BACKENDS
    )
    compile: bool = _setting(_boolean, False, "compile methods, once for this machine; a CPU with a C++ compiler")
    overlap: bool = _setting(_boolean, False, "prepare the next step while this one runs; on a CPU with --compile")
    threads: int | None = _setting(
        _integer, None, "threads that compute; wins over OMP_NUM_THREADS, which wins over the default", minimum=1,
        default_text="torch's, but of two or more cores one is left to the server",
    )  # fmt: skip
    workers: int = _setting(
        _integer, 0, "worker processes, each with the whole model; 0: one worker, in the server's process", minimum=0,
        maximum=64,
    )  # fmt: skip
    placement: str | None = _setting(
        _text, None, "YAML file that says which worker processes run which parts, or the name of one of the plugin's",
        default_text="none",
    )  # fmt: skip
    kv_transfer: str = _setting(
        _text, "layers", "when a sequence's KV cache goes to the worker that goes on: with each layer or chunk of its "
        "prefill, or at its end", choices=KV_TRANSFERS,
    )  # fmt: skip
    start_timeout_s: float = _setting(_number, 1800.0, "seconds for the model to be ready, all workers", minimum=1)
    cuda_graphs: bool = _setting(_boolean, True, "on CUDA, replay captured graphs; off: launch every kernel")
    seed: int | None = _setting(
        _integer, None, "draws seeds for requests without", minimum=0, maximum=2**63 - 1, default_text="drawn at start"
    )
    max_queue: int = _setting(_integer, 256, "most requests that wait; more are refused with 429", minimum=0)
    session_ttl_s: float = _setting(_number, 300.0, "seconds an idle session is kept", minimum=0)
    max_sessions: int = _setting(_integer, 64, "most sessions kept at once", minimum=0)
    request_timeout_s: float | None = _setting(
        _number, None, "seconds until a request is ended with an error", minimum=0.001, default_text="no limit"
    )
    stall_timeout_s: float = _setting(_number, 120.0, "seconds of one step until /health reports it stuck", minimum=1)
    allowed_media_domains: tuple[str, ...] = _setting(
        _names, (), "host that media URLs may name: a name, '*.NAME', '*' or an address; repeatable",
        default_text="none: no URL is fetched; 'mstar run' fetches from any public host",
    )  # fmt: skip
    allowed_local_media_path: str | None = _setting(
        _folder, None, "folder below which requests may name media files", default_text="none"
    )
    max_media_bytes: int = _setting(
        _size, 64 * 1024**2, "largest media file that is fetched or read", minimum=1024, default_text="64MiB"
    )
    media_memory_bytes: int = _setting(
        _size, GIB, "most memory that the decoded media of one request take", minimum=1024, default_text="1GiB"
    )
    max_image_pixels: int = _setting(
        _integer, 32 * 1024**2, "most pixels of an image, or of a video's frame", minimum=1, maximum=178_956_970
    )
    max_video_frames: int = _setting(_integer, 1024, "most frames that are taken of a video", minimum=1, maximum=65536)
    max_audio_duration_s: float = _setting(_number, 3600.0, "longest sound, in seconds", minimum=0.1)
    max_video_duration_s: float = _setting(_number, 3600.0, "longest video, in seconds", minimum=0.1)
    limit_mm_per_prompt: Mapping[str, int] = _setting(
        _amounts, dict, "most media of a kind in a request, as image=3,video=1,audio=2", default_text="no limit"
    )
    media_timeout_s: float = _setting(_number, 30.0, "seconds for fetching and decoding a request's media", minimum=0.1)

    def __post_init__(self) -> None:
        _validate(self)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"--device is {self.device!r}; it must be auto, cpu, cuda or cuda:N")
        if self.threads is not None and self.threads > num_cores():
            limit = f"it must be at most {num_cores()}, the cores that this process may use"
            raise ConfigError(f"--threads is {self.threads}; {limit}; leave it out for the default")
        if self.placement is not None and self.workers:
            raise ConfigError("--placement and --workers exclude each other: give 'replicas' in the placement's groups")
        if self.compile and self.enforce_eager:
            raise ConfigError("--compile and --enforce-eager exclude each other; give one")
        if self.compile and self.batch_invariant:
            raise ConfigError("--compile cannot keep --batch-invariant: compiled code rounds otherwise; give one")
        for name in self.allowed_media_domains:
            if not _is_media_host(name):
                wanted = "a host as example.org, *.example.org or *, or an address as 192.0.2.1 or 192.0.2.0/24"
                raise ConfigError(f"--allowed-media-domains is {name!r}; it must be {wanted}, in lower case")
        folder = self.allowed_local_media_path
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"--allowed-local-media-path is {folder!r}, which is no folder; give one that exists")
        if len(set(self.served_model_name)) != len(self.served_model_name):
            names = ", ".join(self.served_model_name)
            raise ConfigError(f"--served-model-name gives a name twice: {names}; give each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the HTTP server needs. Raises ConfigError for values that cannot work."""

    host: str = _setting(_text, "127.0.0.1", "address to listen on; 0.0.0.0: all interfaces")
    port: int = _setting(_integer, 8000, "TCP port; 0: any free one", minimum=0, maximum=65535)
    log_level: str = _setting(_text, "info", "how much is logged", choices=LOG_LEVELS)
    max_body_bytes: int = _setting(
        _size, 64 * 1024**2, "largest request body, in bytes or as 512MiB, 2GiB", minimum=1024, default_text="64MiB"
    )
    client_timeout_s: float = _setting(
        _number, 120.0, "seconds for a client to send a request, or to read a piece of the answer", minimum=0.1
    )
    drain_timeout_s: float = _setting(_number, 30.0, "seconds for running requests to end at shutdown", minimum=0)
    enable_metrics: bool = _setting(_boolean, True, "answer GET /metrics")
    api_key: tuple[str, ...] = _setting(
        _names, (), "key that clients must send; repeatable, any one will do", is_secret=True,
        default_text="MSTAR_API_KEY, or else none",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = _setting(
        _names, (), "origin whose pages may call (CORS), or '*'; repeatable", default_text="none"
    )
    ssl_certfile: str | None = _setting(
        _file, None, "serve HTTPS with this certificate (PEM, chain included)", default_text="none: HTTP"
    )
    ssl_keyfile: str | None = _setting(
        _file, None, "private key of the certificate", default_text="in the certificate's file"
    )
    ssl_ca_certs: str | None = _setting(
        _file, None, "clients need a certificate signed by one of these", default_text="none: not asked for"
    )

    def __post_init__(self) -> None:
        _validate(self)
        if not all(re.fullmatch(r"[\x21-\x7e]+", key) for key in self.api_key):
            raise ConfigError("--api-key (or MSTAR_API_KEY) is not only visible ASCII; give a key without spaces")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(f"--allowed-origins is {origin!r}; it must be '*' or like https://example.org:8443")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"--{name.replace('_', '-')} is given without --ssl-certfile; give both")


def flags(config: type[Any]) -> dict[str, Flag]:
    """Field name -> `Flag` of the settings an operator may give, in order."""
    found = {one.name: one.metadata["flag"] for one in dataclasses.fields(config) if "flag" in one.metadata}
    spelt = {name: "--" + name.removesuffix("_s").replace("_", "-") for name in found}
    return {name: dataclasses.replace(flag, name=flag.name or spelt[name]) for name, flag in found.items()}


def default(config: type[Any], name: str) -> Any:
    """The default of a field, `dataclasses.MISSING` where there is none."""
    entry = next(f for f in dataclasses.fields(config) if f.name == name)
    return entry.default_factory() if callable(entry.default_factory) else entry.default


def default_text(config: type[Any], name: str) -> str:
    """The default of a setting, for an operator."""
    flag = flags(config)[name]
    return flag.default_text or flag.shown(default(config, name))


def _validate(config: Any) -> None:
    for name, flag in flags(type(config)).items():
        value = getattr(config, name)
        if flag.choices and value not in flag.choices:
            problem = f"must be one of {', '.join(flag.choices)}"
        elif value is None:
            continue
        elif flag.minimum is not None and not value >= flag.minimum:  # refuses NaN too
            problem = f"must be at least {flag.shown(flag.minimum)}"
        elif flag.maximum is not None and value > flag.maximum:
            problem = f"must be at most {flag.shown(flag.maximum)}"
        else:
            continue
        usual = default_text(type(config), name)
        raise ConfigError(f"{flag.name} is {flag.shown(value)}; it {problem}; leave it out for the default ({usual})")


# ---- cores ------------------------------------------------------------------------------------------------------


def num_cores() -> int:
    """Cores that this process may use: its affinity, and what its control group (version 2) gives it, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return cores


def choose_threads(wanted: int | None = None, *, usual: int) -> tuple[int, str]:
    """How many threads compute, and why: --threads, else OMP_NUM_THREADS, else what is usual but for the server's core.

    Args:
        usual: what torch uses by itself, often one for each physical core.
    """
    cores, variable = num_cores(), environment().omp_num_threads
    if wanted is not None:
        return wanted, "--threads"
    if variable is not None:
        return min(variable, cores), "OMP_NUM_THREADS" if variable <= cores else f"OMP_NUM_THREADS asks for {variable}"
    if usual < cores or cores == 1:
        return min(usual, cores), "torch's default"
    return cores - 1, "one core is left to the server"


# ---- configuration files ----------------------------------------------------------------------------------------


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises OSError, or YAMLError, ValueError or RecursionError for what is none."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)


def load_config_file(path: Path) -> dict[str, Any]:
    """Settings of a YAML file, field name -> value; what the command line gives wins over them.

    Keys are flag names without the leading dashes, with dashes or underscores. Raises ConfigError that names file
    and key for an unknown key (with close matches), a key given twice or a value of the wrong kind.
    """
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a readable YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected 'flag: value' lines, found a {type(content).__name__}")
    known = {flag.key: (name, flag) for config in (EngineConfig, ServerConfig) for name, flag in flags(config).items()}
    settings: dict[str, Any] = {}
    for written, value in content.items():
        key = str(written).replace("_", "-")
        if key not in known:
            raise ConfigError(f"--config {path}: unknown key {written!r}{suggest(key, known)}")
        name, flag = known[key]
        if name in settings:
            raise ConfigError(f"--config {path}: {key!r} is given twice; remove one")
        try:
            settings[name] = flag.parse(value)
        except ValueError as error:
            shown = HIDDEN if flag.is_secret else repr(value)
            raise ConfigError(f"--config {path}: {written} is {shown}: {error}") from error
    return settings


def suggest(word: str, known: Iterable[str]) -> str:
    """What to append to "unknown X": close matches, or the list of what is known."""
    names = sorted(known)
    return did_you_mean(word, names) or f"; known: {', '.join(names) or 'none'}"


def close_and_known(word: str, known: Sequence[str]) -> str:
    """What to append to "unknown X" where all is listed: close matches, then all that is known, in its order."""
    return f"{did_you_mean(word, known) or ';'} known: {', '.join(known) or 'none'}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The same with close matches, or nothing."""
    close = difflib.get_close_matches(word[:60], sorted(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


# ---- environment variables --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What environment variables say.

    Args:
        cache: MSTAR_CACHE: folder for tiny checkpoints and compiled code (default: ~/.cache/mstar).
        log_level: MSTAR_LOG_LEVEL: default of --log-level.
        api_key: MSTAR_API_KEY: the key of clients, and so the default of --api-key.
        compiler: CXX, as everywhere: the C++ compiler (default: c++).
        omp_num_threads: OMP_NUM_THREADS, as everywhere: threads that compute; its first number, if it has several.
    """

    cache: Path
    log_level: str
    api_key: str | None = field(repr=False)
    compiler: str
    omp_num_threads: int | None = None


_VARIABLES = ("MSTAR_CACHE", "MSTAR_LOG_LEVEL", "MSTAR_API_KEY")


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Parse variables. Warns of unknown MSTAR_* ones; raises ConfigError for values that cannot work."""
    for name in sorted(variables):
        if name.startswith("MSTAR_") and name not in _VARIABLES:
            logging.getLogger(__name__).warning(
                "environment variable %s is not one of mstar's and has no effect%s", name, suggest(name, _VARIABLES)
            )
    level = variables.get("MSTAR_LOG_LEVEL", "info").lower()
    if level not in LOG_LEVELS:
        raise ConfigError(f"MSTAR_LOG_LEVEL is {level!r}; it must be one of {', '.join(LOG_LEVELS)}")
    base = Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = variables.get("MSTAR_CACHE")
    if cache is not None and not cache.strip():
        raise ConfigError("MSTAR_CACHE is empty; set it to a folder or unset it")
    threads = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # what is no number OpenMP leaves aside
    if variables.get("MSTAR_API_KEY") == "":
        raise ConfigError("MSTAR_API_KEY is empty; set it to a key, or unset it to serve without one")
    return Environment(
        cache=Path(cache).expanduser().absolute() if cache else base / "mstar",
        log_level=level,
        api_key=variables.get("MSTAR_API_KEY"),
        compiler=variables.get("CXX") or "c++",
        omp_num_threads=int(threads) if threads.isdecimal() and int(threads) > 0 else None,
    )


@functools.cache
def environment() -> Environment:
    """This process's environment, read once."""
    return read_environment(os.environ)
