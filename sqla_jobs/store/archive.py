"""Forget finished jobs that are older than their retention, in small batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    CursorResult,
    Delete,
    Interval,
    Select,
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
from sqla_jobs.store.door import may_blame_a_row
from sqla_jobs.store.halves import by_halves
from sqla_jobs.store.parts import IDS, LIMIT, STATEMENT_TIME, status

__all__ = ["Purged", "purge"]

#: If the database refuses all of a look, that is some 200 statements of the claim lane.
_LOOK = 100


def _aged(table: Table, state: JobStatus) -> Any:
    c = table.c
    return and_(c.status == status(state), c.finished_at < STATEMENT_TIME - bindparam("age", type_=Interval))


def _oldest(table: Table, state: JobStatus) -> Select[int]:
    """Oldest first, for the plan's sake too.

    A generic one cannot know that little is aged, and without an order it reads the whole table.
    """
    c = table.c
    return (
        select(c.id)
        .where(_aged(table, state), c.id != func.all(IDS))
        .order_by(c.finished_at)
        .limit(LIMIT)
        .with_for_update(skip_locked=True)
    )


@cache
def purge_statement(table: Table, state: JobStatus) -> Delete:
    """By primary key from a limited sub-select: one batch is one short transaction."""
    chosen = _oldest(table, state)
    return delete(table).where(table.c.id == any_(func.array(chosen.scalar_subquery())), _aged(table, state))


@cache
def purge_these_statement(table: Table, state: JobStatus) -> Delete:
    """Of a batch that was refused, those that can go."""
    return delete(table).where(table.c.id == func.any(IDS), _aged(table, state))


@dataclass(slots=True)
class Purged:
    """How many of each kind of end were deleted, and the ids that the database keeps, with its reason."""

    counts: dict[JobStatus, int] = field(default_factory=dict)
    refused: dict[JobStatus, list[tuple[int, str]]] = field(default_factory=dict)


def purge(
    connection: Connection,
    tables: Tables,
    *,
    retention: Retention,
    limit: int = 1000,
    beside: Mapping[JobStatus, Sequence[int]] | None = None,
) -> Purged:
    """Delete at most `limit` jobs of each final status that are older than their retention; for AUTOCOMMIT.

    What the database refuses to delete (a user's foreign key points at it, say) comes back, and keeps
    no other; `beside` leaves it out of the next look.
    """
    ages: list[tuple[JobStatus, Table, timedelta | None]] = [
        (JobStatus.DONE, tables.archive, retention.done),
        (JobStatus.CANCELLED, tables.archive, retention.cancelled),
        (JobStatus.FAILED, tables.jobs, retention.failed),
    ]
    purged = Purged()
    for state, table, age in ages:
        if age is None:
            continue
        given = {"age": age, "limit": limit, "ids": list((beside or {}).get(state, ()))}
        try:
            result: CursorResult[Any] = connection.execute(purge_statement(table, state), given)
            purged.counts[state] = result.rowcount
        except Exception as error:
            if not may_blame_a_row(error):
                raise
            _purge_apart(connection, table, state, given, purged)
    return purged


def _purge_apart(
    connection: Connection, table: Table, state: JobStatus, given: dict[str, Any], purged: Purged
) -> None:
    def write(part: Sequence[int]) -> int:
        result: CursorResult[Any] = connection.execute(
            purge_these_statement(table, state), {"age": given["age"], "ids": list(part)}
        )
        return result.rowcount

    look = given | {"limit": min(given["limit"], _LOOK)}
    ids = connection.scalars(_oldest(table, state), look).all()
    written, purged.refused[state] = by_halves(write, ids) if ids else ([], [])
    purged.counts[state] = sum(count for _, count in written)
