"""Speech of a fresh random checkpoint of other sizes, against the whole of `transformers`' own generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Asked, token_ids

from mstar_plugin_qwen3_omni import tiny
from mstar_plugin_qwen3_omni.config import OmniConfig, load

SIZES = tiny.Sizes(
    hidden=40, layers=5, experts=5, chosen=3, tap=4, groups=5, codes=96, talker_hidden=48, talker_mlp=56,
    talker_layers=3, talker_heads=6, talker_kv_heads=3, talker_head_dim=24, talker_experts=6, talker_chosen=3,
    talker_expert_mlp=20, shared_mlp=28, predictor_layers=3, predictor_heads=6, predictor_kv_heads=2,
    predictor_head_dim=10, predictor_mlp=44, codec_hidden=24, codec_layers=3, codec_heads=2, codec_mlp=40,
    codec_width=16, window=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("fresh"), SIZES)


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model=str(folder), dtype="float32")
    yield asked
    asked.close()


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def prompt(config: OmniConfig, seed: int) -> list[int]:
    """System, two turns of a user's and one answer between."""
    turns, generator = config.turns, torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for role, count in ((turns.system, 5), (turns.user, 4 + seed), (turns.assistant, 6), (turns.user, 9)):
        words = torch.randint(0, 250, (count,), generator=generator).tolist()
        ids += [turns.start, role, 198, *words, turns.end, 198]
    return [*ids, turns.start, turns.assistant, 198]


@pytest.mark.parametrize(("seed", "speaker", "penalty"), [(0, "Ethan", 1.05), (1, "Chelsie", 1.0), (2, "Aiden", 1.3)])
def test_speech_is_that_of_transformers(
    fresh: Asked, peer: Any, folder: Path, seed: int, speaker: str, penalty: float
) -> None:
    config = load(folder, {})
    ids, words, frames = prompt(config, seed), 7, 12
    with torch.no_grad():
        text, sound = peer.generate(
            torch.tensor([ids]), speaker=speaker, return_audio=True, thinker_max_new_tokens=words,
            thinker_do_sample=False, thinker_eos_token_id=config.turns.end, talker_do_sample=False,
            talker_max_new_tokens=frames + 1, talker_repetition_penalty=penalty,
        )  # fmt: skip
    found = fresh.ask(
        token_ids(ids),
        outputs=["text", "audio", "tensors"],
        params={
            "temperature": 0, "talker_temperature": 0, "speaker": speaker, "max_tokens": words, "repetition_penalty": 1,
            "talker_max_tokens": frames + 1, "talker_repetition_penalty": penalty, "speak_last_token": False,
        },
    )  # fmt: skip
    sequence = text[0] if text.dim() == 2 else text
    assert found.ids[0] == [token for token in sequence[len(ids) :].tolist() if token != config.turns.end]
    expected = sound.flatten()
    assert found.tensors["codes"].shape == (SIZES.groups, frames) and len(found.tensors["audio"]) == len(expected)
    torch.testing.assert_close(found.tensors["audio"], expected, atol=5e-4, rtol=0)
