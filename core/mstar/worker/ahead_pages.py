"""Pages that go where their sequence will be used next while the call that writes them still runs.

A walk's worker that will go on with a sequence says so in the call. Whoever runs it offers the sequence when it begins;
if there is room for all of it, the walk's worker asks for it under a number, and what is written comes in parts: chunk
by chunk, or layer by layer as each has been written. The last part says what the sequence has become. Whatever does not
come to that, for want of room or because the walk goes on elsewhere, moves as any sequence does (`moves`), which is the
oracle. Owned by the worker's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.ipc.messages import Between, Offer, Pages, Want
from mstar.plugin.program import LoopStart, Run, Skip, Spawn
from mstar.worker.holdings import Holdings
from mstar.worker.kv_pool import Jump, KVPool, Sequence
from mstar.worker.output import Output
from mstar.worker.places import Places
from mstar.worker.state import Arrival, Coming, Cursor, Label, Leaving, Scope, Tenant, Work

_DESCRIBED = ("start", "position", "length", "ids", "spans", "jumps")


class AheadPages:
    """One worker's sequences that leave, or come, before their calls have ended.

    Attributes:
        is_layered: send layer by layer.
        send: to another worker, at once.
        glance: takes what others have sent in the middle of a step.
        num_come: sequences that came so and were gone on with.
    """

    def __init__(self, places: Places, *, holdings: Holdings, output: Output) -> None:
        self._places = places
        self._holdings = holdings
        self._modules = holdings.modules
        self._output = output
        self._numbers = itertools.count(1)
        self._copies: list[tuple[torch.cuda.Event, int, Pages]] = []  # that run on the device beside the step
        self._stream = torch.cuda.Stream(self._modules.device) if self._modules.device.type == "cuda" else None
        self.is_layered = holdings.modules.config.kv_transfer == "layers"
        self.send: Callable[[int, Between], None] = output.post
        self.glance: Callable[[], None] = lambda: None
        self.num_come = 0

    # ---- the walk's side: it calls, and receives ------------------------------------------------------------

    def is_wanted(self, work: Work) -> bool:
        """Whether what a call elsewhere writes is used here next, as far as can be told."""
        kv, cursor = work.op.method.kv, work.cursor
        if kv is None or not kv.write or self._modules.config.kv_transfer == "end":
            return False
        after = _next_use(cursor, work.op)
        return after is not None and self._places.of(cursor.lane.request, after) is None

    def offered(self, scope: Scope, offer: Offer) -> None:
        """A sequence could come: ask for it, if there is room for all of it as things are."""
        key, tenant = (offer.module, offer.label), scope.tenant
        if tenant.is_swapped or tenant.forgotten or tenant.num_rebuilding or key in scope.arrivals:
            return
        self.drop(scope, [key])
        pool, source = self._pool(offer.module), described(offer.sequence)
        sequence = self._modules.sequence(scope, *_coming(key))
        start = self.begin(pool, sequence, source)
        if not pool.reserve(sequence, source.length - start):
            self._holdings.drop(scope, _coming(key))
            return
        number = next(self._numbers)
        scope.coming[key] = Coming(number)
        tenant.in_flight += 1  # what has room, and no tokens yet, cannot be moved
        self._output.post(offer.sender, _about(Want, offer, to=self._places.worker, start=start, number=number))

    def begin(self, pool: KVPool, sequence: Sequence, source: Sequence) -> int:
        """Make a new sequence the beginning of `source`, as far as the prefix cache has it: so many tokens."""
        sequence.start = sequence.position = source.start
        if not (self._modules.config.enable_prefix_caching and source.ids):
            return 0
        return pool.match_prefix(sequence, source.ids[: source.length], source.spans)

    def take(self, scope: Scope, message: Pages) -> None:
        """A part has come; what was given up meanwhile is ignored."""
        key = (message.module, message.label)
        coming = scope.coming.get(key)
        if coming is None or coming.number != message.number:
            return
        pool, sequence = self._pool(message.module), scope.sequences[_coming(key)]
        if message.content is not None:
            pool.write_pages(sequence, message.content, start=message.start, first_layer=message.first_layer)
        if message.sequence is None:
            return
        pool.settle(sequence, described(message.sequence))
        coming.is_complete = True
        scope.tenant.in_flight -= 1
        if (arrival := scope.arrivals.pop(key, None)) is not None:
            self.claim(scope, key)
            arrival.is_here = True

    def claim(self, scope: Scope, key: Label) -> bool:
        """The walk goes on with what comes: put it in its place. False if its last part is not here yet."""
        if not scope.coming[key].is_complete:
            scope.arrivals[key] = Arrival(is_asked=True)
            return False
        del scope.coming[key]
        if key in scope.sequences:
            self._holdings.drop(scope, key)
        scope.sequences[key] = scope.sequences.pop(_coming(key))
        self.num_come += 1
        return True

    def claim_all(self, scope: Scope, label: str) -> None:
        """A label is about to be forked here: what has come of it counts, what is still coming is given up."""
        for key in [key for key in scope.coming if key[1] == label]:
            if scope.coming[key].is_complete:
                self.claim(scope, key)
                scope.holders[key].add(self._places.worker)
            else:
                self.drop(scope, [key])

    def drop(self, scope: Scope, keys: Iterable[Label]) -> None:
        """Give up what comes, or has come and is not used next after all."""
        for key in keys:
            if (coming := scope.coming.pop(key, None)) is not None:
                self._holdings.drop(scope, _coming(key))
                scope.tenant.in_flight -= not coming.is_complete

    def give_up(self, tenant: Tenant) -> bool:
        """Give up what comes for younger tenants, and no call waits for yet; whether there was any."""
        found = [
            (scope, key)
            for other in self._holdings.tenants() if other.rank > tenant.rank
            for scope in other.scopes
            for key in scope.coming if key not in scope.arrivals
        ]  # fmt: skip
        for scope, key in found:
            self.drop(scope, [key])
        return bool(found)

    # ---- the side that runs the call, and sends -------------------------------------------------------------

    def start_step(self, works: list[Work]) -> None:
        """A batch is about to run."""
        for work in works:
            if (leaving := work.leaving) is not None:
                leaving.num_layers = leaving.num_sent = 0
                if not leaving.is_offered:
                    leaving.is_offered = True
                    self.send(leaving.to, self._offer(work))

    def watch(self, works: list[Work]) -> Callable[[int], None] | None:
        """What a batch has to tell of each layer that it has written, if anything."""
        if not self.is_layered or not any(work.leaving for work in works):
            return None
        return partial(self._wrote, works) if self._pool(works[0].key[0]).storage.is_whole else None

    def wanted(self, message: Want, *, is_between: bool = False) -> bool:
        """Note that a sequence is wanted while its call runs. False if that is over: then it is sent as it is.

        Args:
            is_between: no step is running: what earlier ones have written can be sent at once.
        """
        request = self._holdings.requests.get(message.request_id)
        scope = None if request is None else request.scope(message.lane, message.path, message.ordinal)
        leaving = None if scope is None else scope.leaving.get((message.module, message.label))
        if leaving is None:
            return False
        leaving.number, leaving.start = message.number, message.start
        sequence = leaving.work.sequence
        if is_between and sequence is not None and sequence.resident:
            self.advance(leaving.work)
        return True

    def advance(self, work: Work) -> None:
        """A step of a call has run: send what of it has not been sent."""
        leaving, sequence = work.leaving, work.sequence
        assert leaving is not None and sequence is not None
        self.drain(wait=True)
        if leaving.number:
            self._send(work, leaving, end=sequence.length, last=self._pool(work.key[0]).storage.num_layers)
            self.drain(wait=True)
            page_size = self._pool(work.key[0]).page_size
            leaving.start = max(leaving.start, sequence.length // page_size * page_size)

    def finish(self, work: Work) -> None:
        """A call has run: say what its sequence has become."""
        leaving = work.leaving
        assert leaving is not None and work.sequence is not None
        self.advance(work)
        work.scope.leaving.pop((work.key[0], work.label), None)
        if leaving.number:
            self.send(leaving.to, self._part(work, leaving, None, sequence=description(work.sequence)))

    def drain(self, *, wait: bool) -> None:
        """Send what has been copied from the device."""
        while self._copies and (wait or self._copies[0][0].query()):
            copied, to, message = self._copies.pop(0)
            copied.synchronize()
            self.send(to, message)

    def _wrote(self, works: list[Work], layer: int) -> None:
        """A batch has written a layer. One that comes out of turn makes all of them count as not sent."""
        for work in works:
            if (leaving := work.leaving) is None:
                continue
            if layer != leaving.num_layers:
                leaving.num_layers = leaving.num_sent = 0
            leaving.num_layers += layer == leaving.num_layers
            if not leaving.number:
                self.glance()
            if leaving.number:
                self._send(work, leaving, end=work.length + work.num_tokens, last=leaving.num_layers)
        self.drain(wait=False)

    def _send(self, work: Work, leaving: Leaving, *, end: int, last: int) -> None:
        """Send all pages up to token `end`, of the layers up to `last`, that have not been sent."""
        pool, sequence, first = self._pool(work.key[0]), work.sequence, leaving.num_sent
        assert sequence is not None
        leaving.num_sent = last
        pages = sequence.pages[leaving.start // pool.page_size : -(-end // pool.page_size)]
        if not pages or first == last:
            return
        if self._stream is None or not pool.storage.is_whole:
            content = pool.read_pages(pages, layers=slice(first, last))
            self.send(leaving.to, self._part(work, leaving, content, first_layer=first))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._modules.device))
        with torch.cuda.stream(self._stream):
            found = pool.storage.select(pages, layers=slice(first, last))
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
            copied = self._stream.record_event()
        self._copies.append((copied, leaving.to, self._part(work, leaving, host, first_layer=first)))

    def _part(self, work: Work, leaving: Leaving, content: Tensor | None, **more: Any) -> Pages:
        return Pages(**_where(work), start=leaving.start, number=leaving.number, content=content, **more)

    def _offer(self, work: Work) -> Offer:
        """What a sequence will be when its call has run, as far as that is known."""
        sequence = work.sequence
        assert sequence is not None
        known = description(sequence)
        known["length"] += work.total - work.token_start
        if work.ids is not None and len(sequence.ids) == sequence.length:
            known["ids"] += work.ids[work.token_start :]
            known["spans"] = msgspec.to_builtins([*sequence.spans, *work.content], builtin_types=(bytes,))
        else:
            known["ids"] = []
        return Offer(**_where(work), sender=self._places.worker, sequence=known, is_ahead=True)

    def _pool(self, module: str) -> KVPool:
        pool = self._modules[module].pool
        assert pool is not None
        return pool


def described(known: dict[str, Any]) -> Sequence:
    """The sequence that a message speaks of; it is in no pool here."""
    known = dict(known)
    spans = [(int(start), int(end), bytes(key)) for start, end, key in known.pop("spans")]
    jumps = [Jump(*jump) for jump in known.pop("jumps")]
    return Sequence(-1, spans=spans, jumps=jumps, **known)


def description(sequence: Sequence) -> dict[str, Any]:
    """All that there is to a sequence but its pages."""
    known = {name: getattr(sequence, name) for name in _DESCRIBED}
    found: dict[str, Any] = msgspec.to_builtins(known, builtin_types=(bytes,))
    return found


def _coming(key: Label) -> Label:
    """Under which label a sequence is held until it is used: what the walk does to its own leaves that alone."""
    return key[0], f"{key[1]}\0coming"


def _next_use(cursor: Cursor, op: Run) -> Run | None:
    """The next call on the sequence of `op`, or on its fork; None if it cannot be told, or a walk's step is before."""
    kv, ops, pc = op.method.kv, cursor.lane.program.ops, cursor.pc + 1
    assert kv is not None
    while True:
        after = ops[pc]
        if isinstance(after, Run):
            if after.key[0] == op.key[0] and after.method.kv is not None and after.method.kv.label == kv.label:
                return after
            pc += 1
        elif isinstance(after, Skip):
            is_run = after.predicate(cursor.lane.request.view, cursor.current_iteration)
            pc = pc + 1 if is_run else after.target
        elif isinstance(after, LoopStart):
            pc += 1
        elif isinstance(after, Spawn) and kv.label in after.forks:
            pc = after.body
        else:
            return None


def _where(work: Work) -> dict[str, Any]:
    scope = work.scope
    return {
        "request_id": work.request_id, "lane": scope.lane, "path": scope.path, "ordinal": scope.ordinal,
        "module": work.key[0], "label": work.label,
    }  # fmt: skip


def _about(kind: Any, message: Between, **more: Any) -> Any:
    """A message about the sequence that another is about."""
    names = ("request_id", "lane", "path", "ordinal", "module", "label")
    return kind(**{name: getattr(message, name) for name in names}, **more)
