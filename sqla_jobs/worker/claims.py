"""The claim lane: takes jobs when the dispatcher says so, and finds again what a lost answer left running.

One verb at a time; maintenance shares the lane. Does not decide when or how much (core.dispatch), nor
hand anything out (the loop).
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection

from sqla_jobs.core.dispatch import Claim, Dispatcher
from sqla_jobs.core.leases import Lease
from sqla_jobs.errors import ConnectionLost
from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.store.claim import ClaimedJob, claim, next_due_in, release_unknown
from sqla_jobs.store.door import Lane, brief

__all__ = ["Claims"]


class Claims:
    """Claims for `owner`. `held` names the leases that the worker knows of; `handed_out` gets what came."""

    def __init__(
        self,
        tables: Tables,
        lane: Lane,
        *,
        owner: str,
        lease: timedelta,
        deadline: float,
        dispatch: Dispatcher,
        held: Callable[[], Iterable[Lease]],
        hand_out: Callable[[list[ClaimedJob], float], None],
        events: Events,
    ) -> None:
        self._tables = tables
        self._lane = lane
        self._owner = owner
        self._lease = lease
        self._deadline = deadline
        self._dispatch = dispatch
        self._held = held
        self._hand_out = hand_out
        self._events = events
        self._lock = asyncio.Lock()
        self._orphans: dict[str, list[float]] = {}
        self._failures = 0

    @property
    def failing(self) -> bool:
        """Whether the last claim got no answer."""
        return self._failures > 0

    async def on_lane(self, verb: Callable[[Connection], Any]) -> Any:
        """Run somebody else's verb when the lane is free."""
        async with self._lock:
            return await self._lane.run(verb, deadline=self._deadline)

    async def make(self, step: Claim) -> None:
        """Make one claim and tell the dispatcher what it brought."""
        verb = partial(
            claim,
            tables=self._tables,
            queue=step.queue,
            owner=self._owner,
            limit=step.limit,
            lease=self._lease,
            prefetch=step.prefetch,
        )
        try:
            async with self._lock:
                await self._release_orphans(step.queue)
                # before the claim: what becomes due between the two is claimed, what comes later is known
                due_in = await self._look_ahead(step.queue) if step.look_ahead else None
                sent = time.monotonic()
                jobs = await self._lane.run(verb, deadline=self._deadline)
        except Exception as error:
            self._failed(step, error)
            return
        self._failures = 0
        self._dispatch.claimed(step, got=len(jobs), now=time.monotonic(), spread=random.random())
        self._hand_out(jobs, sent)
        if due_in is not None and len(jobs) < step.limit:
            now = time.monotonic()
            self._dispatch.woken(step.queue, now=now, due_in=due_in - (now - sent))

    def _failed(self, step: Claim, error: Exception) -> None:
        """The answer is lost: what it took runs for nobody, and is looked for before the next claim."""
        self._failures += 1
        pause = min(0.25 * 2**self._failures, 10.0) * (0.5 + random.random() / 2)
        now = time.monotonic()
        if isinstance(error, ConnectionLost):
            # once at once, and once more: a server that did not notice the cut may still be at it
            self._orphans[step.queue] = [now, now + 10.0]
        self._events.emit("database.error", operation="claim", error=brief(error), retry_in=pause)
        self._dispatch.claim_failed(step, retry_at=now + pause)

    async def _release_orphans(self, queue: str) -> None:
        due = self._orphans.get(queue)
        if not due or due[0] > time.monotonic():
            return
        known = [each.id for each in self._held() if each.queue == queue]
        released = await self._lane.run(
            partial(release_unknown, tables=self._tables, queue=queue, owner=self._owner, known=known),
            deadline=self._deadline,
        )
        due.pop(0)
        if not due:
            del self._orphans[queue]
        if released:
            self._events.emit("job.released", jobs=released, reason="the answer to their claim was lost")

    async def _look_ahead(self, queue: str) -> float | None:
        """Seconds until the next job of a queue becomes due, for those that no wake-up told of."""
        verb = partial(next_due_in, tables=self._tables, queue=queue)
        return await self._lane.run(verb, deadline=self._deadline)
