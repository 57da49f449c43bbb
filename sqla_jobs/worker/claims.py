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
from sqla_jobs.core.refusals import Refusals
from sqla_jobs.errors import ConnectionLost
from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.store.claim import Apart, ClaimedJob, claim, claim_apart, next_due_in, release_unknown
from sqla_jobs.store.door import Lane, brief, may_blame_a_row

__all__ = ["Claims"]

#: Of a claim, for rows that the database refuses: then maintenance has its turn on the lane.
_LOOKS = 5


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
        self._refusals = Refusals()
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
        try:
            async with self._lock:
                await self._release_orphans(step.queue)
                # before the claim: what becomes due between the two is claimed, what comes later is known
                due_in = await self._look_ahead(step.queue) if step.look_ahead else None
                sent = time.monotonic()
                jobs, more = await self._take(step)
        except Exception as error:
            self._failed(step, error)
            return
        self._failures = 0
        self._dispatch.claimed(step, got=len(jobs), now=time.monotonic(), spread=random.random())
        self._hand_out(jobs, sent)
        if more:
            self._dispatch.woken(step.queue, now=time.monotonic())
        if due_in is not None and len(jobs) < step.limit:
            now = time.monotonic()
            self._dispatch.woken(step.queue, now=now, due_in=due_in - (now - sent))

    async def _take(self, step: Claim) -> tuple[list[ClaimedJob], bool]:
        """Claim; and whether there may be more behind rows that were refused in all of the looks."""
        jobs: list[ClaimedJob] = []
        for _ in range(_LOOKS):
            these = self._these(step, step.limit - len(jobs))
            try:
                try:
                    more = await self._lane.run(partial(claim, **these), deadline=self._deadline)
                    return jobs + more, False
                except Exception as error:
                    if not may_blame_a_row(error):
                        raise
                apart = await self._take_apart(step.queue, these)
            except Exception as error:
                if not jobs:
                    raise
                self._lost_answer(step.queue, error)
                self._events.emit("database.error", operation="claim", error=brief(error), retry_in=0.0)
                return jobs, True
            jobs += apart.jobs
            if len(jobs) >= step.limit or not apart.refused:
                return jobs, False
        return jobs, True

    def _these(self, step: Claim, limit: int) -> dict[str, Any]:
        return {
            "tables": self._tables,
            "queue": step.queue,
            "owner": self._owner,
            "limit": limit,
            "lease": self._lease,
            "prefetch": step.prefetch,
            "beside": self._refusals.left_alone(step.queue, now=time.monotonic()),
        }

    async def _take_apart(self, queue: str, these: dict[str, Any]) -> Apart:
        """One row that the database refuses (a user's trigger, say) keeps no other of its queue."""
        # it is many statements: one that got no answer, or was tried again, leaves what nobody was told of
        self._orphans[queue] = [time.monotonic(), *self._orphans.get(queue, ())]
        apart: Apart = await self._lane.run(partial(claim_apart, **these), deadline=self._deadline)
        for id_, text in apart.refused:
            retry_in = self._refusals.add(queue, id_, now=time.monotonic())
            self._events.emit("claim.refused", job=id_, queue=queue, error=text, retry_in=retry_in)
        return apart

    def _lost_answer(self, queue: str, error: Exception) -> None:
        if isinstance(error, ConnectionLost):
            # once at once, and once more: a server that did not notice the cut may still be at it
            now = time.monotonic()
            self._orphans[queue] = [now, now + 10.0]

    def _failed(self, step: Claim, error: Exception) -> None:
        """The answer is lost: what it took runs for nobody, and is looked for before the next claim."""
        self._failures += 1
        pause = min(0.25 * 2**self._failures, 10.0) * (0.5 + random.random() / 2)
        now = time.monotonic()
        self._lost_answer(step.queue, error)
        self._events.emit("database.error", operation="claim", error=brief(error), retry_in=pause)
        self._dispatch.claim_failed(step, retry_at=now + pause)

    async def _release_orphans(self, queue: str) -> None:
        due = self._orphans.get(queue)
        if not due or due[0] > time.monotonic():
            return
        known = [each.id for each in self._held() if each.queue == queue]
        verb = partial(release_unknown, tables=self._tables, queue=queue, owner=self._owner, known=known)
        released = 0
        try:
            released = await self._lane.run(verb, deadline=self._deadline)
        except Exception as error:
            if not may_blame_a_row(error):
                raise
            # nobody may give it back: its lease ends, and the rescue finds a way or says which job it is
            self._events.emit("database.error", operation="release", error=brief(error), retry_in=0.0)
        due.pop(0)
        if not due:
            del self._orphans[queue]
        if released:
            self._events.emit("job.released", jobs=released, reason="the answer to their claim was lost")

    async def give_back_orphans(self) -> None:
        """At the end: what a claim took whose answer was lost would wait for its lease, and be charged."""
        for queue, due in list(self._orphans.items()):
            due[0] = 0.0
            try:
                async with self._lock:
                    await self._release_orphans(queue)
            except Exception as error:
                self._events.emit("database.error", operation="release", error=brief(error), retry_in=None)

    async def _look_ahead(self, queue: str) -> float | None:
        """Seconds until the next job of a queue becomes due, for those that no wake-up told of."""
        verb = partial(next_due_in, tables=self._tables, queue=queue)
        return await self._lane.run(verb, deadline=self._deadline)
