"""`mstar compile`: what it passes on, says and leaves; starts that find everything build nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from serve_process import ServeProcess

import mstar
from mstar import launch
from mstar.cli import cli
from mstar.cli import compile as compile_command
from mstar.config import EngineConfig
from mstar.layers import kernels, shims
from mstar.worker.compiled import Compilation, Compiler, NotCompilable, Progress
from mstar_compile_cache import Store

HARNESS = Path(__file__).parents[1] / "harness"
ECHO = ("--plugin", "echo", "--kv-cache-memory-bytes", "16MiB")
FEW = ("depth.step", "lm.prefill")  # the second stays as it is


# ---- the command, without a model -------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[EngineConfig], Compilation]:
    """Settings passed on, and what is to be answered to them; nothing is built."""
    store = Store(tmp_path / "store")
    monkeypatch.setattr(kernels, "compile_cache", lambda: store)
    configs, answer = list[EngineConfig](), Compilation(eager={"lm.prefill": "its batches are ragged"}, seconds=1.5)

    def build(config: EngineConfig, *, progress: Progress) -> Compilation:
        configs.append(config)
        progress("kernels", 0, 1)
        progress("lm.decode", 0, 3)
        store.counters.builds += 2
        progress("lm.prefill", 1, 3)
        progress("lm.frame", 2, 3)
        return answer

    fake = ModuleType("mstar.launch")
    fake.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mstar.launch", fake)
    monkeypatch.setattr(mstar, "launch", fake)
    return configs, answer


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compile", *arguments])


def test_each_method_is_said_to_be_built_found_or_left(built: tuple[list[EngineConfig], Compilation]) -> None:
    built[1].compiled = dict.fromkeys(("lm.decode", "lm.frame"))  # type: ignore[assignment]
    shown = invoke("--plugin", "echo", "--dtype", "bfloat16")
    assert shown.exit_code == 0, shown.output
    assert built[0][0] == EngineConfig(plugin="echo", dtype="bfloat16", compile=True)
    assert shown.stderr.splitlines() == ["[1/1] kernels", "[1/3] lm.decode", "[2/3] lm.prefill", "[3/3] lm.frame"]
    *lines, last = (" ".join(line.split()) for line in shown.stdout.splitlines())
    assert lines == [
        "kernels found in the cache",
        "lm.decode built in 0.0 s",
        "lm.frame found in the cache",
        "lm.prefill stays eager: its batches are ragged",
    ]
    assert last.startswith("2 methods are compiled, 1 stay eager; 2 artifacts were built, in 0.")
    facts = json.loads(invoke("--plugin", "echo", "--json").stdout)
    assert facts["num_built"] == 4 and facts["compile_seconds"] == 1.5
    assert facts["methods"]["lm.decode"]["state"] == "built" and facts["methods"]["lm.frame"]["state"] == "found"
    assert facts["methods"]["lm.prefill"] == {"state": "eager", "reason": "its batches are ragged"}


def test_what_takes_long_is_said_again_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.cli.progress.LINE_INTERVAL_S", 0.4)
    said = list[str]()
    monkeypatch.setattr("click.echo", lambda line, err: said.append(line))
    with compile_command._shown(is_bar=False) as show:
        show("lm.decode", 0, 2)
        time.sleep(1.7)
        show("lm.frame", 1, 2)
    assert said[0] == "[1/2] lm.decode" and said[-1] == "[2/2] lm.frame"
    assert len(said) > 2 and set(said[1:-1]) <= {f"[1/2] lm.decode: {n} s so far" for n in (1, 2)}


def test_a_model_that_has_nothing_to_compile_ends_with_1(built: tuple[list[EngineConfig], Compilation]) -> None:
    shown = invoke("--plugin", "echo")
    assert shown.exit_code == 1
    assert "0 methods are compiled, 1 stay eager" in shown.stdout


def test_the_server_s_file_of_settings_will_do(built: tuple[list[EngineConfig], Compilation], tmp_path: Path) -> None:
    path = tmp_path / "mstar.yaml"
    path.write_text("plugin: echo\nport: 9000\ncompile: true\nmax-queue: 3\nthreads: 1\ndtype: float32\n")
    invoke("--config", str(path), "--dtype", "bfloat16")
    assert built[0] == [EngineConfig(plugin="echo", compile=True, max_queue=3, threads=1, dtype="bfloat16")]
    path.write_text("plugin: echo\nenforce-eager: true\n")
    shown = invoke("--config", str(path))
    assert "exclude each other" in str(shown.exception)


# ---- with a model -----------------------------------------------------------------------------------------------


def started(cache: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """A `mstar` that compiles few methods, in a process of its own."""
    command = [sys.executable, "-m", "few_methods", *arguments]
    return subprocess.Popen(
        command, env=environment(cache) | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def environment(cache: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(HARNESS), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "MSTAR_CACHE": str(cache), "PYTHONPATH": path, "FEW_METHODS": ",".join(FEW), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def test_without_a_compiler_nothing_is_compiled_and_the_remedy_is_said(tmp_path: Path) -> None:
    process = started(tmp_path / "cache", "compile", *ECHO, CXX="no-such-compiler")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2, err
    assert "nothing can be compiled here" in err and "set CXX to a C++ compiler (it is 'no-such-compiler')" in err
    assert "Traceback" not in err and not out


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A cache that four processes filled, which started at once, and what they said."""
    if not shims.load():
        pytest.skip("no C++ compiler")
    cache = tmp_path_factory.mktemp("cache")
    processes = [started(cache, "compile", *ECHO, "--json") for _ in range(4)]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0 and "Warning" not in err, err
        found.append(json.loads(out))
    return cache, found


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_four_processes_that_start_at_once_build_each_artifact_once(cold: tuple[Path, list[dict[str, Any]]]) -> None:
    cache, found = cold
    with Store(cache / "compiled") as store:
        names = sorted(entry.key["name"] for entry in store.entries())
        assert set(store.verify().values()) == {None}
    kernels = ["attention", "linear", "product", "quantized", "sampler", "shims", "tape"]
    assert names == sorted([*(f"{name}.cpp" for name in kernels), "depth.step"])
    assert sum(facts["num_built"] for facts in found) == len(names)
    for facts in found:
        states = {name: method["state"] != "eager" for name, method in facts["methods"].items()}
        assert states == {"depth.step": True, "lm.prefill": False}


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_warm_start_compiles_nothing(cold: tuple[Path, list[dict[str, Any]]]) -> None:
    cache, found = cold
    cold_s = min(facts["compile_seconds"] for facts in found)
    with ServeProcess(*ECHO, "--compile", module="few_methods", environment=environment(cache)) as server:
        metrics = server.metrics()
    assert metrics["mstar_compile_builds_total"] == 0
    assert metrics["mstar_compiled_methods"] == 1
    assert 0 < metrics["mstar_compile_seconds"] < 0.15 * cold_s


def test_the_log_says_what_a_start_is_at(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    delays = iter([2.0])

    def check(*_: Any) -> None:
        time.sleep(next(delays, 0))
        raise NotCompilable("it is only a test")

    monkeypatch.setattr(Compiler, "_check", check)
    monkeypatch.setattr(launch, "_REPORT_INTERVAL_S", 0.3)
    caplog.set_level("INFO", logger="mstar.launch")

    async def scenario() -> None:
        config = EngineConfig(plugin="echo", kv_cache_memory_bytes=2**24, compile=True)
        async with launch.started_engine(config) as engine:
            assert engine.state.unready is None and engine.state.compiled.num_methods == 0

    asyncio.run(scenario())
    assert any("the model is loading: compiling lm.prefill, 1 of " in line for line in caplog.messages), caplog.messages
