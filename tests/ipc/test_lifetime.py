"""Processes that end with the one that started them, before they have imported anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serve_process import is_alive

from mstar.ipc.lifetime import command

PROBE = """
import signal, sys, time
def main():
    print(sys.path[0], signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "torch" in sys.modules, flush=True)
"""


def test_it_finds_modules_where_its_parent_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    answer = subprocess.run(command("probe"), capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.split() == [str(tmp_path), "True", "False"]


def test_it_ends_with_its_parent_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)")
    code = (
        f"import subprocess, sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom mstar.ipc.lifetime import command\n"
        "child = subprocess.Popen(command('slow'), stdout=subprocess.PIPE)\nchild.stdout.readline()\n"
        "print(child.pid, flush=True)\nsys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdin is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 5
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_does_not_begin_without_its_parent() -> None:
    executable, flag, program, _, module, path = command("os")
    gone = subprocess.run([executable, flag, program, str(os.getppid()), module, path], timeout=60, check=False)
    assert gone.returncode == 1
