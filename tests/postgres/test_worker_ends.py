"""When and how a worker ends by itself, what it leaves out meanwhile, and cancels of running jobs."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from shop import Job, Order
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session
from workers import PATIENCE, Heard, execute, finished, rows, until, until_row, working

from sqla_jobs.context import AsyncJobContext, Cancel, JobContext, Snooze
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import Worker
from sqla_jobs.worker.recycling import memory_in_use

NEVER = timedelta(hours=1)
OFTEN = timedelta(seconds=0.2)


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


# -- enough


@pytest.mark.parametrize("most", [1, 7, 30])
async def test_max_jobs_runs_exactly_so_many_and_ends_with_7(
    engine: Engine, database_url: str, jobs: Jobs, most: int
) -> None:
    ran: list[int] = []

    @jobs.task(name="job")
    async def job(number: int) -> None:
        ran.append(number)

    for number in range(40):
        put(engine, job, number)

    code = await finished(Worker(jobs, url=database_url, concurrency=4, max_jobs=most))

    assert code == 7
    assert len(ran) == most
    assert rows(engine, "SELECT count(*), max(attempts) FROM background_jobs") == [(40 - most, 0)]


async def test_max_runtime_ends_with_7_after_what_runs(engine: Engine, database_url: str, jobs: Jobs) -> None:
    go_on = asyncio.Event()

    @jobs.task(name="job")
    async def job() -> None:
        await go_on.wait()

    put(engine, job)
    worker = Worker(jobs, url=database_url, max_runtime=timedelta(seconds=0.3))
    heard = Heard(worker)
    running = asyncio.create_task(finished(worker))

    reason = (await heard.event("worker.recycling")).fields["reason"]
    go_on.set()

    assert await running == 7
    assert reason == "it has run for 0:00:00.300000"
    assert rows(engine, "SELECT status FROM background_jobs_archive") == [("done",)]


async def test_the_first_stop_of_a_worker_that_ends_by_itself_forces_nothing(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """Its run time is over, and then the deploy comes: what runs has its drain time."""
    go_on = asyncio.Event()

    @jobs.task(name="job")
    async def job() -> None:
        await go_on.wait()

    put(engine, job)
    worker = Worker(jobs, url=database_url, max_runtime=timedelta(seconds=0.3))
    heard = Heard(worker)
    running = asyncio.create_task(finished(worker))
    await heard.event("worker.draining")

    worker.stop()
    assert not await worker_ends_within(running, 0.5)
    go_on.set()

    assert await running == 7
    assert rows(engine, "SELECT status, attempts FROM background_jobs_archive") == [("done", 1)]


async def worker_ends_within(running: "asyncio.Task[int]", seconds: float) -> bool:
    done, _ = await asyncio.wait({running}, timeout=seconds)
    return bool(done)


async def test_max_memory_ends_with_7(engine: Engine, database_url: str, jobs: Jobs) -> None:
    @jobs.task(name="job")
    def job() -> None: ...

    worker = Worker(jobs, url=database_url, max_memory=memory_in_use() // 2)
    heard = Heard(worker)

    assert await finished(worker) == 7
    assert "bytes of memory, the limit is" in str(heard.named("worker.recycling")[0].fields["reason"])


async def test_once_claims_every_queue_once_and_ends(engine: Engine, database_url: str, jobs: Jobs) -> None:
    ran: list[str] = []

    @jobs.task(name="a", queue="a")
    async def a(ctx: AsyncJobContext) -> None:
        ran.append("a")
        enqueue(ctx.session, a)  # due at once, and not for this worker

    @jobs.task(name="b", queue="b")
    def b() -> None:
        ran.append("b")

    for task in (a, b, b, b):
        put(engine, task)

    code = await finished(Worker(jobs, url=database_url, mode="once", concurrency=1))

    assert code == 0
    assert sorted(ran) == ["a", "b"]
    assert rows(engine, "SELECT queue, status FROM background_jobs ORDER BY 1") == [
        ("a", "ready"),
        ("b", "ready"),
        ("b", "ready"),
    ]


async def test_once_on_empty_queues_ends(engine: Engine, database_url: str, jobs: Jobs) -> None:
    @jobs.task(name="a", queue="a")
    def a() -> None: ...

    @jobs.task(name="b", queue="b")
    def b() -> None: ...

    assert await finished(Worker(jobs, url=database_url, mode="once")) == 0


async def test_a_quiet_worker_claims_nothing_finishes_what_runs_and_goes_on_when_told(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    go_on = asyncio.Event()
    ran: list[int] = []

    @jobs.task(name="job")
    async def job(number: int) -> None:
        await go_on.wait()
        ran.append(number)

    async with working(jobs, database_url, poll_interval=OFTEN) as (worker, heard):
        put(engine, job, 1)
        await heard.event("job.claimed")
        worker.quiet()
        await heard.event("worker.quiet")
        await until(lambda: not worker._claims._lock.locked())  # one under way still brings what it finds
        put(engine, job, 2)
        go_on.set()
        await heard.settled(1)
        claims = len(heard.named("job.claimed"))
        assert rows(engine, "SELECT status FROM background_jobs") == [("ready",)]

        worker.quiet(False)
        await heard.settled(2)

    assert (claims, ran) == (1, [1, 2])


async def test_check_tells_nothing_of_a_database_that_is_ready(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    def job() -> None: ...

    put(engine, job)

    await Worker(jobs, url=database_url).check()

    assert rows(engine, "SELECT status FROM background_jobs") == [("ready",)]


@pytest.mark.parametrize("how", ["asyncio", "anyio"])
async def test_a_cancelled_worker_drains_like_one_that_is_stopped(
    engine: Engine, database_url: str, jobs: Jobs, how: str
) -> None:
    go_on = asyncio.Event()

    @jobs.task(name="job")
    async def job() -> None:
        await go_on.wait()

    put(engine, job)
    worker = Worker(jobs, url=database_url, drain_timeout=timedelta(seconds=PATIENCE))
    heard = Heard(worker)

    if how == "asyncio":
        running = asyncio.create_task(worker.run())
        await heard.event("job.claimed")
        running.cancel()
        await heard.event("worker.draining")
        go_on.set()
        await asyncio.wait({running})
        assert running.cancelled()
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            await heard.event("job.claimed")
            group.cancel_scope.cancel()
            asyncio.get_running_loop().call_later(0.1, go_on.set)

    assert rows(engine, "SELECT status FROM background_jobs_archive") == [("done",)]
    assert heard.named("worker.stopped")[0].fields["exit_code"] == 0
    sessions = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() HAVING count(*) = 1"
    await until_row(engine, sessions)  # the server needs a moment to see that they are closed


async def test_a_worker_cancelled_twice_gives_back_what_runs(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    async def job() -> None:
        await asyncio.Event().wait()

    put(engine, job)
    worker = Worker(jobs, url=database_url, drain_timeout=timedelta(seconds=PATIENCE))
    heard = Heard(worker)
    running = asyncio.create_task(worker.run())
    await heard.event("job.claimed")

    running.cancel()
    await heard.event("worker.draining")
    running.cancel()
    await asyncio.wait({running})

    assert running.cancelled()
    assert rows(engine, "SELECT status, attempts FROM background_jobs") == [("ready", 0)]


async def test_a_queue_that_no_task_belongs_to_is_said_at_the_start(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job", queue="mail")
    def job() -> None: ...

    worker = Worker(jobs, url=database_url, queues=["mail", "mial"], mode="drain")
    heard = Heard(worker)

    await finished(worker)

    assert [event.fields["queue"] for event in heard.named("queue.without_task")] == ["mial"]


async def test_b56_a_pool_with_less_room_than_sessions_is_said_at_the_start(
    database_url: str, engine: Engine, async_engine: AsyncEngine, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    def job(ctx: JobContext) -> None: ...

    @jobs.task(name="loop")
    async def loop() -> None: ...  # has no session

    small = create_engine(engine.url, pool_size=2, max_overflow=1)
    none = create_engine(engine.url, poolclass=NullPool)
    cases = {
        "small": Worker(jobs, engine=small, async_engine=async_engine, mode="drain", concurrency=4),
        "threads": Worker(
            jobs, engine=small, async_engine=async_engine, mode="drain", concurrency=4, threads=3
        ),
        "none": Worker(jobs, engine=none, async_engine=async_engine, mode="drain", concurrency=40),
        "url": Worker(jobs, url=database_url, mode="drain", concurrency=40),
    }
    told = {}
    for name, worker in cases.items():
        heard = Heard(worker)
        await finished(worker)
        told[name] = [event.fields for event in heard.named("pool.small")]
    small.dispose()

    assert told == {
        "small": [{"engine": "engine", "connections": 3, "wanted": 4}],
        "threads": [],
        "none": [],
        "url": [],
    }


# -- fewer threads than slots


async def test_no_more_attempts_in_threads_than_threads_while_coroutines_use_the_other_slots(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    go_on = threading.Event()
    most, here, lock = [0], [0], threading.Lock()

    @jobs.task(name="sync")
    def sync() -> None:
        with lock:
            here[0] += 1
            most[0] = max(most[0], here[0])
        go_on.wait(PATIENCE)
        with lock:
            here[0] -= 1

    @jobs.task(name="loop")
    async def loop() -> None: ...

    for task in (sync, sync, sync, sync, loop, loop):
        put(engine, task)

    async with working(jobs, database_url, concurrency=6, threads=2) as (_, heard):
        await heard.settled(2)  # the coroutines, although they are younger
        await until(lambda: here[0] == 2)
        go_on.set()
        assert await heard.settled(6) == [JobStatus.DONE] * 6

    assert most == [2]


async def test_a_last_attempt_that_no_thread_is_free_for_goes_back_uncharged(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    go_on = threading.Event()

    @jobs.task(name="first")
    def first() -> None:
        go_on.wait(PATIENCE)

    @jobs.task(name="last", retry=Retry(max_attempts=1))
    def last() -> None: ...

    put(engine, first)
    put(engine, last)

    async with working(jobs, database_url, concurrency=4, threads=1) as (_, heard):
        await heard.until(
            lambda heard: any(e.fields["reason"] == "no free thread" for e in heard.named("job.released"))
        )
        row = await until_row(
            engine,
            "SELECT attempts, run_at > now() FROM background_jobs WHERE kind = 'last' AND status = 'ready'",
        )
        go_on.set()
        await until_row(engine, "SELECT 1 FROM background_jobs_archive WHERE kind = 'last'")

    assert row == (0, True)


# -- a running job is cancelled by its row

REQUEST = "UPDATE background_jobs SET cancel_requested_at = now() WHERE id = :id AND status = 'running'"


def end_by_return(ctx: JobContext) -> None: ...


def end_by_error(ctx: JobContext) -> None:
    raise ValueError("any other end")


def end_by_snooze(ctx: JobContext) -> None:
    raise Snooze(timedelta(seconds=5))


def end_by_cancel(ctx: JobContext) -> None:
    raise Cancel("its own reason")


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        (end_by_return, "done", None),
        (end_by_error, "cancelled", "ValueError: any other end"),
        (end_by_snooze, "cancelled", None),
        (end_by_cancel, "cancelled", "its own reason"),
    ],
)
async def test_a_thread_sees_the_cancel_within_a_poll_and_a_normal_return_still_counts(
    engine: Engine,
    database_url: str,
    jobs: Jobs,
    end: Callable[[JobContext], None],
    status: str,
    reason: str | None,
) -> None:
    started = threading.Event()

    @jobs.task(name="job")
    def job(ctx: JobContext) -> None:
        started.set()
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        end(ctx)

    id_ = put(engine, job)

    async with working(jobs, database_url, lease=timedelta(seconds=600), poll_interval=OFTEN) as (_, heard):
        await until(started.is_set)
        execute(engine, REQUEST, id=id_)
        await heard.event("job.cancel_requested")
        [(found, error)] = [await until_row(engine, "SELECT status, last_error FROM background_jobs_archive")]

    assert found == status
    assert (error or "").partition("\n")[0] == (reason or "")


async def test_a_coroutine_is_cancelled_within_a_poll_and_its_writes_are_rolled_back(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    async def job(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="never"))
        await ctx.session.flush()
        await asyncio.Event().wait()

    id_ = put(engine, job)

    async with working(jobs, database_url, lease=timedelta(seconds=600), poll_interval=OFTEN) as (_, heard):
        await heard.event("job.claimed")
        execute(engine, REQUEST, id=id_)
        row = await until_row(engine, "SELECT status, last_error FROM background_jobs_archive")

    assert row == ("cancelled", "cancelled while it ran")
    assert rows(engine, "SELECT count(*) FROM orders") == [(0,)]


async def test_a_prolongation_brings_the_cancel_where_the_poll_is_long(
    engine: Engine, async_engine: Any, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    async def job() -> None:
        await asyncio.Event().wait()

    id_ = put(engine, job)

    for engines in ({}, {"async_engine": async_engine}):
        async with working(
            jobs, database_url, lease=timedelta(seconds=2), poll_interval=NEVER, **engines
        ) as (_, heard):
            await heard.event("job.claimed")
            execute(engine, REQUEST, id=id_)
            await until_row(engine, "SELECT 1 FROM background_jobs_archive WHERE id = :id", id=id_)
        id_ = put(engine, job)


# -- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"max_jobs": 0}, "max_jobs must be at least 1, got 0"),
        ({"max_jobs": True}, "max_jobs must be at least 1, got True"),
        ({"max_memory": -5}, "max_memory must be at least 1, got -5"),
        ({"max_runtime": timedelta(0)}, "max_runtime takes a timedelta above 0"),
        ({"max_runtime": 5}, "max_runtime takes a timedelta above 0"),
        ({"mode": "forever"}, "mode must be one of continuous, drain, once, got 'forever'"),
        ({"queues": ["ok", ""]}, "queue must have 1 to 200 bytes"),
        ({"startup_timeout": 5}, "startup_timeout must be a timedelta, got 5"),
    ],
)
def test_an_option_that_cannot_work_is_refused(jobs: Jobs, options: dict[str, Any], message: str) -> None:
    @jobs.task(name="job")
    def job() -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        Worker(jobs, url="postgresql://nowhere/db", **options)
