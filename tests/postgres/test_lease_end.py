"""A lease that cannot be prolonged ends its attempt in that moment, whatever its own lane waits for.

After it another worker may run the job: an attempt that could be ended and is not would run beside that one.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from shop import Job
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from workers import PATIENCE, Heard, rows, until

from sqla_jobs.context import JobContext
from sqla_jobs.core.retry import Retry
from sqla_jobs.tasks import Jobs, enqueue
from sqla_jobs.worker import Worker
from sqla_jobs.worker.leases import LeaseKeeper

LEASE = timedelta(seconds=2)
LEFT = (
    "SELECT extract(epoch FROM locked_until - clock_timestamp())::float8 FROM background_jobs WHERE id = :id"
)


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first prolongation gets no answer, and the lane waits for one until the test ends."""
    heard_again = threading.Event()

    def unanswered(self: LeaseKeeper, *_: Any) -> Any:
        heard_again.wait(PATIENCE)
        raise OSError("no answer")

    monkeypatch.setattr(LeaseKeeper, "_verb", unanswered)
    yield heard_again
    heard_again.set()


def stays(jobs: Jobs, form: str, begun: list[str], ended: list[float]) -> None:
    """An attempt that ends when it is told to, and notes when that was."""
    retry = Retry(delay=timedelta(hours=1))
    if form == "thread":

        @jobs.task(name="job", retry=retry)
        def in_thread(ctx: JobContext) -> None:
            begun.append(form)
            ends = time.monotonic() + PATIENCE
            while not ctx.cancelled and time.monotonic() < ends:
                threading.Event().wait(0.005)
            ended.append(time.monotonic())
    else:

        @jobs.task(name="job", retry=retry)
        async def in_loop() -> None:
            begun.append(form)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(time.monotonic())


@pytest.mark.parametrize("stopped", [False, True], ids=["at work", "in the drain"])
@pytest.mark.parametrize("form", ["thread", "loop"])
async def test_an_attempt_ends_with_its_lease_although_the_lease_lane_waits_for_an_answer(
    engine: Engine, database_url: str, jobs: Jobs, silence: threading.Event, form: str, stopped: bool
) -> None:
    begun: list[str] = []
    ended: list[float] = []
    stays(jobs, form, begun, ended)
    with Session(engine) as session, session.begin():
        job = enqueue(session, jobs.tasks["job"])
    worker = Worker(jobs, url=database_url, lease=LEASE, drain_timeout=timedelta(seconds=PATIENCE))
    heard = Heard(worker)
    running = asyncio.create_task(worker.run())
    await until(lambda: begun == [form])
    [(left,)] = rows(engine, LEFT, id=job.id)
    lease_ends = time.monotonic() + left
    if stopped:
        worker.stop()

    lost = await heard.event("lease.lost")
    await until(lambda: bool(ended))
    silence.set()
    worker.stop()
    async with asyncio.timeout(PATIENCE):
        await running

    assert lost.fields["reason"] == "could not be prolonged in time"
    assert ended[0] <= lease_ends + 0.2  # a loaded machine's patience; the lane alone takes seconds longer
