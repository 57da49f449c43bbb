"""What must hold before a worker starts: options that work, tasks that import, our schema in reach."""

import asyncio
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from importlib import import_module

from sqlalchemy import Connection

from sqla_jobs.errors import (
    AppError,
    ConfigurationError,
    ConnectionLost,
    DatabaseUnreachable,
    SqlaJobsError,
)
from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.schema import require_schema, require_tables
from sqla_jobs.store.door import Lane, brief

__all__ = ["check_options", "connect_only", "import_tasks", "reach_database"]

_SHORTEST_LEASE = timedelta(seconds=2)


def check_options(concurrency: int, **durations: timedelta) -> None:
    """Raise `ConfigurationError` for a value that cannot work."""
    for name, value in durations.items():
        if not isinstance(value, timedelta):
            raise ConfigurationError(f"{name} must be a timedelta, got {value!r}")
    lease, poll_interval = durations["lease"], durations["poll_interval"]
    drain_timeout = durations["drain_timeout"]
    if concurrency < 1:
        raise ConfigurationError(f"concurrency must be at least 1, got {concurrency}")
    if lease < _SHORTEST_LEASE:
        raise ConfigurationError(f"lease must be at least {_SHORTEST_LEASE.seconds} s, got {lease}")
    if poll_interval <= timedelta(0):
        raise ConfigurationError(f"poll_interval must be longer than 0, got {poll_interval}")
    if drain_timeout < timedelta(0):
        raise ConfigurationError(f"drain_timeout must not be negative, got {drain_timeout}")


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
