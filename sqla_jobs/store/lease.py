"""Prolong leases, many at a time.

SKIP LOCKED in id order: a row that its own settle holds, in a handler's slow commit, must not stall the
prolongation of all others. A lease that is not prolonged is looked at before it is called lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

from sqlalchemy import Connection, Executable, Table, Update, func, select, update

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.models import Tables
from sqla_jobs.store.halves import by_halves
from sqla_jobs.store.parts import CLOCK, IDS, LEASE, OWNER, QUEUE, leases_given, status

__all__ = ["Prolonged", "cancel_requested", "prolong"]

RUNNING = status(JobStatus.RUNNING)


@dataclass(slots=True)
class Prolonged:
    """Kept and prolonged; of these, cancel requested; held by somebody for now; lost; refused, and why."""

    kept: list[Lease] = field(default_factory=list)
    cancel_requested: list[Lease] = field(default_factory=list)
    busy: list[Lease] = field(default_factory=list)
    lost: list[Lease] = field(default_factory=list)
    refused: list[tuple[Lease, str]] = field(default_factory=list)


@cache
def prolong_statement(jobs: Table) -> Update:
    """Move the end of our leases to a full lease from now."""
    c = jobs.c
    given = leases_given()
    held = (
        select(c.id)
        .where(
            c.queue == QUEUE,
            c.status == RUNNING,
            c.id == given.c.id,
            c.fencing_token == given.c.token,
            c.locked_by == OWNER,
        )
        .order_by(c.id)
        .with_for_update(of=jobs, skip_locked=True, key_share=True)
        .cte("held")
        .prefix_with("MATERIALIZED")
    )
    return (
        update(jobs)
        .where(c.queue == QUEUE, c.id == held.c.id)
        .values(locked_until=CLOCK + LEASE)
        .returning(c.id, c.cancel_requested_at.is_not(None))
    )


@cache
def ours_statement(jobs: Table) -> Executable:
    """Which of the ids still run, and under which token and owner."""
    c = jobs.c
    return select(c.id, c.fencing_token, c.locked_by).where(
        c.queue == QUEUE, c.status == RUNNING, c.id == func.any(IDS)
    )


def prolong(
    connection: Connection, tables: Tables, leases: Sequence[Lease], *, lease: timedelta
) -> Prolonged:
    """Prolong leases of one queue and one owner; for AUTOCOMMIT. What is refused costs its own lease only."""
    first = leases[0]

    def write(part: Sequence[Lease]) -> dict[int, bool]:
        given = {
            "q": first.queue,
            "owner": first.owner,
            "lease": lease,
            "ids": [each.id for each in part],
            "tokens": [each.token for each in part],
        }
        return {row[0]: row[1] for row in connection.execute(prolong_statement(tables.jobs), given)}

    written, refused = by_halves(write, leases)
    cancel_requested = {id_: requested for _, ids in written for id_, requested in ids.items()}
    prolonged = Prolonged(refused=refused)
    missing: list[Lease] = []
    for each in (each for part, _ in written for each in part):
        if each.id not in cancel_requested:
            missing.append(each)
            continue
        prolonged.kept.append(each)
        if cancel_requested[each.id]:
            prolonged.cancel_requested.append(each)
    if missing:
        _look(connection, tables, missing, prolonged)
    return prolonged


@cache
def cancel_requested_statement(jobs: Table) -> Executable:
    """Which of the attempts somebody wants to end."""
    c, given = jobs.c, leases_given()
    return select(c.id).where(
        c.queue == QUEUE,
        c.id == given.c.id,
        c.fencing_token == given.c.token,
        c.status == RUNNING,
        c.cancel_requested_at.is_not(None),
    )


def cancel_requested(connection: Connection, tables: Tables, leases: Sequence[Lease]) -> list[Lease]:
    """Those of one queue whose job is to be cancelled. Reads only; a prolongation tells it too."""
    given = {
        "q": leases[0].queue,
        "ids": [each.id for each in leases],
        "tokens": [each.token for each in leases],
    }
    ids = set(connection.scalars(cancel_requested_statement(tables.jobs), given))
    return [each for each in leases if each.id in ids]


def _look(connection: Connection, tables: Tables, missing: Sequence[Lease], prolonged: Prolonged) -> None:
    rows = connection.execute(
        ours_statement(tables.jobs), {"q": missing[0].queue, "ids": [each.id for each in missing]}
    )
    running = {(row[0], row[1], row[2]) for row in rows}
    for each in missing:
        still_ours = (each.id, each.token, each.owner) in running
        (prolonged.busy if still_ours else prolonged.lost).append(each)
