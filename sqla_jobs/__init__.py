"""Background jobs for SQLAlchemy applications, in the PostgreSQL they already run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqla_jobs import errors

if TYPE_CHECKING:
    from sqla_jobs.context import AsyncJobContext, Cancel, JobContext, RetryAfter, Snooze
    from sqla_jobs.core.lifecycle import JobStatus
    from sqla_jobs.core.retention import Retention
    from sqla_jobs.core.retry import Retry
    from sqla_jobs.models import JobMixin, job_model, metadata
    from sqla_jobs.outbox import Enqueued
    from sqla_jobs.store.find import JobRecord
    from sqla_jobs.tasks import Jobs, enqueue, enqueue_many, enqueue_select
    from sqla_jobs.worker import Worker

__version__ = "0.1.0.dev0"

__all__ = [
    "AsyncJobContext",
    "Cancel",
    "Enqueued",
    "JobContext",
    "JobMixin",
    "JobRecord",
    "JobStatus",
    "Jobs",
    "Retention",
    "Retry",
    "RetryAfter",
    "Snooze",
    "Worker",
    "enqueue",
    "enqueue_many",
    "enqueue_select",
    "errors",
    "job_model",
    "metadata",
]

# Imported when asked for: our Alembic plugin lies below this package, so every `import alembic` in the
# environment runs this file, and must not pay for models and the ORM. Nor needs a web process the worker.
_HOMES = {
    "context": ("AsyncJobContext", "Cancel", "JobContext", "RetryAfter", "Snooze"),
    "core.lifecycle": ("JobStatus",),
    "core.retention": ("Retention",),
    "core.retry": ("Retry",),
    "models": ("JobMixin", "job_model", "metadata"),
    "outbox": ("Enqueued",),
    "store.find": ("JobRecord",),
    "tasks": ("Jobs", "enqueue", "enqueue_many", "enqueue_select"),
    "worker": ("Worker",),
}
_HOME = {name: f"sqla_jobs.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sqla_jobs' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
