"""Jobs in the worker's custody: claimed, and not yet answered for by the database.

Hands them to the slots, sends their outcomes to the settle lane, reacts to lost leases, cancel requests
and time limits, and gives back what does not run. Does not claim and does not decide when to stop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection

from sqla_jobs.core.dispatch import Dispatcher
from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus, Released, Verdict, judge
from sqla_jobs.events import Events
from sqla_jobs.store.claim import ClaimedJob
from sqla_jobs.store.door import Lane, end_backends
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker.engines import Engines
from sqla_jobs.worker.leases import LeaseKeeper
from sqla_jobs.worker.limits import TimeLimits
from sqla_jobs.worker.run import Ended, Run, Runner
from sqla_jobs.worker.settings import Settings
from sqla_jobs.worker.settling import Settler
from sqla_jobs.worker.slots import Slots

__all__ = ["Custody"]

OnLane = Callable[[Callable[[Connection], Any]], Awaitable[Any]]

#: Jobs whose kind nobody here knows come back after this long: another worker may know it.
_UNKNOWN_KIND_DELAY = timedelta(seconds=30)
#: A last attempt that finds no free thread waits outside, so that a crash beside it does not fail it.
_NO_THREAD_DELAY = timedelta(seconds=1)
#: An attempt that lasts longer than so many leases is remarked upon, once.
_LONG = 10
#: So long a ctx.session may hold a transaction open before it is remarked upon: it holds back vacuum.
_SESSION_LONG = 60.0


_NOT_WRITABLE = "its outcome cannot be written"


class Custody:
    """From the claim to the settled outcome. Lives in the loop; told of some things by other threads."""

    def __init__(
        self,
        jobs: Jobs,
        settings: Settings,
        *,
        engines: Engines,
        settle_lane: Lane,
        dispatch: Dispatcher,
        changed: Callable[[], None],
        stuck: Callable[[Run], None],
        events: Events,
    ) -> None:
        self._jobs = jobs
        self._engines = engines
        self._lease = settings.lease.total_seconds()
        self._deadline = settings.deadline
        self._dispatch = dispatch
        self._changed = changed
        self._told_stuck = stuck
        self._events = events
        self._loop = asyncio.get_running_loop()
        self.held: dict[Lease, Run] = {}
        self._stuck: set[Run] = set()
        self._left: list[tuple[int, float]] = []  # sessions of the server that were cut, and may live on
        self._reported: set[Lease] = set()  # told as lost, and returned all the same
        self._all_settled = asyncio.Event()
        self._closed = False
        self._runner = Runner(
            jobs,
            source=engines.sync,
            async_source=None if engines.asynchronous is None else engines.asynchronous.sync_engine,
            events=events,
            limits=TimeLimits(passed=self._limit_passed, stuck=self._is_stuck),
        )
        self._fewer_threads = settings.threads < settings.concurrency
        self._slots = Slots(
            self._runner,
            concurrency=settings.concurrency,
            threads=min(settings.threads, settings.concurrency),
            finished=self._finished,
        )
        self.keeper = LeaseKeeper(
            jobs.tables,
            engine=engines.sync,
            async_engine=engines.asynchronous,
            lease=settings.lease,
            look_every=settings.poll,
            lost=self._leases_lost,
            cancel_requested=self._cancels_requested,
            events=events,
        )
        self.settler = Settler(
            jobs.tables,
            settle_lane,
            retention=jobs.retention,
            deadline=settings.deadline,
            busy=self._has_backlog,
            answered=self._answered,
            events=events,
        )

    def leases(self) -> Iterable[Lease]:
        """Of everything that is open or whose outcome is not written."""
        return (*self.held, *self.settler.leases())

    def _has_backlog(self) -> bool:
        """Whether more outcomes are about to come; then a flush may wait a moment for them."""
        return self._slots.waiting > 0 and not self._closed

    # -- in

    def hand_out(self, jobs: Sequence[ClaimedJob], sent: float) -> None:
        """These were claimed by a statement sent at `sent`."""
        if not jobs:
            return
        self.keeper.opened([job.lease for job in jobs], sent=sent)
        runs: list[Run] = []
        tasks = self._jobs.tasks
        for job in jobs:
            task = tasks.get(job.kind)
            run = Run(job=job, task=task)  # type: ignore[arg-type]
            self.held[job.lease] = run
            if task is None:
                self._events.emit("job.unknown_kind", job=job.lease.id, kind=job.kind, queue=job.lease.queue)
                self.give_back(run, delay=_UNKNOWN_KIND_DELAY, reason="unknown kind")
            else:
                runs.append(run)
        self._events.emit("job.claimed", jobs=jobs)
        if self._closed:
            for run in runs:
                self.give_back(run)
            return
        if self._fewer_threads:
            runs = self._with_a_thread(runs)
        if runs:
            self._slots.add(runs)

    def _with_a_thread(self, runs: list[Run]) -> list[Run]:
        """Less those at their last attempt that no thread is free for: claimed for a free slot means run."""
        free = self._slots.free_threads
        kept: list[Run] = []
        for run in runs:
            if not run.task.is_async:
                free -= 1
                if free < 0 and run.job.attempt >= run.job.max_attempts:
                    self.give_back(run, delay=_NO_THREAD_DELAY, reason="no free thread")
                    continue
            kept.append(run)
        return kept

    # -- out

    def _finished(self, burst: list[Ended]) -> None:
        """Runs have ended: their slots are free, their outcomes go to the settle lane."""
        ended = 0
        for it in burst:
            job = it.run.job
            self._stuck.discard(it.run)
            if self.held.pop(job.lease, None) is None:
                continue  # given back or lost while it ran
            ended += 1
            if it.verdict is not None:
                # also after the lease's end by our own clock: perhaps nobody has taken the job over yet.
                # The fence decides; thrown away, a failed attempt could be given back uncounted
                if it.run.told:
                    self._reported.add(job.lease)
                self.settler.add(job, it.verdict)
            elif it.written is not None:
                self._answered(job.lease.queue, [(job, it.written)], [])
            else:
                self._answered(job.lease.queue, [], [job])
        self._dispatch.ended(ended, now=time.monotonic())
        self._changed()

    def _answered(
        self, queue: str, written: list[tuple[ClaimedJob, Verdict]], stale: list[ClaimedJob]
    ) -> None:
        """The database has the last word on these."""
        self.keeper.closed([job.lease for job, _ in written] + [job.lease for job in stale])
        if written:
            self._events.emit("job.settled", settled=written)
        for job in stale:
            if job.lease not in self._reported:
                refused = job.lease in self.settler.given_up
                why = (
                    "its outcome cannot be written"
                    if refused
                    else "taken over before its outcome was written"
                )
                self._tell_lost(job, why)
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
        self._changed()
        if self._is_settled():
            self._all_settled.set()

    def _is_settled(self) -> bool:
        """Nothing is left but what nobody can end."""
        return self._dispatch.held <= len(self._stuck)

    def give_back(self, run: Run, *, delay: timedelta | None = None, reason: str = "drain") -> None:
        """Release a job that has not run, or that cannot be waited for any more."""
        if self.held.pop(run.job.lease, None) is None:
            return
        run.released = True
        self._stuck.discard(run)
        if run.lost:
            self._dispatch.ended(1, now=time.monotonic())
            self._settled(1)
            return
        if run.timed_out:
            # an attempt past its limit has failed; given back uncounted it would come again for ever
            self.settler.add(run.job, self._runner.given_up(run))
        else:
            verdict = judge(Released(delay), attempt=run.job.attempt, max_attempts=run.job.max_attempts)
            self.settler.add(run.job, verdict)
            self._events.emit("job.released", jobs=[run.job], reason=reason)
        self._dispatch.ended(1, now=time.monotonic())

    # -- leases, from the lease lane's thread

    def _leases_lost(self, leases: list[Lease], reason: str) -> None:
        with suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._end_lost, leases, reason)

    def _end_lost(self, leases: list[Lease], reason: str) -> None:
        for lease in leases:
            run = self.held.get(lease)
            if run is None or run.ended:
                continue  # its outcome is under way: the fence decides
            # it stays among the held until it really ends: its slot is taken, and it must not be given
            # back as if the answer to its claim had been lost
            run.lost = True
            self._cut(run)  # before the cancel, which a driver passes on to a server that may not answer
            run.cancel()
            if not run.told:
                run.told = True
                self._tell_lost(run.job, reason)

    def _tell_lost(self, job: ClaimedJob, reason: str) -> None:
        self._events.emit("lease.lost", **_named(job), fencing_token=job.lease.token, reason=reason)

    def _cancels_requested(self, leases: list[Lease]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, leases)

    def _cancel(self, leases: list[Lease]) -> None:
        """A coroutine is cancelled, a thread may look at ctx.cancelled; a normal return still counts."""
        for lease in leases:
            run = self.held.get(lease)
            if run is None or run.ended or run.cancel_requested:
                continue
            run.cancel_requested = True
            run.cancel()
            self._events.emit("job.cancel_requested", **_named(run.job))

    # -- time

    def _limit_passed(self, run: Run) -> None:
        run.cancel()
        self._events.emit("job.time_limit", **_named(run.job), attempt=run.job.attempt, seconds=run.timeout)

    def _is_stuck(self, run: Run) -> None:
        if run.job.lease not in self.held:
            return
        self._stuck.add(run)
        self._events.emit("job.stuck", **_named(run.job), attempt=run.job.attempt)
        self._told_stuck(run)

    async def remark(self, stopping: asyncio.Event, on_lane: OnLane) -> None:
        """Say once of each attempt, or of its session, that it has been open for long.

        And end what waits without a deadline of its own: a settle within a handler's transaction, the ping
        of a pool.
        """
        while not stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(self._lease / 4, 1.0), 5.0)):
                    await stopping.wait()
            self._left += self._engines.cut_silent_pings(self._deadline)
            now = time.monotonic()
            for run in list(self.held.values()):
                if run.started is None or run.ended:
                    continue
                settling = None if run.session is None else run.session.settling
                if settling is not None and now - settling > self._deadline:
                    self._cut(run)
                if not run.remarked and now - run.started > _LONG * self._lease:
                    run.remarked = True
                    self._events.emit("job.running_long", **_named(run.job), seconds=now - run.started)
                opened = run.session_opened
                if opened is not None and not run.session_remarked and now - opened > _SESSION_LONG:
                    run.session_remarked = True
                    self._events.emit("session.open_long", **_named(run.job), seconds=now - opened)

            await self._end_left(on_lane)

    def _cut(self, run: Run) -> None:
        if (left := run.cut()) is not None:
            self._left.append(left)

    async def _end_left(self, on_lane: OnLane) -> None:
        """What was cut here still runs on the server, and may hold a job's row."""
        left, self._left = self._left, []
        if not left or self._engines.pooled:
            return
        try:
            await on_lane(partial(end_backends, left=left))
        except Exception:
            self._left += left  # the lane has told why

    # -- the end

    def close(self) -> None:
        """Start nothing any more, and give back what has not started."""
        self._closed = True
        for run in self._slots.close():
            self.give_back(run)

    async def settled(self, seconds: float, *, forced: asyncio.Event | None = None) -> bool:
        """Wait until everything that can end has ended and is written, the time is over, or `forced`."""
        if not self._is_settled():
            self._all_settled.clear()
            waits = [asyncio.ensure_future(self._all_settled.wait())]
            if forced is not None:
                waits.append(asyncio.ensure_future(forced.wait()))
            try:
                await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not self._dispatch.held

    async def end(self) -> None:
        """Cancel what still runs, give a moment, and give back the rest."""
        for run in list(self.held.values()):
            run.draining = True
            run.cancel()
        await asyncio.sleep(0)
        await self.settled(1.0)
        for run in list(self.held.values()):
            self.give_back(run)  # a thread that cannot be stopped, or a coroutine that swallows its end

    async def flush(self, seconds: float) -> bool:
        """The last outcomes: handed to the settle lane, which is given its time."""
        await asyncio.sleep(0)
        await self.settled(seconds)
        self.settler.close(give_up=True)  # what cannot be written now is left to the lease
        return not self._dispatch.held

    async def gone(self, seconds: float) -> None:
        """The last: leases are prolonged no more, consumers have ended."""
        await self.keeper.stop(seconds)
        await self._slots.gone()


def _named(job: ClaimedJob) -> dict[str, object]:
    return {"job": job.lease.id, "queue": job.lease.queue, "kind": job.kind}
