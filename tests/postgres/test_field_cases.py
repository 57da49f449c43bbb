"""Faults that people met with other queues, each named by its case; tests/README.md lists them."""

import asyncio
import contextvars
import functools
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import anyio
import anyio.from_thread
import pytest
from shop import Job, Order
from sqlalchemy import Engine, MetaData, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.schema import CreateSchema
from workers import PATIENCE, execute, rows, until, until_row, working

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.dispatch import Dispatcher
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import TaskDefinitionError
from sqla_jobs.models import JobMixin, tables_of
from sqla_jobs.tasks import Jobs, Task, enqueue, enqueue_many
from sqla_jobs.worker import Worker, custody, leases, maintenance, settling, wakeup
from sqla_jobs.worker import claims as claims_module

DONE, FAILED, READY = JobStatus.DONE, JobStatus.FAILED, JobStatus.READY
ONCE, AT_ONCE = Retry(max_attempts=1), Retry(delay=timedelta(0))
full = pytest.mark.full
SHORT: dict[str, Any] = {"lease": timedelta(seconds=2), "poll_interval": timedelta(seconds=0.2)}
ENDED = "SELECT status, attempts FROM background_jobs_archive"


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


@pytest.fixture
async def go() -> AsyncIterator[threading.Event]:
    """What handlers wait for; set at the end in any case."""
    event = threading.Event()
    yield event
    event.set()


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


def statuses(engine: Engine, kind: str) -> Counter[tuple[Any, ...]]:
    """How many jobs of a kind have which status after how many attempts."""
    found = "SELECT status, attempts FROM {} WHERE kind = :kind"
    return Counter(
        row
        for table in ("background_jobs", "background_jobs_archive")
        for row in rows(engine, found.format(table), kind=kind)
    )


@contextmanager
def another_worker(jobs: Jobs, url: str, **options: Any) -> Iterator[Worker]:
    """A worker with a thread and a loop of its own: what blocks this loop does not block it."""
    worker = Worker(jobs, url=url, drain_timeout=timedelta(seconds=10), **options)
    thread = threading.Thread(target=lambda: asyncio.run(worker.run()))
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


# -- what handlers raise, are, block and see


class Own(BaseException):
    pass


@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_b13_an_exception_that_is_no_exception_fails_its_job_and_nobody_elses(
    engine: Engine, database_url: str, jobs: Jobs, go: threading.Event, form: str
) -> None:
    raised = [SystemExit(0), SystemExit(1), KeyboardInterrupt(), Own()]
    started: list[int] = []

    @jobs.task(name="bad thread", retry=ONCE)
    def bad(number: int) -> None:
        raise raised[number]

    @jobs.task(name="bad loop", retry=ONCE)
    async def bad_in_loop(number: int) -> None:
        raise raised[number]

    @jobs.task(name="good thread")
    def good(number: int) -> None:
        started.append(number)
        go.wait(PATIENCE)

    @jobs.task(name="good loop")
    async def good_in_loop(number: int) -> None:
        started.append(number)
        await until(go.is_set)

    async with working(jobs, database_url, concurrency=8) as (worker, heard):
        for number in range(7):
            put(engine, good if form == "thread" else good_in_loop, number)
        await until(lambda: len(started) == 7)
        for number in range(4):
            put(engine, bad if form == "thread" else bad_in_loop, number)
        assert await heard.settled(4) == [FAILED] * 4
        # what still has a lease to prolong are the seven
        assert {run.job.kind for run in worker._held.values()} == {f"good {form}"}
        assert len(worker._custody.keeper._book) == 7
        go.set()
        assert await heard.settled(11) == [FAILED] * 4 + [DONE] * 7

    assert sorted(started) == list(range(7))
    names = [
        error.split(":")[0].split()[0]
        for (error,) in rows(engine, "SELECT last_error FROM background_jobs ORDER BY id")
    ]
    assert names == ["SystemExit", "SystemExit", "KeyboardInterrupt", "Own"]


async def test_b17_whatever_is_a_coroutine_function_runs_to_its_end_or_is_refused_and_never_done_unrun(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    ran: list[str] = []

    async def really(name: str) -> None:
        await asyncio.sleep(0)
        ran.append(name)

    class Callable:
        async def __call__(self) -> None:
            raise AssertionError

    @functools.wraps(really)
    async def decorated(name: str) -> None:
        await really(name)

    @functools.wraps(really)
    def hidden(name: str) -> Any:
        return really(name)

    def unmarked(name: str) -> Any:
        return really(name)

    def own_loop() -> None:
        asyncio.run(really("own loop"))

    def portal() -> None:
        with anyio.from_thread.start_blocking_portal() as open_portal:
            open_portal.call(really, "portal")

    for shape in (functools.partial(really, "x"), Callable(), lambda: really("x"), hidden):
        with pytest.raises(TaskDefinitionError):
            jobs.task(name="refused")(shape)
    put(engine, jobs.task(name="decorated")(decorated), "decorated")
    put(engine, jobs.task(name="own loop")(own_loop))
    put(engine, jobs.task(name="portal")(portal))
    put(engine, jobs.task(name="unmarked")(unmarked), "unmarked")

    async with working(jobs, database_url) as (_, heard):
        await heard.settled(4)

    assert sorted(ran) == ["decorated", "own loop", "portal"]
    assert rows(engine, "SELECT kind, status, attempts FROM background_jobs") == [("unmarked", "failed", 1)]


async def test_b20_a_job_sees_the_variables_of_its_own_middleware_and_of_no_other_job(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    tenant: contextvars.ContextVar[int] = contextvars.ContextVar("tenant", default=0)
    left_behind: contextvars.ContextVar[int] = contextvars.ContextVar("left_behind", default=0)
    seen: list[tuple[int, int, int]] = []

    @jobs.around
    @contextmanager
    def set_tenant(ctx: JobContext[Any]) -> Iterator[None]:
        tenant.set(ctx.id)
        yield

    @jobs.task(name="thread")
    def in_thread(ctx: JobContext) -> None:
        seen.append((ctx.id, tenant.get(), left_behind.get()))
        left_behind.set(ctx.id)

    @jobs.task(name="loop")
    async def in_loop(ctx: AsyncJobContext) -> None:
        await asyncio.sleep(0.001)
        seen.append((ctx.id, tenant.get(), left_behind.get()))
        left_behind.set(ctx.id)

    with Session(engine) as session, session.begin():
        enqueue_many(session, [(in_thread, in_loop)[number % 2].call() for number in range(100)])

    async with working(jobs, database_url, concurrency=8) as (_, heard):
        assert await heard.settled(100) == [DONE] * 100

    assert sorted(seen) == [(job, job, 0) for job in range(1, 101)]


@pytest.mark.parametrize(
    "what",
    [pytest.param("the loop", marks=full), pytest.param("the interpreter", marks=full), "sixty threads"],
)
async def test_b21_whatever_handlers_block_no_lease_comes_near_its_end(
    engine: Engine, database_url: str, jobs: Jobs, what: str
) -> None:
    """Longer than the lease, while another worker looks for leases that have ended."""
    starts: list[str] = []

    @jobs.task(name="the loop")
    async def blocks_the_loop() -> None:
        starts.append("start")
        time.sleep(2.6)  # noqa: ASYNC251 - that is the point

    @jobs.task(name="the interpreter")
    def blocks_the_interpreter() -> None:
        starts.append("start")
        ends = time.monotonic() + 2.6
        while time.monotonic() < ends:
            pass

    @jobs.task(name="sixty threads")
    def stays() -> None:
        starts.append("start")
        threading.Event().wait(2.6)

    count = 60 if what == "sixty threads" else 1
    with Session(engine) as session, session.begin():
        enqueue_many(session, [jobs.tasks[what].call() for _ in range(count)])
    left = "SELECT extract(epoch FROM min(locked_until) - clock_timestamp())::float8 FROM background_jobs"
    least: list[float] = []

    with another_worker(jobs, database_url, concurrency=60, **SHORT) as first:
        await until(lambda: len(starts) == count)
        async with working(jobs, database_url, **SHORT) as (_, heard):
            while (found := (await asyncio.to_thread(rows, engine, left))[0][0]) is not None:
                least.append(found)

    assert first.id
    assert len(starts) == count
    assert statuses(engine, what) == {("done", 1): count}
    assert min(least) > 0
    assert heard.named("job.rescued") == []


# -- side loops that meet an error


LOOPS = [
    (Dispatcher, "next"),
    (claims_module, "claim"),
    (claims_module.Claims, "make"),
    (settling, "settle"),
    (settling.Settler, "_write"),
    (settling.Settler, "_apply"),
    (maintenance, "left_behind"),
    (maintenance.Maintenance, "run"),
    (wakeup.Wakeups, "listen"),
    (wakeup.Wakeups, "_one_connection"),
    (custody.Custody, "remark"),
]
LEASES = [
    (leases.LeaseKeeper, "_due"),
    (leases, "prolong"),
    (leases.LeaseKeeper, "_to_look_at"),
    (leases.LeaseKeeper, "_apply"),
    (leases.LeaseKeeper, "_drop_ended"),
]


@pytest.mark.parametrize(
    ("owner", "name", "in_loop"),
    [
        *[pytest.param(*loop, False, id=loop[1]) for loop in LOOPS],
        pytest.param(*LEASES[0], False, id="leases"),
        *[pytest.param(*loop, False, id=f"leases {loop[1]}", marks=full) for loop in LEASES[1:]],
        *[pytest.param(*loop, True, id=f"leases in the loop {loop[1]}", marks=full) for loop in LEASES],
    ],
)
async def test_b22_a_side_loop_that_meets_an_error_comes_back_and_jobs_go_on(
    engine: Engine,
    database_url: str,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    in_loop: bool,
) -> None:
    met = threading.Event()
    original = getattr(owner, name)

    def once(*args: Any, **kwargs: Any) -> Any:
        if met.is_set():
            return original(*args, **kwargs)
        met.set()
        raise KeyError(name)

    monkeypatch.setattr(owner, name, once)
    monkeypatch.setattr(wakeup, "_AFTER_LOSS", (0.01, 0.1))

    @jobs.task(name="long")
    async def long() -> None:
        await asyncio.sleep(2.2 if owner in (leases, leases.LeaseKeeper) else 0)

    @jobs.task(name="short")
    async def short() -> None:
        pass

    asynchronous = create_async_engine(engine.url)
    options: dict[str, Any] = {"async_engine": asynchronous} if in_loop else {}
    put(engine, long)
    async with working(jobs, database_url, **SHORT, **options) as (_, heard):
        await until(met.is_set)
        put(engine, short)
        assert await heard.settled(2) == [DONE] * 2
        if owner is wakeup.Wakeups:
            await heard.event("listen.connected")
    await asynchronous.dispose()

    assert rows(engine, ENDED) == [("done", 1)] * 2


# -- stopping, cancelling, waiting


async def test_b27_a_stop_between_claim_and_start_gives_everything_back_unstarted(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    @jobs.task(name="job")
    def job(number: int) -> None:
        started.append(number)

    with Session(engine) as session, session.begin():
        enqueue_many(session, [job.call(number) for number in range(20)])
    worker = Worker(jobs, url=database_url, concurrency=20)
    hand_out = custody.Custody.hand_out

    def stop_first(self: custody.Custody, claimed: Any, sent: float) -> None:
        if claimed and not worker._stops:
            worker.stop()
            self.close()  # as the drain does, before anything is handed out
        hand_out(self, claimed, sent)

    monkeypatch.setattr(custody.Custody, "hand_out", stop_first)
    with anyio.fail_after(PATIENCE):
        code = await worker.run()

    assert code == 0
    assert started == []
    assert statuses(engine, "job") == {("ready", 0): 20}
    assert rows(engine, "SELECT DISTINCT locked_by FROM background_jobs") == [(None,)]


@pytest.mark.parametrize("times", [2, pytest.param(25, marks=full)])
@pytest.mark.parametrize("isolation", [None, "AUTOCOMMIT"])
@pytest.mark.parametrize("form", ["sync", "async"])
async def test_b29_a_stop_during_a_slow_claim_leaves_nothing_running_and_no_connection(
    engine: Engine, jobs: Jobs, form: str, isolation: Any, times: int
) -> None:
    """The claim takes 0.2 s in a trigger; the stop comes at any moment of it."""

    @jobs.task(name="job", retry=AT_ONCE)
    async def job() -> None:
        pass

    execute(
        engine,
        "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.1); RETURN NEW; END $$",
    )
    execute(
        engine,
        "CREATE TRIGGER slowly BEFORE UPDATE ON background_jobs FOR EACH ROW "
        "WHEN (NEW.status = 'running' AND OLD.status = 'ready') EXECUTE FUNCTION slowly()",
    )
    named = engine.url.update_query_dict({"application_name": "stopped"})
    settings: dict[str, Any] = {} if isolation is None else {"isolation_level": isolation}
    sync, asynchronous = create_engine(named, **settings), create_async_engine(named, **settings)
    options: dict[str, Any] = {"engine": sync} if form == "sync" else {"async_engine": asynchronous}

    for _ in range(times):
        put(engine, job)
        put(engine, job)
        worker = Worker(jobs, concurrency=2, **options)
        run = asyncio.create_task(worker.run())
        claiming = (
            "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'UPDATE background_jobs%' AND state = 'active'"
        )
        await until_row(engine, claiming)
        await asyncio.sleep(random.random() * 0.25)
        stopped = time.monotonic()
        worker.stop()
        with anyio.fail_after(PATIENCE):
            assert await run == 0
        assert time.monotonic() - stopped < 5
        mine = "SELECT 1 FROM background_jobs WHERE status = 'running' OR locked_by <> '' OR attempts > 0"
        assert rows(engine, mine) == []
        pool: Any = sync.pool if form == "sync" else asynchronous.sync_engine.pool
        assert pool.checkedout() == 0
    sync.dispose()
    await asynchronous.dispose()
    left = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'stopped'"
    await until(lambda: rows(engine, left) == [(0,)])


@pytest.mark.parametrize("trials", [100, pytest.param(1000, marks=full)])
@pytest.mark.parametrize("listen", [True, False])
async def test_b34_a_cancel_at_any_moment_of_a_run_wins_or_comes_too_late_and_nothing_is_resurrected(
    engine: Engine, database_url: str, jobs: Jobs, listen: bool, trials: int
) -> None:
    @jobs.task(name="returns in a thread", retry=AT_ONCE)
    def returns() -> None:
        threading.Event().wait(random.random() / 50)

    @jobs.task(name="returns", retry=AT_ONCE)
    async def returns_in_loop() -> None:
        await asyncio.sleep(random.random() / 50)

    @jobs.task(name="fails", retry=Retry(max_attempts=3, delay=timedelta(0)))
    async def fails() -> None:
        await asyncio.sleep(random.random() / 50)
        raise ValueError

    @jobs.task(name="fails in a thread", retry=Retry(max_attempts=3, delay=timedelta(0)))
    def fails_in_thread() -> None:
        raise ValueError

    tasks = (returns, returns_in_loop, fails, fails_in_thread)
    with Session(engine) as session, session.begin():
        enqueue_many(session, [tasks[number % 4].call() for number in range(trials)])
    hit: set[int] = set()
    over = threading.Event()

    def cancel_some() -> None:
        """Of what runs at this moment, about every other."""
        while not over.is_set():
            with engine.begin() as connection:
                hit.update(
                    connection.scalars(
                        text(
                            "UPDATE background_jobs SET cancel_requested_at = clock_timestamp() WHERE id IN "
                            "(SELECT id FROM background_jobs WHERE status = 'running' AND random() < 0.5 "
                            "AND cancel_requested_at IS NULL ORDER BY id FOR UPDATE SKIP LOCKED) RETURNING id"
                        )
                    )
                )
            over.wait(0.002)

    ended = "SELECT 1 FROM background_jobs WHERE status IN ('ready', 'running') HAVING count(*) = 0"
    async with working(jobs, database_url, listen=listen, **SHORT):
        canceller = asyncio.create_task(asyncio.to_thread(cancel_some))
        await until_row(engine, ended)
        over.set()
        await canceller

    found = "SELECT id, kind, status, attempts FROM {}"
    tables = ("background_jobs", "background_jobs_archive")
    ends = [row for table in tables for row in rows(engine, found.format(table))]
    assert len(ends) == trials
    assert len(hit) > trials / 10
    for id_, kind, status, attempts in ends:
        if kind.startswith("returns"):
            assert (status, attempts) == ("done", 1) or (status == "cancelled" and id_ in hit)
        else:
            # a failing attempt that was asked to end has no successor
            assert status == ("cancelled" if id_ in hit else "failed")
            assert attempts == 3 or id_ in hit
    assert rows(engine, "SELECT count(*) FROM background_jobs WHERE status <> 'failed'") == [(0,)]


async def test_b38_what_is_due_and_what_comes_in_bulk_does_not_wait_for_the_poll(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """Read off the database's clock: delay, retry, and a hundred jobs for twenty slots."""
    starts: dict[str, list[float]] = {"later": [], "retried": [], "bulk": []}

    @jobs.task(name="later")
    async def later() -> None:
        starts["later"].append(time.monotonic())

    @jobs.task(name="retried", retry=Retry(delay=timedelta(seconds=1), jitter=0))
    async def retried() -> None:
        starts["retried"].append(time.monotonic())
        if len(starts["retried"]) == 1:
            raise ValueError

    @jobs.task(name="bulk")
    def bulk() -> None:
        starts["bulk"].append(time.monotonic())
        threading.Event().wait(0.2)

    hour = timedelta(hours=1)
    async with working(jobs, database_url, concurrency=20, poll_interval=hour) as (_, heard):
        await heard.event("listen.connected")
        begun = time.monotonic()
        put(engine, later.using(delay=timedelta(seconds=1)))
        put(engine, retried)
        with Session(engine) as session, session.begin():
            enqueue_many(session, [bulk.call() for _ in range(100)])
        await heard.settled(103)

    assert 0.9 < starts["later"][0] - begun < 2
    assert 0.9 < starts["retried"][1] - starts["retried"][0] < 2
    assert max(starts["bulk"]) - begun < 3  # five rounds of 0.2 s


async def test_b35_a_rescued_job_keeps_its_priority_and_one_that_fails_at_once_takes_its_turn(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """One slot, a stream of jobs, and two that come back."""
    ran: list[tuple[str, int]] = []

    @jobs.task(name="job")
    async def job(name: str, number: int) -> None:
        ran.append((name, number))
        if name == "stream":
            put(engine, job.using(priority=1), "late", number)  # more comes in than goes out

    @jobs.task(name="fails", retry=AT_ONCE)
    async def fails(ctx: AsyncJobContext) -> None:
        ran.append(("fails", ctx.attempt))
        if ctx.attempt < 3:
            raise ValueError

    @jobs.task(name="lost", retry=AT_ONCE)
    async def lost() -> None:
        ran.append(("lost", 0))

    put(engine, lost.using(priority=9))
    execute(
        engine,
        "UPDATE background_jobs SET status = 'running', attempts = 1, fencing_token = 1, locked_by = 'gone', "
        "locked_until = clock_timestamp() - interval '1 s'",
    )
    with Session(engine) as session, session.begin():
        enqueue_many(session, [job.using(priority=0).call("low", number) for number in range(5)])
        enqueue_many(session, [job.using(priority=1).call("stream", number) for number in range(10)])
    put(engine, fails.using(priority=1))

    async with working(jobs, database_url, concurrency=1, **SHORT) as (_, heard):
        rescued = asyncio.create_task(heard.event("job.rescued"))
        await until(lambda: rescued.done() or len(ran) == 29)
        already = len(ran)
        await heard.settled(10 + 10 + 5 + 3 + 1)  # of the one that fails, each attempt

    # the rescued one goes first, but for what was claimed before it was ready again
    assert ran.index(("lost", 0)) <= already + 2
    others = [name for name, _ in ran if name != "lost"]
    # a failed attempt is due when it failed: after what was due before, before what came later
    assert others[:11] == ["stream"] * 10 + ["fails"]
    assert Counter(others) == {"stream": 10, "late": 10, "low": 5, "fails": 3}
    # the low ones come last, but for those that were claimed ahead when nothing else was ready
    assert others[:21].count("low") <= 2, others


# -- what engines, roles and clocks are


@pytest.mark.parametrize(
    ("engine_level", "database_level"),
    [
        pytest.param("AUTOCOMMIT", None, id="B51: AUTOCOMMIT"),
        pytest.param("REPEATABLE READ", None, id="B52: REPEATABLE READ", marks=full),
        pytest.param("SERIALIZABLE", None, id="B52: SERIALIZABLE"),
        pytest.param(None, "serializable", id="B52: ALTER DATABASE"),
        pytest.param(None, "repeatable read", id="B52: ALTER DATABASE, repeatable read", marks=full),
    ],
)
async def test_b51_b52_whatever_the_isolation_of_its_engines_two_workers_do_every_job_once(
    engine: Engine, database_url: str, jobs: Jobs, engine_level: Any, database_level: str | None
) -> None:
    """Writes of half of the handlers are one with their job; no 40001 costs a job an attempt."""

    @jobs.task(name="thread")
    def in_thread(ctx: JobContext, session: bool) -> None:
        if session:
            ctx.session.add(Order(customer=str(ctx.id)))

    @jobs.task(name="loop")
    async def in_loop(ctx: AsyncJobContext, session: bool) -> None:
        if session:
            ctx.session.add(Order(customer=str(ctx.id)))

    if database_level is not None:
        execute(
            engine,
            f"ALTER DATABASE {engine.url.database} SET default_transaction_isolation = '{database_level}'",
        )
    settings: dict[str, Any] = {} if engine_level is None else {"isolation_level": engine_level}
    sync, asynchronous = create_engine(engine.url, **settings), create_async_engine(engine.url, **settings)
    options: dict[str, Any] = {"engine": sync, "async_engine": asynchronous, "concurrency": 5}
    calls = [(in_thread, in_loop)[number % 2].call(number % 4 < 2) for number in range(400)]
    all_done = "SELECT 1 FROM background_jobs_archive WHERE status = 'done' HAVING count(*) = 400"

    async with (
        working(jobs, database_url, **options) as (_, one),
        working(jobs, database_url, **options) as (_, two),
    ):
        for begin in range(0, 400, 40):
            with Session(sync) as session, session.begin():
                enqueue_many(session, calls[begin : begin + 40])
        await until_row(engine, all_done)
    sync.dispose()
    await asynchronous.dispose()

    assert rows(engine, "SELECT DISTINCT attempts FROM background_jobs_archive") == [(1,)]
    written = [int(customer) for (customer,) in rows(engine, "SELECT customer FROM orders")]
    assert sorted(written) == [job for job in range(1, 401) if (job - 1) % 4 < 2]
    assert [each for each in (*one.events, *two.events) if each.name in ("loop.crashed", "lease.lost")] == []
    assert len(one.named("database.error")) + len(two.named("database.error")) < 10


def test_b53_a_job_enqueued_late_in_a_long_transaction_counts_its_time_from_the_call(
    engine: Engine, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    async def job() -> None:
        pass

    with Session(engine) as session, session.begin():
        session.execute(text("SELECT pg_sleep(1.5)"))
        before = session.scalar(text("SELECT clock_timestamp()"))
        now = enqueue(session, job)
        later = enqueue(session, job.using(delay=timedelta(seconds=2)))
        session.flush()
        after = session.scalar(text("SELECT clock_timestamp()"))

    times = {row[0]: row[1:] for row in rows(engine, "SELECT id, created_at, run_at FROM background_jobs")}
    assert before is not None
    assert after is not None
    assert before <= times[now.id][0] <= after
    assert before <= times[now.id][1] <= after
    assert before <= times[later.id][1] - timedelta(seconds=2) <= after


# -- schemas, tenants, deploys


def queue_in(schema: str) -> type[JobMixin]:
    """A Job class of an application whose tables lie in `schema`."""

    class Tenant(DeclarativeBase):
        metadata = MetaData(schema=schema)

    class TenantJob(JobMixin, Tenant):
        __tablename__ = "background_jobs"

    return TenantJob


def create(engine: Engine, job: type[JobMixin]) -> None:
    """Its schema and tables."""
    table = tables_of(job).jobs
    assert table.schema is not None
    with engine.begin() as connection:
        connection.execute(CreateSchema(table.schema))
        table.metadata.create_all(connection)


def lost_row(table: str, kind: str, queue: str = "default") -> str:
    """A job whose worker has died."""
    return (
        f"INSERT INTO {table} (kind, queue, status, attempts, fencing_token, locked_by, locked_until) "
        f"VALUES ('{kind}', '{queue}', 'running', 1, 1, 'gone', clock_timestamp() - interval '1 s')"
    )


async def test_b67_a_schema_with_an_odd_name_and_no_search_path_works_and_a_decoy_is_untouched(
    engine: Engine, database_url: str
) -> None:
    """In public lie tables of the same names, the shop's."""
    odd = queue_in("Job Q's")
    jobs = Jobs(odd)
    execute(engine, f"ALTER DATABASE {engine.url.database} SET search_path = ''")
    plain = create_engine(engine.url)
    create(plain, odd)
    starts: list[str] = []

    @jobs.task(name="thread", retry=AT_ONCE)
    def in_thread(ctx: JobContext) -> None:
        assert ctx.session.scalar(text("SHOW search_path")) == '""'
        starts.append("thread")

    @jobs.task(name="loop", retry=AT_ONCE)
    async def in_loop(ctx: AsyncJobContext) -> None:
        await ctx.session.execute(text("SELECT 1"))
        starts.append("loop")
        if starts.count("loop") == 1:
            raise ValueError

    @jobs.task(name="fails", retry=ONCE)
    async def fails() -> None:
        raise ValueError

    table = '"Job Q\'s".background_jobs'
    never = timedelta(hours=1)
    async with working(jobs, database_url, lease=timedelta(seconds=2), poll_interval=never) as (_, heard):
        await heard.event("listen.connected")
        with Session(plain) as session, session.begin():
            enqueue(session, in_loop)
            enqueue(session, in_thread.using(unique_key="k"))
            again = enqueue(session, in_thread.using(unique_key="k"))
            enqueue_many(session, [fails.call(), in_thread.using(delay=timedelta(seconds=0.3)).call()])
        execute(plain, lost_row(table, "loop"))
        execute(plain, f"INSERT INTO {table} (kind, expires_at) VALUES ('loop', now())")
        await heard.event("job.rescued")
        await heard.event("job.expired")
        await heard.until(lambda heard: heard.statuses().count(DONE) == 4)

    assert again.created is False
    assert starts.count("thread") == 2
    assert starts.count("loop") == 3
    archive = f"SELECT status, count(*) FROM {table}_archive GROUP BY status ORDER BY status"
    assert rows(plain, archive) == [("cancelled", 1), ("done", 4)]
    assert rows(plain, f"SELECT status FROM {table}") == [("failed",)]
    for decoy in ("background_jobs", "background_jobs_archive"):
        assert rows(plain, f"SELECT count(*) FROM public.{decoy}") == [(0,)]
    assert [each for each in heard.events if each.name in ("database.error", "loop.crashed")] == []
    plain.dispose()


async def test_b68_two_applications_in_two_schemas_neither_claim_nor_rescue_nor_wake_each_other(
    engine: Engine, empty_database_url: str
) -> None:
    target = create_engine(engine.url.set(database=make_url(empty_database_url).database))
    calls: dict[str, list[int]] = {"one": [], "two": []}
    applications: dict[str, Jobs] = {}
    for name in calls:
        jobs = applications[name] = Jobs(queue_in(name))
        create(target, jobs.Job)

        @jobs.task(name="job", retry=AT_ONCE)
        async def job(ctx: AsyncJobContext, application: str) -> None:
            calls[application].append(ctx.id)

        # ids that tell which table a job is from
        execute(target, f"ALTER TABLE {name}.background_jobs ALTER id RESTART WITH {len(applications)}000")
        execute(target, lost_row(f"{name}.background_jobs", "job"))
        execute(target, f'UPDATE {name}.background_jobs SET payload = \'{{"application": "{name}"}}\'')
    never: dict[str, Any] = {"lease": timedelta(seconds=2), "poll_interval": timedelta(hours=1)}
    first, second = (working(applications[name], empty_database_url, **never) for name in calls)

    async with first as (_, one), second as (_, two):
        for heard in (one, two):
            await heard.event("listen.connected")
            await heard.until(lambda heard: DONE in heard.statuses())
        claims = len(two.named("job.claimed"))
        with Session(target) as session, session.begin():
            enqueue_many(session, [applications["one"].tasks["job"].call("one") for _ in range(20)])
        await one.settled(21)
        assert len(two.named("job.claimed")) == claims

    assert sorted(calls["one"]) == list(range(1000, 1021))
    assert calls["two"] == [2000]
    assert [len(heard.named("job.rescued")) for heard in (one, two)] == [1, 1]
    target.dispose()


async def test_b68_two_applications_with_queues_of_their_own_in_one_table_keep_to_them(
    engine: Engine, database_url: str
) -> None:
    applications = {name: Jobs(Job) for name in ("one", "two")}
    for name, jobs in applications.items():

        @jobs.task(name=f"{name}.job", queue=name, retry=AT_ONCE)
        async def job() -> None:
            pass

        execute(engine, lost_row("background_jobs", f"{name}.job", name))

    async with working(applications["one"], database_url, **SHORT) as (_, one):
        put(engine, applications["two"].tasks["two.job"])
        assert await one.settled(1) == [DONE]
        untouched = "SELECT status, attempts, fencing_token FROM background_jobs ORDER BY id"
        assert rows(engine, untouched) == [("running", 1, 1), ("ready", 0, 0)]
    async with working(applications["two"], database_url, **SHORT) as (_, two):
        assert await two.settled(2) == [DONE] * 2

    assert one.named("job.unknown_kind") == two.named("job.unknown_kind") == []


async def test_b69_a_kind_that_only_the_new_release_knows_waits_for_it_uncharged(
    engine: Engine, database_url: str
) -> None:
    old, new = Jobs(Job), Jobs(Job)
    done: list[int] = []

    async def known() -> None:
        pass

    async def added(number: int) -> None:
        done.append(number)

    old.task(name="known")(known)
    new.task(name="known")(known)
    new_task = new.task(name="added")(added)
    with Session(engine) as session, session.begin():
        enqueue_many(session, [new_task.call(number) for number in range(100)])

    async with working(old, database_url, **SHORT) as (_, heard):
        await heard.until(lambda heard: len(heard.named("job.unknown_kind")) >= 100)
        put(engine, old.tasks["known"])
        await heard.until(lambda heard: DONE in heard.statuses())
    given_back = (
        "SELECT DISTINCT status, attempts, last_error, run_at > clock_timestamp() FROM background_jobs"
    )
    assert rows(engine, given_back) == [("ready", 0, None, True)]

    execute(engine, "UPDATE background_jobs SET run_at = clock_timestamp()")  # half a minute later
    async with working(new, database_url, **SHORT) as (_, heard):
        await heard.settled(100)

    assert sorted(done) == list(range(100))
    assert statuses(engine, "added") == {("done", 1): 100}
