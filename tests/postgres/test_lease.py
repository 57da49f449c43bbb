"""Prolonging: many leases in one statement, past rows that somebody holds, and what it finds out."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event
from steps import (
    KEEP,
    LEASE,
    TABLES,
    alive,
    ask,
    expire,
    judged,
    put,
    put_many,
    rescue,
    run,
    take,
    take_one,
    written,
)

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import DONE, Raised
from sqla_jobs.store.lease import cancel_requested, prolong
from sqla_jobs.store.settle import settle_within

LEFT = (
    "SELECT extract(epoch FROM locked_until - clock_timestamp())::float8 FROM background_jobs WHERE id = :id"
)


def test_a_prolonged_lease_ends_a_full_lease_from_now_and_nothing_else_changes(a: Connection) -> None:
    job = put(a)
    lease = take_one(a)
    before = alive(a, job)

    prolonged = prolong(a, TABLES, [lease], lease=timedelta(seconds=600))

    after = alive(a, job)
    assert prolonged.kept == [lease]
    assert (prolonged.busy, prolonged.lost, prolonged.cancel_requested) == ([], [], [])
    assert ask(a, LEFT, id=job) == pytest.approx(600, abs=2)
    assert {name for name in after if after[name] != before[name]} == {"xmin", "ctid", "locked_until"}


def test_a_lease_counts_from_the_clock_also_in_a_transaction_open_for_long(
    clean: Engine, a: Connection
) -> None:
    job = put(a)
    lease = take_one(a)

    with clean.begin() as old:
        ask(old, "SELECT now()")
        run(old, "SELECT pg_sleep(0.3)")
        prolong(old, TABLES, [lease], lease=timedelta(seconds=600))

    assert ask(a, LEFT, id=job) == pytest.approx(600, abs=0.25)


def test_many_leases_are_prolonged_by_one_statement(a: Connection) -> None:
    put_many(a, 100)
    leases = take(a, limit=100)
    sent: list[str] = []
    event.listen(a, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))

    prolonged = prolong(a, TABLES, leases[::-1], lease=LEASE)

    assert prolonged.kept == leases[::-1]
    assert len(sent) == 1


def test_a_lease_that_has_run_out_but_was_not_taken_over_is_kept(a: Connection) -> None:
    put(a)
    lease = take_one(a)
    expire(a, lease)

    assert prolong(a, TABLES, [lease], lease=LEASE).kept == [lease]
    assert rescue(a) == []


def test_a_requested_cancel_is_heard_of_with_the_prolongation(a: Connection) -> None:
    put_many(a, 2)
    leases = take(a, limit=2)
    cancel = "UPDATE background_jobs SET cancel_requested_at = clock_timestamp() WHERE id = :id"
    run(a, cancel, id=leases[0].id)

    prolonged = prolong(a, TABLES, leases, lease=LEASE)

    assert prolonged.kept == leases
    assert prolonged.cancel_requested == [leases[0]]


def test_a_cancel_of_the_second_attempt_does_not_end_the_first(a: Connection) -> None:
    put(a)
    first = take_one(a)
    expire(a, first)
    rescue(a)
    second = take_one(a)
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")

    assert cancel_requested(a, TABLES, [first]) == []
    assert cancel_requested(a, TABLES, [second]) == [second]


def test_a_row_that_somebody_holds_is_busy_and_stalls_no_other(clean: Engine, a: Connection) -> None:
    put_many(a, 10)
    leases = take(a, limit=10)
    run(a, "SET lock_timeout = '1ms'")

    with clean.connect() as user:
        run(user, "UPDATE background_jobs SET priority = 1 WHERE id = :id", id=leases[4].id)
        first = prolong(a, TABLES, leases, lease=LEASE)
        user.rollback()
    second = prolong(a, TABLES, first.busy, lease=LEASE)

    run(a, "RESET lock_timeout")
    assert first.kept == leases[:4] + leases[5:]
    assert first.busy == [leases[4]]
    assert second.kept == [leases[4]]


def test_a_lease_whose_own_settle_is_open_is_busy_and_not_lost(clean: Engine, a: Connection) -> None:
    put(a)
    lease = take_one(a)

    with clean.connect() as handler:
        assert settle_within(handler, TABLES, (lease, DONE), retention=KEEP)

        assert prolong(a, TABLES, [lease], lease=LEASE).busy == [lease]


def test_a_users_foreign_key_to_a_running_job_does_not_keep_its_lease_from_being_prolonged(
    clean: Engine, a: Connection
) -> None:
    put(a)
    lease = take_one(a)

    with clean.connect() as user:
        run(user, "SELECT 1 FROM background_jobs FOR KEY SHARE")

        assert prolong(a, TABLES, [lease], lease=LEASE).kept == [lease]


def test_of_many_leases_only_the_lost_are_lost(a: Connection) -> None:
    put_many(a, 7)
    kept, rescued, reclaimed, settled, retried, foreign, deleted = take(a, limit=7)
    expire(a, rescued, reclaimed)
    rescue(a)
    run(a, "UPDATE background_jobs SET run_at = '2999-01-01' WHERE id = :id", id=rescued.id)
    take_one(a, "B")
    written(a, (settled, DONE), (retried, judged(Raised("boom", timedelta(hours=1)))))
    run(a, "UPDATE background_jobs SET locked_by = 'B' WHERE id = :id", id=foreign.id)
    run(a, "DELETE FROM background_jobs WHERE id = :id", id=deleted.id)
    leases = [kept, rescued, reclaimed, settled, retried, foreign, deleted]

    prolonged = prolong(a, TABLES, leases, lease=LEASE)

    assert prolonged.kept == [kept]
    assert prolonged.lost == leases[1:]


def test_a_lease_on_a_job_that_never_existed_is_lost(a: Connection) -> None:
    lease = Lease("default", 4711, 1, "A")

    assert prolong(a, TABLES, [lease], lease=LEASE).lost == [lease]


# -- which of the attempts somebody wants to end


def test_a_requested_cancel_is_told_without_touching_the_lease(a: Connection) -> None:
    put_many(a, 3)
    leases = take(a, limit=3)
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp() WHERE id = 2")
    before = [alive(a, lease.id) for lease in leases]

    assert cancel_requested(a, TABLES, leases) == [leases[1]]
    assert [alive(a, lease.id) for lease in leases] == before


@pytest.mark.parametrize("change", [{"token": 7}, {"queue": "mail"}], ids=["token", "queue"])
def test_a_cancel_of_another_attempt_is_not_ours(a: Connection, change: dict[str, Any]) -> None:
    put(a)
    lease = take(a)[0]
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")

    assert cancel_requested(a, TABLES, [lease._replace(**change)]) == []


def test_a_cancel_of_a_job_that_runs_no_more_is_not_ours(a: Connection) -> None:
    put(a)
    lease = take(a)[0]
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp(), status = 'ready'")

    assert cancel_requested(a, TABLES, [lease]) == []
