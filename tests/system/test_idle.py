"""What a worker costs that has nothing to do, and what is left of jobs that fail: next to nothing."""

import asyncio
import gc
import os
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import shop
from processes import worker_process
from shop import Base, Job
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.orm import Session
from workers import rows, until, working

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.tasks import Jobs, enqueue, enqueue_many

pytestmark = pytest.mark.system

NAME = "idle"
ONCE = Retry(max_attempts=1)


def statements(log: Path) -> list[str]:
    """What the worker has sent, as the server saw it."""
    return [
        line.partition(f"{NAME} ")[2]
        for line in log.read_text(errors="replace").splitlines()
        if line.startswith(f"{NAME} ") and (" statement: " in line or " execute " in line)
    ]


@pytest.mark.parametrize(
    ("span", "burst", "queues"),
    [
        pytest.param(10.0, 4, ["files"], id="short"),
        pytest.param(70.0, 0, ["files"], id="long", marks=pytest.mark.full),
        pytest.param(70.0, 0, ["files", "mail", "images"], id="three queues", marks=pytest.mark.full),
    ],
)
async def test_an_idle_worker_sends_at_most_30_statements_a_minute_and_needs_less_than_a_hundredth_of_a_core(
    tmp_path: Path, span: float, burst: int, queues: list[str]
) -> None:
    """Counted over `span` seconds soon after its start, scaled to a minute.

    A short span may hold a poll and a pass of the maintenance more than its share: `burst`.
    """
    settings = {"log_statement": "all", "log_line_prefix": "%a "}
    with EmbeddedPostgres(durable=False, settings=settings) as server:
        url = make_url(server.create_database("shop"))
        engine = create_engine(url.set(drivername="postgresql+psycopg"))
        Base.metadata.create_all(engine)
        engine.dispose()
        named = url.update_query_dict({"application_name": NAME}).render_as_string(hide_password=False)
        options = [word for queue in queues for word in ("-q", queue)]
        with worker_process(named, tmp_path / "log", *options) as worker:
            await until(lambda: "listen.connected" in worker.text())
            await asyncio.sleep(1.0)  # what the start itself costs
            log = server.data_directory / "server.log"
            sent, used, begun = len(statements(log)), worker.processor_seconds(), time.monotonic()

            await asyncio.sleep(span)  # nothing else happens: that is what is measured
            took = time.monotonic() - begun
            found, seconds = statements(log)[sent:], worker.processor_seconds() - used
            code = worker.stop()

    assert code == 0
    # of one queue 30; each further one has its own polls, a claim and a look ahead (34 measured with three)
    assert 0 < len(found) <= (30 + 5 * (len(queues) - 1)) * took / 60 + burst, Counter(found)
    assert seconds / took < 0.01


# -- what failing jobs leave behind (field case B18)


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
async def test_b18_notifications_without_jobs_leave_the_memory_flat(
    engine: Engine, database_url: str, tmp_path: Path, count: int
) -> None:
    with worker_process(database_url, tmp_path / "log", "-q", "files") as worker:
        await until(lambda: "listen.connected" in worker.text())
        [(channel,)] = rows(engine, "SELECT 'sqla_jobs_' || 'background_jobs'::regclass::oid")
        say = (
            "SELECT count(pg_notify(:channel, '0 ' || number || ' ' || repeat('another queue ', 20))) "
            "FROM generate_series(1, :count) number"
        )
        await asyncio.to_thread(rows, engine, say, channel=channel, count=1000)
        warm = worker.resident_bytes()

        for _ in range(count // 10_000):
            await asyncio.to_thread(rows, engine, say, channel=channel, count=10_000)
        put_one(engine, tmp_path / "trace")
        await until(lambda: (tmp_path / "trace").exists())  # behind all of them

        assert worker.resident_bytes() - warm < 20_000_000
        assert worker.stop() == 0


class Load:
    """Five megabytes that can be watched."""

    def __init__(self) -> None:
        self.bytes = b"x" * 5_000_000


def put_one(engine: Engine, trace: Path) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, shop.append_line, str(trace), "done")


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "fails",
    [pytest.param(True, id="failing"), pytest.param(False, id="succeeding", marks=pytest.mark.full)],
)
@pytest.mark.parametrize("count", [1_000, pytest.param(3_000, marks=pytest.mark.full)])
async def test_b18_jobs_that_fail_leave_neither_memory_nor_their_locals_behind(
    engine: Engine, database_url: str, count: int, fails: bool
) -> None:
    """Half of them in threads, half in the loop, each with five megabytes in a local."""
    jobs = Jobs(Job)
    loads: list[weakref.ref[Load]] = []
    most_alive = 0

    def work() -> None:
        nonlocal most_alive
        load = Load()
        loads.append(weakref.ref(load))
        most_alive = max(most_alive, sum(ref() is not None for ref in loads[-100:]))
        if fails:
            raise ValueError(str(len(load.bytes)))

    @jobs.task(name="in_thread", retry=ONCE)
    def in_thread() -> None:
        work()

    @jobs.task(name="in_loop", retry=ONCE)
    async def in_loop() -> None:
        await asyncio.sleep(0)
        work()

    def put(number: int) -> None:
        with Session(engine) as session, session.begin():
            enqueue_many(session, [(in_thread, in_loop)[n % 2].call() for n in range(number)])

    end = JobStatus.FAILED if fails else JobStatus.DONE
    async with working(jobs, database_url) as (_, heard):
        put(100)
        assert await heard.settled(100) == [end] * 100
        gc.collect()
        warm = resident_bytes()

        put(count)
        assert await heard.settled(100 + count) == [end] * (100 + count)
        heard.events.clear()
        gc.collect()

        assert resident_bytes() - warm < 60_000_000
        assert [ref for ref in loads if ref() is not None] == []
    assert len(loads) == 100 + count
    # not even the collector of cycles is needed: what ran and what had just ended
    assert most_alive <= 20
