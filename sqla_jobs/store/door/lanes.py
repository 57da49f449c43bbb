"""The lanes: one held connection each, in a thread of its own or in the event loop."""

import asyncio
import random
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from sqla_jobs.errors import ConnectionLost, DeadlineExceeded
from sqla_jobs.store.door.faults import brief, is_confused, is_lost, is_refused, is_retryable
from sqla_jobs.store.door.wire import OtherEnd, Pooled, cut, finish

__all__ = ["Lane", "SyncLane", "Verb", "lane_on"]

T = TypeVar("T")
Verb = Callable[[Connection], T]

_TRIES = 6
#: Seconds to end, at a lane's end, what it had to leave behind.
_FAREWELL = 1.0


def pause_before(attempt: int) -> float:
    """Seconds to wait before trying the same statement again: 10 ms, doubling, scattered."""
    return float(0.01 * 2**attempt * (0.5 + random.random()))


class Lane(Protocol):
    """One held connection that runs one verb at a time."""

    async def run(self, verb: Verb[T], *, deadline: float) -> T:
        """Run `verb` within `deadline` seconds, trying again what may simply run again.

        Raises `DeadlineExceeded` or `ConnectionLost` when no answer came, else what the verb raises.
        """
        ...

    async def drop(self) -> None:
        """Give the connection up between two verbs, for whoever knows that it is of no use.

        The next verb connects anew, and ends what the server may still hold of the old one.
        """
        ...

    async def close(self) -> None:
        """Close the connection, and end what was left behind if the server answers at once."""
        ...


def _nobody(_: bool | None) -> None:
    """Whom it does not concern that there is a pooler."""


def lane_on(engine: Engine | AsyncEngine, name: str, *, pooled: Pooled = _nobody) -> Lane:
    """A lane on whichever engine there is: in the loop, or in a thread of its own.

    `pooled` is called, from any thread, whenever a connection turns out to lead through a pooler.
    """
    if isinstance(engine, AsyncEngine):
        return _LoopLane(engine, OtherEnd(pooled=pooled))
    return _ThreadLane(engine, name, OtherEnd(pooled=pooled))


def _nothing(_: Connection) -> None:
    """A verb that wants nothing but the connection."""


async def _with_retries(once: Callable[[], Any]) -> Any:
    for attempt in range(_TRIES):
        try:
            return await once()
        except DBAPIError as error:
            if not (is_retryable(error) or is_confused(error)) or attempt == _TRIES - 1:
                raise
        await asyncio.sleep(pause_before(attempt))
    raise AssertionError("unreachable")


class SyncLane:
    """A lane for code that lives in its own thread: connects when needed, drops what broke."""

    def __init__(self, engine: Engine, other_end: OtherEnd | None = None) -> None:
        self._engine = engine
        self.other_end = other_end or OtherEnd(pooled=_nobody)
        self._connection: Connection | None = None
        self._driver: Any = None
        self._wires = threading.Lock()
        self.expired = False

    def run(self, verb: Verb[T]) -> T:
        """Run `verb` on the held connection. Raises `ConnectionLost` when it broke, and drops it."""
        if self.expired:
            self.drop()  # the deadline of the last verb passed in the moment its answer came
        try:
            connection = self._connection or self._connect()
            return self.other_end.before(verb, self._driver)(connection)
        except BaseException as error:
            if self.expired:
                self.drop()
                raise DeadlineExceeded("no answer within the deadline; the connection was cut") from error
            if is_confused(error):
                self.other_end.prepares = False
                self.drop()
            if is_lost(error):
                self.drop()
                raise ConnectionLost(brief(error)) from error
            raise

    def _connect(self) -> Connection:
        try:
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            driver = connection.connection.driver_connection
            connection.detach()
        except Exception as error:
            if is_refused(error) and not self.expired:
                raise ConnectionLost(brief(error)) from error
            raise
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

    def drop(self) -> None:
        """Give the connection up; its backend is ended over the next one."""
        with self._wires:
            connection, driver = self._connection, self._driver
            self._connection = self._driver = None
            self.expired = False
        if connection is not None:
            self.other_end.gone()
            finish(driver)
            with suppress(Exception):
                connection.invalidate()
            with suppress(Exception):
                connection.close()

    def close(self) -> None:
        """Close the connection; the lane may be used again."""
        with self._wires:
            connection, self._connection, self._driver = self._connection, None, None
        self.other_end.closed()
        if connection is not None:
            with suppress(Exception):
                connection.close()


class _ThreadLane:
    """A SyncLane in a thread of its own; one hop per verb, whose batch is worth it."""

    def __init__(self, engine: Engine, name: str, other_end: OtherEnd) -> None:
        self._engine = engine
        self._name = name
        self._start(other_end)

    def _start(self, other_end: OtherEnd) -> None:
        self._lane = SyncLane(self._engine, other_end)
        self._inbox: SimpleQueue[_Item] = SimpleQueue()
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
                self._abandon()
            waiter.raise_cancelled(future)
            if not done:
                raise DeadlineExceeded("no connection within the deadline")
            return future.result()

        result: T = await _with_retries(once)
        return result

    def _abandon(self) -> None:
        """Leave a thread that is stuck to itself: it ends when it comes back, and closes what it brings."""
        self._inbox.put(None)
        self._start(self._lane.other_end.heir())

    async def drop(self) -> None:
        self._lane.expire()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put((None, future))
        waiter = _Waiter()
        if not await waiter.wait(future, timeout=1.0):
            future.cancel()
            self._abandon()
        waiter.raise_cancelled(future)

    async def close(self) -> None:
        if self._lane.other_end.left:
            with suppress(Exception):
                await self.run(_nothing, deadline=_FAREWELL)
        self._inbox.put(None)


_Item = tuple[Verb[Any] | None, "asyncio.Future[Any]"] | None  # no verb: drop the connection


def _serve(lane: SyncLane, inbox: "SimpleQueue[_Item]") -> None:
    """The lane's thread. Whatever a verb raises goes to its future; the thread stays."""
    while (item := inbox.get()) is not None:
        verb, future = item
        try:
            result, error = None if verb is None else lane.run(verb), None
            if verb is None:
                lane.drop()
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

    def __init__(self, engine: AsyncEngine, other_end: OtherEnd) -> None:
        self._engine = engine
        self._other_end = other_end
        self._connection: AsyncConnection | None = None
        self._driver: Any = None

    async def run(self, verb: Verb[T], *, deadline: float) -> T:
        ends = time.monotonic() + deadline

        async def once() -> T:
            if self._connection is None:
                await self._connect(max(ends - time.monotonic(), 0.01))
            assert self._connection is not None
            # a task of its own: cancelling whoever waits must not cancel the statement
            introduced = self._other_end.before(verb, self._driver)
            statement = asyncio.ensure_future(self._connection.run_sync(introduced))
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
                if is_confused(error):
                    self._other_end.prepares = False
                if expired or is_lost(error) or is_confused(error):
                    await self.drop()
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
            try:
                await connecting
            except BaseException as error:
                # its frames would keep the socket of the half-made connection until the next collection
                traceback.clear_frames(error.__traceback__)
            waiter.raise_cancelled(connecting)
            raise DeadlineExceeded("no connection within the deadline")
        try:
            self._connection, self._driver = connecting.result()
        except BaseException as error:
            waiter.raise_cancelled(connecting)
            if is_refused(error):
                raise ConnectionLost(brief(error)) from error
            raise
        waiter.raise_cancelled(connecting)

    async def _open(self) -> tuple[AsyncConnection, Any]:
        connection = await self._engine.connect()
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            driver = (await connection.get_raw_connection()).driver_connection
            await connection.run_sync(lambda sync: sync.detach())
        except BaseException:  # also cancelled, when the deadline passes just now
            with suppress(Exception):
                await connection.close()
            raise
        return connection, driver

    async def drop(self) -> None:
        connection, driver = self._connection, self._driver
        self._connection = self._driver = None
        if connection is not None:
            self._other_end.gone()
            finish(driver)
            with suppress(Exception):
                await connection.invalidate()
            with suppress(Exception):
                await connection.close()

    async def close(self) -> None:
        if self._other_end.left:
            with suppress(Exception):
                await self.run(_nothing, deadline=_FAREWELL)
        connection, driver = self._connection, self._driver
        self._connection = self._driver = None
        self._other_end.closed()
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
