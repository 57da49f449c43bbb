"""Lines of the guarantees that no other test turns red: identities, stops, drains, side loops that die."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from shop import Job
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from steps import KEEP, TABLES, run, take_one
from steps import put as put_row
from workers import PATIENCE, Heard, execute, finished, rows, until, working

from sqla_jobs.context import JobContext
from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import DONE, JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.events import Events
from sqla_jobs.store.claim import ClaimedJob
from sqla_jobs.store.lease import Prolonged
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import Worker
from sqla_jobs.worker import session as handler_session
from sqla_jobs.worker.custody import Custody
from sqla_jobs.worker.leases import LeaseKeeper
from sqla_jobs.worker.maintenance import Maintenance
from sqla_jobs.worker.run import Run, Runner
from sqla_jobs.worker.run import _to_its_end as to_its_end
from sqla_jobs.worker.session import HandlerSession, abandon, settle_through
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
    "lease ends": (LeaseKeeper, "watch_ends"),
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


def test_a_handlers_settle_does_not_wait_for_ever_for_its_row(
    clean: Engine, a: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has the row open in psql; the handler's transaction must not hold its own locks meanwhile."""
    short = text("SELECT set_config('lock_timeout', '50ms', true)")
    monkeypatch.setattr(handler_session, "_LOCK_TIMEOUT", short)
    put_row(a)
    lease = take_one(a)
    session = HandlerSession(source=clean)
    session.execute(text("SET LOCAL statement_timeout = '2s'"))

    with clean.connect() as somebody:
        run(somebody, "UPDATE background_jobs SET priority = 1")
        with pytest.raises(OperationalError, match="lock timeout"):
            settle_through(session, TABLES, (lease, DONE), KEEP)
        somebody.rollback()
    abandon(session)


@pytest.mark.parametrize("settled", [True, False])
def test_a_lease_that_was_settled_while_its_prolongation_was_under_way_is_not_told_as_lost(
    settled: bool,
) -> None:
    """The row has left the table by our own hand; the prolongation finds nothing."""
    told: list[Lease] = []
    keeper = LeaseKeeper(
        TABLES,
        engine=None,
        async_engine=None,
        lease=timedelta(seconds=60),
        look_every=60.0,
        lost=lambda leases, reason: told.extend(leases),
        cancel_requested=lambda leases: None,
        events=Events(),
    )
    lease = Lease("default", 1, 1, "A")
    keeper.opened([lease], sent=0.0)

    if settled:
        keeper.closed([lease])
    keeper._apply(Prolonged(lost=[lease]), sent=0.0)

    assert told == ([] if settled else [lease])


@pytest.mark.parametrize("method", ["in_thread", "in_loop"])
@pytest.mark.parametrize("why", ["lost", "released"])
async def test_what_was_lost_or_given_back_while_it_waited_for_a_slot_is_not_run(
    jobs: Jobs, method: str, why: str
) -> None:
    ran: list[int] = []

    @jobs.task(name="in_thread")
    def in_thread() -> None:
        ran.append(1)

    @jobs.task(name="in_loop")
    async def in_loop() -> None:
        ran.append(1)

    runner = Runner(jobs, source=None, async_source=None, events=Events())
    claimed = ClaimedJob(Lease("default", 1, 1, "A"), method, "{}", 1, 20, 0, 0.0)
    run = Run(job=claimed, task=jobs.tasks[method])
    setattr(run, why, True)

    ended = runner.in_thread(run) if method == "in_thread" else await runner.in_loop(run)

    assert ran == []
    assert (ended.verdict, ended.written) == (None, None)


async def test_a_commit_under_way_is_not_cancelled_with_the_task_that_waits_for_it() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def commit() -> str:
        started.set()
        await go_on.wait()
        return "committed"

    waiter = asyncio.create_task(to_its_end(commit()))
    await started.wait()
    waiter.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)  # after the cancellation has arrived

    assert await waiter == "committed"


async def test_a_cancelled_attempt_leaves_no_cancellation_to_the_next_of_its_slot(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """It is asked for when nothing of the first attempt waits any more: it would arrive in the second."""

    @jobs.task(name="cancels itself", retry=Retry(max_attempts=1))
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @jobs.task(name="next", retry=Retry(max_attempts=1))
    async def next_one() -> None:
        await asyncio.get_running_loop().run_in_executor(None, threading.Event)

    put(engine, cancels_itself)
    put(engine, next_one)

    async with working(jobs, database_url, concurrency=1) as (_, heard):
        assert await heard.settled(2) == [JobStatus.DONE, JobStatus.DONE]


async def test_a_delay_past_the_end_of_the_calendar_is_written_as_the_longest_that_can_be(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job", retry=Retry(on={ValueError: lambda error, attempt: timedelta.max}))
    def job() -> None:
        raise ValueError("not before the sun goes out")

    put(engine, job)

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(1) == [JobStatus.READY]

    years = rows(engine, "SELECT round(extract(epoch FROM run_at - now()) / 31557600) FROM background_jobs")
    assert years == [(100,)]
    assert heard.named("outcome.refused") == []


async def test_an_outcome_whose_row_somebody_holds_is_written_when_it_is_let_go(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    starts, go_on = [], threading.Event()

    @jobs.task(name="job")
    def job() -> None:
        starts.append(1)
        go_on.wait(PATIENCE)

    put(engine, job)

    async with working(jobs, database_url, lease=timedelta(minutes=5)) as (worker, heard):
        await until(lambda: bool(starts))
        with engine.connect() as somebody:
            run(somebody, "SELECT FROM background_jobs FOR UPDATE")
            go_on.set()
            await until(lambda: worker._custody.settler._waiting > 0)
            somebody.rollback()
        assert await heard.settled(1) == [JobStatus.DONE]

    assert starts == [1]


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
