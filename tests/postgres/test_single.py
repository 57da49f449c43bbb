"""One attempt inside somebody else's transaction."""

from datetime import timedelta
from typing import Any

import pytest
from shop import Job, Order
from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session
from workers import rows

from sqla_jobs.context import AsyncJobContext, Cancel, JobContext, Snooze
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import AppError, ConfigurationError, LeaseLost
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker.single import run_next


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


def put(connection: Connection, task: Task[Any], *args: Any) -> None:
    """Enqueue in the connection's own transaction."""
    with Session(connection, join_transaction_mode="create_savepoint") as session:
        enqueue(session, task, *args)
        session.commit()


def count(connection: Connection) -> int:
    """How many orders there are, as this transaction sees it."""
    return connection.scalar(select(func.count()).select_from(Order)) or 0


def test_a_job_enqueued_in_a_transaction_runs_in_it_and_goes_with_it(clean: Engine, jobs: Jobs) -> None:
    @jobs.task(name="job")
    def job(ctx: JobContext, order: Order) -> None:
        ctx.session.add(Order(customer=f"friend of {order.customer}"))
        ctx.session.commit()  # of the attempt, never of whoever runs it

    with clean.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add(order := Order(customer="Ada"))
            enqueue(session, job, order)
            session.commit()

        ran = run_next(connection, jobs)
        again = run_next(connection, jobs)
        orders = connection.scalars(select(Order.customer).order_by(Order.id)).all()
        transaction.rollback()

    assert ran is not None
    assert ran[1].status is JobStatus.DONE
    assert again is None
    assert orders == ["Ada", "friend of Ada"]
    assert rows(clean, "SELECT count(*) FROM orders") == [(0,)]
    assert rows(clean, "SELECT count(*) FROM background_jobs_archive") == [(0,)]


@pytest.mark.parametrize(
    ("raised", "status", "attempts"),
    [
        (ValueError("boom"), "ready", 1),
        (Snooze(timedelta(seconds=5)), "ready", 0),
        (Cancel("no"), "cancelled", 1),
    ],
)
def test_what_the_handler_raises_is_its_verdict_and_its_writes_are_gone(
    clean: Engine, jobs: Jobs, raised: Exception, status: str, attempts: int
) -> None:
    @jobs.task(name="job", retry=Retry(max_attempts=2))
    def job(ctx: JobContext) -> None:
        ctx.session.add(Order(customer="never"))
        ctx.session.flush()
        raise raised

    with clean.connect() as connection, connection.begin():
        put(connection, job)
        run_next(connection, jobs)
        here = rows(connection, "SELECT status, attempts FROM background_jobs")
        there = rows(connection, "SELECT status, attempts FROM background_jobs_archive")
        orders = count(connection)

    assert here + there == [(status, attempts)]
    assert orders == 0


async def test_a_coroutine_runs_by_run_sync(
    clean: Engine, async_engine: AsyncEngine, engine: Engine, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    async def job(ctx: AsyncJobContext) -> None:
        ctx.session.add(Order(customer="Ada"))
        await ctx.session.flush()

    async with async_engine.connect() as connection, connection.begin() as transaction:
        await connection.run_sync(put, job)
        ran = await connection.run_sync(run_next, jobs)
        orders = await connection.run_sync(count)
        await transaction.rollback()

    assert ran is not None
    assert ran[1].status is JobStatus.DONE
    assert orders == 1
    assert rows(engine, "SELECT count(*) FROM orders") == [(0,)]


def test_a_coroutine_without_a_loop_is_a_clear_error_and_the_transaction_stays_usable(
    clean: Engine, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    async def job() -> None: ...

    with clean.connect() as connection, connection.begin():
        put(connection, job)
        with pytest.raises(ConfigurationError, match=r"await async_connection.run_sync\(run_next, jobs\)"):
            run_next(connection, jobs)

        assert rows(connection, "SELECT status, attempts FROM background_jobs") == [("ready", 0)]


def test_a_kind_that_nobody_knows_is_a_clear_error(clean: Engine, jobs: Jobs) -> None:
    with clean.connect() as connection, connection.begin():
        connection.exec_driver_sql("INSERT INTO background_jobs (kind) VALUES ('app.unknown')")

        with pytest.raises(AppError, match=r"no task of this Jobs is called 'app.unknown'"):
            run_next(connection, jobs, queues=["default"])


@pytest.mark.parametrize("through_session", [True, False])
def test_a_handler_that_takes_its_own_job_away_is_told(
    clean: Engine, jobs: Jobs, through_session: bool
) -> None:
    with clean.connect() as connection, connection.begin():

        @jobs.task(name="job")
        def job(ctx: JobContext) -> None:
            connection.exec_driver_sql("UPDATE background_jobs SET fencing_token = fencing_token + 1")
            if through_session:
                ctx.session.add(Order(customer="never"))

        put(connection, job)
        with pytest.raises(LeaseLost, match="was changed while it ran"):
            run_next(connection, jobs)

        assert rows(connection, "SELECT status, attempts FROM background_jobs") == [("ready", 0)]
        assert count(connection) == 0
