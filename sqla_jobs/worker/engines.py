"""Which engines a worker runs on: those it is given, used as they are, or both kinds made from one URL."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import URL, Engine, ExceptionContext, NullPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from sqla_jobs.errors import ConfigurationError
from sqla_jobs.events import Events
from sqla_jobs.store.door import cut, is_read_only, told_pid, unprepare
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

#: For an engine of the user's behind a pooler, by whether it prepares statements on the server.
_ADVICE = {
    False: None,
    True: "unless the pooler keeps prepared statements, make your engines with "
    'connect_args={"prepare_threshold": None}',
    None: "unless the pooler keeps prepared statements, switch them off in your driver "
    '(asyncpg: connect_args={"statement_cache_size": 0}, and names of their own)',
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
    """The sync and the async engine; either may be missing. `owned`: made here, disposed of here.

    `listening` is there if LISTEN has a URL of its own; it is always made here.
    """

    sync: Engine | None
    asynchronous: AsyncEngine | None
    owned: bool
    listening: Engine | None = None
    _pooled: bool = field(default=False, init=False)
    _pings: "dict[Any, float]" = field(default_factory=dict, init=False)

    @classmethod
    def choose(
        cls,
        *,
        engine: Engine | None,
        async_engine: AsyncEngine | None,
        url: str | URL | None,
        listen_url: str | URL | None = None,
        concurrency: int,
    ) -> "Engines":
        """From what was given: engines as they are, or a URL; nothing is derived from an engine."""
        listening = None if listen_url is None else _for_listen(database_url(listen_url))
        if url is not None:
            if engine is not None or async_engine is not None:
                raise ConfigurationError("give a URL or engines, not both")
            target = database_url(url)
            made = cls(*_both_kinds(target, concurrency=concurrency), owned=True, listening=listening)
            made._watch_pings()
            return made
        if engine is None and async_engine is None:
            raise ConfigurationError(
                "no database: give Worker(url=...), an engine, --database-url, or set DATABASE_URL"
            )
        for given in (engine, async_engine):
            if given is not None and given.dialect.name != "postgresql":
                raise ConfigurationError(
                    f"sqla_jobs needs PostgreSQL, the engine is for {given.dialect.name}"
                )
        return cls(engine, async_engine, owned=False, listening=listening)

    @property
    def for_listen(self) -> Engine | AsyncEngine | None:
        """Whose connection LISTENs: the one made for it, else one whose driver can."""
        given = [each for each in (self.asynchronous, self.sync) if each is not None]
        fit = [each for each in given if each.dialect.driver == "psycopg"]
        return self.listening or next(iter(fit or given), None)

    def _watch_pings(self) -> None:
        """A pool's ping has no deadline: on a dead path a handler would wait for it without an end."""
        for engine in (self.sync, self.asynchronous):
            dialect: Any = None if engine is None else engine.dialect
            whole = dialect.do_ping

            def watched(connection: Any, whole: Any = whole) -> Any:
                driver = getattr(connection, "driver_connection", connection)
                self._pings[driver] = time.monotonic()
                try:
                    return whole(connection)
                finally:
                    self._pings.pop(driver, None)

            dialect.do_ping = watched  # of engines that we have made, and of no other

    @property
    def pooled(self) -> bool:
        """Whether a pooler was found on the way: then nobody knows whose backend a number is."""
        return self._pooled

    def cut_silent_pings(self, limit: float) -> list[tuple[int, float]]:
        """End pings that have waited for `limit` seconds; the pool then connects anew.

        Returns the server's processes that do not know it, as HandlerSession.cut does.
        """
        now = time.monotonic()
        silent = [(driver, since) for driver, since in list(self._pings.items()) if now - since > limit]
        found = [(told_pid(driver), since) for driver, since in silent]
        for driver, _ in silent:
            cut(driver)
        return [(pid, since) for pid, since in found if pid is not None]

    def pooler_found(self, events: Events, prepares: bool | None) -> None:
        """A connection leads through a pooler: prepare nothing any more, and tell it once.

        Engines that were given are not touched; then the advice says what to give.
        """
        if self._pooled:
            return
        self._pooled = True
        if self.owned:
            for engine in (self.sync, self.asynchronous):
                if engine is not None:
                    event.listen(engine.pool, "checkout", _unprepare_session)
        advice = None if self.owned else _ADVICE[prepares]
        events.emit("pooler.detected", advice=advice)

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
        if self.listening is not None:
            self.listening.dispose()
        if not self.owned:
            return
        if self.asynchronous is not None:
            await self.asynchronous.dispose()
        if self.sync is not None:
            self.sync.dispose()


def _limits(target: URL) -> dict[str, Any]:
    return {name: value for name, value in _NOTICE_A_DEAD_NETWORK.items() if name not in target.query}


def _both_kinds(target: URL, *, concurrency: int) -> tuple[Engine, AsyncEngine]:
    # a session per slot; the worker's own connections are detached, so they need no place
    options: dict[str, Any] = {
        "pool_size": concurrency + 1,
        "max_overflow": 4,
        "pool_pre_ping": True,
        "connect_args": _limits(target),
    }
    sync, asynchronous = create_engine(target, **options), create_async_engine(target, **options)
    for engine in (sync, asynchronous.sync_engine):
        event.listen(engine, "handle_error", _leave_a_read_only_server)
    return sync, asynchronous


def _for_listen(target: URL) -> Engine:
    return create_engine(target, poolclass=NullPool, connect_args=_limits(target))


def _leave_a_read_only_server(context: ExceptionContext) -> None:
    """After a failover the pool's connections to the old primary still answer; they must not stay."""
    if is_read_only(context.original_exception):
        context.is_disconnect = True


def _unprepare_session(_: object, record: Any, __: object) -> None:
    unprepare(record.driver_connection)
