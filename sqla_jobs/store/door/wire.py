"""What a driver's connection is asked for beyond statements: its end, and who is at the other end.

A backend whose client has gone notices only when it next writes: until then it waits on, for a lock
perhaps, and may then do what nobody waits for. So a lane that comes back ends what it left behind. Behind
a pooler nobody knows whose backend it is: there nothing is ended, and nothing is prepared.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from sqla_jobs.store.door.faults import is_confused, is_lost

__all__ = [
    "Backend",
    "OtherEnd",
    "Pooled",
    "cut",
    "driver_of",
    "end_backends",
    "finish",
    "told_pid",
    "unprepare",
]

T = TypeVar("T")
#: Told that a connection leads through a pooler, and whether its driver was about to prepare statements
#: on the server (None: nobody knows).
Pooled = Callable[[bool | None], object]

# epoch seconds are exact (numeric), and read the same under every TimeZone and DateStyle
_WHO = text(
    "SELECT pg_backend_pid(), (SELECT CAST(extract(epoch FROM backend_start) AS text) "
    "FROM pg_stat_activity WHERE pid = pg_backend_pid())"
)

# the start tells a backend from a later one with the same number
_END = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid = :backend AND extract(epoch FROM backend_start) = CAST(:started AS numeric)"
)

# of a session whose start nobody asked for: its backend is older than our use of it
_END_OLDER = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :backend AND usename = current_user "
    "AND datname = current_database() AND backend_start <= clock_timestamp() - make_interval(secs => :age)"
)


def driver_of(connection: Connection) -> Any:
    """The driver's own connection below one of SQLAlchemy's, also of a lane's, which is detached."""
    adapted: Any = connection.connection.dbapi_connection
    return getattr(adapted, "driver_connection", adapted)


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


def told_pid(driver_connection: Any) -> int | None:
    """The backend's process as told at connecting; a pooler tells a number of its own."""
    if (info := getattr(driver_connection, "info", None)) is not None:
        pid = getattr(info, "backend_pid", None)
    else:
        ask = getattr(driver_connection, "get_server_pid", None)  # asyncpg
        pid = None if ask is None else ask()
    return pid if isinstance(pid, int) else None


def end_backends(connection: Connection, left: Sequence[tuple[int, float]]) -> None:
    """End sessions that were cut: process, and time.monotonic() when we had it already.

    Their backends do not know it, and may hold the lock of a job for as long as TCP believes in the client.
    """
    for pid, since in left:
        connection.execute(_END_OLDER, {"backend": pid, "age": max(time.monotonic() - since, 0.0)})


def unprepare(driver_connection: Any) -> None:
    """No server-side statements from now on, as poolers in transaction mode need it (psycopg only)."""
    if _can_say(driver_connection):
        driver_connection.prepare_threshold = None


def _can_say(driver_connection: Any) -> bool:
    return hasattr(driver_connection, "prepare_threshold")


@dataclass(frozen=True, slots=True)
class Backend:
    """A process of the server."""

    pid: int
    started: str


class OtherEnd:
    """Who serves a lane, and which of its former backends may still be at work for nobody."""

    def __init__(self, *, pooled: Pooled) -> None:
        self._pooled = pooled
        self._backend: Backend | None = None
        self._met = False
        self.left: list[Backend] = []
        self.prepares = True

    def before(self, verb: Callable[[Connection], T], driver: Any) -> Callable[[Connection], T]:
        """The verb, after an introduction if the connection is new."""
        if self._met:
            return verb

        def introduced(connection: Connection) -> T:
            self._meet(connection, driver)
            return verb(connection)

        return introduced

    def gone(self) -> None:
        """The connection broke or was cut: its backend may not know."""
        if self._backend is not None:
            self.left.append(self._backend)
        self.closed()

    def closed(self) -> None:
        """The connection was closed in order."""
        self._backend = None
        self._met = False

    def heir(self) -> "OtherEnd":
        """For the lane that takes over from one that is stuck."""
        heir = OtherEnd(pooled=self._pooled)
        heir.left, heir.prepares = list(self.left), self.prepares
        return heir

    def _meet(self, connection: Connection, driver: Any) -> None:
        if not self.prepares:
            unprepare(driver)
        try:
            pid, started = connection.execute(_WHO).one()
            told = told_pid(driver)
            if told is not None and told != pid:
                prepares = driver.prepare_threshold is not None if _can_say(driver) else None
                unprepare(driver)
                self.left.clear()
                self._pooled(prepares)
            elif told is not None and started is not None:
                self._backend = Backend(pid, started)
            if self.prepares:
                self._end_left(connection)
        except DBAPIError as error:
            if is_lost(error) or is_confused(error):
                raise
            self.left.clear()  # whoever may not look at pg_stat_activity can still work
        self._met = True

    def _end_left(self, connection: Connection) -> None:
        for backend in list(self.left):
            connection.execute(_END, {"backend": backend.pid, "started": backend.started})
            self.left.remove(backend)
