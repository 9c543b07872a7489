"""The language model split between two processes."""

import torch
from ranks import Bare, in_processes
from torch import Tensor

from mstar.layers.parallel import Ranks
from mstar.plugin.spec import Checkpoint
from mstar.worker.ranks import split_node
from mstar_plugin_orpheus.nodes import LanguageModel

PROMPTS = [[5, 9, 2, 31, 40, 7], [8, 3]]


def decode(ranks: Ranks | None, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    node = LanguageModel(checkpoint.config)
    if ranks is not None:
        split_node(node, ranks, name="lm")
    node.load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    bare, drawn = Bare(node.eval(), rows=2), []
    node.prefill(
        bare.context([len(ids) - 1 for ids in PROMPTS]), torch.tensor([i for ids in PROMPTS for i in ids[:-1]])
    )
    last = torch.tensor([ids[-1] for ids in PROMPTS])
    for _ in range(20):
        last = node.decode(bare.context([1, 1]), last)["last"]
        drawn.append(last)
    return torch.stack(drawn), torch.stack(bare.logits)


def test_two_processes_draw_what_one_does(tiny_checkpoint: Checkpoint) -> None:
    with torch.inference_mode():
        ids, logits = decode(None, tiny_checkpoint)
    for own_ids, own_logits in in_processes(decode, tiny_checkpoint):
        assert torch.equal(own_ids, ids)
        torch.testing.assert_close(own_logits, logits, atol=1e-4, rtol=1e-4)
