"""What Declarative cannot say about our tables: the wake-up trigger, the stamp, storage parameters.

DDL as text, and the events that run it under `create_all`; an Alembic operation runs the same text.
Does not define columns or indexes (models do), and knows no Alembic.
"""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import DDL, Connection, Table, event, text

from sqla_jobs.errors import SchemaMismatch

__all__ = [
    "JOBS_STORAGE",
    "VERSION",
    "attach",
    "channel_of",
    "install",
    "qualified",
    "require_schema",
    "require_tables",
    "uninstall",
]

#: The schema this version of the library needs; written into the database as the function's comment.
VERSION = 1

#: Above so many (queue, priority) groups in one statement, one `*` wakes everybody.
GROUPS = 50

# A queue table turns over completely many times an hour: vacuum by a small share of it, without naps.
JOBS_STORAGE: Mapping[str, str] = {
    "autovacuum_vacuum_scale_factor": "0.01",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_analyze_scale_factor": "0.02",
    "autovacuum_analyze_threshold": "1000",
    "autovacuum_vacuum_cost_delay": "0",
}


def _quote(name: str) -> str:
    # not the dialect's: made for statements with parameters, it doubles a percent sign
    return '"' + name.replace('"', '""') + '"'


def _literal(text_: str) -> str:
    # under standard_conforming_strings, the default since PostgreSQL 9.1, a backslash is a backslash
    return "'" + text_.replace("'", "''") + "'"


def qualified(name: str, schema: str | None) -> str:
    """A quoted name, as SQL text and as input of a regclass."""
    quoted = _quote(name)
    return f"{_quote(schema)}.{quoted}" if schema else quoted


# Announces every distinct (queue, priority) once: "priority run_at queue", the queue last because names
# may hold spaces. run_at is epoch seconds; what is due already says the start of the transaction, which
# is constant, so that PostgreSQL folds the messages of many statements of one transaction into one
# (manual: NOTIFY). A transition table, not a row trigger: bulk inserts pay once. The `off` switch is for
# two-phase transactions, which cannot NOTIFY; a reset custom setting reads as '' and not as NULL.
_ANNOUNCE = """
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $sqla_jobs$
BEGIN
  IF pg_catalog.current_setting('sqla_jobs.notify', true) = 'off' THEN
    RETURN NULL;
  END IF;
  PERFORM pg_catalog.pg_notify(
      'sqla_jobs_' || coalesce(pg_catalog.pg_partition_root(TG_RELID)::oid, TG_RELID),
      CASE WHEN g.groups > {groups} THEN '*' ELSE g.priority || ' ' || g.due || ' ' || g.queue END)
  FROM (
    SELECT queue, priority, count(*) OVER () AS groups,
           pg_catalog.trunc(extract(epoch FROM
             CASE WHEN min(run_at) <= pg_catalog.statement_timestamp() THEN pg_catalog.now()
                  ELSE min(run_at) END), 1) AS due
    FROM fresh WHERE status = 'ready' GROUP BY queue, priority
  ) g;
  RETURN NULL;
END
$sqla_jobs$
"""

_TRIGGER = """
CREATE OR REPLACE TRIGGER {trigger} AFTER INSERT ON {table}
REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION {function}()
"""

# By a statement of its own and not by Table(postgresql_with=...), which SQLAlchemy 2.0 does not know. Only
# where nothing is set: what an operator has tuned stays.
_STORAGE = """
DO $sqla_jobs$ BEGIN
  IF (SELECT reloptions IS NULL FROM pg_catalog.pg_class WHERE oid = {literal}::pg_catalog.regclass) THEN
    ALTER TABLE {table} SET ({storage});
  END IF;
END $sqla_jobs$
"""


def install(name: str, schema: str | None = None) -> Sequence[str]:
    """The statements that complete the jobs table `name`; running them again changes nothing."""
    names = {
        "table": qualified(name, schema),
        "function": qualified(f"{name}_announce", schema),
        "trigger": _quote(f"{name}_announce"),
        "literal": _literal(qualified(name, schema)),
        "storage": ", ".join(f"{option} = {value}" for option, value in JOBS_STORAGE.items()),
    }
    return [
        _ANNOUNCE.format(groups=GROUPS, **names).strip(),
        f"COMMENT ON FUNCTION {names['function']}() IS 'sqla_jobs schema {VERSION}'",
        _TRIGGER.format(**names).strip(),
        _STORAGE.format(**names).strip(),
    ]


def uninstall(name: str, schema: str | None = None) -> Sequence[str]:
    """The statements that undo `install`; the trigger goes with the function."""
    return [f"DROP FUNCTION IF EXISTS {qualified(f'{name}_announce', schema)}() CASCADE"]


def attach(jobs: Table) -> None:
    """Run `install` when `create_all` creates this table, and `uninstall` when `drop_all` drops it."""

    def created(target: Table, connection: Connection, **_: object) -> None:
        for statement in install(target.name, connection.schema_for_object(target)):
            connection.execute(_verbatim(statement))

    def dropped(target: Table, connection: Connection, **_: object) -> None:
        for statement in uninstall(target.name, connection.schema_for_object(target)):
            connection.execute(_verbatim(statement))

    event.listen(jobs, "after_create", created)
    event.listen(jobs, "after_drop", dropped)


def _verbatim(statement: str) -> DDL:
    return DDL(statement.replace("%", "%%"))  # type: ignore[no-untyped-call]


def channel_of(connection: Connection, jobs: Table) -> str:
    """The LISTEN channel of this table: named by its oid, so that a rename or SET SCHEMA keeps it."""
    oid = _oid(connection, jobs)
    if oid is None:
        raise _missing(connection, jobs)
    return f"sqla_jobs_{oid}"


def require_schema(connection: Connection, jobs: Table) -> None:
    """Raise `SchemaMismatch` unless the jobs table exists, with our trigger in this version or newer."""
    if _oid(connection, jobs) is None:
        raise _missing(connection, jobs)
    schema = connection.schema_for_object(jobs)
    version = connection.scalar(_STAMPED, {"name": qualified(jobs.name, schema)}) or 0
    if version < VERSION:
        found = f"schema {version}" if version else "no wake-up trigger of ours"
        raise SchemaMismatch(
            f"table {qualified(jobs.name, schema)} has {found}, this version of sqla_jobs needs schema "
            f"{VERSION}: run your migrations (alembic upgrade head), or metadata.create_all() on an empty "
            "database"
        )


def require_tables(connection: Connection, tables: Iterable[Table]) -> None:
    """Raise `SchemaMismatch` unless these exist too."""
    for table in tables:
        if _oid(connection, table) is None:
            raise _missing(connection, table)


# by the function of the table's own trigger, not by name: a rename of the table keeps both
_STAMPED = text(
    "SELECT max(substring(obj_description(tgfoid, 'pg_proc') FROM '^sqla_jobs schema ([0-9]+)$')::int) "
    "FROM pg_trigger WHERE tgrelid = to_regclass(:name)"
)

_OID = text(
    "SELECT coalesce(pg_partition_root(relation)::oid, relation::oid)::bigint "
    "FROM (SELECT to_regclass(:name) AS relation) AS named"
)


def _oid(connection: Connection, jobs: Table) -> int | None:
    name = qualified(jobs.name, connection.schema_for_object(jobs))
    oid: int | None = connection.scalar(_OID, {"name": name})
    return oid


def _missing(connection: Connection, jobs: Table) -> SchemaMismatch:
    database = connection.engine.url.database
    return SchemaMismatch(
        f"there is no table {qualified(jobs.name, connection.schema_for_object(jobs))} in database "
        f"{database!r}: run your migrations (alembic upgrade head), or metadata.create_all()"
    )
