"""Calls that are right: no type checker may find anything here. Checked, never run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

from sqlalchemy import select, union_all
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.call import Call
from sqla_jobs.core.retry import Retry
from sqla_jobs.models import JobMixin
from sqla_jobs.outbox import Enqueued
from sqla_jobs.store.find import JobRecord
from sqla_jobs.tasks import Jobs, Task, enqueue, enqueue_many, enqueue_select
from sqla_jobs.worker import Worker


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


@dataclass
class Address:
    city: str


class OwnSession(Session):
    pass


class OwnAsyncSession(AsyncSession):
    pass


jobs = Jobs(Job)
ready_made = Jobs(imports=["app.more_tasks"])


@jobs.task
def bare(value: int) -> str:
    return str(value)


@jobs.task(name="send", aliases=["old"], queue="mail", priority=1, retry=Retry(max_attempts=8))
def send(ctx: JobContext, order: Order, copy_to: str | None = None) -> int:
    ctx.session.add(order)
    ctx.log.info("attempt %d", ctx.attempt)
    return order.id


@jobs.task
async def send_async(ctx: AsyncJobContext, order: Order, *, address: Address) -> bool:
    await ctx.session.flush()
    return ctx.cancelled


@jobs.task()
async def nothing() -> None: ...


@ready_made.task
def names_of_ours(ctx: JobContext[Session], session: str, task: UUID, self: int) -> None: ...


def enqueueing(
    session: Session,
    async_session: AsyncSession,
    scoped: scoped_session[Session],
    async_scoped: async_scoped_session[AsyncSession],
    order: Order,
) -> None:
    assert_type(enqueue(session, bare, 1), Enqueued)
    enqueue(session, bare, value=1)
    enqueue(session, send, order)
    enqueue(session, send, order, "a@example.org")
    enqueue(session, send, order=order, copy_to=None)
    enqueue(session, send_async, order, address=Address("Paris"))
    enqueue(session, nothing)
    enqueue(session, names_of_ours, session="s", task=UUID(int=1), self=3)
    enqueue(async_session, bare, 1)
    enqueue(scoped, bare, 1)
    enqueue(async_scoped, bare, 1)


def sessions_of_their_own(
    one: sessionmaker[OwnSession],
    other: async_sessionmaker[OwnAsyncSession],
    scoped: scoped_session[OwnSession],
    async_scoped: async_scoped_session[OwnAsyncSession],
) -> None:
    enqueue(one(), bare, 1)
    enqueue(other(), bare, 1)
    enqueue(scoped, bare, 1)
    enqueue(async_scoped, bare, 1)


def options(session: Session, context: JobContext, order: Order) -> None:
    later = send.using(queue="slow", priority=2, delay=timedelta(minutes=5), tags=["a"])
    enqueue(session, later, order, copy_to="a@example.org")
    enqueue(session, bare.using(run_at=datetime.now(UTC), expires=timedelta(days=1), max_attempts=3), 1)
    assert_type(later(context, order), int)
    assert_type(send.call(order), Call)
    assert_type(send.kind, str)


def direct(context: JobContext, order: Order) -> None:
    assert_type(bare(1), str)
    assert_type(bare(value=1), str)
    assert_type(send(context, order), int)
    assert_type(send(context, order=order, copy_to="x"), int)
    assert_type(context.session, Session)


async def direct_async(context: AsyncJobContext, order: Order) -> None:
    assert_type(await send_async(context, order, address=Address("Paris")), bool)
    assert_type(context.session, AsyncSession)
    await nothing()


def generic(session: Session, tasks: Sequence[Task[[int]]]) -> None:
    for task in tasks:
        enqueue(session, task, 1)


generic_tasks: list[Task[[int]]] = [bare]


async def found(session: Session, async_session: AsyncSession, handle: Enqueued) -> None:
    assert_type(jobs.find(session, handle.id), JobRecord | None)
    assert_type(await async_session.run_sync(jobs.find, handle.id), JobRecord | None)


def many(session: Session, async_session: AsyncSession, order: Order) -> None:
    calls = [bare.call(1), send.call(order), send.using(priority=1).call(order, copy_to=None)]
    assert_type(enqueue_many(session, calls), list[Enqueued])
    enqueue_many(async_session, (bare.call(number) for number in range(3)))
    assert_type(enqueue_select(session, send, select(Order.id.label("order"))).count, int)
    enqueue_select(async_session, bare, union_all(select(Order.id.label("value"))))


def keys_and_columns(session: Session, order: Order) -> None:
    handle = enqueue(session, send.using(unique_key="k", columns={"tenant": "acme"}), order)
    assert_type(handle.require_created().id, int)
    assert_type(handle.created, bool)
    enqueue(session, send.using(unique_key=lambda order: f"order {order.id}"), order)


def elsewhere(session: Session, order: Order) -> None:
    remote = jobs.remote("app.tasks.send", queue="mail", unique_key="k")
    enqueue(session, remote, order=order, days=3)
    enqueue_many(session, [remote.call(order=order)])


@jobs.task(timeout=timedelta(seconds=30), store_result=True, unique_key=lambda value: str(value))
def limited(value: int) -> dict[str, int]:
    return {"value": value}


@jobs.around
@contextmanager
def surrounded(ctx: JobContext[Any]) -> Iterator[None]:
    ctx.log.info("begins")
    yield


async def worked(session: Session) -> None:
    worker = Worker(jobs, url="postgresql://x/y", threads=2, mode="once", max_jobs=5, max_memory=2**30)
    await worker.check()
    worker.quiet()
    assert_type(await worker.run(), int)
    assert_type(limited(1), dict[str, int])


def read(session: Session) -> None:
    """The user's class knows the types of our columns; `jobs.Job` is what they have in common."""
    assert_type(session.get(Job, 1), Job | None)
    assert_type(session.get(jobs.Job, 1), JobMixin | None)
    assert_type(session.scalars(select(Job.kind)).all(), Sequence[str])
    assert_type(session.get_one(Job, 1).attempts, int)
