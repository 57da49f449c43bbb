"""The application that the tests use: a shop with orders, receipts, and jobs that write them."""

import asyncio
import os
import threading
from datetime import timedelta
from pathlib import Path

from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.retry import Retry
from sqla_jobs.models import JobMixin
from sqla_jobs.tasks import Jobs


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "background_jobs"


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


class Receipt(Base):
    __tablename__ = "receipts"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    text: Mapped[str]
    order: Mapped[Order] = relationship()


class Entry(Base):
    """One effect of one job, written in its own transaction: exactly one each, or something is wrong."""

    __tablename__ = "ledger"

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    attempt: Mapped[int]
    pid: Mapped[int]


jobs = Jobs(Job)

#: What handlers did in this process, in order.
calls: list[object] = []


@jobs.task
async def note(value: int) -> None:
    calls.append(value)


@jobs.task
def note_in_thread(value: int) -> None:
    calls.append((value, threading.current_thread().name))


@jobs.task(queue="mail")
def send_receipt(ctx: JobContext, order: Order, copy_to: str | None = None) -> None:
    ctx.session.add(Receipt(order=order, text=f"to {order.customer}, copy to {copy_to}"))


@jobs.task(queue="mail")
async def send_receipt_async(ctx: AsyncJobContext, order: Order) -> None:
    ctx.session.add(Receipt(order=order, text=f"to {order.customer}, async"))


@jobs.task(retry=Retry(max_attempts=3, delay=timedelta(0)))
def fail(message: str) -> None:
    calls.append(message)
    raise ValueError(message)


@jobs.task(queue="files", retry=Retry(delay=timedelta(0)))
def append_line(ctx: JobContext, path: str, line: str) -> None:
    """Leave a trace that outlives the process: started before, finished after."""
    _append(path, f"start {line} {os.getpid()} {ctx.attempt}")
    _append(path, f"end {line} {os.getpid()} {ctx.attempt}")


@jobs.task(queue="files", retry=Retry(delay=timedelta(0)))
def hold(ctx: JobContext, path: str, line: str, seconds: float) -> None:
    """Start, then stay until the time is over or the attempt is cancelled."""
    _append(path, f"start {line} {os.getpid()} {ctx.attempt}")
    threading.Event().wait(seconds)
    _append(path, f"end {line} {os.getpid()} {ctx.attempt}")


@jobs.task(queue="files", retry=Retry(delay=timedelta(0)))
async def hold_async(ctx: AsyncJobContext, path: str, line: str, seconds: float) -> None:
    """The same in the loop."""
    _append(path, f"start {line} {os.getpid()} {ctx.attempt}")
    await asyncio.wait_for(asyncio.Event().wait(), seconds)


@jobs.task(queue="files", retry=Retry(max_attempts=1))
async def exit_in_a_child() -> None:
    """A library's task of its own that calls sys.exit."""

    async def child() -> None:
        raise SystemExit(3)

    await asyncio.gather(child())


_PATIENT = Retry(max_attempts=100, delay=timedelta(seconds=0.3), factor=1)


@jobs.task(queue="ledger", retry=_PATIENT)
def charge(ctx: JobContext, number: int, seconds: float) -> None:
    """Work for a while, then write the one entry."""
    threading.Event().wait(seconds)
    ctx.session.add(Entry(number=number, attempt=ctx.attempt, pid=os.getpid()))


@jobs.task(queue="ledger", retry=_PATIENT)
async def charge_async(ctx: AsyncJobContext, number: int, seconds: float) -> None:
    """The same in the loop."""
    await asyncio.to_thread(threading.Event().wait, seconds)
    ctx.session.add(Entry(number=number, attempt=ctx.attempt, pid=os.getpid()))


@jobs.task(queue="waste", retry=Retry(max_attempts=1))
def waste() -> None:
    """Fail with five megabytes in a local."""
    local = bytearray(5_000_000)
    raise ValueError(len(local))


@jobs.task(queue="waste", retry=Retry(max_attempts=1))
async def waste_async() -> None:
    """The same in the loop."""
    local = bytearray(5_000_000)
    raise ValueError(len(local))


def _append(path: str, line: str) -> None:
    # one write of one line in append mode is not torn
    with Path(path).open("a", buffering=1) as file:
        file.write(line + "\n")


def put(needed: str) -> Jobs:
    """Not a factory: it wants an argument."""
    raise AssertionError(needed)
