"""Flask-SQLAlchemy models. `Job` is one of them: a table in your metadata and your migrations."""

from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from sqla_jobs import JobMixin


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)


class Job(JobMixin, db.Model):
    __tablename__ = "background_jobs"


class Order(db.Model):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    item: Mapped[str]


class Receipt(db.Model):
    __tablename__ = "receipts"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    text: Mapped[str]
    order: Mapped[Order] = relationship()


class Activity(db.Model):
    """What happened, for the people in the office."""

    __tablename__ = "activities"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


def note(text: str) -> None:
    """Used by views and by jobs. It knows `db.session` only, as most of an application does."""
    db.session.add(Activity(text=text))
