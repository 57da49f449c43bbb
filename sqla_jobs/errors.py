"""Everything sqla_jobs raises on purpose, under one root.

A message names the thing, the value and the way out. What a handler raises is not wrapped here.
"""

__all__ = [
    "AppError",
    "ArgumentError",
    "ConfigurationError",
    "ConnectionLost",
    "DatabaseUnreachable",
    "DeadlineExceeded",
    "DuplicateJob",
    "DuplicateTask",
    "EntityGone",
    "LeaseLost",
    "NotFlushed",
    "PayloadError",
    "SchemaMismatch",
    "SqlaJobsError",
    "TaskDefinitionError",
    "TimeLimitExceeded",
]


class SqlaJobsError(Exception):
    """The root: `except SqlaJobsError` catches all that this library raises on purpose."""


class ConfigurationError(SqlaJobsError, ValueError):
    """An option has a value that cannot work; raised when the option is given, not when it is used."""


class TaskDefinitionError(SqlaJobsError, TypeError):
    """A function cannot be a task; raised at decoration."""


class DuplicateTask(TaskDefinitionError):
    """Two tasks of one `Jobs` claim the same kind or alias."""


class ArgumentError(SqlaJobsError, TypeError):
    """A call does not fit the task's signature; raised by enqueue, before anything is written."""


class PayloadError(SqlaJobsError, ValueError):
    """A value cannot travel in a payload, or a stored payload does not fit the handler.

    `path` says where: `order.lines[3].price`.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NotFlushed(SqlaJobsError):
    """`Enqueued.id` was read before the session flushed, so PostgreSQL has not given the job its id yet."""


class DuplicateJob(SqlaJobsError):
    """`Enqueued.require_created`: a job with an equal unique key was there already."""


class EntityGone(SqlaJobsError):
    """The row that an entity argument names no longer exists; the job is cancelled with this reason."""


class LeaseLost(SqlaJobsError):
    """This attempt no longer owns its job: the lease ran out and somebody else may have taken it over."""


class TimeLimitExceeded(SqlaJobsError):
    """An attempt took longer than its task's `timeout`; `Retry(on=..., give_up=...)` may name it."""


class SchemaMismatch(SqlaJobsError):
    """The tables are missing, or older than this version of the library needs."""


class AppError(SqlaJobsError):
    """`--app` cannot be imported, is not a `Jobs`, or has no task."""


class ConnectionLost(SqlaJobsError):
    """A statement's connection broke; whether the statement took effect is unknown."""


class DeadlineExceeded(ConnectionLost):
    """No answer within the deadline: the connection was cut; whether the statement took effect is unknown."""


class DatabaseUnreachable(SqlaJobsError):
    """No connection could be made within the start-up limit."""
