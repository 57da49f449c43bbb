"""The worker: drives core.dispatch with store. Claims, hands out, settles, rescues, stops cleanly.

One event loop owns all state. Three lanes with a held connection each (claim, settle, leases) and one
LISTEN connection. No lane is ever cancelled in mid-statement, and an error in one loop restarts that
loop, never the worker. Installs no signal handlers: worker.__main__ does.
"""

import asyncio
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from sqla_jobs.core.dispatch import Claim, Dispatcher, Wait
from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus, Released, Verdict, judge
from sqla_jobs.errors import AppError, ConfigurationError, ConnectionLost
from sqla_jobs.events import Events
from sqla_jobs.store.claim import ClaimedJob, claim, next_due_in, release_unknown
from sqla_jobs.store.door import Lane, brief, lane_on
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker.engines import Engines
from sqla_jobs.worker.leases import LeaseKeeper
from sqla_jobs.worker.maintenance import Maintenance
from sqla_jobs.worker.run import Ended, Run, Runner
from sqla_jobs.worker.settling import Settler
from sqla_jobs.worker.slots import Slots
from sqla_jobs.worker.startup import check_options, connect_only, import_tasks, reach_database
from sqla_jobs.worker.wakeup import Wakeups

__all__ = ["Worker"]

CLEAN, FORCED, DRAIN_TIMED_OUT = 0, 1, 6

#: Jobs whose kind nobody here knows come back after this long: another worker may know it.
_UNKNOWN_KIND_DELAY = timedelta(seconds=30)


class Worker:
    """Runs the jobs of some queues until it is stopped.

    Give it a URL (both kinds of engine are made, pools sized from `concurrency`) or engines, which are
    used as they are; without either, those of `jobs`. `queues` defaults to the queues of the registered
    tasks. `mode="drain"` ends when nothing is due any more.

    `run` returns the exit code: 0 clean, 1 forced by a second `stop`, 6 drain timed out. It raises
    `ConfigurationError`, `AppError` (no task), `SchemaMismatch`, or `DatabaseUnreachable` at start-up.

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
        lease: timedelta = timedelta(seconds=60),
        poll_interval: timedelta = timedelta(seconds=5),
        drain_timeout: timedelta = timedelta(seconds=25),
        listen: bool = True,
        mode: Literal["continuous", "drain"] = "continuous",
        name: str | None = None,
        startup_timeout: timedelta = timedelta(seconds=30),
        events: Events | None = None,
    ) -> None:
        check_options(concurrency, lease=lease, poll_interval=poll_interval, drain_timeout=drain_timeout)
        if isinstance(queues, str):
            raise ConfigurationError(f"queues takes several names, got one: write [{queues!r}]")
        import_tasks(jobs.imports)
        if not jobs.tasks:
            raise AppError(
                "no task is registered: import the modules that define them, or name them in "
                "Jobs(imports=[...])"
            )
        if engine is None and async_engine is None and url is None:
            engine, async_engine = jobs.engine, jobs.async_engine
        self.jobs = jobs
        self.queues: tuple[str, ...] = tuple(
            dict.fromkeys(queues or sorted({task.options.queue for task in jobs.tasks.values()}))
        )
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
        self._lease = lease
        self._poll = poll_interval.total_seconds()
        self._drain_timeout = drain_timeout.total_seconds()
        self._startup_timeout = startup_timeout.total_seconds()
        self._listens = listen
        self._mode = mode
        self._retention = jobs.retention
        self._tables = jobs.tables
        self._stops = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline = min(max(lease.total_seconds() / 2, 1.0), 10.0)

    # -- from outside

    def stop(self) -> None:
        """Stop claiming, finish what runs within the drain time; a second call ends at once.

        From any thread, at any time, also before `run`.
        """
        self._stops += 1
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._notice_stop)

    async def run(self) -> int:
        """Work until stopped (or drained); the exit code."""
        self._begin()
        try:
            await reach_database(
                self._claim_lane,
                self._tables,
                patience=self._startup_timeout,
                stopping=self._stopping,
                events=self.events,
            )
            return await self._work()
        finally:
            for lane in (self._claim_lane, self._settle_lane):
                await lane.close()
            await self._engines.dispose()

    # -- start

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        engine = self._engines.asynchronous or self._engines.sync
        assert engine is not None
        self._claim_lane: Lane = lane_on(
            engine, "claims", pooled=partial(self._engines.pooler_found, self.events)
        )
        self._settle_lane: Lane = lane_on(engine, "settles")
        self._claim_lock = asyncio.Lock()
        self._dispatch = Dispatcher(
            queues=self.queues, concurrency=self.concurrency, poll=self._poll, now=time.monotonic()
        )
        self._runner = Runner(
            self._tables,
            engine=self._engines.sync,
            async_engine=self._engines.asynchronous,
            retention=self._retention,
        )
        self._slots = Slots(self._runner, concurrency=self.concurrency, finished=self._finished)
        self._keeper = LeaseKeeper(
            self._tables,
            engine=self._engines.sync,
            async_engine=self._engines.asynchronous,
            lease=self._lease,
            lost=self._leases_lost,
            cancel_requested=self._cancel_requested,
            events=self.events,
        )
        self._settler = Settler(
            self._tables,
            self._settle_lane,
            retention=self._retention,
            deadline=self._deadline,
            busy=self._has_backlog,
            answered=self._answered,
            events=self.events,
        )
        self._maintenance = Maintenance(
            self.jobs,
            queues=self.queues,
            lease=self._lease,
            on_lane=self._on_claim_lane,
            events=self.events,
        )
        self._held: dict[Lease, Run] = {}
        self._reported: set[Lease] = set()  # told as lost, and returned all the same
        self._orphans: dict[str, list[float]] = {}
        self._claim_failures = 0
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._notice_stop()

    async def _work(self) -> int:
        self.events.emit(
            "worker.started",
            worker=self.id,
            queues=self.queues,
            concurrency=self.concurrency,
            kinds=sorted(self.jobs.tasks),
        )
        self._keeper.start()
        with suppress(Exception):  # connect now: later the pool may be full of handlers' sessions
            await self._settle_lane.run(connect_only, deadline=self._deadline)
        claims = self._start("claims", self._claim_loop)
        settles = self._start("settles", self._settler.run)
        maintenance = self._start("maintenance", partial(self._maintenance.run, self._stopping))
        wakeups = self._start("wake-ups", self._wakeups().listen)
        await self._stopping.wait()
        wakeups.cancel()  # now: a connect under way takes its time to end
        code = await self._drain(claims)
        self._settler.close()
        # every statement has a deadline, but a server that is frozen may take one after the other to it
        await asyncio.wait({settles, maintenance}, timeout=self._deadline + 2)
        await asyncio.wait({wakeups})
        await self._keeper.stop()
        await self._slots.gone()
        self.events.emit("worker.stopped", worker=self.id, exit_code=code)
        return code

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
            await asyncio.sleep(pause)
            pause = min(pause * 2, 10.0)

    def _has_backlog(self) -> bool:
        """Whether more outcomes are about to come; then a flush may wait a moment for them."""
        return self._slots.waiting > 0 and not self._stopping.is_set()

    def _wakeups(self) -> Wakeups:
        return Wakeups(
            self._tables,
            self._engines.for_listen if self._listens else None,
            own_url=self._engines.listening is not None,
            poll=self._poll,
            on_lane=self._on_claim_lane,
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

    def _finished(self, burst: list[Ended]) -> None:
        """Runs have ended: their slots are free, their outcomes go to the settle lane."""
        ended = 0
        for it in burst:
            job = it.run.job
            if self._held.pop(job.lease, None) is None:
                continue  # given back or lost while it ran
            ended += 1
            if it.verdict is not None:
                # also after the lease's end by our own clock: perhaps nobody has taken the job over yet.
                # The fence decides; thrown away, a failed attempt could be given back uncounted
                if it.run.told:
                    self._reported.add(job.lease)
                self._settler.add(job, it.verdict)
            elif it.written is not None:
                self._answered(job.lease.queue, [(job, it.written)], [])
            else:
                self._answered(job.lease.queue, [], [job])
        self._dispatch.ended(ended, now=time.monotonic())
        self._changed.set()

    def _answered(
        self, queue: str, written: list[tuple[ClaimedJob, Verdict]], stale: list[ClaimedJob]
    ) -> None:
        """The database has the last word on these."""
        self._keeper.closed([job.lease for job, _ in written] + [job.lease for job in stale])
        if written:
            self.events.emit("job.settled", settled=written)
        for job in stale:
            if job.lease not in self._reported:
                self._tell_lost(job, "taken over before its outcome was written")
        if self._reported:
            self._reported.difference_update([job.lease for job, _ in written], [job.lease for job in stale])
        now = time.monotonic()
        for _, verdict in written:
            if verdict.status is JobStatus.READY:
                delay = 0.0 if verdict.delay is None else verdict.delay.total_seconds()
                self._dispatch.woken(queue, now=now, due_in=delay)
        self._settled(len(written) + len(stale))

    def _settled(self, count: int) -> None:
        self._dispatch.settled(count)
        self._changed.set()
        if self._dispatch.held == 0:
            self._all_settled.set()

    # -- claim

    async def _claim_loop(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            step = self._dispatch.next(time.monotonic())
            if isinstance(step, Claim):
                await self._claim(step)
                continue
            if self._mode == "drain" and self._dispatch.drained and not self._stops:
                self.stop()
            await self._wait_for_change(step)

    async def _wait_for_change(self, step: Wait) -> None:
        seconds = None if step.until is None else max(step.until - time.monotonic(), 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _claim(self, step: Claim) -> None:
        verb = partial(
            claim,
            tables=self._tables,
            queue=step.queue,
            owner=self.id,
            limit=step.limit,
            lease=self._lease,
            prefetch=step.prefetch,
        )
        try:
            async with self._claim_lock:
                await self._release_orphans(step.queue)
                # before the claim: what becomes due between the two is claimed, what comes later is known
                due_in = await self._look_ahead(step.queue) if step.look_ahead else None
                sent = time.monotonic()
                jobs = await self._claim_lane.run(verb, deadline=self._deadline)
        except Exception as error:
            self._claim_failed(step, error)
            return
        self._claim_failures = 0
        self._dispatch.claimed(step, got=len(jobs), now=time.monotonic(), spread=random.random())
        self._hand_out(jobs, sent)
        if due_in is not None and len(jobs) < step.limit:
            now = time.monotonic()
            self._dispatch.woken(step.queue, now=now, due_in=due_in - (now - sent))

    def _claim_failed(self, step: Claim, error: Exception) -> None:
        """The answer is lost: what it took runs for nobody, and is looked for before the next claim."""
        self._claim_failures += 1
        pause = min(0.25 * 2**self._claim_failures, 10.0) * (0.5 + random.random() / 2)
        now = time.monotonic()
        if isinstance(error, ConnectionLost):
            # once at once, and once more: a server that did not notice the cut may still be at it
            self._orphans[step.queue] = [now, now + 10.0]
        self.events.emit("database.error", operation="claim", error=brief(error), retry_in=pause)
        self._dispatch.claim_failed(step, retry_at=now + pause)

    async def _release_orphans(self, queue: str) -> None:
        due = self._orphans.get(queue)
        if not due or due[0] > time.monotonic():
            return
        known = [each.id for each in (*self._held, *self._settler.leases()) if each.queue == queue]
        released = await self._claim_lane.run(
            partial(release_unknown, tables=self._tables, queue=queue, owner=self.id, known=known),
            deadline=self._deadline,
        )
        due.pop(0)
        if not due:
            del self._orphans[queue]
        if released:
            self.events.emit("job.released", jobs=released, reason="the answer to their claim was lost")

    async def _look_ahead(self, queue: str) -> float | None:
        """Seconds until the next job of a queue becomes due, for those that no wake-up told of."""
        verb = partial(next_due_in, tables=self._tables, queue=queue)
        return await self._claim_lane.run(verb, deadline=self._deadline)

    async def _on_claim_lane(self, verb: Callable[[Connection], Any]) -> Any:
        """A lane runs one verb at a time; maintenance shares this one."""
        async with self._claim_lock:
            return await self._claim_lane.run(verb, deadline=self._deadline)

    def _hand_out(self, jobs: Sequence[ClaimedJob], sent: float) -> None:
        if not jobs:
            return
        self._keeper.opened([job.lease for job in jobs], sent=sent)
        runs: list[Run] = []
        tasks = self.jobs.tasks
        for job in jobs:
            task = tasks.get(job.kind)
            run = Run(job=job, task=task)  # type: ignore[arg-type]
            self._held[job.lease] = run
            if task is None:
                self.events.emit("job.unknown_kind", job=job.lease.id, kind=job.kind, queue=job.lease.queue)
                self._give_back(run, delay=_UNKNOWN_KIND_DELAY, reason="unknown kind")
            else:
                runs.append(run)
        self.events.emit("job.claimed", jobs=jobs)
        if self._stopping.is_set():
            for run in runs:
                self._give_back(run)
        elif runs:
            self._slots.add(runs)

    def _give_back(self, run: Run, *, delay: timedelta | None = None, reason: str = "drain") -> None:
        """Release a job that has not run, or that cannot be waited for any more."""
        if self._held.pop(run.job.lease, None) is None:
            return
        run.released = True
        if run.lost:
            self._dispatch.ended(1, now=time.monotonic())
            self._settled(1)
            return
        verdict = judge(Released(delay), attempt=run.job.attempt, max_attempts=run.job.max_attempts)
        self._settler.add(run.job, verdict)
        self.events.emit("job.released", jobs=[run.job], reason=reason)
        self._dispatch.ended(1, now=time.monotonic())

    # -- leases, from the lease lane's thread

    def _leases_lost(self, leases: list[Lease], reason: str) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_lost, leases, reason)

    def _end_lost(self, leases: list[Lease], reason: str) -> None:
        for lease in leases:
            run = self._held.get(lease)
            if run is None or run.ended:
                continue  # its outcome is under way: the fence decides
            # it stays among the held until it really ends: its slot is taken, and it must not be given
            # back as if the answer to its claim had been lost
            run.lost = True
            run.cancel()
            self._report_lost(run, reason)

    def _report_lost(self, run: Run, reason: str) -> None:
        if not run.told:
            run.told = True
            self._tell_lost(run.job, reason)

    def _tell_lost(self, job: ClaimedJob, reason: str) -> None:
        lease = job.lease
        self.events.emit(
            "lease.lost",
            job=lease.id,
            queue=lease.queue,
            kind=job.kind,
            fencing_token=lease.token,
            reason=reason,
        )

    def _cancel_requested(self, leases: list[Lease]) -> None:
        """Cooperative: the handler may look at ctx.cancelled."""
        for lease in leases:
            run = self._held.get(lease)
            if run is not None:
                run.cancelled = True

    # -- stop

    def _notice_stop(self) -> None:
        if self._stops:
            self._stopping.set()
            self._dispatch.stop()
            self._changed.set()
        if self._stops > 1:
            self._forced.set()

    async def _drain(self, claims: asyncio.Task[None]) -> int:
        """Finish what runs within the drain time, give the rest back. The exit code."""
        for run in self._slots.close():
            self._give_back(run)
        self.events.emit("worker.draining", worker=self.id, open=len(self._held), seconds=self._drain_timeout)
        # a claim under way ends, within its deadline; what it brings is given back
        await asyncio.wait({claims}, timeout=self._deadline + 2)
        await self._wait_until_settled(self._drain_timeout)
        if not self._dispatch.held:
            return FORCED if self._forced.is_set() else CLEAN
        if not self._held:
            # everything has ended; only outcomes are left, which no handler can hurry
            await self._flush()
            code = DRAIN_TIMED_OUT if self._dispatch.held else CLEAN
            return FORCED if self._forced.is_set() else code
        for run in list(self._held.values()):
            run.draining = True
            run.cancel()
        await asyncio.sleep(0)
        await self._wait_until_settled(1.0, patient=True)
        for run in list(self._held.values()):
            self._give_back(run)  # a thread that cannot be stopped, or a coroutine that swallows its end
        await self._flush()
        return FORCED if self._forced.is_set() else DRAIN_TIMED_OUT

    async def _flush(self) -> None:
        """The last outcomes: handed to the settle lane, which is given its time."""
        await asyncio.sleep(0)
        await self._wait_until_settled(self._deadline, patient=True)
        self._settler.close(give_up=True)  # what cannot be written now is left to the lease

    async def _wait_until_settled(self, seconds: float, *, patient: bool = False) -> None:
        """Until nothing is held, the time is over, or (unless patient) a second stop."""
        if not self._dispatch.held:
            return
        self._all_settled.clear()
        waits = [asyncio.ensure_future(self._all_settled.wait())]
        if not patient:
            waits.append(asyncio.ensure_future(self._forced.wait()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
