"""How values flow through a walk: every port fed, every loop's carry closed, no branch in another's way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mstar.config import suggest
from mstar.plugin.graph import (
    Call,
    DynamicLoop,
    Each,
    Fork,
    Graph,
    Loop,
    Parallel,
    Port,
    Section,
    Sequential,
    Walk,
    When,
)
from mstar.plugin.program import written
from mstar.plugin.validate.nodes import mismatch
from mstar.plugin.validate.walks import title

_IN_EACH = "is written only inside an Each; add it to its collect"
_SKIPPED = "when a When is skipped"
_NOT_YET = "in the first iteration of a loop that carries it, for nothing feeds it before"


@dataclass(slots=True, eq=False)
class _Value:
    """Args: absent: when the value can be absent. port: the port that wrote it. is_list: of collected values."""

    absent: str = ""
    port: Port | None = None
    is_list: bool = False
    used: bool = False


@dataclass(slots=True)
class _Scope:
    """What a section can read: `values`, in an `Each` also any key of its items; `hidden`: name -> why not."""

    values: dict[str, _Value] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    any_key: bool = False

    def copy(self) -> _Scope:
        return _Scope(dict(self.values), dict(self.hidden), self.any_key)

    def hide(self, names: set[str], reason: str) -> None:
        for name in names:
            self.values.pop(name, None)
            self.hidden[name] = reason

    def write(self, name: str, value: _Value) -> None:
        self.values[name] = value
        self.hidden.pop(name, None)

    def use(self, name: str) -> None:
        """Read a name that is a value's or a request field's."""
        if name in self.values:
            self.values[name].used = True

    def read(self, name: str) -> _Value | None:
        if name in self.values:
            self.values[name].used = True
            return self.values[name]
        return _Value() if self.any_key and name not in self.hidden else None


@dataclass(slots=True)
class Flow:
    """Follows the values of one walk."""

    graph: Graph
    walk: Walk
    found: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        scope = _Scope({name: _Value() for name in self.walk.inputs})
        self.visit(self.walk.section, scope)
        for name in self.walk.outputs:
            if name not in scope.values:
                self.add(f"nothing produces its output {name!r}{self.reason(name, scope)}")
        return self.found

    def add(self, problem: str) -> None:
        self.found.append(f"walk {self.walk.name!r}: {problem}")

    def reason(self, name: str, scope: _Scope) -> str:
        return f": {name!r} {scope.hidden[name]}" if name in scope.hidden else suggest(name, scope.values)

    def visit(self, section: Section, scope: _Scope) -> None:
        if isinstance(section, Call):
            self.call(section, scope)
        elif isinstance(section, Sequential):
            for child in section.sections:
                self.visit(child, scope)
        elif isinstance(section, Parallel):
            self.parallel(section, scope)
        elif isinstance(section, When):
            self.visit(section.section, inner := scope.copy())
            for name in written(section.section, self.graph):
                scope.write(name, replace(inner.values.get(name, _Value()), absent=_SKIPPED))
        elif isinstance(section, Each):
            self.each(section, scope)
        elif isinstance(section, Loop | DynamicLoop):
            self.loop(section, scope)
        elif isinstance(section, Fork) and section.at is not None:
            scope.use(section.at)

    def call(self, call: Call, scope: _Scope) -> None:
        method = self.graph.method(call.target)
        assert method is not None, call.target
        for port in method.inputs:
            if port.name in call.receives:
                continue
            name = call.inputs.get(port.name, port.name)
            where = f"{call.target}: input port {port.name!r}"
            value = scope.read(name)
            if value is None:
                wanted = scope.hidden.get(name, _IN_EACH) != _IN_EACH  # at another time the port would see it
                if not port.optional or port.name in call.inputs or wanted:
                    self.add(f"{where} is not fed: no value {name!r} by then{self.reason(name, scope)}")
            elif value.absent and not port.optional:
                self.add(f"{where} is not always fed: {name!r} is absent {value.absent}; make the port optional")
            elif value.port is not None and (wrong := mismatch(value.port, port)):
                self.add(f"{where} does not fit the output port {value.port.name!r} that feeds it: {wrong}")
        for port in method.outputs:
            scope.write(call.outputs.get(port.name, port.name), _Value(port=port))

    def parallel(self, section: Parallel, scope: _Scope) -> None:
        writes = [set(written(branch, self.graph)) for branch in section.sections]
        inners = []
        for index, branch in enumerate(section.sections):
            others = set[str]().union(*(w for i, w in enumerate(writes) if i != index))
            for name in sorted(writes[index] & others):
                self.add(f"two branches of a Parallel write value {name!r}; rename one through outputs")
            inner = scope.copy()
            inner.hide(others - writes[index], "is written by another branch of the same Parallel")
            self.visit(branch, inner)
            inners.append(inner)
        for names, inner in zip(writes, inners, strict=True):
            for name in names & inner.values.keys():
                scope.write(name, inner.values[name])

    def each(self, section: Each, scope: _Scope) -> None:
        where = title(section)
        over = scope.read(section.over)
        if over is None:
            self.add(f"{where}: there is no such value by then{self.reason(section.over, scope)}")
        elif over.absent:
            self.add(f"{where}: the value is absent {over.absent}")
        inner = scope.copy()
        inner.any_key = scope.any_key or over is None or not over.is_list
        inner.write(section.over, _Value())
        self.visit(section.section, inner)
        body = set(written(section.section, self.graph))
        scope.hide(body - scope.values.keys(), _IN_EACH)
        self.collect(section.collect, body, where, scope)

    def loop(self, section: Loop | DynamicLoop, scope: _Scope) -> None:
        where = title(section)
        count = section.count if isinstance(section, Loop) else section.limit
        if isinstance(count, str):
            scope.use(count)
        body = set(written(section.section, self.graph))
        carried = {name: self.carried(name, scope) for name in section.carry}
        for name in section.carry:
            if name not in body:
                self.add(f"{where}: its body does not write {name!r}, which it carries{suggest(name, body)}")
        first, last = scope.copy(), _Scope()
        for _ in range(2):  # the second time around, the carried values are those the body left behind
            inner = first.copy()
            inner.hide(body - {*section.carry}, "is written later in the loop's body; add it to the loop's carry")
            for name, value in carried.items():
                inner.write(name, value)
            self.visit(section.section, inner)
            for name, value in carried.items():
                if name in body and not value.used:
                    self.add(f"{where}: it carries {name!r}, but its body writes that before reading it")
            carried = {name: replace(inner.values.get(name, _Value()), used=False) for name in section.carry}
            last = inner
        for name in body & last.values.keys():
            scope.write(name, last.values[name])
        self.collect(section.collect, body, where, scope)

    def carried(self, name: str, scope: _Scope) -> _Value:
        """The value a loop begins with; absent where nothing feeds it, which only optional ports accept."""
        value = scope.read(name)
        return replace(value, used=False) if value is not None else _Value(absent=_NOT_YET)

    def collect(self, names: Mapping[str, str], body: set[str], where: str, scope: _Scope) -> None:
        for name, target in names.items():
            if name not in body:
                self.add(f"{where}: its body does not write {name!r}, which it collects{suggest(name, body)}")
            scope.write(target, _Value(is_list=True))
