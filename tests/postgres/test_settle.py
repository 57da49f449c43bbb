"""What each end of an attempt does to its row, in batches, past rows that somebody holds or refuses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DataError
from steps import (
    KEEP,
    LEASE,
    PATIENCE,
    TABLES,
    Row,
    alive,
    archive,
    ask,
    autocommit,
    backend,
    claimed,
    expire,
    judged,
    listening,
    live,
    meanwhile,
    put,
    put_many,
    rescue,
    run,
    statuses,
    take,
    take_one,
    until_blocked,
    written,
)

from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import (
    DONE,
    Aborted,
    JobStatus,
    Lost,
    Outcome,
    Raised,
    Released,
    Returned,
    Snoozed,
    Verdict,
    overridden_by_cancel,
)
from sqla_jobs.core.retention import Retention
from sqla_jobs.store.lease import prolong
from sqla_jobs.store.settle import settle_expired, settle_within

FAILED = judged(Raised("boom", None))
RETRY = judged(Raised("boom", timedelta(seconds=30)))
SNOOZE = judged(Snoozed(timedelta(minutes=5)))
RELEASE = judged(Released())
CANCELLED = judged(Aborted("not wanted"))
SECOND = timedelta(seconds=1)


@contextmanager
def counted(connection: Connection) -> Iterator[list[str]]:
    """The statements sent while the block runs."""
    sent: list[str] = []

    def remember(_c: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(connection, "before_cursor_execute", remember)
    try:
        yield sent
    finally:
        event.remove(connection, "before_cursor_execute", remember)


def ended(connection: Connection, outcome: Outcome, *, max_attempts: int = 20, **columns: Any) -> Row:
    """The row of a job, live or archived, whose first attempt ended so; and when, by the database."""
    job = put(connection, max_attempts=max_attempts, **columns)
    lease = take_one(connection)
    verdict = judged(outcome, attempt=1, max_attempts=max_attempts)
    began = ask(connection, "SELECT clock_timestamp()")
    assert written(connection, (lease, verdict)).written == [(lease, verdict)]
    return (live(connection, job) or archive(connection)[0]) | {"began": began}


# -- the contract, event by event


@pytest.mark.parametrize("result", [None, '{"sum": 7}', "null"])
def test_a_normal_return_archives_the_job_as_done(a: Connection, result: str | None) -> None:
    row = ended(a, Returned(result))

    assert ask(a, "SELECT count(*) FROM background_jobs") == 0
    assert (row["status"], row["attempts"], row["fencing_token"]) == ("done", 1, 1)
    assert row["began"] <= row["finished_at"] < row["began"] + 5 * SECOND
    assert (row["last_error"], row["attempt_log"], row["locked_until"]) == (None, None, None)
    assert ask(a, "SELECT result::text FROM background_jobs_archive") == result


def test_an_exception_sends_the_job_back_with_a_delay_and_its_error(a: Connection) -> None:
    row = ended(a, Raised("ValueError: boom", timedelta(seconds=30)))

    assert (row["status"], row["attempts"], row["fencing_token"]) == ("ready", 1, 1)
    assert row["began"] + 30 * SECOND <= row["run_at"] < row["began"] + 35 * SECOND
    assert (row["locked_by"], row["locked_until"], row["finished_at"]) == (None, None, None)
    assert row["last_error"] == "ValueError: boom"
    assert row["started_at"] is not None
    [line] = row["attempt_log"]
    assert row["began"] <= datetime.fromisoformat(line.pop("at")) < row["began"] + 5 * SECOND
    assert line == {"attempt": 1, "token": 1, "worker": "A", "lost": False, "error": "ValueError: boom"}


@pytest.mark.parametrize(
    ("delay", "max_attempts"), [(None, 20), (timedelta(0), 1)], ids=["policy gives up", "last attempt"]
)
def test_an_exception_that_is_final_keeps_the_job_as_a_dead_letter(
    a: Connection, delay: timedelta | None, max_attempts: int
) -> None:
    row = ended(a, Raised("boom", delay), max_attempts=max_attempts, run_at="2020-01-01 00:00+00")

    assert archive(a) == []
    assert (row["status"], row["attempts"], row["fencing_token"]) == ("failed", 1, 1)
    assert row["began"] <= row["finished_at"] < row["began"] + 5 * SECOND
    assert row["run_at"] == datetime(2020, 1, 1, tzinfo=UTC)
    assert (row["locked_by"], row["locked_until"], row["last_error"]) == (None, None, "boom")
    assert len(row["attempt_log"]) == 1


def test_a_dead_letter_keeps_its_due_time_whatever_its_verdict_says(a: Connection) -> None:
    job = put(a, run_at="2020-01-01 00:00+00")
    verdict = Verdict(JobStatus.FAILED, delay=timedelta(days=1), error="boom")

    written(a, (take_one(a), verdict))

    assert alive(a, job)["run_at"] == datetime(2020, 1, 1, tzinfo=UTC)


def test_a_snooze_gives_the_attempt_back_and_is_no_failure(a: Connection) -> None:
    row = ended(a, Snoozed(timedelta(minutes=5)))

    assert (row["status"], row["attempts"], row["fencing_token"]) == ("ready", 0, 1)
    assert row["began"] + 300 * SECOND <= row["run_at"] < row["began"] + 305 * SECOND
    assert (row["locked_by"], row["locked_until"], row["finished_at"]) == (None, None, None)
    assert (row["last_error"], row["attempt_log"]) == (None, None)


def test_a_release_gives_the_attempt_back_and_keeps_the_due_time(a: Connection) -> None:
    row = ended(a, Released(), run_at="2020-01-01 00:00+00")

    assert (row["status"], row["attempts"], row["fencing_token"]) == ("ready", 0, 1)
    assert row["run_at"] == datetime(2020, 1, 1, tzinfo=UTC)
    assert (row["locked_by"], row["locked_until"], row["finished_at"]) == (None, None, None)
    assert (row["last_error"], row["attempt_log"]) == (None, None)


def test_a_release_for_an_unknown_kind_is_pushed(a: Connection) -> None:
    row = ended(a, Released(timedelta(seconds=30)))

    assert (row["status"], row["attempts"]) == ("ready", 0)
    assert row["began"] + 30 * SECOND <= row["run_at"] < row["began"] + 35 * SECOND


def test_a_cancel_archives_the_job_with_its_reason_and_is_no_failure(a: Connection) -> None:
    row = ended(a, Aborted("the order is gone"))

    assert ask(a, "SELECT count(*) FROM background_jobs") == 0
    assert (row["status"], row["attempts"], row["fencing_token"]) == ("cancelled", 1, 1)
    assert row["began"] <= row["finished_at"] < row["began"] + 5 * SECOND
    assert (row["last_error"], row["attempt_log"], row["locked_until"]) == ("the order is gone", None, None)


@pytest.mark.parametrize("verdict", [DONE, judged(Returned("7")), CANCELLED], ids=["done", "mixed", "cancel"])
def test_the_archive_keeps_every_column_that_the_end_did_not_write(a: Connection, verdict: Verdict) -> None:
    job = put(
        a, "receipts.send", payload='{"order": 7}', priority=3, run_at="2020-01-01 00:00+00", max_attempts=5,
        expires_at="2999-01-01 00:00+00", unique_key="order 7", version=2, meta='{"tags": ["x"]}',
        unique_until_start=True, last_error="earlier", attempt_log='[{"error": "earlier"}]', result="1",
    )  # fmt: skip
    lease = take_one(a)
    run(a, "UPDATE background_jobs SET progress = '0.5'")
    before = alive(a, job)

    written(a, (lease, verdict))

    [row] = archive(a)
    ours = {"xmin", "ctid", "status", "locked_until", "finished_at", "last_error", "result"}
    assert {name for name in row if row[name] != before[name]} <= ours
    assert set(row) == set(before)
    assert row["last_error"] == (verdict.error or "earlier")
    assert row["result"] == (7 if verdict.result else 1)


def test_a_later_failure_keeps_what_an_earlier_one_said_when_it_says_nothing(a: Connection) -> None:
    row = ended(a, Released(), last_error="earlier", attempt_log='[{"error": "earlier"}]')

    assert row["last_error"] == "earlier"
    assert row["attempt_log"] == [{"error": "earlier"}]


def test_delays_and_ends_count_from_the_clock_also_in_a_transaction_open_for_long(
    clean: Engine, a: Connection
) -> None:
    jobs = put_many(a, 2)
    retried, failed = take(a, limit=2)

    with clean.begin() as handler:
        ask(handler, "SELECT now()")
        run(handler, "SELECT pg_sleep(0.3)")
        assert settle_within(handler, TABLES, (retried, RETRY), retention=KEEP)
        assert settle_within(handler, TABLES, (failed, FAILED), retention=KEEP)
        waits, since = handler.execute(
            text(
                "SELECT (SELECT run_at - clock_timestamp() FROM background_jobs WHERE id = :retried), "
                "(SELECT clock_timestamp() - finished_at FROM background_jobs WHERE id = :failed)"
            ),
            {"retried": jobs[0], "failed": jobs[1]},
        ).one()

    assert waits > timedelta(seconds=29.75)
    assert since < timedelta(seconds=0.25)


# -- the attempt log


def test_the_attempt_log_keeps_the_last_ten_failures(a: Connection) -> None:
    job = put(a)

    for number in range(1, 13):
        [it] = claimed(a, f"worker {number}")
        written(a, (it.lease, judged(Raised(f"error {number}", timedelta(0)), attempt=number)))

    log = alive(a, job)["attempt_log"]
    assert [line["attempt"] for line in log] == list(range(3, 13))
    assert [line["token"] for line in log] == list(range(3, 13))
    assert [line["worker"] for line in log] == [f"worker {number}" for number in range(3, 13)]
    assert [line["error"] for line in log] == [f"error {number}" for number in range(3, 13)]


def test_the_attempt_log_cuts_long_errors_and_last_error_does_not(a: Connection) -> None:
    error = "é" * 4000

    row = ended(a, Raised(error, timedelta(0)))

    assert row["last_error"] == error
    assert row["attempt_log"][0]["error"] == error[:500]


@pytest.mark.parametrize("log", ["null", "{}", "7", '"text"'])
@pytest.mark.parametrize("outcome", [Raised("boom", timedelta(0)), Raised("boom", None), Returned()], ids=str)
def test_an_attempt_log_that_is_none_of_ours_keeps_no_job_from_its_end(
    a: Connection, log: str, outcome: Outcome
) -> None:
    row = ended(a, outcome, attempt_log=log)

    assert row["status"] in {"ready", "failed", "done"}
    assert row["status"] == "done" or [line["error"] for line in row["attempt_log"]] == ["boom"]


# -- batches


def mixed_batch(leases: list[Lease]) -> list[tuple[Lease, Verdict]]:
    """A few of every verdict."""
    verdicts = [DONE, judged(Returned("7")), FAILED, RETRY, SNOOZE, RELEASE, CANCELLED]
    return [(lease, verdicts[number % len(verdicts)]) for number, lease in enumerate(leases)]


def test_a_batch_that_only_returned_is_one_statement(a: Connection) -> None:
    put_many(a, 50)
    leases = take(a, limit=50)

    with counted(a) as sent:
        settled = written(a, *[(lease, DONE) for lease in leases])

    assert len(sent) == 1
    assert len(settled.written) == 50
    assert set(statuses(a).values()) == {"done"}


def test_a_mixed_batch_is_one_statement(a: Connection) -> None:
    put_many(a, 70)
    batch = mixed_batch(take(a, limit=70))

    with counted(a) as sent:
        settled = written(a, *batch)

    assert len(sent) == 1
    assert settled.written == batch
    assert statuses(a) == {lease.id: verdict.status for lease, verdict in batch}


def test_the_statement_is_the_same_text_however_large_the_batch(a: Connection) -> None:
    put_many(a, 10)
    leases = take(a, limit=10)

    with counted(a) as sent:
        written(a, *mixed_batch(leases[:3]))
        written(a, *mixed_batch(leases[3:]))

    assert len(sent) == 2
    assert sent[0] == sent[1]


def test_what_is_missing_is_looked_for_in_one_more_statement(a: Connection) -> None:
    put_many(a, 5)
    leases = take(a, limit=5)
    written(a, *[(lease, DONE) for lease in leases[:2]])

    with counted(a) as sent:
        settled = written(a, *[(lease, DONE) for lease in leases], answer_lost=True)

    assert len(sent) == 2
    assert sorted(settled.written) == [(lease, DONE) for lease in leases]


def test_the_same_job_twice_in_a_batch_is_written_once(a: Connection) -> None:
    put(a)
    lease = take_one(a)

    written(a, (lease, DONE), (lease, DONE))

    assert [row["status"] for row in archive(a)] == ["done"]


# -- a row that somebody holds


@pytest.mark.parametrize("mixed", [False, True], ids=["done", "mixed"])
@pytest.mark.parametrize(
    "hold",
    [
        "UPDATE background_jobs SET priority = 1 WHERE id = :id",
        "SELECT 1 FROM background_jobs WHERE id = :id FOR UPDATE",
        "SELECT 1 FROM background_jobs WHERE id = :id FOR KEY SHARE",
    ],
    ids=["update", "for update", "foreign key"],
)
def test_one_row_held_by_somebody_delays_no_other(
    clean: Engine, a: Connection, hold: str, mixed: bool
) -> None:
    """Interleaving 13: the others are settled at once, this one when it is free; nothing is stale."""
    put_many(a, 100)
    leases = take(a, limit=100)
    batch = mixed_batch(leases) if mixed else [(lease, DONE) for lease in leases]
    held = batch[41]
    run(a, "SET lock_timeout = '1ms'")  # to wait at all is an error

    with clean.connect() as user:
        run(user, hold, id=held[0].id)
        first = written(a, *batch)
        user.rollback()
    second = written(a, *first.busy)

    run(a, "RESET lock_timeout")
    assert first.written == [entry for entry in batch if entry is not held]
    assert first.busy == [held]
    assert not first.stale
    assert second.written == [held]
    assert statuses(a) == {lease.id: verdict.status for lease, verdict in batch}


def test_a_handlers_settle_waits_for_a_prolongation_of_its_own_lease(
    clean: Engine, a: Connection, b: Connection
) -> None:
    put(a)
    lease = take_one(a)
    with clean.connect() as handler, clean.connect() as keeper:
        assert prolong(keeper, TABLES, [lease], lease=LEASE).kept
        waiting, holding = backend(handler), backend(keeper)

        with meanwhile(lambda: settle_within(handler, TABLES, (lease, DONE), retention=KEEP)) as won:
            until_blocked(b, waiting, by=holding)
            keeper.commit()
        handler.commit()

    assert won.result() is not None
    assert [row["status"] for row in archive(b)] == ["done"]


# -- values that the database refuses

REFUSED = {
    "a delay past the calendar": judged(Raised("boom", timedelta.max)),
    "a result that is no JSON": judged(Returned("{")),
    "a result with U+0000": judged(Returned('"\\u0000"')),
    "an error with NUL": judged(Raised("a\0b", timedelta(0))),
    "an error with a lone surrogate": judged(Raised("a\ud800b", timedelta(0))),
}


@pytest.mark.parametrize("verdict", REFUSED.values(), ids=list(REFUSED))
@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_value_that_the_database_refuses_costs_its_own_row_only(
    a: Connection, verdict: Verdict, place: int
) -> None:
    """Interleaving 14."""
    put_many(a, 20)
    leases = take(a, limit=20)
    batch = [(lease, DONE) for lease in leases]
    batch[place] = (leases[place], verdict)

    with counted(a) as sent:
        settled = written(a, *batch)

    [(entry, error)] = settled.refused
    assert entry == batch[place]
    assert error
    assert settled.written == [each for each in batch if each != entry]
    assert (settled.busy, settled.stale) == ([], [])
    assert alive(a, leases[place].id)["status"] == "running"
    assert len(sent) <= 12  # halving 20 until one is left, and one try to keep that one in place


def test_several_refused_values_are_all_found(a: Connection) -> None:
    put_many(a, 16)
    leases = take(a, limit=16)
    bad = [judged(Returned("{"))] * 3
    batch = [*zip(leases[:3], bad, strict=True), *((lease, DONE) for lease in leases[3:])]

    settled = written(a, *batch)

    assert [entry for entry, _ in settled.refused] == batch[:3]
    assert settled.written == batch[3:]


def test_a_refused_value_in_a_handlers_transaction_is_raised(clean: Engine, a: Connection) -> None:
    put(a)
    entry = (take_one(a), judged(Returned("{")))

    with clean.connect() as handler, pytest.raises(DataError):
        settle_within(handler, TABLES, entry, retention=KEEP)


def test_a_rescue_of_many_does_not_fail_for_one_refused_value(a: Connection) -> None:
    put_many(a, 10)
    leases = take(a, limit=10)
    expire(a, *leases)
    bad = judged(Lost("A", timedelta.max))
    entries = [(lease, bad if lease is leases[3] else judged(Lost("A", SECOND))) for lease in leases]

    rescued = settle_expired(a, TABLES, entries, retention=KEEP).written

    assert rescued == [entry for entry in entries if entry[0] is not leases[3]]


# -- a cancel requested while the attempt ran


@pytest.mark.parametrize(
    "verdict", [DONE, judged(Returned("7")), FAILED, RETRY, SNOOZE, RELEASE, CANCELLED], ids=str
)
def test_a_requested_cancel_turns_every_end_but_a_return_into_a_cancel(
    a: Connection, verdict: Verdict
) -> None:
    put(a)
    lease = take_one(a)
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")

    settled = written(a, (lease, verdict))

    [row] = archive(a)
    assert settled.written == [(lease, verdict)]
    assert row["status"] == ("done" if verdict.status is JobStatus.DONE else "cancelled")
    assert row["status"] == overridden_by_cancel(verdict.status, cancel_requested=True)
    assert row["last_error"] == verdict.error
    assert row["finished_at"] is not None
    assert ask(a, "SELECT count(*) FROM background_jobs") == 0


def test_a_failure_that_became_a_cancel_is_in_the_attempt_log(a: Connection) -> None:
    put(a)
    lease = take_one(a)
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")

    written(a, (lease, RETRY))

    assert [line["error"] for line in archive(a)[0]["attempt_log"]] == ["boom"]


def test_a_cancel_that_is_being_requested_is_not_overtaken(clean: Engine, a: Connection) -> None:
    """The operator's UPDATE is open, the settle meets it, the operator commits: the retry is a cancel."""
    put(a)
    lease = take_one(a)
    with clean.connect() as operator:
        run(operator, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")
        first = written(a, (lease, RETRY))
        operator.commit()

    second = written(a, *first.busy)

    assert first.busy == second.written == [(lease, RETRY)]
    assert [row["status"] for row in archive(a)] == ["cancelled"]


# -- retention of nothing


def test_what_is_not_to_be_kept_is_deleted_at_once(a: Connection) -> None:
    nothing = Retention(done=timedelta(0), cancelled=timedelta(0), failed=timedelta(0))
    put_many(a, 14)
    batch = mixed_batch(take(a, limit=14))

    settled = written(a, *batch, retention=nothing)

    gone = {JobStatus.DONE, JobStatus.CANCELLED}
    assert settled.written == batch
    assert statuses(a) == {lease.id: v.status for lease, v in batch if v.status not in gone}


@pytest.mark.parametrize("kept", ["done", "cancelled"])
def test_each_kind_of_end_has_a_retention_of_its_own(a: Connection, kept: str) -> None:
    only = Retention(**{"done": timedelta(0), "cancelled": timedelta(0), kept: None})
    put_many(a, 7)
    batch = mixed_batch(take(a, limit=7))

    written(a, *batch, retention=only)

    assert {row["status"] for row in archive(a)} == {kept}


# -- wake-ups


def epoch(message: str) -> float:
    return float(message.split(" ")[1])


@pytest.mark.parametrize(
    ("verdict", "delay"), [(RETRY, 30), (SNOOZE, 300), (RELEASE, 0)], ids=["retry", "snooze", "release"]
)
def test_a_job_that_becomes_ready_again_wakes_workers_for_its_time(
    a: Connection, clean_url: str, verdict: Verdict, delay: float
) -> None:
    put(a, priority=3, queue="two words")
    lease = take_one(a, queue="two words")

    with listening(clean_url) as ear:
        before = ask(a, "SELECT extract(epoch FROM clock_timestamp())::float8")
        written(a, (lease, verdict))
        [message] = ear.heard()

    assert message.split(" ", 2)[::2] == ["3", "two words"]
    assert epoch(message) == pytest.approx(before + delay, abs=2)


@pytest.mark.parametrize("verdict", [DONE, judged(Returned("7")), FAILED, CANCELLED], ids=str)
def test_a_job_that_has_ended_wakes_nobody(a: Connection, clean_url: str, verdict: Verdict) -> None:
    put(a)
    lease = take_one(a)

    with listening(clean_url) as ear:
        written(a, (lease, verdict))

        assert ear.heard() == []


def test_a_retry_that_became_a_cancel_wakes_nobody(a: Connection, clean_url: str) -> None:
    put(a)
    lease = take_one(a)
    run(a, "UPDATE background_jobs SET cancel_requested_at = clock_timestamp()")

    with listening(clean_url) as ear:
        written(a, (lease, RETRY))

        assert ear.heard() == []


def test_a_batch_wakes_once_per_priority_for_the_earliest(a: Connection, clean_url: str) -> None:
    for priority in 1, 1, 1, 2:
        put(a, priority=priority)
    leases = take(a, limit=4)
    delays = [timedelta(seconds=s) for s in (90, 30, 60, 10)]

    with listening(clean_url) as ear:
        before = ask(a, "SELECT extract(epoch FROM clock_timestamp())::float8")
        written(a, *[(lease, judged(Raised("x", d))) for lease, d in zip(leases, delays, strict=True)])
        messages = sorted(ear.heard())

    assert [message.split(" ", 1)[0] for message in messages] == ["1", "2"]
    assert epoch(messages[0]) == pytest.approx(before + 30, abs=2)
    assert epoch(messages[1]) == pytest.approx(before + 10, abs=2)


def test_more_than_fifty_priorities_at_once_are_one_message(a: Connection, clean_url: str) -> None:
    for priority in range(51):
        put(a, priority=priority)
    leases = take(a, limit=51)

    with listening(clean_url) as ear:
        written(a, *[(lease, RELEASE) for lease in leases])

        assert ear.heard() == ["*"]


def test_a_rescue_wakes_workers(a: Connection, clean_url: str) -> None:
    put(a, priority=5)
    expire(a, take_one(a))

    with listening(clean_url) as ear:
        rescue(a, delay=timedelta(seconds=20))
        [message] = ear.heard()

    assert message.split(" ", 2)[::2] == ["5", "default"]


def test_a_handlers_settle_wakes_at_its_commit_and_not_if_rolled_back(
    clean: Engine, a: Connection, clean_url: str
) -> None:
    put(a)
    lease = take_one(a)

    with listening(clean_url) as ear, clean.connect() as handler:
        assert settle_within(handler, TABLES, (lease, RELEASE), retention=KEEP)
        handler.rollback()
        after_rollback = ear.heard()
        assert settle_within(handler, TABLES, (lease, RELEASE), retention=KEEP)
        before_commit = ear.heard()
        handler.commit()
        after_commit = ear.heard()

    assert (after_rollback, before_commit) == ([], [])
    assert len(after_commit) == 1


# -- many writers


def settling(connection: Connection, leases: list[Lease]) -> None:
    written(connection, *mixed_batch(leases))


def prolonging(connection: Connection, leases: list[Lease]) -> None:
    prolong(connection, TABLES, leases, lease=LEASE)


def rescuing(connection: Connection, leases: list[Lease]) -> None:
    entries = [(lease, judged(Lost("A", SECOND))) for lease in leases]
    settle_expired(connection, TABLES, entries, retention=KEEP)


def operating(connection: Connection, leases: list[Lease]) -> None:
    """In id order, one lock after the other, as a careful person does."""
    with connection.engine.begin() as operator:
        for lease in sorted(leases)[::7]:
            run(operator, "UPDATE background_jobs SET priority = 1 WHERE id = :id", id=lease.id)


def test_batch_writers_in_opposite_orders_do_not_deadlock(clean: Engine) -> None:
    """Settle and prolong of one worker overlap on two connections, a rescuer and an operator come by."""
    errors: list[BaseException] = []
    leases: list[Lease] = []

    def prepare() -> None:
        with autocommit(clean) as connection:
            run(connection, "DELETE FROM background_jobs")
            put_many(connection, 60)
            leases[:] = take(connection, limit=60)
            expire(connection, *leases[::3])

    gate = threading.Barrier(4, action=prepare, timeout=PATIENCE)

    def work(step: Callable[[Connection, list[Lease]], None], reverse: bool) -> None:
        try:
            with autocommit(clean) as connection:
                for _ in range(25):
                    gate.wait()
                    step(connection, sorted(leases, reverse=reverse))
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [
        threading.Thread(target=work, args=arguments)
        for arguments in [(settling, True), (prolonging, False), (rescuing, True), (operating, False)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)

    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
