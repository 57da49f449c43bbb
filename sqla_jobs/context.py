"""What a handler sees: its job, its session, and how to end otherwise than by returning or raising.

Knows no machinery: the session and the state of the lease are handed in by whoever runs the attempt.
"""

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeAlias, cast

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import TypeVar

from sqla_jobs.core.call import LONGEST
from sqla_jobs.errors import ConfigurationError, LeaseLost

__all__ = ["AsyncJobContext", "Cancel", "JobContext", "RetryAfter", "Snooze"]

S = TypeVar("S", bound="Session | AsyncSession", default=Session)


class _Ending(Exception):
    """Raised by a handler to end its attempt in a way of its own."""


class Snooze(_Ending):
    """Raise it to run again after `delay`; the attempt is given back. The delay is at least a second.

    >>> raise Snooze(timedelta(minutes=5))
    Traceback (most recent call last):
        ...
    sqla_jobs.context.Snooze: for 0:05:00
    """

    def __init__(self, delay: timedelta) -> None:
        _check_delay("Snooze", delay)
        super().__init__(f"for {delay}")
        self.delay = delay


class RetryAfter(_Ending):
    """Raise it to count the attempt as failed, and to be tried again after exactly `delay`.

    What `raise RetryAfter(...) from error` names as its cause is what is remembered as the error.
    """

    def __init__(self, delay: timedelta) -> None:
        _check_delay("RetryAfter", delay)
        super().__init__(f"retry after {delay}")
        self.delay = delay


class Cancel(_Ending):
    """Raise it to cancel the job for good; `reason` is kept as its last error."""

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str):
            raise ConfigurationError(f"Cancel takes its reason as a str, got {reason!r}")
        super().__init__(reason)
        self.reason = reason


def _check_delay(what: str, delay: object) -> None:
    if not isinstance(delay, timedelta) or delay < timedelta(0):
        raise ConfigurationError(f"{what} takes a timedelta that is not negative, got {delay!r}")
    if delay > LONGEST:
        raise ConfigurationError(f"{what} takes a timedelta of at most 100 years, got {delay}")


@dataclass(slots=True, eq=False)
class Attempt:
    """The state of one attempt, shared by the worker and the context."""

    cancelled: bool = False
    lost: bool = False


class _JobLog(logging.LoggerAdapter[logging.Logger]):
    """Beside the job's fields a record keeps those of its own call (`merge_extra`, from Python 3.13)."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs


class JobContext(Generic[S]):
    """One attempt of one job, as its handler sees it.

    Annotate a handler's first parameter with it (`AsyncJobContext` for an `async def`) and it is handed
    in. `session` is a session of the worker's making: what is written through it and the job's
    completion commit together or not at all. Effects outside the database happen at least once: use
    `idempotency_key`, which is the same in every attempt.

    >>> def send_receipt(ctx: JobContext, order_id: int) -> None:
    ...     ctx.log.info("attempt %d of %d", ctx.attempt, ctx.max_attempts)
    """

    __slots__ = ("_attempt", "_open", "_session", "attempt", "id", "kind", "max_attempts", "queue")

    def __init__(
        self,
        *,
        id: int,  # noqa: A002 - the contract's name
        queue: str,
        kind: str,
        attempt: int,
        max_attempts: int,
        open_session: Callable[[], Any],
        state: Attempt | None = None,
    ) -> None:
        self.id = id
        self.queue = queue
        self.kind = kind
        self.attempt = attempt
        self.max_attempts = max_attempts
        self._open = open_session
        self._session: Any = None
        self._attempt = state or Attempt()

    @property
    def session(self) -> S:
        """The session of this attempt. It takes a connection when it is first used, not before."""
        if self._session is None:
            self._session = self._open()
        return cast("S", self._session)

    @property
    def cancelled(self) -> bool:
        """Whether this attempt should end: its lease is lost, its job is cancelled, or the worker stops."""
        return self._attempt.cancelled

    @property
    def idempotency_key(self) -> str:
        """The same in every attempt of this job, and in no other job of this table."""
        return f"{self.kind}:{self.queue}:{self.id}"

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger named by the kind, whose records carry job_id, queue, kind and attempt."""
        fields = {"job_id": self.id, "queue": self.queue, "kind": self.kind, "attempt": self.attempt}
        return _JobLog(logging.getLogger(f"sqla_jobs.task.{self.kind}"), fields)

    def raise_if_lost(self) -> None:
        """Raise `LeaseLost` when this attempt no longer owns its job: call it before an effect outside."""
        if self._attempt.lost:
            raise LeaseLost(
                f"job {self.id} ({self.kind}): the lease of attempt {self.attempt} is lost; "
                "another worker may be running it"
            )


AsyncJobContext: TypeAlias = JobContext[AsyncSession]
