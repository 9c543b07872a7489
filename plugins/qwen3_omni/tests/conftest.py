"""The golden checkpoint of this model, and what its authors' code made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from mstar.plugin.spec import Checkpoint
from mstar_plugin_qwen3_omni.config import OmniConfig, load

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "qwen3_omni"


@dataclass
class Golden:
    """What the authors' code was asked, and what it gave."""

    folder: Path
    asked: dict[str, Any]
    inputs: dict[str, Tensor]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    config: OmniConfig

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(model=str(self.folder), folder=self.folder, config=self.config)


@pytest.fixture(scope="session")
def golden() -> Golden:
    asked, facts = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("inputs", "golden"))
    inputs, tensors = (load_file(GOLDEN / f"{name}.safetensors") for name in ("inputs", "golden"))
    folder = GOLDEN / "checkpoint"
    return Golden(folder, asked, inputs, facts, tensors, load(folder, {}))
