"""What operators see: log lines and progress. Used in every process; knows nothing about HTTP or models.

Secrets and encoded media never reach a log: the formatter cuts them out of messages and tracebacks alike.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger("mstar")  # of whoever makes progress

_SECRETS = re.compile(
    r"""(?ix)
    ((?:\b|_)(?:authorization|proxy-authorization|api[-_]?key|(?:hf|access|auth)[-_]?token|password|secret)["']?\s*[:=]\s*["']?(?:bearer\s+|basic\s+)?)
    (?!\[\])[^\s"',;}]+
    | (--[a-z-]*(?:key|token|password|secret)\s+)\S+
    | (\bbearer\s+)[\w.~+/-]{8,}=*
    | (://[^\s/:@]+:)[^\s/@]+(?=@)
    | \b((?:sk|hf)[-_])[A-Za-z0-9_-]{16,}
    """
)
_SHORTEST_HIDDEN = 8  # what is shorter also stands in ordinary words
_hidden: set[str] = set()
_subject: ContextVar[str] = ContextVar("subject", default="")
_ENCODED = re.compile(r"[A-Za-z0-9+/_-]{256,}={0,2}")


def hide(secrets: Iterable[str]) -> None:
    """Cut these out of every log line from now on, wherever they stand."""
    _hidden.update(secret for secret in secrets if len(secret) >= _SHORTEST_HIDDEN)


def redact(text: str) -> str:
    """`text` without credentials, and with long base64 replaced by its length."""
    for secret in _hidden:
        text = text.replace(secret, "***")
    text = _ENCODED.sub(lambda match: f"<{len(match[0])} characters of encoded data>", text)
    return _SECRETS.sub(lambda match: next((group for group in match.groups() if group), "") + "***", text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.name == "uvicorn.error":  # what all of uvicorn's lines are called, good ones too
            record.name = "uvicorn"
        return redact(super().format(record))


class _Handler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is now, so that redirection after `setup_logging` works."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logging(level: str) -> None:
    """Send log lines at `level` ("debug", "info", "warning", "error") and above to standard error.

    May be called again to change the level; lines are never doubled.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        handler = _Handler(sys.stderr)
        handler.addFilter(_is_wanted)
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(level.upper())


def _is_wanted(record: logging.LogRecord) -> bool:
    """Ours, plugins' and the HTTP server's lines; of other libraries only warnings and errors."""
    if record.name == "uvicorn.error" and record.msg == "ASGI callable returned without completing response.":
        return False  # so streams that fail are broken; why has been said
    return record.levelno >= logging.WARNING or record.name.startswith(("mstar", "uvicorn"))


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Begin the descriptions of `progress` within the block with what they are about, such as a node's name."""
    token = _subject.set(f"{subject}: ")
    try:
        yield
    finally:
        _subject.reset(token)


@contextmanager
def progress(description: str, total: float | None, unit: str = "items") -> Iterator[Callable[[float], None]]:
    """Show how far a long step is: a bar on a terminal, else one log line with the seconds at its end.

    Yields a function that is called with how many units more are done.

    Args:
        description: what is being done, such as "loading weights".
        total: how many units there are; None: not known.
        unit: "bytes" is shown as KB, MB, GB; anything else as it is.
    """
    description = _subject.get() + description
    started = time.monotonic()
    count = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    console = Console(stderr=True)
    hidden = not console.is_terminal or not logger.isEnabledFor(logging.INFO)
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)
    done = bar.tasks[0].completed
    amount = size_text(done) if unit == "bytes" else f"{done:g} {unit}"
    logger.info("%s: %s in %.1f s", description, amount, time.monotonic() - started)


def size_text(num_bytes: float) -> str:
    """Bytes as people read them: "0.4 MiB", "1.25 GiB"."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def printable(text: str) -> str:
    """A text for a terminal: what is not printable, but for line ends and tabs, is escaped."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else ascii(sign)[1:-1] for sign in text)
