"""One row that the database refuses to change keeps no other from being claimed, prolonged, or purged.

What ends an attempt has its tests in test_refused_rows.py.
"""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from shop import Job
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import ProgrammingError
from steps import TABLES, ask, autocommit, claimed, put, put_many, run, statuses, written
from workers import PATIENCE, until_row, working

from sqla_jobs.core.lifecycle import DONE, JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.store.archive import purge
from sqla_jobs.store.claim import ClaimedJob, claim, claim_apart
from sqla_jobs.store.lease import prolong
from sqla_jobs.tasks import Jobs

SECOND = timedelta(seconds=1)
NEVER = "RaiseException: never"


@pytest.fixture
def own(engine: Engine) -> Iterator[Connection]:
    """A database that the test may alter."""
    with autocommit(engine) as connection:
        yield connection


@pytest.fixture
def jobs() -> Jobs:
    """One task that does nothing."""
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    return jobs


def frozen(connection: Connection, which: str, code: str = "P0001") -> None:
    """A user's trigger lets nobody change these rows."""
    run(
        connection,
        "CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF {which} THEN RAISE EXCEPTION 'never' USING ERRCODE = '{code}'; END IF; "
        "RETURN NEW; END $$",
    )
    run(
        connection,
        "CREATE TRIGGER never BEFORE UPDATE ON background_jobs FOR EACH ROW EXECUTE FUNCTION never()",
    )


def ids(jobs: list[ClaimedJob]) -> list[int]:
    return [job.lease.id for job in jobs]


# -- claims


@pytest.mark.parametrize("place", [1, 3, 5])
def test_of_a_claim_that_is_refused_the_row_is_found_and_the_others_are_claimed(
    own: Connection, place: int
) -> None:
    put_many(own, 5)
    frozen(own, f"OLD.id = {place}")
    these = {"queue": "default", "owner": "A", "limit": 5, "lease": 10 * SECOND}
    with pytest.raises(ProgrammingError, match="never"):
        claim(own, TABLES, **these)  # type: ignore[arg-type]

    apart = claim_apart(own, TABLES, **these)  # type: ignore[arg-type]

    assert ids(apart.jobs) == [id_ for id_ in range(1, 6) if id_ != place]
    assert [job.attempt for job in apart.jobs] == [1] * 4
    assert apart.refused == [(place, NEVER)]
    assert statuses(own) == dict.fromkeys(range(1, 6), "running") | {place: "ready"}


def test_what_is_left_alone_is_claimed_by_neither_form(own: Connection) -> None:
    put_many(own, 6)
    these = {"queue": "default", "owner": "A", "lease": 10 * SECOND, "beside": [1, 4]}

    first = claim(own, TABLES, limit=2, **these)  # type: ignore[arg-type]
    second = claim_apart(own, TABLES, limit=5, **these)  # type: ignore[arg-type]
    third = claim_apart(own, TABLES, limit=5, **these)  # type: ignore[arg-type]

    assert (ids(first), ids(second.jobs), second.refused, ids(third.jobs)) == ([2, 3], [5, 6], [], [])


def test_a_claim_apart_takes_no_more_than_its_limit_and_the_best_first(own: Connection) -> None:
    for priority in 1, 3, 2, 3:
        put(own, priority=priority)
    frozen(own, "OLD.id = 2")

    apart = claim_apart(own, TABLES, queue="default", owner="A", limit=3, lease=10 * SECOND)

    assert ids(apart.jobs) == [4, 3]
    assert apart.refused == [(2, NEVER)]


def test_a_claim_apart_starts_no_last_attempt_ahead(own: Connection) -> None:
    """Guarantee 5, as in a claim."""
    put(own, max_attempts=1)
    put(own, max_attempts=2)
    frozen(own, "OLD.id = 99")

    apart = claim_apart(own, TABLES, queue="default", owner="A", limit=3, lease=10 * SECOND, prefetch=True)

    assert ids(apart.jobs) == [2]


async def test_a_job_that_nobody_may_claim_is_told_of_and_keeps_no_other_of_its_queue(
    database_url: str, own: Connection, jobs: Jobs
) -> None:
    put_many(own, 5)
    frozen(own, "OLD.id = 3")

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(4) == [JobStatus.DONE] * 4
        put(own)
        await heard.settled(5)

    assert statuses(own) == dict.fromkeys([1, 2, 4, 5, 6], "done") | {3: "ready"}
    [event] = heard.named("claim.refused")
    assert event.fields == {"job": 3, "queue": "default", "error": NEVER, "retry_in": 60.0}
    assert heard.named("database.error") == []


async def test_more_refused_rows_than_a_claim_looks_at_keep_nobody_waiting_behind_them(
    engine: Engine, database_url: str, own: Connection, jobs: Jobs
) -> None:
    put_many(own, 602)
    frozen(own, "OLD.id <= 601")

    async with working(jobs, database_url, concurrency=4):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive WHERE id = 602")

    assert ask(own, "SELECT count(*) FROM background_jobs WHERE status = 'ready'") == 601


@pytest.mark.parametrize("code", ["P0001", "APP01"])
async def test_an_orphan_that_nobody_may_give_back_stops_no_claim(
    engine: Engine, database_url: str, own: Connection, jobs: Jobs, code: str
) -> None:
    """The answer to a claim was lost, and the row that it took cannot be written any more."""
    async with working(jobs, database_url) as (worker, heard):
        await heard.event("listen.connected")
        put(own, status="running", locked_by=worker.id, fencing_token=1, attempts=1, locked_until="infinity")
        frozen(own, "OLD.id = 1", code)
        worker._claims._orphans["default"] = [0.0]
        put(own)
        await until_row(engine, "SELECT 1 FROM background_jobs_archive WHERE id = 2")

    assert statuses(own) == {1: "running", 2: "done"}
    told = [event.fields["operation"] for event in heard.named("database.error")]
    assert told == ([] if code == "P0001" else ["release"])  # alone, and with a code that may mean anything


# -- leases


def test_a_lease_that_nobody_may_prolong_costs_no_other_its_lease(own: Connection) -> None:
    put_many(own, 5)
    leases = [job.lease for job in claimed(own, limit=5)]
    frozen(own, "OLD.id = 3")
    run(own, "CREATE TABLE before AS SELECT id, locked_until FROM background_jobs")

    prolonged = prolong(own, TABLES, leases, lease=timedelta(hours=1))

    assert [lease.id for lease in prolonged.kept] == [1, 2, 4, 5]
    assert [(lease.id, error) for lease, error in prolonged.refused] == [(3, NEVER)]
    assert (prolonged.lost, prolonged.busy) == ([], [])
    moved = (
        "SELECT array_agg(id ORDER BY id) FROM background_jobs JOIN before b USING (id) "
        "WHERE background_jobs.locked_until > b.locked_until + interval '50 min'"
    )
    assert ask(own, moved) == [1, 2, 4, 5]


async def test_a_worker_keeps_the_leases_beside_one_that_nobody_may_prolong(
    database_url: str, own: Connection
) -> None:
    jobs, go_on = Jobs(Job), threading.Event()

    @jobs.task(name="noop")
    def noop() -> None:
        go_on.wait(PATIENCE)

    put_many(own, 3)
    frozen(own, "OLD.id = 2 AND OLD.status = 'running' AND NEW.status = 'running'")

    async with working(jobs, database_url, lease=2 * SECOND, concurrency=3) as (_, heard):
        lost = await heard.event("lease.lost")
        go_on.set()
        await heard.settled(2)

    assert lost.fields["job"] == 2
    assert len(heard.named("lease.lost")) == 1
    assert {event.fields["error"] for event in heard.named("database.error")} == {f"job 2: {NEVER}"}
    assert {id_: statuses(own)[id_] for id_ in (1, 3)} == {1: "done", 3: "done"}


# -- purges


def aged(connection: Connection, count: int) -> None:
    put_many(connection, count)
    for job in claimed(connection, limit=count):
        written(connection, (job.lease, DONE))
    run(
        connection,
        "UPDATE background_jobs_archive SET finished_at = now() - interval '9 d' + id * interval '1 s'",
    )


def referenced(connection: Connection, which: str) -> None:
    """A user's table points at these archived jobs."""
    run(connection, "CREATE TABLE notes (LIKE background_jobs_archive)")
    keys = ask(
        connection,
        "SELECT string_agg(quote_ident(attname), ', ' ORDER BY array_position(conkey, attnum)) "
        "FROM pg_constraint JOIN pg_attribute ON attrelid = conrelid AND attnum = ANY (conkey) "
        "WHERE conrelid = 'background_jobs_archive'::regclass AND contype = 'p'",
    )
    run(connection, f"ALTER TABLE notes ADD FOREIGN KEY ({keys}) REFERENCES background_jobs_archive")
    run(connection, f"INSERT INTO notes SELECT * FROM background_jobs_archive WHERE {which}")


def test_what_a_users_foreign_key_keeps_in_the_archive_keeps_no_other_there(own: Connection) -> None:
    aged(own, 5)
    referenced(own, "id IN (1, 4)")

    purged = purge(own, TABLES, retention=Retention())
    again = purge(own, TABLES, retention=Retention(), beside={JobStatus.DONE: [1, 4]})

    assert purged.counts[JobStatus.DONE] == 3
    assert [id_ for id_, _ in purged.refused[JobStatus.DONE]] == [1, 4]
    assert "ForeignKeyViolation" in purged.refused[JobStatus.DONE][0][1]
    assert (again.counts[JobStatus.DONE], again.refused) == (0, {})
    assert statuses(own) == {1: "done", 4: "done"}


async def test_a_purge_goes_on_behind_more_rows_than_a_look_holds_and_tells_of_them(
    engine: Engine, database_url: str, own: Connection, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqla_jobs.worker.maintenance._PURGE_EVERY", 0.0)
    aged(own, 252)
    referenced(own, "id <= 251")

    async with working(jobs, database_url, lease=4 * SECOND) as (_, heard):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 251")

    told = [id_ for event in heard.named("purge.refused") for id_ in event.fields["jobs"]]  # type: ignore[attr-defined]
    assert sorted(told) == list(range(1, 252))


@pytest.mark.parametrize("count", [20_000, pytest.param(200_000, marks=pytest.mark.full)])
def test_b55_a_large_archive_is_purged_in_statements_that_no_time_limit_ends(
    own: Connection, count: int
) -> None:
    columns = ask(
        own,
        "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute "
        "WHERE attrelid = 'background_jobs_archive'::regclass AND attnum > 0 AND attname <> 'id'",
    )
    aged(own, 1)
    run(
        own,
        f"INSERT INTO background_jobs_archive (id, {columns}) SELECT number, {columns} "
        f"FROM background_jobs_archive, generate_series(2, {count}) number",
    )
    run(own, "SET statement_timeout = '300ms'")

    purged = 0
    while batch := purge(own, TABLES, retention=Retention(), limit=1000).counts[JobStatus.DONE]:
        purged += batch

    assert purged == count
    assert ask(own, "SELECT count(*) FROM background_jobs_archive") == 0
