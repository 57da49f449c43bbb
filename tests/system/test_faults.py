"""Real workers and a world that breaks: nothing is lost, no effect is there twice, nothing leaks.

Jobs write one entry each through ctx.session. After every fault each has exactly one, within 30 seconds,
under a lease of 10 seconds or less; server sessions and descriptors of the worker are as many as before.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import shop
from processes import TESTS, WorkerProcess, worker_process
from proxy import Proxy
from shop import Base
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.orm import Session
from workers import execute, rows, until, until_row

from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.tasks import enqueue

pytestmark = pytest.mark.system

JOBS = 40
QUICK = ("--lease", "4s", "-q", "ledger", "-c", "4", "--poll-interval", "500ms", "--drain-timeout", "10s")
APP = "a_worker_under_test"
SESSIONS = f"SELECT pid FROM pg_stat_activity WHERE application_name LIKE '{APP}%'"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server that a proxy can reach, and whose settings may be changed."""
    with EmbeddedPostgres(durable=False, port=0) as running:
        yield running


@pytest.fixture
def engine(server: EmbeddedPostgres) -> Iterator[Engine]:
    engine = create_engine(make_url(server.tcp_url()).set(drivername="postgresql+psycopg"))
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def proxy(server: EmbeddedPostgres) -> Iterator[Proxy]:
    with Proxy(server.tcp_url()) as proxy:
        yield proxy


def named(url: str, name: str = APP, **query: str) -> str:
    """The URL of a worker that can be told from others."""
    made = make_url(url).update_query_dict({"application_name": name} | query)
    return made.set(drivername="postgresql").render_as_string(hide_password=False)


def put(engine: Engine, *, count: int = JOBS, seconds: float = 0.1) -> None:
    """Half of them for threads, half for the loop."""
    with Session(engine) as session, session.begin():
        for number in range(count):
            enqueue(session, (shop.charge, shop.charge_async)[number % 2], number, seconds)


async def some_done(engine: Engine, count: int = 5) -> None:
    await until_row(engine, "SELECT 1 FROM ledger HAVING count(*) >= :count", count=count)


async def all_done(engine: Engine, *, count: int = JOBS) -> None:
    """Every job is done, and its entry is there once."""
    try:
        await until_row(
            engine,
            "SELECT 1 FROM background_jobs_archive HAVING count(*) = :count",
            patience=30,
            count=count,
        )
    except TimeoutError:
        left = rows(
            engine, "SELECT id, status, attempts, run_at - now(), locked_until - now() FROM background_jobs"
        )
        raise AssertionError(f"left: {left}") from None
    assert rows(engine, "SELECT number FROM ledger ORDER BY number") == [(number,) for number in range(count)]
    assert rows(engine, "SELECT count(*) FROM background_jobs") == [(0,)]


class Size:
    """How many sessions of the server and descriptors a worker holds."""

    def __init__(self, engine: Engine, worker: WorkerProcess) -> None:
        self.engine = engine
        self.worker = worker
        self.before = self.now()

    def now(self) -> tuple[int, int]:
        sessions = len(rows(self.engine, SESSIONS))
        return sessions, len(list(Path(f"/proc/{self.worker.pid}/fd").iterdir()))

    async def is_as_before(self) -> None:
        """Until both are what they were, give or take two.

        With more jobs meanwhile: a pool finds out about a dead connection when it gives it out.
        """
        for _ in range(10):
            if all(a <= b + 2 for a, b in zip(self.now(), self.before, strict=True)):
                return
            await more_done(self.engine)
        raise AssertionError(f"sessions, descriptors: before {self.before}, now {self.now()}")


async def more_done(engine: Engine, count: int = 8) -> None:
    """Run a few jobs."""
    execute(engine, "TRUNCATE ledger, background_jobs_archive")
    put(engine, count=count, seconds=0.2)
    await all_done(engine, count=count)


async def warm(engine: Engine, worker: WorkerProcess) -> Size:
    """Run a few jobs, so that every pool has what it will have."""
    await more_done(engine)
    execute(engine, "TRUNCATE ledger, background_jobs_archive")
    return Size(engine, worker)


@pytest.mark.parametrize("mode", ["reset", "blackhole", pytest.param("deaf", marks=pytest.mark.full), "slow"])
async def test_a_network_that_breaks_for_a_while_loses_nothing(
    engine: Engine, proxy: Proxy, tmp_path: Path, mode: Any
) -> None:
    url = named(proxy.url.render_as_string(hide_password=False))
    with worker_process(url, tmp_path / "log", *QUICK) as worker:
        size = await warm(engine, worker)
        put(engine)
        await some_done(engine)

        proxy.become(mode)
        if mode == "slow":
            await some_done(engine, 10)
        elif mode == "reset":
            await until(lambda: "database.error" in worker.text())
        else:
            # until it has given up what it held: what was swallowed will never be answered
            await until(lambda: "lease.lost" in worker.text())
        proxy.become("pass")

        await all_done(engine)
        await size.is_as_before()
        assert worker.stop() == 0


@pytest.mark.parametrize("times", [1, 15])
async def test_ending_every_session_of_a_worker_loses_nothing(
    engine: Engine, server: EmbeddedPostgres, tmp_path: Path, times: int
) -> None:
    with worker_process(named(server.tcp_url()), tmp_path / "log", *QUICK) as worker:
        size = await warm(engine, worker)
        put(engine)
        await some_done(engine)

        for _ in range(times):
            execute(engine, f"SELECT pg_terminate_backend(pid) FROM ({SESSIONS}) AS its")
            await until(lambda: len(rows(engine, SESSIONS)) >= 2)

        await all_done(engine)
        await size.is_as_before()
        assert worker.stop() == 0


async def test_b55_short_timeouts_of_its_role_do_not_stop_a_worker(
    engine: Engine, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Jobs of a second under a statement_timeout of 300 ms: none of ours holds a transaction meanwhile."""
    options = "-c statement_timeout=300ms -c lock_timeout=200ms -c idle_in_transaction_session_timeout=500ms"
    with worker_process(named(server.tcp_url(), options=options), tmp_path / "log", *QUICK) as worker:
        put(engine, count=12, seconds=1.0)

        await all_done(engine, count=12)
        assert worker.stop() == 0

    assert "25P03" not in worker.text()
    assert rows(engine, "SELECT DISTINCT attempt FROM ledger") == [(1,)]


async def test_b65_a_server_that_is_read_only_for_a_while_loses_nothing(
    engine: Engine, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    with worker_process(named(server.tcp_url()), tmp_path / "log", *QUICK) as worker:
        size = await warm(engine, worker)
        put(engine)
        await some_done(engine)

        _alter(engine, "on")
        await until(lambda: "database.error" in worker.text())
        _alter(engine, "off")

        await all_done(engine)
        await size.is_as_before()
        assert worker.stop() == 0


def _alter(engine: Engine, value: str) -> None:
    """For everybody, at once, as after a failover."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("SET default_transaction_read_only = off")
        connection.exec_driver_sql(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
        connection.exec_driver_sql("RESET default_transaction_read_only")
    engine.dispose()


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 8)]])
async def test_workers_killed_at_random_moments_lose_nothing(
    engine: Engine, server: EmbeddedPostgres, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    put(engine, seconds=0.2)
    with ExitStack() as stack:

        def start(number: int) -> WorkerProcess:
            url = named(server.tcp_url())
            return stack.enter_context(worker_process(url, tmp_path / f"log{number}", *QUICK))

        workers = [start(0), start(1)]
        for number in range(2, 5):
            await some_done(engine, chance.randrange(2, 30))
            os.kill(workers.pop(0).pid, signal.SIGKILL)
            workers.append(start(number))

        await all_done(engine)
        assert [worker.stop() for worker in workers] == [0, 0]
        text = "".join((tmp_path / f"log{number}").read_text() for number in range(5))

    assert "job.failed" not in text


async def test_b56_a_pool_of_two_for_ten_handlers_loses_no_lease(
    engine: Engine, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    (tmp_path / "small.py").write_text(
        "import os, sys\n"
        f"sys.path.append({str(TESTS)!r})\n"
        "from sqlalchemy import create_engine\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "from shop import jobs\n"
        "url = os.environ['DATABASE_URL'].replace('postgresql:', 'postgresql+psycopg:')\n"
        "small = {'pool_size': 2, 'max_overflow': 0, 'pool_timeout': 5}\n"
        "jobs.engine = create_engine(url, **small)\n"
        "jobs.async_engine = create_async_engine(url, **small)\n"
    )
    options = ("--lease", "2s", "-q", "ledger", "-c", "10", "--poll-interval", "500ms")
    with worker_process(
        named(server.tcp_url()), tmp_path / "log", *options, app="small:jobs", folder=tmp_path
    ) as worker:
        await until(lambda: "worker.started" in worker.text())
        put(engine, count=30, seconds=0.3)

        await all_done(engine, count=30)
        assert worker.stop() == 0

    assert "pool.small" in worker.text()
    assert "lease.lost" not in worker.text()
