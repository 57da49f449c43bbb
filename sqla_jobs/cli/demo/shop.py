"""The shop of `sqla-jobs demo`: three models, one task. An application looks like this.

Read it from top to bottom; it knows nothing of the demo around it. Only what a real shop would not do is
explained: the receipts table has no unique key, so that a second receipt could be seen.
"""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqla_jobs import JobContext, JobMixin, Jobs, Retry, enqueue

__all__ = ["Base", "Job", "Order", "Receipt", "jobs", "place_order", "receipt_file", "render", "send_receipt"]


class Base(DeclarativeBase):
    """Yours: your naming convention, your schema, your Alembic history."""


class Job(JobMixin, Base):
    """The jobs, in a table of your metadata; archive and other satellites come with it."""

    __tablename__ = "background_jobs"


class Order(Base):
    """What a customer bought."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    item: Mapped[str]
    cents: Mapped[int]


class Receipt(Base):
    """That a receipt was sent. Neither unique nor a foreign key: they would hide what the demo looks for."""

    __tablename__ = "receipts"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    text: Mapped[str]


jobs = Jobs(Job)


@jobs.task(queue="mail", retry=Retry(delay=timedelta(milliseconds=200)))
def send_receipt(ctx: JobContext, order: Order) -> None:
    """Runs in a worker. `order` is loaded there, by the primary key that travelled."""
    text = render(order)
    deliver(text, receipt_file(order.id))  # outside the database: at least once
    ctx.session.add(Receipt(order_id=order.id, text=text))  # exactly once: commits with the job's completion


def place_order(session: Session, order: Order) -> None:
    """Runs in a request, in its transaction: commit, and the receipt is sent; roll back, and it never was."""
    session.add(order)
    enqueue(session, send_receipt, order)


def render(order: Order) -> str:
    """The same text in every attempt."""
    price = f"{order.cents // 100}.{order.cents % 100:02}"
    head = f"Receipt for order {order.id}"
    return f"{head}\n{'=' * len(head)}\n\nTo    {order.customer}\n\n1 x   {order.item:<30}{price:>10} EUR\n"


def deliver(text: str, file: Path) -> None:
    """Stands for a mail server: takes 20 ms to answer, and can be asked twice.

    Written beside and renamed: whenever the worker is killed, the file is whole or not there.
    """
    time.sleep(0.02)
    unfinished = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(file)


def receipt_file(order_id: int) -> Path:
    """Where an order's receipt goes."""
    return Path(os.environ["SHOP_RECEIPTS"]) / f"{order_id:06}.txt"
