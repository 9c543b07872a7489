"""The language model split between two processes."""

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
from mstar.plugin.spec import Checkpoint
from mstar.worker.ranks import split_node
from mstar.worker.team import Team
from mstar_plugin_bagel import config, tiny
from mstar_plugin_bagel.nodes import LanguageModel

PROMPTS = [[5, 9, 2, 31, 40, 7], [8, 3, 12]]
DRAWN = 6  # latent tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tiny.make(tmp_path_factory.mktemp("tiny"))
    return Checkpoint(model="tiny", folder=folder, config=config.load(folder, {}))


def write_and_draw(ranks: Ranks | None, checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor]:
    node = LanguageModel(checkpoint.config)
    if ranks is not None:
        split_node(node, ranks, name="llm")
    node.load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    bare, drawn, rows = Bare(node.eval(), rows=2), [], len(PROMPTS)
    ids = torch.tensor([i for ids in PROMPTS for i in ids[:-1]])
    node.prefill(bare.context([len(ids) - 1 for ids in PROMPTS]), ids, None, None, [None] * rows, [None] * rows)
    last = torch.tensor([ids[-1] for ids in PROMPTS])
    for _ in range(12):
        last = node.decode(bare.context([1, 1]), last)["last"]
        drawn.append(last)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2 * (DRAWN + 2), node.head.enter.in_features, generator=generator)
    starts = torch.tensor([0, DRAWN + 2])
    und = torch.stack((starts, starts + DRAWN + 1), dim=1).flatten()
    gen = torch.cat([start + 1 + torch.arange(DRAWN) for start in starts])
    owners = torch.arange(2).repeat_interleave(DRAWN)
    plan = {"und": und[None], "gen": gen[None], "owners": owners[None], "times": torch.tensor([1.0, 0.4])}
    context = bare.context([DRAWN + 2] * 2, write=False, plan=plan)
    cells = torch.arange(DRAWN + 2).repeat(2) % 4
    return torch.stack(drawn), torch.stack(bare.logits), node.flow(context, latents, cells)["v"]


def test_two_processes_write_and_draw_what_one_does(checkpoint: Checkpoint) -> None:
    with torch.inference_mode():
        ids, *expected = write_and_draw(None, checkpoint)
    for own_ids, *found in in_processes(write_and_draw, checkpoint):
        assert torch.equal(own_ids, ids)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_served_model_of_two_processes_does_what_one_does(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[int]()
    copy_page = Team.copy_page
    monkeypatch.setattr(Team, "copy_page", lambda *of: copied.append(of[-1]) or copy_page(*of))
    given: dict[str, Any] = {"plugin": "bagel", "model": str(checkpoint.folder), "threads": 1}
    picture = image(torch.randint(256, (32, 48, 3), generator=torch.Generator().manual_seed(0)).byte().numpy())
    asked = [
        ask_for(
            text("a red square"),
            task="image",
            outputs=["image"],
            params={"num_timesteps": 4, "height": 32, "width": 32},
        ),
        ask_for(picture, text("make it blue"), task="image", outputs=["image"], params={"num_timesteps": 4}, seed=2),
        ask_for(picture, text("what is this?"), params={"max_tokens": 16, "temperature": 0}),
        ask_for(text("tell me more"), params={"max_tokens": 16, "n": 2}, seed=4),
    ]
    with contextlib.closing(Asked(**given)) as one:
        whole = one.ask_all(*asked)
    with split_worker(**given), contextlib.closing(Asked(**given)) as two:
        found = two.ask_all(*asked)
        two.ask_all(*asked, abort_after={0: 1, 3: 1})
        two.assert_clean()
    assert copied, "the branches of guidance share pages until they write"
    for answer, right in zip(found, whole, strict=True):
        assert (answer.ids, answer.texts) == (right.ids, right.texts)
        for own, other in zip(answer.images, right.images, strict=True):
            assert abs(own.astype(int) - other.astype(int)).max() <= 1
