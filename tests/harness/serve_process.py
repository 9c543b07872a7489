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

    @property
    def resident_bytes(self) -> int:
        """Memory in use, as the system counts it."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_files(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            yield re.split(r"[{ ]", line)[0], float(line.rsplit(" ", 1)[1])
