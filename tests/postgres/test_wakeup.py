"""LISTEN: proven before it is believed, replaced when it falls silent, and what a worker says without it."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import psycopg
import pytest
import shop
from proxy import Proxy
from shop import Job
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session
from workers import PATIENCE, Heard, execute, rows, until, until_row, working

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.errors import ConfigurationError
from sqla_jobs.events import Event, Events
from sqla_jobs.models import tables_of
from sqla_jobs.store.door import lane_on
from sqla_jobs.tasks import Jobs, Task, enqueue
from sqla_jobs.worker import wakeup
from sqla_jobs.worker.engines import Engines
from sqla_jobs.worker.wakeup import Wakeups

DONE = JobStatus.DONE
NEVER = timedelta(hours=1)  # a poll interval: only a wake-up can be in time


@pytest.fixture(autouse=True)
def _forget_calls() -> Iterator[None]:
    shop.calls.clear()
    yield
    shop.calls.clear()


@pytest.fixture
def _probes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes half a minute in life."""
    monkeypatch.setattr(wakeup, "_PROBE_EVERY", (0.05, 0.1))
    monkeypatch.setattr(wakeup, "_ANSWER_LIMIT", 0.5)
    monkeypatch.setattr(wakeup, "_FIRST_ANSWER_LIMIT", 0.5)
    monkeypatch.setattr(wakeup, "_WHILE_DEAF", (0.05, 0.1))
    monkeypatch.setattr(wakeup, "_AFTER_LOSS", (0.05, 0.2))


@pytest.fixture(scope="module")
def tcp_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(durable=False, port=0) as server:
        engine = create_engine(psycopg_url(server.create_database("template_shop")))
        shop.Base.metadata.create_all(engine)
        engine.dispose()
        yield server


@pytest.fixture
def tcp_url(tcp_server: EmbeddedPostgres) -> Iterator[str]:
    tcp_server.create_database("shop", template="template_shop")
    yield tcp_server.tcp_url("shop")
    tcp_server.drop_database("shop")


@pytest.fixture
def tcp_engine(tcp_url: str) -> Iterator[Engine]:
    engine = create_engine(psycopg_url(tcp_url))
    yield engine
    engine.dispose()


@pytest.fixture
def proxy(tcp_url: str) -> Iterator[Proxy]:
    with Proxy(tcp_url) as proxy:
        yield proxy


def psycopg_url(url: str | URL, *, user: str = "postgres", **query: str) -> str:
    chosen = make_url(url).set(drivername="postgresql+psycopg", username=user).update_query_dict(query)
    return chosen.render_as_string(hide_password=False)


def put(engine: Engine, task: Task[Any], *args: Any, **kwargs: Any) -> int:
    """Enqueue and commit; the job's id."""
    with Session(engine) as session, session.begin():
        handle = enqueue(session, task, *args, **kwargs)
    return handle.id


def connected(times: int) -> Callable[[Heard], bool]:
    return lambda heard: len(heard.named("listen.connected")) >= times


SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = :name"


def sessions(engine: Engine, name: str) -> int:
    [(count,)] = rows(engine, SESSIONS, name=name)
    return int(count)


# -- alone, with a probe in our hands


class Listener:
    """Wakeups on a real connection; the probes go where the test says."""

    def __init__(self, engine: Engine | AsyncEngine, *, probe: Callable[[Any], Any]) -> None:
        self.alive: list[bool] = []
        self.told: list[Event] = []
        events = Events()
        events.subscribe(self.told.append)
        self.wakeups = Wakeups(
            tables_of(Job),
            engine,
            own_url=False,
            poll=5.0,
            on_lane=probe,
            woken=lambda queue, due_in: None,
            alive=self.alive.append,
            events=events,
        )

    def named(self, name: str) -> list[Event]:
        return [event for event in self.told if event.name == name]


@pytest.fixture(params=["thread", "loop"])
async def listens_on(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[Any]:
    """Either kind of engine."""
    url = psycopg_url(database_url)
    if request.param == "thread":
        engine = create_engine(url)
        yield engine
        engine.dispose()
    else:
        async_engine = create_async_engine(url)
        yield async_engine
        await async_engine.dispose()


@asynccontextmanager
async def running(listener: Listener) -> AsyncIterator[None]:
    task = asyncio.create_task(listener.wakeups.listen())
    try:
        yield
    finally:
        task.cancel()
        with anyio.fail_after(PATIENCE):
            await asyncio.wait({task})


async def test_a_listener_is_not_believed_before_a_message_has_arrived(
    listens_on: Any, engine: Engine, database_url: str
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()
    lane = lane_on(engine, "probes")

    async def probe(verb: Callable[[Connection], Any]) -> Any:
        asked.set()
        await go_on.wait()
        return await lane.run(verb, deadline=PATIENCE)

    listener = Listener(listens_on, probe=probe)
    async with running(listener):
        with anyio.fail_after(PATIENCE):
            await asked.wait()
        before = list(listener.alive), listener.told[:]
        go_on.set()
        await until(lambda: listener.alive == [True])

    assert before == ([], [])
    assert [event.name for event in listener.told] == ["listen.connected"]
    await lane.close()


async def test_b60_what_is_committed_when_the_look_begins_is_heard(listens_on: Any, engine: Engine) -> None:
    """First LISTEN, then look: a job committed in between is found twice, and never not at all."""
    lane = lane_on(engine, "probes")
    listener = Listener(listens_on, probe=lambda verb: lane.run(verb, deadline=PATIENCE))
    looked: list[bool] = []
    heard: list[str | None] = []

    def look(alive: bool) -> None:
        looked.append(alive)
        if looked == [True]:
            put(engine, shop.note, 1)

    listener.wakeups._alive = look
    listener.wakeups._woken = lambda queue, due_in: heard.append(queue)
    async with running(listener):
        await until(lambda: bool(heard))

    assert heard == ["default"]
    await lane.close()


@pytest.mark.usefixtures("_probes_often")
async def test_a_probe_that_cannot_be_sent_says_nothing_about_the_listener(
    listens_on: Any, engine: Engine
) -> None:
    """The claim lane is at fault: a new LISTEN connection would be for nothing, and polling a pity."""
    sent = 0
    lane = lane_on(engine, "probes")

    async def probe(verb: Callable[[Connection], Any]) -> Any:
        nonlocal sent
        sent += 1
        if sent == 1 or 3 < sent < 8:
            raise OSError("the other connection is broken")
        return await lane.run(verb, deadline=PATIENCE)

    listener = Listener(listens_on, probe=probe)
    async with running(listener):
        await until(lambda: sent > 9)

    assert listener.alive == [True]
    assert [event.name for event in listener.told] == ["listen.connected"]
    await lane.close()


@pytest.mark.usefixtures("_probes_often")
async def test_a_connection_on_which_nothing_arrives_is_told_once_and_tried_again_quietly(
    listens_on: Any, engine: Engine
) -> None:
    sent: list[str] = []
    lane = lane_on(engine, "probes")

    async def probe(verb: Callable[[Connection], Any]) -> Any:
        sent.append(verb.keywords["channel"])  # type: ignore[attr-defined]
        if len(sent) > 3:
            await lane.run(verb, deadline=PATIENCE)

    listener = Listener(listens_on, probe=probe)
    async with running(listener):
        await until(lambda: bool(listener.named("listen.connected")))

    [told] = listener.named("listen.unavailable")
    assert told.fields["reason"] == (
        "notifications do not arrive (a pooler in transaction mode?): polling every 5 s; "
        "give --listen-database-url, a direct one"
    )
    assert len(set(sent[:4])) == 4  # a new connection and a new channel each time
    assert listener.alive[-1] is True
    await lane.close()


@pytest.mark.usefixtures("_probes_often")
async def test_a_listener_that_falls_silent_is_replaced(
    listens_on: Any, engine: Engine, database_url: str
) -> None:
    sent: list[str] = []
    lane = lane_on(engine, "probes")

    async def probe(verb: Callable[[Connection], Any]) -> Any:
        sent.append(verb.keywords["channel"])  # type: ignore[attr-defined]
        if sent.count(sent[0]) < 3 or sent[-1] != sent[0]:
            await lane.run(verb, deadline=PATIENCE)

    pool = getattr(listens_on, "sync_engine", listens_on)
    connections: list[object] = []
    event.listen(pool, "connect", lambda connection, _: connections.append(connection))
    listener = Listener(listens_on, probe=probe)
    async with running(listener):
        await until(lambda: len(listener.named("listen.connected")) == 2)

    assert len(connections) == 2
    [lost] = listener.named("listen.lost")
    assert "did not arrive within 0.5 s" in str(lost.fields["error"])
    assert listener.alive[:3] == [True, False, True]
    await lane.close()


# -- in a worker


@pytest.mark.usefixtures("_probes_often")
async def test_b59_a_listener_in_a_black_hole_is_noticed_and_replaced(
    tcp_url: str, tcp_engine: Engine, proxy: Proxy
) -> None:
    async with working(shop.jobs, tcp_url, listen_url=proxy.url, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        proxy.become("blackhole")

        await heard.event("listen.lost")
        proxy.become("pass")
        await heard.until(connected(2))
        put(tcp_engine, shop.note, 1)
        await heard.settled(1)

    assert shop.calls == [1]


async def test_connecting_into_a_black_hole_ends_and_is_tried_again(
    tcp_url: str, tcp_engine: Engine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "_CONNECT_LIMIT", 0.5)
    monkeypatch.setattr(wakeup, "_AFTER_LOSS", (0.05, 0.2))
    proxy.become("blackhole")
    async with working(shop.jobs, tcp_url, listen_url=proxy.url, poll_interval=NEVER) as (_, heard):
        await heard.until(lambda heard: len(heard.named("listen.lost")) == 2)
        proxy.become("pass")

        await heard.event("listen.connected")
        put(tcp_engine, shop.note, 1)
        await heard.settled(1)

    assert "no connection within the deadline" in str(heard.named("listen.lost")[0].fields["error"])


async def test_a_worker_that_does_not_listen_says_so_once(database_url: str, engine: Engine) -> None:
    put(engine, shop.note, 1)

    often = timedelta(seconds=0.2)
    async with working(shop.jobs, database_url, listen=False, poll_interval=often) as (_, heard):
        await heard.settled(1)

    [told] = heard.named("listen.unavailable")
    assert told.fields == {"reason": "switched off: polling every 0.2 s"}


@pytest.mark.usefixtures("_probes_often")
async def test_a_listen_url_that_names_another_database_is_told_and_jobs_run_by_polling(
    server: EmbeddedPostgres, template: str, database_url: str, engine: Engine
) -> None:
    other = server.create_database("another_shop", template=template)
    often = timedelta(seconds=0.2)
    async with working(shop.jobs, database_url, listen_url=other, poll_interval=often) as (_, heard):
        told = await heard.event("listen.unavailable")
        put(engine, shop.note, 1)
        await heard.settled(1)
    server.drop_database("another_shop")

    assert told.fields["reason"] == (
        "notifications do not arrive: polling every 0.2 s; does the listen URL name the same database?"
    )
    assert len(heard.named("listen.unavailable")) == 1


async def test_a_driver_that_cannot_listen_is_told_and_a_listen_url_helps(
    tcp_url: str, tcp_engine: Engine
) -> None:
    only_async = Jobs(Job)

    @only_async.task(name="note")
    async def note(value: int) -> None:
        shop.calls.append(value)

    asyncpg = create_async_engine(make_url(tcp_url).set(drivername="postgresql+asyncpg"))
    often = timedelta(seconds=0.2)
    async with working(only_async, tcp_url, async_engine=asyncpg, poll_interval=often) as (_, heard):
        told = await heard.event("listen.unavailable")
        put(tcp_engine, note, 1)
        await heard.settled(1)
    options: dict[str, Any] = {"async_engine": asyncpg, "listen_url": tcp_url, "poll_interval": NEVER}
    async with working(only_async, tcp_url, **options) as (_, heard):
        await heard.event("listen.connected")
        put(tcp_engine, note, 2)
        await heard.settled(1)
    await asyncpg.dispose()

    assert str(told.fields["reason"]).startswith("the engine's driver is not psycopg: polling every 0.2 s")
    assert shop.calls == [1, 2]


async def test_of_two_engines_the_one_whose_driver_can_listen_does(tcp_url: str, tcp_engine: Engine) -> None:
    asyncpg = create_async_engine(make_url(tcp_url).set(drivername="postgresql+asyncpg"))
    sync = create_engine(psycopg_url(tcp_url))
    engines: dict[str, Any] = {"engine": sync, "async_engine": asyncpg}
    async with working(shop.jobs, tcp_url, **engines, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        put(tcp_engine, shop.note, 1)
        await heard.settled(1)
    sync.dispose()
    await asyncpg.dispose()


async def test_listen_goes_through_the_users_creator(database_url: str, engine: Engine) -> None:
    only_sync = Jobs(Job)

    @only_sync.task(name="note")
    def note(value: int) -> None:
        shop.calls.append(value)

    def creator() -> Any:
        return psycopg.connect(database_url, application_name="made by the user")

    own = create_engine("postgresql+psycopg://nobody@nowhere.invalid/", creator=creator)
    async with working(only_sync, database_url, engine=own, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        names = rows(
            engine,
            "SELECT application_name FROM pg_stat_activity WHERE query LIKE '%clock_timestamp())::float8'",
        )
    own.dispose()

    assert ("made by the user",) in names


async def test_a_listener_that_is_replaced_leaves_no_backend_behind(
    tcp_url: str, tcp_engine: Engine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "_PROBE_EVERY", (0.05, 0.1))
    monkeypatch.setattr(wakeup, "_ANSWER_LIMIT", 0.3)
    url = proxy.url.update_query_dict({"application_name": "listener"})
    async with working(shop.jobs, tcp_url, listen_url=url) as (_, heard):
        for times in range(1, 4):
            await heard.until(connected(times))
            proxy.become("blackhole")
            await heard.until(lambda heard, times=times: len(heard.named("listen.lost")) >= times)  # type: ignore[misc]
            proxy.become("pass")
        await heard.until(connected(4))

        await until(lambda: sessions(tcp_engine, "listener") == 1)


async def test_b60_nothing_is_missed_while_the_listener_is_cut_again_and_again(
    database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LISTEN, then look: whatever was committed in the gap is found at once, and not by the poll."""
    monkeypatch.setattr(wakeup, "_AFTER_LOSS", (0.02, 0.1))
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'listener' AND query LIKE '%clock_timestamp%'"
    )
    url = psycopg_url(database_url, application_name="listener")
    async with working(shop.jobs, database_url, listen_url=url, poll_interval=NEVER) as (_, heard):
        for times in range(1, 21):
            await heard.until(connected(times))
            await until_row(engine, cut)
            put(engine, shop.note, times)
        await heard.until(connected(21))
        back = time.monotonic()
        await heard.settled(20)
        late = time.monotonic() - back

    assert sorted(shop.calls) == list(range(1, 21))  # type: ignore[type-var]
    assert late < 2


async def test_b19_a_listener_that_is_refused_again_and_again_leaks_nothing(
    server: EmbeddedPostgres, database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "_AFTER_LOSS", (0.005, 0.01))
    server.psql("DROP ROLE IF EXISTS ear; CREATE ROLE ear LOGIN")
    url = psycopg_url(database_url, user="ear", application_name="listener")
    async with working(shop.jobs, database_url, listen_url=url, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        descriptors = len(os.listdir("/proc/self/fd"))
        server.psql("ALTER ROLE ear NOLOGIN")
        await until_row(
            engine, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'ear'"
        )
        await heard.until(lambda heard: len(heard.named("listen.lost")) > 50)

        server.psql("ALTER ROLE ear LOGIN")
        await heard.until(connected(2))

        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
        await until(lambda: sessions(engine, "listener") == 1)


@pytest.mark.full
async def test_b19_a_worker_whose_connections_are_all_ended_again_and_again_leaks_nothing(
    database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "_AFTER_LOSS", (0.005, 0.01))
    often = timedelta(seconds=0.1)
    url = psycopg_url(database_url, application_name="worker")
    end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'worker'"
    async with working(shop.jobs, url, poll_interval=often, concurrency=2) as (_, heard):
        await heard.event("listen.connected")
        put(engine, shop.note, 0)
        await heard.settled(1)
        descriptors, before = len(os.listdir("/proc/self/fd")), sessions(engine, "worker")
        for times in range(2, 102):
            await asyncio.to_thread(rows, engine, end)
            await heard.until(connected(times))
        put(engine, shop.note, 1)
        await heard.settled(2)

        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
        assert sessions(engine, "worker") <= before + 2
    assert shop.calls == [0, 1]
    await until(lambda: sessions(engine, "worker") == 0)


# -- servers that freeze, refuse, or write no more


async def test_a_table_locked_for_many_deadlines_does_not_fill_the_server_with_a_workers_sessions(
    database_url: str, engine: Engine
) -> None:
    url = psycopg_url(database_url, application_name="worker")
    often: dict[str, Any] = {"poll_interval": timedelta(seconds=0.1), "lease": timedelta(seconds=2)}
    most = 0
    async with working(shop.jobs, url, **often) as (_, heard):
        await heard.event("listen.connected")
        with engine.begin() as keeper:
            keeper.execute(text("LOCK TABLE background_jobs IN ACCESS EXCLUSIVE MODE"))
            while len(heard.named("database.error")) < 6:
                await heard.until(lambda heard: True)
                most = max(most, sessions(engine, "worker"))
                with anyio.move_on_after(0.05):
                    await anyio.Event().wait()
        put(engine, shop.note, 1)
        await heard.settled(1)

    assert most <= 4 + 2  # claims, settles, leases, LISTEN; and what has been told to end


async def test_b65_a_worker_leaves_a_server_that_has_become_read_only_and_comes_back(
    server: EmbeddedPostgres, database_url: str, engine: Engine
) -> None:
    name = make_url(database_url).database
    put(engine, shop.note, 0)  # this connection stays, and may write
    url = psycopg_url(database_url, application_name="worker")
    end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'worker'"
    async with working(shop.jobs, url, poll_interval=timedelta(seconds=0.2)) as (_, heard):
        await heard.event("listen.connected")
        await heard.settled(1)
        server.psql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        await asyncio.to_thread(rows, engine, end)
        put(engine, shop.note, 1)
        await heard.until(lambda heard: "read-only" in str(heard.named("database.error")))

        server.psql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        back = time.monotonic()
        await heard.settled(2)

    assert time.monotonic() - back < 10
    assert shop.calls == [0, 1]


def test_the_pool_for_handlers_leaves_a_read_only_server_too(database_url: str) -> None:
    engines = Engines.choose(engine=None, async_engine=None, url=database_url, concurrency=2)
    assert engines.sync is not None
    insert = text("INSERT INTO background_jobs (kind) VALUES ('x')")
    with engines.sync.connect() as first:
        first.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
        first.commit()
        with pytest.raises(DBAPIError, match="read-only"):
            first.execute(insert)

    with engines.sync.connect() as second:
        second.execute(insert)
    engines.sync.dispose()


async def test_a_server_without_room_for_the_listener_costs_wake_ups_and_nothing_else(
    server: EmbeddedPostgres, database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "_AFTER_LOSS", (0.05, 0.1))
    server.psql("DROP ROLE IF EXISTS crowded; CREATE ROLE crowded LOGIN CONNECTION LIMIT 3")
    server.psql(
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO crowded; "
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO crowded",
        str(make_url(database_url).database),
    )
    url = psycopg_url(database_url, user="crowded")
    often = timedelta(seconds=0.2)
    async with working(shop.jobs, url, poll_interval=often) as (_, heard):
        await heard.until(lambda heard: len(heard.named("listen.lost")) >= 3)
        put(engine, shop.note, 1)
        await heard.settled(1)

        server.psql("ALTER ROLE crowded CONNECTION LIMIT 10")
        await heard.event("listen.connected")

    assert "too many connections" in str(heard.named("listen.lost")[0].fields["error"])
    server.psql("DROP OWNED BY crowded", str(make_url(database_url).database))


# -- names: table V2 of the field reports

ACCEPTED = [
    "q" * 63, "q" * 64, "q" * 63 + "a", "q" * 63 + "b", "é" * 32, "default", "select", "user",
    "MyQueue", "myqueue", "a.b", "a:b", "a-b", "a/b", "a b",
    'x"; drop table canary; --', "x'); select pg_sleep(5); --",
    "100%", "%s", "%(x)s", "{0}", ":p", "a\\b", "a\nb", "a\tb", "😀", "队列", "e\u0301", "\u00e9",
    "*", " a ", "0 1 x",
]  # fmt: skip
REFUSED = ["", "   ", "a\0b", "q" * 201, "é" * 101, "\ud800"]


async def test_b70_b71_a_queue_of_any_accepted_name_wakes_its_worker(
    database_url: str, engine: Engine
) -> None:
    jobs = Jobs(Job)
    ran: list[str] = []

    @jobs.task(name="note")
    async def note(queue: str) -> None:
        ran.append(queue)

    execute(engine, "CREATE TABLE canary (n int)")
    async with working(jobs, database_url, queues=ACCEPTED, poll_interval=timedelta(seconds=60)) as (
        _,
        heard,
    ):
        await heard.event("listen.connected")
        for number, queue in enumerate(ACCEPTED):
            put(engine, note.using(queue=queue), queue)
            with anyio.fail_after(5):
                await heard.settled(number + 1)

    claimed: list[Any] = [job for event in heard.named("job.claimed") for job in event.fields["jobs"]]  # type: ignore[attr-defined]
    assert [job.lease.queue for job in claimed] == ACCEPTED
    assert ran == ACCEPTED
    assert rows(engine, "SELECT count(*) FROM canary") == [(0,)]


async def test_a_wake_up_for_one_queue_claims_from_no_other(database_url: str, engine: Engine) -> None:
    """Names that are equal in their first 63 bytes, or but for their case, are two queues."""
    jobs = Jobs(Job)

    @jobs.task(name="note")
    async def note() -> None:
        pass

    names = ["q" * 63 + "a", "MyQueue", "\u00e9"]
    others = ["q" * 63 + "b", "myqueue", "e\u0301"]
    async with working(jobs, database_url, queues=names, poll_interval=NEVER) as (_, heard):
        await heard.event("listen.connected")
        for queue in (*others, *names):
            put(engine, note.using(queue=queue))
        await heard.settled(3)

    left = rows(engine, "SELECT queue FROM background_jobs ORDER BY id")
    assert left == [(queue,) for queue in others]


@pytest.mark.parametrize("name", REFUSED, ids=repr)
def test_a_name_that_cannot_be_a_queue_is_refused_at_definition_and_at_enqueue(name: str) -> None:
    jobs = Jobs(Job)

    with pytest.raises(ConfigurationError, match="queue"):

        @jobs.task(queue=name)
        def never() -> None: ...

    with pytest.raises(ConfigurationError, match="queue"):
        shop.note.using(queue=name)
