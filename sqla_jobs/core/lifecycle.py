"""What may become of a job: statuses, transitions, and the verdict on an attempt.

Pure: an outcome goes in, a verdict comes out; `store` writes verdicts and alone knows whether the
lease was still ours. Every change of status in the library is a row of TRANSITIONS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

__all__ = [
    "FINAL",
    "TRANSITIONS",
    "Aborted",
    "JobStatus",
    "Lost",
    "Outcome",
    "Raised",
    "Released",
    "Returned",
    "Snoozed",
    "Verdict",
    "judge",
    "overridden_by_cancel",
]


class JobStatus(StrEnum):
    """Where a job stands. Stored as text, with a CHECK."""

    READY = "ready"  #: claimable once run_at is past
    BLOCKED = "blocked"  #: waits for other jobs, nothing else
    RUNNING = "running"  #: a worker holds its lease
    DONE = "done"  #: its handler returned; lives in the archive
    FAILED = "failed"  #: for good; stays in the jobs table as a dead letter
    CANCELLED = "cancelled"  #: lives in the archive


#: An attempt's job never leaves these by itself; only an operator's retry does.
FINAL = frozenset({JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED})

_S = JobStatus

#: status -> event -> the statuses that may follow. Anything else is a bug.
TRANSITIONS: Mapping[JobStatus, Mapping[str, frozenset[JobStatus]]] = {
    _S.READY: {
        "claim": frozenset({_S.RUNNING}),
        "cancel": frozenset({_S.CANCELLED}),
        "expire": frozenset({_S.CANCELLED}),
    },
    _S.BLOCKED: {
        "promote": frozenset({_S.READY}),
        "cancel": frozenset({_S.CANCELLED}),
    },
    _S.RUNNING: {
        "return": frozenset({_S.DONE}),
        "raise": frozenset({_S.READY, _S.FAILED, _S.CANCELLED}),
        "snooze": frozenset({_S.READY, _S.CANCELLED}),
        "abort": frozenset({_S.CANCELLED}),
        "release": frozenset({_S.READY, _S.CANCELLED}),
        "rescue": frozenset({_S.READY, _S.FAILED, _S.CANCELLED}),
        "cancel": frozenset({_S.RUNNING}),  # cooperative: cancel_requested_at is set
    },
    _S.FAILED: {"retry": frozenset({_S.READY})},
    _S.CANCELLED: {"retry": frozenset({_S.READY})},
    _S.DONE: {"retry": frozenset({_S.READY})},
}


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler returned; `result` is JSON text when the task stores its results."""

    result: str | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised. `delay` says when it may run again; None gives up."""

    error: str
    delay: timedelta | None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler asked to run later; its attempt is given back."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Aborted:
    """The handler (or a row that is gone) says the job must not run: cancelled, with a reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """Given back unrun, or unfinished at the drain limit; its attempt is given back."""

    delay: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease ran out: the worker is gone, or was not heard of in time."""

    owner: str
    delay: timedelta | None


Outcome = Returned | Raised | Snoozed | Aborted | Released | Lost

#: Snooze(0) with the attempt given back would loop for ever at full speed.
SNOOZE_FLOOR = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is written: the status, when the job may run again, and what is remembered.

    `delay` None keeps run_at as it is. `attempts` is added to the counter (0, or -1 for an attempt
    that is given back). `error` becomes last_error and a line of the attempt log; `result` is JSON text.
    """

    status: JobStatus
    attempts: int = 0
    delay: timedelta | None = None
    error: str | None = None
    result: str | None = None


DONE = Verdict(JobStatus.DONE)


def judge(outcome: Outcome, *, attempt: int, max_attempts: int) -> Verdict:
    """Turn the outcome of attempt number `attempt` (from 1) into a verdict.

    A cancel that was requested meanwhile is known to the database alone: see `overridden_by_cancel`.

    >>> judge(Raised("boom", timedelta(seconds=8)), attempt=3, max_attempts=3).status
    <JobStatus.FAILED: 'failed'>
    """
    match outcome:
        case Returned(result=None):
            return DONE
        case Returned(result):
            return Verdict(JobStatus.DONE, result=result)
        case Raised(error, delay):
            return _failed_attempt(error, delay, attempt, max_attempts)
        case Lost(owner, delay):
            return _failed_attempt(f"lease lost by worker {owner}", delay, attempt, max_attempts)
        case Snoozed(delay):
            return Verdict(JobStatus.READY, attempts=-1, delay=max(delay, SNOOZE_FLOOR))
        case Aborted(reason):
            return Verdict(JobStatus.CANCELLED, error=reason)
        case Released(delay):
            return Verdict(JobStatus.READY, attempts=-1, delay=delay)


def _failed_attempt(error: str, delay: timedelta | None, attempt: int, max_attempts: int) -> Verdict:
    if delay is None or attempt >= max_attempts:
        return Verdict(JobStatus.FAILED, error=error)
    return Verdict(JobStatus.READY, delay=delay, error=error)


def overridden_by_cancel(status: JobStatus, *, cancel_requested: bool) -> JobStatus:
    """The status after a cancel request: a normal return still counts, any other end is a cancel.

    `store.settle` says the same in SQL, because a request may arrive while the outcome is under way.
    """
    return JobStatus.CANCELLED if cancel_requested and status is not JobStatus.DONE else status
