"""core.lifecycle against the contract table of the design, and in thousands of random histories.

The histories run on a model of one row, its database clock and several workers. What the model may do
is what `store` does in SQL; what must come of it is said by `Watch`, which shares no code with
core.lifecycle.
"""

import random
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from sqla_jobs.core.lifecycle import (
    FINAL,
    TRANSITIONS,
    Aborted,
    JobStatus,
    Lost,
    Outcome,
    Raised,
    Released,
    Returned,
    Snoozed,
    Verdict,
    judge,
    overridden_by_cancel,
)

READY, BLOCKED, RUNNING = JobStatus.READY, JobStatus.BLOCKED, JobStatus.RUNNING
DONE, FAILED, CANCELLED = JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


# -- the contract table of design section 11, row by row

#: (row of the table, outcome, attempt, max_attempts) -> what is written
VERDICTS: list[tuple[str, Outcome, int, int, Verdict]] = [
    ("normal return", Returned(), 1, 20, Verdict(DONE)),
    ("normal return at the last attempt", Returned(), 3, 3, Verdict(DONE)),
    ("normal return with a result", Returned('{"a": 1}'), 1, 20, Verdict(DONE, result='{"a": 1}')),
    ("normal return with an empty result", Returned(""), 1, 20, Verdict(DONE, result="")),
    ("exception", Raised("boom", seconds(8)), 1, 20, Verdict(READY, delay=seconds(8), error="boom")),
    (
        "exception before the last",
        Raised("boom", seconds(8)),
        2,
        3,
        Verdict(READY, delay=seconds(8), error="boom"),
    ),
    ("exception at max_attempts", Raised("boom", seconds(8)), 3, 3, Verdict(FAILED, error="boom")),
    ("exception at an only attempt", Raised("boom", seconds(8)), 1, 1, Verdict(FAILED, error="boom")),
    ("exception past max_attempts", Raised("boom", seconds(8)), 4, 3, Verdict(FAILED, error="boom")),
    ("the policy gives up", Raised("boom", None), 1, 20, Verdict(FAILED, error="boom")),
    ("RetryAfter(0)", Raised("boom", seconds(0)), 1, 20, Verdict(READY, delay=seconds(0), error="boom")),
    (
        "RetryAfter(a day)",
        Raised("boom", seconds(86400)),
        1,
        20,
        Verdict(READY, delay=seconds(86400), error="boom"),
    ),
    ("RetryAfter at max_attempts", Raised("boom", seconds(86400)), 3, 3, Verdict(FAILED, error="boom")),
    ("Snooze", Snoozed(seconds(30)), 2, 3, Verdict(READY, attempts=-1, delay=seconds(30))),
    (
        "Snooze at the last attempt",
        Snoozed(seconds(30)),
        3,
        3,
        Verdict(READY, attempts=-1, delay=seconds(30)),
    ),
    ("Snooze(0)", Snoozed(seconds(0)), 1, 20, Verdict(READY, attempts=-1, delay=seconds(1))),
    ("Snooze(half a second)", Snoozed(seconds(0.5)), 1, 20, Verdict(READY, attempts=-1, delay=seconds(1))),
    ("Snooze(-5)", Snoozed(seconds(-5)), 1, 20, Verdict(READY, attempts=-1, delay=seconds(1))),
    ("Snooze(1)", Snoozed(seconds(1)), 1, 20, Verdict(READY, attempts=-1, delay=seconds(1))),
    ("Cancel", Aborted("no such customer"), 1, 20, Verdict(CANCELLED, error="no such customer")),
    ("Cancel at the last attempt", Aborted("gone"), 3, 3, Verdict(CANCELLED, error="gone")),
    ("release", Released(), 1, 20, Verdict(READY, attempts=-1)),
    ("release at the last attempt", Released(), 3, 3, Verdict(READY, attempts=-1)),
    (
        "release of an unknown kind",
        Released(seconds(30)),
        1,
        20,
        Verdict(READY, attempts=-1, delay=seconds(30)),
    ),
    (
        "rescue",
        Lost("web-1:42:abc", seconds(4)),
        2,
        3,
        Verdict(READY, delay=seconds(4), error="lease lost by worker web-1:42:abc"),
    ),
    (
        "rescue at max_attempts",
        Lost("web-1:42:abc", seconds(4)),
        3,
        3,
        Verdict(FAILED, error="lease lost by worker web-1:42:abc"),
    ),
    (
        "rescue when the policy gives up",
        Lost("web-1:42:abc", None),
        1,
        3,
        Verdict(FAILED, error="lease lost by worker web-1:42:abc"),
    ),
]


@pytest.mark.parametrize(
    ("outcome", "attempt", "max_attempts", "expected"),
    [row[1:] for row in VERDICTS],
    ids=[row[0] for row in VERDICTS],
)
def test_an_outcome_becomes_what_the_contract_says(
    outcome: Outcome, attempt: int, max_attempts: int, expected: Verdict
) -> None:
    verdict = judge(outcome, attempt=attempt, max_attempts=max_attempts)

    assert verdict == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (DONE, DONE),  # a normal return still counts
        (READY, CANCELLED),  # a retry, a snooze, a release or a rescue does not come back
        (FAILED, CANCELLED),
        (CANCELLED, CANCELLED),
    ],
)
def test_a_cancel_request_turns_every_end_but_a_normal_return_into_a_cancel(
    status: JobStatus, expected: JobStatus
) -> None:
    assert overridden_by_cancel(status, cancel_requested=True) is expected


@pytest.mark.parametrize("status", list(JobStatus))
def test_without_a_cancel_request_a_verdict_stands(status: JobStatus) -> None:
    assert overridden_by_cancel(status, cancel_requested=False) is status


#: The column "status" of the table, once more by hand; the last of a cell is what a cancel request adds.
ALLOWED: dict[tuple[JobStatus, str], set[JobStatus]] = {
    (READY, "claim"): {RUNNING},
    (READY, "cancel"): {CANCELLED},
    (READY, "expire"): {CANCELLED},
    (BLOCKED, "promote"): {READY},
    (BLOCKED, "cancel"): {CANCELLED},
    (RUNNING, "return"): {DONE},
    (RUNNING, "raise"): {READY, FAILED, CANCELLED},
    (RUNNING, "snooze"): {READY, CANCELLED},
    (RUNNING, "abort"): {CANCELLED},
    (RUNNING, "release"): {READY, CANCELLED},
    (RUNNING, "rescue"): {READY, FAILED, CANCELLED},
    (RUNNING, "cancel"): {RUNNING},
    (FAILED, "retry"): {READY},
    (CANCELLED, "retry"): {READY},
    (DONE, "retry"): {READY},
}


def test_the_transitions_are_those_of_the_contract_and_no_others() -> None:
    written = {
        (status, event): set(following)
        for status, events in TRANSITIONS.items()
        for event, following in events.items()
    }

    assert written == ALLOWED


def test_what_an_attempt_has_ended_for_good_only_an_operator_takes_back() -> None:
    assert {DONE, FAILED, CANCELLED} == FINAL
    assert {event for status in FINAL for event in TRANSITIONS[status]} == {"retry"}


def test_statuses_are_stored_as_the_words_of_the_vocabulary() -> None:
    assert [str(status) for status in JobStatus] == [
        "ready",
        "blocked",
        "running",
        "done",
        "failed",
        "cancelled",
    ]


# -- a model of one row and its workers


@dataclass(slots=True)
class Row:
    """The job as the database has it.

    `owner` stays written when an attempt ends, as it does in the archive: the fence must not lean on its
    being cleared. `claim` is no column: it numbers the claims, also over a restore, and so knows what the
    fence must find out.
    """

    status: JobStatus
    run_at: float
    max_attempts: int
    expires_at: float | None
    attempts: int = 0
    token: int = 0
    owner: str | None = None
    locked_until: float = 0.0
    cancel_requested: bool = False
    claim: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    token: int
    owner: str
    attempt: int
    claim: int


class Rules:
    """What store does in SQL, in the words of design sections 2 and 11. Broken variants override it."""

    lease = 60.0

    def may_claim(self, row: Row, now: float) -> bool:
        expired = row.expires_at is not None and row.expires_at <= now and row.token == 0
        return row.status is READY and row.run_at <= now and not expired

    def claim(self, row: Row, owner: str, now: float) -> None:
        row.status = RUNNING
        row.attempts += 1
        row.token += 1
        row.owner = owner
        row.locked_until = now + self.lease

    def is_ours(self, row: Row, lease: Lease) -> bool:
        return row.status is RUNNING and row.token == lease.token and row.owner == lease.owner

    def is_lost(self, row: Row, now: float) -> bool:
        return row.status is RUNNING and row.locked_until < now

    def judge(self, outcome: Outcome, *, attempt: int, max_attempts: int) -> Verdict:
        return judge(outcome, attempt=attempt, max_attempts=max_attempts)

    def status_of(self, verdict: Verdict, row: Row) -> JobStatus:
        return overridden_by_cancel(verdict.status, cancel_requested=row.cancel_requested)

    def write(self, row: Row, verdict: Verdict, now: float) -> None:
        row.status = self.status_of(verdict, row)
        row.attempts += verdict.attempts
        if row.status is READY and verdict.delay is not None:
            row.run_at = now + verdict.delay.total_seconds()

    def cancel(self, row: Row) -> None:
        if row.status is RUNNING:
            row.cancel_requested = True
        else:
            row.status = CANCELLED

    def retry(self, row: Row, now: float) -> None:
        """The operator's: a new life, the token kept."""
        row.status = READY
        row.attempts = 0
        row.run_at = now
        row.cancel_requested = False


class Violation(AssertionError):
    """A history came to something that must not be."""


#: by how much each event changes the count of attempts; the others leave it
COUNTS = {"claim": 1, "snooze": -1, "release": -1}


class Watch:
    """What must hold after every step, whatever the rules did."""

    def __init__(self, row: Row) -> None:
        self.attempts = row.attempts
        self.finals = 0
        self.row = copy(row)

    def check(self, event: str, row: Row) -> None:
        before, self.row = self.row, copy(row)
        self._check_status(event, before, row)
        self._check_token(event, before, row)
        self._check_attempts(event, row)
        if row.cancel_requested and row.status not in (RUNNING, DONE, CANCELLED):
            raise Violation(f"cancelled on request, and {row.status} after {event}")

    def _check_status(self, event: str, before: Row, row: Row) -> None:
        if row.status not in ALLOWED.get((before.status, event), set()):
            raise Violation(f"{event} led from {before.status} to {row.status}")
        if row.status not in TRANSITIONS[before.status][event]:
            raise Violation(f"{event}: {before.status} -> {row.status} is no row of TRANSITIONS")
        if event == "retry":
            self.finals = 0
        elif row.status in FINAL:
            self.finals += 1
        if self.finals > 1:
            raise Violation("finalised twice in one life")

    def _check_token(self, event: str, before: Row, row: Row) -> None:
        if event == "claim" and row.token <= before.token:
            raise Violation(f"a claim left the token at {row.token}, after {before.token}")
        if event != "claim" and row.token != before.token:
            raise Violation(f"{event} changed the token from {before.token} to {row.token}")

    def _check_attempts(self, event: str, row: Row) -> None:
        # where a cancel ends the job its count is of no consequence: the table does not say it
        if row.status is CANCELLED and event in ("snooze", "release"):
            self.attempts = row.attempts
        else:
            self.attempts = 0 if event == "retry" else self.attempts + COUNTS.get(event, 0)
        if row.attempts != self.attempts:
            raise Violation(f"{row.attempts} attempts after {event}, not {self.attempts}")
        if not 0 <= row.attempts <= row.max_attempts:
            raise Violation(f"{row.attempts} attempts of {row.max_attempts}")


class History:
    """One job's life, by chance. Raises `Violation` at the first step that breaks a promise."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rules = rules
        self.random = random.Random(seed)
        self.now = 1000.0
        self.row = Row(
            status=BLOCKED if self.random.random() < 0.1 else READY,
            run_at=self.now + self.random.choice((0, 0, 5)),
            max_attempts=self.random.choice((1, 2, 3, 5)),
            expires_at=self.now + 30 if self.random.random() < 0.1 else None,
        )
        self.watch = Watch(self.row)
        self.claims = 0
        self.starts = 0
        self.workers: list[str] = [self._new_name() for _ in range(3)]
        self.held: list[Lease] = []
        self.backup: tuple[Row, Watch] | None = None
        self.steps: list[tuple[Callable[[], None], int]] = [
            (self.tick, 12),
            (self.claim, 14),
            (self.settle, 8),
            (self.prolong, 1),
            (self.rescue, 9),
            (self.crash, 1),
            (self.request_cancel, 1),
            (self.retry, 5),
            (self.promote, 1),
            (self.expire, 1),
            (self.back_up, 1),
            (self.restore, 1),
        ]

    def walk(self, steps: int) -> None:
        moves = [move for move, _ in self.steps]
        weights = [weight for _, weight in self.steps]
        for move in self.random.choices(moves, weights, k=steps):
            move()
        self.finish()

    # -- steps

    def tick(self) -> None:
        self.now += self.random.choice((0.5, 2.0, 10.0, 40.0, 70.0))

    def claim(self) -> None:
        if not self.rules.may_claim(self.row, self.now):
            return
        self.claims += 1
        self.row.claim = self.claims
        owner = self.random.choice(self.workers)
        self.rules.claim(self.row, owner, self.now)
        self.watch.check("claim", self.row)
        self.held.append(Lease(self.row.token, owner, self.row.attempts, self.claims))

    def settle(self) -> None:
        if not self.held:
            return
        lease = self.random.choice(self.held)
        event, outcome = self._outcome()
        self.settle_as(lease, event, outcome)
        # else the answer is lost on the wire, and the worker settles it again
        if self.random.random() < 0.6:
            self.held.remove(lease)

    def settle_as(self, lease: Lease, event: str, outcome: Outcome) -> None:
        ours = self.row.status is RUNNING and self.row.claim == lease.claim
        before = copy(self.row)
        verdict = self.rules.judge(outcome, attempt=lease.attempt, max_attempts=self.row.max_attempts)
        if self.rules.is_ours(self.row, lease):
            self.rules.write(self.row, verdict, self.now)
        if ours:
            self.watch.check(event, self.row)
        elif self.row != before:
            raise Violation(f"a stale {event} of {lease} changed {before} to {self.row}")

    def prolong(self) -> None:
        if not self.held:
            return
        lease = self.random.choice(self.held)
        ours = self.row.status is RUNNING and self.row.claim == lease.claim
        if self.rules.is_ours(self.row, lease):
            if not ours:
                raise Violation(f"{lease} prolonged what it does not own: {self.row}")
            self.row.locked_until = self.now + self.rules.lease
        elif ours:
            raise Violation(f"{lease} could not prolong its own {self.row}")

    def rescue(self) -> None:
        if not self.rules.is_lost(self.row, self.now):
            return
        lost = Lost(str(self.row.owner), seconds(self.random.choice((0, 2, 30))))
        verdict = self.rules.judge(lost, attempt=self.row.attempts, max_attempts=self.row.max_attempts)
        self.rules.write(self.row, verdict, self.now)
        self.watch.check("rescue", self.row)

    def crash(self) -> None:
        """A worker forgets what it held, and starts anew under another name."""
        number = self.random.randrange(len(self.workers))
        self.held = [lease for lease in self.held if lease.owner != self.workers[number]]
        self.workers[number] = self._new_name()

    def request_cancel(self) -> None:
        if self.row.status in (READY, BLOCKED, RUNNING):
            self.rules.cancel(self.row)
            self.watch.check("cancel", self.row)

    def retry(self) -> None:
        if self.row.status in FINAL:
            self.rules.retry(self.row, self.now)
            self.watch.check("retry", self.row)

    def promote(self) -> None:
        if self.row.status is BLOCKED:
            self.row.status = READY
            self.watch.check("promote", self.row)

    def expire(self) -> None:
        due = self.row.expires_at is not None and self.row.expires_at <= self.now
        if due and self.row.status is READY and self.row.token == 0:
            self.row.status = CANCELLED
            self.watch.check("expire", self.row)

    def back_up(self) -> None:
        self.backup = copy(self.row), copy(self.watch)

    def restore(self) -> None:
        """A server comes back from a backup, or after a crash without the last asynchronous commits.

        Tokens go back with it. Workers notice and claim under a new name; handlers that run are not
        ended by that.
        """
        if self.backup is None or self.random.random() < 0.5:
            return
        self.row, self.watch = copy(self.backup[0]), copy(self.backup[1])
        self.workers = [self._new_name() for _ in self.workers]

    def _new_name(self) -> str:
        self.starts += 1
        return f"host:42:{self.starts}"

    def _outcome(self) -> tuple[str, Outcome]:
        delay = seconds(self.random.choice((0, 2, 30)))
        return self.random.choice(
            [
                ("return", Returned()),
                ("return", Returned('"x"')),
                ("raise", Raised("boom", delay)),
                ("raise", Raised("boom", delay)),
                ("raise", Raised("boom", delay)),
                ("raise", Raised("given up", None))
                if self.random.random() < 0.2
                else ("snooze", Snoozed(delay)),
                ("snooze", Snoozed(delay)),
                ("abort", Aborted("not wanted")),
                ("release", Released()),
                ("release", Released(delay)),
                ("release", Released(seconds(0))),
            ]
        )

    # -- the end

    def finish(self) -> None:
        """With workers that come back for it and a clock that goes on, every job ends."""
        self.promote()
        # a rescue, or a claim and an exception, for each attempt that is left
        for _ in range(2 * self.row.max_attempts + 2):
            if self.row.status in FINAL:
                return
            self.now += self.rules.lease + 3600
            self.expire()
            self.rescue()
            self.now += 3600
            known = len(self.held)
            self.claim()
            if len(self.held) > known:
                self.settle_as(self.held.pop(), "raise", Raised("boom", seconds(30)))
        raise Violation(f"still {self.row.status} after all its attempts")


HISTORIES = 3_000
STEPS = 60


def histories(rules: Rules, count: int = HISTORIES) -> Iterator[History]:
    """Walked to their end, one after the other."""
    for seed in range(count):
        history = History(rules, seed)
        history.walk(STEPS)
        yield history


def test_no_random_history_breaks_a_promise() -> None:
    ends = {history.row.status for history in histories(Rules())}

    assert ends == FINAL


def test_the_random_histories_come_to_everything_that_may_happen() -> None:
    seen: set[tuple[JobStatus, str, JobStatus]] = set()
    stale = 0

    class Recorder(Rules):
        def is_ours(self, row: Row, lease: Lease) -> bool:
            nonlocal stale
            ours = super().is_ours(row, lease)
            stale += not ours
            return ours

    class Noted(Watch):
        def check(self, event: str, row: Row) -> None:
            seen.add((self.row.status, event, row.status))
            super().check(event, row)

    for seed in range(500):
        history = History(Recorder(), seed)
        history.watch = Noted(history.row)
        history.walk(STEPS)

    possible = {(old, event, new) for (old, event), following in ALLOWED.items() for new in following}
    assert seen == possible
    assert stale > 500


# -- the walks see what is broken


class FenceWithoutToken(Rules):
    def is_ours(self, row: Row, lease: Lease) -> bool:
        return row.status is RUNNING and row.owner == lease.owner


class FenceWithoutOwner(Rules):
    """Harmless until a restore takes tokens back."""

    def is_ours(self, row: Row, lease: Lease) -> bool:
        return row.status is RUNNING and row.token == lease.token


class FenceWithoutStatus(Rules):
    def is_ours(self, row: Row, lease: Lease) -> bool:
        return row.token == lease.token and row.owner == lease.owner


class ClaimKeepsToken(Rules):
    def claim(self, row: Row, owner: str, now: float) -> None:
        super().claim(row, owner, now)
        row.token -= 1


class ClaimCountsNoAttempt(Rules):
    def claim(self, row: Row, owner: str, now: float) -> None:
        super().claim(row, owner, now)
        row.attempts -= 1


class ClaimOfRunningRow(Rules):
    """SKIP LOCKED without the status: takes what another worker holds."""

    def may_claim(self, row: Row, now: float) -> bool:
        return row.status in (READY, RUNNING) and row.run_at <= now


class RescueBeyondMaxAttempts(Rules):
    def judge(self, outcome: Outcome, *, attempt: int, max_attempts: int) -> Verdict:
        if isinstance(outcome, Lost):
            max_attempts += 1
        return super().judge(outcome, attempt=attempt, max_attempts=max_attempts)


class RescueGivesAttemptBack(Rules):
    """A crash loop would run for ever."""

    def judge(self, outcome: Outcome, *, attempt: int, max_attempts: int) -> Verdict:
        verdict = super().judge(outcome, attempt=attempt, max_attempts=max_attempts)
        return replace(verdict, attempts=-1) if isinstance(outcome, Lost) else verdict


class RescueForgotten(Rules):
    def is_lost(self, row: Row, now: float) -> bool:
        return False


class ReleaseKeepsAttempt(Rules):
    def judge(self, outcome: Outcome, *, attempt: int, max_attempts: int) -> Verdict:
        verdict = super().judge(outcome, attempt=attempt, max_attempts=max_attempts)
        return replace(verdict, attempts=0) if isinstance(outcome, Released) else verdict


class SnoozeKeepsAttempt(Rules):
    def judge(self, outcome: Outcome, *, attempt: int, max_attempts: int) -> Verdict:
        verdict = super().judge(outcome, attempt=attempt, max_attempts=max_attempts)
        return replace(verdict, attempts=0) if isinstance(outcome, Snoozed) else verdict


class FailureGivesAttemptBack(Rules):
    def judge(self, outcome: Outcome, *, attempt: int, max_attempts: int) -> Verdict:
        verdict = super().judge(outcome, attempt=attempt, max_attempts=max_attempts)
        return replace(verdict, attempts=-1) if isinstance(outcome, Raised) else verdict


class CancelRequestIgnored(Rules):
    def status_of(self, verdict: Verdict, row: Row) -> JobStatus:
        return verdict.status


class CancelRequestBeatsReturn(Rules):
    """What the handler did is done: to call it cancelled would be a lie."""

    def status_of(self, verdict: Verdict, row: Row) -> JobStatus:
        return CANCELLED if row.cancel_requested else verdict.status


class RetryResetsToken(Rules):
    def retry(self, row: Row, now: float) -> None:
        super().retry(row, now)
        row.token = 0


class RetryKeepsAttempts(Rules):
    def retry(self, row: Row, now: float) -> None:
        attempts = row.attempts
        super().retry(row, now)
        row.attempts = attempts


BROKEN = [
    FenceWithoutToken,
    FenceWithoutOwner,
    FenceWithoutStatus,
    ClaimKeepsToken,
    ClaimCountsNoAttempt,
    ClaimOfRunningRow,
    RescueBeyondMaxAttempts,
    RescueGivesAttemptBack,
    RescueForgotten,
    ReleaseKeepsAttempt,
    SnoozeKeepsAttempt,
    FailureGivesAttemptBack,
    CancelRequestIgnored,
    CancelRequestBeatsReturn,
    RetryResetsToken,
    RetryKeepsAttempts,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda rules: rules.__name__)
def test_a_broken_rule_is_caught_by_the_histories(broken: type[Rules]) -> None:
    with pytest.raises(Violation):
        for _ in histories(broken()):
            pass
