"""Keep the leases of everything the worker holds.

From a thread of its own where there is a sync engine: a handler that blocks the event loop must not
lose the leases of its neighbours.

What is due is decided by core.leases, what is still ours by store.lease. Tells which leases are lost, and
which jobs somebody wants to cancel; does not end handlers itself.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from sqla_jobs.core.leases import Lease, LeaseBook
from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.store.door import Lane, SyncLane, brief, lane_on
from sqla_jobs.store.lease import Prolonged, cancel_requested, prolong
from sqla_jobs.worker.startup import connect_only

__all__ = ["LeaseKeeper"]


T = TypeVar("T")
Lost = Callable[[list[Lease], str], None]

#: A timer may fire a little early: never ask again in the same moment.
_CLOCK_TICK = 0.005


class LeaseKeeper:
    """The lease lane. `lost` and `cancel_requested` are called in whichever thread finds out."""

    def __init__(
        self,
        tables: Tables,
        *,
        engine: Engine | None,
        async_engine: AsyncEngine | None,
        lease: timedelta,
        look_every: float,
        lost: Lost,
        cancel_requested: Callable[[list[Lease]], None],
        events: Events,
    ) -> None:
        self._tables = tables
        self._engine = engine
        self._async_engine = async_engine
        self._lease = lease
        self._look_every = look_every
        self._looked = time.monotonic()
        self._seen: set[Lease] = set()  # open at the last look for cancel requests
        self._book = LeaseBook(lease=lease.total_seconds())
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopping = asyncio.Event()  # for the loop; a thread hears of it by _changed
        self._stopped = False
        self._lost = lost
        self._cancel_requested = cancel_requested
        self._events = events
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    # -- the book, from any thread

    def opened(self, leases: Iterable[Lease], *, sent: float) -> None:
        """These were claimed by a statement sent at `sent`."""
        with self._lock:
            was_empty = not len(self._book)
            self._book.opened(leases, sent=sent)
        if was_empty:
            self._changed.set()

    def closed(self, leases: Iterable[Lease]) -> None:
        """These need no prolongation any more."""
        with self._lock:
            self._book.closed(leases)

    async def watch_ends(self) -> None:
        """Tell of every lease that ends, in that moment and from the loop, until cancelled.

        The lane may wait for an answer that never comes, and may not even be asked before the end has passed.
        """
        while True:
            await asyncio.sleep(self._until_an_end())
            self._drop_ended()

    def _until_an_end(self) -> float:
        # one that is opened meanwhile does not end earlier than in a lease
        longest = self._lease.total_seconds() / 4
        with self._lock:
            end = self._book.first_end()
        return longest if end is None else min(max(end - time.monotonic(), _CLOCK_TICK), longest)

    def _drop_ended(self) -> None:
        """By our own clock these have ended: somebody may run them by now, whatever the network says."""
        with self._lock:
            ended = self._book.ended(time.monotonic())
            self._book.closed(ended)
        if ended:
            self._lost(ended, "could not be prolonged in time")

    # -- the lane

    def start(self) -> None:
        """Begin to prolong."""
        if self._engine is not None:
            self._thread = threading.Thread(
                target=self._in_thread, args=(self._engine,), name="sqla_jobs leases", daemon=True
            )
            self._thread.start()
        else:
            assert self._async_engine is not None
            self._task = asyncio.create_task(self._in_loop(self._async_engine), name="sqla_jobs leases")

    async def stop(self, seconds: float) -> None:
        """End when the statement under way has ended, or the time is over."""
        self._stopped = True
        self._stopping.set()
        self._changed.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)

    def _in_thread(self, engine: Engine) -> None:
        lane = SyncLane(engine)
        with suppress(Exception):
            self._on(lane, connect_only)  # now: later the pool may be full of handlers' sessions
        while not self._stopped:
            self._changed.wait(self._pause())
            self._changed.clear()
            try:  # this thread must outlive whatever it meets: nobody would notice its end in time
                self._beat(lane)
            except Exception as error:
                self._failed(error)
        lane.close()

    def _beat(self, lane: SyncLane) -> None:
        for group in self._due():
            sent = time.monotonic()
            try:
                self._apply(self._on(lane, partial(self._verb, group)), sent)
            except Exception as error:
                self._failed(error)
        for group in self._to_look_at():
            try:
                self._requested(self._on(lane, partial(self._look, group)))
            except Exception as error:
                self._failed(error)
        self._drop_ended()

    def _on(self, lane: SyncLane, verb: Callable[[Connection], T]) -> T:
        watchdog = threading.Timer(self._deadline, lane.expire)
        watchdog.daemon = True
        watchdog.start()
        try:
            return lane.run(verb)
        finally:
            watchdog.cancel()

    async def _in_loop(self, engine: AsyncEngine) -> None:
        lane: Lane = lane_on(engine, "leases")
        with suppress(Exception):
            await lane.run(connect_only, deadline=self._deadline)  # as above
        stopping = asyncio.ensure_future(self._stopping.wait())
        while not self._stopped:
            await asyncio.wait({stopping}, timeout=min(self._pause(), 1.0))
            try:  # as above
                await self._beat_in_loop(lane)
            except Exception as error:
                self._failed(error)
        stopping.cancel()
        await lane.close()

    async def _beat_in_loop(self, lane: Lane) -> None:
        for group in self._due():
            sent = time.monotonic()
            try:
                self._apply(await lane.run(partial(self._verb, group), deadline=self._deadline), sent)
            except Exception as error:
                self._failed(error)
        for group in self._to_look_at():
            try:
                self._requested(await lane.run(partial(self._look, group), deadline=self._deadline))
            except Exception as error:
                self._failed(error)
        self._drop_ended()

    # -- both

    @property
    def _deadline(self) -> float:
        """An answer that takes longer than a quarter of the lease leaves no time for a second try."""
        return max(self._lease.total_seconds() / 4, 0.2)

    def _pause(self) -> float:
        with self._lock:
            # never busy: a row that is held or a server that is down is asked again after a moment
            pause = max(self._book.pause(time.monotonic()), self._lease.total_seconds() / 30)
            return min(pause, self._look_every) if len(self._book) else pause

    def _due(self) -> list[list[Lease]]:
        with self._lock:
            due = self._book.due(time.monotonic())
        return _by_queue(due)

    def _to_look_at(self) -> list[list[Lease]]:
        """Attempts that were open a poll interval ago and still are: short ones cost no statement."""
        now = time.monotonic()
        if now - self._looked < self._look_every:
            return []
        self._looked = now
        with self._lock:
            open_now = self._book.open()
        long, self._seen = open_now & self._seen, open_now
        return _by_queue(long)

    def _verb(self, group: list[Lease], connection: Connection) -> Prolonged:
        return prolong(connection, self._tables, group, lease=self._lease)

    def _look(self, group: list[Lease], connection: Connection) -> list[Lease]:
        return cancel_requested(connection, self._tables, group)

    def _requested(self, leases: list[Lease]) -> None:
        if leases:
            self._cancel_requested(leases)

    def _apply(self, prolonged: Prolonged, sent: float) -> None:
        with self._lock:
            self._book.prolonged(prolonged.kept, sent=sent)
            # one that was settled meanwhile is closed, and not lost
            lost = [lease for lease in prolonged.lost if lease in self._book]
            self._book.closed(lost)
        if lost:
            self._lost(lost, "taken over by somebody else")
        self._requested(prolonged.cancel_requested)
        for lease, error in prolonged.refused:  # asked again until it ends
            self._failed(f"job {lease.id}: {error}")

    def _failed(self, error: Exception | str) -> None:
        again = self._lease.total_seconds() / 30
        text = error if isinstance(error, str) else brief(error)
        self._events.emit("database.error", operation="prolong", error=text, retry_in=again)


def _by_queue(leases: Iterable[Lease]) -> list[list[Lease]]:
    groups: dict[str, list[Lease]] = {}
    for lease in leases:
        groups.setdefault(lease.queue, []).append(lease)
    return list(groups.values())
