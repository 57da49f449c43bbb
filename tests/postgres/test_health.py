"""Probes: closed unless opened, right in every state, and never a question to the database."""

import asyncio
import threading
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import pytest
from shop import Job
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from workers import PATIENCE, Heard, until, working

from sqla_jobs.errors import ConfigurationError
from sqla_jobs.tasks import Jobs, enqueue
from sqla_jobs.worker import Worker, health
from sqla_jobs.worker.health import Health, address


@pytest.fixture
def jobs() -> Jobs:
    """Tasks of this test's own, on the shop's tables."""
    return Jobs(Job)


async def ask(worker: Worker, path: str) -> tuple[int, str]:
    """From a thread, as a probe comes from outside."""
    assert worker._health is not None
    url = f"http://127.0.0.1:{worker._health.port}{path}"

    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def test_a_worker_that_works_is_started_live_and_ready(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    @jobs.task(name="job")
    async def job() -> None: ...

    async with working(jobs, database_url, health_bind="127.0.0.1:0") as (worker, heard):
        await heard.event("listen.connected")
        answers = {path: await ask(worker, path) for path in ("/startupz", "/livez", "/healthz", "/readyz")}
        other = await ask(worker, "/metrics")

    assert answers == dict.fromkeys(answers, (200, "ok"))
    assert other == (404, "not found")


async def test_a_worker_that_stops_is_live_and_not_ready(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    go_on = asyncio.Event()

    @jobs.task(name="job")
    async def job() -> None:
        await go_on.wait()

    with Session(engine) as session, session.begin():
        enqueue(session, job)
    worker = Worker(jobs, url=database_url, health_bind="0", drain_timeout=timedelta(seconds=PATIENCE))
    heard = Heard(worker)
    running = asyncio.create_task(worker.run())
    await heard.event("job.claimed")
    worker.stop()
    await heard.event("worker.draining")
    await until(lambda: worker._health is not None and worker._health.stopping)

    answers = await ask(worker, "/livez"), await ask(worker, "/readyz")
    go_on.set()
    await running

    assert answers == ((200, "ok"), (503, "it is stopping"))


async def test_a_worker_without_a_database_is_live_and_has_not_started(jobs: Jobs) -> None:
    @jobs.task(name="job")
    async def job() -> None: ...

    worker = Worker(jobs, url="postgresql://127.0.0.1:1/nowhere", health_bind="0")
    running = asyncio.create_task(worker.run())
    await until(lambda: worker._health is not None)

    answers = [await ask(worker, path) for path in ("/livez", "/startupz", "/readyz")]
    worker.stop()
    await running

    assert answers == [(200, "ok"), (503, "it has not started yet"), (503, "it has not started yet")]


async def test_a_blocked_loop_is_not_live(
    engine: Engine, database_url: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_SILENT", 1.0)
    seen: list[str | None] = []

    @jobs.task(name="job")
    async def job() -> None:
        threading.Event().wait(1.5)  # blocks everybody
        assert worker._health is not None
        seen.append(worker._health.reason("/livez"))

    with Session(engine) as session, session.begin():
        enqueue(session, job)

    async with working(jobs, database_url, health_bind="0") as (worker, heard):
        await heard.settled(1)
        await until(lambda: worker._health is not None and worker._health.reason("/livez") == "")

    assert seen == ["the event loop has not turned for 2 s"] or "has not turned for 1 s" in str(seen)


async def test_nothing_listens_unless_it_is_told_to(engine: Engine, database_url: str, jobs: Jobs) -> None:
    @jobs.task(name="job")
    async def job() -> None: ...

    async with working(jobs, database_url) as (worker, _):
        assert worker._health is None
        assert [thread for thread in threading.enumerate() if thread.name == "sqla_jobs health"] == []


def test_what_a_loop_that_is_down_and_claims_that_fail_say() -> None:
    with Health("0") as probes:
        probes.started = True
        probes.down.add("claims")
        down = probes.reason("/readyz")
        probes.claims_fail = True
        failing = probes.reason("/readyz")

    assert (down, failing) == ("down: claims", "the database does not answer its claims")


@pytest.mark.parametrize("text", ["", "host", "host:port", "host:99999", "host:-1"])
def test_an_address_that_is_none_is_refused(jobs: Jobs, text: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no address: write 9090"):
        address(text)


def test_an_address_that_is_taken_is_refused_by_name() -> None:
    with (
        Health("0") as first,
        pytest.raises(ConfigurationError, match="cannot be bound: Address already in use"),
    ):
        Health(f"127.0.0.1:{first.port}")
