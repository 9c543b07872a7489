from __future__ import annotations

import pytest
import torch

from mstar.errors import PluginError
from mstar.layers.decoder import Decoder, DecoderConfig, decoder_parallel
from mstar.plugin.nodes import KVLayout, Node, Slot
from mstar.worker.ranks import ProcessRanks, open_store, split_node

SHAPE = DecoderConfig(
    hidden_size=16, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=10
)


class Language(Node):
    def __init__(self) -> None:
        super().__init__(None)
        with torch.device("meta"):
            self.decoder = Decoder(SHAPE)
        self.kv_layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4)
        self.tensor_parallel = decoder_parallel(to="decoder.")


def alone(size: int) -> ProcessRanks:
    """The first rank, which says it is one of several."""
    ranks = ProcessRanks(0, 1, store=open_store(1), device=torch.device("cpu"))
    ranks.size = size
    return ranks


@pytest.mark.parametrize(("size", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_a_split_node_has_its_share_of_weights_and_of_the_cache(size: int, heads: int) -> None:
    node, whole = Language(), sum(p.numel() for p in Language().parameters())
    split_node(node, alone(size), name="lm")
    assert node.kv_layout == KVLayout(num_layers=1, num_kv_heads=heads, head_dim=4)
    assert sum(p.numel() for p in node.parameters()) < 1.2 * whole / size


def test_a_node_with_slots_is_not_split() -> None:
    node = Language()
    node.slots = (Slot(name="total", shape=(1,)),)
    with pytest.raises(PluginError, match="lm has slots"):
        split_node(node, alone(2), name="lm")
