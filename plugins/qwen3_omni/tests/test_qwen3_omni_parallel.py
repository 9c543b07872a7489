"""Thinker and talker split between two processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Asked, ask_for, image, text
from ranks import Bare, in_processes, split_worker
from torch import Tensor

from mstar.layers.parallel import Ranks
from mstar.plugin.nodes import Node
from mstar.plugin.spec import Checkpoint
from mstar.worker.ranks import split_node
from mstar_plugin_qwen3_omni import config, tiny
from mstar_plugin_qwen3_omni.nodes.speech import TalkerNode
from mstar_plugin_qwen3_omni.nodes.thinker import ThinkerNode

PROMPTS = [[5, 9, 2, 31, 40, 7], [8, 3, 12]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tiny.make(tmp_path_factory.mktemp("tiny"))
    return Checkpoint(model="tiny", folder=folder, config=config.load(folder, {}))


def load(node: Node, ranks: Ranks | None, checkpoint: Checkpoint) -> Bare:
    if ranks is not None:
        split_node(node, ranks, name=type(node).__name__)
    node.load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    return Bare(node.eval(), rows=2)


def write(ranks: Ranks | None, checkpoint: Checkpoint) -> tuple[Tensor, ...]:
    """Drawn ids, logits, and what the talker hears."""
    node = ThinkerNode(checkpoint.config)
    bare, drawn = load(node, ranks, checkpoint), []
    counts, none = [len(ids) - 1 for ids in PROMPTS], [None, None]
    ids = torch.tensor([i for ids in PROMPTS for i in ids[:-1]])
    taps = node.tapped(bare.context(counts), ids, None, None, none, none)["taps"]
    last = torch.tensor([ids[-1] for ids in PROMPTS])
    for _ in range(12):
        last = node.decode(bare.context([1, 1]), last)["last"]
        drawn.append(last)
    return torch.stack(drawn), torch.stack(bare.logits), taps


def speak(ranks: Ranks | None, checkpoint: Checkpoint) -> tuple[Tensor, ...]:
    """First codes of frames, logits, hidden states."""
    node = TalkerNode(checkpoint.config)
    bare, drawn, hidden = load(node, ranks, checkpoint), [], []
    counts = [len(ids) for ids in PROMPTS]
    ids, total = torch.tensor([i for ids in PROMPTS for i in ids]), sum(counts)
    codes, places = torch.arange(total) - 3, torch.arange(float(total))[:, None].expand(-1, 3)
    taps = torch.randn(2, checkpoint.config.thinker.decoder.hidden_size, generator=torch.Generator().manual_seed(0))
    plan = {"rows": (torch.arange(total) - 4).clamp(-1, 1)}
    sum_ = node.prefill(bare.context(counts, plan=plan), ids, codes, codes.clamp(min=-1), places, [taps])["sum"]
    for word in range(10):
        made = node.step(bare.context([1, 1]), sum_, torch.full((2,), word))
        sum_ = made["first"]
        drawn.append(made["code"])
        hidden.append(made["hidden"])
    return torch.stack(drawn), torch.stack(bare.logits), torch.stack(hidden)


def both(ranks: Ranks | None, checkpoint: Checkpoint) -> list[tuple[Tensor, ...]]:
    return [write(ranks, checkpoint), speak(ranks, checkpoint)]


def test_two_processes_write_and_speak_what_one_does(checkpoint: Checkpoint) -> None:
    with torch.inference_mode():
        plain = both(None, checkpoint)
    for rank in in_processes(both, checkpoint):
        for (own_ids, *found), (ids, *expected) in zip(rank, plain, strict=True):
            assert torch.equal(own_ids, ids)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_served_model_of_two_processes_speaks_what_one_does(checkpoint: Checkpoint) -> None:
    given: dict[str, Any] = {"plugin": "qwen3_omni", "model": str(checkpoint.folder), "threads": 1}
    picture = image(torch.randint(256, (56, 56, 3), generator=torch.Generator().manual_seed(0)).byte().numpy())
    params = {"max_tokens": 12, "talker_max_tokens": 12}
    messages = [{"role": "user", "content": [picture, text("What is this?")]}]
    asked = [
        ask_for(messages=messages, outputs=["text", "audio", "tensors"], params={**params, "temperature": 0}),
        ask_for(messages=messages, outputs=["text", "audio", "tensors"], params=params, seed=2),
        ask_for(text("Tell me more"), outputs=["text"], params={"max_tokens": 12, "n": 2}, seed=3),
    ]
    with contextlib.closing(Asked(**given)) as one:
        whole = one.ask_all(*asked)
    with split_worker(**given), contextlib.closing(Asked(**given)) as two:
        assert [m.name for m in two.worker.modules.by_name.values() if m.is_split] == ["thinker", "talker"]
        found = two.ask_all(*asked)
        two.ask_all(*asked, abort_after={0: 2, 2: 1})
        two.assert_clean()
    for answer, right in zip(found, whole, strict=True):
        assert (answer.ids, answer.texts) == (right.ids, right.texts)
        if "codes" in right.tensors:
            assert torch.equal(answer.tensors["codes"], right.tensors["codes"])
            torch.testing.assert_close(answer.tensors["audio"], right.tensors["audio"], atol=1e-3, rtol=0)
