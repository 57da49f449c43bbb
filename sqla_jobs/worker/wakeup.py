"""Hear that jobs have become claimable: LISTEN on a connection of its own, and never take its word for it.

Whether messages arrive is tried: one to a private channel, sent over another connection, so that a pooler
in transaction mode or a half-open socket is found out. Only then is the jobs' channel listened to, and only
what was proven counts as alive. The socket is watched by the event loop and libpq is asked without waiting,
so one piece of code serves sync and async engines. A wake-up is a hint: what is missed while the connection
is down is found by the poll, and looked for when it is up again.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self
from uuid import uuid4

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

from sqla_jobs.events import Events
from sqla_jobs.models import Tables
from sqla_jobs.schema import channel_of
from sqla_jobs.store.door import Lane, brief, driver_of, lane_on

__all__ = ["Wakeups", "parse"]

Woken = Callable[[str | None, float], None]  # queue (None: any), claimable in so many seconds
OnLane = Callable[[Callable[[Connection], Any]], Awaitable[Any]]

#: Seconds to connect, and to LISTEN.
_CONNECT_LIMIT = 5.0
#: Seconds between two probes, scattered; a message heard meanwhile is as good.
_PROBE_EVERY = (20.0, 30.0)
#: Seconds for a probe to arrive: the first on a connection, and later ones.
_FIRST_ANSWER_LIMIT, _ANSWER_LIMIT = 3.0, 5.0
#: Seconds before the next try after a loss, and after a connection turned out deaf: first and longest.
_AFTER_LOSS, _WHILE_DEAF = (0.1, 30.0), (15.0, 300.0)

_LOOKS, _TRIES_TO_UNLISTEN = 20, 30
_WAY_OUT = "give --listen-database-url, a direct one"

_PROBE = text("SELECT pg_notify(:channel, '')")
_BACKEND = text("SELECT pg_backend_pid()")
_CLOCK = text("SELECT extract(epoch FROM clock_timestamp())::float8")


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


class _Deaf(Exception):
    """A new connection on which nothing arrives."""


class _Silent(Exception):
    """A connection that was alive, and on which nothing arrives any more."""


class Wakeups:
    """LISTEN, and again after every loss. `woken` and `alive` are called in the loop.

    `engine` None: never listen, and say so. `own_url`: it is not the one that everything else uses.
    `on_lane` runs a verb over another connection: the probes. `poll`: what is left to those who hear nothing.
    """

    def __init__(
        self,
        tables: Tables,
        engine: Engine | AsyncEngine | None,
        *,
        own_url: bool,
        poll: float,
        on_lane: OnLane,
        woken: Woken,
        alive: Callable[[bool], None],
        events: Events,
    ) -> None:
        self._tables = tables
        self._engine = engine
        self._own_url = own_url
        self._poll = poll
        self._on_lane = on_lane
        self._woken = woken
        self._alive = alive
        self._events = events
        self._ahead = 0.0
        self._said_deaf = False
        self._pooled = False

    async def listen(self) -> None:
        """Run until cancelled, or until it is known that nothing will ever be heard."""
        if self._engine is None:
            self._unavailable("switched off")
            return
        lane = lane_on(self._engine, "listen", pooled=self._pooler_found)
        self._after_loss, self._while_deaf = _Pause(*_AFTER_LOSS), _Pause(*_WHILE_DEAF)
        try:
            while True:
                try:
                    await self._one_connection(lane)
                    return
                except _Deaf:
                    await self._gave_up(lane, None, self._while_deaf.next())
                except Exception as error:
                    await self._gave_up(lane, error, self._after_loss.next())
        finally:
            await lane.close()

    async def _one_connection(self, lane: Lane) -> None:
        """Connect, prove, hear. Returns when the driver cannot do it at all, else raises why it is over."""
        driver = await lane.run(driver_of, deadline=_CONNECT_LIMIT)
        if not isinstance(driver, (psycopg.Connection, psycopg.AsyncConnection)):
            self._unavailable("the engine's driver is not psycopg", _WAY_OUT)
            return
        if self._pooled and await self._shares_its_backend(lane):
            raise _Deaf
        private, backend = await lane.run(self._prepare, deadline=_CONNECT_LIMIT)
        try:
            with _Ear(driver.pgconn, private, self._message) as ear:
                await self._prove(ear)
        except _Deaf:
            with suppress(Exception):
                await self._clear_away(lane, private, backend)
            raise
        channel = await lane.run(self._subscribe, deadline=_CONNECT_LIMIT)
        with _Ear(driver.pgconn, private, self._message) as ear:
            self._after_loss, self._while_deaf = _Pause(*_AFTER_LOSS), _Pause(*_WHILE_DEAF)
            self._said_deaf = False
            self._events.emit("listen.connected", channel=channel)
            self._alive(True)  # after LISTEN: what was committed before it is looked for now
            await self._hear(ear)

    def _pooler_found(self, _: bool | None) -> None:
        self._pooled = True

    async def _shares_its_backend(self, lane: Lane) -> bool:
        """Whether a pooler gives our session to others between two statements: then nothing can arrive.

        Found out without LISTEN, which would stay with that session. A pooler's favourite is the session
        that was used last, so as a rule the first look tells; not to see it proves nothing.
        """
        with suppress(Exception):
            for _ in range(_LOOKS):
                ours = await lane.run(_backend, deadline=_CONNECT_LIMIT)
                if await self._on_lane(_backend) == ours:
                    return True
        return False

    async def _clear_away(self, lane: Lane, private: str, backend: int) -> None:
        """A pooler keeps the session that LISTENs for its other clients, and gives us now this one, now that.

        If ours does not come back in so many tries it listens on, to a channel on which nothing is ever said.
        """
        for _ in range(_TRIES_TO_UNLISTEN):
            verb = partial(_on_one_backend, statement=f"UNLISTEN {private}")
            if await lane.run(verb, deadline=_CONNECT_LIMIT) == backend:
                return
            await asyncio.sleep(0.1 * random.random())

    async def _gave_up(self, lane: Lane, error: Exception | None, wait: float) -> None:
        self._alive(False)
        await lane.drop()
        if error is not None:
            self._events.emit("listen.lost", error=brief(error), retry_in=wait)
        elif not self._said_deaf:
            self._said_deaf = True
            if self._own_url:
                self._unavailable(
                    "notifications do not arrive", "does the listen URL name the same database?"
                )
            else:
                self._unavailable("notifications do not arrive (a pooler in transaction mode?)", _WAY_OUT)
        await asyncio.sleep(wait)

    def _unavailable(self, why: str, way_out: str = "") -> None:
        reason = f"{why}: polling every {self._poll:g} s"
        self._events.emit("listen.unavailable", reason=f"{reason}; {way_out}" if way_out else reason)

    # -- verbs of the LISTEN connection

    def _prepare(self, connection: Connection) -> tuple[str, int]:
        """The private channel that is listened to now, and on which backend."""
        # a new name for every connection: an answer to an older one proves nothing
        private = f"{channel_of(connection, self._tables.jobs)}_{uuid4().hex[:12]}"
        return private, _on_one_backend(connection, f"LISTEN {private}")

    def _subscribe(self, connection: Connection) -> str:
        channel = channel_of(connection, self._tables.jobs)
        # takes no parameter; the name is letters, an underscore, an oid and hex digits, all ours
        connection.execute(text(f"LISTEN {channel}"))
        # run_at is the database's time; the clock of this machine may say something else
        epoch = connection.scalar(_CLOCK)
        self._ahead = float(epoch) - time.monotonic()
        return channel

    # -- what is heard

    def _message(self, payload: str) -> None:
        queue, run_at = parse(payload)
        self._woken(queue, 0.0 if run_at is None else run_at - time.monotonic() - self._ahead)

    async def _prove(self, ear: "_Ear") -> None:
        """Return when a message has arrived; raise `_Deaf` when one was sent and has not."""
        pause = _Pause(0.05, 10.0)
        while not (arrived := await self._probe(ear, _FIRST_ANSWER_LIMIT)):
            if arrived is not None:
                raise _Deaf
            await ear.rest(pause.next())

    async def _hear(self, ear: "_Ear") -> None:
        """Until the connection breaks, or says nothing although it should."""
        while True:
            heard = ear.heard
            await ear.rest(random.uniform(*_PROBE_EVERY))
            if ear.heard == heard and await self._probe(ear, _ANSWER_LIMIT) is False:
                raise _Silent(f"a notification did not arrive within {_ANSWER_LIMIT:g} s")

    async def _probe(self, ear: "_Ear", limit: float) -> bool | None:
        """Whether a message arrives; None if it could not be sent, which says nothing about the ear."""
        ear.expect()
        try:
            await self._on_lane(partial(_notify, channel=ear.private))
        except Exception:
            return None
        return await ear.answer(limit)


class _Ear:
    """The socket of one LISTEN connection, watched by the loop while the block runs."""

    def __init__(self, pgconn: Any, private: str, message: Callable[[str], None]) -> None:
        self.private = private
        self.heard = 0
        self._pgconn = pgconn
        self._message = message
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._answer: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Self:
        self._socket = self._pgconn.socket
        self._loop.add_reader(self._socket, self._readable)
        self._readable()  # what came with the answer to LISTEN
        return self

    def __exit__(self, *_: object) -> None:
        if self._broken.done():
            self._broken.exception()  # retrieved
        else:
            self._loop.remove_reader(self._socket)

    def expect(self) -> None:
        """From now on, an answer counts."""
        self._answer = self._loop.create_future()

    async def answer(self, limit: float) -> bool:
        """Whether what was expected arrived within `limit` seconds. Raises what broke the connection."""
        await asyncio.wait({self._broken, self._answer}, timeout=limit, return_when="FIRST_COMPLETED")
        if self._broken.done():
            self._broken.result()
        return self._answer.done()

    async def rest(self, seconds: float) -> None:
        """Let so many seconds pass. Raises what broke the connection meanwhile."""
        await asyncio.wait({self._broken}, timeout=seconds)
        if self._broken.done():
            self._broken.result()

    def _readable(self) -> None:
        try:
            self._pgconn.consume_input()
            while (message := self._pgconn.notifies()) is not None:
                self.heard += 1
                if message.relname.decode() != self.private:
                    self._message(message.extra.decode("utf-8", "replace"))
                elif not self._answer.done():
                    self._answer.set_result(None)
        except Exception as error:
            # here and not later: libpq has closed the socket, and its number may soon be another's
            self._loop.remove_reader(self._socket)
            if not self._broken.done():
                self._broken.set_exception(error)


class _Pause:
    """Seconds to wait before the next try: doubling, scattered."""

    def __init__(self, first: float, longest: float) -> None:
        self._seconds = first
        self._longest = longest

    def next(self) -> float:
        now = self._seconds
        self._seconds = min(now * 2, self._longest)
        return now * (0.5 + random.random())


def _on_one_backend(connection: Connection, statement: str) -> int:
    """Run it, and tell the backend that did: behind a pooler only a transaction stays with one."""
    connection.execute(text("BEGIN"))
    connection.execute(text(statement))
    backend = _backend(connection)
    connection.execute(text("COMMIT"))
    return backend


def _backend(connection: Connection) -> int:
    pid: int = connection.execute(_BACKEND).scalar_one()
    return pid


def _notify(connection: Connection, channel: str) -> None:
    connection.execute(_PROBE, {"channel": channel})
