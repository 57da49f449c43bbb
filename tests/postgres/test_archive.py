"""Forgetting: each kind of end after its own time, in batches, and nothing else."""

from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine
from steps import TABLES, archive, ask, put, run, statuses

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.store.archive import purge

DONE, CANCELLED, FAILED = JobStatus.DONE, JobStatus.CANCELLED, JobStatus.FAILED


def finished(connection: Connection, status: str, *, days: float, queue: str = "default") -> int:
    """A job that ended so many days ago; its id."""
    job = put(connection, queue=queue, status=status)
    run(
        connection,
        "UPDATE background_jobs SET finished_at = clock_timestamp() - :ago WHERE id = :id",
        id=job,
        ago=timedelta(days=days),
    )
    if status != "failed":
        names = ", ".join(column.name for column in TABLES.archive.columns)
        run(
            connection,
            f"WITH gone AS (DELETE FROM background_jobs WHERE id = :id RETURNING *) "
            f"INSERT INTO background_jobs_archive ({names}) SELECT {names} FROM gone",
            id=job,
        )
    return job


def test_each_kind_of_end_is_kept_for_its_own_time(a: Connection) -> None:
    kept = [finished(a, "done", days=1), finished(a, "cancelled", days=4), finished(a, "failed", days=8)]
    gone = [finished(a, "done", days=3), finished(a, "cancelled", days=6), finished(a, "failed", days=10)]
    retention = Retention(done=timedelta(days=2), cancelled=timedelta(days=5), failed=timedelta(days=9))

    counts = purge(a, TABLES, retention=retention).counts

    assert counts == {DONE: 1, CANCELLED: 1, FAILED: 1}
    assert set(statuses(a)) == set(kept)
    assert set(kept).isdisjoint(gone)


DEFAULTS = {"done": 7, "cancelled": 7, "failed": 90}


def test_the_defaults_are_a_week_and_ninety_days(a: Connection) -> None:
    kept = {finished(a, status, days=days - 0.1) for status, days in DEFAULTS.items()}
    for status, days in DEFAULTS.items():
        finished(a, status, days=days + 0.1)

    purge(a, TABLES, retention=Retention())

    assert set(statuses(a)) == kept


def test_none_keeps_for_ever(a: Connection) -> None:
    for status in "done", "cancelled", "failed":
        finished(a, status, days=40_000)

    counts = purge(a, TABLES, retention=Retention(done=None, cancelled=None, failed=None)).counts

    assert counts == {}
    assert len(statuses(a)) == 3


def test_zero_forgets_what_is_there(a: Connection) -> None:
    for status in "done", "cancelled", "failed":
        finished(a, status, days=0)

    purge(
        a,
        TABLES,
        retention=Retention(done=timedelta(0), cancelled=timedelta(0), failed=timedelta(0)),
    )

    assert statuses(a) == {}


@pytest.mark.parametrize("status", ["ready", "blocked", "running"])
def test_a_job_that_has_not_ended_is_never_forgotten(a: Connection, status: str) -> None:
    job = put(a, status=status, locked_by="A", locked_until="2020-01-01", created_at="1999-01-01")
    run(a, "UPDATE background_jobs SET finished_at = '1999-01-01'")  # as a careless admin might

    purge(a, TABLES, retention=Retention(failed=timedelta(0)))

    assert statuses(a) == {job: status}


def test_a_pass_deletes_no_more_than_its_limit_of_each_kind(a: Connection) -> None:
    for status in ["done"] * 5 + ["failed"] * 3:
        finished(a, status, days=400)

    counts = [purge(a, TABLES, retention=Retention(), limit=2).counts for _ in range(3)]

    assert [each[DONE] for each in counts] == [2, 2, 1]
    assert [each[FAILED] for each in counts] == [2, 1, 0]
    assert statuses(a) == {}


def test_all_queues_are_looked_through(a: Connection) -> None:
    for queue in "default", "mail":
        finished(a, "done", days=8, queue=queue)

    assert purge(a, TABLES, retention=Retention()).counts[DONE] == 2


def test_a_dead_letter_that_somebody_holds_is_left_and_nothing_waits(clean: Engine, a: Connection) -> None:
    held, free = finished(a, "failed", days=100), finished(a, "failed", days=100)
    run(a, "SET lock_timeout = '1ms'")

    with clean.connect() as operator:
        run(operator, "SELECT 1 FROM background_jobs WHERE id = :id FOR UPDATE", id=held)
        purge(a, TABLES, retention=Retention())

    run(a, "RESET lock_timeout")
    assert set(statuses(a)) == {held}
    assert free not in statuses(a)


def test_two_that_forget_at_once_do_not_count_twice(clean: Engine, a: Connection) -> None:
    for _ in range(4):
        finished(a, "done", days=8)

    with clean.connect() as first:
        one = purge(first, TABLES, retention=Retention(), limit=3).counts
        two = purge(a, TABLES, retention=Retention(), limit=3).counts
        first.commit()

    assert (one[DONE], two[DONE]) == (3, 1)
    assert archive(a) == []
    assert ask(a, "SELECT count(*) FROM background_jobs") == 0
