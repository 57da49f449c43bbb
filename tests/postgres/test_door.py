"""The door: one held connection per lane, on either kind of engine, and what may happen to it."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
import pytest
from proxy import Proxy
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from steps import PATIENCE, ask, backend, meanwhile, put, run, until, until_blocked

from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.errors import ConnectionLost, DeadlineExceeded
from sqla_jobs.store.door import (
    Lane,
    SyncLane,
    brief,
    driver_of,
    is_lost,
    is_retryable,
    is_rows_fault,
    lane_on,
)
from sqla_jobs.store.door.wire import Backend

SLACK = 1.5  # seconds that an answer may come after its deadline


@dataclass
class Held:
    """A lane and the engine behind it."""

    lane: Lane
    engine: Engine | AsyncEngine
    kind: str

    async def run(self, verb: Callable[[Connection], Any], *, deadline: float = PATIENCE) -> Any:
        return await self.lane.run(verb, deadline=deadline)


@pytest.fixture(params=["thread", "loop"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which engine there is, and so which lane."""
    chosen: str = request.param
    return chosen


@asynccontextmanager
async def opened(kind: str, url: URL | str, **options: Any) -> AsyncIterator[Held]:
    url = make_url(url).set(drivername="postgresql+psycopg")
    engine = create_engine(url, **options) if kind == "thread" else create_async_engine(url, **options)
    lane = lane_on(engine, "test")
    try:
        yield Held(lane, engine, kind)
    finally:
        await lane.close()
        if isinstance(engine, AsyncEngine):
            await engine.dispose()
        else:
            engine.dispose()


@pytest.fixture
async def held(kind: str, clean_url: str) -> AsyncIterator[Held]:
    async with opened(kind, clean_url) as held:
        yield held


@pytest.fixture(scope="module")
def tcp_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(durable=False, port=0) as server:
        yield server


@pytest.fixture
def proxy(tcp_server: EmbeddedPostgres) -> Iterator[Proxy]:
    with Proxy(tcp_server.tcp_url()) as proxy:
        yield proxy


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What takes longer is wrong."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def sleep_for_long(connection: Connection) -> None:
    run(connection, "SELECT pg_sleep(30)")


def raising(state: str, *, times: int = 10**6) -> tuple[Callable[[Connection], str], list[int]]:
    """A verb that the server refuses so often with this SQLSTATE; the backends it was tried on."""
    tried: list[int] = []

    def verb(connection: Connection) -> str:
        tried.append(backend(connection))
        if len(tried) <= times:
            run(connection, f"DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '{state}'; END $$")
        return "done"

    return verb, tried


# -- as it should be


async def test_a_verb_runs_and_its_value_comes_back(held: Held) -> None:
    assert await held.run(lambda connection: ask(connection, "SELECT 6 * 7")) == 42


async def test_what_a_verb_did_is_committed_when_it_returns(held: Held, a: Connection) -> None:
    job = await held.run(put)

    assert ask(a, "SELECT id FROM background_jobs") == job


async def test_a_lane_holds_one_connection_for_all_its_verbs(held: Held) -> None:
    backends = {await held.run(backend) for _ in range(3)}

    assert len(backends) == 1


async def test_a_lane_takes_no_place_in_the_pool(held: Held, a: Connection) -> None:
    pid = await held.run(backend)
    pool: Any = held.engine.pool

    assert pool.checkedout() == 0
    if isinstance(held.engine, AsyncEngine):
        await held.engine.dispose()
    else:
        held.engine.dispose()
    assert await held.run(backend) == pid


async def test_a_closed_lane_leaves_no_connection(kind: str, clean_url: str, a: Connection) -> None:
    url = make_url(clean_url).update_query_dict({"application_name": f"lane {kind}"})
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = :name"
    async with opened(kind, url) as held:
        await held.run(backend)
        assert ask(a, count, name=f"lane {kind}") == 1

        await held.lane.close()

        await asyncio.to_thread(until, lambda: ask(a, count, name=f"lane {kind}") == 0)


async def test_a_lane_that_was_never_used_closes(kind: str, clean_url: str) -> None:
    async with opened(kind, clean_url) as held:
        await held.lane.close()


async def test_a_lane_in_a_thread_never_blocks_the_loop(clean_url: str, clean: Engine, a: Connection) -> None:
    async with opened("thread", clean_url) as held:
        await held.run(backend)
        with clean.connect() as keeper:
            run(keeper, "SELECT pg_advisory_xact_lock(7)")

            waiting = asyncio.create_task(held.run(lambda c: run(c, "SELECT pg_advisory_xact_lock(7)")))
            await asyncio.sleep(0)
            turned = await asyncio.to_thread(lambda: "the loop turns")

            assert turned == "the loop turns"
            assert not waiting.done()
            keeper.rollback()
            await waiting


# -- errors of a verb


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
async def test_what_may_simply_run_again_is_run_again_on_the_same_connection(held: Held, state: str) -> None:
    verb, tried = raising(state, times=2)

    assert await held.run(verb) == "done"
    assert len(tried) == 3
    assert len(set(tried)) == 1


async def test_after_some_tries_the_error_is_passed_on(held: Held) -> None:
    verb, tried = raising("40001")

    with pytest.raises(DBAPIError) as raised:
        await held.run(verb)

    assert is_retryable(raised.value)
    assert 2 < len(tried) < 10
    assert await held.run(backend) == tried[0]


async def test_a_lock_that_is_not_available_in_time_is_tried_again(held: Held, clean: Engine) -> None:
    with clean.connect() as keeper:
        run(keeper, "LOCK TABLE background_jobs")
        tries = 0

        def verb(connection: Connection) -> object:
            nonlocal tries
            tries += 1
            run(connection, "SET lock_timeout = '10ms'")
            if tries == 2:
                keeper.rollback()
            return ask(connection, "SELECT count(*) FROM background_jobs")

        assert await held.run(verb) == 0
        assert tries == 2


@pytest.mark.parametrize(
    "statement", ["SELECT 1/0", "SELECT nothing", "INSERT INTO background_jobs (kind) VALUES ('')"]
)
async def test_another_error_of_the_database_is_passed_on_at_once_and_keeps_the_connection(
    held: Held, statement: str
) -> None:
    pid = await held.run(backend)
    tries = 0

    def verb(connection: Connection) -> None:
        nonlocal tries
        tries += 1
        run(connection, statement)

    with pytest.raises(DBAPIError):
        await held.run(verb)

    assert tries == 1
    assert await held.run(backend) == pid


async def test_a_value_that_the_driver_refuses_is_no_lost_connection(held: Held) -> None:
    pid = await held.run(backend)

    with pytest.raises(DBAPIError, match="NUL"):
        await held.run(lambda connection: ask(connection, "SELECT :it", it="a\0b"))

    assert await held.run(backend) == pid


async def test_an_error_of_the_verb_itself_is_passed_on_and_keeps_the_connection(held: Held) -> None:
    pid = await held.run(backend)
    error = ValueError("mine")

    def verb(connection: Connection) -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as raised:
        await held.run(verb)

    assert raised.value is error
    assert await held.run(backend) == pid


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
async def test_nothing_that_a_verb_raises_ends_the_lanes_thread(clean_url: str, error: BaseException) -> None:
    async with opened("thread", clean_url) as held:
        pid = await held.run(backend)

        def verb(connection: Connection) -> None:
            raise error

        with pytest.raises(type(error)):
            await held.run(verb)

        assert await held.run(backend) == pid


# -- deadlines


async def test_a_statement_that_takes_too_long_is_ended_and_the_lane_works_again(held: Held) -> None:
    pid = await held.run(backend)

    with within(0.3 + SLACK), pytest.raises(DeadlineExceeded):
        await held.run(sleep_for_long, deadline=0.3)

    with within(SLACK):
        assert await held.run(backend) != pid


async def test_a_lost_answer_is_a_lost_connection_to_whoever_handles_both(held: Held) -> None:
    with pytest.raises(ConnectionLost):
        await held.run(sleep_for_long, deadline=0.1)


async def test_in_a_black_hole_the_deadline_holds(kind: str, proxy: Proxy) -> None:
    async with opened(kind, proxy.url) as held:
        pid = await held.run(backend)
        proxy.become("blackhole")

        with within(0.5 + 2), pytest.raises(DeadlineExceeded):
            await held.run(backend, deadline=0.5)

        proxy.become("pass")
        assert await held.run(backend) != pid


async def test_connecting_into_a_black_hole_ends_at_the_deadline(kind: str, proxy: Proxy) -> None:
    proxy.become("blackhole")
    async with opened(kind, proxy.url) as held:
        for _ in range(2):
            with within(0.5 + 2), pytest.raises(DeadlineExceeded, match="no connection within"):
                await held.run(backend, deadline=0.5)

        proxy.become("pass")
        assert await held.run(lambda connection: ask(connection, "SELECT 1")) == 1
        pool: Any = held.engine.pool
        assert pool.checkedout() <= (2 if kind == "thread" else 0)  # a thread cannot be taken from connect()


async def test_what_the_server_did_before_its_answer_was_lost_was_done_once(
    kind: str, proxy: Proxy, tcp_server: EmbeddedPostgres
) -> None:
    tcp_server.psql("DROP TABLE IF EXISTS tally; CREATE TABLE tally (n int); INSERT INTO tally VALUES (0)")
    async with opened(kind, proxy.url) as held:
        await held.run(backend)
        proxy.become("deaf")

        with pytest.raises(DeadlineExceeded):
            await held.run(lambda connection: run(connection, "UPDATE tally SET n = n + 1"), deadline=0.3)

        proxy.become("pass")
        assert await held.run(lambda connection: ask(connection, "SELECT n FROM tally")) == 1


async def test_a_lane_closes_in_a_black_hole(kind: str, proxy: Proxy) -> None:
    async with opened(kind, proxy.url) as held:
        await held.run(backend)
        proxy.become("blackhole")

        with within(SLACK):
            await held.lane.close()


# -- connections that break


async def test_a_reset_connection_is_lost_and_the_next_verb_connects_anew(kind: str, proxy: Proxy) -> None:
    async with opened(kind, proxy.url) as held:
        pid = await held.run(backend)
        proxy.become("reset")

        with pytest.raises(ConnectionLost):
            await held.run(backend)
        with pytest.raises(ConnectionLost):
            await held.run(backend)

        proxy.become("pass")
        assert await held.run(backend) != pid


async def test_a_terminated_backend_is_a_lost_connection(held: Held, a: Connection) -> None:
    pid = await held.run(backend)
    run(a, "SELECT pg_terminate_backend(:pid, 10000)", pid=pid)

    with pytest.raises(ConnectionLost):
        await held.run(backend)

    assert await held.run(backend) != pid


async def test_a_backend_terminated_in_mid_statement_is_a_lost_connection(
    held: Held, clean: Engine, a: Connection
) -> None:
    pid = await held.run(backend)
    with clean.connect() as keeper:
        run(keeper, "SELECT pg_advisory_xact_lock(7)")
        holding = backend(keeper)

        waiting = asyncio.create_task(held.run(lambda c: run(c, "SELECT pg_advisory_lock(7)")))
        await asyncio.to_thread(until_blocked, a, pid, by=holding)
        run(a, "SELECT pg_terminate_backend(:pid)", pid=pid)

        with pytest.raises(ConnectionLost, match="terminating connection"):
            await waiting
        keeper.rollback()

    assert await held.run(backend) != pid


async def test_a_server_that_refuses_connections_is_a_lost_connection(kind: str, proxy: Proxy) -> None:
    proxy.become("reset")
    async with opened(kind, proxy.url) as held:
        with pytest.raises(ConnectionLost):
            await held.run(backend)

        proxy.become("pass")
        assert await held.run(lambda connection: ask(connection, "SELECT 1")) == 1


# -- what a lane leaves behind


def sessions(observer: Connection, name: str) -> int:
    """How many backends serve clients of this name."""
    count: int = ask(
        observer, "SELECT count(*) FROM pg_stat_activity WHERE application_name = :name", name=name
    )
    return count


async def test_the_backend_of_a_cut_statement_is_ended_by_the_next_connection(
    kind: str, clean: Engine, clean_url: str, a: Connection
) -> None:
    """It waits for a lock, so it would not notice that its client has gone, and act when the lock is free."""
    url = make_url(clean_url).update_query_dict({"application_name": f"frozen {kind}"})
    async with opened(kind, url) as held:
        pid = await held.run(backend)
        with clean.connect() as keeper:
            run(keeper, "LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(DeadlineExceeded):
                await held.run(put, deadline=0.3)
            assert ask(a, "SELECT wait_event_type FROM pg_stat_activity WHERE pid = :pid", pid=pid) == "Lock"

            assert await held.run(backend) != pid

            gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid"
            await asyncio.to_thread(until, lambda: ask(a, gone, pid=pid) == 0)
            keeper.rollback()
        assert ask(a, "SELECT count(*) FROM background_jobs") == 0


async def test_a_table_that_stays_locked_for_many_deadlines_does_not_fill_the_server(
    kind: str, clean: Engine, clean_url: str, a: Connection
) -> None:
    name = f"locked out {kind}"
    url = make_url(clean_url).update_query_dict({"application_name": name})
    most = 0
    async with opened(kind, url) as held:
        with clean.connect() as keeper:
            run(keeper, "LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE")
            for _ in range(12):
                with pytest.raises(DeadlineExceeded):
                    await held.run(put, deadline=0.1)
                most = max(most, sessions(a, name))
            await held.run(backend)
            await asyncio.to_thread(until, lambda: sessions(a, name) == 1)
            keeper.rollback()

    assert most <= 3  # at work, told to end, and ending
    assert ask(a, "SELECT count(*) FROM background_jobs") == 0


async def test_a_lane_that_closes_ends_the_statement_that_it_left_behind(
    kind: str, clean: Engine, clean_url: str, a: Connection
) -> None:
    name = f"closes {kind}"
    async with opened(kind, make_url(clean_url).update_query_dict({"application_name": name})) as held:
        with clean.connect() as keeper:
            run(keeper, "LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(DeadlineExceeded):
                await held.run(put, deadline=0.3)

            await held.lane.close()

            await asyncio.to_thread(until, lambda: sessions(a, name) == 0)
            keeper.rollback()
    assert ask(a, "SELECT count(*) FROM background_jobs") == 0


async def test_a_later_backend_with_the_number_of_one_that_was_left_is_not_ended(
    own_engine: Engine, a: Connection
) -> None:
    """A process number comes again; when it began does not."""
    stranger = backend(a)
    lane = SyncLane(own_engine)
    lane.other_end.left.append(Backend(stranger, "1764535510.000001"))

    lane.run(backend)

    assert lane.other_end.left == []
    assert backend(a) == stranger
    lane.close()


async def test_a_dropped_lane_connects_anew_and_ends_what_is_left_of_it(held: Held, a: Connection) -> None:
    pid = await held.run(backend)

    await held.lane.drop()

    gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid"
    await asyncio.to_thread(until, lambda: ask(a, gone, pid=pid) == 0)
    assert await held.run(backend) != pid


async def test_a_lane_dropped_in_a_black_hole_leaves_no_backend(
    kind: str, proxy: Proxy, tcp_server: EmbeddedPostgres
) -> None:
    async with opened(kind, proxy.url) as held:
        pid = await held.run(backend)
        proxy.become("blackhole")
        with within(SLACK):
            await held.lane.drop()
        proxy.become("pass")

        await held.run(backend)

        there = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"
        await asyncio.to_thread(until, lambda: tcp_server.psql(there).strip() == "0")


async def test_whoever_may_not_look_at_others_can_still_use_a_lane(
    kind: str, tcp_server: EmbeddedPostgres
) -> None:
    tcp_server.psql(
        "DROP ROLE IF EXISTS blind; CREATE ROLE blind LOGIN; REVOKE SELECT ON pg_stat_activity FROM PUBLIC"
    )
    url = make_url(tcp_server.tcp_url()).set(username="blind")
    async with opened(kind, url) as held:
        assert await held.run(lambda connection: ask(connection, "SELECT current_user")) == "blind"
    tcp_server.psql("GRANT SELECT ON pg_stat_activity TO PUBLIC")


# -- servers that refuse


@pytest.mark.parametrize("state", ["42P05", "26000"])
async def test_a_prepared_statement_that_a_pooler_mixed_up_runs_again_on_a_new_connection_without_any(
    held: Held, state: str
) -> None:
    verb, tried = raising(state, times=1)

    def thresholds(connection: Connection) -> Any:
        return driver_of(connection).prepare_threshold

    before = await held.run(thresholds)
    assert await held.run(verb) == "done"

    assert len(set(tried)) == 2
    assert (before, await held.run(thresholds)) == (5, None)


async def test_a_server_that_has_become_read_only_is_left(kind: str, tcp_server: EmbeddedPostgres) -> None:
    """After a failover the old primary still answers; a held connection would stay with it for ever."""
    url = make_url(tcp_server.create_database(f"failed_over_{kind}"))
    run_alone = partial(tcp_server.psql, database=f"failed_over_{kind}")
    run_alone("CREATE TABLE tally (n int)")
    run_alone(f"ALTER DATABASE failed_over_{kind} SET default_transaction_read_only = on")

    def write(connection: Connection) -> None:
        run(connection, "INSERT INTO tally VALUES (1)")

    async with opened(kind, url) as held:
        with pytest.raises(ConnectionLost, match="read-only"):
            await held.run(write)

        run_alone(
            f"SET default_transaction_read_only = off; "
            f"ALTER DATABASE failed_over_{kind} RESET default_transaction_read_only"
        )

        await held.run(write)
        assert run_alone("SELECT count(*) FROM tally").strip() == "1"
    tcp_server.drop_database(f"failed_over_{kind}")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_server_that_takes_no_more_connections_is_a_lost_connection_that_comes_back(
    kind: str, driver: str, tcp_server: EmbeddedPostgres
) -> None:
    if driver == "asyncpg" and kind == "thread":
        pytest.skip("asyncpg has no threads")
    tcp_server.psql("DROP ROLE IF EXISTS limited; CREATE ROLE limited LOGIN CONNECTION LIMIT 0")
    url = make_url(tcp_server.tcp_url()).set(username="limited", drivername=f"postgresql+{driver}")
    engine = create_engine(url) if kind == "thread" else create_async_engine(url)
    lane = lane_on(engine, "limited")
    for _ in range(3):
        with pytest.raises(ConnectionLost, match="too many connections"):
            await lane.run(backend, deadline=PATIENCE)

    tcp_server.psql("ALTER ROLE limited CONNECTION LIMIT 1")

    assert await lane.run(backend, deadline=PATIENCE) == await lane.run(backend, deadline=PATIENCE)
    await lane.close()


@pytest.mark.full
async def test_reconnecting_again_and_again_leaks_neither_connections_nor_descriptors(
    kind: str, clean_url: str, a: Connection
) -> None:
    name = f"leaks {kind}"
    async with opened(kind, make_url(clean_url).update_query_dict({"application_name": name})) as held:
        await held.run(backend)
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            run(a, "SELECT pg_terminate_backend(:pid, 10000)", pid=await held.run(backend))
            with pytest.raises(ConnectionLost):
                await held.run(backend)
        await held.run(backend)

        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
        await asyncio.to_thread(until, lambda: sessions(a, name) == 1)


# -- cancelling whoever waits


async def test_cancelling_the_waiter_does_not_cancel_the_statement(
    held: Held, clean: Engine, a: Connection
) -> None:
    job = put(a)
    pid = await held.run(backend)
    statement = "UPDATE background_jobs SET version = version + 1"
    with clean.connect() as keeper:
        run(keeper, "SELECT 1 FROM background_jobs FOR UPDATE")
        holding = backend(keeper)
        waiting = asyncio.create_task(held.run(lambda connection: run(connection, statement)))
        await asyncio.to_thread(until_blocked, a, pid, by=holding)

        waiting.cancel()
        await asyncio.sleep(0)
        waiting.cancel()  # whoever insists waits too
        await asyncio.sleep(0)
        still_under_way = not waiting.done()
        keeper.rollback()

        with pytest.raises(asyncio.CancelledError):
            await waiting

    assert still_under_way
    assert await held.run(backend) == pid
    assert ask(a, "SELECT version FROM background_jobs WHERE id = :id", id=job) == 2


async def test_a_cancelled_waiter_does_not_outlast_its_deadline_and_harms_no_later_verb(held: Held) -> None:
    pid = await held.run(backend)
    waiting = asyncio.create_task(held.run(sleep_for_long, deadline=0.4))
    await asyncio.sleep(0)

    waiting.cancel()

    with within(0.4 + SLACK), pytest.raises(asyncio.CancelledError):
        await waiting
    with within(SLACK):
        assert await held.run(backend, deadline=0.4) != pid


# -- SyncLane, for code that lives in its own thread


@pytest.fixture
def own_engine(clean_url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(clean_url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def test_a_sync_lane_holds_a_detached_connection(own_engine: Engine) -> None:
    lane = SyncLane(own_engine)
    pool: Any = own_engine.pool

    pids = {lane.run(backend), lane.run(backend)}

    assert len(pids) == 1
    assert pool.checkedout() == 0
    lane.close()


def test_a_sync_lane_can_be_used_again_after_its_close(own_engine: Engine, a: Connection) -> None:
    lane = SyncLane(own_engine)
    pid = lane.run(backend)

    lane.close()

    until(lambda: ask(a, "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid", pid=pid) == 0)
    assert lane.run(backend) != pid
    lane.close()


def test_a_sync_lane_is_ended_from_another_thread(own_engine: Engine, a: Connection) -> None:
    lane = SyncLane(own_engine)
    pid = lane.run(backend)

    active = "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid AND wait_event = 'PgSleep'"

    with meanwhile(lambda: lane.run(sleep_for_long)) as ended:
        until(lambda: ask(a, active, pid=pid) == 1)
        lane.expire()
        error = ended.exception(SLACK)

    assert isinstance(error, DeadlineExceeded)
    assert lane.run(backend) != pid
    lane.close()


def test_a_deadline_that_passes_as_the_answer_comes_costs_the_connection_only(own_engine: Engine) -> None:
    lane = SyncLane(own_engine)
    pid = lane.run(backend)

    lane.expire()

    assert lane.run(backend) != pid
    lane.close()


def test_a_verb_whose_deadline_passed_while_connecting_is_not_run_any_more(clean_url: str) -> None:
    """Nobody would cut it, and nobody waits for its answer: a claim would be rows that run for nobody."""
    connecting, go_on, ran = threading.Event(), threading.Event(), threading.Event()

    def slowly() -> Any:
        connecting.set()
        assert go_on.wait(PATIENCE)
        return psycopg.connect(clean_url)

    engine = create_engine("postgresql+psycopg://", creator=slowly)
    lane = SyncLane(engine)

    with meanwhile(lambda: lane.run(lambda connection: ran.set())) as ended:
        assert connecting.wait(PATIENCE)
        lane.expire()
        go_on.set()

    assert isinstance(ended.exception(), DeadlineExceeded)
    assert not ran.is_set()
    lane.run(lambda connection: ran.set())
    assert ran.is_set()
    lane.close()
    engine.dispose()


async def test_a_verb_given_up_while_its_thread_connects_is_not_run_any_more(clean_url: str) -> None:
    go_on, ran = threading.Event(), threading.Event()
    first = threading.Lock()

    def slowly() -> Any:
        if first.acquire(blocking=False):
            assert go_on.wait(PATIENCE)
        return psycopg.connect(clean_url)

    async with opened("thread", "postgresql://", creator=slowly) as held:
        threads = threading.active_count()
        with within(0.2 + SLACK), pytest.raises(DeadlineExceeded, match="no connection within"):
            await held.run(lambda connection: ran.set(), deadline=0.2)
        assert await held.run(lambda connection: ask(connection, "SELECT 1")) == 1

        go_on.set()
        await asyncio.to_thread(until, lambda: threading.active_count() <= threads + 1)

    assert not ran.is_set()


# -- errors in words


def test_an_error_in_brief_shows_neither_statement_nor_parameters(a: Connection) -> None:
    with pytest.raises(DBAPIError) as raised:
        a.execute(text("SELECT cast(:secret AS integer), 'statement'"), {"secret": "pa55word"})
    long = brief(raised.value)

    with pytest.raises(DBAPIError) as raised:
        a.execute(text("SELECT 1/0 AS statement, :secret AS it"), {"secret": "pa55word"})
    short = brief(raised.value)

    assert short == "DivisionByZero: division by zero"
    for line in long, short:
        assert "statement" not in line
        assert "SELECT" not in line
        assert "\n" not in line


def test_an_error_in_brief_is_one_line_also_without_text() -> None:
    assert brief(ValueError("one\ntwo")) == "ValueError: one"
    assert brief(ValueError()) == "ValueError"
    assert brief(OSError("broken")) == "OSError: broken"


def test_a_lost_connection_and_a_retryable_error_are_told_apart(a: Connection) -> None:
    for state, retryable, lost in [
        ("40001", True, False),
        ("40P01", True, False),
        ("55P03", True, False),
        ("57P01", False, True),
        ("08006", False, True),
        ("57014", False, False),
        ("23505", False, False),
        ("53300", False, False),
        ("25006", False, True),
        ("42P05", False, False),
    ]:
        with pytest.raises(DBAPIError) as raised:
            run(a, f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$")
        assert (state, is_retryable(raised.value), is_lost(raised.value)) == (state, retryable, lost)
    broken = OperationalError("SELECT 1", {}, psycopg.OperationalError("server closed the connection"))
    assert is_lost(broken)
    assert is_lost(ConnectionResetError())
    assert not is_lost(ValueError())


@pytest.mark.parametrize(
    ("error", "blames_a_row"),
    [
        (ConnectionLost("gone"), False),
        (DeadlineExceeded("no answer"), False),
        (OSError(111, "refused"), False),
        (OverflowError("a value that the driver cannot send"), True),
    ],
    ids=["lost", "late", "refused", "value"],
)
def test_a_lost_connection_is_no_rows_fault(error: Exception, blames_a_row: bool) -> None:
    assert is_rows_fault(error) is blames_a_row
