"""Forget finished jobs that are older than their retention, in small batches."""

from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    CursorResult,
    Delete,
    Interval,
    Table,
    and_,
    any_,
    bindparam,
    delete,
    func,
    select,
)

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.models import Tables
from sqla_jobs.store.parts import LIMIT, STATEMENT_TIME, status

__all__ = ["purge"]


@cache
def purge_statement(table: Table, state: JobStatus) -> Delete:
    """By primary key from a limited sub-select: one batch is one short transaction.

    Oldest first, for the plan's sake: a generic one cannot know that little is aged, and without an order
    it reads the whole table from its start.
    """
    c = table.c
    aged = and_(c.status == status(state), c.finished_at < STATEMENT_TIME - bindparam("age", type_=Interval))
    chosen = select(c.id).where(aged).order_by(c.finished_at).limit(LIMIT).with_for_update(skip_locked=True)
    return delete(table).where(c.id == any_(func.array(chosen.scalar_subquery())), aged)


def purge(
    connection: Connection, tables: Tables, *, retention: Retention, limit: int = 1000
) -> dict[JobStatus, int]:
    """Delete at most `limit` jobs of each final status that are older than their retention."""
    ages: list[tuple[JobStatus, Table, timedelta | None]] = [
        (JobStatus.DONE, tables.archive, retention.done),
        (JobStatus.CANCELLED, tables.archive, retention.cancelled),
        (JobStatus.FAILED, tables.jobs, retention.failed),
    ]
    counts: dict[JobStatus, int] = {}
    for state, table, age in ages:
        if age is None:
            continue
        result: CursorResult[Any] = connection.execute(
            purge_statement(table, state), {"age": age, "limit": limit}
        )
        counts[state] = result.rowcount
    return counts
