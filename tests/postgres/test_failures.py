"""Failures of every kind end in a record that can be stored and read: field cases B02, B10, B12 and B46.

Each job runs in a thread and in the loop, beside a healthy one that must not notice.
"""

import math
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from shop import Job
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from workers import execute, rows, until_row, working

from sqla_jobs.context import RetryAfter
from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.tasks import Jobs, Task, enqueue

DONE, FAILED, READY = JobStatus.DONE, JobStatus.FAILED, JobStatus.READY

#: Bytes of last_error; characters of an error in the attempt log.
CAP, LINE = 8_000, 500


def put(engine: Engine, task: Task[Any]) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, task)


# -- table V3: what handlers raise. Made elsewhere than it is raised: frames quote their source


def undecodable_file_name() -> BaseException:
    return OSError(2, "x", b"\xff\xfe\x00".decode("utf-8", "surrogateescape"))


def chain_of_causes() -> BaseException:
    error: Exception = ValueError("the first cause")
    for number in range(2_000):
        following = ValueError(f"cause {number}")
        following.__cause__ = error
        error = following
    return error


def recursion() -> BaseException:
    return recursion()


def notes() -> BaseException:
    error = ValueError("noted")
    for _ in range(5_000):
        error.add_note("n" * 1_000)
    return error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("in __str__")

    __repr__ = __str__


class NeedsArguments(Exception):
    """Cannot be rebuilt from its args: a round trip through pickle raises TypeError."""

    def __init__(self, order: int, reason: str) -> None:
        super().__init__(f"order {order}: {reason}")


def group() -> BaseException:
    return ExceptionGroup("g", [ValueError("x\x00y"), ExceptionGroup("h", [KeyError("k")])])


def its_own_cause() -> BaseException:
    error = ValueError("turtles")
    error.__cause__ = error
    return error


V3: list[Any] = [
    pytest.param(lambda: ValueError("before\x00after"), 2, ["ValueError", "before", "after"], id="1 NUL"),
    pytest.param(lambda: ValueError("bad \udce9 name"), 2, ["ValueError", "bad ", " name"], id="2 surrogate"),
    pytest.param(undecodable_file_name, 2, ["FileNotFoundError", "[Errno 2] x"], id="3 file name"),
    pytest.param(lambda: ValueError("A" * 10_000_000), 5, ["ValueError: AAAA", "raise made()"], id="4 large"),
    pytest.param(
        lambda: ValueError("\U0001f600" * 9_000), 5, ["ValueError: \U0001f600"], id="4 wide and large"
    ),
    pytest.param(chain_of_causes, 5, ["cause 1999", "the first cause"], id="5 causes"),
    pytest.param(recursion, 5, ["RecursionError"], id="6 recursion"),
    pytest.param(notes, 5, ["ValueError: noted"], id="7 notes"),
    pytest.param(Unprintable, 2, ["Unprintable"], id="8 unprintable"),
    pytest.param(lambda: NeedsArguments(7, "no"), 2, ["NeedsArguments: order 7: no"], id="9 not rebuilt"),
    pytest.param(group, 2, ["ExceptionGroup: g", "ValueError", "KeyError"], id="10 group"),
    pytest.param(AssertionError, 2, ["AssertionError"], id="11 no message"),
    pytest.param(its_own_cause, 2, ["ValueError: turtles"], id="12 its own cause"),
]


@pytest.mark.parametrize(("made", "attempts", "parts"), V3)
async def test_b02_b10_b12_whatever_a_handler_raises_is_recorded_bounded_and_readable(
    engine: Engine, database_url: str, made: Callable[[], BaseException], attempts: int, parts: list[str]
) -> None:
    jobs = Jobs(Job)
    retry = Retry(max_attempts=attempts, delay=timedelta(0))

    @jobs.task(name="thread", retry=retry)
    def in_thread() -> None:
        raise made()

    @jobs.task(name="loop", retry=retry)
    async def in_loop() -> None:
        raise made()

    @jobs.task(name="healthy")
    async def healthy() -> None: ...

    with Session(engine) as session, session.begin():
        for task in (in_thread, healthy, in_loop):
            enqueue(session, task)

    async with working(jobs, database_url, concurrency=4) as (_, heard):
        await heard.until(lambda heard: heard.statuses().count(FAILED) == 2)
        with Session(engine) as session, session.begin():
            enqueue(session, healthy)  # the worker is alive
        await heard.until(lambda heard: heard.statuses().count(DONE) == 2)

    found = rows(
        engine,
        "SELECT last_error, status, attempts, octet_length(last_error), jsonb_array_length(attempt_log), "
        "(SELECT max(length(line ->> 'error')) FROM jsonb_array_elements(attempt_log) line) "
        "FROM background_jobs ORDER BY kind",
    )
    assert [row[1:3] for row in found] == [("failed", attempts)] * 2
    for error, _, _, size, lines, longest in found:
        assert size <= CAP
        assert (lines, longest <= LINE) == (attempts, True)
        assert [part for part in parts if part not in error] == []


async def test_v3_13_a_failure_shared_by_many_jobs_does_not_grow_from_one_to_the_next(
    engine: Engine, database_url: str
) -> None:
    """A singleton of a module, raised again and again, remembers every frame it has passed."""
    jobs = Jobs(Job)
    shared = ValueError("one for all")

    @jobs.task(name="job", retry=Retry(max_attempts=1))
    def job(number: int) -> None:
        raise shared

    with Session(engine) as session, session.begin():
        for number in range(10):
            enqueue(session, job, number)

    async with working(jobs, database_url, concurrency=1) as (_, heard):
        assert await heard.settled(10) == [FAILED] * 10

    found = rows(engine, "SELECT id, last_error FROM background_jobs")
    assert len({id_ for id_, _ in found}) == 10
    assert {error.count("raise shared") for _, error in found} == {1}
    assert sum(1 for _ in traceback.walk_tb(shared.__traceback__)) < 20


# -- B46: delays that cannot be computed, or written

#: attempt number -> seconds of 2 * 2 ** (n - 1), cut at the cap of an hour: all far above it
ATTEMPTS = [30, 31, 62, 63, 64, 1023, 1024, 5000]
HOUR = timedelta(hours=1)


async def test_b46_no_attempt_number_keeps_a_failure_from_its_record(
    engine: Engine, database_url: str
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="job")
    def job() -> None:
        raise ValueError("again")

    for attempt in ATTEMPTS:
        execute(
            engine,
            "INSERT INTO background_jobs (kind, attempts, max_attempts) VALUES ('job', :before, 10000)",
            before=attempt - 1,
        )

    async with working(jobs, database_url) as (_, heard):
        assert await heard.settled(len(ATTEMPTS)) == [READY] * len(ATTEMPTS)
        began = rows(engine, "SELECT attempts, status, run_at - started_at FROM background_jobs ORDER BY 1")

    assert [(attempts, status) for attempts, status, _ in began] == [(each, "ready") for each in ATTEMPTS]
    for _, _, waits in began:
        assert HOUR <= waits < HOUR + timedelta(seconds=20)  # the cap, from the end of the attempt


def raising(error: BaseException, attempt: int) -> timedelta:
    raise ZeroDivisionError


#: what a user's rule returns -> the least and the most that the job then waits; None: it fails for good
DEFAULT = (timedelta(seconds=1), timedelta(seconds=3))  # 2 s, spread by half
RULES: dict[str, tuple[Any, tuple[timedelta, timedelta] | None]] = {
    "zero": (lambda *_: timedelta(0), (timedelta(0), timedelta(0))),
    "negative": (lambda *_: timedelta(days=-1), DEFAULT),
    "the longest": (lambda *_: timedelta.max, (timedelta(days=36_525), timedelta(days=36_525))),
    "none": (lambda *_: None, None),
    "not a number": (lambda *_: math.nan, DEFAULT),
    "a float": (lambda *_: 1e300, DEFAULT),
    "an int": (lambda *_: 0, DEFAULT),
    "an error": (raising, DEFAULT),
}


@pytest.mark.parametrize(("rule", "waits"), RULES.values(), ids=list(RULES))
async def test_b46_a_rule_of_a_users_that_cannot_work_gives_the_default_delay(
    engine: Engine, database_url: str, rule: Any, waits: tuple[timedelta, timedelta] | None
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="job", retry=Retry(max_attempts=2, on={ValueError: rule}))
    def job() -> None:
        raise ValueError("again")

    put(engine, job)

    async with working(jobs, database_url, mode="once") as (_, heard):
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE last_error IS NOT NULL")

    [(status, attempts, waited)] = rows(
        engine, "SELECT status, attempts, run_at - started_at FROM background_jobs"
    )
    assert (status, attempts) == ("failed" if waits is None else "ready", 1)
    warned = heard.named("delay.refused")
    assert len(warned) == (waits is DEFAULT)
    assert all("a rule of the task's Retry" in str(event.fields["error"]) for event in warned)
    if waits is not None:
        assert waits[0] <= waited < waits[1] + timedelta(seconds=20)


CENTURY = timedelta(days=36_525)


@pytest.mark.parametrize(
    ("delay", "waits", "error"),
    [
        (CENTURY, (CENTURY, CENTURY), "RetryAfter: "),
        (CENTURY + timedelta(days=1), DEFAULT, "ConfigurationError: RetryAfter takes a timedelta of at most"),
        (timedelta.max, DEFAULT, "ConfigurationError: RetryAfter takes a timedelta of at most"),
        (
            timedelta(days=-1),
            DEFAULT,
            "ConfigurationError: RetryAfter takes a timedelta that is not negative",
        ),
    ],
    ids=["a century", "a day more", "the longest", "negative"],
)
async def test_b46_a_delay_that_no_calendar_has_is_refused_where_it_is_asked_for(
    engine: Engine, database_url: str, delay: timedelta, waits: tuple[timedelta, timedelta], error: str
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="job", retry=Retry(max_attempts=2))
    def job() -> None:
        raise RetryAfter(delay)

    put(engine, job)

    async with working(jobs, database_url, mode="once"):
        await until_row(engine, "SELECT 1 FROM background_jobs WHERE last_error IS NOT NULL")

    [(status, said, waited)] = rows(
        engine, "SELECT status, last_error, run_at - started_at FROM background_jobs"
    )
    assert status == "ready"
    assert said.startswith(error)
    assert waits[0] <= waited < waits[1] + timedelta(seconds=20)
