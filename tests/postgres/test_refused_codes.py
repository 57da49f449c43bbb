"""Rows that the database refuses with whatever code, or leaves as they are without a word."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from shop import Job, Order
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from steps import (
    KEEP,
    TABLES,
    ask,
    autocommit,
    candidates,
    claimed,
    expire,
    judged,
    put,
    put_many,
    run,
    statuses,
    take_one,
    written,
)
from workers import PATIENCE, until, until_row, working

from sqla_jobs.context import JobContext
from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import DONE, JobStatus, Raised, Released, Snoozed, judge
from sqla_jobs.core.retry import Retry
from sqla_jobs.events import Events
from sqla_jobs.store.answers import UNCHANGED
from sqla_jobs.store.claim import ClaimedJob, claim_apart
from sqla_jobs.store.lease import prolong
from sqla_jobs.store.rescue import cancel_expired
from sqla_jobs.store.settle import settle_expired, settle_within
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker import session as handler_session
from sqla_jobs.worker.run import Run, Runner

SECOND = timedelta(seconds=1)


@pytest.fixture
def own(engine: Engine) -> Iterator[Connection]:
    """A database that the test may alter."""
    with autocommit(engine) as connection:
        yield connection


def trigger(connection: Connection, verbs: str, body: str) -> None:
    """A BEFORE trigger of a user's."""
    run(
        connection,
        f"CREATE OR REPLACE FUNCTION theirs() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$",
    )
    run(
        connection,
        f"CREATE TRIGGER theirs BEFORE {verbs} ON background_jobs FOR EACH ROW EXECUTE FUNCTION theirs()",
    )


# -- left as it is, without an error

#: The classic slip of an audit trigger: for a DELETE, NEW is null, and null means "leave it".
KEEPS_DELETED = ("DELETE", "RETURN NEW;")
KEEPS_ALL = ("UPDATE OR DELETE", "IF OLD.id = 2 THEN RETURN NULL; END IF; RETURN coalesce(NEW, OLD);")


@pytest.mark.parametrize("verdict", [DONE, judge(Raised("no", None), attempt=1, max_attempts=1)], ids=str)
def test_a_row_that_a_trigger_keeps_from_being_deleted_ends_in_place(own: Connection, verdict: Any) -> None:
    put_many(own, 3)
    leases = [job.lease for job in claimed(own, limit=3)]
    trigger(own, *KEEPS_DELETED)

    settled = written(own, *[(lease, verdict) for lease in leases])

    assert sorted(settled.written) == [(lease, verdict) for lease in leases]
    assert [error for _, error in settled.kept] == ([UNCHANGED] * 3 if verdict is DONE else [])
    assert set(statuses(own).values()) == {verdict.status}


def test_a_row_that_does_not_change_at_all_is_refused_and_not_called_written(own: Connection) -> None:
    put_many(own, 3)
    leases = [job.lease for job in claimed(own, limit=3)]
    trigger(own, *KEEPS_ALL)

    settled = written(own, *[(lease, DONE) for lease in leases])

    assert sorted(lease.id for lease, _ in settled.written) == [1, 3]
    assert [(lease.id, error) for (lease, _), error in settled.refused] == [(2, UNCHANGED)]
    assert (settled.busy, settled.stale) == ([], [])


@pytest.mark.parametrize("keeps", [KEEPS_DELETED, KEEPS_ALL], ids=["deleted", "all"])
async def test_what_a_handler_wrote_is_committed_once_whatever_a_trigger_keeps(
    database_url: str, own: Connection, keeps: tuple[str, str]
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="noop", retry=Retry(max_attempts=3, delay=timedelta(0)))
    def noop(ctx: JobContext) -> None:
        ctx.session.add(Order(customer=str(ctx.id)))

    put_many(own, 3)
    trigger(own, keeps[0], keeps[1].replace("OLD.id = 2", "OLD.id = 2 AND OLD.status = 'running'"))

    async with working(jobs, database_url, lease=4 * SECOND) as (_, heard):
        await heard.settled(3 if keeps is KEEPS_DELETED else 2)

    customers = ask(own, "SELECT array_agg(customer ORDER BY customer) FROM orders")
    assert customers == (["1", "2", "3"] if keeps is KEEPS_DELETED else ["1", "3"])


@pytest.mark.parametrize(("keeps", "ends"), [(KEEPS_DELETED, [1, 2, 3]), (KEEPS_ALL, [1, 3])])
def test_an_expired_row_that_a_trigger_keeps_is_cancelled_in_place_or_refused(
    own: Connection, keeps: tuple[str, str], ends: list[int]
) -> None:
    put_many(own, 3)
    run(own, "UPDATE background_jobs SET expires_at = now() - interval '1 s'")
    trigger(own, *keeps)

    first = cancel_expired(own, TABLES, queue="default", retention=KEEP)
    second = cancel_expired(own, TABLES, queue="default", retention=KEEP)

    assert sorted(first.cancelled) == ends
    assert [each.id for each in first.refused] == sorted({1, 2, 3} - set(ends))
    assert second.cancelled == []


def test_a_rescued_row_that_a_trigger_keeps_is_cancelled_once(own: Connection) -> None:
    put_many(own, 2)
    leases = [job.lease for job in claimed(own, limit=2)]
    run(own, "UPDATE background_jobs SET cancel_requested_at = now()")
    trigger(own, *KEEPS_DELETED)
    expire(own, *leases)

    settled = settle_expired(own, TABLES, candidates(own), retention=KEEP)

    assert len(settled.written) == len(settled.kept) == 2
    assert set(statuses(own).values()) == {"cancelled"}
    assert candidates(own) == []


# -- refused, with a code that may mean anything


def refuses(code: str, which: str = "OLD.id = 3") -> tuple[str, str]:
    return (
        "UPDATE OR DELETE",
        (
            f"IF {which} THEN RAISE EXCEPTION 'never' USING ERRCODE = '{code}'; END IF; "
            "RETURN coalesce(NEW, OLD);"
        ),
    )


codes = pytest.mark.parametrize("code", ["APP01", "42501", "23514", "P0001"])


@codes
def test_whatever_the_code_a_refused_row_costs_its_own_settle_only(own: Connection, code: str) -> None:
    put_many(own, 5)
    leases = [job.lease for job in claimed(own, limit=5)]
    trigger(own, *refuses(code))

    settled = written(own, *[(lease, DONE) for lease in leases])

    assert sorted(lease.id for lease, _ in settled.written) == [1, 2, 4, 5]
    assert [lease.id for (lease, _), _ in settled.refused] == [3]


@codes
def test_whatever_the_code_a_refused_row_costs_its_own_rescue_prolongation_and_claim_only(
    own: Connection, code: str
) -> None:
    put_many(own, 5)
    leases = [job.lease for job in claimed(own, limit=5)]
    trigger(own, *refuses(code))

    kept = prolong(own, TABLES, leases, lease=10 * SECOND)
    run(own, "ALTER TABLE background_jobs DISABLE TRIGGER theirs")
    expire(own, *leases)
    run(own, "ALTER TABLE background_jobs ENABLE TRIGGER theirs")
    rescued = settle_expired(own, TABLES, candidates(own), retention=KEEP)
    run(own, "ALTER TABLE background_jobs DISABLE TRIGGER theirs")
    run(own, "UPDATE background_jobs SET status = 'ready', locked_by = NULL, run_at = now() - interval '1 s'")
    run(own, "ALTER TABLE background_jobs ENABLE TRIGGER theirs")
    apart = claim_apart(own, TABLES, queue="default", owner="B", limit=5, lease=10 * SECOND)

    assert [lease.id for lease, _ in kept.refused] == [3]
    assert [lease.id for (lease, _), _ in rescued.refused] == [3]
    assert [id_ for id_, _ in apart.refused] == [3]
    assert len(kept.kept) == len(rescued.written) == len(apart.jobs) == 4


@codes
@pytest.mark.parametrize("concurrency", [1, 4])
async def test_whatever_the_code_a_refused_row_at_the_head_does_not_freeze_its_queue(
    engine: Engine, database_url: str, own: Connection, code: str, concurrency: int
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    put_many(own, 5)
    trigger(own, *refuses(code, "OLD.id = 1"))

    async with working(jobs, database_url, concurrency=concurrency):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 4")

    assert statuses(own) == {1: "ready"} | dict.fromkeys(range(2, 6), "done")


@pytest.mark.parametrize("count", [2, 5, 40])
def test_what_fails_for_every_row_is_no_rows_fault(own: Connection, count: int) -> None:
    """A privilege that is missing, say: all of it is tried again, and nothing is called refused."""
    put_many(own, count)
    leases = [job.lease for job in claimed(own, limit=count)]
    trigger(own, *refuses("42501", "true"))

    with pytest.raises(DBAPIError, match="never"):
        written(own, *[(lease, DONE) for lease in leases])
    with pytest.raises(DBAPIError, match="never"):
        prolong(own, TABLES, leases, lease=10 * SECOND)


# -- settled through ctx.session


def writing(**options: Any) -> Jobs:
    jobs = Jobs(Job)

    @jobs.task(name="noop", retry=Retry(**options))
    def noop(ctx: JobContext) -> None:
        ctx.session.add(Order(customer=str(ctx.id)))

    return jobs


async def test_a_deferred_foreign_key_to_a_job_does_not_cost_the_work_of_its_handler(
    database_url: str, own: Connection
) -> None:
    """It would be looked at by the COMMIT, past the savepoint of the settle."""
    put_many(own, 2)
    run(
        own,
        "CREATE TABLE notes (job bigint, queue text, "
        "FOREIGN KEY (job, queue) REFERENCES background_jobs DEFERRABLE INITIALLY DEFERRED)",
    )
    run(own, "INSERT INTO notes SELECT id, queue FROM background_jobs WHERE id = 2")

    async with working(writing(max_attempts=1), database_url) as (_, heard):
        assert await heard.settled(2) == [JobStatus.DONE] * 2

    assert statuses(own) == {1: "done", 2: "done"}
    assert ask(own, "SELECT count(*) FROM orders") == 2


async def test_a_row_that_somebody_holds_for_long_does_not_fail_its_handler(
    engine: Engine, database_url: str, own: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = text("SELECT set_config('lock_timeout', '50ms', true)")
    monkeypatch.setattr(handler_session, "_LOCK_TIMEOUT", short)
    monkeypatch.setattr(handler_session, "_TRIES", 1000)
    jobs, began, go_on = Jobs(Job), threading.Event(), threading.Event()

    @jobs.task(name="noop", retry=Retry(max_attempts=1))
    def noop(ctx: JobContext) -> None:
        began.set()
        go_on.wait(PATIENCE)
        ctx.session.add(Order(customer="Ada"))

    put(own)
    whole, tries = settle_within, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        tries.append(1)
        return whole(*args, **kwargs)

    monkeypatch.setattr(handler_session, "settle_within", counted)

    async with working(jobs, database_url, lease=60 * SECOND) as (_, heard):
        await until(began.is_set)
        with engine.connect() as somebody:
            run(somebody, "SELECT FROM background_jobs FOR UPDATE")
            go_on.set()
            await until(lambda: len(tries) > 3)
            somebody.rollback()
        assert await heard.settled(1) == [JobStatus.DONE]

    assert ask(own, "SELECT count(*) FROM orders") == 1


# -- attempts


async def test_a_job_whose_outcome_is_refused_is_not_given_back_as_if_it_had_not_run(
    engine: Engine, database_url: str, own: Connection
) -> None:
    jobs, ran = Jobs(Job), []

    @jobs.task(name="noop", retry=Retry(delay=timedelta(0)))
    def noop() -> None:
        ran.append(1)

    put(own)
    trigger(own, *refuses("P0001", "OLD.status = 'running' AND (TG_OP = 'DELETE' OR NEW.status = 'done')"))

    async with working(jobs, database_url) as (worker, heard):
        await heard.event("outcome.refused")
        worker._claims._orphans["default"] = [0.0]
        put(own, kind="unknown")  # another claim, which looks for orphans first
        await heard.event("job.unknown_kind")

    assert ran == [1]
    assert ask(own, "SELECT attempts FROM background_jobs WHERE kind = 'noop'") == 1
    [lost] = heard.named("lease.lost")
    assert lost.fields["reason"] == "its outcome cannot be written"


@pytest.mark.parametrize("outcome", [Snoozed(SECOND), Released()], ids=["snooze", "release"])
def test_a_job_whose_attempts_were_set_back_by_hand_is_given_back(own: Connection, outcome: Any) -> None:
    put(own)
    lease = take_one(own)
    run(own, "UPDATE background_jobs SET attempts = 0")

    settled = written(own, (lease, judged(outcome)))

    assert len(settled.written) == 1
    assert ask(own, "SELECT (status, attempts)::text FROM background_jobs") == "(ready,0)"


def test_of_two_attempts_of_one_job_in_a_batch_only_the_later_is_written(own: Connection) -> None:
    put(own)
    old = take_one(own)
    run(own, "UPDATE background_jobs SET status = 'ready', locked_by = NULL")
    new = take_one(own)

    settled = written(own, (old, DONE), (new, DONE))

    assert ([lease for lease, _ in settled.written], [lease for lease, _ in settled.stale]) == ([new], [old])


async def test_a_stop_gives_back_what_a_claim_took_whose_answer_was_lost(
    database_url: str, own: Connection
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="noop")
    def noop() -> None: ...

    async with working(jobs, database_url) as (worker, heard):
        await heard.event("listen.connected")
        put(own, status="running", locked_by=worker.id, fencing_token=1, attempts=1, locked_until="infinity")
        worker._claims._orphans["default"] = [float("inf")]

    assert ask(own, "SELECT (status, attempts)::text FROM background_jobs") == "(ready,0)"


@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_a_job_cancelled_while_it_waits_for_its_slot_does_not_begin(form: str) -> None:
    jobs, ran = Jobs(Job), []

    @jobs.task(name="thread")
    def in_thread() -> None:
        ran.append(1)

    @jobs.task(name="loop")
    async def in_loop() -> None:
        ran.append(1)

    runner = Runner(jobs, source=None, async_source=None, events=Events())
    claimed_job = ClaimedJob(Lease("default", 1, 1, "A"), form, "{}", 1, 20, 0, 0.0)
    waiting = Run(job=claimed_job, task=jobs.tasks[form])
    waiting.cancel_requested = True

    ended = runner.in_thread(waiting) if form == "thread" else await runner.in_loop(waiting)

    assert ran == []
    assert ended.verdict is not None
    assert ended.verdict.status is JobStatus.CANCELLED
