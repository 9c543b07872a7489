"""A frame of speech, talker and predictor, as one compiled unit: the codes of the authors, and those that are drawn
eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import served
import torch
from asking import Answer, Asked, ask_for

from mstar.layers import kernels, shims
from mstar.worker import tape
from mstar_compile_cache import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

UNIT = {"talker.step", "code_predictor.prefill", "code_predictor.step", "code_predictor.sum"}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not shims.load():
        pytest.skip("no C++ compiler")
    tape.library()
    with Store(tmp_path_factory.mktemp("cache")) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cache", lambda: store)
        patch.setattr(served, "START_S", 1500.0)  # six methods are compiled
        yield


@pytest.fixture(scope="module")
def compiled(golden: Any) -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model=str(golden.folder), compile=True, overlap=True)
    yield asked
    asked.close()


def wires(golden: Any) -> list[Any]:
    """The golden runs, greedy; and some drawn by chance among few candidates."""
    made = []
    for number, (run, facts) in enumerate(golden.facts["full"].items()):
        common = {
            "speaker": facts["speaker"], "max_tokens": golden.asked["thinker_max_new_tokens"], "temperature": 0,
            "repetition_penalty": 1, "use_audio_in_video": facts["run"] == "video_audio",
        }  # fmt: skip
        greedy = {
            "talker_temperature": 0, "talker_repetition_penalty": facts["repetition_penalty"],
            "speak_last_token": False, "talker_max_tokens": 90 if run == "text_long" else facts["n_frames"] + 1,
        }  # fmt: skip
        drawn = {"talker_top_k": 10, "code_predictor_top_k": 6, "talker_max_tokens": 8 + number}
        for more in (greedy, drawn):
            messages = golden.messages(facts["run"])
            made.append(ask_for(messages=messages, outputs=["text", "tensors"], params=common | more, seed=number))
    return made


def speaking(answer: Answer) -> dict[str, int]:
    """Counters without encoders', which may have given their outputs to another request already."""
    return {name: count for name, count in answer.result.counters.items() if "_encoder" not in name}


def test_frames_are_compiled_and_the_authors(compiled: Asked, model: Asked, golden: Any) -> None:
    compilation = compiled.worker.compilation
    assert set(compilation.compiled) >= UNIT | {"thinker.decode", "thinker.score"}
    asked = wires(golden)
    eager, found = model.ask_all(*asked), compiled.ask_all(*asked)
    for run, answer in zip(golden.facts["full"], found[::2], strict=True):
        assert torch.equal(answer.tensors["codes"], golden.tensors[f"full.{run}.codes"])
    for mine, theirs in zip(found, eager, strict=True):
        assert torch.equal(mine.tensors["codes"], theirs.tensors["codes"])
        assert speaking(mine) == speaking(theirs)
    assert all(compilation.compiled[name].num_runs for name in UNIT)
    compiled.assert_clean()
