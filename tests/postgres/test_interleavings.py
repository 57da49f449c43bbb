"""Interleavings that are written down: who does what in which order, and what must hold afterwards.

Numbers are those of the review that asked for them. Others of the same list: 13 and 14 in test_settle.py
(one row held by somebody, a value that is refused), 24 and the fence in test_fence.py.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from proxy import Proxy
from shop import Base, Job, Order
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from steps import (
    KEEP,
    LEASE,
    TABLES,
    ask,
    autocommit,
    backend,
    candidates,
    claimed,
    expire,
    judged,
    meanwhile,
    put,
    put_many,
    run,
    take,
    written,
)
from workers import rows, until, until_row, working

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.leases import Lease
from sqla_jobs.core.lifecycle import DONE, JobStatus, Raised
from sqla_jobs.core.retention import Retention
from sqla_jobs.core.retry import Retry
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.store.claim import claim, claim_statement
from sqla_jobs.store.lease import prolong
from sqla_jobs.store.settle import settle_expired
from sqla_jobs.tasks import Jobs, enqueue

# -- 12: an answer is lost, and the outcome is recorded once


@pytest.fixture(scope="module")
def tcp_server() -> Iterator[EmbeddedPostgres]:
    """A server that a proxy can reach."""
    with EmbeddedPostgres(durable=False, port=0) as running:
        yield running


@pytest.fixture
def tcp_engine(tcp_server: EmbeddedPostgres) -> Iterator[Engine]:
    engine = create_engine(make_url(tcp_server.tcp_url()).set(drivername="postgresql+psycopg"))
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def proxied(tcp_engine: Engine, tcp_server: EmbeddedPostgres) -> Iterator[Proxy]:
    with Proxy(tcp_server.tcp_url()) as proxy:
        yield proxy


async def test_12_a_settle_whose_answer_is_lost_is_recorded_once_and_nothing_is_stale(
    tcp_engine: Engine, proxied: Proxy
) -> None:
    jobs = Jobs(Job)
    ran: list[int] = []

    @jobs.task(name="job", retry=Retry(delay=timedelta(0)))
    async def job(number: int) -> None:
        ran.append(number)
        if number == 0:
            proxied.become("deaf")  # requests arrive, answers do not

    with Session(tcp_engine) as session, session.begin():
        for number in range(5):
            enqueue(session, job, number)
    url = proxied.url.render_as_string(hide_password=False)
    async with working(jobs, url, lease=timedelta(seconds=5)) as (_, heard):
        await until_row(
            tcp_engine, "SELECT 1 FROM background_jobs_archive"
        )  # it was written, nobody was told
        await heard.event("database.error")
        proxied.become("pass")
        await heard.settled(5)

    assert sorted(ran) == [0, 1, 2, 3, 4]
    assert rows(
        tcp_engine, "SELECT status, attempts, count(*) FROM background_jobs_archive GROUP BY 1, 2"
    ) == [("done", 1, 5)]
    assert heard.named("lease.lost") == []


async def test_12_a_settle_whose_answer_is_lost_is_not_stale_although_its_row_is_gone(
    tcp_engine: Engine, proxied: Proxy
) -> None:
    """What is done is forgotten at once here: nothing is left to look at."""
    jobs = Jobs(Job, retention=Retention(done=timedelta(0)))

    @jobs.task(name="job")
    async def job() -> None:
        proxied.become("deaf")  # requests arrive, answers do not

    with Session(tcp_engine) as session, session.begin():
        enqueue(session, job)
    url = proxied.url.render_as_string(hide_password=False)
    async with working(jobs, url, lease=timedelta(seconds=5)) as (_, heard):
        await until_row(tcp_engine, "SELECT 1 WHERE NOT EXISTS (SELECT FROM background_jobs)")
        await heard.event("database.error")
        proxied.become("pass")
        await heard.until(lambda heard: bool(heard.statuses() or heard.named("lease.lost")))

    assert heard.statuses() == [JobStatus.DONE]
    assert heard.named("lease.lost") == []


async def test_12_a_claim_whose_answer_is_lost_gives_its_jobs_back_with_their_attempt(
    tcp_engine: Engine, proxied: Proxy
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="job")
    async def job() -> None: ...

    claims: list[str] = []

    def before(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        if "SET status='running'" in statement and not claims:
            claims.append(statement)
            proxied.become("deaf")  # it goes out, and its answer never comes in

    own = create_engine(proxied.url)
    event.listen(own, "before_cursor_execute", before)
    with Session(tcp_engine) as session, session.begin():
        enqueue(session, job)
    async with working(jobs, "", engine=own, lease=timedelta(seconds=6), listen=False) as (_, heard):
        await until_row(tcp_engine, "SELECT 1 FROM background_jobs WHERE status = 'running'")
        await heard.event("database.error")
        proxied.become("pass")
        assert await heard.settled(1) == [JobStatus.DONE]
    own.dispose()

    assert rows(tcp_engine, "SELECT attempts FROM background_jobs_archive") == [(1,)]
    assert [each.fields["jobs"] for each in heard.named("job.released")] == [1]


@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_12_a_handlers_commit_whose_answer_is_lost_is_not_done_again(
    tcp_engine: Engine, proxied: Proxy, form: str
) -> None:
    """Nobody but the database knows whether it came through; it did."""
    jobs = Jobs(Job)
    ran: list[int] = []

    @jobs.task(name="thread", retry=Retry(delay=timedelta(0)))
    def in_thread(ctx: JobContext) -> None:
        ran.append(ctx.attempt)
        ctx.session.add(Order(customer="Ada"))

    @jobs.task(name="loop", retry=Retry(delay=timedelta(0)))
    async def in_loop(ctx: AsyncJobContext) -> None:
        ran.append(ctx.attempt)
        ctx.session.add(Order(customer="Ada"))

    commits: list[object] = []

    def before(connection: Connection) -> None:
        if not commits and ran:
            commits.append(connection)
            proxied.become("deaf")

    own, async_own = create_engine(proxied.url), create_async_engine(proxied.url)
    for engine in (own, async_own.sync_engine):
        event.listen(engine, "commit", before)
    with Session(tcp_engine) as session, session.begin():
        enqueue(session, jobs.tasks[form])

    lease = timedelta(seconds=6)
    async with working(jobs, "", engine=own, async_engine=async_own, lease=lease) as (_, heard):
        await until_row(tcp_engine, "SELECT 1 FROM background_jobs_archive")
        await heard.event("database.error")
        proxied.become("pass")
        told = await heard.settled(1)
    own.dispose()
    await async_own.dispose()

    assert ran == [1]
    assert told == [JobStatus.DONE]  # although the handler's thread or task saw an error
    assert len(commits) == 1
    assert rows(tcp_engine, "SELECT status, attempts FROM background_jobs_archive") == [("done", 1)]
    assert rows(tcp_engine, "SELECT count(*) FROM background_jobs") == [(0,)]
    assert rows(tcp_engine, "SELECT customer FROM orders") == [("Ada",)]


# -- 13: somebody holds one row while the others are settled


@pytest.mark.parametrize("end", ["returns", "fails"])
async def test_13_a_worker_writes_the_outcome_of_a_held_row_when_it_is_free_and_the_others_at_once(
    engine: Engine, database_url: str, end: str
) -> None:
    jobs = Jobs(Job)
    ran: list[int] = []
    go = threading.Event()

    @jobs.task(name="job", retry=Retry(delay=timedelta(hours=1)))
    def job(number: int) -> None:
        ran.append(number)
        go.wait(20)
        if end == "fails":
            raise ValueError("boom")

    with Session(engine) as session, session.begin():
        held = [enqueue(session, job, number) for number in range(5)][2]

    async with working(jobs, database_url, concurrency=5) as (_, heard):
        await until(lambda: len(ran) == 5)
        with engine.begin() as user:
            user.execute(text("SELECT 1 FROM background_jobs WHERE id = :id FOR UPDATE"), {"id": held.id})
            go.set()
            await heard.settled(4)
            [(while_held,)] = rows(engine, "SELECT status FROM background_jobs WHERE id = :id", id=held.id)
        await heard.settled(5)

    ends = rows(
        engine,
        "SELECT status, attempts FROM background_jobs UNION ALL "
        "SELECT status, attempts FROM background_jobs_archive",
    )
    assert while_held == "running"
    assert ends == [("done" if end == "returns" else "ready", 1)] * 5
    assert sorted(ran) == [0, 1, 2, 3, 4]
    assert heard.named("lease.lost") == []


# -- 15: settle against prolong against rescue against cancel, in opposite orders


def deadlocks(engine: Engine) -> int:
    """How many the server has counted: each backend tells it when it goes."""
    with autocommit(engine) as connection:
        counted: int = ask(
            connection, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
    return counted


def now_running(connection: Connection) -> list[Lease]:
    """The leases of this moment, in no order: writers of the first ones only would soon meet nobody."""
    found = connection.execute(
        text("SELECT queue, id, fencing_token, locked_by FROM background_jobs WHERE status = 'running'")
    )
    leases = [Lease(*row) for row in found]
    random.shuffle(leases)
    return leases


def settles(connection: Connection) -> int:
    """Half of them fail and are claimed again at once, with what takes the place of those that are gone."""
    some = now_running(connection)[::2]
    again = judged(Raised("again", timedelta(0)))
    changed = len(written(connection, *[(lease, again) for lease in some]).written) if some else 0
    if gone := 400 - ask(connection, "SELECT count(*) FROM background_jobs"):
        put_many(connection, max(gone, 0))
    claimed(connection, "A", limit=400)
    return changed


def prolongs(connection: Connection) -> int:
    leases = now_running(connection)
    return len(prolong(connection, TABLES, leases, lease=LEASE).kept) if leases else 0


def rescues(connection: Connection) -> int:
    """What has run out just now; row by row, so that this step holds no two locks."""
    for lease in now_running(connection)[:20]:
        expire(connection, lease)
    found = candidates(connection)
    random.shuffle(found)
    return len(settle_expired(connection, TABLES, found, retention=KEEP).written) if found else 0


def cancels(connection: Connection) -> int:
    """An operator's transaction over every seventh row, in id order, as a careful person does."""
    leases = sorted(now_running(connection))[::7]
    with connection.engine.begin() as operator:
        for lease in leases:
            run(
                operator,
                "UPDATE background_jobs SET cancel_requested_at = statement_timestamp() WHERE id = :id",
                id=lease.id,
            )
    return len(leases)


def fight(engine: Engine, seconds: float) -> dict[str, int]:
    """Two of each kind over the same 400 rows until the time is over; how many rows each kind changed."""
    with autocommit(engine) as connection:
        put_many(connection, 400)
        take(connection, limit=400)
    ends = time.monotonic() + seconds

    def work(verb: Callable[[Connection], int]) -> int:
        changed = 0
        with autocommit(engine) as connection:
            while time.monotonic() < ends:
                changed += verb(connection)
        return changed

    verbs = (settles, prolongs, rescues, cancels)
    with ThreadPoolExecutor(2 * len(verbs)) as pool:
        rounds = [(verb, pool.submit(work, verb)) for verb in verbs * 2]
        done = dict.fromkeys((verb.__name__ for verb in verbs), 0)
        for verb, future in rounds:
            done[verb.__name__] += future.result(seconds + 60)
    return done


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(180)])])
def test_15_writers_of_every_kind_in_opposite_orders_do_not_deadlock(clean: Engine, seconds: int) -> None:
    backends_that_go = create_engine(clean.url, poolclass=NullPool)
    before = deadlocks(backends_that_go)

    done = fight(backends_that_go, seconds)

    assert deadlocks(backends_that_go) == before
    assert min(done.values()) > 50, (
        done
    )  # they did meet: nobody fought with shadows, however slow the machine


# -- 25: a transaction that has been open for long


@pytest.mark.parametrize("delay", [timedelta(0), timedelta(seconds=20)])
def test_25_a_delay_counts_from_the_call_in_a_transaction_open_for_long(
    clean: Engine, a: Connection, delay: timedelta
) -> None:
    jobs = Jobs(Job)

    @jobs.task(name="job")
    def job() -> None: ...

    with Session(clean) as session, session.begin():
        session.execute(text("SELECT pg_sleep(1.5)"))
        enqueue(session, job.using(delay=delay) if delay else job)
        session.flush()
        moment = ask(a, "SELECT clock_timestamp()")

    due, created = a.execute(text("SELECT run_at, created_at FROM background_jobs")).one()
    assert abs((due - moment - delay).total_seconds()) < 0.5
    assert abs((created - moment).total_seconds()) < 0.5


def test_25_a_lease_counts_from_its_statement_in_a_transaction_open_for_long(
    clean: Engine, a: Connection
) -> None:
    put(a)
    with clean.begin() as connection:
        connection.execute(text("SELECT pg_sleep(1.5)"))
        [job] = claim(connection, TABLES, queue="default", owner="A", limit=1, lease=LEASE)
        until_, now = connection.execute(
            text("SELECT locked_until, clock_timestamp() FROM background_jobs WHERE id = :id"),
            {"id": job.lease.id},
        ).one()
        early = (now + LEASE - until_).total_seconds()
        connection.execute(text("SELECT pg_sleep(1.5)"))
        prolong(connection, TABLES, [job.lease], lease=LEASE)
        again = connection.scalar(text("SELECT locked_until - clock_timestamp() FROM background_jobs"))

    assert early < 0.5
    assert again > LEASE - timedelta(seconds=0.5)


# -- 27: a job changes its queue between the snapshot of a claim and its lock


def test_27_a_job_that_moved_to_another_queue_meanwhile_is_not_claimed_from_the_old_one(
    clean: Engine, a: Connection, b: Connection
) -> None:
    moved, stays = put(a), put(a)
    compiled = claim_statement(TABLES.jobs).compile(clean)
    condition = "WHERE background_jobs.queue = "
    head, found, tail = str(compiled).partition(
        f"SELECT background_jobs.id \nFROM background_jobs \n{condition}"
    )
    assert found
    # evaluated once, at the start of the scan: the snapshot is taken, no row is locked yet
    slow = f"{head}{found.replace('WHERE', 'WHERE (SELECT pg_sleep(1)) IS NOT NULL AND')}{tail}"
    values = {"q": "default", "owner": "A", "limit": 10, "lease": LEASE, "prefetch": False}
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid AND wait_event = 'PgSleep'"
    pid = backend(a)

    def late_claim() -> list[int]:
        return [row[0] for row in a.exec_driver_sql(slow, compiled.construct_params(values))]

    with meanwhile(late_claim) as claimed:
        while not ask(b, asleep, pid=pid):
            threading.Event().wait(0.005)
        run(b, "UPDATE background_jobs SET queue = 'other' WHERE id = :id", id=moved)

    assert claimed.result() == [stays]
    assert [lease.id for lease in take(b, queue="other")] == [moved]
    assert ask(b, "SELECT attempts FROM background_jobs WHERE id = :id", id=moved) == 1


def test_27_the_end_of_a_job_whose_queue_was_changed_while_it_ran_is_stale(
    a: Connection, b: Connection
) -> None:
    """The queue is a part of the proof: who moves a running job takes it away."""
    put(a)
    [lease] = take(a)
    run(b, "UPDATE background_jobs SET queue = 'other'")

    settled = written(a, (lease, DONE))

    assert settled.stale == [(lease, DONE)]
    assert ask(b, "SELECT status FROM background_jobs") == "running"
