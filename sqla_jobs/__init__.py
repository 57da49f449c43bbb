"""Background jobs for SQLAlchemy applications, in the PostgreSQL they already run."""

from typing import TYPE_CHECKING, Any

from sqla_jobs import errors
from sqla_jobs.context import AsyncJobContext, Cancel, JobContext, RetryAfter, Snooze
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retention import Retention
from sqla_jobs.core.retry import Retry
from sqla_jobs.models import JobMixin, job_model, metadata
from sqla_jobs.outbox import Enqueued
from sqla_jobs.store.find import JobRecord
from sqla_jobs.tasks import Jobs, enqueue

if TYPE_CHECKING:
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
    "errors",
    "job_model",
    "metadata",
]


def __getattr__(name: str) -> Any:
    """`Worker` is imported when it is asked for: a web process enqueues, and needs none of it."""
    if name == "Worker":
        from sqla_jobs.worker import Worker

        return Worker
    raise AttributeError(f"module 'sqla_jobs' has no attribute {name!r}")
