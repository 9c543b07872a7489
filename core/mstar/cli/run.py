"""`mstar run`: one request without a server, by the same schema and with the same results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from mstar import config
from mstar.cli import options
from mstar.errors import RequestError

# what only a server has; --seed is the request's here
_SERVER_ONLY = (
    "served_model_name", "max_queue", "session_ttl_s", "max_sessions", "stall_timeout_s", "seed", "workers",
    "allowed_local_media_path",
)  # fmt: skip


@click.command(short_help="Answer one request without a server, into files.")
@click.option("--request", "request_file", metavar="FILE", help="JSON request, as for POST /v1/generate; -: stdin")
@click.option("--text", help="instead of --request: a request with this text, after what these name:")
@click.option("--image", "images", multiple=True, metavar="FILE|URL", help="an image; repeatable")
@click.option("--video", "videos", multiple=True, metavar="FILE|URL", help="a video; repeatable")
@click.option("--audio", "audios", multiple=True, metavar="FILE|URL", help="a sound; repeatable")
@click.option(
    "--tensor", "tensors", multiple=True, metavar="NAME=FILE",
    help="the tensor of this name in a safetensors file; repeatable",
)  # fmt: skip
@click.option("--num-frames", type=click.IntRange(min=1), help="frames of each --video, spread  [default: the task's]")
@click.option("--task", help="task of the request  [default: what inputs and outputs decide]")
@click.option(
    "--outputs", metavar="KINDS",
    help="what is wanted, such as text,audio  [default: the task's; mstar plugins lists kinds]",
)  # fmt: skip
@click.option("--voice", help="the same as --param voice=NAME, or speaker=NAME where that is what the model has")
@click.option(
    "--param", "params", multiple=True, metavar="KEY=VALUE",
    help="a parameter of the request; the value is JSON, or text where it is not; repeatable",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), help="seed of the request  [default: drawn, and reported]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("mstar-out"), show_default=True,
    metavar="DIR", help="folder for result.json, tensors and media",
)  # fmt: skip
@click.option("--plot", is_flag=True, help="draw what came of it, as PNG files beside the tensors")
@options.settings(config.EngineConfig, without=_SERVER_ONLY)
@options.only(config.ServerConfig, "log_level")
@options.config_option
def run(
    request_file: str | None, text: str | None, images: tuple[str, ...], videos: tuple[str, ...],
    audios: tuple[str, ...], tensors: tuple[str, ...], num_frames: int | None, task: str | None,
    outputs: str | None, voice: str | None,
    params: tuple[str, ...], seed: int | None, out: Path, plot: bool, config_file: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Answer one request: print its text, and write result.json, tensors.safetensors and media files."""
    if num_frames is not None and not videos:
        raise click.UsageError("--num-frames chooses frames of a --video; there is none")
    sampling = {} if num_frames is None else {"num_frames": num_frames}
    _check_files(image=images, video=videos, audio=audios)
    inputs: list[dict[str, Any]] = [{"type": "image", "data": source} for source in images]
    inputs += [{"type": "video", "data": source} | sampling for source in videos]
    inputs += [{"type": "audio", "data": source} for source in audios]
    inputs += [_tensor(pair) for pair in tensors]
    inputs += [] if text is None else [{"type": "text", "text": text}]
    request, base = _request(request_file, inputs)
    request |= {name: value for name, value in (("task", task), ("seed", seed)) if value is not None}
    more = read_params(params)
    if outputs is not None:
        request["outputs"] = [kind.strip() for kind in outputs.split(",")]
    settings = options.collect(given, config_file)
    log_level = settings.pop("log_level", config.environment().log_level)
    engine = options.engine_config(settings)
    more |= {} if voice is None else {_voice_param(engine.plugin): voice}
    own = request.get("params") or {}
    if more and isinstance(own, dict):  # else it is refused as in every request
        request["params"] = own | more

    from mstar import launch, observe

    observe.setup_logging(log_level)
    sys.exit(launch.run(engine, request, out=out, base=base, plot=plot))


def _check_files(**sources: tuple[str, ...]) -> None:
    """Say at once, not when the model is loaded, which file is not there."""
    for flag, names in sources.items():
        for name in names:
            if not name.startswith(("http:", "https:", "data:", "file:")) and not Path(name).is_file():
                raise click.BadParameter(f"{name}: there is no such file", param_hint=f"--{flag}")


def _voice_param(plugin: str) -> str:
    from mstar.plugin import loader

    tasks = loader.load(plugin).spec.tasks.values()
    names = {field.name for task in tasks for field in msgspec.structs.fields(task.params)}
    return "speaker" if "voice" not in names and "speaker" in names else "voice"


def _request(file: str | None, inputs: list[dict[str, Any]]) -> tuple[dict[str, Any], Path]:
    """The request, and the folder that relative paths in it start from."""
    if (file is None) == (not inputs):
        raise click.UsageError("give either --request FILE or --text TEXT, with or without media")
    if file is None:
        return {"inputs": inputs}, Path.cwd()
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="--request") from error
    try:
        request = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"--request {file}: not JSON of a request ({error}); a request is a JSON object") from error
    return request, Path.cwd() if file == "-" else Path(file).absolute().parent


def _tensor(pair: str) -> dict[str, Any]:
    name, equals, file = pair.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{pair!r}: expected NAME=FILE", param_hint="--tensor")
    return {"type": "tensor", "name": name, "tensor": {"file": file, "name": name}}


def read_params(pairs: tuple[str, ...]) -> dict[str, Any]:
    """The pairs of --param: KEY=VALUE, where the value is JSON, or text where it is not."""
    params: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{pair!r}: expected KEY=VALUE", param_hint="--param")
        try:
            params[key] = json.loads(value)
        except (ValueError, RecursionError):
            params[key] = value
    return params
