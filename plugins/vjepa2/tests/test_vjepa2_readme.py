"""The examples of the README, run as they stand on the tiny checkpoints, in one folder and against two servers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from scenes import moving_square, write_video
from served import Served

from mstar.cli import cli

README = Path(__file__).parents[1] / "README.md"
MODELS = {"facebook/vjepa2-vitl-fpc64-256": "tiny", "/models/vjepa2-ac": "tiny-ac"}


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the examples run, with the files that they name."""
    folder, before = tmp_path_factory.mktemp("readme"), Path.cwd()
    write_video(folder / "clip.mp4", moving_square(24))
    write_video(folder / "arm.mp4", moving_square(18, height=64, width=96))
    os.chdir(folder)
    exec(snippets("python")[0], {})  # writes the tensors
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """What the README calls a server -> one of this process."""
    servers = [Served(plugin="vjepa2", model=model) for model in ("tiny", "tiny-ac")]
    with servers[0].http(max_body_bytes=2**26) as video, servers[1].http(max_body_bytes=2**26) as action:
        yield {"http://127.0.0.1:8000": video, "http://127.0.0.1:8001": action}
    for server in servers:
        server.assert_clean()
        server.close()


def replaced(text: str, by: dict[str, str]) -> str:
    for name, value in by.items():
        text = text.replace(name, value)
    return text


def test_python_examples_run_one_after_the_other(
    folder: Path, addresses: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    known: dict[str, Any] = {}
    for snippet in snippets("python")[1:]:
        exec(replaced(snippet, addresses), known)
    assert known["result"].features.shape == (1, 8 * 16, 64)
    assert known["rollout"].latents.shape == (1, 8, 16, 64) and known["rollout"].distances.shape == (1, 8)
    assert abs(known["whole"] - known["rollout"].latents).max() < 1e-6
    assert abs(known["step"].latents[0, 0] - known["rollout"].latents[0, -1]).max() < 1e-4
    assert known["plan"].action.shape == (2, 7) and known["plan"].costs.shape == (5, 64)
    assert "tensor(" in capsys.readouterr().out
    known["video"].close(), known["world"].close()


RUNS = [shlex.split(line) for text in snippets("bash") for line in text.splitlines() if line.startswith("mstar run")]


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[words.index("--task") + 1])
def test_commands_write_tensors_and_a_picture(folder: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([MODELS.get(word, word) for word in words[1:]], standalone_mode=False)
    assert caught.value.code == 0
    out, task = folder / words[words.index("--out") + 1], words[words.index("--task") + 1]
    assert load_file(out / "tensors.safetensors")
    picture = (out / f"{task}.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_curl_gets_json_and_safetensors(folder: Path, addresses: dict[str, str]) -> None:
    (script,) = (text for text in snippets("bash") if "curl" in text)
    subprocess.run(["bash", "-ec", replaced(script, addresses)], check=True, timeout=60, capture_output=True)
    assert load_file(folder / "features.safetensors")["features"].shape == (1, 8 * 16, 64)
    assert '"features"' in (folder / "result.json").read_text()


def test_every_task_has_examples() -> None:
    from mstar_plugin_vjepa2.plugin import SPEC

    assert {words[words.index("--task") + 1] for words in RUNS} == set(SPEC.tasks)
    python = "\n".join(snippets("python"))
    assert all(f".{task}(" in python for task in SPEC.tasks)
