"""What crosses between the server's engine and a worker: one struct per message, nothing else.

Values may hold tensors (see `ipc.tensors`), numbers, strings, None, and lists and dicts of those.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from mstar.types import Path, SamplingParams

# ---- engine -> worker -----------------------------------------------------------------------------------


class Open(Struct, tag=True, frozen=True, kw_only=True):
    """A request has been admitted; its walks follow.

    `arrival` orders requests (oldest first); `params` is the task's params struct as built-in types.
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


ToWorker = Open | Begin | StopAt | Abort | Close | DropSession | Shutdown

# ---- worker -> engine -----------------------------------------------------------------------------------


class Compiled(Struct, frozen=True, kw_only=True):
    """How many methods run as compiled code, how many artifacts (kernels too) were built for it, how long it took."""

    num_methods: int = 0
    num_built: int = 0
    seconds: float = 0.0


class Ready(Struct, tag=True, frozen=True, kw_only=True):
    """The worker can answer. `plan` has one line per component: (name, weights bytes, kv bytes, kv tokens).

    `max_model_len` is the most tokens of one sequence: what was configured, or what the KV cache holds.
    """

    plan: list[tuple[str, int, int, int]]
    max_model_len: int
    compiled: Compiled = Compiled()


class Emit(Struct, tag=True, frozen=True, kw_only=True):
    """A value for the client (see `types.Emission`); released in item order."""

    request_id: str
    name: str
    path: Path
    value: Any = None
    final: bool = False
    reason: str | None = None


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


FromWorker = Ready | Emit | WalkDone | Failed | Stats | Beat | Dead | Capacity | SessionLost

# ---- between the two ends of a channel between processes -----------------------------------------------------------


class Peers(Struct, tag=True, frozen=True, kw_only=True):
    """The inboxes of the workers that live, by worker: whoever is not there has ended."""

    addresses: dict[int, str]


Message = ToWorker | FromWorker | Peers


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One of several workers, for an operator.

    `state` is "loading", "ready", "restarting" or "dead"; `detail` says what it is at, or how its last process ended.
    """

    worker: int
    state: str
    pid: int | None
    running: int
    restarts: int
    detail: str | None = None
