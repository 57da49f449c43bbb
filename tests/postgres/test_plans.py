"""How PostgreSQL runs the statements of the hot path: by their indexes, whatever the size of the table.

Each is planned twice: for its parameters, and as the generic plan that a prepared statement gets after
five executions.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from psycopg.sql import SQL, Literal
from sqlalchemy import Connection, Engine, Executable, create_engine, make_url, text
from sqlalchemy.dialects.postgresql import psycopg as dialect
from steps import LEASE, TABLES

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.store.archive import purge_statement
from sqla_jobs.store.claim import Which, claim_statement, next_due_statement, release_unknown_statement
from sqla_jobs.store.find import find_statement
from sqla_jobs.store.lease import ours_statement, prolong_statement
from sqla_jobs.store.rescue import (
    cancel_late_statement,
    expired_leases_statement,
    late_statement,
    left_behind_statement,
)
from sqla_jobs.store.settle import done_statement, look_statement, mixed_statement

JOBS = "background_jobs"

# 20,000 rows as a busy table has them: mostly waiting, of several priorities, some not yet due, 1,000 running
# under 10 owners, some dead letters; half of it in another queue. As many in the archive.
ROWS = """
INSERT INTO background_jobs (kind, queue, status, priority, run_at, locked_by, locked_until, fencing_token,
                             finished_at, expires_at)
SELECT 'noop',
       CASE WHEN n % 2 = 0 THEN 'default' ELSE 'mail' END,
       CASE WHEN n % 20 = 4 THEN 'running' WHEN n % 20 = 6 THEN 'failed' ELSE 'ready' END,
       n % 5,
       statement_timestamp() + (n % 100 - 80) * interval '1 minute',
       CASE WHEN n % 20 = 4 THEN 'worker ' || n / 20 % 10 END,
       CASE WHEN n % 20 = 4 THEN statement_timestamp() + (n % 60) * interval '1 second' END,
       n % 3,
       CASE WHEN n % 20 = 6 THEN statement_timestamp() - (n % 80) * interval '1 day' END,
       CASE WHEN n % 50 = 0 THEN statement_timestamp() + (n % 90 - 5) * interval '1 minute' END
FROM generate_series(1, 20000) n
"""
OLD_ROWS = """
INSERT INTO background_jobs_archive (id, queue, kind, payload, status, priority, run_at, attempts,
                                     max_attempts, fencing_token, unique_until_start, version, created_at,
                                     finished_at)
SELECT n, 'default', 'noop', '{}', CASE WHEN n % 10 = 0 THEN 'cancelled' ELSE 'done' END, 0,
       statement_timestamp(), 1, 20, 1, false, 1, statement_timestamp(),
       statement_timestamp() - (n % 1000) * interval '10 minutes'
FROM generate_series(20001, 40000) n
"""

IDS = list(range(4, 2004, 20))
BATCH: dict[str, Any] = {
    "q": "default",
    "owner": "worker 0",
    "ids": IDS,
    "tokens": [1] * len(IDS),
    "keep_done": True,
    "keep_cancelled": True,
    "lease": LEASE,
}
VERDICTS = {
    "statuses": ["ready"] * len(IDS),
    "given_back": [0] * len(IDS),
    "delays": [2.0] * len(IDS),
    "errors": ["boom"] * len(IDS),
    "results": [None] * len(IDS),
    "owners": ["worker 0"] * len(IDS),
}
WEEK = {"age": LEASE * 60 * 24 * 7, "limit": 1000}

FENCED = {"pkey", "running_idx"}
#: name -> statement, parameters, the indexes of the jobs table that it may use
STATEMENTS: dict[str, tuple[Executable, dict[str, Any], set[str]]] = {
    "claim": (
        claim_statement(TABLES.jobs),
        BATCH | {"limit": 100, "prefetch": False},
        {"claim_idx", "pkey"},
    ),
    "claim ahead": (
        claim_statement(TABLES.jobs),
        BATCH | {"limit": 500, "prefetch": True},
        {"claim_idx", "pkey"},
    ),
    "claim beside": (
        claim_statement(TABLES.jobs, Which.BESIDE),
        BATCH | {"limit": 100, "prefetch": False},
        {"claim_idx", "pkey"},
    ),
    "claim among": (
        claim_statement(TABLES.jobs, Which.AMONG),
        BATCH | {"limit": 100, "prefetch": False},
        {"claim_idx", "pkey"},
    ),
    "next due": (next_due_statement(TABLES.jobs), BATCH, {"claim_idx"}),
    "settle done": (done_statement(TABLES, wait=False), BATCH, FENCED),
    "settle mixed": (mixed_statement(TABLES, expired=False, wait=False), BATCH | VERDICTS, FENCED),
    "settle within": (mixed_statement(TABLES, expired=False, wait=True), BATCH | VERDICTS, FENCED),
    "settle expired": (
        mixed_statement(TABLES, expired=True, wait=False),
        BATCH | VERDICTS,
        FENCED,
    ),
    "look": (look_statement(TABLES), BATCH, FENCED),
    "prolong": (prolong_statement(TABLES.jobs), BATCH, FENCED),
    "ours": (ours_statement(TABLES.jobs), BATCH, FENCED),
    "expired leases": (expired_leases_statement(TABLES.jobs), BATCH | {"limit": 500}, {"running_idx"}),
    "release unknown": (release_unknown_statement(TABLES.jobs), BATCH, {"running_idx", "pkey"}),
    "left behind": (
        left_behind_statement(TABLES.jobs),
        {"queues": ["default", "mail"]},
        {"running_idx", "expiry_idx"},
    ),
    "late": (late_statement(TABLES.jobs), BATCH | {"limit": 500}, {"expiry_idx"}),
    "cancel late": (cancel_late_statement(TABLES), BATCH, {"expiry_idx", "pkey"}),
    "find": (find_statement(TABLES), {"id": 4711}, {"pkey"}),
    "purge failed": (purge_statement(TABLES.jobs, JobStatus.FAILED), BATCH | WEEK, {"failed_idx", "pkey"}),
}


@dataclass
class Node:
    """One node of a plan and what is below it."""

    kind: str
    table: str | None
    index: str | None
    below: list["Node"] = field(default_factory=list)

    def all(self) -> Iterator["Node"]:
        yield self
        for node in self.below:
            yield from node.all()


def _node(plan: dict[str, Any]) -> Node:
    below = [_node(each) for each in plan.get("Plans", ())]
    return Node(plan["Node Type"], plan.get("Relation Name"), plan.get("Index Name"), below)


@pytest.fixture(scope="module", params=[True, False], ids=["analysed", "never analysed"])
def _full(server: EmbeddedPostgres, template: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    name = f"plans_{request.param}"
    url = make_url(server.create_database(name, template=template))
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        for table in JOBS, f"{JOBS}_archive":
            connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        connection.execute(text(ROWS))
        connection.execute(text(OLD_ROWS))
    if request.param:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))
    yield engine
    engine.dispose()
    server.drop_database(name)


@pytest.fixture
def full(_full: Engine) -> Iterator[Connection]:
    with _full.connect() as connection:
        yield connection
        connection.rollback()
        connection.execute(text("DEALLOCATE ALL"))


_DECLARED: dict[type, str] = {bool: "boolean", timedelta: "interval"}


def explained(
    connection: Connection, statement: Executable, parameters: dict[str, Any], *, generic: bool
) -> Node:
    """The plan of a statement as a driver would prepare it."""
    compiled = statement.compile(dialect=dialect.dialect())  # type: ignore[attr-defined,no-untyped-call]
    values = compiled.params | parameters
    names = [name for name in compiled.params if f"%({name})s" in str(compiled)]
    prepared = str(compiled)
    for number, name in enumerate(names, 1):
        prepared = prepared.replace(f"%({name})s", f"${number}")
    assert "%(" not in prepared
    mode = "force_generic_plan" if generic else "force_custom_plan"
    connection.exec_driver_sql(f"SET LOCAL plan_cache_mode = {mode}")
    # psycopg declares the types of these; of texts and arrays PostgreSQL finds them
    types = ", ".join(_DECLARED.get(type(values[name]), "unknown") for name in names)
    connection.exec_driver_sql(f"PREPARE it ({types}) AS {prepared}")
    given = SQL(", ").join(Literal(values[name]) for name in names)
    explain = SQL("EXPLAIN (FORMAT JSON) EXECUTE it ({})").format(given)
    driver: Any = connection.connection.driver_connection
    found = connection.exec_driver_sql(explain.as_string(driver)).scalar()
    plan = found if isinstance(found, list) else json.loads(str(found))
    return _node(plan[0]["Plan"])


either = pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])


@either
@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_of_the_hot_path_reads_the_whole_table(
    full: Connection, name: str, generic: bool
) -> None:
    statement, parameters, expected = STATEMENTS[name]

    plan = explained(full, statement, parameters, generic=generic)

    assert [node.kind for node in plan.all() if node.table == JOBS and node.kind == "Seq Scan"] == []
    # a bitmap scan has its index in a node without a table
    used = {node.index for node in plan.all() if node.index and not node.index.startswith(f"{JOBS}_archive")}
    assert used
    assert used <= {f"{JOBS}_{index}" for index in expected}


@either
@pytest.mark.parametrize("name", ["settle done", "settle mixed", "look", "find", "cancel late"])
def test_no_statement_of_the_hot_path_reads_the_whole_archive(
    full: Connection, name: str, generic: bool
) -> None:
    statement, parameters, _ = STATEMENTS[name]

    plan = explained(full, statement, parameters, generic=generic)

    assert "Seq Scan" not in {node.kind for node in plan.all() if node.table == f"{JOBS}_archive"}


@either
@pytest.mark.parametrize("name", ["claim", "claim ahead", "claim beside"])
def test_a_claim_reads_jobs_in_the_order_of_its_index_and_stops_at_its_limit(
    full: Connection, name: str, generic: bool
) -> None:
    statement, parameters, _ = STATEMENTS[name]

    plan = explained(full, statement, parameters, generic=generic)

    [limit] = [node for node in plan.all() if node.kind == "Limit"]
    assert [(node.kind, node.index) for node in limit.all()] == [
        ("Limit", None),
        ("LockRows", None),
        ("Index Scan", f"{JOBS}_claim_idx"),
    ]
    assert [node.kind for node in plan.all() if "Sort" in node.kind] == []


@either
def test_the_next_due_time_is_read_lane_by_lane(full: Connection, generic: bool) -> None:
    plan = explained(full, *STATEMENTS["next due"][:2], generic=generic)

    scans = [node for node in plan.all() if node.table == JOBS]
    limits = [node for node in plan.all() if node.kind == "Limit"]
    # plain EXPLAIN hides the sub-select of a recursive step, the third
    assert len(scans) == len(limits) >= 2
    assert {node.kind for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert [node.kind for node in plan.all() if "Sort" in node.kind] == []


@either
@pytest.mark.parametrize("name", ["expired leases"])
def test_expired_leases_come_in_the_order_of_their_index(full: Connection, name: str, generic: bool) -> None:
    plan = explained(full, *STATEMENTS[name][:2], generic=generic)

    assert [node.kind for node in plan.all()] == ["Limit", "Index Scan"]


@either
@pytest.mark.parametrize("state", [JobStatus.DONE, JobStatus.CANCELLED])
def test_a_purge_of_the_archive_goes_by_age(full: Connection, state: JobStatus, generic: bool) -> None:
    plan = explained(full, purge_statement(TABLES.archive, state), BATCH | WEEK, generic=generic)

    used = {node.index for node in plan.all() if node.index}
    assert f"{JOBS}_archive_finished_idx" in used
    assert "Seq Scan" not in {node.kind for node in plan.all()}
