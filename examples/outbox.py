"""A plain script: orders and their jobs in one transaction, a worker in the same process, the result checked.

Run it with `python examples/outbox.py`. It needs `sqla_jobs[embedded]` and nothing else.
"""

import asyncio

from sqlalchemy import ForeignKey, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqla_jobs import JobContext, JobMixin, Jobs, JobStatus, Worker, enqueue
from sqla_jobs.embedded import EmbeddedPostgres


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
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))


jobs = Jobs(Job)


@jobs.task(queue="mail")
def send_receipt(ctx: JobContext, order: Order) -> None:
    print(f"to {order.customer}: thank you for order {order.id}")
    ctx.session.add(Receipt(order_id=order.id))


def main() -> None:
    with EmbeddedPostgres() as server:
        engine = create_engine(server.url())
        Base.metadata.create_all(engine)

        with Session(engine) as session, session.begin():
            session.add(order := Order(customer="Ada"))
            kept = enqueue(session, send_receipt, order)

        with Session(engine) as session:
            session.add(order := Order(customer="nobody"))
            enqueue(session, send_receipt, order)
            session.rollback()  # no order, and no job

        code = asyncio.run(Worker(jobs, engine=engine, mode="drain").run())

        with Session(engine) as session:
            record = jobs.find(session, kept.id)
            receipts = session.scalar(select(func.count()).select_from(Receipt))
        engine.dispose()
    assert code == 0
    assert record is not None
    assert record.status is JobStatus.DONE
    assert receipts == 1
    print(f"job {record.id}: {record.status} after {record.attempts} attempt; receipts: {receipts}")


if __name__ == "__main__":
    main()
