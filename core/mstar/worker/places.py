"""Which worker of a request's route runs what: lanes at home, calls where their methods are placed.

Pure lookups over a placement; knows no channels. Owned by the worker's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from mstar.plugin.graph import Graph
from mstar.plugin.program import KVStep, LoopStart, MethodKey, Program, Run, Spawn
from mstar.worker.state import RequestState


class Placing(Protocol):
    """What a worker needs of a placement."""

    @property
    def homes(self) -> Mapping[str, int]:
        """Walk -> the group whose worker goes through it."""

    def group_of(self, walk: str, node: str, method: str) -> int:
        """The group that runs a walk's calls of a method."""


class Places:
    """A worker's view of a placement.

    Args:
        placement: None: everything is here.
        worker: this worker's number.
        group: its group.
        programs: of all walks, before anything is fused.

    Attributes:
        split: modules with sequences that methods of several groups use: those move between workers.
        read: names of values that any walk reads once they are there.
    """

    def __init__(
        self, placement: Placing | None, programs: Mapping[str, Program], *, worker: int = 0, group: int = 0
    ) -> None:
        self.worker = worker
        self.group = group
        self._homes: dict[str, int] = {}
        self._groups: dict[Run, int] = {}
        self._origins: dict[Run, tuple[str, int]] = {}
        self._programs = programs
        self.read = frozenset(name for program in programs.values() for name in names_read(program))
        users: dict[str, set[int]] = {}
        for walk, at, op in _runs(programs) if placement is not None else ():
            found = self._groups[op] = placement.group_of(walk, op.node, op.method.name)  # type: ignore[union-attr]
            self._origins[op] = walk, at
            if op.method.kv is not None:
                users.setdefault(op.key[0], set()).add(found)
        if placement is not None and set(self._groups.values()) | set(placement.homes.values()) != {group}:
            self._homes = dict(placement.homes)
        self.split = frozenset(module for module, groups in users.items() if len(groups) > 1)

    @property
    def is_alone(self) -> bool:
        """Whether nothing is ever elsewhere."""
        return not self._homes

    def home(self, request: RequestState, walk: str) -> int | None:
        """The worker that goes through a walk, if it is another."""
        return self._worker(request, self._homes[walk]) if self._homes else None

    def of(self, request: RequestState, op: Run) -> int | None:
        """The worker that runs a call, if it is another; what has been fused is here."""
        return self._worker(request, self._groups.get(op, self.group)) if self._homes else None

    def is_away(self, walk: str, op: Run) -> bool:
        """Whether a call of a walk runs in another group."""
        return bool(self._homes) and self._groups.get(op, self.group) != self.group

    def origin(self, op: Run) -> tuple[str, int]:
        """(walk, index of the op in its program)."""
        return self._origins[op]

    def op(self, walk: str, at: int) -> Run:
        """The call that `origin` named."""
        found = self._programs[walk].ops[at]
        assert isinstance(found, Run), found
        return found

    def modules(self, graph: Graph) -> set[str]:
        """The modules whose methods run here."""
        if not self._homes:
            return {node.module for node in graph.nodes}
        return {op.key[0] for op, group in self._groups.items() if group == self.group}

    def methods(self, graph: Graph) -> set[MethodKey]:
        """(module, method) of what runs here."""
        if not self._homes:
            return {(node.module, method.name) for node in graph.nodes for method in node.methods}
        return {op.key for op, group in self._groups.items() if group == self.group}

    def _worker(self, request: RequestState, group: int) -> int | None:
        return None if group == self.group else request.info.route[group]


def _runs(programs: Mapping[str, Program]) -> Iterator[tuple[str, int, Run]]:
    for walk, program in programs.items():
        for at, op in enumerate(program.ops):
            if isinstance(op, Run):
                yield walk, at, op


def names_read(program: Program) -> set[str]:
    """Names of values that a program may read from outside."""
    names = set(program.inputs) | set(program.outputs)
    for op in program.ops:
        if isinstance(op, Run):
            names |= {value for run in op.runs for _, value in run.inputs} | {op.cache or ""}
        elif isinstance(op, LoopStart):
            names |= {op.limit} if isinstance(op.limit, str) else set()
            names |= {source for source, _ in op.collect}
        elif isinstance(op, Spawn):
            names |= {op.over} | {source for source, _ in op.collect}
        elif isinstance(op, KVStep):
            names.add(getattr(op.step, "at", None) or "")
    return names
