"""The golden checkpoint of this model, and a tiny one written once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from mstar.plugin.spec import Checkpoint
from mstar_plugin_orpheus import config, tiny

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "orpheus"


@dataclass(frozen=True)
class Golden:
    answers: dict[str, Any]
    tensors: dict[str, Tensor]
    inputs: dict[str, Any]
    codes: Tensor
    checkpoint: Checkpoint


def open_checkpoint(folder: Path, codec: Path) -> Checkpoint:
    parts = {"snac_24khz": codec}
    return Checkpoint(model=str(folder), folder=folder, parts=parts, config=config.load(folder, parts))


@pytest.fixture(scope="session")
def golden() -> Golden:
    folder = GOLDEN / "checkpoint"
    return Golden(
        answers=json.loads((GOLDEN / "golden.json").read_text()),
        tensors=load_file(GOLDEN / "golden.safetensors"),
        inputs=json.loads((GOLDEN / "inputs.json").read_text()),
        codes=load_file(GOLDEN / "inputs.safetensors")["codes7"],
        checkpoint=open_checkpoint(folder / "orpheus-3b-0.1-ft", folder / "snac_24khz"),
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder, tiny_folder.parent / "snac_24khz")
