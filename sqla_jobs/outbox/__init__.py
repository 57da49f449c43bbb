"""Calls into the caller's transaction: their jobs exist if and only if that transaction commits."""

from sqla_jobs.outbox.entities import entity_hook, has_pending
from sqla_jobs.outbox.handles import Enqueued, EnqueuedSelect
from sqla_jobs.outbox.session import AnySession, put, put_many, put_select

__all__ = [
    "AnySession",
    "Enqueued",
    "EnqueuedSelect",
    "entity_hook",
    "has_pending",
    "put",
    "put_many",
    "put_select",
]
