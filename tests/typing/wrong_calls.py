# type: ignore  # noqa: PGH003 - not for the test, which takes this line away
"""Calls that are wrong: every line marked `error:` has one, no other line has. Checked, never run."""

from datetime import timedelta

from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Session

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.retry import Retry
from sqla_jobs.tasks import Jobs, enqueue, enqueue_many, enqueue_select
from sqla_jobs.worker import Worker

jobs = Jobs()


class Base(DeclarativeBase):
    pass


class Order(Base):
    pass


@jobs.task
def bare(value: int) -> str:
    return str(value)


@jobs.task(queue="mail")
def send(ctx: JobContext, order: Order, copy_to: str | None = None) -> int:
    return len(copy_to or "")


@jobs.task
async def send_async(ctx: AsyncJobContext, order: Order, *, address: str) -> bool:
    return ctx.cancelled


@jobs.task
async def nothing() -> None: ...


class NotAJob:
    pass


def plain(value: int) -> None: ...


def enqueueing(session: Session, engine: Engine, context: JobContext, order: Order) -> None:
    enqueue(session, send)  # error: missing argument
    enqueue(session, send, copy_to="x")  # error: missing argument, another given
    enqueue(session, send, 7)  # error: wrong type
    enqueue(session, send, order, 7)  # error: wrong type of a second argument
    enqueue(session, send, order=7)  # error: wrong type by name
    enqueue(session, bare, "1")  # error: wrong type of a task without context
    enqueue(session, send, order, copyto="x")  # error: misspelt keyword
    enqueue(session, bare, 1, 2)  # error: too many
    enqueue(session, nothing, 1)  # error: too many for none
    enqueue(session, send, order, order=order)  # error: given twice
    enqueue(session, send_async, order)  # error: missing keyword of an async task
    enqueue(engine, bare, 1)  # error: not a session
    enqueue(Session, bare, 1)  # error: the class of a session
    enqueue(session, plain, 1)  # error: a plain function
    enqueue(session, "send", order)  # error: the name of a task
    enqueue(session, send, context, order)  # error: context passed to enqueue
    enqueue(session, send, order).id.bit_length()


async def coroutines(session: AsyncSession, order: Order) -> None:
    await enqueue(session, send, order)  # error: nothing to await


def options(session: Session, order: Order) -> None:
    later = send.using(delay=timedelta(minutes=5))
    enqueue(session, later, order)
    enqueue(session, later, 7)  # error: wrong type after using
    enqueue(session, later)  # error: missing argument after using
    send.using(delay=5)  # error: wrong type of an option
    send.using(dealy=timedelta(1))  # error: misspelt option
    send.call()  # error: missing argument of a call


def direct(context: JobContext, async_context: AsyncJobContext, order: Order) -> None:
    send(context, order)
    send(order)  # error: direct call without a context
    send(async_context, order)  # error: direct call with the other context
    bare("1")  # error: direct call with a wrong type
    nothing(1)  # error: direct call with too many


def results(context: JobContext, order: Order) -> str:
    return send(context, order)  # error: the wrong result


def sessions(context: JobContext, async_context: AsyncJobContext) -> None:
    context.session.commit().bit_length()  # error: a sync session is awaited by nobody
    async_context.session.query(Order)  # error: an AsyncSession has no query


Jobs(NotAJob)  # error: not a Job class
Jobs().task(queue=1)  # error: wrong type of a task option
Jobs().task(retry=8)  # error: a number is no Retry
Jobs().task(retry=Retry(max_attempts=8))


def many(session: Session, order: Order) -> None:
    enqueue_many(session, [send.call(order)])
    enqueue_many(session, [send])  # error: a task is no call
    enqueue_many(session, [send.call()])  # error: missing argument in a call of many
    enqueue_many(session, send, [order])  # error: calls are made by the task
    enqueue_select(session, send, "SELECT 1")  # error: no select
    enqueue_select(session, plain, select())  # error: no task
    send.using(unique_key=7)  # error: a number is no key
    send.using(unique_key="k", on_conflict="replace")  # error: not there yet
    send.using(columns=["tenant"])  # error: no mapping
    Jobs().remote(7)  # error: a number is no kind
    Jobs().task(timeout=30)  # error: seconds are no time limit
    Jobs().around("name")  # error: no function


Worker(Jobs(), url="postgresql://x/y", mode="forever")  # error: no such mode
