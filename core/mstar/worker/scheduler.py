"""Picks the next batch: one (module, method)'s ready work, with KV pages and slot rows reserved.

Shares measured time, not turns: methods by the time they have had, requests by their share of it. A method that is
ready waits for one step at most that is long beside its own. When pages run out younger tenants are moved to the host,
or forgotten and recomputed; the oldest never is. Sans-IO: `record` brings the measured time in, nothing here reads a
clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from mstar.config import EngineConfig
from mstar.errors import PluginError, RequestError
from mstar.plugin.nodes import StreamChunk
from mstar.plugin.program import MethodKey, Run
from mstar.worker.kv_pool import KVPool, Sequence
from mstar.worker.modules import Modules
from mstar.worker.state import Cursor, RequestState, Scope, Tenant, Work, plain

log = logging.getLogger("mstar.worker")

_LONG = 2.0  # times a method's own last step

_age = attrgetter("scope.tenant.order", "path")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Works of one (module, method) to run together."""

    key: MethodKey
    works: list[Work]


class Scheduler:
    """Queues of ready work by method.

    Args:
        tenants: gives every tenant of the worker, idle sessions included.
        requests: the worker's requests.
        fail: ends a request that asks for what it cannot get, such as a sampler's row; its work is discarded.
        admit: whether a work's sequence has come from another worker; given what makes room for it.
        runs_here: whether a cursor's next call runs in this worker, and on what is here already.
        give_up: has tenants younger than one give up room for what comes from other workers; `is_asked`: also what
            calls wait for.
    """

    def __init__(self, modules: Modules, *, config: EngineConfig) -> None:
        self.modules = modules
        self.config = config
        self.tenants: Callable[[], Iterable[Tenant]] = tuple
        self.requests: Mapping[str, RequestState] = {}
        self.fail: Callable[[RequestState, Exception], None]
        self.admit: Callable[[Work, Callable[[Sequence, int], bool]], bool]
        self.runs_here: Callable[[Cursor, Run], bool]
        self.give_up: Callable[..., bool] = lambda tenant, *, is_asked: False
        self.num_swaps = 0
        self.num_rebuilds = 0
        self.has_moved = False  # a tenant came back or was moved since the last call of next_batch
        self.suspended: list[Cursor] = []
        self._queues: dict[MethodKey, list[Work]] = {}
        self._runtime_s: dict[MethodKey, float] = {}
        self._step_s: dict[MethodKey, float] = {}  # what its last step took
        self._passed: set[MethodKey] = set()  # methods that were ready during a long step and have not run since
        self._least_s = 0.0  # runtime of the method that ran last: those that had nothing to do begin there
        self._share_s = 0.0  # what a request would have had, had it been here always and got its fair share

    # ---- ready work -------------------------------------------------------------------------------------

    def make_work(self, cursor: Cursor, op: Run, *, inputs: dict[str, Any], chunks: dict[str, StreamChunk]) -> Work:
        """The cursor's next work."""
        request, scope, kv = cursor.lane.request, cursor.scope, op.method.kv
        work = Work(
            request_id=request.info.request_id,
            path=scope.path,
            inputs=inputs,
            iteration=cursor.current_iteration,
            chunks=chunks,
            fields=request.info.fields,
            params=request.view.params,
            draw_key=scope.draw_key,
            request=request,
            cursor=cursor,
            op=op,
            key=op.key,
            scope=scope,
            label=kv.label if kv is not None else "",
            total=kv.tokens if kv is not None else 0,
        )
        if op.cache is not None and (key := cursor.env.get(op.cache)) is not None:
            if not isinstance(key, bytes):
                raise PluginError(f"{op.target}: its cache key {op.cache!r} is {type(key).__name__}, not bytes")
            work.content_key = key
        if kv is not None and kv.spans is not None and inputs.get(kv.spans) is not None:
            work.spans = plain(inputs[kv.spans]).tolist()
        if op.has_tokens:
            work.total = _num_tokens(work)
        if op.free_ports:
            values = [plain(inputs[port]) for port in op.free_ports]
            work.shape_key = [None if value is None else tuple(value.shape) for value in values]
        return work

    def add(self, work: Work) -> None:
        queue = self._queues.get(work.key)
        if not queue:
            queue = self._queues[work.key] = []
            self._runtime_s[work.key] = max(self._runtime_s.get(work.key, 0.0), self._least_s)
        queue.append(work)

    def cancel(self, work: Work) -> None:
        work.is_cancelled = True
        queue = self._queues.get(work.key, [])
        if work in queue:
            queue.remove(work)

    def discard(self, request: RequestState) -> None:
        """Forget all work of a request."""
        for key, queue in self._queues.items():
            self._queues[key] = [work for work in queue if work.request is not request]
        self.suspended = [cursor for cursor in self.suspended if cursor.lane.request is not request]

    def discard_scope(self, scope: Scope) -> None:
        """Forget the recomputation of what a scope no longer needs, or must begin anew."""
        for sequence in scope.sequences.values():
            self.discard_rebuild(scope.tenant, sequence)

    def discard_rebuild(self, tenant: Tenant, sequence: Sequence) -> None:
        """The same of one sequence."""
        if tenant.forgotten:
            tenant.forgotten = [entry for entry in tenant.forgotten if entry[2] is not sequence]
        if tenant.num_rebuilding:
            for work in [work for work in self.works() if work.is_rebuild and work.sequence is sequence]:
                self.cancel(work)
                tenant.num_rebuilding -= 1

    def works(self) -> Iterator[Work]:
        for queue in self._queues.values():
            yield from queue

    @property
    def has_work(self) -> bool:
        return any(self._queues.values()) or bool(self.suspended)

    def suspend(self, cursor: Cursor) -> None:
        """A cursor needs its sequences, which are on the host, for a step that is not a method's."""
        self.suspended.append(cursor)

    def take_resumable(self) -> list[Cursor]:
        """Suspended cursors whose sequences are back."""
        back = [c for c in self.suspended if not c.scope.tenant.is_swapped or self._bring_back(c.scope.tenant, [])]
        back = [c for c in back if not c.scope.tenant.num_rebuilding]
        if back:
            self.suspended = [c for c in self.suspended if c not in back]
        return back

    # ---- fairness ---------------------------------------------------------------------------------------

    @property
    def fair_share_s(self) -> float:
        """Where a new request starts, so that neither it nor the others starve, however many keep coming."""
        return self._share_s

    def record(self, batch: Batch, seconds: float) -> None:
        """Account a batch's measured time to its method and its requests."""
        self._runtime_s[batch.key] = self._runtime_s.get(batch.key, 0.0) + seconds
        self._step_s[batch.key] = seconds
        self._passed |= {
            key for key, queue in self._queues.items() if queue and _LONG * self._step_s.get(key, seconds) < seconds
        }
        self._passed.discard(batch.key)
        self._share_s += seconds / max(1, len(self.requests))
        share = seconds / len(batch.works)
        for work in batch.works:
            work.request.runtime_s += share

    # ---- the next batch ---------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """The next works to run, taken from their queue; None if nothing can run now."""
        self.has_moved = False
        ready = [key for key, queue in self._queues.items() if queue]
        if len(ready) > 1:
            ready.sort(key=self._turn)
        for key in ready:
            works = self._gather(key)
            if works:
                self._least_s = max(self._least_s, self._runtime_s[key])
                for other in ready[: ready.index(key)]:  # waiting for memory earns them neither time nor turns
                    self._runtime_s[other] = max(self._runtime_s[other], self._runtime_s[key])
                    self._passed.discard(other)
                queue, taken = self._queues[key], set(map(id, works))
                self._queues[key] = [work for work in queue if id(work) not in taken] if len(works) < len(queue) else []
                return Batch(key, works)
        return None

    def _turn(self, key: MethodKey) -> tuple[bool, float]:
        """Who sorts first runs first."""
        return (False, self._step_s[key]) if key in self._passed else (True, self._runtime_s[key])

    def victim_of_deadlock(self) -> RequestState:
        """When work is ready and nothing runs: the youngest request that holds pages which cannot be moved."""
        holding = [t for t in self.tenants() if not t.request.is_dead and self.modules.num_pages_held(t)]
        stuck = self.stuck()
        waiting = [work.scope.tenant for work in self.works()] + [cursor.scope.tenant for cursor in self.suspended]
        return max(stuck or holding or waiting, key=lambda tenant: tenant.order).request

    def stuck(self) -> list[Tenant]:
        """Those that hold pages which cannot be moved."""
        holding = [t for t in self.tenants() if not t.request.is_dead and self.modules.num_pages_held(t)]
        return [t for t in holding if not self.modules.can_swap_out(t) and not self.modules.can_forget(t)]

    def _gather(self, key: MethodKey) -> list[Work]:
        queue = self._queues[key]
        if not queue:
            return []
        method, has_tokens = queue[0].op.method, queue[0].op.has_tokens
        limit = method.max_batch or self.config.max_num_seqs
        pool = self.modules[key[0]].pool if method.kv is not None and method.kv.write else None
        if len(queue) > limit:
            queue.sort(key=lambda w: (w.request.runtime_s, w.scope.tenant.order, w.path))
        elif len(queue) > 1:
            queue.sort(key=_age)
        budget = self.config.max_num_batched_tokens
        picked: list[Work] = []
        for work in list(queue):
            if len(picked) == limit or budget <= 0:
                break
            if work.is_cancelled or (picked and work.shape_key != picked[0].shape_key):
                continue
            try:
                is_ready = self._prepare(work, budget, picked, pool)
            except Exception as error:  # noqa: BLE001  # attributed to the request
                self.fail(work.request, error)
                return self._gather(key)
            if is_ready:
                picked.append(work)
                if has_tokens:
                    budget -= work.num_tokens
        return picked

    def _prepare(self, work: Work, budget: int, picked: list[Work], pool: KVPool | None) -> bool:
        """Give a work what it needs to run now, its tokens' room in `pool` included; False: it has to wait."""
        scope = work.scope
        tenant = scope.tenant
        if tenant.is_swapped and not self._bring_back(tenant, picked):
            return False
        if tenant.num_rebuilding and not work.is_rebuild:
            return False
        op, module, sequence = work.op, work.key[0], work.sequence
        if work.arrival is not None and not self.admit(work, partial(self._reserve, work, picked=picked)):
            return False
        if sequence is None and op.method.kv is not None:
            sequence = work.sequence = self.modules.sequence(scope, module, work.label)
            if op.has_tokens:
                self._match_prefix(work)
        if op.has_tokens:
            self._cut_chunk(work, budget, is_first=not picked)
            if work.num_tokens == 0 and work.total > 0:
                return False
        else:
            work.num_tokens = work.total
        if sequence is not None:
            work.length, work.position = sequence.length, sequence.position
            end = work.length + work.num_tokens
            is_full = pool is not None and end > sequence.writable
            if is_full and not self._reserve(work, sequence, work.num_tokens, picked=picked):
                return False
        row = scope.rows.get(module)
        if row is None or work.is_rebuild:
            row = 0 if work.is_rebuild else self.modules.row(scope, module, work.request.info)
        work.row = row
        for other in op.unit.modules if op.unit is not None else ():
            self.modules.row(scope, other, work.request.info)
        if scope.states:
            work.state = scope.states.get(module)
        return True

    def _match_prefix(self, work: Work) -> None:
        """Skip what the prefix cache holds, unless outputs of skipped tokens would be missed."""
        kv, sequence = work.op.method.kv, work.sequence
        assert kv is not None and sequence is not None
        if kv.ids is None or not kv.write:
            return
        keys = self._spans(work)
        if any(not any(k[0] <= start and end <= k[1] for k in keys) for start, end in work.spans or ()):
            return  # what such a span writes depends on more than the ids before it
        if work.ids is None:
            work.ids = plain(work.inputs[kv.ids]).tolist()
            work.content = keys
        module = self.modules[work.key[0]]
        per_token = any(p.layout == "tokens" for p in work.op.method.outputs) and not work.is_rebuild
        if self.config.enable_prefix_caching and sequence.length == 0 and not per_token:
            assert module.pool is not None
            work.token_start = module.pool.match_prefix(sequence, work.ids, keys)

    @staticmethod
    def _spans(work: Work) -> list[Any]:
        """Content keys of a work's ids: of its value, or of its item's."""
        kv = work.op.method.kv
        value = dict(work.op.inputs).get(kv.ids or "", "") if kv is not None else ""
        keys = work.request.info.content_keys.get(value, [])
        if keys and not isinstance(keys[0][0], int):
            keys = keys[work.path[0]]
        return [tuple(key) for key in keys]

    def _cut_chunk(self, work: Work, budget: int, *, is_first: bool) -> None:
        """How many of a work's tokens go into this step: never part of a bidirectional span."""
        kv = work.op.method.kv
        start, end = work.token_start, min(work.total, work.token_start + budget)
        if kv is None or kv.attention == "full":
            end = work.total if is_first or work.total <= budget else start
        for span_start, span_end in work.spans or ():
            if span_start < end < span_end:
                end = span_start if span_start > start else (span_end if is_first else start)
        work.num_tokens = end - start
        work.is_last = end == work.total

    # ---- memory -----------------------------------------------------------------------------------------

    def _reserve(self, work: Work, sequence: Sequence, num_tokens: int, *, picked: list[Work]) -> bool:
        module = self.modules[work.key[0]]
        pool = module.pool
        assert pool is not None
        if not pool.reserve(sequence, num_tokens):

            def has_room(moved: list[Tenant]) -> bool:
                without = self.modules.sequences(moved, module.name)
                return pool.pages_needed(sequence, num_tokens, without=without) <= pool.num_free_without(without)

            return self._make_room(work.scope.tenant, picked, has_room) and pool.reserve(sequence, num_tokens)
        return True

    def _make_room(self, tenant: Tenant, picked: list[Work], has_room: Callable[[list[Tenant]], bool]) -> bool:
        """Move the youngest tenants, of those younger than `tenant` and not about to run; none if that is no use.

        Args:
            has_room: whether there is, without these tenants.
        """
        if self.give_up(tenant, is_asked=False) and has_room([]):
            return True
        if self._move_younger(tenant, picked, has_room):
            return True
        can_more = self.give_up(tenant, is_asked=True)
        return can_more and (has_room([]) or self._move_younger(tenant, picked, has_room))

    def _move_younger(self, tenant: Tenant, picked: list[Work], has_room: Callable[[list[Tenant]], bool]) -> bool:
        busy = {id(work.scope.tenant) for work in picked}
        younger = [t for t in self.tenants() if t.rank > tenant.rank and id(t) not in busy]
        moved: list[Tenant] = []
        swapped_bytes = 0
        for other in sorted(younger, key=lambda other: other.order, reverse=True):
            if other.is_swapped or other.in_flight or not self.modules.num_pages_held(other):
                continue
            more_bytes = self.modules.swap_bytes(other)
            if self.modules.swap_space.can_hold(swapped_bytes + more_bytes):
                swapped_bytes += more_bytes
            elif not self.modules.can_forget(other):
                continue
            moved.append(other)
            if has_room(moved):
                for victim in moved:
                    self._move(victim)
                return True
        return False

    def _move(self, tenant: Tenant) -> None:
        self.has_moved = True
        if self.modules.swap_out(tenant):
            self.num_swaps += 1
        else:
            for scope in tenant.scopes:
                self.discard_scope(scope)
            self.modules.forget(tenant)
            self.num_rebuilds += 1

    def _bring_back(self, tenant: Tenant, picked: list[Work]) -> bool:
        """Swap a tenant in, or start to recompute it, if there is room; the oldest makes room for itself."""
        if not self._fits(tenant, []):
            is_first = tenant.rank == self._oldest_waiting()
            if not is_first or not self._make_room(tenant, picked, lambda moved: self._fits(tenant, moved)):
                return False
        self.has_moved = True
        tenant.is_swapped = False
        if not tenant.forgotten:
            self.modules.swap_in(tenant)
            return True
        tenant.num_rebuilding = len(tenant.forgotten)
        for module, scope, sequence in tenant.forgotten:
            self.add(self._rebuild(module, scope, sequence))
        tenant.forgotten = []
        return False  # its work waits until the sequences are rewritten

    def _oldest_waiting(self) -> tuple[float, float]:
        """Rank of the oldest tenant that has something to run: one that only waits for its items needs no memory."""
        scopes = [work.scope for work in self.works()] + [cursor.scope for cursor in self.suspended]
        return min(scope.tenant.rank for scope in scopes)

    def _fits(self, tenant: Tenant, moved: list[Tenant]) -> bool:
        """Whether a tenant can be brought back without these."""
        return all(
            count <= module.pool.num_free_without(self.modules.sequences(moved, module.name))
            for module, count in self.modules.pages_to_return(tenant)
            if module.pool is not None
        )

    def _rebuild(self, module: str, scope: Scope, sequence: Sequence) -> Work:
        node, method = self.modules.rebuilders[module]
        kv, pool = method.kv, self.modules[module].pool
        assert kv is not None and kv.ids is not None and pool is not None
        ids = list(sequence.history or ())
        inputs: dict[str, Any] = {p.name: None for p in method.inputs}
        inputs[kv.ids] = torch.tensor(ids, dtype=torch.int64, device=self.modules.device)
        key = (node.module, method.name)
        op = Run(node.name, key, method, (), (), (), (), (), has_tokens=True)
        return Work(
            request_id=scope.request.info.request_id,
            path=scope.path,
            inputs=inputs,
            params=scope.request.view.params,
            fields=scope.request.info.fields,
            request=scope.request,
            op=op,
            key=op.key,
            scope=scope,
            total=len(ids),
            sequence=sequence,
            ids=ids,
            token_start=pool.match_prefix(sequence, ids) if self.config.enable_prefix_caching else 0,
            is_rebuild=True,
        )


def _num_tokens(work: Work) -> int:
    """Tokens of a work with ragged inputs; its `tokens` ports must agree."""
    lengths = {
        port.name: len(plain(work.inputs[port.name]))
        for port in work.op.method.inputs
        if port.layout == "tokens" and work.inputs.get(port.name) is not None
    }
    if len(set(lengths.values())) != 1:
        raise RequestError(f"{work.op.target}: token inputs differ in length: {lengths}", status=500)
    length = next(iter(lengths.values()))
    if length == 0 and any(port.layout == "rows" for port in work.op.method.outputs):
        raise RequestError(f"{work.op.target} got no tokens, so it has no last one to go on from; the input is empty")
    return length
