"""Lines of the guarantees that no other test turns red: identities, stops, drains, side loops that die."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from shop import Job
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.orm import Session
from workers import PATIENCE, Heard, execute, finished, rows, until, working

from sqla_jobs.context import JobContext
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import Worker
from sqla_jobs.worker.custody import Custody
from sqla_jobs.worker.leases import LeaseKeeper
from sqla_jobs.worker.maintenance import Maintenance
from sqla_jobs.worker.run import Runner
from sqla_jobs.worker.settling import Settler
from sqla_jobs.worker.wakeup import Wakeups


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


def put(engine: Engine, task: Task[Any], *args: Any) -> int:
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args)
    return handle.id


def test_two_workers_of_one_process_have_two_identities(jobs: Jobs) -> None:
    @jobs.task(name="job")
    def job() -> None: ...

    ids = {Worker(jobs, url="postgresql://nowhere/db").id for _ in range(10)}

    assert len(ids) == 10


async def test_what_a_claim_under_way_brings_after_the_stop_is_given_back_unrun(
    engine: Engine, jobs: Jobs
) -> None:
    ran: list[int] = []

    @jobs.task(name="job")
    def job() -> None:
        ran.append(1)

    own = create_engine(engine.url)
    worker = Worker(jobs, engine=own, listen=False)
    stopping = threading.Event()

    def before(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        if "SET status='running'" in statement and not stopping.is_set():
            stopping.set()
            worker.stop()
            while not worker._stopping.is_set():  # the loop has noticed, the claim goes out now
                threading.Event().wait(0.005)

    event.listen(own, "before_cursor_execute", before)
    put(engine, job)

    code = await finished(worker)
    own.dispose()

    assert code == 0
    assert stopping.is_set()
    assert ran == []
    assert rows(engine, "SELECT status, attempts, fencing_token FROM background_jobs") == [("ready", 0, 1)]


async def test_leases_are_prolonged_through_the_drain(engine: Engine, database_url: str, jobs: Jobs) -> None:
    started, starts = threading.Event(), []

    @jobs.task(name="job")
    def job() -> None:
        starts.append(1)
        started.set()
        threading.Event().wait(4)  # its work: twice the lease

    put(engine, job)
    short = timedelta(seconds=2)
    worker = Worker(jobs, url=database_url, lease=short, drain_timeout=timedelta(seconds=PATIENCE))
    heard = Heard(worker)
    running = asyncio.create_task(finished(worker))
    await until(started.is_set)
    worker.stop()

    async with working(jobs, database_url, lease=short) as (_, other):
        assert await running == 0

    assert starts == [1]
    assert heard.statuses() == [JobStatus.DONE]
    assert other.named("job.rescued") == []


LOOPS: dict[str, tuple[type, str]] = {
    "claims": (Worker, "_claim_loop"),
    "settles": (Settler, "run"),
    "maintenance": (Maintenance, "run"),
    "remarks": (Custody, "remark"),
    "wake-ups": (Wakeups, "listen"),
    "recycling": (Worker, "_watch"),
}


@pytest.mark.parametrize("name", LOOPS)
async def test_b22_a_side_loop_that_dies_comes_back_and_jobs_go_on(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    @jobs.task(name="job")
    async def job() -> None: ...

    owner, method = LOOPS[name]
    whole: Callable[..., Any] = getattr(owner, method)
    calls: list[int] = []

    async def once_broken(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("a bad reply")
        return await whole(self, *args)

    monkeypatch.setattr(owner, method, once_broken)

    async with working(jobs, database_url) as (_, heard):
        crashed = await heard.event("loop.crashed")
        put(engine, job)
        assert await heard.settled(1) == [JobStatus.DONE]
        await until(lambda: len(calls) == 2)

    assert (crashed.fields["loop"], crashed.fields["error"]) == (name, "KeyError('a bad reply')")


async def test_b22_the_lease_thread_outlives_what_it_meets(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    @jobs.task(name="job")
    def job() -> None:
        threading.Event().wait(4)  # its work: twice the lease

    whole, calls = LeaseKeeper._verb, []

    def once_broken(self: LeaseKeeper, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("a bad reply")
        return whole(self, *args)

    monkeypatch.setattr(LeaseKeeper, "_verb", once_broken)
    put(engine, job)

    async with working(jobs, database_url, lease=timedelta(seconds=2)) as (_, heard):
        assert await heard.settled(1) == [JobStatus.DONE]

    assert len(calls) > 1
    assert heard.named("lease.lost") == []


@pytest.mark.parametrize("method", ["in_thread", "in_loop"])
async def test_a_consumer_outlives_what_its_runner_meets(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    if method == "in_thread":

        @jobs.task(name="job", retry=Retry(max_attempts=1))
        def in_thread() -> None: ...
    else:

        @jobs.task(name="job", retry=Retry(max_attempts=1))
        async def in_loop() -> None: ...

    whole, calls = getattr(Runner, method), []

    def once_broken(self: Runner, run: Any) -> Any:
        calls.append(run)
        if len(calls) == 1:
            raise SystemExit("nobody expected this")
        return whole(self, run)

    monkeypatch.setattr(Runner, method, once_broken)
    put(engine, jobs.tasks["job"])
    put(engine, jobs.tasks["job"])

    async with working(jobs, database_url, concurrency=1) as (_, heard):
        assert await heard.settled(2) == [JobStatus.FAILED, JobStatus.DONE]


async def test_a_system_exit_gives_the_connection_of_its_session_back(engine: Engine, jobs: Jobs) -> None:
    @jobs.task(name="job", retry=Retry(max_attempts=1))
    def job(ctx: JobContext) -> None:
        ctx.session.connection()
        raise SystemExit(3)

    own = create_engine(engine.url)
    put(engine, job)

    async with working(jobs, "", engine=own) as (_, heard):
        assert await heard.settled(1) == [JobStatus.FAILED]
        held = own.pool.checkedout()  # type: ignore[attr-defined]
    own.dispose()

    assert held == 0


async def test_a_retry_rule_that_raises_hides_nothing_of_the_failure(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    def rule(error: BaseException, attempt: int) -> timedelta:
        raise KeyError("the rule is broken")

    @jobs.task(name="job", retry=Retry(on={ValueError: rule}))
    def job() -> None:
        raise ValueError("the real failure")

    put(engine, job)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.READY]

    [(error, waits)] = rows(engine, "SELECT last_error, run_at - now() FROM background_jobs")
    assert error.startswith("ValueError: the real failure")
    assert timedelta(0) < waits < timedelta(seconds=4)  # as without the rule


async def test_a_job_that_killed_its_worker_waits_as_after_a_failure_before_it_may_kill_another(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    ran: list[int] = []

    @jobs.task(name="job", retry=Retry(delay=timedelta(minutes=30), jitter=0))
    def job() -> None:
        ran.append(1)

    put(engine, job)
    execute(
        engine,
        "UPDATE background_jobs SET status = 'running', attempts = 1, fencing_token = 1, locked_by = 'gone', "
        "locked_until = clock_timestamp() - interval '1 s'",
    )

    async with working(jobs, database_url) as (_, heard):
        await heard.event("job.rescued")

    [(status, waits)] = rows(engine, "SELECT status, run_at - now() FROM background_jobs")
    assert status == "ready"
    assert timedelta(minutes=29) < waits <= timedelta(minutes=30)
    assert ran == []
