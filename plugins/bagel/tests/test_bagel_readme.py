"""The examples of the README, run as they stand on the tiny checkpoint, and what `mstar run` shows meanwhile."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from safetensors.numpy import load_file
from served import Served

from mstar import observe
from mstar.cli import cli

README = Path(__file__).parents[1] / "README.md"
SMALLER = {"ByteDance-Seed/BAGEL-7B-MoT": "tiny", "1024x1024": "64x64"}


def snippets(language: str) -> list[str]:
    text = README.read_text()
    for name, value in SMALLER.items():
        text = text.replace(name, value)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


RUNS = [shlex.split(line) for text in snippets("bash") for line in text.splitlines() if line.startswith("mstar run")]


def run(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words, standalone_mode=False)
    assert caught.value.code == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands have run, one after the other."""
    folder, before = tmp_path_factory.mktemp("readme"), Path.cwd()
    os.chdir(folder)
    for words in RUNS:
        run(words[1:])
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    served = Served(plugin="bagel", model="tiny")
    with served.http() as url:
        yield url
    served.assert_clean()
    served.close()


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[words.index("--out") + 1])
def test_commands_write_pictures_and_words(folder: Path, words: list[str]) -> None:
    out = folder / words[words.index("--out") + 1]
    (result, *_) = json.loads((out / "result.json").read_text())["outputs"]
    if words[words.index("--task") + 1] == "text":
        assert result["type"] == "text" and result["text"]
    else:
        assert np.asarray(Image.open(out / "image-0.png")).shape == (128, 128, 3)
        assert load_file(out / "tensors.safetensors")


def test_curl_draws_edits_and_chats(folder: Path, address: str) -> None:
    (script,) = (text for text in snippets("bash") if "curl" in text)
    script = script.replace("http://127.0.0.1:8000", address)
    subprocess.run(["bash", "-ec", script], check=True, timeout=60, capture_output=True)
    drawn, joined, words = (json.loads((folder / f"{name}.json").read_text()) for name in ("fox", "joined", "words"))
    assert (drawn["size"], joined["size"]) == ("64x64", "128x128")
    assert words["choices"][0]["finish_reason"] and words["usage"]["completion_tokens"]


def test_the_openai_package_does_as_shown(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {}
    for snippet in snippets("python"):
        exec(snippet.replace("http://127.0.0.1:8000", address), known)
    known["client"].close()
    assert len(known["drawn"].data) == 2
    shown = capsys.readouterr().out
    assert shown.count("image_generation.partial_image") == 4 and shown.count("image_generation.completed") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_run_shows_how_far_a_drawing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(observe, "Console", lambda **_: Console(file=screen, force_terminal=is_terminal, width=100))
    size = ["--param", "height=16", "--param", "width=16", "--param", "num_timesteps=6", "--param", "n=2"]
    run(["run", "--plugin", "bagel", "--task", "image", "--text", "a fox", *size, "--out", str(tmp_path)])
    assert ("10/10" in screen.getvalue()) == is_terminal
    assert re.search(r"image: 10 steps in \d+\.\d s", capsys.readouterr().err)
    assert (tmp_path / "image-0.png").exists() and (tmp_path / "image-1.png").exists()
