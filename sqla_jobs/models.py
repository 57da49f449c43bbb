"""The tables: `JobMixin` for the user's own Job class, its satellites, and a ready-made model.

Mapping a class that has the mixin declares everything: indexes and checks by a mapper event (a user's
`__table_args__` cannot drop them), the satellite tables on the same metadata by another. Does not read
or write rows.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    SmallInteger,
    Table,
    Text,
    event,
    func,
    inspect,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedColumn, Mapper, mapped_column, registry
from sqlalchemy.types import NullType

from sqla_jobs import schema
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.errors import ConfigurationError

__all__ = ["LIVE_KEYS", "JobMixin", "Tables", "job_model", "metadata", "own_columns", "tables_of"]

# statement_timestamp(), not now(): in a transaction open for a minute now() is a minute ago, and a delay
# or a lease counted from it is shorter by that minute (PostgreSQL manual 9.9.5; docs/adr/0004).
_MOMENT = func.statement_timestamp()
_TIME = DateTime(timezone=True)

#: Of which jobs a unique key is unique; also what ON CONFLICT must say to find the index.
LIVE_KEYS = "unique_key IS NOT NULL AND status IN ('ready', 'blocked', 'running')"

# Names are the table's, as prefix, plus the longest of ours; PostgreSQL cuts identifiers at 63 bytes.
_LONGEST_NAME = 63 - len("_dependencies_parent_idx")


class JobMixin:
    """The columns of a job. Derive your own class from it and your Declarative base, mixin first.

    All times are timestamps with time zone. Every column but `kind` has a server default or may be
    null, so that a plain `INSERT INTO jobs (kind, payload)` enqueues. The satellite tables (archive,
    queues, schedules, workers, dependencies, audit) are declared with it, on the same metadata, named
    by its table name.

    Columns that you add, in the class or in a single-table subclass, go to the archive with their job. They
    need a server default or must be nullable, and may not replace ours. A `__mapper_args__` of yours starts
    with `**JobMixin.__mapper_args__`. A dataclass base makes an `__init__` without our columns: write
    `class Job(JobMixin, Base, init=False)` if you want `Job(kind=...)`. SQLModel with `table=True` has
    pydantic's `__init__`, which ignores them: enqueue there, or map Job on a base with SQLModel's metadata.

    Raises `ConfigurationError` at mapping for what cannot work: a table name too long for its satellites, a
    column against these rules, a subclass with a table of its own.

    >>> from sqlalchemy.orm import DeclarativeBase
    >>> class Base(DeclarativeBase):
    ...     pass
    >>> class Job(JobMixin, Base):
    ...     __tablename__ = "background_jobs"
    >>> sorted(Base.metadata.tables)[:2]
    ['background_jobs', 'background_jobs_archive']
    """

    # No Mapped[] annotation at run time: dataclass bases and SQLModel refuse an annotated mixin, and the
    # user's type_annotation_map must not touch our types.
    if TYPE_CHECKING:
        id: Mapped[int]
        queue: Mapped[str]
        kind: Mapped[str]
        payload: Mapped[dict[str, Any]]
        status: Mapped[str]
        priority: Mapped[int]
        run_at: Mapped[datetime]
        attempts: Mapped[int]
        max_attempts: Mapped[int]
        expires_at: Mapped[datetime | None]
        locked_by: Mapped[str | None]
        locked_until: Mapped[datetime | None]
        fencing_token: Mapped[int]
        cancel_requested_at: Mapped[datetime | None]
        last_error: Mapped[str | None]
        unique_key: Mapped[str | None]
        unique_until_start: Mapped[bool]
        ordering_key: Mapped[str | None]
        version: Mapped[int]
        progress: Mapped[dict[str, Any] | None]
        meta: Mapped[dict[str, Any] | None]
        attempt_log: Mapped[list[dict[str, Any]] | None]
        result: Mapped[Any | None]
        created_at: Mapped[datetime]
        started_at: Mapped[datetime | None]
        finished_at: Mapped[datetime | None]
        __mapper_args__: Any
    else:
        # insert_sentinel: with the composite primary key, 2,500 adds would be 2,500 INSERTs without it
        id = mapped_column(BigInteger, Identity(), primary_key=True, insert_sentinel=True)
        queue = mapped_column(Text, primary_key=True, default="default", server_default=text("'default'"))
        kind = mapped_column(Text, nullable=False)
        payload = mapped_column(JSONB, nullable=False, server_default=text("'{}'::jsonb"))
        status = mapped_column(Text, nullable=False, server_default=text("'ready'"))
        priority = mapped_column(SmallInteger, nullable=False, server_default=text("0"))
        run_at = mapped_column(_TIME, nullable=False, server_default=_MOMENT)
        attempts = mapped_column(Integer, nullable=False, server_default=text("0"))
        max_attempts = mapped_column(Integer, nullable=False, server_default=text("20"))
        expires_at = mapped_column(_TIME)
        locked_by = mapped_column(Text)
        locked_until = mapped_column(_TIME)
        fencing_token = mapped_column(BigInteger, nullable=False, server_default=text("0"))
        cancel_requested_at = mapped_column(_TIME)
        last_error = mapped_column(Text)
        unique_key = mapped_column(Text)
        unique_until_start = mapped_column(Boolean, nullable=False, server_default=text("false"))
        ordering_key = mapped_column(Text)
        version = mapped_column(Integer, nullable=False, server_default=text("1"))
        progress = mapped_column(JSONB)
        meta = mapped_column(JSONB)
        attempt_log = mapped_column(JSONB)
        result = mapped_column(JSONB)
        created_at = mapped_column(_TIME, nullable=False, server_default=_MOMENT)
        started_at = mapped_column(_TIME)
        finished_at = mapped_column(_TIME)

        # the key of the table is (id, queue), of the mapper id alone: session.get(Job, id)
        __mapper_args__ = {"primary_key": ["id"]}


@cache
def own_columns() -> frozenset[str]:
    """The names of the columns that the mixin brings; the others of a jobs table are the user's."""
    return frozenset(name for name, value in vars(JobMixin).items() if isinstance(value, MappedColumn))


#: In Column.info, which declarative copies with the column: what replaces a column of ours has it not.
_OURS = "sqla_jobs"
for _name in own_columns():
    vars(JobMixin)[_name].column.info[_OURS] = True

# Binds and labels of our statements. Of an UPDATE or INSERT SQLAlchemy takes a parameter for the column
# of that name, and a label beside such a column is ambiguous (tests/postgres/test_models_columns.py).
_TAKEN = frozenset({
    "delays", "errors", "final", "given_back", "ids", "keep_cancelled", "keep_done", "lease", "limit",
    "outcome_result", "owner", "owners", "prefetch", "q", "reason", "results", "statuses", "tokens",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables behind one Job class, and the classes mapped to the satellites."""

    jobs: Table
    archive: Table
    queues: Table
    schedules: Table
    workers: Table
    dependencies: Table
    audit: Table
    classes: dict[str, type]


_known: dict[Table, Tables] = {}


def tables_of(model: type) -> Tables:
    """The tables of a mapped Job class. Raises `ConfigurationError` when it is not one, or changed since."""
    mapper: Any = inspect(model, raiseerr=False) if isinstance(model, type) else None
    local: Any = mapper.local_table if isinstance(mapper, Mapper) else None
    tables = _known.get(local)
    if tables is None:
        raise ConfigurationError(
            f"{model!r} is not a mapped Job class: write `class Job(JobMixin, Base): __tablename__ = ...`"
        )
    if len(tables.jobs.c) != len(tables.archive.c):
        late = [column.name for column in tables.jobs.c if column.name not in tables.archive.c]
        raise ConfigurationError(
            f"column {late[0]!r} was added to {model.__name__} when it was mapped already, so its archive "
            "lacks it: declare it in the body of the class"
        )
    return tables


@event.listens_for(JobMixin, "instrument_class", propagate=True)
def _complete(mapper: Mapper[Any], cls: type) -> None:
    """Indexes, checks and DDL events, before anybody can ask for the table."""
    jobs = mapper.local_table
    if mapper.inherits is not None:
        _extend(mapper, cls)
        return
    if not isinstance(jobs, Table) or jobs in _known:
        return
    if len(jobs.name.encode()) > _LONGEST_NAME:
        raise ConfigurationError(
            f"table name {jobs.name!r} is longer than {_LONGEST_NAME} bytes: names of its satellites and "
            "indexes would pass PostgreSQL's 63"
        )
    _check_columns(jobs, cls)
    _constrain(jobs)
    _index(jobs)
    schema.attach(jobs)
    _known[jobs] = _satellites(jobs)


def _extend(mapper: Mapper[Any], cls: type) -> None:
    """A subclass shares the table; columns that it brings are there already, and go to the archive too."""
    tables = _known.get(cast("Table", mapper.local_table))
    if tables is None:
        raise ConfigurationError(
            f"{cls.__name__} has a table of its own beside that of its jobs: a job leaves its table when it "
            "ends, and that part would stay behind; leave __tablename__ out (single-table inheritance), or "
            "derive it from JobMixin and your base"
        )
    _check_columns(tables.jobs, cls)
    archived: Mapper[Any] = inspect(tables.classes["archive"])
    for column in _archive_columns(tables.jobs):
        if column.name not in tables.archive.c:
            tables.archive.append_column(column)
            archived.add_property(column.key, column)
    _type_later(tables.jobs, tables.archive)


#: Columns whose type their foreign key will bring, once its table is there, and the archive's of that name.
_untyped: list[tuple[Column[Any], Column[Any]]] = []


@event.listens_for(Table, "after_parent_attach")
def _type_what_waited(_table: Table, _metadata: MetaData) -> None:
    for pair in list(_untyped):
        column, archived = pair
        if not isinstance(column.type, NullType):
            archived.type = column.type
            _untyped.remove(pair)


def _type_later(jobs: Table, archive: Table) -> None:
    _untyped.extend(
        (column, archive.c[column.name])
        for column in jobs.c
        if isinstance(column.type, NullType) and column.foreign_keys
    )


@event.listens_for(JobMixin, "after_mapper_constructed", propagate=True)
def _check_mapper(mapper: Mapper[Any], cls: type) -> None:
    """A user's own __mapper_args__ takes the place of ours, and `session.get(Job, id)` would be broken."""
    keys = tuple(column.key for column in mapper.primary_key)
    if mapper.inherits is None and keys != ("id",):
        raise ConfigurationError(
            f"the mapper key of {cls.__name__} is {keys}, not id: start its __mapper_args__ with "
            "**JobMixin.__mapper_args__"
        )
    decides = mapper.polymorphic_on
    if decides is not None and (
        not isinstance(decides, Column)
        or decides.table is not mapper.local_table
        or decides.name in own_columns()
    ):
        raise ConfigurationError(
            f"polymorphic_on of {cls.__name__} is {decides}: it must be a column of your own, which enqueue "
            "can fill; those of JobMixin have their own meaning"
        )
    counted = mapper.version_id_col
    if counted is not None and counted.name in own_columns():
        raise ConfigurationError(
            f"version_id_col of {cls.__name__} is {counted.name!r}, which the ORM would change with every "
            "UPDATE, behind the back of the worker that runs the job: give it a column of your own"
        )


def _check_columns(jobs: Table, cls: type) -> None:
    """Ours are there as we declare them, every row may be written without the user's, no name is taken."""
    for name in sorted(own_columns()):
        if name not in jobs.c or _OURS not in jobs.c[name].info:
            raise ConfigurationError(
                f"{name!r} of {cls.__name__} is a column of JobMixin, which every statement relies on: give "
                "yours another name, and put JobMixin before classes that have a column of that name"
            )
    users = {column.name: column for column in jobs.c if column.name not in own_columns()}
    for name, column in users.items():
        optional = column.nullable or column.server_default is not None or column.identity is not None
        if not optional:
            raise ConfigurationError(
                f"column {name!r} of {cls.__name__} has no server_default and must not be null, so a "
                "plain INSERT of a job would fail: make it nullable, or give it a server_default"
            )
        # f"user_{other}" and its_: the parameters of outbox.rows
        if name in _TAKEN or name.startswith("its_") or name.removeprefix("user_") in users.keys() - {name}:
            raise ConfigurationError(
                f"{name!r} of {cls.__name__} is the name of a parameter of our statements: call the column "
                f'otherwise; the attribute may keep its name, `{name} = mapped_column("job_{name}", ...)`'
            )
        if column.key != name:
            raise ConfigurationError(
                f"column {name!r} of {cls.__name__} has the key {column.key!r}: leave key= out, the "
                "attribute has a name of its own anyway"
            )


def _constrain(jobs: Table) -> None:
    statuses = ", ".join(f"'{status}'" for status in JobStatus)
    checks = {
        "status": f"status IN ({statuses})",
        "queue_length": "octet_length(queue) BETWEEN 1 AND 200",
        "kind_length": "octet_length(kind) BETWEEN 1 AND 200",
        "unique_key_length": "octet_length(unique_key) <= 2000",
        # dropped by the step that brings ordering keys; until then a keyed row would never be claimed
        "ordering_key": "ordering_key IS NULL",
        "attempts": "attempts >= 0 AND max_attempts >= 1",
        # a running row without a lease could never be rescued
        "lease": "status <> 'running' OR (locked_by IS NOT NULL AND locked_until IS NOT NULL)",
    }
    for name, condition in checks.items():
        jobs.append_constraint(CheckConstraint(condition, name=name))


def _index(jobs: Table) -> None:
    """All partial: an index entry lives only as long as the row is in that state."""
    c, name = jobs.c, jobs.name
    ready = text("status = 'ready' AND ordering_key IS NULL")
    running = text("status = 'running'")
    Index(f"{name}_claim_idx", c.queue, c.priority.desc(), c.run_at, c.id, postgresql_where=ready)
    Index(
        f"{name}_keyed_idx",
        c.queue,
        c.ordering_key,
        c.id,
        postgresql_where=text("ordering_key IS NOT NULL AND status IN ('ready', 'running')"),
    )
    Index(
        f"{name}_one_per_key_idx",
        c.queue,
        c.ordering_key,
        unique=True,
        postgresql_where=text("status = 'running' AND ordering_key IS NOT NULL"),
    )
    Index(
        f"{name}_expiry_idx",  # only rows that have an expiry pay for it (docs/adr/0003)
        c.queue,
        c.expires_at,
        postgresql_where=text("expires_at IS NOT NULL AND status = 'ready' AND fencing_token = 0"),
    )
    Index(
        f"{name}_failed_idx",  # dead letters: their retention, and whoever looks through them (docs/adr/0003)
        c.finished_at,
        postgresql_where=text("status = 'failed'"),
    )
    Index(f"{name}_running_idx", c.queue, c.locked_until, postgresql_where=running)
    Index(
        f"{name}_unique_idx",
        c.queue,
        c.unique_key,
        unique=True,
        postgresql_where=text(LIVE_KEYS),
    )


def _satellites(jobs: Table) -> Tables:
    """The other tables, on the user's metadata and in the schema of the jobs table.

    Mapped by a registry of our own: the user's base class, type map and class names stay untouched.
    """

    def table(suffix: str, *items: Any) -> Table:
        what = f"sqla_jobs: {suffix} of {jobs.name}"
        return Table(f"{jobs.name}_{suffix}", jobs.metadata, *items, schema=jobs.schema, comment=what)

    if jobs.comment is None:
        jobs.comment = "sqla_jobs: jobs"
    archive = table("archive", *_archive_columns(jobs))
    _type_later(jobs, archive)
    Index(f"{jobs.name}_archive_finished_idx", archive.c.finished_at)
    made = {
        "archive": archive,
        "queues": table("queues", *_queue_columns()),
        "schedules": table("schedules", *_schedule_columns()),
        "workers": table("workers", *_worker_columns()),
        "dependencies": table("dependencies", *_dependency_columns()),
        "audit": table("audit", *_audit_columns()),
    }
    Index(
        f"{jobs.name}_dependencies_parent_idx",
        made["dependencies"].c.parent_queue,
        made["dependencies"].c.parent_id,
        postgresql_where=text("outcome IS NULL"),
    )
    ours = registry(metadata=jobs.metadata)
    classes = {}
    for suffix, made_table in made.items():
        cls = type(f"{suffix.capitalize()}Row", (), {"__doc__": made_table.comment})
        ours.map_imperatively(cls, made_table)
        classes[suffix] = cls
    return Tables(jobs=jobs, classes=classes, **made)


def _archive_columns(jobs: Table) -> list[Column[Any]]:
    """The columns of the jobs table, without defaults: a finished row is written whole.

    finished_at is in the key because the partitioned shape is by it; both shapes have the same keys. The
    user's may be null, or the migration that adds one would fail on the rows that are there.
    """
    keys = ("id", "queue", "finished_at")
    ours = own_columns()
    return [
        Column(
            c.name,
            c.type,
            primary_key=c.name in keys,
            nullable=(c.nullable or c.name not in ours) and c.name not in keys,
            autoincrement=False,
        )
        for c in jobs.columns
    ]


def _queue_columns() -> list[Column[Any]]:
    return [
        Column("queue", Text, primary_key=True),
        Column("paused_at", _TIME),
        Column("paused_kinds", ARRAY(Text)),
        Column("max_running", Integer),
        Column("key_max_running", Integer),
        Column("rate", Double),
        Column("rate_period", Interval),
        Column("burst", Integer),
        Column("tokens", Double),
        Column("refilled_at", _TIME),
        Column("latency_objective", Interval),
    ]


def _schedule_columns() -> list[Column[Any]]:
    return [
        Column("name", Text, primary_key=True),
        Column("kind", Text, nullable=False),
        Column("payload", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
        Column("queue", Text, nullable=False, server_default=text("'default'")),
        Column("cron", Text),
        Column("every", Interval),
        Column("timezone", Text, nullable=False, server_default=text("'UTC'")),
        Column("missed", Text, nullable=False, server_default=text("'latest'")),
        Column("next_run_at", _TIME),
        Column("last_run_at", _TIME),
        Column("paused_at", _TIME),
        Column("edited_at", _TIME),
        Column("source", Text),
    ]


def _worker_columns() -> list[Column[Any]]:
    return [
        Column("id", Text, primary_key=True),
        Column("host", Text, nullable=False),
        Column("pid", Integer, nullable=False),
        Column("started_at", _TIME, nullable=False, server_default=_MOMENT),
        Column("seen_at", _TIME, nullable=False, server_default=_MOMENT),
        Column("queues", ARRAY(Text), nullable=False),
        Column("concurrency", Integer, nullable=False),
        Column("running", Integer, nullable=False, server_default=text("0")),
        Column("state", Text, nullable=False),
        Column("version", Text),
        Column("kinds", ARRAY(Text)),
    ]


def _dependency_columns() -> list[Column[Any]]:
    return [
        Column("child_queue", Text, primary_key=True),
        Column("child_id", BigInteger, primary_key=True, autoincrement=False),
        Column("parent_queue", Text, primary_key=True),
        Column("parent_id", BigInteger, primary_key=True, autoincrement=False),
        Column("on_failure", Text, nullable=False, server_default=text("'cancel'")),
        Column("outcome", Text),
    ]


def _audit_columns() -> list[Column[Any]]:
    return [
        Column("id", BigInteger, Identity(), primary_key=True),
        Column("at", _TIME, nullable=False, server_default=_MOMENT),
        Column("actor", Text, nullable=False),
        Column("action", Text, nullable=False),
        Column("target", Text),
        Column("count", Integer),
        Column("detail", JSONB),
    ]


#: The metadata of the ready-made models.
metadata = MetaData()


class _ReadyBase(DeclarativeBase):
    metadata = metadata


def job_model(name: str = "sqla_jobs", schema: str | None = None) -> type[JobMixin]:
    """The ready-made Job class on `sqla_jobs.metadata`, for those who have no Declarative base.

    The same arguments give the same class. Raises `ConfigurationError` when the name is too long.

    >>> job_model().__table__.name
    'sqla_jobs'
    """
    return _ready_model(name, schema or None)


@cache  # here and not above, where a default and the same value given are two entries
def _ready_model(name: str, schema: str | None) -> type[JobMixin]:
    names = {"__tablename__": name, "__table_args__": {"schema": schema} if schema else {}}
    return type("_".join(filter(None, ("Job", schema, name))), (JobMixin, _ReadyBase), names)
