"""The worker: where nodes run. One thread or process; `step` is the loop, and the function to read first."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import torch

from mstar.config import EngineConfig
from mstar.errors import ConfigError, PluginError, RequestError
from mstar.ipc.channel import WorkerEnd
from mstar.ipc.messages import (
    AskSteps,
    Beat,
    Between,
    Compiled,
    Dead,
    Emit,
    FromWorker,
    Parcel,
    Ready,
    Shutdown,
    Stats,
    Steps,
    ToWorker,
    WalkDone,
    Want,
)
from mstar.layers import kernels
from mstar.plugin.graph import Graph
from mstar.plugin.spec import Checkpoint, ModelSpec
from mstar.worker.ahead import look_ahead
from mstar.worker.compiled import Compilation, Compiler, Progress
from mstar.worker.finish import Finished, Step, described, finish
from mstar.worker.graphs import CudaGraphs, GraphRunner
from mstar.worker.modules import Modules
from mstar.worker.output_cache import OutputCache
from mstar.worker.places import Placing
from mstar.worker.router import Router
from mstar.worker.runner import Runner
from mstar.worker.scheduler import Batch, Scheduler
from mstar.worker.standstill import Standstill
from mstar.worker.state import Work
from mstar.worker.tape import Queue
from mstar.worker.taped import Taper
from mstar.worker.team import Team

log = logging.getLogger("mstar.worker")

STATS_INTERVAL_S = 0.1
IDLE_WAIT_S = 1.0  # only bounds how long a wait takes to notice that the process ends
BLOCKED_WAIT_S = 0.05
LONG_STEP_S = 1.0  # from then on a step is reported while it goes on
BEAT_INTERVAL_S = 0.25


class Worker:
    """Serves the engine's messages: receive, schedule, run, route.

    Example:
        worker = Worker(spec, graph, checkpoint, config, end)
        worker.run()  # until Shutdown
    """

    def __init__(
        self, spec: ModelSpec, graph: Graph, checkpoint: Checkpoint, config: EngineConfig, end: WorkerEnd,
        *, placing: Placing | None = None, worker: int = 0, group: int = 0, team: Team | None = None,
    ) -> None:  # fmt: skip
        self.end = end
        self.placing, self.worker, self.group, self.team = placing, worker, group, team
        self.spec, self.graph, self.checkpoint, self.config = spec, graph, checkpoint, config
        self.is_stopped = False
        self.is_blocked = False  # work is ready, but all of it waits for memory
        self._kept: list[ToWorker] = []  # messages that came in the middle of a step
        self.num_steps = 0
        self._standstill = Standstill(worker, send=end.send_to)
        self._checked_at_step = 0  # integrity is checked once at every return to idleness
        self._stats_due_s = 0.0
        self._last_stats: Stats | None = None
        self._doing: tuple[str, float] | None = None  # which step, and since when; read by the watchdog's thread

    def load(self, progress: Progress = lambda *_: None) -> None:
        """Load the model and build the worker's parts; `progress` is told of methods that are compiled."""
        self.modules = Modules(
            self.spec, self.graph, checkpoint=self.checkpoint, config=self.config,
            placing=self.placing, worker=self.worker, group=self.group, team=self.team,
        )  # fmt: skip
        self.scheduler = Scheduler(self.modules, config=self.config)
        self.runner = Runner(self.modules, config=self.config)
        self.compilation = Compilation()
        if self.config.compile:
            compiler = Compiler(
                self.modules,
                plugin=self.spec.name,
                attention=self.runner.backend.name,
                store=kernels.compile_cache(),
            )
            self.compilation = compiler.run(progress)
        if self.compilation.compiled:
            most = min(code.most_rows for code in self.compilation.compiled.values())
            if self.config.max_num_seqs > most:
                log.info("batches of more than %d rows run without compiled code (--max-num-seqs)", most)
            if self.config.overlap:
                self.modules.queue = Queue(threads=torch.get_num_threads())
            self.runner.taper = Taper(self.runner, queue=self.modules.queue)
        elif self.config.overlap and self.modules.device.type == "cpu":
            log.info("--overlap gains nothing here: on a CPU only compiled code runs beside the worker; add --compile")
        self.cache = OutputCache(self.config.encoder_cache_bytes)
        self.router = Router(self.spec, self.graph, modules=self.modules, scheduler=self.scheduler)
        self.ahead = self.router.remote.moves.ahead
        if not self.modules.places.is_alone:
            self.ahead.send, self.ahead.glance = self.end.send_to, self.glance
            self.runner.watch, self.runner.drain = self.ahead.watch, partial(self.ahead.drain, wait=True)
        is_graphed = self.config.cuda_graphs and not (self.config.enforce_eager or self.config.batch_invariant)
        if is_graphed and self.modules.device.type == "cuda":
            self._enter("capturing CUDA graphs")
            self.runner.graphs = GraphRunner(self.runner, CudaGraphs(self.modules.device))
            self.runner.graphs.capture_all(self.router.programs)

    def run(self) -> None:
        """Load, say Ready, and step until told to stop. Whatever ends it early is reported as Dead."""
        is_over = threading.Event()
        try:
            self._enter("reading weights")
            threading.Thread(target=self._watch, args=(is_over,), name="mstar-watchdog", daemon=True).start()
            self.load(lambda name, index, total: self._enter(f"compiling {name}, {index + 1} of {total}"))
            self._doing = None
            self.end.send(self.ready())
            pending: Step | None = None
            while not self.is_stopped:
                if self.config.overlap:
                    pending = self.overlapped_step(pending)
                else:
                    self.step()
            self.modules.fence()  # nothing is dropped while code runs on it
        except BaseException as error:  # whatever it is, the engine must not wait for ever
            if not isinstance(error, ConfigError | PluginError):
                log.exception("the worker stopped")
            self.end.send(Dead(reason=described(error)))
        finally:
            is_over.set()

    def step(self) -> None:
        """One turn of the loop."""
        self.receive()
        batch = self.schedule()
        if batch is not None:
            self._enter(".".join(batch.key))
            started = time.perf_counter()
            self.ahead.start_step(batch.works)
            finished = self.runner.run(batch)
            self.scheduler.record(batch, time.perf_counter() - started)
            self.route(finished)
        self.report()

    def overlapped_step(self, pending: Step | None) -> Step | None:
        """The same turn with the last step still running: it comes in as a value, this one's goes out.

        `step` is the oracle: every request gets the same results from both.
        """
        self.receive(is_running=pending is not None)
        batch = self.schedule(is_running=pending is not None)
        launched = self.launch(batch) if batch is not None else None
        if pending is not None:
            self._enter(".".join(pending.batch.key))
            self.route(self.finish(pending))
            if pending.running is not None:
                self.scheduler.record(pending.batch, pending.running.tape.seconds)
        if launched is not None:
            look_ahead(launched, self.scheduler)
        elif batch is not None:  # raised: now that the step before has been routed, find out whose fault it was
            live = _live(batch.works)
            if live:
                self._enter(".".join(batch.key))
                self.route(self.runner.run(Batch(batch.key, live)))
        self.report()
        return launched

    def finish(self, step: Step) -> Finished:
        """What a launched step gave. One that failed since runs again, task by task, to find out whose fault it was."""
        try:
            step.settle()
        except Exception:
            log.debug("a launched step failed; its tasks will run one by one", exc_info=True)
            for work in step.batch.works:
                if work.cursor.ahead is not None:  # first, as it was launched on what this step should have left
                    self.router.retract(work.cursor)
            self.runner.take_back(step)
            live = _live(step.batch.works)
            return self.runner.run(Batch(step.batch.key, live)) if live else Finished()
        return finish(step, self.modules)

    def launch(self, batch: Batch) -> Step | None:
        """Launch a batch; None if it raised."""
        self._enter(".".join(batch.key))
        started = time.perf_counter()
        try:
            self.ahead.start_step(batch.works)
            return self.runner.launch(batch)
        except (Exception, SystemExit):
            log.debug("a launched batch raised; its tasks will run one by one", exc_info=True)
            return None
        finally:
            self.scheduler.record(batch, time.perf_counter() - started)

    def receive(self, *, is_running: bool = False) -> None:
        """Take the engine's messages; wait for some only when there is nothing else to do."""
        timeout_s = BLOCKED_WAIT_S if self.is_blocked and not is_running else 0.0
        if not self.scheduler.has_work and not is_running:
            timeout_s = IDLE_WAIT_S if self._last_stats == self.stats() else STATS_INTERVAL_S
            if self.num_steps != self._checked_at_step and not self.router.requests:
                self._checked_at_step = self.num_steps
                self._report_leaks()
        self._doing = None
        kept, self._kept = self._kept, []
        messages = kept + self.end.receive(0.0 if kept else timeout_s)
        self._enter("the worker's own work between two steps")
        for message in messages:
            if isinstance(message, Shutdown):
                self.is_stopped = True
            elif isinstance(message, AskSteps):
                self._standstill.answer(message, num_steps=self.num_steps)
            elif isinstance(message, Steps):
                self._standstill.hear(message)
            else:
                self.router.handle(message)
        self.router.resume()
        self._post()

    def glance(self) -> None:
        """In the middle of a step: look whether what its sequences are waiting to be asked has come."""
        for message in self.end.receive(0.0):
            if not (isinstance(message, Want) and self.ahead.wanted(message)):
                self._kept.append(message)

    def schedule(self, *, is_running: bool = False) -> Batch | None:
        """The next batch. When work is ready but nothing can ever run, the youngest request fails, so others go on."""
        batch = self.cache.rest(self.scheduler.next_batch(), self.router.complete)
        while batch is None and (self.scheduler.has_moved or self.cache.has_answered):
            self.router.resume()
            batch = self.cache.rest(self.scheduler.next_batch(), self.router.complete)
        was_blocked, self.is_blocked = self.is_blocked, batch is None and self.scheduler.has_work and not is_running
        if not (self.is_blocked and was_blocked):
            self._standstill.ends()
        if self.is_blocked and not self._may_be_helped():
            self._standstill.eases()
            request = self.scheduler.victim_of_deadlock()
            message = "the KV cache is exhausted and nothing more can be moved to the host; raise --swap-space"
            self.router.fail(request, RequestError(message, status=503, code="kv_cache_exhausted"))
        return batch

    def _may_be_helped(self) -> bool:
        """Whether what blocks all work here may end without it: by the engine, or by other workers."""
        if self.modules.places.is_alone:
            return self.router.awaits_engine()
        routes = (request.info.route for request in self.router.requests.values())
        others = {other for route in routes for other in route} - {self.worker}
        return not self._standstill.is_total(others, is_patient=not self.scheduler.stuck())

    def route(self, finished: Finished) -> None:
        """Send what a batch gave on its way."""
        self.num_steps += 1
        for work in finished.unfinished:
            if not work.request.is_dead:
                if work.leaving is not None:
                    self.ahead.advance(work)
                self.scheduler.add(work)
        for work, error in finished.failed:
            self.router.fail(work.request, error)
        for work, values in finished.done:
            if work.is_rebuild:
                work.scope.tenant.num_rebuilding -= 1
            elif not work.request.is_dead:
                self.cache.keep(work, values)
                self.router.complete(work, values)

    def report(self) -> None:
        """Send the router's messages, and statistics now and then."""
        self._post()
        messages = self.router.output.messages
        for message in messages:  # which grow where one cannot cross
            try:
                self.end.send(message)
            except TypeError as error:
                self._cannot_send(message, error)
        messages.clear()
        now = time.monotonic()
        if now >= self._stats_due_s:
            self._stats_due_s = now + STATS_INTERVAL_S
            stats = self.stats()
            if stats != self._last_stats:
                self._last_stats = stats
                self.end.send(stats)

    def _post(self) -> None:
        """Send what other workers are told; what this one tells itself may lead to more."""
        posts = self.router.output.posts
        while posts:  # handling one may take others back
            worker, message = posts.pop(0)
            if worker == self.worker:
                self.router.handle(message)
                continue
            try:
                self.end.send_to(worker, message)
            except TypeError as error:
                self._cannot_send(message, error)

    def _cannot_send(self, message: FromWorker | Between, error: TypeError) -> None:
        assert isinstance(message, Emit | Parcel | WalkDone | Between), message
        request = self.router.requests.get(message.request_id)
        if request is not None:
            self.router.fail(request, PluginError(f"an output of the model cannot leave its process: {error}"))

    def ready(self) -> Ready:
        """What the worker holds, for the start-up log and for admission."""
        plan = []
        for module in self.modules.by_name.values():
            pool = module.pool
            num_pages = pool.num_usable if pool else 0
            kv_bytes = num_pages * pool.page_bytes if pool else 0
            plan.append((module.name, module.weights_bytes, kv_bytes, num_pages * pool.page_size if pool else 0))
        compiled = Compiled(
            num_methods=len(self.compilation.compiled),
            num_built=kernels.compile_cache().counters.builds if self.config.compile else 0,
            seconds=self.compilation.seconds,
        )
        ranks = () if self.team is None else tuple(self.team.pids)
        return Ready(plan=plan, max_model_len=self.modules.max_model_len, compiled=compiled, ranks=ranks)

    def stats(self) -> Stats:
        pools = {m.name: m.pool for m in self.modules.by_name.values() if m.pool is not None}
        return Stats(
            running=len(self.router.requests),
            waiting=sum(1 for _ in self.scheduler.works()),
            steps=self.num_steps,
            pools={name: (pool.num_used, pool.num_usable) for name, pool in pools.items()},
            slots_used=sum(m.slots.num_used for m in self.modules.by_name.values()),
            swapped=sum(tenant.is_swapped for tenant in self.router.holdings.tenants()),
            swaps=self.scheduler.num_swaps,
            cache_hit_tokens=sum(pool.hit_tokens for pool in pools.values()),
            cache_queried_tokens=sum(pool.queried_tokens for pool in pools.values()),
            encoder_cache=(self.cache.num_queries, self.cache.num_hits, self.cache.num_bytes),
            method_s={
                f"{module.name}.{method}": (int(calls), int(rows), seconds)
                for module in self.modules.by_name.values()
                for method, (calls, rows, seconds) in module.method_s.items()
            },
        )

    def _enter(self, step: str) -> None:
        self._doing = (step, time.monotonic())

    def _watch(self, is_over: threading.Event) -> None:
        """The watchdog: reports a step that lasts, from a thread of its own since the step blocks the worker's."""
        reported: tuple[str, float] | None = None
        while not is_over.wait(BEAT_INTERVAL_S):
            doing = self._doing
            if reported is not None and doing is not reported:
                self.end.send(Beat(step=reported[0], seconds=0.0))
                reported = None
            if doing is not None and (seconds := time.monotonic() - doing[1]) >= LONG_STEP_S:
                self.end.send(Beat(step=doing[0], seconds=seconds))
                reported = doing

    def _report_leaks(self) -> None:
        try:
            self.check_integrity()
        except AssertionError:
            log.exception("pools and slots do not hold what sessions hold: a leak in the engine; please report it")

    def check_integrity(self) -> None:
        """Assert that pools and slots hold exactly what requests and sessions hold."""
        self.modules.check_integrity(self.router.holdings.scopes())
        self.cache.check_integrity()


def _live(works: list[Work]) -> list[Work]:
    return [work for work in works if not work.is_cancelled and not work.request.is_dead]
