"""What an error means for whoever holds the connection: try again, connect again, or pass it on.

Judges by SQLSTATE (manual, appendix A), whatever the driver. Does nothing about it.
"""

from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from sqla_jobs.errors import SqlaJobsError

__all__ = [
    "brief",
    "is_confused",
    "is_lost",
    "is_read_only",
    "is_refused",
    "is_retryable",
    "is_rows_fault",
    "may_blame_a_row",
    "sqlstate_of",
]

#: 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available: the statement did
#: nothing and may simply run again.
_RETRYABLE = frozenset({"40001", "40P01", "55P03"})
#: 42P05 duplicate_prepared_statement, 26000 invalid_sql_statement_name: a pooler has put another backend
#: behind the connection than the one where the driver prepared its statement. It did nothing either.
_CONFUSED = frozenset({"42P05", "26000"})
#: 08 connection exception, 53 insufficient resources, 57P0x shutdown, crash, start-up, database dropped.
_UNREACHABLE = ("08", "53", "57P0")
#: 53 resources, 57 operator (a statement timeout), 58 system, XX internal, 40 rollback: nothing about a row.
_NOT_A_ROWS = ("08", "40", "53", "57", "58", "XX")
#: 25006 read_only_sql_transaction: the old primary after a failover. Held, the connection would stay there.
_READ_ONLY = "25006"


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of a database error, whatever the driver."""
    orig = getattr(error, "orig", None)
    for each in (orig, getattr(orig, "__cause__", None), error):
        state = getattr(each, "sqlstate", None)
        if isinstance(state, str):
            return state
    return None


def is_retryable(error: BaseException) -> bool:
    """Whether the statement did nothing and may run again at once."""
    return isinstance(error, DBAPIError) and sqlstate_of(error) in _RETRYABLE


def is_confused(error: BaseException) -> bool:
    """Whether server and driver disagree about prepared statements; on a new connection it may run again."""
    return isinstance(error, DBAPIError) and sqlstate_of(error) in _CONFUSED


def is_read_only(error: BaseException) -> bool:
    """Whether the server writes nothing (any more)."""
    return sqlstate_of(error) == _READ_ONLY


def is_lost(error: BaseException) -> bool:
    """Whether the connection is of no use: the server may or may not have done what was asked."""
    state = sqlstate_of(error)
    if not isinstance(error, DBAPIError):
        # SQLAlchemy 2.0 passes on what asyncpg raises while connecting
        return isinstance(error, OSError) or (state or "").startswith(_UNREACHABLE)
    if state is None:  # not from the server: the socket broke, or the driver refuses a value
        return error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError))
    # 08 connection exception, 57P0x shutdown, crash, database dropped
    return error.connection_invalidated or state.startswith(("08", "57P0")) or state == _READ_ONLY


def is_refused(error: BaseException) -> bool:
    """Of an error while connecting: whether it is the network's or the server's, so that it may pass."""
    return isinstance(error, (DBAPIError, OSError)) or is_lost(error)


def is_rows_fault(error: Exception) -> bool:
    """Whether one row's values are surely to blame: then the others must not suffer.

    Data (22), integrity (23), limits (54), what a user's trigger raises without saying more (P0), and values
    that the driver cannot adapt.
    """
    if not isinstance(error, DBAPIError):
        return not isinstance(error, (SQLAlchemyError, SqlaJobsError, OSError))
    state = sqlstate_of(error)
    return isinstance(error, DataError) if state is None else state[:2] in {"22", "23", "54", "P0"}


def may_blame_a_row(error: Exception) -> bool:
    """Whether it may be one row, too: a trigger may raise any code, a row security policy 42501.

    Whoever asks tries the others: what fails for every row alike (privileges, a missing table) is none's
    fault. Never what is about the connection, the server or its resources, or may simply run again.
    """
    if is_rows_fault(error):
        return True
    state = sqlstate_of(error)
    if state is None or not isinstance(error, DBAPIError) or is_lost(error) or is_read_only(error):
        return False
    return not (is_retryable(error) or is_confused(error) or state.startswith(_NOT_A_ROWS))


def brief(error: BaseException) -> str:
    """An error in one line, without the statement and the parameters that SQLAlchemy adds to its text."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
