"""mstar: a serving engine for composite multimodal models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar import client as client
    from mstar.client import AsyncClient as AsyncClient
    from mstar.client import Client as Client

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The client, imported when somebody first asks for it."""
    if name not in ("Client", "AsyncClient", "client"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("mstar.client")
    return module if name == "client" else getattr(module, name)
