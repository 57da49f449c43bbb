"""Find what nobody looks after any more: leases that ran out, jobs that expired unclaimed.

Reads only candidates; what becomes of a lost attempt is judged outside (core.lifecycle) and written by
store.settle under the fence, so that a worker that settles in the last moment wins.
"""

from functools import cache
from typing import NamedTuple

from sqlalchemy import Connection, Executable, Table, Text, cast, delete, func, literal_column, null, select
from sqlalchemy.dialects.postgresql import JSONB

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.models import Tables
from sqla_jobs.store.parts import LIMIT, QUEUE, STATEMENT_TIME, archived, status

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


@cache
def cancel_expired_statement(tables: Tables) -> Executable:
    """Ready, never claimed, past their expiry: to the archive as cancelled."""
    jobs = tables.jobs
    c = jobs.c
    late = (
        select(c.id)
        .where(
            c.queue == QUEUE,
            c.status == status(JobStatus.READY),
            c.fencing_token == literal_column("0"),
            c.expires_at <= STATEMENT_TIME,
        )
        .order_by(c.id)
        .limit(LIMIT)
        .with_for_update(skip_locked=True)
        .cte("late")
        .prefix_with("MATERIALIZED")
    )
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


def cancel_expired(
    connection: Connection, tables: Tables, *, queue: str, retention: Retention, limit: int = 500
) -> list[int]:
    """Cancel the jobs of `queue` that expired before their first claim; returns their ids."""
    ids = connection.scalar(
        cancel_expired_statement(tables),
        {
            "q": queue,
            "limit": limit,
            "keep_done": retention.keeps_done,
            "keep_cancelled": retention.keeps_cancelled,
        },
    )
    return list(ids or ())
