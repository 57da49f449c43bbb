"""Take due jobs of one queue for a lease. One statement; other workers' rows are skipped, never waited for.

Claims at most what is asked for, under every plan: the ids are locked in an array sub-select, which
PostgreSQL evaluates once. Does not decide how much or when (core.dispatch), nor run anything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Boolean,
    Connection,
    Double,
    Executable,
    Select,
    Table,
    Text,
    Update,
    and_,
    any_,
    bindparam,
    cast,
    extract,
    func,
    lateral,
    literal_column,
    not_,
    null,
    or_,
    select,
    true,
    update,
)

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.models import Tables
from sqla_jobs.store.door import brief, may_blame_a_row
from sqla_jobs.store.halves import by_halves
from sqla_jobs.store.parts import (
    CLOCK,
    IDS,
    LEASE,
    LIMIT,
    OWNER,
    QUEUE,
    RELATION,
    STATEMENT_TIME,
    announced,
    status,
)

__all__ = ["Apart", "ClaimedJob", "claim", "claim_apart", "next_due_in", "release_unknown"]

READY, RUNNING = status(JobStatus.READY), status(JobStatus.RUNNING)

#: A look for what the database refuses: if that is all of it, some 200 statements of the claim lane.
_LOOK = 100


class Which(Enum):
    """Of which rows a claim chooses; two are for what the database refuses."""

    ANY = auto()
    BESIDE = auto()  # not these ids
    AMONG = auto()  # these ids only


class ClaimedJob(NamedTuple):
    """What the worker needs to run an attempt.

    `payload` is JSON text: it is decoded inside the attempt, so that one row that cannot be decoded
    never fails the fetch of a whole claim.
    """

    lease: Lease
    kind: str
    payload: str
    attempt: int
    max_attempts: int
    priority: int
    due: float  # run_at, epoch seconds


def _eligible(jobs: Table) -> Any:
    c = jobs.c
    return and_(
        c.queue == QUEUE,
        c.status == READY,
        c.ordering_key.is_(None),
        c.run_at <= STATEMENT_TIME,
        # guarantee 5: a prefetched last attempt would be failed by a crash beside it, without a start
        or_(not_(bindparam("prefetch", type_=Boolean)), c.attempts < c.max_attempts - literal_column("1")),
        # an expired row that was never claimed is not started; store.rescue cancels it
        or_(c.expires_at.is_(None), c.expires_at > STATEMENT_TIME, c.fencing_token > literal_column("0")),
    )


@cache
def claim_statement(jobs: Table, which: Which = Which.ANY) -> Update:
    """Due, ready, unkeyed rows in the order of the claim index.

    Why not `UPDATE .. FROM (sub-select)`: a nested loop may run the locking sub-select again for every
    row and pass the limit (field case B30). FOR NO KEY UPDATE: a user's foreign key to jobs takes KEY
    SHARE, which FOR UPDATE would skip.
    """
    c = jobs.c
    chosen = _best(jobs, which).with_for_update(skip_locked=True, key_share=True)
    return (
        update(jobs)
        .where(c.queue == QUEUE, c.status == READY, c.id == any_(func.array(chosen.scalar_subquery())))
        .values(
            status=RUNNING,
            # capped: one row that somebody set to the largest number must not fail every claim of its queue
            attempts=func.least(c.attempts, literal_column("2147483646")) + literal_column("1"),
            fencing_token=func.least(c.fencing_token, literal_column("9223372036854775806"))
            + literal_column("1"),
            locked_by=OWNER,
            locked_until=CLOCK + LEASE,
            started_at=CLOCK,
            progress=null(),  # None would be the JSON value null
        )
        .returning(
            c.id,
            c.fencing_token,
            c.kind,
            cast(c.payload, Text),
            c.attempts,
            c.max_attempts,
            c.priority,
            cast(extract("epoch", c.run_at), Double),
        )
    )


def _best(jobs: Table, which: Which) -> Select[int]:
    c = jobs.c
    best = select(c.id).where(_eligible(jobs)).order_by(c.priority.desc(), c.run_at, c.id).limit(LIMIT)
    if which is Which.BESIDE:
        best = best.where(c.id != func.all(IDS))
    if which is Which.AMONG:
        best = best.where(c.id == func.any(IDS))
    return best


def claim(
    connection: Connection,
    tables: Tables,
    *,
    queue: str,
    owner: str,
    limit: int,
    lease: timedelta,
    prefetch: bool = False,
    beside: Sequence[int] = (),
) -> list[ClaimedJob]:
    """Claim at most `limit` due jobs of `queue`, but none `beside`, for `owner`; best first."""
    given: dict[str, object] = {"limit": limit, "prefetch": prefetch}
    if not beside:  # the hot path: not one condition more
        return _claim(connection, tables, Which.ANY, queue, owner, lease, given)
    return _claim(connection, tables, Which.BESIDE, queue, owner, lease, given | {"ids": list(beside)})


@dataclass(slots=True)
class Apart:
    """What was claimed, best first, and the ids that the database let nobody claim, with its reason."""

    jobs: list[ClaimedJob] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)


def claim_apart(
    connection: Connection,
    tables: Tables,
    *,
    queue: str,
    owner: str,
    limit: int,
    lease: timedelta,
    prefetch: bool = False,
    beside: Sequence[int] = (),
) -> Apart:
    """As `claim`, once it has failed by a row's fault: finds the row, and claims the others; for AUTOCOMMIT.

    Looks at 100 rows at most. When it raises, jobs may be claimed that nobody was told of: `release_unknown`.
    """
    given = {"q": queue, "limit": _LOOK, "prefetch": prefetch, "ids": list(beside)}
    candidates = connection.scalars(_best(tables.jobs, Which.BESIDE), given).all()

    def write(part: Sequence[int]) -> list[ClaimedJob]:
        these = {"limit": len(part), "prefetch": prefetch, "ids": list(part)}
        return _claim(connection, tables, Which.AMONG, queue, owner, lease, these)

    apart, doubtful = Apart(), []
    for start in range(0, len(candidates), limit):
        part = candidates[start : start + limit]
        try:
            claimed, refused = by_halves(write, part)
        except Exception as error:
            if not may_blame_a_row(error):
                raise
            doubtful.append((part, error))  # the next may tell whose fault it is
            continue
        apart.jobs += sorted((job for _, jobs in claimed for job in jobs), key=_claim_order)
        apart.refused += refused
        if apart.jobs:
            break
    if doubtful and not apart.jobs:
        raise doubtful[0][1]
    apart.refused += [(id_, brief(error)) for part, error in doubtful for id_ in part]
    return apart


def _claim(
    connection: Connection,
    tables: Tables,
    which: Which,
    queue: str,
    owner: str,
    lease: timedelta,
    given: dict[str, object],
) -> list[ClaimedJob]:
    rows = connection.execute(
        claim_statement(tables.jobs, which), {"q": queue, "owner": owner, "lease": lease, **given}
    ).all()
    claimed = [ClaimedJob(Lease(queue, row[0], row[1], owner), *row[2:]) for row in rows]
    # RETURNING promises no order
    claimed.sort(key=_claim_order)
    return claimed


def _claim_order(job: ClaimedJob) -> tuple[int, float, int]:
    return -job.priority, job.due, job.lease.id


@cache
def next_due_statement(jobs: Table) -> Executable:
    """Seconds until the first future job of a queue.

    min(run_at) over the queue would read every ready row: the index sorts by priority first. So the
    priorities in use are found by a loose scan, and each gives its first future row.
    """
    c = jobs.c
    live = and_(c.queue == QUEUE, c.status == READY, c.ordering_key.is_(None))
    highest = select(c.priority).where(live).order_by(c.priority.desc()).limit(literal_column("1"))
    lanes = select(highest.scalar_subquery().label("priority")).cte("lanes", recursive=True)
    below = (
        select(c.priority)
        .where(live, c.priority < lanes.c.priority)
        .order_by(c.priority.desc())
        .limit(literal_column("1"))
        .scalar_subquery()
    )
    lanes = lanes.union_all(select(below).where(lanes.c.priority.is_not(None)))
    first = lateral(
        select(c.run_at)
        .where(
            live,
            c.priority == lanes.c.priority,
            c.run_at > STATEMENT_TIME,
            # parked for ever: never due, and PostgreSQL 15 cannot subtract from it
            c.run_at < literal_column("'infinity'"),
        )
        .order_by(c.run_at)
        .limit(literal_column("1"))
    )
    return select(cast(extract("epoch", func.min(first.c.run_at) - CLOCK), Double)).select_from(
        lanes.join(first, true())
    )


def next_due_in(connection: Connection, tables: Tables, *, queue: str) -> float | None:
    """Seconds until the next job of `queue` becomes due; None when no job waits for its time."""
    seconds = connection.scalar(next_due_statement(tables.jobs), {"q": queue})
    return None if seconds is None else max(0.0, float(seconds))


def _unknown(c: Any) -> Any:
    return and_(
        c.queue == QUEUE,
        c.status == RUNNING,
        c.locked_by == OWNER,
        # to give it back would run it once more: its rescue cancels it
        c.cancel_requested_at.is_(None),
    )


@cache
def unknown_statement(jobs: Table) -> Executable:
    """Rows that run under our name, but for those we know of."""
    return select(jobs.c.id).where(_unknown(jobs.c), jobs.c.id != func.all(IDS))


@cache
def release_unknown_statement(jobs: Table) -> Executable:
    """Give back what runs under our name although no answer ever told us of it."""
    c = jobs.c
    unknown = (
        select(c.id)
        .where(_unknown(c), c.id == func.any(IDS))
        .order_by(c.id)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("unknown")
        .prefix_with("MATERIALIZED")
    )
    released = (
        update(jobs)
        .where(c.queue == QUEUE, c.id == unknown.c.id)
        .values(
            status=READY,
            attempts=c.attempts - literal_column("1"),
            locked_by=None,
            locked_until=None,
            started_at=None,
        )
        .returning(RELATION, c.id, c.queue, c.priority, c.run_at, c.status)
        .cte("released")
    )
    return select(func.count(), announced(released)).select_from(released)


def release_unknown(
    connection: Connection, tables: Tables, *, queue: str, owner: str, known: Iterable[int]
) -> int:
    """After a claim whose answer was lost: give back what it took; for AUTOCOMMIT. Returns how many jobs.

    What the database lets nobody give back is left to its rescue.
    """
    ours = {"q": queue, "owner": owner}
    unknown = connection.scalars(unknown_statement(tables.jobs), ours | {"ids": list(known)}).all()
    if not unknown:
        return 0

    def write(part: Sequence[int]) -> int:
        row = connection.execute(release_unknown_statement(tables.jobs), ours | {"ids": list(part)}).one()
        return int(row[0])

    released, _ = by_halves(write, unknown)
    return sum(count for _, count in released)
