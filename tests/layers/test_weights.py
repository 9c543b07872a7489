from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar.errors import ConfigError
from mstar.layers.linear import Head, MergedLinear
from mstar.layers.rotary import RotaryEmbedding
from mstar.layers.weights import Weights, load_into


class Net(nn.Module):
    def __init__(self, *, tie: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.qkv = MergedLinear(4, (4, 2), bias=True)
        self.rotary = RotaryEmbedding(4, theta=100.0)
        self.register_buffer("mean", torch.zeros(3))
        self.head = Head(4, 6)
        if tie:
            self.head.tie(self.embedding)


def rename(name: str) -> str | None:
    kind, _, rest = name.partition(".")
    return {"tok": "embedding." + rest, "q": f"qkv.{rest}[0]", "k": f"qkv.{rest}[1]", "lm_head": f"head.{rest}"}.get(
        kind, name
    )


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"tok.weight": (6, 4), "q.weight": (4, 4), "q.bias": (4,), "k.weight": (2, 4), "k.bias": (2,)}
    shapes |= {"mean": (3,), "lm_head.weight": (6, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, kind: str, content: dict[str, Tensor]) -> None:
    names = sorted(content)
    halves = {"00001-of-00002": names[:3], "00002-of-00002": names[3:]}
    if kind == "single":
        save_file(content, folder / "model.safetensors")
    elif kind == "named":
        save_file(content, folder / "weights.safetensors")
    elif kind == "bin":
        torch.save(content, folder / "pytorch_model.bin")
    elif kind == "pt":
        torch.save({"epoch": 3, "net": content}, folder / "net.pt")
    else:
        stem, suffix = ("model", "safetensors") if kind == "sharded" else ("pytorch_model", "bin")
        for shard, chosen in halves.items():
            part = {name: content[name] for name in chosen}
            path = folder / f"{stem}-{shard}.{suffix}"
            save_file(part, path) if suffix == "safetensors" else torch.save(part, path)
        mapping = {name: f"{stem}-{shard}.{suffix}" for shard, chosen in halves.items() for name in chosen}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))


@pytest.mark.parametrize("kind", ["single", "named", "bin", "sharded", "sharded bin"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_layout_on_disk_loads(tmp_path: Path, kind: str, device: str) -> None:
    content = tensors()
    write(tmp_path, kind, content)
    weights = Weights.open(tmp_path)
    assert set(weights.names) == set(content)
    assert weights.num_bytes == sum(tensor.numel() * 4 for tensor in content.values())
    assert all(torch.equal(tensor, content[name]) for name, tensor in weights)
    with torch.device(device):
        net = Net()
    load_into(net, weights, rename=rename)
    assert torch.equal(net.embedding.weight, content["tok.weight"])
    assert torch.equal(net.qkv.weight, torch.cat((content["q.weight"], content["k.weight"])))
    assert torch.equal(net.qkv.bias, torch.cat((content["q.bias"], content["k.bias"])))
    assert torch.equal(net.head.weight, content["lm_head.weight"])
    assert torch.equal(net.mean, content["mean"])
    assert torch.equal(net.rotary.frequencies, RotaryEmbedding(4, theta=100.0).frequencies)
    assert not net.training
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_nested_pickles_get_dotted_names(tmp_path: Path) -> None:
    write(tmp_path, "pt", tensors())
    weights = Weights.open(tmp_path)
    assert "net.q.bias" in weights.names
    net = Net()
    load_into(net, weights, rename=lambda name: rename(name.removeprefix("net.")))
    assert torch.equal(net.mean, tensors()["mean"])


def test_rules_may_be_patterns(tmp_path: Path) -> None:
    write(tmp_path, "single", tensors())
    rules = {
        r"tok\.weight": "embedding.weight",
        r"q\.(.*)": r"qkv.\1[0]",
        r"k\.(.*)": r"qkv.\1[1]",
        r"lm_head\.(.*)": r"head.\1",
    }
    net = Net()
    load_into(net, Weights.open(tmp_path / "model.safetensors"), rename=rules)
    assert torch.equal(net.qkv.weight[4:], tensors()["k.weight"])


@pytest.mark.parametrize("stored", [("tok.weight",), ("lm_head.weight",), ("lm_head.weight", "tok.weight")])
def test_tied_weights_may_be_stored_under_either_name_or_both(tmp_path: Path, stored: tuple[str, ...]) -> None:
    content = {name: value for name, value in tensors().items() if name in stored or not name.endswith("d.weight")}
    content = {name: value for name, value in content.items() if name in stored or name != "tok.weight"}
    write(tmp_path, "single", content)
    with torch.device("meta"):
        net = Net(tie=True)
    load_into(net, Weights.open(tmp_path), rename=rename)
    assert net.head.weight is net.embedding.weight
    assert torch.equal(net.head.weight, content[stored[-1]])


def test_dtype_is_cast_for_floats_and_buffers_too(tmp_path: Path) -> None:
    write(tmp_path, "single", tensors())
    net = Net()
    load_into(net, Weights.open(tmp_path), rename=rename, dtype=torch.bfloat16)
    assert torch.equal(net.qkv.bias[:4], tensors()["q.bias"].bfloat16())
    assert net.mean.dtype == torch.bfloat16
    assert net.rotary.frequencies.dtype == torch.float32


def test_what_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    content = tensors()
    del content["k.bias"], content["mean"]
    content |= {"extra.weight": torch.zeros(2), "q.weight": torch.zeros(4, 5), "v.weight": torch.zeros(1)}
    write(tmp_path, "single", content)
    with pytest.raises(ConfigError) as caught:
        load_into(Net(), Weights.open(tmp_path), rename=lambda name: None if name == "v.weight" else rename(name))
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "missing: mean, qkv.bias[1];" in message
    assert "unexpected: extra.weight, v.weight;" in message
    assert "wrong shape: q.weight: [4, 5] in model.safetensors, the model has [4, 4]" in message
    load_into(
        Net(),
        Weights.open(write_again(tmp_path)),
        rename=rename,
        ignore=(r"extra\..*",),
    )


def write_again(folder: Path) -> Path:
    write(folder, "single", tensors() | {"extra.weight": torch.zeros(2)})
    return folder


def test_two_names_for_one_parameter_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, "single", tensors() | {"mean2": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"unexpected: mean2 \(as mean\)"):
        load_into(Net(), Weights.open(tmp_path), rename=lambda n: "mean" if n == "mean2" else rename(n))


def test_missing_folders_files_and_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder .*nowhere does not exist; check --model"):
        Weights.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no weights: no model.safetensors.index.json"):
        Weights.open(tmp_path)
    with pytest.raises(ConfigError, match=r"has no ema.safetensors"):
        Weights.open(tmp_path, file="ema.safetensors")
    write(tmp_path, "sharded", tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks: model-00002-of-00002.safetensors; download"):
        Weights.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"is not an index of weights"):
        Weights.open(tmp_path)


def test_of_several_files_one_must_be_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"several weight files and no index: one.safetensors, two.safetensors"):
        Weights.open(tmp_path)
    assert Weights.open(tmp_path, file="two.safetensors").names == ("b",)


@pytest.mark.parametrize("kind", ["single", "bin"])
def test_damaged_files_are_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind, tensors())
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"\x00" * 64):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=rf"cannot read .*{path.name}.*download it again"):
            Weights.open(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match=r"is a Git LFS pointer, not the weights; run `git lfs pull`"):
        Weights.open(tmp_path)


def test_pickles_that_run_code_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": nn.Linear(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"cannot read .*pytorch_model.bin"):
        Weights.open(tmp_path)


def test_loading_leaves_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "single", tensors())
    with caplog.at_level(logging.INFO):
        load_into(Net(), Weights.open(tmp_path), rename=rename)
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == ["loading 7 tensors"]
