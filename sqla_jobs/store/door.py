"""The one door to the database: held connections that run a verb at a time, on either kind of engine.

A lane is one connection in AUTOCOMMIT, taken from the user's engine (so its creator, listeners and
connect arguments count) and detached from the pool. Every statement has a deadline by the local clock:
when it passes, the socket is shut down, which ends the statement at once wherever it waits; psycopg's
own cancel can take 12 seconds on a dead network. A lane is never cancelled in mid-statement: a claim
whose answer is thrown away is rows that run for nobody. Serialization failures, deadlocks and lock
timeouts are tried again; a broken connection is reported, because only the verb knows what that means.
"""

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import anyio
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from sqla_jobs.errors import ConnectionLost, DeadlineExceeded

__all__ = ["Lane", "SyncLane", "Verb", "brief", "finish", "is_retryable", "lane_on"]

T = TypeVar("T")
Verb = Callable[[Connection], T]

#: 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available (manual, appendix A):
#: the statement did nothing and may simply run again.
_RETRYABLE = frozenset({"40001", "40P01", "55P03"})
_TRIES = 6


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of a database error, whatever the driver."""
    orig = getattr(error, "orig", None)
    state = getattr(orig, "sqlstate", None) or getattr(getattr(orig, "__cause__", None), "sqlstate", None)
    return state if isinstance(state, str) else None


def is_retryable(error: BaseException) -> bool:
    """Whether the statement did nothing and may run again at once."""
    return isinstance(error, DBAPIError) and sqlstate_of(error) in _RETRYABLE


def is_lost(error: BaseException) -> bool:
    """Whether the connection is gone: the server may or may not have done what was asked."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, OSError)
    state = sqlstate_of(error)
    if state is None:  # not from the server: the socket broke, or the driver refuses a value
        return error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError))
    # 08 connection exception, 57P0x shutdown, crash, database dropped
    return error.connection_invalidated or state.startswith(("08", "57P0"))


def brief(error: BaseException) -> str:
    """An error in one line, without the statement and the parameters that SQLAlchemy adds to its text."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def pause_before(attempt: int) -> float:
    """Seconds to wait before trying the same statement again: 10 ms, doubling, scattered."""
    return float(0.01 * 2**attempt * (0.5 + random.random()))


def cut(driver_connection: Any) -> None:
    """Shut the socket of a driver's connection down: whoever waits on it gets an error now.

    Safe from any thread: it is a system call on a duplicate of the descriptor, not a call of libpq.
    """
    if (terminate := getattr(driver_connection, "terminate", None)) is not None:
        terminate()  # asyncpg
        return
    with suppress(Exception):
        duplicate = socket.socket(fileno=os.dup(driver_connection.fileno()))
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        finally:
            duplicate.close()


def finish(driver_connection: Any) -> None:
    """Close a driver's connection without waiting. SQLAlchemy leaves a detached async one of psycopg open."""
    with suppress(Exception):
        if (terminate := getattr(driver_connection, "terminate", None)) is not None:
            terminate()  # asyncpg
        else:
            driver_connection.pgconn.finish()


class Lane(Protocol):
    """One held connection that runs one verb at a time."""

    async def run(self, verb: Verb[T], *, deadline: float) -> T:
        """Run `verb` within `deadline` seconds, trying again what may simply run again.

        Raises `DeadlineExceeded` or `ConnectionLost` when no answer came, else what the verb raises.
        """
        ...

    async def close(self) -> None:
        """Give the connection up."""
        ...


def lane_on(engine: Engine | AsyncEngine, name: str) -> Lane:
    """A lane on whichever engine there is: in the loop, or in a thread of its own."""
    return _LoopLane(engine) if isinstance(engine, AsyncEngine) else _ThreadLane(engine, name)


async def _with_retries(once: Callable[[], Any]) -> Any:
    for attempt in range(_TRIES):
        try:
            return await once()
        except DBAPIError as error:
            if not is_retryable(error) or attempt == _TRIES - 1:
                raise
        await anyio.sleep(pause_before(attempt))
    raise AssertionError("unreachable")


class SyncLane:
    """A lane for code that lives in its own thread: connects when needed, drops what broke."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._driver: Any = None
        self._wires = threading.Lock()
        self.expired = False

    def run(self, verb: Verb[T]) -> T:
        """Run `verb` on the held connection. Raises `ConnectionLost` when it broke, and drops it."""
        if self.expired:
            self._drop()  # the deadline of the last verb passed in the moment its answer came
        try:
            connection = self._connection or self._connect()
            return verb(connection)
        except BaseException as error:
            if self.expired:
                self._drop()
                raise DeadlineExceeded("no answer within the deadline; the connection was cut") from error
            if is_lost(error):
                self._drop()
                raise ConnectionLost(brief(error)) from error
            raise

    def _connect(self) -> Connection:
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        driver = connection.connection.driver_connection
        connection.detach()
        with self._wires:
            self._connection, self._driver = connection, driver
            if self.expired:  # nobody waits any more, and nobody would cut it a second time
                raise DeadlineExceeded("no connection within the deadline")
        return connection

    def expire(self) -> None:
        """From any thread: the deadline has passed; end whatever waits for an answer."""
        with self._wires:
            self.expired = True
            if self._driver is not None:
                cut(self._driver)

    def _drop(self) -> None:
        with self._wires:
            connection, driver = self._connection, self._driver
            self._connection = self._driver = None
            self.expired = False
        if connection is not None:
            finish(driver)
            with suppress(Exception):
                connection.invalidate()
            with suppress(Exception):
                connection.close()

    def close(self) -> None:
        """Close the connection; the lane may be used again."""
        with self._wires:
            connection, self._connection, self._driver = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                connection.close()


class _ThreadLane:
    """A SyncLane in a thread of its own; one hop per verb, whose batch is worth it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._start()

    def _start(self) -> None:
        self._lane = SyncLane(self._engine)
        self._inbox: SimpleQueue[tuple[Verb[Any], asyncio.Future[Any]] | None] = SimpleQueue()
        threading.Thread(
            target=_serve, args=(self._lane, self._inbox), name=f"sqla_jobs {self._name}", daemon=True
        ).start()

    async def run(self, verb: Verb[T], *, deadline: float) -> T:
        ends = time.monotonic() + deadline

        async def once() -> T:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[T] = loop.create_future()
            lane = self._lane
            self._inbox.put((verb, future))
            waiter = _Waiter()
            done = await waiter.wait(future, timeout=max(ends - time.monotonic(), 0.01))
            if not done:
                lane.expire()
                # the cut ends a statement at once; a connect to a dead network it cannot reach
                done = await waiter.wait(future, timeout=1.0)
            if not done:
                future.cancel()  # what its thread may still bring is for nobody
                self._inbox.put(None)
                self._start()
            waiter.raise_cancelled(future)
            if not done:
                raise DeadlineExceeded("no connection within the deadline")
            return future.result()

        result: T = await _with_retries(once)
        return result

    async def close(self) -> None:
        self._inbox.put(None)


def _serve(lane: SyncLane, inbox: "SimpleQueue[tuple[Verb[Any], asyncio.Future[Any]] | None]") -> None:
    """The lane's thread. Whatever a verb raises goes to its future; the thread stays."""
    while (item := inbox.get()) is not None:
        verb, future = item
        try:
            result, error = lane.run(verb), None
        except BaseException as caught:
            result, error = None, caught
        _answer(future, result, error)
        del item, verb, future, result, error
    lane.close()


def _answer(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    def set_() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    with suppress(RuntimeError):  # the loop has closed: nobody waits
        future.get_loop().call_soon_threadsafe(set_)


class _LoopLane:
    """A lane on an AsyncEngine, in the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None
        self._driver: Any = None

    async def run(self, verb: Verb[T], *, deadline: float) -> T:
        ends = time.monotonic() + deadline

        async def once() -> T:
            if self._connection is None:
                await self._connect(max(ends - time.monotonic(), 0.01))
            assert self._connection is not None
            # a task of its own: cancelling whoever waits must not cancel the statement
            statement = asyncio.ensure_future(self._connection.run_sync(verb))
            waiter = _Waiter()
            expired = not await waiter.wait(statement, timeout=max(ends - time.monotonic(), 0.01))
            if expired:
                cut(self._driver)
                if not await waiter.wait(statement, timeout=1.0):
                    statement.cancel()
            try:
                if expired:
                    with suppress(BaseException):
                        await statement
                    raise DeadlineExceeded("no answer within the deadline; the connection was cut")
                result = statement.result()
            except BaseException as error:
                if expired or is_lost(error):
                    await self._drop()
                waiter.raise_cancelled(statement)
                if isinstance(error, DBAPIError) and is_lost(error):
                    raise ConnectionLost(brief(error)) from error
                raise
            waiter.raise_cancelled(statement)
            return result

        result: T = await _with_retries(once)
        return result

    async def _connect(self, seconds: float) -> None:
        connecting = asyncio.ensure_future(self._open())
        waiter = _Waiter()
        if not await waiter.wait(connecting, timeout=seconds):
            connecting.cancel()
            with suppress(BaseException):
                await connecting
            waiter.raise_cancelled(connecting)
            raise DeadlineExceeded("no connection within the deadline")
        try:
            self._connection, self._driver = connecting.result()
        except BaseException as error:
            waiter.raise_cancelled(connecting)
            if is_lost(error):
                raise ConnectionLost(brief(error)) from error
            raise
        waiter.raise_cancelled(connecting)

    async def _open(self) -> tuple[AsyncConnection, Any]:
        connection = await self._engine.connect()
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        raw = await connection.get_raw_connection()
        driver = raw.driver_connection
        await connection.run_sync(lambda sync: sync.detach())
        return connection, driver

    async def _drop(self) -> None:
        connection, driver = self._connection, self._driver
        self._connection = self._driver = None
        if connection is not None:
            finish(driver)
            with suppress(Exception):
                await connection.invalidate()
            with suppress(Exception):
                await connection.close()

    async def close(self) -> None:
        connection, driver = self._connection, self._driver
        self._connection = self._driver = None
        if connection is not None:
            with suppress(Exception):
                await connection.close()
            finish(driver)


class _Waiter:
    """Waits on, whoever is cancelled: the cancellation is raised when all is in order again.

    Waiting is bounded by its timeouts, so a cancellation is late by these at most.
    """

    def __init__(self) -> None:
        self._cancelled: asyncio.CancelledError | None = None

    async def wait(self, future: "asyncio.Future[Any]", *, timeout: float) -> bool:
        """Whether `future` was done in time."""
        ends = time.monotonic() + timeout
        while True:
            try:
                done, _ = await asyncio.wait({future}, timeout=max(ends - time.monotonic(), 0))
            except asyncio.CancelledError as error:
                self._cancelled = error
            else:
                return bool(done)

    def raise_cancelled(self, future: "asyncio.Future[Any]") -> None:
        """Raise the cancellation, if there was one; nobody will ask for the outcome of `future` then."""
        if self._cancelled is not None:
            if future.done() and not future.cancelled():
                future.exception()  # retrieved
            raise self._cancelled
