"""Look a job up by id, wherever it lives. Reads only."""

from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Executable,
    bindparam,
    literal_column,
    select,
)
from sqlalchemy.orm import Session, scoped_session

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.models import Tables

__all__ = ["JobRecord", "find"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as it was when it was read. All times are timezone-aware.

    `archived` says whether it has left the jobs table; a done job is archived, not gone.
    """

    id: int
    queue: str
    kind: str
    payload: Any
    status: JobStatus
    priority: int
    run_at: datetime
    attempts: int
    max_attempts: int
    expires_at: datetime | None
    locked_by: str | None
    locked_until: datetime | None
    fencing_token: int
    cancel_requested_at: datetime | None
    last_error: str | None
    unique_key: str | None
    ordering_key: str | None
    progress: Any
    meta: Any
    attempt_log: list[dict[str, Any]] | None
    result: Any
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    archived: bool


_COLUMNS = [each.name for each in fields(JobRecord) if each.name != "archived"]


@cache
def find_statement(tables: Tables) -> Executable:
    """Both tables in one statement: two would miss a job that moves between them."""
    id_ = bindparam("id", type_=BigInteger)
    live, old = tables.jobs.c, tables.archive.c
    here = select(*[live[name] for name in _COLUMNS], literal_column("false")).where(live.id == id_)
    there = select(*[old[name] for name in _COLUMNS], literal_column("true")).where(old.id == id_)
    return here.union_all(there)


def find(
    session: Session | scoped_session[Any] | Connection, tables: Tables, job_id: int
) -> JobRecord | None:
    """The job with this id in its latest life, or None."""
    rows = session.execute(find_statement(tables), {"id": job_id}).all()
    records = []
    for row in rows:
        values: dict[str, Any] = dict(zip((*_COLUMNS, "archived"), row, strict=True))
        values["status"] = JobStatus(values["status"])
        records.append(JobRecord(**values))
    return max(records, key=lambda record: (record.fencing_token, not record.archived), default=None)
