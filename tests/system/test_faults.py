"""What may happen to a worker's connections, its server and its process: nothing is lost, nothing is twice.

Real processes, a server of this file's own, and a ledger that every job enters exactly once.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import shop
from ledger import Ledger
from processes import TESTS, WorkerProcess, worker_process
from proxy import Mode, Proxy
from shop import Base
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.orm import Session
from workers import execute, rows, until, until_row

from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.tasks import enqueue

pytestmark = pytest.mark.system

NAME = "faulty"  # of the worker's connections
LEASE = ("--lease", "8s", "-q", "files", "-c", "4", "--poll-interval", "1s")
_numbers = count(1)


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedPostgres]:
    """Durable, for it is killed; on TCP too, for the proxy."""
    with EmbeddedPostgres(durable=True, port=0) as running:
        yield running


@pytest.fixture
def database(own_server: EmbeddedPostgres) -> Iterator[str]:
    """The name of a database with the shop's tables."""
    name = f"faults_{next(_numbers)}"
    url = make_url(own_server.create_database(name)).set(drivername="postgresql+psycopg")
    engine = create_engine(url, pool_pre_ping=True)
    Base.metadata.create_all(engine)
    engine.dispose()
    yield name
    own_server.drop_database(name)


@pytest.fixture
def observer(own_server: EmbeddedPostgres, database: str) -> Iterator[Engine]:
    """The test's own way to the database, which no fault touches but the server's end."""
    url = make_url(own_server.url(database)).set(drivername="postgresql+psycopg")
    engine = create_engine(url, pool_pre_ping=True)
    yield engine
    engine.dispose()


@pytest.fixture
def ledger(observer: Engine, tmp_path: Path) -> Ledger:
    return Ledger(observer, tmp_path / "trace")


def sessions(engine: Engine) -> int:
    """How many the workers have on the server."""
    [(found,)] = rows(engine, "SELECT count(*) FROM pg_stat_activity WHERE application_name = :n", n=NAME)
    return int(found)


def named(url: str | URL) -> str:
    """The URL of a worker whose sessions can be told from others."""
    target = make_url(url).update_query_dict({"application_name": NAME})
    return target.set(drivername="postgresql").render_as_string(hide_password=False)


@dataclass
class Scene:
    """A worker that runs jobs of both forms, about half of which hold their session."""

    server: EmbeddedPostgres
    engine: Engine
    ledger: Ledger
    worker: WorkerProcess
    proxy: Proxy | None = None
    before: tuple[int, int] = field(default=(0, 0))

    async def exercise(self) -> None:
        """As many sessions of either kind at once as there can be: the pools are full of connections."""
        for _ in range(2):
            self.ledger.open(8, seconds=0.2, hold=True)
            await self.ledger.closed()

    def measured(self) -> tuple[int, int]:
        """Sessions on the server, and descriptors of the process."""
        return sessions(self.engine), self.worker.descriptors()

    async def back_to_the_start(self) -> None:
        """At most two more, or this waits until its deadline. Fewer: so many were not needed at once."""

        def is_back() -> bool:
            now = self.measured()
            return all(one - other <= 2 for one, other in zip(now, self.before, strict=True))

        await until(is_back)


@asynccontextmanager
async def scene(
    server: EmbeddedPostgres,
    engine: Engine,
    ledger: Ledger,
    url: str,
    log: Path,
    *,
    proxy: Proxy | None = None,
) -> AsyncIterator[Scene]:
    """A worker in the middle of its work; after the block it must be as good as before it."""
    with worker_process(url, log, *LEASE) as worker:
        await until(lambda: "listen.connected" in worker.text())
        it = Scene(server, engine, ledger, worker, proxy)
        await it.exercise()
        it.before = it.measured()
        ledger.open(48, seconds=0.2)
        begun = ledger.starts()
        await until(lambda: ledger.starts() > begun + 6)
        yield it
        healed = time.monotonic()
        await ledger.closed()
        took = time.monotonic() - healed
        await it.exercise()
        await it.back_to_the_start()
        code = worker.stop()

    assert took < 30
    assert code == 0
    ledger.check()
    said = worker.text()
    assert "loop.crashed" not in said
    assert "Traceback" not in said
    await until(lambda: sessions(engine) == 0)


# -- faults

Fault = Callable[[Scene], Awaitable[None]]
TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"


async def backends_terminated_once(it: Scene) -> None:
    await asyncio.to_thread(rows, it.engine, TERMINATE, name=NAME)


async def backends_terminated_in_a_loop(it: Scene) -> None:
    ends = time.monotonic() + 2
    while time.monotonic() < ends:
        await asyncio.to_thread(rows, it.engine, TERMINATE, name=NAME)
        await asyncio.sleep(0.1)


def server_restarted(mode: Any, away: float = 1.0) -> Fault:
    async def fault(it: Scene) -> None:
        it.engine.dispose()
        await asyncio.to_thread(it.server.halt, mode)
        await asyncio.sleep(away)
        await asyncio.to_thread(it.server.resume)
        assert it.worker.text().count("\n") < 60 + 2 * away  # what cannot go on says so now and then

    return fault


def network(mode: Mode, seconds: float) -> Fault:
    async def fault(it: Scene) -> None:
        assert it.proxy is not None
        it.proxy.become(mode)
        await asyncio.sleep(seconds)
        if mode in ("blackhole", "deaf"):
            # a TCP stream cannot go on after a hole; the kernel would have ended it by now or soon
            # (keepalives, tcp_user_timeout), but it thinks that the proxy is alive
            it.proxy.become("reset")
        it.proxy.become("pass")

    return fault


async def read_only_for_a_while(it: Scene) -> None:
    """The server of the worker's sessions writes no more, and says nothing about it."""
    [(name,)] = rows(it.engine, "SELECT current_database()")
    it.server.psql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    rows(it.engine, TERMINATE, name=NAME)  # as at a failover: new sessions meet the standby
    await asyncio.sleep(3)
    it.server.psql(f"ALTER DATABASE {name} RESET default_transaction_read_only")


async def read_only_without_a_word(it: Scene) -> None:
    it.server.psql("ALTER SYSTEM SET default_transaction_read_only = on")
    it.server.psql("SELECT pg_reload_conf()")
    await asyncio.sleep(3)
    it.server.psql(
        "SET default_transaction_read_only = off; ALTER SYSTEM RESET default_transaction_read_only"
    )
    it.server.psql("SELECT pg_reload_conf()")


full = pytest.mark.full


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(backends_terminated_once, id="terminated once", marks=full),
        pytest.param(backends_terminated_in_a_loop, id="terminated in a loop"),
        pytest.param(server_restarted("fast"), id="restart, fast", marks=full),
        pytest.param(server_restarted("immediate"), id="restart, immediate", marks=full),
        pytest.param(server_restarted("kill"), id="restart, killed", marks=full),
        pytest.param(server_restarted("fast", away=60.0), id="B58: a minute without a server", marks=full),
        pytest.param(read_only_for_a_while, id="B65: a standby", marks=full),
        pytest.param(read_only_without_a_word, id="B65: read only", marks=full),
    ],
)
async def test_a_fault_of_the_server_loses_nothing_runs_nothing_twice_and_leaves_nothing_behind(
    own_server: EmbeddedPostgres,
    observer: Engine,
    database: str,
    ledger: Ledger,
    tmp_path: Path,
    fault: Fault,
) -> None:
    url = named(own_server.url(database))

    async with scene(own_server, observer, ledger, url, tmp_path / "log") as it:
        await fault(it)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(network("reset", 2), id="reset", marks=full),
        pytest.param(network("blackhole", 4), id="black hole", marks=full),
        pytest.param(network("blackhole", 12), id="black hole, longer than the lease", marks=full),
        pytest.param(network("deaf", 4), id="deaf", marks=full),
        pytest.param(network("slow", 5), id="slow", marks=full),
    ],
)
async def test_a_fault_of_the_network_loses_nothing_runs_nothing_twice_and_leaves_nothing_behind(
    own_server: EmbeddedPostgres,
    observer: Engine,
    database: str,
    ledger: Ledger,
    tmp_path: Path,
    fault: Fault,
) -> None:
    with Proxy(own_server.tcp_url(database)) as proxy:
        url = named(proxy.url)

        async with scene(own_server, observer, ledger, url, tmp_path / "log", proxy=proxy) as it:
            await fault(it)


@pytest.mark.parametrize("way", [pytest.param("blackhole", marks=full), "deaf"])
@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=full)])
async def test_a_stop_behind_a_dead_network_takes_little_more_than_the_drain_time(
    own_server: EmbeddedPostgres,
    observer: Engine,
    database: str,
    ledger: Ledger,
    tmp_path: Path,
    way: Mode,
    busy: bool,
) -> None:
    """Whoever stops it (Kubernetes, say) kills it after its grace period."""
    options = ("--lease", "60s", "-q", "files", "-c", "4", "--poll-interval", "1s", "--drain-timeout", "2s")
    with (
        Proxy(own_server.tcp_url(database)) as proxy,
        worker_process(named(proxy.url), tmp_path / "log", *options) as worker,
    ):
        await until(lambda: "listen.connected" in worker.text())
        if busy:
            ledger.open(12, seconds=0.7)
            await until(lambda: ledger.starts() > 6)
        proxy.become(way)
        if not busy:
            await until(lambda: proxy.swallowed > 0)  # a claim, whose answer will not come
        began = time.monotonic()
        code = worker.stop()
        took = time.monotonic() - began

    assert code == (6 if busy else 0)
    assert took < 2 + 4 + 1.5  # the drain, the farewell, the process's own end


# -- limits that an administrator sets


async def test_b55_the_time_limits_of_a_role_end_a_handlers_own_statement_and_nothing_else(
    own_server: EmbeddedPostgres, observer: Engine, database: str, ledger: Ledger, tmp_path: Path
) -> None:
    own_server.psql(
        "DROP ROLE IF EXISTS hasty; CREATE ROLE hasty LOGIN; "
        "ALTER ROLE hasty SET statement_timeout = '300ms'; "
        "ALTER ROLE hasty SET lock_timeout = '200ms'; "
        "ALTER ROLE hasty SET idle_in_transaction_session_timeout = '500ms'"
    )
    for kind in ("TABLES", "SEQUENCES"):
        own_server.psql(f"GRANT ALL ON ALL {kind} IN SCHEMA public TO hasty", database)
    url = named(make_url(own_server.tcp_url(database)).set(username="hasty"))
    with Session(observer) as session, session.begin():
        slow = enqueue(session, shop.query_for, 1.0)
    oldest: list[float] = []
    age = (
        "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 "
        "FROM pg_stat_activity WHERE application_name = :name AND state = 'idle in transaction'"
    )

    with worker_process(url, tmp_path / "log", *LEASE) as worker:
        await until_row(observer, "SELECT 1 FROM background_jobs WHERE status = 'failed'")
        ledger.open(8, seconds=1.2, hold=False)
        while not rows(observer, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 8"):
            oldest.append((await asyncio.to_thread(rows, observer, age, name=NAME))[0][0])
            assert worker.process.poll() is None
            await asyncio.sleep(0.02)
        code = worker.stop()

    assert code == 0
    [(failed, error)] = rows(observer, "SELECT id, last_error FROM background_jobs")
    execute(observer, "DELETE FROM background_jobs")
    assert failed == slow.id
    assert "statement timeout" in error
    ledger.check()
    assert rows(observer, "SELECT max(attempts) FROM background_jobs_archive") == [(1,)]
    assert max(oldest) < 0.3
    said = worker.text()
    assert [word for word in ("database.error", "lease.lost", "idle-in-transaction") if word in said] == []


async def test_b56_handlers_that_hold_all_sessions_of_a_small_pool_lose_no_lease(
    own_server: EmbeddedPostgres, observer: Engine, database: str, ledger: Ledger, tmp_path: Path
) -> None:
    """Ten at once on two connections of either kind, so that the last wait for longer than a lease."""
    url = make_url(named(own_server.url(database))).set(drivername="postgresql+psycopg")
    (tmp_path / "small.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "from sqlalchemy import create_engine\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "from shop import jobs\n"
        "pool = dict(pool_size=2, max_overflow=0, pool_timeout=5)\n"
        f"url = {url.render_as_string(hide_password=False)!r}\n"
        "jobs.engine, jobs.async_engine = create_engine(url, **pool), create_async_engine(url, **pool)\n",
        encoding="utf-8",
    )
    ledger.open(16, seconds=1.0, hold=True)
    most = 0

    options = ("--lease", "4s", "-q", "files", "-c", "10", "--poll-interval", "1s")
    with worker_process("", tmp_path / "log", *options, app="small:jobs", folder=tmp_path) as worker:
        while not rows(observer, "SELECT 1 FROM background_jobs_archive HAVING count(*) = 16"):
            most = max(most, await asyncio.to_thread(sessions, observer))
            assert worker.process.poll() is None
            await asyncio.sleep(0.05)
        code = worker.stop()

    assert code == 0
    said = worker.text()
    assert "(engine in code)" in said
    assert [word for word in ("lease.lost", "job.rescued", "database.error") if word in said] == []
    ledger.check()
    assert most <= 2 + 2 + 4  # the pools, and claims, settles, leases, LISTEN beside them


# -- workers that die


@full
@pytest.mark.parametrize("rounds", [3, 8])
async def test_of_two_workers_one_after_the_other_is_killed_at_any_moment(
    own_server: EmbeddedPostgres,
    observer: Engine,
    database: str,
    ledger: Ledger,
    tmp_path: Path,
    rounds: int,
) -> None:
    url = named(own_server.url(database))
    options = ("--lease", "2s", "-q", "files", "-c", "4", "--poll-interval", "500ms")
    ledger.open(40 * rounds, seconds=0.1)
    numbers = count(1)
    with ExitStack() as living:

        def another() -> WorkerProcess:
            return living.enter_context(worker_process(url, tmp_path / f"log{next(numbers)}", *options))

        workers = [another(), another()]
        killed: list[int] = []
        for _ in range(rounds):
            victim = workers.pop(0)
            await until(lambda victim=victim: f" {victim.pid} " in ledger.trace.read_text())  # type: ignore[misc]
            threading.Event().wait(random.random())  # any moment
            victim.kill()
            killed.append(victim.pid)
            workers.append(another())
        last = time.monotonic()
        await ledger.closed()
        took = time.monotonic() - last
        codes = [worker.stop() for worker in workers]

    assert took < 30
    assert codes == [0, 0]
    ledger.check(killed=killed)
    await until(lambda: sessions(observer) == 0)
