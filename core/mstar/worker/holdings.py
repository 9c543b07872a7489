"""Who holds what on the device: requests, sessions, and the scopes in which their sequences and rows live.

Opens, keeps and frees; the router moves requests, the scheduler and `Modules` do what this asks. Owned by the
worker's thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from mstar.ipc.messages import Open
from mstar.layers.sampling import draw_key
from mstar.plugin.graph import Alias, Drop, Fork
from mstar.plugin.spec import ModelSpec
from mstar.plugin.states import RequestView
from mstar.types import Path
from mstar.worker.modules import Modules, draw_name
from mstar.worker.scheduler import Scheduler
from mstar.worker.state import Lane, RequestState, Scope, Tenant


class Holdings:
    """All requests and sessions of one worker.

    Args:
        sessions: session -> lane -> the scope it left.
    """

    def __init__(self, spec: ModelSpec, *, modules: Modules, scheduler: Scheduler) -> None:
        self.spec = spec
        self.modules = modules
        self.scheduler = scheduler
        self.requests: dict[str, RequestState] = {}
        self.sessions: dict[str, dict[str, Scope]] = {}
        scheduler.tenants = self.tenants
        scheduler.requests = self.requests

    # ---- requests and sessions --------------------------------------------------------------------------

    def open(self, info: Open) -> None:
        """A request begins, with what its session left."""
        params = msgspec.convert(info.params, self.spec.tasks[info.task].params)
        kept = self.sessions.pop(info.session, {}) if info.session is not None else {}
        view = RequestView(info.task, info.outputs, params, info.fields, info.session, bool(kept))
        arrival, taken = info.arrival, {other.arrival for other in self.requests.values()}
        while arrival in taken:  # of two tenants that rank alike neither could make room for the other
            arrival = math.nextafter(arrival, math.inf)
        request = self.requests[info.request_id] = RequestState(info, view, arrival, kept_scopes=kept)
        request.runtime_s = self.scheduler.fair_share_s
        for scope in kept.values():
            scope.request = scope.tenant.request = request
            scope.draw_key = draw_key(info.seed, scope.path, "noise")
            scope.tenant.order = (request.arrival, -1)
            request.tenants[-1] = scope.tenant

    def close(self, request: RequestState) -> None:
        """A request has ended well: its session, if it has one, keeps its outermost scopes."""
        session = request.info.session
        if session is not None:
            kept = request.kept_scopes | {x.lane: x for t in request.tenants.values() for x in t.scopes if x.path == ()}
            kept |= {name: x.scope for name, x in request.lanes.items() if x.scope is not None}
            for scope in kept.values():
                self.modules.free_rows(scope)  # its next request brings its own parameters and seed
                scope.tenant.order = (float("inf"), -1)
            self.sessions[session] = kept
            request.tenants.pop(-1, None)
        self.remove(request)

    def drop_session(self, session: str) -> None:
        """Free what a session holds."""
        for scope in self.sessions.pop(session, {}).values():
            self.free(scope)

    def remove(self, request: RequestState) -> None:
        """Forget a request and free all it holds, wherever it is."""
        request.is_dead = True
        self.requests.pop(request.info.request_id, None)
        self.scheduler.discard(request)
        for tenant in list(request.tenants.values()):
            for scope in list(tenant.scopes):
                self.free(scope)
        request.buffers.clear()
        request.waiters.clear()

    # ---- scopes -----------------------------------------------------------------------------------------

    def scope(self, lane: Lane, path: Path) -> Scope:
        """A new scope of a lane."""
        request = lane.request
        ordinal = request.num_scopes.get((lane.name, path), 0)
        request.num_scopes[(lane.name, path)] = ordinal + 1
        return self.guest_scope(request, lane.name, path, ordinal)

    def guest_scope(self, request: RequestState, lane: str, path: Path, ordinal: int) -> Scope:
        """A new scope of a lane that may live elsewhere; `ordinal` is what that has counted."""
        tenant = request.tenant(path)
        key = draw_key(request.info.seed, path, draw_name("noise", ordinal))
        scope = Scope(lane, path, request, tenant, key, ordinal)
        tenant.scopes.append(scope)
        return scope

    def free(self, scope: Scope) -> None:
        """Free everything a scope holds."""
        tenant = scope.tenant
        self.scheduler.discard_scope(scope)
        self.modules.free_scope(scope)
        tenant.scopes.remove(scope)
        if not tenant.scopes and tenant.item >= 0:
            tenant.request.tenants.pop(tenant.item, None)

    def drop(self, scope: Scope, key: tuple[str, str]) -> None:
        """Forget one label of a module, also while it is swapped out or waits to be recomputed."""
        sequence = scope.sequences[key]
        self.modules.drop(scope, key)
        if sequence.row < 0:
            self.scheduler.discard_scope(scope, only=sequence)

    def fork(self, source: Scope, label: str, target: Scope, new: str, *, at: Any = None) -> None:
        """Give `target` a copy-on-write fork, called `new`, of every module's sequence `label`."""
        for module, own in list(source.sequences):
            if own == label:
                if (module, new) in target.sequences:
                    self.modules.drop(target, (module, new))
                target.sequences[(module, new)] = self.modules.fork(module, source.sequences[(module, own)], at=at)
                if target is not source and module in source.rows:
                    row = self.modules.row(target, module, target.request.info)
                    self.modules[module].slots.copy_slots(source.rows[module], row)

    def kv_step(self, scope: Scope, step: Fork | Alias | Drop, *, at: Any) -> None:
        """Do a walk's Fork, Alias or Drop."""
        if isinstance(step, Fork):
            self.fork(scope, step.source, scope, step.new, at=at)
        elif isinstance(step, Drop):
            for key in [key for key in scope.sequences if key[1] == step.label]:
                self.modules.drop(scope, key)
        else:
            for module, label in list(scope.sequences):
                if label == step.source:
                    if (module, step.new) in scope.sequences:
                        self.modules.drop(scope, (module, step.new))
                    scope.sequences[(module, step.new)] = scope.sequences[(module, label)]

    # ---- everything -------------------------------------------------------------------------------------

    def tenants(self) -> Iterable[Tenant]:
        """Every tenant, those of idle sessions too."""
        for request in self.requests.values():
            yield from request.tenants.values()
        for scopes in self.sessions.values():
            yield from {id(scope.tenant): scope.tenant for scope in scopes.values()}.values()

    def scopes(self) -> Iterable[Scope]:
        """Every scope."""
        return (scope for tenant in self.tenants() for scope in tenant.scopes)
