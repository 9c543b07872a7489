"""Settings: limits, files, environment variables; and the frozen list of flags."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mstar.config import EngineConfig, ServerConfig, default, flags, load_config_file, read_environment
from mstar.errors import ConfigError

ENGINE_FLAGS = """
--plugin --model --set --served-model-name --dtype --quantization --device --max-model-len --max-num-seqs
--max-num-batched-tokens --block-size --kv-cache-memory-bytes --swap-space --enable-prefix-caching
--encoder-cache-bytes --batch-invariant
--enforce-eager
--attention-backend --compile --overlap --threads --workers --placement --kv-transfer --start-timeout
--cuda-graphs --seed --max-queue --session-ttl --max-sessions --request-timeout --stall-timeout
--allowed-media-domains --allowed-local-media-path
--max-media-bytes --media-memory-bytes --max-image-pixels --max-video-frames --max-audio-duration --max-video-duration
--limit-mm-per-prompt --media-timeout
""".split()
SERVER_FLAGS = """
--host --port --log-level --max-body-bytes --client-timeout --drain-timeout --enable-metrics --api-key --allowed-origins
--ssl-certfile --ssl-keyfile --ssl-ca-certs
""".split()


def test_the_list_of_flags_is_frozen() -> None:
    """Adding a flag is a decision: it arrives with its feature, its help, and a change here and in docs/serving.md."""
    assert [flag.name for flag in flags(EngineConfig).values()] == ENGINE_FLAGS
    assert [flag.name for flag in flags(ServerConfig).values()] == SERVER_FLAGS


def test_configurations_are_frozen_and_have_working_defaults() -> None:
    engine = EngineConfig(plugin="echo")
    assert (engine.model, engine.max_num_seqs, engine.swap_space_bytes) == ("tiny", 32, 1024**3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.model = "other"  # type: ignore[misc]
    assert ServerConfig().port == 8000


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 0}, ["--max-num-seqs is 0", "at least 1", "default (32)"]),
        ({"block_size": 4096}, ["--block-size is 4096", "at most 1024"]),
        ({"swap_space_bytes": -(2 * 1024**3)}, ["--swap-space is -2", "at least 0", "default (1)"]),
        ({"dtype": "int8"}, ["--dtype is int8", "bfloat16"]),
        ({"device": "gpu"}, ["--device is 'gpu'", "cuda:N"]),
        ({"request_timeout_s": float("nan")}, ["--request-timeout is nan"]),
        ({"max_audio_duration_s": 0}, ["--max-audio-duration is 0", "at least 0.1"]),
        ({"encoder_cache_bytes": -1}, ["--encoder-cache-bytes is -1", "at least 0"]),
        ({"max_model_len": 0}, ["--max-model-len is 0", "the model's own limit"]),
        (
            {"allowed_media_domains": ("https://a.org",)},
            ["--allowed-media-domains is 'https", "*.example.org"],
        ),
        ({"allowed_media_domains": ("10.0.0.1/8",)}, ["--allowed-media-domains is '10.0.0.1/8'"]),
        ({"allowed_media_domains": ("0x7f.1",)}, ["--allowed-media-domains"]),
        ({"allowed_local_media_path": "/no/such"}, ["--allowed-local-media-path is '/no/such'", "no folder"]),
        ({"max_image_pixels": 10**9}, ["--max-image-pixels is 1000000000", "at most 178956970"]),
        ({"served_model_name": ("a", "a")}, ["--served-model-name", "twice"]),
    ],
)
def test_a_bad_setting_is_refused_with_flag_value_limit_and_remedy(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(plugin="echo", **settings)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_key": ("two words",)}, "--api-key .*without spaces"),
        ({"api_key": ("",)}, "--api-key"),
        ({"api_key": ("schl\u00fcssel",)}, "--api-key .*visible ASCII"),
        ({"allowed_origins": ("example.org",)}, "--allowed-origins is 'example.org'"),
        ({"allowed_origins": ("https://example.org/",)}, "--allowed-origins is 'https://example.org/'"),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile is given without --ssl-certfile"),
        ({"ssl_ca_certs": "c"}, "--ssl-ca-certs is given without --ssl-certfile"),
        ({"client_timeout_s": 0}, "--client-timeout is 0"),
    ],
)
def test_a_bad_setting_of_the_server_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        ServerConfig(**settings)
    assert not any(key and key in str(error.value) for key in settings.get("api_key", ()))
    assert ServerConfig(allowed_origins=("*", "https://example.org:8443")).allowed_origins


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    config = ServerConfig(api_key=("sesame",))
    assert "sesame" not in repr(config)
    assert flags(ServerConfig)["api_key"].shown(config.api_key) == "***"
    assert "sesame" not in repr(read_environment({"MSTAR_API_KEY": "sesame"}))
    with pytest.raises(ConfigError, match="api-key is \\*\\*\\*") as error:
        load_config_file(written(tmp_path, "api-key: [{a: sesame}]"))
    assert "sesame" not in str(error.value)


def test_every_flag_has_help_and_a_default_that_passes_validation() -> None:
    for kind in (EngineConfig, ServerConfig):
        for name, flag in flags(kind).items():
            assert len(flag.help) > 10, name
            assert default(kind, name) is not dataclasses.MISSING or name == "plugin"


# ---- files ------------------------------------------------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    path = folder / "mstar.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_dashes_or_underscores_and_typed_values(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "plugin: echo\nmax-num-seqs: 4\nmax_model_len: 128\nkv-cache-memory-bytes: 2MiB\nswap-space: 0.5\n"
        "enable-prefix-caching: false\nserved-model-name: [a, b]\nset:\n  codec: /x\nport: 9000\n"
        "limit-mm-per-prompt: {image: 3, video: 0}\nencoder-cache-bytes: 0\n",
    )
    assert load_config_file(path) == {
        "plugin": "echo",
        "max_num_seqs": 4,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 2 * 1024**2,
        "swap_space_bytes": 512 * 1024**2,
        "enable_prefix_caching": False,
        "served_model_name": ("a", "b"),
        "parts": {"codec": Path("/x")},
        "port": 9000,
        "limit_mm_per_prompt": {"image": 3, "video": 0},
        "encoder_cache_bytes": 0,
    }


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_config_file(written(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 4", ["unknown key 'max-num-seq'", "max-num-seqs"]),
        ("max-num-seqs: 4\nmax_num_seqs: 5", ["given twice"]),
        ("port: 4\nport: 5", ["'port' is given twice", "line 2"]),
        ("max-num-seqs: true", ["max-num-seqs is True", "whole number"]),
        ("max-num-seqs: 1.5", ["whole number"]),
        ("port: [1]", ["port", "whole number"]),
        ("swap-space: .inf", ["swap-space is inf", "expected a number"]),
        ("request-timeout: soon", ["expected a number"]),
        ("enable-prefix-caching: 1", ["true or false"]),
        ("kv-cache-memory-bytes: lots", ["512MiB"]),
        ("host:", ["expected text"]),
        ("set: [codec]", ["part=PATH"]),
        ("- a", ["'flag: value'"]),
        ("a: [", ["not YAML"]),
        ("a: " + "[" * 5000, ["not YAML"]),
        ("port: " + "9" * 400, ["whole number"]),
        ("swap-space: 1.0e+308", ["less than 8 EiB"]),
        ("limit-mm-per-prompt: image", ["whole number"]),
        ("limit-mm-per-prompt: image=-1", ["image=3,video=0", "image, audio, video"]),
        ("limit-mm-per-prompt: {smell: 1}", ["image=3,video=0"]),
        ("limit-mm-per-prompt: image=1,image=2", ["image=3,video=0"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config_file(path)
    assert all(word in str(error.value) for word in [str(path), *words]), error.value


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config_file(tmp_path / "absent.yaml")


# ---- environment ------------------------------------------------------------------------------------------------


def test_variables_are_read_and_have_defaults(tmp_path: Path) -> None:
    assert read_environment({"XDG_CACHE_HOME": "/c"}).cache == Path("/c/mstar")
    found = read_environment({"MSTAR_CACHE": str(tmp_path), "MSTAR_LOG_LEVEL": "DEBUG"})
    assert (found.cache, found.log_level) == (tmp_path, "debug")
    numbers = {"": None, "3": 3, "4,2": 4, "many": None, "0": None}
    assert {text: read_environment({"OMP_NUM_THREADS": text}).omp_num_threads for text in numbers} == numbers


def test_an_unknown_variable_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_environment({"MSTAR_CACHES": "/x", "OTHER": "1"})
    assert "MSTAR_CACHES" in caplog.text
    assert "did you mean MSTAR_CACHE" in caplog.text


@pytest.mark.parametrize("variables", [{"MSTAR_LOG_LEVEL": "loud"}, {"MSTAR_CACHE": " "}, {"MSTAR_API_KEY": ""}])
def test_a_variable_that_cannot_work_is_an_error(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(variables))):
        read_environment(variables)


def test_settings_import_without_torch() -> None:
    code = "import sys, mstar.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
