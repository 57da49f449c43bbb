"""A worker in this process, on a real database: what becomes of jobs and of their rows."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import anyio
import pytest
import shop
from shop import Job, Order, Receipt
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session
from workers import PATIENCE, execute, finished, rows, until, until_row, working

from sqla_jobs.context import AsyncJobContext, Cancel, JobContext, RetryAfter, Snooze
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.errors import AppError, ConfigurationError, DatabaseUnreachable, SchemaMismatch
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import Worker

DONE, FAILED, CANCELLED, READY = JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.READY
NEVER = timedelta(hours=1)  # a poll interval: only a wake-up or a timer can be in time


@pytest.fixture(autouse=True)
def _forget_calls() -> Iterator[None]:
    shop.calls.clear()
    yield
    shop.calls.clear()


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


# -- the way of a job


async def test_a_committed_job_runs_and_is_archived_as_done(engine: Engine, database_url: str) -> None:
    job = put(engine, shop.note, 7)

    async with working(shop.jobs, database_url) as (_, heard):
        await heard.settled(1)

    assert shop.calls == [7]
    assert rows(engine, "SELECT count(*) FROM background_jobs") == [(0,)]
    assert rows(engine, "SELECT id, status, attempts FROM background_jobs_archive") == [(job, "done", 1)]


async def test_a_plain_function_runs_in_a_thread(engine: Engine, database_url: str) -> None:
    put(engine, shop.note_in_thread, 7)

    async with working(shop.jobs, database_url) as (_, heard):
        await heard.settled(1)

    [(value, thread)] = cast("list[tuple[int, str]]", shop.calls)
    assert value == 7
    assert thread.startswith("sqla_jobs handler")


@pytest.mark.parametrize("task", [shop.send_receipt, shop.send_receipt_async], ids=["sync", "async"])
async def test_what_the_handler_writes_is_committed_with_its_job(
    engine: Engine, database_url: str, task: Task[Any]
) -> None:
    with Session(engine) as session, session.begin():
        session.add(order := Order(customer="Ada"))
        enqueue(session, task, order)

    async with working(shop.jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [DONE]

    with Session(engine) as session:
        receipt = session.scalars(select(Receipt)).one()
        assert receipt.text.startswith("to Ada")
        assert session.scalar(select(func.count()).select_from(Job)) == 0


async def test_what_a_failing_handler_wrote_is_rolled_back_and_the_failure_recorded(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="half", retry=Retry(max_attempts=1))
    def half(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="nobody"))
        ctx.session.commit()
        raise ValueError("after the commit")

    put(engine, half)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [FAILED]

    assert rows(engine, "SELECT count(*) FROM orders") == [(0,)]
    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert error.startswith("ValueError: after the commit\n")


async def test_an_entity_that_is_gone_cancels_its_job_with_that_reason(
    engine: Engine, database_url: str
) -> None:
    with Session(engine) as session, session.begin():
        session.add(order := Order(customer="Ada"))
        enqueue(session, shop.send_receipt, order)
        enqueue(session, shop.send_receipt_async, order)
    execute(engine, "DELETE FROM orders")

    async with working(shop.jobs, database_url) as (_, heard):
        assert await heard.settled(2) == [CANCELLED, CANCELLED]

    reasons = rows(engine, "SELECT last_error FROM background_jobs_archive")
    assert reasons == [("Order 1 no longer exists",)] * 2


# -- when a job starts


async def test_a_wake_up_starts_a_job_at_once(engine: Engine, database_url: str) -> None:
    async with working(shop.jobs, database_url, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        put(engine, shop.note, 1)

        await heard.settled(1)


async def test_a_row_inserted_by_psql_starts_at_once(
    engine: Engine, database_url: str, server: EmbeddedPostgres
) -> None:
    async with working(shop.jobs, database_url, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        insert = """INSERT INTO background_jobs (kind, payload) VALUES ('shop.note', '{"value": 3}')"""
        await asyncio.to_thread(server.psql, insert, str(engine.url.database))

        assert await heard.settled(1) == [DONE]


@pytest.mark.parametrize("listen", [True, False])
async def test_a_job_starts_when_it_is_due_and_not_at_the_next_poll(
    engine: Engine, database_url: str, listen: bool
) -> None:
    put(engine, shop.note.using(delay=timedelta(seconds=1.2)), 1)

    async with working(shop.jobs, database_url, listen=listen, poll_interval=NEVER) as (_, heard):
        await heard.settled(1)

    [(late,)] = rows(engine, "SELECT extract(epoch FROM started_at - run_at) FROM background_jobs_archive")
    assert 0 <= late < 1


async def test_a_job_that_becomes_due_later_is_heard_of_while_the_worker_sleeps(
    engine: Engine, database_url: str
) -> None:
    async with working(shop.jobs, database_url, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        put(engine, shop.note.using(delay=timedelta(seconds=1.2)), 1)
        await heard.settled(1)

    [(late,)] = rows(engine, "SELECT extract(epoch FROM started_at - run_at) FROM background_jobs_archive")
    assert 0 <= late < 1


async def test_without_listen_the_poll_finds_a_job(engine: Engine, database_url: str) -> None:
    async with working(shop.jobs, database_url, listen=False, poll_interval=timedelta(seconds=0.2)) as (
        _,
        heard,
    ):
        await heard.event("worker.started")
        put(engine, shop.note, 1)

        assert await heard.settled(1) == [DONE]


async def test_higher_priority_runs_first_and_equal_ones_in_order(engine: Engine, database_url: str) -> None:
    for value, priority in ((1, 0), (2, 5), (3, 0), (4, 5)):
        put(engine, shop.note.using(priority=priority), value)

    async with working(shop.jobs, database_url, concurrency=1) as (_, heard):
        await heard.settled(4)

    assert shop.calls == [2, 4, 1, 3]


# -- how an attempt ends


async def test_a_failing_job_is_tried_again_and_fails_for_good_at_its_last_attempt(
    engine: Engine, database_url: str
) -> None:
    job = put(engine, shop.fail, "broken")

    async with working(shop.jobs, database_url) as (_, heard):
        assert await heard.settled(3) == [READY, READY, FAILED]

    with Session(engine) as session:
        record = shop.jobs.find(session, job)
    assert record is not None
    assert (record.status, record.attempts, record.archived) == (FAILED, 3, False)
    assert [entry["attempt"] for entry in record.attempt_log or []] == [1, 2, 3]
    assert shop.calls == ["broken"] * 3


class Odd(BaseException):
    """Neither an error nor an exit."""


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(1), KeyboardInterrupt(), Odd(), StopIteration()])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_whatever_a_handler_raises_its_neighbours_go_on(
    engine: Engine, database_url: str, jobs: Jobs, error: BaseException, kind: str
) -> None:
    @jobs.task(name="sync", retry=Retry(max_attempts=1))
    def raises() -> None:
        raise error

    @jobs.task(name="async", retry=Retry(max_attempts=1))
    async def raises_async() -> None:
        raise error

    @jobs.task(name="fine")
    async def fine() -> None:
        await asyncio.sleep(0)

    put(engine, raises if kind == "sync" else raises_async)
    put(engine, fine)

    async with working(jobs, database_url) as (_, heard):
        assert sorted(await heard.settled(2)) == [DONE, FAILED]


async def test_a_handlers_own_cancelled_error_is_a_failed_attempt(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="cancelled", retry=Retry(max_attempts=1))
    async def cancelled() -> None:
        raise asyncio.CancelledError

    put(engine, cancelled)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [FAILED]


async def test_snooze_cancel_and_retry_after_do_what_the_contract_says(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="snooze")
    async def snooze() -> None:
        raise Snooze(timedelta(minutes=5))

    @jobs.task(name="cancel")
    def cancel() -> None:
        raise Cancel("not wanted")

    @jobs.task(name="later")
    async def later() -> None:
        raise RetryAfter(timedelta(hours=2))

    for task in (snooze, cancel, later):
        put(engine, task)

    async with working(jobs, database_url) as (_, heard):
        await heard.settled(3)

    waits = "round(extract(epoch FROM run_at - clock_timestamp()) / 60)::int"
    live = rows(engine, f"SELECT kind, status, attempts, {waits} FROM background_jobs ORDER BY kind")
    assert live == [("later", "ready", 1, 120), ("snooze", "ready", 0, 5)]
    archived = rows(engine, "SELECT kind, status, last_error FROM background_jobs_archive")
    assert archived == [("cancel", "cancelled", "not wanted")]


async def test_an_error_text_that_postgresql_refuses_is_recorded_readably(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @jobs.task(name="nul", retry=Retry(max_attempts=1))
    def nul() -> None:
        raise ValueError("marker \0 \ud800 end")

    @jobs.task(name="unprintable", retry=Retry(max_attempts=1))
    async def unprintable() -> None:
        raise Unprintable

    @jobs.task(name="huge", retry=Retry(max_attempts=1))
    def huge() -> None:
        raise ValueError("x" * 10_000_000)

    for task in (nul, unprintable, huge):
        put(engine, task)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(3) == [FAILED] * 3

    errors = dict(rows(engine, "SELECT kind, last_error FROM background_jobs"))
    assert errors["nul"].startswith("ValueError: marker \ufffd ? end")
    assert "Unprintable" in errors["unprintable"]
    assert errors["huge"].startswith("ValueError: xxx")
    assert len(errors["huge"].encode()) <= 8_000


async def test_a_payload_that_does_not_fit_costs_its_own_job_an_attempt(
    engine: Engine, database_url: str
) -> None:
    deep = "[" * 4000 + "]" * 4000
    for payload in ('{"other": 1}', "[1]", '{"value": "text"}', '{"value": 1%s}' % ("0" * 5000), deep):
        execute(
            engine,
            "INSERT INTO background_jobs (kind, payload) VALUES ('shop.note', cast(:payload AS jsonb))",
            payload=payload,
        )
    put(engine, shop.note, 1)

    async with working(shop.jobs, database_url) as (_, heard):
        await heard.settled(6)

    # ready again, by the backoff: a newer worker may understand what this one does not
    states = rows(engine, "SELECT status, attempts, last_error IS NULL FROM background_jobs")
    assert shop.calls == [1]
    assert states == [("ready", 1, False)] * 5


async def test_a_job_of_an_unknown_kind_is_given_back_and_comes_later(
    engine: Engine, database_url: str
) -> None:
    execute(engine, "INSERT INTO background_jobs (kind) VALUES ('of.tomorrow')")

    async with working(shop.jobs, database_url) as (_, heard):
        event = await heard.event("job.unknown_kind")
        await heard.settled(1)

    assert event.fields["kind"] == "of.tomorrow"
    [(status, attempts, later)] = rows(
        engine, "SELECT status, attempts, run_at > clock_timestamp() + interval '20 s' FROM background_jobs"
    )
    assert (status, attempts, later) == ("ready", 0, True)


async def test_a_job_that_expired_before_its_first_claim_is_cancelled(
    engine: Engine, database_url: str
) -> None:
    put(engine, shop.note.using(expires=timedelta(0)), 1)

    async with working(shop.jobs, database_url) as (_, heard):
        await heard.event("job.expired")

    assert shop.calls == []
    archived = rows(engine, "SELECT status, last_error, attempts, fencing_token FROM background_jobs_archive")
    assert archived == [("cancelled", "expired", 0, 0)]


# -- slots, contexts


async def test_never_more_attempts_at_once_than_concurrency(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    lock = threading.Lock()
    running: list[int] = [0, 0]  # now, most

    def enter() -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)

    def leave() -> None:
        with lock:
            running[0] -= 1

    @jobs.task(name="in_thread")
    def in_thread() -> None:
        enter()
        threading.Event().wait(0.01)
        leave()

    @jobs.task(name="in_loop")
    async def in_loop() -> None:
        enter()
        await asyncio.sleep(0.01)
        leave()

    with Session(engine) as session, session.begin():
        for _ in range(40):
            enqueue(session, in_thread)
            enqueue(session, in_loop)

    async with working(jobs, database_url, concurrency=4) as (_, heard):
        await heard.settled(80)

    assert running == [0, 4]


async def test_a_handler_that_stays_keeps_nobody_of_either_kind_waiting(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """In the order of their claim: a thread's, the loop's, a thread's, the loop's; the first ends last."""
    go = threading.Event()

    @jobs.task(name="stays")
    def stays() -> None:
        go.wait(PATIENCE)

    @jobs.task(name="in_loop")
    async def in_loop() -> None:
        pass

    @jobs.task(name="in_thread")
    def in_thread() -> None:
        pass

    with Session(engine) as session, session.begin():
        for task in (stays, in_loop, in_thread, in_loop, in_thread, in_loop, in_loop, in_thread):
            enqueue(session, task)

    async with working(jobs, database_url, concurrency=4) as (_, heard):
        await heard.settled(7)
        go.set()
        assert await heard.settled(8) == [DONE] * 8


async def test_a_job_never_sees_the_context_variables_of_another(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    tenant: contextvars.ContextVar[int] = contextvars.ContextVar("tenant", default=0)
    seen: list[int] = []

    @jobs.task(name="in_loop")
    async def in_loop(number: int) -> None:
        seen.append(tenant.get())
        tenant.set(number)
        await asyncio.sleep(0)
        assert tenant.get() == number

    @jobs.task(name="in_thread")
    def in_thread(number: int) -> None:
        seen.append(tenant.get())
        tenant.set(number)

    with Session(engine) as session, session.begin():
        for number in range(1, 21):
            enqueue(session, in_loop, number)
            enqueue(session, in_thread, number)

    async with working(jobs, database_url, concurrency=2) as (_, heard):
        assert await heard.settled(40) == [DONE] * 40

    assert seen == [0] * 40


# -- leases


async def test_a_job_longer_than_its_lease_runs_once(engine: Engine, database_url: str, jobs: Jobs) -> None:
    @jobs.task(name="long")
    async def long() -> None:
        shop.calls.append("start")
        await asyncio.sleep(3)

    @jobs.task(name="long_in_thread")
    def long_in_thread(ctx: JobContext) -> None:
        shop.calls.append("start")
        threading.Event().wait(3)
        ctx.raise_if_lost()

    put(engine, long)
    put(engine, long_in_thread)

    async with (
        working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard),
        working(jobs, database_url, lease=timedelta(seconds=2)) as (_, others),
    ):
        await until(lambda: len(heard.statuses() + others.statuses()) == 2)

    assert heard.statuses() + others.statuses() == [DONE, DONE]
    assert shop.calls == ["start", "start"]


async def test_a_handler_that_blocks_the_loop_loses_no_lease(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="blocking")
    async def blocking() -> None:
        shop.calls.append("start")
        time.sleep(3)  # noqa: ASYNC251 - that is the point

    put(engine, blocking)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        assert await heard.settled(1) == [DONE]

    assert shop.calls == ["start"]
    assert heard.named("lease.lost") == []


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_lost_lease_cancels_the_handler_and_rolls_its_writes_back(
    engine: Engine, database_url: str, jobs: Jobs, kind: str
) -> None:
    ended: list[str] = []

    @jobs.task(name="sync")
    def stays(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="lost"))
        ctx.session.flush()
        shop.calls.append("started")
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        ended.append("told")

    @jobs.task(name="async")
    async def stays_async(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="lost"))
        await ctx.session.flush()
        shop.calls.append("started")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("told")
            raise

    job = put(engine, stays if kind == "sync" else stays_async)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
        # somebody else takes the job over, and holds it
        execute(
            engine,
            "UPDATE background_jobs SET fencing_token = fencing_token + 1, locked_by = 'other', "
            "locked_until = clock_timestamp() + interval '1 hour' WHERE id = :job",
            job=job,
        )
        event = await heard.event("lease.lost")
        await until(lambda: bool(ended))

    assert event.fields["job"] == job
    assert rows(engine, "SELECT count(*) FROM orders") == [(0,)]
    assert rows(engine, "SELECT status, locked_by FROM background_jobs") == [("running", "other")]


async def test_a_lost_lease_found_at_the_end_rolls_the_writes_back(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """Interleaving: A runs, its lease is taken over, A returns and its session meets the fence."""
    go = threading.Event()

    @jobs.task(name="late")
    def late(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="late"))
        shop.calls.append("started")
        go.wait(PATIENCE)

    put(engine, late)

    async with working(jobs, database_url, lease=timedelta(seconds=60)) as (_, heard):
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
        execute(
            engine,
            "UPDATE background_jobs SET fencing_token = fencing_token + 1, locked_by = 'other'",
        )
        go.set()
        await heard.event("lease.lost")

    assert rows(engine, "SELECT count(*) FROM orders") == [(0,)]
    assert rows(engine, "SELECT status, locked_by FROM background_jobs") == [("running", "other")]


async def test_a_job_whose_worker_vanished_is_rescued_and_finished_by_another(
    engine: Engine, database_url: str
) -> None:
    job = put(engine, shop.note.using(max_attempts=2), 1)
    execute(
        engine,
        "UPDATE background_jobs SET status = 'running', attempts = 1, fencing_token = 1, locked_by = 'gone', "
        "locked_until = clock_timestamp() - interval '1 s'",
    )

    async with working(shop.jobs, database_url) as (_, heard):
        await heard.event("job.rescued")
        await heard.settled(1)

    archived = rows(engine, "SELECT id, status, attempts, fencing_token FROM background_jobs_archive")
    assert archived == [(job, "done", 2, 2)]


async def test_a_job_that_kills_its_workers_fails_at_its_last_attempt(
    engine: Engine, database_url: str
) -> None:
    put(engine, shop.note.using(max_attempts=2), 1)
    execute(
        engine,
        "UPDATE background_jobs SET status = 'running', attempts = 2, fencing_token = 2, locked_by = 'gone', "
        "locked_until = clock_timestamp() - interval '1 s'",
    )

    async with working(shop.jobs, database_url) as (_, heard):
        await heard.event("job.rescued")

    assert shop.calls == []
    [(status, error)] = rows(engine, "SELECT status, last_error FROM background_jobs")
    assert (status, error) == ("failed", "lease lost by worker gone")


# -- stopping


async def test_stop_lets_running_jobs_finish_and_gives_the_rest_back_uncharged(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    @jobs.task(name="slow")
    async def slow() -> None:
        started.set()
        await go.wait()

    for _ in range(5):
        put(engine, slow)
    worker = Worker(jobs, url=database_url, concurrency=1)
    # more is claimed than there are slots, as after a burst of short jobs
    worker_run = asyncio.create_task(worker.run())
    with anyio.fail_after(PATIENCE):
        await started.wait()

    worker.stop()
    await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
    go.set()
    with anyio.fail_after(PATIENCE):
        code = await worker_run

    assert code == 0
    assert rows(engine, "SELECT count(*) FROM background_jobs_archive") == [(1,)]
    states = rows(engine, "SELECT DISTINCT status, attempts, locked_by FROM background_jobs")
    assert states == [("ready", 0, None)]


@pytest.mark.parametrize(("stops", "code"), [(1, 6), (2, 1)], ids=["drain timed out", "forced"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_what_does_not_end_in_time_is_given_back_at_once(
    engine: Engine, database_url: str, jobs: Jobs, kind: str, stops: int, code: int
) -> None:
    go = threading.Event()

    @jobs.task(name="sync")
    def stays() -> None:
        shop.calls.append("started")
        go.wait(PATIENCE)

    @jobs.task(name="async")
    async def stays_async() -> None:
        shop.calls.append("started")
        await asyncio.Event().wait()

    put(engine, stays if kind == "sync" else stays_async)
    worker = Worker(jobs, url=database_url, drain_timeout=timedelta(seconds=0.3 if stops == 1 else 60))
    run = asyncio.create_task(worker.run())
    await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
    await until(lambda: bool(shop.calls))

    for _ in range(stops):
        worker.stop()
    with anyio.fail_after(PATIENCE):
        assert await run == code
    go.set()

    assert rows(engine, "SELECT status, attempts, locked_by FROM background_jobs") == [("ready", 0, None)]


async def test_a_stop_before_the_start_is_not_lost(engine: Engine, database_url: str) -> None:
    put(engine, shop.note, 1)
    worker = Worker(shop.jobs, url=database_url)
    worker.stop()

    code = await finished(worker)

    assert code == 0
    assert rows(engine, "SELECT status, attempts FROM background_jobs") == [("ready", 0)]


async def test_drain_mode_ends_when_nothing_is_due(engine: Engine, database_url: str) -> None:
    with Session(engine) as session, session.begin():
        for value in range(50):
            enqueue(session, shop.note, value)
        enqueue(session, shop.note.using(delay=timedelta(hours=1)), -1)

    code = await finished(Worker(shop.jobs, url=database_url, mode="drain"))

    assert code == 0
    assert sorted(shop.calls) == list(range(50))  # type: ignore[type-var]
    assert rows(engine, "SELECT count(*) FROM background_jobs") == [(1,)]


# -- engines and start-up


async def test_a_sync_engine_alone_runs_everything_without_an_async_session(
    engine: Engine, database_url: str
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="in_loop")
    async def in_loop() -> None:
        shop.calls.append("loop")

    @jobs.task(name="in_thread")
    def in_thread(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="sync"))

    put(engine, in_loop)
    put(engine, in_thread)

    async with working(jobs, database_url, engine=engine) as (_, heard):
        await heard.event("listen.connected")
        assert await heard.settled(2) == [DONE, DONE]

    assert rows(engine, "SELECT customer FROM orders") == [("sync",)]


async def test_an_async_engine_alone_runs_everything_without_a_sync_session(
    engine: Engine, async_engine: AsyncEngine, database_url: str
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="in_loop")
    async def in_loop(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="async"))
        await asyncio.sleep(2.5)  # longer than the lease

    @jobs.task(name="in_thread")
    def in_thread() -> None:
        shop.calls.append("thread")

    put(engine, in_loop)
    put(engine, in_thread)

    async with working(jobs, database_url, async_engine=async_engine, lease=timedelta(seconds=2)) as (
        _,
        heard,
    ):
        await heard.event("listen.connected")
        assert await heard.settled(2) == [DONE, DONE]

    assert rows(engine, "SELECT customer FROM orders") == [("async",)]


def test_a_missing_kind_of_engine_is_an_error_that_names_the_tasks(engine: Engine) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no async_engine .* shop\.hold_async, shop\.send_receipt_async"
    ):
        Worker(shop.jobs, engine=engine)


def test_a_worker_without_tasks_is_refused(engine: Engine, jobs: Jobs) -> None:
    with pytest.raises(AppError, match="no task is registered"):
        Worker(jobs, engine=engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"lease": timedelta(seconds=1)}, "lease must be at least 2 s"),
        ({"poll_interval": timedelta(0)}, "poll_interval must be longer than 0"),
        ({"drain_timeout": timedelta(seconds=-1)}, "drain_timeout must not be negative"),
        ({"url": "mysql://localhost/x"}, "needs PostgreSQL"),
        ({"url": "nonsense"}, "cannot be parsed"),
    ],
)
def test_an_option_that_cannot_work_is_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Worker(shop.jobs, **{"url": "postgresql://localhost/x"} | options)


async def test_a_database_without_our_tables_is_a_clear_error(empty_database_url: str) -> None:
    worker = Worker(shop.jobs, url=empty_database_url)

    with pytest.raises(
        SchemaMismatch, match=r'no table "background_jobs" in database .*alembic upgrade head'
    ):
        await finished(worker)


async def test_an_unreachable_database_is_given_up_after_the_start_up_limit() -> None:
    worker = Worker(
        shop.jobs,
        url="postgresql://postgres@/nowhere?host=/nonexistent",
        startup_timeout=timedelta(seconds=0.5),
    )

    with pytest.raises(DatabaseUnreachable, match=r"no connection within 0\.5 s"):
        await finished(worker)


async def test_every_connection_is_closed_when_the_worker_has_stopped(
    engine: Engine, database_url: str, server: EmbeddedPostgres
) -> None:
    put(engine, shop.note, 1)
    async with working(shop.jobs, database_url) as (_, heard):
        await heard.settled(1)

    database = engine.url.database
    engine.dispose()
    other = create_engine(str(engine.url).replace(str(database), "postgres", 1))
    query = "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = :database)"
    await until_row(other, query, database=database)
    other.dispose()


async def test_a_row_that_cannot_leave_the_jobs_table_is_done_there_and_does_not_run_again(
    engine: Engine, database_url: str
) -> None:
    """A user's foreign key without ON DELETE points at it: the archive can never have it."""
    execute(
        engine,
        "CREATE TABLE mine (job_id bigint, job_queue text, "
        "FOREIGN KEY (job_id, job_queue) REFERENCES background_jobs (id, queue))",
    )
    held, free = put(engine, shop.note, 1), put(engine, shop.note, 2)
    execute(engine, "INSERT INTO mine VALUES (:job, 'default')", job=held)

    async with working(shop.jobs, database_url) as (_, heard):
        assert await heard.settled(2) == [DONE, DONE]

    assert shop.calls == [1, 2]
    live = rows(engine, "SELECT id, status, finished_at IS NOT NULL, locked_by FROM background_jobs")
    assert live == [(held, "done", True, None)]
    assert rows(engine, "SELECT id FROM background_jobs_archive") == [(free,)]
    [refused] = heard.named("archive.refused")
    assert refused.fields["job"] == held


async def test_a_row_with_the_largest_numbers_does_not_fail_the_claims_of_its_queue(
    engine: Engine, database_url: str
) -> None:
    numbers = ("attempts = 2147483647", "max_attempts = 2147483647", "fencing_token = 9223372036854775807")
    for extreme in numbers:
        job = put(engine, shop.note, 0)
        execute(engine, f"UPDATE background_jobs SET {extreme} WHERE id = :job", job=job)
    put(engine, shop.note, 1)

    async with working(shop.jobs, database_url) as (_, heard):
        await heard.settled(4)

    assert 1 in shop.calls
    assert heard.named("database.error") == []
