"""The models. `Job` is one of them: a table in your metadata and your migrations."""

from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from sqla_jobs import JobMixin


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "background_jobs"


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    # deferred: PostgreSQL looks whether there is such a customer at COMMIT, and not before
    customer_id: Mapped[int] = mapped_column(ForeignKey(Customer.id, deferrable=True, initially="DEFERRED"))
    item: Mapped[str]
    customer: Mapped[Customer] = relationship()


class Receipt(Base):
    __tablename__ = "receipts"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    text: Mapped[str]
