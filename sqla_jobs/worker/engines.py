"""Which engines a worker runs on: those it is given, used as they are, or both kinds made from one URL."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from sqla_jobs.errors import ConfigurationError
from sqla_jobs.tasks import Task

__all__ = ["Engines", "database_url"]

#: libpq waits for ever by default; a URL may say otherwise (its own parameters win).
_NOTICE_A_DEAD_NETWORK = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def database_url(text: str | URL) -> URL:
    """A URL for psycopg, whatever driver it names: `postgres://` and `postgresql+asyncpg://` are taken too.

    Raises `ConfigurationError` when it is not a PostgreSQL URL.

    >>> database_url("postgres://app@db/shop").drivername
    'postgresql+psycopg'
    """
    try:
        if isinstance(text, str) and text.startswith("postgres://"):
            text = "postgresql://" + text.removeprefix("postgres://")
        url = make_url(text)
    except ArgumentError:
        raise ConfigurationError(
            "the database URL cannot be parsed; it looks like postgresql://user:password@host:5432/name"
        ) from None
    if url.get_backend_name() != "postgresql":
        raise ConfigurationError(f"sqla_jobs needs PostgreSQL, the database URL is for {url.drivername}")
    return url.set(drivername="postgresql+psycopg")


@dataclass(slots=True)
class Engines:
    """The sync and the async engine; either may be missing. `owned`: made here, disposed of here."""

    sync: Engine | None
    asynchronous: AsyncEngine | None
    owned: bool

    @classmethod
    def choose(
        cls,
        *,
        engine: Engine | None,
        async_engine: AsyncEngine | None,
        url: str | URL | None,
        concurrency: int,
    ) -> "Engines":
        """From what was given: engines as they are, or a URL; nothing is derived from an engine."""
        if url is not None:
            if engine is not None or async_engine is not None:
                raise ConfigurationError("give a URL or engines, not both")
            # a session per slot; the worker's own connections are detached, so they need no place
            target = database_url(url)
            limits = {
                name: value for name, value in _NOTICE_A_DEAD_NETWORK.items() if name not in target.query
            }
            pool: dict[str, Any] = {
                "pool_size": concurrency + 1,
                "max_overflow": 4,
                "pool_pre_ping": True,
                "connect_args": limits,
            }
            return cls(create_engine(target, **pool), create_async_engine(target, **pool), owned=True)
        if engine is None and async_engine is None:
            raise ConfigurationError(
                "no database: give Worker(url=...), an engine, --database-url, or set DATABASE_URL"
            )
        for given in (engine, async_engine):
            if given is not None and given.dialect.name != "postgresql":
                raise ConfigurationError(
                    f"sqla_jobs needs PostgreSQL, the engine is for {given.dialect.name}"
                )
        return cls(engine, async_engine, owned=False)

    def check(self, tasks: Iterable[Task[Any]]) -> None:
        """Raise `ConfigurationError` when a task needs a session of a kind that no engine here makes."""
        # takes_entities first: it compiles the annotations of every task, which must not fail later
        needy = {task.kind: task for task in tasks if task.takes_entities or task.takes_context}
        for missing, is_async, argument in (
            (self.sync is None, False, "engine"),
            (self.asynchronous is None, True, "async_engine"),
        ):
            kinds = sorted(kind for kind, task in needy.items() if task.is_async is is_async)
            if missing and kinds:
                raise ConfigurationError(
                    f"no {argument} for the session of {', '.join(kinds)}: "
                    f"give the worker {argument}=, or a URL"
                )

    async def dispose(self) -> None:
        """Close the pools that were made here."""
        if not self.owned:
            return
        if self.asynchronous is not None:
            await self.asynchronous.dispose()
        if self.sync is not None:
            self.sync.dispose()
