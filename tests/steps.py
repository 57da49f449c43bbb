"""Steps of written interleavings: jobs put, claimed, expired, rescued, and who waits for whom.

Rows are written and read by plain SQL, so that what a test expects never comes from the code under test.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
from shop import Job
from sqlalchemy import Connection, Engine, text

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import Lost, Outcome, Verdict, judge
from sqla_jobs.core.retention import Retention
from sqla_jobs.models import tables_of
from sqla_jobs.store.claim import ClaimedJob, claim
from sqla_jobs.store.rescue import expired_leases
from sqla_jobs.store.settle import Entry, Settled, settle, settle_expired

T = TypeVar("T")
Row = dict[str, Any]

TABLES = tables_of(Job)
KEEP = Retention()
LEASE = timedelta(seconds=60)
PATIENCE = 20.0  # seconds: a deadline, not a wait


# -- connections


@contextmanager
def autocommit(engine: Engine) -> Iterator[Connection]:
    """A connection as the store's verbs expect it."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        yield connection


def ask(connection: Connection, statement: str, **parameters: object) -> Any:
    """The first column of the first row."""
    return connection.execute(text(statement), parameters).scalar()


def run(connection: Connection, statement: str, **parameters: object) -> None:
    connection.execute(text(statement), parameters)


def backend(connection: Connection) -> int:
    """The process that serves it."""
    pid: int = ask(connection, "SELECT pg_backend_pid()")
    return pid


# -- rows


def put(connection: Connection, kind: str = "noop", **columns: object) -> int:
    """Insert one job as psql would; its id."""
    names = ", ".join(["kind", *columns])
    values = ", ".join([":kind", *(f":{name}" for name in columns)])
    statement = f"INSERT INTO background_jobs ({names}) VALUES ({values}) RETURNING id"
    id_: int = ask(connection, statement, kind=kind, **columns)
    return id_


def put_many(connection: Connection, count: int, *, queue: str = "default", kind: str = "noop") -> list[int]:
    """Insert so many jobs; their ids in order."""
    statement = (
        "INSERT INTO background_jobs (kind, queue) SELECT :kind, :queue FROM generate_series(1, :count) "
        "RETURNING id"
    )
    found = connection.execute(text(statement), {"kind": kind, "queue": queue, "count": count})
    return sorted(found.scalars())


def live(connection: Connection, id_: int) -> Row | None:
    """The row in the jobs table, with what tells one version of it from the next."""
    found = connection.execute(
        text("SELECT xmin::text AS xmin, ctid::text AS ctid, * FROM background_jobs WHERE id = :id"),
        {"id": id_},
    ).mappings()
    row = found.one_or_none()
    return None if row is None else dict(row)


def alive(connection: Connection, id_: int) -> Row:
    """The row, which is there."""
    row = live(connection, id_)
    assert row is not None
    return row


def archive(connection: Connection) -> list[Row]:
    """Every row of the archive, by id, with what tells versions apart."""
    found = connection.execute(
        text("SELECT xmin::text AS xmin, ctid::text AS ctid, * FROM background_jobs_archive ORDER BY id")
    ).mappings()
    return [dict(row) for row in found]


def everything(connection: Connection) -> tuple[list[Row], list[Row]]:
    """Both tables, version by version."""
    found = connection.execute(
        text("SELECT xmin::text AS xmin, ctid::text AS ctid, * FROM background_jobs ORDER BY id")
    ).mappings()
    return [dict(row) for row in found], archive(connection)


def statuses(connection: Connection) -> dict[int, str]:
    """id -> status, of both tables."""
    found = connection.execute(
        text(
            "SELECT id, status FROM background_jobs UNION ALL SELECT id, status FROM background_jobs_archive"
        )
    )
    return {row[0]: row[1] for row in found}


# -- the life of a lease


def claimed(
    connection: Connection,
    owner: str = "A",
    *,
    limit: int = 1,
    queue: str = "default",
    lease: timedelta = LEASE,
    prefetch: bool = False,
) -> list[ClaimedJob]:
    return claim(connection, TABLES, queue=queue, owner=owner, limit=limit, lease=lease, prefetch=prefetch)


def take(connection: Connection, owner: str = "A", *, limit: int = 1, queue: str = "default") -> list[Lease]:
    """Claim so many, no less; their leases in id order."""
    leases = sorted(job.lease for job in claimed(connection, owner, limit=limit, queue=queue))
    assert len(leases) == limit
    return leases


def take_one(connection: Connection, owner: str = "A", *, queue: str = "default") -> Lease:
    return take(connection, owner, queue=queue)[0]


def expire(connection: Connection, *leases: Lease) -> None:
    """Let their time run out."""
    run(
        connection,
        "UPDATE background_jobs SET locked_until = clock_timestamp() - interval '1 second' "
        "WHERE id = ANY(:ids)",
        ids=[lease.id for lease in leases],
    )


def candidates(
    connection: Connection, *, queue: str = "default", delay: timedelta | None = timedelta(0)
) -> list[Entry]:
    """What a rescuer reads and judges; writing it is the next step."""
    return [
        (it.lease, judge(Lost(it.lease.owner, delay), attempt=it.attempt, max_attempts=it.max_attempts))
        for it in expired_leases(connection, TABLES, queue=queue)
    ]


def rescue(connection: Connection, *, delay: timedelta | None = timedelta(0)) -> list[Entry]:
    """Both steps at once."""
    found = candidates(connection, delay=delay)
    return settle_expired(connection, TABLES, found, retention=KEEP).written if found else []


def judged(outcome: Outcome, *, attempt: int = 1, max_attempts: int = 20) -> Verdict:
    return judge(outcome, attempt=attempt, max_attempts=max_attempts)


def written(
    connection: Connection,
    *entries: Entry,
    retention: Retention = KEEP,
    answer_lost: bool = False,
) -> Settled:
    """Settle these."""
    return settle(connection, TABLES, entries, retention=retention, answer_lost=answer_lost)


# -- who waits for whom


@contextmanager
def meanwhile(step: Callable[[], T]) -> Iterator["Future[T]"]:
    """Run a step that is expected to wait in a thread; the block makes it go on."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(step())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield future
        future.exception(PATIENCE)
    finally:
        thread.join(PATIENCE)
    assert not thread.is_alive()


def until_blocked(observer: Connection, waiting: int, *, by: int) -> None:
    """Wait until backend `waiting` waits for a lock that backend `by` holds."""
    until(lambda: by in ask(observer, "SELECT pg_blocking_pids(:pid)", pid=waiting))


def until(condition: Callable[[], bool]) -> None:
    """Ask until it is true, under a deadline."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "it did not become true in time"
        threading.Event().wait(0.005)


# -- wake-ups


class Ear:
    """A raw connection that listens to the wake-ups of one jobs table."""

    def __init__(self, url: str, table: str = "background_jobs") -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        found = self.connection.execute("SELECT %s::regclass::oid", (table,)).fetchone()
        assert found is not None
        self.connection.execute(f"LISTEN sqla_jobs_{found[0]}".encode())
        self.connection.execute("LISTEN the_end")

    def heard(self) -> list[str]:
        """The messages since the last time. One of our own, sent now, comes after all committed before."""
        self.connection.execute("SELECT pg_notify('the_end', '')")
        messages: list[str] = []
        for message in self.connection.notifies(timeout=PATIENCE):
            if message.channel == "the_end":
                return messages
            messages.append(message.payload)
        raise AssertionError("not even our own message came")

    def close(self) -> None:
        self.connection.close()


@contextmanager
def listening(url: str, table: str = "background_jobs") -> Iterator[Ear]:
    ear = Ear(url, table)
    try:
        yield ear
    finally:
        ear.close()
