"""The rows of calls: which statement writes them, and what became of each.

Jobs without a unique key go by one statement of constant text however many they are; those with one by
another that leaves out what is there already. A job with values for columns of the user's goes through
their types. Called within a flush, on the session's own connection.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from itertools import groupby
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Connection,
    Executable,
    Insert,
    Integer,
    Interval,
    NestedTransaction,
    SmallInteger,
    Table,
    Text,
    bindparam,
    cast,
    column,
    func,
    inspect,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Mapper, Session

from sqla_jobs.core.call import Call, Options
from sqla_jobs.core.payload import Json, Reference
from sqla_jobs.errors import ConfigurationError, SqlaJobsError
from sqla_jobs.models import LIVE_KEYS, JobMixin, own_columns
from sqla_jobs.outbox.handles import Enqueued

__all__ = ["WITHOUT_WAKE_UP", "Row", "connection_of", "select_statement", "write_rows"]

#: A statement takes at most so many rows: their arrays are in memory here, on the wire, and there.
_CHUNK = 10_000
#: So often a unique key may be taken and given back between our INSERT and our look at who has it.
_TRIES = 20

#: PREPARE TRANSACTION refuses a transaction that has sent a NOTIFY (manual: PREPARE TRANSACTION).
WITHOUT_WAKE_UP = text("SELECT set_config('sqla_jobs.notify', 'off', true)")

#: A call, its handle, and how its references become identities.
Row = tuple[Call, Enqueued, Callable[[Reference], Json]]

_PARAMETERS = (
    ("queue", Text),
    ("kind", Text),
    ("payload", Text),
    ("priority", SmallInteger),
    ("run_at", None),
    ("delay", Interval),
    ("max_attempts", Integer),
    ("expires_at", None),
    ("expires_in", Interval),
    ("meta", Text),
    ("unique_key", Text),
)


def connection_of(session: Session, model: type[JobMixin]) -> Connection:
    """The session's connection for this table, in its transaction."""
    connection = session.connection(bind_arguments={"mapper": inspect(model)})
    if session.twophase:
        connection.execute(WITHOUT_WAKE_UP)
    return connection


def write_rows(session: Session, model: type[JobMixin], rows: Sequence[Row]) -> None:
    """Write calls of one model: those without a unique key in their order, then the others by key."""
    mapper: Mapper[Any] = inspect(model)
    connection = connection_of(session, model)
    jobs = mapper.local_table
    assert isinstance(jobs, Table)
    always = _always(mapper, jobs)
    keyed = [row for row in rows if row[0].options.unique_key is not None]
    plain = rows if not keyed else [row for row in rows if row[0].options.unique_key is None]
    for wide, some in _runs(plain, lambda row: always is not None or bool(row[0].options.columns)):
        if wide:
            _put_wide(connection, jobs, some, always or {})
        else:
            _put_plain(connection, jobs, some)
    if keyed:
        _put_keyed(connection, jobs, keyed, always)


def _always(mapper: Mapper[Any], jobs: Table) -> dict[str, Any] | None:
    """Values that every row has for columns of the user's; None when the database fills them all."""
    users = [each for each in jobs.c if each.name not in own_columns()]
    values = {}
    if mapper.polymorphic_on is not None and mapper.polymorphic_identity is not None:
        values[mapper.polymorphic_on.name] = mapper.polymorphic_identity
    return values if values or any(each.default is not None for each in users) else None


def _runs(rows: Sequence[Row], kind: Callable[[Row], bool]) -> Iterator[tuple[bool, Sequence[Row]]]:
    """Neighbours of one kind together, at most a chunk of them."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or kind(rows[end]) is not kind(rows[start]) or end - start == _CHUNK:
            yield kind(rows[start]), rows[start:end]
            start = end


# -- without a unique key


@cache
def put_statement(jobs: Table) -> Executable:
    """Many jobs in one statement of constant text, ids in the order of the calls.

    The rows are sorted below the INSERT, and PostgreSQL draws the identity above the sort.
    """
    return _given_rows(jobs).returning(jobs.c.id)


def _given_rows(jobs: Table) -> Insert:
    moment = jobs.c.run_at.type
    types = {name: type_ or moment for name, type_ in _PARAMETERS}
    given = (
        func.unnest(*[bindparam(f"{name}_s", type_=ARRAY(type_)) for name, type_ in types.items()])
        .table_valued(
            *[column(name, type_) for name, type_ in types.items()],
            with_ordinality="place",
            name="given",
        )
        .render_derived()
    )
    values = _values({name: given.c[name] for name in types})
    rows = select(*values.values()).order_by(literal_column("place", BigInteger))
    return insert(jobs).from_select(list(values), rows, include_defaults=False)


def _values(g: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that an enqueue fills, of the parameters of a call."""
    now = func.statement_timestamp()
    return {
        "queue": g["queue"],
        "kind": g["kind"],
        "payload": cast(g["payload"], JSONB),
        "priority": g["priority"],
        "run_at": func.coalesce(g["run_at"], now + g["delay"], now),
        "max_attempts": g["max_attempts"],
        "expires_at": func.coalesce(g["expires_at"], now + g["expires_in"]),
        "meta": cast(g["meta"], JSONB),
        "unique_key": g["unique_key"],
    }


def _put_plain(connection: Connection, jobs: Table, rows: Sequence[Row]) -> None:
    ids = connection.scalars(put_statement(jobs), _arrays([_parameters(row) for row in rows])).all()
    for row, id_ in zip(rows, sorted(ids), strict=True):
        row[1]._id = id_


def _arrays(rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    return {f"{name}_s": [row[i] for row in rows] for i, (name, _) in enumerate(_PARAMETERS)}


def _parameters(row: Row) -> tuple[Any, ...]:
    call, _, identities = row
    return (call.options.queue, call.kind, call.arguments.text(identities), *_options(call.options))


def _options(options: Options) -> tuple[Any, ...]:
    expires = options.expires
    return (
        options.priority,
        options.run_at,
        options.delay,
        options.max_attempts,
        expires if isinstance(expires, datetime) else None,
        expires if isinstance(expires, timedelta) else None,
        json.dumps({"tags": list(options.tags)}) if options.tags else None,
        options.unique_key,
    )


# -- with a unique key


@cache
def put_keyed_statement(jobs: Table) -> Any:
    """The same, less those whose key a waiting or running job has.

    DO NOTHING waits for a transaction that holds the key and has not ended: after its rollback ours is
    written, after its commit it is left out (manual: INSERT). DO UPDATE would lock a running job's row.
    """
    return _skipping(jobs, _given_rows(jobs)).returning(jobs.c.id, jobs.c.queue, jobs.c.unique_key)


def _skipping(jobs: Table, statement: Any) -> Any:
    return statement.on_conflict_do_nothing(
        index_elements=[jobs.c.queue, jobs.c.unique_key], index_where=text(LIVE_KEYS)
    )


@cache
def holders_statement(jobs: Table) -> Executable:
    """Who has these keys."""
    c = jobs.c
    given = (
        func.unnest(bindparam("queues", type_=ARRAY(Text)), bindparam("keys", type_=ARRAY(Text)))
        .table_valued(column("its_queue", Text), column("its_key", Text))
        .render_derived(name="given")
    )
    return select(c.id, c.queue, c.unique_key, c.status).where(
        c.queue == given.c.its_queue, c.unique_key == given.c.its_key, text(LIVE_KEYS)
    )


def _put_keyed(
    connection: Connection, jobs: Table, rows: Sequence[Row], always: dict[str, Any] | None
) -> None:
    """Skip what is there. In the order of their keys, so that two flushes never wait for each other."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault(_key(row), row)
    ordered = [first[key] for key in sorted(first)]
    vanished: list[Row] = []
    for _ in range(_TRIES):
        savepoint = _savepoint(connection, ordered)
        put = _put_in_order(connection, jobs, ordered, always)
        for row in ordered:
            handle = row[1]
            handle._id, handle._created, handle._conflict = put.get(_key(row)), True, None
        vanished = _find_holders(connection, jobs, [row for row in ordered if row[1]._id is None])
        if savepoint is not None:
            savepoint.rollback() if vanished else savepoint.commit()
        if not vanished:
            break
    else:
        queue, key = _key(vanished[0])
        raise SqlaJobsError(
            f"unique key {key[:60]!r} of queue {queue!r} was taken and given back {_TRIES} times: try again"
        )
    for row in rows:
        holder = first[_key(row)]
        if row is not holder:  # folded: an equal call came before it in this flush
            handle = row[1]
            handle._id, handle._created = holder[1]._id, False
            handle._conflict = holder[1]._conflict or "waiting"


def _savepoint(connection: Connection, rows: Sequence[Row]) -> NestedTransaction | None:
    """Where a second try begins again: it must not ask for an earlier key while it holds later ones.

    In AUTOCOMMIT nothing is held after the statement.
    """
    autocommit = getattr(connection.connection.dbapi_connection, "autocommit", False)
    return None if len(rows) == 1 or autocommit else connection.begin_nested()


def _put_in_order(
    connection: Connection, jobs: Table, rows: Sequence[Row], always: dict[str, Any] | None
) -> dict[tuple[str, str], int]:
    if always is not None or any(row[0].options.columns for row in rows):
        return _one_by_one(connection, jobs, rows, always or {})
    put: dict[tuple[str, str], int] = {}
    for start in range(0, len(rows), _CHUNK):
        arrays = _arrays([_parameters(row) for row in rows[start : start + _CHUNK]])
        written: Any = connection.execute(put_keyed_statement(jobs), arrays)
        put |= {(row[1], row[2]): row[0] for row in written}
    return put


def _one_by_one(
    connection: Connection, jobs: Table, rows: Sequence[Row], always: dict[str, Any]
) -> dict[tuple[str, str], int]:
    put = {}
    for row in rows:
        names, values = _wide(row, always)
        id_ = connection.scalar(put_wide_statement(jobs, names, skips=True), values)
        if id_ is not None:
            put[_key(row)] = id_
    return put


def _find_holders(connection: Connection, jobs: Table, rows: Sequence[Row]) -> list[Row]:
    """Tell the handles of `rows` who has their key; returns those whose holder has vanished meanwhile."""
    if not rows:
        return []
    keys = [_key(row) for row in rows]
    found = connection.execute(
        holders_statement(jobs), {"queues": [queue for queue, _ in keys], "keys": [key for _, key in keys]}
    )
    holders = {(queue, key): (id_, status) for id_, queue, key, status in found}
    vanished = []
    for row in rows:
        holder = holders.get(_key(row))
        if holder is None:
            vanished.append(row)
            continue
        handle = row[1]
        handle._id, handle._created = holder[0], False
        handle._conflict = "running" if holder[1] == "running" else "waiting"
    return vanished


def _key(row: Row) -> tuple[str, str]:
    options = row[0].options
    return options.queue, options.unique_key or ""


# -- with columns of the user's


@cache
def put_wide_statement(jobs: Table, names: tuple[str, ...], *, skips: bool) -> Any:
    """Jobs with values for `names`: their types and the defaults of all columns apply."""
    moment = jobs.c.run_at.type
    values = _values({name: bindparam(f"its_{name}", type_=type_ or moment) for name, type_ in _PARAMETERS})
    values |= {name: bindparam(f"user_{name}", type_=jobs.c[name].type) for name in names}
    statement = insert(jobs).values(values)
    if skips:
        return _skipping(jobs, statement).returning(jobs.c.id)
    return statement.returning(jobs.c.id, sort_by_parameter_order=True)


def _put_wide(connection: Connection, jobs: Table, rows: Sequence[Row], always: dict[str, Any]) -> None:
    """Neighbours with values for the same columns together: the ids are in the order of the calls."""
    wide = [(row, *_wide(row, always)) for row in rows]
    for names, together in groupby(wide, key=lambda each: each[1]):
        some = [(row, values) for row, _, values in together]
        statement = put_wide_statement(jobs, names, skips=False)
        ids = connection.scalars(statement, [values for _, values in some]).all()
        for (row, _), id_ in zip(some, ids, strict=True):
            row[1]._id = id_


def _wide(row: Row, always: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    columns = {**always, **dict(row[0].options.columns)}
    values = {f"its_{name}": value for (name, _), value in zip(_PARAMETERS, _parameters(row), strict=True)}
    return tuple(sorted(columns)), values | {f"user_{name}": value for name, value in columns.items()}


# -- of a select


def select_statement(
    mapper: Mapper[Any], jobs: Table, kind: str, options: Options, source: Any, payload: Any
) -> Insert:
    """A job for every row of `source`, whose arguments are `payload`, an expression over its columns.

    Raises `ConfigurationError` for a column of the user's whose default is a function in Python.
    """
    moment = jobs.c.run_at.type
    given = (options.queue, kind, "{}", *_options(options))
    binds = {
        name: bindparam(f"its_{name}", value, type_=type_ or moment)
        for (name, type_), value in zip(_PARAMETERS, given, strict=True)
    }
    values = _values(binds) | {"payload": payload}
    for name, value in _same_in_every_row(mapper, jobs, options).items():
        values[name] = bindparam(f"user_{name}", value, type_=jobs.c[name].type)
    for column_ in jobs.c:
        default: Any = column_.default
        if default is None or column_.name in values:
            continue
        if default.is_clause_element:
            values[column_.name] = default.arg
        elif default.is_sequence:
            values[column_.name] = default.next_value()
    rows = select(*[expression.label(f"put_{name}") for name, expression in values.items()])
    statement = insert(jobs).from_select(list(values), rows.select_from(source), include_defaults=False)
    return statement.execution_options(preserve_rowcount=True)  # else SQLAlchemy forgets it for an INSERT


def _same_in_every_row(mapper: Mapper[Any], jobs: Table, options: Options) -> dict[str, Any]:
    given = (_always(mapper, jobs) or {}) | dict(options.columns)
    for column_ in jobs.c:
        default: Any = column_.default
        if default is None or column_.name in own_columns() or column_.name in given:
            continue
        if default.is_clause_element or default.is_sequence:
            continue  # the database can: select_statement
        if not default.is_scalar:
            raise ConfigurationError(
                f"column {column_.name!r} of {jobs.name} has a default in Python, which no select can call: "
                "give it a server_default, or a value by task.using(columns=...)"
            )
        given[column_.name] = default.arg
    return given
