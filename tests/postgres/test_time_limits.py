"""Time limits: a coroutine is cancelled, a thread is waited for, a stuck one ends the worker."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from shop import Job, Order
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from workers import (
    PATIENCE,
    Heard,
    finished,
    rows,
    until_row,
    working,
)

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError, TimeLimitExceeded
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import Worker

SHORT = timedelta(seconds=0.2)
ONCE = Retry(max_attempts=1)
SOON = Retry(max_attempts=2, delay=timedelta(0))


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end, so that no handler's thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def put(engine: Engine, task: Task[Any], *args: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args)
    return handle.id


async def test_a_coroutine_is_cancelled_at_its_limit_and_the_attempt_has_failed(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="slow", timeout=SHORT, retry=ONCE)
    async def slow(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="too late"))
        await ctx.session.flush()
        await asyncio.Event().wait()

    put(engine, slow)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert error.startswith("TimeLimitExceeded: the attempt passed its time limit of 0.2 s\n")
    assert "await asyncio.Event().wait()" in error  # where it was at that moment
    assert rows(engine, "SELECT count(*) FROM orders") == [(0,)]
    assert [event.fields["seconds"] for event in heard.named("job.time_limit")] == [0.2]


async def test_the_policy_may_name_the_time_limit(engine: Engine, database_url: str, jobs: Jobs) -> None:
    @jobs.task(name="slow", timeout=SHORT, retry=Retry(give_up=(TimeLimitExceeded,)))
    async def slow() -> None:
        await asyncio.Event().wait()

    put(engine, slow)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]


async def test_an_attempt_that_ends_in_time_is_not_watched_any_more(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="quick", timeout=SHORT)
    async def quick() -> None: ...

    @jobs.task(name="quick_thread", timeout=SHORT)
    def quick_thread() -> None: ...

    @jobs.task(name="longer", timeout=timedelta(seconds=60))
    async def longer() -> None:
        await asyncio.wait_for(never.wait(), 1.0)  # outlives the others' limits

    never = asyncio.Event()
    for task in (quick, quick_thread, longer):
        put(engine, task)

    async with working(jobs, database_url) as (worker, heard):
        await heard.settled(3)
        watched = worker._custody._runner._limits._buckets  # type: ignore[union-attr]

    assert heard.named("job.time_limit") == []
    assert watched == {}


async def test_a_thread_past_its_limit_keeps_slot_and_lease_and_its_return_still_counts(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    seen: list[bool] = []

    @jobs.task(name="slow", timeout=timedelta(seconds=1), retry=SOON)
    def slow(ctx: JobContext) -> None:
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        seen.append(ctx.cancelled)

    put(engine, slow)

    async with working(jobs, database_url, concurrency=1) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]

    assert seen == [True]
    assert len(heard.named("job.time_limit")) == 1
    assert heard.named("job.stuck") == []


async def test_a_thread_that_raises_after_its_limit_has_failed(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="slow", timeout=SHORT, retry=ONCE)
    def slow(ctx: JobContext) -> None:
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        raise RuntimeError("stopped half-way")

    put(engine, slow)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]

    [(error,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert error.startswith("RuntimeError: stopped half-way")


@pytest.mark.parametrize("form", ["thread", "coroutine"])
async def test_a_stuck_attempt_ends_the_worker_after_the_others_and_counts_as_failed(
    engine: Engine, database_url: str, jobs: Jobs, released: threading.Event, form: str
) -> None:
    others = asyncio.Event()

    if form == "thread":

        @jobs.task(name="stuck", timeout=SHORT, retry=SOON)
        def stuck() -> None:
            released.wait(PATIENCE)
    else:

        @jobs.task(name="stuck", timeout=SHORT, retry=SOON)
        async def stuck() -> None:
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)  # the work of a handler that swallows its end

    @jobs.task(name="neighbour")
    async def neighbour() -> None:
        await others.wait()

    put(engine, stuck)
    put(engine, neighbour)
    worker = Worker(jobs, url=database_url, drain_timeout=timedelta(seconds=PATIENCE))
    heard = Heard(worker)
    running = asyncio.create_task(finished(worker))

    await heard.event("worker.draining")
    others.set()
    code = await running
    released.set()  # the worker is gone, its handler is not

    assert code == 7
    assert rows(engine, "SELECT kind, status FROM background_jobs_archive") == [("neighbour", "done")]
    [(status, attempts, error)] = rows(engine, "SELECT status, attempts, last_error FROM background_jobs")
    assert (status, attempts) == ("ready", 1)
    assert error == (
        "TimeLimitExceeded: the attempt passed its time limit of 0.2 s, and its handler does not end"
    )
    [event] = heard.named("worker.recycling")
    assert "(stuck) does not end after its time limit" in str(event.fields["reason"])


async def test_a_job_that_is_stuck_every_time_fails_at_its_last_attempt(
    engine: Engine, database_url: str, jobs: Jobs, released: threading.Event
) -> None:
    @jobs.task(name="stuck", timeout=SHORT, retry=Retry(max_attempts=2, delay=timedelta(0)))
    def stuck() -> None:
        released.wait(PATIENCE)

    put(engine, stuck)

    codes = [await finished(Worker(jobs, url=database_url)) for _ in range(2)]

    assert codes == [7, 7]
    assert rows(engine, "SELECT status, attempts FROM background_jobs") == [("failed", 2)]


async def test_no_second_run_starts_while_a_thread_past_its_limit_lives(
    engine: Engine, database_url: str, jobs: Jobs, released: threading.Event
) -> None:
    starts: list[int] = []

    @jobs.task(name="slow", timeout=timedelta(seconds=3), retry=Retry(delay=timedelta(0)))
    def slow(ctx: JobContext) -> None:
        starts.append(ctx.attempt)
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        released.wait(2.5)  # longer than the lease

    put(engine, slow)

    async with (
        working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard),
        working(jobs, database_url, lease=timedelta(seconds=2)) as (_, other),
    ):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive")

    assert starts == [1]
    assert heard.named("lease.lost") + other.named("lease.lost") == []


async def test_an_attempt_longer_than_ten_leases_is_remarked_upon_once(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqla_jobs.worker.custody._LONG", 0.1)  # of a lease, so that nobody waits for ten
    monkeypatch.setattr("sqla_jobs.worker.custody._SESSION_LONG", 0.1)
    go_on = asyncio.Event()

    @jobs.task(name="long")
    async def long(ctx: AsyncJobContext) -> None:
        await ctx.session.connection()
        await go_on.wait()

    put(engine, long)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        await heard.event("job.running_long")
        await heard.event("session.open_long")
        go_on.set()
        await heard.settled(1)

    assert len(heard.named("job.running_long")) == 1


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), 5, "5s"])
def test_a_time_limit_that_is_none_is_refused(jobs: Jobs, timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout takes a timedelta above 0, or None"):
        jobs.task(timeout=timeout)
