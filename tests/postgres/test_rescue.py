"""What nobody looks after any more: leases that ran out, jobs that expired unclaimed."""

from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine, event
from steps import (
    KEEP,
    TABLES,
    Row,
    alive,
    archive,
    ask,
    autocommit,
    candidates,
    expire,
    judged,
    listening,
    put,
    put_many,
    rescue,
    run,
    statuses,
    take,
    take_one,
    written,
)

from sqla_jobs.core.lifecycle import Released
from sqla_jobs.core.retention import Retention
from sqla_jobs.store.rescue import ExpiredLease, cancel_expired, expired_leases
from sqla_jobs.store.settle import settle_expired

AGO, SOON = "2020-01-01 00:00+00", "2999-01-01 00:00+00"


# -- leases that ran out


def test_a_candidate_carries_what_its_judge_needs(a: Connection) -> None:
    put(a, "receipts.send", queue="mail", max_attempts=5, attempts=2)
    lease = take_one(a, "A", queue="mail")
    expire(a, lease)

    assert expired_leases(a, TABLES, queue="mail") == [ExpiredLease(lease, "receipts.send", 3, 5)]
    assert expired_leases(a, TABLES, queue="default") == []


def test_the_longest_expired_come_first_and_no_more_than_the_limit(a: Connection) -> None:
    put_many(a, 4)
    leases = take(a, limit=4)
    for number, lease in enumerate([leases[2], leases[0], leases[3]]):
        run(
            a,
            "UPDATE background_jobs SET locked_until = clock_timestamp() - :ago WHERE id = :id",
            id=lease.id,
            ago=timedelta(hours=3 - number),
        )

    found = expired_leases(a, TABLES, queue="default", limit=2)

    assert [each.lease for each in found] == [leases[2], leases[0]]


def test_a_lost_attempt_waits_and_the_log_says_which_worker_was_lost(a: Connection) -> None:
    job = put(a)
    lease = take_one(a, "worker 7")
    expire(a, lease)
    began = ask(a, "SELECT clock_timestamp()")

    rescued = rescue(a, delay=timedelta(seconds=30))

    row = alive(a, job)
    assert [each for each, _ in rescued] == [lease]
    assert (row["status"], row["attempts"], row["fencing_token"]) == ("ready", 1, 1)
    assert timedelta(seconds=30) <= row["run_at"] - began < timedelta(seconds=35)
    assert (row["locked_by"], row["locked_until"], row["finished_at"]) == (None, None, None)
    assert row["last_error"] == "lease lost by worker worker 7"
    [line] = row["attempt_log"]
    assert (line["attempt"], line["token"], line["worker"], line["lost"]) == (1, 1, "worker 7", True)


def test_a_lost_last_attempt_fails_the_job(a: Connection) -> None:
    job = put(a, max_attempts=2, attempts=1)
    expire(a, take_one(a))

    rescue(a)

    row = alive(a, job)
    assert (row["status"], row["attempts"]) == ("failed", 2)
    assert row["finished_at"] is not None
    assert row["attempt_log"][0]["lost"] is True


def test_a_job_that_kills_every_worker_ends_as_failed(a: Connection) -> None:
    """Field case B25: neither without end, nor stuck at the limit."""
    job = put(a, max_attempts=3)

    attempts = 0
    while statuses(a)[job] == "ready":
        expire(a, take_one(a, f"worker {attempts}"))
        rescue(a)
        attempts += 1
        assert attempts <= 3

    assert attempts == 3
    assert statuses(a)[job] == "failed"
    assert [line["worker"] for line in alive(a, job)["attempt_log"]] == ["worker 0", "worker 1", "worker 2"]


def test_a_lost_attempt_whose_cancel_was_requested_is_cancelled_and_says_who_was_lost(a: Connection) -> None:
    put(a)
    lease = take_one(a, "A")
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")
    expire(a, lease)

    rescue(a)

    [row] = archive(a)
    assert (row["status"], row["attempts"], row["last_error"]) == ("cancelled", 1, "lease lost by worker A")
    assert [(line["worker"], line["lost"]) for line in row["attempt_log"]] == [("A", True)]


def test_the_lost_of_several_owners_are_rescued_together(a: Connection) -> None:
    put_many(a, 6)
    leases = [lease for owner in "ABC" for lease in take(a, owner, limit=2)]
    expire(a, *leases)

    assert sorted(lease for lease, _ in rescue(a)) == sorted(leases)
    assert set(statuses(a).values()) == {"ready"}


def test_a_row_that_somebody_holds_is_left_for_the_next_pass(clean: Engine, a: Connection) -> None:
    put_many(a, 3)
    leases = take(a, limit=3)
    expire(a, *leases)

    with clean.connect() as user:
        run(user, "SELECT 1 FROM background_jobs WHERE id = :id FOR UPDATE", id=leases[1].id)
        first = rescue(a)
        user.rollback()

    assert [lease for lease, _ in first] == [leases[0], leases[2]]
    assert [lease for lease, _ in rescue(a)] == [leases[1]]


def test_a_candidate_is_only_read(a: Connection) -> None:
    job = put(a)
    expire(a, take_one(a))
    before = alive(a, job)

    candidates(a)

    assert alive(a, job) == before


def test_one_candidate_that_was_settled_meanwhile_does_not_keep_the_others(a: Connection) -> None:
    put_many(a, 3)
    leases = take(a, limit=3)
    expire(a, *leases)
    found = candidates(a)
    written(a, (leases[1], judged(Released())))

    rescued = settle_expired(a, TABLES, found, retention=KEEP).written

    assert [lease for lease, _ in rescued] == [leases[0], leases[2]]


# -- jobs that expired before their first claim


def test_a_job_that_expired_unclaimed_is_cancelled_with_that_reason(a: Connection, clean_url: str) -> None:
    job = put(a, payload='{"order": 7}', expires_at=AGO)

    with listening(clean_url) as ear:
        assert cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled == [job]
        assert ear.heard() == []

    [row] = archive(a)
    assert ask(a, "SELECT count(*) FROM background_jobs") == 0
    assert (row["id"], row["status"], row["last_error"]) == (job, "cancelled", "expired")
    assert (row["attempts"], row["fencing_token"], row["payload"]) == (0, 0, {"order": 7})
    assert row["finished_at"] is not None


def test_only_what_has_expired_is_cancelled(a: Connection) -> None:
    put(a)
    put(a, expires_at=SOON)
    put(a, expires_at=AGO, queue="mail")
    put(a, expires_at=AGO, status="blocked")

    assert cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled == []
    assert archive(a) == []


def test_a_job_that_was_claimed_before_it_expired_goes_on(a: Connection) -> None:
    job = put(a, expires_at=SOON)
    written(a, (take_one(a), judged(Released())))
    run(a, "UPDATE background_jobs SET expires_at = :ago", ago=AGO)

    assert cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled == []
    assert statuses(a) == {job: "ready"}


def test_a_job_that_is_claimed_between_the_look_and_the_write_does_not_expire(
    clean: Engine, a: Connection
) -> None:
    """An operator puts the expiry off, and a worker claims at once."""
    job = put(a, expires_at=AGO)

    def between(_: Connection, cursor: object, statement: str, *rest: object) -> None:
        if "DELETE FROM background_jobs" in statement:
            run(a, "UPDATE background_jobs SET expires_at = :soon", soon=SOON)
            take_one(a)
            run(a, "UPDATE background_jobs SET expires_at = :ago", ago=AGO)

    with autocommit(clean) as rescuer:
        event.listen(rescuer, "before_cursor_execute", between)
        expired = cancel_expired(rescuer, TABLES, queue="default", retention=KEEP)

    assert expired.cancelled == []
    assert statuses(a) == {job: "running"}


def test_a_running_job_does_not_expire(a: Connection) -> None:
    put(a, expires_at=SOON)
    take_one(a)
    run(a, "UPDATE background_jobs SET expires_at = :ago, fencing_token = 0", ago=AGO)

    assert cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled == []


def test_a_pass_takes_no_more_than_its_limit(a: Connection) -> None:
    jobs = [put(a, expires_at=AGO) for _ in range(5)]

    taken = [cancel_expired(a, TABLES, queue="default", retention=KEEP, limit=2).cancelled for _ in range(4)]

    assert sorted(map(len, taken)) == [0, 1, 2, 2]
    assert sorted(job for each in taken for job in each) == jobs


@pytest.mark.parametrize("kept", [True, False])
def test_an_expired_job_is_archived_as_long_as_cancelled_ones_are(a: Connection, kept: bool) -> None:
    put(a, expires_at=AGO)
    retention = Retention(cancelled=timedelta(days=1) if kept else timedelta(0), done=timedelta(0))

    assert len(cancel_expired(a, TABLES, queue="default", retention=retention).cancelled) == 1
    assert len(archive(a)) == kept
    assert ask(a, "SELECT count(*) FROM background_jobs") == 0


def test_an_expired_job_that_somebody_holds_is_left(clean: Engine, a: Connection) -> None:
    held, free = put(a, expires_at=AGO), put(a, expires_at=AGO)

    with clean.connect() as user:
        run(user, "SELECT 1 FROM background_jobs WHERE id = :id FOR UPDATE", id=held)

        assert cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled == [free]


@pytest.mark.parametrize(
    "change",
    [
        "status = 'running', fencing_token = 1, locked_by = 'A', locked_until = now() + interval '1 minute'",
        "fencing_token = 1",
        "expires_at = now() + interval '1 hour'",
        "status = 'blocked'",
    ],
    ids=["claimed", "claimed and given back", "put off", "blocked"],
)
def test_an_expiry_looks_again_before_it_writes(a: Connection, b: Connection, change: str) -> None:
    """A claim of the last moment may commit between the look and the cancel."""
    changed, expired = put(a, expires_at=AGO), put(a, expires_at=AGO)

    def meddle(_c: object, _cursor: object, statement: str, *_: object) -> None:
        if "WITH late AS" in statement:
            run(b, f"UPDATE background_jobs SET {change} WHERE id = :id", id=changed)
            looked.append(alive(b, changed))

    looked: list[Row] = []
    event.listen(a, "before_cursor_execute", meddle)
    cancelled = cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled
    event.remove(a, "before_cursor_execute", meddle)

    assert cancelled == [expired]
    assert [alive(b, changed)] == looked
