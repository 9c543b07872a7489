"""The golden checkpoint of this model, served, and what its authors' code made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from asking import Asked
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "bagel"


@dataclass
class Golden:
    """What the authors' code was asked, and what it gave."""

    folder: Path
    asked: dict[str, Any]
    inputs: dict[str, Tensor]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def vision_heads(self) -> int:
        heads: int = json.loads((self.folder / "vit_config.json").read_text())["num_attention_heads"]
        return heads


@pytest.fixture(scope="session")
def golden() -> Golden:
    asked, facts = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("inputs", "golden"))
    inputs, tensors = (load_file(GOLDEN / f"{name}.safetensors") for name in ("inputs", "golden"))
    return Golden(GOLDEN / "checkpoint", asked, inputs, facts, tensors)


@pytest.fixture(scope="session")
def serving(golden: Golden) -> Iterator[Asked]:
    asked = Asked(plugin="bagel", model=str(golden.folder))
    yield asked
    asked.close()


@pytest.fixture
def model(serving: Asked) -> Iterator[Asked]:
    """The served golden checkpoint, and nothing left in it afterwards."""
    yield serving
    serving.assert_clean()


@pytest.fixture(scope="session")
def url(serving: Asked) -> Iterator[str]:
    """Its address."""
    with serving.http(max_body_bytes=2**25) as url:
        yield url


@pytest.fixture(scope="session")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    """The openai package's client of it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
