"""Finds a model's files before anything is loaded: in folders, on the hub, or written at random for "tiny".

Runs in every process that loads a model. Imports no torch and reads no weights; what the files hold is the plugin's
business.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

import mstar
from mstar.config import did_you_mean, environment, suggest
from mstar.errors import ConfigError, MstarError, PluginError
from mstar.plugin.spec import Checkpoint, ModelSpec, load_object, tinies

log = logging.getLogger(__name__)

TINY = "tiny"
_MARKER = "mstar-tiny.json"  # written last: which folder inside to load
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_IGNORED = ("*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite", "*.ckpt", "*.distcp", "optimizer*")


def download_snapshot(repository: str, *, only: Iterable[str] | None = None) -> Path:
    """The folder of a hub repository, downloaded if need be. Honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Args:
        only: patterns of the files that are needed; None: all.
    """
    from huggingface_hub import errors, snapshot_download

    page = f"https://huggingface.co/{repository}"
    try:
        allowed = None if only is None else list(only)
        return Path(snapshot_download(repository, allow_patterns=allowed, ignore_patterns=list(_IGNORED)))
    except errors.GatedRepoError as error:
        wrong = f"is gated: accept its terms at {page}, then run 'hf auth login' or set HF_TOKEN"
        raise ConfigError(f"{repository!r} {wrong}") from error
    except errors.RepositoryNotFoundError as error:
        wrong = "or it is private; check the spelling, or set HF_TOKEN to see private ones"
        raise ConfigError(f"the hub has no {repository!r}, {wrong}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        wrong = "is not in the hub's cache and cannot be downloaded (no connection, or HF_HUB_OFFLINE is set)"
        raise ConfigError(f"{repository!r} {wrong}: go online once, set HF_HOME, or pass its folder") from error
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"downloading {repository!r} failed: {reason}; try again, or pass its folder") from error


def check(spec: ModelSpec, model: str) -> None:
    """Raise ConfigError for a model that can be seen, without reading or downloading anything, not to be there."""
    makers = _makers(spec, model)
    if model not in makers:
        _folder(model, words=makers)


def resolve(
    spec: ModelSpec,
    model: str,
    *,
    parts: Mapping[str, Path] | None = None,
    download: Callable[[str], Path] = download_snapshot,
    cache: Path | None = None,
) -> Checkpoint:
    """Find the folders of `model` and of the spec's further parts, and read its configuration.

    `model` is a folder, a hub id, or a word for a tiny checkpoint of the plugin's, such as "tiny".

    A part is looked for in `parts` (the operator's `--set part=PATH`), in the model's folder, beside it, then on the
    hub. `cache` holds tiny checkpoints (default: where MSTAR_CACHE says).

    Raises ConfigError for what the operator can change, PluginError for what only the plugin's author can.
    """
    given = dict(parts or {})
    for name, path in given.items():
        if name not in spec.parts:
            raise ConfigError(f"--set {name}={path}: {spec.name!r} has no such part{suggest(name, spec.parts)}")
        if not path.is_dir():
            raise ConfigError(f"--set {name}={path}: there is no such folder")
    makers = _makers(spec, model)
    is_tiny = model in makers
    if is_tiny:
        folder = _tiny(spec, makers[model], (cache or environment().cache) / TINY / f"{spec.name}-{model}")
    else:
        folder = _folder(model, words=makers) or download(model)
    found = {}
    for name, repository in spec.parts.items():
        local = given.get(name) or _nearby(folder, name)
        if local is None and is_tiny:
            raise PluginError(f"plugin {spec.name!r}: its tiny checkpoint {folder} lacks the part {name!r}")
        found[name] = local or download(repository)
    return Checkpoint(model=model, folder=folder, parts=found, config=_config(spec, folder, found))


def _makers(spec: ModelSpec, model: str) -> Mapping[str, str]:
    """Makers of tiny checkpoints by word; none is fine unless `model` asks for one."""
    return tinies(spec) if spec.tiny or model == TINY else {}


def _folder(model: str, *, words: Iterable[str]) -> Path | None:
    """The folder `model` names, or None for a hub id. `words`: what else it could have meant."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"--model {model} is a file; pass the folder it lies in")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        return None
    hint = did_you_mean(model, [*words]) or "; check the spelling"
    raise ConfigError(f"--model {model} is neither a folder nor a hub id (OWNER/NAME){hint}")


def _nearby(folder: Path, part: str) -> Path | None:
    return next((path for path in (folder / part, folder.absolute().parent / part) if path.is_dir()), None)


def _config(spec: ModelSpec, folder: Path, parts: Mapping[str, Path]) -> Any:
    read = load_object(spec.config, plugin=spec.name)
    try:
        return read(folder, parts)
    except (*_UNREADABLE, msgspec.MsgspecError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{folder} is not a checkpoint that plugin {spec.name!r} can read: {reason}") from error


# ---- tiny checkpoints -----------------------------------------------------------------------------------


def _tiny(spec: ModelSpec, maker: str, name: Path) -> Path:
    """A tiny checkpoint of the plugin, written once per version of its code to a folder that begins with `name`."""
    home = name.with_name(f"{name.name}-{_code_version(maker)}")
    if not (home / _MARKER).exists():
        _write_tiny(spec, maker, home)
    return home / json.loads((home / _MARKER).read_text(encoding="utf-8"))["folder"]


def _code_version(path: str) -> str:
    """A hash of mstar's version and the Python files of the package that a dotted path lies in."""
    found = importlib.util.find_spec(path.partition(":")[0].partition(".")[0])
    digest = hashlib.sha256(mstar.__version__.encode())
    for location in (found.submodule_search_locations or ()) if found else ():
        for file in sorted(Path(location).rglob("*.py")):
            digest.update(str(file.relative_to(location)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _write_tiny(spec: ModelSpec, maker: str, home: Path) -> None:
    """Write beside, then rename: other processes see a whole checkpoint or none."""
    make = load_object(maker, plugin=spec.name)
    log.info("writing a tiny random checkpoint of %s to %s", spec.name, home)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}-"))
    except OSError as error:
        raise ConfigError(f"cannot write to {home.parent}: {error}; set MSTAR_CACHE to a writable folder") from error
    try:
        folder = _made(spec, make, maker, temporary)
        (temporary / _MARKER).write_text(json.dumps({"folder": str(folder)}), encoding="utf-8")
        temporary.rename(home)
    except OSError:
        if not (home / _MARKER).exists():  # else another process was first, with the same files
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _made(spec: ModelSpec, make: Callable[[Path], Path], maker: str, temporary: Path) -> Path:
    """Where, inside of `temporary`, the maker put the folder to load."""
    try:
        folder = Path(make(temporary))
    except MstarError:
        raise
    except Exception as error:  # a plugin's code may raise anything; whatever it is, it is the plugin's
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(f"plugin {spec.name!r}: writing its tiny checkpoint failed: {reason}") from error
    if not folder.is_dir() or not folder.is_relative_to(temporary):
        wrong = f"{maker} returned {folder}; it must be a folder within {temporary}"
        raise PluginError(f"plugin {spec.name!r}: {wrong}")
    return folder.relative_to(temporary)
