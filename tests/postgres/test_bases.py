"""JobMixin on every kind of base: mapped, created, enqueued, run, archived, and nothing left to migrate."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

import flask
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    declarative_base,
    declared_attr,
    mapped_column,
    registry,
    relationship,
)
from sqlalchemy.orm.attributes import set_attribute
from sqlmodel import Field, SQLModel
from workers import finished, rows

from sqla_jobs.context import JobContext
from sqla_jobs.errors import ConfigurationError
from sqla_jobs.models import JobMixin
from sqla_jobs.tasks import Jobs, enqueue
from sqla_jobs.worker import Worker


@dataclass
class Made:
    """A Job class and what was made with it."""

    job: type[Any]
    metadata: sa.MetaData
    new: Callable[[type[Any]], Any] = lambda job: job(kind="job", payload={"value": 2})
    columns: dict[str, Any] = field(default_factory=dict)  # for using(columns=...)
    table: str = "jobs"
    schema: str | None = None


def by_attributes(job: type[Any]) -> Any:
    """Dataclasses and SQLModel do not know our columns as arguments, pydantic not even as attributes."""
    made = job()
    set_attribute(made, "kind", "job")
    set_attribute(made, "payload", {"value": 2})
    return made


def declarative() -> Made:
    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        tenant: Mapped[str | None]

    return Made(Job, Base.metadata, columns={"tenant": "acme"})


def dataclasses() -> Made:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        tenant: Mapped[str | None] = mapped_column(default=None)

    return Made(Job, Base.metadata, new=by_attributes, columns={"tenant": "acme"})


def dataclass_without_init() -> Made:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(JobMixin, Base, init=False):
        __tablename__ = "jobs"
        tenant: Mapped[str | None] = mapped_column(default=None)

    return Made(Job, Base.metadata, columns={"tenant": "acme"})


def dataclass_of_one_class() -> Made:
    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, MappedAsDataclass, Base):
        __tablename__ = "jobs"
        tenant: Mapped[str | None] = mapped_column(default=None)

    return Made(Job, Base.metadata, new=by_attributes, columns={"tenant": "acme"})


def decorated_dataclass() -> Made:
    reg = registry()

    @reg.mapped_as_dataclass
    class Job(JobMixin):
        __tablename__ = "jobs"
        tenant: Mapped[str | None] = mapped_column(default=None)

    return Made(Job, reg.metadata, new=by_attributes, columns={"tenant": "acme"})


def function() -> Made:
    base: Any = declarative_base()

    class Job(JobMixin, base):  # type: ignore[misc]
        __tablename__ = "jobs"

    return Made(Job, base.metadata)


def decorated() -> Made:
    reg = registry()

    @reg.mapped
    class Job(JobMixin):
        __tablename__ = "jobs"

    return Made(Job, reg.metadata)


def flask_classic() -> Made:
    db = SQLAlchemy()

    class Job(JobMixin, db.Model):  # type: ignore[name-defined, misc]
        __tablename__ = "jobs"

    return Made(Job, db.metadata)


def flask_model_class() -> Made:
    class Base(DeclarativeBase):
        pass

    db = SQLAlchemy(model_class=Base)

    class Job(JobMixin, db.Model):  # type: ignore[name-defined, misc]
        __tablename__ = "jobs"

    return Made(Job, db.metadata)


def flask_dataclass() -> Made:
    """By the class: a dataclass base as model_class fails inside Flask-SQLAlchemy 3.1 on SQLAlchemy 2.1."""

    class Base(DeclarativeBase):
        pass

    db = SQLAlchemy(model_class=Base)

    class Job(JobMixin, MappedAsDataclass, db.Model):  # type: ignore[name-defined, misc]
        tenant: Mapped[str | None] = mapped_column(default=None)

    return Made(Job, db.metadata, new=by_attributes, columns={"tenant": "acme"}, table="job")


def sqlmodel_metadata() -> Made:
    class Base(DeclarativeBase):
        metadata = sa.MetaData()

    class Root(SQLModel):
        metadata = Base.metadata

    class Job(JobMixin, Base):
        __tablename__ = "jobs"

    class Hero(Root, table=True):
        __tablename__ = "heroes"
        id: int | None = Field(default=None, primary_key=True)

    return Made(Job, Hero.metadata)


def sqlmodel_direct() -> Made:
    class Root(SQLModel):
        metadata = sa.MetaData()

    class Job(JobMixin, Root, table=True):
        __tablename__ = "jobs"
        tenant: str | None = Field(default=None)

    return Made(Job, Root.metadata, new=by_attributes, columns={"tenant": "acme"})


def everything_of_ones_own() -> Made:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(
            schema="app",
            naming_convention={
                "ix": "ix_%(column_0_label)s",
                "uq": "uq_%(table_name)s_%(column_0_name)s",
                "ck": "ck_%(table_name)s_%(constraint_name)s",
                "fk": "fk_%(table_name)s_%(column_0_name)s",
                "pk": "pk_%(table_name)s",
            },
        )
        type_annotation_map = {str: sa.String(50), datetime: sa.DateTime(), int: sa.SmallInteger()}  # noqa: RUF012

    class Tenant(Base):
        __tablename__ = "tenants"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        tenant_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Tenant.id), index=True)
        price: Mapped[Decimal] = mapped_column(server_default="0")
        tenant: Mapped[Tenant | None] = relationship()
        __table_args__ = (
            sa.Index("jobs_by_price", "price"),
            sa.CheckConstraint("price >= 0", name="price"),
            {"comment": "ours"},
        )

    return Made(Job, Base.metadata, columns={"price": Decimal("1.50")}, schema="app")


def through_an_abstract_class() -> Made:
    class Base(DeclarativeBase):
        pass

    class Abstract(JobMixin, Base):
        __abstract__ = True

        @declared_attr.directive
        def __tablename__(cls) -> str:
            return "jobs"

        origin: Mapped[str | None]

    class Job(Abstract):
        pass

    return Made(Job, Base.metadata, columns={"origin": "web"})


def single_table_inheritance() -> Made:
    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        flavour: Mapped[str] = mapped_column(server_default="plain")
        __mapper_args__ = {  # noqa: RUF012
            **JobMixin.__mapper_args__,
            "polymorphic_on": "flavour",
            "polymorphic_identity": "plain",
        }

    class Special(Job):
        __mapper_args__ = {"polymorphic_identity": "special"}  # noqa: RUF012
        sugar: Mapped[int | None]

    return Made(Special, Base.metadata, columns={"sugar": 7})


def second_of_two() -> Made:
    class Base(DeclarativeBase):
        pass

    class Mail(JobMixin, Base):
        __tablename__ = "mail_jobs"

    class Job(JobMixin, Base):
        __tablename__ = "jobs"

    assert Jobs(Mail).tables.archive is not Jobs(Job).tables.archive
    return Made(Job, Base.metadata)


def own_index_and_name_to_quote() -> Made:
    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "Our Jobs"
        __table_args__ = (sa.Index("by_kind", "kind", "created_at"),)

    return Made(Job, Base.metadata, table="Our Jobs")


def same_name_in_two_schemas() -> Made:
    class Base(DeclarativeBase):
        pass

    class Mail(JobMixin, Base):
        __tablename__ = "jobs"

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        __table_args__ = {"schema": "app"}  # noqa: RUF012

    assert Jobs(Mail).tables.archive.schema is None
    return Made(Job, Base.metadata, schema="app")


BASES = [
    declarative, dataclasses, dataclass_without_init, dataclass_of_one_class, decorated_dataclass, function,
    decorated, flask_classic, flask_model_class, flask_dataclass, sqlmodel_metadata, sqlmodel_direct,
    everything_of_ones_own, through_an_abstract_class, single_table_inheritance, second_of_two,
    own_index_and_name_to_quote, same_name_in_two_schemas,
]  # fmt: skip


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(sa.make_url(empty_database_url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA app"))
    yield engine
    engine.dispose()


@pytest.mark.parametrize("make", BASES, ids=lambda make: make.__name__)
async def test_a_job_class_on_this_base_is_a_complete_queue(
    clean: sa.Engine, empty: sa.Engine, empty_database_url: str, make: Callable[[], Made]
) -> None:
    made = make()
    jobs = Jobs(made.job)
    seen: list[tuple[int, Any]] = []

    @jobs.task(name="job")
    def job(ctx: JobContext, value: int) -> None:
        seen.append((value, ctx.session.get(made.job, ctx.id)))

    made.metadata.create_all(empty)
    with Session(empty) as session, session.begin():
        handle = enqueue(session, job.using(columns=made.columns) if made.columns else job, 1)
        session.add(made.new(made.job))
    with Session(empty) as session:
        found = session.get(made.job, handle.id)
        assert found is not None
        assert (found.kind, found.payload, found.status) == ("job", {"value": 1}, "ready")
    code = await finished(Worker(jobs, url=empty_database_url, mode="drain"))

    schema = made.schema or "public"
    archive, name = f'{schema}."{made.table}_archive"', f'{schema}."{made.table}"'
    assert code == 0
    assert sorted(value for value, _ in seen) == [1, 2]
    assert all(isinstance(row, made.job) for _, row in seen)
    names = ", ".join(made.columns) or "'x'"
    archived = rows(empty, f"SELECT status, {names} FROM {archive} WHERE id = {handle.id}")
    assert archived == [("done", *(made.columns.values() or ["x"]))]
    assert rows(empty, f"SELECT count(*) FROM {name}") == [(0,)]
    wanted = catalogue(clean, "public", "background_jobs")
    assert {what for what, *_ in wanted} == set(CATALOGUE)
    assert wanted - catalogue(empty, schema, made.table) == set()
    with empty.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_schemas": True, "compare_server_default": True}
        )
        assert compare_metadata(context, made.metadata) == []


CATALOGUE = {
    "column": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attidentity, a.attnotnull,
            pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE a.attnum > 0 AND c.relkind = 'r' {here}""",
    "index": """
        SELECT c.relname, i.relname, substring(pg_get_indexdef(i.oid) FROM 'USING .*'), x.indisunique
        FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class c ON c.oid = x.indrelid
        WHERE i.relname LIKE '%\\_idx' {here}""",
    "constraint": """
        SELECT c.relname, pg_get_constraintdef(n.oid), n.contype::text
        FROM pg_constraint n JOIN pg_class c ON c.oid = n.conrelid WHERE n.contype IN ('p', 'c') {here}""",
    "trigger": """
        SELECT c.relname, t.tgname, t.tgtype, t.tgenabled, t.tgnewtable, length(p.prosrc) > 100
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc p ON p.oid = t.tgfoid
        WHERE NOT t.tgisinternal {here}""",
    "storage": "SELECT c.relname, unnest(c.reloptions) FROM pg_class c WHERE c.relkind = 'r' {here}",
}


def catalogue(engine: sa.Engine, schema: str, table: str) -> set[tuple[str, ...]]:
    """What PostgreSQL knows of a jobs table and its satellites, under names without the table's own."""
    here = "AND c.relnamespace = to_regnamespace(:schema)"
    return {
        (what, *[str(each).removeprefix(table) for each in (relation, *facts)])
        for what, statement in CATALOGUE.items()
        for relation, *facts in rows(engine, statement.format(here=here), schema=schema)
        if relation == table or relation.startswith(f"{table}_")
    }


def test_flask_sqlalchemys_own_session_takes_part(empty: sa.Engine) -> None:
    db = SQLAlchemy()

    class Job(JobMixin, db.Model):  # type: ignore[name-defined, misc]
        __tablename__ = "jobs"

    jobs = Jobs(Job)

    @jobs.task(name="job")
    def job() -> None: ...

    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = empty.url.render_as_string(hide_password=False)
    db.init_app(app)
    with app.app_context():
        db.create_all()
        kept = enqueue(db.session, job)
        db.session.commit()
        enqueue(db.session, job)
        db.session.rollback()
        enqueue(db.session, job)
    with app.app_context():  # the teardown has dropped the last one
        assert rows(empty, "SELECT id FROM jobs") == [(kept.id,)]
        db.engine.dispose()


# -- what cannot be


def test_a_dataclass_base_makes_an_init_of_the_users_fields_in_their_order() -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        tenant: Mapped[str] = mapped_column(server_default="acme")
        note: Mapped[str | None] = mapped_column(default=None)

    made: type[Any] = Job
    job = made("acme", "hello")

    assert (job.tenant, job.note, job.kind) == ("acme", "hello", None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kind'"):
        made(kind="noop", tenant="acme")


def test_what_sqlmodels_init_ignores_is_refused_by_the_database(empty: sa.Engine) -> None:
    made = sqlmodel_direct()
    made.metadata.create_all(empty)

    with Session(empty) as session:
        session.add(made.job(kind="job", payload={"value": 2}))
        with pytest.raises(IntegrityError, match='"kind"'):
            session.flush()


def test_a_column_without_a_default_that_must_not_be_null_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"column 'tenant' of Job .* server_default"):

        class Job(JobMixin, Base):
            __tablename__ = "jobs"
            tenant: Mapped[str]


def test_mapper_arguments_of_the_users_that_lose_our_key_are_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"JobMixin.__mapper_args__"):

        class Job(JobMixin, Base):
            __tablename__ = "jobs"
            flavour: Mapped[str] = mapped_column(server_default="plain")
            __mapper_args__ = {"polymorphic_on": "flavour"}  # noqa: RUF012


def test_a_key_of_the_users_own_type_is_no_column_of_ours() -> None:
    """A user's column under one of our names replaces ours, which every statement relies on."""

    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="'priority' of Job is a column of JobMixin"):

        class Job(JobMixin, Base):
            __tablename__ = "jobs"
            priority: Mapped[str] = mapped_column(server_default="low")  # type: ignore[assignment]


def test_a_job_class_may_have_an_init_of_its_own_and_hybrids(empty: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        token: Mapped[uuid.UUID] = mapped_column(default=uuid.uuid4, server_default=sa.func.gen_random_uuid())

        def __init__(self, *, must: str) -> None:
            self.kind = must

    jobs = Jobs(Job)

    @jobs.task(name="job")
    def job() -> None: ...

    Base.metadata.create_all(empty)
    with Session(empty) as session, session.begin():
        enqueue(session, job)
        session.add(Job(must="plain"))

    assert rows(empty, "SELECT kind FROM jobs ORDER BY id") == [("job",), ("plain",)]
