"""The one hook of a plugin. Read wherever plugins are loaded; imports no torch, knows no plugin."""

from __future__ import annotations

from collections.abc import Callable

import pluggy

from mstar.plugin.spec import ModelSpec

PROJECT = "mstar"
"""Name of the pluggy project and of the entry point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_models(register: Callable[[ModelSpec], None]) -> None:
    """Register the plugin's model; its name is the entry point's.

    Example:
        @hookimpl
        def register_models(register):
            register(ModelSpec(name="echo", graph=build_graph, ...))
    """
