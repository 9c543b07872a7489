"""What a worker knows of its requests: lanes, scopes, cursors, tenants, and the work they are ready for.

    Request -> Lane (one chain of walks) -> Cursor (a place in a program) -> Work (its turn at a method)
    Scope   owns what one Each item (or a whole lane) has on the device: sequences, slot rows, host states
    Tenant  is what is swapped as one: every lane's scopes of a request, or of one item of its outermost Each

Data only; the router changes it, the scheduler and the runner read it. Owned by the worker's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor

from mstar.ipc.messages import Emit, Offer, Open
from mstar.plugin.nodes import StreamChunk, Task
from mstar.plugin.program import LoopStart, MethodKey, Program, Run
from mstar.plugin.states import RequestView
from mstar.types import Path
from mstar.worker.kv_pool import Sequence
from mstar.worker.slots import SavedRow
from mstar.worker.streams import StreamBuffer
from mstar.worker.tape import Later, now


class Batched:
    """A batched output, split into rows on the host once, when the first of them is needed there.

    Attributes:
        given: the tensor, or what it will be.
        copy: the same on the host, if it is there already.
    """

    __slots__ = ("_host_rows", "copy", "given")

    def __init__(self, given: Tensor | Later, *, copy: Tensor | None = None) -> None:
        self.given, self.copy = given, copy
        self._host_rows: tuple[Tensor, ...] | None = None

    @property
    def tensor(self) -> Tensor:
        """Waits for it."""
        return now(self.given)  # type: ignore[no-any-return]

    def host_row(self, index: int) -> Tensor:
        if self._host_rows is None:
            self._host_rows = (self.tensor.cpu() if self.copy is None else self.copy).unbind(0)
        return self._host_rows[index]

    def rows(self, index: Iterable[int]) -> list[Row]:
        """The `Row`s at `index`, made without a call of Python code for each."""
        return list(map(tuple.__new__, repeat(Row), zip(repeat(self), index, strict=False)))


class Row(NamedTuple):
    """One task's row of a batched output, not split off before somebody needs it alone."""

    batch: Batched
    at: int

    @property
    def tensor(self) -> Tensor:
        return self.batch.tensor[self.at]


class Parceled(NamedTuple):
    """A value that another worker sends to the engine by itself, in a `Parcel`."""

    worker: int
    number: int


def plain(value: Any) -> Any:
    """The value itself, for what may be a `Row`."""
    return value.tensor if type(value) is Row else value


def add_counts(counters: dict[str, int], counts: Iterable[tuple[str, int]]) -> None:
    """Add amounts to counters by name."""
    for name, amount in counts:
        counters[name] = counters.get(name, 0) + amount


def settled(value: Any) -> Any:
    """The value with no `Row` anywhere in it."""
    if isinstance(value, Mapping):
        return {key: settled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [settled(item) for item in value]
    return plain(value)


Label = tuple[str, str]
"""(module, label)."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A sequence on its way here from another worker.

    Args:
        offer: what it is, once that is known.
        is_asked: there is room for it, and its pages have been asked for.
        turn: how often that was given up before.
    """

    offer: Offer | None = None
    is_asked: bool = False
    is_here: bool = False
    turn: int = 0


@dataclass(slots=True, eq=False)
class Coming:
    """A sequence that comes from another worker while a call there still writes it (`ahead_pages`).

    Args:
        number: of its transfer.
    """

    number: int
    is_complete: bool = False


@dataclass(slots=True, eq=False)
class Leaving:
    """The sequence of a call that runs here for a walk elsewhere, which goes on with it there.

    Args:
        to: that worker.
        work: the call.
        number: of the transfer; 0: it has not been asked for.
        start: first token that has not been sent in all layers, the first of a page.
        num_layers: what the running step has written so far; `num_sent` of them have been sent.
    """

    to: int
    work: Work
    is_offered: bool = False
    number: int = 0
    start: int = 0
    num_layers: int = 0
    num_sent: int = 0


@dataclass(slots=True, eq=False)
class Scope:
    """What one lane keeps on the device at one path.

    Args:
        lane: its name.
        sequences: (module, label) -> sequence; an Alias is a second label of the same one.
        rows: module -> row in its slot pool.
        states: module -> the node's host state.
        ordinal: how many scopes the lane had at this path before: each draws its own numbers.
        draw_key: for noise, see `layers.sampling.draw_key`.
        guests: other workers that have something of it.
        holders: (module, label) -> the workers that have the sequence as it is now; labels of one sequence share it.
        arrivals: (module, label) -> what is on its way here.
        coming, leaving: (module, label) -> what goes from worker to worker while it is written.
    """

    lane: str
    path: Path
    request: RequestState
    tenant: Tenant
    draw_key: int
    ordinal: int = 0
    sequences: dict[Label, Sequence] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    saved_rows: dict[str, SavedRow] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    guests: list[int] = field(default_factory=list)
    holders: dict[Label, set[int]] = field(default_factory=dict)
    arrivals: dict[Label, Arrival] = field(default_factory=dict)
    coming: dict[Label, Coming] = field(default_factory=dict)
    leaving: dict[Label, Leaving] = field(default_factory=dict)

    def distinct(self, module: str) -> list[Sequence]:
        """The module's sequences, aliases once."""
        return list({id(s): s for (m, _), s in self.sequences.items() if m == module}.values())


@dataclass(slots=True, eq=False)
class Tenant:
    """What is preempted as one.

    Args:
        order: (arrival, item); the least is the oldest. Idle sessions have an infinite arrival.
        is_swapped: its pages and rows are on the host.
        forgotten: (module, scope, sequence) to be recomputed once it is brought back.
        num_rebuilding: sequences still to be recomputed before its work can go on.
        in_flight: tasks in a step that has been launched and not finished.
    """

    request: RequestState
    order: tuple[float, int]
    scopes: list[Scope] = field(default_factory=list)
    is_swapped: bool = False
    forgotten: list[tuple[str, Scope, Sequence]] = field(default_factory=list)
    num_rebuilding: int = 0
    in_flight: int = 0

    @property
    def item(self) -> int:
        """The item of the outermost Each; -1 for what lies outside any."""
        return self.order[1]

    @property
    def rank(self) -> tuple[float, float]:
        """Who makes room for whom: the greater for the less. Outside of an Each waits for the items, so comes last."""
        return self.order if self.item >= 0 else (self.order[0], float("inf"))


@dataclass(slots=True, eq=False)
class EachGroup:
    """The children of one Each, as far as the order of their output goes.

    Args:
        next: the item whose output goes out; that of later ones is held.
        fed: in a fed lane, the items whose feeding scope has ended.
        number: tells it from all others of this worker.
    """

    size: int
    next: int = 0
    done: set[int] = field(default_factory=set)
    held: dict[int, list[Emit]] = field(default_factory=dict)
    fed: set[int] = field(default_factory=set)
    number: int = field(default_factory=itertools.count().__next__)


Groups = tuple[tuple[EachGroup, int], ...]
"""The Eaches around a cursor, outermost first, with its item in each."""

GroupKeys = tuple[tuple[int, int, int, int], ...]
"""The same for another worker: (worker, number, size, item)."""


@dataclass(slots=True, eq=False)
class Frame:
    """A loop a cursor is in. `reason` is set when the loop must end after this iteration."""

    op: LoopStart
    limit: int | None
    iteration: int = 0
    reason: str | None = None
    collected: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Cursor:
    """A place in a program.

    Args:
        env: the values it sees, by name; branches and children start with a copy of their parent's.
        written: names a branch has written, merged into its parent at the join.
        index: which branch or item of its parent it is.
        iteration: of the loop around its Each or Parallel, for use outside loops of its own.
        pending: children that have not joined yet; `results` holds their values to collect.
        chunks: what it has taken from streams while it waits for others.
        ahead: the next work, queued or launched before the current one has finished.
        waiting: what it will start when an ordered Each goes on.
    """

    lane: Lane
    scope: Scope
    groups: Groups
    pc: int
    env: dict[str, Any]
    parent: Cursor | None = None
    index: int = 0
    iteration: int = 0
    loops: list[Frame] = field(default_factory=list)
    written: dict[str, None] = field(default_factory=dict)
    pending: int = 0
    results: list[Cursor] = field(default_factory=list)
    waiting: list[Cursor] = field(default_factory=list)
    chunks: dict[str, StreamChunk] = field(default_factory=dict)
    reason: str | None = None
    work: Work | None = None
    ahead: Work | None = None
    is_done: bool = False

    @property
    def current_iteration(self) -> int:
        return self.loops[-1].iteration if self.loops else self.iteration


@dataclass(slots=True, eq=False)
class Lane:
    """A chain of walks. `is_fed`: its cursors are started by the scopes of the walks that feed its streams.

    Args:
        scope: the outermost scope, which its walks share one after the other.
        live: cursors at its outermost level that have not ended.
        feeders: walks that can still start cursors of this lane.
        groups: (worker, number) of a feeding lane's EachGroup -> this lane's own.
        ended: its ended outermost cursors, by path.
        reasons: path, as "0.2" -> why its last dynamic loop ended.
        stops: paths whose loops the client's side wants ended -> why.
    """

    request: RequestState
    name: str
    program: Program
    scope: Scope | None = None
    live: dict[Path, Cursor] = field(default_factory=dict)
    feeders: int = 0
    is_fed: bool = False
    groups: dict[tuple[int, int], EachGroup] = field(default_factory=dict)
    ended: dict[Path, Cursor] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    stops: dict[Path, str] = field(default_factory=dict)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class RequestState:
    """One admitted request, or the part of it that is here.

    Args:
        walks: lane -> its walk, of lanes elsewhere too.
    """

    info: Open
    view: RequestView
    arrival: float
    kept_scopes: dict[str, Scope] = field(default_factory=dict)  # lane -> what its session left
    tenants: dict[int, Tenant] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    walks: dict[str, str] = field(default_factory=dict)
    buffers: dict[tuple[str, Path], StreamBuffer] = field(default_factory=dict)
    waiters: dict[tuple[str, Path], Cursor] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    budgets: dict[str, int] = field(default_factory=dict)
    num_scopes: dict[tuple[str, Path], int] = field(default_factory=dict)  # (lane, path) -> made so far
    runtime_s: float = 0.0  # its share of measured step time, for fairness
    is_dead: bool = False

    def tenant(self, path: Path) -> Tenant:
        """The tenant that holds what lies at `path`."""
        item = path[0] if path else -1
        if item not in self.tenants:
            self.tenants[item] = Tenant(self, (self.arrival, item))
        return self.tenants[item]

    def scope(self, lane: str, path: Path, ordinal: int) -> Scope | None:
        """The scope that a lane, here or elsewhere, has here."""
        tenant = self.tenants.get(path[0] if path else -1)
        named = (scope for scope in tenant.scopes if scope.lane == lane) if tenant is not None else ()
        return next((scope for scope in named if scope.path == path and scope.ordinal == ordinal), None)


@dataclass(slots=True, eq=False)
class Work(Task):
    """A task with what the engine needs besides: made by the router, reserved by the scheduler, run by the runner.

    Args:
        total: tokens in all its chunks; `num_tokens` are this step's.
        sequence: the KV history it reads or extends.
        row: in the module's slot pool.
        ids: what it writes, where ids alone tell it, with `content`: the keys of spans they do not tell.
        spans: bidirectional spans of the whole task, (n, 2).
        token_outputs: port -> what earlier chunks gave.
        undo: takes back what a launched step did for this work alone; set by the runner.
        is_rebuild: rewrites a preempted sequence from its ids; outputs and samples are dropped.
        content_key: of a call whose outputs are cached; `is_cached`: they were there, and it has not run.
        reply: (worker, number) of the walk's call, where the walk lives elsewhere.
        arrival: of the sequence it waits for.
        leaving: how its sequence leaves while it runs.
        ran_at: the worker that runs it, where its module's sequences move between workers; None: this one.
        has_moved: its sequence was not there before.
    """

    request: RequestState = None  # type: ignore[assignment]
    cursor: Cursor = None  # type: ignore[assignment]
    op: Run = None  # type: ignore[assignment]
    key: MethodKey = ("", "")
    scope: Scope = None  # type: ignore[assignment]
    label: str = ""
    total: int = 0
    sequence: Sequence | None = None
    row: int = 0
    ids: list[int] | None = None
    content: list[Any] = field(default_factory=list)
    spans: Any = None
    shape_key: Any = None
    token_outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    undo: Callable[[], None] | None = None
    is_rebuild: bool = False
    is_cancelled: bool = False
    content_key: bytes | None = None
    is_cached: bool = False
    reply: tuple[int, int] | None = None
    arrival: Arrival | None = None
    leaving: Leaving | None = None
    ran_at: int | None = None
    has_moved: bool = False
