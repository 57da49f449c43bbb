"""The wake-up that every enqueue sends, from wherever it comes, and the check that it is there."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import errors, sql
from sqlalchemy import Connection, Engine, MetaData, create_engine, make_url
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.schema import CreateSchema
from steps import TABLES, Ear, ask, autocommit, claimed, listening, run

from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.errors import SchemaMismatch
from sqla_jobs.models import JobMixin, tables_of
from sqla_jobs.schema import channel_of, install, require_schema, uninstall
from sqla_jobs.worker.wakeup import parse


@pytest.fixture
def user(clean_url: str) -> Iterator[psycopg.Connection]:
    """Somebody who enqueues with nothing but a driver."""
    with psycopg.connect(clean_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def ear(clean_url: str) -> Iterator[Ear]:
    with listening(clean_url) as ear:
        yield ear


def groups(messages: list[str]) -> list[tuple[str, str]]:
    """(priority, queue) of each message, sorted."""
    return sorted((message.split(" ", 2)[0], message.split(" ", 2)[2]) for message in messages)


PUT = "INSERT INTO background_jobs (kind, queue, priority) VALUES ('noop', %s, %s)"


# -- one message per distinct (queue, priority) and transaction


def test_one_insert_is_one_message(user: psycopg.Connection, ear: Ear) -> None:
    user.execute(PUT, ["mail", 3])

    assert groups(ear.heard()) == [("3", "mail")]


def test_many_rows_of_one_insert_are_one_message(user: psycopg.Connection, ear: Ear) -> None:
    user.execute("INSERT INTO background_jobs (kind) SELECT 'noop' FROM generate_series(1, 1000)")

    assert groups(ear.heard()) == [("0", "default")]


def test_each_queue_and_priority_of_an_insert_is_one_message(user: psycopg.Connection, ear: Ear) -> None:
    user.execute(
        "INSERT INTO background_jobs (kind, queue, priority) "
        "SELECT 'noop', q, p FROM unnest(ARRAY['a', 'b']) q, generate_series(1, 2) p, generate_series(1, 5)"
    )

    assert groups(ear.heard()) == [("1", "a"), ("1", "b"), ("2", "a"), ("2", "b")]


def test_many_statements_of_a_transaction_fold_into_one_message(user: psycopg.Connection, ear: Ear) -> None:
    with user.transaction():
        for _ in range(50):
            user.execute(PUT, ["mail", 0])
        user.execute(PUT, ["files", 0])

    assert groups(ear.heard()) == [("0", "files"), ("0", "mail")]


def test_a_transaction_that_takes_its_time_still_sends_one_message(
    user: psycopg.Connection, ear: Ear
) -> None:
    with user.transaction():
        for _ in range(3):
            user.execute(PUT, ["mail", 0])
            user.execute("SELECT pg_sleep(0.15)")  # longer than the resolution of the message

    assert groups(ear.heard()) == [("0", "mail")]


def test_copy_is_one_message(user: psycopg.Connection, ear: Ear) -> None:
    with user.cursor() as cursor, cursor.copy("COPY background_jobs (kind, queue) FROM STDIN") as copy:
        for _ in range(100):
            copy.write_row(("noop", "mail"))

    assert groups(ear.heard()) == [("0", "mail")]


def test_merge_is_one_message(user: psycopg.Connection, ear: Ear) -> None:
    user.execute(
        "MERGE INTO background_jobs j USING generate_series(1, 10) n ON j.id = -n "
        "WHEN NOT MATCHED THEN INSERT (kind, queue) VALUES ('noop', 'mail')"
    )

    assert groups(ear.heard()) == [("0", "mail")]


def test_an_insert_that_inserts_nothing_is_silent(user: psycopg.Connection, ear: Ear) -> None:
    put = "INSERT INTO background_jobs (id, kind) VALUES (7, 'noop') ON CONFLICT DO NOTHING"
    user.execute(put)
    assert len(ear.heard()) == 1

    user.execute(put)
    user.execute("INSERT INTO background_jobs (kind) SELECT 'noop' WHERE false")

    assert ear.heard() == []


def test_only_ready_rows_are_announced(user: psycopg.Connection, ear: Ear) -> None:
    user.execute("INSERT INTO background_jobs (kind, status) VALUES ('noop', 'blocked'), ('noop', 'failed')")

    assert ear.heard() == []


@pytest.mark.parametrize(("count", "expected"), [(50, 50), (51, 1), (500, 1)])
def test_more_than_fifty_groups_wake_everybody_by_one_message(
    user: psycopg.Connection, ear: Ear, count: int, expected: int
) -> None:
    user.execute(
        "INSERT INTO background_jobs (kind, queue) SELECT 'noop', 'q' || n FROM generate_series(1, %s) n",
        [count],
    )

    messages = ear.heard()
    assert len(messages) == expected
    assert (messages == ["*"]) is (expected == 1)


def test_psql_wakes_workers(server: EmbeddedPostgres, user: psycopg.Connection, ear: Ear) -> None:
    server.psql("INSERT INTO background_jobs (kind, payload) VALUES ('noop', '{}')", user.info.dbname)

    assert groups(ear.heard()) == [("0", "default")]


# -- what did not happen is not announced


def test_a_rollback_is_silent(user: psycopg.Connection, ear: Ear) -> None:
    with user.transaction(force_rollback=True):
        user.execute(PUT, ["mail", 0])

    assert ear.heard() == []


def test_a_savepoint_that_was_rolled_back_is_silent(user: psycopg.Connection, ear: Ear) -> None:
    with user.transaction():
        user.execute(PUT, ["kept", 0])
        with user.transaction(force_rollback=True):
            user.execute(PUT, ["dropped", 0])

    assert groups(ear.heard()) == [("0", "kept")]


def test_nothing_is_heard_before_the_commit(user: psycopg.Connection, ear: Ear) -> None:
    with user.transaction():
        user.execute(PUT, ["mail", 0])
        before = ear.heard()

    assert before == []
    assert len(ear.heard()) == 1


# -- the message


@pytest.mark.parametrize(
    "queue",
    ["two words", "  ", "0 1764535510.1 x", "it's", 'a "quoted" one', "größe→💥", "é" * 100, "*", "\t\n"],
    ids=ascii,
)
def test_a_queue_of_any_name_arrives_whole(user: psycopg.Connection, ear: Ear, queue: str) -> None:
    user.execute(PUT, [queue, -32768])

    [message] = ear.heard()
    assert message.split(" ", 2)[::2] == ["-32768", queue]
    assert parse(message)[0] == queue


def test_a_due_job_is_announced_for_now(user: psycopg.Connection, ear: Ear) -> None:
    user.execute("INSERT INTO background_jobs (kind, run_at) VALUES ('noop', '2020-01-01')")
    found = user.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()

    [message] = ear.heard()
    assert found is not None
    assert parse(message)[1] == pytest.approx(found[0], abs=2)


def test_a_future_job_is_announced_with_its_time(user: psycopg.Connection, ear: Ear) -> None:
    user.execute("INSERT INTO background_jobs (kind, run_at) VALUES ('noop', '2999-01-01 00:00:00.25+00')")

    assert ear.heard() == ["0 32472144000.2 default"]


def test_the_earliest_of_a_group_is_announced(user: psycopg.Connection, ear: Ear) -> None:
    user.execute(
        "INSERT INTO background_jobs (kind, run_at) VALUES "
        "('noop', '2999-01-03'), ('noop', '2999-01-01 00:00+00'), ('noop', '2999-01-02')"
    )

    assert ear.heard() == ["0 32472144000.0 default"]


def test_a_parked_job_disturbs_nobody(user: psycopg.Connection, ear: Ear) -> None:
    user.execute("INSERT INTO background_jobs (kind, run_at) VALUES ('noop', 'infinity')")

    [message] = ear.heard()
    assert parse(message) == ("default", float("inf"))


# -- the off-switch, and two-phase transactions


def test_the_off_switch_holds_for_its_transaction_only(user: psycopg.Connection, ear: Ear) -> None:
    with user.transaction():
        user.execute("SET LOCAL sqla_jobs.notify = 'off'")
        user.execute(PUT, ["quiet", 0])
    user.execute(PUT, ["loud", 0])  # the setting now reads '' and not NULL

    assert groups(ear.heard()) == [("0", "loud")]


@pytest.mark.parametrize("value", ["on", "", "true", "whatever"])
def test_only_off_is_off(user: psycopg.Connection, ear: Ear, value: str) -> None:
    with user.transaction():
        user.execute("SELECT set_config('sqla_jobs.notify', %s, true)", [value])
        user.execute(PUT, ["mail", 0])

    assert groups(ear.heard()) == [("0", "mail")]


def test_a_two_phase_transaction_cannot_notify(user: psycopg.Connection) -> None:
    """The manual says so (PREPARE TRANSACTION); this is why the off-switch exists."""
    user.execute("BEGIN")
    user.execute(PUT, ["mail", 0])

    with pytest.raises(errors.FeatureNotSupported, match="NOTIFY"):
        user.execute("PREPARE TRANSACTION 'one'")

    user.execute("ROLLBACK")


def test_a_two_phase_transaction_with_the_off_switch_prepares_and_commits_in_silence(
    user: psycopg.Connection, ear: Ear, a: Connection
) -> None:
    user.execute("BEGIN")
    user.execute("SELECT set_config('sqla_jobs.notify', 'off', true)")
    user.execute(PUT, ["mail", 0])
    user.execute("PREPARE TRANSACTION 'two'")
    assert claimed(a, queue="mail") == []

    user.execute("COMMIT PREPARED 'two'")

    assert ear.heard() == []
    assert len(claimed(a, queue="mail")) == 1


# -- names


@contextmanager
def database(url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("schema", "table"),
    [
        (None, "MixedCase"),
        (None, "50%x"),
        ("My Schema", 'odd "jobs"'),
        ("select", "table"),
        ("größe", "über'jobs"),
    ],
)
def test_names_that_need_quotes_work_from_create_to_drop(
    empty_database_url: str, schema: str | None, table: str
) -> None:
    class Own(DeclarativeBase):
        metadata = MetaData(schema=schema)

    model = type("Task", (JobMixin, Own), {"__tablename__": table})
    jobs = tables_of(model).jobs
    name = sql.Identifier(*filter(None, (schema, table)))
    with database(empty_database_url) as engine, autocommit(engine) as connection:
        if schema:
            connection.execute(CreateSchema(schema))

        Own.metadata.create_all(connection)

        require_schema(connection, jobs)
        with psycopg.connect(empty_database_url, autocommit=True) as user:
            ear = Ear(empty_database_url, name.as_string())
            user.execute(sql.SQL("INSERT INTO {} (kind) VALUES ('noop')").format(name))
            assert groups(ear.heard()) == [("0", "default")]
            ear.close()
            oid = user.execute("SELECT %s::regclass::oid", [name.as_string()]).fetchone()
        assert oid is not None
        assert channel_of(connection, jobs) == f"sqla_jobs_{oid[0]}"

        Own.metadata.drop_all(connection)

        assert ask(connection, "SELECT count(*) FROM pg_proc WHERE proname LIKE '%announce'") == 0


def test_the_channel_survives_a_rename(empty_database_url: str) -> None:
    class Own(DeclarativeBase):
        pass

    class Old(JobMixin, Own):
        __tablename__ = "old_jobs"

    class Other(DeclarativeBase):
        pass

    class New(JobMixin, Other):
        __tablename__ = "new_jobs"

    with database(empty_database_url) as engine, autocommit(engine) as connection:
        Own.metadata.create_all(connection)
        before = channel_of(connection, tables_of(Old).jobs)
        with listening(empty_database_url, "old_jobs") as ear:
            run(connection, "ALTER TABLE old_jobs RENAME TO new_jobs")
            run(connection, "INSERT INTO new_jobs (kind) VALUES ('noop')")

            assert groups(ear.heard()) == [("0", "default")]
        assert channel_of(connection, tables_of(New).jobs) == before
        require_schema(connection, tables_of(New).jobs)


def test_installing_again_changes_nothing(clean: Engine, user: psycopg.Connection, ear: Ear) -> None:
    with clean.begin() as connection:
        for statement in install("background_jobs"):
            connection.exec_driver_sql(statement)

    user.execute(PUT, ["mail", 0])

    assert len(ear.heard()) == 1


def test_uninstalling_takes_the_trigger_away(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in uninstall("background_jobs"):
            connection.exec_driver_sql(statement)

        assert ask(connection, "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal") == 0
        run(connection, "INSERT INTO background_jobs (kind) VALUES ('noop')")


# -- the check at start-up


def test_a_complete_schema_is_accepted(a: Connection) -> None:
    require_schema(a, TABLES.jobs)


def test_a_database_without_the_table_is_refused_by_name(empty_database_url: str) -> None:
    name = make_url(empty_database_url).database
    with database(empty_database_url) as engine, autocommit(engine) as connection:
        with pytest.raises(SchemaMismatch, match=f"no table \"background_jobs\" in database '{name}'"):
            require_schema(connection, TABLES.jobs)
        with pytest.raises(SchemaMismatch, match="alembic upgrade head"):
            channel_of(connection, TABLES.jobs)


BROKEN = {
    "no function": "DROP FUNCTION background_jobs_announce CASCADE",
    "no trigger": "DROP TRIGGER background_jobs_announce ON background_jobs",
    "no stamp": "COMMENT ON FUNCTION background_jobs_announce IS NULL",
    "the stamp of somebody else": "COMMENT ON FUNCTION background_jobs_announce IS 'mine'",
    "no number": "COMMENT ON FUNCTION background_jobs_announce IS 'sqla_jobs schema x'",
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=list(BROKEN))
def test_a_table_without_our_trigger_is_refused(clean: Engine, change: str) -> None:
    with clean.connect() as connection:  # rolled back
        run(connection, change)

        with pytest.raises(SchemaMismatch, match="has no wake-up trigger of ours"):
            require_schema(connection, TABLES.jobs)


def test_an_older_schema_is_refused_with_what_to_do(clean: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqla_jobs.schema.VERSION", 2)

    with clean.connect() as connection:
        run(connection, "COMMENT ON FUNCTION background_jobs_announce IS 'sqla_jobs schema 1'")

        with pytest.raises(SchemaMismatch, match=r"has schema 1, .* needs schema 2: run your migrations"):
            require_schema(connection, TABLES.jobs)


def test_a_newer_schema_is_accepted(clean: Engine) -> None:
    with clean.connect() as connection:
        run(connection, "COMMENT ON FUNCTION background_jobs_announce IS 'sqla_jobs schema 99'")

        require_schema(connection, TABLES.jobs)
