"""Find what nobody looks after any more: leases that ran out, jobs that expired unclaimed.

Reads only candidates; what becomes of a lost attempt is judged outside (core.lifecycle) and written by
store.settle under the fence, so that a worker that settles in the last moment wins.
"""

from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    Connection,
    Executable,
    Table,
    Text,
    and_,
    cast,
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
from sqla_jobs.store.door import is_rows_fault
from sqla_jobs.store.parts import CLOCK, IDS, LIMIT, QUEUE, STATEMENT_TIME, archived, status

__all__ = ["ExpiredLease", "cancel_expired", "expired_leases"]


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
        .where(c.queue == QUEUE, c.status == status(JobStatus.RUNNING), c.locked_until < STATEMENT_TIME)
        .order_by(c.locked_until)
        .limit(LIMIT)
    )


def expired_leases(
    connection: Connection, tables: Tables, *, queue: str, limit: int = 500
) -> list[ExpiredLease]:
    """Running jobs of `queue` whose lease has ended."""
    rows = connection.execute(expired_leases_statement(tables.jobs), {"q": queue, "limit": limit})
    return [ExpiredLease(Lease(queue, row[0], row[1], row[2]), row[3], row[4], row[5]) for row in rows]


def _late(c: Any) -> Any:
    """Ready, never claimed, past their expiry; matches the index on expiries."""
    return and_(
        c.queue == QUEUE,
        c.status == status(JobStatus.READY),
        c.fencing_token == literal_column("0"),
        c.expires_at <= STATEMENT_TIME,
    )


@cache
def late_statement(jobs: Table) -> Executable:
    """Candidates: whoever writes looks again."""
    c = jobs.c
    return select(c.id).where(_late(c)).order_by(c.expires_at).limit(LIMIT)


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
    return select(func.array_agg(late.c.id)).add_cte(archived(tables, gone).cte("moved"))


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
        .where(_late(c), c.id == func.any(IDS))
        .order_by(c.id)
        .with_for_update(skip_locked=True)
        .cte("late")
        .prefix_with("MATERIALIZED")
    )


def cancel_expired(
    connection: Connection, tables: Tables, *, queue: str, retention: Retention, limit: int = 500
) -> list[int]:
    """Cancel the jobs of `queue` that expired before their first claim, for AUTOCOMMIT; returns their ids.

    A row that the archive or a user's trigger refuses is cancelled in place, and does not keep the others.
    """
    ids = list(connection.scalars(late_statement(tables.jobs), {"q": queue, "limit": limit}))
    return _cancel_late(connection, tables, ids, queue, retention) if ids else []


def _cancel_late(
    connection: Connection, tables: Tables, ids: list[int], queue: str, retention: Retention
) -> list[int]:
    keeps = {"keep_done": retention.keeps_done, "keep_cancelled": retention.keeps_cancelled}
    try:
        done = connection.scalar(cancel_late_statement(tables), {"q": queue, "ids": ids} | keeps)
        return list(done or ())
    except Exception as error:
        if not is_rows_fault(error):
            raise
        if len(ids) == 1:
            in_place = cancel_late_in_place_statement(tables.jobs)
            return list(connection.scalars(in_place, {"q": queue, "ids": ids}))
    half = len(ids) // 2
    return [
        *_cancel_late(connection, tables, ids[:half], queue, retention),
        *_cancel_late(connection, tables, ids[half:], queue, retention),
    ]
