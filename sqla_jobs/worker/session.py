"""The handler's session: what it writes and the job's completion are one transaction, fenced.

An ordinary Session whose savepoints live inside an outer READ COMMITTED transaction of the worker's, so
that the handler's own commit(), rollback() and begin_nested() behave, and everything still commits or
vanishes with the job (SQLAlchemy manual: joining a session into an external transaction). The outer
transaction begins at the first use. Does not judge, and does not know threads from loops: the same
functions run directly, or in the greenlet of an AsyncSession.
"""

import re
import threading
import time
from itertools import count
from typing import Any

from sqlalchemy import Connection, Engine, NestedTransaction, Transaction, event, text
from sqlalchemy.orm import Session, SessionTransaction

from sqla_jobs.core.retention import Retention
from sqla_jobs.errors import SqlaJobsError
from sqla_jobs.models import Tables
from sqla_jobs.store.door import cut, driver_of, is_retryable, told_pid
from sqla_jobs.store.settle import Entry, Settled, settle_within

__all__ = ["HandlerSession", "abandon", "end_read", "settle_through"]

#: The settle waits for its row: the worker's own prolongation may hold it for a moment.
_LOCK_TIMEOUT = text("SELECT set_config('lock_timeout', '5s', true)")
_TRIES = 12
_OLD_LOCK_TIMEOUT = text("SELECT current_setting('lock_timeout')")
_RESTORE_LOCK_TIMEOUT = text("SELECT set_config('lock_timeout', :before, true)")


#: The verbs of a statement that writes, wherever a WITH has them; not those of a lock. A false alarm (the
#: word as a name, in quotes) fails a job loudly that had closed its session, which it need not do.
_WRITES = re.compile(
    r"(?<!FOR )(?<!FOR NO KEY )\b(?:INSERT|UPDATE|DELETE|MERGE|COPY|TRUNCATE|CREATE|ALTER|DROP|CALL|DO|GRANT"
    r"|REVOKE|REFRESH|LOCK|NOTIFY)\b",
    re.IGNORECASE,
)


class HandlerSession(Session):
    """A session that opens its outer transaction when it is first used.

    On a given connection that is a savepoint of whatever transaction its owner has begun.
    """

    def __init__(self, *, source: Engine | Connection, **arguments: Any) -> None:
        super().__init__(**arguments, join_transaction_mode="create_savepoint")
        self._source = source
        self.outer: Connection | None = None
        self.opened: float | None = None  # time.monotonic(), while it holds a connection
        self.settling: float | None = None  # the same, while our own statements are under way
        self._driver: Any = None
        self._wires = threading.Lock()
        self._begun: Transaction | None = None
        self._over = False
        self._unsettled = False  # written since the last commit, by whatever way
        self._discarded = False  # by a close() of the handler's

    def get_bind(self, *_: Any, **__: Any) -> Connection:
        """The connection of the outer transaction, whatever is asked about."""
        if self._over:
            raise SqlaJobsError(
                "ctx.session was used after its handler had ended: await what the handler starts"
            )
        if self.outer is None:
            self.opened = time.monotonic()
            if isinstance(self._source, Connection):
                self._begun = self._source.begin_nested()
                self.outer = self._source
                event.listen(self.outer, "after_cursor_execute", self._sent)
                return self.outer
            # READ COMMITTED whatever the engine says: above it, one prolongation of the lease makes the
            # settle fail for ever; under AUTOCOMMIT a lost lease would roll nothing back
            connection = self._source.connect().execution_options(isolation_level="READ COMMITTED")
            self._begun = connection.begin()
            event.listen(connection, "after_cursor_execute", self._sent)
            with self._wires:
                self.outer, self._driver = connection, driver_of(connection)
        return self.outer

    def cut(self) -> tuple[int, float] | None:
        """From any thread: end whatever waits on its connection; nothing of it can be committed any more.

        Returns the server's process that does not know it yet, and since when it was ours.
        """
        with self._wires:
            driver, since = self._driver, self.opened
            if driver is None or since is None:
                return None
            pid = told_pid(driver)
            cut(driver)
        return None if pid is None else (pid, since)

    def close(self) -> None:
        """Closing it is allowed; closing it on work that is not committed would lose that in silence."""
        self._notice_loss()
        super().close()

    def reset(self) -> None:
        """The same."""
        self._notice_loss()
        super().reset()

    def _notice_loss(self) -> None:
        if not self._over and (self._unsettled or self.new or self.deleted or self._has_changes()):
            self._discarded = True

    def _sent(self, _c: object, _cursor: object, statement: str, *_: object) -> None:
        """After every statement on its connection: Core, text, bulk and enqueues tell the session nothing."""
        if not self._unsettled and _WRITES.search(statement):
            self._unsettled = True

    @property
    def on_given_connection(self) -> bool:
        """Whether somebody else goes on with its transaction."""
        return isinstance(self._source, Connection)

    def _has_changes(self) -> bool:
        return any(self.is_modified(each) for each in self.dirty)

    def require_transaction(self) -> None:
        """Raise `SqlaJobsError` when the handler has ended the worker's own transaction, or lost its work."""
        if self._discarded:
            raise SqlaJobsError(
                "ctx.session was closed before its handler ended, and what was not committed is lost: "
                "commit first, or leave the closing to the worker"
            )
        if self.outer is not None and self._begun is not None and not self._is_in(self.outer):
            raise SqlaJobsError(
                "the handler committed or rolled back ctx.session.connection() itself: what it wrote is no "
                "longer one with its job; use ctx.session.commit()"
            )

    def _is_in(self, outer: Connection) -> bool:
        begun = self._begun
        return outer.get_transaction() is begun or (isinstance(begun, NestedTransaction) and begun.is_active)

    def finish(self) -> None:
        """No use after the handler's end: nobody would ever commit it."""
        self._over = True

    def let_go(self, *, commit: bool) -> None:
        """End the outer transaction and give the connection back."""
        outer, begun = self.outer, self._begun
        if outer is None or begun is None:
            return
        try:
            if commit:
                begun.commit()
            elif outer is not self._source:
                outer.rollback()  # also what the handler began after ending ours
            elif begun.is_active:
                begun.rollback()
        finally:
            with self._wires:  # not earlier: a commit may wait; not later: in the pool it is somebody else's
                self.outer = self._begun = self._driver = self.opened = None
            event.remove(outer, "after_cursor_execute", self._sent)
            if outer is not self._source:
                outer.close()


@event.listens_for(HandlerSession, "after_transaction_end")
def _ended(session: HandlerSession, transaction: SessionTransaction) -> None:
    if transaction.parent is None:  # a savepoint's end settles nothing
        session._unsettled = False


def end_read(session: HandlerSession) -> None:
    """End the read that loaded the arguments: objects stay attached and unexpired, no connection is held."""
    expires = session.expire_on_commit
    session.expire_on_commit = False
    try:
        session.commit()
    finally:
        session.expire_on_commit = expires
        session.let_go(commit=False)


def settle_through(
    session: HandlerSession, tables: Tables, entry: Entry, retention: Retention
) -> Settled | None:
    """Commit what the handler wrote together with its verdict.

    Both are committed, or nothing is `written`: the lease is lost, and both are rolled back. None: the
    session was never used, the verdict is still to be written. Raises what the handler's own statements
    raise.
    """
    session.require_transaction()
    session.commit()
    outer = session.outer
    if outer is None:
        session.finish()
        session.close()
        return None
    session.settling = time.monotonic()
    before = outer.scalar(_OLD_LOCK_TIMEOUT) if session.on_given_connection else None
    outer.execute(_LOCK_TIMEOUT)
    settled = _settled(session, outer, tables, entry, retention)
    if settled is not None and session.on_given_connection:  # its owner goes on with it
        outer.execute(_RESTORE_LOCK_TIMEOUT, {"before": before})
    if settled is None:
        abandon(session)
        return Settled(stale=[entry])
    session.let_go(commit=True)
    session.settling = None
    session.finish()
    session.close()
    return settled


def _settled(
    session: HandlerSession, outer: Connection, tables: Tables, entry: Entry, retention: Retention
) -> Settled | None:
    """Its row may be held for a while; until its lease ends, when it is cut, that is worth waiting for."""
    for attempt in count(1):
        session.settling = time.monotonic()  # the server has answered: the network is there
        try:
            last = not session.on_given_connection  # its owner's constraints stay deferred
            return settle_within(outer, tables, entry, retention=retention, check_now=last)
        except Exception as error:
            if not is_retryable(error) or attempt == _TRIES:
                raise
    raise AssertionError("unreachable")


def abandon(session: HandlerSession) -> None:
    """Roll back whatever the handler wrote."""
    session.finish()
    try:
        session.close()
    finally:
        session.let_go(commit=False)
