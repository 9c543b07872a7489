"""`mstar serve` in a process of its own, as operators run it: its address, its log, its numbers, its end."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx


class ServeProcess:
    """A server on a free port of this machine; killed at the end of the `with` block if it still runs.

    Args:
        flags: of `mstar serve`, besides the port.
        environment: further variables.
        module: what to run in place of `mstar`.
        start_s: how long it may take until it answers.
    """

    def __init__(
        self, *flags: str, environment: dict[str, str] | None = None, module: str = "mstar", start_s: float = 60
    ) -> None:
        self.start_s = start_s
        command = [sys.executable, "-m", module, "serve", "--port", "0", *flags]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
        self.log: list[str] = []
        self.url = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> ServeProcess:
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(5)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.log.append(line)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + self.start_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "".join(self.log)
            found = re.search(r"Starting mstar server on (http://\S+)", "".join(self.log))
            if found is not None:
                self.url = found[1]
                with contextlib.suppress(httpx.ConnectError):
                    if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                        return
            time.sleep(0.05)
        raise AssertionError("the server does not answer:\n" + "".join(self.log))

    # ---- its numbers ----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Metric -> value, those with labels added up."""
        found: dict[str, float] = {}
        for name, value in _samples(self._scrape()):
            found[name] = found.get(name, 0.0) + value
        return found

    def histogram(self, name: str) -> dict[float, float]:
        """Upper bound of a bucket -> how many observations lie below."""
        found = re.findall(rf'^{name}_bucket{{.*le="([^"]+)".*}} (\S+)$', self._scrape(), re.MULTILINE)
        return {float(bound): float(number) for bound, number in found}

    def _scrape(self) -> str:
        response = httpx.get(f"{self.url}/metrics", timeout=20)
        assert response.status_code == 200, response.text
        return response.text

    def workers(self) -> list[dict[str, Any]]:
        """Its worker processes, as `/health` shows them."""
        return list(httpx.get(f"{self.url}/health", timeout=10).json().get("workers", ()))

    @property
    def resident_bytes(self) -> int:
        """Memory in use, as the system counts it."""
        return resident_bytes(self.process.pid)

    @property
    def num_files(self) -> int:
        """Open file descriptors."""
        return num_files(self.process.pid)

    @property
    def num_threads(self) -> int:
        return num_threads(self.process.pid)


# ---- processes of this machine ----------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"])


def children(pid: int) -> set[int]:
    """Processes that it has started and not waited for, dead ones too."""
    found = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {one for one in found if _stat(one)[1:2] == [str(pid)]}


def abstract_sockets(pid: int) -> set[str]:
    """Names of its open sockets that are in no file system."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    return {name for inode, name in _abstract() if inode in inodes}


def num_abstract_sockets(prefix: str) -> int:
    """Sockets of that name, whoever has them."""
    return sum(name.startswith(prefix) for _, name in _abstract())


def _abstract() -> list[tuple[str, str]]:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [(line[6], line[7]) for line in lines if len(line) == 8 and line[7].startswith("@")]


def _stat(pid: int) -> list[str]:
    """State, parent and so on; [] for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            yield re.split(r"[{ ]", line)[0], float(line.rsplit(" ", 1)[1])
