"""The application that the tests use: a shop with orders, receipts, and jobs that write them."""

import asyncio
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

from sqlalchemy import ForeignKey, text
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


#: The table that the ledger's tests make for themselves.
_ENTRY = text("INSERT INTO ledger (job, attempt, pid) VALUES (:job, :attempt, :pid)")
_PATIENT = Retry(max_attempts=500, delay=timedelta(seconds=0.2), factor=1)


@jobs.task(queue="files", retry=_PATIENT)
def enter(ctx: JobContext, path: str, seconds: float, first: bool = False) -> None:
    """Write a row of the ledger through ctx.session; `first`: before the wait, and hold the session in it."""
    _append(path, f"start {ctx.id} {os.getpid()} {ctx.attempt}")
    entry = {"job": ctx.id, "attempt": ctx.attempt, "pid": os.getpid()}
    try:
        if first:
            ctx.session.execute(_ENTRY, entry)
        threading.Event().wait(seconds)
        if not first:
            ctx.session.execute(_ENTRY, entry)
    finally:
        _append(path, f"end {ctx.id} {os.getpid()} {ctx.attempt}")


@jobs.task(queue="files", retry=_PATIENT)
async def enter_async(ctx: AsyncJobContext, path: str, seconds: float, first: bool = False) -> None:
    """The same in the loop."""
    _append(path, f"start {ctx.id} {os.getpid()} {ctx.attempt}")
    entry = {"job": ctx.id, "attempt": ctx.attempt, "pid": os.getpid()}
    try:
        if first:
            await ctx.session.execute(_ENTRY, entry)
        await asyncio.sleep(seconds)
        if not first:
            await ctx.session.execute(_ENTRY, entry)
    finally:
        _append(path, f"end {ctx.id} {os.getpid()} {ctx.attempt}")


@jobs.task(queue="files", retry=Retry(delay=timedelta(0)))
def hold_and_fail(ctx: JobContext, path: str, line: str, seconds: float) -> None:
    """Start, stay, and raise."""
    _append(path, f"start {line} {os.getpid()} {ctx.attempt}")
    threading.Event().wait(seconds)
    raise ValueError(line)


@jobs.task(queue="files", retry=Retry(max_attempts=3, delay=timedelta(0)))
def kill_worker(ctx: JobContext, path: str) -> None:
    """Take the process along."""
    _append(path, f"start killer {os.getpid()} {ctx.attempt}")
    os.kill(os.getpid(), signal.SIGKILL)


@jobs.task(queue="files", retry=Retry(max_attempts=1))
def query_for(ctx: JobContext, seconds: float) -> None:
    """A statement of the handler's own that takes its time."""
    ctx.session.execute(text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})


@jobs.task(queue="files", retry=Retry(max_attempts=1))
async def exit_in_a_child() -> None:
    """A library's task of its own that calls sys.exit."""

    async def child() -> None:
        raise SystemExit(3)

    await asyncio.gather(child())


def _append(path: str, line: str) -> None:
    # one write of one line in append mode is not torn
    with Path(path).open("a", buffering=1) as file:
        file.write(line + "\n")


def put(needed: str) -> Jobs:
    """Not a factory: it wants an argument."""
    raise AssertionError(needed)
