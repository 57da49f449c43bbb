"""Calls of tasks into the caller's transaction: `enqueue` and its sisters."""

from collections.abc import Iterable
from typing import ParamSpec

from sqlalchemy.sql.expression import SelectBase

from sqla_jobs import outbox
from sqla_jobs.core.call import Call
from sqla_jobs.errors import ConfigurationError
from sqla_jobs.outbox import AnySession, Enqueued, EnqueuedSelect
from sqla_jobs.tasks.task import RemoteTask, Task

__all__ = ["enqueue", "enqueue_many", "enqueue_select"]

P = ParamSpec("P")


def enqueue(session: AnySession, task: Task[P], /, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
    """Let this call run as a job when, and only when, the session's transaction commits.

    A plain call for every kind of session, also an AsyncSession: it only touches the session object.
    Arguments that cannot travel are refused here, before anything is written, and the transaction stays
    usable. A mapped instance travels as its identity; one that is still pending gets it at flush.

    Raises `ArgumentError` (the call does not fit the signature), `PayloadError` (a value cannot travel;
    says which), `ConfigurationError` (not a session, not a task).
    """
    _check(session, task)
    return outbox.put(session, task.call(*args, **kwargs))


def enqueue_many(session: AnySession, calls: Iterable[Call], /) -> list[Enqueued]:
    """Let many calls run as jobs: `enqueue_many(session, [task.call(order) for order in orders])`.

    The handles are in the order of the calls, each with its own outcome; one that meets an equal unique
    key does not keep the others. One statement writes thousands, in the session's flush. Otherwise as
    `enqueue`.

    Raises `ConfigurationError` for an element that is not a call, with its index.
    """
    given = list(calls)
    for index, call in enumerate(given):
        if not isinstance(call, Call) or call.model is None:
            raise ConfigurationError(
                f"calls[{index}] is a {type(call).__name__}, not a call of a task: write task.call(arguments)"
            )
    return outbox.put_many(session, given)


def enqueue_select(session: AnySession, task: Task[...], statement: SelectBase, /) -> EnqueuedSelect:
    """Let every row of a select become a job.

    `enqueue_select(session, send_receipt, select(Order.id.label("order")).where(...))`: the columns are
    named like the task's parameters and become its arguments inside PostgreSQL; an entity is its primary
    key. Runs in the session's next flush, after everything else in it. The options of `task.using(...)`
    hold for every row; a unique key cannot be one of them.

    Raises `ArgumentError` when the columns do not fit the parameters, `ConfigurationError` for something else
    than a select.
    """
    _check(session, task)
    if not isinstance(statement, SelectBase):
        raise ConfigurationError(f"enqueue_select takes a select(), got {type(statement).__name__}")
    if task.unique_key is not None:
        raise ConfigurationError(f"task {task.kind} has a unique key, which many rows cannot share")
    parameters = None if isinstance(task, RemoteTask) else task.parameters
    return outbox.put_select(session, task.kind, task.options, task.jobs.Job, statement, parameters)


def _check(session: object, task: object) -> None:
    if isinstance(session, Task):  # whoever checks no types
        raise ConfigurationError("the session comes first: enqueue(session, task, arguments)")
    if not isinstance(task, Task):
        name = getattr(task, "__qualname__", type(task).__name__)
        raise ConfigurationError(
            f"{name} is not a task: decorate the function with @jobs.task, and pass it without calling it"
        )
