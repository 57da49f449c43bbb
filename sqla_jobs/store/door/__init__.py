"""The one door to the database: held connections that run a verb at a time, on either kind of engine.

A lane is one connection in AUTOCOMMIT, taken from the user's engine (so its creator, listeners and
connect arguments count) and detached from the pool. Every statement has a deadline by the local clock:
when it passes, the socket is shut down, which ends the statement at once wherever it waits; psycopg's
own cancel can take 12 seconds on a dead network. A lane is never cancelled in mid-statement: a claim
whose answer is thrown away is rows that run for nobody. Serialization failures, deadlocks and lock
timeouts are tried again; a broken connection is reported, because only the verb knows what that means.
"""

from sqla_jobs.store.door.faults import (
    brief,
    is_confused,
    is_lost,
    is_read_only,
    is_retryable,
    is_rows_fault,
    may_blame_a_row,
    sqlstate_of,
)
from sqla_jobs.store.door.lanes import Lane, SyncLane, Verb, lane_on
from sqla_jobs.store.door.wire import cut, driver_of, end_backends, finish, told_pid, unprepare

__all__ = [
    "Lane",
    "SyncLane",
    "Verb",
    "brief",
    "cut",
    "driver_of",
    "end_backends",
    "finish",
    "is_confused",
    "is_lost",
    "is_read_only",
    "is_retryable",
    "is_rows_fault",
    "lane_on",
    "may_blame_a_row",
    "sqlstate_of",
    "told_pid",
    "unprepare",
]
