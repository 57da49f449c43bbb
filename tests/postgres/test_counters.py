"""Ids, attempts and tokens at the ends of their range, and attempts counted as they were run.

Field cases B33 and B45.
"""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from shop import Job, Order
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session
from steps import (
    KEEP,
    LEASE,
    TABLES,
    alive,
    claimed,
    expire,
    judged,
    put,
    put_many,
    rescue,
    run,
    statuses,
    take,
    take_one,
    written,
)
from workers import execute, rows, working

from sqla_jobs.context import Cancel, JobContext
from sqla_jobs.core.lifecycle import DONE, Aborted, JobStatus, Outcome, Raised, Released, Snoozed
from sqla_jobs.core.retention import Retention
from sqla_jobs.core.retry import Retry
from sqla_jobs.store.archive import purge
from sqla_jobs.store.claim import release_unknown
from sqla_jobs.store.lease import cancel_requested, prolong
from sqla_jobs.store.rescue import cancel_expired
from sqla_jobs.tasks import Jobs, enqueue, enqueue_many

# -- B33: attempts are those that ran


SOON = timedelta(seconds=1)


def steps_of_b33() -> Iterator[tuple[Outcome | None, int]]:
    """How each claim ends (None: its worker dies), and the attempts that then count, by hand."""
    for _ in range(50):
        yield Released(SOON), 0  # no room under a limit
    yield None, 1
    for _ in range(300):
        yield Snoozed(SOON), 1
    yield None, 2
    for _ in range(20):
        yield Released(), 2  # at a stop
    yield Raised("boom", SOON), 3


def test_b33_only_what_ran_and_failed_or_was_lost_counts_as_an_attempt(a: Connection) -> None:
    job = put(a, max_attempts=3)
    claims = 0

    for outcome, attempts in steps_of_b33():
        assert alive(a, job)["status"] == "ready"
        run(a, "UPDATE background_jobs SET run_at = statement_timestamp()")
        [it] = claimed(a, "A")
        claims += 1
        if outcome is None:
            expire(a, it.lease)
            assert len(rescue(a)) == 1
        else:
            verdict = judged(outcome, attempt=it.attempt, max_attempts=it.max_attempts)
            assert written(a, (it.lease, verdict)).written
        row = alive(a, job)
        assert (row["attempts"], row["fencing_token"]) == (attempts, claims)

    assert (row["status"], claims) == ("failed", 373)
    assert [(line["attempt"], line["lost"]) for line in row["attempt_log"]] == [
        (1, True),
        (2, True),
        (3, False),
    ]


@pytest.mark.parametrize("outcome", [Snoozed(SOON), Released()], ids=["snooze", "release"])
@pytest.mark.parametrize("claims", [32_766, 39_999, 2**31 - 2, 2**63 - 3])
def test_b33_no_number_of_claims_that_cost_nothing_overflows_a_column(
    a: Connection, outcome: Outcome, claims: int
) -> None:
    job = put(a, max_attempts=1)
    run(a, "UPDATE background_jobs SET fencing_token = :claims", claims=claims)

    for _ in range(2):
        run(a, "UPDATE background_jobs SET run_at = statement_timestamp()")
        lease = take_one(a)
        assert written(a, (lease, judged(outcome, max_attempts=1))).written

    row = alive(a, job)
    assert (row["status"], row["attempts"], row["fencing_token"]) == ("ready", 0, claims + 2)


# -- B45: ids beyond 2 ** 31, and the very last ones

THREE_BILLION, THE_LAST_TEN = 3_000_000_000, 2**63 - 10
starts = pytest.mark.parametrize("start", [THREE_BILLION, THE_LAST_TEN], ids=["3e9", "2**63-10"])


def number_from(connection: Connection, start: int) -> None:
    """The identity sequence goes on from there; the next TRUNCATE puts it back."""
    run(connection, f"ALTER TABLE background_jobs ALTER COLUMN id RESTART WITH {start}")


@starts
async def test_b45_jobs_of_every_kind_live_their_life_with_such_ids(
    engine: Engine, database_url: str, start: int
) -> None:
    jobs = Jobs(Job)
    seen: list[int] = []

    @jobs.task(name="returns")
    def returns(ctx: JobContext) -> None:
        seen.append(ctx.id)

    @jobs.task(name="fails", retry=Retry(max_attempts=2, delay=timedelta(0)))
    async def fails() -> None:
        raise ValueError("boom")

    @jobs.task(name="cancels")
    def cancels() -> None:
        raise Cancel("not wanted")

    @jobs.task(name="writes")
    def writes(ctx: JobContext) -> None:
        ctx.session.add(Order(customer=str(ctx.id)))

    execute(engine, f"ALTER TABLE background_jobs ALTER COLUMN id RESTART WITH {start}")
    with Session(engine) as session, session.begin():
        single = [enqueue(session, task) for task in (returns, fails, cancels, writes)]
        many = enqueue_many(session, [returns.call(), returns.call()])
        first = enqueue(session, returns.using(unique_key="k"))
    with Session(engine) as session, session.begin():
        second = enqueue(session, returns.using(unique_key="k"))
    execute(engine, "INSERT INTO background_jobs (kind) VALUES ('returns')")

    async with working(jobs, database_url) as (_, heard):
        await heard.settled(9)

    ids = [each.id for each in (*single, *many, first)]
    assert ids == list(range(start, start + 7))
    assert (second.id, second.created) == (first.id, False)
    ends = rows(engine, "SELECT id, status FROM background_jobs "
                        "UNION ALL SELECT id, status FROM background_jobs_archive")  # fmt: skip
    assert [ends_of for _, ends_of in sorted(ends)] == ["done", "failed", "cancelled", *["done"] * 5]
    assert rows(engine, "SELECT customer FROM orders") == [(str(start + 3),)]
    assert len(set(seen)) == 5
    assert heard.named("database.error") == []
    with Session(engine) as session:
        for id_, status in ends:
            record = jobs.find(session, id_)
            assert record is not None
            assert (record.id, record.status) == (id_, status)


@starts
def test_b45_every_verb_takes_such_ids(a: Connection, start: int) -> None:
    number_from(a, start)
    ids = put_many(a, 9)
    assert ids == list(range(start, start + 9))
    leases = take(a, limit=8)
    fails, rescued, released, cancelled, lost, held, orphan, done = leases
    run(a, "UPDATE background_jobs SET expires_at = run_at WHERE id = :id", id=ids[8])
    run(a, "UPDATE background_jobs SET cancel_requested_at = run_at WHERE id = :id", id=held.id)

    assert prolong(a, TABLES, leases, lease=LEASE).kept == leases
    assert cancel_requested(a, TABLES, leases) == [held]
    expire(a, rescued)
    assert [lease for lease, _ in rescue(a)] == [rescued]
    settled = written(
        a,
        (fails, judged(Raised("boom", None))),
        (released, judged(Released(LEASE))),
        (cancelled, judged(Aborted("not wanted"))),
        (lost._replace(token=7), DONE),
        (done, DONE),
    )
    known = [each.id for each in leases if each is not orphan]
    assert release_unknown(a, TABLES, queue="default", owner="A", known=known) == 1
    assert cancel_expired(a, TABLES, queue="default", retention=KEEP).cancelled == [ids[8]]

    assert [lease for lease, _ in settled.stale] == [lost._replace(token=7)]
    assert statuses(a) == dict(
        zip(
            ids,
            ["failed", "ready", "ready", "cancelled", "running", "running", "ready", "done", "cancelled"],
            strict=True,
        )
    )
    run(a, "UPDATE background_jobs_archive SET finished_at = finished_at - interval '2 d'")
    day = Retention(done=timedelta(days=1), cancelled=timedelta(days=1))
    assert purge(a, TABLES, retention=day).counts == {
        JobStatus.DONE: 1,
        JobStatus.CANCELLED: 2,
        JobStatus.FAILED: 0,
    }


def test_b45_every_sequence_of_ours_reaches_to_the_end_of_bigint(a: Connection) -> None:
    """Ignored duplicates consume numbers: a narrower sequence would end one day."""
    found = a.execute(
        text("SELECT sequencename, max_value FROM pg_sequences WHERE sequencename LIKE 'background_jobs%'")
    ).all()

    assert {name: last for name, last in found if last != 2**63 - 1} == {}
    assert "background_jobs_id_seq" in dict(tuple(row) for row in found)
