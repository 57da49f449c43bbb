"""What an enqueue gives back: a promise that the flush keeps."""

from typing import Literal, Self

from sqla_jobs.errors import DuplicateJob, NotFlushed

__all__ = ["Conflict", "Enqueued", "EnqueuedSelect"]

Conflict = Literal["waiting", "running"]


class Enqueued:
    """What became of an `enqueue`: readable after the flush, and after commit, on every kind of session.

    `created` is False when a job with an equal unique key was there already; then `id` is that job's and
    `conflict` says whether it was "waiting" or "running". After a rollback the handle means nothing.

    Raises `NotFlushed` from `id`, `created` and `conflict` before the flush.
    """

    __slots__ = ("_conflict", "_created", "_id", "kind", "queue")

    def __init__(self, kind: str, queue: str) -> None:
        self._id: int | None = None
        self._created = True
        self._conflict: Conflict | None = None
        self.kind = kind
        self.queue = queue

    @property
    def id(self) -> int:
        """The job's id: `jobs.find(session, handle.id)`."""
        if self._id is None:
            raise NotFlushed(
                f"the id of this {self.kind} job comes from PostgreSQL at flush: "
                "call session.flush(), or read it after commit"
            )
        return self._id

    @property
    def created(self) -> bool:
        """Whether this call made the job that `id` names."""
        return self.id is not None and self._created

    @property
    def conflict(self) -> Conflict | None:
        """What the job with the equal unique key was doing; None when there was none."""
        return self._conflict if self.id is not None else None

    def require_created(self) -> Self:
        """The handle itself; raises `DuplicateJob` when an equal job was there already."""
        if not self.created:
            raise DuplicateJob(
                f"a {self.kind} job with this unique key is {self.conflict} already, as job {self.id}"
            )
        return self

    def __repr__(self) -> str:
        return f"<Enqueued {self.kind} {'not flushed' if self._id is None else self._id}>"


class EnqueuedSelect:
    """What became of an `enqueue_select`: `count` jobs, known after the flush.

    Raises `NotFlushed` from `count` before it.
    """

    __slots__ = ("_count", "kind", "queue")

    def __init__(self, kind: str, queue: str) -> None:
        self._count: int | None = None
        self.kind = kind
        self.queue = queue

    @property
    def count(self) -> int:
        """How many jobs the select has become."""
        if self._count is None:
            raise NotFlushed(
                f"how many {self.kind} jobs there are is known at flush: "
                "call session.flush(), or read it after commit"
            )
        return self._count

    def __repr__(self) -> str:
        return f"<EnqueuedSelect {self.kind} {'not flushed' if self._count is None else self._count}>"
