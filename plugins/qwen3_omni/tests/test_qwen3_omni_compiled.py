"""A frame of speech, talker and predictor, as one compiled unit: the codes that are drawn eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import few_methods
import pytest
import torch
from asking import Asked, ask_for, text

from mstar.layers import kernels, shims
from mstar.worker import tape
from mstar.worker.compiled import Compiler
from mstar_compile_cache import Store
from mstar_plugin_qwen3_omni.tiny import Sizes, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UNIT = {"talker.step", "code_predictor.prefill", "code_predictor.step", "code_predictor.sum"}
SIZES = Sizes(talker_layers=1, predictor_layers=1)
"""A layer each, as each is compiled for itself; the other tests are what says that the codes are the authors'."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("small"), SIZES))


@pytest.fixture(scope="module")
def serving(folder: str) -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model=folder)
    yield asked
    asked.close()


@pytest.fixture(scope="module")
def compiled(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    if not shims.load():
        pytest.skip("no C++ compiler")
    tape.library()
    with Store(tmp_path_factory.mktemp("cache")) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cache", lambda: store)
        patch.setattr(few_methods, "run_all", Compiler.run, raising=False)
        patch.setattr(Compiler, "run", few_methods.run_few)  # the thinker's methods would take a minute each
        patch.setenv("FEW_METHODS", ",".join(UNIT))
        asked = Asked(plugin="qwen3_omni", model=folder, compile=True, overlap=True)
        yield asked
        asked.close()


def wires() -> list[Any]:
    """Greedy, by one speaker and with penalties or without; and drawn by chance among few candidates."""
    made = []
    for number in range(10):
        greedy = {"talker_temperature": 0, "talker_repetition_penalty": 1 + number / 20}
        drawn = {"talker_top_k": 10, "code_predictor_top_k": 6}
        params = {
            "speaker": ("ethan", "chelsie", "aiden")[number % 3], "temperature": 0, "max_tokens": 1 + number,
            "talker_max_tokens": 30 if number == 4 else 6 + number, **(drawn if number % 2 else greedy),
        }  # fmt: skip
        made.append(ask_for(text(f"Say {number}."), outputs=["text", "tensors"], params=params, seed=number))
    return made


def test_frames_are_compiled_and_what_they_are_eagerly(compiled: Asked, model: Asked) -> None:
    compilation = compiled.worker.compilation
    assert set(compilation.compiled) == UNIT
    eager, found = model.ask_all(*wires()), compiled.ask_all(*wires())
    for mine, theirs in zip(found, eager, strict=True):
        assert torch.equal(mine.tensors["codes"], theirs.tensors["codes"])
        assert mine.ids == theirs.ids and mine.result.counters == theirs.result.counters
    assert sum(answer.tensors["codes"].shape[1] for answer in found) > 60
    assert all(compilation.compiled[name].num_runs for name in UNIT)
    compiled.assert_clean()
