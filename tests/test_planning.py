"""What a model takes, what fits where, and the file that `mstar plan` writes. Loads no weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mstar import planning
from mstar.cli import main
from mstar.config import GIB, EngineConfig
from mstar.errors import ConfigError
from mstar.model import Model, find_model
from mstar.placement import Group, Placement, examples, read
from mstar.planning import Demand, Device, ModuleSize, check, check_devices, judge, module_sizes, processes, propose
from mstar.plugin import loader
from mstar.plugin.spec import tinies

MIB = 2**20
PLUGINS = ("orpheus", "vjepa2", "bagel", "qwen3_omni", "echo")

command = sys.modules["mstar.cli.plan"]
Run = Callable[..., tuple[int, str, str]]


def model_of(plugin: str, word: str = "tiny") -> Model:
    return find_model(EngineConfig(plugin=plugin, model=word))


@pytest.fixture(scope="module")
def orpheus() -> Model:
    return model_of("orpheus")


SIZES = {
    "lm": ModuleSize(
        name="lm", weights_bytes=10 * GIB, kv_token_bytes=MIB, num_kv_heads=4, activation_bytes=GIB, can_split=True
    ),
    "snac": ModuleSize(name="snac", weights_bytes=GIB),
}
DEMAND = Demand(seqs=8, length=1024)  # 8 GiB of KV


def proposed(model: Model, *memory_gib: float, ranks: int | None = None) -> list[Group]:
    devices = [Device(f"cuda:{index}", int(size * GIB)) for index, size in enumerate(memory_gib)]
    return propose(model, SIZES, devices, DEMAND, ranks=ranks)


def judged(model: Model, groups: list[Group], *memory_gib: float, demand: Demand = DEMAND) -> planning.Verdict:
    devices = [Device(f"cuda:{index}", int(size * GIB)) for index, size in enumerate(memory_gib)]
    placement = Placement.of(groups, model.graph)
    return judge(processes(placement, SIZES, devices), devices, demand, is_float32=True)


# ---- examples --------------------------------------------------------------------------------------------------

EXAMPLES = [
    pytest.param(plugin, word, path, id=f"{plugin}-{word}-{name}")
    for plugin in PLUGINS
    for word in tinies(loader.load(plugin).spec)
    for name, path in examples(loader.load(plugin).spec).items()
]


@pytest.mark.parametrize(("plugin", "word", "path"), EXAMPLES)
def test_every_example_fits_its_graph_and_says_what_it_is(plugin: str, word: str, path: Path) -> None:
    model = model_of(plugin, word)
    assert path.read_text().startswith("# ")
    placement = Placement.of(read(path), model.graph, source=path.name)
    planning.check(model, placement, source=path.name)
    assert placement.homes.keys() == {walk.name for walk in model.graph.walks}
    Placement.of(read(path), model.plugin.spec.graph(None), source=path.name)


def test_examples_are_there_for_what_each_model_can_do() -> None:
    found = {plugin: set(examples(loader.load(plugin).spec)) for plugin in PLUGINS}
    assert all({"colocated", "disaggregated"} <= names for names in found.values())
    assert found["orpheus"] >= {"pd", "tp2"} and found["bagel"] >= {"pd", "cfg_parallel", "tp2"}
    assert found["qwen3_omni"] >= {"pd", "talker_codec", "tp2"}


def test_a_placement_that_splits_what_shares_state_is_refused() -> None:
    model = model_of("echo")
    groups = [Group(nodes=("depth.start",)), Group(nodes=("*",))]
    with pytest.raises(ConfigError, match="group 0 has depth.start, group 1 has depth.step, depth.sum; these share"):
        planning.check(model, Placement.of(groups, model.graph))


@pytest.mark.parametrize(
    ("entry", "ranks", "said"),
    [
        ("lm", 3, r"groups\[0\].tensor_parallel is 3: lm: .* query heads, which 3 ranks cannot share evenly"),
        ("snac", 2, r"groups\[0\].tensor_parallel is 2, but of snac none can be split; set it to 1"),
    ],
)
def test_a_placement_that_splits_what_cannot_be_split_so_is_refused(
    orpheus: Model, entry: str, ranks: int, said: str
) -> None:
    groups = [Group(nodes=(entry,), tensor_parallel=ranks), Group(nodes=("*",))]
    with pytest.raises(ConfigError, match=said):
        planning.check(orpheus, Placement.of(groups, orpheus.graph))


def test_ranks_hold_shares_and_the_first_what_cannot_be_split() -> None:
    model = model_of("orpheus")
    devices = [Device("cpu", GIB)]
    first, second = processes(Placement.of([Group(nodes=("*",), tensor_parallel=2)], model.graph), SIZES, devices)
    assert [module.name for module in first.modules] == ["lm", "snac"] and first.modules[1] == SIZES["snac"]
    assert second.modules == first.modules[:1] and first.modules[0].weights_bytes == 5 * GIB


# ---- sizes -----------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_modules_that_are_loaded(orpheus: Model) -> None:
    from mstar.worker.modules import Modules

    config = EngineConfig(plugin="orpheus", dtype="bfloat16", max_model_len=256, max_num_seqs=2)
    spec, graph = orpheus.plugin.spec, orpheus.graph
    loaded = Modules(spec, graph, checkpoint=orpheus.checkpoint, config=config)
    sizes = module_sizes(orpheus, config)
    assert {name: size.weights_bytes for name, size in sizes.items()} == {
        name: module.weights_bytes for name, module in loaded.by_name.items()
    }
    assert sizes["lm"].kv_token_bytes * config.block_size == loaded._page_bytes(loaded["lm"].node)
    assert not sizes["snac"].kv_token_bytes and not any(size.is_counted for size in sizes.values())


def test_without_weights_sizes_are_counted(orpheus: Model, tmp_path: Path) -> None:
    from dataclasses import replace

    empty = Model(orpheus.plugin, replace(orpheus.checkpoint, folder=tmp_path, parts={}))
    config = EngineConfig(plugin="orpheus", dtype="bfloat16")
    counted, read_ = module_sizes(empty, config)["lm"], module_sizes(orpheus, config)["lm"]
    assert counted.is_counted and counted.weights_bytes == pytest.approx(read_.weights_bytes, rel=0.02)


def test_slots_count_for_each_request() -> None:
    sizes = module_sizes(model_of("echo"), EngineConfig(plugin="echo"))
    assert sizes["depth"].row_bytes > 0 and sizes["lm"].row_bytes == 0


# ---- what fits -------------------------------------------------------------------------------------------------


def test_a_model_that_fits_on_each_device_is_replicated(orpheus: Model) -> None:
    assert proposed(orpheus, 24, 24) == [Group(name="all", nodes=("*",), replicas=2, devices=("cuda:0", "cuda:1"))]
    verdict = judged(orpheus, proposed(orpheus, 24, 24), 24, 24)
    assert verdict.seqs == 8 and not verdict.missing and not verdict.advice


def test_a_model_that_does_not_is_spread(orpheus: Model) -> None:
    groups = proposed(orpheus, 22, 10)
    assert [(group.nodes, group.devices) for group in groups] == [(("lm",), ("cuda:0",)), (("snac",), ("cuda:1",))]
    assert judged(orpheus, groups, 22, 10).seqs == 8


def test_a_module_that_fits_nowhere_is_split_and_the_rest_stays_together(orpheus: Model) -> None:
    groups = proposed(orpheus, 12, 12)
    assert groups[0] == Group(name="lm", nodes=("lm",), tensor_parallel=2, devices=("cuda:0", "cuda:1"))
    assert groups[1].nodes == ("snac",) and judged(orpheus, groups, 12, 12).seqs >= 1
    assert proposed(orpheus, 80, 80, ranks=2)[0].tensor_parallel == 2, "where it is asked for"


def test_what_is_missing_and_what_helps_is_said(orpheus: Model) -> None:
    one = [Group(nodes=("*",))]
    verdict = judged(orpheus, one, 8)
    assert verdict.seqs == 0 and verdict.missing["cuda:0"] == pytest.approx(
        (10 + 1 + 1 + 0.5 + 1 - 7.2) * GIB, rel=0.01
    )
    assert verdict.advice == ("half the memory: --dtype bfloat16", "more devices, or larger ones")
    verdict = judged(orpheus, one, 18)  # 3.7 GiB are left for KV
    assert verdict.seqs == 3 and not verdict.missing
    assert verdict.advice[:2] == (
        "fewer requests at once: --max-num-seqs 3",
        "shorter sequences: --max-model-len 448",
    )
    nearly = judged(orpheus, one, 14.6)
    assert nearly.seqs == 0 and "one short sequence at a time: --max-num-seqs 1 --max-model-len 640" in nearly.advice


def test_a_cpu_keeps_a_small_cache_unless_told(orpheus: Model) -> None:
    devices = [Device("cpu", 40 * GIB), Device("cpu", 40 * GIB)]
    plan = processes(Placement.of([Group(nodes=("*",), replicas=2)], orpheus.graph), SIZES, devices)
    verdict = judge(plan, devices, DEMAND, is_float32=False)
    assert verdict.seqs == 2 and verdict.advice[0] == "a larger KV cache: --kv-cache-memory-bytes 16384MiB"
    told = Demand(seqs=8, length=1024, kv_bytes=8 * GIB)
    assert judge(plan, devices, told, is_float32=False).seqs == 8


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(3, "divides the KV heads of no module that can be split; KV heads: lm 4"), (4, "more than the 2 devices")],
)
def test_what_cannot_be_split_so_is_told(orpheus: Model, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        proposed(orpheus, 24, 24, ranks=ranks)


@pytest.mark.parametrize(
    ("plugin", "group", "said"),
    [
        ("orpheus", Group(nodes=("*",), tensor_parallel=3), "groups[0].tensor_parallel is 3: lm: .* query heads"),
        ("echo", Group(nodes=("*",), tensor_parallel=2), "groups[0].tensor_parallel is 2, but of .* none can be split"),
        ("orpheus", Group(nodes=("*",), devices=("cuda:7",)), "groups[0].devices[0] is 'cuda:7': this torch sees"),
    ],
)
def test_what_cannot_start_is_told_before_anything_starts(plugin: str, group: Group, said: str) -> None:
    config = EngineConfig(plugin=plugin)
    model = find_model(config)
    placement = Placement.of([group], model.graph)
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        check(model, placement, source="--placement x")
        check_devices(placement, config, source="--placement x")


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_what_it_prints_can_be_given_to_placement(run: Run, tmp_path: Path) -> None:
    asked = ("--plugin", "orpheus", "--devices", "cuda:0=2GiB,cuda:1=2GiB", "--max-num-seqs", "2")
    code, out, err = run(*asked, "--format", "yaml")
    path = tmp_path / "plan.yaml"
    path.write_text(out)
    assert code == 0 and "fits: 4 requests of 8,192 tokens at once" in err
    assert read(path) == (Group(name="all", nodes=("*",), replicas=2, devices=("cuda:0", "cuda:1")),)
    code, out, _ = run(*asked)
    assert code == 0 and "cuda:1" in out and "snac" in out and out.endswith(path.read_text())
    code, out, _ = run(*asked, "--placement", str(path))
    assert code == 0 and "groups:" not in out


def test_a_placement_is_judged(run: Run) -> None:
    code, out, _ = run("--plugin", "orpheus", "--placement", "tp2", "--devices", "cuda:0=2GiB,cuda:1=2GiB")
    assert code == 0 and "lm rank 1" in out and "codec" in out
    code, out, _ = run("--plugin", "orpheus", "--placement", "pd", "--devices", "cuda:0=0.5GiB")
    assert code == 1 and "does not fit: cuda:0 lacks" in out and "more devices" in out


def test_it_lists_a_plugin_s_placements(run: Run) -> None:
    code, out, _ = run("--plugin", "orpheus", "--list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == sorted(
        ("colocated", "disaggregated", "pd", "tp2")
    )
    assert "the language model and the codec apart" in out


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("gpu", "--devices names 'gpu'; expected auto, or cpu or cuda:N"),
        ("cpu=100", "--devices names 'cpu=100', a device of 100 bytes; give a size with its unit"),
        ("cuda:0=much", "--devices names 'cuda:0=much': expected bytes"),
        ("cuda:0=1GiB,cuda:0=1GiB", "names 'cuda:0' twice"),
        ("cuda:5", "give its memory: cuda:5=80GiB"),
    ],
)
def test_wrong_devices_are_told(run: Run, monkeypatch: pytest.MonkeyPatch, devices: str, said: str) -> None:
    monkeypatch.setattr(command, "gpus", lambda: [GIB])
    code, _, err = run("--plugin", "orpheus", "--devices", devices)
    assert code == 2 and said in err


def test_a_device_that_is_not_given_is_told(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("groups: [{nodes: ['*'], devices: ['cuda:3']}]")
    code, _, err = run("--plugin", "orpheus", "--placement", str(path), "--devices", "cpu")
    assert (
        code == 2
        and "the placement names device 'cuda:3'; --devices has cpu: name it there too, such as cuda:3=80GiB" in err
    )


class FakeNVML(SimpleNamespace):
    """Two GPUs, as nvidia-ml-py shows them."""

    NVMLError = RuntimeError
    is_broken = False

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlInit" and self.is_broken:
            raise RuntimeError("no driver")
        answers = {
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB),
        }
        return lambda *args: answers.get(name)


def test_memory_is_asked_of_the_driver_or_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML())
    assert command.read_devices("auto") == [Device("cuda:0", 80 * GIB), Device("cuda:1", 80 * GIB)]
    assert command.read_devices("cuda:1") == [Device("cuda:1", 80 * GIB)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(is_broken=True))
    (cpu,) = command.read_devices("auto")
    assert cpu.name == "cpu" and cpu.memory_bytes > GIB // 4
    first, second = command.read_devices("cpu,cpu")
    assert first == second and first.memory_bytes == pytest.approx(cpu.memory_bytes / 2, rel=0.2)
