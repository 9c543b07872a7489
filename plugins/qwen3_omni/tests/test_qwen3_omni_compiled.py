"""All that `--compile` compiles of Qwen3-Omni: ids and codes are those that are drawn eagerly, and a frame of speech,
talker and predictor, is one unit. Compiled code lies where kernels do (MSTAR_CACHE), for later runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import few_methods
import pytest
import served
import torch
from asking import Answer, Asked, ask_for, text

from mstar.layers import shims
from mstar.plugin.program import Run
from mstar.worker import tape
from mstar.worker.taped import Taper
from mstar_plugin_qwen3_omni.tiny import Sizes, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FRAME = ("talker.step", "code_predictor.prefill", "code_predictor.step", "code_predictor.sum")
COMPILED = {"thinker.decode", "thinker.score", *FRAME}
SIZES = Sizes(layers=1, tap=0, vision_layers=2, taps=(1,), talker_layers=1, predictor_layers=1)
"""A layer each, as each is compiled for itself; the other tests are what says that the codes are the authors'."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not shims.load():
        pytest.skip("no C++ compiler")
    tape.library()
    return str(write(tmp_path_factory.mktemp("small"), SIZES))


@pytest.fixture(scope="module")
def beside(folder: str) -> Iterator[None]:
    """A process that compiles the predictor, while the engine compiles what comes before it."""
    path = os.pathsep.join([str(Path(few_methods.__file__).parent), *sys.path])
    variables = {"FEW_METHODS": ",".join(FRAME[:0:-1]), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "few_methods", "compile", "--plugin", "qwen3_omni", "--model", folder]
    process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.DEVNULL)
    yield
    assert process.wait(timeout=300) == 0


@pytest.fixture(scope="module")
def serving(folder: str) -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model=folder)
    yield asked
    asked.close()


@pytest.fixture(scope="module")
def compiled(folder: str, beside: None) -> Iterator[Asked]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "START_S", 800.0)  # where others keep the machine busy
        asked = Asked(plugin="qwen3_omni", model=folder, compile=True, overlap=True)
    yield asked
    asked.close()


def wires() -> list[Any]:
    """Greedy, by each speaker and with penalties or without; and drawn by chance among few candidates; some written
    alone, some told how likely they are."""
    made = []
    for number in range(12):
        greedy = {"talker_temperature": 0, "talker_repetition_penalty": 1 + number / 20}
        drawn = {"talker_top_k": 10, "code_predictor_top_k": 6, "temperature": 1, "top_k": 10}
        params = {
            "speaker": ("ethan", "chelsie", "aiden")[number % 3], "temperature": 0, "max_tokens": 2 + number,
            "talker_max_tokens": 30 if number == 4 else 6 + number, "ignore_eos": number % 4 == 0,
            **(drawn if number % 2 else greedy), **({"logprobs": 3} if number % 3 == 0 else {}),
        }  # fmt: skip
        outputs = ["text"] if number in (2, 3) else ["text", "tensors"]
        made.append(ask_for(text(f"Say {number}."), outputs=outputs, params=params, seed=number))
    return made


def logprobs(answer: Answer) -> list[float]:
    return [one.logprob for chunk in answer.chunks for one in getattr(chunk, "logprobs", ())]


def test_ids_and_codes_are_those_that_are_drawn_eagerly(compiled: Asked, model: Asked) -> None:
    compilation = compiled.worker.compilation
    assert set(compilation.compiled) == COMPILED
    eager, found = model.ask_all(*wires()), compiled.ask_all(*wires())
    for mine, theirs in zip(found, eager, strict=True):
        assert mine.ids == theirs.ids and mine.texts == theirs.texts
        assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-4)
        assert {*mine.tensors} == {*theirs.tensors}
        assert all(torch.equal(mine.tensors[name], theirs.tensors[name]) for name in mine.tensors if name == "codes")
        assert mine.result.counters == theirs.result.counters
    assert sum(answer.tensors["codes"].shape[1] for answer in found if answer.tensors) > 80
    assert all(code.num_runs and not code.num_eager for code in compilation.compiled.values())
    compiled.assert_clean()


def test_a_frame_of_speech_is_one_compiled_unit(compiled: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its methods are one operation of the program, each of whose launches is one tape; none runs by itself."""
    operations = compiled.worker.router.programs["talk"].ops
    (unit,) = (one for one in operations if isinstance(one, Run) and one.unit is not None)
    assert unit.target == "talker.step, code_predictor.prefill, 14 × code_predictor.step, code_predictor.sum"
    assert not {*FRAME} & {one.target for one in operations if isinstance(one, Run) and one.unit is None}
    launched, launch = list[tuple[str, bool]](), Taper.launch

    def noted(self: Taper, batch: Any, *more: Any) -> Any:
        made = launch(self, batch, *more)
        launched.append((batch.works[0].op.target, made is not None))
        return made

    monkeypatch.setattr(Taper, "launch", noted)
    monkeypatch.setattr(Taper, "call", None)  # of a method of a unit that runs method by method
    codes = compiled.worker.compilation.compiled
    before = {name: codes[name].num_runs for name in FRAME}
    params = {"max_tokens": 4, "talker_max_tokens": 9, "talker_temperature": 0}
    answer = compiled.ask(text("Hello."), outputs=["text", "tensors"], params=params)
    frames = answer.tensors["codes"].shape[1]
    tapes = [is_taped for target, is_taped in launched if target == unit.target]
    assert all(tapes) and len(tapes) >= frames > 0
    assert not {*FRAME} & {target for target, _ in launched}
    assert [codes[name].num_runs - before[name] for name in FRAME] == [len(tapes) * n for n in (1, 1, 14, 1)]
    compiled.assert_clean()
