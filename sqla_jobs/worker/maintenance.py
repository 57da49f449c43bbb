"""What any worker does for all: rescue what others lost, cancel what expired, forget what is old.

No leader: rescue is fenced and skips rows that somebody holds, so any number of workers may do it.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus, Lost, judge
from sqla_jobs.core.retry import Retry
from sqla_jobs.events import Events
from sqla_jobs.store.archive import Purged, purge
from sqla_jobs.store.door import brief
from sqla_jobs.store.rescue import Expired, ExpiredLease, cancel_expired, expired_leases, left_behind
from sqla_jobs.store.settle import Entry, Settled, settle_expired
from sqla_jobs.tasks import Jobs

__all__ = ["Maintenance"]

_PURGE_EVERY = 600.0
_DAY = 86400.0
_BATCH = 1000
#: A look at what is left behind. If the database refuses all of it, that is some 300 statements of the claim
#: lane, which must stay far below a lane's deadline; what is refused is left out of the next look.
_LOOK = 100

OnLane = Callable[[Callable[[Connection], Any]], Awaitable[Any]]


class Maintenance:
    """A pass over the worker's queues every quarter of a lease, from 1 to 15 seconds."""

    def __init__(
        self, jobs: Jobs, *, queues: Sequence[str], lease: timedelta, on_lane: OnLane, events: Events
    ) -> None:
        self._jobs = jobs
        self._queues = queues
        self._every = min(max(lease.total_seconds() / 4, 1.0), 15.0)
        self._on_lane = on_lane
        self._events = events
        self._kept: dict[JobStatus, list[int]] = {}
        self._kept_since = time.monotonic()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set; an error costs one pass."""
        # scattered, so that a fleet that starts together does not purge together
        purged = time.monotonic() - _PURGE_EVERY * random.random()
        while not stopping.is_set():
            await self._try("rescue", self._look_after_queues(stopping))
            if time.monotonic() - purged >= _PURGE_EVERY:
                purged = time.monotonic()
                await self._try("purge", self._purge(stopping))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every * (0.75 + random.random() / 2)):
                    await stopping.wait()

    async def _look_after_queues(self, stopping: asyncio.Event) -> None:
        """One statement for all, and more only where there is something to do."""
        look = partial(left_behind, tables=self._jobs.tables, queues=self._queues)
        leases, expiries = await self._on_lane(look)
        for queue in leases:
            await self._try("rescue", self._rescue(queue, stopping))
        for queue in expiries:
            await self._try("expire", self._expire(queue, stopping))

    async def _try(self, operation: str, step: Awaitable[None]) -> None:
        try:
            await step
        except Exception as error:
            self._events.emit("database.error", operation=operation, error=brief(error), retry_in=self._every)

    async def _rescue(self, queue: str, stopping: asyncio.Event) -> None:
        """Look after look, until one changes nothing."""
        tables, retention = self._jobs.tables, self._jobs.retention
        refused: list[int] = []
        while not stopping.is_set():
            look = partial(expired_leases, tables=tables, queue=queue, limit=_LOOK, beside=refused)
            expired: list[ExpiredLease] = await self._on_lane(look)
            if not expired:
                return
            entries = [self._judged(each) for each in expired]
            settled: Settled = await self._on_lane(
                partial(settle_expired, tables=tables, entries=entries, retention=retention)
            )
            self._tell_rescued(queue, settled, {each.lease: each.kind for each in expired})
            if not (settled.written or settled.refused):
                return
            refused += [lease.id for (lease, _), _ in settled.refused]

    def _tell_rescued(self, queue: str, settled: Settled, kinds: Mapping[Lease, str]) -> None:
        if settled.written:
            self._events.emit("job.rescued", jobs=settled.written)
        for (lease, _), error in settled.kept:
            self._events.emit("archive.refused", job=lease.id, queue=queue, kind=kinds[lease], error=error)
        for (lease, _), error in settled.refused:
            self._events.emit("outcome.refused", job=lease.id, queue=queue, kind=kinds[lease], error=error)

    def _judged(self, expired: ExpiredLease) -> Entry:
        """A crash waits like a failure: what killed a worker must not kill the next at once."""
        task = self._jobs.tasks.get(expired.kind)
        retry = Retry() if task is None else task.retry
        lost = Lost(expired.lease.owner, retry.wait(expired.attempt, spread=random.random()))
        return expired.lease, judge(lost, attempt=expired.attempt, max_attempts=expired.max_attempts)

    async def _expire(self, queue: str, stopping: asyncio.Event) -> None:
        tables, retention = self._jobs.tables, self._jobs.retention
        refused: list[int] = []
        while not stopping.is_set():
            expired: Expired = await self._on_lane(
                partial(
                    cancel_expired,
                    tables=tables,
                    queue=queue,
                    retention=retention,
                    limit=_LOOK,
                    beside=refused,
                )
            )
            if expired.cancelled:
                self._events.emit("job.expired", jobs=expired.cancelled)
            for id_, kind, error in expired.refused:
                self._events.emit("outcome.refused", job=id_, queue=queue, kind=kind, error=error)
            if not (expired.cancelled or expired.refused):
                return
            refused += [each.id for each in expired.refused]

    async def _purge(self, stopping: asyncio.Event) -> None:
        """Batch after batch. What cannot be deleted is left alone for a day; every look would find it."""
        if time.monotonic() - self._kept_since > _DAY:
            self._kept, self._kept_since = {}, time.monotonic()
        tables, retention = self._jobs.tables, self._jobs.retention
        while not stopping.is_set():
            purged: Purged = await self._on_lane(
                partial(purge, tables=tables, retention=retention, limit=_BATCH, beside=self._kept)
            )
            for state, refused in purged.refused.items():
                self._kept.setdefault(state, []).extend(id_ for id_, _ in refused)
            told = [each for refused in purged.refused.values() for each in refused]
            if told:
                self._events.emit("purge.refused", jobs=[id_ for id_, _ in told], error=told[0][1])
            elif all(count < _BATCH for count in purged.counts.values()):
                return
