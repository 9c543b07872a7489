"""The thinker by itself, with media spliced in, against what the authors' code gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mstar_plugin_qwen3_omni.modeling.thinker import Spliced, Thinker
from mstar_plugin_qwen3_omni.weights import thinker as weights

RUNS = ("text", "image", "audio", "video", "image_audio", "video_audio")


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


class Cache:
    """Keys and values of one sequence, and attention over them: the slow twin of the engine's."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kept:
            k, v = (torch.cat(pair) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        heads = (one.transpose(0, 1)[None] for one in (q, k, v))
        seen = functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return seen[0].transpose(0, 1)


@pytest.fixture(scope="module")
def thinker(golden: Any) -> Thinker:
    with torch.device("meta"):
        found = Thinker(golden.config.thinker)
    weights.load_thinker(found, golden.checkpoint, torch.float32, torch.device("cpu"))
    return found


def spliced(golden: Any, ids: Tensor) -> Spliced | None:
    """The media of a run, from what the authors' encoders gave."""
    tokens, tensors = golden.config.thinker.tokens, golden.tensors
    is_media = (ids == tokens.audio) | (ids == tokens.image) | (ids == tokens.video)
    if not is_media.any():
        return None
    embeddings = torch.zeros(len(ids), golden.config.thinker.decoder.hidden_size)
    deepstack = torch.zeros(len(ids), 2, embeddings.shape[1])
    for token, name in ((tokens.audio, "audio"), (tokens.image, "image"), (tokens.video, "video")):
        at = ids == token
        if at.any():
            embeddings[at] = tensors[f"{name}.encoder_out"]
        if at.any() and name != "audio":
            deepstack[at] = torch.stack([tensors[f"{name}.deepstack{level}"] for level in range(2)], dim=1)
    seen_at = (is_media & (ids != tokens.audio)).nonzero()[:, 0]
    return Spliced(is_media.nonzero()[:, 0], embeddings[is_media], seen_at, deepstack[seen_at])


@pytest.mark.parametrize("run", RUNS)
def test_logits_taps_and_greedy_ids_are_the_authors(golden: Any, thinker: Thinker, run: str) -> None:
    facts, cache = golden.facts["runs"][run], Cache()
    ids = torch.tensor(facts["input_ids"])
    positions = golden.tensors[f"thinker.{run}.position_ids"].T
    tap = golden.facts["geometry"]["accept_hidden_layer"]
    hidden, tapped = thinker(ids, positions, cache.attend, media=spliced(golden, ids), tap=tap)
    assert tapped is not None
    close(tapped, golden.tensors[f"thinker.{run}.hidden_accept_layer"])
    logits = thinker.logits(hidden[-1:])
    close(logits[0], golden.tensors[f"thinker.{run}.last_logits"])
    found, at = [int(logits.argmax())], positions.max() + 1
    for step in range(len(facts["greedy_ids"]) - 1):
        hidden, _ = thinker(torch.tensor(found[-1:]), (at + step)[None], cache.attend)
        logits = thinker.logits(hidden)
        if step == 0:
            close(logits[0], golden.tensors[f"thinker.{run}.step1_logits"])
        found.append(int(logits.argmax()))
    assert found == facts["greedy_ids"]
