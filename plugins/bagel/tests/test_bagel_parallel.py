"""The language model split between two processes."""

from pathlib import Path

import pytest
import torch
from ranks import Bare, in_processes
from torch import Tensor

from mstar.layers.parallel import Ranks
from mstar.plugin.spec import Checkpoint
from mstar.worker.ranks import split_node
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
