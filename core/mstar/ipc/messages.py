"""What crosses between the server's engine and a worker: one struct per message, nothing else.

Values may hold tensors (see `ipc.tensors`), numbers, strings, None, and lists and dicts of those.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from mstar.types import Path, SamplingParams

# ---- engine -> worker -----------------------------------------------------------------------------------


class Open(Struct, tag=True, frozen=True, kw_only=True):
    """A request has been admitted; its walks follow.

    `arrival` orders requests (oldest first); `params` is the task's params struct as built-in types; `route` has the
    worker that serves it in each group, and is empty where there is only one.
    """

    request_id: str
    task: str
    seed: int
    arrival: float
    params: dict[str, Any]
    fields: dict[str, int]
    samplers: dict[str, SamplingParams]
    sampler_prompts: dict[str, list[Any]]
    content_keys: dict[str, list[tuple[int, int, bytes]]]
    outputs: tuple[str, ...] = ()
    session: str | None = None
    resumed: bool = False  # the session was open already
    route: tuple[int, ...] = ()  # group -> the worker that serves it; (): all in one


class Begin(Struct, tag=True, frozen=True, kw_only=True):
    """Start `walk` on `lane`; lanes of one request that start together come in one message."""

    request_id: str
    walks: dict[str, str]  # lane -> walk
    inputs: dict[str, Any]


class StopAt(Struct, tag=True, frozen=True, kw_only=True):
    """End the dynamic loops of one item after their iteration: the client's side found a stop string.

    What comes out meanwhile is cut there, by token index.
    """

    request_id: str
    path: Path
    reason: str = "stop"


class Abort(Struct, tag=True, frozen=True, kw_only=True):
    """The client is gone, or a deadline passed: free everything, say nothing."""

    request_id: str


class Close(Struct, tag=True, frozen=True, kw_only=True):
    """All lanes have ended: free the request, or keep what its session needs."""

    request_id: str


class DropSession(Struct, tag=True, frozen=True, kw_only=True):
    """A session has expired or was deleted."""

    session: str


class Shutdown(Struct, tag=True, frozen=True, kw_only=True):
    """Stop the worker after the current step."""


# ---- worker -> worker: of one request, between the workers of its route ----------------------------------


class Feed(Struct, tag=True, frozen=True, kw_only=True):
    """What one lane tells another, elsewhere, that reads its stream.

    `event`: "open" (a scope that feeds it has begun at `path`; `value` has what the reader sees of the walk's values),
    "items" (`value`, (k, ...)), "close" (the stream at `path` has ended), "item" (an Each item of the feeding walk has
    ended), "over" (the walk can open no more scopes). `groups` are the Eaches around it, outermost first: (where its
    lane lives, number of the Each there, its items, which of them).
    """

    request_id: str
    stream: str
    event: Literal["open", "items", "close", "item", "over"]
    path: Path = ()
    groups: tuple[tuple[int, int, int, int], ...] = ()
    value: Any = None


class Call(Struct, tag=True, frozen=True, kw_only=True):
    """Run a method here for a walk that lives elsewhere: op `at` of the walk's program, before anything is fused.

    `number` tells the caller's calls apart; (`lane`, `path`, `ordinal`) is the scope; `chunks` has stream chunks by
    port: (items, num_new, first, final, start).
    """

    request_id: str
    caller: int
    number: int
    walk: str
    at: int
    lane: str
    path: Path
    ordinal: int
    iteration: int
    inputs: dict[str, Any]
    chunks: dict[str, tuple[Any, int, bool, bool, int]] = {}
    content_key: bytes | None = None
    awaits: bool = False  # its sequence is on its way
    is_ahead: bool = False  # the caller will go on with its sequence: offer that to it at once


class Returned(Struct, tag=True, frozen=True, kw_only=True):
    """What a Call gave, by port; `rows` are the ports whose value is one row of a batch."""

    request_id: str
    number: int
    values: dict[str, Any]
    rows: tuple[str, ...]
    counts: dict[str, int]
    stop_reason: str | None = None
    is_cached: bool = False
    parcels: dict[str, tuple[int, int]] = {}  # port -> (worker, number) of the Parcel that has its value


class ScopeStep(Struct, tag=True, frozen=True, kw_only=True):
    """What a walk elsewhere does to a scope that has something here.

    `step`: "fork" (label `source` into `new`, cut to `at`), "alias", "drop" (label `new`; these two of every module, or
    of `module`), "free" (the scope has ended).
    """

    request_id: str
    step: Literal["fork", "alias", "drop", "free"]
    lane: str
    path: Path
    ordinal: int
    new: str = ""
    source: str = ""
    source_path: Path | None = None  # None: the scope itself
    source_ordinal: int = 0
    module: str | None = None
    at: Any = None


class SendPages(Struct, tag=True, frozen=True, kw_only=True):
    """Give worker `to` a copy of a sequence that is here; its next call there waits for it."""

    request_id: str
    to: int
    lane: str
    path: Path
    ordinal: int
    module: str
    label: str


class Offer(Struct, tag=True, frozen=True, kw_only=True):
    """A sequence on its way: all but what is in its pages. The receiver says by Want which tokens it lacks.

    Ahead of its call's end it is what it will be; the receiver says nothing if it has no room.
    """

    request_id: str
    sender: int
    lane: str
    path: Path
    ordinal: int
    module: str
    label: str
    sequence: dict[str, Any]  # fields of `kv_pool.Sequence`
    is_ahead: bool = False


class Want(Struct, tag=True, frozen=True, kw_only=True):
    """Send the pages of what was offered, from token `start` on (the first of a page); `number`: in parts, ahead.

    `turn`: how often the receiver has asked before, and given up the room.
    """

    request_id: str
    to: int
    lane: str
    path: Path
    ordinal: int
    module: str
    label: str
    start: int
    number: int = 0
    turn: int = 0


class Pages(Struct, tag=True, frozen=True, kw_only=True):
    """Contents of a sequence's pages from token `start` on: (2, layers, pages, kv heads, page size, head dim).

    `number` is that of a Want: then it may be a part, with layers from `first_layer` on, and the last part has
    `sequence`, as an Offer. `turn` is that of the Want too.
    """

    request_id: str
    lane: str
    path: Path
    ordinal: int
    module: str
    label: str
    start: int
    content: Any
    number: int = 0
    turn: int = 0
    first_layer: int = 0
    sequence: dict[str, Any] | None = None


class AskSteps(Struct, tag=True, frozen=True, kw_only=True):
    """Worker `sender` waits for memory, with all it could run. It would know how many steps the other has run."""

    sender: int


class Steps(Struct, tag=True, frozen=True, kw_only=True):
    """The answer of worker `sender`, between two steps."""

    sender: int
    steps: int


Between = Feed | Call | Returned | ScopeStep | SendPages | Offer | Want | Pages

ToWorker = Open | Begin | StopAt | Abort | Close | DropSession | Shutdown | Between | AskSteps | Steps

# ---- worker -> engine -----------------------------------------------------------------------------------


class Compiled(Struct, frozen=True, kw_only=True):
    """How many methods run as compiled code, how many artifacts (kernels too) were built for it, how long it took."""

    num_methods: int = 0
    num_built: int = 0
    seconds: float = 0.0


class Ready(Struct, tag=True, frozen=True, kw_only=True):
    """The worker can answer. `plan` has one line per component: (name, weights bytes, kv bytes, kv tokens).

    `max_model_len` is the most tokens of one sequence: what was configured, or what the KV cache holds; `ranks` are the
    processes of its further ranks.
    """

    plan: list[tuple[str, int, int, int]]
    max_model_len: int
    compiled: Compiled = Compiled()
    ranks: tuple[int, ...] = ()


class Emit(Struct, tag=True, frozen=True, kw_only=True):
    """A value for the client (see `types.Emission`); released in item order. `parcel`: its value is in that one."""

    request_id: str
    name: str
    path: Path
    value: Any = None
    final: bool = False
    reason: str | None = None
    parcel: tuple[int, int] | None = None


class Parcel(Struct, tag=True, frozen=True, kw_only=True):
    """A large value for the client from a worker that is not the walk's: an Emit of that will name it, or has."""

    request_id: str
    number: int  # of this worker's
    value: Any


class WalkDone(Struct, tag=True, frozen=True, kw_only=True):
    """A walk has ended on its lane.

    `outputs` are the walk's named outputs; `reasons` says why each item's last dynamic loop ended; `counters` and
    `counts` hold, for the whole request so far, how often each "node.method" ran and what nodes counted.
    """

    request_id: str
    lane: str
    walk: str
    outputs: dict[str, Any]
    reasons: dict[str, str]  # path as "0.2", "" for ()
    counters: dict[str, int]
    counts: dict[str, int]


class Failed(Struct, tag=True, frozen=True, kw_only=True):
    """One request failed; it has been freed on the worker."""

    request_id: str
    message: str
    status: int = 500
    param: str | None = None
    code: str | None = None


class Stats(Struct, tag=True, frozen=True, kw_only=True):
    """A snapshot, sent when it changes and at most every 100 ms."""

    running: int
    waiting: int
    steps: int
    pools: dict[str, tuple[int, int]]  # module -> (pages used, pages in all)
    slots_used: int
    swapped: int
    swaps: int
    cache_hit_tokens: int
    cache_queried_tokens: int
    method_s: dict[str, tuple[int, int, float]]  # "module.method" -> (calls, rows, seconds)
    encoder_cache: tuple[int, int, int] = (0, 0, 0)  # calls looked up, found; bytes held


class Beat(Struct, tag=True, frozen=True, kw_only=True):
    """A step lasts: for so long already. Sent while it goes on, and once more, with 0 s, when it is over.

    `step` is "module.method", or says which of the worker's own work it is, also before it is ready.
    """

    step: str
    seconds: float


class Dead(Struct, tag=True, frozen=True, kw_only=True):
    """The worker cannot go on (start-up failed, or its loop broke)."""

    reason: str


# ---- from whoever stands between an engine and several workers -----------------------------------------------------


class Capacity(Struct, tag=True, frozen=True, kw_only=True):
    """How many requests may run at once from now on; if none, why."""

    most_running: int
    missing: str | None = None


class SessionLost(Struct, tag=True, frozen=True, kw_only=True):
    """The worker that kept a session has ended."""

    session: str


FromWorker = Ready | Emit | Parcel | WalkDone | Failed | Stats | Beat | Dead | Capacity | SessionLost

# ---- between the two ends of a channel between processes -----------------------------------------------------------


class Peers(Struct, tag=True, frozen=True, kw_only=True):
    """The inboxes of the workers that live, by worker: whoever is not there has ended."""

    addresses: dict[int, str]


Message = ToWorker | FromWorker | Peers


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One of several workers, for an operator.

    `state` is "loading", "ready", "restarting" or "dead"; `group` and `role` are its group's name and what it runs;
    `detail` says what it is at, or how its last process ended; `ranks` are the processes of its further ranks.
    """

    worker: int
    state: str
    pid: int | None
    running: int
    restarts: int
    group: str
    role: str
    detail: str | None = None
    ranks: tuple[int, ...] = ()
