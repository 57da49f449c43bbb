"""Behind PgBouncer in transaction mode: what arrives, what runs, and what a worker leaves to others there."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
import shop
from pooler import Pooler
from processes import worker_process
from shop import Order
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from steps import backend
from workers import PATIENCE, rows, until, until_row, working

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.store.door import driver_of, lane_on
from sqla_jobs.tasks import Task, enqueue
from sqla_jobs.worker import wakeup

DRIVER = "postgresql+psycopg"
DONE = JobStatus.DONE
NEVER = timedelta(hours=1)  # a poll interval: only a wake-up can be in time
NO_STATEMENTS = {"prepare_threshold": None}


@pytest.fixture(autouse=True)
def _forget_calls() -> Iterator[None]:
    shop.calls.clear()
    yield
    shop.calls.clear()


@pytest.fixture(scope="module")
def tcp_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(durable=False, port=0) as server:
        engine = create_engine(make_url(server.create_database("template_shop")).set(drivername=DRIVER))
        shop.Base.metadata.create_all(engine)
        engine.dispose()
        yield server


@pytest.fixture
def direct_url(tcp_server: EmbeddedPostgres) -> Iterator[str]:
    """Past the pooler."""
    tcp_server.create_database("shop", template="template_shop")
    yield tcp_server.tcp_url("shop")
    tcp_server.drop_database("shop")


@pytest.fixture
def direct(direct_url: str) -> Iterator[Engine]:
    engine = create_engine(make_url(direct_url).set(drivername=DRIVER))
    yield engine
    engine.dispose()


@pytest.fixture
def pooler(direct_url: str) -> Iterator[Pooler]:
    with Pooler(direct_url) as pooler:
        yield pooler


@pytest.fixture
def pooled_url(pooler: Pooler) -> str:
    """Through it."""
    return pooler.url.render_as_string(hide_password=False)


@pytest.fixture
def producer(pooled_url: str) -> Iterator[Engine]:
    """An application behind the same pooler, as its manual wants it."""
    engine = create_engine(pooled_url, connect_args=NO_STATEMENTS)
    yield engine
    engine.dispose()


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


# -- wake-ups


async def test_with_a_direct_listen_url_wake_ups_arrive(
    pooled_url: str, direct_url: str, producer: Engine
) -> None:
    async with working(shop.jobs, pooled_url, listen_url=direct_url, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        put(producer, shop.note, 1)
        with anyio.fail_after(5):
            await heard.settled(1)

    assert shop.calls == [1]
    assert heard.named("listen.unavailable") == []


async def test_without_one_the_worker_says_once_that_it_polls_and_jobs_run(
    pooled_url: str, producer: Engine
) -> None:
    often = timedelta(seconds=0.2)
    async with working(shop.jobs, pooled_url, poll_interval=often) as (_, heard):
        told = await heard.event("listen.unavailable")
        put(producer, shop.note, 1)
        put(producer, shop.note_in_thread, 2)
        await heard.settled(2)

    assert told.fields["reason"] == (
        "notifications do not arrive (a pooler in transaction mode?): polling every 0.2 s; "
        "give --listen-database-url, a direct one"
    )
    assert len(heard.named("listen.unavailable")) == 1
    assert heard.named("listen.connected") == heard.named("listen.lost") == []


async def test_a_pooler_that_hides_what_it_does_is_found_out_by_the_message_that_does_not_arrive(
    pooled_url: str, producer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "_LOOKS", 0)
    monkeypatch.setattr(wakeup, "_FIRST_ANSWER_LIMIT", 0.5)
    often = timedelta(seconds=0.2)
    async with working(shop.jobs, pooled_url, poll_interval=often) as (_, heard):
        told = await heard.event("listen.unavailable")
        put(producer, shop.note, 1)
        await heard.settled(1)

    assert str(told.fields["reason"]).startswith("notifications do not arrive")
    assert heard.named("listen.connected") == []


async def test_a_worker_process_takes_the_listen_url_as_a_flag_and_from_its_environment(
    pooled_url: str, direct_url: str, producer: Engine, direct: Engine, tmp_path: Path
) -> None:
    flags = ("--listen-database-url", direct_url, "--poll-interval", "1h")
    with worker_process(pooled_url, tmp_path / "log", *flags) as worker:
        await until(lambda: "listen.connected" in worker.text())
        put(producer, shop.note, 1)
        await until_row(direct, "SELECT 1 FROM background_jobs_archive")
        assert worker.stop() == 0

    assert "pooler.detected" in worker.text()
    assert "listen.unavailable" not in worker.text()


# -- prepared statements


async def test_a_lane_notices_the_pooler_and_prepares_nothing(pooled_url: str) -> None:
    for make in (create_engine, create_async_engine):
        told: list[bool | None] = []
        engine: Any = make(pooled_url, poolclass=NullPool)
        lane = lane_on(engine, "pooled", pooled=told.append)

        threshold = await lane.run(
            lambda connection: driver_of(connection).prepare_threshold, deadline=PATIENCE
        )

        assert (told, threshold) == ([True], None)
        await lane.close()


async def test_a_lane_without_a_pooler_notices_none_and_prepares(direct_url: str) -> None:
    told: list[bool | None] = []
    engine = create_engine(make_url(direct_url).set(drivername=DRIVER))
    lane = lane_on(engine, "direct", pooled=told.append)

    threshold = await lane.run(lambda connection: driver_of(connection).prepare_threshold, deadline=PATIENCE)

    assert (told, threshold) == ([], 5)
    await lane.close()
    engine.dispose()


async def test_b63_a_thousand_jobs_are_done_once_by_two_workers_while_the_pooler_restarts(
    pooler: Pooler, pooled_url: str, direct: Engine, tmp_path: Path
) -> None:
    options = ("--poll-interval", "200ms", "--lease", "5s", "-q", "mail", "-c", "5")
    with (
        worker_process(pooled_url, tmp_path / "one", *options) as one,
        worker_process(pooled_url, tmp_path / "two", *options) as two,
    ):
        producers = [
            asyncio.create_task(asyncio.to_thread(_order_receipts, pooled_url, direct, name))
            for name in ("a", "b", "c", "d")
        ]
        await until_row(direct, "SELECT 1 FROM receipts HAVING count(*) > 200", patience=60)
        pooler.stop()
        pooler.start()
        await asyncio.gather(*producers)
        await until_row(direct, "SELECT 1 FROM background_jobs_archive HAVING count(*) >= 1000", patience=60)
        codes = one.stop(), two.stop()

    assert codes == (0, 0)
    assert rows(direct, "SELECT count(*) FROM background_jobs") == [(0,)]
    assert rows(direct, "SELECT count(*), count(DISTINCT order_id) FROM receipts") == [(1000, 1000)]
    assert rows(direct, "SELECT status, count(*) FROM background_jobs_archive GROUP BY 1") == [("done", 1000)]
    for worker in (one, two):
        assert worker.text().count("pooler.detected") == 1
        assert worker.text().count("listen.unavailable") == 1
        assert "prepared statement" not in worker.text()


def _order_receipts(url: str, direct: Engine, name: str) -> None:
    """An application that puts 250 jobs and tries again what certainly failed."""
    engine = create_engine(url, connect_args=NO_STATEMENTS)
    task: Any = shop.send_receipt if name in "ab" else shop.send_receipt_async
    for number in range(250):
        customer = f"{name} {number}"
        while not rows(direct, "SELECT 1 FROM orders WHERE customer = :customer", customer=customer):
            with suppress(DBAPIError), Session(engine) as session, session.begin():
                session.add(order := Order(customer=customer))
                enqueue(session, task, order)
    engine.dispose()


# -- an application's own engines


async def test_an_engine_of_the_users_that_prepares_nothing_needs_no_advice(
    pooled_url: str, producer: Engine
) -> None:
    sync = create_engine(pooled_url, connect_args=NO_STATEMENTS)
    loop = create_async_engine(pooled_url, connect_args=NO_STATEMENTS)
    often = timedelta(seconds=0.2)
    engines: dict[str, Any] = {"engine": sync, "async_engine": loop}
    async with working(shop.jobs, pooled_url, **engines, poll_interval=often) as (_, heard):
        for number in range(30):
            put(producer, shop.note_in_thread, number)
        await heard.settled(30)
    sync.dispose()
    await loop.dispose()

    assert [event.fields for event in heard.named("pooler.detected")] == [{"advice": None}]
    assert heard.statuses() == [DONE] * 30
    assert heard.named("database.error") == []


async def test_an_engine_of_the_users_that_prepares_statements_is_left_alone_and_told_about(
    pooled_url: str,
) -> None:
    loop = create_async_engine(pooled_url)
    sync = create_engine(pooled_url)
    engines: dict[str, Any] = {"engine": sync, "async_engine": loop}
    async with working(shop.jobs, pooled_url, **engines) as (_, heard):
        told = await heard.event("pooler.detected")
    with sync.connect() as connection:
        threshold = driver_of(connection).prepare_threshold
    sync.dispose()
    await loop.dispose()

    assert 'connect_args={"prepare_threshold": None}' in str(told.fields["advice"])
    assert threshold == 5


# -- what others find behind the pooler


async def test_b64_a_worker_leaves_nothing_of_its_own_in_the_poolers_sessions(
    pooler: Pooler, pooled_url: str, producer: Engine, direct: Engine
) -> None:
    settings = "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY name"
    leftovers = (
        "SELECT 'prepared', name FROM pg_prepared_statements UNION ALL "
        "SELECT 'channel', name FROM pg_listening_channels() AS name"
    )
    nobody_else = create_engine(pooled_url, connect_args=NO_STATEMENTS, poolclass=NullPool)
    with nobody_else.connect() as other:
        before = rows(other, settings)
    often = timedelta(seconds=0.2)
    async with working(shop.jobs, pooled_url, poll_interval=often, concurrency=2) as (_, heard):
        await heard.event("listen.unavailable")
        with Session(producer) as session, session.begin():
            for number in range(20):
                session.add(order := Order(customer=f"Ada {number}"))
                enqueue(session, shop.send_receipt, order)
                enqueue(session, shop.note, number)
        await heard.settled(40)
        assert rows(direct, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]

    assert rows(direct, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
    # as many clients at once as the pool has sessions: each looks into another one
    found = []
    with ExitStack() as stack:
        for _ in range(3):
            other = stack.enter_context(nobody_else.connect())
            other.execute(text("SELECT 1"))
            found.append((backend(other), rows(other, settings), rows(other, leftovers)))
    assert len({pid for pid, *_ in found}) == 3
    assert [rest for _, *rest in found] == [[before, []]] * 3
