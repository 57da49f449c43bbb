"""Unique keys in the caller's transaction: skip what is there, never break it, wait for who holds it."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from shop import Job, Order
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from steps import LEASE, backend, expire, rescue, until_blocked
from workers import rows, working

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ConfigurationError, DuplicateJob, NotFlushed
from sqla_jobs.models import tables_of
from sqla_jobs.outbox import Enqueued
from sqla_jobs.store.claim import claim
from sqla_jobs.tasks import Jobs, enqueue, enqueue_many

jobs = Jobs(Job)
TABLES = tables_of(Job)


@jobs.task(name="report", queue="reports")
def report(day: int) -> None: ...


@jobs.task(name="keyed", unique_key=lambda day, force=False: f"day {day}")
def keyed(day: int, force: bool = False) -> None: ...


def handles(session: Session, *keys: str | None) -> list[Enqueued]:
    """One call of `report` per key, in this session."""
    return [
        enqueue(session, report if key is None else report.using(unique_key=key), day)
        for day, key in enumerate(keys)
    ]


def live(engine: Engine | Connection) -> list[tuple[Any, ...]]:
    return rows(engine, "SELECT id, unique_key, (payload->>'day')::int FROM background_jobs ORDER BY id")


# -- one session


def test_b40_an_equal_job_is_left_out_and_the_transaction_goes_on(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        [first] = handles(session, "k")

    with Session(clean) as session, session.begin():
        session.add(Order(customer="Ada"))
        session.flush()
        [second] = handles(session, "k")
        [other] = handles(session, None)

    assert (first.created, first.conflict) == (True, None)
    assert (second.id, second.created, second.conflict) == (first.id, False, "waiting")
    assert other.created
    assert rows(clean, "SELECT count(*) FROM orders") == [(1,)]
    assert [row[0] for row in live(clean)] == [first.id, other.id]


@pytest.mark.parametrize("autoflush", [True, False])
def test_b40_inside_a_savepoint_that_is_rolled_back_the_key_is_free_again(
    clean: Engine, autoflush: bool
) -> None:
    with Session(clean, autoflush=autoflush) as session, session.begin():
        savepoint = session.begin_nested()
        [gone] = handles(session, "k")
        session.flush()
        savepoint.rollback()
        [kept] = handles(session, "k")

    assert kept.created
    assert live(clean) == [(kept.id, "k", 0)]
    assert gone.id != kept.id


async def test_b40_on_an_async_session(clean: Engine, async_engine: AsyncEngine, engine: Engine) -> None:
    async with AsyncSession(async_engine) as session, session.begin():
        first = enqueue(session, report.using(unique_key="k"), 1)
        second = enqueue(session, report.using(unique_key="k"), 2)

    assert (second.id, second.created) == (first.id, False)
    assert live(engine) == [(first.id, "k", 1)]


def test_equal_calls_of_one_flush_are_folded_and_the_first_counts(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        made = handles(session, "b", "a", None, "b", "a", "c")

    assert [each.created for each in made] == [True, True, True, False, False, True]
    assert made[3].id == made[0].id
    assert made[4].id == made[1].id
    assert made[3].conflict == "waiting"
    # without a key first, then by key
    assert [row[1:] for row in live(clean)] == [(None, 2), ("a", 1), ("b", 0), ("c", 5)]


def test_equal_keys_of_two_queues_are_two_jobs(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        one = enqueue(session, report.using(unique_key="k"), 1)
        two = enqueue(session, report.using(unique_key="k", queue="other"), 1)

    assert one.created
    assert two.created


def test_a_running_holder_is_told_and_a_finished_one_is_none(clean: Engine, a: Connection) -> None:
    with Session(clean) as session, session.begin():
        [first] = handles(session, "k")
    claim(a, TABLES, queue="reports", owner="w", limit=1, lease=LEASE)

    with Session(clean) as session, session.begin():
        [during] = handles(session, "k")
    a.execute(text("DELETE FROM background_jobs"))
    with Session(clean) as session, session.begin():
        [after] = handles(session, "k")

    assert (during.id, during.conflict) == (first.id, "running")
    assert after.created


@pytest.mark.parametrize("status", ["failed"])
def test_a_job_that_has_failed_for_good_holds_no_key(clean: Engine, a: Connection, status: str) -> None:
    with Session(clean) as session, session.begin():
        handles(session, "k")
    a.execute(text("UPDATE background_jobs SET status = :status"), {"status": status})

    with Session(clean) as session, session.begin():
        [second] = handles(session, "k")

    assert second.created


def test_the_key_may_be_made_of_the_arguments(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        one = enqueue(session, keyed, 7)
        two = enqueue(session, keyed, day=7, force=True)
        three = enqueue(session, keyed, 8)
        own = enqueue(session, keyed.using(unique_key="mine"), 7)

    assert [each.created for each in (one, two, three, own)] == [True, False, True, True]
    assert {row[1] for row in live(clean)} == {"day 7", "day 8", "mine"}


def test_nothing_is_known_before_the_flush(clean: Engine) -> None:
    with Session(clean) as session:
        [handle] = handles(session, "k")

        for name in ("id", "created", "conflict"):
            with pytest.raises(NotFlushed):
                getattr(handle, name)


def test_require_created_says_who_is_there(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        first, second = handles(session, "k", "k")

    assert first.require_created() is first
    with pytest.raises(DuplicateJob, match=f"unique key is waiting already, as job {first.id}"):
        second.require_created()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "unique_key must have 1 to 2,000 bytes, '' has 0"),
        ("é" * 1001, "has 2,002"),
        ("a\0b", r"holds U\+0000"),
        ("\udc80", "lone surrogate"),
        (7, "unique_key must be a str, got int"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused_at_the_call(clean: Engine, key: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        report.using(unique_key=key)
    made = jobs.task(name="made", unique_key=lambda: key)(_nothing)
    with Session(clean) as session, session.begin():
        with pytest.raises(ConfigurationError, match=message):
            enqueue(session, made)
        session.add(Order(customer="Ada"))

    assert rows(clean, "SELECT count(*) FROM orders") == [(1,)]
    del jobs._tasks["made"]


def _nothing() -> None: ...


@pytest.mark.parametrize("value", ["replace", "raise", None])
def test_what_on_conflict_does_not_know_yet_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="this release knows 'skip' only"):
        report.using(unique_key="k", on_conflict=value)


def test_b44_many_with_duplicates_each_have_their_outcome_in_their_place(clean: Engine) -> None:
    with Session(clean) as session, session.begin():
        old = enqueue_many(session, [report.using(unique_key=f"k{n}").call(n) for n in range(0, 100, 10)])
    keys = [f"k{n}" if n < 995 else f"k{n - 990}" for n in range(1000)]  # the last five again within it

    with Session(clean) as session, session.begin():
        made = enqueue_many(session, [report.using(unique_key=k).call(n) for n, k in enumerate(keys)])

    assert [n for n, each in enumerate(made) if not each.created] == [*range(0, 100, 10), *range(995, 1000)]
    assert [made[n].id for n in range(0, 100, 10)] == [each.id for each in old]
    assert [made[995 + n].id for n in range(5)] == [made[5 + n].id for n in range(5)]
    by_id = {id_: day for id_, _, day in live(clean)}
    assert all(by_id[each.id] == n for n, each in enumerate(made) if each.created)
    assert len(by_id) == 995


def test_b51_on_an_autocommit_session_every_flush_commits_by_itself(clean: Engine) -> None:
    engine = create_engine(clean.url, isolation_level="AUTOCOMMIT")
    with Session(engine) as session:
        made = handles(session, "a", "b", "a", None)
        session.flush()
        seen = len(live(clean))
        session.rollback()
    engine.dispose()

    assert [each.created for each in made] == [True, True, False, True]
    assert seen == len(live(clean)) == 3


# -- two transactions


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_b39_who_meets_a_key_in_an_open_transaction_waits_for_its_end(
    clean: Engine, b: Connection, pool: ThreadPoolExecutor, ending: str
) -> None:
    with Session(clean) as one, Session(clean) as two:
        [first] = handles(one, "k")
        one.flush()
        holder, waiter = backend(one.connection()), backend(two.connection())

        def second() -> Enqueued:
            [handle] = handles(two, "k")
            two.commit()
            return handle

        waiting = pool.submit(second)
        until_blocked(b, waiter, by=holder)
        getattr(one, ending)()
        handle = waiting.result(20)

    assert handle.created is (ending == "rollback")
    assert len(live(clean)) == 1
    assert live(clean)[0][0] == handle.id
    assert (handle.id == first.id) is (ending == "commit")


def test_b39_a_statement_timeout_reaches_the_caller_as_it_is(clean: Engine) -> None:
    with Session(clean) as one, Session(clean) as two:
        handles(one, "k")
        one.flush()
        two.execute(text("SET LOCAL statement_timeout = '300ms'"))
        handles(two, "k")
        with pytest.raises(DBAPIError) as raised:
            two.flush()
        two.rollback()
        handles(two, "l")
        two.commit()

    assert getattr(raised.value.orig, "sqlstate", None) == "57014"
    assert [row[1] for row in live(clean)] == ["l"]


def test_b39_of_five_that_meet_four_roll_back_and_one_job_is_there(
    clean: Engine, pool: ThreadPoolExecutor
) -> None:
    together = threading.Barrier(4)

    def one(number: int) -> bool:
        together.wait(20)
        with Session(clean) as session:
            handles(session, "k")
            session.flush()
            if number:
                session.rollback()
            else:
                session.commit()
        return True

    assert list(pool.map(one, range(4))) == [True] * 4
    assert len(live(clean)) == 1


def test_b52_a_repeatable_read_caller_gets_the_serialization_failure_unchanged(clean: Engine) -> None:
    engine = create_engine(clean.url, isolation_level="REPEATABLE READ")
    with Session(engine) as session:
        session.execute(text("SELECT 1"))  # its snapshot is taken
        with Session(clean) as other, other.begin():
            handles(other, "k")
        handles(session, "k")
        with pytest.raises(DBAPIError) as raised:
            session.flush()
    engine.dispose()

    assert getattr(raised.value.orig, "sqlstate", None) == "40001"


def test_b41_flushes_that_name_the_same_keys_in_opposite_orders_do_not_deadlock(
    clean: Engine, pool: ThreadPoolExecutor
) -> None:
    keys = [f"k{n}" for n in range(200)]

    def many(number: int) -> int:
        made = 0
        for _ in range(5):
            with Session(clean) as session, session.begin():
                order = keys if number % 2 else list(reversed(keys))
                made += sum(each.created for each in _flushed(session, order))
            with clean.begin() as connection:
                connection.execute(text("DELETE FROM background_jobs WHERE id % 3 = 0"))
        return made

    before = rows(clean, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    list(pool.map(many, range(4)))

    with clean.connect() as connection:
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
    after = rows(clean, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert after == before
    assert len({row[1] for row in live(clean)}) == len(live(clean))


def _flushed(session: Session, keys: list[str]) -> list[Enqueued]:
    made = handles(session, *keys)
    session.flush()
    return made


@pytest.mark.parametrize("keys", ["k", "jkl"])
def test_a_holder_that_vanishes_between_the_insert_and_the_look_is_none(clean: Engine, keys: str) -> None:
    """Insert meets a waiting job; before it is looked for, it is gone: the second try writes ours.

    It begins again at the first key: what the first try wrote must not meet itself there.
    """
    with Session(clean) as session, session.begin():
        handles(session, "k")

    looks: list[str] = []

    def vanish(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        if "its_key" in statement and not looks:
            looks.append(statement)
            with clean.begin() as other:
                other.execute(text("DELETE FROM background_jobs"))

    event.listen(clean, "before_cursor_execute", vanish)
    with Session(clean) as session, session.begin():
        made = handles(session, *keys)
    event.remove(clean, "before_cursor_execute", vanish)

    assert [(each.created, each.conflict) for each in made] == [(True, None)] * len(keys)
    assert [row[:2] for row in live(clean)] == [(each.id, key) for each, key in zip(made, keys, strict=True)]


def test_a_second_try_begins_again_without_what_the_first_has_written(clean: Engine) -> None:
    """Or it would meet its own job as somebody's, and ask for an early key while it holds a later one."""
    with Session(clean) as session, session.begin():
        handles(session, "k")

    looks: list[str] = []

    def vanish(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        if "its_key" in statement and not looks:
            looks.append(statement)
            with clean.begin() as other:
                other.execute(text("DELETE FROM background_jobs"))

    event.listen(clean, "before_cursor_execute", vanish)
    with Session(clean) as session, session.begin():
        free, taken = handles(session, "a", "k")
    event.remove(clean, "before_cursor_execute", vanish)

    assert (free.created, taken.created) == (True, True)
    assert [row[0] for row in live(clean)] == [free.id, taken.id]


# -- beside a worker


async def test_b43_a_retry_cannot_collide_with_a_newer_job_of_its_key(
    engine: Engine, database_url: str
) -> None:
    own = Jobs(Job)
    started, go_on = asyncio.Event(), asyncio.Event()

    @own.task(name="job", retry=Retry(max_attempts=2))
    async def job() -> None:
        started.set()
        await go_on.wait()
        raise ValueError("once more")

    with Session(engine) as session, session.begin():
        first = enqueue(session, job.using(unique_key="k"))
    async with working(own, database_url) as (_, heard):
        await started.wait()
        with Session(engine) as session, session.begin():
            second = enqueue(session, job.using(unique_key="k"))
        go_on.set()
        assert await heard.settled(1) == [JobStatus.READY]

    assert (second.id, second.conflict) == (first.id, "running")
    assert rows(engine, "SELECT id, status FROM background_jobs") == [(first.id, "ready")]


def test_b43_a_rescue_of_many_is_not_stopped_by_a_key(clean: Engine, a: Connection) -> None:
    with Session(clean) as session, session.begin():
        handles(session, "k", *[None] * 50)
    a.execute(text("UPDATE background_jobs SET queue = 'default'"))
    leases = [job.lease for job in claim(a, TABLES, queue="default", owner="w", limit=100, lease=LEASE)]
    with Session(clean) as session, session.begin():
        again = enqueue(session, report.using(unique_key="k", queue="default"), 1)
    expire(a, *leases)

    rescued = rescue(a)

    assert len(rescued) == 51
    assert not again.created
    assert rows(clean, "SELECT status, count(*) FROM background_jobs GROUP BY 1") == [("ready", 51)]
