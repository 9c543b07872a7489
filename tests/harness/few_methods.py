"""`mstar` that compiles no more than a few methods, so that a test of the command line is over soon.

Run it as `python -m few_methods compile ...`; FEW_METHODS names them, with commas.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from mstar.cli import main
from mstar.plugin.graph import Graph
from mstar.worker.compiled import Compilation, Compiler


def only(graph: Graph, names: list[str]) -> Graph:
    nodes = [
        dataclasses.replace(node, methods=tuple(m for m in node.methods if f"{node.module}.{m.name}" in names))
        for node in graph.nodes
    ]
    return dataclasses.replace(graph, nodes=tuple(node for node in nodes if node.methods))


def run_few(self: Compiler, *arguments: Any) -> Compilation:
    graph = self._modules.graph
    self._modules.graph = only(graph, os.environ["FEW_METHODS"].split(","))
    try:
        return run_all(self, *arguments)
    finally:
        self._modules.graph = graph


if __name__ == "__main__":
    run_all, Compiler.run = Compiler.run, run_few  # type: ignore[method-assign]
    main()
