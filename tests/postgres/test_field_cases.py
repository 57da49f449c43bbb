"""Cases from reports of people who run job queues on PostgreSQL, named by their number (tests/README.md)."""

import asyncio
import functools
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from shop import Job
from sqlalchemy import Engine, MetaData, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session
from workers import PATIENCE, execute, finished, rows, until_row, working

from sqla_jobs.context import JobContext
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import TaskDefinitionError
from sqla_jobs.models import JobMixin
from sqla_jobs.tasks import Jobs, Task, enqueue, enqueue_many
from sqla_jobs.worker import Worker

DONE, FAILED = JobStatus.DONE, JobStatus.FAILED


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


def put(engine: Engine, task: Task[Any], *args: Any) -> int:
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args)
    return handle.id


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


@pytest.mark.parametrize("raised", [SystemExit(0), SystemExit(1), KeyboardInterrupt(), Odd("odd")])
@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_b13_one_that_leaves_by_the_back_door_is_a_failed_attempt_and_seven_go_on(
    engine: Engine, database_url: str, jobs: Jobs, raised: BaseException, form: str
) -> None:
    together, here = threading.Barrier(8), asyncio.Barrier(8)
    runs: list[int] = []

    def work(number: int) -> None:
        runs.append(number)
        together.wait(PATIENCE)
        if number == 3:
            raise raised

    if form == "thread":

        @jobs.task(name="job", retry=Retry(max_attempts=1))
        def in_thread(number: int) -> None:
            work(number)
    else:

        @jobs.task(name="job", retry=Retry(max_attempts=1))
        async def in_loop(number: int) -> None:
            await here.wait()
            runs.append(number)
            if number == 3:
                raise raised

    for number in range(8):
        put(engine, jobs.tasks["job"], number)

    async with working(jobs, database_url, concurrency=8) as (_, heard):
        statuses = await heard.settled(8)

    assert sorted(statuses) == [DONE] * 7 + [FAILED]
    assert sorted(runs) == list(range(8))


def test_b17_what_looks_like_a_plain_function_and_is_a_coroutine_is_refused(jobs: Jobs) -> None:
    async def real(number: int) -> None: ...

    class Callable_:
        async def __call__(self) -> None: ...

    @functools.wraps(real)
    def wrapped(number: int) -> Any:
        return real(number)

    shapes: list[Any] = [functools.partial(real, 1), Callable_(), wrapped, lambda: real(1)]

    for number, shape in enumerate(shapes):
        with pytest.raises(TaskDefinitionError):
            jobs.task(name=f"shape {number}")(shape)


async def test_b17_a_plain_handler_may_start_a_loop_of_its_own(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    ran: list[int] = []

    @jobs.task(name="job")
    def job() -> None:
        async def inner() -> None:
            await asyncio.sleep(0)
            ran.append(1)

        asyncio.run(inner())

    put(engine, job)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [DONE]

    assert ran == [1]


async def test_b21_sixty_handlers_in_threads_at_once_lose_no_lease(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    together = threading.Barrier(60)
    starts: list[int] = []

    @jobs.task(name="job")
    def job(number: int) -> None:
        starts.append(number)
        together.wait(PATIENCE)  # all sixty run, or none ever ends
        threading.Event().wait(3)  # longer than the lease

    with Session(engine) as session, session.begin():
        enqueue_many(session, [job.call(number) for number in range(60)])

    options: dict[str, Any] = {"concurrency": 60, "lease": timedelta(seconds=2)}
    async with working(jobs, database_url, **options) as (_, heard), working(jobs, database_url, **options):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 60")

    assert sorted(starts) == list(range(60))
    assert heard.named("lease.lost") == []


async def test_b34_a_cancel_at_any_moment_ends_in_a_cancel_or_in_an_end_that_won(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """A hundred requests at random moments around claim, failure, retry and return: nothing comes back."""
    chance = random.Random(34)

    @jobs.task(name="job", retry=Retry(max_attempts=30, delay=timedelta(0)))
    async def job(number: int) -> None:
        if random.random() < 0.5:
            raise ValueError(number)

    async with working(jobs, database_url, poll_interval=timedelta(seconds=0.5)) as (_, heard):
        del heard
        for number in range(100):
            id_ = put(engine, job, number)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            execute(
                engine,
                "UPDATE background_jobs SET cancel_requested_at = now() "
                "WHERE id = :id AND status = 'running'",
                id=id_,
            )
        await until_row(engine, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 100")

    ends = rows(engine, "SELECT DISTINCT status FROM background_jobs_archive")
    assert {status for (status,) in ends} <= {"done", "cancelled"}
    assert rows(engine, "SELECT count(*) FROM background_jobs") == [(0,)]


async def test_b38_jobs_put_in_bulk_use_every_slot_and_a_delay_is_kept(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    together = threading.Barrier(20)

    @jobs.task(name="job")
    def job() -> None:
        together.wait(PATIENCE)

    @jobs.task(name="later")
    async def later() -> None: ...

    async with working(jobs, database_url, concurrency=21, poll_interval=timedelta(seconds=30)) as (_, heard):
        await heard.event("listen.connected")
        with Session(engine) as session, session.begin():
            enqueue_many(session, [job.call() for _ in range(20)])
            enqueue(session, later.using(delay=timedelta(seconds=1.5)))
        await heard.settled(21)

    [(late,)] = rows(engine, "SELECT started_at - run_at FROM background_jobs_archive WHERE kind = 'later'")
    assert timedelta(0) <= late < timedelta(seconds=1)


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE", "role default"])
async def test_b51_b52_workers_on_engines_of_any_isolation_level_run_every_job_once(
    engine: Engine, database_url: str, jobs: Jobs, level: str
) -> None:
    ran: list[int] = []

    @jobs.task(name="job")
    def job(ctx: JobContext, number: int) -> None:
        ctx.session.execute(text("SELECT 1"))
        ran.append(number)

    with Session(engine) as session, session.begin():
        enqueue_many(session, [job.call(number) for number in range(200)])
    settings: dict[str, Any] = {"isolation_level": level}
    if level == "role default":
        settings = {"connect_args": {"options": "-c default_transaction_isolation=serializable"}}
    url = make_url(database_url).set(drivername="postgresql+psycopg")
    engines = [(create_engine(url, **settings), create_async_engine(url, **settings)) for _ in range(3)]
    workers = [Worker(jobs, engine=e, async_engine=a, mode="drain", concurrency=4) for e, a in engines]

    codes = await asyncio.gather(*[finished(worker) for worker in workers])
    for sync, other in engines:
        sync.dispose()
        await other.dispose()

    assert codes == [0, 0, 0]
    assert sorted(ran) == list(range(200))
    assert rows(engine, "SELECT DISTINCT status, attempts FROM background_jobs_archive") == [("done", 1)]


@pytest.mark.parametrize("shift", [600.0, pytest.param(-600.0, marks=pytest.mark.full)])
async def test_b54_a_wall_clock_that_is_wrong_changes_no_lease_and_no_delay(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + shift)
    runs: list[int] = []

    @jobs.task(name="job", retry=Retry(delay=timedelta(seconds=1), jitter=0))
    def job(ctx: JobContext) -> None:
        runs.append(ctx.attempt)
        threading.Event().wait(2.5)  # longer than the lease
        if ctx.attempt == 1:
            raise ValueError("once more")

    put(engine, job.using(delay=timedelta(seconds=1)))

    short = timedelta(seconds=2)
    async with (
        working(jobs, database_url, lease=short) as (_, heard),
        working(jobs, database_url, lease=short),
    ):
        await until_row(engine, "SELECT 1 FROM background_jobs_archive")

    assert runs == [1, 2]
    assert heard.named("lease.lost") == []


# -- other places, other applications


def application(schema: str | None, name: str = "jobs") -> tuple[Jobs, MetaData]:
    class Base(DeclarativeBase):
        metadata = MetaData(schema=schema)

    job = type("Job", (JobMixin, Base), {"__tablename__": name})
    return Jobs(job), Base.metadata


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(empty_database_url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


async def test_b67_a_schema_that_needs_quotes_and_no_search_path(
    empty: Engine, empty_database_url: str
) -> None:
    own, metadata = application("Job Q's")

    @own.task(name="job")
    def job(ctx: JobContext) -> None:
        ctx.session.execute(text("SELECT 1"))

    execute(empty, 'CREATE SCHEMA "Job Q\'s"')
    execute(empty, "CREATE TABLE public.jobs (LIKE pg_class)")  # a decoy
    metadata.create_all(empty)
    url = make_url(empty_database_url).update_query_dict({"options": "-c search_path="})
    with Session(empty) as session, session.begin():
        session.execute(text("SET LOCAL search_path = ''"))
        enqueue(session, job)
        enqueue(session, job.using(unique_key="k"))

    async with working(own, url.render_as_string(hide_password=False)) as (_, heard):
        await heard.event("listen.connected")
        assert await heard.settled(2) == [DONE, DONE]

    assert rows(empty, "SELECT count(*) FROM public.jobs") == [(0,)]
    assert rows(empty, 'SELECT count(*) FROM "Job Q\'s".jobs_archive') == [(2,)]


async def test_b68_two_applications_in_one_database_see_nothing_of_each_other(
    empty: Engine, empty_database_url: str
) -> None:
    ran: list[str] = []
    execute(empty, "CREATE SCHEMA one")
    execute(empty, "CREATE SCHEMA two")
    made: dict[str, Jobs] = {}
    for name in ("one", "two"):
        own, metadata = application(name)
        metadata.create_all(empty)
        made[name] = own

        def job(which: str) -> None:
            ran.append(which)

        own.task(name="job")(job)

    hour = timedelta(hours=1)
    async with (
        working(made["one"], empty_database_url, poll_interval=hour) as (_, first),
        working(made["two"], empty_database_url, poll_interval=hour) as (_, second),
    ):
        await first.event("listen.connected")
        await second.event("listen.connected")
        claims = len(second.named("job.claimed"))
        with Session(empty) as session, session.begin():
            enqueue(session, made["one"].tasks["job"], "one")
        assert await first.settled(1) == [DONE]
        quiet = len(second.named("job.claimed")) == claims
        with Session(empty) as session, session.begin():
            enqueue(session, made["two"].tasks["job"], "two")
        assert await second.settled(1) == [DONE]

    assert quiet
    assert ran == ["one", "two"]


async def test_b69_a_kind_of_a_newer_deploy_waits_for_a_worker_that_knows_it(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqla_jobs.worker.custody._UNKNOWN_KIND_DELAY", timedelta(seconds=1))
    newer = Jobs(Job)

    @jobs.task(name="old")
    def old() -> None: ...

    @newer.task(name="new")
    def new() -> None: ...

    for _ in range(20):
        put(engine, new)
    async with working(jobs, database_url) as (_, heard):
        await heard.until(lambda heard: len(heard.named("job.unknown_kind")) >= 20)
        async with working(newer, database_url) as (_, other):
            assert await other.settled(20) == [DONE] * 20

    assert rows(engine, "SELECT DISTINCT attempts FROM background_jobs_archive") == [(1,)]
