"""How a process ends with the one that started it: run as a program, this runs the `main` of the module it is told.

Imports next to nothing, since what a worker imports takes seconds, in which its parent may end too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(module: str) -> tuple[str, ...]:
    """Starts `module.main()` in a process that ends with this one, and leaves signals meant for both to it.

    It finds modules where this one does, its own too.
    """
    return (sys.executable, "-P", __file__, str(os.getpid()), module, json.dumps(sys.path))


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends (Linux); exit if it has already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """The first thing that such a process does."""
    parent, module, path = sys.argv[1:]
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.path[:] = json.loads(path)
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
