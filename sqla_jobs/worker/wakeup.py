"""Hear that jobs have become claimable: LISTEN on a connection of its own.

The connection comes from the user's engine and is detached from its pool. The socket is watched by the
event loop and libpq is asked without waiting, so one piece of code serves sync and async engines. A
wake-up is a hint: what is missed while the connection is down is found by the poll, and looked for when
it is up again.
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.schema import channel_of
from sqla_jobs.store.door import brief, finish

__all__ = ["Wakeups", "parse"]

Woken = Callable[[str | None, float], None]  # queue (None: any), claimable in so many seconds


def parse(payload: str) -> tuple[str | None, float | None]:
    """A message of the trigger: (queue, run_at in epoch seconds); (None, None) wakes everybody.

    What is not understood wakes everybody too: a newer trigger must never leave a worker asleep.

    >>> parse("0 1764535510.1 my queue")
    ('my queue', 1764535510.1)
    """
    parts = payload.split(" ", 2)
    if len(parts) == 3:
        with suppress(ValueError):
            return parts[2], float(parts[1])
    return None, None


class Wakeups:
    """LISTEN, and again after every loss. `woken` and `alive` are called in the loop."""

    def __init__(
        self,
        tables: Tables,
        engine: Engine | AsyncEngine,
        *,
        woken: Woken,
        alive: Callable[[bool], None],
        events: Events,
    ) -> None:
        self._tables = tables
        self._engine = engine
        self._woken = woken
        self._alive = alive
        self._events = events
        self._ahead = 0.0
        self._connection: Any = None
        self._driver: Any = None

    async def listen(self) -> None:
        """Run until cancelled."""
        pause = 0.1
        while True:
            try:
                pgconn, channel = await self._connect()
                if pgconn is None:
                    self._events.emit("listen.unavailable", reason="the engine's driver is not psycopg")
                    return
                self._events.emit("listen.connected", channel=channel)
                self._alive(True)
                pause = 0.1
                await self._hear(pgconn)
            except Exception as error:
                self._alive(False)
                wait = pause * (0.5 + random.random())
                self._events.emit("listen.lost", error=brief(error), retry_in=wait)
                await asyncio.sleep(wait)
                pause = min(pause * 2, 30.0)
            finally:
                await self._close()

    async def _connect(self) -> tuple[Any, str]:
        if isinstance(self._engine, AsyncEngine):
            self._connection = await self._engine.connect()
            await self._connection.execution_options(isolation_level="AUTOCOMMIT")
            raw = await self._connection.get_raw_connection()
            self._driver = raw.driver_connection
            channel = await self._connection.run_sync(self._subscribe)
        else:
            channel = await asyncio.to_thread(self._connect_sync, self._engine)
        return _pgconn(self._driver), channel

    def _connect_sync(self, engine: Engine) -> str:
        self._connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._driver = self._connection.connection.driver_connection
        return self._subscribe(self._connection)

    def _subscribe(self, connection: Connection) -> str:
        connection.detach()
        channel = channel_of(connection, self._tables.jobs)
        # LISTEN takes no parameter; the name is letters, an underscore and an oid, all ours
        connection.execute(text(f"LISTEN {channel}"))
        # run_at is the database's time; the clock of this machine may say something else
        epoch = connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())::float8"))
        self._ahead = float(epoch) - time.monotonic()
        return channel

    async def _hear(self, pgconn: Any) -> None:
        """Read messages until the connection breaks."""
        loop = asyncio.get_running_loop()
        broken: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            try:
                pgconn.consume_input()
                while (message := pgconn.notifies()) is not None:
                    queue, run_at = parse(message.extra.decode("utf-8", "replace"))
                    due_in = 0.0 if run_at is None else run_at - time.monotonic() - self._ahead
                    self._woken(queue, due_in)
            except Exception as error:
                if not broken.done():
                    broken.set_exception(error)

        readable()  # what came with the answer to LISTEN
        loop.add_reader(pgconn.socket, readable)
        try:
            await broken
        finally:
            loop.remove_reader(pgconn.socket)

    async def _close(self) -> None:
        connection, driver = self._connection, self._driver
        self._connection = self._driver = None
        if connection is None:
            return
        with suppress(Exception):
            if isinstance(self._engine, AsyncEngine):
                await connection.close()
            else:
                await asyncio.to_thread(connection.close)
        finish(driver)


def _pgconn(driver: Any) -> Any:
    return driver.pgconn if isinstance(driver, (psycopg.Connection, psycopg.AsyncConnection)) else None
