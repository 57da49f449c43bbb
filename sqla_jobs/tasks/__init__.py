"""Functions that may become jobs, and their calls into the caller's transaction."""

from sqla_jobs.tasks.calls import enqueue, enqueue_many, enqueue_select
from sqla_jobs.tasks.registry import Jobs, Middleware
from sqla_jobs.tasks.task import ContextTask, PlainTask, RemoteTask, Task

__all__ = [
    "ContextTask",
    "Jobs",
    "Middleware",
    "PlainTask",
    "RemoteTask",
    "Task",
    "enqueue",
    "enqueue_many",
    "enqueue_select",
]
