"""Packages compiled once run in other processes without a compiler, at every batch size, with weights of their own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mstar_compile_cache import aot_compile
from mstar_compile_cache.warm import remove_abandoned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# Small constants tempt the compiler to write them into the code: a bias of 4, a scalar, a buffer.
MODULE = """
import sys
from pathlib import Path
import torch
from mstar_compile_cache import CacheKey, Machine, Store, StoreError, aot_compile, aot_load, inductor_environment

machine = Machine(python="p", torch="t", compiler="c", processor="x", accelerator="")
key = CacheKey(
    machine=machine, plugin="p", plugin_version="1", name="n", source="", dtype="float32", threads=1
)

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.bias = torch.nn.Parameter(torch.randn(4))
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.register_buffer("fixed", torch.arange(4.0), persistent=False)
        self.plain = torch.arange(4.0) + 5

    def forward(self, x):
        y = torch.nn.functional.silu(x @ self.weight * self.scale + self.bias) * self.plain + self.fixed
        return {"y": y + torch.tensor([1.0, 2.0, 3.0, 4.0])}
"""
BUILD = """
def build(folder):
    batch = torch.export.Dim("batch", min=1, max=16)
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # compiles faster
    aot_compile(
        Small(), (torch.ones(2, 4),), out=folder / "small.pt2", dynamic_shapes=({0: batch},), options=options
    )

with Store(Path(sys.argv[1])) as store:
    store.get_or_build(key, build)
    assert store.counters.builds == 1
"""
LOAD = """
import threading
import time
torch.manual_seed(1)
store = Store(Path(sys.argv[1]))
package = store.get(key) / "small.pt2"
first, second = Small(), Small()
programs = [aot_load(package, weights=small.state_dict()) for small in (first, second)]
for small, program in zip((first, second), programs):
    for batch in range(1, 17):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(program(x), small(x), atol=1e-6, rtol=1e-5)
with torch.no_grad():
    first.bias += 1  # shared, not copied
    torch.testing.assert_close(programs[0](x), first(x), atol=1e-6, rtol=1e-5)
for wrong in (None, {**first.state_dict(), "weight": first.weight.detach().double()}):
    try:
        aot_load(package, weights=wrong)
    except StoreError as error:
        assert "'weight'" in str(error) or wrong is None, error
    else:
        raise AssertionError("wrong weights were taken")

ticks = []
def tick():
    while len(ticks) < 10000:
        ticks.append(time.perf_counter())
        time.sleep(0.001)

x = torch.randn(1_000_000, 4)  # the range is not checked
thread = threading.Thread(target=tick, daemon=True)
thread.start()
begin = time.perf_counter()
for _ in range(5):
    programs[0](x)
end = time.perf_counter()
inside = [begin, *(moment for moment in ticks if begin < moment < end), end]
assert max(b - a for a, b in zip(inside, inside[1:])) < (end - begin) / 2, "the GIL was held"
ticks += [0.0] * 10000
assert not any(name.startswith(("torch._inductor.codecache", "torch._dynamo.eval")) for name in sys.modules)
"""
COMPILE = """
from torch._dynamo.utils import counters

def function(x):
    return torch.nn.functional.silu(x) * 2

with inductor_environment(Path(sys.argv[1])), torch.no_grad():
    torch.testing.assert_close(torch.compile(function)(torch.ones(8)), function(torch.ones(8)))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def run(source: str, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-W", "ignore", "-c", MODULE + source, *arguments]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def test_a_second_process_runs_a_package_without_a_compiler(tmp_path: Path) -> None:
    run(BUILD, str(tmp_path / "store"), TORCHINDUCTOR_VEC_ISA_OK="1")  # compiles less
    run(LOAD, str(tmp_path / "store"), CXX="false")


def test_a_second_process_compiles_nothing_from_a_folder_that_was_moved(tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    (tmp_path / "aside").mkdir()
    assert run(COMPILE, str(tmp_path / "aside"), CXX=str(compiler)) == "0 1\n"
    assert " -shared " in log.read_text()
    log.unlink()
    (tmp_path / "aside").rename(tmp_path / "entry")
    assert run(COMPILE, str(tmp_path / "entry"), CXX=str(compiler)) == "1 0\n"
    assert set(log.read_text().splitlines()) <= {"--version", "-v"}


KILLED = """
import os, signal, sys
from mstar_compile_cache.warm import _scratch
print(_scratch(), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def test_scratch_folders_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KILLED, how]
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        return subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True)

    running, killed = start("running"), start("killed")
    assert running.stdin is not None and running.stdout is not None
    in_use, left = Path(running.stdout.readline().strip()), Path(killed.communicate(timeout=60)[0].strip())
    own = tmp_path / f"mstar-compile-{os.getpid()}-running"
    unseen = tmp_path / "mstar-compile-999999999-unseen"  # as from a container that shares the folder
    older, other = tmp_path / "mstar-compile-abc", tmp_path / "mstar-compile-x-1"
    for folder in (own, unseen, older, other):
        folder.mkdir()
    assert in_use.is_dir() and left.is_dir()
    held = os.open(unseen, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {in_use, own, unseen, older, other}
    os.close(held)
    remove_abandoned(tmp_path)
    running.communicate("", timeout=60)
    assert set(tmp_path.iterdir()) == {own, older, other}


def test_a_module_that_writes_to_its_buffers_is_refused(tmp_path: Path) -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    with pytest.raises(ValueError, match="writes to its buffers count"):
        aot_compile(Counter(), (torch.zeros(2),), out=tmp_path / "counter.pt2")
