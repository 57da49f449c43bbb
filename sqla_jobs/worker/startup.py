"""What must hold before a worker starts: options that work, tasks that import, our schema in reach."""

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from importlib import import_module

from sqlalchemy import AssertionPool, Connection, Engine, QueuePool, StaticPool
from sqlalchemy.ext.asyncio import AsyncEngine

from sqla_jobs.errors import (
    AppError,
    ConnectionLost,
    DatabaseUnreachable,
    SqlaJobsError,
)
from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.schema import require_schema, require_tables
from sqla_jobs.store.door import Lane, brief

__all__ = ["capacity", "connect_only", "import_tasks", "reach_database"]


def import_tasks(modules: Iterable[str]) -> None:
    """Import what `Jobs(imports=[...])` names. Raises `AppError` when one cannot be imported."""
    for module in modules:
        try:
            import_module(module)
        except Exception as error:
            raise AppError(
                f"Jobs(imports=[{module!r}]) cannot be imported: {type(error).__name__}: {error}"
            ) from error


async def reach_database(
    lane: Lane, tables: Tables, *, patience: float, stopping: asyncio.Event, events: Events
) -> None:
    """Connect and check the schema; keep trying for `patience` seconds, or until `stopping` is set.

    Raises `SchemaMismatch` at once, `DatabaseUnreachable` when the time is over.
    """
    ends = time.monotonic() + patience
    pause = 0.1
    while not stopping.is_set():
        try:
            left = max(ends - time.monotonic(), 1.0)
            await lane.run(partial(_check_schema, tables), deadline=min(left, 10.0))
        except SqlaJobsError as error:
            if not isinstance(error, ConnectionLost):
                raise
            if time.monotonic() + pause >= ends:
                raise DatabaseUnreachable(f"no connection within {patience:g} s: {error}") from error
            events.emit("database.error", operation="connect", error=brief(error), retry_in=pause)
        else:
            return
        await asyncio.sleep(pause)
        pause = min(pause * 2, 5.0)


def _check_schema(tables: Tables, connection: Connection) -> None:
    require_schema(connection, tables.jobs)
    require_tables(connection, (tables.archive,))


def connect_only(connection: Connection) -> None:
    """A verb that wants nothing but the connection."""


def capacity(engine: Engine | AsyncEngine) -> int | None:
    """How many connections the engine's pool gives out at once; None for as many as are asked for."""
    pool = engine.pool
    if isinstance(pool, QueuePool):
        size, overflow = pool.size(), pool._max_overflow
        return None if size == 0 or overflow < 0 else size + overflow
    return 1 if isinstance(pool, (StaticPool, AssertionPool)) else None
