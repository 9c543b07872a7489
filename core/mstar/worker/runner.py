"""Runs one batch: prepare, collate, forward, check, split, finish. A task that raises fails alone.

Knows ports, layouts and padding; does not know walks. `Runner.run` changes nothing a failed task could leave behind:
KV lengths move only after the method returned, draws are undone, slot rows restored, and the batch is run again task
by task to find whose fault it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mstar.config import EngineConfig
from mstar.errors import PluginError
from mstar.layers.attention import AttentionBackend, KVBatch, build_plan, choose_backend, decode_plan
from mstar.plugin.graph import KV, Method, Port
from mstar.plugin.nodes import NO_PLAN, Context, Plan
from mstar.plugin.program import MethodKey, Run
from mstar.worker.finish import Columns, Finished, HostCopies, Step, explain, finish
from mstar.worker.fused import run_unit
from mstar.worker.launched import BatchLayout, Launched, Traces, draw, everywhere, repeat_last, to_device
from mstar.worker.modules import Module, Modules, port_dtype
from mstar.worker.scheduler import Batch
from mstar.worker.state import Row, Work, plain, settled
from mstar.worker.tape import Later, now
from mstar.worker.taped import Taper

if TYPE_CHECKING:
    from mstar.worker.graphs import GraphRunner

MOST_KEPT = 4096  # elements of a batch that is kept for the next step, in case its rows stay the same


class Runner:
    """Executes batches on this worker's modules."""

    def __init__(self, modules: Modules, *, config: EngineConfig) -> None:
        self.modules = modules
        self.device = modules.device
        self.backend: AttentionBackend = choose_backend(modules.device, config.attention_backend)
        for module in modules.by_name.values():
            if module.node.kv_layout is not None:
                self.backend.require(head_dim=module.node.kv_layout.head_dim, dtype=modules.dtype)
        self.align = 16 if config.batch_invariant else 1
        self.batch_invariant = config.batch_invariant
        self.overlap = config.overlap
        self.copies_early = config.overlap and self.device.type == "cuda"  # else there is nothing that would wait
        self.taper: Taper | None = None  # once methods are compiled
        self.graphs: GraphRunner | None = None  # on CUDA, once captured
        self.watch: Callable[[list[Work]], Callable[[int], None] | None] = lambda works: None  # of each layer's pages
        self.drain: Callable[[], None] = lambda: None  # what that has begun and not ended
        self._layouts: dict[tuple[MethodKey, int], BatchLayout] = {}  # of methods whose rows are alike
        self._stacked: dict[tuple[MethodKey, str], tuple[list[Any], Tensor]] = {}  # a port's last values, as a batch

    def run(self, batch: Batch) -> Finished:
        """Run a batch to the end, isolating failures."""
        step: Step | None = None
        try:
            step = self.launch(batch)
            step.settle()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed to a request, once it is alone
            if step is not None:
                self.take_back(step)
            if len(batch.works) == 1:
                return Finished(failed=[(batch.works[0], explain(error, ".".join(batch.key)))])
        else:
            return finish(step, self.modules)
        result = Finished()
        for work in batch.works:
            work.stop_reason, work.error, work.counts = None, None, {}
            alone = self.run(Batch(batch.key, [work]))
            result.done += alone.done
            result.unfinished += alone.unfinished
            result.failed += alone.failed
        return result

    def take_back(self, step: Step) -> None:
        """Undo a step that failed after its launch, so that its works can run again; not those that have ended."""
        for work in step.batch.works:
            if work.undo is None:
                continue
            work.scope.tenant.in_flight -= 1
            if not (work.is_cancelled or work.request.is_dead):
                work.undo()
                kv, pool = work.op.method.kv, self.modules[work.key[0]].pool
                if kv is not None and kv.write and pool is not None and work.sequence is not None:
                    has_room = pool.reserve(work.sequence, work.num_tokens)
                    assert has_room, "it had room before"
            work.undo = None

    # ---- launch -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Step:
        """Prepare, collate and call the method; then count what it wrote. Undone if it raises."""
        works, module = batch.works, self.modules[batch.key[0]]
        method, layout, columns = works[0].op.method, self._layout(batch.key, works), Columns.of(works)
        traces = Traces(self.modules.fence)
        run = self._run_method if works[0].op.unit is None else partial(run_unit, self)
        try:
            launched = None if self.taper is None else self.taper.launch(batch, layout, columns, traces)
            if launched is None:
                self.modules.fence()
                launched = run(batch, layout, columns, traces)
            ids_port = None if method.kv is None or not method.kv.write or method.has_tokens else method.kv.ids
            row_ids = launched.inputs[ids_port] if ids_port is not None else None
            copies = self._begin_copies(works[0].op, launched, row_ids)
            self.drain()
        except BaseException:
            traces.undo()
            raise
        plan = launched.plan
        self._commit(module, method, works, plan, layout, columns)
        if self.overlap:
            for index, work in enumerate(works):
                work.scope.tenant.in_flight += 1
                work.undo = partial(self._undo_work, work, index, plan, traces)
        more: dict[str, Any] = {"running": launched.running, "copies": copies}
        return Step(batch, launched.outputs, layout.starts, columns, row_ids, launched.parts, **more)

    def _begin_copies(self, op: Run, launched: Launched, row_ids: Any) -> HostCopies | None:
        """Copies of what will be read on the host: ids for the pool, what `finish` hooks see, what is sent."""
        if not self.copies_early:
            return None
        is_hooked, emitted = op.key[1] in self.modules[op.key[0]].finish, dict(op.emits)
        found = [value for port, value in launched.outputs.items() if is_hooked or port in emitted]
        found += [row_ids, *(value for part in launched.parts for value in part.outputs.values())]
        tensors = [value for value in found if isinstance(value, Tensor)]
        copies = HostCopies(tensors) if tensors else None
        for part in launched.parts:
            part.copies = copies
        return copies

    def _run_method(self, batch: Batch, layout: BatchLayout, columns: Columns, traces: Traces) -> Launched:
        works, (name, method_name) = batch.works, batch.key
        module, method = self.modules[name], works[0].op.method
        plan = self.prepare(batch, layout)
        context = self.context(module, works, plan, layout, columns, traces)
        inputs = {port.name: now(self.collate(port, works, layout, context)) for port in method.inputs}
        traces.save(module.slots, context.rows)
        if self.graphs and (made := self.graphs.replay(batch, context, inputs, {name: context.rows}, traces)):
            return Launched(made[0], inputs, plan)
        with module.timed(method_name, calls=1, rows=len(works)):
            outputs = module.methods[method_name](context, **inputs)
        self.check(module, method, outputs, layout)
        return Launched(outputs, inputs, plan)

    def _layout(self, key: MethodKey, works: list[Work]) -> BatchLayout:
        method = works[0].op.method
        if method.has_tokens:
            return BatchLayout(method, works, align=self.align)
        found = self._layouts.get((key, len(works)))
        if found is None:
            align = self.graphs.align(key, len(works)) if self.graphs else self.align
            found = self._layouts[(key, len(works))] = BatchLayout(method, works, align=align)
        return found

    def prepare(self, batch: Batch, layout: BatchLayout) -> Plan:
        """What a method's hook plans for a batch."""
        module, works = self.modules[batch.key[0]], batch.works
        hook = module.prepare.get(batch.key[1])
        if hook is None:
            return NO_PLAN
        for work in works:
            work.inputs = {port: settled(value) for port, value in work.inputs.items()}
        with module.timed(batch.key[1]):
            plan: Plan = hook(works) or NO_PLAN
        where = ".".join(batch.key)
        if plan.advance is not None and len(plan.advance) != len(works):
            raise PluginError(f"{where}: Plan.advance has {len(plan.advance)} entries for {len(works)} tasks")
        if plan.positions is not None and plan.positions.shape[0] != layout.starts[-1]:
            raise PluginError(f"{where}: Plan.positions has {plan.positions.shape[0]} rows; {layout.starts[-1]} tokens")
        return plan

    def context(
        self, module: Module, works: list[Work], plan: Plan, layout: BatchLayout, columns: Columns, traces: Traces
    ) -> Context:
        """What the works' method sees besides its ports."""
        kv = works[0].op.method.kv
        device, padding = self.device, (0,) * layout.num_padding
        numbers: dict[str, tuple[float, ...]] = {
            "rows": columns.rows, "iteration": columns.iterations, "draw_keys": columns.draw_keys
        }  # fmt: skip
        if plan.positions is None and layout.is_single and all(map(float.is_integer, columns.positions)):
            numbers["positions"] = columns.positions
        if layout.is_ragged:  # rows that do not end here draw on scratch
            numbers["draw_rows"] = tuple([work.row if work.is_last else 0 for work in works])
        if layout.is_single and kv is not None and kv.write and module.pool is not None:
            numbers["slots"] = tuple(module.pool.next_slots(columns.sequences))
        table = np.array([column + padding for column in numbers.values()], dtype=np.int64)
        given = dict(zip(numbers, to_device(torch.from_numpy(table), device).unbind(0), strict=True))  # copied as one
        query_starts, last_tokens = layout.on_device(device)
        context = Context(
            num_rows=layout.num_rows,
            query_starts=query_starts,
            last_tokens=last_tokens,
            positions=given["positions"] if "positions" in given else self._positions(works, plan, layout),
            rows=given["rows"],
            iteration=given["iteration"],
            draw_keys=given["draw_keys"],
            sample=partial(draw, module, works, given.get("draw_rows", given["rows"]), traces),
            slots=module.slots.tensors,
            plan=self.planned(plan, works, layout),
            row_multiple=self.align,
        )
        if kv is not None:
            context.kv = self._kv_batch(module, kv, works, layout, columns, given.get("slots"))
            if layout.is_ragged:
                context.kv.after_layer = self.watch(works)
        return context

    def planned(self, plan: Plan, works: list[Work], layout: BatchLayout) -> dict[str, Tensor]:
        """Planned tensors on the device; those with one row per task or token are padded as the ports are."""
        return {name: self._padded(tensor.to(self.device), works, layout) for name, tensor in plan.tensors.items()}

    @staticmethod
    def _padded(tensor: Tensor, works: list[Work], layout: BatchLayout) -> Tensor:
        if layout.num_padding and tensor.dim() and tensor.shape[0] in (len(works), layout.starts[-1]):
            size = layout.num_rows if tensor.shape[0] == len(works) else layout.num_tokens
            return repeat_last(tensor, size - tensor.shape[0])
        return tensor

    def _kv_batch(
        self, module: Module, kv: KV, works: list[Work], layout: BatchLayout, columns: Columns, slots: Tensor | None
    ) -> KVBatch:
        pool = module.pool
        assert pool is not None
        padding = [0] * layout.num_padding
        if slots is not None:
            attention = decode_plan(
                context_lens=[*columns.lengths, *padding],
                slot_mapping=slots,
                page_table=pool.page_table(columns.sequences, num_rows=layout.num_rows),
                page_size=pool.page_size,
                batch_invariant=self.batch_invariant,
            )
            return KVBatch(attention, pool.keys, pool.values, self.backend)
        need = -(-int(layout.query_lens.max()) // pool.page_size) if padding else 1  # which writes to the scratch page
        spans = None
        if any(w.spans for w in works):
            spans = [_cut_spans(w) for w in works] + [None] * layout.num_padding
        full = np.full(layout.num_rows, True) if kv.attention == "full" else None
        attention = build_plan(
            query_lens=layout.query_lens,
            context_lens=np.array([*columns.lengths, *padding], dtype=np.int32),
            page_table=pool.page_table(columns.sequences, num_rows=layout.num_rows, width=need),
            page_size=pool.page_size,
            device=self.device,
            write=kv.write,
            full=full,
            spans=spans,
            batch_invariant=self.batch_invariant,
        )
        return KVBatch(attention, pool.keys, pool.values, self.backend)

    def _positions(self, works: list[Work], plan: Plan, layout: BatchLayout) -> Tensor:
        if plan.positions is not None:
            positions = plan.positions.to(self.device)
            missing = layout.num_tokens - positions.shape[0]
            return repeat_last(positions, missing)
        starts = np.array([w.position for w in works] + [0.0] * layout.num_padding)
        if not layout.is_single:
            starts = np.concatenate(
                [np.arange(n) + s for s, n in zip(starts, layout.query_lens, strict=True)] or [np.zeros(0)]
            )
        whole = starts.astype(np.int64)
        return torch.from_numpy(whole if (whole == starts).all() else starts.astype(np.float32)).to(self.device)

    # ---- collate and split ------------------------------------------------------------------------------

    def collate(self, port: Port, works: list[Work], layout: BatchLayout, context: Context) -> Any:
        """A port's values as one batch, maybe a `Later`; says in the context which are there."""
        values = [work.inputs.get(port.name) for work in works]
        if port.layout == "item":
            items = [settled(v) for v in values]
            return items if layout.is_ragged else items + items[-1:] * layout.num_padding
        if port.layout == "tokens":
            return self._collate_tokens(port, works, values, layout, context)
        is_absent = [v is None for v in values]
        if any(is_absent):
            if all(is_absent):
                context.present[port.name] = everywhere(layout.num_rows, False, self.device)
                return None
            present = [not absent for absent in is_absent] + [False] * layout.num_padding
            context.present[port.name] = torch.tensor(present, device=self.device)
            example = torch.zeros_like(torch.as_tensor(next(plain(v) for v in values if v is not None)))
            values = [example if v is None else v for v in values]
        elif port.optional:
            context.present[port.name] = everywhere(layout.num_rows, True, self.device)
        batch = self._stack(values, (works[0].key, port.name))
        if layout.num_padding:
            batch = repeat_last(now(batch), layout.num_padding)
        return self.cast(port, batch)

    def _stack(self, values: list[Any], port: tuple[MethodKey, str]) -> Tensor | Later:
        """Rows side by side; without copying where they lie so already, or are the very ones of the last step."""
        first = values[0]
        if type(first) is Row:
            given = first.batch.given
            index = [v.at for v in values if type(v) is Row and v.batch.given is given]
            if len(index) == len(values):
                if index == list(range(given.shape[0])):
                    return given
                source = first.batch.tensor
                if index == list(range(len(index))):
                    return source[: len(index)]
                return source.index_select(0, torch.tensor(index, device=source.device))
        before, batch = self._stacked.get(port, ([], None))
        if batch is None or len(before) != len(values) or not all(map(is_, before, values)):
            rows = [plain(v) for v in values]
            batch = torch.stack([v if isinstance(v, Tensor) else torch.as_tensor(v, device=self.device) for v in rows])
            if batch.numel() <= MOST_KEPT:
                self._stacked[port] = values, batch
        return batch

    def _collate_tokens(
        self, port: Port, works: list[Work], values: list[Any], layout: BatchLayout, context: Context
    ) -> Tensor | None:
        present = [plain(v) for v in values]
        if port.optional:
            mask = [v is not None for v in present] + [False] * layout.num_padding
            context.present[port.name] = torch.tensor(mask, device=self.device)
        example = next((v for v in present if v is not None), None)
        if example is None:
            return None
        pieces = [
            example.new_zeros((work.num_tokens, *example.shape[1:]))
            if value is None
            else value[work.token_start : work.token_start + work.num_tokens]
            for work, value in zip(works, present, strict=True)
        ]
        batch = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return now(self.cast(port, repeat_last(batch, layout.num_tokens - batch.shape[0])))  # type: ignore[no-any-return]

    def cast(self, port: Port, batch: Tensor | Later) -> Tensor | Later:
        """A batch in the port's dtype."""
        dtype = port_dtype(port, self.modules.dtype)
        if batch.dtype == dtype and (isinstance(batch, Later) or batch.device == self.device):
            return batch
        return now(batch).to(self.device, dtype)  # type: ignore[no-any-return]

    def check(self, module: Module, method: Method, outputs: Any, layout: BatchLayout) -> None:
        """Outputs that do not fit their ports are the plugin's fault; say which."""
        where = f"{module.name}.{method.name}"
        if not isinstance(outputs, dict):
            raise PluginError(f"{where} must return a dict of its output ports, not {type(outputs).__name__}")
        known = {port.name: port for port in method.outputs}
        if missing := known.keys() - outputs.keys():
            raise PluginError(
                f"{where} returned no {', '.join(sorted(missing))}; for a port without a value return None"
            )
        if unknown := outputs.keys() - known.keys():
            names = ", ".join(known) or "none"
            raise PluginError(f"{where} returned {', '.join(map(repr, sorted(unknown)))}; its output ports are {names}")
        for name, port in known.items():
            value = outputs[name]
            if value is None:
                continue
            if port.layout == "item":
                got, size = (len(value),), len(layout.starts) - 1
                is_right = got[0] >= size
            else:
                got, size = value.shape, layout.num_tokens if port.layout == "tokens" else layout.num_rows
                is_right = got[:1] == (size,) and port.shape in (None, got[1:])
            if not is_right:
                wanted = f"{size} {port.layout}" + (f" of shape {port.shape}" if port.shape else "")
                raise PluginError(f"{where} returned {tuple(got)} for port {name!r}; {wanted} were expected")

    @staticmethod
    def _commit(
        module: Module, method: Method, works: list[Work], plan: Plan, layout: BatchLayout, columns: Columns
    ) -> None:
        """Count what was written. Ids that are rows may still be running; they are told at the finish."""
        kv, pool = method.kv, module.pool
        if kv is None or pool is None or not kv.write:
            return
        if layout.is_single and not layout.is_ragged and plan.advance is None:
            pool.commit_rows(columns.sequences)
            return
        for i, work in enumerate(works):
            assert work.sequence is not None
            ids: list[int] | None = None
            if kv.ids is not None and layout.is_ragged and work.ids is not None:
                ids = work.ids[work.token_start : work.token_start + work.num_tokens]
            advance = plan.advance[i] if plan.advance is not None else None
            pool.commit(work.sequence, work.num_tokens, ids=ids, spans=work.content, advance=advance)

    @torch.inference_mode()
    def _undo_work(self, work: Work, index: int, plan: Plan, traces: Traces) -> None:
        """A launched step turned out to be late for one work: its draws, slot rows and KV tokens are taken back."""
        kv, pool = work.op.method.kv, self.modules[work.key[0]].pool
        if kv is not None and kv.write and pool is not None and work.sequence is not None:
            advance = plan.advance[index] if plan.advance is not None else None
            pool.rollback(work.sequence, work.num_tokens, advance=advance)
        traces.undo(slice(index, index + 1))


def _cut_spans(work: Work) -> Any:
    """A work's spans as seen from this chunk, or None."""
    start, end = work.token_start, work.token_start + work.num_tokens
    inside = [(a - start, b - start) for a, b in work.spans or () if a >= start and b <= end]
    return np.array(inside, dtype=np.int64) if inside else None
