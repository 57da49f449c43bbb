"""What a worker costs that has nothing to do, and what failing jobs leave in its memory."""

import asyncio
import gc
import os
import re
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shop
from processes import worker_process
from shop import Job
from sqlalchemy import Engine, make_url
from sqlalchemy.orm import Session
from workers import until, until_row, working

from sqla_jobs.core.lifecycle import JobStatus
from sqla_jobs.core.retry import Retry
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.tasks import Jobs, enqueue, enqueue_many

pytestmark = pytest.mark.system

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu(pid: int) -> float:
    """Seconds of a core that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


@pytest.mark.full
async def test_an_idle_worker_sends_few_statements_and_uses_no_core(
    server: EmbeddedPostgres, database_url: str, tmp_path: Path
) -> None:
    """Default options, one queue, after its polls have grown long. The server's log counts statements."""
    url = make_url(database_url).update_query_dict({"options": "-c log_statement=all"})
    log = server.data_directory / "server.log"

    def sent() -> int:
        return len(re.findall(r"LOG:  (?:statement|execute)", log.read_text(errors="replace")))

    with worker_process(
        url.render_as_string(hide_password=False), tmp_path / "log", "-q", "default"
    ) as worker:
        await until(lambda: "listen.connected" in worker.text())
        await asyncio.sleep(45)  # the time is what is measured
        began, used, before = time.monotonic(), cpu(worker.pid), sent()
        await asyncio.sleep(60)
        seconds = time.monotonic() - began
        used, count = cpu(worker.pid) - used, sent() - before
        assert worker.stop() == 0

    assert 0 < count / seconds * 60 <= 30
    assert used / seconds < 0.01


@pytest.mark.parametrize("task", [shop.waste, shop.waste_async], ids=["thread", "loop"])
async def test_b18_a_thousand_failing_jobs_leave_the_memory_flat(
    engine: Engine, database_url: str, tmp_path: Path, task: Any
) -> None:
    def put(count: int) -> None:
        with Session(engine) as session, session.begin():
            enqueue_many(session, [task.call() for _ in range(count)])

    failed = "SELECT 1 FROM background_jobs WHERE status = 'failed' HAVING count(*) = :count"
    options = ("-q", "waste", "-c", "4", "--log-level", "error", "--poll-interval", "500ms")
    with worker_process(database_url, tmp_path / "log", *options) as worker:
        put(100)
        await until_row(engine, failed, count=100)
        before = resident(worker.pid)
        put(1000)
        await until_row(engine, failed, count=1100, patience=60)
        after = resident(worker.pid)
        assert worker.stop() == 0

    assert after - before < 30_000_000


@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_b18_nothing_keeps_the_locals_of_a_failed_handler(
    engine: Engine, database_url: str, form: str
) -> None:
    class Local:
        pass

    jobs = Jobs(Job)
    seen: list[weakref.ref[Local]] = []

    if form == "thread":

        @jobs.task(name="job", retry=Retry(max_attempts=1))
        def in_thread() -> None:
            local = Local()
            seen.append(weakref.ref(local))
            raise ValueError("with a local")
    else:

        @jobs.task(name="job", retry=Retry(max_attempts=1))
        async def in_loop() -> None:
            local = Local()
            seen.append(weakref.ref(local))
            raise ValueError("with a local")

    with Session(engine) as session, session.begin():
        for _ in range(5):
            enqueue(session, jobs.tasks["job"])

    gc.disable()  # what is let go needs no collection
    try:
        async with working(jobs, database_url, poll_interval=timedelta(seconds=1)) as (_, heard):
            assert await heard.settled(5) == [JobStatus.FAILED] * 5
            await until(lambda: [ref() for ref in seen] == [None] * 5)
    finally:
        gc.enable()
