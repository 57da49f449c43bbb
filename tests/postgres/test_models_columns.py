"""Columns of the user's on a Job class: all pass through every statement, or are refused at mapping."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.operations.ops import ModifyTableOps
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    declared_attr,
    mapped_column,
    registry,
    relationship,
    synonym,
)
from sqlalchemy.sql import visitors
from steps import KEEP, LEASE, autocommit, run
from workers import rows

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import DONE, Aborted, Lost, Raised, Returned, judge
from sqla_jobs.core.retention import Retention
from sqla_jobs.errors import ConfigurationError
from sqla_jobs.models import _TAKEN, JobMixin, Tables, own_columns, tables_of
from sqla_jobs.store.archive import purge
from sqla_jobs.store.claim import claim, next_due_in, release_unknown
from sqla_jobs.store.find import find
from sqla_jobs.store.lease import cancel_requested, prolong
from sqla_jobs.store.rescue import cancel_expired, expired_leases
from sqla_jobs.store.settle import settle, settle_expired, settle_within
from sqla_jobs.tasks import Jobs, enqueue, enqueue_many, enqueue_select


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(sa.make_url(empty_database_url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def job_class(**attributes: Any) -> tuple[type[Any], sa.MetaData]:
    """A Job class with these in its body, on a base of its own."""

    class Base(DeclarativeBase):
        pass

    return type("Job", (JobMixin, Base), {"__tablename__": "jobs", **attributes}), Base.metadata


# -- names

SECOND = timedelta(seconds=1)


def put(engine: sa.Engine, model: type[Any], names: list[str]) -> None:
    """Ten jobs, by every way that has a statement of its own; those by `columns` say "mine" everywhere."""
    jobs = Jobs(model)

    @jobs.task(name="plain")
    def plain(number: int) -> None: ...

    @jobs.task(name="stays")
    def stays() -> None: ...

    mine = plain.using(columns=dict.fromkeys(names, "mine"))
    numbers = sa.select(sa.literal_column("7", sa.Integer).label("number"))
    with Session(engine) as session, session.begin():
        enqueue(session, plain, 1)
        enqueue(session, plain.using(unique_key="a"), 2)
        enqueue_many(session, [plain.call(3), plain.call(4)])
        enqueue_select(session, plain, numbers)
        enqueue(session, mine, 5)
        enqueue(session, mine.using(unique_key="b"), 6)
        enqueue(session, mine.using(unique_key="b"), 6)
        enqueue_select(session, mine, numbers)
        enqueue(session, stays)
        enqueue(session, plain.using(expires=timedelta(microseconds=1)), 8)


def take(connection: sa.Connection, tables: Tables, limit: int = 1) -> list[Lease]:
    """Claim so many; "stays" comes last."""
    found = claim(connection, tables, queue="default", owner="A", limit=limit, lease=LEASE)
    return [each.lease for each in sorted(found, key=lambda job: job.kind)]


def live(connection: sa.Connection, tables: Tables) -> None:
    """Every statement of a job's life after enqueue, on the ten jobs."""
    run(connection, "ALTER TABLE jobs_archive ADD CHECK (kind <> 'stays')")
    assert len(cancel_expired(connection, tables, queue="default", retention=KEEP).cancelled) == 1
    leases = take(connection, tables, limit=9)
    assert len(leases) == 9
    nobodys = Lease("default", 4711, 1, "A")
    kept = prolong(connection, tables, [*leases, nobodys], lease=LEASE)
    assert (len(kept.kept), len(kept.lost)) == (9, 1)
    assert cancel_requested(connection, tables, leases) == []

    again = judge(Raised("no", timedelta(0)), attempt=1, max_attempts=20)
    ends = [
        judge(Returned('"yes"'), attempt=1, max_attempts=20),
        judge(Aborted("no"), attempt=1, max_attempts=20),
        judge(Raised("no", None), attempt=1, max_attempts=20),
        again,
        again,
        again,
    ]
    settled = settle(connection, tables, list(zip(leases, ends, strict=False)), retention=KEEP)
    assert len(settled.written) == 6
    run(connection, "BEGIN")  # a handler's transaction
    assert settle_within(connection, tables, (leases[6], DONE), retention=KEEP)
    run(connection, "COMMIT")
    settled = settle(connection, tables, [(lease, DONE) for lease in leases[7:]], retention=KEEP)
    assert (len(settled.written), len(settled.kept)) == (2, 1)
    assert len(settle(connection, tables, [(nobodys, DONE)], retention=KEEP).stale) == 1

    [lease] = take(connection, tables)
    run(connection, "UPDATE jobs SET locked_until = '2020-01-01' WHERE status = 'running'")
    [late] = expired_leases(connection, tables, queue="default")
    lost = judge(Lost("A", timedelta(0)), attempt=2, max_attempts=20)
    assert len(settle_expired(connection, tables, [(late.lease, lost)], retention=KEEP).written) == 1
    assert len(take(connection, tables, limit=2)) == 2
    assert release_unknown(connection, tables, queue="default", owner="A", known=[]) == 2
    assert next_due_in(connection, tables, queue="default") is None
    assert find(connection, tables, lease.id) is not None
    purge(connection, tables, retention=Retention(done=100 * SECOND, failed=100 * SECOND))


def names_in(statement: Any) -> set[str]:
    """Every name that a statement gives: parameters, labels, columns of what is no table."""
    found = set()
    for element in visitors.iterate(statement):
        if isinstance(element, (sa.BindParameter, sa.Label)):
            found.add(element.key)
        elif isinstance(element, sa.ColumnClause) and element.table is None:
            found.add(element.name)
    return {str(name) for name in found if name and str(name).isidentifier()}


@pytest.fixture
def names(empty: sa.Engine) -> set[str]:
    """All names in all statements, heard while a Job class without columns of its own lives through them."""
    model, metadata = job_class()
    heard: set[str] = set()
    with empty.begin() as connection:
        metadata.create_all(connection)
    hear: Callable[..., None] = lambda *given: heard.update(names_in(given[1]), *given[2], given[3])  # noqa: E731
    sa.event.listen(empty, "before_execute", hear)

    put(empty, model, [])
    with autocommit(empty) as connection:
        live(connection, tables_of(model))

    sa.event.remove(empty, "before_execute", hear)
    metadata.drop_all(empty)
    return heard - own_columns() - {"tableoid"}  # which PostgreSQL itself refuses


def test_a_column_by_any_other_name_than_those_taken_comes_through_untouched(
    empty: sa.Engine, names: set[str]
) -> None:
    free = sorted(name for name in names - _TAKEN if not name.startswith("its_"))
    model, metadata = job_class(**{name: mapped_column(sa.Text) for name in free})
    metadata.create_all(empty)

    put(empty, model, free)
    with autocommit(empty) as connection:
        before = values(connection, free)
        live(connection, tables_of(model))

        assert len(free) > 20
        assert values(connection, free) == before


def values(connection: sa.Connection, names: list[str]) -> list[tuple[Any, ...]]:
    """id and all columns of the user's, wherever the job is now."""
    quoted = ", ".join(f'"{name}"' for name in names)
    statement = f"SELECT id, {quoted} FROM jobs UNION ALL SELECT id, {quoted} FROM jobs_archive ORDER BY 1"
    found = rows(connection, statement)
    assert {value for row in found for value in row[1:]} == {None, "mine"}
    return found


def test_no_name_is_refused_that_no_statement_uses(names: set[str]) -> None:
    assert names >= _TAKEN


@pytest.mark.parametrize("name", sorted(_TAKEN | {"its_queue"}))
def test_the_name_of_a_parameter_is_refused_and_the_attribute_may_keep_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf'mapped_column\("job_{name}"'):
        job_class(**{name: mapped_column(sa.Text)})

    model, _ = job_class(**{name: mapped_column(f"job_{name}", sa.Text)})

    assert tables_of(model).archive.c[f"job_{name}"] is not None


def test_a_column_beside_the_parameter_that_fills_another_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'user_agent' of Job is the name of a parameter"):
        job_class(agent=mapped_column(sa.Text), user_agent=mapped_column(sa.Text))


# -- ours


@pytest.mark.parametrize(
    ("name", "mine"),
    [
        ("priority", mapped_column(sa.SmallInteger)),  # no default: a plain INSERT would fail
        ("run_at", mapped_column(sa.DateTime, server_default=sa.func.now())),  # without a time zone
        ("attempts", mapped_column(sa.SmallInteger, nullable=False, server_default="0")),
        ("id", mapped_column(sa.Uuid, primary_key=True)),
        ("kind", mapped_column("kind_2", sa.Text)),
        ("kind", property(lambda self: "x")),
        ("payload", synonym("meta")),
    ],
    ids=["no default", "no time zone", "smaller", "other type", "other column", "property", "synonym"],
)
def test_what_takes_the_place_of_a_column_of_ours_is_refused(name: str, mine: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' of Job is a column of JobMixin"):
        job_class(**{name: mine})


def test_a_base_that_gives_every_class_a_column_of_the_same_name_is_no_trouble() -> None:
    class Base(DeclarativeBase):
        created_at: Mapped[str | None] = mapped_column(sa.Text)

    job = type("Job", (JobMixin, Base), {"__tablename__": "jobs"})

    assert repr(tables_of(job).jobs.c.created_at.type) == "DateTime(timezone=True)"


def test_a_mixin_of_the_users_before_ours_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    class Stamped:
        created_at: Mapped[str | None] = mapped_column(sa.Text)

    with pytest.raises(ConfigurationError, match="put JobMixin before"):
        type("Job", (Stamped, JobMixin, Base), {"__tablename__": "jobs"})


def test_a_class_that_is_mapped_without_declarative_is_refused() -> None:
    class Job(JobMixin):
        pass

    mapping = registry()

    with pytest.raises(ConfigurationError, match="is a column of JobMixin"):
        mapping.map_imperatively(
            Job, sa.Table("jobs", mapping.metadata, sa.Column("id", sa.BigInteger, primary_key=True))
        )


# -- kinds of columns


def test_generated_identity_enum_and_odd_names_arrive_in_the_archive(empty: sa.Engine) -> None:
    model, metadata = job_class(
        shout=mapped_column(sa.Text, sa.Computed("kind || '!'", persisted=True)),
        serial=mapped_column(sa.BigInteger, sa.Identity(always=True)),
        colour=mapped_column(sa.Enum("red", "blue", name="colour"), server_default="red"),
        order=mapped_column("Order No: 100%", sa.Text),
        select=mapped_column(sa.ARRAY(sa.Integer)),
    )
    metadata.create_all(empty)
    jobs = Jobs(model)

    @jobs.task(name="noop")
    def noop() -> None: ...

    with Session(empty) as session, session.begin():
        enqueue(session, noop.using(columns={"Order No: 100%": "7", "select": [1, 2]}))
    with autocommit(empty) as connection:
        settle(connection, tables_of(model), [(take(connection, jobs.tables)[0], DONE)], retention=KEEP)

    archived = sa.select(sa.cast(tables_of(model).archive.c.colour, sa.Text), tables_of(model).archive)
    with empty.connect() as connection:
        [row] = connection.execute(archived)
    assert (row[0], row.shout, row.serial, row._mapping["Order No: 100%"], row.select) == (
        "red",
        "noop!",
        1,
        "7",
        [1, 2],
    )


def test_a_column_with_a_key_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'tenant_id' of Job has the key 'tenant'"):
        job_class(tenant=mapped_column("tenant_id", sa.Integer, key="tenant"))


def test_a_required_column_can_be_added_while_the_archive_has_rows(empty: sa.Engine) -> None:
    model, metadata = job_class()
    metadata.create_all(empty)
    with Session(empty) as session, session.begin():
        session.add(model(kind="old"))
    with autocommit(empty) as connection:
        [old] = take(connection, tables_of(model))
        settle(connection, tables_of(model), [(old, DONE)], retention=KEEP)
    wider, metadata = job_class(tenant=mapped_column(sa.Text, nullable=False, server_default="acme"))

    with empty.begin() as connection:
        context = MigrationContext.configure(connection)
        operations = Operations(context)
        for table in produce_migrations(context, metadata).upgrade_ops.ops:  # type: ignore[union-attr]
            assert isinstance(table, ModifyTableOps)
            for change in table.ops:
                operations.invoke(change)

    with Session(empty) as session, session.begin():
        session.add(wider(kind="new"))
    with autocommit(empty) as connection:
        [new] = take(connection, tables_of(wider))
        settle(connection, tables_of(wider), [(new, DONE)], retention=KEEP)
    assert rows(empty, "SELECT kind, tenant FROM jobs_archive ORDER BY id") == [
        ("old", None),
        ("new", "acme"),
    ]


def test_a_column_added_to_a_mapped_class_is_refused_where_jobs_are_made_of_it() -> None:
    model, _ = job_class()

    model.extra = mapped_column(sa.Text)

    with pytest.raises(ConfigurationError, match="column 'extra' was added to Job when it was mapped"):
        Jobs(model)


# -- subclasses


def test_columns_of_a_single_table_subclass_go_to_the_archive(empty: sa.Engine) -> None:
    model, metadata = job_class()

    class Special(model):  # type: ignore[valid-type, misc]
        sugar: Mapped[int | None]

    metadata.create_all(empty)
    with Session(empty) as session, session.begin():
        session.add_all([model(kind="plain"), Special(kind="special", sugar=7)])
    with autocommit(empty) as connection:
        leases = take(connection, tables_of(model), limit=2)
        settled = settle(connection, tables_of(model), [(it, DONE) for it in leases], retention=KEEP)

    archived: Any = tables_of(model).classes["archive"]
    with Session(empty) as session:
        found = {row.kind: row.sugar for row in session.query(archived)}
    assert settled.kept == []
    assert found == {"plain": None, "special": 7}


def test_a_required_column_of_a_subclass_is_refused() -> None:
    model, _ = job_class()

    with pytest.raises(ConfigurationError, match="'sugar' of Special has no server_default"):

        class Special(model):  # type: ignore[valid-type, misc]
            sugar: Mapped[int]


@pytest.mark.parametrize("concrete", [False, True])
def test_a_subclass_with_a_table_of_its_own_is_refused(concrete: bool) -> None:
    model, _ = job_class()

    with pytest.raises(ConfigurationError, match="Special has a table of its own"):

        class Special(model):  # type: ignore[valid-type, misc]
            __tablename__ = "special"
            __mapper_args__ = {"concrete": True} if concrete else {}
            id = mapped_column(sa.ForeignKey("jobs.id"), primary_key=True)


# -- mapper arguments


@pytest.mark.parametrize("name", ["fencing_token", "version"])
def test_a_version_counter_on_a_column_of_ours_is_refused(name: str) -> None:
    arguments = declared_attr.directive(
        lambda cls: {**JobMixin.__mapper_args__, "version_id_col": getattr(cls, name)}
    )

    with pytest.raises(ConfigurationError, match=f"version_id_col of Job is '{name}'"):
        job_class(__mapper_args__=arguments)


def test_a_version_counter_and_eager_defaults_of_the_users_own_work(empty: sa.Engine) -> None:
    edits = mapped_column(sa.Integer, nullable=False, server_default="1")
    model, metadata = job_class(
        edits=edits,
        __mapper_args__={**JobMixin.__mapper_args__, "version_id_col": edits, "eager_defaults": True},
    )
    metadata.create_all(empty)
    jobs = Jobs(model)

    @jobs.task(name="noop")
    def noop() -> None: ...

    with Session(empty) as session, session.begin():
        handle = enqueue(session, noop)
        session.add(job := model(kind="noop"))
        session.flush()
        assert job.status == "ready"
    with Session(empty) as session, session.begin():
        session.get_one(model, handle.id).priority = 7
    with autocommit(empty) as connection:
        leases = take(connection, jobs.tables, limit=2)
        settle(connection, jobs.tables, [(lease, DONE) for lease in leases], retention=KEEP)

    assert rows(empty, "SELECT priority, edits FROM jobs_archive ORDER BY id") == [(7, 2), (0, 1)]


def test_a_table_that_refers_to_a_job_keeps_its_row_in_the_jobs_table(empty: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "jobs"

    class Upload(Base):
        __tablename__ = "uploads"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int]
        job_queue: Mapped[str]
        job: Mapped[Job] = relationship()
        __table_args__ = (sa.ForeignKeyConstraint(["job_id", "job_queue"], ["jobs.id", "jobs.queue"]),)

    Base.metadata.create_all(empty)
    with Session(empty) as session, session.begin():
        session.add(Upload(job=Job(kind="noop")))
    with autocommit(empty) as connection:
        tables = tables_of(Job)
        settled = settle(connection, tables, [(take(connection, tables)[0], DONE)], retention=KEEP)

    assert len(settled.kept) == 1
    assert rows(empty, "SELECT status FROM jobs") == [("done",)]
