"""How commands that take long tell what they are at where there is no terminal: in lines, not too many of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

LINE_INTERVAL_S = 10.0


@contextlib.contextmanager
def repeated(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` every ten seconds, in a thread, as long as the block lasts."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(LINE_INTERVAL_S):
            tell()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
