"""Pieces that several statements share: literals, clocks, the wake-up of rows that become claimable."""

from typing import Any

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    Boolean,
    ColumnElement,
    Interval,
    ScalarSelect,
    TableValuedAlias,
    Text,
    bindparam,
    case,
    cast,
    column,
    extract,
    func,
    insert,
    literal_column,
    null,
    select,
)
from sqlalchemy.dialects.postgresql import OID
from sqlalchemy.sql.dml import Insert

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.models import Tables
from sqla_jobs.schema import GROUPS

QUEUE = bindparam("q", type_=Text)
OWNER = bindparam("owner", type_=Text)
IDS = bindparam("ids", type_=ARRAY(BigInteger))
LIMIT = bindparam("limit", type_=BigInteger)
LEASE = bindparam("lease", type_=Interval)

# in WHERE: an index condition, and right in a long transaction; for stored ends: the wall clock (ADR 0004)
STATEMENT_TIME = func.statement_timestamp()
CLOCK = func.clock_timestamp()

#: The leaf that a row lives in; RETURNING of an UPDATE knows it unqualified.
RELATION = literal_column("tableoid", OID).label("relation")


def status(value: JobStatus) -> ColumnElement[str]:
    """A status as a literal in the text, never a bind: the planner must see it to use a partial index."""
    return literal_column(f"'{value}'", Text)


def announced(rows: CTE) -> ScalarSelect[int]:
    """Send the trigger's wake-up for `rows` (relation, queue, priority, run_at, status) that are ready."""
    due = func.trunc(extract("epoch", func.greatest(func.min(rows.c.run_at), func.now())), 1)
    groups = (
        select(
            rows.c.relation,
            rows.c.queue,
            rows.c.priority,
            due.label("due"),
            func.count().over().label("groups"),
        )
        .where(rows.c.status == status(JobStatus.READY))
        .group_by(rows.c.relation, rows.c.queue, rows.c.priority)
        .subquery("announced")
    )
    root = func.coalesce(cast(func.pg_partition_root(groups.c.relation), OID), groups.c.relation)
    channel = literal_column("'sqla_jobs_'", Text) + cast(root, Text)
    space = literal_column("' '", Text)
    message = case(
        (groups.c.groups > literal_column(str(GROUPS)), literal_column("'*'", Text)),
        else_=cast(groups.c.priority, Text) + space + cast(groups.c.due, Text) + space + groups.c.queue,
    )
    return select(func.count(func.pg_notify(channel, message))).select_from(groups).scalar_subquery()


def archived(tables: Tables, gone: CTE) -> Insert:
    """Move the rows of `gone` to the archive, unless retention deletes their kind of end at once.

    `gone` has all columns of the jobs table under their names, and `final`, `reason`, `outcome_result`.
    """
    kept = {
        column.name: gone.c[column.name]
        for column in tables.jobs.columns
        if column.name not in {"status", "locked_until", "finished_at", "last_error", "result"}
    }
    values = kept | {
        "status": gone.c.final,
        "locked_until": null(),
        "finished_at": CLOCK,
        "last_error": func.coalesce(gone.c.reason, gone.c.last_error),
        "result": func.coalesce(gone.c.outcome_result, gone.c.result),
    }
    wanted = select(*values.values()).where(
        case(
            (gone.c.final == status(JobStatus.DONE), bindparam("keep_done", type_=Boolean)),
            else_=bindparam("keep_cancelled", type_=Boolean),
        )
    )
    return insert(tables.archive).from_select(list(values), wanted)


def unnested(*columns: tuple[str, Any, str]) -> TableValuedAlias:
    """Rows given as arrays, one bind per column (name, type, bind): constant text however many there are."""
    binds = [bindparam(bind, type_=ARRAY(type_)) for _, type_, bind in columns]
    return (
        func.unnest(*binds)
        .table_valued(*[column(name, type_) for name, type_, _ in columns])
        .render_derived(name="given")
    )


def leases_given() -> TableValuedAlias:
    """Ids and tokens, as arrays."""
    return unnested(("id", BigInteger, "ids"), ("token", BigInteger, "tokens"))
