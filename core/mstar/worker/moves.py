"""Sequences that move between workers: where the latest of each is, and how its pages get where its next call runs.

A walk's worker knows who holds a sequence. A call elsewhere that uses it has a holder offer it there; the receiver says
what its prefix cache lacks, makes room as for any call, and gets those pages. A call that writes leaves the only copy.
Owned by the worker's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from mstar.ipc.messages import Between, Offer, Pages, ScopeStep, SendPages, Want
from mstar.plugin.program import Run
from mstar.worker.ahead_pages import AheadPages, described, description
from mstar.worker.holdings import Holdings
from mstar.worker.kv_pool import Sequence
from mstar.worker.output import Output
from mstar.worker.places import Places
from mstar.worker.state import Arrival, Label, Scope, Tenant, Work


class Moves:
    """The moves of one worker's sequences, and its knowledge of where those of its walks are."""

    def __init__(self, places: Places, *, holdings: Holdings, output: Output) -> None:
        self._places = places
        self._holdings = holdings
        self._modules = holdings.modules
        self._output = output
        self.ahead = AheadPages(places, holdings=holdings, output=output)

    # ---- the walk's side ------------------------------------------------------------------------------------

    def before(self, work: Work, worker: int) -> bool:
        """A call is about to go to `worker`, or to queue here: whether its sequence has to come there first."""
        if (key := self._label(work)) is None:
            return False
        scope, work.ran_at = work.scope, worker
        holders = scope.holders.setdefault(key, set())
        must_come = work.has_moved = bool(holders) and worker not in holders
        if must_come and worker == self._places.worker and key in scope.coming:
            must_come = not self.ahead.claim(scope, key)
            holders.add(worker)
            return must_come
        self.ahead.drop(scope, [k for k, own in scope.holders.items() if own is holders and k not in scope.arrivals])
        if must_come:
            holder = self._places.worker if self._places.worker in holders else min(holders)
            order = SendPages(
                request_id=work.request_id, to=worker, lane=scope.lane, path=scope.path, ordinal=scope.ordinal,
                module=key[0], label=key[1],
            )  # fmt: skip
            self._output.post(holder, order)
        holders.add(worker)
        return must_come

    def has(self, scope: Scope, op: Run) -> bool:
        """Whether a call could run here at once, as far as its sequence goes."""
        if op.method.kv is None or op.key[0] not in self._places.split:
            return True
        return self._places.worker in scope.holders.get((op.key[0], op.method.kv.label), ())

    def after(self, work: Work) -> None:
        """A call has run: a sequence that moved for it gets its other labels; if it wrote, what others hold is old."""
        if (key := self._label(work)) is None:
            return
        scope, holders = work.scope, work.scope.holders[key]
        ran_at = self._places.worker if work.ran_at is None else work.ran_at
        same = [label for label, own in scope.holders.items() if own is holders]
        if work.has_moved:
            work.has_moved = False
            for label in same:
                if label != key:
                    self._relabel(ran_at, scope, "alias", label, source=key[1])
        if not work.op.method.kv.write:  # type: ignore[union-attr]
            return
        for worker in holders - {ran_at}:
            for label in same:
                self._relabel(worker, scope, "drop", label)
        holders &= {ran_at}

    def _relabel(
        self, worker: int, scope: Scope, step: Literal["alias", "drop"], label: Label, *, source: str = ""
    ) -> None:
        module, new = label
        message = ScopeStep(
            request_id=scope.request.info.request_id, step=step, lane=scope.lane, path=scope.path,
            ordinal=scope.ordinal, new=new, source=source, module=module,
        )  # fmt: skip
        if worker == self._places.worker:
            self.relabel(scope, message)
        else:
            self._output.post(worker, message)

    def forked(self, source: Scope, label: str, target: Scope, new: str) -> None:
        """A fork has been made wherever its source is."""
        self.ahead.drop(target, [key for key in target.coming if key[1] == new])
        for module, own in list(source.holders):
            if own == label:
                target.holders[(module, new)] = set(source.holders[(module, own)])

    def aliased(self, scope: Scope, source: str, new: str) -> None:
        """A label has become another name of a sequence."""
        self.ahead.drop(scope, [key for key in scope.coming if key[1] == new])
        for module, own in list(scope.holders):
            if own == source:
                scope.holders[(module, new)] = scope.holders[(module, own)]

    def dropped(self, scope: Scope, label: str) -> None:
        """A label has been dropped everywhere."""
        self.ahead.drop(scope, [key for key in scope.coming if key[1] == label])
        for key in [key for key in scope.holders if key[1] == label]:
            del scope.holders[key]

    def _label(self, work: Work) -> Label | None:
        """The sequence that a call uses, if it can be anywhere but where the call runs."""
        key = (work.key[0], work.label)
        return key if work.op.method.kv is not None and work.key[0] in self._places.split else None

    # ---- the holder's and the receiver's side ---------------------------------------------------------------

    def handle(self, scope: Scope, message: Between) -> bool:
        """False, with nothing done, if it has to wait for what is to be recomputed."""
        if isinstance(message, Want) and (
            self.ahead.wanted(message, is_between=True) or not self._is_here(scope, message)
        ):
            return True
        if isinstance(message, SendPages | Want) and (scope.tenant.forgotten or scope.tenant.num_rebuilding):
            return False
        if isinstance(message, SendPages):
            self._offer(scope, message)
        elif isinstance(message, Offer):
            if message.is_ahead:
                self.ahead.offered(scope, message)
            else:
                scope.arrivals.setdefault((message.module, message.label), Arrival()).offer = message
        elif isinstance(message, Want):
            self._send(scope, message)
        elif isinstance(message, Pages) and message.number:
            self.ahead.take(scope, message)
        elif isinstance(message, Pages):
            arrival = scope.arrivals.get((message.module, message.label))
            if arrival is not None and arrival.is_asked and arrival.turn == message.turn:  # else it was given up
                assert arrival.offer is not None
                self._finish(scope, arrival.offer, message.start, message.content)
        return True

    def give_up(self, tenant: Tenant, *, is_asked: bool) -> bool:
        """Have younger tenants give up room for what is on its way to them; whether there was any.

        Args:
            is_asked: what a call waits for, to ask for it again later; else what comes ahead of one.
        """
        if not is_asked:
            return self.ahead.give_up(tenant)
        found = [
            (scope, key, arrival)
            for other in self._holdings.tenants() if other.rank > tenant.rank
            for scope in other.scopes
            for key, arrival in scope.arrivals.items() if arrival.is_asked and arrival.offer is not None
        ]  # fmt: skip
        for scope, key, arrival in found:
            self._holdings.drop(scope, key)
            scope.tenant.in_flight -= 1
            arrival.is_asked, arrival.turn = False, arrival.turn + 1
        return bool(found)

    def expect(self, work: Work, *, awaits: bool) -> None:
        """Let a call wait for its sequence if that is on its way."""
        key = (work.key[0], work.label)
        work.arrival = work.scope.arrivals.setdefault(key, Arrival()) if awaits else work.scope.arrivals.get(key)

    def relabel(self, scope: Scope, message: ScopeStep) -> None:
        """Do a step on one module's label."""
        assert message.module is not None
        if message.step == "alias":
            self._holdings.alias(scope, message.module, message.source, message.new)
        else:
            self.release(scope, message.module, message.new)

    def release(self, scope: Scope, module: str, label: str) -> None:
        """Drop what has become old."""
        if (module, label) in scope.sequences:
            self._holdings.drop(scope, (module, label))

    def _offer(self, scope: Scope, order: SendPages) -> None:
        sequence = scope.sequences[(order.module, order.label)]
        self._output.post(
            order.to,
            Offer(
                request_id=order.request_id, sender=self._places.worker, lane=order.lane, path=order.path,
                ordinal=order.ordinal, module=order.module, label=order.label,
                sequence=description(sequence),
            ),
        )  # fmt: skip

    def _send(self, scope: Scope, message: Want) -> None:
        pool, sequence = self._modules[message.module].pool, scope.sequences[(message.module, message.label)]
        assert pool is not None
        first, end = message.start // pool.page_size, -(-sequence.length // pool.page_size)
        if (image := sequence.image) is not None:  # on the host: to bring it back first could wait for who waits for it
            content = image.content[:, :, image.indices[image.sequences.index(sequence)][first:end]]
        else:
            content = pool.read_pages(sequence.pages[first:end])
        self._output.post(
            message.to,
            Pages(
                request_id=message.request_id, lane=message.lane, path=message.path, ordinal=message.ordinal,
                module=message.module, label=message.label, start=message.start, content=content,
                number=message.number, turn=message.turn, sequence=description(sequence) if message.number else None,
            ),
        )  # fmt: skip

    def _is_here(self, scope: Scope, message: Want) -> bool:
        """What was offered ahead may have gone before it is asked for: then nobody waits for it."""
        return not message.number or (message.module, message.label) in scope.sequences

    def admit(self, work: Work, reserve: Callable[[Sequence, int], bool]) -> bool:
        """Whether a call's sequence is here; if not, its pages are asked for once there is room for them.

        Args:
            reserve: makes room for so many tokens more.
        """
        arrival, scope = work.arrival, work.scope
        if arrival is None or arrival.is_here:
            work.arrival = None
            return True
        if (offer := arrival.offer) is None or arrival.is_asked:
            return False
        source = described(offer.sequence)
        pool = self._modules[offer.module].pool
        assert pool is not None
        self.release(scope, offer.module, offer.label)
        sequence = self._modules.sequence(scope, offer.module, offer.label)
        start = self.ahead.begin(pool, sequence, source)
        if not reserve(sequence, source.length - start):
            self.release(scope, offer.module, offer.label)
            return False
        arrival.is_asked = True
        scope.tenant.in_flight += 1  # what has room, and no tokens yet, cannot be moved
        self._output.post(
            offer.sender,
            Want(
                request_id=offer.request_id, to=self._places.worker, lane=offer.lane, path=offer.path,
                ordinal=offer.ordinal, module=offer.module, label=offer.label, start=start, turn=arrival.turn,
            ),
        )  # fmt: skip
        return False

    def _finish(self, scope: Scope, offer: Offer, start: int, content: Tensor) -> None:
        pool = self._modules[offer.module].pool
        assert pool is not None
        sequence = scope.sequences[(offer.module, offer.label)]
        pool.write_pages(sequence, content, start=start)
        pool.settle(sequence, described(offer.sequence))
        scope.tenant.in_flight -= 1
        scope.arrivals.pop((offer.module, offer.label)).is_here = True
