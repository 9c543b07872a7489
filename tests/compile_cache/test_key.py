"""Keys: everything that invalidates changes the digest, nothing else does, in any process."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mstar_compile_cache import CacheKey, Machine, canonical, current_machine, digest_of, source_hash

MACHINE = Machine(python="3.11", torch="2.9", compiler="g++ 12", processor="x86_64 avx2", accelerator="")
KEY = CacheKey(
    machine=MACHINE, plugin="echo", plugin_version="1.0", name="llm.decode", source="ab", dtype="float32", threads=2,
    config=canonical({"hidden": 8, "layers": [1, 2]}), shapes=canonical({"batch": [1, 16]}),
)  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CacheKey) if field.name != "machine"])
def test_every_field_changes_the_digest(name: str) -> None:
    value = {"threads": 3, "config": '{"hidden":9}', "shapes": "[]", "options": "[1]"}.get(name, "other")
    assert dataclasses.replace(KEY, **{name: value}).digest != KEY.digest


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Machine)])
def test_every_fact_of_the_machine_changes_the_digest(name: str) -> None:
    changed = dataclasses.replace(MACHINE, **{name: "other"})
    assert dataclasses.replace(KEY, machine=changed).digest != KEY.digest


def test_the_digest_is_that_of_the_description() -> None:
    assert digest_of(KEY.describe()) == KEY.digest
    assert len(KEY.digest) == 64


@pytest.mark.parametrize("seed", ["0", "1"])
def test_digests_and_source_hashes_are_the_same_in_every_process(seed: str) -> None:
    code = (
        "from mstar_compile_cache import *\nimport json\n"
        "m = Machine(python='3.11', torch='2.9', compiler='g++ 12', processor='x86_64 avx2', accelerator='')\n"
        "k = CacheKey(threads=2, machine=m, plugin='echo', plugin_version='1.0', name='llm.decode', source='ab',"
        " dtype='float32', config=canonical({'layers': (1, 2), 'hidden': 8}), shapes=canonical({'batch': [1, 16]}))\n"
        "print(k.digest, source_hash(CacheKey, json), canonical({'b', 'a', 'c'}))"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(
        command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=60, check=True
    )
    import json

    assert answer.stdout.split() == [KEY.digest, source_hash(CacheKey, json), '["a","b","c"]']


def test_canonical_text_does_not_depend_on_order_and_tells_values_apart() -> None:
    class Kind(Enum):
        fast = "fast"

    assert canonical({"b": 1, "a": (Kind.fast, torch.bfloat16)}) == '{"a":["fast","torch.bfloat16"],"b":1}'
    assert len({canonical(value) for value in (1, "1", True, 1.0, None, [1])}) == 6


@pytest.mark.parametrize("value", [object(), lambda: 0, b"x"])
def test_what_has_no_canonical_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="key"):
        canonical({"config": value})


@pytest.mark.parametrize("text", ["not json", '{"b": 1}', '{"b":1,"a":2}'])
def test_a_key_takes_canonical_text_only(text: str) -> None:
    with pytest.raises(ValueError, match="config of a key is"):
        dataclasses.replace(KEY, config=text)


# ---- source code -------------------------------------------------------------------------------------------------

NODES = """
import torch
from . import math_of as m

def step(x):
    from made_up.lazy import late
    return m.f(x)

class Node(torch.nn.Module):
    def forward(self, x):
        return step(x)

def other(x):
    return x
"""
FILES = {
    "__init__.py": "",
    "nodes.py": NODES,
    "math_of.py": "from made_up.deep.part import g\n\ndef f(x):\n    return g(x)\n",
    "lazy.py": "late = 1\n",
    "deep/__init__.py": "",
    "deep/part.py": "def g(x):\n    return x\n",
    "unused.py": "",
}

Load = Callable[[], ModuleType]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "made_up"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_a_change_in_any_imported_file_changes_the_hash(package: Path) -> None:
    nodes = importlib.import_module("made_up.nodes")
    before = source_hash(nodes.step)
    for name in set(FILES) - {"unused.py"}:
        (package / name).write_text(FILES[name] + "# changed\n")
        assert source_hash(nodes.step) != before, name
        (package / name).write_text(FILES[name])
    (package / "unused.py").write_text("# changed\n")
    assert source_hash(nodes.step) == before


def test_the_hash_tells_things_of_one_file_apart_and_takes_all_kinds(package: Path) -> None:
    nodes = importlib.import_module("made_up.nodes")
    node = nodes.Node()
    things: list[Any] = [nodes.step, nodes.other, nodes.Node, node.forward, nodes, package / "lazy.py"]
    assert len({source_hash(thing) for thing in things}) == len(things)
    assert source_hash(torch.nn.Sequential(node)) == source_hash(node) == source_hash(nodes.Node)
    assert source_hash(functools.partial(nodes.step, 1)) == source_hash(nodes.step)


def test_the_hash_does_not_depend_on_where_the_package_lies(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_hash(importlib.import_module("made_up.nodes").Node)
    (package.parent / "elsewhere").mkdir()
    package.rename(package.parent / "elsewhere" / "made_up")
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(package.parent / "elsewhere")
    importlib.invalidate_caches()
    assert source_hash(importlib.import_module("made_up.nodes").Node) == before


@pytest.mark.parametrize("thing", [3, len, sys])
def test_what_has_no_source_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="to hash"):
        source_hash(thing)


# ---- this machine ------------------------------------------------------------------------------------------------


def test_the_machine_is_described(tmp_path: Path) -> None:
    machine = current_machine()
    assert torch.__version__ in machine.torch
    assert machine.accelerator == ""
    assert machine.processor
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\necho version 7")
    compiler.chmod(0o755)
    assert current_machine(compiler=str(compiler)).compiler == f"{compiler}: version 7"
    assert current_machine(compiler=str(tmp_path / "none")).compiler == ""


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, mstar_compile_cache\nassert not {'torch', 'mstar'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
