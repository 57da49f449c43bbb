"""One row that the database refuses to let go costs itself alone: at a settle, a rescue and an expiry."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from shop import Job
from sqlalchemy import Connection, Engine, text
from steps import KEEP, TABLES, ask, autocommit, candidates, claimed, expire, put_many, run
from workers import until_row, working

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.store.rescue import Refused, cancel_expired, expired_leases
from sqla_jobs.store.settle import settle_expired
from sqla_jobs.tasks import Jobs

#: A user's table points at a job: it cannot leave the jobs table.
FOREIGN_KEY = (
    "CREATE TABLE notes (job bigint, queue text, FOREIGN KEY (job, queue) REFERENCES background_jobs)",
    "INSERT INTO notes SELECT id, queue FROM background_jobs WHERE id = 3",
)
#: A user's trigger on the archive refuses it.
ARCHIVE = (
    (
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.id = 3 THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    ),
    "CREATE TRIGGER no BEFORE INSERT ON background_jobs_archive FOR EACH ROW EXECUTE FUNCTION no()",
)


def frozen(which: str) -> tuple[str, ...]:
    """Another lets nobody change these rows at all."""
    return (
        (
            "CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN IF {which} THEN RAISE EXCEPTION 'never'; END IF; RETURN coalesce(NEW, OLD); END $$"
        ),
        (
            "CREATE TRIGGER never BEFORE UPDATE OR DELETE ON background_jobs "
            "FOR EACH ROW EXECUTE FUNCTION never()"
        ),
    )


FROZEN = frozen("OLD.id = 3")


@pytest.fixture
def own(engine: Engine) -> Iterator[Connection]:
    """A database that the test may alter."""
    with autocommit(engine) as connection:
        yield connection


def refuse(connection: Connection, statements: tuple[str, ...]) -> None:
    for statement in statements:
        run(connection, statement)


def statuses(connection: Connection) -> dict[int, str]:
    found = connection.execute(
        text(
            "SELECT id, status FROM background_jobs UNION ALL SELECT id, status FROM background_jobs_archive"
        )
    )
    return {id_: status for id_, status in found}  # noqa: C416


@pytest.mark.parametrize("refusal", [FOREIGN_KEY, ARCHIVE], ids=["foreign key", "archive"])
def test_a_rescued_row_that_cannot_be_archived_is_cancelled_in_place(
    own: Connection, refusal: tuple[str, ...]
) -> None:
    put_many(own, 5)
    leases = [job.lease for job in claimed(own, limit=5)]
    run(own, "UPDATE background_jobs SET cancel_requested_at = now()")
    refuse(own, refusal)
    expire(own, *leases)

    settled = settle_expired(own, TABLES, candidates(own), retention=KEEP)

    assert sorted(lease.id for lease, _ in settled.written) == [1, 2, 3, 4, 5]
    assert [lease.id for (lease, _), _ in settled.kept] == [3]
    assert statuses(own) == dict.fromkeys(range(1, 6), "cancelled")
    assert ask(own, "SELECT status FROM background_jobs") == "cancelled"


def test_a_row_that_cannot_be_written_at_all_comes_back_and_the_others_are_rescued(own: Connection) -> None:
    put_many(own, 5)
    leases = [job.lease for job in claimed(own, limit=5)]
    expire(own, *leases)
    refuse(own, FROZEN)

    settled = settle_expired(own, TABLES, candidates(own), retention=KEEP)

    assert [lease.id for (lease, _), _ in settled.refused] == [3]
    assert "never" in settled.refused[0][1]
    assert statuses(own) == {1: "ready", 2: "ready", 3: "running", 4: "ready", 5: "ready"}


@pytest.mark.parametrize("refusal", [FOREIGN_KEY, ARCHIVE], ids=["foreign key", "archive"])
def test_an_expired_row_that_cannot_be_archived_is_cancelled_in_place(
    own: Connection, refusal: tuple[str, ...]
) -> None:
    put_many(own, 5)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second'")
    refuse(own, refusal)

    expired = cancel_expired(own, TABLES, queue="default", retention=KEEP)

    assert (sorted(expired.cancelled), expired.refused) == ([1, 2, 3, 4, 5], [])
    assert statuses(own) == dict.fromkeys(range(1, 6), "cancelled")
    assert own.execute(text("SELECT id, last_error FROM background_jobs")).all() == [(3, "expired")]


@pytest.mark.parametrize("place", [1, 3, 5])
def test_an_expired_row_that_cannot_be_written_at_all_comes_back_and_the_others_are_cancelled(
    own: Connection, place: int
) -> None:
    put_many(own, 5)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second'")
    refuse(own, frozen("OLD.id = " + str(place)))

    expired = cancel_expired(own, TABLES, queue="default", retention=KEEP)

    assert sorted(expired.cancelled) == [id_ for id_ in range(1, 6) if id_ != place]
    assert expired.refused == [Refused(place, "noop", "RaiseException: never")]
    assert statuses(own) == dict.fromkeys(range(1, 6), "cancelled") | {place: "ready"}


def test_a_look_leaves_out_what_was_refused_already(own: Connection) -> None:
    put_many(own, 4)
    expire(own, *[job.lease for job in claimed(own, limit=4)])
    put_many(own, 4)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second' WHERE status = 'ready'")

    leases = expired_leases(own, TABLES, queue="default", beside=[1, 3])
    late = cancel_expired(own, TABLES, queue="default", retention=KEEP, beside=[5, 7])

    assert sorted(each.lease.id for each in leases) == [2, 4]
    assert sorted(late.cancelled) == [6, 8]


@pytest.mark.parametrize("left", ["leases", "expiries"])
async def test_more_refused_rows_than_a_pass_looks_at_keep_no_other_waiting(
    engine: Engine, database_url: str, own: Connection, left: str
) -> None:
    """They are the oldest: without more ado every look would find them, and nothing else."""
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    put_many(own, 252)
    if left == "leases":
        expire(own, *[job.lease for job in claimed(own, limit=252)])
        run(own, "UPDATE background_jobs SET locked_until = locked_until + id * interval '1 us'")
    else:
        run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 h' + id * interval '1 us'")
    refuse(own, frozen("OLD.id <= 251"))

    async with working(jobs, database_url, lease=timedelta(seconds=8)):
        await until_row(
            engine,
            "SELECT 1 FROM background_jobs WHERE id = 252 AND status = 'ready' AND fencing_token > 0 "
            "UNION ALL SELECT 1 FROM background_jobs_archive WHERE id = 252",
        )

    assert {statuses(own)[id_] for id_ in range(1, 252)} == {"running" if left == "leases" else "ready"}


async def test_a_worker_tells_what_it_could_not_cancel(database_url: str, own: Connection) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    put_many(own, 3)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 second'")
    refuse(own, FROZEN)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        refused = await heard.event("outcome.refused")
        cancelled = await heard.event("job.expired")

    assert refused.fields == {"job": 3, "queue": "default", "kind": "noop", "error": "RaiseException: never"}
    assert sorted(cancelled.fields["jobs"]) == [1, 2]  # type: ignore[call-overload]
    assert heard.named("database.error") == []


async def test_a_worker_tells_what_it_could_not_rescue(
    engine: Engine, database_url: str, own: Connection
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    put_many(own, 3)
    expire(own, *[job.lease for job in claimed(own, limit=3)])
    refuse(own, FROZEN)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        event = await heard.event("outcome.refused")
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 2", patience=30)

    assert (event.fields["job"], event.fields["kind"]) == (3, "noop")
    assert statuses(own)[3] == JobStatus.RUNNING


async def test_a_failure_whose_text_is_refused_is_recorded_without_it(
    engine: Engine, database_url: str, own: Connection
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="job", retry=Retry(max_attempts=1))
    def job() -> None:
        raise ValueError("the forbidden word")

    run(
        own,
        "CREATE FUNCTION clean() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.last_error LIKE '%forbidden%' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$",
    )
    run(own, "CREATE TRIGGER clean BEFORE UPDATE ON background_jobs FOR EACH ROW EXECUTE FUNCTION clean()")
    run(own, "INSERT INTO background_jobs (kind, max_attempts) VALUES ('job', 1)")

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    assert own.execute(text("SELECT status, last_error FROM background_jobs")).all() == [
        ("failed", "(the database refused the text of this error)")
    ]
    assert len(heard.named("outcome.refused")) == 1
