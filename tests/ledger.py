"""A ledger that every job enters once, and a trace of who ran when: what any fault must leave right.

Rows come through ctx.session, so that they are one with their job's end; lines are written outside of any
transaction, so that they show every start, also of an attempt that came to nothing.
"""

from collections.abc import Iterable
from pathlib import Path

from shop import enter, enter_async
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from workers import execute, rows, until_row

from sqla_jobs.tasks import enqueue

__all__ = ["Ledger"]


class Ledger:
    """On the database of `engine`."""

    def __init__(self, engine: Engine, trace: Path) -> None:
        self.engine = engine
        self.trace = trace
        self.jobs: set[int] = set()
        trace.touch()
        execute(engine, "CREATE TABLE ledger (job bigint, attempt int, pid int)")

    def open(self, count: int, *, seconds: float, hold: bool | None = None) -> None:
        """Enqueue so many jobs of both forms; `hold`: with their session open all the time (None: half)."""
        with Session(self.engine) as session, session.begin():
            handles = [
                enqueue(
                    session,
                    enter if number % 2 else enter_async,
                    str(self.trace),
                    seconds,
                    number % 4 < 2 if hold is None else hold,
                )
                for number in range(count)
            ]
        self.jobs |= {handle.id for handle in handles}

    async def closed(self, *, patience: float = 30.0) -> None:
        """Wait until every job is done."""
        done = "SELECT 1 FROM background_jobs_archive WHERE status = 'done' HAVING count(*) = :count"
        await until_row(self.engine, done, patience=patience, count=len(self.jobs))

    def starts(self) -> int:
        """Of attempts, so far."""
        return sum(what == "start" for what, *_ in self._lines())

    def check(self, *, killed: Iterable[int] = ()) -> None:
        """Every job is in the books exactly once, nothing is left, nothing ran twice at once."""
        assert rows(self.engine, "SELECT id, status, locked_until FROM background_jobs") == []
        archived = rows(self.engine, "SELECT id, status FROM background_jobs_archive ORDER BY id")
        assert archived == [(job, "done") for job in sorted(self.jobs)]
        entries = rows(self.engine, "SELECT job FROM ledger ORDER BY job")
        assert entries == [(job,) for job in sorted(self.jobs)]
        assert self._overlaps({str(pid) for pid in killed}) == []

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in self.trace.read_text().splitlines()]

    def _overlaps(self, killed: set[str]) -> list[str]:
        """Jobs that started while an attempt in a process that lives was still running them."""
        running: dict[str, set[tuple[str, str]]] = {}
        found = []
        for what, job, pid, attempt in self._lines():
            holders = running.setdefault(job, set())
            if what == "start":
                found += [job] if any(holder not in killed for holder, _ in holders) else []
                holders.add((pid, attempt))
            else:
                holders.discard((pid, attempt))
        return found
