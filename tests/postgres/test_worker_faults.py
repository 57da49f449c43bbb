"""What users' code, users' tables and a bad network do to a worker: one job's outcome, never the worker's."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from shop import Job, Order
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from workers import PATIENCE, Heard, execute, finished, rows, until, until_row, working

from sqla_jobs.context import AsyncJobContext, JobContext, RetryAfter, Snooze
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.core.retry import Retry
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import Worker, maintenance

DONE, FAILED, READY = JobStatus.DONE, JobStatus.FAILED, JobStatus.READY
LATER = Retry(delay=timedelta(hours=1))
ONCE = Retry(max_attempts=1)


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


@pytest.fixture
async def go() -> AsyncIterator[threading.Event]:
    """What handlers in threads wait for; set at the end in any case."""
    event = threading.Event()
    yield event
    event.set()


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


# -- slots


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_jobs_that_arrive_one_by_one_still_fill_every_slot(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event, kind: str
) -> None:
    started: list[int] = []

    @jobs.task(name="sync")
    def stays(number: int) -> None:
        started.append(number)
        go.wait(PATIENCE)

    @jobs.task(name="async")
    async def stays_async(number: int) -> None:
        started.append(number)
        await until(go.is_set)

    async with working(jobs, database_url, concurrency=5) as (_, heard):
        for number in range(5):
            put(engine, stays if kind == "sync" else stays_async, number)
            await until(lambda number=number: number in started)  # type: ignore[misc]
        go.set()
        assert await heard.settled(5) == [DONE] * 5


async def test_a_handler_that_outlives_its_lease_keeps_its_slot_until_it_ends(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event
) -> None:
    """Or the worker would hold a job that it cannot start, perhaps at its last attempt."""

    @jobs.task(name="stays", retry=LATER)
    def stays() -> None:
        go.wait(PATIENCE)

    @jobs.task(name="next", retry=ONCE)
    def next_one() -> None:
        pass

    put(engine, stays)
    async with working(jobs, database_url, concurrency=1, lease=timedelta(seconds=2)) as (worker, heard):
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
        execute(engine, "UPDATE background_jobs SET locked_by = 'other', fencing_token = 9")
        await heard.event("lease.lost")
        waiting = put(engine, next_one)
        await until(lambda: worker._dispatch.open == 1)
        assert rows(engine, "SELECT status, attempts FROM background_jobs WHERE id = :i", i=waiting) == [
            ("ready", 0)
        ]

        go.set()
        assert await heard.settled(1) == [DONE]


async def test_a_lease_lost_in_an_outage_is_rescued_with_its_attempt_and_never_given_back(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event
) -> None:
    """Nobody answers for longer than the lease: claims lose their answers, the handler runs on."""
    starts: list[int] = []

    @jobs.task(name="stays", retry=LATER)
    def stays(ctx: JobContext) -> None:
        starts.append(ctx.attempt)
        go.wait(PATIENCE)

    put(engine, stays)
    often: dict[str, Any] = {"listen": False, "poll_interval": timedelta(seconds=0.2)}
    async with working(jobs, database_url, lease=timedelta(seconds=2), **often) as (_, heard):
        await until(lambda: starts == [1])
        with engine.begin() as outage:
            outage.execute(text("LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE"))
            await heard.event("lease.lost")
            await heard.until(
                lambda heard: any(e.fields["operation"] == "claim" for e in heard.named("database.error"))
            )
        await heard.event("job.rescued")

        [(status, attempts, log)] = rows(
            engine, "SELECT status, attempts, attempt_log -> -1 ->> 'lost' FROM background_jobs"
        )
    assert (status, attempts, log) == ("ready", 1, "true")
    assert starts == [1]
    assert heard.named("job.released") == []


async def test_a_return_after_the_leases_end_still_counts_while_nobody_has_taken_the_job(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event
) -> None:
    """An outage longer than the lease; the handler returns in it, and a settle comes before a rescue."""

    @jobs.task(name="stays", retry=LATER)
    def stays() -> None:
        go.wait(PATIENCE)

    job = put(engine, stays)
    async with working(jobs, database_url, lease=timedelta(seconds=2), listen=False) as (worker, heard):
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
        with engine.begin() as outage:
            outage.execute(text("LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE"))
            await heard.event("lease.lost")
            # nobody finds it expired when the lock is gone
            outage.execute(
                text("UPDATE background_jobs SET locked_until = clock_timestamp() + interval '1 hour'")
            )
            go.set()
            await until(lambda: not worker._held)
        assert await heard.settled(1) == [DONE]

    archived = rows(engine, "SELECT id, status, attempts, fencing_token FROM background_jobs_archive")
    assert archived == [(job, "done", 1, 1)]  # the token says that nobody ran it again


async def test_a_pool_without_room_loses_no_lease(engine: Engine, database_url: str, jobs: Jobs) -> None:
    tiny = create_engine(engine.url, pool_size=1, max_overflow=0)

    @jobs.task(name="long")
    def long(ctx: JobContext) -> None:
        ctx.session.execute(text("SELECT pg_sleep(3)"))

    put(engine, long)

    async with working(jobs, database_url, engine=tiny, concurrency=1, lease=timedelta(seconds=2)) as (
        _,
        heard,
    ):
        assert await heard.settled(1) == [DONE]
    tiny.dispose()

    assert rows(engine, "SELECT attempts FROM background_jobs_archive") == [(1,)]


# -- handlers


class OddSnooze(Snooze):
    def __init__(self) -> None:
        Exception.__init__(self)
        self.delay = 60  # type: ignore[assignment]


class OddRetryAfter(RetryAfter):
    def __init__(self) -> None:
        Exception.__init__(self)
        self.delay = 60  # type: ignore[assignment]


async def test_no_exception_of_a_user_ends_a_consumer(engine: Engine, database_url: str, jobs: Jobs) -> None:
    @jobs.task(name="exit", retry=ONCE)
    async def generator_exit() -> None:
        raise GeneratorExit

    @jobs.task(name="snooze", retry=ONCE)
    async def odd_snooze() -> None:
        raise OddSnooze

    @jobs.task(name="retry", retry=ONCE)
    def odd_retry() -> None:
        raise OddRetryAfter

    @jobs.task(name="cancel")
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @jobs.task(name="fine")
    async def fine() -> None:
        await asyncio.sleep(0)

    for task in (generator_exit, odd_snooze, odd_retry, cancels_itself, fine):
        put(engine, task)

    async with working(jobs, database_url, concurrency=1) as (_, heard):
        await heard.settled(5)

    ends = dict(rows(engine, "SELECT kind, status FROM background_jobs UNION ALL "
                             "SELECT kind, status FROM background_jobs_archive"))  # fmt: skip
    assert ends == {"exit": "failed", "snooze": "failed", "retry": "failed", "cancel": "done", "fine": "done"}


async def test_a_plain_function_that_returns_a_coroutine_has_failed(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    async def really() -> None:
        raise AssertionError

    @jobs.task(name="plain", retry=ONCE)
    def plain() -> object:
        return really()

    put(engine, plain)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert error.startswith("TypeError: the handler returned a coroutine, which nobody runs")


async def test_a_handler_that_ends_the_workers_transaction_fails_loudly(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="escapes", retry=ONCE)
    def escapes(ctx: JobContext) -> None:
        ctx.session.connection().commit()

    put(engine, escapes)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert "use ctx.session.commit()" in error


async def test_a_session_used_after_its_handler_ended_opens_nothing(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    left: list[Any] = []

    @jobs.task(name="leaves")
    def leaves(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="Ada"))
        left.append(ctx.session)

    put(engine, leaves)

    async with working(jobs, database_url) as (_, heard):
        await heard.settled(1)
        with pytest.raises(Exception, match="used after its handler had ended"):
            left[0].execute(text("SELECT 1"))


# -- outcomes


async def test_one_outcome_that_a_users_trigger_refuses_does_not_keep_the_others(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="refused")
    async def refused(secret: str) -> None:
        pass

    @jobs.task(name="fine")
    async def fine() -> None:
        pass

    execute(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.kind = 'refused' THEN RAISE EXCEPTION 'not %', NEW.kind USING DETAIL = NEW.payload; END IF; "
        "RETURN NEW; END $$",
    )
    execute(
        engine,
        "CREATE TRIGGER refuse BEFORE INSERT ON background_jobs_archive "
        "FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    with Session(engine) as session, session.begin():
        enqueue(session, refused, "hush")
        for _ in range(5):
            enqueue(session, fine)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(6) == [DONE] * 6

    assert rows(engine, "SELECT kind, status FROM background_jobs") == [("refused", "done")]
    assert "hush" not in str(heard.named("archive.refused"))


async def test_outcomes_that_cannot_be_written_are_not_a_clean_end(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event
) -> None:
    @jobs.task(name="waits")
    def waits() -> None:
        go.wait(PATIENCE)

    put(engine, waits)
    worker = Worker(jobs, url=database_url, drain_timeout=timedelta(seconds=0.5), lease=timedelta(seconds=2))
    run = asyncio.create_task(worker.run())
    await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
    execute(engine, "ALTER TABLE background_jobs_archive RENAME TO elsewhere")
    go.set()
    await until(lambda: not worker._held)

    worker.stop()
    with anyio.fail_after(PATIENCE):
        code = await run

    assert code == 6


async def test_a_handler_that_swallows_its_end_does_not_end_the_worker_cleanly(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event
) -> None:
    @jobs.task(name="swallows")
    async def swallows(ctx: AsyncJobContext) -> None:
        while not go.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    put(engine, swallows)
    worker = Worker(jobs, url=database_url, drain_timeout=timedelta(seconds=0.3), lease=timedelta(seconds=2))
    run = asyncio.create_task(worker.run())
    await until_row(engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
    execute(engine, "UPDATE background_jobs SET locked_by = 'other', fencing_token = 9")
    await until(lambda: any(each.lost for each in worker._held.values()))

    worker.stop()
    with anyio.fail_after(PATIENCE):
        code = await run

    assert code == 6


async def test_a_stop_gives_back_what_was_prefetched_uncharged(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event
) -> None:
    """A burst of short jobs makes the worker hold more than it has slots for; then long ones come."""

    @jobs.task(name="short", priority=9)
    async def short() -> None:
        pass

    @jobs.task(name="long")
    async def long() -> None:
        await until(go.is_set)

    with Session(engine) as session, session.begin():
        for _ in range(1500):
            enqueue(session, short)
        for _ in range(200):
            enqueue(session, long)
    worker = Worker(jobs, url=database_url, concurrency=2)
    heard = Heard(worker)
    run = asyncio.create_task(worker.run())
    await until_row(
        engine, "SELECT 1 FROM background_jobs WHERE kind = 'long' AND status = 'running' HAVING count(*) > 2"
    )

    worker.stop()
    await heard.event("worker.draining")  # before, a consumer would run on: what never waits ends at once
    go.set()
    with anyio.fail_after(PATIENCE):
        code = await run

    assert code == 0
    left = rows(
        engine,
        "SELECT count(*) FILTER (WHERE fencing_token > 0) > 0, max(attempts), count(locked_by), "
        "bool_and(status = 'ready') FROM background_jobs WHERE kind = 'long'",
    )
    assert left == [(True, 0, 0, True)]


# -- maintenance


async def test_a_worker_forgets_what_is_older_than_its_retention(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(Job, retention=Retention(done=timedelta(days=1), failed=timedelta(days=2)))

    @jobs.task(name="noop")
    async def noop() -> None:
        pass

    old, new = put(engine, noop), put(engine, noop)
    assert await finished(Worker(jobs, url=database_url, mode="drain")) == 0
    execute(
        engine, "UPDATE background_jobs_archive SET finished_at = now() - interval '2 d' WHERE id = :i", i=old
    )
    monkeypatch.setattr(maintenance, "_PURGE_EVERY", 0.0)

    async with working(jobs, database_url):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 1")

    assert rows(engine, "SELECT id FROM background_jobs_archive") == [(new,)]


def _close_pending(session: Session) -> None:
    session.add(Order(customer="pending"))
    session.close()


def _close_flushed(session: Session) -> None:
    session.add(Order(customer="flushed"))
    session.flush()
    session.close()


def _close_after_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Order(customer="in a savepoint"))
    session.close()


def _close_in_a_block(session: Session) -> None:
    with session:
        session.add(Order(customer="in a block"))


def _close_modified(session: Session) -> None:
    session.get_one(Order, 1).customer = "modified"
    session.close()


@pytest.mark.parametrize(
    "close",
    [_close_pending, _close_flushed, _close_after_savepoint, _close_in_a_block, _close_modified],
)
@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_a_session_closed_on_work_that_is_not_committed_is_not_a_silent_success(
    engine: Engine, database_url: str, jobs: Jobs, close: Callable[[Session], None], form: str
) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(customer="Ada"))

    @jobs.task(name="thread", retry=Retry(max_attempts=1))
    def in_thread(ctx: JobContext) -> None:
        close(ctx.session)

    @jobs.task(name="loop", retry=Retry(max_attempts=1))
    async def in_loop(ctx: AsyncJobContext) -> None:
        await ctx.session.run_sync(close)

    put(engine, in_thread if form == "thread" else in_loop)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert error.startswith("SqlaJobsError: ctx.session was closed before its handler ended")
    assert rows(engine, "SELECT customer FROM orders") == [("Ada",)]


@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_a_session_closed_after_a_commit_or_a_read_is_fine(
    engine: Engine, database_url: str, jobs: Jobs, form: str
) -> None:
    def work(session: Session) -> None:
        session.add(Order(customer="Ada"))
        session.commit()
        session.close()
        session.get_one(Order, 1)
        session.close()

    @jobs.task(name="thread")
    def in_thread(ctx: JobContext) -> None:
        work(ctx.session)

    @jobs.task(name="loop")
    async def in_loop(ctx: AsyncJobContext) -> None:
        await ctx.session.run_sync(work)

    put(engine, in_thread if form == "thread" else in_loop)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]

    assert rows(engine, "SELECT customer FROM orders") == [("Ada",)]


async def test_threads_that_the_system_does_not_give_are_asked_for_again(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    @jobs.task(name="job")
    def job() -> None: ...

    start = threading.Thread.start
    refused: list[str] = []

    def sometimes(self: threading.Thread) -> None:
        if self.name.startswith("sqla_jobs handler") and len(refused) < 2:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    for _ in range(3):
        put(engine, job)

    async with working(jobs, database_url, concurrency=2) as (_, heard):
        assert await heard.settled(3) == [JobStatus.DONE] * 3

    assert len(refused) == 2


@pytest.mark.parametrize("form", ["sync", "async"])
async def test_a_stop_while_a_silent_host_is_asked_for_a_connection_is_over_soon(
    jobs: Jobs, form: str
) -> None:
    @jobs.task(name="job")
    async def job() -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        url = f"postgresql+psycopg://nobody@127.0.0.1:{silent.getsockname()[1]}/none"
        sync, asynchronous = create_engine(url), create_async_engine(url)
        options: dict[str, Any] = {"engine": sync} if form == "sync" else {"async_engine": asynchronous}
        worker = Worker(jobs, drain_timeout=timedelta(seconds=1), **options)
        running = asyncio.create_task(worker.run())
        connection, _ = await asyncio.get_running_loop().sock_accept(silent)
        began = asyncio.get_running_loop().time()
        worker.stop()
        code = await running
        took = asyncio.get_running_loop().time() - began
        connection.close()

    assert code == 0
    assert took < 3
    assert worker.left_behind
    sync.dispose()
    await asynchronous.dispose()
