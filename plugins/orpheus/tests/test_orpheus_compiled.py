"""Decoding by compiled code: every batch draws what it draws eagerly, nothing is compiled on the way or at the next
start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mstar.layers import kernels, shims
from mstar.worker import compiled, tape
from mstar_compile_cache import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "enable_prefix_caching": False}
# Few candidates: where thousands are as likely as each other, a draw may fall between two roundings of a border.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.0},
    {"temperature": 1.0, "top_k": 20, "top_p": 1.0},
    {"temperature": 0.8, "top_k": 10, "presence_penalty": 0.5},
)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not shims.load():
        pytest.skip("no C++ compiler")
    tape.library()
    with Store(tmp_path_factory.mktemp("cache")) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cache", lambda: store)
        yield


@pytest.fixture(scope="module")
def first(serving: Any, tiny_folder: Path) -> Iterator[Any]:
    with serving(tiny_folder, compile=True, **SETTINGS) as served:
        yield served


@pytest.fixture(scope="module")
def eager(serving: Any, tiny_folder: Path) -> Iterator[Any]:
    with serving(tiny_folder, **SETTINGS) as served:
        yield served


def requests(speech: Any, *, batch: int) -> list[dict[str, Any]]:
    """Prompts of mixed lengths, on both sides of a page, and outputs of mixed lengths."""
    draw = random.Random(batch)
    return [
        speech(
            [draw.randrange(256) for _ in range(draw.choice([2, 3, 17, 63, 64, 65, 130]))],
            seed=number, outputs=("tensor:codes",), max_tokens=draw.choice([7, 15, 21]), ignore_eos=True,
            **SAMPLING[number % len(SAMPLING)],
        )
        for number in range(batch)
    ]  # fmt: skip


def test_a_sweep_of_batches_and_lengths_draws_eager_ids_and_compiles_nothing(
    first: Any, eager: Any, speech: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = first.worker.compilation
    assert (compilation.num_built, set(compilation.compiled)) == (1, {"lm.decode"})
    assert set(compilation.eager) == {"lm.prefill", "snac.feed", "snac.vocode"}
    monkeypatch.setattr(compiled.cache, "aot_compile", None)
    code = compilation.compiled["lm.decode"]
    for batch in range(1, 17):
        asked, runs = requests(speech, batch=batch), code.num_runs
        answers = first.ask_all(asked)
        assert [answer.ids for answer in answers] == [answer.ids for answer in eager.ask_all(asked)]
        assert all(answer.ids for answer in answers)
        assert code.num_runs > runs
    assert code.num_eager == 0
    first.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_start_compiles_nothing_and_is_ready_at_once(
    first: Any, serving: Any, tiny_folder: Path, speech: Any, overlap: bool
) -> None:
    cold, asked = first.worker.compilation, requests(speech, batch=5)
    right = [answer.ids for answer in first.ask_all(asked)]
    with serving(tiny_folder, compile=True, overlap=overlap, **SETTINGS) as served:
        warm = served.worker.compilation
        assert (warm.num_built, set(warm.compiled)) == (0, {"lm.decode"})
        assert warm.seconds < 0.15 * cold.seconds
        assert [answer.ids for answer in served.ask_all(asked)] == right
        served.assert_clean()
