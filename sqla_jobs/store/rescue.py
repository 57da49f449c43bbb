"""Find what nobody looks after any more: leases that ran out, jobs that expired unclaimed.

Reads only candidates; what becomes of a lost attempt is judged outside (core.lifecycle) and written by
store.settle under the fence, so that a worker that settles in the last moment wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    CTE,
    Connection,
    Executable,
    Table,
    Text,
    and_,
    bindparam,
    cast,
    column,
    delete,
    func,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.models import Tables
from sqla_jobs.store.answers import UNCHANGED, Answer, answer_of, told
from sqla_jobs.store.door import brief, may_blame_a_row
from sqla_jobs.store.halves import by_halves
from sqla_jobs.store.parts import CLOCK, IDS, LIMIT, QUEUE, STATEMENT_TIME, archived, status

__all__ = ["Expired", "ExpiredLease", "Refused", "cancel_expired", "expired_leases", "left_behind"]

#: Refused in this pass already: they are the oldest, and would be all that every later look finds.
_NOT_BESIDE = func.all(IDS)


class ExpiredLease(NamedTuple):
    """A running job whose lease has ended."""

    lease: Lease
    kind: str
    attempt: int
    max_attempts: int


@cache
def expired_leases_statement(jobs: Table) -> Executable:
    """Oldest end first; matches the index on running rows."""
    c = jobs.c
    return (
        select(c.id, c.fencing_token, c.locked_by, c.kind, c.attempts, c.max_attempts)
        .where(
            c.queue == QUEUE,
            c.status == status(JobStatus.RUNNING),
            c.locked_until < STATEMENT_TIME,
            c.id != _NOT_BESIDE,
        )
        .order_by(c.locked_until)
        .limit(LIMIT)
    )


def expired_leases(
    connection: Connection, tables: Tables, *, queue: str, limit: int = 500, beside: Sequence[int] = ()
) -> list[ExpiredLease]:
    """Running jobs of `queue` whose lease has ended, without those `beside`."""
    rows = connection.execute(
        expired_leases_statement(tables.jobs), {"q": queue, "limit": limit, "ids": list(beside)}
    )
    return [ExpiredLease(Lease(queue, row[0], row[1], row[2]), row[3], row[4], row[5]) for row in rows]


def _late(c: Any) -> Any:
    """Ready, never claimed, past their expiry; matches the index on expiries."""
    return and_(
        c.status == status(JobStatus.READY),
        c.fencing_token == literal_column("0"),
        c.expires_at <= STATEMENT_TIME,
    )


@cache
def late_statement(jobs: Table) -> Executable:
    """Candidates: whoever writes looks again."""
    c = jobs.c
    late = and_(c.queue == QUEUE, _late(c), c.id != _NOT_BESIDE)
    return select(c.id, c.kind).where(late).order_by(c.expires_at).limit(LIMIT)


@cache
def left_behind_statement(jobs: Table) -> Executable:
    """One index look per queue and kind, all in one statement: most passes find nothing."""
    c = jobs.c
    queues = func.unnest(bindparam("queues", type_=ARRAY(Text))).table_valued(column("name", Text), name="of")
    expired = and_(c.status == status(JobStatus.RUNNING), c.locked_until < STATEMENT_TIME)
    of_queue = c.queue == queues.c.name
    return select(
        queues.c.name,
        select(c.id).where(of_queue, expired).exists(),
        select(c.id).where(of_queue, _late(c)).exists(),
    )


def left_behind(
    connection: Connection, tables: Tables, *, queues: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The queues with leases that have ended, and those with jobs that have expired unclaimed."""
    rows = connection.execute(left_behind_statement(tables.jobs), {"queues": list(queues)}).all()
    return [row[0] for row in rows if row[1]], [row[0] for row in rows if row[2]]


@cache
def cancel_late_statement(tables: Tables) -> Executable:
    """To the archive as cancelled."""
    jobs = tables.jobs
    c = jobs.c
    late = _held_late(jobs)
    gone = (
        delete(jobs)
        .where(c.queue == QUEUE, c.id.in_(select(late.c.id)))
        .returning(
            *c,
            status(JobStatus.CANCELLED).label("final"),
            literal_column("'expired'", Text).label("reason"),
            cast(null(), JSONB).label("outcome_result"),
        )
        .cte("gone")
    )
    return select(*told(late, select(gone.c.id))).add_cte(archived(tables, gone).cte("moved"))


@cache
def cancel_late_in_place_statement(jobs: Table) -> Executable:
    """What cannot leave the jobs table is cancelled there."""
    c = jobs.c
    late = _held_late(jobs)
    return (
        update(jobs)
        .where(c.queue == QUEUE, c.id == late.c.id)
        .values(
            status=status(JobStatus.CANCELLED),
            last_error=literal_column("'expired'", Text),
            finished_at=CLOCK,
        )
        .returning(c.id)
    )


def _held_late(jobs: Table) -> CTE:
    c = jobs.c
    return (
        select(c.id)
        .where(c.queue == QUEUE, _late(c), c.id == func.any(IDS))
        .order_by(c.id)
        .with_for_update(skip_locked=True)
        .cte("late")
        .prefix_with("MATERIALIZED")
    )


class Refused(NamedTuple):
    """A job that the database lets nobody end, and what it says."""

    id: int
    kind: str
    error: str


@dataclass(slots=True)
class Expired:
    """The ids of what was cancelled, and what the database refused."""

    cancelled: list[int] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def cancel_expired(
    connection: Connection,
    tables: Tables,
    *,
    queue: str,
    retention: Retention,
    limit: int = 500,
    beside: Sequence[int] = (),
) -> Expired:
    """Cancel jobs of `queue` that expired before their first claim, but those `beside`; for AUTOCOMMIT.

    A row that the archive or a user's trigger refuses is cancelled in place; what cannot be written at all
    comes back, and neither keeps the others.
    """
    rows = connection.execute(
        late_statement(tables.jobs), {"q": queue, "limit": limit, "ids": list(beside)}
    ).all()
    expired = Expired()
    if rows:
        late = [(row[0], row[1]) for row in rows]
        _cancel_late(connection, tables, late, queue, retention, expired)
    return expired


def _cancel_late(
    connection: Connection,
    tables: Tables,
    late: Sequence[tuple[int, str]],
    queue: str,
    retention: Retention,
    expired: Expired,
) -> None:
    keeps = {"keep_done": retention.keeps_done, "keep_cancelled": retention.keeps_cancelled}

    def cancel(part: Sequence[tuple[int, str]]) -> Answer:
        given = {"q": queue, "ids": [id_ for id_, _ in part]}
        return answer_of(connection.execute(cancel_late_statement(tables), given | keeps))

    cancelled, refused = by_halves(cancel, late)
    for part, answer in cancelled:
        expired.cancelled += answer.ids
        refused += [(each, UNCHANGED) for each in part if each[0] in answer.unchanged]
    for each, _ in refused:
        _cancel_in_place(connection, tables, each, queue, expired)


def _cancel_in_place(
    connection: Connection, tables: Tables, late: tuple[int, str], queue: str, expired: Expired
) -> None:
    id_, kind = late
    try:
        statement = cancel_late_in_place_statement(tables.jobs)
        cancelled = connection.scalars(statement, {"q": queue, "ids": [id_]}).all()
    except Exception as error:
        if not may_blame_a_row(error):
            raise
        expired.refused.append(Refused(id_, kind, brief(error)))
        return
    expired.cancelled += cancelled
    if not cancelled:  # or somebody holds it: the next pass finds it again
        expired.refused.append(Refused(id_, kind, UNCHANGED))
