from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import in_processes, in_threads
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from mstar.errors import ConfigError, PluginError
from mstar.layers.decoder import Decoder, DecoderConfig, decoder_parallel
from mstar.layers.grouped import Experts, grouped_linear, grouped_share
from mstar.layers.linear import Embedding, Linear, MergedLinear, set_batch_invariant
from mstar.layers.parallel import Ranks, num_kv_heads, shard
from mstar.layers.quantized import quantize_int4
from mstar.layers.weights import Weights, load_into

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8}
KINDS = {
    **decoder_parallel(to="decoder."),
    "experts": "sum",
    r"experts\.(gate_up|down)": "experts",
    r"experts\.shared\.0": "column",
    r"experts\.shared\.1": "partial",
}


class Sparse(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Linear(32, 8, bias=False)
        self.gate_up = Experts(32, (16, 16), num_experts=8)
        self.down = Experts(16, (32,), num_experts=8)
        self.shared = nn.Sequential(Linear(32, 24), Linear(24, 32))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        gate, up = self.gate_up.product(x, chosen, invariant=False).chunk(2, dim=-1)
        return self.down.product(functional.silu(gate) * up, chosen, invariant=False) + self.shared(x)


class Net(nn.Module):
    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        options = {"attention_bias": True, "mlp_bias": True, "vocab_size": 51, **SIZES, **sizes}
        self.decoder = Decoder(DecoderConfig(**options))
        self.experts = Sparse()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.decoder(self.decoder.embed(ids), torch.arange(len(ids)), Causal())
        return self.decoder.logits(hidden + self.experts(hidden))


class Causal:
    """Attention over one sequence."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, k, v)]
        return functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in groups), is_causal=True).transpose(
            0, 1
        )


def write(folder: Path, **sizes: Any) -> Path:
    torch.manual_seed(3)
    net = Net(**sizes)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.3)
    named = dict(net.state_dict())
    if sizes.get("tie_word_embeddings"):
        del named["decoder.head.weight"]
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, ranks: Ranks | None = None, kinds: Mapping[str, str] = KINDS, **sizes: Any) -> Net:
    with torch.device("meta"):
        net = Net(**sizes)
    if ranks is not None:
        shard(net, kinds, ranks, name="net", head_dim=8)
    load_into(net, Weights.open(folder))
    return net


IDS = torch.tensor([1, 50, 7, 26, 13, 0, 25, 49])


# ---- the same as plain ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": True}, {"qk_norm": True, "num_kv_heads": 4}], ids=str)
def test_shards_together_are_the_plain_network(tmp_path: Path, size: int, sizes: dict[str, Any]) -> None:
    folder = write(tmp_path, **sizes)
    with torch.inference_mode():
        expected = load(folder, **sizes)(IDS)
    for logits in in_threads(lambda ranks: load(folder, ranks, **sizes)(IDS), size=size):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def of_process(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    mine = torch.arange(4.0) * (ranks.rank + 1)
    return {
        "logits": load(folder, ranks)(IDS),
        "sum": ranks.sum(mine.clone()),
        "half": ranks.sum(mine.bfloat16()),
        "gather": ranks.gather(mine[None]),
        "share": ranks.share(mine.long()),
    }


@pytest.mark.parametrize(("size", "invariant"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_processes_share_a_network(tmp_path: Path, size: int, invariant: bool) -> None:
    folder = write(tmp_path)
    with torch.inference_mode():
        expected = load(folder)(IDS)
    found = in_processes(of_process, folder, size=size, invariant=invariant)
    whole, counted = size * (size + 1) // 2, torch.arange(4.0)
    for rank in found:
        torch.testing.assert_close(rank["logits"], expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(rank["logits"], found[0]["logits"])
        assert torch.equal(rank["sum"], counted * whole)
        assert torch.equal(rank["half"], (counted * whole).bfloat16())
        assert torch.equal(rank["gather"], torch.cat([counted * (i + 1) for i in range(size)])[None])
        assert torch.equal(rank["share"], counted.long())


def test_other_outside_changes_keep_the_sums(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with torch.inference_mode():
        expected = load(folder)(IDS)

    def run(ranks: Ranks) -> tuple[Tensor, Tensor]:
        invariant, packed = load(folder, ranks), load(folder, ranks)
        set_batch_invariant(invariant)
        quantize_int4(packed)
        return invariant(IDS), packed(IDS)

    for invariant, packed in in_threads(run, size=2):
        torch.testing.assert_close(invariant, expected, atol=1e-4, rtol=1e-4)
        assert functional.cosine_similarity(packed.flatten(), expected.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("invariant", [False, True])
def test_rows_of_other_ranks_experts_are_zero(invariant: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((40, 12), (6, 5, 12)))
    group = torch.randint(6, (40,), generator=generator)
    whole = grouped_linear(x, weight, group)
    parts = [grouped_share(x, weight[i : i + 2], group, first=i, invariant=invariant) for i in (0, 2, 4)]
    for part, first in zip(parts, (0, 2, 4), strict=True):
        is_own = (group >= first) & (group < first + 2)
        assert not part[~is_own].any()
        torch.testing.assert_close(part[is_own], whole[is_own])


def test_more_ranks_than_heads_of_keys_and_values_have_the_same_ones(tmp_path: Path) -> None:
    write(tmp_path)
    nets = in_threads(lambda ranks: load(tmp_path, ranks).decoder.layers[0].qkv, size=4)
    assert [net.widths for net in nets] == [(16, 8, 8)] * 4
    keys = [net.weight[16:24] for net in nets]
    assert torch.equal(keys[0], keys[1]) and torch.equal(keys[2], keys[3]) and not torch.equal(keys[1], keys[2])
    assert [num_kv_heads(2, size=size) for size in (1, 2, 4)] == [2, 1, 1]


def test_a_fused_tensor_of_the_checkpoint_is_cut_part_by_part(tmp_path: Path) -> None:
    weight = torch.arange(20.0)[:, None].expand(20, 3).contiguous()
    save_file({"0.weight": weight}, tmp_path / "model.safetensors")

    def run(ranks: Ranks) -> Tensor:
        net = nn.Sequential(MergedLinear(3, (8, 12)))
        shard(net, {"0": "column"}, ranks, name="net")
        load_into(net, Weights.open(tmp_path))
        return net[0].weight[:, 0]

    assert in_threads(run, size=2)[1].tolist() == [4, 5, 6, 7, 14, 15, 16, 17, 18, 19]


# ---- what is read ---------------------------------------------------------------------------------------


def resident_bytes(file: Path) -> int:
    """Of a mapped file, in this process."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    own = [block for block in blocks if str(file) in block.partition("\n")[0]]
    assert own, "the file is not mapped"
    return sum(int(found[1]) * 1024 for block in own if (found := re.search(r"^Rss:\s+(\d+) kB", block, re.MULTILINE)))


@pytest.mark.parametrize("kind", ["vocab", "column"])
def test_a_rank_reads_its_share_of_the_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(1 << 15, 256)}, file)  # 32 MiB
    net = nn.Sequential(Embedding(1 << 15, 256) if kind == "vocab" else Linear(256, 1 << 15, bias=False))

    def run(ranks: Ranks) -> int:
        if ranks.rank != 1:
            return 0
        weights = Weights.open(tmp_path)
        shard(net, {"0": kind}, ranks, name="net")
        load_into(net, weights)
        return resident_bytes(file)

    read = in_threads(run, size=4)[1]
    assert net[0].weight.shape == (1 << 13, 256) and bool((net[0].weight == 1).all())
    assert read <= 12 << 20, f"{read} bytes of the file were read for a share of {8 << 20}"  # in blocks of up to 2 MiB


def test_what_is_missing_or_misshapen_of_other_ranks_shares_is_seen(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> None:
        net = nn.Sequential(Experts(3, (2,), num_experts=4))
        shard(net, {"0": "experts"}, ranks, name="net")
        load_into(net, Weights.open(tmp_path))

    for tensors, said in (
        ({f"0.weight[{i}]": torch.zeros(2, 3) for i in range(3)}, r"missing: 0.weight\[3\]"),
        ({f"0.weight[{i}]": torch.zeros(2 + (i == 3), 3) for i in range(4)}, r"wrong shape: 0.weight\[3\]: \[3, 3\]"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=said):
            in_threads(run, size=2)


# ---- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "size", "said"),
    [
        ({"intermediate_size": 50}, 4, r"lm: decoder.layers.0.gate_up.weight has 50 outputs, which 4 ranks"),
        ({"num_heads": 6}, 4, r"lm: decoder.layers.0.qkv.weight has 6 query heads, which 4 ranks .* divides 6"),
        ({"num_heads": 12, "num_kv_heads": 3}, 4, r"lm: decoder.layers.0.qkv.weight has 3 heads of keys and values"),
        ({}, 16, r"qkv.weight has 8 query heads, which 16 ranks"),
    ],
)
def test_what_cannot_be_split_is_named(sizes: dict[str, Any], size: int, said: str) -> None:
    with torch.device("meta"):
        net = Net(**sizes)
    with pytest.raises(ConfigError, match=said):
        shard(net, KINDS, AsRank(0, size), name="lm", head_dim=8)


class AsRank:
    """A rank that calls nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, x: Tensor) -> Tensor:
        raise AssertionError

    gather = share = sum


def test_experts_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match=r"lm: 0.weight has 6 experts, which 4 ranks"):
        shard(nn.Sequential(Experts(4, (2,), num_experts=6)), {"0": "experts"}, AsRank(0, 4), name="lm")


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ({"decoder.embedding": "rows"}, r"lm: tensor_parallel has \['rows'\]"),
        ({"decoder.embeddings": "vocab"}, r"lm: tensor_parallel names 'decoder.embeddings', which no module"),
        ({"decoder.norm": "column"}, r"lm: decoder.norm is a RMSNorm; it cannot be split as 'column'"),
        ({"decoder.head": "experts"}, r"lm: decoder.head is a Head"),
        ({r"experts\.down": "row"}, r"lm: experts.down is a Experts"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_the_plugins_fault(kinds: dict[str, str], said: str) -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(PluginError, match=said):
        shard(net, kinds, AsRank(0, 2), name="lm", head_dim=8)
