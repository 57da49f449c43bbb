"""The settle lane: outcomes that have not been written yet, and their way into the database.

A flush takes all that ended while the last one was under way. An outcome is kept until the database
has answered for it: written, or stale. Nothing is given up because a connection broke.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import Verdict
from sqla_jobs.core.retention import Retention
from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.store.claim import ClaimedJob
from sqla_jobs.store.door import Lane, brief
from sqla_jobs.store.settle import Entry, Settled, settle

__all__ = ["Answered", "Settler"]

#: While jobs wait in the buffer, a flush waits this long for company: fewer, larger statements.
_LINGER = 0.005
_WORTH_A_STATEMENT = 100
_BUSY_PAUSE = 0.1
_LONGEST_DELAY = timedelta(days=365)

#: queue, what was written, what was stale
Answered = Callable[[str, list[tuple[ClaimedJob, Verdict]], list[ClaimedJob]], None]


class Settler:
    """Writes outcomes in the order they came, batch by batch. Lives in the loop."""

    def __init__(
        self,
        tables: Tables,
        lane: Lane,
        *,
        retention: Retention,
        deadline: float,
        busy: Callable[[], bool],
        answered: Answered,
        events: Events,
    ) -> None:
        self._tables = tables
        self._lane = lane
        self._retention = retention
        self._deadline = deadline
        self._busy = busy
        self._answered = answered
        self._events = events
        self._outcomes: list[Entry] = []
        self._jobs: dict[Lease, ClaimedJob] = {}
        self._unanswered: set[Lease] = set()
        self._more = asyncio.Event()
        #: The latest whose outcome the database refuses in every form.
        self.given_up: deque[Lease] = deque(maxlen=10_000)
        self._waiting = 0
        self._closing = False
        self._gave_up = False

    def add(self, job: ClaimedJob, verdict: Verdict) -> None:
        """This outcome is to be written."""
        self._jobs[job.lease] = job
        self._outcomes.append((job.lease, verdict))
        self._more.set()

    def leases(self) -> Iterable[Lease]:
        """Those whose outcome is not written yet, or can never be: none of them is to be given back unrun."""
        return (*self._jobs, *self.given_up)

    def close(self, *, give_up: bool = False) -> None:
        """End when everything is written; with `give_up`, when the next try fails."""
        self._closing = True
        self._gave_up = self._gave_up or give_up
        self._more.set()

    async def run(self) -> None:
        """Write until closed."""
        pause = 0.05
        while True:
            if not self._outcomes:
                if self._closing and (self._gave_up or not self._waiting):
                    return
                await self._more.wait()
                self._more.clear()
                continue
            if len(self._outcomes) < _WORTH_A_STATEMENT and self._busy():
                await asyncio.sleep(_LINGER)
            batch, self._outcomes = self._outcomes, []
            try:
                complete = await self._write(batch)
            except BaseException:
                self._put_back(batch)  # this loop is started again, and must find them
                raise
            if complete:
                pause = 0.05
                continue
            # the connection is at fault: nothing else would get through either
            if self._gave_up:
                return
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, 5.0)

    def _put_back(self, batch: list[Entry]) -> None:
        """What is not answered for, and may be written already; the fence makes a second time harmless."""
        again = {lease for lease, _ in self._outcomes}
        entries = [(lease, verdict) for lease, verdict in batch if lease in self._jobs and lease not in again]
        self._unanswered.update(lease for lease, _ in entries)
        self._outcomes += entries

    def _again(self, entries: list[Entry]) -> None:
        self._waiting -= 1
        self._outcomes += entries
        self._more.set()

    async def _write(self, batch: list[Entry]) -> bool:
        """One statement per queue; False when one got no answer."""
        complete = True
        for queue, entries in _by_queue(batch).items():
            leases = [lease for lease, _ in entries]
            verb = partial(
                settle,
                tables=self._tables,
                entries=entries,
                retention=self._retention,
                answer_lost=bool(self._unanswered) and not self._unanswered.isdisjoint(leases),
            )
            try:
                settled = await self._lane.run(verb, deadline=self._deadline)
            except Exception as error:
                # also when the batch is at fault and not the connection: the fence makes it harmless
                self._events.emit("database.error", operation="settle", error=brief(error), retry_in=None)
                self._unanswered.update(leases)
                self._outcomes += entries
                complete = False
                continue
            if self._unanswered:
                self._unanswered.difference_update(leases)
            self._apply(queue, settled)
        return complete

    def _apply(self, queue: str, settled: Settled) -> None:
        if settled.busy:
            # somebody holds these rows: they wait, the others do not wait for them
            self._waiting += 1
            asyncio.get_running_loop().call_later(_BUSY_PAUSE, self._again, settled.busy)
        for (lease, _), error in settled.kept:
            job = self._jobs[lease]
            self._events.emit("archive.refused", job=lease.id, queue=queue, kind=job.kind, error=error)
        for (lease, verdict), error in settled.refused:
            job = self._jobs[lease]
            self._events.emit("outcome.refused", job=lease.id, queue=queue, kind=job.kind, error=error)
            degraded = _degraded(verdict)
            if degraded != verdict:
                self._outcomes.append((lease, degraded))
            else:
                self.given_up.append(lease)  # nothing is left to try: the lease will run out
                settled.stale.append((lease, verdict))
        # one that was put back while it was busy is answered twice
        written = [
            (self._jobs.pop(lease), verdict) for lease, verdict in settled.written if lease in self._jobs
        ]
        stale = [self._jobs.pop(lease) for lease, _ in settled.stale if lease in self._jobs]
        self._answered(queue, written, stale)


def _by_queue(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    queues: dict[str, list[Entry]] = {}
    for entry in entries:
        queues.setdefault(entry[0].queue, []).append(entry)
    return queues


def _degraded(verdict: Verdict) -> Verdict:
    """The same end, without what a database may refuse: text, results, delays beyond its calendar."""
    return Verdict(
        verdict.status,
        attempts=verdict.attempts,
        delay=None if verdict.delay is None else min(verdict.delay, _LONGEST_DELAY),
        error=None if verdict.error is None else "(the database refused the text of this error)",
    )
