"""The examples of the README, run as they stand on the tiny checkpoint, but for their limits."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from served import Served

from mstar.cli import cli

README = Path(__file__).parents[1] / "README.md"
SMALLER = {"Qwen/Qwen3-Omni-30B-A3B-Instruct": "tiny", "64": "4", "400": "8"}


def snippets(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    for name, value in SMALLER.items():
        found = [re.sub(rf"(?<!\w){name}(?!\w)", value, snippet) for snippet in found]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands have run, one after the other."""
    folder, before = tmp_path_factory.mktemp("readme"), Path.cwd()
    os.chdir(folder)
    for command in snippets("bash")[0].splitlines():
        if command.startswith("echo"):
            subprocess.run(["bash", "-c", command], check=True)
            continue
        with pytest.raises(SystemExit) as caught:
            cli.main(shlex.split(command)[1:], standalone_mode=False)
        assert caught.value.code == 0
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    served = Served(plugin="qwen3_omni", model="tiny", served_model_name=("qwen3_omni",))
    with served.http() as url:
        yield url
    served.assert_clean()
    served.close()


def test_commands_write_speak_hear_and_decode(folder: Path) -> None:
    results = {name: json.loads((folder / name / "result.json").read_text()) for name in ("answer", "hello", "heard")}
    assert [[one["type"] for one in results[name]["outputs"]] for name in results] == [
        ["text"], ["text", "audio", "tensor"], ["text"],
    ]  # fmt: skip
    assert results["heard"]["counters"]["audio_encoder.encode"] == 1
    spoken, again = (load_file(folder / name / "tensors.safetensors") for name in ("hello", "again"))
    assert len(spoken["audio"]) == spoken["codes"].shape[1] * 1920 - 555
    assert torch.allclose(spoken["audio"], again["audio"], atol=0.01)


def test_curl_speaks(folder: Path, address: str) -> None:
    script = snippets("bash")[1].replace("http://127.0.0.1:8000", address)
    subprocess.run(["bash", "-ec", script], check=True, timeout=60, capture_output=True)
    message = json.loads((folder / "hello.chat.json").read_text())["choices"][0]["message"]
    assert message["audio"]["data"] and message["audio"]["transcript"] == message["content"]


def test_the_openai_package_does_as_shown(folder: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {}
    exec(snippets("python")[0].replace("http://127.0.0.1:8000", address), known)
    known["client"].close()
    assert (len(known["pcm"]) // 2 + 555) % 1920 == 0 and "s of speech" in capsys.readouterr().out
