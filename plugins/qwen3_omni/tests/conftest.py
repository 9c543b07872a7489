"""The golden checkpoint of this model, and what its authors' code made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from asking import Asked, Part, image, tensor, text
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

    def messages(self, run: str) -> list[dict[str, Any]]:
        """The conversation of a run, its media in the last turn."""
        given, media = self.asked, list[Part]()
        if "image" in run:
            media.append(image(self.inputs["image_uint8"]))
        if "video" in run:
            frames = tensor("", self.inputs["video_uint8"])["tensor"]
            media.append({"type": "video", "frames": frames, "fps": 2 / given["video_second_per_grid"]})
        if "audio" in run:
            media.append(tensor("audio", self.inputs["audio_pcm16"]))
        told = [("system", given["system"])]
        if run in ("text", "image", "image_audio"):
            told += [("user", given["user1"]), ("assistant", given["assistant1"])]
        asked = {"role": "user", "content": [*media, text(given["user2"])]}
        return [*({"role": role, "content": words} for role, words in told), asked]


@pytest.fixture(scope="session")
def golden() -> Golden:
    asked, facts = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("inputs", "golden"))
    inputs, tensors = (load_file(GOLDEN / f"{name}.safetensors") for name in ("inputs", "golden"))
    folder = GOLDEN / "checkpoint"
    return Golden(folder, asked, inputs, facts, tensors, load(folder, {}))


@pytest.fixture(scope="module")
def serving(golden: Golden) -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model=str(golden.folder))
    yield asked
    asked.close()


@pytest.fixture
def model(serving: Asked) -> Iterator[Asked]:
    """The served golden checkpoint, and nothing left in it afterwards."""
    yield serving
    serving.assert_clean()


@pytest.fixture(scope="module")
def opened(serving: Asked) -> Iterator[openai.OpenAI]:
    with (
        serving.http() as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def client(opened: openai.OpenAI, model: Asked) -> openai.OpenAI:
    """A client of what `serving` serves, with nothing left in it afterwards."""
    return opened
