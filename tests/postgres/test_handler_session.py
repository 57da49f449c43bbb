"""What a handler may do with ctx.session, and what becomes of its writes and its job.

Every row of one table, for a thread and for a coroutine, on engines of three isolation levels: the worker's
own transaction is READ COMMITTED whatever the engine says.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from shop import Job, Order
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from workers import Heard, execute, rows, until, until_row, working

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import SqlaJobsError
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import Worker

DONE, FAILED = JobStatus.DONE, JobStatus.FAILED
ONCE = Retry(max_attempts=1)
#: The third in `make full` and in the rows where it differs: the worker overrides all three alike.
LEVELS = ["default", pytest.param("AUTOCOMMIT", marks=pytest.mark.full), "REPEATABLE READ"]
FORMS = ["thread", "loop"]

pytestmark = [pytest.mark.parametrize("form", FORMS), pytest.mark.parametrize("level", LEVELS)]


@asynccontextmanager
async def on(url: str, jobs: Jobs, level: str, **options: Any) -> AsyncIterator[tuple[Worker, Heard]]:
    """A worker on engines of the user's with this isolation level."""
    settings: dict[str, Any] = {} if level == "default" else {"isolation_level": level}
    target = url.replace("postgresql:", "postgresql+psycopg:")
    engine, async_engine = create_engine(target, **settings), create_async_engine(target, **settings)
    try:
        async with working(jobs, url, engine=engine, async_engine=async_engine, **options) as (worker, heard):
            yield worker, heard
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        assert async_engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    finally:
        await async_engine.dispose()
        engine.dispose()


def task_of(jobs: Jobs, form: str, work: Callable[[Session], object], *, retry: Retry = ONCE) -> Task[Any]:
    """A task that does this with its session; in the loop, by run_sync."""
    if form == "thread":

        @jobs.task(name="job", retry=retry)
        def in_thread(ctx: JobContext) -> None:
            work(ctx.session)

        return in_thread

    @jobs.task(name="job", retry=retry)
    async def in_loop(ctx: AsyncJobContext) -> None:
        await ctx.session.run_sync(work)

    return in_loop


def put(engine: Engine, task: Task[Any]) -> int:
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task)
    return handle.id


def add(session: Session, customer: str) -> None:
    session.add(Order(customer=customer))


def customers(engine: Engine) -> list[str]:
    return [name for (name,) in rows(engine, "SELECT customer FROM orders ORDER BY id")]


# -- what it does, what is there afterwards


def commits(session: Session) -> None:
    add(session, "a")
    session.commit()
    add(session, "b")


def begins_a_block(session: Session) -> None:
    with session.begin():
        add(session, "a")


def nests(session: Session) -> None:
    add(session, "a")
    with session.begin_nested():
        add(session, "b")
    nested = session.begin_nested()
    add(session, "gone")
    session.flush()
    nested.rollback()


def rolls_back_then_more(session: Session) -> None:
    add(session, "gone")
    session.flush()
    session.rollback()
    add(session, "a")


def reads_only(session: Session) -> None:
    assert session.scalars(select(Order)).all() == []


def closes_after_a_commit(session: Session) -> None:
    add(session, "a")
    session.commit()
    session.close()


def leaves_a_savepoint_open(session: Session) -> None:
    add(session, "a")
    session.flush()
    session.begin_nested()
    add(session, "b")


def survives_an_error_in_a_savepoint(session: Session) -> None:
    add(session, "a")
    session.flush()
    with pytest.raises(IntegrityError), session.begin_nested():
        session.execute(text("INSERT INTO receipts (order_id, text) VALUES (4711, 'x')"))
    add(session, "b")


@pytest.mark.parametrize(
    ("work", "left"),
    [
        (commits, ["a", "b"]),
        (begins_a_block, ["a"]),
        (nests, ["a", "b"]),
        (rolls_back_then_more, ["a"]),
        (reads_only, []),
        (closes_after_a_commit, ["a"]),
        (leaves_a_savepoint_open, ["a", "b"]),
        (survives_an_error_in_a_savepoint, ["a", "b"]),
    ],
)
async def test_what_it_does_is_one_with_its_job(
    engine: Engine, database_url: str, form: str, level: str, work: Callable[[Session], None], left: list[str]
) -> None:
    jobs = Jobs(Job)
    put(engine, task_of(jobs, form, work))

    async with on(database_url, jobs, level) as (_, heard):
        assert await heard.settled(1) == [DONE]

    assert customers(engine) == left


# -- what fails


def commits_then_raises(session: Session) -> None:
    commits(session)
    session.commit()
    raise ValueError("after the commit")


def swallows_an_error(session: Session) -> None:
    add(session, "a")
    session.flush()
    with pytest.raises(IntegrityError):
        session.execute(text("INSERT INTO receipts (order_id, text) VALUES (4711, 'x')"))


def breaks_a_deferred_constraint(session: Session) -> None:
    add(session, "a")
    session.execute(text("INSERT INTO late (order_id) VALUES (4711)"))


def commits_the_connection(session: Session) -> None:
    add(session, "a")
    session.flush()
    session.connection().commit()


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (commits_then_raises, "ValueError: after the commit"),
        (swallows_an_error, "in failed sql transaction|transaction is aborted|rolled back"),
        (breaks_a_deferred_constraint, "violates foreign key constraint"),
    ],
)
async def test_what_fails_is_the_jobs_failure_and_nothing_of_it_stays(
    engine: Engine, database_url: str, form: str, level: str, work: Callable[[Session], None], error: str
) -> None:
    jobs = Jobs(Job)
    execute(engine, "CREATE TABLE late (order_id int REFERENCES orders DEFERRABLE INITIALLY DEFERRED)")
    put(engine, task_of(jobs, form, work))

    async with on(database_url, jobs, level) as (_, heard):
        assert await heard.settled(1) == [FAILED]

    [(found,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert any(part in found.lower() for part in error.lower().split("|")), found
    assert customers(engine) == []


async def test_ending_the_workers_transaction_is_a_loud_failure(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    """Misuse: what it committed itself stays, and the attempt says so."""
    jobs = Jobs(Job)
    put(engine, task_of(jobs, form, commits_the_connection))

    async with on(database_url, jobs, level) as (_, heard):
        assert await heard.settled(1) == [FAILED]

    [(found,)] = rows(engine, "SELECT last_error FROM background_jobs")
    assert "use ctx.session.commit()" in found


async def test_a_commit_as_text_escapes_and_is_a_loud_failure(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    """Documented misuse: nobody sees the COMMIT, but the savepoint that the worker began is gone."""
    jobs = Jobs(Job)

    def work(session: Session) -> None:
        add(session, "escaped")
        session.flush()
        session.execute(text("COMMIT"))

    put(engine, task_of(jobs, form, work))

    async with on(database_url, jobs, level) as (_, heard):
        assert await heard.settled(1) == [FAILED]

    [(status, found)] = rows(engine, "SELECT status, last_error FROM background_jobs")
    assert status == "failed"
    assert "savepoint" in found.lower(), found
    assert customers(engine) == ["escaped"]


async def test_a_session_used_after_its_handlers_end_opens_nothing(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    """Nobody would ever commit it."""
    jobs = Jobs(Job)
    kept: list[Session] = []

    def work(session: Session) -> None:
        add(session, "a")
        kept.append(session)

    put(engine, task_of(jobs, form, work))

    async with on(database_url, jobs, level) as (_, heard):
        assert await heard.settled(1) == [DONE]
        add(kept[0], "late")
        with pytest.raises(SqlaJobsError, match="used after its handler had ended"):
            kept[0].flush()

    assert customers(engine) == ["a"]


async def test_an_untouched_session_takes_no_connection(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    jobs = Jobs(Job)
    none_open = (  # a connection of the worker's own may be one for a moment, while it is being made
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
        "AND state LIKE 'idle in transaction%' HAVING count(*) = 0"
    )
    go_on, started = threading.Event(), threading.Event()

    if form == "thread":

        @jobs.task(name="job")
        def in_thread(ctx: JobContext) -> None:
            _ = ctx.session
            started.set()
            go_on.wait(20)
    else:

        @jobs.task(name="job")
        async def in_loop(ctx: AsyncJobContext) -> None:
            _ = ctx.session
            started.set()
            await asyncio.to_thread(go_on.wait, 20)

    put(engine, jobs.tasks["job"])

    async with on(database_url, jobs, level) as (worker, heard):
        await until(started.is_set)
        engines = (worker._engines.sync, worker._engines.asynchronous)
        # the worker's own connections pass through the pools on their way
        await until(lambda: [each.pool.checkedout() for each in engines if each] == [0, 0])  # type: ignore[attr-defined]
        await until_row(engine, none_open)
        go_on.set()
        assert await heard.settled(1) == [DONE]


# -- a lost lease

STEAL = (
    "UPDATE background_jobs SET fencing_token = fencing_token + 1, locked_by = 'thief' "
    "WHERE status = 'running'"
)


@pytest.mark.parametrize("committed", [True, False])
async def test_a_lease_stolen_meanwhile_rolls_everything_back_chained_jobs_too(
    engine: Engine, database_url: str, form: str, level: str, committed: bool
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="next", queue="next")
    def follow_up() -> None: ...

    def work(session: Session) -> None:
        add(session, "a")
        enqueue(session, follow_up)
        if committed:
            session.commit()
        execute(engine, STEAL)

    put(engine, task_of(jobs, form, work))

    async with on(database_url, jobs, level, queues=["default"]) as (_, heard):
        await heard.event("lease.lost")

    assert customers(engine) == []
    assert rows(engine, "SELECT kind, status, locked_by FROM background_jobs") == [
        ("job", "running", "thief")
    ]


async def test_a_chained_job_commits_with_its_parent(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="next")
    def follow_up() -> None: ...

    put(engine, task_of(jobs, form, lambda session: enqueue(session, follow_up)))

    async with on(database_url, jobs, level) as (_, heard):
        assert await heard.settled(2) == [DONE, DONE]

    assert rows(engine, "SELECT kind FROM background_jobs_archive ORDER BY id") == [("job",), ("next",)]


async def test_a_prolongation_while_the_transaction_is_open_does_not_break_its_settle(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    """Above READ COMMITTED the settle would fail for ever: the lease's row has changed since its snapshot."""
    jobs = Jobs(Job)

    def work(session: Session) -> None:
        add(session, "a")
        session.flush()
        [(first,)] = rows(engine, "SELECT locked_until FROM background_jobs")
        while rows(engine, "SELECT locked_until FROM background_jobs") == [(first,)]:
            threading.Event().wait(0.05)

    put(engine, task_of(jobs, form, work))

    async with on(database_url, jobs, level, lease=timedelta(seconds=2)) as (_, heard):
        assert await heard.settled(1) == [DONE]

    assert customers(engine) == ["a"]


# -- field case B49: what one job leaves behind is not the next one's


def raises(session: Session) -> None:
    session.execute(text("INSERT INTO receipts (order_id, text) VALUES (4711, 'x')"))


def closes_on_its_work(session: Session) -> None:
    add(session, "gone")
    session.close()


def leaves_a_savepoint_and_raises(session: Session) -> None:
    session.begin_nested()
    add(session, "gone")
    session.flush()
    raise ValueError("in a savepoint")


def loses_its_backend_unseen(session: Session) -> None:
    """The settle is the first to notice."""
    add(session, "gone")
    pid = session.scalar(text("SELECT pg_backend_pid()"))
    url = session.connection().engine.url.set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False)) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))


def loses_its_backend_in_a_statement(session: Session) -> None:
    session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


FAULTS = [
    raises,
    swallows_an_error,
    closes_on_its_work,
    leaves_a_savepoint_and_raises,
    loses_its_backend_unseen,
    loses_its_backend_in_a_statement,
]


async def test_b49_every_job_has_a_clean_session_whatever_the_one_before_did(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    """Fifty jobs by turns: the even ones write, the odd ones fail, each in a way of its own."""
    jobs = Jobs(Job)
    numbers = iter(range(50))
    kept: list[Session] = []

    def work(session: Session) -> None:
        kept.append(session)
        number = next(numbers)
        if number % 2:
            FAULTS[number // 2 % len(FAULTS)](session)
        else:
            add(session, str(number))

    task = task_of(jobs, form, work)
    for _ in range(50):
        put(engine, task)

    async with on(database_url, jobs, level, concurrency=1) as (_, heard):
        statuses = await heard.settled(50)

    assert sorted(statuses) == [DONE] * 25 + [FAILED] * 25
    assert customers(engine) == [str(number) for number in range(0, 50, 2)]


async def test_a_statement_under_way_is_ended_with_its_coroutine(
    engine: Engine, database_url: str, form: str, level: str
) -> None:
    """A cancelled coroutine rolls back and gives its connection back; a thread's statement goes on."""
    jobs = Jobs(Job)

    @jobs.task(name="job", timeout=timedelta(seconds=0.5), retry=ONCE)
    async def in_loop(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="gone"))
        await ctx.session.flush()
        await ctx.session.execute(text("SELECT pg_sleep(30)"))

    @jobs.task(name="quick")
    async def quick(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="next"))

    put(engine, in_loop)

    async with on(database_url, jobs, level, concurrency=1) as (_, heard):
        assert await heard.settled(1) == [FAILED]
        put(engine, quick)
        await until_row(engine, "SELECT 1 FROM orders WHERE customer = 'next'")

    assert customers(engine) == ["next"]
