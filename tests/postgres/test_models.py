"""Mapping a class is all it takes: what create_all makes of it, and what the ORM does with it."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

import pytest
import sqlalchemy
from shop import Base, Job
from sqlalchemy import (
    CheckConstraint,
    Connection,
    Engine,
    ForeignKey,
    Index,
    MetaData,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column
from steps import LEASE, ask, claimed, put, run

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import DONE, JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.errors import ConfigurationError
from sqla_jobs.models import JobMixin, job_model, metadata, tables_of
from sqla_jobs.schema import JOBS_STORAGE, channel_of, require_schema
from sqla_jobs.store.claim import claim
from sqla_jobs.store.settle import settle

#: SQLAlchemy 2.0 knows no storage parameters of a table.
OWN_STORAGE: dict[str, Any] = (
    {} if sqlalchemy.__version__.startswith("2.0.") else {"postgresql_with": {"fillfactor": "90"}}
)
STORAGE = [f"{name}={value}" for name, value in JOBS_STORAGE.items()]

SUFFIXES = ("", "_archive", "_audit", "_dependencies", "_queues", "_schedules", "_workers")


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(empty_database_url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def rows(connection: Connection, statement: str, **parameters: object) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute(text(statement), parameters)]


def tables(connection: Connection, schema: str = "public") -> set[str]:
    statement = "SELECT tablename FROM pg_tables WHERE schemaname = :schema"
    return {row[0] for row in rows(connection, statement, schema=schema)}


def indexes(connection: Connection, table: str, schema: str = "public") -> dict[str, str]:
    """name -> what follows the name in its definition."""
    statement = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = :schema AND tablename = :table"
    return {
        name: ("UNIQUE " if "UNIQUE" in definition else "") + definition.partition(" USING btree ")[2]
        for name, definition in rows(connection, statement, schema=schema, table=table)
    }


def checks(connection: Connection, table: str) -> dict[str, str]:
    statement = (
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = to_regclass(:table) AND contype = 'c'"
    )
    return {name: definition for name, definition in rows(connection, statement, table=table)}  # noqa: C416


# -- what create_all makes


def test_create_all_makes_the_tables_of_a_complete_queue(a: Connection) -> None:
    made = {name for name in tables(a) if name.startswith("background_jobs")}

    assert made == {f"background_jobs{suffix}" for suffix in SUFFIXES}


def test_every_hot_index_is_partial_and_in_the_order_its_statement_needs(a: Connection) -> None:
    assert indexes(a, "background_jobs") == {
        "background_jobs_pkey": "UNIQUE (id, queue)",
        "background_jobs_claim_idx": "(queue, priority DESC, run_at, id) "
        "WHERE ((status = 'ready'::text) AND (ordering_key IS NULL))",
        "background_jobs_keyed_idx": "(queue, ordering_key, id) WHERE ((ordering_key IS NOT NULL) "
        "AND (status = ANY (ARRAY['ready'::text, 'running'::text])))",
        "background_jobs_one_per_key_idx": "UNIQUE (queue, ordering_key) "
        "WHERE ((status = 'running'::text) AND (ordering_key IS NOT NULL))",
        "background_jobs_running_idx": "(queue, locked_until) WHERE (status = 'running'::text)",
        "background_jobs_unique_idx": "UNIQUE (queue, unique_key) WHERE ((unique_key IS NOT NULL) "
        "AND (status = ANY (ARRAY['ready'::text, 'blocked'::text, 'running'::text])))",
        "background_jobs_expiry_idx": "(queue, expires_at) WHERE ((expires_at IS NOT NULL) "
        "AND (status = 'ready'::text) AND (fencing_token = 0))",
        "background_jobs_failed_idx": "(finished_at) WHERE (status = 'failed'::text)",
    }


def test_the_satellites_have_their_keys_and_indexes(a: Connection) -> None:
    assert indexes(a, "background_jobs_archive") == {
        "background_jobs_archive_pkey": "UNIQUE (id, queue, finished_at)",
        "background_jobs_archive_finished_idx": "(finished_at)",
    }
    assert indexes(a, "background_jobs_dependencies") == {
        "background_jobs_dependencies_pkey": "UNIQUE (child_queue, child_id, parent_queue, parent_id)",
        "background_jobs_dependencies_parent_idx": "(parent_queue, parent_id) WHERE (outcome IS NULL)",
    }
    assert indexes(a, "background_jobs_queues") == {"background_jobs_queues_pkey": "UNIQUE (queue)"}
    assert indexes(a, "background_jobs_schedules") == {"background_jobs_schedules_pkey": "UNIQUE (name)"}
    assert indexes(a, "background_jobs_workers") == {"background_jobs_workers_pkey": "UNIQUE (id)"}
    assert indexes(a, "background_jobs_audit") == {"background_jobs_audit_pkey": "UNIQUE (id)"}


def test_the_archive_has_the_columns_of_the_jobs_table_without_their_defaults(a: Connection) -> None:
    statement = (
        "SELECT column_name, data_type, ordinal_position FROM information_schema.columns "
        "WHERE table_name = :table ORDER BY 3"
    )
    defaults = (
        "SELECT count(*) FROM information_schema.columns "
        "WHERE table_name = 'background_jobs_archive' AND (column_default IS NOT NULL OR is_identity = 'YES')"
    )

    assert rows(a, statement, table="background_jobs_archive") == rows(a, statement, table="background_jobs")
    assert ask(a, defaults) == 0


def test_no_foreign_key_of_ours_and_no_gin_index(a: Connection) -> None:
    foreign_keys = "SELECT conname FROM pg_constraint WHERE contype = 'f' AND conname LIKE 'background%'"

    assert rows(a, foreign_keys) == []
    assert rows(a, "SELECT indexdef FROM pg_indexes WHERE indexdef NOT LIKE '%USING btree%'") == []


BAD_ROWS: dict[str, dict[str, Any]] = {
    "status": {"status": "later"},
    "queue_length": {"queue": "é" * 101},
    "kind_length": {"kind": "k" * 201},
    "unique_key_length": {"unique_key": "u" * 2001},
    "ordering_key": {"ordering_key": "customer 7"},
    "attempts": {"attempts": -1},
    "lease": {"status": "running", "locked_by": "A"},
}


@pytest.mark.parametrize(("check", "columns"), BAD_ROWS.items(), ids=list(BAD_ROWS))
def test_a_row_that_no_worker_could_work_with_is_refused(
    clean: Engine, check: str, columns: dict[str, Any]
) -> None:
    with clean.connect() as connection, pytest.raises(IntegrityError, match=f'check constraint "{check}"'):
        put(connection, **columns)


@pytest.mark.parametrize(
    "columns",
    [{"queue": ""}, {"kind": ""}, {"max_attempts": 0}, {"status": "running", "locked_until": "now"}],
    ids=str,
)
def test_empty_names_and_impossible_numbers_are_refused(clean: Engine, columns: dict[str, Any]) -> None:
    with clean.connect() as connection, pytest.raises(IntegrityError, match="check constraint"):
        put(connection, **({"kind": "noop"} | columns))


def test_names_as_long_as_allowed_are_taken(a: Connection) -> None:
    run(
        a,
        "INSERT INTO background_jobs (kind, queue, unique_key) VALUES (:kind, :queue, :key)",
        kind="k" * 200,
        queue="é" * 100,
        key="u" * 2000,
    )

    assert ask(a, "SELECT count(*) FROM background_jobs") == 1


def test_trigger_stamp_storage_and_comments_come_with_the_table(a: Connection) -> None:
    trigger = "SELECT tgname, tgenabled FROM pg_trigger WHERE tgrelid = 'background_jobs'::regclass"
    stamp = "SELECT obj_description('background_jobs_announce'::regproc, 'pg_proc')"
    options = "SELECT reloptions FROM pg_class WHERE relname = 'background_jobs'"
    comments = (
        "SELECT relname, obj_description(oid, 'pg_class') FROM pg_class "
        "WHERE relname LIKE 'background_jobs%' AND relkind = 'r'"
    )

    assert rows(a, trigger) == [("background_jobs_announce", "O")]
    assert ask(a, stamp) == "sqla_jobs schema 1"
    assert sorted(ask(a, options)) == [
        "autovacuum_analyze_scale_factor=0.02",
        "autovacuum_analyze_threshold=1000",
        "autovacuum_vacuum_cost_delay=0",
        "autovacuum_vacuum_scale_factor=0.01",
        "autovacuum_vacuum_threshold=1000",
    ]
    assert dict(rows(a, comments)) == {"background_jobs": "sqla_jobs: jobs"} | {
        f"background_jobs{suffix}": f"sqla_jobs: {suffix[1:]} of background_jobs" for suffix in SUFFIXES[1:]
    }


def test_create_all_again_changes_nothing(clean: Engine) -> None:
    statement = "SELECT relname, oid, xmin::text FROM pg_class WHERE relname LIKE 'background%' ORDER BY 1"
    with clean.connect() as connection:
        before = rows(connection, statement)

    Base.metadata.create_all(clean)

    with clean.connect() as connection:
        assert rows(connection, statement) == before


def test_drop_all_leaves_nothing_behind(empty: Engine) -> None:
    Base.metadata.create_all(empty)

    Base.metadata.drop_all(empty)

    with empty.connect() as connection:
        assert tables(connection) == set()
        functions = "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        assert rows(connection, functions) == []


# -- the shortest INSERT


def test_a_kind_is_all_that_an_insert_needs(a: Connection) -> None:
    run(a, "INSERT INTO background_jobs (kind) VALUES ('receipts.send')")

    [row] = a.execute(text("SELECT * FROM background_jobs")).mappings()
    age = ask(a, "SELECT clock_timestamp() - run_at FROM background_jobs")
    values = dict(row)
    assert values.pop("run_at") == values.pop("created_at")
    assert timedelta(0) < age < timedelta(seconds=10)
    assert {name: value for name, value in values.items() if value is not None} == {
        "id": 1,
        "queue": "default",
        "kind": "receipts.send",
        "payload": {},
        "status": "ready",
        "priority": 0,
        "attempts": 0,
        "max_attempts": 20,
        "fencing_token": 0,
        "unique_until_start": False,
        "version": 1,
    }
    assert len(claimed(a)) == 1


def test_defaults_of_time_are_the_statements_and_not_the_transactions(clean: Engine) -> None:
    with clean.connect() as connection:
        began = ask(connection, "SELECT now()")
        run(connection, "SELECT pg_sleep(0.05)")
        run(connection, "INSERT INTO background_jobs (kind) VALUES ('noop')")

        run_at, created_at = rows(connection, "SELECT run_at, created_at FROM background_jobs")[0]

    assert run_at - began >= timedelta(seconds=0.05)
    assert run_at == created_at


def test_an_explicit_id_is_taken(a: Connection) -> None:
    run(a, "INSERT INTO background_jobs (id, kind) VALUES (4711, 'noop')")

    assert claimed(a)[0].lease.id == 4711


def test_a_unique_key_is_held_by_a_live_job_only(clean: Engine, a: Connection) -> None:
    for ended in "failed", "done", "cancelled":
        put(a, unique_key="order 7", status=ended)
    put(a, unique_key="order 7", status="ready")

    with clean.connect() as connection, pytest.raises(IntegrityError, match="background_jobs_unique_idx"):
        put(connection, unique_key="order 7", status="blocked")


# -- the ORM


def test_a_job_added_as_an_object_can_be_claimed(clean: Engine, a: Connection) -> None:
    with Session(clean) as session, session.begin():
        session.add(job := Job(kind="receipts.send", payload={"order": 7}))
        session.flush()
        key = job.id

    [it] = claimed(a)

    assert it.lease == Lease("default", key, 1, "A")
    assert (it.kind, it.payload) == ("receipts.send", '{"order": 7}')


def test_an_object_knows_its_defaults_after_the_flush(clean: Engine) -> None:
    with Session(clean) as session:
        session.add(job := Job(kind="noop", queue="mail"))
        session.flush()

        assert (job.status, job.queue, job.attempts, job.priority) == (JobStatus.READY, "mail", 0, 0)
        assert isinstance(job.run_at, datetime)
        assert job.payload == {}


def test_a_job_is_got_by_its_id_alone(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        session.add(job := Job(kind="noop", queue="mail"))
        session.flush()
        key = job.id

    with Session(clean) as session:
        found = session.get(Job, key)

        assert found is not None
        assert (found.id, found.queue) == (key, "mail")
        assert session.get(Job, key + 1) is None


def test_2500_added_objects_are_a_handful_of_inserts_and_keep_their_order(clean: Engine) -> None:
    sent: list[str] = []
    event.listen(clean, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))
    jobs = [Job(kind="noop", payload={"number": number}) for number in range(2500)]

    with Session(clean) as session, session.begin():
        session.add_all(jobs)
        session.flush()
        by_id = {job.id: job.payload["number"] for job in jobs}

    inserts = [statement for statement in sent if "INSERT" in statement]
    assert 1 <= len(inserts) <= 5
    with clean.connect() as connection:
        stored = rows(connection, "SELECT id, (payload->>'number')::int FROM background_jobs")
        assert dict(stored) == by_id
    assert list(by_id) == sorted(by_id)


def test_objects_change_and_go_as_any_other(clean: Engine, a: Connection) -> None:
    with Session(clean) as session, session.begin():
        session.add_all([Job(kind="one"), Job(kind="two")])
    with Session(clean) as session, session.begin():
        one, two = session.query(Job).order_by(Job.id)
        one.priority = 7
        session.delete(two)

    assert rows(a, "SELECT kind, priority FROM background_jobs") == [("one", 7)]


def test_satellites_are_mapped_too(clean: Engine, a: Connection) -> None:
    queue = tables_of(Job).classes["queues"]

    with Session(clean) as session, session.begin():
        row = queue()
        row.queue, row.max_running = "mail", 3
        session.add(row)

    assert rows(a, "SELECT queue, max_running FROM background_jobs_queues") == [("mail", 3)]


# -- the user's own class

CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def test_naming_convention_schema_and_table_args_of_the_user_are_kept(empty: Engine) -> None:
    class Own(DeclarativeBase):
        metadata = MetaData(naming_convention=CONVENTION, schema="app")

    class Tenant(Own):
        __tablename__ = "tenants"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Task(JobMixin, Own):
        __tablename__ = "tasks"
        __table_args__ = (
            Index("tasks_by_tenant", "tenant_id"),
            CheckConstraint("priority < 100", name="polite"),
            {"comment": "ours"} | OWN_STORAGE,
        )
        tenant_id: Mapped[int | None] = mapped_column(ForeignKey(Tenant.id), index=True)

    with empty.begin() as connection:
        run(connection, "CREATE SCHEMA app")
        Own.metadata.create_all(connection)

    with empty.connect() as connection:
        assert tables(connection) == set()
        assert tables(connection, "app") == {"tenants", *(f"tasks{suffix}" for suffix in SUFFIXES)}
        made = indexes(connection, "tasks", "app")
        assert {"tasks_by_tenant", "ix_app_tasks_tenant_id", "pk_tasks"} < set(made)
        assert {name for name in made if name.endswith("_idx")} == {
            f"tasks_{name}_idx"
            for name in ("claim", "keyed", "one_per_key", "running", "unique", "expiry", "failed")
        }
        assert set(checks(connection, "app.tasks")) == {f"ck_tasks_{name}" for name in ["polite", *BAD_ROWS]}
        assert ask(connection, "SELECT obj_description('app.tasks'::regclass, 'pg_class')") == "ours"
        kept = ask(connection, "SELECT reloptions FROM pg_class WHERE relname = 'tasks'")
        assert kept == (["fillfactor=90"] if OWN_STORAGE else STORAGE)
        require_schema(connection, tables_of(Task).jobs)
        assert channel_of(connection, tables_of(Task).jobs).startswith("sqla_jobs_")
    assert inspect(Task).primary_key == (Task.__table__.c.id,)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def test_columns_of_the_user_travel_to_the_archive(empty: Engine) -> None:
    class Own(DeclarativeBase):
        pass

    class Task(JobMixin, Own):
        __tablename__ = "tasks"
        tenant: Mapped[int] = mapped_column("tenant_id", server_default=text("7"))
        colour: Mapped[Colour | None]
        note: Mapped[str | None] = mapped_column(deferred=True)

    found = tables_of(Task)
    Own.metadata.create_all(empty)
    with Session(empty) as session, session.begin():
        session.add(Task(kind="noop", colour=Colour.BLUE, note="hello"))
        session.add(Task(kind="noop", tenant=8))

    with empty.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        jobs = claim(connection, found, queue="default", owner="A", limit=2, lease=LEASE)
        settle(connection, found, [(job.lease, DONE) for job in jobs], retention=Retention())

        assert rows(connection, "SELECT tenant_id, colour::text, note FROM tasks_archive ORDER BY id") == [
            (7, "BLUE", "hello"),
            (8, None, None),
        ]


def test_a_dataclass_base_can_have_a_job(empty: Engine) -> None:
    class Own(MappedAsDataclass, DeclarativeBase):
        pass

    class Task(JobMixin, Own):
        __tablename__ = "tasks"
        note: Mapped[str | None] = mapped_column(default=None)

    Own.metadata.create_all(empty)

    with Session(empty) as session, session.begin():
        task = Task(note="hello")
        task.kind = "noop"
        session.add(task)

    with empty.connect() as connection:
        assert rows(connection, "SELECT kind, note FROM tasks") == [("noop", "hello")]


def test_two_job_classes_live_on_one_metadata_and_do_not_mix(empty: Engine) -> None:
    class Own(DeclarativeBase):
        pass

    class Fast(JobMixin, Own):
        __tablename__ = "fast_jobs"

    class Slow(JobMixin, Own):
        __tablename__ = "slow_jobs"

    Own.metadata.create_all(empty)
    with Session(empty) as session, session.begin():
        session.add_all([Fast(kind="fast"), Slow(kind="slow")])

    with empty.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        expected = {f"{name}{suffix}" for name in ("fast_jobs", "slow_jobs") for suffix in SUFFIXES}
        assert tables(connection) == expected
        found = [tables_of(cls) for cls in (Fast, Slow)]
        kinds = [
            [job.kind for job in claim(connection, each, queue="default", owner="A", limit=9, lease=LEASE)]
            for each in found
        ]
        assert kinds == [["fast"], ["slow"]]
        assert len({channel_of(connection, each.jobs) for each in found}) == 2


def test_a_subclass_of_a_job_class_shares_its_table(clean: Engine, a: Connection) -> None:
    class Special(Job):
        pass

    with Session(clean) as session, session.begin():
        session.add(Special(kind="special"))

    assert [job.kind for job in claimed(a)] == ["special"]


LONGEST = 63 - len("_dependencies_parent_idx")


@pytest.mark.parametrize("name", ["x" * (LONGEST + 1), "é" * 20])
def test_a_table_name_too_long_for_its_satellites_is_refused_at_mapping(name: str) -> None:
    class Own(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=f"longer than {LONGEST} bytes"):
        type("Task", (JobMixin, Own), {"__tablename__": name})


def test_the_longest_table_name_is_cut_nowhere(empty: Engine) -> None:
    class Own(DeclarativeBase):
        metadata = MetaData(naming_convention=CONVENTION)

    name = "x" * LONGEST
    model = type("Task", (JobMixin, Own), {"__tablename__": name})
    Own.metadata.create_all(empty)

    with empty.connect() as connection:
        assert tables(connection) == {f"{name}{suffix}" for suffix in SUFFIXES}
        assert {index for index in indexes(connection, name) if index.endswith("_idx")} == {
            index.name for index in tables_of(model).jobs.indexes
        }
        require_schema(connection, tables_of(model).jobs)


# -- the ready-made model


@pytest.fixture
def _tidy() -> Iterator[None]:
    """Take what a test adds to the library's own metadata away again: others create all of it."""
    job_model()
    before = set(metadata.tables.values())
    yield
    for table in set(metadata.tables.values()) - before:
        metadata.remove(table)


@pytest.mark.usefixtures("_tidy")
def test_the_ready_made_model_is_made_once_per_name_and_schema() -> None:
    default = job_model()

    assert job_model() is default
    assert job_model("sqla_jobs") is default
    assert job_model(name="sqla_jobs", schema=None) is default
    assert tables_of(job_model("letters")).jobs.name == "letters"
    assert job_model("letters") is job_model("letters")
    assert job_model("letters", "post") is not job_model("letters")
    assert tables_of(job_model("letters", "post")).archive.fullname == "post.letters_archive"
    assert tables_of(default).jobs.metadata is metadata


def test_the_ready_made_model_makes_a_complete_queue(empty: Engine) -> None:
    default = job_model()

    metadata.create_all(empty)

    with empty.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert tables(connection) == {f"sqla_jobs{suffix}" for suffix in SUFFIXES}
        run(connection, "INSERT INTO sqla_jobs (kind) VALUES ('noop')")
        found = claim(connection, tables_of(default), queue="default", owner="A", limit=9, lease=LEASE)
        assert len(found) == 1


def test_a_ready_made_model_with_too_long_a_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="longer than"):
        job_model("x" * 60)


@pytest.mark.parametrize("model", [object, int, Base, JobMixin, "Job", None])
def test_what_is_no_job_class_has_no_tables(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a mapped Job class"):
        tables_of(model)
