"""One attempt on a connection whose transaction is the caller's: claimed, run and settled here and now.

For tests that roll everything back, and for whoever wants a job's effects inside a transaction of their
own. The same claim, runner and fence as the worker's; no lease is prolonged, and no time limit is kept.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from uuid import uuid4

from sqlalchemy import Connection
from sqlalchemy.exc import MissingGreenlet
from sqlalchemy.util import await_only

from sqla_jobs.core.lifecycle import Released, Verdict, judge
from sqla_jobs.errors import AppError, ConfigurationError, LeaseLost
from sqla_jobs.events import Events
from sqla_jobs.store.claim import ClaimedJob, claim
from sqla_jobs.store.settle import settle_within
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker.run import Ended, Run, Runner
from sqla_jobs.worker.settings import queue_names

__all__ = ["run_next"]

_LEASE = timedelta(minutes=5)


def run_next(
    connection: Connection, jobs: Jobs, *, queues: Iterable[str] | None = None, events: Events | None = None
) -> tuple[ClaimedJob, Verdict] | None:
    """Run the next due job of `queues` (default: those of the tasks); None when there is none.

    Everything happens in the connection's own transaction, inside a savepoint: commit or roll back as you
    like. An async handler needs `await async_connection.run_sync(run_next, jobs)`. Jobs enqueued in the
    same transaction are seen. What the handler raises becomes its verdict, as in the worker.

    Raises `AppError` for a job whose kind is not registered, `ConfigurationError` for what is no connection
    with a transaction and for an async handler outside `run_sync`, `LeaseLost` when the handler itself took
    its job away.
    """
    if not isinstance(connection, Connection):
        raise ConfigurationError(
            f"run_next takes a Connection, got {type(connection).__name__}: session.connection() has one, "
            "and engine.begin() makes one"
        )
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise ConfigurationError(
            "run_next needs a transaction to run in, and this connection is in AUTOCOMMIT: leave that out"
        )
    owner = f"single:{os.getpid()}:{uuid4().hex[:12]}"
    names = queue_names(queues, (task.options.queue for task in jobs.tasks.values()))
    with connection.begin_nested():
        for queue in names:
            for job in claim(connection, jobs.tables, queue=queue, owner=owner, limit=1, lease=_LEASE):
                return job, _attempt(connection, jobs, job, events or Events())
    return None


def _attempt(connection: Connection, jobs: Jobs, job: ClaimedJob, events: Events) -> Verdict:
    task = jobs.tasks.get(job.kind)
    if task is None:
        raise AppError(f"job {job.lease.id}: no task of this Jobs is called {job.kind!r}")
    run = Run(job=job, task=task)
    runner = Runner(jobs, source=connection, async_source=connection, events=events)
    ended = _awaited(runner, run) if task.is_async else runner.in_thread(run)
    if ended.written is not None:
        return ended.written
    verdict = ended.verdict or judge(Released(), attempt=job.attempt, max_attempts=job.max_attempts)
    if ended.verdict is None or not settle_within(
        connection, jobs.tables, (job.lease, verdict), retention=jobs.retention
    ):
        raise LeaseLost(f"job {job.lease.id} ({job.kind}): its row was changed while it ran")
    return verdict


def _awaited(runner: Runner, run: Run) -> Ended:
    attempt = runner.in_loop(run)
    try:
        return await_only(attempt)
    except MissingGreenlet:
        attempt.close()
        raise ConfigurationError(
            f"{run.job.kind} is a coroutine: await async_connection.run_sync(run_next, jobs)"
        ) from None
