"""Which group of workers runs which methods of a graph, read from a placement file. Pure data, imports no torch.

A group has replicas; a replica is one worker, and with tensor parallelism as many processes. Read in the server's
process and in every worker's; nothing here starts or talks to one.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta, Struct

from mstar.config import EngineConfig, num_cores, read_yaml, suggest
from mstar.errors import ConfigError
from mstar.plugin import graph as parts
from mstar.plugin.graph import Graph
from mstar.plugin.spec import ModelSpec, Task

EVERYTHING = "*"
_MOST_WORKERS = 64

Key = tuple[str, str, str]
"""(walk, node, method). In a file's entries a part that is not named is empty."""
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")]
Count = Annotated[int, Meta(ge=1, le=_MOST_WORKERS)]


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that run the same methods, side by side.

    Args:
        name: for people; "group 0" and so on, if there is none.
        nodes: what they run: "node", "node.method", "walk/node", "walk/node.method", or "*", which takes the rest.
        devices: one per process, replica by replica; or one for all; empty: as where no placement is given.
        tensor_parallel: processes of a replica.
        threads: of each process, on a CPU.
    """

    nodes: Annotated[tuple[str, ...], Meta(min_length=1)]
    name: str = ""
    replicas: Count = 1
    devices: tuple[Device, ...] = ()
    tensor_parallel: Count = 1
    threads: Annotated[int, Meta(ge=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker.

    Args:
        index: among all workers.
        process: of its first process, among all processes.
        group, name: its group.
        devices: one per process; empty: as where no placement is given.
    """

    index: int
    process: int
    group: int
    name: str
    replica: int
    devices: tuple[str, ...] = ()
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Groups, and what each runs of one graph.

    Args:
        calls: every call of a walk -> the group that runs it.
        modules: node -> module.
        homes: walk -> the group whose worker interprets it; the same for all walks that follow each other on a lane.
    """

    groups: tuple[Group, ...]
    calls: Mapping[Key, int] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    homes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, groups: Sequence[Group], graph: Graph, *, tasks: Mapping[str, Task] = MappingProxyType({}),
        source: str = "placement",
    ) -> Placement:  # fmt: skip
        """Place a graph's calls. Raises ConfigError, which begins with `source`.

        Args:
            tasks: of the model, those with sessions among them.
        """
        named = tuple(msgspec.structs.replace(g, name=g.name or f"group {n}") for n, g in enumerate(groups))
        _check_groups(named, source)
        calls = _placed(named, graph, source)
        chains = _chains(graph, tasks)
        homes = {walk: home for chain in chains for home in [_home(chain, graph, calls)] for walk in chain}
        modules = {node.name: node.module for node in graph.nodes}
        return cls(groups=named, calls=calls, modules=modules, homes=homes)

    @classmethod
    def of_workers(cls, number: int, graph: Graph) -> Placement:
        """Equal workers, each with everything."""
        return cls.of([Group(name="all", nodes=(EVERYTHING,), replicas=number)], graph)

    @classmethod
    def wanted(cls, config: EngineConfig, spec: ModelSpec, graph: Graph) -> Placement:
        """What --placement, or else --workers, asks for. Raises ConfigError."""
        if config.placement is None:
            return cls.of_workers(max(1, config.workers), graph)
        path = locate(config.placement, spec)
        return cls.of(read(path), graph, tasks=spec.tasks, source=f"--placement {path}")

    @property
    def num_replicas(self) -> int:
        """How many requests may run at once that take a whole worker each: those of the smallest group."""
        return min(group.replicas for group in self.groups)

    @property
    def num_processes(self) -> int:
        return sum(group.replicas * group.tensor_parallel for group in self.groups)

    @property
    def workers(self) -> list[WorkerPlace]:
        """All workers, group by group."""
        found: list[WorkerPlace] = []
        process = 0
        for index, group in enumerate(self.groups):
            ranks = group.tensor_parallel
            devices = group.devices * (group.replicas * ranks) if len(group.devices) == 1 else group.devices
            for replica in range(group.replicas):
                found.append(
                    WorkerPlace(
                        index=len(found), process=process, group=index, name=group.name, replica=replica,
                        devices=devices[replica * ranks : (replica + 1) * ranks], threads=group.threads,
                    )
                )  # fmt: skip
                process += ranks
        return found

    def role_of(self, group: int) -> str:
        """What a group runs, for people."""
        rest = "everything" if len(self.groups) == 1 else "everything else"
        return ", ".join(rest if entry == EVERYTHING else entry for entry in self.groups[group].nodes)

    def group_of(self, walk: str, node: str, method: str) -> int:
        """Which group runs a call."""
        return self.calls[walk, node, method]

    def modules_of(self, group: int) -> frozenset[str]:
        """What a group loads. A single group loads all that the graph names."""
        if len(self.groups) == 1:
            return frozenset(self.modules.values())
        return frozenset(self.modules[node] for (_, node, _), g in self.calls.items() if g == group)


# ---- files ------------------------------------------------------------------------------------------------------


def examples(spec: ModelSpec) -> dict[str, Path]:
    """A plugin's own placement files, by short name: those in `placements` of its package."""
    found = importlib.util.find_spec(spec.config.partition(":")[0].partition(".")[0])
    folders = [Path(place) / "placements" for place in (found.submodule_search_locations or ())] if found else []
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def locate(name: str, spec: ModelSpec) -> Path:
    """The file that --placement names: one of the plugin's by its short name, or a path. ConfigError if neither is."""
    own = examples(spec)
    path = own.get(name, Path(name).expanduser())
    if not path.is_file():
        known = ", ".join(own) or "none"
        raise ConfigError(f"--placement {name} is neither a file nor a placement of {spec.name!r}; those are: {known}")
    return path


def read(path: Path) -> tuple[Group, ...]:
    """The groups of a placement file. Raises ConfigError that names file, key, value and what is expected."""
    source = f"--placement {path}"
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}; give a readable YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        hint = "; write '*' in quotes" if "alias" in str(error) else ""
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}{hint}") from error
    entries = content.get("groups") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{source}: expected 'groups:' and a list of groups, each with 'nodes:'")
    _check_keys(content, ("groups",), source)
    return tuple(_group(entry, f"groups[{index}]", source) for index, entry in enumerate(entries))


def _check_keys(given: dict[Any, Any], known: tuple[str, ...], at: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{at}: unknown key {key!r}{suggest(str(key), known)}")


def _group(entry: Any, key: str, source: str) -> Group:
    if not isinstance(entry, dict):
        raise ConfigError(f"{source}: {key} is {entry!r}; expected a mapping with {', '.join(Group.__struct_fields__)}")
    _check_keys(entry, Group.__struct_fields__, f"{source}: {key}")
    try:
        return msgspec.convert(entry, Group)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        value = entry
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", where):
            value = value[name or int(index)]
        problem = problem.replace("`array`", "a list").replace("got `str`", "got a text")
        if "regex" in problem:
            problem = "expected auto, cpu, cuda or cuda:N"
        shown = f"{key}{where.rstrip('`')}" + (f" is {value!r}" if where else "")
        raise ConfigError(f"{source}: {shown}: {problem[0].lower()}{problem[1:]}") from error


def _check_groups(groups: tuple[Group, ...], source: str) -> None:
    names = Counter(group.name for group in groups)
    total = sum(group.replicas * group.tensor_parallel for group in groups)
    if total > _MOST_WORKERS:
        raise ConfigError(f"{source}: it takes {total} processes; at most {_MOST_WORKERS}; lower replicas")
    for index, group in enumerate(groups):
        at = f"{source}: groups[{index}]"
        if names[group.name] > 1:
            raise ConfigError(f"{at}.name is {group.name!r}, as another's; give each its own")
        processes = group.replicas * group.tensor_parallel
        if len(group.devices) not in (0, 1, processes):
            wanted = f"{processes} (replicas times tensor_parallel), one for all of them, or none"
            raise ConfigError(f"{at}.devices names {len(group.devices)} devices; expected {wanted}")
        if group.threads is not None and group.threads > num_cores():
            limit = f"at most {num_cores()}, the cores that this process may use; leave it out for the default"
            raise ConfigError(f"{at}.threads is {group.threads}; it must be {limit}")


# ---- what runs where --------------------------------------------------------------------------------------------


def _calls(walk: parts.Walk) -> list[parts.Call]:
    return parts.calls(walk.section)


def _placed(groups: tuple[Group, ...], graph: Graph, source: str) -> dict[Key, int]:
    """Every call of a walk -> its group: that of the narrowest entry."""
    entries: dict[Key, tuple[int, str]] = {}
    for index, group in enumerate(groups):
        for number, text in enumerate(group.nodes):
            at = f"groups[{index}].nodes[{number}]"
            key = _entry(text, graph, f"{source}: {at} is {text!r}")
            if key in entries:
                raise ConfigError(f"{source}: {at} is {text!r}, as is {entries[key][1]}; keep one of them")
            entries[key] = index, at
    calls: dict[Key, int] = {}
    missing: dict[str, list[str]] = {}
    for walk in graph.walks:
        for call in _calls(walk):
            node, method = call.node, call.method
            wider = ((walk.name, node, ""), ("", node, method), ("", node, ""), ("", EVERYTHING, ""))
            found = next((entries[key] for key in ((walk.name, node, method), *wider) if key in entries), None)
            if found is None:
                missing.setdefault(call.target, []).append(walk.name)
            else:
                calls[walk.name, node, method] = found[0]
    if missing:
        listed = "; ".join(f"{target} (in {', '.join(dict.fromkeys(walks))})" for target, walks in missing.items())
        raise ConfigError(f"{source}: no group has {listed}; name them, or give one group nodes: ['{EVERYTHING}']")
    for index, group in enumerate(groups):
        if index not in calls.values():
            raise ConfigError(f"{source}: groups[{index}] ({group.name}) has nothing to run; narrower entries take it")
    return calls


def _entry(text: str, graph: Graph, at: str) -> Key:
    """An entry of `nodes`, taken apart and found to name something."""
    walk, _, target = text.rpartition("/")
    node, _, method = target.partition(".")
    if target == EVERYTHING:
        if walk:
            raise ConfigError(f"{at}; '{EVERYTHING}' stands alone: name the walk's nodes")
        return "", EVERYTHING, ""
    within = graph.walk(walk) if walk else None
    if walk and within is None:
        raise ConfigError(f"{at}: there is no walk {walk!r}{suggest(walk, [w.name for w in graph.walks])}")
    found = graph.node(node)
    if found is None:
        raise ConfigError(f"{at}: there is no node {node!r}{suggest(node, [n.name for n in graph.nodes])}")
    if method and found.method(method) is None:
        known = suggest(method, [m.name for m in found.methods])
        raise ConfigError(f"{at}: node {node!r} has no method {method!r}{known}")
    called = {call.target for one in ([within] if within else graph.walks) for call in _calls(one)}
    if not any(target in (one, one.partition(".")[0]) for one in called):
        missing = f"walk {walk!r} does not call it" if walk else "no walk calls it"
        raise ConfigError(f"{at}: {missing}; calls: {', '.join(sorted(called))}")
    return walk, node, method


def _chains(graph: Graph, tasks: Mapping[str, Task]) -> list[list[str]]:
    """Walks that have to have one home: those that a lane may run, one after the other or in each other's place for
    one task, or for those that may go on with each other's sessions; and those that read the same stream.
    """
    alike: list[list[str]] = [[then.after, then.walk] for then in graph.states.thens]
    together: list[set[str | None]] = [{start.task} for start in graph.states.starts]
    together.append({name for name, task in tasks.items() if task.sessions})
    for alternatives in together:
        starts = [start for start in graph.states.starts if start.task is None or start.task in alternatives]
        alike += [[s.walk for s in starts if s.lane == lane] for lane in {s.lane for s in starts}]
    for stream in graph.streams:
        alike.append([w.name for w in graph.walks if any(stream.name in c.receives.values() for c in _calls(w))])
    chain = {walk.name: {walk.name} for walk in graph.walks}
    for walks in alike:
        joined = set().union(*(chain[walk] for walk in walks))
        chain.update(dict.fromkeys(joined, joined))
    order = [walk.name for walk in graph.walks]
    return [sorted(c, key=order.index) for c in {min(c, key=order.index): c for c in chain.values()}.values()]


def _home(chain: Iterable[str], graph: Graph, calls: Mapping[Key, int]) -> int:
    """The group with most of the calls that run most often, those in the innermost loops; the first of equals."""
    found: list[tuple[int, int]] = []  # loops around it, group
    for name in chain:
        walk = graph.walk(name)
        assert walk is not None
        found += [(depth, calls[name, call.node, call.method]) for call, depth in _depths(walk.section, 0)]
    deepest = max((depth for depth, _ in found), default=0)
    return Counter(group for depth, group in found if depth == deepest).most_common(1)[0][0] if found else 0


def _depths(section: parts.Section, depth: int) -> Iterator[tuple[parts.Call, int]]:
    """A section's calls, each with the number of loops around it."""
    if isinstance(section, parts.Call):
        yield section, depth
    for child in parts.children(section):
        yield from _depths(child, depth + isinstance(section, parts.Loop | parts.DynamicLoop))


# ---- state ------------------------------------------------------------------------------------------------------


def stateful_methods(node: Any, methods: Iterable[str]) -> frozenset[str]:
    """Methods of a module that share what it keeps of a request: all, if it has slots; those with hooks, if it has
    host state. `node` is the module's `Node`, which may be on the meta device.
    """
    if node.slots:
        return frozenset(methods)
    hooked = (m for m in methods if any(hasattr(node, f"{kind}_{m}") for kind in ("prepare", "finish")))
    return frozenset(hooked if node.host_state is not None else ())


def check_state(placement: Placement, stateful: Mapping[str, frozenset[str]], *, source: str = "placement") -> None:
    """Raise ConfigError if methods that share state are in several groups. `stateful`: module -> those methods."""
    for module, methods in stateful.items():
        groups: dict[int, list[str]] = {}
        for (_, node, method), group in placement.calls.items():
            if placement.modules[node] == module and method in methods:
                groups.setdefault(group, []).append(f"{node}.{method}")
        if len(groups) > 1:
            shown = ", ".join(
                f"{placement.groups[group].name} has {', '.join(dict.fromkeys(targets))}"
                for group, targets in sorted(groups.items())
            )
            what = "share what their module keeps of a request, which stays in one worker"
            raise ConfigError(f"{source}: {shown}; these {what}: put them into one group")
