"""The worker: drives core.dispatch with store. Claims, hands out, settles, rescues, stops cleanly.

One event loop owns all state. Three lanes with a held connection each (claim, settle, leases) and one
LISTEN connection. No lane is ever cancelled in mid-statement, and an error in one loop restarts that
loop, never the worker. Installs no signal handlers: worker.program does.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from uuid import uuid4

import anyio
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from sqla_jobs.core.dispatch import Claim, Dispatcher, Wait
from sqla_jobs.core.leases import Lease
from sqla_jobs.errors import AppError
from sqla_jobs.events import Events
from sqla_jobs.store.door import Lane, lane_on
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker.claims import Claims
from sqla_jobs.worker.custody import Custody
from sqla_jobs.worker.engines import Engines
from sqla_jobs.worker.health import Health, address
from sqla_jobs.worker.maintenance import Maintenance
from sqla_jobs.worker.recycling import watch
from sqla_jobs.worker.run import Run
from sqla_jobs.worker.settings import Mode, Settings, queue_names
from sqla_jobs.worker.startup import capacity, connect_only, import_tasks, reach_database
from sqla_jobs.worker.wakeup import Wakeups

__all__ = ["Worker"]

CLEAN, FORCED, DRAIN_TIMED_OUT, RECYCLED = 0, 1, 6, 7
#: Seconds beyond the drain time for all that is left: a claim under way, outcomes, connections. What the
#: database has not answered by then it may never answer; its lease ends, and another worker has the job.
FAREWELL = 4.0


class Worker:
    """Runs the jobs of some queues until it is stopped.

    Give it a URL (both kinds of engine are made, pools sized from `concurrency`) or engines, which are
    used as they are; without either, those of `jobs`. `queues` defaults to the queues of the registered
    tasks. `threads` limits the attempts that run in threads (default: as `concurrency`). `mode="drain"`
    ends when nothing is due any more, `mode="once"` when what one claim of each queue brought has ended.
    `max_jobs`, `max_runtime` and `max_memory` (bytes) end it when it has done enough. `health_bind`
    (`"9090"`, `"0.0.0.0:9090"`) opens probes over HTTP; they are closed by default.

    `run` returns the exit code: 0 clean, 1 forced by a second `stop`, 6 drain timed out, 7 it has done
    enough, or an attempt is stuck in a thread: then end the process. It raises `ConfigurationError`,
    `AppError` (no task), `SchemaMismatch`, or `DatabaseUnreachable` at start-up.

    >>> from sqla_jobs import Jobs
    >>> jobs = Jobs()
    >>> @jobs.task(name="ping")
    ... def ping() -> None: ...
    >>> worker = Worker(jobs, url="postgresql://localhost/app", concurrency=4)
    >>> worker.queues
    ('default',)
    """

    def __init__(
        self,
        jobs: Jobs,
        *,
        engine: Engine | None = None,
        async_engine: AsyncEngine | None = None,
        url: str | URL | None = None,
        listen_url: str | URL | None = None,
        queues: Iterable[str] | None = None,
        concurrency: int = 10,
        threads: int | None = None,
        lease: timedelta = timedelta(seconds=60),
        poll_interval: timedelta = timedelta(seconds=5),
        drain_timeout: timedelta = timedelta(seconds=25),
        listen: bool = True,
        mode: Mode = "continuous",
        max_jobs: int | None = None,
        max_runtime: timedelta | None = None,
        max_memory: int | None = None,
        health_bind: str | None = None,
        name: str | None = None,
        startup_timeout: timedelta = timedelta(seconds=30),
        events: Events | None = None,
    ) -> None:
        import_tasks(jobs.imports)
        if not jobs.tasks:
            raise AppError(
                "no task is registered: import the modules that define them, or name them in "
                "Jobs(imports=[...])"
            )
        self._settings = Settings(
            queues=queue_names(queues, (task.options.queue for task in jobs.tasks.values())),
            concurrency=concurrency,
            threads=concurrency if threads is None else threads,
            lease=lease,
            poll_interval=poll_interval,
            drain_timeout=drain_timeout,
            startup_timeout=startup_timeout,
            mode=mode,
            max_jobs=max_jobs,
            max_runtime=max_runtime,
            max_memory=max_memory,
        )
        if engine is None and async_engine is None and url is None:
            engine, async_engine = jobs.engine, jobs.async_engine
        self.jobs = jobs
        self.queues: tuple[str, ...] = self._settings.queues
        self.concurrency = concurrency
        self.events = events or Events()
        # unique per process start: a restart that gets the same pid must not own its ancestor's leases
        self.id = f"{name or socket.gethostname()}:{os.getpid()}:{uuid4().hex[:12]}"
        self._engines = Engines.choose(
            engine=engine,
            async_engine=async_engine,
            url=url,
            listen_url=listen_url,
            concurrency=concurrency,
        )
        self._engines.check(jobs.tasks.values())
        self._listens = listen
        if health_bind is not None:
            address(health_bind)
        self._health_bind = health_bind
        self._health: Health | None = None
        self._tables = jobs.tables
        self._stops = 0
        self._ends_by_itself = False
        self._quiet = False
        self._recycled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: float | None = None  # when the stop must be over
        #: After `run`: something still waits for a dead connection. A process that ends need not wait for it.
        self.left_behind = False

    # -- from outside

    def stop(self) -> None:
        """Stop claiming, finish what runs within the drain time; a second call ends at once.

        From any thread, at any time, also before `run`.
        """
        self._stops += 1
        self._call(self._notice_stop)

    def quiet(self, quiet: bool = True) -> None:
        """Claim nothing and keep running, until `quiet(False)`: what runs goes on. From any thread."""
        self._quiet = quiet
        self._call(self._notice_quiet)

    def _call(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(callback)

    async def run(self) -> int:
        """Work until stopped (or drained); the exit code.

        Cancelling it is the same as `stop`: it drains, and is cancelled then.
        """
        self._begin()
        with ExitStack() as stack:
            if self._health_bind is not None:
                self._health = stack.enter_context(Health(self._health_bind))
                beats = asyncio.create_task(self._beat(self._health), name="sqla_jobs health")
                stack.callback(beats.cancel)
            try:
                if not await self._reached_before_a_stop():
                    return self._code(CLEAN)
                return await self._work()
            finally:
                await self._close()

    async def _reached_before_a_stop(self) -> bool:
        """Whether the database was reached; a connect under way on a silent host is not waited for then."""
        reaching = asyncio.ensure_future(self._reach_database())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({reaching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if reaching.done():
                reaching.result()
                return True
            self.left_behind = True
            self._over = time.monotonic()
            return False
        finally:
            stopping.cancel()
            if not reaching.done():
                reaching.cancel()

    async def _beat(self, health: Health) -> None:
        while True:
            health.beat()
            health.stopping = self._stopping.is_set()
            health.claims_fail = self._claims.failing
            await asyncio.sleep(0.5)

    async def check(self) -> None:
        """Only what comes before the work: the database is reached and has our schema.

        Raises `SchemaMismatch` or `DatabaseUnreachable`.
        """
        self._begin()
        try:
            await self._reach_database()
        finally:
            await self._close()

    async def _reach_database(self) -> None:
        await reach_database(
            self._claim_lane,
            self._tables,
            patience=self._settings.startup_timeout.total_seconds(),
            stopping=self._stopping,
            events=self.events,
        )

    async def _close(self) -> None:
        closing = asyncio.ensure_future(self._close_connections())
        await asyncio.wait({closing}, timeout=None if self._over is None else _until(self._over))
        if closing.done():
            closing.result()
        else:
            self.left_behind = True

    async def _close_connections(self) -> None:
        for lane in (self._claim_lane, self._settle_lane):
            await lane.close()
        await self._engines.dispose()

    # -- start

    def _begin(self) -> None:
        self._over = None
        self.left_behind = False
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        engine = self._engines.asynchronous or self._engines.sync
        assert engine is not None
        self._claim_lane: Lane = lane_on(
            engine, "claims", pooled=partial(self._engines.pooler_found, self.events)
        )
        self._settle_lane: Lane = lane_on(engine, "settles")
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._dispatch = Dispatcher(
            queues=self.queues,
            concurrency=settings.concurrency,
            poll=settings.poll,
            now=time.monotonic(),
            once=settings.mode == "once",
            budget=settings.max_jobs,
        )
        self._custody = Custody(
            self.jobs,
            settings,
            engines=self._engines,
            settle_lane=self._settle_lane,
            dispatch=self._dispatch,
            changed=self._changed.set,
            stuck=self._is_stuck,
            events=self.events,
        )
        self._claims = Claims(
            self._tables,
            self._claim_lane,
            owner=self.id,
            lease=settings.lease,
            deadline=settings.deadline,
            dispatch=self._dispatch,
            held=self._custody.leases,
            hand_out=self._custody.hand_out,
            events=self.events,
        )
        self._maintenance = Maintenance(
            self.jobs,
            queues=self.queues,
            lease=settings.lease,
            on_lane=self._claims.on_lane,
            events=self.events,
        )
        self._notice_stop()

    @property
    def _held(self) -> dict[Lease, Run]:
        return self._custody.held

    async def _work(self) -> int:
        self.events.emit(
            "worker.started",
            worker=self.id,
            queues=self.queues,
            concurrency=self.concurrency,
            kinds=sorted(self.jobs.tasks),
            retention=str(self.jobs.retention),
        )
        for queue in set(self.queues) - {task.options.queue for task in self.jobs.tasks.values()}:
            self.events.emit("queue.without_task", queue=queue)  # a typo, perhaps
        self._remark_small_pools()
        if self._health is not None:
            self._health.started = True
        self._custody.keeper.start()
        with suppress(Exception):  # connect now: later the pool may be full of handlers' sessions
            await self._settle_lane.run(connect_only, deadline=self._settings.deadline)
        claims = self._start("claims", self._claim_loop)
        settles = self._start("settles", self._custody.settler.run)
        others = {
            self._start("maintenance", partial(self._maintenance.run, self._stopping)),
            self._start("remarks", partial(self._custody.remark, self._stopping, self._claims.on_lane)),
            self._start("recycling", self._watch),
        }
        wakeups = self._start("wake-ups", self._wakeups().listen)
        ends = self._start("lease ends", self._custody.keeper.watch_ends)
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._stopping.wait()
        except asyncio.CancelledError as error:
            cancelled = error  # whoever runs us in a task of theirs: the same as a stop
            self.stop()
        ending = asyncio.ensure_future(self._end(claims, settles, others, wakeups, ends))
        with anyio.CancelScope(shield=True):  # a scope of anyio's would cancel every wait of the drain
            while not ending.done():
                try:
                    await asyncio.wait({ending})
                except asyncio.CancelledError as error:
                    cancelled = error
                    self.stop()
        code = ending.result()
        if cancelled is not None:
            raise cancelled
        return code

    async def _end(
        self,
        claims: asyncio.Task[None],
        settles: asyncio.Task[None],
        others: set[asyncio.Task[None]],
        wakeups: asyncio.Task[None],
        ends: asyncio.Task[None],
    ) -> int:
        wakeups.cancel()  # now: a connect under way takes its time to end
        drained_at = time.monotonic() + self._settings.drain_timeout.total_seconds()
        code = await self._drain(claims, drained_at)
        self._custody.settler.close()
        # every statement has a deadline, but behind a dead network one after the other would take its own
        over = self._over = drained_at + FAREWELL
        await asyncio.wait({settles, *others}, timeout=_until(over - 1.0))
        ends.cancel()  # through the drain: a lease may end in it
        await asyncio.wait({wakeups, ends}, timeout=_until(over - 1.0))
        await self._custody.gone(_until(over - 0.5))
        self.left_behind = not all(each.done() for each in (claims, settles, *others, wakeups, ends))
        self.events.emit("worker.stopped", worker=self.id, exit_code=code)
        return code

    def _remark_small_pools(self) -> None:
        """A pool with less room than attempts have sessions: they will wait for each other."""
        tasks = [task for task in self.jobs.tasks.values() if task.takes_context or task.takes_entities]
        for engine, name, wanted, is_async in (
            (self._engines.sync, "engine", min(self._settings.threads, self.concurrency), False),
            (self._engines.asynchronous, "async_engine", self.concurrency, True),
        ):
            if engine is None or not any(task.is_async is is_async for task in tasks):
                continue
            room = capacity(engine)
            if room is not None and room < wanted:
                self.events.emit("pool.small", engine=name, connections=room, wanted=wanted)

    def _start(self, name: str, loop: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return asyncio.create_task(self._forever(name, loop), name=f"sqla_jobs {name}")

    async def _forever(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """A side loop that dies unnoticed is a worker that looks healthy and does nothing."""
        pause = 0.1
        while True:
            try:
                return await loop()
            except Exception as error:
                self.events.emit("loop.crashed", loop=name, error=repr(error), retry_in=pause)
                self._dispatch.woken(None, now=time.monotonic())  # a claim may have died with its answer
            if self._health is not None:
                self._health.down.add(name)
            await asyncio.sleep(pause)
            if self._health is not None:
                self._health.down.discard(name)
            pause = min(pause * 2, 10.0)

    def _wakeups(self) -> Wakeups:
        return Wakeups(
            self._tables,
            self._engines.for_listen if self._listens else None,
            own_url=self._engines.listening is not None,
            poll=self._settings.poll,
            on_lane=self._claims.on_lane,
            woken=self._woken,
            alive=self._alive,
            events=self.events,
        )

    # -- facts, in the loop

    def _woken(self, queue: str | None, due_in: float) -> None:
        self._dispatch.woken(queue, now=time.monotonic(), due_in=due_in)
        self._changed.set()

    def _alive(self, alive: bool) -> None:
        self._dispatch.listening(alive, now=time.monotonic())
        self._changed.set()

    def _notice_quiet(self) -> None:
        self.events.emit("worker.quiet", worker=self.id, quiet=self._quiet)
        self._changed.set()

    def _is_stuck(self, run: Run) -> None:
        self._recycle(f"job {run.job.lease.id} ({run.job.kind}) does not end after its time limit")

    async def _watch(self) -> None:
        await watch(
            max_runtime=self._settings.max_runtime,
            max_memory=self._settings.max_memory,
            reached=self._recycle,
            stopping=self._stopping,
        )

    def _recycle(self, reason: str) -> None:
        """Whoever watches over the process starts another."""
        if self._recycled:
            return
        self._recycled = True
        self.events.emit("worker.recycling", worker=self.id, reason=reason)
        self._end_by_itself()

    # -- claim

    async def _claim_loop(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            if self._quiet:
                await self._changed.wait()
                continue
            step = self._dispatch.next(time.monotonic())
            if isinstance(step, Claim):
                await self._claims.make(step)
                continue
            if self._dispatch.spent:
                self._recycle(f"it has run {self._settings.max_jobs} jobs")
            elif self._settings.mode != "continuous" and self._dispatch.drained:
                self._end_by_itself()
            await self._wait_for_change(step)

    async def _wait_for_change(self, step: Wait) -> None:
        seconds = None if step.until is None else max(step.until - time.monotonic(), 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # -- stop

    def _end_by_itself(self) -> None:
        """The same as a stop, but none of anybody's: the next one does not force it."""
        self._ends_by_itself = True
        self._notice_stop()

    def _notice_stop(self) -> None:
        if self._stops or self._ends_by_itself:
            self._stopping.set()
            self._dispatch.stop()
            self._changed.set()
        if self._stops > 1:
            self._forced.set()

    async def _drain(self, claims: asyncio.Task[None], drained_at: float) -> int:
        """Finish what runs until then, give the rest back. The exit code."""
        custody, seconds = self._custody, self._settings.drain_timeout.total_seconds()
        over = drained_at + FAREWELL
        custody.close()
        self.events.emit("worker.draining", worker=self.id, open=len(custody.held), seconds=seconds)
        await custody.settled(_until(drained_at), forced=self._forced)
        # a claim under way ends; what it brings is given back
        await asyncio.wait({claims}, timeout=1.0 if self._forced.is_set() else _until(over - 1.5))
        if claims.done():
            orphans = asyncio.ensure_future(self._claims.give_back_orphans())
            await asyncio.wait({orphans}, timeout=1.0 if self._forced.is_set() else _until(over - 1.5))
        if custody.held:
            await custody.end()
            await custody.flush(_until(over - 1.5))
            return self._code(DRAIN_TIMED_OUT)
        # everything has ended; only outcomes are left, which no handler can hurry
        return self._code(CLEAN if await custody.flush(_until(over - 1.5)) else DRAIN_TIMED_OUT)

    def _code(self, otherwise: int) -> int:
        if self._forced.is_set():
            return FORCED
        return RECYCLED if self._recycled else otherwise


def _until(when: float) -> float:
    """Seconds; a moment at least, for what needs no more than one."""
    return max(when - time.monotonic(), 0.3)
