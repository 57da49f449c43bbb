"""Looking a job up: live, archived, on its way between the two, or nowhere."""

from dataclasses import asdict, fields
from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from steps import (
    KEEP,
    TABLES,
    alive,
    archive,
    autocommit,
    backend,
    judged,
    meanwhile,
    put,
    run,
    take_one,
    until_blocked,
    written,
)

from sqla_jobs.core.lifecycle import DONE, Aborted, JobStatus, Raised, Returned
from sqla_jobs.store.find import JobRecord, find
from sqla_jobs.store.settle import settle_within


def test_a_live_job_is_found_with_all_that_its_row_says(a: Connection) -> None:
    job = put(a, "receipts.send", queue="mail", payload='{"order": 7}', priority=3, meta='{"tags": ["x"]}')
    take_one(a, queue="mail")

    record = find(a, TABLES, job)

    row = alive(a, job)
    assert record is not None
    assert asdict(record) == {
        each.name: row[each.name] for each in fields(JobRecord) if each.name != "archived"
    } | {"archived": False}
    assert record.status is JobStatus.RUNNING


@pytest.mark.parametrize(
    ("verdict", "status"),
    [(DONE, "done"), (judged(Returned('{"sum": 7}')), "done"), (judged(Aborted("no")), "cancelled")],
    ids=["done", "with a result", "cancelled"],
)
def test_an_archived_job_is_found_with_all_that_its_row_says(
    a: Connection, verdict: object, status: str
) -> None:
    job = put(a, payload='{"order": 7}')
    written(a, (take_one(a), verdict))  # type: ignore[arg-type]

    record = find(a, TABLES, job)

    [row] = archive(a)
    assert record is not None
    assert asdict(record) == {
        each.name: row[each.name] for each in fields(JobRecord) if each.name != "archived"
    } | {"archived": True}
    assert record.status == status


def test_a_dead_letter_is_not_archived(a: Connection) -> None:
    job = put(a)
    written(a, (take_one(a), judged(Raised("boom", None))))

    record = find(a, TABLES, job)

    assert record is not None
    assert (record.status, record.archived, record.last_error) == (JobStatus.FAILED, False, "boom")


@pytest.mark.parametrize("id_", [0, -1, 4711, 2**63 - 1])
def test_a_job_that_never_existed_is_none(a: Connection, id_: int) -> None:
    put(a)

    assert find(a, TABLES, id_) is None


def test_a_job_that_moves_between_the_tables_is_always_found_once(clean: Engine, a: Connection) -> None:
    job = put(a)
    lease = take_one(a)

    with clean.connect() as handler:
        assert settle_within(handler, TABLES, (lease, DONE), retention=KEEP)
        during = find(a, TABLES, job)
        inside = find(handler, TABLES, job)
        handler.commit()
    after = find(a, TABLES, job)

    assert during is not None
    assert inside is not None
    assert after is not None
    assert (during.status, during.archived) == (JobStatus.RUNNING, False)
    assert (inside.status, inside.archived) == (JobStatus.DONE, True)
    assert after == inside


MOVES = {
    # the table that a search in two steps would read last: it must not be gone from both by then
    "to the archive": ("background_jobs", None),
    "back": ("background_jobs_archive", "DELETE FROM background_jobs_archive"),
}


@pytest.mark.parametrize(("last", "delete"), MOVES.values(), ids=list(MOVES))
def test_a_search_that_meets_a_move_halfway_finds_the_job(
    clean: Engine, a: Connection, last: str, delete: str | None
) -> None:
    job = put(a)
    lease = take_one(a)
    if delete:
        written(a, (lease, DONE))
    with clean.connect() as mover, autocommit(clean) as reader:
        run(mover, f"LOCK TABLE {last} IN ACCESS EXCLUSIVE MODE")
        waiting, holding = backend(reader), backend(mover)

        with meanwhile(lambda: find(reader, TABLES, job)) as found:
            until_blocked(a, waiting, by=holding)
            if delete:
                run(mover, "INSERT INTO background_jobs (id, kind) VALUES (:id, 'noop')", id=job)
                run(mover, delete)
            else:
                assert settle_within(mover, TABLES, (lease, DONE), retention=KEEP)
            mover.commit()

    assert found.result() is not None


def test_a_job_that_an_operator_retried_is_found_in_its_new_life(a: Connection) -> None:
    """Insert first, then delete: for a moment the id is in both tables, with the same token."""
    job = put(a)
    written(a, (take_one(a), judged(Aborted("no"))))
    run(a, "INSERT INTO background_jobs (id, kind, fencing_token) VALUES (:id, 'noop', 1)", id=job)

    both = find(a, TABLES, job)
    take_one(a)
    running = find(a, TABLES, job)

    assert both is not None
    assert running is not None
    assert (both.status, both.archived) == (JobStatus.READY, False)
    assert (running.status, running.archived) == (JobStatus.RUNNING, False)


def test_a_second_life_that_has_ended_hides_the_first(a: Connection) -> None:
    job = put(a)
    written(a, (take_one(a), judged(Aborted("no"))))
    run(a, "INSERT INTO background_jobs (id, kind, fencing_token) VALUES (:id, 'noop', 1)", id=job)
    written(a, (take_one(a), DONE))

    record = find(a, TABLES, job)

    assert len(archive(a)) == 2
    assert record is not None
    assert (record.status, record.fencing_token) == (JobStatus.DONE, 2)


def test_every_kind_of_session_can_look(clean: Engine, a: Connection) -> None:
    job = put(a)

    scope = scoped_session(sessionmaker(clean))
    with Session(clean) as session:
        records = [find(session, TABLES, job), find(scope, TABLES, job), find(a, TABLES, job)]
    scope.remove()

    assert records[0] is not None
    assert records[0] == records[1] == records[2]


async def test_an_async_session_looks_through_run_sync(async_engine: AsyncEngine) -> None:
    async with AsyncSession(async_engine) as session:
        job = await session.run_sync(lambda sync: put(sync.connection()))

        record = await session.run_sync(find, TABLES, job)

    assert record is not None
    assert record.id == job


def test_times_are_aware(a: Connection) -> None:
    job = put(a)
    written(a, (take_one(a), DONE))

    record = find(a, TABLES, job)

    assert record is not None
    assert record.finished_at is not None
    assert record.finished_at.utcoffset() == timedelta(0)
    assert record.created_at.tzinfo is not None
